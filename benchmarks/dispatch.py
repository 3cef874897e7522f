"""What a dispatch costs: the choice itself, and the way from an arrival to a running task.

    python benchmarks/dispatch.py            # tables
    python benchmarks/dispatch.py --json     # one JSON object

`choose`: Arbiter.choose + commit with 8, 64 and 1,024 ready tasks. `path`: on rank 1 of two ranks
in one process, whose device is idle, (header received -> receive posted) + (tensor complete ->
task started), as probes around the world's bus, transfer and device see it. All in microseconds.
"""

import argparse
import gc
import json
import platform
import statistics
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from datetime import date

import torch
from rich.console import Console
from rich.table import Table

import rrfp_async
from rrfp_async.arbiter import Arbiter
from rrfp_async.backpressure import Backpressure
from rrfp_async.bus.base import Bus, BusStatistics
from rrfp_async.bus.messages import Header, Message
from rrfp_async.gpu.completion import Computed, T
from rrfp_async.gpu.device import Device
from rrfp_async.gpu.transfer import Transfer, TransferStatistics
from rrfp_async.hints import HINTS, make_hint
from rrfp_async.ids import Link, TaskId, TaskKind, TensorSpec
from rrfp_async.ready_set import ReadySet
from rrfp_async.topology import Topology
from rrfp_async.world import Wires, World

READY = (8, 64, 1024)
DISPATCHES = 2000


def choose_us(hint: str, ready: int) -> float:
    """Median microseconds of choose + commit with `ready` ready tasks."""
    microbatches = ready + DISPATCHES
    ready_set = ReadySet(Topology(4), 0, deterministic=True)
    backpressure = Backpressure(microbatches + 1)
    arbiter = Arbiter(make_hint(hint), backpressure)
    tasks = ready_set.begin_step(microbatches, backward=True)
    backpressure.begin_step(microbatches, backward=True)
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
            bus, transfer = ProbeBus(wires.bus, times), wires.transfer
            yield Wires(bus, ProbeTransfer(transfer, times, microbatches))

    return replace(world, connect=connect, device=ProbeDevice(world.device, times))


class Slow(torch.nn.Module):
    """Sleeps two milliseconds, so that whoever waits for it is idle."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        time.sleep(0.002)
        return x * 1.0


async def paths_us(microbatches: int = 64, steps: int = 20) -> list[float]:
    """The path's microseconds for every arrival on rank 1, the first step left out."""
    batch = torch.zeros(microbatches, 256)
    samples: list[float] = []

    async def main(world: World) -> None:
        times = Clockings()
        if world.rank == 1:
            world = probed(world, times, microbatches)
        stage = torch.nn.Identity() if world.rank else Slow()
        config = rrfp_async.Config(microbatches=microbatches)
        async with rrfp_async.Runtime(stage, world=world, config=config) as runtime:
            for step in range(steps):
                await runtime.eval_step(batch)
                if world.rank == 1 and step > 0:
                    samples.extend(times.paths_us())

    await rrfp_async.run_local(2, main)
    return samples


def measure() -> dict[str, object]:
    """Every number of this benchmark."""
    torch.set_num_threads(1)
    choose = {hint: {str(r): choose_us(hint, r) for r in READY} for hint in HINTS}
    samples = sorted(rrfp_async.run(paths_us))
    return {
        "choose_us": choose,
        "path_us": {
            "median": statistics.median(samples),
            "p99": samples[int(0.99 * len(samples))],
            "samples": len(samples),
        },
        "date": date.today().isoformat(),
        "python": platform.python_version(),
        "torch": torch.__version__,
    }


def show(result: dict[str, object]) -> None:
    """The numbers as tables."""
    console = Console()
    table = Table("hint", *(f"{r} ready" for r in READY), "1024 / 8", title="choose + commit, µs")
    choose = result["choose_us"]
    for hint, row in choose.items():
        cells = [f"{value:.1f}" for value in row.values()]
        table.add_row(hint, *cells, f"{row['1024'] / row['8']:.2f}")
    console.print(table)
    path = result["path_us"]
    table = Table("median", "p99", "samples", title="arrival to running task, µs")
    table.add_row(f"{path['median']:.0f}", f"{path['p99']:.0f}", str(path["samples"]))
    console.print(table)


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    result = measure()
    if parser.parse_args().json:
        print(json.dumps(result))
    else:
        show(result)


if __name__ == "__main__":
    main()
