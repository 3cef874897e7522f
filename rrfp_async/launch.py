"""Ways to start: an event loop for a program, and every rank of one process at once.

Knows worlds and coroutines, nothing of steps.
"""

import asyncio
import signal
import sys
import threading
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, TypeVar

from rrfp_async.errors import StateError, StepFailed
from rrfp_async.topology import Topology
from rrfp_async.world import World, local_world

if sys.platform != "win32":
    import uvloop

T = TypeVar("T")

_FIRST_CAUSE_S = 2.0

SWITCH_INTERVAL_S = 0.0005
"""The interpreter's thread switch interval under `run`, in seconds. See docs/design.md."""

TERM_GRACE_S = 3.0
"""How long after SIGTERM `run` lets its program end by itself, in seconds."""


def run(main: Coroutine[Any, Any, T] | Callable[[], Coroutine[Any, Any, T]]) -> T:
    """Run `main`, a coroutine or a function that returns one, on a new uvloop; return its result.

    For the duration the interpreter's switch interval is `SWITCH_INTERVAL_S`: at its usual 5 ms a
    compute thread that is busy in Python keeps the loop waiting that long for every wake-up.
    Inside a loop that runs already (a notebook), await your coroutine instead.

    Raises:
        StateError: If a loop is running already.
        SystemExit: With status 143 after SIGTERM, once `main` was cancelled and has cleaned up.
        KeyboardInterrupt: After SIGINT, likewise.
    """
    _refuse_nesting(main)
    coroutine = main() if callable(main) else main
    before, on_interrupt = sys.getswitchinterval(), signal.getsignal(signal.SIGINT)
    sys.setswitchinterval(SWITCH_INTERVAL_S)
    try:
        with asyncio.Runner(loop_factory=_loop_factory()) as runner:
            return runner.run(_until_terminated(coroutine))
    finally:
        sys.setswitchinterval(before)
        if _handles_signals():
            signal.signal(signal.SIGINT, on_interrupt)


def _refuse_nesting(main: object) -> None:
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return
    if asyncio.iscoroutine(main):
        main.close()
    raise StateError("an event loop is running here already: await your coroutine instead of run()")


async def _until_terminated(coroutine: Coroutine[Any, Any, T]) -> T:
    """Await `coroutine`, cancelled when a signal ends the program; see `_Signals`."""
    task = asyncio.current_task()
    assert task is not None  # this is a coroutine of a Runner
    signals = _Signals(task)
    signals.install()
    try:
        return await coroutine
    except asyncio.CancelledError:
        signals.raise_what_came()
        raise
    finally:
        signals.remove()


class _Signals:
    """What SIGTERM and SIGINT do to the program's task.

    On SIGTERM it is cancelled a little later: torchrun ends its processes so as soon as one of them
    has died, often before the others know why, and given that little time they end by themselves
    and name the cause. On SIGINT it is cancelled at once, and once: a terminal and torchrun both
    send one for one Ctrl-C, and the second must not break into the cleaning up.
    """

    def __init__(self, task: "asyncio.Task[Any]") -> None:
        self._loop = asyncio.get_running_loop()
        self._task = task
        self._terminated = False
        self._interrupted = False

    def install(self) -> None:
        """Take both, where this thread may; an ignored SIGINT stays ignored."""
        if _handles_signals():
            self._loop.add_signal_handler(signal.SIGTERM, self._terminate)
            if signal.getsignal(signal.SIGINT) is not signal.SIG_IGN:
                self._loop.add_signal_handler(signal.SIGINT, self._interrupt)

    def remove(self) -> None:
        """Give both back; after an interrupt no other one comes through until `run` has ended."""
        if _handles_signals():
            self._loop.remove_signal_handler(signal.SIGTERM)
            self._loop.remove_signal_handler(signal.SIGINT)
            if self._interrupted:
                signal.signal(signal.SIGINT, signal.SIG_IGN)

    def raise_what_came(self) -> None:
        """Where the task was cancelled by a signal, say so.

        Raises:
            SystemExit: After SIGTERM.
            KeyboardInterrupt: After SIGINT.
        """
        if self._terminated:
            sys.exit(128 + signal.SIGTERM)
        if self._interrupted:
            raise KeyboardInterrupt from None

    def _terminate(self) -> None:
        self._terminated = True
        self._loop.call_later(TERM_GRACE_S, self._task.cancel)

    def _interrupt(self) -> None:
        if not self._interrupted:
            self._interrupted = self._task.cancel()


def _handles_signals() -> bool:
    """Python lets the main thread alone do so; Windows' loops do not."""
    return threading.current_thread() is threading.main_thread() and sys.platform != "win32"


async def run_local(
    n: int,
    main: Callable[[World], Awaitable[T]],
    *,
    topology: Topology | None = None,
    device: str = "cpu",
) -> list[T]:
    """Run `main(world)` for every rank of a local world of `n` ranks at once.

    Returns:
        What `main` returned, by rank.

    Raises:
        The error that came first, itself; every other rank is cancelled.
    """
    failure: BaseException | None = None
    tasks: list[asyncio.Task[T]] = []
    async with local_world(n, topology, device=device) as worlds:
        try:
            async with asyncio.TaskGroup() as group:
                tasks += [group.create_task(_call(main, world, tasks)) for world in worlds]
        except BaseExceptionGroup as errors:
            failure = errors.exceptions[0]
    if failure is not None:
        raise failure
    return [task.result() for task in tasks]


async def _call(
    main: Callable[[World], Awaitable[T]], world: World, tasks: "list[asyncio.Task[T]]"
) -> T:
    try:
        return await main(world)
    except StepFailed as error:
        if error.rank != world.rank:  # what that rank raises itself is the first cause
            await asyncio.wait([tasks[error.rank]], timeout=_FIRST_CAUSE_S)
        raise


def _loop_factory() -> Callable[[], asyncio.AbstractEventLoop] | None:
    if sys.platform == "win32":
        return None
    return uvloop.new_event_loop
