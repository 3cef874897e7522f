"""Forms in which a step takes its batch, and stage graphs with several ways in."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import rrfp_async as r
from tests.runtime.parity import assert_parity, build, chain_case, linear_stages
from tests.runtime.reference import Case, Step, run_reference
from tests.runtime.worlds import each_rank

mse_loss = nn.functional.mse_loss


async def test_ready_microbatches_set_their_own_count(tmp_path: Path) -> None:
    """`Microbatches` of other counts and shapes than the config's, with a whole target: parity."""
    torch.manual_seed(32)
    parts = r.Microbatches([torch.randn(n, 8) for n in (3, 1, 2)])
    more = r.Microbatches([torch.randn(n, 8) for n in (2, 2, 1, 5, 1)])
    targets = r.Microbatches([torch.randn(n, 8) for n in (2, 2, 1, 5, 1)])
    steps = [Step({0: (parts,)}, torch.randn(6, 8)), Step({0: (more,)}, targets)]
    await assert_parity(replace(chain_case(3, microbatches=4), steps=steps), tmp_path)


class TwoArguments(nn.Module):
    """Takes two tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: Tensor, scale: Tensor) -> Tensor:
        return self.linear(x) * scale


async def test_a_tuple_in_microbatches_is_the_arguments(tmp_path: Path) -> None:
    """As the only positional argument, an entry that is a tuple holds positional arguments."""
    torch.manual_seed(33)
    parts = r.Microbatches([(torch.randn(n, 8), torch.randn(n, 1)) for n in (3, 1, 2)])
    steps = [Step({0: (parts,)}, torch.randn(6, 8))]
    stages = [TwoArguments(), *linear_stages(2)]
    await assert_parity(Case(stages, steps, microbatches=2), tmp_path)


class Keywords(nn.Module):
    """Notes what it was called with."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[Any, dict[str, Any]]] = []

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        self.calls.append((args, kwargs))
        return kwargs["x"] * kwargs["scale"]


async def test_keywords_are_split_or_go_to_every_microbatch() -> None:
    """Tensors are split along dimension 0, `Microbatches` handed out, plain values repeated."""
    stage = Keywords()
    x = torch.arange(6.0).reshape(6, 1)
    parts = r.Microbatches([0, 1, 2, 3])

    async def main(world: r.World) -> r.StepResult:
        async with r.Runtime(stage, world=world, config=r.Config(microbatches=4)) as runtime:
            return await runtime.eval_step(x=x, scale=2.0, name="a", mask=None, part=parts)

    [result] = await r.run_local(1, main)
    given = sorted(stage.calls, key=lambda call: call[1]["part"])
    sizes = [len(kwargs["x"]) for _, kwargs in given]
    assert sizes == [2, 2, 1, 1]
    assert [kwargs["part"] for _, kwargs in given] == [0, 1, 2, 3]
    assert {(kwargs["scale"], kwargs["name"], kwargs["mask"]) for _, kwargs in given} == {
        (2.0, "a", None)
    }
    assert torch.equal(torch.cat(result.outputs), x * 2)


async def test_what_other_ranks_are_given_is_ignored(tmp_path: Path) -> None:
    """Inputs past the first rank and targets before the last do nothing."""
    case = chain_case(2, microbatches=4)
    (x,), y = case.steps[0].inputs[0], case.steps[0].target

    async def main(world: r.World) -> float | None:
        args = (x,) if world.rank == 0 else (torch.ones(3, 3), "nonsense")
        target = y if world.rank == 1 else "nonsense"
        async with build(case, list(case.stages), world, None) as runtime:
            return (await runtime.train_step(*args, target=target)).loss

    assert await r.run_local(2, main) == [run_reference(case)[0].loss] * 2


@pytest.mark.parametrize("form", ["tensor", "tuple", "dict"])
async def test_data_may_yield_inputs_in_three_forms(form: str) -> None:
    """A tensor, a tuple of positional arguments or a dict of keywords, step after step."""
    torch.manual_seed(34)
    batches = [(torch.randn(4, 8), torch.ones(4, 1), torch.randn(4, 8)) for _ in range(3)]
    wrap = {
        "tensor": lambda x, scale: x,
        "tuple": lambda x, scale: (x, scale),
        "dict": lambda x, scale: {"scale": scale, "x": x},
    }[form]
    stages = [nn.Linear(8, 8) if form == "tensor" else TwoArguments(), nn.Linear(8, 8)]
    expected = [
        float(mse_loss(stages[1](stages[0](*([x] if form == "tensor" else [x, s]))), y).detach())
        for x, s, y in batches
    ]

    async def main(world: r.World) -> list[float | None]:
        first = world.rank == 0
        data = ((wrap(x, s) if first else None, None if first else y) for x, s, y in batches)
        config = r.Config(microbatches=1)
        runtime = r.Runtime(
            stages[world.rank], world=world, config=config, loss_fn=mse_loss, data=data
        )
        async with runtime:
            return [(await runtime.train_step()).loss for _ in batches]

    assert await r.run_local(2, main) == [expected] * 2


class Joined(nn.Module):
    """The sum of a linear map of each input."""

    def __init__(self, inputs: int) -> None:
        super().__init__()
        self.maps = nn.ModuleList([nn.Linear(8, 8) for _ in range(inputs)])

    def forward(self, *tensors: Tensor) -> Tensor:
        mapped = [f(tensor) for f, tensor in zip(self.maps, tensors, strict=True)]
        return torch.tanh(sum(mapped))


async def test_two_encoders_join_in_one_decoder(tmp_path: Path) -> None:
    """A DAG of two source stages: each takes inputs on its own rank; parity."""
    stages = [*linear_stages(2), Joined(2), *linear_stages(1)]
    inputs = {0: (torch.randn(8, 8),), 1: (torch.randn(8, 8),)}
    steps = [Step(inputs, torch.randn(8, 8))]
    edges = ((0, 2), (1, 2), (2, 3))
    await assert_parity(Case(stages, steps, microbatches=4, edges=edges), tmp_path)


async def test_a_skip_edge_sums_its_gradients(tmp_path: Path) -> None:
    """A stage with two consumers gets the sum of both gradients: parity."""
    stages = [*linear_stages(2), Joined(2)]
    steps = [Step({0: (torch.randn(8, 8),)}, torch.randn(8, 8))]
    edges = ((0, 1), (0, 2), (1, 2))
    await assert_parity(Case(stages, steps, microbatches=4, edges=edges), tmp_path)


async def test_two_sources_with_other_counts_are_refused() -> None:
    """Every rank that takes inputs must give as many microbatches: both counts are named."""
    stages = [*linear_stages(2), Joined(2)]
    topology = r.Topology(3, (r.Edge(0, 2), r.Edge(1, 2)))

    async def main(world: r.World) -> None:
        counts = {0: 4, 1: 3}
        args = (r.Microbatches([torch.ones(2, 8)] * counts[world.rank]),) if world.rank < 2 else ()
        config = r.Config(microbatches=4)
        module = stages[world.rank]
        async with r.Runtime(module, world=world, config=config, loss_fn=mse_loss) as runtime:
            await runtime.train_step(*args, target=torch.ones(8, 8))

    errors = await each_rank(3, main, topology=topology)
    assert isinstance(errors[1], ValueError)
    assert "given microbatches of [2, 2, 2] samples, rank 0 of [2, 2, 2, 2]" in str(errors[1])
    assert {error.rank for error in (errors[0], errors[2])} == {1}
