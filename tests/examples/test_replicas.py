"""--dp, --tp and --zero1: what the examples make of them, and what they refuse."""

import json
import os
import subprocess
import sys
from functools import cache
from typing import Any

import pytest
import torch
import train_gpt
import training

from tests.ranks.test_replicas import WITHIN_FP32

STEPS = ("--steps", "3", "--json")
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node"]
KEPT = ("losses", "replica_grad_sha256", "grad_sha256")


def kept(report: str) -> dict[str, Any]:
    """What of a report must not depend on how fast it went."""
    result = json.loads(report)
    return {name: result[name] for name in (*KEPT, "ranks", "dp", "tp")}


def run(*extra: str) -> dict[str, Any]:
    """Run the GPT in this process; its report without the times."""
    options = train_gpt.parse([*STEPS, *extra])
    model, text = train_gpt.GPT(), training.load_text(options.data)
    history = training.way_of(options)(model, options, text, lambda *_: None)
    return kept(training.report(model, options, history))


@cache
def command(example: str, ranks: int, *extra: str) -> dict[str, Any]:
    """Run an example as a user does, under torchrun; its report without the times."""
    ended = subprocess.run(
        [*TORCHRUN, str(ranks), example, *STEPS, *extra],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert ended.returncode == 0, ended.stderr
    return kept(ended.stdout.splitlines()[-1])


@cache
def reference() -> dict[str, Any]:
    """The unpartitioned model's report."""
    return run("--reference")


def assert_trains_as_the_reference(result: dict[str, Any], ranks: int, dp: int, tp: int) -> None:
    """The reference's losses, but for the order of sums; replicas equal to the bit."""
    assert (result["ranks"], result["dp"], result["tp"]) == (ranks, dp, tp)
    assert result["losses"] == pytest.approx(reference()["losses"], rel=0.0, abs=WITHIN_FP32)
    assert result["replica_grad_sha256"] == [result["grad_sha256"]] * dp
    assert abs(reference()["losses"][1] - reference()["losses"][0]) > 1e-3, "no update would show"


@pytest.fixture(autouse=True)
def one_thread() -> None:
    """Bits are equal at equal thread counts."""
    torch.set_num_threads(1)


@pytest.fixture
def torchrun(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if torchrun had started this process, as one of eight."""
    for name, value in {"TORCHELASTIC_RUN_ID": "none", "WORLD_SIZE": "8", "RANK": "0"}.items():
        monkeypatch.setenv(name, value)


def refused(capsys: pytest.CaptureFixture[str], *extra: str) -> str:
    """What is said of a command line that ends with status 2."""
    with pytest.raises(SystemExit) as ended:
        train_gpt.parse([*STEPS, *extra])
    assert ended.value.code == 2
    return capsys.readouterr().err


# -- the command line ----------------------------------------------------------------------------


@pytest.mark.usefixtures("torchrun")
@pytest.mark.parametrize(
    ("words", "ranks"), [("", 8), ("--dp 2", 4), ("--tp 4", 2), ("--tp 2 --dp 2", 2)]
)
@pytest.mark.parametrize("said", [False, True])
def test_under_torchrun_the_pipeline_has_the_ranks_that_are_left(
    words: str, ranks: int, *, said: bool
) -> None:
    """World size over dp x tp; --ranks may say the same."""
    also = ["--ranks", str(ranks)] if said else []
    assert train_gpt.parse([*words.split(), *also]).ranks == ranks


def test_without_torchrun_ranks_are_those_of_each_replica() -> None:
    """Four by default, times the replicas."""
    options = train_gpt.parse(["--dp", "2"])
    assert options.ranks == 4
    assert train_gpt.GPT().topology(options).world_size == 8


@pytest.mark.usefixtures("torchrun")
def test_the_reference_is_one_rank_whatever_else_is_said() -> None:
    """So a command line can be compared with itself plus --reference."""
    options = train_gpt.parse(["--tp", "2", "--dp", "2", "--reference"])
    assert (options.ranks, options.tp, options.dp) == (1, 1, 1)


@pytest.mark.usefixtures("torchrun")
@pytest.mark.parametrize(
    ("words", "told"),
    [
        ("--dp 3", "torchrun started 8 ranks, no multiple of the 3 of --tp x --dp"),
        ("--dp 4 --tp 4", "torchrun started 8 ranks, no multiple of the 16 of --tp x --dp"),
        ("--dp 2 --ranks 8", "--ranks 8, but torchrun started 8, which makes 4 pipeline ranks"),
        ("--dp 2 --batch 15", "--batch 15 must be a multiple of --dp 2"),
        ("--zero1", "--zero1 divides optimizer state among replicas: give --dp too"),
        ("--zero1 --dp 2 --tp 2", "--zero1 cannot divide the state of shards"),
        ("--engine torch --dp 2", "one stage a rank on CPUs: leave the other options out"),
        ("--engine torch --tp 2", "one stage a rank on CPUs: leave the other options out"),
        ("--dp 0", "'0' must be a whole number of at least 1"),
    ],
)
def test_under_torchrun_it_refuses_what_cannot_be(
    words: str, told: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Exit status 2, before any process group exists."""
    assert told in refused(capsys, *words.split())


@pytest.mark.parametrize("words", ["--tp 2", "--dp 2 --zero1"])
def test_without_torchrun_it_says_how_to_start(
    words: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both need torch's mesh, and that a process for every rank."""
    monkeypatch.delenv("TORCHELASTIC_RUN_ID", raising=False)
    assert "start with torchrun" in refused(capsys, *words.split())


# -- in one process ------------------------------------------------------------------------------


def test_without_replicas_the_report_is_of_one() -> None:
    """The hash of the one replica is the hash."""
    result = run("--ranks", "2")
    assert result["replica_grad_sha256"] == [result["grad_sha256"]]
    assert result == {**reference(), "ranks": 2}


@pytest.mark.parametrize("order", ["auto", "bf --chunks 2"])
def test_two_replicas_in_one_process_train_as_one_model(order: str) -> None:
    """Each on its half of the batch; any dispatch order, the same bits."""
    words = ("--ranks", "2", "--dp", "2", "--hint", *order.split(), "--delay-seed")
    results = [run(*words, seed) for seed in "12"]
    assert_trains_as_the_reference(results[0], ranks=2, dp=2, tp=1)
    assert results[0] == results[1]
    assert results[0]["grad_sha256"] != reference()["grad_sha256"], "sums of other parts"


# -- a process for each rank ---------------------------------------------------------------------


@pytest.mark.parametrize(
    ("ranks", "words", "pp", "dp", "tp"),
    [
        pytest.param(4, ("--dp", "2"), 2, 2, 1, id="dp"),
        pytest.param(4, ("--tp", "2"), 2, 1, 2, id="tp"),
        pytest.param(4, ("--tp", "4"), 1, 1, 4, id="tp alone"),
        pytest.param(8, ("--tp", "2", "--dp", "2"), 2, 2, 2, id="tp x dp"),
    ],
)
@pytest.mark.slow
@pytest.mark.multiprocess
@pytest.mark.timeout(240)
def test_under_torchrun_the_grid_trains_as_one_model(
    ranks: int, words: tuple[str, ...], pp: int, dp: int, tp: int
) -> None:
    """Three steps, the losses of the unpartitioned model, equal replicas."""
    result = command(train_gpt.__file__, ranks, *words)
    assert_trains_as_the_reference(result, ranks=pp, dp=dp, tp=tp)


@pytest.mark.slow
@pytest.mark.multiprocess
@pytest.mark.timeout(240)
def test_zero1_trains_to_the_bits_of_the_plain_optimizer() -> None:
    """Its gradients and losses after two updates are those of AdamW as a whole."""
    plain = command(train_gpt.__file__, 4, "--dp", "2")
    assert command(train_gpt.__file__, 4, "--dp", "2", "--zero1") == plain
