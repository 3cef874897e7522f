"""The example under torchrun trains to the same bits as in one process and as unpartitioned."""

import json
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import train_gpt
import training

from tests import logs
from tests.examples.logs import dispatched, write_csv
from tests.ranks.hosts import run_here

pytestmark = [pytest.mark.multiprocess, pytest.mark.timeout(150)]

WORDS = ("--steps", "5", "--microbatches", "8", "--json")
SEEDS = (1, 2)
SAMPLED = {("auto", 1)}
CASES = [
    pytest.param(hint, seed, marks=[] if (hint, seed) in SAMPLED else [pytest.mark.slow])
    for hint, seeds in (
        *(("auto", SEEDS), ("bf", SEEDS), ("bfw", SEEDS)),
        *(("fb", (1,)), ("f-priority", (2,))),
    )
    for seed in seeds
]
LISTS = ("1f1b", "gpipe", "zb-h1", "csv:{csv}", "replay:{log}")
CHUNKED = {
    "bfw in a v": ("--hint", "bfw", "--chunks", "2", "--placement", "v"),
    "bf in a loop": ("--hint", "bf", "--chunks", "2"),
    "zbv in a v": ("--hint", "zbv", "--chunks", "2", "--placement", "v"),
    "interleaved in a loop": ("--hint", "interleaved", "--chunks", "2"),
}
ENDS_WITHIN_S = 120.0


def bits(result: dict[str, Any]) -> dict[str, Any]:
    """What must be equal."""
    return {name: result[name] for name in ("losses", "grad_sha256")}


def _in_this_process(*words: str) -> dict[str, Any]:
    options = train_gpt.parse([*WORDS, *words])
    recipe, text = train_gpt.GPT(), training.load_text(options.data)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # as the example does
    try:
        history = training.way_of(options)(recipe, options, text, lambda *_: None)
        return bits(json.loads(training.report(recipe, options, history)))
    finally:
        torch.set_num_threads(threads)


@cache
def reference() -> dict[str, Any]:
    """The unpartitioned model's losses and hash."""
    return _in_this_process("--reference")


def _under_torchrun(ranks: int, *words: str) -> dict[str, Any]:
    result = run_here(ranks, *WORDS, *words, timeout_s=ENDS_WITHIN_S)
    assert result["ranks"] == ranks
    return bits(result)


@pytest.mark.parametrize(("hint", "seed"), CASES)
def test_four_processes_train_to_the_bits_of_one_process_and_of_the_unpartitioned_model(
    hint: str, seed: int
) -> None:
    """Losses of five steps and the hash over all gradients, for any hint and arrival order."""
    order = ("--hint", hint, "--delay-seed", str(seed))
    processes = _under_torchrun(4, *order)
    assert processes == reference()
    assert processes == _in_this_process("--ranks", "4", *order)


@pytest.mark.slow
@pytest.mark.parametrize("hint", LISTS)
def test_four_processes_execute_a_list_to_the_bits_of_the_unpartitioned_model(
    hint: str, tmp_path: Path
) -> None:
    """Generated, read from a file, or replayed, in which case the logs are equal."""
    log, again = tmp_path / "log", tmp_path / "again"
    hint = hint.format(csv=write_csv(tmp_path / "order.csv"), log=log)
    if hint.startswith("replay:"):
        _under_torchrun(4, "--delay-seed", "1", "--trace-dir", str(log))
    order = ("--hint", hint, "--binding", "--delay-seed", "2", "--trace-dir", str(again))
    assert _under_torchrun(4, *order) == reference()
    if hint.startswith("replay:"):
        assert dispatched(again) == dispatched(log)


@pytest.mark.slow
@pytest.mark.parametrize("name", list(CHUNKED))
def test_four_processes_with_two_stages_each_train_to_the_bits_of_the_unpartitioned_model(
    name: str,
) -> None:
    """Eight stages on four ranks, for one arrival order; in one process likewise."""
    order = (*CHUNKED[name], "--delay-seed", "3")
    assert _under_torchrun(4, *order) == reference()
    assert _in_this_process("--ranks", "4", *order) == reference()


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [1, 2])
def test_one_and_two_processes_train_to_the_bits_of_the_unpartitioned_model(ranks: int) -> None:
    """The number of stages changes nothing either."""
    assert _under_torchrun(ranks) == reference()


@pytest.mark.slow
def test_processes_really_dispatch_in_other_orders_for_other_seeds(tmp_path: Path) -> None:
    """Every rank's log holds each task once a step; the orders differ between seeds."""
    seen = []
    for seed in SEEDS:
        folder = tmp_path / str(seed)
        order = ("--hint", "bf", "--delay-seed", str(seed))
        _under_torchrun(4, *order, "--trace-dir", str(folder))
        seen.append([logs.dispatched(folder, rank) for rank in range(4)])
    assert seen[0] != seen[1]
    for ranks in seen:
        for rank, order in enumerate(ranks):
            step = [f"{rank}{kind}{j}" for kind in "BF" for j in range(8)]
            assert sorted(order) == sorted(step * 5)
