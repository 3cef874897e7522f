"""One pipeline and one order of events. Its repr is all that a replay needs."""

from dataclasses import dataclass

from rrfp_async.hints import HintOrder
from rrfp_async.ids import Edge
from rrfp_async.topology import Topology


@dataclass(frozen=True, slots=True)
class Step:
    """The size and mode of one step."""

    microbatches: int
    backward: bool = True


@dataclass(frozen=True, slots=True)
class Case:
    """What `pipeline_model.run` runs; a failure is replayed by `run(Case(...))`, as printed.

    Attributes:
        edges: The stage graph as pairs, such as `((0, 1), (1, 2))`.
        limits: One limit for each rank; as many ranks as limits.
        hint: A name or an order; every rank gets its own copy.
        steps: The steps, run one after the other on the same objects.
        seed: Decides which event happens next.
        chunks: Stages per rank.
        placement: Of the stages on the ranks, as a Topology takes it.
        split: The stages whose backward is I and W.
        newest_first: The share of events that overtake every earlier one; the rest are uniform.
    """

    edges: tuple[tuple[int, int], ...]
    limits: tuple[int, ...]
    hint: str | HintOrder
    deterministic: bool
    steps: tuple[Step, ...]
    seed: int = 0
    newest_first: float = 0.0
    split: tuple[int, ...] = ()
    chunks: int = 1
    placement: str | tuple[int, ...] = "loop"

    @property
    def topology(self) -> Topology:
        """The graph as the core takes it."""
        edges = tuple(Edge(*pair) for pair in self.edges)
        return Topology(len(self.limits), edges, self.chunks, self.placement)
