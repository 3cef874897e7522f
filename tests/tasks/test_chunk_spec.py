"""Chunk specs: which dimension is split, and what every microbatch gets whole."""

import re
import subprocess
import sys
from collections import OrderedDict
from dataclasses import dataclass
from typing import Any, NamedTuple

import pytest
import torch
from torch.distributed.pipelining import microbatch as torchs
from torch.utils import _pytree as pytree

from rrfp_async.tasks.batch import Arguments, Batch, Microbatches
from rrfp_async.tasks.chunk_spec import REPLICATE, Replicate, TensorChunkSpec

IDS = torch.arange(8).view(4, 2)
WIDE = torch.arange(12).view(3, 4)
POSITIONS = torch.arange(7).view(1, 7)


class Named(NamedTuple):
    """A pytree without being registered."""

    x: Any
    y: Any


@dataclass
class Pair:
    """A pytree that names its children."""

    x: Any
    y: Any


@dataclass
class Bare:
    """A pytree that does not name its children."""

    x: Any
    y: Any


def _flat(pair: Any) -> tuple[list[Any], None]:
    return [pair.x, pair.y], None


def _keyed(pair: Pair) -> tuple[list[tuple[Any, Any]], None]:
    return [(pytree.GetAttrKey(name), getattr(pair, name)) for name in ("x", "y")], None


pytree.register_pytree_node(
    Pair, _flat, lambda leaves, _: Pair(*leaves), flatten_with_keys_fn=_keyed
)
pytree.register_pytree_node(Bare, _flat, lambda leaves, _: Bare(*leaves))


def split(
    *args: Any, specs: Any = None, named_specs: Any = None, count: int = 2, **kwargs: Any
) -> list[Arguments]:
    """The microbatches under these specs."""
    return Batch(args, kwargs, None, count, specs, named_specs).split_inputs()


# -- what a spec does ---------------------------------------------------------------------------


@pytest.mark.parametrize("spec", [TensorChunkSpec(1), torchs.TensorChunkSpec(1)], ids=str)
def test_a_tensor_is_split_along_the_dimension_of_its_spec(spec: Any) -> None:
    """By position and by keyword, with this package's spec or torch's; others as by default."""
    parts = split(IDS, WIDE, specs=[None, spec], w=WIDE, named_specs={"w": spec})
    for part, where in zip(parts, (slice(0, 2), slice(2, 4)), strict=True):
        assert torch.equal(part.args[0], IDS[where])
        assert torch.equal(part.args[1], WIDE[:, where])
        assert torch.equal(part.kwargs["w"], WIDE[:, where])


@pytest.mark.parametrize(
    "spec",
    [REPLICATE, Replicate, Replicate(), torchs._Replicate(), torchs._Replicate],
    ids=["the word", "its class", "another", "torch's", "torch's class"],
)
def test_what_is_replicated_goes_to_every_microbatch_whole(spec: Any) -> None:
    """Position ids of one row, or any object, with this package's word or torch's."""
    thing = object()
    value = {"positions": POSITIONS, "thing": thing}
    parts = split(value, IDS, specs=[spec, None], more=[thing], named_specs={"more": spec})
    for part in parts:
        assert torch.equal(part.args[0]["positions"], POSITIONS)
        assert part.args[0]["thing"] is part.kwargs["more"][0] is thing
    assert [len(part.args[1]) for part in parts] == [2, 2]


def test_a_spec_is_for_all_tensors_of_its_argument() -> None:
    """Plain values in it are still in every microbatch."""
    value = {"a": WIDE, "b": [WIDE + 1, 3, None]}
    [_, last] = split(value, specs=[TensorChunkSpec(1)])
    assert torch.equal(last.args[0]["a"], WIDE[:, 2:])
    assert torch.equal(last.args[0]["b"][0], WIDE[:, 2:] + 1)
    assert last.args[0]["b"][1:] == [3, None]


SPEC = TensorChunkSpec(1)
PREFIXES = [
    ({"a": IDS, "b": (WIDE, WIDE)}, {"a": None, "b": SPEC}),
    ({"a": IDS, "b": (WIDE, WIDE)}, {"b": (SPEC, SPEC), "a": TensorChunkSpec(0)}),
    ({"a": IDS, "b": (WIDE, WIDE)}, OrderedDict(b=SPEC, a=None)),
    ([IDS, [POSITIONS, WIDE]], [None, [REPLICATE, SPEC]]),
    (Named(WIDE, IDS), Named(SPEC, None)),
    (Pair(WIDE, (IDS, POSITIONS)), Pair(SPEC, (None, REPLICATE))),
    (Bare((IDS, WIDE), 3), Bare((None, SPEC), None)),
    (([IDS, WIDE], {"w": WIDE}), torchs.TensorChunkSpec.from_tuple(([0, 1], {"w": 1}))),
    ({"b": {"w": [WIDE]}}, torchs.TensorChunkSpec.from_dict({"b": {"w": [1]}})),
]


@pytest.mark.parametrize(("value", "spec"), PREFIXES, ids=range(len(PREFIXES)))
def test_specs_may_follow_the_structure_of_their_argument(value: Any, spec: Any) -> None:
    """To any depth, dicts in any order: each tensor goes its own way."""
    parts = split(value, specs=[spec])
    rows = [pytree.tree_leaves(part.args[0]) for part in parts]
    for leaf, *pieces in zip(pytree.tree_leaves(value), *rows, strict=True):
        if leaf is IDS or leaf is WIDE:
            dim = 0 if leaf is IDS else 1
            assert [piece.size(dim) for piece in pieces] == [2, 2]
            assert torch.equal(torch.cat(pieces, dim), leaf)
        else:
            assert all(
                torch.equal(torch.as_tensor(piece), torch.as_tensor(leaf)) for piece in pieces
            )
    structures = [pytree.tree_structure(part.args[0]) for part in parts]
    assert structures == [pytree.tree_structure(value)] * 2


def test_a_target_follows_its_spec() -> None:
    """Split by the sizes of the inputs along its dimension, or in every microbatch whole."""
    target = {"y": WIDE, "weights": POSITIONS}
    spec = {"y": TensorChunkSpec(1), "weights": REPLICATE}
    batch = Batch((), {}, target, 4, target_chunk_spec=spec)
    parts = batch.split_target([1, 3])
    assert [part["y"].tolist() for part in parts] == [WIDE[:, :1].tolist(), WIDE[:, 1:].tolist()]
    assert all(torch.equal(part["weights"], POSITIONS) for part in parts)
    whole = Batch((), {}, POSITIONS, 4, target_chunk_spec=REPLICATE).split_target([1, 3])
    assert all(torch.equal(part, POSITIONS) for part in whole)


def test_samples_are_counted_along_the_dimension_of_the_spec() -> None:
    """What is replicated is passed over, by position and by keyword."""
    first = Batch((POSITIONS, WIDE), {}, None, 3, [REPLICATE, SPEC])
    assert first.sizes(first.split_inputs()) == (2, 1, 1)
    named = Batch(
        (), {"p": POSITIONS, "w": {"a": WIDE}}, None, 3, None, {"p": REPLICATE, "w": {"a": SPEC}}
    )
    assert named.sizes(named.split_inputs()) == (2, 1, 1)


def test_specs_tell_where_ready_microbatches_count_their_samples() -> None:
    """They are as given; where one tuple has all arguments, each argument has its spec."""
    ready = [(POSITIONS, WIDE[:, :3]), (POSITIONS, WIDE[:, 3:])]
    batch = Batch((Microbatches(ready),), {}, None, 4, [REPLICATE, SPEC])
    parts = batch.split_inputs()
    assert [[tensor.shape for tensor in part.args] for part in parts] == [
        [(1, 7), (3, 3)],
        [(1, 7), (3, 1)],
    ]
    assert batch.sizes(parts) == (3, 1)
    by_name = Batch((), {"w": Microbatches([WIDE, [object(), WIDE]])}, None, 4, None, {"w": SPEC})
    assert by_name.sizes(by_name.split_inputs()) == (4, 4)


# -- what is refused ----------------------------------------------------------------------------

REMEDY = "give TensorChunkSpec(dim), REPLICATE, None for the default, or a pytree of these"
REFUSED: dict[str, tuple[Any, Any, str]] = {
    "negative": (
        WIDE,
        TensorChunkSpec(-1),
        "args_chunk_spec[1] of argument 1 has split_dim=-1: give the dimension as an int of at "
        "least 0",
    ),
    "negative, of torch": (
        WIDE,
        torchs.TensorChunkSpec(-1),
        "args_chunk_spec[1] of argument 1 has split_dim=-1: give",
    ),
    "negative, inside": (
        {"a": WIDE},
        {"a": TensorChunkSpec(-2)},
        "args_chunk_spec[1] of argument 1 has split_dim=-2: give",
    ),
    "no int": (
        WIDE,
        torchs.TensorChunkSpec("batch"),
        "args_chunk_spec[1] of argument 1 has split_dim='batch': give",
    ),
    "a truth": (
        WIDE,
        torchs.TensorChunkSpec(True),
        "args_chunk_spec[1] of argument 1 has split_dim=True: give",
    ),
    "out of range": (
        WIDE,
        TensorChunkSpec(2),
        "argument 1 of shape (3, 4) has no dimension 2, which args_chunk_spec[1] splits along: "
        "give TensorChunkSpec of a dimension below 2 for it, or REPLICATE",
    ),
    "out of range, inside": (
        {"a": [IDS.view(2, 2, 2), IDS]},
        TensorChunkSpec(2),
        "argument 1['a'][1] of shape (4, 2) has no dimension 2, which",
    ),
    "no dimension": (
        torch.tensor(1.0),
        TensorChunkSpec(0),
        "argument 1 of shape () has no dimension 0, which",
    ),
    "an int": (WIDE, 1, f"args_chunk_spec[1] of argument 1 has 1: {REMEDY}"),
    "its class": (WIDE, TensorChunkSpec, f"tasks.chunk_spec.TensorChunkSpec'>: {REMEDY}"),
    "torch's class": (
        WIDE,
        torchs.TensorChunkSpec,
        f"pipelining.microbatch.TensorChunkSpec'>: {REMEDY}",
    ),
    "another structure": (
        (WIDE, WIDE),
        [SPEC, SPEC],
        "args_chunk_spec[1] has not the structure of argument 1 (",
    ),
    "other keys": (
        {"a": WIDE},
        {"b": SPEC},
        f"): {REMEDY}, in the tuples, lists and dicts of the argument",
    ),
    "an object": (
        [object()],
        SPEC,
        "argument 1[0] of type object cannot be split: give tensors and plain values",
    ),
    "an object without a way to it": (
        Bare(3, object()),
        None,
        "leaf 1 of argument 1 of type object cannot be split: give tensors and plain values",
    ),
    "other samples": (
        {"w": [WIDE]},
        None,
        "argument 1['w'][0] has 3 samples in dimension 0, the batch has 4: give as many, or say in "
        "args_chunk_spec[1] how it is split (TensorChunkSpec(dim) along another dimension",
    ),
    "other samples in its dimension": (
        Pair(1, IDS),
        SPEC,
        "argument 1.y has 2 samples in dimension 1, the batch has 4: give as many",
    ),
}


@pytest.mark.parametrize(("value", "spec", "message"), REFUSED.values(), ids=REFUSED)
def test_a_spec_that_does_not_fit_its_argument_is_refused(
    value: Any, spec: Any, message: str
) -> None:
    """By position, by keyword and for a target: the argument, what was seen and the remedy."""
    with pytest.raises(ValueError, match=re.escape(message)) as told:
        split(IDS, value, specs=(None, spec))
    assert "argument 0" not in str(told.value)
    named = message.replace("args_chunk_spec[1]", "kwargs_chunk_spec['v']")
    named = named.replace("argument 1", "keyword argument 'v'")
    with pytest.raises(ValueError, match=re.escape(named)):
        split(IDS, v=value, named_specs={"v": spec})
    of_target = message.replace("args_chunk_spec[1]", "target_chunk_spec")
    of_target = of_target.replace("argument 1", "target").partition(" in dimension")[0]
    with pytest.raises(ValueError, match=re.escape(of_target)):
        Batch((), {}, value, 2, target_chunk_spec=spec).split_target([2, 2])


@pytest.mark.parametrize(
    ("specs", "named_specs", "message"),
    [
        (
            [SPEC],
            None,
            "argument 1 has no chunk spec: args_chunk_spec has 1 chunk specs for 2 positional "
            "arguments; give one for each, None for the default",
        ),
        (
            [None] * 3,
            None,
            "argument 2 has a chunk spec and was not given: args_chunk_spec has 3 chunk specs for "
            "2 positional arguments; give one for each",
        ),
        (SPEC, None, "args_chunk_spec=TensorChunkSpec(split_dim=1) is no sequence: give one"),
        (
            None,
            {"x": None, "z": SPEC},
            "keyword argument 'z' has a chunk spec and was not given: kwargs_chunk_spec may name "
            "['x', 'y']; leave out the spec or give the argument",
        ),
        (None, REPLICATE, "kwargs_chunk_spec=REPLICATE is no mapping: give chunk specs by keyword"),
    ],
)
def test_specs_for_other_arguments_than_the_steps_are_refused(
    specs: Any, named_specs: Any, message: str
) -> None:
    """Whether too few, too many, unknown or in another form."""
    with pytest.raises(ValueError, match=re.escape(message)):
        split(IDS, IDS, specs=specs, named_specs=named_specs, x=IDS, y=IDS)


def test_specs_for_other_arguments_than_a_ready_microbatch_has_are_refused() -> None:
    """Where a tuple has all arguments, they are counted in it."""
    batch = Batch((Microbatches([(IDS, IDS)]),), {}, None, 4, [SPEC])
    parts = batch.split_inputs()
    with pytest.raises(ValueError, match=r"argument 1 has no chunk spec: args_chunk_spec has 1 "):
        batch.sizes(parts)


def test_a_batch_without_a_split_tensor_is_refused() -> None:
    """Where all is replicated, nothing tells how many samples a microbatch has."""
    batch = Batch((IDS,), {}, None, 4, [REPLICATE])
    with pytest.raises(ValueError, match="microbatch 0 holds no tensor with a batch dimension"):
        batch.sizes(batch.split_inputs())


# -- what it costs ------------------------------------------------------------------------------

PROBE = """
import sys
import rrfp_async.tasks.batch
print([name for name in sys.modules if name.startswith("torch.distributed.pipelining")])
"""


@pytest.mark.slow
@pytest.mark.multiprocess
def test_torchs_pipelining_is_not_loaded() -> None:
    """Its chunk specs are known without it: importing it would double start-up."""
    command = [sys.executable, "-c", PROBE]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    assert done.stdout.strip() == "[]"
