"""Stages from `torch.distributed.pipelining.pipeline`: routing, names, and the model's bits."""

import copy
import inspect
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn
from torch.distributed.pipelining import SplitPoint, pipeline

import rrfp_async as r
from rrfp_async.from_pipe import stages_from_pipe
from tests.runtime.parity import shaken

pytestmark = pytest.mark.filterwarnings("ignore:.*LeafSpec:FutureWarning")  # torch's own use

MICROBATCHES = 4
SAMPLES = 2  # per microbatch
STEPS = 2


def linear() -> nn.Linear:
    return nn.Linear(8, 8)


class Skip(nn.Module):
    """The third stage adds what the first one made."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = linear(), linear(), linear()

    def forward(self, x: Tensor) -> Tensor:
        first = self.a(x).tanh()
        second = self.b(first).tanh()
        return self.c(second) + first


class Masked(nn.Module):
    """Only the last stage uses the mask; the middle ones know ids that the first one made."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = linear(), linear(), linear()
        self.words = nn.Embedding(3, 8)

    def forward(self, x: Tensor, mask: Tensor, scale: Tensor) -> Tensor:
        ids = (x > 0).sum(1) % 3
        hidden = self.b(self.a(x).tanh()).tanh()
        return (self.c(hidden) + self.words(ids)).masked_fill(mask, 0.0) * scale


class Shared(nn.Module):
    """One value that four stages use, once or twice; a list of layers; a parameter of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(linear() for _ in range(5))
        self.gain = nn.Parameter(torch.full((8,), 0.7))

    def forward(self, x: Tensor) -> Tensor:
        made = self.layers[0](x).tanh()
        hidden = made
        for layer in self.layers[1:]:
            hidden = layer(hidden * made).tanh() + made
        return hidden * self.gain


class Towers(nn.Module):
    """Two towers that do not know each other, and two outputs, one of them made early."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right, self.top = linear(), linear(), linear()

    def forward(self, x: Tensor, y: Tensor) -> dict[str, Tensor]:
        left = self.left(x).tanh()
        right = self.right(y).tanh()
        return {"top": self.top(left) * right, "left": left}


class Early(nn.Module):
    """A split before the first layer leaves the first stage without any."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = linear(), linear()

    def forward(self, x: Tensor) -> Tensor:
        return self.b(self.a(x).tanh())


class Halves(nn.Module):
    """Returns two tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = linear()

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        made = self.layer(x)
        return made, made.tanh()


class Twice(nn.Module):
    """A stage calls its module twice, and takes its two outputs apart; a frozen gain is in both."""

    def __init__(self) -> None:
        super().__init__()
        self.halves, self.b = Halves(), linear()
        self.gain = nn.Parameter(torch.full((8,), 0.7), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        left, right = self.halves(x)
        left, right = self.halves(left * right * self.gain)
        return self.b(left - right) * self.gain


class Tied(nn.Module):
    """The first and the last layer share a weight."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = linear(), linear(), linear()
        self.c.weight = self.a.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.c(self.b(self.a(x)).tanh())


def two_losses(output: Any, target: Tensor) -> Tensor:
    """For a model and for a last stage: a dict, or its values."""
    top, left = output.values() if isinstance(output, dict) else output
    return nn.functional.mse_loss(top, target) + left.square().mean()


def arguments_of(model: nn.Module, samples: int) -> tuple[Tensor, ...]:
    """Random inputs for the model's forward."""
    torch.manual_seed(17)
    made = {
        "x": torch.randn(samples, 8),
        "y": torch.randn(samples, 8),
        "mask": torch.rand(samples, 8) < 0.3,
        "scale": torch.rand(samples, 1),
    }
    return tuple(
        made[name] for name in inspect.signature(type(model).forward).parameters if name in made
    )


def build(kind: type[nn.Module]) -> nn.Module:
    """The model, the same at each call."""
    torch.manual_seed(3)
    return kind()


def split(model: nn.Module, *before: str) -> Any:
    """The pipe of `model`, cut before these layers."""
    spec = dict.fromkeys(before, SplitPoint.BEGINNING)
    return pipeline(model, mb_args=arguments_of(model, SAMPLES), split_spec=spec)


def sgd(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    """Moves the parameters far enough to be seen in the next step."""
    return torch.optim.SGD(parameters, lr=0.1)


Trained = tuple[list[float], dict[str, Tensor | None], list[Any]]
"""Losses of each step, the last step's gradients by name, outputs of an evaluation after it."""


def plain_training(model: nn.Module, loss_fn: Callable[[Any, Tensor], Tensor]) -> Trained:
    """The unpartitioned model in plain torch, microbatch after microbatch."""
    optimizer, losses = sgd(list(model.parameters())), []
    inputs, target = arguments_of(model, MICROBATCHES * SAMPLES), goal()
    columns = [column.chunk(MICROBATCHES) for column in (*inputs, target)]
    for _ in range(STEPS):
        optimizer.zero_grad()
        weighted = []
        for *parts, wanted in zip(*columns, strict=True):
            loss = loss_fn(model(*parts), wanted)
            (loss * (1 / MICROBATCHES)).backward()
            weighted.append(loss.item() / MICROBATCHES)
        losses.append(sum(weighted))
        optimizer.step()
    with torch.no_grad():
        outputs = [model(*parts) for *parts, _ in zip(*columns, strict=True)]
    return losses, {name: p.grad for name, p in model.named_parameters()}, outputs


def goal() -> Tensor:
    """A target for every sample."""
    torch.manual_seed(19)
    return torch.randn(MICROBATCHES * SAMPLES, 8)


async def pipelined_training(
    stages: list[nn.Module],
    inputs: tuple[Tensor, ...],
    loss_fn: Callable[[Any, Tensor], Tensor],
    *,
    seed: int | None = None,
    **options: Any,
) -> Trained:
    """The stages in a chain, one a rank."""

    async def main(world: r.World) -> tuple[list[float], list[Any]]:
        runtime = r.Runtime(
            stages[world.rank],
            world=world if seed is None else shaken(seed)(world),
            config=r.Config(microbatches=MICROBATCHES, **options),
            loss_fn=loss_fn,
            optimizer=sgd,
        )
        async with runtime:
            steps = [await runtime.train_step(*inputs, target=goal()) for _ in range(STEPS)]
            outputs = (await runtime.eval_step(*inputs)).outputs
        return [step.loss for step in steps], outputs

    ranks = await r.run_local(len(stages), main)
    assert len({tuple(losses) for losses, _ in ranks}) == 1
    gradients = {name: p.grad for stage in stages for name, p in stage.named_parameters()}
    return ranks[-1][0], gradients, ranks[-1][1]


def assert_same(got: Trained, wanted: Trained) -> None:
    """Every loss, gradient and output, bit for bit."""
    assert got[0] == wanted[0]
    assert got[1].keys() == wanted[1].keys()
    assert [name for name in wanted[1] if not same(got[1][name], wanted[1][name])] == []
    assert len(got[2]) == len(wanted[2]) == MICROBATCHES
    assert all(map(same, got[2], wanted[2]))


def same(got: Any, wanted: Any) -> bool:
    """Equal tensors, a tuple equal to a dict's values, or None both."""
    if isinstance(wanted, dict):
        return len(got) == len(wanted) and all(map(same, got, wanted.values()))
    return got is wanted is None or torch.equal(got, wanted)


CASES = {
    "skip": (Skip, ("b", "c"), nn.functional.mse_loss),
    "root argument": (Masked, ("b", "c"), nn.functional.mse_loss),
    "used by all": (Shared, tuple(f"layers.{i}" for i in (1, 2, 3, 4)), nn.functional.mse_loss),
    "towers": (Towers, ("right", "top"), two_losses),
    "called twice": (Twice, ("b",), nn.functional.mse_loss),
    "early split": (Early, ("a", "b"), nn.functional.mse_loss),
}


@pytest.mark.parametrize("name", CASES)
async def test_training_gives_the_bits_of_the_unpartitioned_model(name: str) -> None:
    """Two steps with an optimizer and an evaluation: every loss, gradient and output."""
    kind, before, loss_fn = CASES[name]
    model = build(kind)
    wanted = plain_training(copy.deepcopy(model), loss_fn)
    stages = stages_from_pipe(split(model, *before))
    inputs = arguments_of(build(kind), MICROBATCHES * SAMPLES)
    assert_same(await pipelined_training(stages, inputs, loss_fn), wanted)


@pytest.mark.parametrize("seed", range(5))
async def test_no_order_of_arrival_changes_a_bit(seed: int) -> None:
    """The skip connection under delays, a limit of two, and the backward split."""
    model = build(Skip)
    wanted = plain_training(copy.deepcopy(model), nn.functional.mse_loss)
    stages = stages_from_pipe(split(model, "b", "c"))
    options = {"hint": "bfw" if seed % 2 else "bf", "limit": 2}
    inputs = arguments_of(model, MICROBATCHES * SAMPLES)
    got = await pipelined_training(stages, inputs, nn.functional.mse_loss, seed=seed, **options)
    assert_same(got, wanted)


@pytest.mark.parametrize("name", CASES)
def test_a_parameter_has_the_name_that_it_has_in_the_model(name: str) -> None:
    """State dicts put together are the model's: the same keys, the same parameters."""
    kind, before, _ = CASES[name]
    model = build(kind)
    wanted = model.state_dict(keep_vars=True)
    stages = stages_from_pipe(split(model, *before))
    held = [pair for stage in stages for pair in stage.state_dict(keep_vars=True).items()]
    trained = {key for key, tensor in wanted.items() if tensor.requires_grad}
    assert sorted(key for key, tensor in held if tensor.requires_grad) == sorted(trained)
    assert {key for key, _ in held} == wanted.keys()
    assert all(tensor is wanted[key] for key, tensor in held if key in trained)


def test_a_stage_loads_its_part_of_the_models_state() -> None:
    """`load_state_dict` with the model's own keys; the stage computes with what was loaded."""
    stages = stages_from_pipe(split(build(Skip), "b", "c"))
    state = {name: torch.zeros_like(t) for name, t in build(Skip).state_dict().items()}
    for stage, layer in zip(stages, "abc", strict=True):
        stage.load_state_dict({k: v for k, v in state.items() if k.startswith(f"{layer}.")})
    assert not stages[0](torch.randn(SAMPLES, 8)).any()
    handed_on, made = stages[1](torch.ones(SAMPLES, 8))
    assert handed_on.all()
    assert not made.any()


def test_the_first_stage_is_called_as_the_model_is() -> None:
    """By position or by name, also with arguments that only the last stage uses."""
    model = build(Masked)
    first, second, third = stages_from_pipe(split(model, "b", "c"))
    assert list(inspect.signature(first.forward).parameters) == ["x", "mask", "scale"]
    x, mask, scale = arguments_of(model, SAMPLES)
    expected = model(x, mask, scale)
    by_name = first(scale=scale, mask=mask, x=x)
    assert torch.equal(third(*second(*by_name)), expected)
    with pytest.raises(TypeError, match="mask"):
        first(x, scale=scale)


def test_a_stage_hands_on_what_later_ones_need_and_no_more() -> None:
    """Arguments and skips go through the middle stage untouched; its own input ends there."""
    model = build(Masked)
    stages = stages_from_pipe(split(model, "b", "c"))
    args = arguments_of(model, SAMPLES)
    after_first = stages[0](*args)
    after_second = stages[1](*after_first)
    mask, scale, hidden, ids = after_first
    assert mask is args[1]
    assert scale is args[2]
    assert ids.dtype == torch.int64
    assert [id(tensor) for tensor in after_second[:3]] == [id(mask), id(scale), id(ids)]
    assert after_second[3] is not hidden
    assert len(after_second) == 4
    assert isinstance(stages[2](*after_second), Tensor)


def test_stages_are_numbered_as_the_pipe_numbers_them() -> None:
    """Also where its graph calls those first that do not depend on the others."""
    pipe = split(build(Towers), "right", "top")
    called = [node.target for node in pipe.split_gm.graph.find_nodes(op="call_module")]
    assert called == ["submod_pp_1", "submod_pp_0", "submod_pp_2"]
    stages = stages_from_pipe(pipe)
    for stage, module in enumerate(stages):
        wanted = {name for name, _ in pipe.get_stage_module(stage).named_parameters()}
        assert {name for name, _ in module.named_parameters()} == wanted


def test_a_pipe_of_one_stage_is_the_model() -> None:
    """No cut: one stage with the model's arguments and output."""
    model = build(Skip)
    (stage,) = stages_from_pipe(pipeline(model, mb_args=arguments_of(model, SAMPLES)))
    (x,) = arguments_of(model, SAMPLES)
    assert torch.equal(stage(x), model(x))


def test_the_pipe_itself_is_left_as_it_was() -> None:
    """It still runs, and gives what it gave."""
    pipe = split(build(Skip), "b", "c")
    (x,) = arguments_of(build(Skip), SAMPLES)
    before, text = pipe(x), str(pipe)
    stages_from_pipe(pipe)
    assert str(pipe) == text
    assert all(map(torch.equal, pipe(x), before))


def test_a_trained_weight_of_two_stages_is_refused() -> None:
    """The pipe made copies of it, which would go apart; frozen ones stay equal."""
    with pytest.raises(ValueError, match=r"stage 0 and 'c\.weight' in stage 2 are the same"):
        stages_from_pipe(split(build(Tied), "b", "c"))
    assert len(stages_from_pipe(split(build(Tied), "c").requires_grad_(False))) == 2


def test_what_is_no_pipe_is_refused() -> None:
    """A model, and a graph with other nodes than calls of stages."""
    with pytest.raises(ValueError, match="type Linear has no graph of stages"):
        stages_from_pipe(linear())
    traced = fx.symbolic_trace(nn.Sequential(linear(), nn.ReLU()))
    traced.graph.call_function(torch.relu, (next(iter(traced.graph.nodes)),))
    with pytest.raises(ValueError, match=r"has the node .*relu.*only calls of stages"):
        stages_from_pipe(SimpleNamespace(split_gm=traced, replicated_params=[]))
