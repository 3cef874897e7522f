"""From a batch to microbatches."""

import re
from collections import OrderedDict
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils._pytree import tree_leaves

from rrfp_async.tasks.batch import Arguments, Batch, Microbatches

PLAIN = [None, True, 3, 0.5, 2j, "a", b"a", torch.float16, torch.device("cpu"), slice(1, 3)]


class Named(NamedTuple):
    """A pytree without being registered."""

    ids: Any
    rest: Any


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
    """`Microbatches` overrule the configured count; whole tensors beside them are cut alike."""
    parts = batch(Microbatches([torch.ones(2), torch.ones(3)]), mask=torch.arange(5)).split_inputs()
    assert [len(part.args[0]) for part in parts] == [2, 3]
    assert [part.kwargs["mask"].tolist() for part in parts] == [[0, 1], [2, 3, 4]]


def test_a_whole_tensor_beside_ready_microbatches_must_have_their_samples() -> None:
    """Else it would be cut between the wrong samples."""
    given = batch(Microbatches([torch.ones(2), torch.ones(3)]), mask=torch.arange(6))
    with pytest.raises(ValueError, match=r"'mask' has 6 samples, the Microbatches .* \[2, 3\]"):
        given.split_inputs()


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


@pytest.mark.parametrize("value", PLAIN, ids=str)
def test_every_kind_of_plain_value_is_the_same_in_every_microbatch(value: Any) -> None:
    """Alone, in a container and as a target, it is handed on as the object it is."""
    given_batch = batch(torch.ones(4), value, inside=[value], target=value, count=2)
    parts = given_batch.split_inputs()
    found = [[part.args[1], *part.kwargs["inside"]] for part in parts]
    found.append(given_batch.split_target([2, 2]))
    assert all(one is value for of_part in found for one in of_part)


def test_tensors_without_dimensions_go_to_every_microbatch() -> None:
    """As arguments, inside of them and as targets."""
    scale = torch.tensor(2.0)
    given_batch = batch(torch.ones(4), scale, inside={"scale": scale}, target=scale, count=2)
    parts = given_batch.split_inputs()
    tensors = [given for part in parts for given in (part.args[1], part.kwargs["inside"]["scale"])]
    tensors += given_batch.split_target([2, 2])
    assert [(tensor.dim(), float(tensor)) for tensor in tensors] == [(0, 2.0)] * 6


def test_arguments_are_split_at_every_depth() -> None:
    """In tuples, lists, dicts and named tuples, whose kinds and order stay; dtypes stay too."""
    ids = torch.arange(5)
    mask = torch.tensor([True, False, False, True, True])
    nested = {"z": [ids, (mask, None)], "a": Named(ids.float(), "text"), "empty": {}}
    parts = batch(nested, more=OrderedDict(x=ids), count=2).split_inputs()
    for part, where in zip(parts, (slice(0, 3), slice(3, 5)), strict=True):
        [value] = part.args
        assert list(value) == ["z", "a", "empty"]
        assert [type(value["z"]), type(value["z"][1]), type(value["a"])] == [list, tuple, Named]
        assert torch.equal(value["z"][0], ids[where])
        assert value["z"][0].dtype == torch.int64
        assert torch.equal(value["z"][1][0], mask[where])
        assert value["z"][1][0].dtype == torch.bool
        assert value["z"][1][1] is None
        assert torch.equal(value["a"].ids, ids[where].float())
        assert value["a"].rest == "text"
        assert value["empty"] == {}
        assert type(part.kwargs["more"]) is OrderedDict
        assert torch.equal(part.kwargs["more"]["x"], ids[where])


def test_every_microbatch_has_containers_of_its_own() -> None:
    """A module that changes a dict it was given changes neither the caller's nor another's."""
    value = {"x": torch.ones(4), "scale": 2}
    first, second = batch(value, count=2).split_inputs()
    first.args[0].pop("scale")
    first.args[0]["x"] = None
    assert list(second.args[0]) == list(value) == ["x", "scale"]
    assert second.args[0]["x"] is not None


def test_a_target_is_split_at_every_depth() -> None:
    """By the sizes of the inputs; what is not split is in each of them."""
    labels = torch.arange(5)
    target = {"labels": labels, "more": (labels.view(5, 1), None, 0.1, torch.tensor(7))}
    parts = batch(target=target).split_target([1, 3, 1])
    assert [part["labels"].tolist() for part in parts] == [[0], [1, 2, 3], [4]]
    assert [part["more"][0].flatten().tolist() for part in parts] == [[0], [1, 2, 3], [4]]
    assert [(part["more"][1], part["more"][2], int(part["more"][3])) for part in parts] == [
        (None, 0.1, 7)
    ] * 3


def test_inputs_lose_their_history() -> None:
    """Gradients end at the inputs, whole or ready-made: the caller's graph is not walked."""
    x = torch.ones(4, requires_grad=True) * 2
    whole = batch(x, {"deep": [x], "scale": x.sum()}, count=2).split_inputs()
    ready = batch(Microbatches([x[:2], x[2:]])).split_inputs()
    inside = batch(Microbatches([(x, {"mask": x})])).split_inputs()
    tensors = [leaf for part in whole + ready + inside for leaf in tree_leaves(part.args)]
    assert [tensor.requires_grad for tensor in tensors] == [False] * 10


def test_targets_lose_their_history() -> None:
    """The same of targets."""
    y = torch.ones(4, requires_grad=True) * 2
    parts = [
        *batch(target={"y": [y], "scale": y.sum()}).split_target([1, 3]),
        *batch(target=Microbatches([y[:1], {"y": y[1:]}])).split_target([1, 3]),
    ]
    assert [tensor.requires_grad for tensor in tree_leaves(parts)] == [False] * 6


def test_a_microbatch_counts_the_samples_of_its_first_tensor() -> None:
    """Plain values and scalars are passed over, keywords count too, as does what is nested."""
    parts = [
        Arguments((3, torch.tensor(1.0), torch.ones(5, 2))),
        Arguments((), {"name": "a", "x": torch.ones(2)}),
        Arguments(([], {"a": None, "b": (torch.tensor(1), torch.ones(3))}, torch.ones(4))),
    ]
    assert batch().sizes(parts) == (5, 2, 3)


def test_ready_microbatches_are_pytrees_of_any_objects() -> None:
    """They are handed on as they are; their first tensor with a dimension counts."""
    thing = object()
    values = [{"thing": thing, "x": [torch.ones(n, 2)]} for n in (3, 1)]
    given_batch = batch(torch.arange(4), extra=Microbatches(values), count=9)
    parts = given_batch.split_inputs()
    assert [part.kwargs["extra"]["thing"] is thing for part in parts] == [True] * 2
    assert [part.kwargs["extra"]["x"][0].shape for part in parts] == [(3, 2), (1, 2)]
    alone = batch(Microbatches(values))
    assert alone.sizes(alone.split_inputs()) == (3, 1)


X, Y = torch.ones(4), torch.ones(5)
LONG = torch.ones(2, 9)


@pytest.mark.parametrize(
    ("given_batch", "message"),
    [
        (batch(X, Y), "argument 1 has 5 samples in dimension 0, the batch has 4: give as many"),
        (batch(x=X, y=Y), "keyword argument 'y' has 5 samples in dimension 0, the batch has 4: "),
        (batch(X, {"a": [3, Y]}), "argument 1['a'][1] has 5 samples in dimension 0, "),
        (batch(X, m=Named(X, Y)), "keyword argument 'm'.rest has 5 samples in dimension 0, "),
        (batch(Y, X, m=X), "argument 0 has 5 samples in dimension 0, the batch has 4: "),
        (
            batch((X, LONG), X, m=Y),
            "argument 0[1] has 2 samples in dimension 0 and keyword argument 'm' has 5 samples in "
            "dimension 0, the batch has 4: give as many, or say in args_chunk_spec[0], "
            "kwargs_chunk_spec['m'] how",
        ),
        (
            batch(X, m=Y),
            "give as many, or say in kwargs_chunk_spec['m'] how it is split (TensorChunkSpec(dim) "
            "along another dimension, REPLICATE not at all), or give Microbatches([...])",
        ),
        (batch(X, object()), "argument 1 of type object cannot be split: give tensors and plain"),
        (batch(X, m=[1, {"k": set()}]), "keyword argument 'm'[1]['k'] of type set cannot be split"),
        (
            batch(X, [Microbatches([X])]),
            "argument 1[0] of type Microbatches cannot be split: give tensors and plain values "
            "(numbers, strings, None) in tuples, lists, dicts or registered pytrees, REPLICATE in "
            "args_chunk_spec[1] for one object to every microbatch, or Microbatches([...]) as the "
            "whole argument",
        ),
        (
            batch(Microbatches([1, 2]), x=Microbatches([1])),
            "Microbatches of different lengths: {'argument 0': 2, \"keyword argument 'x'\": 1}",
        ),
        (
            batch(torch.ones(3)),
            "a batch of 3 samples cannot be split into 4 microbatches: give at least 4 samples or "
            "set microbatches=3 or less",
        ),
        (batch({"x": torch.ones(3)}), "a batch of 3 samples cannot be split into 4 microbatches"),
        (batch(torch.ones(0, 3)), "microbatches=1 or less"),
    ],
)
def test_inputs_that_cannot_be_split_are_refused(given_batch: Batch, message: str) -> None:
    """The message names the argument, the place in it, and the remedy; no other argument."""
    with pytest.raises(ValueError, match=re.escape(message)) as told:
        given_batch.split_inputs()
    others = [word for word in ("argument 0", "argument 1", "'x'", "'y'") if word not in message]
    assert [word for word in others if word in str(told.value)] == []


@pytest.mark.parametrize(
    ("target", "message"),
    [
        (X, "target has 4 samples, the inputs have 5: give as many of both"),
        (torch.ones(6), "target has 6 samples, the inputs have 5: give as many of both"),
        ({"y": [Y, X]}, "target['y'][1] has 4 samples, the inputs have 5: give as many of both"),
        (
            (Y, LONG),
            "target[1] has 2 samples, the inputs have 5: give as many of both, or say in "
            "target_chunk_spec how it is split (TensorChunkSpec(dim) along another dimension than "
            "0, REPLICATE not at all), or give Microbatches([...])",
        ),
        ((Y, object()), "target[1] of type object cannot be split: give tensors and plain values"),
        (Microbatches([1]), "target has 1 microbatches, the inputs have 2"),
    ],
)
def test_targets_that_cannot_be_split_are_refused(target: Any, message: str) -> None:
    """As for inputs."""
    with pytest.raises(ValueError, match=re.escape(message)):
        batch(target=target).split_target([2, 3])


@pytest.mark.parametrize(
    ("part", "message"),
    [
        (Arguments((torch.ones(0, 2),)), "microbatch 1 is empty: give it at least 1 sample"),
        (Arguments(({"a": [torch.ones(0)]},)), "microbatch 1 is empty: give it at least 1 sample"),
        (Arguments((3, [torch.tensor(1)])), "microbatch 1 holds no tensor with a batch dimension"),
    ],
)
def test_a_microbatch_without_samples_is_refused(part: Arguments, message: str) -> None:
    """It has none, or nothing tells how many: the message names it."""
    with pytest.raises(ValueError, match=message):
        batch().sizes([Arguments((torch.ones(1),)), part])


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
