"""R: what makes a rank's gradients whole before its update.

First sums over the copies of tied parameters, then means over replicas. It does not know when the
gradients that go in are complete, or how any of it travels.
"""

import asyncio
from collections.abc import Mapping, Sequence

import torch

from rrfp_async.averaging import Averaging
from rrfp_async.bus.messages import Header
from rrfp_async.errors import TransferError
from rrfp_async.executor import EXPLAIN_S
from rrfp_async.ids import Edge, TaskId
from rrfp_async.tasks.stage import Stage
from rrfp_async.tied_sums import Send, TiedSums
from rrfp_async.world import Wires, World


class Reduction:
    """The reductions of one rank, step after step.

    Args:
        world: The rank's.
        wires: What its tensors go over.
        stages: Its stages, by index.
        send: Called with what a tied parameter's owners tell each other.
    """

    def __init__(
        self, world: World, wires: Wires, stages: Mapping[int, Stage], *, send: Send
    ) -> None:
        self._tied = TiedSums(
            world.topology,
            world.place.pp,
            stages,
            device=world.device,
            export=wires.transfer.export,
            send=send,
        )
        self._averaging = Averaging(
            stages,
            wires.replicas,
            tied=self._tied.tasks(),
            number=len(world.topology.tied_parameters),
            device=world.device,
        )

    def tasks(self) -> dict[TaskId, Sequence[int | TaskId]]:
        """This rank's, each with the stages and reductions that it waits for."""
        return {**self._tied.tasks(), **self._averaging.tasks()}

    def begin_step(self) -> None:
        """Start a step that ends in an update."""
        self._tied.begin_step()

    def end_step(self) -> None:
        """Forget the step, whole or broken."""
        self._tied.end_step()

    async def run(self, task: TaskId) -> None:
        """Run one, together with the other ranks that it concerns.

        Where a transfer breaks, the bus may speak first: it knows whether a peer is gone.

        Raises:
            ValueError: If copies or replicas differ before they were trained.
            TransferError: If another rank is gone.
        """
        averages = task in self._averaging.tasks()
        try:
            await (self._averaging if averages else self._tied).run(task)
        except TransferError:
            await asyncio.sleep(EXPLAIN_S)
            raise

    def expects(self, edge: Edge, number: int) -> bool:
        """Whether one of this step waits for something over `edge`."""
        return self._tied.expects(edge, number)

    def take(self, header: Header, tensors: Sequence[torch.Tensor]) -> None:
        """Take what another rank's sent.

        Raises:
            ProtocolError: If none of this step waits for it.
        """
        self._tied.take(header, tensors)
