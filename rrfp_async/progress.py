"""How a training run goes, for people: a live display on a terminal, plain lines elsewhere.

Shows what rank 0 is told of a step: its loss, how fast steps come, and which part of the step every
rank computed. It changes nothing and keeps no more than the last steps' times.
"""

import time
from collections import deque
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Self

from rich.console import Console, Group
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from rrfp_async.result import StepResult
from rrfp_async.tasks.step import RankTimes

_LATELY = 16  # steps that the speed is taken over
_RANKS_MOST = 16
_SLACKEST = 4
_BAR_WIDTH = 24


class Progress:
    """A display for training loops. Use it as a context manager on every rank.

    Only the rank that is told of all others, rank 0, shows anything. On a terminal the display is
    drawn anew after each step; elsewhere a line is printed each `every` steps and after the last.

    Args:
        steps: How many steps there will be, if that is known: then the time left is shown.
        every: Of how many steps one makes a line, off a terminal.
        console: Where to; by default standard error.
        clock: Seconds, monotonic.

    Raises:
        ValueError: If `steps` or `every` is below 1.
    """

    def __init__(
        self,
        steps: int | None = None,
        *,
        every: int = 5,
        console: Console | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        for name, value in (("steps", steps), ("every", every)):
            if value is not None and (type(value) is not int or value < 1):
                raise ValueError(f"{name}={value!r} must be an int of at least 1")
        self._steps = steps
        self._every = every
        self._console = Console(stderr=True) if console is None else console
        self._clock = clock
        self._ended_s: deque[float] = deque([clock()], maxlen=_LATELY + 1)
        self._done = 0
        self._live: Live | None = None
        self._last: StepResult | None = None

    def __enter__(self) -> Self:
        return self

    def step(self, result: StepResult) -> None:
        """Show that a step has ended. On other ranks than rank 0 nothing happens."""
        if not result.ranks:
            return
        self._done += 1
        self._ended_s.append(self._clock())
        self._last = result
        if self._console.is_terminal:
            self._draw(result)
        elif self._done % self._every == 0 or self._done == self._steps:
            self._tell(result)

    def close(self) -> None:
        """Leave the last picture standing; the terminal is as before. Twice is harmless."""
        live, self._live = self._live, None
        if live is not None:
            live.stop()
        elif self._last is not None and self._done % self._every and self._done != self._steps:
            self._tell(self._last)
        self._last = None

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def _draw(self, result: StepResult) -> None:
        if self._live is None:
            self._live = Live(console=self._console, auto_refresh=False)
            self._live.start()
        busy = _busy(result)
        ranks = _bars(busy) if len(busy) <= _RANKS_MOST else Text(_summary(busy))
        self._live.update(Group(self._head(result), ranks), refresh=True)

    def _head(self, result: StepResult) -> Table:
        head = Table.grid(padding=(0, 2))
        bar = [] if self._steps is None else [_bar(self._done / self._steps)]
        head.add_row(*self._words(result), *bar)
        return head

    def _tell(self, result: StepResult) -> None:
        line = "  ".join((*self._words(result), _summary(_busy(result))))
        self._console.print(line, soft_wrap=True, highlight=False, markup=False)

    def _words(self, result: StepResult) -> list[str]:
        of = "" if self._steps is None else f"/{self._steps}"
        loss = "" if result.loss is None else f"loss {result.loss:.4f}"
        per_s = self._per_s()
        words = [f"step {self._done}{of}", loss, f"{per_s:.2f} steps/s"]
        if self._steps is not None and per_s:
            words.append(f"{_duration(max(0, self._steps - self._done) / per_s)} left")
        return [word for word in words if word]

    def _per_s(self) -> float:
        """Steps per second, lately."""
        took_s = self._ended_s[-1] - self._ended_s[0]
        return (len(self._ended_s) - 1) / took_s if took_s > 0.0 else 0.0


def _busy(result: StepResult) -> list[float]:
    """The part of the step that every rank computed."""
    return [_share(times, result.step_s) for times in result.ranks]


def _share(times: RankTimes, step_s: float) -> float:
    return min(1.0, times.compute_s / step_s) if step_s > 0.0 else 0.0


def _bars(busy: Sequence[float]) -> Table:
    table = Table.grid(padding=(0, 1))
    for rank, share in enumerate(busy):
        table.add_row(f"rank {rank}", _bar(share), f"{share:.0%} busy")
    return table


def _bar(share: float) -> ProgressBar:
    return ProgressBar(total=1.0, completed=share, width=_BAR_WIDTH)


def _summary(busy: Sequence[float]) -> str:
    """Least, mean and most, and which ranks had least to do."""
    slackest = sorted(range(len(busy)), key=lambda rank: (busy[rank], rank))[:_SLACKEST]
    mean = sum(busy) / len(busy)
    told = f"busy {mean:.0%} ({min(busy):.0%} to {max(busy):.0%})"
    if len(busy) == 1:
        return f"busy {mean:.0%}"
    return f"{told}, least: rank {', '.join(map(str, slackest[: len(busy) - 1]))}"


def _duration(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"
