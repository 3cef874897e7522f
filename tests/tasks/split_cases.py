"""The cases of test_split: by kind of module, by shape of what arrives, by use of a layer."""

from functools import partial

import torch
from torch import nn
from torch.nn import functional
from torch.nn.utils import parametrizations

from tests.tasks.split_harness import MIDDLE, Case, summed
from tests.tasks.split_models import (
    WIDTH,
    Block,
    Experts,
    MyLinear,
    Scale,
    Tied,
    TwoLayersOneWeight,
    applied,
    chunked,
    frozen,
    ids,
    linear,
    materialised,
    mlp,
    no_features,
    parametrized,
    randn,
    relu_on_half,
    stored,
    transformer_layer,
    with_transposed_scale,
    without_grad,
)

X = randn(6, WIDTH)
X3 = randn(2, 5, WIDTH)

BLOCKS = [
    Case("transformer block", Block, X3),
    Case("transformer block with dropout", partial(Block, dropout=0.3), X3),
    Case("two blocks", lambda: nn.Sequential(Block(), Block()), X3),
    Case("a block of 2,048 tokens", Block, randn(1, 2048, WIDTH), microbatches=2),
    Case("2,048 tokens wide", lambda: mlp(64), randn(2, 1024, 64)),
    Case("nn.TransformerEncoderLayer", transformer_layer, X3),
    Case("nn.TransformerEncoderLayer with dropout", partial(transformer_layer, 0.3), X3),
    Case("nn.TransformerEncoderLayer pre-norm", partial(transformer_layer, norm_first=True), X3),
    Case("tied to an embedding, the layer's weight", Tied, ids(2, 5)),
    Case("tied to an embedding, the embedding's", partial(Tied, first="embedding"), ids(2, 5)),
    Case("tied to a sparse embedding", partial(Tied, sparse=True), ids(2, 5)),
    Case(
        "sparse embedding before a layer",
        lambda: nn.Sequential(nn.Embedding(11, WIDTH, sparse=True), nn.Linear(WIDTH, WIDTH)),
        ids(2, 5),
    ),
    Case("convolutions", lambda: nn.Sequential(nn.Conv1d(5, 4, 3), nn.Linear(14, 3)), X3),
    Case("batch norm", lambda: nn.Sequential(nn.Linear(WIDTH, 4), nn.BatchNorm1d(4)), X),
    Case(
        "LSTM",
        applied(lambda m, x: m.b(m.a(x)[0]), a=lambda: nn.LSTM(WIDTH, 4), b=linear(3, 4)),
        X3,
    ),
]

SHAPES = [
    Case("2-D layer alone", linear(), X),
    Case("3-D layer last, a view", linear(), X3),
    Case("3-D layer last, no bias", linear(bias=False), X3),
    Case("2-D layer, no bias", linear(bias=False), X),
    Case("4-D inputs", mlp, randn(2, 3, 4, WIDTH)),
    Case("4-D inputs, no bias", lambda: mlp(bias=False), randn(2, 3, 4, WIDTH)),
    Case("4-D inputs, many", mlp, randn(8, 7, 33, WIDTH)),
    Case("4-D inputs, wide", partial(mlp, 256), randn(2, 4, 32, 256)),
    Case("1-D bf16", partial(mlp, dtype=torch.bfloat16), randn(WIDTH, dtype=torch.bfloat16)),
    Case(
        "4-D bf16",
        partial(mlp, dtype=torch.bfloat16),
        randn(2, 3, 4, WIDTH, dtype=torch.bfloat16),
    ),
    Case("5-D inputs", linear(), randn(2, 1, 3, 2, WIDTH)),
    Case("1-D inputs", mlp, randn(WIDTH)),
    Case("1-D inputs, no bias", linear(bias=False), randn(WIDTH)),
    Case("transposed 3-D inputs", mlp, lambda _: (torch.randn(5, 2, WIDTH).transpose(0, 1),)),
    Case("3-D inputs, last two transposed", linear(3), lambda _: (torch.randn(2, WIDTH, 5).mT,)),
    Case("column-major inputs", linear(3), lambda _: (torch.randn(WIDTH, 6).t(),)),
    Case("column-major, no bias", linear(3, bias=False), lambda _: (torch.randn(WIDTH, 6).t(),)),
    Case("strided inputs", linear(3), lambda _: (torch.randn(6, 2 * WIDTH)[:, ::2],)),
    Case("rows of a larger tensor", linear(3), lambda _: (torch.randn(6, 2 * WIDTH)[:, :WIDTH],)),
    Case("expanded inputs", linear(3), lambda _: (torch.randn(1, WIDTH).expand(6, WIDTH),)),
    Case("expanded gradients 2-D", mlp, X, summed, torch.ones_like),
    Case("expanded gradients 3-D", mlp, X3, summed, torch.ones_like),
    Case("expanded gradients 4-D", mlp, randn(2, 3, 4, WIDTH), summed),
    Case(
        "expanded seeds",
        linear(3),
        X,
        seeds_of=lambda y: torch.rand(1, 3).expand_as(y),
        places=(MIDDLE,),
    ),
    Case("transposed seeds", linear(3), X, seeds_of=lambda y: y.t().contiguous().t().cos()),
    Case("one input feature", linear(5, 1), randn(6, 1)),
    Case("one input feature 3-D", linear(5, 1), randn(2, 3, 1)),
    Case("one output feature", linear(1), X),
    Case("one output feature 3-D", linear(1), X3),
    Case("one output feature, no bias", linear(1, bias=False), X3),
    Case("one by one", linear(1, 1), randn(6, 1)),
    Case("one row", mlp, randn(1, WIDTH)),
    Case("one row 3-D", mlp, randn(1, 1, WIDTH)),
    Case("one row, one feature", linear(1, 1), randn(1, 1)),
    Case("no rows", mlp, randn(0, WIDTH), summed),
    Case("no rows 3-D", mlp, randn(0, 5, WIDTH), summed),
    Case("no rows 4-D", mlp, randn(2, 0, 5, WIDTH), summed),
    Case("no input features", applied(lambda m, x: m.a(x[..., :0]) + x.mean(), a=no_features), X),
    Case(
        "no input features 3-D", applied(lambda m, x: m.a(x[..., :0]) + x.mean(), a=no_features), X3
    ),
    Case("bf16", lambda: mlp(dtype=torch.bfloat16), randn(2, 5, WIDTH, dtype=torch.bfloat16)),
    Case("fp64", lambda: mlp(dtype=torch.float64), randn(2, 5, WIDTH, dtype=torch.float64)),
    Case("fp16", lambda: mlp(dtype=torch.float16), randn(2, 5, WIDTH, dtype=torch.float16)),
    Case("complex", linear(3, dtype=torch.complex64), randn(6, WIDTH, dtype=torch.complex64)),
    Case(
        "complex 3-D", linear(3, dtype=torch.complex64), randn(2, 5, WIDTH, dtype=torch.complex64)
    ),
    Case("weight stored transposed", lambda: stored(torch.randn(WIDTH, 3).t()), X),
    Case("weight of a larger tensor", lambda: stored(torch.randn(3, 2 * WIDTH)[:, :WIDTH]), X3),
    Case("inputs without gradient", mlp, X, wants_gradient=False),
    Case("3-D inputs without gradient", mlp, X3, wants_gradient=False),
]


USES = [
    Case("used twice", applied(lambda m, x: m.a(torch.tanh(m.a(x))), a=linear()), X),
    Case("used twice 3-D", applied(lambda m, x: m.a(torch.tanh(m.a(x))), a=linear()), X3),
    Case("used three times", applied(lambda m, x: m.a(m.a(m.a(x).tanh()).tanh()), a=linear()), X3),
    Case(
        "used side by side",
        applied(lambda m, x: m.a(x.sin()) * m.a(x.cos()) + m.a(x), a=linear()),
        X,
    ),
    Case(
        "used as 2-D, 3-D and 4-D",
        applied(lambda m, x: m.a(m.a(m.a(x).tanh()[None]).tanh()[None]), a=linear()),
        X,
    ),
    Case(
        "its transpose used too",
        applied(
            lambda m, x: m.b(functional.linear(m.a(x).tanh(), m.a.weight.t())),
            a=linear(8),
            b=linear(),
        ),
        X,
    ),
    Case(
        "its transpose used before",
        applied(lambda m, x: m.a(functional.linear(x[..., :8], m.a.weight.t())), a=linear(8)),
        X3,
    ),
    Case("penalty on its weight", applied(lambda m, x: (m.a(x), m.a.weight.norm()), a=linear()), X),
    Case(
        "penalty on its bias", applied(lambda m, x: m.a(x) + m.a.bias.pow(2).sum(), a=linear()), X3
    ),
    Case(
        "used twice and a penalty",
        applied(lambda m, x: (m.a(m.a(x).tanh()), m.a.weight.norm()), a=linear()),
        X,
    ),
    Case(
        "used, its transpose, and a penalty",
        applied(
            lambda m, x: (functional.linear(m.a(x), m.a.weight.t()), m.a.weight.norm()), a=linear()
        ),
        X,
    ),
    Case("inplace ReLU 2-D", lambda: mlp(inplace=True), X),
    Case("inplace ReLU 3-D", lambda: mlp(inplace=True), X3),
    Case("inplace ReLU 4-D", lambda: mlp(inplace=True), randn(2, 3, 4, WIDTH)),
    Case("inplace ReLU 3-D, no bias", lambda: mlp(inplace=True, bias=False), X3),
    Case(
        "inplace sum", applied(lambda m, x: m.b(m.a(x).add_(x).mul_(2)), a=linear(), b=linear()), X3
    ),
    Case(
        "inplace on part of the output",
        applied(lambda m, x: m.b(relu_on_half(m.a(x))), a=linear(), b=linear()),
        X3,
    ),
    Case("frozen weights", lambda: frozen(mlp(), "0.weight", "0.bias"), X3),
    Case("frozen weight only", lambda: frozen(mlp(), "0.weight"), X3),
    Case("frozen bias only", lambda: frozen(mlp(), "0.bias", "2.bias"), X),
    Case("frozen bias only 4-D", lambda: frozen(mlp(), "0.bias"), randn(2, 3, 4, WIDTH)),
    Case(
        "tuple outputs", applied(lambda m, x: (m.a(x), m.b(x), x > 0), a=linear(), b=linear(4)), X
    ),
    Case(
        "an output without parameters",
        applied(lambda m, x: (m.a(x), x.sin(), x.detach()), a=linear()),
        X,
    ),
    Case(
        "an output twice, and the input", applied(lambda m, x: (y := m.a(x), y, x), a=linear()), X
    ),
    Case(
        "an output gets no gradient",
        applied(lambda m, x: (m.a(x), m.b(x)), a=linear(), b=linear(4)),
        X,
        seeds_of=lambda y: None if y.shape[-1] == 4 else y.cos(),
        places=(MIDDLE,),
    ),
    Case("no output gets a gradient", mlp, X, seeds_of=lambda _: None, places=(MIDDLE,)),
    Case("experts, some without rows", Experts, X),
    Case("two layers, one weight", TwoLayersOneWeight, X3),
    Case("an unused layer", applied(lambda m, x: m.a(x), a=linear(), b=linear()), X),
    Case(
        "two inputs",
        applied(lambda m, x, y: m.a(x) * m.b(y), a=linear(), b=linear()),
        lambda _: (torch.randn(6, WIDTH), torch.randn(6, WIDTH)),
    ),
    Case(
        "an unused input",
        applied(lambda m, x, y: m.a(x), a=linear()),
        lambda _: (torch.randn(6, WIDTH), torch.randn(3)),
    ),
    Case(
        "chunk, a * sin(b)",
        applied(chunked, a=linear()),
        X3,
    ),
    Case("linear(input=x)", applied(lambda m, x: m.a(input=x), a=linear()), X3),
    Case("linear.forward(x)", applied(lambda m, x: m.a.forward(x), a=linear()), X),
    Case(
        "nn.Linear.forward(linear, x)",
        applied(lambda m, x: nn.Linear.forward(m.a, x), a=linear()),
        X,
    ),
    Case("weight_norm", lambda: parametrizations.weight_norm(nn.Linear(WIDTH, 4)), X),
    Case("spectral_norm", lambda: parametrizations.spectral_norm(nn.Linear(WIDTH, 4)), X),
    Case("spectral_norm by hooks", lambda: nn.utils.spectral_norm(nn.Linear(WIDTH, 4)), X),
    Case("parametrized weight", lambda: parametrized("weight"), X3),
    Case("parametrized bias", lambda: parametrized("bias"), X3),
    Case(
        "LazyLinear, materialised", lambda: materialised(nn.LazyLinear(4), torch.ones(2, WIDTH)), X
    ),
    Case(
        "subclass of Linear", lambda: nn.Sequential(MyLinear(WIDTH, WIDTH), nn.Linear(WIDTH, 2)), X
    ),
    Case("no_grad inside", applied(lambda m, x: m.a(x) + without_grad(m.a, x), a=linear()), X),
    Case("detached inside", applied(lambda m, x: m.a(x) + m.a(x.cos()).detach(), a=linear()), X),
    Case(
        "parameters beside layers", lambda: nn.Sequential(Scale(), nn.Linear(WIDTH, 3), Scale()), X3
    ),
    Case("a gradient in another layout", with_transposed_scale, X),
]


KNOWN = [*BLOCKS, *SHAPES, *USES]
