"""The main job: a GPT on real text trains to the same bits under any hint and any arrival order."""

import json
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest
import train_gpt
import training

from tests import logs
from tests.examples.logs import dispatched, write_csv

SEEDS = (1, 2, 3)
EXAMPLE = Path(train_gpt.__file__)
RULES = ("auto", "bf", "bfw", "fb", "b-priority", "f-priority")
LISTS = ("gpipe", "1f1b", "zb-h1")
SAMPLED = {("auto", 1), ("auto", 3), ("bf", 1), ("bfw", 2), ("f-priority", 2)}
CASES = [
    pytest.param(hint, seed, marks=[] if (hint, seed) in SAMPLED else [pytest.mark.slow])
    for hint in RULES
    for seed in SEEDS
]


def words(*extra: str) -> list[str]:
    """The command line of five steps with eight microbatches."""
    return ["--steps", "5", "--microbatches", "8", "--json", *extra]


def run(*extra: str) -> dict[str, object]:
    """Run the example in this process; returns its JSON object without the times."""
    options = train_gpt.parse(words(*extra))
    recipe, text = train_gpt.GPT(), training.load_text(options.data)
    history = training.way_of(options)(recipe, options, text, lambda *_: None)
    result = json.loads(training.report(recipe, options, history))
    return {name: result[name] for name in ("losses", "grad_sha256")}


@cache
def reference() -> dict[str, object]:
    """The unpartitioned model's losses and hash."""
    return run("--reference")


def orders(trace: Path) -> list[list[str]]:
    """Every rank's dispatch order as its log tells it."""
    return [logs.dispatched(trace, rank) for rank in range(len(list(trace.glob("rank*.jsonl"))))]


@pytest.fixture(autouse=True)
def one_thread() -> None:
    """Bits are equal at equal thread counts."""
    train_gpt.torch.set_num_threads(1)


@pytest.mark.parametrize(("hint", "seed"), CASES)
def test_any_hint_and_arrival_order_trains_to_the_bits_of_the_unpartitioned_model(
    hint: str, seed: int
) -> None:
    """Losses of five steps and the hash over all gradients equal the reference's."""
    assert run("--ranks", "4", "--hint", hint, "--delay-seed", str(seed)) == reference()


@pytest.mark.parametrize("binding", [True, pytest.param(False, marks=pytest.mark.slow)])
@pytest.mark.parametrize("hint", LISTS)
def test_a_listed_hint_trains_to_the_same_bits_as_a_ranking_and_executed_as_it_stands(
    hint: str, *, binding: bool
) -> None:
    """Executed, its log is the list itself."""
    how = "--binding" if binding else "--no-binding"
    assert run("--ranks", "4", "--hint", hint, how, "--delay-seed", "1") == reference()


@pytest.mark.slow
@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("hint", ["zbv", "bfw", "bf-deep", "interleaved", "interleaved --binding"])
def test_two_chunks_a_rank_train_to_the_same_bits(hint: str, seed: int) -> None:
    """In the placement that the hint is made for."""
    placement = "loop" if hint.startswith("interleaved") else "v"
    order = ["--hint", *hint.split(), "--chunks", "2", "--placement", placement]
    assert run("--ranks", "4", *order, "--delay-seed", str(seed)) == reference()


def test_a_csv_is_executed_to_the_same_bits(tmp_path: Path) -> None:
    """The log is the file's lists, step after step."""
    file, folder = write_csv(tmp_path / "order.csv"), tmp_path / "log"
    executed = run("--hint", f"csv:{file}", "--binding", "--trace-dir", str(folder))
    assert executed == reference()
    rows = [[word for word in row.split(",") if word] for row in file.read_text().split()]
    assert dispatched(folder) == [[(step, word) for step in range(5) for word in r] for r in rows]


def test_a_replay_has_the_log_and_the_bits_of_the_recorded_run(tmp_path: Path) -> None:
    """Other delays, the same dispatches: every step of every rank."""
    recorded, replayed = tmp_path / "recorded", tmp_path / "replayed"
    run("--delay-seed", "5", "--trace-dir", str(recorded))
    again = run("--hint", f"replay:{recorded}", "--delay-seed", "6", "--trace-dir", str(replayed))
    assert again == reference()
    assert dispatched(replayed) == dispatched(recorded)


def test_dispatch_orders_really_differ_between_delay_seeds(tmp_path: Path) -> None:
    """The logs hold every task once, on every rank, in different orders for different seeds."""
    seen = []
    for seed in SEEDS[:2]:
        folder = tmp_path / str(seed)
        order = ("--hint", "bf", "--delay-seed", str(seed))
        run("--ranks", "4", *order, "--trace-dir", str(folder))
        seen.append(orders(folder))
    assert seen[0] != seen[1]
    for ranks in seen:
        for rank, order in enumerate(ranks):
            step = [f"{rank}{kind}{j}" for kind in "BF" for j in range(8)]
            assert sorted(order) == sorted(step * 5)


@pytest.mark.multiprocess
def test_the_command_ends_with_one_json_object_and_a_falling_loss() -> None:
    """Run as a user runs it; the last line is JSON with the promised keys."""
    command = [sys.executable, str(EXAMPLE), "--ranks", "2", *words()]
    done = subprocess.run(command, capture_output=True, text=True, timeout=50, check=True)
    result = json.loads(done.stdout.splitlines()[-1])
    keys = {"losses", "step_s", "ranks", "dp", "tp", "engine", "hint"}
    assert set(result) == keys | {"grad_sha256", "replica_grad_sha256"}
    assert (result["ranks"], result["engine"], result["hint"]) == (2, "rrfp_async", "auto")
    assert len(result["losses"]) == len(result["step_s"]) == 5
    assert result["losses"][-1] < result["losses"][0]
    assert result["grad_sha256"] == reference()["grad_sha256"]


@pytest.mark.parametrize(
    ("extra", "told"),
    [
        (["--ranks", "9"], "use fewer ranks"),
        (["--batch", "4"], "a batch of 4 samples cannot be split into 8 microbatches"),
        (["--hint", "zb"], "hint 'zb' is not known: use one of auto, bf, "),
        (["--binding"], "binding=True executes a list as it stands"),
        (["--hint", "csv:/nowhere"], "cannot be read"),
        (["--hint", "1f1b", "--binding", "--limit", "3"], "limit=3 is below 4"),
        (["--data", "/nowhere"], "/nowhere holds no text"),
    ],
)
def test_bad_settings_end_with_one_line_that_says_what_to_change(
    extra: list[str], told: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Exit status 2 and a message, no traceback."""
    assert train_gpt.main(words(*extra)) == 2
    assert told in capsys.readouterr().err
