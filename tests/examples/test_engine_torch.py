"""The example under torch's own schedule: the same losses, and a word where it cannot run."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import train_gpt

EXAMPLE = Path(train_gpt.__file__)
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2"]
STEPS = ["--steps", "2", "--json"]


@pytest.fixture
def _torchrun(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if torchrun had started this process, as one of two."""
    for name, value in {"TORCHELASTIC_RUN_ID": "none", "WORLD_SIZE": "2", "RANK": "0"}.items():
        monkeypatch.setenv(name, value)


def refused(capsys: pytest.CaptureFixture[str], *extra: str) -> str:
    """What is said of a command line that ends with status 2."""
    with pytest.raises(SystemExit) as ended:
        train_gpt.main(["--engine", "torch", "--steps", "1", *extra])
    assert ended.value.code == 2
    return capsys.readouterr().err


@pytest.mark.parametrize("extra", [[], ["--reference"], ["--ranks", "2"]], ids=str)
def test_without_torchrun_it_says_how_to_start(
    extra: list[str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Exit status 2, whatever else is asked for."""
    monkeypatch.delenv("TORCHELASTIC_RUN_ID", raising=False)
    assert "start with torchrun" in refused(capsys, *extra)


@pytest.mark.usefixtures("_torchrun")
@pytest.mark.parametrize(
    ("extra", "told"),
    [
        (["--reference"], "one stage a rank on CPUs: leave the other options out"),
        (["--chunks", "2"], "one stage a rank on CPUs: leave the other options out"),
        (["--device", "cuda"], "one stage a rank on CPUs: leave the other options out"),
        (["--batch", "12"], "--batch 12 must be a multiple of 8"),
        (["--ranks", "4"], "--ranks 4, but torchrun started 2"),
    ],
)
def test_under_torchrun_it_refuses_what_torchs_schedule_does_not_do(
    extra: list[str], told: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Exit status 2, before any process group exists."""
    assert told in refused(capsys, *extra)


@pytest.mark.slow
@pytest.mark.multiprocess
@pytest.mark.timeout(120)
def test_torchs_schedule_trains_to_the_losses_of_the_unpartitioned_model() -> None:
    """Two steps on two ranks, the second after an update, to rounding."""
    pipelined = result([*TORCHRUN, str(EXAMPLE), "--engine", "torch", *STEPS])
    expected = result([sys.executable, str(EXAMPLE), "--reference", *STEPS])
    assert (pipelined["engine"], pipelined["ranks"], pipelined["hint"]) == ("torch", 2, None)
    assert len(pipelined["losses"]) == len(pipelined["step_s"]) == 2
    assert pipelined["losses"] == pytest.approx(expected["losses"], rel=0.0, abs=1e-4)
    assert abs(expected["losses"][1] - expected["losses"][0]) > 1e-3, "an update would not show"


def result(command: list[str]) -> dict[str, object]:
    """The command's JSON object, its last line."""
    ended = subprocess.run(
        command,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert ended.returncode == 0, ended.stderr
    told: dict[str, object] = json.loads(ended.stdout.splitlines()[-1])
    return told
