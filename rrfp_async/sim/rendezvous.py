"""Where the ranks of a tensor-parallel group meet in each task, as collectives make them.

A real collective waits for all ranks of its group; one that some of them never enter waits for
ever. Here that is an error. It does not know what a task costs, nor why it was chosen.
"""

import asyncio
from collections.abc import Sequence

from rrfp_async.errors import ProtocolError
from rrfp_async.ids import TaskId, TaskKind

MEETING_KINDS = frozenset({TaskKind.F, TaskKind.B, TaskKind.I})
"""Tasks that enter collectives; a weight gradient needs none."""


class Rendezvous:
    """The meetings of one group, one after the other.

    Args:
        ranks: The group's.
    """

    def __init__(self, ranks: Sequence[int]) -> None:
        self._ranks = tuple(ranks)
        self._here: dict[int, TaskId] = {}
        self._complete = asyncio.Event()

    async def enter(self, rank: int, task: TaskId) -> None:
        """Wait, as `rank` that begins `task`, until all ranks of the group have begun it.

        Raises:
            ProtocolError: If a rank waits here with another task; it goes on waiting.
        """
        others = set(self._here.values()) - {task}
        self._here[rank] = task
        if others:
            raise ProtocolError(self._disagreement())
        if len(self._here) < len(self._ranks):
            await self._complete.wait()
            return
        complete, self._complete = self._complete, asyncio.Event()
        self._here = {}
        complete.set()

    def _disagreement(self) -> str:
        entered = ", ".join(f"rank {rank} {task}" for rank, task in sorted(self._here.items()))
        return (
            f"the ranks {self._ranks} of a tensor-parallel group have entered different tasks: "
            f"{entered}. Their collectives would wait for one another for ever: all must run the "
            f"same tasks in the same order"
        )
