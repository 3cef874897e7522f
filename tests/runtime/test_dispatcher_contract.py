"""The walls around the dispatcher: sole reader of the bus, led by the arbiter, waiting for none."""

import ast
import asyncio
import inspect
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import rrfp_async
import rrfp_async as r
from rrfp_async.arbiter import Arbiter, Decision, Reason
from rrfp_async.ids import Link
from rrfp_async.tasks import kinds
from tests.runtime.parity import build, chain_case, differences, pipelined
from tests.runtime.reference import run_reference
from tests.runtime.worlds import gated, watched

PACKAGE = Path(rrfp_async.__file__).parent
WRAPPER = "sim/delayed_bus.py"
"""A bus around another one, which it reads for whoever reads it."""


def _nodes(kind: type[ast.AST]) -> Iterator[tuple[str, Any]]:
    """Every node of that kind in the package, with its file."""
    for path in sorted(PACKAGE.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, kind):
                yield path.relative_to(PACKAGE).as_posix(), node


def test_only_the_dispatcher_reads_the_bus() -> None:
    """`deliver` is used in dispatcher.py alone, `next_message` by the bus's own `deliver`."""
    users = {file for file, node in _nodes(ast.Attribute) if node.attr == "deliver"}
    assert users == {"dispatcher.py", WRAPPER}
    users = {file for file, node in _nodes(ast.Attribute) if node.attr == "next_message"}
    assert users == {"bus/base.py", "bus/zeromq.py", WRAPPER}
    taken_by_name = ("deliver", "next_message")
    named = {file for file, node in _nodes(ast.Constant) if node.value in taken_by_name}
    assert named == set()


def test_only_the_bus_defines_the_next_message() -> None:
    """The method is the bus's."""
    definitions = {
        file for file, node in _nodes(ast.AsyncFunctionDef) if node.name == "next_message"
    }
    definitions |= {file for file, node in _nodes(ast.FunctionDef) if node.name == "next_message"}
    assert "bus/base.py" in definitions
    assert {file.split("/")[0] for file in definitions - {WRAPPER}} == {"bus"}


async def test_in_a_run_only_the_dispatcher_reads_the_bus(tmp_path: Path) -> None:
    """Whoever reads in a run is `dispatcher._read`, through `deliver`: one reader at a time."""
    callers: set[tuple[str, str]] = set()

    def note() -> None:
        deliver, reader = inspect.stack()[2:4]
        assert deliver.function == "deliver"
        callers.add((Path(reader.filename).name, reader.function))

    case = chain_case(3, microbatches=4)
    await pipelined(case, tmp_path, wrap=lambda world: watched(world, on_read=note))
    assert callers == {("dispatcher.py", "_read")}


def _forwards(order: list[str]) -> list[str]:
    return [task for task in order if "F" in task]


async def test_what_the_arbiter_chooses_is_what_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Patching Arbiter.choose changes the dispatch order of a Runtime, and only that: parity."""
    case = chain_case(2, microbatches=4, options={"limit": 4})
    choose = Arbiter.choose
    plain = await pipelined(case, tmp_path / "plain")
    assert _forwards(plain.orders[0]) == ["0F0", "0F1", "0F2", "0F3"]

    def youngest(self: Arbiter) -> Decision:
        decision = choose(self)
        forwards = [task for task in self._ready if task.kind is r.TaskKind.F]
        if decision.task is None or not forwards:
            return decision
        task = max(forwards, key=lambda t: t.microbatch)
        return Decision(task, None, decision.ready, (), decision.reason)

    monkeypatch.setattr(Arbiter, "choose", youngest)
    run = await pipelined(case, tmp_path / "patched")
    assert _forwards(run.orders[0]) == ["0F3", "0F2", "0F1", "0F0"]
    assert differences(run_reference(case), run.outcomes) == []


async def _until_stuck(monkeypatch: pytest.MonkeyPatch, *, limit: int, training: bool) -> list[str]:
    """Rank 0's dispatches when no transfer ever completes."""
    dispatched: list[str] = []
    stuck = asyncio.Event()
    choose, commit = Arbiter.choose, Arbiter.commit

    def watching(self: Arbiter) -> Decision:
        decision = choose(self)
        if decision.reason is Reason.BACKPRESSURE:
            stuck.set()
        return decision

    def noting(self: Arbiter, decision: Decision) -> None:
        commit(self, decision)
        if decision.task is not None and decision.task.stage == 0:
            dispatched.append(str(decision.task))

    monkeypatch.setattr(Arbiter, "choose", watching)
    monkeypatch.setattr(Arbiter, "commit", noting)
    never = asyncio.Event()
    case = chain_case(2, microbatches=8, options={"limit": limit})

    async def main(world: r.World) -> None:
        async with build(case, list(case.stages), gated(world, never), None) as runtime:
            args = case.steps[0].inputs.get(world.rank, ())
            step = runtime.train_step if training else runtime.eval_step
            await step(*args, target=case.steps[0].target)

    run = asyncio.create_task(r.run_local(2, main))
    async with asyncio.timeout(5.0):
        await stuck.wait()
    for _ in range(20):  # nothing more is dispatched however often the loop turns
        await asyncio.sleep(0)
    run.cancel()
    await asyncio.gather(run, return_exceptions=True)
    return dispatched


@pytest.mark.parametrize("training", [True, False], ids=["training", "evaluation"])
@pytest.mark.parametrize("limit", [1, 3])
async def test_computation_goes_on_to_its_bound_while_no_transfer_completes(
    monkeypatch: pytest.MonkeyPatch, limit: int, training: bool
) -> None:
    """No task waits for its send: rank 0 runs as many forwards as the limit lets it, then stops."""
    dispatched = await _until_stuck(monkeypatch, limit=limit, training=training)
    assert dispatched == [f"0F{j}" for j in range(limit)]


def test_kinds_know_no_transfer() -> None:
    """No kind awaits anything but the device: the source says so."""
    tree = ast.parse(inspect.getsource(kinds))
    awaits = [node.value for node in ast.walk(tree) if isinstance(node, ast.Await)]
    assert {ast.unparse(call.func) for call in awaits} == {"_compute", "context.device.run"}


async def test_a_gradient_may_overtake_an_activation_on_another_link(tmp_path: Path) -> None:
    """Activations and gradients between two ranks share no link."""
    topology = r.Topology(2)
    edge = r.Edge(0, 1)
    assert topology.activation_link(edge) == Link(0, 1)
    assert topology.gradient_link(edge) == Link(1, 0)


async def test_a_wake_up_between_choosing_and_waiting_is_not_lost(tmp_path: Path) -> None:
    """A hundred short steps on three ranks end: no wake-up falls between two stools."""
    case = chain_case(3, microbatches=3)

    async def main(world: r.World) -> int:
        async with build(case, list(case.stages), world, None) as runtime:
            args = case.steps[0].inputs.get(world.rank, ())
            for _ in range(100):
                await runtime.train_step(*args, target=case.steps[0].target)
        return 100

    torch.set_num_threads(1)
    async with asyncio.timeout(30.0):
        assert await r.run_local(3, main) == [100] * 3
