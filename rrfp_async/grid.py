"""Where each rank stands among pp x dp x tp: its coordinates, its pipeline, its groups.

Ranks are numbered as torch's DeviceMesh of the dimensions ("pp", "dp", "tp") numbers them: tp
fastest. All ranks of one (dp, tp) form a *column*, a pipeline of its own: tensors travel within it.
Arithmetic only.
"""

from dataclasses import dataclass

from rrfp_async.ids import Edge, Link
from rrfp_async.topology import Topology


@dataclass(frozen=True, slots=True)
class Coordinates:
    """A rank's place in each dimension."""

    pp: int
    dp: int
    tp: int


@dataclass(frozen=True, slots=True)
class Column:
    """The pipeline that a rank is part of.

    Attributes:
        topology: All pipelines'.
        dp: Which replica it is.
        tp: Which of the ranks that compute a stage together are in it.
    """

    topology: Topology
    dp: int = 0
    tp: int = 0

    @classmethod
    def of(cls, topology: Topology, rank: int) -> "Column":
        """The column of `rank`."""
        place = coordinates(topology, rank)
        return cls(topology, place.dp, place.tp)

    def rank(self, pp: int) -> int:
        """The rank with that place in the pipeline."""
        return rank_at(self.topology, Coordinates(pp, self.dp, self.tp))

    def rank_of(self, stage: int) -> int:
        """The rank that owns `stage` here."""
        return self.rank(self.topology.rank_of(stage))

    def activation_link(self, edge: Edge) -> Link:
        """The link that the activations of `edge` travel on."""
        return Link(self.rank_of(edge.source), self.rank_of(edge.target))

    def gradient_link(self, edge: Edge) -> Link:
        """The link that the gradients of `edge` travel on."""
        return Link(self.rank_of(edge.target), self.rank_of(edge.source))

    def links(self) -> tuple[Link, ...]:
        """Every link between different ranks of the column, in an order that is the same on all."""
        links = self.topology.links()
        return tuple(Link(self.rank(link.source), self.rank(link.target)) for link in links)


def coordinates(topology: Topology, rank: int) -> Coordinates:
    """Where `rank` stands.

    Raises:
        ValueError: If there is no such rank.
    """
    if not 0 <= rank < topology.world_size:
        raise ValueError(f"rank {rank} is none of the {topology.world_size} ranks of {topology}")
    pp, rest = divmod(rank, topology.dp * topology.tp)
    dp, tp = divmod(rest, topology.tp)
    return Coordinates(pp, dp, tp)


def rank_at(topology: Topology, place: Coordinates) -> int:
    """The rank that stands there."""
    return (place.pp * topology.dp + place.dp) * topology.tp + place.tp


def counted_ranks(topology: Topology) -> frozenset[int]:
    """One rank for each place in the pipeline: what is equal on its copies counts once."""
    return frozenset(rank_at(topology, Coordinates(pp, 0, 0)) for pp in range(topology.pp))


def tp_group(topology: Topology, rank: int) -> tuple[int, ...]:
    """The ranks that compute the stages of `rank` together, itself among them; the first leads."""
    here = coordinates(topology, rank)
    places = (Coordinates(here.pp, here.dp, tp) for tp in range(topology.tp))
    return tuple(rank_at(topology, place) for place in places)


def dp_group(topology: Topology, rank: int) -> tuple[int, ...]:
    """The ranks that hold copies of the same parameters as `rank`, itself among them."""
    here = coordinates(topology, rank)
    places = (Coordinates(here.pp, dp, here.tp) for dp in range(topology.dp))
    return tuple(rank_at(topology, place) for place in places)
