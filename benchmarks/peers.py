"""The systems that `versus_torch` runs side by side: torch's schedules and ours, on equal terms.

Each gets stages of its own made from the same seed, the same batch and gloo, and makes one step
when asked. It does not know what is measured.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass

import torch
from torch import nn
from torch.distributed import pipelining

import rrfp_async
from benchmarks.emulation import Emulated, SleepingLayer, batch_of

WIDTH = 16
SEED = 7


def loss_fn(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """Mean squared error; column 0 is no prediction."""
    return nn.functional.mse_loss(output[:, 1:], target[:, 1:])


@dataclass(frozen=True, slots=True)
class System:
    """A row of the comparison.

    Attributes:
        name: `torch`, `rrfp_async` or that of another maker of peers.
        hint: The schedule or hint order.
        chunks: Stages a rank: with two, each takes half the time.
        placement: Of the stages on the ranks.
        split: Whether its backward is I and W.
        limit: Of ours: forwards in flight, or `auto`.
    """

    name: str
    hint: str
    chunks: int = 1
    placement: str = "loop"
    split: bool = False
    limit: int | str = "auto"


SCHEDULES: dict[str, Callable[..., object]] = {
    "GPipe": pipelining.ScheduleGPipe,
    "1F1B": pipelining.Schedule1F1B,
    "Interleaved1F1B": pipelining.ScheduleInterleaved1F1B,
    "InterleavedZeroBubble": pipelining.ScheduleInterleavedZeroBubble,
    "ZBV": pipelining.ScheduleZBVZeroBubble,
    "DualPipeV": pipelining.ScheduleDualPipeV,
}
"""torch's, by the names of the rows."""

SYSTEMS = (
    System("torch", "GPipe"),
    System("torch", "1F1B"),
    System("torch", "Interleaved1F1B", 2),
    System("torch", "InterleavedZeroBubble", 2, split=True),
    System("torch", "ZBV", 2, "v", split=True),
    System("torch", "DualPipeV", 2, "v", split=True),
    System("rrfp_async", "bf"),
    System("rrfp_async", "bfw", split=True),
    System("rrfp_async", "zbv", 2, "v", split=True),
    System("rrfp_async", "auto", 2, "v", split=True),
)


class Peer(ABC):
    """One rank of one system."""

    def __init__(self, system: System, rank: int, pp: int, microbatches: int, rows: int) -> None:
        self.system = system
        self.topology = rrfp_async.Topology(pp, chunks=system.chunks, placement=system.placement)
        self.microbatches = microbatches
        self.batch = batch_of(microbatches, rows, WIDTH)
        self.layers = [
            SleepingLayer(WIDTH, Emulated(stage, lambda _kind, _microbatch: 0.0), SEED)
            for stage in self.topology.stages_of(rank)
        ]

    @abstractmethod
    async def step(self) -> None:
        """Run one training step together with the other ranks; gradients are left."""

    def forget_gradients(self) -> None:
        """As an optimizer does between steps."""
        for layer in self.layers:
            layer.zero_grad(set_to_none=True)


class TorchPeer(Peer):
    """A schedule of torch.distributed.pipelining, over the default process group."""

    def __init__(self, system: System, rank: int, pp: int, microbatches: int, rows: int) -> None:
        super().__init__(system, rank, pp, microbatches, rows)
        stages = [self._stage(layer, rows) for layer in self.layers]
        several = system.chunks > 1
        self._is_first = any(stage.is_first for stage in stages)
        self._is_last = any(stage.is_last for stage in stages)
        self._schedule = SCHEDULES[system.hint](
            stages if several else stages[0], microbatches, loss_fn=loss_fn
        )

    def _stage(self, layer: SleepingLayer, rows: int) -> pipelining.PipelineStage:
        """Shapes and gradients given, so that torch need not find them out by running it."""
        index = layer.emulated.stage
        made, gradient = torch.zeros(rows, WIDTH, requires_grad=True), torch.zeros(rows, WIDTH)
        return pipelining.PipelineStage(
            layer,
            index,
            self.topology.num_stages,
            torch.device("cpu"),
            input_args=(made if index else gradient,),
            output_args=(made,),
            output_grads=(gradient,),
            input_grads=(gradient if index else None,),
        )

    async def step(self) -> None:
        """Blocks."""
        args = (self.batch,) if self._is_first else ()
        target = {"target": self.batch} if self._is_last else {}
        self._schedule.step(*args, **target, return_outputs=False)


class OurPeer(Peer):
    """A Runtime of ours."""

    def __init__(
        self, system: System, world: rrfp_async.World, pp: int, microbatches: int, rows: int
    ) -> None:
        super().__init__(system, world.rank, pp, microbatches, rows)
        self.runtime = rrfp_async.Runtime(
            list(self.layers),
            world=world,
            config=rrfp_async.Config(
                microbatches=microbatches,
                hint=system.hint,
                limit=system.limit,
                return_outputs=False,
            ),
            loss_fn=loss_fn,
        )

    async def step(self) -> None:
        """One `train_step`."""
        await self.runtime.train_step(self.batch, target=self.batch)


async def open_peers(
    systems: Sequence[System],
    pp: int,
    microbatches: int,
    rows: int,
    resources: AsyncExitStack,
    *,
    makers: Mapping[str, Callable[[System, int, int, int, int], Peer]],
) -> list[Peer]:
    """This rank's end of every system, in order; `makers` by name of those that are not ours."""
    rank = torch.distributed.get_rank()
    peers: list[Peer] = []
    for system in systems:
        if system.name in makers:
            peers.append(makers[system.name](system, rank, pp, microbatches, rows))
            continue
        topology = rrfp_async.Topology(pp, chunks=system.chunks, placement=system.placement)
        world = await resources.enter_async_context(rrfp_async.torchrun_world(topology))
        peer = OurPeer(system, world, pp, microbatches, rows)
        await resources.enter_async_context(peer.runtime)
        peers.append(peer)
    return peers
