"""The example under torchrun trains to the same bits as in one process and as unpartitioned."""

import json
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import train_gpt
import training

from tests import logs
from tests.examples.logs import dispatched, write_csv
from tests.ranks.hosts import run_all_here, run_here

pytestmark = [pytest.mark.multiprocess, pytest.mark.timeout(150)]

WORDS = ("--steps", "5", "--microbatches", "8", "--json")
SEEDS = ("1", "2")
ORDERS = [
    ("--hint", hint, "--delay-seed", seed)
    for hint, seeds in (
        *(("auto", "2"), ("bf", SEEDS), ("bfw", SEEDS)),
        *(("fb", "1"), ("f-priority", "2")),
    )
    for seed in seeds
]
LISTS = ("1f1b", "gpipe", "zb-h1", "csv:{csv}", "replay:{log}")
CHUNKED = [
    ("--hint", "bfw", "--chunks", "2", "--placement", "v"),
    ("--hint", "bf", "--chunks", "2"),
    ("--hint", "zbv", "--chunks", "2", "--placement", "v"),
    ("--hint", "interleaved", "--chunks", "2"),
]
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


def _under_torchrun(ranks: int, lines: Sequence[Sequence[str]]) -> list[dict[str, Any]]:
    """What each command line came to; a launch for all of them."""
    given = [[*WORDS, *words] for words in lines]
    results = run_all_here(ranks, given, timeout_s=ENDS_WITHIN_S)
    assert [result["ranks"] for result in results] == [ranks] * len(lines)
    return [bits(result) for result in results]


def assert_all_train_as_the_reference(lines: Sequence[Sequence[str]], ranks: int = 4) -> None:
    """Each command line to its losses and its hash."""
    for words, result in zip(lines, _under_torchrun(ranks, lines), strict=True):
        assert result == reference(), words


def test_four_processes_train_to_the_bits_of_one_process_and_of_the_unpartitioned_model() -> None:
    """Losses of five steps and the hash over all gradients, as the README starts it."""
    order = ("--hint", "auto", "--delay-seed", "1")
    processes = bits(run_here(4, *WORDS, *order, timeout_s=ENDS_WITHIN_S))
    assert processes == reference()
    assert processes == _in_this_process("--ranks", "4", *order)


@pytest.mark.slow
def test_four_processes_train_to_the_same_bits_for_any_hint_and_arrival_order() -> None:
    """And so does one process with four ranks."""
    assert_all_train_as_the_reference(ORDERS)
    for order in ORDERS:
        assert _in_this_process("--ranks", "4", *order) == reference(), order


@pytest.mark.slow
def test_four_processes_execute_a_list_to_the_bits_of_the_unpartitioned_model(
    tmp_path: Path,
) -> None:
    """Generated, read from a file, or replayed, in which case the logs are equal."""
    log, csv = tmp_path / "log", write_csv(tmp_path / "order.csv")
    lines: list[tuple[str, ...]] = [("--delay-seed", "1", "--trace-dir", str(log))]
    for place, name in enumerate(LISTS):
        hint = ("--hint", name.format(csv=csv, log=log), "--binding")
        lines.append((*hint, "--delay-seed", "2", "--trace-dir", str(tmp_path / str(place))))
    assert_all_train_as_the_reference(lines)
    replayed = tmp_path / str(len(LISTS) - 1)
    assert dispatched(replayed) == dispatched(log)


@pytest.mark.slow
def test_four_processes_with_two_stages_each_train_to_the_bits_of_the_unpartitioned_model() -> None:
    """Eight stages on four ranks, for one arrival order; in one process likewise."""
    lines = [(*chunked, "--delay-seed", "3") for chunked in CHUNKED]
    assert_all_train_as_the_reference(lines)
    for words in lines:
        assert _in_this_process("--ranks", "4", *words) == reference(), words


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [1, 2])
def test_one_and_two_processes_train_to_the_bits_of_the_unpartitioned_model(ranks: int) -> None:
    """The number of stages changes nothing either."""
    assert_all_train_as_the_reference([()], ranks)


@pytest.mark.slow
def test_processes_really_dispatch_in_other_orders_for_other_seeds(tmp_path: Path) -> None:
    """Every rank's log holds each task once a step; the orders differ between seeds."""
    folders = [tmp_path / seed for seed in SEEDS]
    _under_torchrun(
        4,
        [
            ("--hint", "bf", "--delay-seed", seed, "--trace-dir", str(folder))
            for seed, folder in zip(SEEDS, folders, strict=True)
        ],
    )
    seen = [[logs.dispatched(folder, rank) for rank in range(4)] for folder in folders]
    assert seen[0] != seen[1]
    for ranks in seen:
        for rank, order in enumerate(ranks):
            step = [f"{rank}{kind}{j}" for kind in "BF" for j in range(8)]
            assert sorted(order) == sorted(step * 5)
