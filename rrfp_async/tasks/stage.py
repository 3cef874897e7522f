"""A stage: its module, what has arrived for it, and what autograd must keep until the backward.

`deliver_*` and `take_*` are called on the event loop, `forward` and `backward` on the device's
thread; they share no state but the module and the saved graphs, which only the latter touch.
A stage does not know when it runs or where its results go beyond their edges.
"""

import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.fx.experimental.symbolic_shapes  # or the first backward imports it, in a step
from torch.utils import _pytree as pytree

from rrfp_async.errors import ProtocolError
from rrfp_async.gpu.transfer import spec_of
from rrfp_async.ids import Edge
from rrfp_async.tasks.batch import Arguments
from rrfp_async.tasks.boundary import (
    Export,
    Outgoing,
    copied,
    outgoing_gradients,
    sum_present,
    writable,
)
from rrfp_async.tasks.memory import SavedBytes
from rrfp_async.tasks.split import Deferral, Deferred
from rrfp_async.tasks.split_support import SplitSupport, split_support
from rrfp_async.topology import Topology

LossFn = Callable[[Any, Any], Any]


@dataclass(frozen=True, slots=True)
class StageInputs:
    """What a stage gets from the user in one step.

    Attributes:
        training: Whether gradients are computed.
        zero_gradients: Whether the first accumulation of the step starts from nothing.
        sizes: Samples per microbatch.
        arguments: Arguments per microbatch, on a source stage; else empty.
        targets: Targets per microbatch, on the last stage with a loss; else empty.
        keep_outputs: Whether the last stage keeps its outputs for the step's result.
    """

    training: bool
    zero_gradients: bool
    sizes: tuple[int, ...]
    arguments: Sequence[Arguments] = ()
    targets: Sequence[Any] = ()
    keep_outputs: bool = True


@dataclass(slots=True)
class _Saved:
    """One microbatch between its forward and its backward."""

    inputs: list[list[torch.Tensor]]  # per in-edge, leaves
    roots: tuple[torch.Tensor, ...]
    deferred: Deferred | None


@dataclass(slots=True)
class _Memory:
    """Everything of a stage that lives for one step."""

    inputs: StageInputs
    activations: dict[tuple[Edge, int], list[torch.Tensor]] = field(default_factory=dict)
    gradients: dict[tuple[Edge, int], list[torch.Tensor | None]] = field(default_factory=dict)
    saved: dict[int, _Saved] = field(default_factory=dict)
    deferred: dict[int, Deferred] = field(default_factory=dict)
    losses: dict[int, torch.Tensor] = field(default_factory=dict)
    outputs: dict[int, Any] = field(default_factory=dict)


_NOTHING = StageInputs(training=False, zero_gradients=False, sizes=())


class Stage:
    """One stage of the pipeline on the rank that owns it.

    Attributes:
        kept_bytes: The most that a microbatch was seen to keep until its gradient is accumulated,
            if that is counted; None before.
    """

    def __init__(
        self,
        index: int,
        module: torch.nn.Module,
        topology: Topology,
        loss_fn: LossFn | None,
        *,
        split: bool = False,
        insist: bool = True,
        count_bytes: bool = False,
    ) -> None:
        self.index = index
        self.module = module
        self.split_support = split_support(module, insist=insist)
        self.kept_bytes: int | None = None
        self._counts_bytes = count_bytes
        self._wants_split = split
        self._insists = insist
        self._deferral: Deferral | None = None
        self._found: SplitSupport | None = None
        self._told: SplitSupport | None = None
        self._trained = False
        self.is_source = topology.is_source(index)
        self.is_last = index == topology.last_stage
        self._is_local = topology.is_local
        self._in_edges = topology.in_edges(index)
        self._out_edges = topology.out_edges(index)
        self._loss_fn = loss_fn
        self._memory = _Memory(_NOTHING)
        self._to_zero: list[torch.nn.Parameter] = []
        self._modes: list[tuple[torch.nn.Module, bool]] = []

    @property
    def splits(self) -> bool:
        """Whether the stage's backward is I and W, not B: wanted, and possible."""
        possible = self._wants_split and self.split_support.mode == "deferral"
        return possible and any(p.requires_grad for p in self.module.parameters())

    @property
    def open_microbatches(self) -> int:
        """Microbatches whose forward has run and whose gradient is not yet accumulated."""
        return len(self._memory.saved) + len(self._memory.deferred)

    @property
    def waiting_arrivals(self) -> int:
        """Activations and gradients that have arrived and no task has taken."""
        return len(self._memory.activations) + len(self._memory.gradients)

    def begin_step(self, inputs: StageInputs) -> None:
        """Set up a step. In evaluation the module is in eval mode until the step ends."""
        self._memory = _Memory(inputs)
        self._to_zero = list(self.module.parameters()) if inputs.zero_gradients else []
        if inputs.training and self._wants_split:
            self._look_again()
            if self.splits:
                self._deferral = Deferral(self.module)
                self._deferral.install()
        if not inputs.training:
            self._modes = [(module, module.training) for module in self.module.modules()]
            self.module.eval()

    def end_step(self) -> None:
        """Forget the step, whole or broken, and restore the module's modes and layers."""
        if self._deferral is not None:
            self._deferral.remove()
            self._deferral = None
            self._trained = True
        for module, mode in self._modes:
            module.training = mode
        self._modes = []
        self._memory = _Memory(_NOTHING)

    def deliver_activation(
        self, edge: Edge, microbatch: int, tensors: list[torch.Tensor], wanted: Sequence[bool]
    ) -> None:
        """Keep what came along `edge`; `wanted` tells which tensors need a gradient back."""
        for tensor, gradient_wanted in zip(tensors, wanted, strict=True):
            tensor.requires_grad_(gradient_wanted and self._memory.inputs.training)
        self._memory.activations[edge, microbatch] = tensors

    def deliver_gradient(
        self, edge: Edge, microbatch: int, gradients: list[torch.Tensor | None]
    ) -> None:
        """Keep what came back against `edge`; None stands for "no gradient"."""
        self._memory.gradients[edge, microbatch] = gradients

    def take_activations(self, microbatch: int) -> list[list[torch.Tensor]]:
        """What arrived for the forward of `microbatch`, per in-edge."""
        return [self._memory.activations.pop((edge, microbatch)) for edge in self._in_edges]

    def take_gradients(self, microbatch: int) -> list[list[torch.Tensor | None]]:
        """What arrived for the backward of `microbatch`, per out-edge."""
        return [self._memory.gradients.pop((edge, microbatch)) for edge in self._out_edges]

    def forward(
        self, microbatch: int, activations: list[list[torch.Tensor]], export: Export
    ) -> tuple[Outgoing, ...]:
        """Run the module, and on the last stage the loss.

        Raises:
            TypeError: If the module returns anything but tensors for the next stage, or the loss
                is no scalar tensor.
        """
        memory = self._memory
        arguments = (
            memory.inputs.arguments[microbatch]
            if self.is_source
            else Arguments(tuple(writable(leaf) for leaves in activations for leaf in leaves))
        )
        deferred = None if self._deferral is None else Deferred()
        training = memory.inputs.training
        with (
            torch.set_grad_enabled(training),
            self._deferring(deferred),
            self._counting(microbatch, activations, counted=training) as saved,
        ):
            output = self.module(*arguments.args, **arguments.kwargs)
            roots = self._end(microbatch, output) if self.is_last else self._tensors_of(output)
            if saved is not None:
                saved.add(roots)
        if memory.inputs.training:
            memory.saved[microbatch] = _Saved(activations, roots, deferred)
            self._look_closer(microbatch, roots)
        if self.is_last:
            return ()
        specs = tuple(spec_of(root) for root in roots)
        return tuple(
            Outgoing.of(edge, specs, map(self._way_out(edge, export), roots))
            for edge in self._out_edges
        )

    def backward(
        self, microbatch: int, gradients: list[list[torch.Tensor | None]], export: Export
    ) -> tuple[Outgoing, ...]:
        """Accumulate the module's gradients and return those of its inputs, per in-edge."""
        self._zero_once()
        saved = self._memory.saved.pop(microbatch)
        roots, seeds = self._seeds(saved.roots, gradients)
        if roots:
            torch.autograd.backward(roots, seeds)
        return self._to_inputs([[leaf.grad for leaf in leaves] for leaves in saved.inputs], export)

    def backward_input(
        self, microbatch: int, gradients: list[list[torch.Tensor | None]], export: Export
    ) -> tuple[Outgoing, ...]:
        """I: return the gradients of the module's inputs, per in-edge; W finds the rest."""
        saved = self._memory.saved.pop(microbatch)
        if self._deferral is None or saved.deferred is None:
            raise ProtocolError(f"stage {self.index} was not set up to split its backward")
        self._memory.deferred[microbatch] = saved.deferred
        roots, seeds = self._seeds(saved.roots, gradients)
        if roots:
            self._deferral.backward_input(saved.deferred, roots, seeds)
        if self._counts_bytes:
            kept = SavedBytes(self.module, self._given(microbatch))
            kept.add(saved.deferred.tensors())
            self._note_kept(kept)
        return self._to_inputs([[leaf.grad for leaf in leaves] for leaves in saved.inputs], export)

    def backward_weight(self, microbatch: int) -> tuple[Outgoing, ...]:
        """W: accumulate the gradients of the module's parameters that I left."""
        self._zero_once()
        self._memory.deferred.pop(microbatch).accumulate()
        return ()

    def losses(self) -> list[float]:
        """The loss of every microbatch, unweighted; empty without a target. On the device."""
        losses = self._memory.losses
        return [float(losses[microbatch]) for microbatch in sorted(losses)]

    def outputs(self) -> list[Any]:
        """The kept outputs of every microbatch, detached; empty on other stages than the last."""
        return [self._memory.outputs[microbatch] for microbatch in sorted(self._memory.outputs)]

    @contextmanager
    def _deferring(self, deferred: Deferred | None) -> Iterator[None]:
        if self._deferral is None or deferred is None:
            yield
            return
        with self._deferral.forward(deferred):
            yield

    def _look_closer(self, microbatch: int, roots: tuple[torch.Tensor, ...]) -> None:
        """After the first step's forwards, and each later step's first, know what a graph tells."""
        if self._deferral is None or (self._trained and len(self._memory.saved) > 1):
            return
        inputs = (leaf for leaves in self._memory.saved[microbatch].inputs for leaf in leaves)
        found = self._deferral.study(roots, inputs)
        if found is not None:
            self._found, self.split_support = found, found
            self.warn_if_whole()

    def _look_again(self) -> None:
        """Before a step: a hook, a wrapper or a compilation may have come since."""
        self.split_support = self._found or split_support(self.module, insist=self._insists)
        self.warn_if_whole()

    def warn_if_whole(self) -> None:
        """Warn once, naming the stage, if its backward must be split and cannot be."""
        told, self._told = self._told, self.split_support
        wanted = self._wants_split and self._insists
        if wanted and self.split_support.mode == "full" and told != self._told:
            warnings.warn(
                f"the backward of stage {self.index} is not split, {self.split_support.reason}: "
                f"it runs as a whole (B)",
                RuntimeWarning,
                stacklevel=2,
            )

    @contextmanager
    def _counting(
        self, microbatch: int, activations: list[list[torch.Tensor]], *, counted: bool
    ) -> Iterator[SavedBytes | None]:
        """Note what a forward keeps for its backward, if that is wanted."""
        if not (self._counts_bytes and counted):
            yield None
            return
        with SavedBytes(self.module, self._given(microbatch)) as saved:
            yield saved
        saved.add(tensor for tensors in activations for tensor in tensors)
        self._note_kept(saved)

    def _note_kept(self, saved: SavedBytes) -> None:
        self.kept_bytes = max(self.kept_bytes or 0, saved.total)

    def _given(self, microbatch: int) -> list[torch.Tensor]:
        """The tensors of the user's batch that the stage gets."""
        inputs = self._memory.inputs
        arguments = [(part.args, part.kwargs) for part in inputs.arguments[microbatch:][:1]]
        leaves = pytree.tree_leaves((arguments, list(inputs.targets[microbatch:][:1])))
        return [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]

    def _zero_once(self) -> None:
        """At a step's first accumulation, start from nothing where that was asked for."""
        for parameter in self._to_zero:
            parameter.grad = None
        self._to_zero = []

    def _way_out(self, edge: Edge, export: Export) -> Export:
        """How a tensor leaves over `edge`; one that stays on the rank is copied.

        The stage that gets it may write to it, and what this stage has saved must not change.
        """
        return copied if self._is_local(edge) else export

    def _to_inputs(
        self, gradients: list[list[torch.Tensor | None]], export: Export
    ) -> tuple[Outgoing, ...]:
        """What goes back along every in-edge."""
        return tuple(
            outgoing_gradients(edge, of_edge, self._way_out(edge, export))
            for edge, of_edge in zip(self._in_edges, gradients, strict=True)
        )

    def _end(self, microbatch: int, output: Any) -> tuple[torch.Tensor, ...]:
        memory = self._memory
        if memory.inputs.keep_outputs:
            memory.outputs[microbatch] = pytree.tree_map_only(
                torch.Tensor, torch.Tensor.detach, output
            )
        if self._loss_fn is None or not memory.inputs.targets:
            return ()
        loss = self._loss_fn(output, memory.inputs.targets[microbatch])
        if not isinstance(loss, torch.Tensor) or loss.numel() != 1:
            seen = tuple(loss.shape) if isinstance(loss, torch.Tensor) else type(loss).__name__
            raise TypeError(f"loss_fn returned {seen}, not a scalar tensor: reduce it to one value")
        memory.losses[microbatch] = loss.detach()
        weight = memory.inputs.sizes[microbatch] / sum(memory.inputs.sizes)
        return (loss * weight,)

    def _tensors_of(self, output: Any) -> tuple[torch.Tensor, ...]:
        tensors = tuple(output) if isinstance(output, tuple | list) else (output,)
        for tensor in tensors:
            if not isinstance(tensor, torch.Tensor):
                raise TypeError(
                    f"stage {self.index} returned {type(tensor).__name__} for the next stage: "
                    f"return a tensor or a tuple of tensors"
                )
        return tensors

    def _seeds(
        self, roots: tuple[torch.Tensor, ...], gradients: list[list[torch.Tensor | None]]
    ) -> tuple[list[torch.Tensor], list[torch.Tensor | None]]:
        """The outputs to start the backward from, each with its gradient."""
        if self.is_last:
            differentiable = [root for root in roots if root.requires_grad]
            return differentiable, [None] * len(differentiable)
        summed = [sum_present(column) for column in zip(*gradients, strict=True)]
        pairs = [
            (root, seed)
            for root, seed in zip(roots, summed, strict=True)
            if root.requires_grad and seed is not None
        ]
        return [root for root, _ in pairs], [seed for _, seed in pairs]
