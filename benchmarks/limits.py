"""How the limit on forwards in flight trades speed for memory, on the virtual cluster.

    python -m benchmarks.limits --seeds 20

For each kind of pipeline: limit -> ratio to the bound (1 is perfect), the median over the seeds,
and the most forwards that any rank ever held in flight. `auto` is the
default of `Config(limit=)`; the other limits are the same on every rank.
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
from rrfp_async.sim.simulate import bound_s


@dataclass(frozen=True)
class Pipeline:
    """What is simulated: sizes, profile, jitter, and the median delay in seconds."""

    stages: int
    microbatches: int
    profile: str
    jitter: str
    delay_s: float


@dataclass(frozen=True)
class Row:
    """What a limit came to: the median ratio over the seeds, and the largest peak."""

    limit: str
    ratio_to_bound: float
    peak_in_flight: int


PIPELINES = [
    Pipeline(16, 64, "llm", "J3", 0.005),
    Pipeline(16, 64, "llm", "J3", 0.001),
    Pipeline(16, 64, "multimodal", "J0", 0.005),
    Pipeline(32, 128, "multimodal", "J2", 0.005),
]


def curve(pipeline: Pipeline, hint: str, seeds: int, console: Console) -> list[Row]:
    """A row per limit."""
    stages = pipeline.stages
    shares = (stages // 4, stages // 2, stages, 3 * stages // 2, 2 * stages, 2 * stages + 8)
    limits: list[int | str] = [*dict.fromkeys((*shares, pipeline.microbatches)), "auto"]
    label = f"{stages} x {pipeline.microbatches} {pipeline.profile}"
    return [
        measure(pipeline, hint, limit, seeds)
        for limit in track(limits, label, console=console, transient=True)
    ]


def measure(pipeline: Pipeline, hint: str, limit: int | str, seeds: int) -> Row:
    """What one limit comes to."""
    config = Config(microbatches=pipeline.microbatches, hint=hint, limit=limit)  # type: ignore[arg-type]
    ratios, peak = [], 0
    for seed in range(seeds):
        costs = draw_costs(**asdict(pipeline), seed=seed)
        step = VirtualCluster(costs, config).run_step()
        ratios.append(bound_s(costs) / step.makespan_s)
        peak = max(peak, *(report.peak_in_flight for report in step.reports))
    return Row(str(limit), statistics.median(ratios), peak)


def show(pipeline: Pipeline, hint: str, rows: Sequence[Row], console: Console) -> None:
    """Print one pipeline's curve."""
    title = (
        f"{hint}, {pipeline.stages} stages x {pipeline.microbatches}, {pipeline.profile} "
        f"{pipeline.jitter}, delay {pipeline.delay_s * 1000:g} ms"
    )
    console.print(title)
    table = Table("limit", "ratio to bound", "peak")
    for row in rows:
        table.add_row(row.limit, f"{row.ratio_to_bound:.3f}", str(row.peak_in_flight))
    console.print(table)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=int, default=20)
    parser.add_argument("--hint", default="bf")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args(arguments)
    found = {}
    for pipeline in PIPELINES:
        found[pipeline] = curve(pipeline, options.hint, options.seeds, Console(stderr=True))
        if not options.json:
            show(pipeline, options.hint, found[pipeline], Console(width=100))
    if options.json:
        print(
            json.dumps(
                [{**asdict(p), "rows": [asdict(r) for r in rows]} for p, rows in found.items()]
            )
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
