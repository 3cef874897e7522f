"""Several stages a rank: who owns which, what stays on the rank, and what is refused."""

import random
from itertools import pairwise, product

import pytest

from rrfp_async.ids import Edge, Link
from rrfp_async.topology import PLACEMENTS, Topology

SIZES = list(product(range(1, 6), range(1, 5)))
"""Ranks and chunks."""


def shuffled(pp: int, chunks: int, seed: int) -> tuple[int, ...]:
    """A placement in any order that begins on rank 0."""
    listed = list(range(pp)) * chunks
    listed.remove(0)
    random.Random(seed).shuffle(listed)
    return (0, *listed)


def placements(pp: int, chunks: int) -> list[str | tuple[int, ...]]:
    """The named ones and two drawn ones."""
    return [*PLACEMENTS, shuffled(pp, chunks, 1), shuffled(pp, chunks, 2)]


def ranks_of(topology: Topology) -> list[int]:
    return [topology.rank_of(stage) for stage in range(topology.num_stages)]


# -- where stages live -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("pp", "chunks", "ranks"),
    [
        (1, 3, [0, 0, 0]),
        (2, 2, [0, 1, 0, 1]),
        (3, 3, [0, 1, 2, 0, 1, 2, 0, 1, 2]),
        (4, 1, [0, 1, 2, 3]),
    ],
)
def test_a_loop_goes_round_and_round(pp: int, chunks: int, ranks: list[int]) -> None:
    """The default: stage s on rank s % pp."""
    topology = Topology(pp, chunks=chunks)
    assert ranks_of(topology) == ranks
    assert topology == Topology(pp, chunks=chunks, placement="loop")


@pytest.mark.parametrize(
    ("pp", "chunks", "ranks"),
    [
        (1, 3, [0, 0, 0]),
        (2, 2, [0, 1, 1, 0]),
        (3, 3, [0, 1, 2, 2, 1, 0, 0, 1, 2]),
        (3, 4, [0, 1, 2, 2, 1, 0, 0, 1, 2, 2, 1, 0]),
        (4, 1, [0, 1, 2, 3]),
    ],
)
def test_a_v_goes_there_and_back(pp: int, chunks: int, ranks: list[int]) -> None:
    """As ZBV and DualPipeV place two chunks; more go on as they began."""
    assert ranks_of(Topology(pp, chunks=chunks, placement="v")) == ranks


def test_a_listed_placement_is_taken_as_it_stands() -> None:
    """The rank of every stage; a rank's stages are its chunks, lowest first."""
    topology = Topology(3, chunks=2, placement=(0, 2, 1, 1, 0, 2))
    assert ranks_of(topology) == [0, 2, 1, 1, 0, 2]
    assert [topology.stages_of(rank) for rank in range(3)] == [(0, 4), (2, 3), (1, 5)]


@pytest.mark.parametrize(("pp", "chunks"), SIZES)
def test_every_rank_owns_as_many_stages_and_knows_which(pp: int, chunks: int) -> None:
    """`stages_of` is the inverse of `rank_of`, in rising order."""
    for placement in placements(pp, chunks):
        topology = Topology(pp, chunks=chunks, placement=placement)
        assert (topology.num_stages, topology.world_size) == (pp * chunks, pp)
        assert topology.last_stage == pp * chunks - 1
        owned = [topology.stages_of(rank) for rank in range(pp)]
        assert sorted(stage for stages in owned for stage in stages) == list(range(pp * chunks))
        for rank, stages in enumerate(owned):
            assert len(stages) == chunks
            assert list(stages) == sorted(stages)
            assert {topology.rank_of(stage) for stage in stages} == {rank}


def test_the_last_stage_lives_where_the_placement_ends() -> None:
    """Last rank in a loop and an odd V, first rank in an even V."""
    ends = {
        (placement, chunks): Topology(3, chunks=chunks, placement=placement).rank_of(3 * chunks - 1)
        for placement in PLACEMENTS
        for chunks in (1, 2, 3)
    }
    assert {key for key, rank in ends.items() if rank == 0} == {("v", 2)}
    assert set(ends.values()) == {0, 2}


# -- edges and links -------------------------------------------------------------------------------


@pytest.mark.parametrize(("pp", "chunks"), SIZES)
def test_links_join_different_ranks_and_are_listed_once(pp: int, chunks: int) -> None:
    """Both directions of every edge that leaves its rank, none of an edge that does not."""
    for placement in placements(pp, chunks):
        topology = Topology(pp, chunks=chunks, placement=placement)
        expected = set()
        for edge in topology.graph:
            ends = topology.rank_of(edge.source), topology.rank_of(edge.target)
            assert topology.is_local(edge) is (ends[0] == ends[1])
            if ends[0] != ends[1]:
                assert topology.activation_link(edge) == Link(*ends)
                assert topology.gradient_link(edge) == Link(*reversed(ends))
                expected |= {Link(*ends), Link(*reversed(ends))}
        links = topology.links()
        assert len(links) == len(set(links))
        assert set(links) == expected
        assert links == Topology(pp, chunks=chunks, placement=placement).links()


@pytest.mark.parametrize("chunks", [1, 2, 3, 4])
def test_a_v_is_local_at_its_turns_and_a_loop_nowhere(chunks: int) -> None:
    """With several ranks; the stages of a single rank are all neighbours."""
    loop, v = (Topology(3, chunks=chunks, placement=name) for name in PLACEMENTS)
    assert not any(loop.is_local(edge) for edge in loop.graph)
    turns = [edge for edge in v.graph if v.is_local(edge)]
    assert turns == [Edge(3 * chunk - 1, 3 * chunk) for chunk in range(1, chunks)]
    single = Topology(1, chunks=chunks)
    assert all(single.is_local(edge) for edge in single.graph)
    assert single.links() == ()


def test_a_skip_between_stages_of_one_rank_is_local() -> None:
    """Whether an edge is local follows from where its ends live, not from what lies between."""
    skip = Edge(0, 2)
    edges = (Edge(0, 1), Edge(1, 2), skip, Edge(2, 3))
    assert Topology(2, edges, chunks=2).is_local(skip)
    assert not Topology(2, edges, chunks=2, placement="v").is_local(skip)


def test_a_loop_closes_the_ring() -> None:
    """From the last rank back to the first: links that one chunk a rank does not have."""
    assert set(Topology(3, chunks=2).links()) - set(Topology(3).links()) == {Link(2, 0), Link(0, 2)}
    assert set(Topology(3, chunks=2, placement="v").links()) == set(Topology(3).links())


@pytest.mark.parametrize(("pp", "chunks"), SIZES)
def test_depth_counts_stages_not_ranks(pp: int, chunks: int) -> None:
    """In a chain all higher stages follow, wherever they live."""
    for placement in placements(pp, chunks):
        topology = Topology(pp, chunks=chunks, placement=placement)
        assert topology.depth == pp * chunks
        after = [topology.depth_after(stage) for stage in range(pp * chunks)]
        assert after == list(reversed(range(pp * chunks)))


def test_depth_takes_the_longest_way() -> None:
    """A short cut makes no stage less deep; two encoders may be of unequal length."""
    short_cut = (*(Edge(*pair) for pair in pairwise(range(6))), Edge(0, 5))
    assert Topology(3, short_cut, chunks=2).depth_after(0) == 5
    encoders = (Edge(0, 1), Edge(1, 2), Edge(2, 4), Edge(3, 4), Edge(4, 5))
    topology = Topology(3, encoders, chunks=2, placement="v")
    assert [topology.depth_after(stage) for stage in range(6)] == [4, 3, 2, 2, 1, 0]
    assert topology.depth == 5
    assert [stage for stage in range(6) if topology.is_source(stage)] == [0, 3]


# -- what is refused -------------------------------------------------------------------------------


@pytest.mark.parametrize("chunks", [0, -1, 2.0, "2", True, None])
def test_chunks_that_are_no_count_are_refused(chunks: object) -> None:
    """The error names value, rule and remedy."""
    with pytest.raises(ValueError, match="int of at least 1: give the stages per rank") as caught:
        Topology(2, chunks=chunks)  # type: ignore[arg-type]
    assert f"chunks={chunks!r}" in str(caught.value)


@pytest.mark.parametrize(
    "placement",
    ["zigzag", "V", "", None, 3, (), (0, 1), (0, 1, 1, 0, 0), (0, 0, 0, 1), (0, 1, 2, 0)],
)
def test_a_placement_that_is_none_is_refused(placement: object) -> None:
    """The error names the value, the names there are, how often each rank must occur."""
    with pytest.raises(ValueError, match=r"'loop', 'v'.* 4 stages.* 0\.\.1 2 times") as caught:
        Topology(2, chunks=2, placement=placement)  # type: ignore[arg-type]
    assert f"placement={placement!r}" in str(caught.value)


def test_the_first_stage_must_live_on_the_first_rank() -> None:
    """Rank 0 announces the step, from the inputs of stage 0."""
    with pytest.raises(ValueError, match="stage 0 on rank 0"):
        Topology(2, chunks=2, placement=(1, 0, 0, 1))


@pytest.mark.parametrize(
    "placement",
    [
        (0, "1", 1, 0),
        (0, None, 1, 1),
        ({}, 1, 1, 0),
        (False, True, True, False),
        (0.0, 1.0, 1.0, 0.0),
    ],
    ids=["a word", "None", "a dict", "bools", "floats"],
)
def test_a_placement_of_anything_but_ranks_is_refused(placement: object) -> None:
    """As a size that is no int: with the same ValueError, whatever the entries are."""
    with pytest.raises(ValueError, match="placement=") as caught:
        Topology(2, chunks=2, placement=placement)  # type: ignore[arg-type]
    assert "'loop', 'v'" in str(caught.value)


def test_a_placement_given_as_a_list_makes_the_same_topology() -> None:
    """Equal and hashable, as edges given as a list are."""
    listed = Topology(2, chunks=2, placement=[0, 1, 1, 0])  # type: ignore[arg-type]
    assert listed == Topology(2, chunks=2, placement=(0, 1, 1, 0))
    assert hash(listed) == hash(Topology(2, chunks=2, placement=(0, 1, 1, 0)))


def test_edges_must_lie_within_all_chunks() -> None:
    """The range of stages counts those of every chunk."""
    Topology(2, (Edge(0, 1), Edge(1, 2), Edge(2, 3)), chunks=2)
    with pytest.raises(ValueError, match=r"4 stages 0\.\.3"):
        Topology(2, (Edge(0, 1), Edge(1, 2), Edge(2, 3), Edge(3, 4)), chunks=2)
    with pytest.raises(ValueError, match=r"stage 2 has no edge out.*last stage \(3\)"):
        Topology(2, (Edge(0, 1), Edge(1, 3)), chunks=2)
