"""HAZARDS 2 on real ranks: shapes may change with every microbatch and step."""

from pathlib import Path

import pytest

from tests.ranks.conftest import Launch

WORKER = Path(__file__).with_name("worker_lengths.py")
STEPS = 3

pytestmark = [pytest.mark.multiprocess, pytest.mark.timeout(120)]


@pytest.mark.parametrize(
    ("ranks", "seeds"), [(2, 5), pytest.param(4, 20, marks=pytest.mark.slow)], ids=["2", "4"]
)
def test_lengths_that_vary_and_a_doubled_batch_equal_the_unpartitioned_model_bit_for_bit(
    launch: Launch, ranks: int, seeds: int
) -> None:
    """Loss, losses and all gradients of three steps, over random arrival orders, in every rank."""
    job = launch(ranks, script=WORKER, words=("0", str(seeds)))
    assert job.wait(within_s=100) == [0], job.story()
    for rank in range(ranks):
        steps = job.events(rank, "step")
        told = [(event["seed"], event["step"]) for event in steps]
        assert told == [(seed, step) for seed in range(seeds) for step in range(STEPS)]
        assert [event for event in steps if event["wrong"]] == []
    job.assert_orderly()
