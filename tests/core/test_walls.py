"""The walls of the core: importing it loads no tensors, no sockets and no event loop."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
CORE = ["errors", "ids", "topology", "hints", "ready_set", "backpressure", "arbiter", "config"]
HEAVY = ["torch", "zmq", "asyncio", "uvloop", "msgpack"]
PROBE = """
import importlib, json, sys
importlib.import_module(sys.argv[1])
print(json.dumps([name for name in sys.argv[2:] if name in sys.modules]))
"""


def loaded_by(module: str) -> list[str]:
    """Which of the heavy packages a new interpreter has loaded once it imported `module`."""
    done = subprocess.run(
        [sys.executable, "-c", PROBE, module, *HEAVY],
        cwd=ROOT,
        check=True,
        capture_output=True,
        text=True,
    )
    return list(json.loads(done.stdout))


@pytest.mark.multiprocess
@pytest.mark.parametrize("module", CORE)
def test_a_module_of_the_core_loads_nothing_heavy(module: str) -> None:
    """A decision can be replayed where there is no torch, zmq or loop."""
    assert loaded_by(f"rrfp_async.{module}") == []


@pytest.mark.multiprocess
def test_the_probe_sees_what_is_loaded() -> None:
    """The test above can fail: a module that imports asyncio is caught."""
    assert loaded_by("asyncio.queues") == ["asyncio"]
