"""ZB-H1 executed as it stands on the virtual cluster, against the times that its lists dictate."""

import random
from collections.abc import Sequence

import pytest

from rrfp_async.config import Config
from rrfp_async.sim.cluster import VirtualCluster
from tests.sim.event_simulation import Tables
from tests.sim.tables import STYLES, costs_of, drawn

Task = tuple[str, int]
"""Kind and microbatch."""

TOLERANCE_S = 1e-6
CASES = 60


def zero_bubble_h1(stage: int, stages: int, microbatches: int) -> list[Task]:
    """As many forwards as stages remain; then I, the W of `stage` microbatches ago, and F."""
    ahead = min(stages - stage, microbatches)
    order = [("F", index) for index in range(ahead)]
    for index in range(microbatches):
        order.append(("I", index))
        if index >= stage:
            order.append(("W", index - stage))
        if ahead + index < microbatches:
            order.append(("F", ahead + index))
    return order + [("W", index) for index in range(max(0, microbatches - stage), microbatches)]


def makespan_of(orders: Sequence[Sequence[Task]], tables: Tables) -> float:
    """When the last task ends, if every stage executes its list: by going round until all ran."""
    stages = len(orders)
    ends: list[dict[Task, float]] = [{} for _ in orders]
    arrived: list[dict[Task, float]] = [{} for _ in orders]  # F: the activation, I: the gradient
    last_on = {"F": [0.0] * stages, "I": [0.0] * stages}
    free = [0.0] * stages
    place = [0] * stages
    names = {"F": "forward_s", "I": "backward_input_s", "W": "weight_s"}
    while any(place[stage] < len(orders[stage]) for stage in range(stages)):
        for stage, order in enumerate(orders):
            while place[stage] < len(order):
                kind, index = order[place[stage]]
                needs = {
                    "F": [] if stage == 0 else [arrived[stage].get(("F", index))],
                    "I": [ends[stage].get(("F", index))],
                    "W": [ends[stage].get(("I", index))],
                }[kind]
                if kind == "I" and stage < stages - 1:
                    needs.append(arrived[stage].get(("I", index)))
                known = [need for need in needs if need is not None]
                if len(known) < len(needs):
                    break
                end = max([free[stage], *known]) + tables[names[kind]][stage][index]
                ends[stage][kind, index] = free[stage] = end
                place[stage] += 1
                receiver = {"F": stage + 1, "I": stage - 1, "W": -1}[kind]
                if 0 <= receiver < stages:
                    delays = "activation_delay_s" if kind == "F" else "gradient_delay_s"
                    arrival = max(end + tables[delays][stage][index], last_on[kind][stage])
                    last_on[kind][stage] = arrived[receiver][kind, index] = arrival
    return max(free)


@pytest.mark.parametrize("style", STYLES)
def test_zb_h1_takes_the_time_that_its_lists_dictate(style: str) -> None:
    """1 to 7 stages, 1 to 12 microbatches, with and without ties; its peak is 1F1B's largest."""
    for seed in range(CASES // len(STYLES) + 1):
        source = random.Random(f"{seed}/{style}")
        stages, microbatches = source.randint(1, 7), source.randint(1, 12)
        tables = drawn(source, stages, microbatches, style)
        config = Config(microbatches=microbatches, hint="zb-h1", binding=True)
        step = VirtualCluster(costs_of(tables), config).run_step()
        orders = [zero_bubble_h1(stage, stages, microbatches) for stage in range(stages)]
        assert step.makespan_s == pytest.approx(makespan_of(orders, tables), abs=TOLERANCE_S)
        assert max(report.peak_in_flight for report in step.reports) == min(stages, microbatches)
