"""What a busy machine takes from this process, and clocks for tests that leave that out.

"No gap over 50 ms" is a claim about our code; a machine that gives the process no core breaks it
though the code is right. Left out is only what the kernel counts: time that threads of this process
waited on a run queue, and time that the hypervisor gave to others. What blocks a thread otherwise,
a sleep, a lock, the interpreter's own, counts in full.

Garbage is collected before the clocks start: a full collection holds the interpreter's lock for a
tenth of a second and more in a process with hundreds of tests behind it, and would fall into
whichever block it is due in.
"""

import asyncio
import ctypes
import gc
import os
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

_THREADS = b"/proc/self/task"
_NAME_AT = 19  # in Linux's struct dirent on 64 bits: d_ino, d_off, d_reclen, d_type, d_name
_STOLEN_HZ = 100.0

_LIBC = ctypes.PyDLL(None)
"""libc, called with the interpreter's lock held.

`open` and `listdir` let it go, a few times a thread, and whoever is busy in Python takes it: beside
three such threads on a loaded machine a reading then took up to 0.5 s, and takes 4 ms so. A ticker
that reads must not make the gaps that it looks for.
"""
_LIBC.opendir.argtypes, _LIBC.opendir.restype = [ctypes.c_char_p], ctypes.c_void_p
_LIBC.readdir.argtypes, _LIBC.readdir.restype = [ctypes.c_void_p], ctypes.c_void_p
_LIBC.closedir.argtypes = [ctypes.c_void_p]


class Kept:
    """Counts how long this process is kept from running, in seconds, since this was made.

    The sum over its threads, of which several may wait at once, and over the machine's cores: an
    upper bound of what the machine takes. Always 0.0 where there is no /proc. What a thread waited
    after the last reading before its end is not counted.
    """

    def __init__(self) -> None:
        self._waited_ns, self._stolen_s = _waited_ns(), _stolen_s()
        self._sum_s = 0.0

    def so_far_s(self) -> float:
        """Read anew; never falls, though threads end."""
        waited_ns, stolen_s = _waited_ns(), _stolen_s()
        for thread, now_ns in waited_ns.items():
            before_ns = self._waited_ns.get(thread, 0)
            self._sum_s += (now_ns - before_ns if now_ns >= before_ns else now_ns) / 1e9
        self._sum_s += stolen_s - self._stolen_s
        self._waited_ns, self._stolen_s = waited_ns, stolen_s
        return self._sum_s


def _waited_ns() -> dict[bytes, int]:
    """How long each thread of this process has waited on a run queue in its life."""
    waited_ns = {}
    for thread in _thread_ids():
        numbers = _read(b"%s/%s/schedstat" % (_THREADS, thread)).split()
        if numbers:  # the thread may have ended just now
            waited_ns[thread] = int(numbers[1])
    return waited_ns


def _stolen_s() -> float:
    """What the hypervisor has taken from this machine's cores since it started."""
    numbers = _read(b"/proc/stat").split(maxsplit=9)
    return int(numbers[8]) / _STOLEN_HZ if numbers else 0.0


def _thread_ids() -> list[bytes]:
    folder = _LIBC.opendir(_THREADS)
    if not folder:
        return []
    names = []
    while entry := _LIBC.readdir(folder):
        names.append(ctypes.string_at(entry + _NAME_AT))
    _LIBC.closedir(folder)
    return [name for name in names if name.isdigit()]


def _read(path: bytes) -> bytes:
    """The file's first few hundred bytes; nothing if there is no such file."""
    handle = _LIBC.open(path, os.O_RDONLY)
    if handle < 0:
        return b""
    buffer = ctypes.create_string_buffer(512)
    size = _LIBC.read(handle, buffer, len(buffer))
    _LIBC.close(handle)
    return buffer.raw[: max(0, size)]


class Taken:
    """How long a block took, in seconds: by the clock, and by our own doing.

    Attributes:
        wall_s: From beginning to end.
        own_s: Without what the machine kept from this process meanwhile, at least 0.0.
    """

    def __init__(self) -> None:
        self.wall_s = self.own_s = 0.0


@contextmanager
def took() -> Iterator[Taken]:
    """Times the block; what it gives is filled in when the block ends, by an error too."""
    gc.collect()
    taken, kept, begun = Taken(), Kept(), time.monotonic()
    try:
        yield taken
    finally:
        taken.wall_s = time.monotonic() - begun
        taken.own_s = max(0.0, taken.wall_s - kept.so_far_s())


@dataclass(frozen=True, slots=True)
class Tick:
    """One wake-up of a ticker.

    Attributes:
        time_s: When, by `time.monotonic`, which is one clock for all processes.
        before_s: How long the process had been kept from running since the ticker began, read
            just before that time was taken.
        after_s: The same, read just after it.
    """

    time_s: float
    before_s: float
    after_s: float


class Ticker:
    """A task that sleeps `tick_s` again and again beside the block, and notes when it woke.

    On leaving, what the loop owes since the last tick counts as a gap too.
    """

    def __init__(self, *, tick_s: float = 0.01) -> None:
        self.ticks: list[Tick] = []
        self._tick_s = tick_s
        self._kept = Kept()

    @property
    def gaps(self) -> list[float]:
        """Seconds from tick to tick without what the machine kept from this process meanwhile."""
        return [
            max(0.0, (now.time_s - last.time_s) - (now.after_s - last.before_s))
            for last, now in zip(self.ticks, self.ticks[1:], strict=False)
        ]

    async def __aenter__(self) -> "Ticker":
        gc.collect()
        self._note()
        self._task = asyncio.create_task(self._run())
        return self

    async def __aexit__(self, *_: object) -> None:
        self._note()
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)

    async def _run(self) -> None:
        while True:
            await asyncio.sleep(self._tick_s)
            self._note()

    def _note(self) -> None:
        before_s, now_s = self._kept.so_far_s(), time.monotonic()
        self.ticks.append(Tick(now_s, before_s, self._kept.so_far_s()))


def kept_between(ticks: Sequence[Tick], begin_s: float, end_s: float) -> float:
    """How long at most the process of these ticks was kept from running between two moments."""
    before = [tick.before_s for tick in ticks if tick.time_s <= begin_s]
    after = [tick.after_s for tick in ticks if tick.time_s >= end_s]
    return max(0.0, min(after) - max(before))
