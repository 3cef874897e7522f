"""Along which dimension each tensor of a value is split, and what every microbatch gets whole.

A chunk spec says it for one argument or for the target. How many samples a batch has, and which
arguments it has besides, is not known here.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum
from numbers import Number
from typing import Any, NamedTuple, TypeAlias

import torch
from torch.fx.immutable_collections import immutable_dict, immutable_list
from torch.utils import _pytree as pytree

_PLAIN = (
    *(bool, int, float, str, bytes, type(None), complex, Number, Enum, slice, range),
    *(torch.dtype, torch.device, torch.layout, torch.memory_format),
)
_SPECS = "TensorChunkSpec(dim), REPLICATE, None for the default, or a pytree of these"


@dataclass(frozen=True, slots=True)
class TensorChunkSpec:
    """Split every tensor of the argument along one dimension.

    Attributes:
        split_dim: The dimension, from 0 on; every tensor that the spec is for must have it.
    """

    split_dim: int


class Replicate:
    """Every microbatch gets the whole argument, whatever is in it. `REPLICATE` is one of these.

    Tensors are handed out without copies: a module that writes to one changes it for all.
    """

    def __repr__(self) -> str:
        return "REPLICATE"


REPLICATE = Replicate()

Cut: TypeAlias = Callable[[torch.Tensor, int], Sequence[torch.Tensor]]
_Rule: TypeAlias = int | Replicate | None  # a dimension, whole, or the default


class Place(NamedTuple):
    """Where a value stands: its `name` in messages and the `option` that holds its chunk spec."""

    name: str
    option: str


@dataclass(frozen=True, slots=True)
class Splittable:
    """A value of a batch, as its leaves, and how each of them is split.

    Attributes:
        place: Where the value stands.
        value: Any pytree.
        leaves: Its leaves.
        shape: Its structure; None if the value is a leaf.
        dims: The dimension to split along, per leaf; None for one that every microbatch gets.
    """

    place: Place
    value: Any
    leaves: Sequence[Any]
    shape: pytree.TreeSpec | None
    dims: Sequence[int | None]

    @classmethod
    def of(cls, place: Place, value: Any, spec: Any = None, *, ready: bool = False) -> "Splittable":
        """The value under `spec`.

        Args:
            place: Where the value stands.
            value: Any pytree.
            spec: A `TensorChunkSpec` or `REPLICATE` for all of the value, those of
                torch.distributed.pipelining included; None for the default, which is dimension 0
                of tensors that have one; or a pytree of these with the outer structure of `value`.
            ready: Whether it is part of a microbatch already, so that any object may be in it.

        Raises:
            ValueError: If `spec` is none for this value, or an object is neither a tensor nor a
                plain value nor replicated by `spec`.
        """
        if spec is None and isinstance(value, torch.Tensor):
            return cls(place, value, (value,), None, (0 if value.dim() else None,))
        leaves, shape = pytree.tree_flatten(value)
        rules = [None] * len(leaves) if spec is None else _rules(place, shape, spec)
        dims = []
        for index, (leaf, rule) in enumerate(zip(leaves, rules, strict=True)):
            if isinstance(leaf, torch.Tensor):
                dims.append(_dim(place, value, index, leaf, rule))
            elif ready or isinstance(rule, Replicate) or isinstance(leaf, _PLAIN):
                dims.append(None)
            else:
                raise ValueError(
                    f"{_where(place, value, index)} of type {type(leaf).__name__} cannot be split: "
                    f"give tensors and plain values (numbers, strings, None) in tuples, lists, "
                    f"dicts or registered pytrees, REPLICATE in {place.option} for one object to "
                    f"every microbatch, or Microbatches([...]) as the whole argument"
                )
        return cls(place, value, leaves, None if shape.is_leaf() else shape, dims)

    def samples(self) -> list[tuple[int, int]]:
        """The leaves that are split, by index, with the size of the dimension they are split in."""
        dims = enumerate(self.dims)
        return [(index, self.leaves[index].size(dim)) for index, dim in dims if dim is not None]

    def where(self, index: int) -> str:
        """The leaf's name in messages: the argument's, and the way to the leaf inside."""
        return _where(self.place, self.value, index)

    def parts(self, count: int, cut: Cut) -> Sequence[Any]:
        """`count` values of this structure, all tensors detached.

        Args:
            count: The number of microbatches.
            cut: Splits a tensor along a dimension into as many.
        """
        columns = [
            [_detached(leaf)] * count if dim is None else cut(leaf.detach(), dim)
            for leaf, dim in zip(self.leaves, self.dims, strict=True)
        ]
        if self.shape is None:
            return columns[0]
        rows = ([column[index] for column in columns] for index in range(count))
        return [pytree.tree_unflatten(row, self.shape) for row in rows]


def _detached(leaf: Any) -> Any:
    return leaf.detach() if isinstance(leaf, torch.Tensor) else leaf


def _where(place: Place, value: Any, index: int) -> str:
    try:
        leaves, _ = pytree.tree_flatten_with_path(value)
    except ValueError:  # something registered without names for its children
        return f"leaf {index} of {place.name}"
    return place.name + pytree.keystr(leaves[index][0])


def _dim(place: Place, value: Any, index: int, tensor: torch.Tensor, rule: _Rule) -> int | None:
    if rule is None:
        return 0 if tensor.dim() else None
    if isinstance(rule, Replicate):
        return None
    if rule < tensor.dim():
        return rule
    raise ValueError(
        f"{_where(place, value, index)} of shape {tuple(tensor.shape)} has no dimension {rule}, "
        f"which {place.option} splits along: give TensorChunkSpec of a dimension below "
        f"{tensor.dim()} for it, or REPLICATE"
    )


def _rules(place: Place, shape: pytree.TreeSpec, spec: Any) -> list[_Rule]:
    """What `spec` says of each leaf of a value of structure `shape`."""
    prefix, prefix_shape = pytree.tree_flatten(_thawed(spec))
    rules = [_rule(place, one) for one in prefix]
    if prefix_shape.is_leaf():
        return rules * shape.num_leaves
    numbered = pytree.tree_unflatten(list(range(shape.num_leaves)), shape)
    try:
        subtrees = prefix_shape.flatten_up_to(numbered)
    except ValueError as error:
        reason = str(error).rstrip(".")
        raise ValueError(
            f"{place.option} has not the structure of {place.name} ({reason}): give {_SPECS}, in "
            f"the tuples, lists and dicts of the argument"
        ) from error
    of_leaf: dict[int, _Rule] = {}  # by number: a dict of specs may have another order
    for rule, subtree in zip(rules, subtrees, strict=True):
        of_leaf |= dict.fromkeys(pytree.tree_leaves(subtree), rule)
    return [of_leaf[index] for index in range(shape.num_leaves)]


def _thawed(spec: Any) -> Any:
    """With ordinary lists and dicts for what torch's `TensorChunkSpec.from_...` made of them."""
    if isinstance(spec, immutable_dict):
        return {name: _thawed(one) for name, one in spec.items()}
    if isinstance(spec, immutable_list):
        return [_thawed(one) for one in spec]
    return tuple(map(_thawed, spec)) if type(spec) is tuple else spec


def _rule(place: Place, spec: Any) -> _Rule:
    """What one chunk spec says; torch's own are told by name: importing them doubles start-up."""
    if spec is None:
        return None
    kind = spec if isinstance(spec, type) else type(spec)
    if issubclass(kind, Replicate) or kind.__name__ == "_Replicate":
        return REPLICATE
    if isinstance(spec, type) or not hasattr(spec, "split_dim"):
        raise ValueError(f"{place.option} of {place.name} has {spec!r}: give {_SPECS}")
    dim = spec.split_dim
    if isinstance(dim, int) and not isinstance(dim, bool) and dim >= 0:
        return dim
    raise ValueError(
        f"{place.option} of {place.name} has split_dim={dim!r}: give the dimension as an int of at "
        f"least 0, counted from the first one"
    )
