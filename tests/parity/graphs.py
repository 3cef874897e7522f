"""Cases whose stages are no chain: two encoders before one language stage, and skips."""

from dataclasses import replace

import torch
from torch import Tensor

from rrfp_async import Microbatches
from tests.parity.batches import Batches, shapes_of
from tests.parity.cases import momentum
from tests.parity.losses import CrossEntropy
from tests.parity.models import Attention, Build, Embedding, First, Head, Joining, Mlp, Stage
from tests.runtime.reference import Case, Step

ENCODERS = ((0, 2), (1, 2), (2, 3))
SKIP = ((0, 1), (0, 2), (1, 2), (2, 3))
STEPS = range(2)


def encoders(
    hint: str, *, microbatches: int = 4, shapes: str = "even", frozen: tuple[int, ...] = ()
) -> Case:
    """Tokens on rank 0, patches `(batch, length, width)` on rank 1; rank 2 adds both up."""
    torch.manual_seed(5)
    given = Batches(arguments="keywords")
    steps = [given.step(shapes_of(shapes, microbatches, number)) for number in STEPS]
    case = _joined_case(hint, ENCODERS, microbatches, [_with_patches(step) for step in steps])
    for index in frozen:
        case.stages[index].requires_grad_(False)
    return case


def skipping(hint: str, *, microbatches: int = 4, shapes: str = "even") -> Case:
    """A chain of four whose first stage also feeds the third."""
    torch.manual_seed(6)
    steps = [Batches().step(shapes_of(shapes, microbatches, number)) for number in STEPS]
    return _joined_case(hint, SKIP, microbatches, steps)


def _joined_case(
    hint: str, edges: tuple[tuple[int, int], ...], microbatches: int, steps: list[Step]
) -> Case:
    """Four stages, of which the third takes what comes over two edges."""
    build = Build()
    stages = [First(Embedding, build), Stage(Attention, build), Joining(Mlp, build)]
    return Case(
        [*stages, Stage(Head, build)],
        steps,
        microbatches,
        CrossEntropy(),
        edges=edges,
        make_optimizer=momentum,
        options={"hint": hint},
    )


def _with_patches(step: Step) -> Step:
    """The step with a second encoder's input, of as many samples and places as there are tokens."""
    assert step.parts is not None
    patches = [torch.randn(*part.args[0][0].shape, Build().width) for part in step.parts]
    parts = [
        replace(part, args={**part.args, 1: (own,)})
        for part, own in zip(step.parts, patches, strict=True)
    ]
    equal = isinstance(step.target, Tensor)
    whole = torch.cat(patches) if equal else Microbatches(patches)
    return replace(step, inputs={**step.inputs, 1: (whole,)}, parts=parts)
