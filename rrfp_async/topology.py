"""Which stages exist, how data flows between them, and which rank owns each.

Arithmetic only: no process group, no device, no module is known here.
"""

from collections.abc import Callable
from dataclasses import dataclass, field

from rrfp_async.ids import Edge, Link


def _chain(stages: int) -> tuple[Edge, ...]:
    return tuple(Edge(stage, stage + 1) for stage in range(stages - 1))


def _grouped(
    edges: tuple[Edge, ...], stages: int, stage_of: Callable[[Edge], int]
) -> dict[int, tuple[Edge, ...]]:
    groups: dict[int, list[Edge]] = {stage: [] for stage in range(stages)}
    for edge in edges:
        groups[stage_of(edge)].append(edge)
    return {stage: tuple(group) for stage, group in groups.items()}


@dataclass(frozen=True, slots=True)
class Topology:
    """A pipeline of `pp` ranks with one stage each; a chain unless `edges` say otherwise.

    Stages are numbered so that data flows from lower to higher numbers; stage s lives on rank s.
    Several stages may take inputs (two encoders, say), exactly one ends the graph: the last,
    where the loss is.

    Attributes:
        pp: Pipeline-parallel size, the number of ranks.
        edges: The stage graph. None stands for the chain 0 -> 1 -> ... and is replaced by it.

    Raises:
        ValueError: If `pp` is below 1, an edge leaves the stages, runs backwards or is listed
            twice, or a stage other than the last leads nowhere.
    """

    pp: int
    edges: tuple[Edge, ...] | None = None
    _in: dict[int, tuple[Edge, ...]] = field(init=False, repr=False, compare=False)
    _out: dict[int, tuple[Edge, ...]] = field(init=False, repr=False, compare=False)
    _after: dict[int, int] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        if type(self.pp) is not int or self.pp < 1:
            raise ValueError(f"pp={self.pp!r} must be an int of at least 1: give the rank count")
        if self.edges is None:
            object.__setattr__(self, "edges", _chain(self.pp))
        object.__setattr__(self, "edges", tuple(self.graph))
        self._check_range()
        object.__setattr__(self, "_in", _grouped(self.graph, self.pp, lambda e: e.target))
        object.__setattr__(self, "_out", _grouped(self.graph, self.pp, lambda e: e.source))
        self._check_ends()
        object.__setattr__(self, "_after", self._count_after())

    def _check_range(self) -> None:
        for edge in self.graph:
            if not 0 <= edge.source < edge.target < self.pp:
                raise ValueError(
                    f"edge {edge} must run from a lower to a higher of the {self.pp} stages "
                    f"0..{self.pp - 1}: renumber the stages in the order data flows"
                )
        if len(set(self.graph)) != len(self.graph):
            raise ValueError(f"edges {list(self.graph)} list an edge twice: list each once")

    def _check_ends(self) -> None:
        for stage in range(self.last_stage):
            if not self.out_edges(stage):
                raise ValueError(
                    f"stage {stage} has no edge out, and only the last stage ({self.last_stage}) "
                    f"ends the graph: add an edge from it or leave the stage out"
                )

    def _count_after(self) -> dict[int, int]:
        after: dict[int, int] = {}
        for stage in reversed(range(self.pp)):
            after[stage] = max((after[e.target] + 1 for e in self._out[stage]), default=0)
        return after

    @property
    def graph(self) -> tuple[Edge, ...]:
        """Every edge, never None."""
        return self.edges or ()

    @property
    def world_size(self) -> int:
        """The number of ranks."""
        return self.pp

    @property
    def num_stages(self) -> int:
        """The number of stages over all ranks."""
        return self.pp

    @property
    def last_stage(self) -> int:
        """The stage that computes the loss."""
        return self.num_stages - 1

    @property
    def chunks(self) -> int:
        """Model chunks (stages) per rank."""
        return 1

    def rank_of(self, stage: int) -> int:
        """The rank that owns `stage`."""
        return stage

    def stages_of(self, rank: int) -> tuple[int, ...]:
        """The stages that `rank` owns, lowest first."""
        return (rank,)

    def in_edges(self, stage: int) -> tuple[Edge, ...]:
        """Edges into `stage` in the order their tensors become its arguments."""
        return self._in[stage]

    def out_edges(self, stage: int) -> tuple[Edge, ...]:
        """Edges out of `stage` in the order their gradients are summed."""
        return self._out[stage]

    @property
    def depth(self) -> int:
        """How many stages lie on the longest way through the graph."""
        return max(self._after.values()) + 1

    def depth_after(self, stage: int) -> int:
        """How many stages follow `stage` on the longest way to the last one."""
        return self._after[stage]

    def is_source(self, stage: int) -> bool:
        """Whether `stage` takes the step's inputs."""
        return not self.in_edges(stage)

    def links(self) -> tuple[Link, ...]:
        """Every link between different ranks, in an order that is the same on every rank."""
        both = [self.activation_link(edge) for edge in self.graph]
        both += [self.gradient_link(edge) for edge in self.graph]
        return tuple(dict.fromkeys(link for link in both if link.source != link.target))

    def activation_link(self, edge: Edge) -> Link:
        """The link that the activations of `edge` travel on."""
        return Link(self.rank_of(edge.source), self.rank_of(edge.target))

    def gradient_link(self, edge: Edge) -> Link:
        """The link that the gradients of `edge` travel on."""
        return Link(self.rank_of(edge.target), self.rank_of(edge.source))
