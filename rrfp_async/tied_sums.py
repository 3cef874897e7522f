"""R of tied parameters: the gradients of copies, summed in one fixed order.

Each rank that holds a copy sends what it has to the home of the parameter, the rank of its lowest
stage; that sums, and sends the sum back. So equal copies get equal gradients, and stay equal. It
runs beside the tasks that compute; what it computes itself comes after them on their device. It
does not know when it may run, or how a tensor travels.
"""

import asyncio
from collections.abc import Callable, Mapping, Sequence
from functools import partial

import torch

from rrfp_async.bus.messages import Header
from rrfp_async.errors import ProtocolError
from rrfp_async.gpu.device import Device
from rrfp_async.gpu.transfer import spec_of
from rrfp_async.ids import Edge, TaskId, TaskKind
from rrfp_async.tasks.boundary import Export, Outgoing, sum_present
from rrfp_async.tasks.stage import Stage
from rrfp_async.topology import TiedParameter, Topology

Send = Callable[[TaskId, Outgoing], None]
Gradient = torch.Tensor | None


class TiedSums:
    """The tied parameters of one rank, step after step.

    The first step also compares the copies themselves: what is not equal at the start would never
    become so.
    """

    def __init__(
        self,
        topology: Topology,
        rank: int,
        stages: Mapping[int, Stage],
        *,
        device: Device,
        export: Export,
        send: Send,
    ) -> None:
        self._topology = topology
        self._stages = stages
        self._device = device
        self._export = export
        self._send = send
        self._compared: set[int] = set()
        self._own: dict[TaskId, tuple[TiedParameter, tuple[int, ...]]] = {}
        for number, tied in enumerate(topology.tied_parameters):
            here = tuple(stage for stage, _ in tied.owners if topology.rank_of(stage) == rank)
            if here:
                self._own[TaskId(here[0], TaskKind.R, number)] = tied, here
        self._mail: dict[tuple[Edge, int], asyncio.Future[list[Gradient]]] = {}

    def tasks(self) -> dict[TaskId, tuple[int, ...]]:
        """This rank's reductions, each with the stages whose gradients it waits for."""
        return {task: here for task, (_, here) in self._own.items()}

    def begin_step(self) -> None:
        """Start a step that ends in an update."""
        loop = asyncio.get_running_loop()
        self._mail = {
            (edge, task.microbatch): loop.create_future()
            for task, (tied, _) in self._own.items()
            for edge in self._edges_of(task, tied)
        }

    def end_step(self) -> None:
        """Forget the step, whole or broken."""
        for came in self._mail.values():
            came.cancel()
        self._mail = {}

    def expects(self, edge: Edge, number: int) -> bool:
        """Whether a reduction of this step waits for something over `edge`."""
        came = self._mail.get((edge, number))
        return came is not None and not came.done()

    def take(self, header: Header, tensors: Sequence[torch.Tensor]) -> None:
        """Take what another rank's reduction sent.

        Raises:
            ProtocolError: If none of this step waits for it.
        """
        came = self._mail.get((header.edge, header.task.microbatch))
        if came is None or came.done():
            raise ProtocolError(
                f"{header.task} sent over {header.edge} what no reduction of this step awaits"
            )
        present = iter(tensors)
        came.set_result([None if spec is None else next(present) for spec in header.specs])

    async def run(self, task: TaskId) -> None:
        """Sum the gradients of one tied parameter, together with its other owners.

        Raises:
            ValueError: If the copies differ before they were trained.
        """
        tied, here = self._own[task]
        edges, number = self._edges_of(task, tied), task.microbatch
        first = number not in self._compared
        own: Gradient = (await self._device.run(partial(self._collected, tied, here))).value
        if task.stage == tied.home:
            came = [await self._mail[edge, number] for edge in edges]
            sum_all = partial(self._sum, tied, here, own, edges, came)
            total: Gradient = (await self._device.run(sum_all)).value
            for edge in edges:
                self._send(task, self._outgoing(edge, [total]))
        else:
            told = [own, self._parameter(tied, task.stage).detach()] if first else [own]
            self._send(task, self._outgoing(edges[0], told))
            [total] = await self._mail[edges[0], number]
            await self._device.run(partial(self._give, tied, here, total))
        self._compared.add(number)

    def _edges_of(self, task: TaskId, tied: TiedParameter) -> list[Edge]:
        """Those that the reduction gets something over, in the order that it is summed in."""
        if task.stage != tied.home:
            return [Edge(task.stage, tied.home)]
        lowest: dict[int, int] = {}
        for stage, _ in tied.owners:
            lowest.setdefault(self._topology.rank_of(stage), stage)
        return [Edge(stage, tied.home) for stage in lowest.values() if stage != tied.home]

    def _outgoing(self, edge: Edge, tensors: list[Gradient]) -> Outgoing:
        specs = [None if tensor is None else spec_of(tensor) for tensor in tensors]
        return Outgoing.of(edge, specs, [self._export(t) for t in tensors if t is not None])

    # -- on the device's thread ------------------------------------------------------------------

    def _collected(self, tied: TiedParameter, here: Sequence[int]) -> Gradient:
        """The sum over the copies of this rank, in an own tensor where there are several."""
        for stage in here:
            self._stages[stage].complete_gradients()
        return sum_present(self._parameter(tied, stage).grad for stage in here)

    def _sum(
        self,
        tied: TiedParameter,
        here: Sequence[int],
        own: Gradient,
        edges: Sequence[Edge],
        came: Sequence[Sequence[Gradient]],
    ) -> Gradient:
        for edge, (_, *copies) in zip(edges, came, strict=True):
            self._compare(tied, edge.source, copies)
        total = sum_present([own, *(gradient for gradient, *_ in came)])
        self._give(tied, here, total)
        return total

    def _compare(self, tied: TiedParameter, stage: int, copies: Sequence[Gradient]) -> None:
        ours = self._parameter(tied, tied.home).detach()
        for copy in copies:
            if copy is None or not torch.equal(copy, ours):
                raise ValueError(
                    f"the copies of the tied parameter {tied} differ on stages {tied.home} and "
                    f"{stage} before the first step: give both the same values"
                )

    def _give(self, tied: TiedParameter, here: Sequence[int], total: Gradient) -> None:
        """Make `total` the gradient of the copies of this rank, each its own tensor."""
        for place, stage in enumerate(here):
            self._stages[stage].give_tied(
                self._name(tied, stage), total.clone() if place and total is not None else total
            )

    def _parameter(self, tied: TiedParameter, stage: int) -> torch.Tensor:
        return self._stages[stage].module.get_parameter(self._name(tied, stage))

    def _name(self, tied: TiedParameter, stage: int) -> str:
        return dict(tied.owners)[stage]
