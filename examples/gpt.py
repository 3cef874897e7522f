"""A small byte-level GPT as a list of named layers, so that any cut of the list is a stage.

The unpartitioned model is the whole list as one `nn.Sequential`; a stage is a slice of it. Names
are kept, so a parameter is called the same in both.
"""

from collections import OrderedDict
from dataclasses import dataclass

import torch
import torch.nn.functional as F  # noqa: N812 - its usual name
from torch import nn

VOCABULARY = 256  # every byte


@dataclass(frozen=True)
class GPTConfig:
    """Sizes of the model: positions, channels, attention heads and transformer blocks."""

    context: int = 128
    width: int = 128
    heads: int = 4
    blocks: int = 6


class Embedding(nn.Module):
    """Bytes `(batch, seq)` int64 -> hidden `(batch, seq, width)`: token plus position."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.token = nn.Embedding(VOCABULARY, config.width)
        self.position = nn.Embedding(config.context, config.width)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Embed `tokens`."""
        positions = torch.arange(tokens.shape[1], device=tokens.device)
        return self.token(tokens) + self.position(positions)


class Attention(nn.Module):
    """Causal self-attention over hidden `(batch, seq, width)`."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.heads = config.heads
        self.head_width = config.width // config.heads
        self.qkv = nn.Linear(config.width, 3 * config.width)
        self.out = nn.Linear(config.width, config.width)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """Attend to this and earlier positions."""
        batch, seq, _ = hidden.shape
        by_head = self.qkv(hidden).view(batch, seq, 3, self.heads, self.head_width)
        q, k, v = by_head.permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(mixed.transpose(1, 2).reshape(batch, seq, self.heads * self.head_width))


class Block(nn.Module):
    """A pre-norm transformer block, hidden `(batch, seq, width)` in and out."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(config.width)
        self.attention = Attention(config)
        self.norm2 = nn.LayerNorm(config.width)
        self.up = nn.Linear(config.width, 4 * config.width)
        self.down = nn.Linear(4 * config.width, config.width)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """Attention, then the feed-forward layer, each added to its input."""
        hidden = hidden + self.attention(self.norm1(hidden))
        return hidden + self.down(F.gelu(self.up(self.norm2(hidden))))


class Head(nn.Module):
    """Hidden `(batch, seq, width)` -> logits over the next byte `(batch, seq, 256)`; untied."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(config.width)
        self.logits = nn.Linear(config.width, VOCABULARY, bias=False)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """Predict the next byte at every position."""
        return self.logits(self.norm(hidden))


def build_layers(config: GPTConfig, seed: int) -> list[tuple[str, nn.Module]]:
    """The whole model, layer by layer; equal on every rank for equal seeds."""
    torch.manual_seed(seed)
    blocks = [(f"block{index}", Block(config)) for index in range(config.blocks)]
    return [("embedding", Embedding(config)), *blocks, ("head", Head(config))]


def stage_of(layers: list[tuple[str, nn.Module]], index: int, stages: int) -> nn.Sequential:
    """Stage `index` of an even split into `stages`; `stage_of(layers, 0, 1)` is the model."""
    if stages > len(layers):
        raise ValueError(f"{len(layers)} layers cannot make {stages} stages: use fewer ranks")
    cuts = [len(layers) * cut // stages for cut in range(stages + 1)]
    return nn.Sequential(OrderedDict(layers[cuts[index] : cuts[index + 1]]))


def loss_fn(logits: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """Mean cross-entropy of logits `(batch, seq, 256)` against bytes `(batch, seq)`."""
    return F.cross_entropy(logits.flatten(0, 1), target.flatten())
