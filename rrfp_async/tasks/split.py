"""The backward in two halves: I computes a stage's input gradients, W its weight gradients.

By deferral: while a stage's forward runs, its `nn.Linear` layers go through an autograd function
whose backward returns the input's gradient and keeps (x, dY). I runs autograd, which computes all
gradients but those, and sets them aside; W multiplies dY and x, adds what was set aside for the
same parameter, and accumulates. Every product and sum is the one that torch's own backward would
do, so the bits are those of the fused backward. (To rounding only: a weight that autocast casts
more than once in one forward.)

This file knows modules and gradients. It does not know stages, microbatches or when W runs.
"""

import functools
import math
import types
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.nn import functional

from rrfp_async.tasks.split_support import SplitSupport
from rrfp_async.tasks.weight_grad_store import PutOff, WeightGradStore, has_store, storing

_REENTRANT_NODE = "CheckpointFunctionBackward"
_DIMS_PROBED = range(1, 9)


@dataclass(slots=True)
class _Use:
    """One application of a Linear: what its weight's gradient is made of."""

    weight: torch.nn.Parameter
    bias: torch.nn.Parameter | None
    x: torch.Tensor  # (rows, in features), in the dtype of the product
    version: int  # of x, when I ran
    cast: int  # equal for uses of one cast of the weight
    gradient: torch.Tensor  # (rows, out features), likewise
    for_bias: torch.Tensor | None  # summed in I, while the gradient is at hand

    def tensors(self) -> tuple[torch.Tensor, ...]:
        """What is kept."""
        return self.x, self.gradient

    def products(self) -> Iterator[tuple[torch.nn.Parameter, torch.Tensor]]:
        """The gradients of the weight and of the bias.

        Raises:
            RuntimeError: If x was written to since I.
        """
        if self.x._version != self.version:
            raise RuntimeError(
                f"the input {tuple(self.x.shape)} of a Linear was modified in place before the "
                f"gradient of its weight was computed: do not reuse it for another microbatch"
            )
        if self.weight.requires_grad:
            yield self.weight, _weight_gradient(self.gradient, self.weight, self.x)
        if self.bias is not None and self.for_bias is not None:
            yield self.bias, self.for_bias


@dataclass(slots=True)
class Deferred:
    """What I leaves for W: kept operands, and the gradients that autograd computed.

    Attributes:
        uses: Kept operands, in the order autograd came to them.
        others: Gradients of parameters by other ways, each in a tensor of its own.
        collecting: Whether I is running for it.
    """

    uses: list[_Use | PutOff] = field(default_factory=list)
    others: list[tuple[torch.Tensor, torch.Tensor]] = field(default_factory=list)
    collecting: bool = False

    def tensors(self) -> list[torch.Tensor]:
        """Everything that is kept."""
        operands = [tensor for use in self.uses for tensor in use.tensors()]
        return operands + [gradient for _, gradient in self.others]

    def accumulate(self) -> None:
        """W: compute the gradients and add each parameter's to its `.grad`.

        Raises:
            RuntimeError: If a kept operand was written to since I.
        """
        for parameter, gradient in self._totals():
            if parameter.grad is None:
                parameter.grad = gradient
            elif parameter.grad.is_sparse and not gradient.is_sparse:
                parameter.grad = gradient + parameter.grad
            else:
                parameter.grad.add_(gradient)
        self.uses.clear()
        self.others.clear()

    def _totals(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Each parameter and its gradient, in a tensor of its own and of the parameter's layout."""
        others = {id(parameter): gradient for parameter, gradient in self.others}
        parameter: torch.Tensor
        for parameter, gradient in self._products():
            other = others.pop(id(parameter), None)
            total = gradient if other is None else gradient + other
            if total.stride() != parameter.stride():
                total = torch.empty_like(parameter).copy_(total)
            yield parameter, total
        for parameter, gradient in self.others:
            if id(parameter) in others:
                yield parameter, gradient

    def _products(self) -> Iterator[tuple[torch.nn.Parameter, torch.Tensor]]:
        """The gradients from the kept operands: summed as they were cast, then in full."""
        sums: dict[tuple[int, int], tuple[torch.nn.Parameter, torch.Tensor]] = {}
        for use in self.uses:
            for parameter, gradient in use.products():
                key = (id(parameter), use.cast)
                total = sums[key][1].add_(gradient) if key in sums else gradient
                sums[key] = (parameter, total)
        full: dict[int, tuple[torch.nn.Parameter, torch.Tensor]] = {}
        for parameter, gradient in sums.values():
            cast = gradient.to(parameter.dtype)
            held = full.get(id(parameter))
            full[id(parameter)] = (parameter, cast if held is None else held[1] + cast)
        return iter(full.values())


def _weight_gradient(gradient: torch.Tensor, weight: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """As torch's derivative of mm for its second argument, here the weight transposed."""
    if weight.is_contiguous():
        return gradient.t().mm(x)
    return x.t().mm(gradient).t()


def _input_gradient(gradient: torch.Tensor, weight: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """As torch's derivative of mm for its first argument: column-major where that is."""
    if x.stride(0) == 1 and x.stride(1) == x.size(0):
        return weight.t().mm(gradient.t()).t()
    return gradient.mm(weight)


@dataclass(frozen=True, slots=True)
class _Call:
    """What an application of a Linear needs besides the tensors that autograd knows."""

    used_weight: torch.Tensor  # as it enters the product: cast, under autocast
    used_bias: torch.Tensor | None
    cast: int
    kept: Deferred
    undeferred: set[int]  # parameters whose gradients are left to autograd


class _DeferredLinear(torch.autograd.Function):
    """x @ weight.t() + bias on 2-D x, whose backward keeps what the weight's gradient needs."""

    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        weight: torch.nn.Parameter,
        bias: torch.nn.Parameter | None,
        call: _Call,
    ) -> torch.Tensor:
        ctx.save_for_backward(x, call.used_weight)
        ctx.weight, ctx.bias, ctx.call = weight, bias, call
        return functional.linear(x, call.used_weight, call.used_bias)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        x, used_weight = ctx.saved_tensors
        call: _Call = ctx.call
        if not call.kept.collecting or id(ctx.weight) in call.undeferred:
            return (*_at_once(ctx, gradient, x), None)
        for_x, _, for_bias = ctx.needs_input_grad[:3]
        bias_gradient = gradient.sum(0) if for_bias else None
        call.kept.uses.append(
            _Use(ctx.weight, ctx.bias, x.detach(), x._version, call.cast, gradient, bias_gradient)
        )
        return (_input_gradient(gradient, used_weight, x) if for_x else None), None, None, None


def _at_once(ctx: Any, gradient: torch.Tensor, x: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
    """All gradients, as operations that can be differentiated again: nobody collects."""
    weight: torch.Tensor = ctx.weight.to(x.dtype)
    for_x, for_weight, for_bias = ctx.needs_input_grad[:3]
    return (
        _input_gradient(gradient, weight, x) if for_x else None,
        _weight_gradient(gradient, weight, x).to(ctx.weight.dtype) if for_weight else None,
        gradient.sum(0).to(ctx.bias.dtype) if for_bias else None,
    )


class _Forward:
    """Stands where a deferring layer's `forward` was. A copy of the layer has its own again."""

    def __init__(self, deferral: "Deferral", linear: torch.nn.Linear) -> None:
        self._deferral = deferral
        self._linear = linear

    def __call__(self, input: torch.Tensor) -> torch.Tensor:  # noqa: A002 - nn.Linear's name
        linear = self._linear
        if _is_deferrable(input, linear.weight, linear.bias):
            return self._deferral.linear(input, linear.weight, linear.bias)
        return functional.linear(input, linear.weight, linear.bias)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        return types.MethodType(torch.nn.Linear.forward, memo.get(id(self._linear), self._linear))


class Deferral:
    """The deferring layers of one module: exact `nn.Linear`s with a forward of their own."""

    def __init__(self, module: torch.nn.Module) -> None:
        self._linears = [
            part
            for part in module.modules()
            if type(part) is torch.nn.Linear and "forward" not in part.__dict__
        ]
        self._leaves: dict[int, torch.Tensor] = {
            id(parameter): parameter for parameter in module.parameters() if parameter.requires_grad
        }
        self._undeferred: set[int] = set()
        self._kept = Deferred()
        self._casts: dict[tuple[int, torch.dtype], torch.Tensor] = {}
        self._casts_made = 0
        self._bias_at_once = {dim: _adds_bias_at_once(dim) for dim in _DIMS_PROBED}

    @contextmanager
    def forward(self, kept: Deferred) -> Iterator[None]:
        """For the length of a forward: what its layers defer goes to `kept`."""
        self._kept = kept
        store = WeightGradStore(kept.uses.append, lambda: kept.collecting, self._can_put_off)
        try:
            with storing(store):
                yield
        finally:
            self._casts.clear()

    def _can_put_off(self, weight: torch.Tensor) -> bool:
        """Whether it is a leaf that gets a gradient, in an order that W can keep."""
        return self._leaves.get(id(weight)) is weight and id(weight) not in self._undeferred

    def install(self) -> None:
        """Let the layers defer, until `remove`."""
        for linear in self._linears:
            linear.__dict__["forward"] = _Forward(self, linear)

    def remove(self) -> None:
        """Give the layers their own forward again."""
        for linear in self._linears:
            linear.__dict__.pop("forward", None)

    def backward_input(
        self, kept: Deferred, roots: list[torch.Tensor], seeds: list[torch.Tensor | None]
    ) -> None:
        """I: compute the gradients of the graph's leaves; those of parameters go to `kept`."""
        self._kept = kept  # what a reentrant checkpoint runs again defers to it too
        before = [(leaf, leaf.grad) for leaf in self._leaves.values()]
        for leaf, _ in before:
            leaf.grad = None
        kept.collecting = True
        try:
            torch.autograd.backward(roots, seeds)
        finally:
            kept.collecting = False
            self._kept = Deferred()
            for leaf, grad in before:
                if leaf.grad is not None:
                    kept.others.append((leaf, leaf.grad))
                leaf.grad = grad

    def study(
        self, roots: Iterable[torch.Tensor], inputs: Iterable[torch.Tensor]
    ) -> SplitSupport | None:
        """Learn from a forward's graph what the module does not tell.

        Leaves besides the parameters (a loss function's, say) are set aside as those are.
        Parameters that get three or more contributions, by different ways, are not deferred: only
        autograd knows in which order it adds them.

        Returns:
            What to do from the next step on, if reentrant checkpointing was found.
        """
        own = {id(tensor) for tensor in inputs}
        ways: defaultdict[int, Counter[str]] = defaultdict(Counter)
        support = None
        for node, following in _edges(roots):
            if node.name() == _REENTRANT_NODE:
                support = SplitSupport("full", "it uses reentrant checkpointing")
            leaf = getattr(following, "variable", None)
            if leaf is None or id(leaf) in own:
                continue
            self._leaves.setdefault(id(leaf), leaf)
            ways[id(leaf)][_way(node)] += 1
        self._undeferred |= {
            key for key, of_leaf in ways.items() if len(of_leaf) > 1 and of_leaf.total() >= 3
        }
        return support

    def linear(
        self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None
    ) -> torch.Tensor:
        """As `functional.linear`, along the same ways: one product with the bias, or two steps."""
        dtype = _autocast_dtype(x)
        x = x if dtype is None else x.to(dtype)
        at_once = bias is not None and (
            x.dim() == 2 or (x.is_contiguous() and self._bias_at_once.get(x.dim(), False))
        )
        added = bias if at_once else None
        used_weight, used_bias = self._as(weight, dtype), self._as(added, dtype)
        shared = dtype is None or torch.is_autocast_cache_enabled()
        cast = hash(dtype) if shared else self._casts_made
        call = _Call(used_weight, used_bias, cast, self._kept, self._undeferred)
        rows = x if x.dim() == 2 else x.reshape(math.prod(x.shape[:-1]), x.shape[-1])
        y: torch.Tensor = _DeferredLinear.apply(rows, weight, added, call)  # type: ignore[no-untyped-call] # torch's
        if x.dim() != 2:
            y = y.view(*x.shape[:-1], y.shape[-1])
        if bias is None or at_once:
            return y
        return y + (bias if dtype is None else bias.to(dtype))

    def _as(self, parameter: torch.Tensor | None, dtype: torch.dtype | None) -> Any:
        """The parameter as autocast would use it: one cast per forward."""
        if parameter is None or dtype is None or parameter.dtype == torch.float64:
            return None if parameter is None else parameter.detach()
        key = (id(parameter), dtype)
        if key not in self._casts or not torch.is_autocast_cache_enabled():
            self._casts_made += 1
            self._casts[key] = parameter.detach().to(dtype)
        return self._casts[key]


def _is_deferrable(x: Any, weight: Any, bias: Any) -> bool:
    """Whether a Linear may go another way: plain tensors, and nothing but ordinary autograd."""
    plain = type(x) in (torch.Tensor, torch.nn.Parameter) and x.layout is torch.strided
    exact = type(weight) is torch.nn.Parameter and weight.requires_grad
    known = bias is None or type(bias) is torch.nn.Parameter
    ordinary = (
        torch.is_grad_enabled()
        and torch._C._functorch.peek_interpreter_stack() is None
        and torch.autograd.forward_ad._current_level < 0
        and not torch.compiler.is_compiling()
    )
    return plain and exact and known and ordinary and x.dim() > 0 and not weight.is_complex()


def _autocast_dtype(x: torch.Tensor) -> torch.dtype | None:
    """The dtype that autocast would give to floating `x`; None without autocast."""
    device = x.device.type
    if not torch.is_autocast_enabled(device) or x.dtype == torch.float64:
        return None
    return torch.get_autocast_dtype(device) if x.is_floating_point() else None


@functools.cache  # one torch in a process
def _adds_bias_at_once(dim: int) -> bool:
    """Whether this torch adds the bias in the product, for contiguous inputs of that dimension."""
    weight, bias = torch.zeros(1, 1, requires_grad=True), torch.zeros(1, requires_grad=True)
    with torch.enable_grad(), torch.autocast("cpu", enabled=False):
        node = functional.linear(torch.zeros((1,) * dim), weight, bias).grad_fn
    return node is not None and not node.name().startswith("Add")


def _way(node: Any) -> str:
    """By what a leaf's gradient comes: a Linear, a layer with a store, or autograd alone."""
    if node.name() == "_DeferredLinearBackward":
        return "linear"
    return "store" if has_store(node) else "autograd"


def _edges(roots: Iterable[torch.Tensor]) -> Iterator[tuple[Any, Any]]:
    """Every node of the graph with each node that follows it."""
    waiting = [root.grad_fn for root in roots if root.grad_fn is not None]
    seen = set(waiting)
    while waiting:
        node = waiting.pop()
        for following, _ in node.next_functions:
            if following is None:
                continue
            yield node, following
            if following not in seen:
                seen.add(following)
                waiting.append(following)
