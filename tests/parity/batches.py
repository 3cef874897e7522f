"""Batches of tokens: microbatch by microbatch, and put together as a user gives them.

What each microbatch consists of is made first and goes to the reference; the step that the
pipeline gets is their concatenation, or `Microbatches` where lengths differ. So splitting is tested
and not assumed.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

import rrfp_async as r
from tests.parity.models import LONGEST
from tests.runtime.reference import Part, Step

IGNORED = -100

CHUNK_SPECS = {
    "args_chunk_spec": (r.TensorChunkSpec(1), r.REPLICATE),
    "kwargs_chunk_spec": {"gain": {"by sample": None, "by feature": r.REPLICATE}},
    "target_chunk_spec": r.TensorChunkSpec(1),
}
"""How time-major tokens and targets are split, and what comes with them."""


@dataclass(frozen=True)
class Shape:
    """A microbatch's: samples and tokens of each."""

    samples: int
    length: int


def shapes_of(kind: str, microbatches: int, step: int) -> list[Shape]:
    """The microbatches of the `step`-th step.

    even: two samples each. odd: one sample more than fits, and about half as many the next time.
    lengths: one to three samples, each microbatch of its own length, and of another the next time.
    """
    numbers = range(microbatches)
    if kind == "even":
        return [Shape(2, 5)] * microbatches
    if kind == "lengths":
        return [Shape(1 + j % 3, 1 + (5 * j + 4 * step + 2) % LONGEST) for j in numbers]
    samples = 2 * microbatches + 1 if step % 2 == 0 else microbatches + microbatches // 2
    fewer, more = divmod(samples, microbatches)
    return [Shape(fewer + (j < more), 4 + step) for j in numbers]


@dataclass(frozen=True)
class Batches:
    """How batches are given.

    Attributes:
        arguments: "plain", "keywords" or "chunk specs": see `models.First`.
        dtype: Of floating arguments.
        words: Tokens are below.
        width: Features of the hidden states.
        ignores: Whether some of the targets are `IGNORED`.
    """

    arguments: str = "plain"
    dtype: torch.dtype = torch.float32
    words: int = 11
    width: int = 8
    ignores: bool = False

    def step(self, shapes: Sequence[Shape], *, update: bool = True) -> Step:
        """A training step, its tokens drawn from torch's generator."""
        shift = torch.randn(1, self.width, dtype=self.dtype)
        by_feature = torch.rand(self.width).to(self.dtype)
        parts = [self._part(shape, shift, by_feature) for shape in shapes]
        equal = len({shape.length for shape in shapes}) == 1
        dim = 1 if self.arguments == "chunk specs" else 0

        def whole(values: Sequence[Tensor], dim: int = dim) -> Any:
            return torch.cat(list(values), dim) if equal else r.Microbatches(values)

        named = [part.kwargs[0] for part in parts]
        kwargs = dict(named[0])
        if self.arguments == "keywords":
            kwargs["mask"] = whole([each["mask"] for each in named])
        if self.arguments == "chunk specs":
            by_sample = torch.cat([each["gain"]["by sample"] for each in named])
            kwargs["gain"] = {**kwargs["gain"], "by sample": by_sample}
        return Step(
            {0: (whole([part.args[0][0] for part in parts]), *parts[0].args[0][1:])},
            whole([part.target for part in parts]),
            update=update,
            kwargs={0: kwargs},
            parts=parts,
        )

    def _part(self, shape: Shape, shift: Tensor, by_feature: Tensor) -> Part:
        """One microbatch."""
        size = (shape.samples, shape.length)
        tokens, target = torch.randint(0, self.words, (2, *size)).unbind()
        if self.ignores:
            target[:, 1:][torch.rand(size)[:, 1:] < 0.4] = IGNORED
        args: tuple[Any, ...] = (tokens,)
        kwargs: dict[str, Any] = {}
        if self.arguments == "keywords":
            mask = torch.rand(size) < 0.7
            mask[:, 0] = True
            kwargs = {"mask": mask, "bias": None, "scale": 0.5}
        if self.arguments == "chunk specs":
            by_sample = torch.rand(shape.samples).to(self.dtype)
            kwargs = {"gain": {"by sample": by_sample, "by feature": by_feature}}
            args, target = (tokens.t().contiguous(), shift), target.t().contiguous()
        return Part(shape.samples, {0: args}, {0: kwargs}, target)
