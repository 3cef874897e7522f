"""What is told of a step's spans, on steps small enough to reckon by hand."""

import pytest

from benchmarks.emulation import Span
from benchmarks.timeline import peak_activations, replayed, task_gaps_s


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
