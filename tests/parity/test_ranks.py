"""A part of the matrix under torchrun: gloo between processes, compared bit for bit."""

import pytest
import torch

from rrfp_async.gpu.group_transfer import PACKED_MOST_BYTES
from tests.parity.ranks_cases import CASES, MANY_WORDS, large
from tests.parity.worker import SEEDS
from tests.ranks.conftest import Launch
from tests.ranks.launching import REPOSITORY, Job

pytestmark = [pytest.mark.multiprocess, pytest.mark.slow, pytest.mark.timeout(150)]

WORKER = REPOSITORY / "tests/parity/worker.py"
REUSE = REPOSITORY / "tests/parity/worker_reuse.py"
ENDS_WITHIN_S = 120.0


@pytest.mark.parametrize("ranks", list(CASES))
def test_processes_train_to_the_bits_of_the_unpartitioned_model(launch: Launch, ranks: int) -> None:
    """Each case as it comes and over shaken orders: loss, losses, gradients, parameters."""
    job = launch(ranks, script=WORKER, words=tuple(CASES[ranks]))
    assert job.wait(within_s=ENDS_WITHIN_S) == [0], job.story()
    for name, make in CASES[ranks].items():
        steps = range(len(make().steps))
        for rank in range(ranks):
            told = [event for event in job.events(rank, "step") if event["case"] == name]
            assert [(e["seed"], e["step"]) for e in told] == [
                (seed, step) for seed in SEEDS for step in steps
            ]
            assert [event for event in told if event["wrong"] or not event["compared"]] == []
    _assert_warned(job, ranks)
    job.assert_orderly()


def _assert_warned(job: Job, ranks: int) -> None:
    """Only where a stage cannot be split, on the rank that owns it, once a run."""
    for rank in range(ranks):
        for event in job.events(rank, "warned"):
            expected = "hooked" in event["case"] and rank == 2
            assert len(event["texts"]) == expected, event


@pytest.mark.parametrize("hint", ["bf", "bfw"])
def test_large_means_that_each_kind_of_tensor_travels_by_itself(hint: str) -> None:
    """A microbatch's tokens (int64), mask (bool) and hidden states are beyond the limit each."""
    case = large(hint)
    [part, _] = case.steps[0].parts
    tokens, mask = part.args[0][0], part.kwargs[0]["mask"]
    assert (tokens.dtype, mask.dtype) == (torch.int64, torch.bool)
    assert min(tokens.nbytes, mask.nbytes, tokens.numel() * 8) > PACKED_MOST_BYTES
    assert MANY_WORDS * 8 * 4 > PACKED_MOST_BYTES


def test_an_output_buffer_that_is_reused_during_its_send_is_an_error(launch: Launch) -> None:
    """Hazard 23: on both ranks, naming the stage and the task whose tensor it was."""
    job = launch(2, script=REUSE, words=("reuse",))
    assert job.wait() == [0], job.story()
    for event in job.failures().values():
        told = "stage 0 changed a tensor of 0F0 in place while it was being sent"
        assert told in event["message"]
        assert event["failed"]["rank"] == 0
    job.assert_orderly()


@pytest.mark.parametrize("way", ["fresh", "small"])
def test_what_was_sent_is_what_the_stage_returned(launch: Launch, way: str) -> None:
    """Hazard 23: no error and the right values.

    For outputs that are not reused, though a send waits; and for a small buffer that is: it must
    have been copied before the stage's next forward writes to it.
    """
    job = launch(2, script=REUSE, words=(way,))
    assert job.wait() == [0], job.story()
    assert [job.event(rank, "step")["loss"] for rank in range(2)] == [0.0, 0.0]
