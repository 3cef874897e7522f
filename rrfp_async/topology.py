"""Which stages exist, how data flows between them, and which rank owns each.

Arithmetic only: no process group, no device, no module is known here.
"""

from collections.abc import Callable, Mapping, Sequence
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


PLACEMENTS = ("loop", "v")
"""`loop`: stage s on rank s % pp. `v`: up the ranks with one chunk, down with the next."""


def _placed(placement: object, pp: int, chunks: int) -> tuple[int, ...]:
    """The rank of every stage."""
    stages = range(pp * chunks)
    if placement == "loop":
        return tuple(stage % pp for stage in stages)
    if placement == "v":
        there_and_back = [*range(pp), *reversed(range(pp))]
        return tuple(there_and_back[stage % (2 * pp)] for stage in stages)
    listed = tuple(placement) if isinstance(placement, tuple | list) else ()
    ranks = all(type(rank) is int for rank in listed)
    if not ranks or sorted(listed) != sorted([*range(pp)] * chunks) or listed[0] != 0:
        raise ValueError(
            f"placement={placement!r} must be one of {', '.join(map(repr, PLACEMENTS))}, or the "
            f"rank of each of the {pp * chunks} stages, each of the ranks 0..{pp - 1} {chunks} "
            f"times and stage 0 on rank 0"
        )
    return listed


@dataclass(frozen=True, slots=True)
class TiedParameter:
    """One parameter of the model that several stages hold a copy of.

    Attributes:
        owners: Each stage that has it, ascending, and its name in that stage's module.
    """

    owners: tuple[tuple[int, str], ...]

    @property
    def home(self) -> int:
        """The stage where the gradients of all copies are summed: the lowest."""
        return self.owners[0][0]

    def __str__(self) -> str:
        return " = ".join(f"{stage}:{name}" for stage, name in self.owners)


def _tied(given: object, stages: int) -> tuple[TiedParameter, ...]:
    listed = tuple(given) if isinstance(given, tuple | list) else (given,)
    tied = []
    for entry in listed:
        owners = entry.owners if isinstance(entry, TiedParameter) else None
        if isinstance(entry, Mapping):
            owners = tuple(sorted(entry.items()))
        if (
            not owners
            or len(owners) < 2
            or not all(type(s) is int and 0 <= s < stages and type(n) is str for s, n in owners)
        ):
            raise ValueError(
                f"tied={entry!r} must give at least two of the stages 0..{stages - 1}, each with "
                f"the parameter's name in its module, such as {{0: 'embedding.weight', "
                f"{stages - 1}: 'head.weight'}}"
            )
        tied.append(TiedParameter(owners))
    held = [owner for entry in tied for owner in entry.owners]
    twice = next((owner for owner in held if held.count(owner) > 1), None)
    if twice is not None:
        raise ValueError(
            f"tied lists parameter {twice[1]!r} of stage {twice[0]} twice: list all copies of a "
            f"parameter together"
        )
    return tuple(tied)


@dataclass(frozen=True, slots=True)
class Topology:
    """A pipeline of `pp` ranks with `chunks` stages each; a chain unless `edges` say otherwise.

    With `dp` replicas of it, each of whose stages is computed by `tp` ranks together, there are
    pp x dp x tp ranks (grid.py). What follows speaks of one pipeline: a "rank" in it is a pp rank.

    Stages are numbered so that data flows from lower to higher numbers. Several stages may take
    inputs (two encoders, say), exactly one ends the graph: the last, where the loss is.

    Attributes:
        pp: Pipeline-parallel size, the number of ranks.
        edges: The stage graph. None stands for the chain 0 -> 1 -> ... and is replaced by it.
        chunks: Model chunks (stages) per rank.
        placement: `"loop"`, `"v"` (as ZBV and DualPipeV place theirs), or the rank of every stage.
        tied: Parameters that stages share, each as a mapping from stage to the parameter's name in
            that stage's module: `[{0: "embedding.weight", 3: "head.weight"}]`. Their gradients
            are summed over the owners before an update, so equal copies stay equal.
        tp: Tensor-parallel size: ranks that compute a stage together.
        dp: Data-parallel size: replicas of the pipeline.

    Raises:
        ValueError: If `pp` or `chunks` is below 1, the placement is not one, an edge leaves the
            stages, runs backwards or is listed twice, or a stage other than the last leads nowhere.
    """

    pp: int
    edges: tuple[Edge, ...] | None = None
    chunks: int = 1
    placement: str | Sequence[int] = "loop"
    tied: Sequence[TiedParameter | Mapping[int, str]] = ()
    tp: int = field(default=1, kw_only=True)
    dp: int = field(default=1, kw_only=True)
    _ranks: tuple[int, ...] = field(init=False, repr=False, compare=False)
    _stages: dict[int, tuple[int, ...]] = field(init=False, repr=False, compare=False)
    _in: dict[int, tuple[Edge, ...]] = field(init=False, repr=False, compare=False)
    _out: dict[int, tuple[Edge, ...]] = field(init=False, repr=False, compare=False)
    _after: dict[int, int] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        for name in ("pp", "tp", "dp"):
            size = getattr(self, name)
            if type(size) is not int or size < 1:
                raise ValueError(
                    f"{name}={size!r} must be an int of at least 1: give the rank count"
                )
        if type(self.chunks) is not int or self.chunks < 1:
            raise ValueError(
                f"chunks={self.chunks!r} must be an int of at least 1: give the stages per rank"
            )
        self._set("_ranks", _placed(self.placement, self.pp, self.chunks))
        if not isinstance(self.placement, str):
            self._set("placement", self._ranks)
        owned: dict[int, list[int]] = {rank: [] for rank in range(self.pp)}
        for stage, rank in enumerate(self._ranks):
            owned[rank].append(stage)
        self._set("_stages", {rank: tuple(stages) for rank, stages in owned.items()})
        self._set("edges", _chain(self.num_stages) if self.edges is None else tuple(self.edges))
        self._check_range()
        self._set("_in", _grouped(self.graph, self.num_stages, lambda edge: edge.target))
        self._set("_out", _grouped(self.graph, self.num_stages, lambda edge: edge.source))
        self._check_ends()
        self._set("_after", self._count_after())
        self._set("tied", _tied(self.tied, self.num_stages))

    def _set(self, name: str, value: object) -> None:
        object.__setattr__(self, name, value)

    def _check_range(self) -> None:
        stages = self.num_stages
        for edge in self.graph:
            if not 0 <= edge.source < edge.target < stages:
                raise ValueError(
                    f"edge {edge} must run from a lower to a higher of the {stages} stages "
                    f"0..{stages - 1}: renumber the stages in the order data flows"
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
        for stage in reversed(range(self.num_stages)):
            after[stage] = max((after[e.target] + 1 for e in self._out[stage]), default=0)
        return after

    @property
    def graph(self) -> tuple[Edge, ...]:
        """Every edge, never None."""
        return self.edges or ()

    @property
    def world_size(self) -> int:
        """The number of ranks of all replicas."""
        return self.pp * self.dp * self.tp

    @property
    def num_stages(self) -> int:
        """The number of stages over all ranks."""
        return self.pp * self.chunks

    @property
    def last_stage(self) -> int:
        """The stage that computes the loss."""
        return self.num_stages - 1

    def rank_of(self, stage: int) -> int:
        """The rank that owns `stage`."""
        return self._ranks[stage]

    def stages_of(self, rank: int) -> tuple[int, ...]:
        """The stages that `rank` owns, lowest first: its chunks 0, 1, ..."""
        return self._stages[rank]

    def is_local(self, edge: Edge) -> bool:
        """Whether both ends of `edge` live on one rank."""
        return self._ranks[edge.source] == self._ranks[edge.target]

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

    @property
    def tied_parameters(self) -> tuple[TiedParameter, ...]:
        """`tied`, as it was understood."""
        return self.tied  # type: ignore[return-value] # checked and replaced at the start

    def tied_edges(self) -> tuple[Edge, ...]:
        """From each rank that holds a copy of a tied parameter to its home: lowest stages there."""
        edges = []
        for tied in self.tied_parameters:
            lowest: dict[int, int] = {}
            for stage, _ in tied.owners:
                lowest.setdefault(self.rank_of(stage), stage)
            edges += [Edge(stage, tied.home) for stage in lowest.values() if stage != tied.home]
        return tuple(dict.fromkeys(edges))

    def links(self) -> tuple[Link, ...]:
        """Every link between different ranks, in an order that is the same on every rank."""
        edges = (*self.graph, *self.tied_edges())
        both = [self.activation_link(edge) for edge in edges]
        both += [self.gradient_link(edge) for edge in edges]
        return tuple(dict.fromkeys(link for link in both if link.source != link.target))

    def activation_link(self, edge: Edge) -> Link:
        """The link that the activations of `edge` travel on."""
        return Link(self.rank_of(edge.source), self.rank_of(edge.target))

    def gradient_link(self, edge: Edge) -> Link:
        """The link that the gradients of `edge` travel on."""
        return Link(self.rank_of(edge.target), self.rank_of(edge.source))
