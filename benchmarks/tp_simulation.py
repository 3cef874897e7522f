"""What agreeing on every task costs a pipeline of tensor-parallel groups, on the virtual cluster.

    python -m benchmarks.tp_simulation                     # PP16 x TP4 and TP8: some minutes

Real dispatchers and agreements, virtual time: F takes 10 ms, B 20 ms, with the paper's jitter J2,
alike on all ranks of a group; both protocols have the same limit. Agreement messages take the
control delay; each tensor comes to each member late by 0 to the skew. The numbers are medians over
the seeds, whose draws both protocols share.

`wait` is the part of all ranks' time that tasks waited though all their needs were met on every
rank of the group and the device was free. `retries` are the rounds of an all-gather that ended in
different proposals, summed over the groups, per task that the groups have run. `time` is the
makespan over that of the same protocol without delay and skew; what the skew costs any protocol is
in it.
"""

import argparse
import json
import statistics
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import product

from rich.console import Console
from rich.progress import track
from rich.table import Table

from benchmarks.options import count, counts
from rrfp_async.config import TP_PROTOCOLS, Config
from rrfp_async.sim.cluster import VirtualCluster
from rrfp_async.sim.costs import draw_costs
from rrfp_async.sim.lateness import Lateness
from rrfp_async.sim.simulate import tp_retries, tp_wait_share
from rrfp_async.topology import Topology


@dataclass(frozen=True)
class Row:
    """What a protocol came to in a setting, as medians over the seeds.

    Attributes:
        tp: Ranks of a group.
        control_us: What an agreement message takes, in microseconds.
        skew_ms: How late a tensor is at most, in milliseconds.
        protocol: `leader` or `allgather`.
        wait_share: See above.
        retries_per_task: See above.
        makespan_s: Of the step, in virtual seconds.
        time_ratio: The makespan over that without delay and skew.
    """

    tp: int
    control_us: int
    skew_ms: int
    protocol: str
    wait_share: float
    retries_per_task: float
    makespan_s: float
    time_ratio: float


@dataclass(frozen=True)
class Step:
    """One simulated step: makespan in virtual seconds, wait share, retries per task."""

    makespan_s: float
    wait_share: float
    retries_per_task: float


def row_of(
    setting: tuple[int, int, int, str], late: Sequence[Step], punctual: Sequence[Step]
) -> Row:
    """A row of the table: a setting's steps and those without delay and skew, one per seed."""
    ratios = [a.makespan_s / b.makespan_s for a, b in zip(late, punctual, strict=True)]
    return Row(
        *setting,
        statistics.median(step.wait_share for step in late),
        statistics.median(step.retries_per_task for step in late),
        statistics.median(step.makespan_s for step in late),
        statistics.median(ratios),
    )


def simulate_step(options: argparse.Namespace, tp: int, protocol: str, lateness: Lateness) -> Step:
    """One step; the seed of `lateness` is that of the draws."""
    topology = Topology(options.stages, tp=tp)
    costs = draw_costs(
        stages=options.stages,
        microbatches=options.microbatches,
        profile="llm",
        jitter="J2",
        delay_s=0.0,
        seed=lateness.seed,
    )
    config = Config(
        microbatches=options.microbatches,
        hint=options.hint,
        limit=options.limit,
        tp_protocol=protocol,  # type: ignore[arg-type] # one of TP_PROTOCOLS
    )
    step = VirtualCluster(costs, config, topology, lateness=lateness).run_step()
    told = [report.agreement for report in step.reports]
    tasks = sum(one.decisions for one in told if one) / tp
    share = tp_wait_share(step)
    return Step(step.makespan_s, share, tp_retries(topology, step) / tasks if tasks else 0.0)


def show(rows: Sequence[Row], console: Console) -> None:
    """Print a line per setting, both protocols in it."""
    table = Table("TP", "delay, us", "skew, ms", *_HEADERS)
    for setting in dict.fromkeys((row.tp, row.control_us, row.skew_ms) for row in rows):
        found = {
            row.protocol: row for row in rows if (row.tp, row.control_us, row.skew_ms) == setting
        }
        leader, allgather = (found[protocol] for protocol in TP_PROTOCOLS)
        table.add_row(
            *map(str, setting),
            f"{leader.wait_share:.2%}",
            f"{leader.time_ratio:.3f}",
            f"{leader.makespan_s * 1000:.0f}",
            f"{allgather.wait_share:.2%}",
            f"{allgather.retries_per_task:.2f}",
            f"{allgather.time_ratio:.3f}",
            f"{allgather.makespan_s * 1000:.0f}",
        )
    console.print(table)


_HEADERS = (
    "leader: wait",
    "time",
    "ms",
    "allgather: wait",
    "retries",
    "time",
    "ms",
)


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--stages", type=count, default=16)
    parser.add_argument("--microbatches", type=count, default=32)
    parser.add_argument("--tp", type=counts(2), default=[4, 8], help="sizes of groups")
    parser.add_argument("--control-us", type=counts(0), default=[50, 500])
    parser.add_argument("--skew-ms", type=counts(0), default=[0, 1, 5])
    parser.add_argument("--hint", default="bf")
    parser.add_argument("--limit", type=count, default=24, help="forwards in flight per rank")
    parser.add_argument("--seeds", type=count, default=3)
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line."""
    options = _options(arguments)
    seeds, console = range(options.seeds), Console(stderr=True)
    punctual = {
        (tp, protocol): [
            simulate_step(options, tp, protocol, Lateness(seed=seed)) for seed in seeds
        ]
        for tp, protocol in product(options.tp, TP_PROTOCOLS)
    }
    settings = list(product(options.tp, options.control_us, options.skew_ms, TP_PROTOCOLS))
    rows = []
    for setting in track(settings, "simulating", console=console, transient=True):
        tp, control_us, skew_ms, protocol = setting
        lateness = [Lateness(control_us / 1e6, skew_ms / 1e3, seed) for seed in seeds]
        late = [simulate_step(options, tp, protocol, one) for one in lateness]
        rows.append(row_of(setting, late, punctual[tp, protocol]))
    if options.json:
        print(json.dumps({"rows": [asdict(row) for row in rows]}))
    else:
        show(rows, Console(width=110))
    return 0


if __name__ == "__main__":
    sys.exit(main())
