"""Two hosts on one machine: network namespaces joined by a veth pair, with torchrun in each.

Needs root and `ip` (iproute2). Everything made here is undone: processes by pid, then the
namespaces, which take the veth pair with them.
"""

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).parents[2]
EXAMPLE = REPOSITORY / "examples" / "train_gpt.py"
TRAINER = Path(__file__).with_name("worker_train.py")
ADDRESSES = ("10.77.0.1", "10.77.0.2")
PORT = 29_400
RANKS_PER_HOST = 2
_MARK = "RRFP_TEST_HOSTS"
_POLL_S = 0.05


def reason_against() -> str | None:
    """Why two hosts cannot be made here, or None."""
    if sys.platform != "linux":
        return "network namespaces are Linux's"
    if os.geteuid() != 0:
        return "network namespaces need root"
    if shutil.which("ip") is None:
        return "no `ip`: install iproute2"
    name = f"rrfp-probe-{os.getpid()}"
    if (made := _try("ip", "netns", "add", name)).returncode:
        return f"`ip netns add` fails here: {made.stderr.strip()}"
    paired = _try(
        "ip", "-n", name, *["link", "add", "veth0", "type", "veth", "peer", "name", "veth1"]
    )
    _ip("netns", "delete", name)
    return f"no veth here: {paired.stderr.strip()}" if paired.returncode else None


def _try(*words: str) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(words, capture_output=True, text=True, check=False)


def _ip(*words: str) -> None:
    done = _try("ip", *words)
    if done.returncode:
        raise RuntimeError(f"ip {' '.join(words)}: {done.stderr.strip()}")


@dataclass
class Host:
    """One namespace: its name, its address, what was started in it."""

    name: str
    address: str
    processes: list["subprocess.Popen[bytes]"] = field(default_factory=list)

    def start(
        self, command: Sequence[str], folder: Path, mark: str, **variables: str
    ) -> "subprocess.Popen[bytes]":
        """Start a process in this namespace, its output in `folder`."""
        inherited = {k: v for k, v in os.environ.items() if not k.startswith("TORCHELASTIC")}
        ours = {"PYTHONPATH": str(REPOSITORY), "OMP_NUM_THREADS": "1", _MARK: mark}
        folder.mkdir(parents=True, exist_ok=True)
        with (folder / "stdout").open("wb") as stdout, (folder / "stderr").open("wb") as stderr:
            process = subprocess.Popen(
                ["ip", "netns", "exec", self.name, *command],
                env={**inherited, **ours, **variables},
                stdout=stdout,
                stderr=stderr,
                start_new_session=True,
            )
        self.processes.append(process)
        return process


@dataclass(frozen=True)
class Process:
    """One rank's process: its pid, its host by number (c10d may number ranks otherwise)."""

    pid: int
    host: int
    local_rank: int


class Hosts:
    """Two hosts and the job that runs on both."""

    def __init__(self, folder: Path) -> None:
        self.mark = uuid.uuid4().hex
        self.folder = folder
        short = self.mark[:8]
        self.hosts = [
            Host(f"rrfp-{short}-{index}", address) for index, address in enumerate(ADDRESSES)
        ]

    def set_up(self) -> None:
        """Make the namespaces and join them; `lo` is up in each."""
        near, far = (host.name for host in self.hosts)
        for name in (near, far):
            _ip("netns", "add", name)
        _ip(
            "-n",
            near,
            "link",
            "add",
            "veth0",
            "type",
            "veth",
            "peer",
            "name",
            "veth0",
            "netns",
            far,
        )
        for host in self.hosts:
            _ip("-n", host.name, "address", "add", f"{host.address}/24", "dev", "veth0")
            _ip("-n", host.name, "link", "set", "veth0", "up")
            _ip("-n", host.name, "link", "set", "lo", "up")

    def tear_down(self) -> None:
        """Kill by pid what is left, then remove the namespaces."""
        while left := self.left():
            for pid in left:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            for host in self.hosts:
                for process in host.processes:
                    process.poll()
            time.sleep(_POLL_S)
        for host in self.hosts:
            for process in host.processes:
                process.wait()
            _try("ip", "netns", "delete", host.name)

    def torchrun(self, rendezvous: str, script: Path, *words: str, **variables: str) -> None:
        """Start the job as the README says, on both hosts."""
        for index, host in enumerate(self.hosts):
            launcher = [sys.executable, "-m", "torch.distributed.run", "--nnodes", "2"]
            ranks = ["--nproc-per-node", str(RANKS_PER_HOST)]
            here = ["--local-addr", host.address, "--log-dir", str(self.folder / f"logs{index}")]
            command = [*launcher, *ranks, *here, "--redirects", "3", *_meeting(rendezvous, index)]
            script_words = [str(script), *words]
            host.start(
                [*command, *script_words], self.folder / f"host{index}", self.mark, **variables
            )

    def cut_cable(self) -> None:
        """Nothing passes between the hosts any more, and nobody is told."""
        _ip("-n", self.hosts[0].name, "link", "set", "veth0", "down")

    def wait(self, *, within_s: float) -> list[int]:
        """Wait until torchrun has ended on both hosts; returns its statuses."""
        launchers = self._launchers()
        self.wait_until(
            lambda: all(process.poll() is not None for process in launchers), within_s=within_s
        )
        return [process.returncode for process in launchers]

    def _launchers(self) -> list["subprocess.Popen[bytes]"]:
        return [process for host in self.hosts for process in host.processes]

    def wait_until(self, holds: Callable[[], bool], *, within_s: float) -> None:
        """Poll until something holds; fails at once where the job has ended without."""
        deadline = time.monotonic() + within_s
        while not holds():
            ended = all(process.poll() is not None for process in self._launchers())
            assert holds() or not ended, f"it ended before\n{self.story()}"
            assert time.monotonic() < deadline, f"not within {within_s} s\n{self.story()}"
            time.sleep(_POLL_S)

    def written(self, stream: str) -> dict[tuple[int, int], str]:
        """What each process wrote to "stdout" or "stderr", by host and local rank."""
        told = {}
        for index in range(len(self.hosts)):
            for log in self.folder.glob(f"logs{index}/*/attempt_0/*/{stream}.log"):
                told[index, int(log.parent.name)] = log.read_text()
        return told

    def result(self) -> dict[str, Any]:
        """The one JSON object that rank 0 ended with, wherever it ran."""
        lines = [line for text in self.written("stdout").values() for line in text.splitlines()]
        [line] = [line for line in lines if line.startswith("{")]
        result: dict[str, Any] = json.loads(line)
        return result

    def story(self) -> str:
        """All output, for the message of a failed assertion."""
        files = [path for path in sorted(self.folder.rglob("*")) if path.is_file()]
        return "\n".join(f"--- {path}\n{path.read_text()[-3000:]}" for path in files)

    def ranks(self) -> dict[int, "Process"]:
        """The job's ranks that run now, without torchrun itself."""
        spaces = {Path(f"/run/netns/{host.name}").stat().st_ino: i for i, host in self._numbered()}
        found = {}
        for pid in self.left():
            environ = _environ(pid)
            with contextlib.suppress(OSError, KeyError):
                space = Path(f"/proc/{pid}/ns/net").stat().st_ino
                local_rank = int(environ["LOCAL_RANK"])
                found[int(environ["RANK"])] = Process(pid, spaces[space], local_rank)
        return found

    def _numbered(self) -> list[tuple[int, Host]]:
        return list(enumerate(self.hosts))

    def left(self) -> list[int]:
        """The pids of the job's processes."""
        pids = [int(entry.name) for entry in Path("/proc").iterdir() if entry.name.isdecimal()]
        return [pid for pid in pids if _environ(pid).get(_MARK) == self.mark and _runs(pid)]


def _meeting(rendezvous: str, index: int) -> list[str]:
    """Torchrun's words for where the hosts meet."""
    first = ADDRESSES[0]
    if rendezvous == "static":
        where = ["--master-addr", first, "--master-port", str(PORT)]
        return ["--node-rank", str(index), *where]
    words = ["--rdzv-backend", "c10d", "--rdzv-endpoint", f"{first}:{PORT}", "--rdzv-id", "job"]
    return [*words, "--rdzv-conf", f"is_host={1 - index}"]


def _environ(pid: int) -> dict[str, str]:
    try:
        raw = Path(f"/proc/{pid}/environ").read_bytes().decode(errors="replace")
    except OSError:
        return {}
    return dict(pair.split("=", 1) for pair in raw.split("\0") if "=" in pair)


def _runs(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except OSError:
        return False


@contextlib.contextmanager
def two_hosts(folder: Path) -> Iterator[Hosts]:
    """The hosts, gone afterwards whatever happens."""
    hosts = Hosts(folder)
    try:
        hosts.set_up()
        yield hosts
    finally:
        hosts.tear_down()


def run_here(ranks: int, *words: str, timeout_s: float) -> dict[str, Any]:
    """The example under torchrun on this host; returns the JSON object that it ends with."""
    [*_, result] = _told(ranks, EXAMPLE, *words, timeout_s=timeout_s)
    return result


def run_all_here(
    ranks: int, lines: Sequence[Sequence[str]], *, timeout_s: float
) -> list[dict[str, Any]]:
    """The same for several command lines, one after another in the same processes."""
    results = _told(ranks, TRAINER, json.dumps(lines), timeout_s=timeout_s)
    assert len(results) == len(lines)
    return results


def _told(ranks: int, script: Path, *words: str, timeout_s: float) -> list[dict[str, Any]]:
    """The JSON objects that a script under torchrun prints."""
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    paths = f"{REPOSITORY}{os.pathsep}{EXAMPLE.parent}"
    process = subprocess.Popen(
        [*launcher, "--nproc-per-node", str(ranks), str(script), *words],
        env={**os.environ, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        told, errors = process.communicate(timeout=timeout_s)
    except BaseException:
        process.terminate()  # torchrun ends its ranks
        process.communicate()
        raise
    assert process.returncode == 0, errors
    return [json.loads(line) for line in told.splitlines() if line.startswith("{")]
