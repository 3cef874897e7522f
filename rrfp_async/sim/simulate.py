"""A hint order judged on the virtual cluster: its makespan beside 1F1B's and beside the bound."""

import math
import time
from collections.abc import Callable
from dataclasses import dataclass, replace

from rrfp_async.config import Config
from rrfp_async.sim.cluster import Simulated, VirtualCluster
from rrfp_async.sim.costs import Costs


@dataclass(frozen=True, slots=True)
class Result:
    """What a simulation came to. Times in virtual seconds, `wall_s` apart.

    Attributes:
        makespan_s: How long the step takes.
        speedup_vs_1f1b: How many times as long 1F1B takes on the same draws, executed as it
            stands with its own peak as limit.
        bound_s: What no order can beat; see `bound_s`.
        ratio_to_bound: The bound over the makespan: 1 is perfect.
        compute_s: Per stage.
        blocking_s: Per stage: time without a task to run.
        blocking_fraction: Blocking over the makespan, on average over the stages.
        peak_in_flight: Per stage, forwards whose gradient is not yet accumulated.
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
    *,
    dispatch_s: float = 0.0,
    done: Callable[[], None] = lambda: None,
) -> Result:
    """Run a step on the virtual cluster, and the 1F1B baseline beside it.

    Args:
        costs: What tasks and transfers take.
        config: The hint, limit and the rest; `trace_dir` gets the records of the step.
        dispatch_s: What it costs to dispatch a task, in seconds.
        done: Called after every simulated task, twice `2 * stages * microbatches` times in all.

    Raises:
        ValueError: If a setting breaks its rule.
    """
    begun_s = time.perf_counter()
    ours = VirtualCluster(costs, config, dispatch_s=dispatch_s, done=done)
    baseline = VirtualCluster(costs, _baseline(config), dispatch_s=dispatch_s, done=done)
    step = ours.run_step()
    reference = baseline.run_step()
    return _result(costs, step, reference, time.perf_counter() - begun_s)


def bound_s(costs: Costs) -> float:
    """The largest, over the stages, of all the stage's work after its first possible start.

    A stage cannot begin before some microbatch has come through all stages before it, alone.
    """
    arrivals = [0.0] * costs.microbatches
    bound = 0.0
    for stage in range(costs.stages):
        bound = max(bound, min(arrivals) + costs.work_s(stage))
        passed = zip(arrivals, costs.forward_s[stage], costs.activation_delay_s[stage], strict=True)
        arrivals = [math.fsum(times) for times in passed]
    return bound


def _baseline(config: Config) -> Config:
    return replace(config, hint="1f1b", binding=True, limit="auto", trace_dir=None)


def _result(costs: Costs, step: Simulated, reference: Simulated, wall_s: float) -> Result:
    bound = bound_s(costs)
    blocking = [report.blocking_s for report in step.reports]
    return Result(
        makespan_s=step.makespan_s,
        speedup_vs_1f1b=_ratio(reference.makespan_s, step.makespan_s),
        bound_s=bound,
        ratio_to_bound=_ratio(bound, step.makespan_s),
        compute_s=[report.compute_s for report in step.reports],
        blocking_s=blocking,
        blocking_fraction=_ratio(math.fsum(blocking), costs.stages * step.makespan_s, empty=0.0),
        peak_in_flight=[report.peak_in_flight for report in step.reports],
        wall_s=wall_s,
    )


def _ratio(above: float, below: float, *, empty: float = 1.0) -> float:
    return above / below if below else empty
