"""Data parallelism in one process: HAZARDS 17, and 15 over replicas."""

import copy
import time
from pathlib import Path

import pytest
import torch
from torch import nn

import rrfp_async as r
from rrfp_async.averaging import Averaging
from rrfp_async.gpu.loopback_replicas import ReplicaFabric
from rrfp_async.ids import TaskId
from rrfp_async.tasks.stage import Stage
from tests.runtime.parity import order_of, shaken
from tests.runtime.replicas import Run, batches, differences, gradients, layers, part, train

PP2_DP2 = r.Topology(2, dp=2)
F64_SUMS = 1e-14
MODEL_LR = 0.1
parse = TaskId.parse


def sgd(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=MODEL_LR)


def assert_replicas_equal(run: Run, topology: r.Topology) -> None:
    """Gradients and parameters, to the bit."""
    first = run.of_replica(0, topology)
    for dp in range(1, topology.dp):
        other = run.of_replica(dp, topology)
        assert differences(gradients(first), gradients(other)) == []
        for stage, held in first.items():
            pairs = zip(held.parameters(), other[stage].parameters(), strict=True)
            assert all(torch.equal(a, b) for a, b in pairs)


def whole_after(
    model: list[nn.Module],
    steps: list[tuple[torch.Tensor, torch.Tensor]],
    clip: float | None = None,
) -> tuple[list[float], list[float], dict[int, nn.Module]]:
    """Losses, gradient norms and stages of the unpartitioned model on whole batches."""
    whole = nn.Sequential(*model)
    optimizer = sgd(list(whole.parameters()))
    losses, norms = [], []
    for x, y in steps:
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(whole(x), y)
        loss.backward()
        if clip is not None:
            norms.append(nn.utils.clip_grad_norm_(whole.parameters(), clip).item())
        optimizer.step()
        losses.append(loss.item())
    return losses, norms, dict(enumerate(model))


@pytest.mark.parametrize("hint", ["bf", "bfw", "auto"])
@pytest.mark.parametrize(
    "topology",
    [PP2_DP2, r.Topology(1, dp=3), r.Topology(2, chunks=2, placement="v", dp=2)],
    ids=["PP2 x DP2", "PP1 x DP3", "PP2 x DP2, in a v"],
)
async def test_replicas_train_as_one_model_on_the_whole_batch(
    topology: r.Topology, hint: str, tmp_path: Path
) -> None:
    """Three steps: replicas equal to the bit, loss and gradients the whole model's in fp64."""
    count, steps = topology.num_stages, batches(3, rows=12 if topology.dp == 3 else 8)
    run = await train(
        layers(count), topology, steps, folder=tmp_path, hint=hint, options={"optimizer": sgd}
    )
    losses, _, whole = whole_after(layers(count), steps)
    assert_replicas_equal(run, topology)
    found = gradients(run.of_replica(0, topology))
    assert differences(found, gradients(whole), within=F64_SUMS) == []
    for of_rank in run.results:
        assert [result.loss for result in of_rank] == pytest.approx(losses, abs=F64_SUMS)
    for rank in range(topology.world_size):
        place = rank // topology.dp
        own = [f"{stage}R0" for stage in reversed(topology.stages_of(place))]
        assert [task for task in order_of(tmp_path, rank) if "R" in task] == own * 3


async def test_replicas_agree_to_the_bit_whatever_order_each_dispatches_in(tmp_path: Path) -> None:
    """HAZARDS 17: in fp32, ranks of a replica delayed unlike the other's; the same in every run."""
    seen = []
    for seed in range(5):
        folder = tmp_path / str(seed)
        run = await train(
            layers(2, torch.float32),
            PP2_DP2,
            batches(2, torch.float32),
            folder=folder,
            wrap=lambda rank, seed=seed: shaken(10 * seed + rank % 2),
            hint="bf",
            options={"optimizer": sgd},
        )
        assert_replicas_equal(run, PP2_DP2)
        seen.append(
            (gradients(run.of_replica(0, PP2_DP2)), [order_of(folder, n) for n in range(4)])
        )
    for found, _ in seen[1:]:
        assert differences(seen[0][0], found) == []
    assert any(orders[0] != orders[1] or orders[2] != orders[3] for _, orders in seen)


async def test_a_higher_stage_is_averaged_while_lower_ones_still_compute(tmp_path: Path) -> None:
    """On a rank with both stages, the first R comes before the last B."""
    topology = r.Topology(1, chunks=2, dp=2)
    await train(layers(2), topology, batches(1), folder=tmp_path, hint="bf")
    order = order_of(tmp_path, 0)
    assert order.index("1R0") < max(order.index(f"0B{j}") for j in range(4))
    assert order.index("1R0") < order.index("0R0")


async def test_gradients_are_averaged_once_for_several_steps() -> None:
    """With update=False they wait, each replica's own; the update averages the sum."""
    run = await train(
        layers(2), PP2_DP2, batches(2), updates=lambda step: step == 1, options={"optimizer": sgd}
    )
    whole = layers(2)
    for x, y in batches(2):
        nn.functional.mse_loss(nn.Sequential(*whole)(x), y).backward()
    found, wanted = gradients(run.of_replica(0, PP2_DP2)), gradients(dict(enumerate(whole)))
    assert differences(found, wanted, within=F64_SUMS) == []
    assert_replicas_equal(run, PP2_DP2)
    alone = await train(layers(2), PP2_DP2, batches(1), updates=lambda _: False)
    first, second = (gradients(alone.of_replica(dp, PP2_DP2)) for dp in (0, 1))
    assert sorted(differences(first, second)) == sorted(first)


class Hundredfold(nn.Linear):
    """A layer whose weight's gradient is a hundred times as large as it should be."""

    def __init__(self) -> None:
        super().__init__(8, 8, bias=False, dtype=torch.float64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weight = self.weight * 100 - (self.weight * 99).detach()
        return nn.functional.linear(x, weight)


class Picky(nn.Module):
    """Uses one of its layers only for samples of a replica, and one for none."""

    def __init__(self) -> None:
        super().__init__()
        self.always = nn.Linear(8, 8, dtype=torch.float64)
        self.sometimes = nn.Linear(8, 8, dtype=torch.float64)
        self.never = nn.Linear(8, 8, dtype=torch.float64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.always(x)
        return y + self.sometimes(x) if x[0, 0] > 100 else y


async def test_a_gradient_that_one_replica_lacks_counts_as_zero_there() -> None:
    """The mean of two is half of the one that there is; one that all lack stays None."""
    [(x, y)] = batches(1)
    x[4:, 0] = 200.0  # the second replica's samples
    torch.manual_seed(1)
    model: list[nn.Module] = [Picky(), layers(1)[0]]
    run = await train(model, PP2_DP2, [(x, y)])
    alone = await train(model, r.Topology(2), [(x[4:], y[4:])])
    assert_replicas_equal(run, PP2_DP2)
    found = gradients(run.of_replica(0, PP2_DP2))
    half = alone.stages[0][0].sometimes.weight.grad / 2
    assert torch.equal(found["0.sometimes.weight"], half)
    assert found["0.never.weight"] is None


@pytest.mark.parametrize("topology", [PP2_DP2, r.Topology(2, chunks=2, placement="v", dp=2)])
async def test_tied_copies_are_summed_before_they_are_averaged(topology: r.Topology) -> None:
    """Copies stay equal to each other on all replicas, and train as one weight."""
    last = topology.last_stage
    tied = r.Topology(
        topology.pp,
        chunks=topology.chunks,
        placement=topology.placement,
        dp=2,
        tied=[{0: "0.weight", last: "0.weight"}],
    )
    model = layers(tied.num_stages)
    model[last][0].weight.data.copy_(model[0][0].weight.data)
    run = await train(model, tied, batches(2), options={"optimizer": sgd})
    assert_replicas_equal(run, tied)
    whole = layers(tied.num_stages)
    whole[last][0].weight = whole[0][0].weight
    whole_after(whole, batches(2))
    held = run.of_replica(0, tied)
    assert torch.equal(held[0][0].weight, held[last][0].weight)
    assert torch.equal(held[0][0].weight.grad, held[last][0].weight.grad)
    assert (held[0][0].weight - whole[0][0].weight).abs().max() < F64_SUMS


async def test_one_norm_over_pipeline_and_replicas_clips_as_torch_does_the_whole_model() -> None:
    """HAZARDS 15: stage 0's gradients x100; each stage counts once, not once for each replica."""

    def large() -> list[nn.Module]:
        made = layers(2)
        made[0].insert(0, Hundredfold())
        return made

    run = await train(
        large(), PP2_DP2, batches(3), options={"optimizer": sgd, "max_grad_norm": 0.5}
    )
    _, norms, whole = whole_after(large(), batches(3), clip=0.5)
    assert_replicas_equal(run, PP2_DP2)
    for of_rank in run.results:
        assert [result.grad_norm for result in of_rank] == pytest.approx(norms, rel=1e-12)
    found = gradients(run.of_replica(1, PP2_DP2))
    assert differences(found, gradients(whole), within=F64_SUMS) == []


async def test_an_inf_on_one_replica_skips_the_update_on_all() -> None:
    """It reaches all with the mean; nobody steps, and every scaler backs off."""
    [(x, y)] = batches(1, torch.float32)
    y[-1] = float("inf")
    model = layers(2, torch.float32)
    scaler = torch.amp.GradScaler("cpu", 8.0)
    options = {"optimizer": sgd, "grad_scaler": scaler}
    run = await train(model, PP2_DP2, [(x, y)], options=options)
    assert {result.skipped for of_rank in run.results for result in of_rank} == {True}
    for rank, held in enumerate(run.stages):
        for stage, module in held.items():
            pairs = zip(module.parameters(), model[stage].parameters(), strict=True)
            assert all(torch.equal(a, b) for a, b in pairs), rank


async def test_replicas_draw_other_numbers_from_streams_that_a_reference_can_draw_from() -> None:
    """Dropout: each replica's gradients are those of its own streams, in any arrival order."""
    dtype = torch.float64
    model = [nn.Sequential(layer, nn.Dropout(0.5)) for layer in layers(2)]
    [(x, y)] = batches(1, dtype)
    y = torch.cat([y[:4], y[:4]])
    x = torch.cat([x[:4], x[:4]])
    run = await train(
        model,
        PP2_DP2,
        [(x, y)],
        wrap=shaken,
        updates=lambda _: False,
        microbatches=2,
        seed=11,
    )
    for dp in (0, 1):
        alone = copy.deepcopy(model)
        for j, (part_x, part_y) in enumerate(zip(x[:4].split(2), y[:4].split(2), strict=True)):
            hidden = part_x
            for stage, held in enumerate(alone):
                with r.rng_stream(11, 0, stage, j, replica=dp):
                    hidden = held(hidden)
            (nn.functional.mse_loss(hidden, part_y) * 0.5).backward()
        wanted = gradients(dict(enumerate(alone)))
        assert differences(gradients(run.of_replica(dp, PP2_DP2)), wanted) == []
    first, second = (gradients(run.of_replica(dp, PP2_DP2)) for dp in (0, 1))
    assert differences(first, second) != []


async def test_an_evaluation_gives_the_mean_loss_of_all_replicas() -> None:
    """And leaves gradients alone."""
    model, [(x, y)] = layers(2), batches(1)

    async def main(world: r.World) -> float | None:
        held = [copy.deepcopy(model[s]) for s in PP2_DP2.stages_of(world.place.pp)]
        config = r.Config(microbatches=2)
        async with r.Runtime(
            held, world=world, config=config, loss_fn=nn.functional.mse_loss
        ) as runtime:
            mine, target = part((x, y), world)
            result = await runtime.eval_step(mine, target=target)
            assert all(p.grad is None for p in runtime.parameters())
            return result.loss

    losses = await r.run_local(4, main, topology=PP2_DP2)
    wanted = nn.functional.mse_loss(nn.Sequential(*model)(x), y).item()
    assert losses == pytest.approx([wanted] * 4, abs=F64_SUMS)


async def test_every_replica_may_take_its_batches_from_data() -> None:
    """Each from its own iterator; steps without arguments."""
    model, steps = layers(2), batches(2)

    async def main(world: r.World) -> list[float | None]:
        held = [copy.deepcopy(model[s]) for s in PP2_DP2.stages_of(world.place.pp)]
        async with r.Runtime(
            held,
            world=world,
            config=r.Config(microbatches=2),
            loss_fn=nn.functional.mse_loss,
            optimizer=sgd,
            data=(part(batch, world) for batch in steps),
        ) as runtime:
            return [(await runtime.train_step()).loss for _ in steps]

    losses, _, _ = whole_after(layers(2), steps)
    for of_rank in await r.run_local(4, main, topology=PP2_DP2):
        assert of_rank == pytest.approx(losses, abs=F64_SUMS)


async def test_reductions_follow_one_order_that_does_not_depend_on_dispatch() -> None:
    """From the highest stage down, each after the one before and the tied sums that concern it."""
    topology = r.Topology(1, chunks=3)
    held = {index: Stage(index, layer, topology) for index, layer in enumerate(layers(3))}
    end = ReplicaFabric().open((0, 1), 0, torch.device("cpu"), time.perf_counter)
    async with r.local_world(1, topology) as [world]:
        averaging = Averaging(held, end, tied={parse("0R0"): (0, 2)}, number=1, device=world.device)
    end.close()
    assert list(averaging.tasks().items()) == [
        (parse("2R1"), (2, parse("0R0"))),
        (parse("1R1"), (1, parse("2R1"))),
        (parse("0R1"), (0, parse("0R0"), parse("1R1"))),
    ]
