"""A rank's surroundings on the virtual cluster: its stage, its device, its end of the links.

They stand where a torch module, a GPU and a network would. A task computes nothing and takes its
cost; a tensor is one number, its own delay, so the transfer knows how long it is under way.
"""

import asyncio
from collections import defaultdict
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace

import torch

from rrfp_async.gpu.completion import Clock, Computed, T
from rrfp_async.gpu.device import Device
from rrfp_async.gpu.loopback import LoopbackFabric, LoopbackTransfer
from rrfp_async.gpu.transfer import spec_of
from rrfp_async.ids import Edge, Link, TaskId
from rrfp_async.sim.costs import Costs
from rrfp_async.sim.lateness import PUNCTUAL, Lateness
from rrfp_async.sim.rendezvous import MEETING_KINDS
from rrfp_async.tasks.boundary import Activation, Export, Outgoing
from rrfp_async.tasks.stage import Stage, StageInputs
from rrfp_async.topology import Topology

_CPU = torch.device("cpu")


class CostModelStage(Stage):
    """A stage without a module: what its tasks send is the delay of the sending."""

    def __init__(self, index: int, topology: Topology, costs: Costs, *, split: bool) -> None:
        super().__init__(index, torch.nn.Identity(), topology)
        self._split = split
        self._activations = torch.tensor(costs.activation_delay_s[index], dtype=torch.float64)
        self._gradients = torch.tensor(costs.gradient_delay_s[index], dtype=torch.float64)
        self._spec = replace(spec_of(self._activations[0]), requires_grad=True)

    @property
    def splits(self) -> bool:
        """As the hint wants."""
        return self._split

    def begin_step(self, inputs: StageInputs) -> None:
        """There is nothing to set up."""

    def forward(
        self,
        microbatch: int,
        activations: list[Activation],  # noqa: ARG002 - nothing is computed
        export: Export,  # noqa: ARG002
    ) -> tuple[Outgoing, ...]:
        """Send something along every edge."""
        return self._to(self._out_edges, self._activations[microbatch])

    def backward(
        self,
        microbatch: int,
        gradients: list[list[torch.Tensor | None]],  # noqa: ARG002 - nothing is computed
        export: Export,  # noqa: ARG002
    ) -> tuple[Outgoing, ...]:
        """Send something back along every edge."""
        return self._to(self._in_edges, self._gradients[microbatch])

    def backward_input(
        self, microbatch: int, gradients: list[list[torch.Tensor | None]], export: Export
    ) -> tuple[Outgoing, ...]:
        """As `backward`."""
        return self.backward(microbatch, gradients, export)

    def backward_weight(self, microbatch: int) -> tuple[Outgoing, ...]:  # noqa: ARG002
        """Nothing is sent."""
        return ()

    def _to(self, edges: Sequence[Edge], delay_s: torch.Tensor) -> tuple[Outgoing, ...]:
        return tuple(Outgoing.of(edge, (self._spec,), (delay_s,)) for edge in edges)


class CostModelDevice(Device):
    """Computes nothing and takes the time that a table says.

    Args:
        costs: The table.
        clock: The virtual one.
        dispatch_s: What it costs to dispatch a task, in seconds, before its own time.
        done: Called when a task is done.
        meet: Waits until all ranks that compute a task together have begun it; None for a rank that
            computes alone. This is no part of the task's time.
    """

    def __init__(
        self,
        costs: Costs,
        clock: Clock,
        *,
        dispatch_s: float,
        done: Callable[[], None],
        meet: Callable[[TaskId], Awaitable[None]] | None = None,
    ) -> None:
        self._costs = costs
        self._clock = clock
        self._dispatch_s = dispatch_s
        self._done = done
        self._meet = meet

    @property
    def torch_device(self) -> torch.device:
        """`cpu`."""
        return _CPU

    async def run(self, function: Callable[[], T], *, task: TaskId | None = None) -> Computed[T]:
        """Call `function`, which takes no time, then let the task's time pass."""
        value = function()
        if task is None:
            return Computed(value, self._clock(), self._clock())
        if self._dispatch_s:
            await asyncio.sleep(self._dispatch_s)
        if self._meet is not None and task.kind in MEETING_KINDS:
            await self._meet(task)
        started_s = self._clock()
        await asyncio.sleep(self._costs.task_s(task))
        self._done()
        return Computed(value, started_s, self._clock())

    def close(self) -> None:
        """Nothing runs outside the loop."""


class DelayedLoopback(LoopbackTransfer):
    """A loopback whose tensors arrive after their delay, on each link in the order they were sent.

    A delay is latency, not occupancy: tensors of one link are under way together.
    """

    def __init__(self, fabric: LoopbackFabric, clock: Clock, lateness: Lateness = PUNCTUAL) -> None:
        super().__init__(fabric, _CPU)
        self._clock = clock
        self._lateness = lateness
        self._skews: dict[Link, Callable[[], float]] = {}
        self._last_arrival_s: defaultdict[Link, float] = defaultdict(float)

    async def send(self, link: Link, sequence: int, tensors: Sequence[torch.Tensor]) -> None:
        """Arrive after the delay, and not before what was sent earlier on the link."""
        if link not in self._skews:
            self._skews[link] = self._lateness.skews(link)
        delay_s = float(tensors[0]) + self._skews[link]()
        arrival_s = max(self._clock() + delay_s, self._last_arrival_s[link])
        self._last_arrival_s[link] = arrival_s
        loop = asyncio.get_running_loop()
        arrived = loop.create_future()
        timer = loop.call_at(arrival_s, _arrive, arrived)
        try:
            await arrived
        finally:
            timer.cancel()
        await super().send(link, sequence, tensors)


def _arrive(arrived: "asyncio.Future[None]") -> None:
    if not arrived.done():  # else the step is being cancelled at this very instant
        arrived.set_result(None)
