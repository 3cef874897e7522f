"""Jobs of real processes for tests: started, watched by pid, and ended without a trace.

A job is torchrun with a script, or processes started by hand with torchrun's variables. Each job
marks the environment of everything it starts, so what is left of it can be found in /proc.
"""

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from torch.distributed import TCPStore

REPOSITORY = Path(__file__).parents[2]
WORKER = Path(__file__).with_name("worker.py")
EXAMPLE = REPOSITORY / "examples" / "train_gpt.py"
START_WITHIN_S = 50.0
GONE_WITHIN_S = 40.0
_POLL_S = 0.02
_MARK = "RRFP_TEST_JOB"

Event = dict[str, Any]


class Job:
    """Processes under watch. Times are seconds of `time.monotonic`, equal in all processes."""

    def __init__(self, folder: Path, ranks: int) -> None:
        self.ranks = ranks
        self.folder = folder
        self.mark = uuid.uuid4().hex
        self.roots: list[subprocess.Popen[bytes]] = []
        self._pids: dict[int, int] = {}

    def start(self, command: Sequence[str], environment: Mapping[str, str], out: Path) -> None:
        """Start a process in a session of its own, its output going to `out`."""
        inherited = {k: v for k, v in os.environ.items() if not k.startswith("TORCHELASTIC")}
        paths = f"{REPOSITORY}{os.pathsep}{REPOSITORY / 'examples'}"
        ours = {_MARK: self.mark, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1"}
        out.mkdir(parents=True, exist_ok=True)
        with (out / "stdout.log").open("wb") as stdout, (out / "stderr.log").open("wb") as stderr:
            process = subprocess.Popen(
                command,
                env={**inherited, **ours, **environment},
                stdout=stdout,
                stderr=stderr,
                cwd=self.folder,
                start_new_session=True,
            )
        self.roots.append(process)

    # -- what the ranks say --------------------------------------------------------------------

    def text(self, rank: int, stream: str = "stdout", *, attempt: int = 0) -> str:
        """What `rank` has written so far; nothing while its log is not there."""
        found = list(self.folder.glob(f"logs/*/attempt_{attempt}/{rank}/{stream}.log"))
        return found[0].read_text(errors="replace") if found else ""

    def text_of_torchrun(self) -> str:
        """What torchrun itself has written."""
        return (self.folder / "logs/torchrun/stderr.log").read_text(errors="replace")

    def events(self, rank: int, name: str | None = None, *, attempt: int = 0) -> list[Event]:
        """The JSON lines of a rank's standard output: all, or those called `name`."""
        lines = self.text(rank, attempt=attempt).splitlines(keepends=True)
        told = [json.loads(line) for line in lines if line.startswith("{") and line.endswith("\n")]
        return [event for event in told if name in (None, event["event"])]

    def event(self, rank: int, name: str, **fields: Any) -> Event:
        """The one event of that name, and with these fields, that `rank` has told."""
        found = [
            event
            for event in self.events(rank, name)
            if all(event.get(key) == value for key, value in fields.items())
        ]
        assert len(found) == 1, f"{len(found)} events {name} {fields}\n{self.story()}"
        return found[0]

    def wait_for(
        self, rank: int, name: str, *, count: int = 1, within_s: float = START_WITHIN_S
    ) -> Event:
        """Wait until `rank` has told event `name` `count` times; returns the last of them."""
        self.wait_until(
            lambda: len(self.events(rank, name)) >= count, f"{name} of {rank}", within_s
        )
        return self.events(rank, name)[count - 1]

    def wait_for_text(self, rank: int, words: str, *, stream: str = "stderr") -> None:
        """Wait until `words` stand in what `rank` has written."""
        self.wait_until(lambda: words in self.text(rank, stream), words, START_WITHIN_S)

    def wait_until(self, true: Callable[[], bool], what: str, within_s: float) -> None:
        """Poll until `true()`; fails at once if every process has ended before."""
        deadline = time.monotonic() + within_s
        while not true():
            ended = all(root.poll() is not None for root in self.roots)
            if ended and true():
                return
            late = time.monotonic() > deadline
            assert not ended, f"all ended before {what}\n{self.story()}"
            assert not late, f"{what} not within {within_s} s\n{self.story()}"
            time.sleep(_POLL_S)

    def story(self) -> str:
        """Everything that was written, for the message of a failed assertion."""
        logs = sorted(self.folder.glob("logs/**/*.log"))
        return "\n".join(f"--- {log}\n{log.read_text(errors='replace')[-4000:]}" for log in logs)

    # -- the processes -------------------------------------------------------------------------

    def pid(self, rank: int) -> int:
        """The process of `rank`, found by its RANK in /proc/PID/environ."""
        if rank not in self._pids:
            found = [p for p in self._marked() if _environ(p).get("RANK") == str(rank)]
            assert found, f"no process of rank {rank}\n{self.story()}"
            self._pids[rank] = min(found)
        return self._pids[rank]

    def pids(self) -> dict[int, int]:
        """The process of every rank."""
        return {rank: self.pid(rank) for rank in range(self.ranks)}

    def failures(self, **fields: Any) -> dict[int, Event]:
        """Every rank's one failure (with these fields)."""
        return {rank: self.event(rank, "failed", **fields) for rank in range(self.ranks)}

    def assert_orderly(self) -> None:
        """No process was aborted or told a traceback on its way out."""
        told = [self.text(rank, "stderr") for rank in range(self.ranks)]
        bad = [
            words for words in ("terminate called", "Traceback", "Fatal") if words in "".join(told)
        ]
        assert not bad, f"{bad}\n{self.story()}"

    def signal(self, rank: int, number: signal.Signals) -> float:
        """Send a signal to a rank's process; returns when."""
        pid = self.pid(rank)
        now = time.monotonic()
        os.kill(pid, number)
        return now

    def let_go(self, rank: int) -> None:
        """Let a stopped process hear torchrun's SIGTERM; else that kills it after 30 seconds."""
        with contextlib.suppress(ProcessLookupError):
            self.signal(rank, signal.SIGCONT)

    def wait_ended(self, ranks: Iterable[int], *, within_s: float) -> dict[int, float]:
        """Wait until the processes of `ranks` have ended; returns when each had."""
        ended: dict[int, float] = {}
        waiting = {rank: self._pids[rank] for rank in ranks}
        deadline = time.monotonic() + within_s
        while len(ended) < len(waiting):
            for rank, pid in waiting.items():
                if rank not in ended and not _runs(pid):
                    ended[rank] = time.monotonic()
            late = set(waiting) - set(ended) if time.monotonic() > deadline else set()
            assert not late, f"ranks {late} still run after {within_s} s\n{self.story()}"
            time.sleep(_POLL_S)
        return ended

    def wait(self, *, within_s: float = START_WITHIN_S) -> list[int]:
        """Wait until what the job started has ended by itself; returns the exit statuses."""
        deadline = time.monotonic() + within_s
        try:
            return [root.wait(max(0.1, deadline - time.monotonic())) for root in self.roots]
        except subprocess.TimeoutExpired:
            raise AssertionError(f"not ended within {within_s} s\n{self.story()}") from None

    def assert_nothing_left(self, *, within_s: float = GONE_WITHIN_S) -> None:
        """Wait until no process of the job is left."""
        deadline = time.monotonic() + within_s
        while self._marked():
            late = time.monotonic() > deadline
            assert not late, f"{self._marked()} are left after {within_s} s\n{self.story()}"
            time.sleep(_POLL_S)

    def end(self) -> None:
        """Kill, by pid, whatever is left of the job."""
        while left := self._marked():
            for pid in left:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            for root in self.roots:
                root.poll()
            time.sleep(_POLL_S)
        for root in self.roots:
            root.wait()

    def _marked(self) -> list[int]:
        return [
            int(entry.name)
            for entry in Path("/proc").iterdir()
            if entry.name.isdecimal() and _environ(int(entry.name)).get(_MARK) == self.mark
        ]


def _environ(pid: int) -> dict[str, str]:
    """A process's environment; empty for one that is gone, a zombie or another user's."""
    try:
        raw = Path(f"/proc/{pid}/environ").read_bytes().decode(errors="replace")
    except OSError:
        return {}
    return dict(pair.split("=", 1) for pair in raw.split("\0") if "=" in pair)


def _runs(pid: int) -> bool:
    """Whether the process is there and no zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except OSError:
        return False


def start_torchrun(
    folder: Path, ranks: int, script: Path, arguments: Sequence[str], *, max_restarts: int = 0
) -> Job:
    """Start `script` under torchrun on `ranks` local ranks."""
    job = Job(folder, ranks)
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    options = ["--nproc-per-node", str(ranks), "--max-restarts", str(max_restarts)]
    logs = ["--redirects", "3", "--log-dir", str(folder / "logs")]
    job.start([*launcher, *options, *logs, str(script), *arguments], {}, folder / "logs/torchrun")
    return job


class ByHand:
    """Starts processes as torchrun would, with any RANK, around a store that this process hosts."""

    def __init__(self, folder: Path, world_size: int) -> None:
        self.store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        self.job = Job(folder, 0)
        self._world_size = world_size

    def start(self, script: Path, arguments: Sequence[str], **variables: str | None) -> None:
        """Start one more process; `variables` change torchrun's (None removes one)."""
        index = self.job.ranks
        told: dict[str, str | None] = {
            "RANK": str(index),
            "LOCAL_RANK": str(index),
            "WORLD_SIZE": str(self._world_size),
            "LOCAL_WORLD_SIZE": str(self._world_size),
            "GROUP_RANK": "0",
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(self.store.port),
            "TORCHELASTIC_USE_AGENT_STORE": "True",
            "TORCHELASTIC_RESTART_COUNT": "0",
            **variables,
        }
        environment = {name: value for name, value in told.items() if value is not None}
        out = self.job.folder / f"logs/by_hand/attempt_0/{index}"
        self.job.start([sys.executable, str(script), *arguments], environment, out)
        self.job.ranks += 1
