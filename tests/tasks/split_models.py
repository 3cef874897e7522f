"""Modules whose backward is split in tests, and what arrives for them; see split_harness.Case."""

import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.utils import parametrize
from torch.utils.checkpoint import checkpoint

from tests.tasks.split_harness import Inputs

WIDTH = 16


def randn(*shape: int, dtype: torch.dtype = torch.float32) -> Inputs:
    """One random tensor for each microbatch."""
    return lambda _: (torch.randn(*shape, dtype=dtype),)


def ids(*shape: int) -> Inputs:
    """Token ids."""
    return lambda _: (torch.randint(0, 11, shape),)


class Applied(nn.Module):
    """Layers by name, and a function of them and the inputs."""

    def __init__(self, function: Callable[..., Any], **layers: nn.Module) -> None:
        super().__init__()
        self.function = function
        for name, layer in layers.items():
            self.add_module(name, layer)

    def forward(self, *inputs: Tensor) -> Any:
        return self.function(self, *inputs)


class Block(nn.Module):
    """A pre-norm transformer block; (batch, sequence, width)."""

    def __init__(self, width: int = WIDTH, heads: int = 2, dropout: float = 0.0) -> None:
        super().__init__()
        self.heads = heads
        self.first_norm, self.second_norm = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.project = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.dropout = nn.Dropout(dropout)

    def attention(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        parts = self.qkv(x).view(batch, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        mixed = functional.scaled_dot_product_attention(*parts, is_causal=True)
        return self.project(mixed.transpose(1, 2).reshape(batch, length, width))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.dropout(self.attention(self.first_norm(x)))
        return x + self.dropout(self.down(functional.gelu(self.up(self.second_norm(x)))))


class Counting(nn.Module):
    """Counts the forwards of what is inside."""

    def __init__(self, inside: nn.Module) -> None:
        super().__init__()
        self.inside = inside
        self.forwards = 0

    def forward(self, *inputs: Tensor) -> Any:
        self.forwards += 1
        return self.inside(*inputs)


class Checkpointed(nn.Module):
    """Recomputes what is inside in the backward, without reentering autograd."""

    def __init__(self, inside: nn.Module, **options: Any) -> None:
        super().__init__()
        self.inside = Counting(inside)
        self.options = options

    def forward(self, *inputs: Tensor) -> Any:
        return checkpoint(self.inside, *inputs, use_reentrant=False, **self.options)


class Tied(nn.Module):
    """An embedding whose matrix is the last layer's too."""

    def __init__(self, *, sparse: bool = False, first: str = "layer") -> None:
        super().__init__()
        self.embed = nn.Embedding(11, WIDTH, sparse=sparse)
        self.head = nn.Linear(WIDTH, 11)
        if first == "layer":
            self.embed.weight = self.head.weight
        else:
            self.head.weight = self.embed.weight

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(torch.tanh(self.embed(tokens)))


class TwoLayersOneWeight(nn.Module):
    """Two layers that share their weight, not their bias."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.b.weight = self.a.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.b(torch.tanh(self.a(x)))


class Experts(nn.Module):
    """Every row goes to one of four layers; one of these never gets any, one sometimes."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        chosen = (x[:, 0] > 0).long() + (x[:, 1] > 1).long()
        y = torch.zeros_like(x)
        for index, expert in enumerate(self.experts):
            rows = (chosen == index).nonzero().squeeze(1)
            y = y.index_add(0, rows, expert(x[rows]))
        return y


def transformer_layer(dropout: float = 0.0, *, norm_first: bool = False) -> nn.Module:
    """Torch's own."""
    return nn.TransformerEncoderLayer(
        WIDTH, 2, 32, dropout=dropout, batch_first=True, norm_first=norm_first
    )


def mlp(width: int = WIDTH, *, inplace: bool = False, **options: Any) -> nn.Module:
    """Linear, ReLU, Linear."""
    first, last = (nn.Linear(width, width, **options) for _ in range(2))
    return nn.Sequential(first, nn.ReLU(inplace=inplace), last)


def frozen(module: nn.Module, *names: str) -> nn.Module:
    """`module` with the named parameters frozen."""
    for name in names:
        module.get_parameter(name).requires_grad_(False)
    return module


def materialised(lazy: nn.Module, inputs: Tensor) -> nn.Module:
    """A lazy module after its first forward."""
    with torch.no_grad():
        lazy(inputs)
    return lazy


class Scale(nn.Module):
    """A parametrization: scaled by a parameter of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(1.25))

    def forward(self, weight: Tensor) -> Tensor:
        return weight * self.scale


class MyLinear(nn.Linear):
    """A subclass that computes something else."""

    def forward(self, x: Tensor) -> Tensor:
        return functional.linear(x, self.weight.abs(), self.bias) * 2


def linear(out: int = WIDTH, width: int = WIDTH, **options: Any) -> Callable[[], nn.Module]:
    """Makes one layer."""
    return partial(nn.Linear, width, out, **options)


def applied(function: Callable[..., Any], **layers: Callable[[], nn.Module]) -> Any:
    """Makes an `Applied`."""
    return lambda: Applied(function, **{name: make() for name, make in layers.items()})


def stored(weight: Tensor) -> nn.Module:
    """A layer with this very weight."""
    layer = nn.Linear(WIDTH, len(weight))
    layer.weight = nn.Parameter(weight)
    return layer


def no_features() -> nn.Module:
    """A layer without inputs."""
    with warnings.catch_warnings(action="ignore"):
        return nn.Linear(0, 3)


def chunked(module: Applied, x: Tensor) -> Tensor:
    """Hazard 12: a * sin(b) of the two halves of a layer's output."""
    a, b = module.a(x).chunk(2, -1)
    return a * b.sin()


def relu_on_half(y: Tensor) -> Tensor:
    """Write to a part of `y`."""
    y[..., : WIDTH // 2].relu_()
    return y


def without_grad(layer: nn.Module, x: Tensor) -> Tensor:
    """A forward that autograd does not see."""
    with torch.no_grad():
        return layer(x)


def parametrized(name: str) -> nn.Module:
    """A layer whose weight or bias is computed from another parameter."""
    layer = nn.Linear(WIDTH, 4)
    parametrize.register_parametrization(layer, name, Scale())
    return layer


def with_transposed_scale() -> nn.Module:
    """A parameter whose gradient comes transposed."""
    module = Applied(lambda m, x: m.a(x) * m.scale.t()[: len(x)], a=nn.Linear(WIDTH, 8))
    module.scale = nn.Parameter(torch.randn(8, 6))
    return module
