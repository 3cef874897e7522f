"""A hint order judged on the virtual cluster: its makespan beside 1F1B's and beside the bound."""

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import repeat

from rrfp_async.config import Config
from rrfp_async.grid import tp_group
from rrfp_async.sim.cluster import Simulated, VirtualCluster, costs_of_replicas
from rrfp_async.sim.costs import Costs
from rrfp_async.sim.lateness import PUNCTUAL, Lateness
from rrfp_async.topology import Topology


@dataclass(frozen=True, slots=True)
class Result:
    """What a simulation came to. Times in virtual seconds, `wall_s` apart.

    Attributes:
        makespan_s: How long the step takes.
        speedup_vs_1f1b: How many times as long 1F1B takes on the same draws, executed as it
            stands with its own peak as limit; with several chunks, as one stage a rank. Its
            ranks compute alone (tp = 1), with tensors as late; of replicas the slowest counts.
        bound_s: What no order can beat; see `bound_s`. Of replicas the slowest counts.
        ratio_to_bound: The bound over the makespan: 1 is perfect.
        compute_s: Per rank, which is per stage with one chunk and column.
        blocking_s: Per rank: time without a task to run.
        blocking_fraction: Blocking over the makespan, on average over the ranks.
        peak_in_flight: Per rank, forwards (of its chunks) whose gradient is not yet accumulated.
        tp_wait_share: The part of all ranks' time in the step that tasks waited, though their needs
            were met on every rank of the tensor-parallel group and the device was free.
        tp_retries: How often groups were of several minds, summed over the groups.
        wall_s: How long the simulations took, in real seconds.
    """

    makespan_s: float
    speedup_vs_1f1b: float
    bound_s: float
    ratio_to_bound: float
    compute_s: list[float]
    blocking_s: list[float]
    blocking_fraction: float
    peak_in_flight: list[int]
    tp_wait_share: float
    tp_retries: int
    wall_s: float


def simulate(
    costs: Costs | Sequence[Costs],
    config: Config,
    topology: Topology | None = None,
    *,
    dispatch_s: float = 0.0,
    lateness: Lateness = PUNCTUAL,
    done: Callable[[], None] = lambda: None,
) -> Result:
    """Run a step on the virtual cluster, and the 1F1B baseline beside it.

    Args:
        costs: What tasks and transfers take; for all replicas alike, or one for each.
        config: The hint, limit and the rest; `trace_dir` gets the records of the step.
        topology: Whose stages the costs are of; by default a chain, a stage on each rank.
        dispatch_s: What it costs to dispatch a task, in seconds.
        lateness: What comes late beside what `costs` say.
        done: Called after every simulated task of either.

    Raises:
        ValueError: If a setting breaks its rule.
    """
    begun_s = time.perf_counter()
    if topology is None:
        topology = Topology((costs if isinstance(costs, Costs) else costs[0]).stages)
    cluster = partial(VirtualCluster, dispatch_s=dispatch_s, lateness=lateness, done=done)
    ours = cluster(costs, config, topology)
    replicas = set(costs_of_replicas(costs, topology))
    baselines = [cluster(one.merged(topology.chunks), _baseline(config)) for one in replicas]
    step = ours.run_step()
    reference_s = max(baseline.run_step().makespan_s for baseline in baselines)
    bound = max(bound_s(one, topology) for one in replicas)
    return _result(topology, bound, step, reference_s, time.perf_counter() - begun_s)


def bound_s(costs: Costs, topology: Topology | None = None) -> float:
    """The largest, over the ranks, of all the rank's work after its first possible start.

    A rank cannot begin before some microbatch has come through all stages before it, alone.
    """
    topology = Topology(costs.stages) if topology is None else topology
    firsts = []
    arrivals = [0.0] * costs.microbatches
    for stage in range(costs.stages):
        firsts.append(min(arrivals))
        local = any(map(topology.is_local, topology.out_edges(stage)))
        delays = repeat(0.0) if local else costs.activation_delay_s[stage]
        passed = zip(arrivals, costs.forward_s[stage], delays, strict=False)
        arrivals = [math.fsum(times) for times in passed]
    owned = map(topology.stages_of, range(topology.pp))
    return max(
        min(firsts[stage] for stage in stages) + math.fsum(map(costs.work_s, stages))
        for stages in owned
    )


def _baseline(config: Config) -> Config:
    return replace(config, hint="1f1b", binding=True, limit="auto", trace_dir=None)


def _result(
    topology: Topology, bound: float, step: Simulated, reference_s: float, wall_s: float
) -> Result:
    blocking = [report.blocking_s for report in step.reports]
    ranks_s = len(blocking) * step.makespan_s
    return Result(
        makespan_s=step.makespan_s,
        speedup_vs_1f1b=_ratio(reference_s, step.makespan_s),
        bound_s=bound,
        ratio_to_bound=_ratio(bound, step.makespan_s),
        compute_s=[report.compute_s for report in step.reports],
        blocking_s=blocking,
        blocking_fraction=_ratio(math.fsum(blocking), ranks_s, empty=0.0),
        peak_in_flight=[report.peak_in_flight for report in step.reports],
        tp_wait_share=tp_wait_share(step),
        tp_retries=tp_retries(topology, step),
        wall_s=wall_s,
    )


def tp_wait_share(step: Simulated) -> float:
    """What agreeing cost; see `Result`."""
    waits = [report.agreement.wait_s for report in step.reports if report.agreement]
    return _ratio(math.fsum(waits), len(step.reports) * step.makespan_s, empty=0.0)


def tp_retries(topology: Topology, step: Simulated) -> int:
    """How often groups were of several minds; see `Result`."""
    firsts = {tp_group(topology, rank)[0] for rank in range(topology.world_size)}
    reports = (step.reports[rank].agreement for rank in firsts)
    return sum(report.retries for report in reports if report)


def _ratio(above: float, below: float, *, empty: float = 1.0) -> float:
    return above / below if below else empty
