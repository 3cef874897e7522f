"""Listed orders of several chunks a rank: as torch lists them, executed, and where refused."""

from itertools import product
from typing import Any

import pytest
from torch.distributed.pipelining.schedules import (
    ScheduleDualPipeV,
    ScheduleInterleaved1F1B,
    ScheduleInterleavedZeroBubble,
    ScheduleLoopedBFS,
    ScheduleZBVZeroBubble,
)

from rrfp_async.config import Config
from rrfp_async.hints import Execution, Schedule, make_order, resolve_hint
from rrfp_async.hints.checks import as_split, peak_of
from rrfp_async.hints.recorded import from_torch
from rrfp_async.ids import TaskId, TaskKind
from rrfp_async.topology import Topology
from tests.core.fixed_order import Cores, tasks_of
from tests.core.torch_stages import built
from tests.core.words import words

TORCHS = {
    "looped-bfs": ScheduleLoopedBFS,
    "interleaved": ScheduleInterleaved1F1B,
    "interleaved-zb": ScheduleInterleavedZeroBubble,
    "zbv": ScheduleZBVZeroBubble,
    "dualpipev": ScheduleDualPipeV,
}
LOOPED = ("looped-bfs", "interleaved", "interleaved-zb")
V_SHAPED = ("zbv", "dualpipev")
RANKS = (1, 2, 3, 4, 5, 8)
COUNTS = (1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 16, 17, 20, 24, 27, 33)
PIPELINES = [
    *product(LOOPED, RANKS, (1, 2, 3, 4)),
    *product(V_SHAPED, RANKS, (2,)),
]
"""Schedule, ranks and chunks."""
EXECUTED = [
    *product(LOOPED, (1, 2, 4), (1, 2, 3), (1, 3, 4, 10, 16)),
    *product(("zbv",), (1, 2, 3, 4), (2,), (1, 2, 5, 7, 16)),
    *product(("dualpipev",), (1, 2, 3, 4), (2,), (8, 9, 16)),
]
"""The same and microbatches: fewer than ranks, not a multiple of them, and enough."""


def pipeline(name: str, ranks: int, chunks: int) -> Topology:
    """The pipeline that a schedule is made for."""
    return Topology(ranks, chunks=chunks, placement="v" if name in V_SHAPED else "loop")


def generated(name: str, topology: Topology, microbatches: int) -> list[list[TaskId]]:
    """The lists of a schedule that has a name."""
    schedule = resolve_hint(name)
    assert isinstance(schedule, Schedule)
    return [list(row) for row in schedule.orders(topology, microbatches, 0)]


def torchs(name: str, topology: Topology, microbatches: int) -> list[list[TaskId]]:
    """The lists of torch; where the schedule splits backwards, a whole one as I and W."""
    schedule = from_torch(built(TORCHS[name], topology, microbatches))
    split = range(topology.num_stages if resolve_hint(name).splits else 0)
    return [list(as_split(row, split)) for row in schedule.orders(topology, microbatches, 0)]


def executed(name: str, microbatches: int, **settings: Any) -> Config:
    """The schedule executed as it stands; breadth first, backwards come in no order of theirs."""
    free = {"deterministic": name != "looped-bfs"}
    return Config(
        **{"microbatches": microbatches, "hint": name, "binding": True, **free, **settings}
    )


def refused(topology: Topology, **settings: Any) -> str:
    """The message that a pipeline refuses a config with, before anything starts."""
    with pytest.raises(ValueError, match=r".") as caught:
        Config(**{"microbatches": 8, **settings}).check_order(topology)
    return str(caught.value)


# -- generated -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "microbatches", "rows"),
    [
        (
            "looped-bfs",
            2,
            ["0F0 0F1 2F0 2F1 2B1 2B0 0B1 0B0", "1F0 1F1 3F0 3F1 3B1 3B0 1B1 1B0"],
        ),
        (
            "interleaved",
            4,
            [
                "0F0 0F1 2F0 2F1 0F2 2B0 0F3 2B1 2F2 0B0 2F3 0B1 2B2 2B3 0B2 0B3",
                "1F0 1F1 3F0 3B0 3F1 3B1 1F2 1B0 1F3 1B1 3F2 3B2 3F3 3B3 1B2 1B3",
            ],
        ),
        (
            "interleaved-zb",
            2,
            [
                "0F0 0F1 2F0 2F1 2I0 2W0 2I1 2W1 0I0 0W0 0I1 0W1",
                "1F0 1F1 3F0 3I0 3F1 3I1 3W0 1I0 3W1 1I1 1W0 1W1",
            ],
        ),
        (
            "zbv",
            3,
            [
                "0F0 0F1 0F2 3F0 3I0 3W0 3F1 3I1 3W1 0I0 0W0 3F2 3I2 3W2 0I1 0W1 0I2 0W2",
                "1F0 2F0 1F1 2F1 2I0 2W0 1F2 1I0 1W0 2F2 2I1 2W1 1I1 2I2 1I2 1W1 2W2 1W2",
            ],
        ),
        (
            "dualpipev",
            4,
            [
                "0F0 0F1 0F2 3F0 3I0 3W0 3F1 0F3 3I1 3W1 3F2 0I0 0W0 "
                "3I2 3W2 3F3 0I1 0W1 3I3 3W3 0I2 0W2 0I3 0W3",
                "1F0 2F0 1F1 2F1 1F2 2I0 2W0 2F2 1I0 1W0 1F3 2I1 2W1 2F3 1I1 1W1 "
                "2I2 2W2 1I2 1W2 2I3 1I3 2W3 1W3",
            ],
        ),
    ],
)
def test_a_schedule_of_two_chunks_on_two_ranks_reads(
    name: str, microbatches: int, rows: list[str]
) -> None:
    """Written out, as few microbatches as show its character."""
    topology = pipeline(name, 2, 2)
    assert [words(row) for row in generated(name, topology, microbatches)] == rows


@pytest.mark.parametrize(("name", "ranks", "chunks"), PIPELINES)
def test_a_schedule_lists_what_torchs_own_lists_and_is_refused_where_torchs_is(
    name: str, ranks: int, chunks: int
) -> None:
    """Task by task on every rank, for rounds longer than the ranks, too few microbatches, one rank.

    Idle slots apart; and where torch runs a whole backward of a stage that it splits elsewhere
    (DualPipeV), I and W in a row.
    """
    topology = pipeline(name, ranks, chunks)
    compared = 0
    for count in COUNTS:
        try:
            theirs = torchs(name, topology, count)
        except ValueError:
            assert f"microbatches={count} must be" in refused(
                topology, hint=name, microbatches=count
            )
            continue
        assert generated(name, topology, count) == theirs, f"{count} microbatches"
        compared += 1
    assert compared >= 6


# -- executed --------------------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "ranks", "chunks", "microbatches"), EXECUTED)
def test_a_schedule_is_executed_as_it_stands_up_to_exactly_its_own_peak(
    name: str, ranks: int, chunks: int, microbatches: int
) -> None:
    """Whatever overtakes: its largest peak is enough for a limit, and one less is refused.

    All but breadth first accumulate in microbatch order.
    """
    topology = pipeline(name, ranks, chunks)
    if name.startswith("interleaved") and microbatches % max(1, microbatches // ranks):
        microbatches += 1
    rows = generated(name, topology, microbatches)
    peaks = list(map(peak_of, rows))
    cores = Cores(executed(name, microbatches, limit=max(peaks)), topology, seed=ranks)
    for _ in range(2):
        assert tasks_of(cores.run_step()) == rows
        assert cores.peaks == peaks
    forwards = [[each for each in row if each.kind is TaskKind.F] for row in rows]
    assert tasks_of(cores.run_step(training=False)) == forwards
    if max(peaks) > 1:
        with pytest.raises(ValueError, match=f"limit={max(peaks) - 1} is below {max(peaks)}"):
            executed(name, microbatches, limit=max(peaks) - 1).check_order(topology)


@pytest.mark.parametrize("ranks", RANKS)
def test_the_peaks_are_those_that_the_schedules_are_known_for(ranks: int) -> None:
    """With enough microbatches, in forwards (of a chunk) whose W, or whole backward, is to come."""
    count, every = 4 * ranks, range(ranks)
    for chunks in (1, 2, 3):
        peaks = {
            name: list(map(peak_of, generated(name, pipeline(name, ranks, chunks), count)))
            for name in LOOPED
        }
        lead = (chunks - 1) * ranks + 1
        assert peaks["interleaved"] == [lead + 2 * (ranks - 1 - rank) for rank in every]
        assert peaks["interleaved-zb"] == [chunks * ranks] * ranks
        assert peaks["looped-bfs"] == [chunks * count] * ranks
    for name, peak in (("zbv", 2 * ranks), ("dualpipev", 2 * ranks + 1)):
        rows = generated(name, pipeline(name, ranks, 2), count)
        assert list(map(peak_of, rows)) == [peak] * ranks


def test_breadth_first_binds_only_where_accumulation_is_free() -> None:
    """It runs backwards from the last microbatch: the error names the first pair and the remedy."""
    topology = Topology(2, chunks=2)
    message = refused(topology, hint="looped-bfs", microbatches=3, binding=True)
    assert message.startswith("looped-bfs, rank 0: 2B2 stands before 2B1, but gradients")
    assert message.endswith("or set deterministic=False")
    Config(microbatches=3, hint="looped-bfs").check_order(topology)
    executed("looped-bfs", 3).check_order(topology)


@pytest.mark.parametrize("limit", ["auto", 1, 3])
@pytest.mark.parametrize("name", TORCHS)
def test_a_schedule_ranks_under_any_limit(name: str, limit: Any) -> None:
    """As a hint nothing waits for it: every task runs, within the bound, however tight it is."""
    topology = pipeline(name, 3, 2)
    config = Config(microbatches=9, hint=name, limit=limit)
    for seed in range(5):
        cores = Cores(config, topology, seed=seed)
        ran = tasks_of(cores.run_step())
        assert list(map(set, ran)) == list(map(set, generated(name, topology, 9)))
        if limit != "auto":
            assert max(cores.peaks) <= limit + 2


def test_a_split_schedule_serves_stages_that_cannot_split() -> None:
    """Their whole backward stands where I is listed, the other chunk's stay split."""
    order = make_order(
        resolve_hint("zbv"),
        Topology(2, chunks=2, placement="v"),
        0,
        Execution(binding=True, deterministic=True),
    )
    kinds = {0: "FB", 3: "FIW"}
    step = [TaskId(s, TaskKind(kind), j) for j in range(3) for s in kinds for kind in kinds[s]]
    order.begin_step(step)
    ranked = sorted(step, key=lambda each: order.position(each) or 0)
    assert words(ranked) == ("0F0 0F1 0F2 3F0 3I0 3W0 3F1 3I1 3W1 0B0 3F2 3I2 3W2 0B1 0B2")


# -- refused ---------------------------------------------------------------------------------------

LOOP, V = Topology(4, chunks=2), Topology(4, chunks=2, placement="v")
OTHER = Topology(4, chunks=2, placement=(0, 1, 2, 3, 1, 0, 3, 2))


@pytest.mark.parametrize("binding", [False, True])
@pytest.mark.parametrize(
    ("name", "needs", "topology"),
    [
        *product(("gpipe", "1f1b", "zb-h1"), ("chunks=1",), (LOOP, V, OTHER)),
        *product(LOOPED, ("placement='loop'",), (V, OTHER)),
        *product(V_SHAPED, ("chunks=2 and placement='v'",), (LOOP, OTHER, Topology(4))),
        *product(V_SHAPED, ("chunks=2 and placement='v'",), (Topology(4, None, 4, "v"),)),
    ],
)
def test_a_schedule_for_another_pipeline_is_refused_before_anything_starts(
    name: str, needs: str, topology: Topology, binding: bool
) -> None:
    """The error says what the schedule needs, what there is, and what to do."""
    got = f"chunks={topology.chunks} and placement={topology.placement!r}"
    message = refused(topology, hint=name, binding=binding)
    assert message.startswith(f"hint {name!r} needs {needs}, got {got}: ")
    assert message.endswith("or take a hint that fits every pipeline, such as 'bf'")


@pytest.mark.parametrize(
    ("name", "ranks", "same"),
    [
        ("zbv", 1, Topology(1, chunks=2)),
        ("dualpipev", 3, Topology(3, chunks=2, placement=(0, 1, 2, 2, 1, 0))),
        ("interleaved", 2, Topology(2, chunks=2, placement=(0, 1, 0, 1))),
    ],
)
def test_a_placement_counts_by_where_the_stages_are_and_not_by_its_name(
    name: str, ranks: int, same: Topology
) -> None:
    """One rank has no other, and a placement may be listed."""
    assert generated(name, same, 6) == generated(name, pipeline(name, ranks, 2), 6)


@pytest.mark.parametrize("name", ["interleaved", "interleaved-zb"])
@pytest.mark.parametrize(
    ("ranks", "microbatches", "rounds", "nearest"),
    [(4, 9, 2, (8, 10)), (4, 13, 3, (12, 15)), (2, 11, 5, (10, 12)), (3, 11, 3, (9, 12))],
)
def test_microbatches_that_do_not_part_into_rounds_are_refused(
    name: str, ranks: int, microbatches: int, rounds: int, nearest: tuple[int, int]
) -> None:
    """The error names the two nearest numbers that do; the rounds may be longer than the ranks."""
    topology = Topology(ranks, chunks=2)
    message = refused(topology, hint=name, microbatches=microbatches)
    assert message.startswith(f"microbatches={microbatches} must be a multiple of {rounds}: ")
    assert f"on {ranks} ranks" in message
    assert message.endswith("give {} or {}".format(*nearest))
    for count in range(nearest[0], nearest[1] + 1):
        if count in nearest:
            Config(microbatches=count, hint=name).check_order(topology)
        else:
            assert "must be a multiple" in refused(topology, hint=name, microbatches=count)


def test_fewer_microbatches_than_stages_are_refused_by_dualpipev() -> None:
    """As by torch: the error gives the least number and another schedule that takes fewer."""
    message = refused(V, hint="dualpipev", microbatches=7)
    assert message.startswith("microbatches=7 must be at least 8, the number of stages")
    assert message.endswith("give 8 or more, or hint='zbv'")
    for name, count in (("dualpipev", 8), ("zbv", 7)):
        Config(microbatches=count, hint=name).check_order(V)


def test_a_step_that_a_schedule_does_not_fit_is_refused_and_the_next_may_fit() -> None:
    """A step of another size than the config's is checked when it begins."""
    cores = Cores(executed("interleaved", 8), Topology(4, chunks=2), seed=3)
    with pytest.raises(ValueError, match=r"^microbatches=9 must be a multiple of 2: .* 8 or 10$"):
        cores.run_step(9)
    again = Cores(executed("interleaved", 8), Topology(4, chunks=2), seed=3)
    for count in (10, 3, 8):
        assert tasks_of(again.run_step(count)) == generated(
            "interleaved", Topology(4, chunks=2), count
        )
