"""A stage: its module, what has arrived for it, and what autograd must keep until the backward.

`deliver_*` and `take_*` are called on the event loop, `forward` and `backward` on the device's
thread; they share no state but the module and the saved graphs, which only the latter touch.
A stage does not know when it runs or where its results go beyond their edges.
"""

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.fx.experimental.symbolic_shapes  # or the first backward imports it, in a step
from torch.utils import _pytree as pytree

from rrfp_async.errors import ProtocolError
from rrfp_async.gpu.transfer import spec_of
from rrfp_async.ids import TENSORS_ONLY, Edge, Layout
from rrfp_async.tasks.alias import Alias
from rrfp_async.tasks.batch import Arguments
from rrfp_async.tasks.boundary import (
    Activation,
    Export,
    Outgoing,
    backward_seeds,
    copied,
    outgoing_gradients,
)
from rrfp_async.tasks.generators import Streams
from rrfp_async.tasks.layout import flattened
from rrfp_async.tasks.loss import Loss
from rrfp_async.tasks.memory import KeptBytes
from rrfp_async.tasks.split import Deferral, Deferred
from rrfp_async.tasks.split_choice import SplitChoice
from rrfp_async.topology import Topology


@dataclass(frozen=True, slots=True)
class StageInputs:
    """What a stage gets from the user in one step.

    Attributes:
        training: Whether gradients are computed.
        zero_gradients: Whether the first accumulation of the step starts from nothing.
        sizes: Samples per microbatch.
        number: The step's among those of its mode, from 0.
        seed: Of what is drawn in it.
        arguments: Arguments per microbatch, on a source stage; else empty.
        targets: Targets per microbatch, on the last stage with a loss; else empty.
        keep_outputs: Whether the last stage keeps its outputs for the step's result.
    """

    training: bool
    zero_gradients: bool
    sizes: tuple[int, ...]
    number: int = 0
    seed: int = 0
    arguments: Sequence[Arguments] = ()
    targets: Sequence[Any] = ()
    keep_outputs: bool = True


@dataclass(slots=True)
class _Saved:
    """One microbatch between its forward and its backward."""

    inputs: list[Activation]  # per in-edge
    roots: tuple[torch.Tensor, ...]
    deferred: Deferred | None


@dataclass(slots=True)
class _Memory:
    """Everything of a stage that lives for one step."""

    inputs: StageInputs
    activations: dict[tuple[Edge, int], Activation] = field(default_factory=dict)
    gradients: dict[tuple[Edge, int], list[torch.Tensor | None]] = field(default_factory=dict)
    saved: dict[int, _Saved] = field(default_factory=dict)
    deferred: dict[int, Deferred] = field(default_factory=dict)
    outputs: dict[int, Any] = field(default_factory=dict)
    ungraded: set[int] = field(default_factory=set)  # no output wants a gradient


_NOTHING = StageInputs(training=False, zero_gradients=False, sizes=())


class Stage:
    """One stage of the pipeline on the rank that owns it."""

    def __init__(
        self,
        index: int,
        module: torch.nn.Module,
        topology: Topology,
        loss: Loss | None = None,
        *,
        split: bool = False,
        insist: bool = True,
        count_bytes: bool = False,
        streams: Streams | None = None,
    ) -> None:
        self.index = index
        self._streams = streams
        self.module = module
        self._kept = KeptBytes(module, counts=count_bytes)
        self.split_choice = SplitChoice(module, index, wanted=split, insist=insist)
        self._deferral: Deferral | None = None
        self._trained = False
        self.is_source = topology.is_source(index)
        self.is_last = index == topology.last_stage
        self._is_local = topology.is_local
        self._in_edges = topology.in_edges(index)
        self._out_edges = topology.out_edges(index)
        self._loss = loss
        self._memory = _Memory(_NOTHING)
        self._to_zero: list[torch.nn.Parameter] = []
        self._modes: list[tuple[torch.nn.Module, bool]] = []
        self._aliases: list[Alias] = []

    def stand_in(self, parameter: torch.nn.Parameter) -> None:
        """From now on compute with a stand-in for a parameter that another stage here has too."""
        self._aliases.append(Alias(self.module, parameter))

    def complete_gradients(self) -> None:
        """After a training step's last task: what got no gradient in it keeps no older one."""
        self._zero_once()

    def give_tied(self, name: str, gradient: torch.Tensor | None) -> None:
        """Set the gradient that all owners of a tied parameter have in common.

        A stand-in has given its share, and gets none.

        Raises:
            ValueError: If other copies are trained and this one is frozen.
        """
        parameter = self.module.get_parameter(name)
        if gradient is not None and not parameter.requires_grad:
            raise ValueError(
                f"the tied parameter {name!r} of stage {self.index} is frozen and a copy of it on "
                f"another stage is not: set requires_grad alike on all"
            )
        aliased = any(alias.stands_in_as(parameter) for alias in self._aliases)
        parameter.grad = None if aliased else gradient

    @property
    def splits(self) -> bool:
        """Whether the stage's backward is I and W, not B: wanted, and possible."""
        return self.split_choice.splits

    @property
    def kept_bytes(self) -> int | None:
        """The most that a microbatch was seen to keep, if that is counted; None before."""
        return self._kept.most

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
        if self._streams is not None:
            self._streams.reseed(inputs.seed)
        for alias in self._aliases:
            alias.install()
        self._to_zero = list(self.module.parameters()) if inputs.zero_gradients else []
        if self._loss is not None:
            self._loss.begin_step(inputs.targets, inputs.sizes)
        if inputs.training:
            self.split_choice.look_again()
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
        for alias in self._aliases:
            alias.remove()
        for module, mode in self._modes:
            module.training = mode
        self._modes = []
        self._memory = _Memory(_NOTHING)

    def deliver_activation(
        self, edge: Edge, microbatch: int, arrived: Activation, wanted: Sequence[bool]
    ) -> None:
        """Keep what came along `edge`; `wanted` tells which tensors need a gradient back."""
        for tensor, gradient_wanted in zip(arrived.tensors, wanted, strict=True):
            tensor.requires_grad_(gradient_wanted and self._memory.inputs.training)
        self._memory.activations[edge, microbatch] = arrived

    def deliver_gradient(
        self, edge: Edge, microbatch: int, gradients: list[torch.Tensor | None]
    ) -> None:
        """Keep what came back against `edge`; None stands for "no gradient"."""
        self._memory.gradients[edge, microbatch] = gradients

    def take_activations(self, microbatch: int) -> list[Activation]:
        """What arrived for the forward of `microbatch`, per in-edge."""
        return [self._memory.activations.pop((edge, microbatch)) for edge in self._in_edges]

    def take_gradients(self, microbatch: int) -> list[list[torch.Tensor | None]]:
        """What arrived for the backward of `microbatch`, per out-edge that wants a gradient."""
        if microbatch in self._memory.ungraded:
            return []
        return [self._memory.gradients.pop((edge, microbatch)) for edge in self._out_edges]

    def forward(
        self, microbatch: int, activations: list[Activation], export: Export
    ) -> tuple[Outgoing, ...]:
        """Run the module, and on the last stage the loss.

        Raises:
            TypeError: If the module returns something for the next stage that cannot be sent, or
                the loss is no scalar tensor.
        """
        memory = self._memory
        arguments = (
            memory.inputs.arguments[microbatch]
            if self.is_source
            else Arguments(tuple(a for came in activations for a in came.arguments()))
        )
        deferred = None if self._deferral is None else Deferred()
        training = memory.inputs.training
        with (
            self._drawing(memory, microbatch, backward=False),
            torch.set_grad_enabled(training),
            self._deferring(deferred),
            self._kept.in_forward(
                self._given(microbatch), _tensors_of(activations), kept=training
            ) as saved,
        ):
            output = self.module(*arguments.args, **arguments.kwargs)
            roots, layout = self._roots_of(microbatch, output)
            if saved is not None:
                saved.add(roots)
        if training:
            self._keep(memory, microbatch, _Saved(activations, roots, deferred))
        specs = tuple(spec_of(root) for root in roots)
        return tuple(
            Outgoing.of(edge, specs, map(self._way_out(edge, export), roots), layout)
            for edge in self._out_edges
        )

    def wants_gradient(self, microbatch: int) -> bool:
        """After a forward: whether a gradient comes back for it, over every out-edge or none."""
        return microbatch not in self._memory.ungraded

    def is_settled(self, microbatch: int) -> bool:
        """After a forward: whether there is nothing that its backward would have to do."""
        return not self.wants_gradient(microbatch) and microbatch not in self._memory.saved

    def backward(
        self, microbatch: int, gradients: list[list[torch.Tensor | None]], export: Export
    ) -> tuple[Outgoing, ...]:
        """Accumulate the module's gradients and return those of its inputs, per in-edge."""
        self._zero_once()
        saved = self._memory.saved.pop(microbatch, None)
        if saved is None:
            return ()
        roots, seeds = backward_seeds(saved.roots, gradients)
        if roots:
            with self._drawing(self._memory, microbatch, backward=True):
                torch.autograd.backward(roots, seeds)
        return self._to_inputs(saved.inputs, export)

    def backward_input(
        self, microbatch: int, gradients: list[list[torch.Tensor | None]], export: Export
    ) -> tuple[Outgoing, ...]:
        """I: return the gradients of the module's inputs, per in-edge; W finds the rest."""
        saved = self._memory.saved.pop(microbatch, None)
        if saved is None:
            return ()
        if self._deferral is None or saved.deferred is None:
            raise ProtocolError(f"stage {self.index} was not set up to split its backward")
        self._memory.deferred[microbatch] = saved.deferred
        roots, seeds = backward_seeds(saved.roots, gradients)
        if roots:
            with self._drawing(self._memory, microbatch, backward=True):
                self._deferral.backward_input(saved.deferred, roots, seeds)
        self._kept.after_input_gradient(self._given(microbatch), saved.deferred.tensors)
        return self._to_inputs(saved.inputs, export)

    def backward_weight(self, microbatch: int) -> tuple[Outgoing, ...]:
        """W: accumulate the gradients of the module's parameters that I left."""
        self._zero_once()
        deferred = self._memory.deferred.pop(microbatch, None)
        if deferred is not None:
            deferred.accumulate()
        return ()

    def losses(self) -> tuple[list[float], float | None]:
        """Every microbatch's loss and the batch's; nothing without a target. On the device."""
        if self._loss is None:
            return [], None
        losses = self._loss.losses()
        return losses, self._loss.total(losses)

    def outputs(self) -> list[Any]:
        """The kept outputs of every microbatch, detached; empty on other stages than the last."""
        return [self._memory.outputs[microbatch] for microbatch in sorted(self._memory.outputs)]

    def _drawing(
        self, memory: _Memory, microbatch: int, *, backward: bool
    ) -> AbstractContextManager[None]:
        """What is drawn inside depends on the microbatch, and not on the order of tasks."""
        number, training = memory.inputs.number, memory.inputs.training
        if self._streams is None:
            return nullcontext()
        if backward:
            return self._streams.backward(number, microbatch)
        return self._streams.forward(number, microbatch, training=training)

    @contextmanager
    def _deferring(self, deferred: Deferred | None) -> Iterator[None]:
        if self._deferral is None or deferred is None:
            yield
            return
        with self._deferral.forward(deferred):
            yield

    def _keep(self, memory: _Memory, microbatch: int, saved: _Saved) -> None:
        """Keep what a backward needs, if there is to be one; in a step that may have ended."""
        graded = any(root.requires_grad for root in saved.roots)
        if not graded:
            memory.ungraded.add(microbatch)
        if graded or any(came.wants_gradient for came in saved.inputs):
            memory.saved[microbatch] = saved
            self._look_closer(saved)

    def _look_closer(self, saved: _Saved) -> None:
        """After the first step's forwards, and each later step's first, know what a graph tells."""
        if self._deferral is None or (self._trained and len(self._memory.saved) > 1):
            return
        self.split_choice.look_closer(self._deferral, saved.roots, _tensors_of(saved.inputs))

    def _given(self, microbatch: int) -> Iterator[torch.Tensor]:
        """The tensors of the user's batch that the stage gets."""
        inputs = self._memory.inputs
        arguments = [(part.args, part.kwargs) for part in inputs.arguments[microbatch:][:1]]
        for leaf in pytree.tree_leaves((arguments, list(inputs.targets[microbatch:][:1]))):
            if isinstance(leaf, torch.Tensor):
                yield leaf

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

    def _to_inputs(self, inputs: list[Activation], export: Export) -> tuple[Outgoing, ...]:
        """What goes back along every in-edge that wants something."""
        return tuple(
            outgoing_gradients(
                edge, [leaf.grad for leaf in came.tensors], self._way_out(edge, export)
            )
            for edge, came in zip(self._in_edges, inputs, strict=True)
            if came.wants_gradient
        )

    def _roots_of(self, microbatch: int, output: Any) -> tuple[tuple[torch.Tensor, ...], Layout]:
        """Where the backward starts: the loss, or what is sent and how it is put together."""
        if not self.is_last:
            try:
                return flattened(output)
            except TypeError as error:
                raise TypeError(f"stage {self.index} returned {error}") from error
        memory = self._memory
        if memory.inputs.keep_outputs:
            memory.outputs[microbatch] = pytree.tree_map_only(
                torch.Tensor, torch.Tensor.detach, output
            )
        root = self._loss.root(microbatch, output) if self._loss else None
        return (() if root is None else (root,)), TENSORS_ONLY


def _tensors_of(activations: Sequence[Activation]) -> Iterator[torch.Tensor]:
    return (tensor for came in activations for tensor in came.tensors)
