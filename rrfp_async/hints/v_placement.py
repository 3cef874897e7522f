"""Listed orders of two chunks a rank placed in a V: up the ranks with chunk 0, down with chunk 1.

The last stage is then on rank 0, and a microbatch turns round on the last rank without a transfer.
ZBV (Zero Bubble, arXiv 2401.10241, section 6) splits every backward. DualPipeV (DualPipe of
DeepSeek-V3, arXiv 2412.19437, cut in half) runs a forward of one chunk beside a whole backward of
the other, and splits where a pipeline fills and drains.

What stands here are the rules. Whether a pipeline is one that they are made for is checked before.
"""

from collections import Counter
from collections.abc import Iterable

from rrfp_async.ids import TaskId, TaskKind
from rrfp_async.topology import Topology

Move = tuple[TaskKind, int]
"""A kind of task and the chunk it is run on: its next microbatch there."""

F0, I0, W0 = ((kind, 0) for kind in (TaskKind.F, TaskKind.I, TaskKind.W))
F1, I1, W1 = ((kind, 1) for kind in (TaskKind.F, TaskKind.I, TaskKind.W))


def zero_bubble_v(topology: Topology, rank: int, microbatches: int) -> list[TaskId]:
    """Both directions of both chunks in turn, of which the ends are filled with late W.

    With fewer microbatches than fill the pipeline it is the list of as many as do, without those
    that there are not.
    """
    ranks = topology.pp
    after = ranks - 1 - rank
    count = max(microbatches, 2 * ranks - 1)
    moves = (
        (F0,) * (2 * after + 1)
        + (F1, F0) * rank
        + (F1, I1, W1) * (after + 1)
        + (F0, I0, W0, F1, I1, W1) * (count - ranks - after)
        + (I0, W0, F1, I1, W1) * after
        + (I0, I1) * rank
        + (I0, W0) * (after + 1)
        + (W1,) * rank
        + (W0,) * rank
    )
    return [task for task in _listed(topology, rank, moves) if task.microbatch < microbatches]


def dual_pipe_v(topology: Topology, rank: int, microbatches: int) -> list[TaskId]:
    """A forward of one chunk, then a backward of the other, whose chunks take turns.

    The two may overlap on the device; here one stands after the other, and a whole backward stands
    as I and W in a row, because W of the last backwards is put off to fill the end.

    Raises:
        ValueError: If there are fewer microbatches than stages.
    """
    ranks = topology.pp
    if microbatches < topology.num_stages:
        raise ValueError(
            f"microbatches={microbatches} must be at least {topology.num_stages}, the number of "
            f"stages, to fill DualPipeV: give {topology.num_stages} or more, or hint='zbv'"
        )
    after = ranks - 1 - rank
    moves = (
        (F0,) * (2 * after)
        + (F0, F1) * (rank + 1)
        + (I1, W1, F1) * after
        + (F0, I1, W1, F1, I0, W0) * (microbatches - ranks - after)
        + (I1, W1, F1, I0, W0) * after
        + _dual_pipe_end(rank, after)
    )
    return _listed(topology, rank, moves)


def _dual_pipe_end(rank: int, after: int) -> tuple[Move, ...]:
    """Backwards alone, the first half whole; W of the other half comes late, oldest first."""
    turns = ((I1, W1), (I0, W0)) * (rank + 1)
    whole, half = turns[: rank + 1], turns[rank + 1 :]
    late = [weight for _, weight in (*half, *((I0, W0),) * after)]
    end = [move for pair in whole for move in pair]
    end += [inputs for inputs, _ in half]
    end += [move for weight in late[:after] for move in (weight, I0)]
    return (*end, *late[after:])


def _listed(topology: Topology, rank: int, moves: Iterable[Move]) -> list[TaskId]:
    """The moves as tasks: each kind takes the microbatches of a chunk in order."""
    stages = topology.stages_of(rank)
    taken: Counter[Move] = Counter()
    order = []
    for move in moves:
        kind, chunk = move
        order.append(TaskId(stages[chunk], kind, taken[move]))
        taken[move] += 1
    return order
