"""The backward in two halves: I computes a stage's input gradients, W its weight gradients.

By deferral: while a stage's forward runs, its `nn.Linear` layers go through an autograd function
whose backward returns the input's gradient and keeps (x, dY). I runs autograd, which computes all
gradients but those; W multiplies dY and x, adds what autograd found for the same parameter, and
accumulates. Every product and sum is the one that torch's own backward would do, in the order in
which it would, so the bits are those of the fused backward. (A third contribution of mixed origin
to one parameter may be added in another order.)

This file knows modules and gradients. It does not know stages, microbatches or when W runs.
"""

import inspect
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.nn import functional

_REENTRANT_NODE = "CheckpointFunctionBackward"
_WRAPPERS = ("FullyShardedDataParallel", "DistributedDataParallel", "FSDPModule")


@dataclass(frozen=True, slots=True)
class SplitSupport:
    """How a module's backward can be split.

    Attributes:
        mode: `deferral`, or `full`: not at all.
        reason: Why not; empty for `deferral`.
    """

    mode: str
    reason: str = ""


def split_support(module: torch.nn.Module) -> SplitSupport:
    """What can be told of `module` before it has run."""
    reason = next(_obstacles(module), None)
    return SplitSupport("deferral") if reason is None else SplitSupport("full", reason)


def _obstacles(module: torch.nn.Module) -> Iterator[str]:
    for name, part in module.named_modules():
        where = f"module {name!r}" if name else "the module"
        kinds = [kind.__name__ for kind in type(part).__mro__]
        if "OptimizedModule" in kinds or getattr(part, "_compiled_call_impl", None) is not None:
            yield f"{where} is compiled"
        if found := next((kind for kind in kinds if kind in _WRAPPERS), None):
            yield f"{where} is wrapped by {found}"
        if _is_reentrant(part):
            yield f"{where} uses reentrant checkpointing"
    for name, parameter in module.named_parameters():
        if parameter._backward_hooks or getattr(parameter, "_post_accumulate_grad_hooks", None):
            yield f"parameter {name!r} has hooks"
        if type(parameter.data).__name__ == "DTensor" or type(parameter).__name__ == "DTensor":
            yield f"parameter {name!r} is a DTensor"


def _is_reentrant(part: torch.nn.Module) -> bool:
    """Whether its source, or its checkpoint wrapper, asks for reentrant checkpointing."""
    wrapped = getattr(part, "checkpoint_impl", None)
    if wrapped is not None:
        return getattr(wrapped, "name", "") == "REENTRANT"
    try:
        source = inspect.getsource(type(part).forward)
    except (OSError, TypeError):
        return False
    return "use_reentrant=True" in source.replace(" ", "")


@dataclass(slots=True)
class _Use:
    """One application of a Linear: what its weight's gradient is made of."""

    weight: torch.nn.Parameter
    bias: torch.nn.Parameter | None
    x: torch.Tensor  # (rows, in features), in the dtype of the product
    gradient: torch.Tensor  # (rows, out features), likewise


@dataclass(slots=True)
class Deferred:
    """What I leaves for W: kept operands, and the gradients that autograd computed.

    Attributes:
        uses: Kept operands, in the order autograd came to them.
        others: Gradients of parameters by other ways.
    """

    uses: list[_Use] = field(default_factory=list)
    others: list[tuple[torch.nn.Parameter, torch.Tensor]] = field(default_factory=list)

    @property
    def kept_bytes(self) -> int:
        """The size of everything that is kept, in bytes."""
        tensors = [tensor for use in self.uses for tensor in (use.x, use.gradient)]
        tensors += [gradient for _, gradient in self.others if not gradient.is_sparse]
        storages = (tensor.untyped_storage() for tensor in tensors)
        return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())

    def accumulate(self) -> None:
        """W: compute the gradients and add each parameter's to its `.grad`."""
        for parameter, gradient, is_ours in self._totals():
            if parameter.grad is None:
                parameter.grad = gradient if is_ours else _owned(gradient, parameter)
            elif parameter.grad.is_sparse or gradient.is_sparse:
                parameter.grad = parameter.grad + gradient
            else:
                parameter.grad.add_(gradient)

    def _totals(self) -> Iterator[tuple[torch.nn.Parameter, torch.Tensor, bool]]:
        """Each parameter, its gradient, and whether that is a fresh tensor of its layout."""
        others = {id(parameter): gradient for parameter, gradient in self.others}
        for parameter, gradient in self._products():
            other = others.pop(id(parameter), None)
            total = gradient.to(parameter.dtype)
            total = total if other is None else total + other
            yield parameter, total, total.stride() == parameter.stride()
        for parameter, gradient in self.others:
            if id(parameter) in others:
                yield parameter, gradient, False

    def _products(self) -> Iterator[tuple[torch.nn.Parameter, torch.Tensor]]:
        """The weights' and biases' gradients from the kept operands, a parameter's uses summed."""
        sums: dict[int, tuple[torch.nn.Parameter, torch.Tensor]] = {}
        for use in self.uses:
            for parameter, gradient in _gradients_of(use):
                held = sums.get(id(parameter))
                total = gradient if held is None else held[1].add_(gradient)
                sums[id(parameter)] = (parameter, total)
        self.uses.clear()
        return iter(sums.values())


def _gradients_of(use: _Use) -> Iterator[tuple[torch.nn.Parameter, torch.Tensor]]:
    if use.weight.requires_grad:
        yield use.weight, _weight_gradient(use)
    if use.bias is not None and use.bias.requires_grad:
        yield use.bias, use.gradient.sum((0,), keepdim=True).view(-1)


def _weight_gradient(use: _Use) -> torch.Tensor:
    """As torch's derivative of mm for its second argument, here the weight transposed."""
    if use.weight.is_contiguous():
        return use.gradient.t().mm(use.x)
    return use.x.t().mm(use.gradient).t()


def _owned(gradient: torch.Tensor, parameter: torch.nn.Parameter) -> torch.Tensor:
    """A copy that nobody else holds, laid out as the parameter where it is dense."""
    if gradient.is_sparse:
        return gradient.clone()
    return torch.empty_like(parameter).copy_(gradient)


@dataclass(frozen=True, slots=True)
class _Call:
    """What an application of a Linear needs besides the tensors that autograd knows."""

    bias: torch.nn.Parameter | None
    used_weight: torch.Tensor  # as it enters the product: cast, under autocast
    used_bias: torch.Tensor | None
    kept: Deferred


class _DeferredLinear(torch.autograd.Function):
    """x @ weight.t() + bias on 2-D x, whose backward keeps what the weight's gradient needs."""

    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        weight: torch.nn.Parameter,
        call: _Call,
    ) -> torch.Tensor:
        ctx.save_for_backward(x, call.used_weight)
        ctx.weight, ctx.bias, ctx.kept = weight, call.bias, call.kept
        return functional.linear(x, call.used_weight, call.used_bias)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        ctx.kept.uses.append(_Use(ctx.weight, ctx.bias, x.detach(), gradient))
        if not ctx.needs_input_grad[0]:
            return None, None, None
        return _input_gradient(gradient, weight, x), None, None


def _input_gradient(gradient: torch.Tensor, weight: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """As torch's derivative of mm for its first argument: column-major where that is."""
    if x.stride(0) == 1 and x.stride(1) == x.size(0):
        return weight.t().mm(gradient.t()).t()
    return gradient.mm(weight)


class Deferral:
    """The deferring layers of one module: exact `nn.Linear`s with a forward of their own."""

    def __init__(self, module: torch.nn.Module) -> None:
        self._linears = [
            part
            for part in module.modules()
            if type(part) is torch.nn.Linear and "forward" not in part.__dict__
        ]
        self._parameters = [p for p in module.parameters() if p.requires_grad]
        self._kept = Deferred()
        self._casts: dict[tuple[int, torch.dtype], torch.Tensor] = {}
        self._reentrant = False

    @contextmanager
    def forward(self, kept: Deferred) -> Iterator[None]:
        """For the length of a forward: what its layers defer goes to `kept`."""
        self._kept = kept
        try:
            yield
        finally:
            self._casts.clear()

    def install(self) -> None:
        """Let the layers defer, until `remove`."""
        for linear in self._linears:
            linear.__dict__["forward"] = self._forward_of(linear)

    def remove(self) -> None:
        """Give the layers their own forward again."""
        for linear in self._linears:
            linear.__dict__.pop("forward", None)

    def backward_input(
        self,
        kept: Deferred,
        roots: list[torch.Tensor],
        seeds: list[torch.Tensor | None],
        leaves: list[torch.Tensor],
    ) -> list[torch.Tensor | None]:
        """I: the gradients of `leaves`; those of parameters are left in `kept`."""
        self._kept = kept  # layers that a reentrant checkpoint runs again defer to it too
        if self._reentrant:
            return self._whole(kept, roots, seeds, leaves)
        wanted = [*leaves, *self._parameters]
        if not wanted:
            return []
        found: Any = torch.autograd.grad(roots, wanted, seeds, allow_unused=True)
        pairs = zip(self._parameters, found[len(leaves) :], strict=True)
        kept.others += [(p, gradient) for p, gradient in pairs if gradient is not None]
        return list(found[: len(leaves)])

    def look_for_reentrant(self, roots: Iterable[torch.Tensor]) -> SplitSupport | None:
        """Whether a reentrant checkpoint made part of `roots`: autograd.grad would refuse."""
        seen: set[Any] = set()
        waiting = [root.grad_fn for root in roots if root.grad_fn is not None]
        while waiting:
            node = waiting.pop()
            if node in seen:
                continue
            seen.add(node)
            if node.name() == _REENTRANT_NODE:
                self._reentrant = True
                return SplitSupport("full", "it uses reentrant checkpointing")
            waiting += [following for following, _ in node.next_functions if following is not None]
        return None

    def _whole(
        self,
        kept: Deferred,
        roots: list[torch.Tensor],
        seeds: list[torch.Tensor | None],
        leaves: list[torch.Tensor],
    ) -> list[torch.Tensor | None]:
        """The whole backward, with the parameters' gradients set aside for W."""
        before = [parameter.grad for parameter in self._parameters]
        for parameter in self._parameters:
            parameter.grad = None
        torch.autograd.backward(roots, seeds)
        for parameter, grad in zip(self._parameters, before, strict=True):
            if parameter.grad is not None:
                kept.others.append((parameter, parameter.grad))
            parameter.grad = grad
        return [leaf.grad for leaf in leaves]

    def _forward_of(self, linear: torch.nn.Linear) -> Callable[[torch.Tensor], torch.Tensor]:
        def forward(input: torch.Tensor) -> torch.Tensor:  # noqa: A002 - nn.Linear's name
            weight: Any = linear.weight
            bias: Any = linear.bias
            if not (torch.is_grad_enabled() and _is_deferrable(weight, bias) and input.dim()):
                return functional.linear(input, weight, bias)
            return self._linear(input, weight, bias)

        return forward

    def _linear(
        self, x: torch.Tensor, weight: torch.nn.Parameter, bias: torch.nn.Parameter | None
    ) -> torch.Tensor:
        """As `functional.linear`, along the same ways: one product with the bias, or two steps."""
        at_once = bias is not None and (x.dim() == 2 or (x.dim() == 3 and x.is_contiguous()))
        dtype = _autocast_dtype(x)
        added = bias if at_once else None
        call = _Call(added, self._as(weight, dtype), self._as(added, dtype), self._kept)
        if dtype is not None:
            x = x.to(dtype)
        rows = x if x.dim() == 2 else x.reshape(-1, x.shape[-1])
        y: torch.Tensor = _DeferredLinear.apply(  # type: ignore[no-untyped-call] # torch's
            rows, weight, call
        )
        if x.dim() != 2:
            y = y.view(*x.shape[:-1], y.shape[-1])
        if bias is None or at_once:
            return y
        return y + (bias if dtype is None else bias.to(dtype))

    def _as(self, parameter: torch.nn.Parameter | None, dtype: torch.dtype | None) -> Any:
        """The parameter as autocast would use it: one cast per forward."""
        if parameter is None or dtype is None or parameter.dtype == torch.float64:
            return None if parameter is None else parameter.detach()
        key = (id(parameter), dtype)
        if key not in self._casts:
            self._casts[key] = parameter.detach().to(dtype)
        return self._casts[key]


def _is_deferrable(weight: Any, bias: Any) -> bool:
    exact = type(weight) is torch.nn.Parameter and weight.requires_grad
    return exact and (bias is None or type(bias) is torch.nn.Parameter)


def _autocast_dtype(x: torch.Tensor) -> torch.dtype | None:
    """The dtype that autocast would give to floating `x`; None without autocast."""
    device = x.device.type
    if not torch.is_autocast_enabled(device) or x.dtype == torch.float64:
        return None
    return torch.get_autocast_dtype(device) if x.is_floating_point() else None
