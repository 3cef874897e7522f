"""From what a user gives a step to what each microbatch gets.

Arguments and the target are pytrees. Their tensors are split, along dimension 0 or as chunk specs
say; ready parts come as `Microbatches`; plain values go to every microbatch as they are. Which
stage uses what is not known here.
"""

from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.utils import _pytree as pytree

from rrfp_async.tasks.chunk_spec import Cut, Place, Splittable


class Microbatches:
    """Values that are split already: one per microbatch, as many as the step shall have.

    Each value is any pytree. As the only positional argument of a step, an entry that is a tuple
    holds that microbatch's positional arguments.

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

    Arguments and target are pytrees of tensors and plain values. Without a chunk spec, tensors are
    split along dimension 0; tensors without dimensions and plain values go to every microbatch. A
    chunk spec is a `TensorChunkSpec` or `REPLICATE` for all of an argument (or those of
    torch.distributed.pipelining), None for the default, or a pytree of these with the argument's
    outer structure. `Microbatches` are not split: theirs only tells which dimension counts samples.

    Attributes:
        args: Positional arguments of the first stage's module.
        kwargs: Its keyword arguments.
        target: The second argument of the loss function.
        microbatches: Parts to split a whole batch into.
        args_chunk_spec: One chunk spec per positional argument of the module.
        kwargs_chunk_spec: Chunk specs by keyword; the default for those it leaves out.
        target_chunk_spec: The target's chunk spec.
    """

    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    target: Any
    microbatches: int
    args_chunk_spec: Sequence[Any] | None = None
    kwargs_chunk_spec: Mapping[str, Any] | None = None
    target_chunk_spec: Any | None = None

    @property
    def has_inputs(self) -> bool:
        """Whether any argument was given."""
        return bool(self.args or self.kwargs)

    def split_inputs(self) -> list[Arguments]:
        """The first stage's arguments, per microbatch; tensors are detached.

        Raises:
            ValueError: If arguments disagree on the number of microbatches or samples, there are
                fewer samples than microbatches, a value cannot be split, or a chunk spec is none
                for what it stands for.
        """
        places = [_place(key) for key in (*range(len(self.args)), *self.kwargs)]
        values = [*self.args, *self.kwargs.values()]
        specs = self._specs(len(self.args), self.kwargs, exact=not self._is_one_of_microbatches)
        count = _count_of(places, values) or self.microbatches
        inputs = [
            value if isinstance(value, Microbatches) else Splittable.of(place, value, spec)
            for place, value, spec in zip(places, values, specs, strict=True)
        ]
        whole = [value for value in inputs if isinstance(value, Splittable)]
        lengths = self._ready_lengths(places, values, specs) if whole else None
        _check_samples(whole, count, lengths)
        columns = [
            value.parts(count, _cutting(count, lengths))
            if isinstance(value, Splittable)
            else _detached(value)
            for value in inputs
        ]
        return [self._arguments(row) for row in zip(*columns, strict=True)]

    def sizes(self, inputs: Sequence[Arguments]) -> tuple[int, ...]:
        """The samples of each microbatch, told by its first tensor that is split.

        They are the size of the dimension of its chunk spec, else of dimension 0. What came as
        `Microbatches` counts in the same way.

        Raises:
            ValueError: If a microbatch holds no such tensor or no sample, or a chunk spec is none
                for what it stands for.
        """
        return tuple(self._samples_of(index, part) for index, part in enumerate(inputs))

    def split_target(self, sizes: Sequence[int]) -> list[Any]:
        """The target of each microbatch, for microbatches of `sizes` samples; tensors are detached.

        Raises:
            ValueError: If the target has another number of microbatches or samples, cannot be
                split, or its chunk spec is none for it.
        """
        if isinstance(self.target, Microbatches):
            if len(self.target) != len(sizes):
                raise ValueError(
                    f"target has {len(self.target)} microbatches, the inputs have {len(sizes)}: "
                    f"give as many of both"
                )
            return _detached(self.target)
        place = Place("target", "target_chunk_spec")
        target = Splittable.of(place, self.target, self.target_chunk_spec)
        for index, samples in target.samples():
            if samples != sum(sizes):
                raise ValueError(
                    f"{target.where(index)} has {samples} samples, the inputs have {sum(sizes)}: "
                    f"give as many of both, or say in target_chunk_spec how it is split "
                    f"(TensorChunkSpec(dim) along another dimension than {target.dims[index]}, "
                    f"REPLICATE not at all), or give Microbatches([...])"
                )
        lengths = list(sizes)
        return list(
            target.parts(len(lengths), lambda tensor, dim: torch.split(tensor, lengths, dim))
        )

    @property
    def _is_one_of_microbatches(self) -> bool:
        """Whether one `Microbatches` stands for all positional arguments."""
        return len(self.args) == 1 and isinstance(self.args[0], Microbatches)

    def _ready_lengths(
        self, places: Sequence[Place], values: Sequence[Any], specs: Sequence[Any]
    ) -> list[int] | None:
        """The samples of ready parts, which whole values beside them are split by; None without."""
        for index, (place, value, spec) in enumerate(zip(places, values, specs, strict=True)):
            if isinstance(value, Microbatches):
                all_args = index == 0 and self._is_one_of_microbatches
                found = [
                    _length(place, part, self._spec_of_all(part) if all_args else spec)
                    for part in value
                ]
                known = [length for length in found if length is not None]
                if len(known) == len(found):
                    return known
        return None

    def _spec_of_all(self, part: Any) -> Any:
        """The chunk spec of a ready part that is all positional arguments.

        Specs that do not fit it are refused where its samples are counted.
        """
        specs, is_tuple = self.args_chunk_spec, isinstance(part, tuple)
        if not isinstance(specs, Sequence) or len(specs) != (len(part) if is_tuple else 1):
            return None
        return tuple(specs) if is_tuple else specs[0]

    def _arguments(self, row: tuple[Any, ...]) -> Arguments:
        args, values = row[: len(self.args)], row[len(self.args) :]
        if self._is_one_of_microbatches and isinstance(args[0], tuple):
            args = args[0]
        return Arguments(args, dict(zip(self.kwargs, values, strict=True)))

    def _specs(self, args: int, names: Collection[str], *, exact: bool = True) -> list[Any]:
        """The chunk specs of `args` positional arguments and of the keyword arguments.

        Args:
            args: Positional arguments that the module gets.
            names: Its keyword arguments.
            exact: Whether `args` is known yet; if not, they are left for `sizes`.
        """
        if self.args_chunk_spec is None and self.kwargs_chunk_spec is None:
            return [None] * (args + len(names))
        by_position: Sequence[Any] = [None] * args
        if self.args_chunk_spec is not None and exact:
            by_position = self.args_chunk_spec
            _check_count(by_position, args)
        by_keyword = {} if self.kwargs_chunk_spec is None else self.kwargs_chunk_spec
        _check_names(by_keyword, list(names))
        return [*by_position, *map(by_keyword.get, names)]

    def _samples_of(self, index: int, part: Arguments) -> int:
        values = (*part.args, *part.kwargs.values())
        specs = self._specs(len(part.args), part.kwargs)
        for position, (value, spec) in enumerate(zip(values, specs, strict=True)):
            if spec is None and isinstance(value, torch.Tensor):  # in most batches the first is
                samples = value.size(0) if value.dim() else None
            else:
                place = _place([*range(len(part.args)), *part.kwargs][position])
                found = Splittable.of(place, value, spec, ready=True).samples()
                samples = found[0][1] if found else None
            if samples == 0:
                raise ValueError(f"microbatch {index} is empty: give it at least 1 sample")
            if samples is not None:
                return samples
        raise ValueError(
            f"microbatch {index} holds no tensor with a batch dimension, so its weight in the loss "
            f"is unknown: give at least one tensor of shape (samples, ...)"
        )


def _place(key: int | str) -> Place:
    """Where the argument of this position or keyword stands."""
    kind = "argument" if isinstance(key, int) else "keyword argument"
    option = "args_chunk_spec" if isinstance(key, int) else "kwargs_chunk_spec"
    return Place(f"{kind} {key!r}", f"{option}[{key!r}]")


def _detached(parts: Microbatches) -> list[Any]:
    return [pytree.tree_map_only(torch.Tensor, torch.Tensor.detach, part) for part in parts]


def _check_count(specs: Sequence[Any], args: int) -> None:
    if not isinstance(specs, Sequence):
        raise ValueError(
            f"args_chunk_spec={specs!r} is no sequence: give one chunk spec for each positional "
            f"argument"
        )
    if len(specs) != args:
        odd = min(len(specs), args)
        seen = "has no chunk spec" if odd < args else "has a chunk spec and was not given"
        raise ValueError(
            f"argument {odd} {seen}: args_chunk_spec has {len(specs)} chunk specs for {args} "
            f"positional arguments; give one for each, None for the default"
        )


def _check_names(specs: Mapping[str, Any], names: Sequence[str]) -> None:
    if not isinstance(specs, Mapping):
        raise ValueError(
            f"kwargs_chunk_spec={specs!r} is no mapping: give chunk specs by keyword argument"
        )
    for name in specs:
        if name not in names:
            raise ValueError(
                f"keyword argument {name!r} has a chunk spec and was not given: kwargs_chunk_spec "
                f"may name {names}; leave out the spec or give the argument"
            )


def _count_of(places: Sequence[Place], values: Sequence[Any]) -> int | None:
    """The microbatch count that ready-made values set, or None if there are none."""
    counts = {
        place.name: len(value)
        for place, value in zip(places, values, strict=True)
        if isinstance(value, Microbatches)
    }
    if len(set(counts.values())) > 1:
        raise ValueError(f"Microbatches of different lengths: {counts}; give as many of each")
    return next(iter(counts.values()), None)


def _length(place: Place, part: Any, spec: Any) -> int | None:
    found = Splittable.of(place, part, spec, ready=True).samples()
    return found[0][1] if found else None


def _cutting(count: int, lengths: list[int] | None) -> Cut:
    if lengths is None:
        return lambda tensor, dim: tensor.tensor_split(count, dim)
    return lambda tensor, dim: torch.split(tensor, lengths, dim)


def _check_samples(values: Sequence[Splittable], count: int, lengths: Sequence[int] | None) -> None:
    found = [(value, index, size) for value in values for index, size in value.samples()]
    if not found:
        return
    samples = found[0][2]
    if any(size != samples for _, _, size in found):
        raise ValueError(_disagreement(found))
    if lengths is not None and samples != sum(lengths):
        value, index, _ = found[0]
        raise ValueError(
            f"{value.where(index)} has {samples} samples, the Microbatches beside it have "
            f"{list(lengths)}: give {sum(lengths)}, or Microbatches([...]) of it too, or say in "
            f"{value.place.option} that it is not split (REPLICATE)"
        )
    if samples < count:
        raise ValueError(
            f"a batch of {samples} samples cannot be split into {count} microbatches: "
            f"give at least {count} samples or set microbatches={max(samples, 1)} or less"
        )


def _disagreement(found: Sequence[tuple[Splittable, int, int]]) -> str:
    """What to say where tensors differ in size: most of them are the batch, or else the first."""
    [(batch, _)] = Counter(size for _, _, size in found).most_common(1)
    odd = [(value, index, size) for value, index, size in found if size != batch]
    seen = " and ".join(
        f"{value.where(index)} has {size} samples in dimension {value.dims[index]}"
        for value, index, size in odd
    )
    options = ", ".join(dict.fromkeys(value.place.option for value, _, _ in odd))
    return (
        f"{seen}, the batch has {batch}: give as many, or say in {options} how it is split "
        f"(TensorChunkSpec(dim) along another dimension, REPLICATE not at all), or give "
        f"Microbatches([...])"
    )
