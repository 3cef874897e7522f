"""Cases drawn with few choices: sizes by themselves, graphs and event orders as one seed each."""

import random
from collections.abc import Sequence

from hypothesis import strategies as st

from rrfp_async.hints import HINTS, HintOrder, RankedHint
from rrfp_async.ids import TaskId
from tests.core.case import Case, Step

Edges = tuple[tuple[int, int], ...]
Graph = tuple[int, Edges]
"""How many stages, and the edges between them."""

MOST_STAGES = 12
SEEDS = st.integers(0, 2**32 - 1)


class Shuffled(RankedHint):
    """Ranks a step's tasks by a permutation drawn from a seed, another one on each rank."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        self._seed = seed
        self._places: dict[TaskId, int] = {}

    def __repr__(self) -> str:
        return f"Shuffled({self._seed})"

    def begin_step(self, tasks: Sequence[TaskId]) -> None:
        """Draw the permutation of this rank and step size."""
        drawn = list(tasks)
        random.Random(f"{self._seed}/{drawn[0].stage}").shuffle(drawn)
        self._places = {task: place for place, task in enumerate(drawn)}
        super().begin_step(tasks)

    def rank(self, task: TaskId) -> int:
        """The place in the permutation."""
        return self._places[task]


CHOOSY = frozenset({"interleaved", "interleaved-zb", "zbv", "dualpipev"})
"""The hints that refuse one stage a rank, or some numbers of microbatches."""
NAMED: st.SearchStrategy[str | HintOrder] = st.sampled_from(sorted(set(HINTS) - CHOOSY))
RULES: st.SearchStrategy[str | HintOrder] = st.sampled_from(
    sorted(name for name, hint in HINTS.items() if isinstance(hint.make(), HintOrder))
)
SHUFFLED: st.SearchStrategy[str | HintOrder] = st.builds(Shuffled, SEEDS)


def chain_edges(first: int, length: int) -> list[tuple[int, int]]:
    """A chain of `length` stages that begins with stage `first`."""
    return [(stage, stage + 1) for stage in range(first, first + length - 1)]


@st.composite
def chains(draw: st.DrawFn) -> Graph:
    """The default graph."""
    stages = draw(st.integers(1, MOST_STAGES))
    return stages, tuple(chain_edges(0, stages))


@st.composite
def two_encoders(draw: st.DrawFn) -> Graph:
    """Two encoder chains that join into one language chain, with a few random skips."""
    first = draw(st.integers(1, 4))
    second = draw(st.integers(1, 4))
    language = draw(st.integers(1, MOST_STAGES - 8))
    join = first + second
    edges = chain_edges(0, first) + chain_edges(first, second) + chain_edges(join, language)
    edges += [(first - 1, join), (join - 1, join)]
    return join + language, with_skips(edges, join + language, draw(st.integers(0, 4)), draw(SEEDS))


def with_skips(edges: list[tuple[int, int]], stages: int, most: int, seed: int) -> Edges:
    """`edges` and at most `most` more that run upwards, all in a random order."""
    drawn = random.Random(seed)
    most = most if stages > 1 else 0
    skips = {(s, t) for s, t in (sorted(drawn.sample(range(stages), 2)) for _ in range(most))}
    listed = sorted(skips | set(edges))
    drawn.shuffle(listed)
    return tuple(listed)


@st.composite
def any_graphs(draw: st.DrawFn) -> Graph:
    """Every stage but the last leads to one or more higher ones, whichever they are."""
    stages = draw(st.integers(2, MOST_STAGES))
    drawn = random.Random(draw(SEEDS))
    edges = [(stage, drawn.randrange(stage + 1, stages)) for stage in range(stages - 1)]
    return stages, with_skips(edges, stages, draw(st.integers(0, stages)), drawn.getrandbits(32))


GRAPHS = chains() | two_encoders() | any_graphs()
LIMITS = st.integers(1, 5) | st.integers(1, 40)
TRAINING = st.builds(Step, st.integers(1, 24), st.just(True))
EVALUATION = st.builds(Step, st.integers(1, 24), st.just(False))


def split_of(stages: int, share: float, seed: int) -> tuple[int, ...]:
    """About that share of the stages, drawn from a seed: their backward is split."""
    drawn = random.Random(seed)
    return tuple(stage for stage in range(stages) if drawn.random() < share)


@st.composite
def cases(
    draw: st.DrawFn,
    *,
    graphs: st.SearchStrategy[Graph] = GRAPHS,
    hints: st.SearchStrategy[str | HintOrder] = NAMED | SHUFFLED,
    limits: st.SearchStrategy[int] = LIMITS,
    deterministic: st.SearchStrategy[bool] = st.booleans(),  # noqa: B008 - strategies are values
    first: st.SearchStrategy[Step] = TRAINING,
    second: st.SearchStrategy[Step] = TRAINING | EVALUATION,
    splits: st.SearchStrategy[float] = st.sampled_from([0.0, 0.5, 1.0]),  # noqa: B008
) -> Case:
    """A case of two steps whose parts come from the given strategies."""
    stages, edges = draw(graphs)
    return Case(
        edges=edges,
        limits=tuple(draw(st.lists(limits, min_size=stages, max_size=stages))),
        hint=draw(hints),
        deterministic=draw(deterministic),
        steps=(draw(first), draw(second)),
        seed=draw(SEEDS),
        split=split_of(stages, draw(splits), draw(SEEDS)),
        newest_first=draw(st.sampled_from([0.0, 0.5, 0.9])),
    )


def placed(kind: str, ranks: int, chunks: int, seed: int) -> str | tuple[int, ...]:
    """A placement by name, or drawn: every rank as often, the first stage on the first rank."""
    if kind != "random":
        return kind
    listed = list(range(ranks)) * chunks
    random.Random(seed).shuffle(listed)
    first = listed.index(0)
    listed[0], listed[first] = listed[first], listed[0]
    return tuple(listed)


@st.composite
def chunked_cases(
    draw: st.DrawFn,
    *,
    hints: st.SearchStrategy[str | HintOrder] = RULES | SHUFFLED,
    limits: st.SearchStrategy[int] = LIMITS,
    second: st.SearchStrategy[Step] = TRAINING | EVALUATION,
) -> Case:
    """Several stages a rank, in a chain or any graph, in a loop, a V or anywhere."""
    ranks, chunks = draw(st.integers(1, 5)), draw(st.integers(1, 4))
    stages = ranks * chunks
    edges = tuple(chain_edges(0, stages))
    if draw(st.booleans()):
        edges = with_skips(list(edges), stages, draw(st.integers(0, stages)), draw(SEEDS))
    return Case(
        edges=edges,
        limits=tuple(draw(st.lists(limits, min_size=ranks, max_size=ranks))),
        hint=draw(hints),
        deterministic=draw(st.booleans()),
        steps=(draw(TRAINING), draw(second)),
        seed=draw(SEEDS),
        newest_first=draw(st.sampled_from([0.0, 0.5, 0.9])),
        split=split_of(stages, draw(st.sampled_from([0.0, 0.5, 1.0])), draw(SEEDS)),
        chunks=chunks,
        placement=placed(
            draw(st.sampled_from(["loop", "v", "random"])), ranks, chunks, draw(SEEDS)
        ),
    )
