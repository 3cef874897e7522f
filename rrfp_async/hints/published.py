"""Schedules known from the literature, generated for any depth and number of microbatches.

Here are those of one stage a rank, and what checks that a pipeline is one that a schedule is made
for; `loop_placement` and `v_placement` have those of several.

GPipe (arXiv 1811.06965) runs all forwards, then all backwards. 1F1B (PipeDream-flush, arXiv
2006.09503; Megatron-LM, arXiv 2104.04473) runs as many forwards as stages follow, then alternates.
ZB-H1 (Zero Bubble, arXiv 2401.10241) is 1F1B with the backward split; stage s puts its weight
gradients off by s microbatches, which fills the pipeline's end and keeps 1F1B's largest peak.
"""

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass

from rrfp_async.hints.schedule import Schedule
from rrfp_async.ids import TaskId, TaskKind
from rrfp_async.topology import Topology

Generate = Callable[[Topology, int, int], list[TaskId]]
"""The tasks of (topology, rank, microbatches) in order."""


@dataclass(frozen=True, slots=True)
class Needs:
    """The pipelines that a schedule is made for.

    Attributes:
        chunks: Model chunks per rank, or None for any number.
        placement: Of the chunks, as a Topology takes it, or None where there is only one.
    """

    chunks: int | None = None
    placement: str | None = None

    def __str__(self) -> str:
        chunks = None if self.chunks is None else f"chunks={self.chunks}"
        placement = None if self.placement is None else f"placement={self.placement!r}"
        return " and ".join(filter(None, (chunks, placement)))

    def met_by(self, topology: Topology) -> bool:
        """Whether the ranks own the stages that they should; the name of a placement is nothing."""
        if self.chunks not in {None, topology.chunks}:
            return False
        wanted = Topology(
            topology.pp, chunks=topology.chunks, placement=self.placement or topology.placement
        )
        stages = range(topology.num_stages)
        return all(topology.rank_of(stage) == wanted.rank_of(stage) for stage in stages)


ONE_CHUNK = Needs(chunks=1)
LOOP = Needs(placement="loop")
V_OF_TWO = Needs(chunks=2, placement="v")


class PublishedSchedule(Schedule):
    """A schedule that a rule generates, rank by rank.

    Args:
        name: Its name in the field.
        generate: The rule.
        needs: The pipelines that the rule is made for.
        splits: Whether it splits backwards into I and W.
    """

    def __init__(
        self, name: str, generate: Generate, *, needs: Needs = ONE_CHUNK, splits: bool = False
    ) -> None:
        super().__init__()
        self.splits = splits
        self._name = name
        self._generate = generate
        self._needs = needs

    @property
    def name(self) -> str:
        """Its name in the field."""
        return self._name

    def orders(
        self,
        topology: Topology,
        microbatches: int,
        step: int,  # noqa: ARG002 - every step has the same
    ) -> Sequence[Sequence[TaskId]]:
        """The generated lists.

        Raises:
            ValueError: If the schedule is not made for this pipeline or number of microbatches.
        """
        self._check_needs(topology)
        ranks = range(topology.pp)
        return [self._generate(topology, rank, microbatches) for rank in ranks]

    def forwards(
        self, topology: Topology, microbatches: int, step: int
    ) -> Sequence[Sequence[TaskId]]:
        """As listed; with numbers of microbatches that the rule refuses, chunk after chunk."""
        self._check_needs(topology)
        with suppress(ValueError):
            return self.orders(topology, microbatches, step)
        return [
            [
                TaskId(stage, TaskKind.F, index)
                for stage in topology.stages_of(rank)
                for index in range(microbatches)
            ]
            for rank in range(topology.pp)
        ]

    def _check_needs(self, topology: Topology) -> None:
        if not self._needs.met_by(topology):
            raise ValueError(
                f"hint {self._name!r} needs {self._needs}, got chunks={topology.chunks} and "
                f"placement={topology.placement!r}: build the Topology so, or take a hint that "
                f"fits every pipeline, such as 'bf'"
            )


def gpipe(topology: Topology, rank: int, microbatches: int) -> list[TaskId]:
    """All forwards, then all backwards, each in microbatch order."""
    [stage] = topology.stages_of(rank)
    kinds = (TaskKind.F, TaskKind.B)
    return [TaskId(stage, kind, index) for kind in kinds for index in range(microbatches)]


def one_forward_one_backward(topology: Topology, rank: int, microbatches: int) -> list[TaskId]:
    """A forward for this stage and each that follows it, then backward and forward in turn.

    torch 2.13's own `Schedule1F1B._get_pipeline_order` is no help: it lists no forward of
    microbatch 0 for the last stage.
    """
    [stage] = topology.stages_of(rank)
    warm_up = min(microbatches, topology.depth_after(stage) + 1)
    order = [TaskId(stage, TaskKind.F, index) for index in range(warm_up)]
    for index in range(microbatches):
        order.append(TaskId(stage, TaskKind.B, index))
        if warm_up + index < microbatches:
            order.append(TaskId(stage, TaskKind.F, warm_up + index))
    return order


def zero_bubble_h1(topology: Topology, rank: int, microbatches: int) -> list[TaskId]:
    """As 1F1B with I for B, and W of a microbatch as many places later as stages come before."""
    [stage] = topology.stages_of(rank)
    warm_up = min(microbatches, topology.depth_after(stage) + 1)
    put_off = topology.depth - topology.depth_after(stage) - 1
    order = [TaskId(stage, TaskKind.F, index) for index in range(warm_up)]
    for index in range(microbatches + put_off):
        if index < microbatches:
            order.append(TaskId(stage, TaskKind.I, index))
        if index >= put_off:
            order.append(TaskId(stage, TaskKind.W, index - put_off))
        if warm_up + index < microbatches:
            order.append(TaskId(stage, TaskKind.F, warm_up + index))
    return order
