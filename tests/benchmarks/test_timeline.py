"""What is told of a step's spans, on steps small enough to reckon by hand."""

import pytest

from benchmarks.emulation import Span
from benchmarks.timeline import peak_activations, percentile, replayed, task_gaps_s


def spans(*rows: tuple[str, int, int, float, float]) -> list[Span]:
    """Kind, stage, microbatch, begin and end of each."""
    return [Span(*row) for row in rows]


FIRST = spans(("F", 0, 0, 0.0, 1.0), ("F", 0, 1, 1.5, 2.5), ("I", 0, 0, 6.0, 7.0))
FIRST += spans(("W", 0, 0, 7.0, 8.0), ("I", 0, 1, 9.0, 10.0), ("W", 0, 1, 10.5, 11.5))
LAST = spans(("F", 1, 0, 2.0, 3.0), ("I", 1, 0, 3.0, 5.0), ("W", 1, 0, 5.0, 6.0))
LAST += spans(("F", 1, 1, 6.0, 7.0), ("I", 1, 1, 7.0, 8.0), ("W", 1, 1, 8.0, 9.0))


def test_a_replay_lets_nothing_pass_but_the_tasks() -> None:
    """Split: F0 1, F 1, I 2, W 1, F 1, I 1 on the last rank, then I and W of 0: 9 s, 8 tasks."""
    replay = replayed([FIRST, LAST], split=True, stages=2)
    assert replay.makespan_s == pytest.approx(9.0)
    assert replay.path_tasks == 8


def test_a_whole_backward_sends_when_its_second_half_is_done() -> None:
    """The first rank's last backward begins one second later, and a B counts once."""
    replay = replayed([FIRST, LAST], split=False, stages=2)
    assert replay.makespan_s == pytest.approx(10.0)
    assert replay.path_tasks == 6


def test_gaps_are_what_a_task_waited_with_all_it_needed_done() -> None:
    """On the first rank 0.5, 1.0, 0.0, 1.0 and 0.5 s; on the last 1.0 s, then none."""
    gaps = task_gaps_s([FIRST, LAST], split=True, stages=2)
    assert gaps == pytest.approx([0.5, 1.0, 0.0, 1.0, 0.5, 1.0, 0.0, 0.0, 0.0, 0.0, 0.0])


def test_a_peak_counts_from_the_forward_to_the_weight_gradient() -> None:
    """The first rank holds two, the last one; of two chunks each is half a rank's."""
    assert peak_activations([FIRST, LAST], chunks=1) == 2
    assert peak_activations([LAST], chunks=1) == 1
    assert peak_activations([FIRST, LAST], chunks=2) == 1


def test_an_order_that_cannot_be_is_refused() -> None:
    """A backward before its own forward never comes to its turn."""
    with pytest.raises(RuntimeError, match="does not fit"):
        replayed([list(reversed(FIRST)), LAST], split=True, stages=2)


def one_second_each(words: str) -> list[Span]:
    """Spans of microbatch 0 from words as F0, kind and stage; when they ran does not matter."""
    rows = enumerate(words.split())
    return spans(*((w[0], int(w[1:]), 0, float(10 * i), 10.0 * i + 1.0) for i, w in rows))


V_ENDS = one_second_each("F0 F3 I3 W3 I0 W0")


def test_a_v_of_two_chunks_is_replayed_by_its_stages() -> None:
    """F0 F1 F2 F3 I3 I2 W2 I1 I0 W0 is the path; with I1 before W2 it is one second less."""
    behind, ahead = map(one_second_each, ("F1 F2 I2 W2 I1 W1", "F1 F2 I2 I1 W2 W1"))
    replay = replayed([V_ENDS, behind], split=True, stages=4)
    assert (replay.makespan_s, replay.path_tasks) == (10.0, 10)
    replay = replayed([V_ENDS, ahead], split=True, stages=4)
    assert (replay.makespan_s, replay.path_tasks) == (9.0, 9)


def test_a_v_of_whole_backwards_is_replayed_one_after_another() -> None:
    """Four forwards, then four backwards of two seconds: nothing overlaps."""
    replay = replayed([V_ENDS, one_second_each("F1 F2 I2 W2 I1 W1")], split=False, stages=4)
    assert (replay.makespan_s, replay.path_tasks) == (12.0, 8)


def test_gaps_of_whole_backwards_count_to_their_beginning() -> None:
    """Both backwards of the first rank begin when W of the last one ends; W follows its I."""
    gaps = task_gaps_s([FIRST, LAST], split=False, stages=2)
    assert gaps == pytest.approx([0.5, 0.0, 0.0, 1.0, 0.0, 0.0, 0.0])


def test_three_half_stages_at_once_are_one_and_a_half() -> None:
    """Two forwards of the first chunk and one of the second before any W."""
    rank = spans(("F", 0, 0, 0.0, 1.0), ("F", 0, 1, 1.0, 2.0), ("F", 3, 0, 2.0, 3.0))
    rank += spans(("I", 3, 0, 3.0, 4.0), ("W", 3, 0, 4.0, 5.0), ("F", 3, 1, 5.0, 6.0))
    assert peak_activations([rank], chunks=2) == 1.5


def test_what_a_task_needs_and_nobody_ran_is_refused() -> None:
    """The last rank's spans are lost."""
    with pytest.raises(RuntimeError, match="does not fit"):
        replayed([FIRST, []], split=True, stages=2)


def test_a_percentile_is_passed_by_the_rest() -> None:
    """Of 0 to 100, 99 is the 99th."""
    assert percentile([float(n) for n in range(101)], 99) == pytest.approx(99.0)
