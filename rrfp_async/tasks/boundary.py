"""Tensors where they cross from one stage to the next: what leaves, and in what form it enters.

Knows edges and tensors; neither modules nor when anything runs.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from rrfp_async.errors import TransferError
from rrfp_async.gpu.transfer import spec_of
from rrfp_async.ids import TENSORS_ONLY, Edge, Layout, TaskId, TensorSpec
from rrfp_async.tasks.layout import assembled

Export = Callable[[torch.Tensor], torch.Tensor]
"""Makes a tensor sendable."""


@dataclass(frozen=True, slots=True)
class Outgoing:
    """What a task sends over one edge.

    Attributes:
        edge: The stage edge it belongs to.
        specs: One per tensor of the edge; None where there is no gradient.
        tensors: The tensors themselves, one per spec that is not None.
        versions: Their version counters when the task ended.
        layout: The arguments that an activation's tensors are part of.
    """

    edge: Edge
    specs: tuple[TensorSpec | None, ...]
    tensors: tuple[torch.Tensor, ...]
    versions: tuple[int, ...]
    layout: Layout = TENSORS_ONLY

    @classmethod
    def of(
        cls,
        edge: Edge,
        specs: Iterable[TensorSpec | None],
        tensors: Iterable[torch.Tensor],
        layout: Layout = TENSORS_ONLY,
    ) -> "Outgoing":
        """What goes over `edge`, as it is now."""
        sent = tuple(tensors)
        return cls(edge, tuple(specs), sent, tuple(tensor._version for tensor in sent), layout)

    def check_unchanged(self, task: TaskId) -> None:
        """Refuse tensors that were written to after `task` made them.

        Raises:
            TransferError: If one was; the receiver may have got either value.
        """
        if self.versions != tuple(tensor._version for tensor in self.tensors):
            raise TransferError(
                f"stage {task.stage} changed a tensor of {task} in place while it was being sent: "
                f"return a tensor that later microbatches do not write to"
            )


@dataclass(frozen=True, slots=True)
class Activation:
    """What came along an edge for one microbatch: leaf tensors, and the arguments they make."""

    tensors: list[torch.Tensor]
    layout: Layout = TENSORS_ONLY

    def arguments(self) -> tuple[Any, ...]:
        """What the stage's module is called with."""
        return assembled(self.layout, [writable(tensor) for tensor in self.tensors])

    @property
    def wants_gradient(self) -> bool:
        """Whether any gradient is to go back."""
        return any(tensor.requires_grad for tensor in self.tensors)


def outgoing_gradients(
    edge: Edge, gradients: list[torch.Tensor | None], export: Export
) -> Outgoing:
    """What goes back against `edge`: the gradients that there are."""
    specs = (None if gradient is None else spec_of(gradient) for gradient in gradients)
    present = (export(gradient) for gradient in gradients if gradient is not None)
    return Outgoing.of(edge, specs, present)


def copied(tensor: torch.Tensor) -> torch.Tensor:
    """`tensor` for a stage of the same rank: detached, contiguous, in memory of its own."""
    return tensor.detach().clone(memory_format=torch.contiguous_format)


def sum_present(gradients: Iterable[torch.Tensor | None]) -> torch.Tensor | None:
    """The sum of the gradients that there are, in order; None without any."""
    total: torch.Tensor | None = None
    for gradient in gradients:
        if gradient is not None:
            total = gradient if total is None else total + gradient
    return total


def backward_seeds(
    roots: Sequence[torch.Tensor], gradients: Sequence[Sequence[torch.Tensor | None]]
) -> tuple[list[torch.Tensor], list[torch.Tensor | None]]:
    """The tensors to start a backward from, each with its gradient.

    Args:
        roots: A stage's outputs, or its loss.
        gradients: What came back for them, per out-edge; nothing where the loss is.
    """
    if not gradients:
        differentiable = [root for root in roots if root.requires_grad]
        return differentiable, [None] * len(differentiable)
    summed = [sum_present(column) for column in zip(*gradients, strict=True)]
    pairs = [
        (root, seed)
        for root, seed in zip(roots, summed, strict=True)
        if root.requires_grad and seed is not None
    ]
    return [root for root, _ in pairs], [seed for _, seed in pairs]


class _Writable(torch.autograd.Function):
    """The identity, into a tensor of its own over the same memory."""

    @staticmethod
    def forward(ctx: Any, leaf: torch.Tensor) -> torch.Tensor:  # noqa: ARG004 - torch's signature
        place = (leaf.untyped_storage(), leaf.storage_offset(), leaf.size(), leaf.stride())
        written: torch.Tensor = leaf.new_empty(0).set_(*place)
        return written

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> torch.Tensor:  # noqa: ARG004
        return gradients[0]


def writable(leaf: torch.Tensor) -> torch.Tensor:
    """`leaf` as a stage may use it: an in-place first operation is no error, as in one piece."""
    if not leaf.requires_grad:
        return leaf
    written: torch.Tensor = _Writable.apply(leaf)  # type: ignore[no-untyped-call] # torch's
    return written
