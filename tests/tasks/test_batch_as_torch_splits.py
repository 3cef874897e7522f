"""Whoever comes from torch.distributed.pipelining finds batches split as there."""

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed.pipelining import microbatch as torchs
from torch.utils import _pytree as pytree

from rrfp_async.tasks.batch import Batch
from rrfp_async.tasks.chunk_spec import REPLICATE, TensorChunkSpec

SAMPLES = 6


def _whole_or(spec: Any) -> Any:
    """This package's chunk spec for one of torch's."""
    return REPLICATE if isinstance(spec, torchs._Replicate) else TensorChunkSpec(spec.split_dim)


def assert_equal_trees(found: Any, expected: Any) -> None:
    """Equal in structure, order, dtypes and values."""
    found_leaves, found_shape = pytree.tree_flatten(found)
    leaves, shape = pytree.tree_flatten(expected)
    assert found_shape == shape
    for one, other in zip(found_leaves, leaves, strict=True):
        if isinstance(other, torch.Tensor):
            assert one.dtype == other.dtype
            assert torch.equal(one, other)
        else:
            assert one is other


def assert_split_as_torch_does(
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    count: int,
    args_spec: Any = None,
    kwargs_spec: Any = None,
) -> None:
    """With torch's chunk specs as with our own."""
    expected = torchs.split_args_kwargs_into_chunks(args, kwargs, count, args_spec, kwargs_spec)
    own = [
        None if spec is None else pytree.tree_map(_whole_or, spec)
        for spec in (args_spec, kwargs_spec)
    ]
    for specs in ((args_spec, kwargs_spec), own):
        parts = Batch(args, kwargs, None, count, *specs).split_inputs()
        assert_equal_trees([part.args for part in parts], expected[0])
        assert_equal_trees([part.kwargs for part in parts], expected[1])


def _tensor(dtype: torch.dtype, width: int) -> torch.Tensor:
    return torch.arange(SAMPLES * width).view(SAMPLES, width).remainder(3).to(dtype)


LEAVES = st.one_of(
    st.builds(
        _tensor, st.sampled_from([torch.int64, torch.bool, torch.float32]), st.integers(0, 3)
    ),
    st.sampled_from([None, True, 3, 0.5, "text", b"bytes"]),
)
TREES = st.recursive(
    LEAVES,
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.lists(inner, max_size=3).map(tuple),
        st.dictionaries(st.sampled_from("zyxw"), inner, max_size=3),
    ),
    max_leaves=8,
)


@given(TREES, TREES, st.integers(1, SAMPLES))
def test_nested_arguments_are_split_as_torch_does(value: Any, named: Any, count: int) -> None:
    """Without chunk specs."""
    x = torch.arange(SAMPLES)
    assert_split_as_torch_does((value, x), {"named": named, "x": x}, count)


@given(TREES, st.data(), st.integers(1, SAMPLES))
def test_nested_arguments_with_specs_are_split_as_torch_does(
    value: Any, data: st.DataObject, count: int
) -> None:
    """With a spec for each leaf, in the second dimension for what stands across."""
    across = pytree.tree_map_only(
        torch.Tensor, lambda tensor: tensor.t() if data.draw(st.booleans()) else tensor, value
    )

    def spec(leaf: Any) -> Any:
        if not isinstance(leaf, torch.Tensor) or data.draw(st.booleans(), label="replicate"):
            return torchs._Replicate()
        return torchs.TensorChunkSpec(0 if leaf.size(0) == SAMPLES else 1)

    specs = pytree.tree_map(spec, across)
    x, along = torch.arange(SAMPLES), torchs.TensorChunkSpec(0)
    assert_split_as_torch_does(
        (x, across), {"x": x, "v": across}, count, (along, specs), {"x": along, "v": specs}
    )


@pytest.mark.parametrize("count", [1, 4, 6])
def test_masks_positions_and_sequence_first_tensors_are_split_as_torch_does(count: int) -> None:
    """What language models get: ids, a mask, shared position ids, (sequence, batch, hidden)."""
    replicate = torchs._Replicate()
    args = (torch.arange(5).view(1, 5), torch.randn(5, SAMPLES, 2))
    kwargs = {"batch": {"mask": torch.ones(SAMPLES, 5, dtype=torch.bool), "cache": None}}
    specs = {"batch": {"mask": torchs.TensorChunkSpec(0), "cache": replicate}}
    assert_split_as_torch_does(args, kwargs, count, (replicate, torchs.TensorChunkSpec(1)), specs)


def test_the_specs_of_torchs_own_makers_are_split_as_torch_does() -> None:
    """`from_tuple` and `from_dict` make lists and dicts that cannot be changed: these count too."""
    across = torch.arange(3 * SAMPLES).view(3, SAMPLES)
    x = across.t().contiguous()
    args, kwargs = (x, [across, {"x": x}]), {"y": {"z": across}}
    args_spec = torchs.TensorChunkSpec.from_tuple((0, [1, {"x": 0}]))
    kwargs_spec = torchs.TensorChunkSpec.from_dict({"y": {"z": 1}})
    expected = torchs.split_args_kwargs_into_chunks(args, kwargs, 4, args_spec, kwargs_spec)
    parts = Batch(args, kwargs, None, 4, args_spec, kwargs_spec).split_inputs()
    assert_equal_trees([part.args for part in parts], expected[0])
    assert_equal_trees([part.kwargs for part in parts], expected[1])
