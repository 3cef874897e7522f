"""Any two settings together: loss, gradients and trained parameters are the whole model's bits.

Every pair of values of the axes in `axes` is in a case. `make test` runs a sample that holds each
value once, `make test-all` the rest.
"""

import warnings
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.parity.axes import matrix, sample
from tests.parity.cases import HOOKED, case_of, kinds_of, must_warn, within
from tests.parity.pairwise import Row
from tests.runtime.parity import Run, differences, pipelined, records_of, shaken
from tests.runtime.reference import Outcome, run_reference

SEEDS = range(3)
CASES = [
    pytest.param(row, id=name, marks=[] if name in sample() else [pytest.mark.slow])
    for name, row in matrix().items()
]


@pytest.mark.parametrize("row", CASES)
async def test_any_two_settings_train_to_the_bits_of_the_unpartitioned_model(
    tmp_path: Path, row: Row
) -> None:
    """Loss, losses, outputs, all gradients, all parameters, over shaken arrival orders.

    With a free order of accumulation within 1e-9. A stage that cannot be split is warned of once,
    where its hint insists; each stage ran the tasks that it should.
    """
    case = case_of(row)
    expected = run_reference(case)
    assert_trains(expected, row)
    for seed in SEEDS:
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            run = await pipelined(case, folder := tmp_path / str(seed), wrap=shaken(seed))
        found = differences(expected, run.outcomes, within=within(row))
        assert found + _other_outputs(expected, run, within(row)) == [], f"delays of seed {seed}"
        assert_warned(told, row)
        assert_ran(_dispatched(folder, len(run.orders)), row, len(case.steps))


def assert_trains(expected: list[Outcome], row: Row) -> None:
    """The reference's gradients are there, finite and not all zero, or nothing is compared."""
    for outcome in expected:
        assert outcome.loss == outcome.loss != 0.0
        gradients = [g for g in outcome.gradients.values() if g is not None]
        assert gradients
        assert all(gradient.isfinite().all() for gradient in gradients)
        assert any(gradient.any() for gradient in gradients)
    frozen = {"first": "stage 0", "last": "stage 3", "middle": "stage 1"}.get(row["frozen"])
    held = expected[-1].gradients.items()
    assert all((gradient is None) for name, gradient in held if frozen and name.startswith(frozen))


def _other_outputs(expected: list[Outcome], run: Run, most: float) -> list[str]:
    """The microbatches whose output is not the reference's."""
    return [
        f"step {number} output {j}"
        for number, (wanted, got) in enumerate(zip(expected, run.outcomes, strict=True))
        for j, pair in enumerate(zip(wanted.outputs, got.outputs, strict=True))
        if not torch.allclose(*pair, rtol=0, atol=most)
    ]


def assert_warned(told: list[Any], row: Row) -> None:
    """Once, naming the stage, if at all; and of nothing else."""
    texts = [str(warning.message) for warning in told]
    assert len(texts) == must_warn(row), texts
    assert all(f"the backward of stage {HOOKED} is not split" in text for text in texts)


def assert_ran(orders: list[list[str]], row: Row, steps: int) -> None:
    """Each stage its kinds of tasks, each once a microbatch and step."""
    for stage in range(4):
        own = Counter(task for order in orders for task in order if task.startswith(str(stage)))
        kinds = {task[1] for task in own} - {"R"}
        every = [f"{stage}{kind}{j}" for kind in kinds for j in range(row["microbatches"])]
        assert {task: count for task, count in own.items() if "R" not in task} == dict.fromkeys(
            every, steps
        )
        assert kinds_of(row, stage) in (None, kinds), f"stage {stage}"


def _dispatched(folder: Path, ranks: int) -> list[list[str]]:
    """The tasks that ran, by rank."""
    logs = [records_of(folder, rank) for rank in range(ranks)]
    return [[record["task"] for record in log if record["event"] == "dispatch"] for log in logs]
