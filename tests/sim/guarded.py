"""Virtual loops for tests: one that fails where it would spin, one that is interrupted."""

import asyncio
import signal
from collections.abc import Coroutine
from typing import Any

from rrfp_async.sim.clock import VirtualLoop

TURNS_MOST = 50_000


class GuardedLoop(VirtualLoop):
    """Counts its turns; no test here needs as many. A hang is a failed assertion, not a timeout."""

    turns = 0

    def select(self, timeout: float | None) -> list[Any]:
        self.turns += 1
        assert self.turns != TURNS_MOST, f"the loop spins at {self.time()} s"
        return super().select(timeout)


class InterruptedLoop(GuardedLoop):
    """Gets a Ctrl-C at its turn number `interrupted_at`."""

    interrupted_at = 0

    def select(self, timeout: float | None) -> list[Any]:
        if self.turns == self.interrupted_at:
            signal.raise_signal(signal.SIGINT)
        return super().select(timeout)


def play(main: Coroutine[Any, Any, Any]) -> Any:
    """Run `main` on a virtual loop of its own."""
    with asyncio.Runner(loop_factory=GuardedLoop) as runner:
        return runner.run(main)


def clock() -> VirtualLoop:
    """The running loop."""
    loop = asyncio.get_running_loop()
    assert isinstance(loop, VirtualLoop)
    return loop
