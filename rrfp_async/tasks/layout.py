"""What a stage returns for the next ones as tensors and a `Layout`, and back again.

A plain tuple or list holds the next stage's positional arguments; anything else is one argument.
Arguments may be trees of any kind that torch's pytree knows, of tensors and plain values. Nothing
is known here of edges, or of which tensor wants a gradient.
"""

import functools
from collections.abc import Sequence
from typing import Any

import torch
from torch.utils import _pytree as pytree

from rrfp_async.errors import ProtocolError
from rrfp_async.ids import TENSORS_ONLY, Layout

_PLAIN = (bool, int, float, str, bytes, type(None))
_INT_BITS = 63
_TEXT_MOST = 16_384
_BYTES_MOST = 65_536


def flattened(output: Any) -> tuple[tuple[torch.Tensor, ...], Layout]:
    """The tensors of a stage's output, and what else its receiver must know.

    Raises:
        TypeError: If a leaf is neither a tensor nor a plain value, or the tree cannot be written
            down.
    """
    arguments = tuple(output) if type(output) in (tuple, list) else (output,)
    if all(isinstance(argument, torch.Tensor) for argument in arguments):
        return arguments, TENSORS_ONLY
    leaves, tree = pytree.tree_flatten(arguments)
    tensors = tuple(leaf for leaf in leaves if isinstance(leaf, torch.Tensor))
    plain = tuple(
        (place, _checked(leaf))
        for place, leaf in enumerate(leaves)
        if not isinstance(leaf, torch.Tensor)
    )
    return tensors, Layout(_written(tree), plain)


def assembled(layout: Layout, tensors: Sequence[torch.Tensor]) -> tuple[Any, ...]:
    """The positional arguments that `flattened` was given.

    Raises:
        ProtocolError: If tensors and layout do not fit, or a kind of node is not known here.
    """
    if layout.structure is None:
        return tuple(tensors)
    tree = _read(layout.structure)
    leaves: list[Any] = list(tensors)
    for place, value in layout.plain:
        leaves.insert(place, value)
    if tree.num_leaves != len(leaves):
        raise ProtocolError(f"{len(leaves)} leaves came for a tree of {tree.num_leaves}")
    arguments: tuple[Any, ...] = tuple(pytree.tree_unflatten(leaves, tree))
    return arguments


@functools.lru_cache(maxsize=1024)  # mostly the same few, microbatch after microbatch
def _written(tree: pytree.TreeSpec) -> str:
    try:
        structure: str = pytree.treespec_dumps(tree)
        same = pytree.treespec_loads(structure) == tree
    except (NotImplementedError, ValueError, TypeError, KeyError, RecursionError) as error:
        raise TypeError(
            f"a tree that cannot be written down ({error}): use tuples, lists and dicts with "
            f"strings as keys, or register the node with a serialized_type_name"
        ) from error
    if not same:
        raise TypeError(
            "a tree that would arrive as another one: use strings or numbers as a dict's keys"
        )
    if len(structure) > _TEXT_MOST:
        raise TypeError(
            f"a tree that takes {len(structure)} characters to write down, {_TEXT_MOST} at most: "
            f"stack what belongs together into tensors"
        )
    return structure


@functools.lru_cache(maxsize=1024)
def _read(structure: str) -> pytree.TreeSpec:
    try:
        return pytree.treespec_loads(structure)
    except (NotImplementedError, ValueError, TypeError, KeyError, RecursionError) as error:
        raise ProtocolError(
            f"a tree came that is not known here ({error}): register its nodes on every rank"
        ) from error


def _checked(leaf: Any) -> Any:
    if type(leaf) not in _PLAIN:
        raise TypeError(
            f"a {type(leaf).__name__}: return tensors, numbers, strings, bytes, None, and "
            f"tuples, lists and dicts of them"
        )
    if type(leaf) is int and leaf.bit_length() > _INT_BITS:
        raise TypeError(f"the int {leaf}, which takes more than {_INT_BITS} bits: use a tensor")
    if isinstance(leaf, str | bytes):
        _check_length(leaf)
    return leaf


def _check_length(leaf: str | bytes) -> None:
    most = _TEXT_MOST if isinstance(leaf, str) else _BYTES_MOST
    if len(leaf) > most:
        raise TypeError(
            f"a {type(leaf).__name__} of length {len(leaf)}, {most} at most: use a tensor"
        )
    if isinstance(leaf, str) and not leaf.isascii():
        try:
            leaf.encode()
        except UnicodeEncodeError as error:
            raise TypeError(f"a str that UTF-8 cannot hold ({error})") from error
