"""Places among pp x dp x tp, as torch's DeviceMesh numbers them: tp fastest."""

import pytest

from rrfp_async.grid import (
    Column,
    Coordinates,
    coordinates,
    counted_ranks,
    dp_group,
    rank_at,
    tp_group,
)
from rrfp_async.ids import Edge, Link
from rrfp_async.topology import Topology

GRID = Topology(2, dp=3, tp=2)


def test_every_rank_has_one_place_and_every_place_one_rank() -> None:
    """Counted with pp slowest and tp fastest."""
    places = [coordinates(GRID, rank) for rank in range(12)]
    assert places[:4] == [
        Coordinates(0, 0, 0),
        Coordinates(0, 0, 1),
        Coordinates(0, 1, 0),
        Coordinates(0, 1, 1),
    ]
    assert places[6] == Coordinates(1, 0, 0)
    assert [rank_at(GRID, place) for place in places] == list(range(12))
    with pytest.raises(ValueError, match="rank 12 is none of the 12 ranks"):
        coordinates(GRID, 12)


def test_groups_hold_the_ranks_that_differ_in_one_coordinate() -> None:
    """Each rank is in its own groups, and in the same ones as its peers."""
    assert dp_group(GRID, 9) == (7, 9, 11)
    assert tp_group(GRID, 9) == (8, 9)
    for rank in range(12):
        for group in (dp_group, tp_group):
            assert rank in group(GRID, rank)
            assert {group(GRID, peer) for peer in group(GRID, rank)} == {group(GRID, rank)}


def test_one_rank_for_each_place_in_the_pipeline_counts() -> None:
    """The first of its replicas and shards."""
    assert counted_ranks(GRID) == {0, 6}
    assert counted_ranks(Topology(3)) == {0, 1, 2}


def test_tensors_travel_within_a_column() -> None:
    """The same links as in a pipeline alone, between the column's ranks."""
    column = Column.of(GRID, 9)
    assert column.activation_link(Edge(0, 1)) == Link(3, 9)
    assert column.gradient_link(Edge(0, 1)) == Link(9, 3)
    assert column.links() == (Link(3, 9), Link(9, 3))
