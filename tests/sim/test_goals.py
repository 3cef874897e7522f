"""What readiness gains on the virtual cluster: exact numbers of seeded draws, not timings."""

import statistics

import pytest

from rrfp_async.config import Config
from rrfp_async.sim.costs import draw_costs
from rrfp_async.sim.simulate import simulate

SEEDS = 5


@pytest.mark.slow
@pytest.mark.timeout(240)
@pytest.mark.parametrize(
    ("stages", "microbatches", "profile", "jitter", "speedup"),
    [
        (16, 64, "llm", "J3", 1.33),
        (16, 64, "multimodal", "J0", 1.50),
        (32, 128, "multimodal", "J2", 1.57),
    ],
)
def test_bf_beats_executed_1f1b(
    stages: int, microbatches: int, profile: str, jitter: str, speedup: float
) -> None:
    """With the automatic limit and delays of 5 ms: the median speedup, and at most 2 S + 8."""
    speedups, peak = [], 0
    for seed in range(SEEDS):
        costs = draw_costs(
            stages=stages,
            microbatches=microbatches,
            profile=profile,
            jitter=jitter,
            delay_s=0.005,
            seed=seed,
        )
        result = simulate(costs, Config(microbatches=microbatches, hint="bf"))
        speedups.append(result.speedup_vs_1f1b)
        peak = max(peak, *result.peak_in_flight)
    print(f"median speedup {statistics.median(speedups):.3f}, peak {peak}")
    assert statistics.median(speedups) >= speedup
    assert peak <= 2 * stages + 8
