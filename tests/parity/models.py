"""A small language model in stages: embedding, attention block, MLP block, head.

Tokens are int64 `(batch, length)`, or `(length, batch)` where a stage is told so; the mask is bool
`(batch, length)`; hidden states are `(batch, length, width)` in the stage's dtype, bfloat16 where
it computes under autocast. What travels between stages is a tensor, a tuple or a tree, as
`between` says.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

HEADS = 2
LONGEST = 9


@dataclass(frozen=True)
class Build:
    """How every stage of a model is made.

    Attributes:
        between: What stages hand on: "tensor", "tuple" or "tree".
        recompute: Whether they are checkpointed, without reentering autograd.
        autocast: Whether they compute under autocast to bfloat16.
        dtype: Of their parameters.
        width: Features.
        words: Size of the vocabulary.
    """

    between: str = "tensor"
    recompute: bool = False
    autocast: bool = False
    dtype: torch.dtype = torch.float32
    width: int = 8
    words: int = 11


class Embedding(nn.Module):
    """Tokens and positions to hidden states."""

    def __init__(self, build: Build) -> None:
        super().__init__()
        self.embed = nn.Embedding(build.words, build.width)
        self.position = nn.Parameter(torch.randn(LONGEST, build.width))
        self.project = nn.Linear(build.width, build.width)

    def forward(self, tokens: Tensor, scale: float) -> Tensor:
        places = self.position[: tokens.size(1)]
        return self.project((self.embed(tokens) + places) * scale)


class Attention(nn.Module):
    """A pre-norm causal attention block; tokens that are masked are not looked at."""

    def __init__(self, build: Build) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(build.width)
        self.qkv = nn.Linear(build.width, 3 * build.width)
        self.project = nn.Linear(build.width, build.width)

    def forward(self, x: Tensor, mask: Tensor | None) -> Tensor:
        batch, length, width = x.shape
        parts = self.qkv(self.norm(x)).view(batch, length, 3, HEADS, -1).permute(2, 0, 3, 1, 4)
        seen = torch.ones(length, length, dtype=torch.bool).tril()
        if mask is not None:
            seen = seen & mask[:, None, None, :]
        mixed = functional.scaled_dot_product_attention(*parts, attn_mask=seen)
        return x + self.project(mixed.transpose(1, 2).reshape(batch, length, width))


class Mlp(nn.Module):
    """A pre-norm MLP block; what it adds is nothing where the mask is False."""

    def __init__(self, build: Build) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(build.width)
        self.up = nn.Linear(build.width, 4 * build.width)
        self.down = nn.Linear(4 * build.width, build.width)

    def forward(self, x: Tensor, mask: Tensor | None) -> Tensor:
        added = self.down(functional.gelu(self.up(self.norm(x))))
        return x + (added if mask is None else added * mask.unsqueeze(-1))


class Head(nn.Module):
    """Hidden states to logits; its weight has the shape of the embedding's."""

    def __init__(self, build: Build) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(build.width)
        self.out = nn.Linear(build.width, build.words)

    def forward(self, x: Tensor, mask: Tensor | None) -> Tensor:
        return self.out(self.norm(x))


class Stage(nn.Module):
    """A body, and how it is run; copies are built anew, so that hooks come along.

    Args:
        kind: The body's class.
        build: See there.
        hooked: Name of a parameter of the body whose gradient a hook doubles.
    """

    def __init__(self, kind: type[nn.Module], build: Build, hooked: str | None = None) -> None:
        super().__init__()
        self.made_by = (kind, build, hooked)
        self.build = build
        self.body = kind(build).to(build.dtype)
        if hooked is not None:
            self.body.get_parameter(hooked).register_hook(lambda gradient: gradient * 2)

    def __deepcopy__(self, memo: dict[int, Any]) -> "Stage":
        other = type(self)(*self.made_by)
        other.load_state_dict(self.state_dict())
        for mine, copied in zip(self.parameters(), other.parameters(), strict=True):
            copied.requires_grad_(mine.requires_grad)
        return other

    def run(self, *inputs: Any) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16, enabled=self.build.autocast):
            if self.build.recompute:
                return checkpoint(self.body, *inputs, use_reentrant=False)
            return self.body(*inputs)

    def forward(self, *received: Any) -> Any:
        hidden, mask, tokens = self.unpacked(received)
        hidden = self.run(hidden, mask)
        return hidden if isinstance(self.body, Head) else self.packed(hidden, mask, tokens)

    def packed(self, hidden: Tensor, mask: Tensor | None, tokens: Tensor | None) -> Any:
        """What the next stage gets; a tree has one tensor more for some microbatches."""
        if self.build.between == "tensor":
            return hidden
        if self.build.between == "tuple":
            return hidden, mask, tokens
        more = [hidden * 2] * (hidden.size(1) % 2)
        return {"hidden": (hidden, more), "rest": [mask, None, {"tokens": tokens, "half": 0.5}]}

    def unpacked(self, received: tuple[Any, ...]) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """What was packed."""
        if self.build.between == "tensor":
            return received[0], None, None
        if self.build.between == "tuple":
            hidden, mask, tokens = received
            return hidden, mask, tokens
        [tree] = received
        (hidden, more), (mask, nothing, rest) = tree["hidden"], tree["rest"]
        assert nothing is None
        for extra in more:
            hidden = hidden + extra * rest["half"]
        return hidden, mask, rest["tokens"]


class First(Stage):
    """The stage that is given tokens, in one of three ways.

    As `(tokens,)`; with the keywords `mask`, `bias` (None) and `scale`; or time-major with a
    `shift` of `(1, width)` for every token, and `gain`s by sample, `(batch,)`, and by feature,
    `(width,)`.
    """

    def forward(
        self,
        tokens: Tensor,
        shift: Tensor | None = None,
        *,
        mask: Tensor | None = None,
        bias: Tensor | None = None,
        scale: float = 1.0,
        gain: dict[str, Tensor] | None = None,
    ) -> Any:
        assert bias is None
        tokens = tokens if shift is None else tokens.t()
        hidden = self.run(tokens, scale)
        if shift is not None and gain is not None:
            by_sample = gain["by sample"].view(-1, 1, 1)
            hidden = (hidden + shift) * by_sample.to(hidden.dtype) * gain["by feature"]
        mask = tokens >= 0 if mask is None else mask
        return self.packed(hidden * mask.unsqueeze(-1), mask, tokens)


class Joining(Stage):
    """A stage that takes what came over several edges, as tensors, and sums it up."""

    def unpacked(self, received: tuple[Any, ...]) -> tuple[Tensor, Tensor | None, Tensor | None]:
        return sum(received[1:], received[0]), None, None


def language_model(
    build: Build, *, hooked: bool = False, middle: tuple[type[nn.Module], ...] = (Attention, Mlp)
) -> list[Stage]:
    """Embedding, middle stages and head; with `hooked` the last middle one cannot be split."""
    torch.manual_seed(7)
    stages = [First(Embedding, build), *(Stage(kind, build) for kind in middle[:-1])]
    stages.append(Stage(middle[-1], build, "norm.weight" if hooked else None))
    return [*stages, Stage(Head, build)]


FROZEN = {
    "nothing": lambda stage, name: False,
    "first": lambda stage, name: stage < 2,
    "middle": lambda stage, name: stage == 1,
    "last": lambda stage, name: stage == 3,
    "parts": lambda stage, name: "bias" in name or (stage == 1 and "norm" in name),
}
"""By name: whether the parameter `name` of a stage wants no gradient."""


def freeze(stages: list[Stage], what: str) -> None:
    """Let some parameters want no gradient."""
    for index, stage in enumerate(stages):
        for name, parameter in stage.named_parameters():
            parameter.requires_grad_(not FROZEN[what](index, name))
