"""A model that nobody here wrote: transformers' Llama trains over ranks as it does by itself."""

import json
import os
import subprocess
import sys
from functools import cache

import pytest
import torch
import training

REASON = "needs transformers: pip install -c constraints.txt -e '.[dev,examples]'"
pytest.importorskip("transformers", reason=REASON)

import train_llama  # noqa: E402 - imports transformers, which may be absent

pytestmark = pytest.mark.slow

STEPS = ["--steps", "3", "--json"]
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "4"]
WAYS = (
    "",
    "--hint bf --delay-seed 1",
    "--hint bfw --delay-seed 2",
    "--hint fb --ranks 3 --delay-seed 3",
    "--hint 1f1b --binding",
    "--chunks 2 --placement v --hint zbv",
    "--chunks 2 --hint interleaved --delay-seed 4",
    "--batch 14 --microbatches 4",
)


def run(*extra: str) -> dict[str, object]:
    """Run the example in this process; losses and hash of its JSON object."""
    options = train_llama.parse([*STEPS, *extra])
    recipe, text = train_llama.Llama(tied=options.tied), training.load_text(options.data)
    history = training.way_of(options)(recipe, options, text, lambda *_: None)
    return bits(training.report(recipe, options, history))


def bits(report: str) -> dict[str, object]:
    """What of a report must not depend on how the model was trained."""
    result = json.loads(report)
    return {name: result[name] for name in ("losses", "grad_sha256")}


@cache
def reference(*extra: str) -> dict[str, object]:
    """The unpartitioned model's losses and hash."""
    return run("--reference", *extra)


def command(*extra: str) -> dict[str, object]:
    """Run the example as a user does, a process for each of four ranks."""
    ended = subprocess.run(
        [*TORCHRUN, train_llama.__file__, *STEPS, *extra],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert ended.returncode == 0, ended.stderr
    return bits(ended.stdout.splitlines()[-1])


def tokens() -> torch.Tensor:
    """The first batch of the example, `(16, 128)` int64."""
    options = train_llama.parse(STEPS)
    return training.batch_of(train_llama.Llama(), options, training.load_text(None), 0)[0]


def mask() -> torch.Tensor:
    """Padding at the right, another length for each sample of the batch."""
    return (torch.arange(128) < torch.arange(113, 129)[:, None]).long()


@pytest.fixture(autouse=True)
def one_thread() -> None:
    """Bits are equal at equal thread counts."""
    torch.set_num_threads(1)


@pytest.mark.parametrize("way", WAYS)
def test_any_hint_order_and_cut_trains_to_the_bits_of_the_unpartitioned_model(way: str) -> None:
    """Losses of three steps and the hash over all gradients equal the reference's."""
    batch = way.split() if way.startswith("--batch") else []
    assert run(*way.split()) == reference(*batch)


@pytest.mark.multiprocess
@pytest.mark.timeout(120)
def test_a_process_for_each_rank_trains_to_the_same_bits() -> None:
    """Under torchrun, with the hidden states' position ids on the wire."""
    assert command("--delay-seed", "5") == reference()


@pytest.mark.multiprocess
@pytest.mark.timeout(120)
def test_tied_embeddings_train_to_the_same_losses_under_torchrun() -> None:
    """Within 1e-5: the two uses of the weight are summed in another order."""
    wanted = reference("--tied")["losses"]
    assert command("--tied")["losses"] == pytest.approx(wanted, rel=0.0, abs=1e-5)
    assert wanted != pytest.approx(reference()["losses"], rel=0.0, abs=1e-3)


@pytest.mark.parametrize("way", ["--ranks 2 --hint bfw", "--ranks 2 --chunks 2 --placement v"])
def test_tied_embeddings_train_to_the_same_losses_wherever_the_copies_are(way: str) -> None:
    """On two ranks, or both on the first as in a V."""
    wanted = reference("--tied")["losses"]
    assert run("--tied", *way.split())["losses"] == pytest.approx(wanted, rel=0.0, abs=1e-5)


@pytest.mark.parametrize("given", ["position_ids", "attention_mask", "both", "nothing"])
@pytest.mark.parametrize("stages", [1, 3, 8])
def test_stages_one_after_another_are_the_model_to_the_bit(stages: int, given: str) -> None:
    """Whatever else the model is called with: packed paragraphs, padding."""
    recipe, first = train_llama.Llama(), tokens()
    also = {"position_ids": train_llama.positions(first), "attention_mask": mask()}
    if given != "both":
        also = {name: value for name, value in also.items() if name == given}
    passed: tuple[object, ...] = (first, also)
    for index in range(stages - 1):
        passed = recipe.stage(0, index, stages)(*passed)
    logits = recipe.stage(0, stages - 1, stages)(*passed)
    assert torch.equal(logits, recipe.whole(0)(input_ids=first, **also).logits)


@pytest.mark.parametrize("stages", [1, 4, 8])
def test_a_checkpoint_of_the_model_is_one_of_its_stages(stages: int) -> None:
    """Every name is in one stage, none is new, and each stage loads its own."""
    recipe = train_llama.Llama()
    saved = recipe.whole(1).state_dict()
    found = []
    for index in range(stages):
        stage = recipe.stage(0, index, stages)
        names = list(stage.state_dict())
        stage.load_state_dict({name: saved[name] for name in names})
        assert all(torch.equal(value, saved[name]) for name, value in stage.state_dict().items())
        found += names
    assert sorted(found) == sorted(saved)


def test_positions_begin_anew_after_an_empty_line() -> None:
    """And they do so in the batches that are trained on."""
    line = torch.tensor([list(b"ab\n\nc\n\n\nd\n")])
    assert train_llama.positions(line).tolist() == [[0, 1, 2, 3, 0, 1, 2, 0, 0, 1]]
    assert (train_llama.positions(tokens())[:, 1:] == 0).any()


def test_more_stages_than_layers_end_with_one_line_that_says_what_to_change(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Exit status 2 and a message, no traceback."""
    assert train_llama.main([*STEPS, "--ranks", "9"]) == 2
    assert "8 layers cannot make 9 stages: use fewer ranks or chunks" in capsys.readouterr().err
