"""One stage, driven by hand with its backward split, beside plain autograd on a copy of its module.

Both run the same microbatches through the same forwards in the same order; autograd then runs the
backwards in microbatch order, the stage its I in another order and its W in microbatch order, put
off as the case says. Everything is compared bit for bit.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from rrfp_async.ids import Edge
from rrfp_async.tasks.boundary import Activation
from rrfp_async.tasks.build import build_stages
from rrfp_async.tasks.loss import Loss
from rrfp_async.tasks.split_support import split_support
from rrfp_async.tasks.stage import Stage, StageInputs
from rrfp_async.topology import Topology

MICROBATCHES = 3
LAST, MIDDLE = "last", "middle"
PLACES = (LAST, MIDDLE)

Inputs = Callable[[int], tuple[Tensor, ...]]


def tensors_in(output: Any) -> tuple[Tensor, ...]:
    """A module's output as a tuple."""
    return tuple(output) if isinstance(output, tuple | list) else (output,)


def mean_square(output: Any, _target: Any) -> Tensor:
    """A loss whose gradients are dense, of any outputs."""
    return sum(t.abs().double().pow(2).mean() for t in tensors_in(output) if t.requires_grad)


def summed(output: Any, _target: Any) -> Tensor:
    """A loss whose gradients are expanded from one number."""
    return sum(t.sum() for t in tensors_in(output) if t.requires_grad)


@dataclass(frozen=True)
class Case:
    """A module, its inputs for each microbatch, and what is done with its outputs.

    `inputs` makes what arrives; floating tensors get a gradient. `seeds_of` makes the gradients
    that come back, of the outputs; `loss_fn` is used where the stage is the last.
    """

    name: str
    make: Callable[[], nn.Module]
    inputs: Inputs
    loss_fn: Callable[[Any, Any], Tensor] = mean_square
    seeds_of: Callable[[Tensor], Tensor | None] = torch.cos
    microbatches: int = MICROBATCHES
    places: tuple[str, ...] = PLACES
    wants_gradient: bool = True

    def __str__(self) -> str:
        return self.name


@dataclass(frozen=True)
class Order:
    """How the split backwards are dispatched: I's order, and how many I's each W is behind."""

    name: str
    first_inputs: tuple[int, ...]
    put_off: int

    def __str__(self) -> str:
        return self.name

    def tasks(self) -> Iterator[tuple[str, int]]:
        """("I" or "W", microbatch) in order: a W once its I, those before and the delay allow."""
        done: set[int] = set()
        weights = 0
        for index, microbatch in enumerate(self.first_inputs):
            yield "I", microbatch
            done.add(microbatch)
            while weights in done and index - weights >= self.put_off:
                yield "W", weights
                weights += 1
        yield from (("W", index) for index in range(weights, len(self.first_inputs)))


AT_ONCE = Order("W at once", (0, 1, 2), 0)
SHUFFLED = Order("I out of order", (2, 0, 1), 0)
PUT_OFF = Order("W last", (1, 2, 0), 9)
SOME_ORDERS = (SHUFFLED, PUT_OFF)
ALL_ORDERS = (AT_ONCE, SHUFFLED, PUT_OFF)


@dataclass
class Found:
    """All that a run computed, by name."""

    values: dict[str, Tensor | None] = field(default_factory=dict)

    def note(self, name: str, value: Tensor | None) -> None:
        """Keep a copy of `value`."""
        assert name not in self.values
        if isinstance(value, DTensor):
            value = value.full_tensor()
        self.values[name] = None if value is None else value.detach().clone()

    def differences(self, other: "Found") -> list[str]:
        """What is not the same, bit for bit; in words."""
        names = [*self.values, *(name for name in other.values if name not in self.values)]
        pairs = [(name, self.values.get(name), other.values.get(name)) for name in names]
        return [f"{name}: {_told(a, b)}" for name, a, b in pairs if not _same(a, b)]


def _same(a: Tensor | None, b: Tensor | None) -> bool:
    if a is None or b is None:
        return a is b
    if (a.dtype, a.shape, a.layout) != (b.dtype, b.shape, b.layout):
        return False
    return torch.equal(*(t.to_dense() if t.is_sparse else t for t in (a, b)))


def _told(a: Tensor | None, b: Tensor | None) -> str:
    if a is None or b is None or a.shape != b.shape or a.dtype != b.dtype:
        kinds = [None if t is None else (t.dtype, tuple(t.shape), t.layout) for t in (a, b)]
        return f"{kinds[0]} became {kinds[1]}"
    return f"differs by {(a.to_dense() - b.to_dense()).abs().max().item():.3g}"


def leaves_of(case: Case, microbatch: int) -> list[Tensor]:
    """What arrives for a microbatch."""
    torch.manual_seed(1000 + microbatch)
    return [_wanting(tensor, case) for tensor in case.inputs(microbatch)]


def _wanting(tensor: Tensor, case: Case) -> Tensor:
    differentiable = tensor.is_floating_point() or tensor.is_complex()
    return tensor.detach().requires_grad_(case.wants_gradient and differentiable)


def _seed_of(case: Case, output: Tensor) -> Tensor | None:
    return case.seeds_of(output.detach()) if output.requires_grad else None


# -- plain autograd ----------------------------------------------------------------------------


def run_fused(case: Case, module: nn.Module, place: str, *, zero: bool = True) -> Found:
    """A step of plain autograd on `module`."""
    found = Found()
    inputs = [leaves_of(case, index) for index in range(case.microbatches)]
    if zero:
        module.zero_grad(set_to_none=True)
    torch.manual_seed(5)
    outputs_of = [_forward(module, leaves, found, i) for i, leaves in enumerate(inputs)]
    roots = [_roots(case, output, place, found, i) for i, output in enumerate(outputs_of)]
    for index, (outputs, seeds) in enumerate(roots):
        pairs = [p for p in zip(outputs, seeds, strict=True) if _starts(place, *p)]
        if pairs:
            torch.autograd.backward([o for o, _ in pairs], [s for _, s in pairs])
        for number, leaf in enumerate(inputs[index]):
            found.note(f"gradient of input {number}, microbatch {index}", leaf.grad)
    _note_state(found, module)
    return found


def _starts(place: str, root: Tensor, seed: Tensor | None) -> bool:
    return root.requires_grad and (place == LAST or seed is not None)


def _forward(module: nn.Module, leaves: list[Tensor], found: Found, index: int) -> Any:
    output = module(*leaves)
    for number, tensor in enumerate(tensors_in(output)):
        found.note(f"output {number}, microbatch {index}", tensor)
    return output


def _roots(
    case: Case, output: Any, place: str, found: Found, index: int
) -> tuple[list[Tensor], list[Tensor | None]]:
    if place == MIDDLE:
        outputs = list(tensors_in(output))
        return outputs, [_seed_of(case, tensor) for tensor in outputs]
    loss = case.loss_fn(output, None)
    found.note(f"loss, microbatch {index}", loss.detach().float())
    return [loss * (1 / case.microbatches)], [None]


def _note_state(found: Found, module: nn.Module) -> None:
    for name, parameter in module.named_parameters():
        found.note(f"gradient of {name}", parameter.grad)
    for name, buffer in module.named_buffers():
        found.note(f"buffer {name}", buffer)


# -- a stage -----------------------------------------------------------------------------------


def make_stage(
    case: Case, module: nn.Module, place: str, *, split: bool = True, insist: bool = True
) -> Stage:
    """`module` as stage 1, the last or between others; warns if it must and cannot be split."""
    topology = Topology(2 if place == LAST else 3)
    return build_stages(module, topology, 1, Loss(case.loss_fn), split=split, insist=insist)[1]


def run_split(case: Case, stage: Stage, order: Order, place: str, *, zero: bool = True) -> Found:
    """A step of the stage by hand, with I and W if it splits, else with B."""
    run = StageRun(case, stage, place)
    with run.step(zero=zero):
        for index in range(case.microbatches):
            run.forward(index)
        for kind, index in order.tasks():
            if not run.is_split:
                if kind == "W":
                    run.backward(index)
            elif kind == "I":
                run.backward_input(index)
            else:
                run.backward_weight(index)
        run.note_losses()
    _note_state(run.found, stage.module)
    return run.found


class StageRun:
    """The tasks of a stage, one by one, and what they gave."""

    def __init__(self, case: Case, stage: Stage, place: str) -> None:
        self.found = Found()
        self._case = case
        self._stage = stage
        self._place = place
        self._seeds: dict[int, list[Tensor | None]] = {}
        self._leaves = [leaves_of(case, index) for index in range(case.microbatches)]
        self.is_split = False

    @contextmanager
    def step(self, *, zero: bool = True) -> Iterator[None]:
        """A training step."""
        count = self._case.microbatches
        targets = [None] * count if self._place == LAST else []
        self._stage.begin_step(
            StageInputs(training=True, zero_gradients=zero, sizes=(1,) * count, targets=targets)
        )
        self.is_split = self._stage.splits
        torch.manual_seed(5)
        try:
            yield
        finally:
            self._stage.end_step()

    def forward(self, index: int) -> None:
        """F."""
        edge = Edge(0, 1)
        leaves = self._leaves[index]
        wanted = [leaf.requires_grad for leaf in leaves]
        self._stage.deliver_activation(edge, index, Activation(leaves), wanted)
        sent = self._stage.forward(index, self._stage.take_activations(index), _as_it_is)
        outputs = sent[0].tensors if sent else tensors_in(self._stage.outputs()[-1])
        for number, tensor in enumerate(outputs):
            self.found.note(f"output {number}, microbatch {index}", tensor)
        if sent:
            self._seeds[index] = [_seed_of(self._case, tensor) for tensor in outputs]

    def _gradients(self, index: int) -> list[list[Tensor | None]]:
        if self._place == LAST:
            return []
        self._stage.deliver_gradient(Edge(1, 2), index, self._seeds.pop(index))
        return self._stage.take_gradients(index)

    def backward_input(self, index: int) -> None:
        """I, which leaves every `.grad` as it was."""
        before = [_state_of(parameter.grad) for parameter in self._stage.module.parameters()]
        self._note(index, self._stage.backward_input(index, self._gradients(index), _as_it_is))
        after = [_state_of(parameter.grad) for parameter in self._stage.module.parameters()]
        assert all(map(_unchanged, before, after)), "I changed the .grad of a parameter"

    def backward_weight(self, index: int) -> None:
        """W."""
        assert self._stage.backward_weight(index) == ()

    def backward(self, index: int) -> None:
        """B."""
        self._note(index, self._stage.backward(index, self._gradients(index), _as_it_is))

    def _note(self, index: int, sent: Sequence[Any]) -> None:
        specs = [spec for outgoing in sent for spec in outgoing.specs]
        if not sent:  # no input wants a gradient
            specs = [None] * len(self._leaves[index])
        present = iter([tensor for outgoing in sent for tensor in outgoing.tensors])
        for number, spec in enumerate(specs):
            gradient = None if spec is None else next(present)
            self.found.note(f"gradient of input {number}, microbatch {index}", gradient)

    def note_losses(self) -> None:
        """The last stage's losses."""
        losses, _ = self._stage.losses()
        for index, loss in enumerate(losses):
            self.found.note(f"loss, microbatch {index}", torch.tensor(loss))


def _as_it_is(tensor: Tensor) -> Tensor:
    return tensor


def _state_of(grad: Tensor | None) -> tuple[Tensor | None, int, Tensor | None]:
    if grad is None:
        return None, 0, None
    return grad, grad._version, grad.detach().clone()


def _unchanged(
    before: tuple[Tensor | None, int, Tensor | None],
    after: tuple[Tensor | None, int, Tensor | None],
) -> bool:
    return before[0] is after[0] and before[1] == after[1] and _same(before[2], after[2])


def assert_bitwise(
    case: Case, orders: Sequence[Order] = SOME_ORDERS, *, mode: str = "deferral"
) -> list[nn.Module]:
    """Two steps, the second without zeroing, in every order and place: equal, and deferred.

    The last stage is run in the last order only.

    Returns:
        The stages' modules after their runs.
    """
    modules = []
    for place in case.places:
        plain = made(case)
        expected = [run_fused(case, plain, place, zero=zero) for zero in (True, False)]
        for order in orders if place == MIDDLE or case.places == (LAST,) else orders[-1:]:
            module = made(case)
            support = split_support(module)
            assert support.mode == mode, support.reason
            stage = make_stage(case, module, place)
            for zero, wanted in zip((True, False), expected, strict=True):
                got = run_split(case, stage, _sized(order, case), place, zero=zero)
                told = wanted.differences(got)
                step = "first" if zero else "second"
                assert told == [], f"{place} stage, {order}, {step} step: {told[:4]}"
            assert stage.split_choice.support.mode == mode
            _assert_clean(module)
            modules.append(module)
    return modules


def made(case: Case) -> nn.Module:
    """The case's module, the same every time, with gradients of an earlier step."""
    torch.manual_seed(3)
    module = case.make()
    for parameter in module.parameters():
        if parameter.requires_grad:
            parameter.grad = torch.full_like(parameter, 7.0)
    return module


def _sized(order: Order, case: Case) -> Order:
    inputs = tuple(i for i in order.first_inputs if i < case.microbatches)
    return replace(order, first_inputs=inputs)


def _assert_clean(module: nn.Module) -> None:
    layers = [(n, part) for n, part in module.named_modules() if type(part) is nn.Linear]
    held = [name for name, layer in layers if "forward" in layer.__dict__]
    assert held == [], "layers that kept another forward"
