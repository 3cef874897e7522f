"""Schedule objects of torch.distributed.pipelining, built without process groups."""

from types import SimpleNamespace
from typing import Any

from rrfp_async.topology import Topology


def stage(index: int, stages: int, ranks: int) -> Any:
    """As much of a torch stage as a schedule asks for when it is built, without process groups."""
    return SimpleNamespace(
        num_stages=stages,
        group_size=ranks,
        group_rank=0,
        stage_index=index,
        submod=None,
        is_first=index == 0,
        is_last=index == stages - 1,
    )


def built(kind: Any, topology: Topology, microbatches: int) -> Any:
    """A torch schedule of one or several stages per rank, as rank 0 builds it."""
    ranks, stages = topology.world_size, topology.num_stages
    return kind([stage(index, stages, ranks) for index in topology.stages_of(0)], microbatches)
