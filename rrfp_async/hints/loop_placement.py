"""Listed orders of several chunks a rank placed in a loop: stage s lives on rank s % ranks.

Interleaved 1F1B (Megatron-LM, arXiv 2104.04473) sends a round of microbatches through a chunk, then
the same round through the next one. Its rounds need not be as long as there are ranks, only equally
long, which is torch.distributed.pipelining's reading. The interleaved zero bubble is ZB1P of Zero
Bubble (arXiv 2401.10241) on the same rounds. Looped BFS (Breadth-First Pipeline Parallelism, arXiv
2211.05953) is one round of everything. With one chunk a rank they run as well.

What stands here are the rules. Whether a pipeline is one that they are made for is checked before.
"""

from collections.abc import Iterable, Sequence
from itertools import zip_longest

from rrfp_async.ids import TaskId, TaskKind
from rrfp_async.topology import Topology


def interleaved(topology: Topology, rank: int, microbatches: int) -> list[TaskId]:
    """Forwards until the first backward may come back, then forward and backward in turn.

    Raises:
        ValueError: If the microbatches cannot be parted into equal rounds.
    """
    stages, length = topology.stages_of(rank), _round_length(topology, microbatches)
    forwards = _in_rounds(TaskKind.F, stages, microbatches, length)
    backwards = _in_rounds(TaskKind.B, stages[::-1], microbatches, length)
    lead = (len(stages) - 1) * length + 2 * _ranks_after(topology, rank)
    return forwards[:lead] + _in_turn(forwards[lead:], backwards)


def interleaved_zero_bubble(topology: Topology, rank: int, microbatches: int) -> list[TaskId]:
    """As interleaved, with half the lead and W as many backwards after its I as ranks come before.

    Raises:
        ValueError: If the microbatches cannot be parted into equal rounds.
    """
    stages, length = topology.stages_of(rank), _round_length(topology, microbatches)
    forwards = _in_rounds(TaskKind.F, stages, microbatches, length)
    inputs = _in_rounds(TaskKind.I, stages[::-1], microbatches, length)
    weights = _in_rounds(TaskKind.W, stages[::-1], microbatches, length)
    lead = (len(stages) - 1) * length + _ranks_after(topology, rank)
    return forwards[:lead] + _in_turn(forwards[lead:], inputs, [*[None] * rank, *weights])


def looped_bfs(topology: Topology, rank: int, microbatches: int) -> list[TaskId]:
    """All forwards chunk after chunk, then the same way back.

    Backwards run from the last microbatch to the first, so that executed as it stands the list
    needs free accumulation.
    """
    kinds = (TaskKind.F, TaskKind.B)
    forwards, backwards = (
        _in_rounds(kind, topology.stages_of(rank), microbatches, microbatches) for kind in kinds
    )
    return forwards + backwards[::-1]


def _round_length(topology: Topology, microbatches: int) -> int:
    """How many microbatches pass a chunk before the next chunk has its turn."""
    ranks = topology.pp
    rounds = max(1, microbatches // ranks)
    beyond = microbatches % rounds
    if beyond:
        fewer = microbatches - beyond
        more = min(fewer + rounds, (rounds + 1) * ranks)
        raise ValueError(
            f"microbatches={microbatches} must be a multiple of {rounds}: an interleaved schedule "
            f"on {ranks} ranks runs them in {rounds} (microbatches // ranks) rounds of equal "
            f"length: give {fewer} or {more}"
        )
    return microbatches // rounds


def _ranks_after(topology: Topology, rank: int) -> int:
    return topology.pp - 1 - rank


def _in_rounds(
    kind: TaskKind, stages: Sequence[int], microbatches: int, length: int
) -> list[TaskId]:
    """Round after round, and within a round stage after stage."""
    return [
        TaskId(stage, kind, index)
        for first in range(0, microbatches, length)
        for stage in stages
        for index in range(first, first + length)
    ]


def _in_turn(*columns: Iterable[TaskId | None]) -> list[TaskId]:
    """One task of each column, then the next of each; None and the end of a column are skipped."""
    return [task for row in zip_longest(*columns) for task in row if task is not None]
