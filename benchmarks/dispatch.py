"""What a dispatch costs: the choice itself, and the way from an arrival to a running task.

    python -m benchmarks.dispatch            # tables
    python -m benchmarks.dispatch --torchrun # the path between two processes
    python -m benchmarks.dispatch --json     # one JSON object

`choose`: Arbiter.choose + commit with 8, 64 and 1,024 ready tasks. `path`: on rank 1 of two ranks,
whose device is idle, (header received -> receive posted) + (tensor complete ->
task started), as probes around the world's bus, transfer and device see it; between processes the
receive is clocked on the link's own thread, so that the hand-offs to it count. In microseconds.
"""

import argparse
import gc
import json
import os
import platform
import statistics
import sys
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from datetime import date
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

import rrfp_async
from benchmarks.launching import start
from rrfp_async.arbiter import Arbiter
from rrfp_async.backpressure import Backpressure
from rrfp_async.bus.base import Bus, BusStatistics
from rrfp_async.bus.messages import Header, Message
from rrfp_async.gpu.completion import Computed, T
from rrfp_async.gpu.device import Device
from rrfp_async.gpu.group_transfer import GroupTransfer
from rrfp_async.gpu.links import Communicator
from rrfp_async.gpu.transfer import Transfer, TransferStatistics
from rrfp_async.hints import HINTS, Execution, make_order, resolve_hint
from rrfp_async.ids import Link, TaskId, TaskKind, TensorSpec
from rrfp_async.limits import FixedLimit
from rrfp_async.ready_set import ReadySet
from rrfp_async.topology import Topology
from rrfp_async.world import Wires, World

READY = (8, 64, 1024)
WIDTH = 32_768
"""Elements of a microbatch: 128 KiB, which is transferred and never comes with its header."""
DISPATCHES = 2000
TWO_CHUNKS = ("zbv", "dualpipev")
"""Hints that do not fit one stage a rank."""


def choose_us(hint: str, ready: int) -> float:
    """Median microseconds of choose + commit with `ready` ready tasks."""
    microbatches = ready + DISPATCHES
    topology = Topology(4)
    ready_set = ReadySet(topology, 0, deterministic=True)
    backpressure = Backpressure(FixedLimit(microbatches + 1))
    ranking = Execution(binding=False, deterministic=True)
    arbiter = Arbiter(make_order(resolve_hint(hint), topology, 0, ranking), backpressure)
    tasks = ready_set.begin_step(microbatches, backward=True)
    arbiter.begin_step(tasks)
    forwards = [task for task in tasks if task.kind is TaskKind.F]
    arbiter.add(forwards[:ready])
    samples = []
    gc.disable()
    for task in forwards[ready:]:
        begun = time.perf_counter_ns()
        arbiter.commit(arbiter.choose())
        samples.append(time.perf_counter_ns() - begun)
        arbiter.add([task])
    gc.enable()
    return statistics.median(samples) / 1000


@dataclass
class Clockings:
    """When each microbatch's activation passed each point on rank 1, in seconds."""

    header: dict[int, float] = field(default_factory=dict)
    posted: dict[int, float] = field(default_factory=dict)
    complete: dict[int, float] = field(default_factory=dict)
    started: dict[int, float] = field(default_factory=dict)

    def paths_us(self) -> list[float]:
        """The two spans of each microbatch, summed."""
        return [
            1e6 * (self.posted[j] - self.header[j] + self.started[j] - self.complete[j])
            for j in self.header
        ]


class ProbeBus(Bus):
    """Notes when headers come out of the bus."""

    def __init__(self, inner: Bus, times: Clockings) -> None:
        self._inner = inner
        self._times = times

    @property
    def rank(self) -> int:
        return self._inner.rank

    def send_nowait(self, target: int, message: Message) -> None:
        self._inner.send_nowait(target, message)

    async def next_message(self) -> tuple[int, Message]:
        source, message = await self._inner.next_message()
        if isinstance(message, Header):
            self._times.header[message.task.microbatch] = time.perf_counter()
        return source, message

    def statistics(self) -> BusStatistics:
        return self._inner.statistics()

    def close(self) -> None:
        self._inner.close()


class ProbeTransfer(Transfer):
    """Notes when receives are posted and complete; on one link, number n is microbatch n."""

    def __init__(self, inner: Transfer, times: Clockings, microbatches: int) -> None:
        self._inner = inner
        self._times = times
        self._microbatches = microbatches

    def export(self, tensor: torch.Tensor) -> torch.Tensor:
        return self._inner.export(tensor)

    async def send(self, link: Link, sequence: int, tensors: Sequence[torch.Tensor]) -> None:
        await self._inner.send(link, sequence, tensors)

    async def receive(
        self, link: Link, sequence: int, specs: Sequence[TensorSpec]
    ) -> list[torch.Tensor]:
        microbatch = sequence % self._microbatches
        self._times.posted[microbatch] = time.perf_counter()
        tensors = await self._inner.receive(link, sequence, specs)
        self._times.complete[microbatch] = time.perf_counter()
        return tensors

    def statistics(self) -> TransferStatistics:
        return self._inner.statistics()


class ProbeCommunicator:
    """Notes, on a link's own thread, when a receive is really posted and complete.

    Later than `ProbeTransfer` posts, earlier than it completes: what lies between are hand-offs
    to that thread and back, which belong to the path.
    """

    def __init__(self, inner: Communicator, times: Clockings, microbatches: int) -> None:
        self._inner = inner
        self._times = times
        self._microbatches = microbatches
        self._received = 0

    def send(self, tensors: list[torch.Tensor], peer: int, tag: int) -> Any:
        return self._inner.send(tensors, peer, tag)

    def recv(self, tensors: list[torch.Tensor], peer: int, tag: int) -> "ProbeCommunicator":
        self._work = self._inner.recv(tensors, peer, tag)
        self._times.posted[self._received % self._microbatches] = time.perf_counter()
        return self

    def wait(self, timeout: Any) -> None:
        """Wait as the receive that was started last would."""
        self._work.wait(timeout)
        self._times.complete[self._received % self._microbatches] = time.perf_counter()
        self._received += 1

    def abort(self) -> None:
        self._inner.abort()


class ProbeDevice(Device):
    """Notes when forwards start."""

    def __init__(self, inner: Device, times: Clockings) -> None:
        self._inner = inner
        self._times = times

    @property
    def torch_device(self) -> torch.device:
        return self._inner.torch_device

    async def run(self, function: Callable[[], T], *, task: TaskId | None = None) -> Computed[T]:
        def noted() -> T:
            if task is not None and task.kind is TaskKind.F:
                self._times.started[task.microbatch] = time.perf_counter()
            return function()

        return await self._inner.run(noted, task=task)

    def close(self) -> None:
        self._inner.close()


def probed(world: World, times: Clockings, microbatches: int) -> World:
    """`world` with a probe at every point of the path."""

    @asynccontextmanager
    async def connect(config: rrfp_async.Config) -> AsyncIterator[Wires]:
        async with world.connect(config) as wires:
            transfer = wires.transfer
            if isinstance(transfer, GroupTransfer):
                for end in transfer._ends.values():
                    end._group = ProbeCommunicator(end._group, times, microbatches)
            else:
                transfer = ProbeTransfer(transfer, times, microbatches)
            yield Wires(ProbeBus(wires.bus, times), transfer)

    return replace(world, connect=connect, device=ProbeDevice(world.device, times))


class Slow(torch.nn.Module):
    """Sleeps two milliseconds, so that whoever waits for it is idle."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        time.sleep(0.002)
        return x * 1.0


async def clock_rank(world: World, microbatches: int, steps: int) -> list[float]:
    """Evaluate as one of two ranks; rank 1 returns its arrivals' microseconds.

    The first step is left out.
    """
    batch = torch.zeros(microbatches, WIDTH)
    times, samples = Clockings(), []
    if world.rank == 1:
        world = probed(world, times, microbatches)
    stage = torch.nn.Identity() if world.rank else Slow()
    config = rrfp_async.Config(microbatches=microbatches)
    async with rrfp_async.Runtime(stage, world=world, config=config) as runtime:
        for step in range(steps):
            await runtime.eval_step(batch)
            if step > 0:
                samples.extend(times.paths_us())
    return samples


async def paths_us(microbatches: int = 64, steps: int = 20) -> list[float]:
    """The path's microseconds for every arrival on rank 1, both ranks in this process."""
    by_rank = await rrfp_async.run_local(2, lambda world: clock_rank(world, microbatches, steps))
    return by_rank[1]


def process_paths_us(microbatches: int = 64, steps: int = 20) -> list[float]:
    """As `paths_us`, as one of two processes of torchrun; both get rank 1's samples."""
    world = rrfp_async.torchrun_world()
    samples = rrfp_async.run(clock_rank(world, microbatches, steps))
    world.close()
    if world.rank == 1:
        world.store.set("paths_us", json.dumps(samples))
    return json.loads(world.store.get("paths_us"))


def spread(samples: list[float]) -> dict[str, float]:
    """Median and 99th percentile of some microseconds."""
    ranked = sorted(samples)
    p99 = ranked[int(0.99 * len(ranked))]
    return {"median": statistics.median(ranked), "p99": p99, "samples": len(ranked)}


def under_torchrun() -> bool:
    """Whether torchrun started this process."""
    return "TORCHELASTIC_RUN_ID" in os.environ


def measure() -> dict[str, Any]:
    """Every number of this benchmark."""
    torch.set_num_threads(1)
    samples = process_paths_us() if under_torchrun() else rrfp_async.run(paths_us)
    talks = os.environ.get("RANK", "0") == "0"
    hints = [hint for hint in HINTS if talks and hint not in TWO_CHUNKS]
    return {
        "choose_us": {hint: {str(r): choose_us(hint, r) for r in READY} for hint in hints},
        "path_us": spread(samples),
        "between": "processes" if under_torchrun() else "ranks of one process",
        "date": date.today().isoformat(),
        "python": platform.python_version(),
        "torch": torch.__version__,
    }


def show(result: dict[str, Any]) -> None:
    """The numbers as tables."""
    console = Console()
    table = Table("hint", *(f"{r} ready" for r in READY), "1024 / 8", title="choose + commit, µs")
    for hint, row in result["choose_us"].items():
        cells = [f"{value:.1f}" for value in row.values()]
        table.add_row(hint, *cells, f"{row['1024'] / row['8']:.2f}")
    console.print(table)
    title = f"arrival to running task between {result['between']}, µs"
    table = Table("median", "p99", "samples", title=title, min_width=len(title))
    path = result["path_us"]
    table.add_row(f"{path['median']:.0f}", f"{path['p99']:.0f}", str(path["samples"]))
    console.print(table)


def main() -> int:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--torchrun", action="store_true", help="two processes, started here")
    options = parser.parse_args()
    if options.torchrun and not under_torchrun():
        return start("dispatch", *sys.argv[1:], ranks=2)
    result = measure()
    if os.environ.get("RANK", "0") == "0":
        print(json.dumps(result)) if options.json else show(result)
    return 0


if __name__ == "__main__":
    sys.exit(main())
