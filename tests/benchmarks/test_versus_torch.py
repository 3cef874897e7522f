"""The comparison with torch's schedules is fair and complete; no test says how fast anything is."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from benchmarks import versus_torch
from benchmarks.emulation import Emulated, SleepingLayer
from benchmarks.peers import SYSTEMS, System
from benchmarks.versus_torch import Problem, reference_gradients
from rrfp_async import Topology

ROOT = Path(__file__).parents[2]
COLUMNS = {
    "system",
    "hint",
    "pp",
    "microbatches",
    "profile",
    "jitter",
    "step_ms",
    "ratio_to_bound",
    "ratio_to_best_torch",
    "peak_activations",
    "cpu_ms_per_task",
}


class FakePeer:
    """A rank's stages without a system that runs them."""

    def __init__(self, system: System, rank: int) -> None:
        self.system = system
        self.topology = Topology(4, chunks=system.chunks, placement=system.placement)
        stages = self.topology.stages_of(rank)
        self.layers = [SleepingLayer(16, Emulated(s, lambda _k, _m: 0.0), 7) for s in stages]


def problem(jitter: str = "J3") -> Problem:
    """A small one."""
    return Problem(4, 8, "multimodal", jitter, 2)


def test_a_steps_delays_are_the_same_whenever_they_are_drawn() -> None:
    """Equal for a step, different between steps."""
    assert problem().costs(1) == problem().costs(1)
    assert problem().costs(1) != problem().costs(2)


@pytest.mark.parametrize("rank", range(4))
def test_every_system_suffers_the_same_on_a_rank(rank: int) -> None:
    """A rank's stages sleep as long in all, with one chunk and with two."""
    costs = problem().costs(0)
    totals = []
    for system in SYSTEMS:
        peer = FakePeer(system, rank)
        for layer in peer.layers:
            versus_torch.set_durations(layer.emulated, costs, peer)
        totals.append(
            sum(
                layer.emulated.duration(k, j)
                for layer in peer.layers
                for k in "FIW"
                for j in range(8)
            )
        )
    assert totals == pytest.approx([costs.work_s(rank)] * len(SYSTEMS))


def test_our_gradients_are_compared_to_the_last_bit_and_torchs_to_rounding() -> None:
    """One unit in the last place fails ours and passes theirs."""
    reference = reference_gradients(problem())
    for system in (System("rrfp_async", "bf"), System("torch", "1F1B")):
        peer = FakePeer(system, 1)
        for layer in peer.layers:
            for parameter, gradient in zip(
                layer.parameters(), reference[4][layer.emulated.stage], strict=True
            ):
                parameter.grad = torch.nextafter(gradient, gradient + 1.0)
        if system.name == "torch":
            versus_torch.check_gradients(peer, reference)
            continue
        with pytest.raises(AssertionError):
            versus_torch.check_gradients(peer, reference)


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("--pp", "0"),
        ("--steps", "0"),
        ("--rows", "none"),
        ("--profile", "llama"),
        ("--jitter", "J9"),
        ("--systems", "torch:Fast"),
    ],
)
def test_what_is_not_known_is_named(
    option: str, value: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Status 2, with the value."""
    with pytest.raises(SystemExit) as ended:
        versus_torch.main([option, value])
    assert ended.value.code == 2
    assert repr(value) in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.multiprocess
@pytest.mark.timeout(180)
def test_every_system_has_its_row() -> None:
    """On two ranks, gradients checked on the way; nothing is faster than the bound."""
    command = [sys.executable, "-m", "benchmarks.versus_torch", "--pp", "2", "--microbatches", "4"]
    ended = subprocess.run(
        [*command, "--steps", "2", "--json"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert ended.returncode == 0, ended.stderr
    rows = json.loads(ended.stdout)["rows"]
    assert [(row["system"], row["hint"]) for row in rows] == [(s.name, s.hint) for s in SYSTEMS]
    assert all(set(row) >= COLUMNS for row in rows)
    assert all(row["ratio_to_bound"] >= 1.0 for row in rows)
    theirs = [row["ratio_to_best_torch"] for row in rows if row["system"] == "torch"]
    assert min(theirs) == 1.0
