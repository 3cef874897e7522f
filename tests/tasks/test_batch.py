"""From a batch to microbatches."""

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rrfp_async.tasks.batch import Arguments, Batch, Microbatches


def batch(*args: Any, target: Any = None, count: int = 4, **kwargs: Any) -> Batch:
    return Batch(args, kwargs, target, count)


@given(st.integers(1, 64), st.integers(1, 16))
def test_a_batch_is_split_as_tensor_split_does(samples: int, count: int) -> None:
    """Sizes differ by one at most, larger ones first, none empty, every sample once in order."""
    x = torch.arange(samples)
    split = batch(x, count=count)
    if samples < count:
        with pytest.raises(ValueError, match=f"{samples} samples cannot be split into {count}"):
            split.split_inputs()
        return
    parts = split.split_inputs()
    sizes = split.sizes(parts)
    assert len(parts) == count
    assert sum(sizes) == samples
    assert max(sizes) - min(sizes) <= 1
    assert list(sizes) == sorted(sizes, reverse=True)
    assert torch.equal(torch.cat([part.args[0] for part in parts]), x)


@given(st.lists(st.integers(1, 5), min_size=1, max_size=8))
def test_a_target_is_split_as_the_inputs_were(sizes: list[int]) -> None:
    """Whatever the microbatches' sizes, targets follow."""
    target = torch.arange(sum(sizes))
    parts = batch(target=target).split_target(sizes)
    assert [len(part) for part in parts] == sizes
    assert torch.equal(torch.cat(parts), target)


def test_ready_microbatches_set_the_count() -> None:
    """`Microbatches` overrule the configured count; whole tensors beside them are split alike."""
    parts = batch(Microbatches([torch.ones(2), torch.ones(3)]), mask=torch.arange(5)).split_inputs()
    assert [len(part.args[0]) for part in parts] == [2, 3]
    assert [part.kwargs["mask"].tolist() for part in parts] == [[0, 1, 2], [3, 4]]


def test_a_tuple_is_the_arguments_only_where_it_stands_alone() -> None:
    """As the only positional argument it is unpacked; beside another it is one argument."""
    pair = (torch.ones(1), torch.zeros(1))
    [alone] = batch(Microbatches([pair])).split_inputs()
    assert [tensor.tolist() for tensor in alone.args] == [[1.0], [0.0]]
    [beside] = batch(Microbatches([pair]), Microbatches([torch.ones(1)])).split_inputs()
    assert [type(value) for value in beside.args] == [tuple, torch.Tensor]


def test_plain_values_go_to_every_microbatch() -> None:
    """Numbers, strings and None are repeated, by position and by keyword."""
    parts = batch(torch.ones(4), 2, "a", scale=0.5, mask=None, flag=True, count=2).split_inputs()
    assert [part.args[1:] for part in parts] == [(2, "a")] * 2
    assert [part.kwargs for part in parts] == [{"scale": 0.5, "mask": None, "flag": True}] * 2


def test_inputs_lose_their_history() -> None:
    """Gradients end at the inputs, whole or ready-made: the caller's graph is not walked."""
    x = torch.ones(4, requires_grad=True) * 2
    whole = batch(x, count=2).split_inputs()
    ready = batch(Microbatches([x[:2], x[2:]])).split_inputs()
    inside = batch(Microbatches([(x, {"mask": x})])).split_inputs()
    assert [part.args[0].requires_grad for part in whole + ready] == [False] * 4
    assert [inside[0].args[0].requires_grad, inside[0].args[1]["mask"].requires_grad] == [False] * 2


def test_a_microbatch_counts_the_samples_of_its_first_tensor() -> None:
    """Plain values and scalars are passed over, keywords count too."""
    parts = [
        Arguments((3, torch.tensor(1.0), torch.ones(5, 2))),
        Arguments((), {"name": "a", "x": torch.ones(2)}),
    ]
    assert batch().sizes(parts) == (5, 2)


@pytest.mark.parametrize(
    ("given_batch", "message"),
    [
        (batch(torch.ones(4), torch.ones(5)), "dimension 0 is the batch, but differs"),
        (batch(x=torch.ones(4), y=torch.ones(5)), "'y'"),
        (batch(torch.tensor(1.0)), "without dimensions"),
        (batch(torch.ones(4), [1]), "type list cannot be split"),
        (batch(torch.ones(4), {"a": 1}), "type dict cannot be split"),
        (
            batch(Microbatches([1, 2]), x=Microbatches([1])),
            "Microbatches of different lengths",
        ),
        (batch(torch.ones(3)), r"3 samples cannot be split into 4 .*at least 4 .*microbatches=3"),
        (batch(torch.ones(0, 3)), "microbatches=1 or less"),
    ],
)
def test_inputs_that_cannot_be_split_are_refused(given_batch: Batch, message: str) -> None:
    """The message names the argument and the remedy."""
    with pytest.raises(ValueError, match=message):
        given_batch.split_inputs()


@pytest.mark.parametrize(
    ("target", "message"),
    [
        (torch.ones(4), "target has 4 samples, the inputs have 5"),
        (torch.tensor(1.0), "type Tensor cannot be split"),
        ([1, 2], "type list cannot be split"),
        (Microbatches([1]), "target has 1 microbatches, the inputs have 2"),
    ],
)
def test_targets_that_cannot_be_split_are_refused(target: Any, message: str) -> None:
    """As for inputs."""
    with pytest.raises(ValueError, match=message):
        batch(target=target).split_target([2, 3])


def test_no_microbatches_are_refused() -> None:
    """A step has at least one."""
    with pytest.raises(ValueError, match=r"Microbatches\(\[\]\) is empty"):
        Microbatches([])


def test_microbatches_are_a_sequence_to_look_into() -> None:
    """Length, items and iteration; a later change of the list given does not reach in."""
    values = [1, 2]
    parts = Microbatches(values)
    values.append(3)
    assert (len(parts), parts[1], list(parts)) == (2, 2, [1, 2])
