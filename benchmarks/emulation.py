"""Stages that take the time they are told to, inside autograd, and note when they took it.

Processes' sleeps overlap as GPUs' kernels do, so a pipeline of more stages than this machine has
cores can be timed on it, under any system: the same modules run in torch's schedules and in ours.

A stage is one layer: a real product with a real weight, so that gradients can be compared, and a
sleep for each of F, I and W. Its backward sleeps for what really runs. torch's split backward runs
an autograd function twice, once for its input and once for its weight: the layer asks the engine
which of them is wanted, else it would sleep for both both times. Under rrfp_async it leaves its
weight's gradient, and the sleep that stands for it, in the microbatch's `WeightGradStore`.
"""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

import rrfp_async

Duration = Callable[[str, int], float]
"""Seconds of a kind (`F`, `I` or `W`) of a microbatch."""


@dataclass(frozen=True, slots=True)
class Span:
    """When a part of a task ran, in seconds of `time.perf_counter`, which processes share."""

    kind: str
    stage: int
    microbatch: int
    begun_s: float
    ended_s: float


@dataclass(slots=True)
class Emulated:
    """How long a stage's tasks take in the current step, and what they took.

    Attributes:
        stage: Its global index.
        duration: Looked up by kind and microbatch.
        spans: What ran, in that order; emptied by whoever reads it.
    """

    stage: int
    duration: Duration
    spans: list[Span] = field(default_factory=list)

    @contextmanager
    def taking(self, kind: str, microbatch: int) -> Iterator[None]:
        """Sleep for as long as `kind` of `microbatch` takes, then note it with what is done."""
        begun_s = time.perf_counter()
        time.sleep(self.duration(kind, microbatch))
        yield
        self.spans.append(Span(kind, self.stage, microbatch, begun_s, time.perf_counter()))


class SleepingLayer(nn.Module):
    """A linear layer on `(batch, width)` whose F, I and W take as long as `emulated` says.

    Column 0 passes through unchanged: it carries the number of the microbatch.
    """

    def __init__(self, width: int, emulated: Emulated, seed: int) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(1000 * seed + emulated.stage)
        weight = torch.randn(width, width, generator=generator) / width**0.5
        weight[0, :] = weight[:, 0] = 0.0
        weight[0, 0] = 1.0
        self.weight = nn.Parameter(weight)
        first = emulated.stage == 0
        self.shift = nn.Parameter(torch.zeros(width)) if first else None  # so that it has an I
        self.emulated = emulated

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """`(batch, width)` in, the same out."""
        x = x if self.shift is None else x + self.shift
        y: torch.Tensor = _Layer.apply(x, self.weight, self.emulated)
        return y


class _Layer(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, weight: nn.Parameter, emulated: Emulated
    ) -> torch.Tensor:
        ctx.save_for_backward(x)
        ctx.weight, ctx.emulated = weight, emulated
        ctx.store = rrfp_async.weight_grad_store()
        ctx.microbatch = round(x[0, 0].item())
        with emulated.taking("F", ctx.microbatch):
            return x @ weight.t()

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        (x,) = ctx.saved_tensors
        weight = ctx.weight
        emulated, microbatch = ctx.emulated, ctx.microbatch
        for_x = for_weight = None
        if _is_wanted(ctx, 0):
            with emulated.taking("I", microbatch):
                for_x = gradients[0] @ weight

        def compute(gradient: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
            with emulated.taking("W", microbatch):
                return gradient.t() @ x

        if _is_wanted(ctx, 1) and not ctx.store.put(weight, compute, gradients[0], x):
            for_weight = compute(gradients[0], x)
        return for_x, for_weight, None


def _is_wanted(ctx: Any, position: int) -> bool:
    """Whether the backward that runs wants the gradient of that input."""
    node = ctx.next_functions[position][0]
    try:
        return node is not None and torch._C._will_engine_execute_node(node)
    except RuntimeError:  # a leaf that autograd.grad was asked for, which it cannot answer
        return True


def batch_of(microbatches: int, rows: int, width: int) -> torch.Tensor:
    """`(microbatches * rows, width)`: column 0 is the number of the microbatch."""
    batch = torch.linspace(-1.0, 1.0, microbatches * rows * width).reshape(-1, width)
    batch[:, 0] = torch.arange(microbatches).repeat_interleave(rows)
    return batch
