"""The stage graph: a chain by default, any graph that flows upwards to the last stage."""

import pytest

from rrfp_async.ids import Edge, Link
from rrfp_async.topology import Topology

JOINED = (Edge(0, 1), Edge(1, 3), Edge(2, 3), Edge(3, 4), Edge(0, 4))


def test_without_edges_the_stages_are_a_chain() -> None:
    """A chain is the default, and the same value as a chain spelled out."""
    chain = Topology(3)
    assert chain.graph == (Edge(0, 1), Edge(1, 2))
    assert chain == Topology(3, (Edge(0, 1), Edge(1, 2)))
    assert [chain.is_source(stage) for stage in range(3)] == [True, False, False]
    assert (chain.num_stages, chain.world_size, chain.last_stage, chain.chunks) == (3, 3, 2, 1)


def test_one_stage_has_no_edges() -> None:
    """A pipeline of one rank is first and last stage at once."""
    single = Topology(1)
    assert single.graph == ()
    assert single.is_source(0)
    assert single.last_stage == 0


def test_edges_of_a_stage_keep_the_order_they_were_given_in() -> None:
    """In-edges are the order of arguments, out-edges the order in which gradients are summed."""
    graph = Topology(5, JOINED)
    assert graph.in_edges(3) == (Edge(1, 3), Edge(2, 3))
    assert graph.in_edges(4) == (Edge(3, 4), Edge(0, 4))
    assert graph.out_edges(0) == (Edge(0, 1), Edge(0, 4))
    turned = Topology(5, tuple(reversed(JOINED)))
    assert turned.in_edges(4) == (Edge(0, 4), Edge(3, 4))


def test_several_stages_may_take_inputs() -> None:
    """Every stage without an in-edge is a source: here both encoders."""
    graph = Topology(5, JOINED)
    assert [stage for stage in range(5) if graph.is_source(stage)] == [0, 2]


def test_every_rank_owns_the_stage_of_its_number() -> None:
    """Placement and its inverse agree."""
    graph = Topology(5, JOINED)
    assert [graph.stages_of(graph.rank_of(stage)) for stage in range(5)] == [
        (stage,) for stage in range(5)
    ]


def test_gradients_travel_against_the_edge_on_a_link_of_their_own() -> None:
    """The two directions of an edge never share a link."""
    graph = Topology(5, JOINED)
    assert graph.activation_link(Edge(1, 3)) == Link(1, 3)
    assert graph.gradient_link(Edge(1, 3)) == Link(3, 1)


@pytest.mark.parametrize("pp", [0, -2, 2.0, "2", True, None])
def test_a_size_that_is_no_count_is_refused(pp: object) -> None:
    """The error names the value and the rule."""
    with pytest.raises(ValueError, match="int of at least 1") as caught:
        Topology(pp)  # type: ignore[arg-type]
    assert f"pp={pp!r}" in str(caught.value)


@pytest.mark.parametrize(
    "wrong", [Edge(1, 0), Edge(1, 1), Edge(2, 3), Edge(-1, 2)], ids=["back", "self", "out", "minus"]
)
def test_an_edge_must_run_upwards_inside_the_graph(wrong: Edge) -> None:
    """The error names the edge, the stages there are, and the remedy."""
    with pytest.raises(ValueError, match="renumber the stages") as caught:
        Topology(3, (Edge(0, 1), Edge(1, 2), wrong))
    assert str(wrong) in str(caught.value)
    assert "0..2" in str(caught.value)


def test_an_edge_listed_twice_is_refused() -> None:
    """A doubled edge would be waited for twice."""
    with pytest.raises(ValueError, match="list each once"):
        Topology(2, (Edge(0, 1), Edge(0, 1)))


def test_a_stage_that_leads_nowhere_is_refused() -> None:
    """Only the last stage ends the graph; another end would never get a gradient."""
    with pytest.raises(ValueError, match=r"stage 1 has no edge out.*last stage \(2\)"):
        Topology(3, (Edge(0, 2),))


def test_edges_left_empty_are_not_the_default_chain() -> None:
    """An empty tuple is a graph without edges, which only one stage can be."""
    assert Topology(1, ()).graph == ()
    with pytest.raises(ValueError, match="stage 0 has no edge out"):
        Topology(2, ())


def test_edges_given_as_a_list_make_the_same_topology() -> None:
    """Equal and hashable, whatever sequence they came in."""
    assert Topology(2, [Edge(0, 1)]) == Topology(2)
    assert hash(Topology(2, [Edge(0, 1)])) == hash(Topology(2))
