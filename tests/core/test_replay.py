"""Replays: the log of an earlier run as a schedule, executed as it stands or as a ranking."""

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rrfp_async.arbiter import Decision, Reason
from rrfp_async.config import Config
from rrfp_async.hints import HintOrder
from rrfp_async.hints.recorded import ReplayedSchedule
from rrfp_async.ids import Edge
from rrfp_async.topology import Topology
from rrfp_async.trace.records import SCHEMA
from tests.core.fixed_order import Cores, Decided, tasks_of, write_logs
from tests.core.strategies import GRAPHS, NAMED, SEEDS, SHUFFLED, Graph
from tests.core.words import words

GRAPH = Topology(5, (Edge(0, 2), Edge(1, 2), Edge(2, 3), Edge(0, 3), Edge(3, 4)))
FIRST = "0F0 0F1 0B0 0B1"
SECOND = "1F0 1B0 1F1 1B1"


def lines(step: Any, listed: str) -> str:
    """The log of a step on a rank, as `JsonlTrace` writes it, with what a replay needs."""
    told = {"schema": SCHEMA, "event": "dispatch", "step": step}
    return "".join(json.dumps({**told, "task": word}) + "\n" for word in listed.split())


def logs(folder: Path, *texts: str) -> str:
    """A log for each rank; returns the hint that names their folder."""
    for rank, text in enumerate(texts):
        (folder / f"rank{rank}.jsonl").write_text(text, encoding="utf-8")
    return f"replay:{folder}"


def recorded(
    folder: Path, config: Config, topology: Topology, steps: list[tuple[int, bool]]
) -> tuple[str, list[Decided]]:
    """Run and log steps of (microbatches, training); returns the hint and what was decided."""
    cores = Cores(config, topology, seed=11)
    decided = [cores.run_step(count, training=training) for count, training in steps]
    write_logs(folder, decided)
    return f"replay:{folder}", decided


def refused(hint: str, *, ranks: int = 2, **settings: Any) -> str:
    """The message that a replay is refused with."""
    with pytest.raises(ValueError, match=r".") as caught:
        Config(**{"microbatches": 2, "hint": hint, **settings}).check_order(Topology(ranks))
    return str(caught.value)


# -- faithful --------------------------------------------------------------------------------------


@pytest.mark.parametrize("limit", ["auto", 3])
def test_a_replay_repeats_the_log_step_by_step(tmp_path: Path, limit: Any) -> None:
    """Sizes and modes change from step to step, evaluations count, and events come otherwise.

    The limit that the run kept is enough for its replay.
    """
    steps = [(4, True), (9, True), (9, False), (1, True), (6, True)]
    run = Config(microbatches=4, hint="bf", limit=limit)
    hint, before = recorded(tmp_path / "first", run, GRAPH, steps)
    config = Config(microbatches=4, hint=hint, limit=limit)
    assert config.execution.binding
    cores = Cores(config, GRAPH, seed=12)
    for (count, training), decided in zip(steps, before, strict=True):
        after = cores.run_step(count, training=training)
        assert tasks_of(after) == tasks_of(decided)
        assert [[each.hint_position for each in rank] for rank in after] == [
            list(range(len(rank))) for rank in decided
        ]
    assert tasks_of(before[0]) != tasks_of(Cores(run, GRAPH, seed=12).run_step(4))


@given(
    graph=GRAPHS,
    hint=NAMED | SHUFFLED,
    microbatches=st.integers(1, 10),
    limit=st.integers(1, 9),
    ordered=st.booleans(),
    seed=SEEDS,
)
def test_whatever_ran_can_be_replayed_under_the_limit_it_ran_under(
    *, graph: Graph, hint: str | HintOrder, microbatches: int, limit: int, ordered: bool, seed: int
) -> None:
    """On every graph and in every order that readiness allows, with events in another order."""
    stages, edges = graph
    topology = Topology(stages, tuple(Edge(*pair) for pair in edges))
    settings: dict[str, Any] = {
        "microbatches": microbatches, "limit": limit, "deterministic": ordered
    }  # fmt: skip
    first = Cores(Config(hint=hint, **settings), topology, seed=seed)
    rows = tasks_of(first.run_step())
    replayed = ReplayedSchedule(Path("log"), [rows])
    second = Cores(Config(hint=replayed, **settings), topology, seed=seed + 1)
    assert tasks_of(second.run_step()) == rows
    assert second.peaks == first.peaks


def test_steps_beyond_the_log_repeat_its_last(tmp_path: Path) -> None:
    """A longer run goes on as the recorded one ended."""
    hint = logs(
        tmp_path,
        lines(0, FIRST) + lines(1, "0F1 0F0 0B0 0B1"),
        lines(0, SECOND) + lines(1, "1F0 1F1 1B0 1B1"),
    )
    cores = Cores(Config(microbatches=2, hint=hint), Topology(2), seed=1)
    ran = [[words(row) for row in tasks_of(cores.run_step())] for _ in range(4)]
    assert ran[0] == [FIRST, SECOND]
    assert ran[1] == ran[2] == ran[3] == ["0F1 0F0 0B0 0B1", "1F0 1F1 1B0 1B1"]


def test_a_recorded_training_step_serves_an_evaluation_and_not_the_reverse(tmp_path: Path) -> None:
    """Its forwards are listed; an evaluation has no backwards to list, which the error names."""
    hint = logs(
        tmp_path, lines(0, FIRST) + lines(1, "0F1 0F0"), lines(0, SECOND) + lines(1, "1F0 1F1")
    )
    cores = Cores(Config(microbatches=2, hint=hint), Topology(2), seed=1)
    assert [words(row) for row in tasks_of(cores.run_step(training=False))] == [
        "0F0 0F1",
        "1F0 1F1",
    ]
    with pytest.raises(ValueError, match=r"rank0\.jsonl: task 0B0 is missing"):
        cores.ranks[0].begin_step(2)


def test_what_is_no_dispatch_is_left_out(tmp_path: Path) -> None:
    """Other events, and decisions to wait, which have no task."""
    others = json.dumps({"event": "transfer", "bytes": 7}) + "\n"
    waits = json.dumps({"event": "dispatch", "step": 0, "task": None}) + "\n"
    hint = logs(tmp_path, others + lines(0, FIRST) + waits, waits + lines(0, SECOND))
    cores = Cores(Config(microbatches=2, hint=hint), Topology(2))
    assert [words(row) for row in tasks_of(cores.run_step())] == [FIRST, SECOND]
    idle = Decision(None, None, 1, (), Reason.FIXED_ORDER)
    write_logs(tmp_path, [[[idle, *rank] for rank in cores.run_step()]])
    again = Cores(Config(microbatches=2, hint=hint), Topology(2))
    assert [words(row) for row in tasks_of(again.run_step())] == [FIRST, SECOND]


def test_a_replay_may_rank_and_then_may_lack_tasks(tmp_path: Path) -> None:
    """With `binding=False` no rank waits, a step may be larger, and the limit may be tighter."""
    hint = logs(tmp_path, lines(0, "0F1 0F0 0B0"), lines(0, SECOND))
    config = Config(microbatches=2, hint=hint, binding=False, limit=1)
    assert not config.execution.binding
    cores = Cores(config, Topology(2), seed=3)
    for count in (2, 5):
        decided = cores.run_step(count)
        assert [len(rank) for rank in decided] == [2 * count, 2 * count]
        places = {str(each.task): each.hint_position for each in decided[0]}
        assert (places["0F1"], places["0F0"], places["0B0"]) == (0, 1, 2)
    assert "rank0.jsonl: task 0B1 is missing" in refused(hint)


# -- bad logs --------------------------------------------------------------------------------------


def test_a_log_that_lacks_a_rank_is_refused(tmp_path: Path) -> None:
    """The error names the file and what to do; a run of more ranks is told from its logs."""
    hint = logs(tmp_path, lines(0, FIRST), "", lines(0, "2F0 2B0"))
    (tmp_path / "rank1.jsonl").unlink()
    message = refused(hint)
    assert message.startswith(f"hint '{hint}': rank1.jsonl cannot be read (")
    assert message.endswith("bring the log of every rank into one folder")
    (tmp_path / "rank2.jsonl").unlink()
    message = refused(hint)
    assert message.startswith(str(tmp_path))
    assert "1 lists for 2 ranks: give one row for each rank" in message


def test_a_log_of_another_number_of_ranks_is_refused(tmp_path: Path) -> None:
    """More than there are ranks now: both counts are told."""
    hint = logs(tmp_path, lines(0, FIRST), lines(0, SECOND), lines(0, "2F0 2F1 2B0 2B1"))
    assert "3 lists for 2 ranks" in refused(hint)
    swapped = logs(tmp_path, lines(0, SECOND), lines(0, FIRST), lines(0, "2F0 2F1 2B0 2B1"))
    message = refused(swapped, ranks=3)
    assert message.startswith(f"{tmp_path / 'rank0.jsonl'}, entry 0: task 1F0, but rank 0 owns")


@pytest.mark.parametrize(
    "garbage",
    [
        "{",
        '{"event": "dispatch", "step": 0, "ta',
        "null",
        "[]",
        "7",
        "",
        '{"step": 0, "task": "0F1"}',
        '{"event": "dispatch", "task": "0F1"}',
        '{"event": "dispatch", "step": 0}',
        '{"event": "dispatch", "step": "one", "task": "0F1"}',
        '{"event": "dispatch", "step": null, "task": "0F1"}',
        '{"event": "dispatch", "step": NaN, "task": "0F1"}',
        '{"event": "dispatch", "step": Infinity, "task": "0F1"}',
        '{"event": "dispatch", "step": 0, "task": "0Q1"}',
        '{"event": "dispatch", "step": 0, "task": 5}',
        "0F0,0F1",
        pytest.param("[" * 100_000, id="deep"),
    ],
)
def test_a_line_that_is_no_record_is_refused(tmp_path: Path, garbage: str) -> None:
    """Cut off, of another format or edited: the error names file and line."""
    hint = logs(tmp_path, lines(0, FIRST), lines(0, "1F0") + garbage + "\n" + lines(0, "1B0"))
    message = refused(hint)
    assert message.startswith(f"{tmp_path / 'rank1.jsonl'}, line 2 is no record of a dispatch (")
    assert message.endswith("replay a whole log")


def test_a_log_of_the_first_format_is_replayed_as_one_of_today_s(tmp_path: Path) -> None:
    """Schema 1 had the same fields, fewer kinds of lines, and no time in them."""
    texts = (lines(0, FIRST), lines(0, SECOND))
    older = [text.replace(f'"schema": {SCHEMA}', '"schema": 1') for text in texts]
    assert older != list(texts)
    (tmp_path / "older").mkdir()
    orders = [
        Config(microbatches=2, hint=hint).order.orders(Topology(2), 2, 0)
        for hint in (logs(tmp_path / "older", *older), logs(tmp_path, *texts))
    ]
    assert orders[0] == orders[1] != []


def test_a_log_in_a_later_format_is_refused(tmp_path: Path) -> None:
    """Records have a version: what a later one means is not guessed."""
    later = lines(0, SECOND).replace(f'"schema": {SCHEMA}', f'"schema": {SCHEMA + 1}')
    message = refused(logs(tmp_path, lines(0, FIRST), later))
    assert message.startswith(f"{tmp_path / 'rank1.jsonl'}, line 1")


def test_a_log_that_is_no_text_is_refused(tmp_path: Path) -> None:
    """The error names the folder and the file."""
    hint = logs(tmp_path, lines(0, FIRST), "")
    (tmp_path / "rank1.jsonl").write_bytes(b"\xff\xfe\x00\x01")
    assert f"hint '{hint}': rank1.jsonl cannot be read (" in refused(hint)


@pytest.mark.parametrize("steps", [[0, 2], [1], [1, 2], [-1, 0]])
def test_a_log_without_some_step_is_refused(tmp_path: Path, steps: list[int]) -> None:
    """The error lists those that there are, and what to replay."""
    hint = logs(
        tmp_path,
        "".join(lines(step, FIRST) for step in steps),
        "".join(lines(step, SECOND) for step in steps),
    )
    message = refused(hint)
    assert message.startswith(f"hint '{hint}': the logs hold the steps {steps}: replay a run that")


@pytest.mark.parametrize(
    ("first", "second", "fault"),
    [
        (FIRST, "1F0 1B0 1F1", "rank1.jsonl: task 1B1 is missing"),
        (FIRST, "", "rank1.jsonl: task 1F0 is missing"),
        (f"{FIRST} 0F1", SECOND, "rank0.jsonl, entry 4: task 0F1, but it stands there a second"),
        ("0F0 0B0 0F1 0B1", "1F0 1F1 1B0 1B1", "rank0.jsonl, entry 1: 0B0 waits for 1B0"),
        ("0F0 0F1 0B1 0B0", "1F0 1F1 1B1 1B0", "rank0.jsonl: 0B1 stands before 0B0"),
    ],
    ids=["cut off", "not logged", "doubled", "circle", "order"],
)
def test_every_recorded_step_is_checked_before_the_first(
    tmp_path: Path, first: str, second: str, fault: str
) -> None:
    """A fault of a later step does not wait for it: the error names the log and the task."""
    hint = logs(tmp_path, lines(0, FIRST) + lines(1, first), lines(0, SECOND) + lines(1, second))
    message = refused(hint)
    assert message.startswith(str(tmp_path))
    assert fault in message


def test_the_largest_peak_of_the_recorded_steps_counts(tmp_path: Path) -> None:
    """A limit that one of them passes is refused, an evaluation passes none."""
    hint = logs(
        tmp_path,
        lines(0, "0F0 0B0") + lines(1, FIRST) + lines(2, "0F0 0F1 0F2"),
        lines(0, "1F0 1B0") + lines(1, SECOND) + lines(2, "1F0 1F1 1F2"),
    )
    assert refused(hint, limit=1).startswith("limit=1 is below 2")
    Config(microbatches=2, hint=hint, limit=2).check_order(Topology(2))


@pytest.mark.parametrize("name", ["", "nowhere", "x" * 300], ids=["none", "nowhere", "long"])
def test_a_folder_without_logs_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """The error names the hint and what to name."""
    monkeypatch.chdir(tmp_path)
    message = refused(f"replay:{name}")
    assert message.startswith("hint 'replay:")
    assert "name the trace_dir of an earlier run" in message


def test_logs_without_a_dispatch_are_refused(tmp_path: Path) -> None:
    """A run that never made a step has nothing to repeat."""
    hint = logs(tmp_path, "", "")
    assert refused(hint) == f"hint '{hint}': no dispatch is logged: replay a run with steps"


# -- named -----------------------------------------------------------------------------------------


def test_ranks_compare_what_was_recorded_and_not_where_it_lies(tmp_path: Path) -> None:
    """A copy of the logs is the same hint; one step more, or another order, is another."""
    short = [lines(0, FIRST), lines(0, SECOND)]
    runs = [
        short,
        short,
        [lines(0, FIRST), lines(0, "1F0 1F1 1B0 1B1")],
        [short[0] + lines(1, FIRST), short[1] + lines(1, SECOND)],
    ]
    names = []
    for number, texts in enumerate(runs):
        folder = tmp_path / str(number)
        folder.mkdir()
        config = Config(microbatches=2, hint=logs(folder, *texts))
        agreed = dict(config.agreed())
        assert (agreed["hint"], agreed["binding"]) == (config.hint_name, "True")
        names.append(config.hint_name)
    assert names[0] == names[1]
    assert len(set(names)) == 3
    assert all(name.startswith("replay of sha256 ") for name in names)
