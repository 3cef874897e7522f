"""What a forward keeps, in bytes, and a limit that follows from it."""

import re
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import rrfp_async as r
from rrfp_async.tasks.memory import SavedBytes

FLOAT = 4


def kept(module: nn.Module, x: torch.Tensor) -> int:
    """The bytes that a forward of `module` saves."""
    with SavedBytes(module) as saved:
        module(x)
    return saved.total


class Checkpointed(nn.Module):
    """A module whose activations are computed again."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: torch.Tensor) -> Any:
        return checkpoint(self.inner, x, use_reentrant=False)


def test_each_saved_storage_counts_once_and_parameters_do_not() -> None:
    """Linear saves its input, tanh its output, which the next Linear saves too."""
    module = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4))
    assert kept(module, torch.randn(5, 8)) == FLOAT * (5 * 8 + 5 * 16)


def test_a_view_counts_as_the_storage_that_it_holds() -> None:
    """What is pinned is the whole."""
    assert kept(nn.Linear(8, 8), torch.randn(100, 8)[:2]) == FLOAT * 100 * 8


def test_what_a_checkpoint_recomputes_does_not_count() -> None:
    """The inner activations are dropped."""
    inner = nn.Sequential(*(nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(4)))
    x = torch.randn(5, 8)
    assert kept(Checkpointed(inner), x) < kept(inner, x) / 2


def test_writing_to_a_counted_tensor_is_still_an_error() -> None:
    """The library leaves that check to whoever has hooks."""
    module = nn.Tanh()
    with SavedBytes(module):
        y = module(torch.randn(3, requires_grad=True))
    y.detach().add_(1.0)
    with pytest.raises(RuntimeError, match="modified in place"):
        y.sum().backward()


class Wide(nn.Module):
    """Keeps its input, a hidden activation and its output: 3 x (rows, 64) floats."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(64, 64), nn.Linear(64, 64)

    def forward(self, x: torch.Tensor) -> Any:
        return self.second(torch.tanh(self.first(x)))


ROWS = 2
BYTES = 3 * ROWS * 64 * FLOAT


async def peaks(budget_bytes: int | None, **options: Any) -> list[int]:
    """The peaks of two steps of eight microbatches on every rank of three."""
    torch.set_num_threads(1)

    async def main(world: r.World) -> list[int]:
        config = r.Config(
            microbatches=8, hint="f-priority", activation_budget_bytes=budget_bytes, **options
        )
        loss = nn.functional.mse_loss
        async with r.Runtime(Wide(), world=world, config=config, loss_fn=loss) as runtime:
            batch = torch.randn(8 * ROWS, 64)
            return [(await runtime.train_step(batch, target=batch)).peak_in_flight for _ in "ab"]

    return [max(of_rank) for of_rank in await r.run_local(3, main)]


@pytest.mark.parametrize("most", [1, 2, 5])
async def test_a_budget_bounds_the_forwards_in_flight(most: int) -> None:
    """As many as fit on the middle rank; the first keeps no input; without one, all at once."""
    assert (await peaks(most * BYTES + BYTES // 2))[1] == most
    assert max(await peaks(None, limit=8)) == 8


async def test_a_budget_never_raises_the_limit() -> None:
    """The lower of both counts."""
    assert max(await peaks(100 * BYTES, limit=3)) == 3


async def test_a_budget_below_one_microbatch_is_refused_with_the_bytes() -> None:
    """Value, need and remedy."""
    need = re.escape(f"activation_budget_bytes={BYTES - 1} is below {BYTES}")
    with pytest.raises((ValueError, r.StepFailed), match=need):
        await peaks(BYTES - 1)


@pytest.mark.parametrize("value", [0, -1, 1.5, "1G", True])
def test_a_budget_that_is_no_number_of_bytes_is_refused(value: Any) -> None:
    """The error names the setting."""
    with pytest.raises(ValueError, match=r"activation_budget_bytes=.* must be an int"):
        r.Config(microbatches=1, activation_budget_bytes=value)


def test_a_budget_cannot_hold_back_a_fixed_order() -> None:
    """It is executed as it stands."""
    with pytest.raises(ValueError, match="cannot hold back an order"):
        r.Config(microbatches=1, hint="1f1b", binding=True, activation_budget_bytes=1)
