"""The task kinds: one async function each, called once per task the arbiter chose.

A kind awaits the device, on whose thread it takes its stage's arrivals, computes, and hands over
what goes to another stage of its rank; it returns what to send. It never awaits a transfer: sends
are rendezvous, and waiting for one while holding the device would deadlock. To add a kind, write
its function and enter it in `KINDS`.
"""

from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from types import MappingProxyType
from typing import Any, Protocol

import torch

from rrfp_async.gpu.ambient import Ambient
from rrfp_async.gpu.completion import Computed
from rrfp_async.gpu.device import Device
from rrfp_async.ids import Edge, Layout, TaskId, TaskKind, TensorSpec
from rrfp_async.tasks.boundary import Activation, Export, Outgoing
from rrfp_async.tasks.stage import Stage


@dataclass(slots=True)
class TaskContext:
    """What a task may use.

    Attributes:
        stages: Its rank's.
        is_local: Whether an edge stays on the rank.
        device: Where it computes.
        export: Makes a tensor sendable.
        ambient: What the caller of the step has set on its thread.
        steps_ended: How many steps have ended: a task may outlive the one it belongs to.
    """

    stages: Mapping[int, Stage]
    is_local: Callable[[Edge], bool]
    device: Device
    export: Export
    ambient: Ambient = field(default_factory=Ambient)
    steps_ended: int = 0


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a task leaves.

    Attributes:
        outgoing: What to send, and what was handed over.
        computed: When it held the device, and when its results are there.
    """

    outgoing: tuple[Outgoing, ...]
    computed: Computed[tuple[Outgoing, ...]]


TaskCoroutine = Coroutine[Any, None, Outcome]
TaskFunction = Callable[[TaskContext, TaskId], TaskCoroutine]
Compute = Callable[[], tuple[Outgoing, ...]]


async def forward(context: TaskContext, task: TaskId) -> Outcome:
    """F: run the stage's module on a microbatch; on the last stage, the loss too."""
    stage, microbatch = context.stages[task.stage], task.microbatch

    def compute() -> tuple[Outgoing, ...]:
        with context.ambient.autocast():
            return stage.forward(microbatch, stage.take_activations(microbatch), context.export)

    return await _compute(context, task, compute)


async def backward(context: TaskContext, task: TaskId) -> Outcome:
    """B: accumulate the stage's gradients of a microbatch, and send back those of its inputs."""
    stage, microbatch = context.stages[task.stage], task.microbatch

    def compute() -> tuple[Outgoing, ...]:
        return stage.backward(microbatch, stage.take_gradients(microbatch), context.export)

    return await _compute(context, task, compute)


async def backward_input(context: TaskContext, task: TaskId) -> Outcome:
    """I: send back the gradients of the stage's inputs; its parameters' are left for W."""
    stage, microbatch = context.stages[task.stage], task.microbatch

    def compute() -> tuple[Outgoing, ...]:
        return stage.backward_input(microbatch, stage.take_gradients(microbatch), context.export)

    return await _compute(context, task, compute)


async def backward_weight(context: TaskContext, task: TaskId) -> Outcome:
    """W: accumulate the gradients that I of the microbatch left."""
    compute = partial(context.stages[task.stage].backward_weight, task.microbatch)
    return await _compute(context, task, compute)


async def _compute(context: TaskContext, task: TaskId, compute: Compute) -> Outcome:
    function = partial(_compute_and_hand_over, context, task, compute, context.steps_ended)
    computed = await context.device.run(function, task=task)
    return Outcome(computed.value, computed)


def _compute_and_hand_over(
    context: TaskContext, task: TaskId, compute: Compute, steps_ended: int
) -> tuple[Outgoing, ...]:
    """On the device's thread: what comes after `task` there finds what it made."""
    context.ambient.adopt_num_threads()
    made = compute()
    for outgoing in made:
        if context.is_local(outgoing.edge) and context.steps_ended == steps_ended:
            deliver(context.stages, task, outgoing, outgoing.tensors)
    return made


class Announced(Protocol):
    """What goes with tensors over an edge, whether they stay on the rank or came with a header."""

    @property
    def edge(self) -> Edge:
        """The stage edge they belong to."""

    @property
    def specs(self) -> tuple[TensorSpec | None, ...]:
        """One per tensor of the edge; None where there is no gradient."""

    @property
    def layout(self) -> Layout:
        """The arguments that an activation's tensors are part of."""


def deliver(
    stages: Mapping[int, Stage],
    task: TaskId,
    announced: Announced,
    tensors: Sequence[torch.Tensor],
) -> None:
    """Give the receiving one of `stages` what `task` made for an edge."""
    edge, specs = announced.edge, announced.specs
    if task.kind is TaskKind.F:
        wanted = [spec is not None and spec.requires_grad for spec in specs]
        arrived = Activation(list(tensors), announced.layout)
        stages[edge.target].deliver_activation(edge, task.microbatch, arrived, wanted)
        return
    present = iter(tensors)
    gradients = [None if spec is None else next(present) for spec in specs]
    stages[edge.source].deliver_gradient(edge, task.microbatch, gradients)


KINDS: Mapping[TaskKind, TaskFunction] = MappingProxyType(
    {
        TaskKind.F: forward,
        TaskKind.B: backward,
        TaskKind.I: backward_input,
        TaskKind.W: backward_weight,
    }
)
"""The function of every kind."""
