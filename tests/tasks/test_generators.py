"""Random streams: every task has numbers of its own, whatever the order."""

import random
from contextlib import AbstractContextManager
from itertools import product
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from rrfp_async.tasks.generators import Generators, Phase, Streams, rng_stream

CPU = torch.device("cpu")
SEED = 11


def drawn() -> list[float]:
    """What the default generator gives now."""
    return torch.rand(4).tolist()


# -- streams ------------------------------------------------------------------------------------


def test_streams_differ_in_every_coordinate_and_repeat_for_equal_ones() -> None:
    """Seed, step, stage, microbatch and phase each count, also those beyond 32 bits."""
    few = (0, 1, 2**40)
    places = list(product(few, few, few, few, Phase))
    first = []
    for seed, step, stage, microbatch, phase in places + places[:1]:
        with rng_stream(seed, step, stage, microbatch, phase=phase):
            first.append(tuple(drawn()))
    assert len(set(first)) == len(places)
    assert first[0] == first[-1]


def test_replicas_draw_other_numbers_and_the_first_draws_what_a_single_one_does() -> None:
    """What was drawn without replicas stays what it was."""
    seen = []
    for options in ({}, {"replica": 0}, {"replica": 1}, {"replica": 2}):
        with rng_stream(SEED, 0, 1, 2, **options):
            seen.append(tuple(drawn()))
    assert seen[0] == seen[1]
    assert len(set(seen)) == 3


@pytest.mark.parametrize("shared", [False, True])
def test_a_stage_draws_what_rng_stream_draws(shared: bool) -> None:
    """A reference run finds the same numbers, in each phase, whether threads share or not."""
    streams = Streams(Generators(shared=shared), CPU, SEED, 3)
    for step, microbatch in product(range(2), range(2)):
        for context, phase in (
            (streams.forward(step, microbatch), Phase.FORWARD),
            (streams.backward(step, microbatch), Phase.BACKWARD),
            (streams.forward(step, microbatch, training=False), Phase.EVALUATION),
        ):
            with context:
                inside = drawn()
            with rng_stream(SEED, step, 3, microbatch, phase=phase):
                assert inside == drawn()


@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("kind", ["forward", "backward"])
def test_the_users_state_is_restored_whatever_happens_inside(shared: bool, kind: str) -> None:
    """After drawing, after torch.manual_seed and after an exception."""
    streams = Streams(Generators(shared=shared), CPU, SEED, 0)
    outer = torch.get_rng_state()
    for microbatch in range(3):
        with getattr(streams, kind)(0, microbatch):
            torch.manual_seed(5)
            drawn()
        assert torch.equal(torch.get_rng_state(), outer)
        with pytest.raises(ZeroDivisionError), getattr(streams, kind)(1, microbatch):
            assert 1 / (drawn() == [])
        assert torch.equal(torch.get_rng_state(), outer)


def test_a_negative_seed_is_taken_as_torch_takes_it() -> None:
    """Modulo 2**64, so -1 and 2**64 - 1 are one seed."""
    with rng_stream(-1, 0, 0, 0):
        first = drawn()
    with rng_stream(2**64 - 1, 0, 0, 0):
        assert drawn() == first


@pytest.mark.parametrize(
    ("numbers", "message"),
    [
        ((2**64, 0, 0, 0), "seed=18446744073709551616 must be an int of -2"),
        ((True, 0, 0, 0), "seed=True must be an int"),
        ((0, -1, 0, 0), "step=-1, stage=0, microbatch=0 name no random stream"),
        ((0, 0, 0, 0.5), "microbatch=0.5 name no random stream"),
    ],
)
def test_a_number_that_names_no_stream_is_refused(numbers: Any, message: str) -> None:
    """The message names it and the rule."""
    with pytest.raises(ValueError, match=message), rng_stream(*numbers):
        pass


def test_an_unknown_device_is_refused() -> None:
    """Its generators are not known, and to seed nothing would be silent."""
    with pytest.raises(ValueError, match="'meta' has no known generator"):
        Streams(Generators(shared=False), torch.device("meta"), SEED, 0)


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU here")
def test_the_gpus_generator_has_a_stream_too() -> None:
    """Seeded and restored as the CPU's."""
    torch.cuda.manual_seed(3)
    outer = torch.cuda.get_rng_state()
    draws = []
    for microbatch in (0, 1, 0):
        with rng_stream(SEED, 0, 0, microbatch, device="cuda"):
            draws.append(torch.rand(4, device="cuda").tolist())
    assert draws[0] == draws[2] != draws[1]
    assert torch.equal(torch.cuda.get_rng_state(), outer)


# -- any order ----------------------------------------------------------------------------------


class Dropping(nn.Module):
    """Linear and dropout 0.5, twice; recomputed in the backward if asked to."""

    def __init__(self, stage: int, *, recompute: bool) -> None:
        super().__init__()
        self.recompute = recompute
        self.linears = nn.ModuleList(nn.Linear(8, 8, dtype=torch.float64) for _ in range(2))
        for number, linear in enumerate(self.linears):
            nn.init.normal_(linear.weight, generator=torch.Generator().manual_seed(stage + number))  # type: ignore[arg-type]
            nn.init.zeros_(linear.bias)  # type: ignore[arg-type]

    def body(self, x: torch.Tensor) -> torch.Tensor:
        for linear in self.linears:
            x = functional.dropout(linear(x).tanh(), 0.5, self.training)
        return x

    def forward(self, x: torch.Tensor) -> Any:
        return checkpoint(self.body, x, use_reentrant=False) if self.recompute else self.body(x)


def pipeline_gradients(
    order: random.Random | None, *, recompute: bool, shared: bool
) -> list[torch.Tensor]:
    """Losses and gradients of 3 stages and 4 microbatches; without an order by `rng_stream`."""
    modules = [Dropping(stage, recompute=recompute) for stage in range(3)]
    generators = Generators(shared=shared)
    streams = [Streams(generators, CPU, SEED, stage) for stage in range(3)]
    x = torch.linspace(-1, 1, 4 * 5 * 8, dtype=torch.float64).reshape(4, 5, 8)
    outputs: dict[tuple[int, int], torch.Tensor] = {}
    leaves: dict[tuple[int, int], torch.Tensor] = {}
    turns = [microbatch for microbatch in range(4) for _ in range(6)]  # each has 3 F, then 3 B
    if order is not None:
        order.shuffle(turns)
    done = [0] * 4
    found: dict[tuple[int, int], list[torch.Tensor]] = {}
    for microbatch in turns:
        turn, done[microbatch] = done[microbatch], done[microbatch] + 1
        if turn < 3:
            given = outputs[turn - 1, microbatch].detach() if turn else x[microbatch]
            leaves[turn, microbatch] = given.requires_grad_(turn > 0)
            context: AbstractContextManager[None] = streams[turn].forward(0, microbatch)
            if order is None:
                context = rng_stream(SEED, 0, turn, microbatch)
            with context:
                y = modules[turn](leaves[turn, microbatch])
                outputs[turn, microbatch] = y.square().mean() if turn == 2 else y
            continue
        stage = 5 - turn
        y, leaf = outputs[stage, microbatch], leaves[stage, microbatch]
        seed = None if stage == 2 else leaves[stage + 1, microbatch].grad
        inputs = [*modules[stage].parameters(), *([leaf] if stage else [])]
        with streams[stage].backward(0, microbatch):
            gradients = torch.autograd.grad(y, inputs, seed)
        leaf.grad = gradients[-1] if stage else None
        found[stage, microbatch] = [y.detach(), *gradients]
    return [tensor for place in sorted(found) for tensor in found[place]]


@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("recompute", [False, True])
def test_dropout_is_bitwise_the_same_in_ten_orders(recompute: bool, shared: bool) -> None:
    """Losses and gradients of every microbatch, recomputed or not, are the reference run's."""
    reference = pipeline_gradients(None, recompute=False, shared=False)
    for number in range(10):
        seen = pipeline_gradients(random.Random(number), recompute=recompute, shared=shared)
        assert all(map(torch.equal, seen, reference)), f"order {number}"
