"""R of data parallelism: a stage's gradients, averaged over the replicas of its rank.

Beside the tasks that compute, in buckets, stage by stage from the highest down: the same order on
all replicas, whatever their dispatch orders were. As in torch's DistributedDataParallel the mean
counts every replica alike, and a gradient that some replicas do not have as zero there. It does
not know how tensors travel, nor when gradients are complete.
"""

from collections.abc import Iterable, Mapping, Sequence
from functools import partial

from rrfp_async.gpu.device import Device
from rrfp_async.gpu.replicas import Replicas
from rrfp_async.ids import TaskId, TaskKind
from rrfp_async.tasks.buckets import Bucket, buckets_of, layout_word, value_word
from rrfp_async.tasks.stage import Stage

_NOT_COMPARED = 0


class Averaging:
    """The reductions of one rank over its replicas, step after step.

    Every time replicas compare what they are about to send, and the first time of a stage also its
    parameters: what is not equal at the start would never become so.

    Args:
        stages: This rank's, by index.
        replicas: The rank's end of its group; None for a pipeline without replicas.
        tied: This rank's reductions of tied parameters, each with the stages that it concerns:
            they come before.
        number: Of its own R tasks on each stage.
        device: Where the rank computes.
    """

    def __init__(
        self,
        stages: Mapping[int, Stage],
        replicas: Replicas | None,
        *,
        tied: Mapping[TaskId, Sequence[int]],
        number: int,
        device: Device,
    ) -> None:
        self._stages = stages
        self._replicas = replicas
        self._device = device
        self._compared: set[int] = set()
        self._needs: dict[TaskId, tuple[int | TaskId, ...]] = {}
        for stage in sorted(stages, reverse=True) if replicas is not None else ():
            before = [task for task, concerned in tied.items() if stage in concerned]
            task = TaskId(stage, TaskKind.R, number)
            self._needs[task] = (stage, *before, *list(self._needs)[-1:])

    def tasks(self) -> Mapping[TaskId, Sequence[int | TaskId]]:
        """Each stage's, with what it waits for: its gradients, tied sums, the one before."""
        return self._needs

    async def run(self, task: TaskId) -> None:
        """Average the gradients of one stage, together with the other replicas.

        Raises:
            ValueError: If the replicas' parameters differ before they were trained, or what they
                would send.
            TransferError: If a replica is gone.
        """
        if self._replicas is None:
            return
        stage, replicas = self._stages[task.stage], self._replicas
        looked = await self._device.run(partial(self._look, stage))
        buckets, words = looked.value
        self._compare(stage, await replicas.gather(words))
        for bucket in buckets:
            flat = (await self._device.run(partial(bucket.flatten, replicas.size))).value
            total = await replicas.sum(flat)
            self._device.adopt([total])
            await self._device.run(partial(bucket.give_mean, total, replicas.size))
        self._compared.add(stage.index)

    def _look(self, stage: Stage) -> tuple[Sequence[Bucket], tuple[int, int]]:
        """What is to be sent, and what is to be equal; on the device's thread."""
        stage.complete_gradients()
        parameters = list(stage.module.parameters())
        buckets = buckets_of(parameters)
        fresh = stage.index not in self._compared
        values = value_word(parameters) if fresh else _NOT_COMPARED
        return buckets, (layout_word(buckets), values)

    def _compare(self, stage: Stage, told: Sequence[tuple[int, ...]]) -> None:
        layout = _first_other(words[0] for words in told)
        if layout is not None:
            raise ValueError(
                f"the trainable parameters of stage {stage.index} on replicas 0 and {layout} have "
                f"different shapes or dtypes: build, freeze and unfreeze the same on every replica"
            )
        values = _first_other(words[1] for words in told)
        if values is not None:
            raise ValueError(
                f"the parameters of stage {stage.index} on replicas 0 and {values} differ before "
                f"the first update: build them from the same seed, or load the same checkpoint"
            )


def _first_other(words: Iterable[int]) -> int | None:
    """The first place whose word is not that of place 0."""
    first, *others = words
    return next((place for place, word in enumerate(others, 1) if word != first), None)
