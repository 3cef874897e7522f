"""Cases for real ranks, by how many they need and what they are called.

Their tensors are larger than what travels behind a header, where the name says so; else they are
sent both ways, since delayed worlds transfer everything.
"""

from collections.abc import Callable
from dataclasses import replace

import torch

from tests.parity.axes import AXES
from tests.parity.batches import Batches, Shape, shapes_of
from tests.parity.cases import case_of, momentum
from tests.parity.graphs import encoders
from tests.parity.losses import CrossEntropy
from tests.parity.models import Attention, Build, language_model
from tests.runtime.reference import Case

TOKENS = Shape(8200, 8)
"""So many that a bool for each is more than what travels behind a header: 64 KiB an edge."""

MANY_WORDS = 2100
"""So many that an embedding of 8 features is more than that, too."""


def row_case(**values: object) -> Case:
    """The case of a row of the matrix, all axes not named at their first value."""
    row = {axis: first for axis, (first, *_) in AXES.items()}
    return case_of({**row, "microbatches": 5, "steps": "momentum", **values})


def large(hint: str) -> Case:
    """Two microbatches whose hidden states, int64 tokens and bool mask are each large."""
    build = Build(between="tree")
    torch.manual_seed(3)
    step = Batches(arguments="keywords").step([TOKENS] * 2)
    stages = language_model(build)
    return Case(stages, [step], 2, CrossEntropy(), make_optimizer=momentum, options={"hint": hint})


def tied(hint: str, *, words: int = 11, update: tuple[bool, ...] = (True, True, True)) -> Case:
    """Three stages; the first's embedding is the last's output weight."""
    build = Build(between="tuple", words=words)
    torch.manual_seed(4)
    batches = Batches(words=words)
    steps = [
        batches.step(shapes_of("odd", 4, number), update=each) for number, each in enumerate(update)
    ]
    stages = language_model(build, middle=(Attention,))
    with torch.no_grad():
        stages[2].body.out.weight.copy_(stages[0].body.embed.weight)
    return Case(
        stages,
        steps,
        4,
        CrossEntropy(),
        make_optimizer=momentum,
        options={"hint": hint},
        tied=({0: "body.embed.weight", 2: "body.out.weight"},),
    )


CASES: dict[int, dict[str, Callable[[], Case]]] = {
    4: {
        "trees, split, lengths": lambda: row_case(hint="bfw", between="tree", shapes="lengths"),
        "keywords, hooked, zb-h1 as it stands": lambda: row_case(
            hint="zb-h1!", arguments="keywords", between="tuple", whole="a hooked stage"
        ),
        "frozen first stages, trees": lambda: row_case(
            hint="auto", frozen="first", between="tree", shapes="odd", steps="adamw"
        ),
        "chunk specs, tokens, recomputed, autocast": lambda: row_case(
            hint="1f1b",
            arguments="chunk specs",
            loss="tokens",
            recompute="checkpoint",
            dtype="autocast",
            shapes="odd",
        ),
        "two encoders": lambda: encoders("bf", shapes="lengths"),
        "two encoders, split, one frozen": lambda: encoders("bfw", shapes="odd", frozen=(1,)),
        "large trees": lambda: large("bf"),
        "large trees, split": lambda: large("bfw"),
    },
    3: {
        "tied": lambda: tied("bf"),
        "tied, split, accumulated": lambda: tied("bfw", update=(False, True, True)),
        "large tied": lambda: tied("auto", words=MANY_WORDS),
    },
    2: {
        "v, zbv, trees, tied": lambda: row_case(
            hint="zbv!", placement="v", between="tree", tied="embedding", steps="accumulated"
        ),
        "loop, interleaved, bfloat16, sum": lambda: row_case(
            hint="interleaved", placement="loop", microbatches=4, dtype="bfloat16", loss="sum"
        ),
        "large trees in a loop": lambda: replace(large("bfw"), chunks=2),
    },
}
"""By number of ranks."""
