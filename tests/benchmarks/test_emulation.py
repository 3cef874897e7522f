"""The emulated stage takes each part's time once, whoever runs its backward, and once is enough."""

import copy
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.distributed.pipelining import _backward as torch_backward

import rrfp_async as r
from benchmarks import emulation
from benchmarks.emulation import Emulated, SleepingLayer, Span, batch_of
from benchmarks.peers import loss_fn
from rrfp_async import WeightGradStore

WIDTH, ROWS = 8, 3


def layer(stage: int = 1) -> SleepingLayer:
    """A stage whose parts take no time."""
    return SleepingLayer(WIDTH, Emulated(stage, lambda _kind, _microbatch: 0.0), seed=3)


def kinds(of_layer: SleepingLayer) -> list[str]:
    """What has run since the last look."""
    ran = [span.kind for span in of_layer.emulated.spans]
    of_layer.emulated.spans.clear()
    return ran


def plain(of_layer: SleepingLayer) -> list[torch.Tensor]:
    """The gradients of a plain backward: of the input, then of the weight."""
    x = batch_of(1, ROWS, WIDTH).requires_grad_()
    loss_fn(of_layer(x), x.detach()).backward()
    assert x.grad is not None
    assert of_layer.weight.grad is not None
    return [x.grad, of_layer.weight.grad]


def test_a_plain_backward_takes_the_time_of_both_halves() -> None:
    """F, then I and W, once each."""
    one = layer()
    plain(one)
    assert kinds(one) == ["F", "I", "W"]


def test_torchs_split_takes_each_half_where_it_belongs() -> None:
    """I in the first part, W in the second, neither twice; the gradients are the same."""
    one, twin = layer(), layer()
    expected = plain(twin)
    x = batch_of(1, ROWS, WIDTH).requires_grad_()
    loss = loss_fn(one(x), x.detach())
    (for_x, *_), groups = torch_backward.stage_backward_input(
        [loss], None, [x], iter(one.parameters())
    )
    assert kinds(one) == ["F", "I"]
    assert one.weight.grad is None
    torch_backward.stage_backward_weight(iter(one.parameters()), groups)
    assert kinds(one) == ["W"]
    assert for_x is not None
    assert torch.equal(for_x, expected[0])
    assert torch.equal(one.weight.grad, expected[1])


def test_torchs_split_between_two_others_takes_each_half_where_it_belongs() -> None:
    """From the gradients that come back, without a loss, as on a middle stage."""
    one, twin = layer(), layer()
    x, twins_x = (batch_of(1, ROWS, WIDTH).requires_grad_() for _ in range(2))
    gradient = torch.linspace(1.0, 2.0, ROWS * WIDTH).reshape(ROWS, WIDTH)
    twin(twins_x).backward(gradient)
    (for_x, *_), groups = torch_backward.stage_backward_input(
        [one(x)], [gradient], [x], iter(one.parameters())
    )
    assert kinds(one) == ["F", "I"]
    torch_backward.stage_backward_weight(iter(one.parameters()), groups)
    assert kinds(one) == ["W"]
    assert torch.equal(for_x, twins_x.grad)
    assert torch.equal(one.weight.grad, twin.weight.grad)


def test_a_first_stage_has_an_input_gradient_to_take_time_for() -> None:
    """Though its batch wants none: that of its shift."""
    one = layer(0)
    batch = batch_of(1, ROWS, WIDTH)
    loss_fn(one(batch), batch).backward()
    assert kinds(one) == ["F", "I", "W"]
    assert batch.grad is None


def test_each_part_sleeps_as_long_as_it_is_told_and_is_noted_with_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """On a clock that only sleeps move: F of 3 s, I of 5 and W of 7, for microbatch 2."""
    now_s = 0.0

    def sleep(seconds: float) -> None:
        nonlocal now_s
        now_s += seconds

    clock = SimpleNamespace(sleep=sleep, perf_counter=lambda: now_s)
    monkeypatch.setattr(emulation, "time", clock)
    tables = {"F": [0.0, 0.0, 3.0], "I": [0.0, 0.0, 5.0], "W": [0.0, 0.0, 7.0]}
    emulated = Emulated(1, lambda kind, microbatch: tables[kind][microbatch])
    x = batch_of(3, ROWS, WIDTH)[2 * ROWS :].requires_grad_()
    SleepingLayer(WIDTH, emulated, seed=3)(x).sum().backward()
    assert emulated.spans == [
        Span("F", 1, 2, 0.0, 3.0),
        Span("I", 1, 2, 3.0, 8.0),
        Span("W", 1, 2, 8.0, 15.0),
    ]


@pytest.mark.parametrize("hint", ["bf", "bfw"])
async def test_our_backward_takes_each_half_once(
    hint: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """F, I and W of each microbatch, W put off where the hint splits; the reference's bits."""
    taken: list[bool] = []
    put = WeightGradStore.put

    def noting(self: WeightGradStore, *args: Any) -> bool:
        taken.append(put(self, *args))
        return taken[-1]

    monkeypatch.setattr(WeightGradStore, "put", noting)
    microbatches = 3
    stages = [layer(0), layer(1)]
    reference = copy.deepcopy(stages)
    batch = batch_of(microbatches, ROWS, WIDTH)
    for part in batch.tensor_split(microbatches):
        loss = loss_fn(reference[1](reference[0](part)), part)
        (loss * (len(part) / len(batch))).backward()
    config = r.Config(microbatches=microbatches, hint=hint)

    async def main(world: r.World) -> None:
        runtime = r.Runtime(stages[world.rank], world=world, config=config, loss_fn=loss_fn)
        async with runtime:
            await runtime.train_step(batch, target=batch)

    taken.clear()  # the reference's: nobody collects there
    await r.run_local(2, main)
    assert taken == [hint == "bfw"] * 2 * microbatches
    for stage, twin in zip(stages, reference, strict=True):
        seen = [(span.kind, span.microbatch) for span in stage.emulated.spans]
        assert sorted(seen) == sorted((k, j) for k in "FIW" for j in range(microbatches))
        for parameter, expected in zip(stage.parameters(), twin.parameters(), strict=True):
            assert parameter.grad is not None
            assert expected.grad is not None
            assert torch.equal(parameter.grad, expected.grad)


def test_the_microbatchs_number_passes_through_unchanged() -> None:
    """Through sixteen layers, for numbers up to 1,023."""
    hidden = batch_of(1024, 1, WIDTH)
    for stage in range(16):
        hidden = layer(stage)(hidden)
    assert torch.equal(hidden[:, 0], torch.arange(1024.0))
