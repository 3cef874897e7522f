"""What goes wrong among replicas ends the step on every rank, and names why. Nothing hangs."""

import asyncio
import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import rrfp_async as r
from tests.runtime.replicas import batches, layers, part
from tests.runtime.worlds import each_rank

TOPOLOGY = r.Topology(2, dp=2)
ENDS_WITHIN_S = 5.0

Change = Callable[[r.World, list[nn.Module]], None]


async def ended(
    change: Change = lambda *_: None,
    rows: Callable[[r.World], int] = lambda _world: 4,
    model: Callable[[], list[nn.Module]] = lambda: layers(2),
    loss_fn: Callable[[Any, Any], Any] = nn.functional.mse_loss,
) -> list[Any]:
    """What every rank raised in one step, after `change` had its stages in hand."""

    async def main(world: r.World) -> Any:
        held = [copy.deepcopy(model()[s]) for s in TOPOLOGY.stages_of(world.place.pp)]
        change(world, held)
        config = r.Config(microbatches=2)
        async with r.Runtime(held, world=world, config=config, loss_fn=loss_fn) as runtime:
            x, y = (t[: rows(world)] for t in part(batches(1)[0], world))
            await runtime.train_step(x, target=y)

    async with asyncio.timeout(ENDS_WITHIN_S):
        return await each_rank(4, main, topology=TOPOLOGY)


def assert_all_told(errors: list[Any], told: str) -> None:
    for rank, error in enumerate(errors):
        assert isinstance(error, r.StepFailed | ValueError), (rank, error)
        assert told in str(error), (rank, error)


async def test_replicas_that_are_given_batches_of_other_sizes_are_named() -> None:
    """Rank and replica, and both sizes."""
    errors = await ended(rows=lambda world: 4 - world.place.dp)
    told = "rank 1 (replica 1) was given microbatches of [2, 1] samples, rank 0 of [2, 2]"
    assert isinstance(errors[1], ValueError)
    assert told in str(errors[1])
    assert all(isinstance(error, r.StepFailed | ValueError) for error in errors)


async def test_replicas_whose_parameters_differ_at_the_start_are_refused() -> None:
    """Before anything is updated; the stage and the replicas are named."""

    def nudge(world: r.World, held: list[nn.Module]) -> None:
        if world.rank == 3:
            held[0][0].bias.data[0] += 1e-9

    errors = await ended(nudge)
    assert_all_told(errors, "the parameters of stage 1 on replicas 0 and 1 differ before the first")


async def test_replicas_that_train_other_parameters_are_refused() -> None:
    """Frozen on one, not on the other: they would send other amounts."""

    def freeze(world: r.World, held: list[nn.Module]) -> None:
        if world.rank == 1:
            held[0][0].bias.requires_grad_(False)

    errors = await ended(freeze)
    assert_all_told(errors, "trainable parameters of stage 0 on replicas 0 and 1 have different")


@pytest.mark.parametrize("rank", range(4))
async def test_a_forward_that_fails_on_one_replica_ends_the_step_on_all(rank: int) -> None:
    """The others do not wait in their reductions for it."""

    class Boom(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            raise RuntimeError("told boom")

    def break_it(world: r.World, held: list[nn.Module]) -> None:
        if world.rank == rank:
            held[0].append(Boom())

    errors = await ended(break_it)
    assert_all_told(errors, "told boom")
    assert {error.rank for error in errors} == {rank}


async def test_a_backward_that_fails_while_another_replica_waits_in_its_reduction() -> None:
    """It is given up there, and the fabric is empty afterwards."""

    class Fails(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x.view_as(x)

        @staticmethod
        def backward(ctx: Any, gradient: Tensor) -> Tensor:
            raise RuntimeError("told late")

    class Late(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            y: Tensor = Fails.apply(x)
            return y

    def break_it(world: r.World, held: list[nn.Module]) -> None:
        if world.rank == 1:
            held[0].append(Late())

    assert_all_told(await ended(break_it), "told late")


async def test_a_sparse_gradient_is_refused() -> None:
    """With what to change."""
    torch.manual_seed(1)
    words = nn.Embedding(4, 8, sparse=True, dtype=torch.float64)

    class Looked(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.words = words

        def forward(self, x: Tensor) -> Tensor:
            y: Tensor = self.words(x[:, 0].abs().long() % 4)
            return y

    errors = await ended(model=lambda: [Looked(), layers(1)[0]])
    assert_all_told(errors, "which is not averaged over replicas: use a dense one")
