"""A rank's next task while one runs: it is given ahead, and gives way to a better one."""

import asyncio
import gc
import time
from collections import defaultdict
from collections.abc import Callable, Coroutine, Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import rrfp_async as r
from rrfp_async.arbiter import Arbiter, Decision, Reason
from rrfp_async.ids import Link
from rrfp_async.tasks.generators import Generators
from tests.runtime.conftest import Made
from tests.runtime.parity import (
    Run,
    build,
    differences,
    linear_stages,
    pipelined,
    records_of,
)
from tests.runtime.reference import Case, Step, run_reference
from tests.runtime.watched_device import SOON_S, Holding, Told, with_watched_device
from tests.runtime.worlds import gated

ACTIVATIONS, GRADIENTS = Link(0, 1), Link(1, 0)
MICROBATCHES = 4


class Oldest(r.RankedHint):
    """The lowest microbatch, forwards before backwards."""

    def rank(self, task: r.TaskId) -> tuple[int, bool]:
        return task.microbatch, task.kind is not r.TaskKind.F


def case_of(stages: Sequence[nn.Module], **options: Any) -> Case:
    """A training step on a chain, with room for every microbatch."""
    torch.manual_seed(3)
    steps = [Step({0: (torch.randn(8, 8),)}, torch.randn(8, 8))]
    return Case(stages, steps, MICROBATCHES, options={"limit": 8, **options})


class Scene:
    """Two ranks; the device of one is watched, and the sends that are late wait for the gate."""

    def __init__(
        self, case: Case, folder: Path, *, rank: int, late: Callable[[Link, int], bool]
    ) -> None:
        self.told = Told()
        self.gate = asyncio.Event()
        self._case = case
        self._folder = folder
        self._rank = rank
        self._late = late

    def _wrap(self, world: r.World) -> r.World:
        world = gated(world, self.gate, self._late)
        # A task here waits for other ranks' tasks, which what holds torch's generators never does.
        world = replace(world, generators=Generators(shared=False))
        return with_watched_device(world, self.told) if world.rank == self._rank else world

    async def play(self, script: Callable[[], Coroutine[Any, Any, None]]) -> Run:
        """Run the case beside the script."""
        running = asyncio.create_task(pipelined(self._case, self._folder, wrap=self._wrap))
        try:
            async with asyncio.timeout(10.0):
                await script()
                return await running
        finally:
            running.cancel()
            await asyncio.gather(running, return_exceptions=True)

    def took_back(self) -> list[str]:
        """What was asked back, and whether it came."""
        return [event for event in self.told.events if not event.startswith("give ")]


@pytest.fixture
def becomes_ready(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], asyncio.Event]:
    """Makes an event that is set when a task of that name becomes ready."""
    events: defaultdict[str, asyncio.Event] = defaultdict(asyncio.Event)
    add = Arbiter.add

    def noting(self: Arbiter, tasks: Iterable[r.TaskId]) -> None:
        tasks = list(tasks)
        add(self, tasks)
        for task in tasks:
            events[str(task)].set()

    monkeypatch.setattr(Arbiter, "add", noting)
    return events.__getitem__


async def better_arrives(folder: Path, ready: Callable[[str], asyncio.Event]) -> tuple[Scene, Run]:
    """On the last rank F1 runs, F2 is given and F3 waits when F0 arrives; checked for parity."""
    last = Holding(of=0)
    case = case_of([*linear_stages(1), last], hint=Oldest())
    scene = Scene(case, folder, rank=1, late=lambda *which: which == (ACTIVATIONS, 0))

    async def script() -> None:
        await last.until_begun()
        await scene.told.until("give 1F2")
        await ready("1F3").wait()
        scene.gate.set()
        await scene.told.until("give 1F0")
        last.let_go.set()

    run = await scene.play(script)
    assert last.ran == list(range(MICROBATCHES)), "a task ran twice, or not at all"
    assert differences(run_reference(case), run.outcomes) == []
    return scene, run


async def test_a_better_task_takes_the_place_of_the_one_given(
    tmp_path: Path, becomes_ready: Callable[[str], asyncio.Event]
) -> None:
    """It is next; what it replaced runs later, once; parity."""
    scene, run = await better_arrives(tmp_path, becomes_ready)
    assert scene.told.events[:4] == ["give 1F1", "give 1F2", "took back 1F2", "give 1F0"]
    assert scene.took_back() == ["took back 1F2"]
    assert run.orders[1] == ["1F1", "1F0", "1B0", "1B1", "1F2", "1B2", "1F3", "1B3"]


async def test_the_log_shows_the_choice_that_was_carried_out(
    tmp_path: Path, becomes_ready: Callable[[str], asyncio.Event]
) -> None:
    """Not the one that was taken back: what was ready then, and what it ranks below."""
    await better_arrives(tmp_path, becomes_ready)
    first, second, *_ = records_of(tmp_path, 1)
    assert (first["task"], first["passed_over"][0]) == ("1F1", "1F0")
    assert (second["task"], second["ready"], second["passed_over"]) == ("1F0", 3, [])
    assert second["reason"] == Reason.FIRST.value
    assert second["waited_s"] == 0.0, "the device went on to it by itself"


async def test_a_task_that_is_no_better_changes_nothing(
    tmp_path: Path, becomes_ready: Callable[[str], asyncio.Event]
) -> None:
    """F0 runs and B0 is given when F3 arrives: nothing is taken back; parity."""
    last = Holding(of=0)
    case = case_of([*linear_stages(1), last], hint=Oldest())
    scene = Scene(case, tmp_path, rank=1, late=lambda *which: which == (ACTIVATIONS, 3))

    async def script() -> None:
        await last.until_begun()
        await scene.told.until("give 1B0")  # ready once F0 is sure to run
        await becomes_ready("1F2").wait()
        scene.gate.set()
        await becomes_ready("1F3").wait()
        for _ in range(10):
            await asyncio.sleep(0)
        last.let_go.set()

    run = await scene.play(script)
    assert scene.took_back() == []
    assert run.orders[1] == [f"1{kind}{j}" for j in range(MICROBATCHES) for kind in "FB"]
    assert [event.removeprefix("give ") for event in scene.told.events] == run.orders[1]
    assert differences(run_reference(case), run.outcomes) == []


async def test_a_weight_gradient_gives_way_to_a_gradient_that_arrives(tmp_path: Path) -> None:
    """Without a hint: I0 runs and W0 is given when the others' gradients come; parity."""
    first, last = Holding(of=0, backward=True), Holding(of=0)
    case = case_of([first, last])
    scene = Scene(
        case, tmp_path, rank=0, late=lambda link, number: link == GRADIENTS and number > 0
    )

    async def script() -> None:
        await first.until_ran(MICROBATCHES)
        last.let_go.set()
        await first.until_begun()
        await scene.told.until("give 0W0")
        scene.gate.set()
        await scene.told.until("took back 0W0")
        first.let_go.set()

    run = await scene.play(script)
    assert run.orders[0][:5] == ["0F0", "0F1", "0F2", "0F3", "0I0"]
    assert "I" in run.orders[0][5], "a W ran before an I that was ready"
    assert sorted(run.orders[0]) == sorted(f"0{kind}{j}" for kind in "FIW" for j in range(4))
    assert differences(run_reference(case), run.outcomes) == []


async def test_a_task_that_has_begun_is_left_to_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """F0 arrives when F2 runs, of which the loop has not heard: it comes after F2; parity.

    The loop is kept from hearing of it while it chooses.
    """
    last = Holding(of=0)
    case = case_of([*linear_stages(1), last], hint=Oldest())
    scene = Scene(case, tmp_path, rank=1, late=lambda *which: which == (ACTIVATIONS, 0))
    choose = Arbiter.choose

    def slowly(self: Arbiter) -> Decision:
        decision = choose(self)
        if str(decision.task) == "1F0" and not last.let_go.is_set():
            last.let_go.set()
            deadline = time.monotonic() + SOON_S
            while len(last.ran) < 2 and time.monotonic() < deadline:
                time.sleep(0.001)
        return decision

    async def script() -> None:
        await last.until_begun()
        await scene.told.until("give 1F2")
        monkeypatch.setattr(Arbiter, "choose", slowly)
        scene.gate.set()

    run = await scene.play(script)
    assert scene.took_back() == ["kept 1F2"]
    assert run.orders[1][:3] == ["1F1", "1F2", "1F0"]
    assert len(set(run.orders[1])) == len(run.orders[1]) == 2 * MICROBATCHES
    assert differences(run_reference(case), run.outcomes) == []


@pytest.mark.parametrize(
    ("options", "training", "most"),
    [
        ({}, True, 2),
        ({"activation_budget_bytes": 2**20}, True, 1),
        ({}, False, 1),
    ],
    ids=["training", "a budget", "an evaluation"],
)
async def test_at_most_one_task_is_given_ahead(
    tmp_path: Path, options: dict[str, Any], training: bool, most: int
) -> None:
    """None where what a task keeps or sends decides about the next; parity."""
    case = case_of(linear_stages(2), hint="f-priority", **options)
    case = replace(case, steps=[replace(step, training=training) for step in case.steps])
    told = [Told(), Told()]
    run = await pipelined(case, tmp_path, wrap=lambda w: with_watched_device(w, told[w.rank]))
    assert told[0].most == most
    assert told[1].most <= most
    assert differences(run_reference(case), run.outcomes) == []


# -- steps that end early --------------------------------------------------------------------------


class Ends:
    """Two ranks, whose step ends early; the device of rank 1 is watched, all run out at the end."""

    def __init__(self, *stages: nn.Module) -> None:
        self.told = Told()
        self.errors: list[Any] = []
        self._stages = list(stages)
        self._case = case_of(stages, hint="f-priority")

    async def run(self, script: Callable[[list["asyncio.Task[None]"]], Any]) -> None:
        """Both ranks, beside the script, which gets their tasks."""
        async with r.local_world(2) as worlds, asyncio.timeout(10.0):
            ranks = [asyncio.create_task(self._main(world)) for world in worlds]
            try:
                await script(ranks)
            finally:
                self.errors = await asyncio.gather(*ranks, return_exceptions=True)
            for world in worlds:
                await world.device.run(lambda: None)

    async def _main(self, world: r.World) -> None:
        watched = with_watched_device(world, self.told) if world.rank == 1 else world
        async with build(self._case, self._stages, watched, None) as runtime:
            [step] = self._case.steps
            await runtime.train_step(*step.inputs.get(world.rank, ()), target=step.target)


async def fails_with_another_given() -> tuple[Ends, Holding]:
    """On rank 1, F0 fails when F1 is given."""
    last = Holding(of=0, error="no forward today")
    ends = Ends(*linear_stages(1), last)

    async def script(_ranks: list["asyncio.Task[None]"]) -> None:
        await last.until_begun()
        await ends.told.until("give 1F1")
        last.let_go.set()

    await ends.run(script)
    return ends, last


async def ends_with_another_given(how: str) -> tuple[Ends, Holding]:
    """On rank 1, F0 runs and F1 is given when the step ends; what runs then ends, or fails."""
    first = Holding(of=3, error="no forward today")
    last = Holding(of=0, error="nor here" if how == "cancelled" else None)
    ends = Ends(first, last)

    async def script(ranks: list["asyncio.Task[None]"]) -> None:
        await last.until_begun()
        await ends.told.until("give 1F1")
        if how == "cancelled":
            ranks[1].cancel()
        else:
            first.let_go.set()
        await ends.told.until("took back 1F1")
        last.let_go.set()
        first.let_go.set()

    await ends.run(script)
    return ends, last


async def test_a_task_that_fails_takes_the_one_given_behind_it_along() -> None:
    """F1 never runs; both ranks are told what failed."""
    ends, last = await fails_with_another_given()
    assert [type(error) for error in ends.errors] == [r.StepFailed] * 2
    assert {(error.rank, error.task) for error in ends.errors} == {(1, "1F0")}
    assert last.ran == [0], "a task ran behind the one that failed"


@pytest.mark.parametrize("how", ["cancelled", "fails elsewhere"])
async def test_what_was_given_does_not_run_once_the_step_has_ended(how: str) -> None:
    """F0 runs to its end, and F1 never does."""
    ends, last = await ends_with_another_given(how)
    told = {"cancelled": asyncio.CancelledError, "fails elsewhere": r.StepFailed}
    assert [type(error) for error in ends.errors] == [r.StepFailed, told[how]]
    assert last.ran == [0], "a task ran after the step's end"


@pytest.mark.parametrize("how", ["fails here", "cancelled", "fails elsewhere"])
async def test_a_step_that_ends_early_leaves_the_loop_nothing_to_complain_of(
    how: str, caplog: pytest.LogCaptureFixture
) -> None:
    """No callback raises, and no task's error or cancellation goes unheard."""
    await (fails_with_another_given() if how == "fails here" else ends_with_another_given(how))
    gc.collect()  # futures complain when they are dropped
    assert [record.getMessage() for record in caplog.records if record.name == "asyncio"] == []


async def test_what_a_task_hands_over_after_the_steps_end_is_dropped(made: Made) -> None:
    """Between stages of one rank: nobody will take it, and a failed Runtime keeps nothing."""
    first = Holding(of=0)
    stages = [first, *linear_stages(1)]
    case = replace(case_of(stages), chunks=2)
    async with (
        r.local_world(1, r.Topology(1, chunks=2)) as [world],
        build(case, stages, world, None) as runtime,
    ):
        [step] = case.steps
        running = asyncio.create_task(runtime.train_step(*step.inputs[0], target=step.target))
        await first.until_begun()
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running
        first.let_go.set()
        await world.device.run(lambda: None)
    assert [stage.waiting_arrivals for stage in made.stages] == [0, 0]
