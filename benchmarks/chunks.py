"""Two chunks a rank in a V, on the virtual cluster: ZBV as it stands, as a hint, and our orders.

    python -m benchmarks.chunks --seeds 20

8 ranks, 16 microbatches, jitter J2, delays of 0.2 ms. Every order meets the same draws; the rows
with one chunk run the same work, two stages in a row as one. Peaks count what a rank holds in
flight in whole-rank units (two chunks are one).
"""

import argparse
import json
import statistics
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass

from rich.console import Console
from rich.progress import track
from rich.table import Table

from rrfp_async.config import Config
from rrfp_async.sim.cluster import VirtualCluster
from rrfp_async.sim.costs import draw_costs
from rrfp_async.topology import Topology

RANKS, MICROBATCHES, CHUNKS = 8, 16, 2
BASELINE = "zbv, as it stands"


@dataclass(frozen=True)
class Order:
    """What is compared: a hint, its limit in forwards, and the chunks it runs with."""

    name: str
    hint: str
    chunks: int
    limit: int | None = None
    binding: bool = False


@dataclass(frozen=True)
class Row:
    """The median makespan, beside ZBV's as it stands, and the peak in whole-rank units."""

    order: str
    limit: str
    makespan_ms: float
    of_zbv: float
    peak: float


ORDERS = [
    Order(BASELINE, "zbv", 2, binding=True),
    Order("zbv, as a hint", "zbv", 2, 16),
    Order("zbv, as a hint", "zbv", 2, 22),
    Order("zbv, as a hint", "zbv", 2),
    Order("bf, V", "bf", 2, 16),
    Order("bf, V", "bf", 2),
    Order("bf-deep, V", "bf-deep", 2, 16),
    Order("bf-deep, V", "bf-deep", 2),
    Order("bfw, V", "bfw", 2, 16),
    Order("bfw, V", "bfw", 2, 22),
    Order("bfw, V", "bfw", 2),
    Order("bfw-deep, V", "bfw-deep", 2, 16),
    Order("bfw-deep, V", "bfw-deep", 2, 22),
    Order("bfw-deep, V", "bfw-deep", 2),
    Order("bfw, one chunk", "bfw", 1, 8),
    Order("bfw, one chunk", "bfw", 1, 12),
    Order("bfw, one chunk", "bfw", 1),
    Order("zb-h1, as it stands, one chunk", "zb-h1", 1, binding=True),
    Order("1f1b, as it stands, one chunk", "1f1b", 1, binding=True),
]


def measure(order: Order, *, seeds: int, task_s: float) -> tuple[float, float]:
    """The median makespan in seconds, and the peak."""
    placement = "v" if order.chunks > 1 else "loop"
    topology = Topology(RANKS, chunks=order.chunks, placement=placement)
    limit = "auto" if order.limit is None else order.limit
    config = Config(
        microbatches=MICROBATCHES,
        hint=order.hint,
        binding=order.binding or None,
        limit=limit,  # type: ignore[arg-type] # "auto" or a number
    )
    makespans, peak = [], 0
    for seed in range(seeds):
        costs = draw_costs(
            stages=RANKS * CHUNKS,
            microbatches=MICROBATCHES,
            profile="llm",
            jitter="J2",
            delay_s=0.0002,
            seed=seed,
            task_s=task_s,
        ).merged(CHUNKS // order.chunks)
        step = VirtualCluster(costs, config, topology).run_step()
        makespans.append(step.makespan_s)
        peak = max(peak, *(report.peak_in_flight for report in step.reports))
    return statistics.median(makespans), peak / order.chunks


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=int, default=20)
    parser.add_argument("--task-ms", type=float, default=5.0, help="of F, I and W of a chunk, each")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args(arguments)
    console = Console(width=100)
    measured = [
        measure(order, seeds=options.seeds, task_s=options.task_ms / 1000)
        for order in track(ORDERS, "orders", console=Console(stderr=True), transient=True)
    ]
    zbv_s = measured[0][0]
    rows = [
        Row(order.name, str(order.limit or "auto"), 1000 * makespan_s, makespan_s / zbv_s, peak)
        for order, (makespan_s, peak) in zip(ORDERS, measured, strict=True)
    ]
    if options.json:
        print(json.dumps([asdict(row) for row in rows]))
        return 0
    table = Table("order", "limit", "makespan, ms", "of ZBV", "peak")
    for row in rows:
        numbers = (f"{row.makespan_ms:.1f}", f"{row.of_zbv:.3f}", f"{row.peak:g}")
        table.add_row(row.order, row.limit, *numbers)
    console.print(table)
    return 0


if __name__ == "__main__":
    sys.exit(main())
