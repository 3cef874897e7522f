"""A hint order judged on the virtual cluster: its makespan beside 1F1B's and beside the bound."""

import math
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import repeat

from rrfp_async.config import Config
from rrfp_async.sim.cluster import Simulated, VirtualCluster
from rrfp_async.sim.costs import Costs
from rrfp_async.topology import Topology


@dataclass(frozen=True, slots=True)
class Result:
    """What a simulation came to. Times in virtual seconds, `wall_s` apart.

    Attributes:
        makespan_s: How long the step takes.
        speedup_vs_1f1b: How many times as long 1F1B takes on the same draws, executed as it
            stands with its own peak as limit; with several chunks, as one stage a rank.
        bound_s: What no order can beat; see `bound_s`.
        ratio_to_bound: The bound over the makespan: 1 is perfect.
        compute_s: Per rank, which is per stage with one chunk.
        blocking_s: Per rank: time without a task to run.
        blocking_fraction: Blocking over the makespan, on average over the ranks.
        peak_in_flight: Per rank, forwards (of its chunks) whose gradient is not yet accumulated.
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
    wall_s: float


def simulate(
    costs: Costs,
    config: Config,
    topology: Topology | None = None,
    *,
    dispatch_s: float = 0.0,
    done: Callable[[], None] = lambda: None,
) -> Result:
    """Run a step on the virtual cluster, and the 1F1B baseline beside it.

    Args:
        costs: What tasks and transfers take.
        config: The hint, limit and the rest; `trace_dir` gets the records of the step.
        topology: Whose stages the costs are of; by default a chain, a stage on each rank.
        dispatch_s: What it costs to dispatch a task, in seconds.
        done: Called after every simulated task of either.

    Raises:
        ValueError: If a setting breaks its rule.
    """
    begun_s = time.perf_counter()
    topology = Topology(costs.stages) if topology is None else topology
    ours = VirtualCluster(costs, config, topology, dispatch_s=dispatch_s, done=done)
    whole = costs.merged(topology.chunks)
    baseline = VirtualCluster(whole, _baseline(config), dispatch_s=dispatch_s, done=done)
    step = ours.run_step()
    reference = baseline.run_step()
    return _result(bound_s(costs, topology), step, reference, time.perf_counter() - begun_s)


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


def _result(bound: float, step: Simulated, reference: Simulated, wall_s: float) -> Result:
    blocking = [report.blocking_s for report in step.reports]
    return Result(
        makespan_s=step.makespan_s,
        speedup_vs_1f1b=_ratio(reference.makespan_s, step.makespan_s),
        bound_s=bound,
        ratio_to_bound=_ratio(bound, step.makespan_s),
        compute_s=[report.compute_s for report in step.reports],
        blocking_s=blocking,
        blocking_fraction=_ratio(math.fsum(blocking), len(blocking) * step.makespan_s, empty=0.0),
        peak_in_flight=[report.peak_in_flight for report in step.reports],
        wall_s=wall_s,
    )


def _ratio(above: float, below: float, *, empty: float = 1.0) -> float:
    return above / below if below else empty
