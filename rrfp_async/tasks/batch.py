"""From what a user gives a step to what each microbatch gets.

Tensors are split along dimension 0 by `tensor_split`, ready parts come as `Microbatches`, plain
values go to every microbatch as they are. Which stage uses what is not known here.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.utils import _pytree as pytree

_REPLICATED = (bool, int, float, str, type(None))


class Microbatches:
    """Values that are split already: one per microbatch, as many as the step shall have.

    As the only positional argument of a step, an entry that is a tuple holds that microbatch's
    positional arguments.

    Raises:
        ValueError: If there is none.
    """

    def __init__(self, values: Sequence[Any]) -> None:
        self._values = tuple(values)
        if not self._values:
            raise ValueError("Microbatches([]) is empty: a step has at least 1 microbatch")

    def __len__(self) -> int:
        return len(self._values)

    def __getitem__(self, index: int) -> Any:
        return self._values[index]

    def __iter__(self) -> Iterator[Any]:
        return iter(self._values)


@dataclass(frozen=True, slots=True)
class Arguments:
    """What the first stage's module is called with for one microbatch."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Batch:
    """A step's inputs and target on this rank, whole or as `Microbatches`; either may be absent.

    Attributes:
        args: Positional arguments of the first stage's module.
        kwargs: Its keyword arguments.
        target: The second argument of the loss function.
        microbatches: Parts to split a whole batch into.
    """

    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    target: Any
    microbatches: int

    @property
    def has_inputs(self) -> bool:
        """Whether any argument was given."""
        return bool(self.args or self.kwargs)

    def split_inputs(self) -> list[Arguments]:
        """The first stage's arguments, per microbatch.

        Raises:
            ValueError: If arguments disagree on the number of microbatches or samples, there are
                fewer samples than microbatches, or a value cannot be split.
        """
        named = {f"argument {index}": value for index, value in enumerate(self.args)}
        named |= {f"keyword argument {name!r}": value for name, value in self.kwargs.items()}
        count = _count_of(named) or self.microbatches
        _check_samples(named, count)
        columns = [_split(name, value, count) for name, value in named.items()]
        rows = list(zip(*columns, strict=True))
        return [self._arguments(row) for row in rows]

    def sizes(self, inputs: Sequence[Arguments]) -> tuple[int, ...]:
        """The samples of each microbatch: dimension 0 of its first tensor.

        Raises:
            ValueError: If a microbatch holds no tensor with a dimension 0, or no sample.
        """
        return tuple(_samples_of(index, part) for index, part in enumerate(inputs))

    def split_target(self, sizes: Sequence[int]) -> list[Any]:
        """The target of each microbatch, for microbatches of `sizes` samples.

        Raises:
            ValueError: If the target has another number of microbatches or samples.
        """
        if isinstance(self.target, Microbatches):
            if len(self.target) != len(sizes):
                raise ValueError(
                    f"target has {len(self.target)} microbatches, the inputs have {len(sizes)}: "
                    f"give as many of both"
                )
            return list(self.target)
        if not isinstance(self.target, torch.Tensor) or self.target.dim() == 0:
            raise ValueError(
                f"target of type {type(self.target).__name__} cannot be split: give a tensor "
                f"whose dimension 0 is the batch, or Microbatches([...])"
            )
        if len(self.target) != sum(sizes):
            raise ValueError(
                f"target has {len(self.target)} samples, the inputs have {sum(sizes)}: "
                f"give as many of both"
            )
        return list(torch.split(self.target, list(sizes)))

    def _arguments(self, row: tuple[Any, ...]) -> Arguments:
        args, values = row[: len(self.args)], row[len(self.args) :]
        if len(args) == 1 and isinstance(self.args[0], Microbatches) and isinstance(args[0], tuple):
            args = args[0]
        return Arguments(args, dict(zip(self.kwargs, values, strict=True)))


def _count_of(named: Mapping[str, Any]) -> int | None:
    """The microbatch count that ready-made values set, or None if there are none."""
    counts = {name: len(value) for name, value in named.items() if isinstance(value, Microbatches)}
    if len(set(counts.values())) > 1:
        raise ValueError(f"Microbatches of different lengths: {counts}; give as many of each")
    return next(iter(counts.values()), None)


def _check_samples(named: Mapping[str, Any], count: int) -> None:
    sizes = {}
    for name, value in named.items():
        if isinstance(value, torch.Tensor):
            if value.dim() == 0:
                raise ValueError(
                    f"{name} is a tensor without dimensions, which cannot be split along the "
                    f"batch: give a number, or Microbatches([...])"
                )
            sizes[name] = len(value)
    if len(set(sizes.values())) > 1:
        raise ValueError(
            f"dimension 0 is the batch, but differs: {sizes}; give equal sizes, or "
            f"Microbatches([...]) for what is not split per sample"
        )
    for samples in sizes.values():
        if samples < count:
            raise ValueError(
                f"a batch of {samples} samples cannot be split into {count} microbatches: "
                f"give at least {count} samples or set microbatches={max(samples, 1)} or less"
            )


def _split(name: str, value: Any, count: int) -> Sequence[Any]:
    if isinstance(value, torch.Tensor):
        return value.detach().tensor_split(count)
    if isinstance(value, Microbatches):
        return [pytree.tree_map_only(torch.Tensor, torch.Tensor.detach, part) for part in value]
    if isinstance(value, _REPLICATED):
        return [value] * count
    raise ValueError(
        f"{name} of type {type(value).__name__} cannot be split: give a tensor, a plain value "
        f"(number, string, None) for every microbatch, or Microbatches([...])"
    )


def _samples_of(index: int, part: Arguments) -> int:
    for value in (*part.args, *part.kwargs.values()):
        if isinstance(value, torch.Tensor) and value.dim() > 0:
            if len(value) == 0:
                raise ValueError(f"microbatch {index} is empty: give it at least 1 sample")
            return len(value)
    raise ValueError(
        f"microbatch {index} holds no tensor with a batch dimension, so its weight in the loss "
        f"is unknown: give at least one tensor of shape (samples, ...)"
    )
