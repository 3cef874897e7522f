"""The task kinds: one async function each, called once per task the arbiter chose.

A kind takes its stage's arrivals, awaits the device, and returns what to send. It never awaits a
transfer: sends are rendezvous, and waiting for one while holding the device would deadlock. To
add a kind, write its function and enter it in `KINDS`.
"""

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from functools import partial
from types import MappingProxyType

from rrfp_async.gpu.completion import Computed
from rrfp_async.gpu.device import Device
from rrfp_async.ids import TaskId, TaskKind
from rrfp_async.tasks.boundary import Export, Outgoing
from rrfp_async.tasks.stage import Stage


@dataclass(frozen=True, slots=True)
class TaskContext:
    """What a task may use: its rank's stages, the device, and how to make a tensor sendable."""

    stages: Mapping[int, Stage]
    device: Device
    export: Export


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a task leaves.

    Attributes:
        outgoing: What to send.
        computed: When it held the device, and when its results are there.
    """

    outgoing: tuple[Outgoing, ...]
    computed: Computed[tuple[Outgoing, ...]]


TaskFunction = Callable[[TaskContext, TaskId], Awaitable[Outcome]]


async def forward(context: TaskContext, task: TaskId) -> Outcome:
    """F: run the stage's module on a microbatch; on the last stage, the loss too."""
    stage = context.stages[task.stage]
    activations = stage.take_activations(task.microbatch)
    compute = partial(stage.forward, task.microbatch, activations, context.export)
    return await _compute(context, task, compute)


async def backward(context: TaskContext, task: TaskId) -> Outcome:
    """B: accumulate the stage's gradients of a microbatch, and send back those of its inputs."""
    stage = context.stages[task.stage]
    gradients = stage.take_gradients(task.microbatch)
    compute = partial(stage.backward, task.microbatch, gradients, context.export)
    return await _compute(context, task, compute)


async def backward_input(context: TaskContext, task: TaskId) -> Outcome:
    """I: send back the gradients of the stage's inputs; its parameters' are left for W."""
    stage = context.stages[task.stage]
    gradients = stage.take_gradients(task.microbatch)
    compute = partial(stage.backward_input, task.microbatch, gradients, context.export)
    return await _compute(context, task, compute)


async def backward_weight(context: TaskContext, task: TaskId) -> Outcome:
    """W: accumulate the gradients that I of the microbatch left."""
    compute = partial(context.stages[task.stage].backward_weight, task.microbatch)
    return await _compute(context, task, compute)


async def _compute(
    context: TaskContext, task: TaskId, compute: Callable[[], tuple[Outgoing, ...]]
) -> Outcome:
    computed = await context.device.run(compute, task=task)
    return Outcome(computed.value, computed)


KINDS: Mapping[TaskKind, TaskFunction] = MappingProxyType(
    {
        TaskKind.F: forward,
        TaskKind.B: backward,
        TaskKind.I: backward_input,
        TaskKind.W: backward_weight,
    }
)
"""The function of every kind."""
