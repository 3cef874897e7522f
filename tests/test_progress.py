"""The display of a training loop: what it says, to whom, and that it leaves a terminal in order."""

import io

import pytest
from rich.console import Console

from rrfp_async.progress import Progress
from rrfp_async.result import StepResult
from rrfp_async.tasks.step import RankTimes


def result(loss: float | None = 1.5, busy: tuple[float, ...] = (0.5, 0.25)) -> StepResult:
    """A step of two seconds in which ranks computed those parts."""
    ranks = tuple(RankTimes(2.0 * share, 0.0, 0.0) for share in busy)
    return StepResult(loss, [], [], None, False, 2.0, 1.0, 0.5, 0.0, 0.5, 3, None, ranks)


class Ticking:
    """A clock that goes on by two seconds whenever it is read."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        self.now_s += 2.0
        return self.now_s


def console(*, terminal: bool) -> Console:
    return Console(file=io.StringIO(), force_terminal=terminal, width=120, color_system=None)


def written(on: Console) -> str:
    assert isinstance(on.file, io.StringIO)
    return on.file.getvalue()


def test_off_a_terminal_a_line_tells_of_every_fifth_step_and_of_the_last() -> None:
    """Step, loss, speed, time left, how busy ranks were; nothing else."""
    on = console(terminal=False)
    with Progress(12, console=on, clock=Ticking()) as progress:
        for step in range(12):
            progress.step(result(loss=12.0 - step))
    assert written(on).splitlines() == [
        "step 5/12  loss 8.0000  0.50 steps/s  0:14 left  busy 38% (25% to 50%), least: rank 1",
        "step 10/12  loss 3.0000  0.50 steps/s  0:04 left  busy 38% (25% to 50%), least: rank 1",
        "step 12/12  loss 1.0000  0.50 steps/s  0:00 left  busy 38% (25% to 50%), least: rank 1",
    ]


def test_a_loop_that_ends_early_or_has_no_known_end_is_told_of_its_last_step() -> None:
    """Also without a loss, as an evaluation without a target."""
    on = console(terminal=False)
    progress = Progress(every=2, console=on, clock=Ticking())

    def loop() -> None:
        with progress:
            for _ in range(3):
                progress.step(result(loss=None, busy=(1.0,)))
            raise KeyError("the loop's own")

    with pytest.raises(KeyError):
        loop()
    assert written(on).splitlines() == [
        "step 2  0.50 steps/s  busy 100%",
        "step 3  0.50 steps/s  busy 100%",
    ]


def test_a_terminal_shows_a_bar_for_every_rank_and_is_left_in_order() -> None:
    """The cursor is shown again after an exception too; closing twice is harmless."""
    on = console(terminal=True)
    progress = Progress(4, console=on, clock=Ticking())

    def loop() -> None:
        with progress:
            progress.step(result())
            raise KeyError("the loop's own")

    with pytest.raises(KeyError):
        loop()
    progress.close()
    text = written(on)
    assert "step 1/4" in text
    assert "loss 1.5000" in text
    assert "0:06 left" in text
    for told in ("rank 0", "50% busy", "rank 1", "25% busy"):
        assert told in text
    assert text.index("\x1b[?25l") < text.rindex("\x1b[?25h")


def test_a_thousand_ranks_are_summed_up() -> None:
    """Mean, least, most and the slackest four, on one line."""
    on = console(terminal=True)
    busy = tuple(0.5 + rank / 4096 for rank in range(1024))
    with Progress(console=on, clock=Ticking()) as progress:
        progress.step(result(busy=busy))
    assert "busy 62% (50% to 75%), least: rank 0, 1, 2, 3" in written(on)
    assert "rank 17 " not in written(on)


def test_only_the_rank_that_is_told_of_all_shows_anything() -> None:
    """Elsewhere a step has no ranks' times."""
    on = console(terminal=False)
    with Progress(1, console=on, clock=Ticking()) as progress:
        progress.step(result(busy=()))
    assert written(on) == ""


@pytest.mark.parametrize("settings", [{"steps": 0}, {"steps": 2.0}, {"every": 0}, {"every": True}])
def test_bad_counts_are_refused(settings: dict[str, int]) -> None:
    """Value and rule."""
    with pytest.raises(ValueError, match="must be an int of at least 1"):
        Progress(**settings)
