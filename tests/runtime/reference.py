"""The unpartitioned reference: the same stage modules, run in sequence on the same microbatches.

What parity means (HAZARDS.md): loss and every gradient of a pipelined step equal, bit for bit, what
this file computes. The stages run one after another in plain autograd; at stage boundaries outputs
and gradients are copied to contiguous memory of their own, as a link would leave them. Nothing of
rrfp_async is used but `Microbatches`, to say how a batch is split, and `rng_stream`, to draw the
same numbers.
"""

import copy
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from rrfp_async import Microbatches, Phase, rng_stream

LossFn = Callable[[Any, Any], Any]


@dataclass(frozen=True)
class Part:
    """What one microbatch consists of, where the reference is not to split a step itself.

    Attributes:
        samples: How many it has.
        args: Positional arguments by source stage.
        kwargs: Keyword arguments by source stage.
        target: The loss function's second argument.
    """

    samples: int
    args: Mapping[int, tuple[Any, ...]]
    kwargs: Mapping[int, Mapping[str, Any]]
    target: Any


@dataclass(frozen=True)
class Step:
    """What the user gives one step: inputs by source stage, a target, and the mode.

    `parts` are the microbatches that all this comes to; needed where tensors are not split along
    their first dimension or there are keyword arguments.
    """

    inputs: Mapping[int, tuple[Any, ...]]
    target: Any = None
    training: bool = True
    update: bool = True
    kwargs: Mapping[int, Mapping[str, Any]] = field(default_factory=dict)
    parts: Sequence[Part] | None = None


@dataclass(frozen=True)
class Case:
    """A model in stages, and the steps it goes through. Stage modules are copied before use.

    `chunks` and `placement` only say which rank owns what. `count` is what a microbatch's loss is
    weighted by, instead of its samples; "sum" adds the losses up. `tied` are parameters that
    stages have copies of, as a Topology takes them; `specs` more arguments of the Runtime.
    """

    stages: Sequence[nn.Module]
    steps: Sequence[Step]
    microbatches: int
    loss_fn: LossFn = nn.functional.mse_loss
    edges: tuple[tuple[int, int], ...] | None = None
    make_optimizer: Callable[[list[nn.Parameter]], torch.optim.Optimizer] | None = None
    options: Mapping[str, Any] = field(default_factory=dict)
    chunks: int = 1
    placement: str | tuple[int, ...] = "loop"
    count: Callable[[Any], Any] | str | None = None
    tied: tuple[Mapping[int, str], ...] = ()
    specs: Mapping[str, Any] = field(default_factory=dict)

    @property
    def graph(self) -> tuple[tuple[int, int], ...]:
        """The stage edges; a chain by default."""
        if self.edges is not None:
            return self.edges
        return tuple((stage, stage + 1) for stage in range(len(self.stages) - 1))


Gradients = dict[str, Tensor | None]


@dataclass(frozen=True)
class Outcome:
    """One step's results: the loss, each microbatch's, the outputs, gradients by parameter.

    `parameters` are as the step's update leaves them.
    """

    loss: float | None
    losses: list[float]
    outputs: list[Any]
    gradients: Gradients
    parameters: Gradients


class _Boundary(torch.autograd.Function):
    """Copies to contiguous memory, in both directions."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor) -> Tensor:
        return tensor.clone(memory_format=torch.contiguous_format)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient.clone(memory_format=torch.contiguous_format)


def _cross(tensor: Tensor) -> Tensor:
    if tensor.requires_grad:
        return _Boundary.apply(tensor)
    return tensor.detach().clone(memory_format=torch.contiguous_format)


def run_reference(case: Case) -> list[Outcome]:
    """Every step of the case, unpartitioned, on one thread."""
    torch.set_num_threads(1)
    stages = copy.deepcopy(list(case.stages))
    optimizers = _optimizers(case, stages)
    outcomes = []
    fresh = True
    for number, step in enumerate(case.steps):
        before = sum(earlier.training is step.training for earlier in case.steps[:number])
        results = _run_step(case, stages, step, before, zero=fresh)
        if step.training:
            fresh = step.update
        if step.training and step.update:
            for optimizer in optimizers:
                optimizer.step()
        outcomes.append(Outcome(*results, gradients_of(stages), parameters_of(stages)))
    return outcomes


def _run_step(
    case: Case, stages: list[nn.Module], step: Step, number: int, *, zero: bool
) -> tuple[float | None, list[float], list[Any]]:
    if step.training and zero:
        for stage in stages:
            stage.zero_grad(set_to_none=True)
    modes = [(module, module.training) for stage in stages for module in stage.modules()]
    if not step.training:
        for stage in stages:
            stage.eval()
    with torch.set_grad_enabled(step.training):
        losses, outputs, weights = _run_microbatches(case, stages, step, number)
    for module, mode in modes:
        module.training = mode
    if step.training and step.update:
        _sum_tied(case, stages)
    return _weighted(losses, weights), losses, outputs


def _run_microbatches(
    case: Case, stages: list[nn.Module], step: Step, number: int
) -> tuple[list[float], list[Any], list[float]]:
    parts = _split_evenly(case, step) if step.parts is None else step.parts
    losses, outputs = [], []
    weights = _weights(case, parts, has_target=step.target is not None)
    for j, (part, weight) in enumerate(zip(parts, weights, strict=True)):
        streams = partial(_stream, case, number, j, training=step.training)
        output = _forward(case, stages, part, streams)
        outputs.append(output.detach() if isinstance(output, Tensor) else output)
        if step.target is None:
            continue
        loss = case.loss_fn(pytree.tree_map_only(Tensor, _in_full, output), part.target)
        losses.append(float(loss.detach()))
        if step.training and loss.requires_grad:
            (loss * weight).backward()
    return losses, outputs, weights


def _in_full(output: Tensor) -> Tensor:
    """What a loss function gets of an output: float32 where that is of half precision."""
    return output.float() if output.dtype in (torch.float16, torch.bfloat16) else output


def _split_evenly(case: Case, step: Step) -> list[Part]:
    """The microbatches of tensors that are split along their first dimension."""
    columns = {stage: [split(v, case) for v in args] for stage, args in step.inputs.items()}
    sizes = [_samples(part) for part in columns[0][0]]
    targets = split_target(step.target, sizes) or [None] * len(sizes)
    rows = [
        {stage: tuple(c[j] for c in cs) for stage, cs in columns.items()} for j in range(len(sizes))
    ]
    return [
        Part(size, {stage: _unpacked(args) for stage, args in row.items()}, {}, target)
        for size, row, target in zip(sizes, rows, targets, strict=True)
    ]


def _unpacked(args: tuple[Any, ...]) -> tuple[Any, ...]:
    """A tuple as the only argument holds them all."""
    return args[0] if len(args) == 1 and isinstance(args[0], tuple) else args


def _weights(case: Case, parts: Sequence[Part], *, has_target: bool) -> list[float]:
    """What each microbatch's loss counts in the batch's."""
    if case.count == "sum":
        return [1.0] * len(parts)
    if callable(case.count) and has_target:
        counts = [float(case.count(part.target)) for part in parts]
    else:
        counts = [float(part.samples) for part in parts]
    return [count / sum(counts) for count in counts]


def _sum_tied(case: Case, stages: list[nn.Module]) -> None:
    """Give every copy of a tied parameter the sum over the copies, in the order of the stages."""
    for owners in case.tied:
        copies = [stages[stage].get_parameter(name) for stage, name in sorted(owners.items())]
        gradients = [each.grad for each in copies if each.grad is not None]
        if not gradients:
            continue
        total = sum(gradients[1:], gradients[0])
        for each in copies:
            each.grad = total.clone()


def _stream(
    case: Case, number: int, microbatch: int, stage: int, *, training: bool
) -> AbstractContextManager[None]:
    """What a stage draws a microbatch's numbers from, where the case has a seed."""
    if "seed" not in case.options:
        return nullcontext()
    phase = Phase.FORWARD if training else Phase.EVALUATION
    return rng_stream(case.options["seed"], number, stage, microbatch, phase=phase)


def _forward(
    case: Case,
    stages: list[nn.Module],
    part: Part,
    streams: Callable[[int], AbstractContextManager[None]],
) -> Any:
    """One microbatch through the stage graph."""
    sent: dict[int, Any] = {}
    for index, module in enumerate(stages):
        sources = [source for source, target in case.graph if target == index]
        arguments = list(part.args.get(index, ())) if not sources else []
        named = part.kwargs.get(index, {}) if not sources else {}
        for source in sources:
            output = sent[source]
            tensors = output if type(output) in (tuple, list) else (output,)
            arguments += [pytree.tree_map_only(Tensor, _cross, tensor) for tensor in tensors]
        with streams(index):
            sent[index] = module(*arguments, **named)
    return sent[len(stages) - 1]


def split(value: Any, case: Case) -> list[Any]:
    """A step's value, by microbatch."""
    if isinstance(value, Microbatches):
        return list(value)
    return list(value.tensor_split(case.microbatches))


def split_target(target: Any, sizes: list[int]) -> list[Any] | None:
    """The target by microbatch, or None without one."""
    if target is None:
        return None
    return list(target) if isinstance(target, Microbatches) else list(target.split(sizes))


def _samples(part: Any) -> int:
    return len(part[0]) if isinstance(part, tuple) else len(part)


def _weighted(losses: list[float], weights: list[float]) -> float | None:
    if not losses:
        return None
    return sum((x * weight for x, weight in zip(losses, weights, strict=True)), start=0.0)


def _optimizers(case: Case, stages: list[nn.Module]) -> list[torch.optim.Optimizer]:
    if case.make_optimizer is None:
        return []
    held = [list(stage.parameters()) for stage in stages]
    return [case.make_optimizer(parameters) for parameters in held if parameters]


def parameters_of(stages: Sequence[nn.Module]) -> Gradients:
    """A copy of every parameter, by stage and name."""
    return {
        f"stage {index} {name}": p.detach().clone()
        for index, stage in enumerate(stages)
        for name, p in stage.named_parameters()
    }


def gradients_of(stages: Sequence[nn.Module]) -> Gradients:
    """A copy of every gradient, by stage and parameter name; None where there is none."""
    return {
        f"stage {index} {name}": None if p.grad is None else p.grad.detach().clone()
        for index, stage in enumerate(stages)
        for name, p in stage.named_parameters()
    }
