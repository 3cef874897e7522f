"""The bound for BF of arXiv 2605.18750 (theorem 6.1), and the bounds from below, on random steps.

No delays, one chunk a rank, room for every microbatch: what the theorem assumes.
"""

import random

import pytest

from rrfp_async.config import Config
from rrfp_async.sim.cluster import VirtualCluster
from rrfp_async.sim.simulate import bound_s
from tests.sim.event_simulation import Tables
from tests.sim.tables import costs_of, drawn

SAMPLE, ALL = 120, 1000
SLACK_S = 1e-6

Rows = list[list[float]]


def one_way_s(rows: Rows) -> float:
    """The makespan of a pipeline that runs only one kind of task, `rows[0]` first."""
    left = [0.0] * len(rows[0])
    for row in rows:
        free = 0.0
        for microbatch, cost in enumerate(row):
            free = max(free, left[microbatch]) + cost
            left[microbatch] = free
    return left[-1]


def excess_s(rows: Rows, microbatches: range) -> float:
    """How much longer the slowest stage takes than the last, summed over `microbatches`."""
    return sum(max(row[j] for row in rows) - rows[-1][j] for j in microbatches)


def theorem_s(forward: Rows, backward: Rows) -> float:
    """What BF's makespan does not pass."""
    microbatches = len(forward[0])
    both_ways = one_way_s(forward) + one_way_s(backward[::-1])
    late_forwards = excess_s(forward, range(1, microbatches))
    return both_ways + late_forwards + excess_s(backward, range(microbatches - 1))


def backward_of(tables: Tables) -> Rows:
    return [
        [i + w for i, w in zip(inputs, weights, strict=True)]
        for inputs, weights in zip(tables["backward_input_s"], tables["weight_s"], strict=True)
    ]


def instance(seed: int) -> Tables:
    """Few or many stages; even, wild and tied costs; the last stage the slowest or not."""
    source = random.Random(seed)
    stages, microbatches = source.randint(1, 8), source.randint(1, 12)
    tables = drawn(source, stages, microbatches, ("undelayed", "still grid")[seed % 2])
    if seed % 3 == 0:  # as in the paper's workloads, the last stage is the bottleneck
        for rows in (tables["forward_s"], tables["backward_input_s"]):
            rows[-1] = [cost * 2.0 for cost in rows[-1]]
    return tables


def bf_makespan_s(tables: Tables, *, ordered: bool) -> float:
    costs = costs_of(tables)
    every = costs.microbatches
    config = Config(microbatches=every, hint="bf", limit=every, deterministic=ordered)
    return VirtualCluster(costs, config).run_step().makespan_s


def check(seed: int) -> None:
    """The makespan lies between the bounds."""
    tables = instance(seed)
    forward, backward = tables["forward_s"], backward_of(tables)
    makespan_s = bf_makespan_s(tables, ordered=seed % 4 > 0)
    assert makespan_s <= theorem_s(forward, backward) + SLACK_S, f"seed {seed} breaks the theorem"
    assert makespan_s >= sum(forward[-1]) + sum(backward[-1]) - SLACK_S, f"seed {seed}"
    assert makespan_s >= bound_s(costs_of(tables)) - SLACK_S, f"seed {seed} beats our bound"


def test_bf_keeps_the_bounds_on_a_sample() -> None:
    """The first of the thousand."""
    for seed in range(SAMPLE):
        check(seed)


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_bf_keeps_the_bounds_on_a_thousand_instances() -> None:
    """Theorem 6.1 from above; the last stage's work, and ours, from below."""
    for seed in range(ALL):
        check(seed)


def test_the_bound_is_not_idle() -> None:
    """A pipeline that ran one microbatch after the other would break it: it says something."""
    broken = 0
    for seed in range(SAMPLE):
        tables = instance(seed)
        serial_s = sum(map(sum, tables["forward_s"])) + sum(map(sum, backward_of(tables)))
        broken += serial_s > theorem_s(tables["forward_s"], backward_of(tables)) + SLACK_S
    assert broken > SAMPLE / 2


def test_an_even_pipeline_meets_the_theorem_exactly() -> None:
    """Equal stages: forward and backward makespans, and nothing between them is lost."""
    tables = {
        name: [[0.0 if "delay" in name else 1.0] * 6 for _ in range(4)] for name in instance(0)
    }
    makespan_s = bf_makespan_s(tables, ordered=True)
    assert makespan_s == pytest.approx(theorem_s(tables["forward_s"], backward_of(tables)))
