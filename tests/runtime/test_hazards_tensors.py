"""HAZARDS.md, one stage a rank: what stages may hand to one another."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from rrfp_async.bus.messages import Header
from rrfp_async.ids import TaskKind
from tests.runtime.parity import (
    assert_parity,
    chain_case,
    differences,
    linear_stages,
    pipelined,
)
from tests.runtime.reference import Case, Step, run_reference
from tests.runtime.worlds import watched


class Mixed(nn.Module):
    """Emits (hidden, mask, ids, constant), all of (batch, 8)."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        hidden = self.linear(x)
        ids = torch.arange(x.numel()).reshape(x.shape) + 2**40
        return hidden, x > 0, ids, torch.full_like(x, 0.1).double()


class Mixing(nn.Module):
    """Uses what `Mixed` emits, passes it on, and notes what came."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.seen: list[tuple[Tensor, ...]] = []

    def __deepcopy__(self, memo: dict[int, Any]) -> "Mixing":
        other = Mixing()
        other.load_state_dict(self.state_dict())
        other.seen = self.seen
        return other

    def forward(self, hidden: Tensor, mask: Tensor, ids: Tensor, constant: Tensor) -> Any:
        self.seen.append((hidden, mask, ids, constant))
        mixed = self.linear(hidden) * mask + ids.remainder(3) + constant.float()
        return mixed, mask, ids, constant


class Tail(nn.Module):
    """Reduces what `Mixing` emits to one tensor."""

    def forward(self, hidden: Tensor, mask: Tensor, ids: Tensor, constant: Tensor) -> Tensor:
        return torch.where(mask, hidden, ids.remainder(5).float()) * constant.float()


async def test_stages_may_emit_tensors_of_any_kind(tmp_path: Path) -> None:
    """Hazard 4: (hidden, bool, int64, float64 without grad) of equal numel: exact, parity."""
    torch.manual_seed(1)
    stages = [Mixed(), Mixing(), Tail()]
    case = Case(stages, [Step({0: (torch.randn(8, 8),)}, torch.randn(8, 8))], microbatches=4)
    await assert_parity(case, tmp_path)
    for hidden, mask, ids, constant in stages[1].seen:
        assert [t.dtype for t in (mask, ids, constant)] == [torch.bool, torch.int64, torch.float64]
        assert [t.requires_grad for t in (hidden, mask, ids, constant)] == [True] + [False] * 3
        assert torch.equal(ids, torch.arange(ids.numel()).reshape(ids.shape) + 2**40)


class TwoHeads(nn.Module):
    """Emits two tensors that both need a gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return self.first(x), self.second(x)


class OddIgnores(nn.Module):
    """Ignores its second input where the first microbatch value says so."""

    def __init__(self, *, everything: bool = False) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.everything = everything

    def forward(self, first: Tensor, second: Tensor) -> Tensor:
        odd = len(first) % 2 == 1
        if odd and self.everything:
            return self.linear(torch.ones(len(first), 8))
        return self.linear(first if odd else first + second)


@pytest.mark.parametrize("everything", [False, True], ids=["one input", "both inputs"])
async def test_an_ignored_input_gets_no_gradient_and_nothing_hangs(
    tmp_path: Path, everything: bool
) -> None:
    """Hazard 5: stage 1 ignores an input (or all) on odd microbatches: parity, no hang."""
    torch.manual_seed(2)
    stages = [TwoHeads(), OddIgnores(everything=everything), *linear_stages(1)]
    steps = [Step({0: (torch.randn(10, 8),)}, torch.randn(10, 8))]  # sizes 3, 3, 2, 2
    await assert_parity(Case(stages, steps, microbatches=4), tmp_path)


def _frozen(stage: nn.Module) -> nn.Module:
    return stage.requires_grad_(False)


def _partly_trainable(where: str) -> list[nn.Module]:
    stages = linear_stages(4)
    if where == "first":
        return [stages[0], *map(_frozen, stages[1:])]
    if where == "last":
        return [*map(_frozen, stages[:3]), stages[3]]
    return [stages[0], nn.Tanh(), *stages[2:]]


@pytest.mark.parametrize("where", ["first", "last", "one stage without parameters"])
async def test_parameters_may_be_frozen_or_absent(tmp_path: Path, where: str) -> None:
    """Hazard 6: trainable only in the first, only in the last, a stage without any: parity."""
    case = chain_case(4, microbatches=4, stages=_partly_trainable(where))
    expected = run_reference(case)[0].gradients
    for name, parameter in _named(case.stages):
        assert (expected[name] is None) is not parameter.requires_grad
    await assert_parity(case, tmp_path)


def _named(stages: Any) -> Iterator[tuple[str, nn.Parameter]]:
    for index, stage in enumerate(stages):
        for name, parameter in stage.named_parameters():
            yield f"stage {index} {name}", parameter


async def test_no_gradient_travels_below_the_first_trainable_stage(tmp_path: Path) -> None:
    """Hazard 6: with only stage 2 of 4 trainable, nothing is sent back to ranks 1 and 0."""
    stages = [_frozen(s) if i != 2 else s for i, s in enumerate(linear_stages(4))]
    headers: list[Header] = []

    def note(_target: int, message: object) -> None:
        if isinstance(message, Header) and message.task.kind in (TaskKind.B, TaskKind.I):
            headers.append(message)

    case = chain_case(4, microbatches=3, stages=stages)
    await pipelined(case, tmp_path, wrap=lambda world: watched(world, on_send=note))
    assert {header.edge.source for header in headers} == {2}


async def test_evaluations_leave_training_bitwise_unchanged(tmp_path: Path) -> None:
    """Hazard 7: eval, train, eval, train with other sizes equals the run without evals."""
    torch.manual_seed(8)
    plain = chain_case(3, microbatches=4, make_optimizer=lambda ps: torch.optim.SGD(ps, lr=0.1))
    sizes = ((6, False), (8, True), (4, False), (12, True))
    steps = [Step({0: (torch.randn(n, 8),)}, torch.randn(n, 8), training=t) for n, t in sizes]
    training = run_reference(replace(plain, steps=[s for s in steps if s.training]))
    case = replace(plain, steps=steps)
    runs = await assert_parity(case, tmp_path)
    for run in runs:
        assert differences(training, [run.outcomes[1], run.outcomes[3]]) == []
        assert set(run.outcomes[0].gradients.values()) == {None}, "an eval left gradients"


class Shaped(nn.Module):
    """A linear layer whose output is not contiguous in the named way."""

    def __init__(self, way: str) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 16 if way == "strided slice" else 8)
        self.way = way

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.linear(x)
        if self.way == "transpose":
            return hidden.transpose(1, 2)
        if self.way == "expand":
            return hidden.mean(1, keepdim=True).expand(-1, 8, -1)
        return hidden[..., ::2]


@pytest.mark.parametrize("way", ["transpose", "expand", "strided slice"])
async def test_outputs_need_not_be_contiguous(tmp_path: Path, way: str) -> None:
    """Hazard 8: non-contiguous outputs: parity."""
    torch.manual_seed(9)
    stages = [Shaped(way), Shaped(way), nn.Linear(8, 8)]
    assert not stages[0](torch.randn(2, 8, 8)).is_contiguous()
    steps = [Step({0: (torch.randn(8, 8, 8),)}, torch.randn(8, 8, 8))]
    await assert_parity(Case(stages, steps, microbatches=4), tmp_path)


class Reusing(nn.Module):
    """Writes every output into one buffer of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.buffer = torch.zeros(2, 8)

    def forward(self, x: Tensor) -> Tensor:
        self.buffer.copy_(x * 2)
        return self.buffer


async def test_a_reused_output_buffer_cannot_reach_what_was_sent(tmp_path: Path) -> None:
    """Hazard 23: in one process the output was copied: parity though its buffer is reused."""
    case = chain_case(3, microbatches=4, stages=[Reusing(), *linear_stages(2)])
    await assert_parity(case, tmp_path)


class Aliased(nn.Module):
    """Emits the same tensor twice, and its input as it came."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: Tensor, *_: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        hidden = self.linear(x)
        return hidden, hidden, x


class Summed(nn.Module):
    """The sum of what came."""

    def forward(self, *tensors: Tensor) -> Tensor:
        return sum(tensor * (index + 1) for index, tensor in enumerate(tensors))


async def test_a_stage_may_emit_a_tensor_twice_and_its_own_input(tmp_path: Path) -> None:
    """Aliased outputs each get their gradient: within 1e-9 in fp64, sums having no fixed order."""
    torch.manual_seed(10)
    stages = [nn.Linear(8, 8), Aliased(), Aliased(), Summed()]
    stages = [stage.double() for stage in stages]
    case = chain_case(4, microbatches=4, stages=stages, dtype=torch.float64)
    await assert_parity(case, tmp_path, within=1e-9)


class Scalars(nn.Module):
    """Emits a tensor without dimensions and an empty one beside the hidden state."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: Tensor, *_: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        hidden = self.linear(x)
        return hidden, hidden.mean(), hidden[:0]


class UsesScalar(nn.Module):
    """Scales by a scalar that came along."""

    def forward(self, hidden: Tensor, scale: Tensor, nothing: Tensor) -> Tensor:
        return hidden * scale + nothing.sum()


async def test_empty_and_zero_dimensional_tensors_travel_too(tmp_path: Path) -> None:
    """A scalar and an empty tensor are exact, and get their gradients."""
    torch.manual_seed(12)
    case = chain_case(3, microbatches=4, stages=[Scalars(), Scalars(), UsesScalar()])
    await assert_parity(case, tmp_path)


class InPlace(nn.Module):
    """Begins with an in-place activation."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(nn.functional.relu(x, inplace=True))


async def test_a_stage_may_begin_with_an_in_place_operation(tmp_path: Path) -> None:
    """A stage may change the activation it was given, which no one else has: parity."""
    torch.manual_seed(13)
    case = chain_case(3, microbatches=4, stages=[*linear_stages(1), InPlace(), InPlace()])
    await assert_parity(case, tmp_path)
