"""Where a step's batch comes from: the call's arguments, or the `data=` iterator, on a thread.

Checks that a rank gets what its stages need. It does not know how a batch is split, or when a step
runs.
"""

from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

from rrfp_async.errors import DataExhausted
from rrfp_async.gpu.completion import WaitingThread
from rrfp_async.tasks.batch import Batch
from rrfp_async.world import World

GetBatch = Callable[[], Awaitable[Batch]]

_NO_MORE = object()


class Feed:
    """The batches of one rank.

    Args:
        world: Of the rank.
        microbatches: Parts that a whole batch is split into.
        takes_inputs: Whether a stage here takes the step's inputs.
        needs_target: Whether the loss is computed here.
        has_loss: Whether there is a loss function.
        chunk_specs: Of positional arguments, keyword arguments and the target.
        data: The iterator of (inputs, target), or None.
        naming: Around the iterator: says whose failure it is.
    """

    def __init__(
        self,
        world: World,
        microbatches: int,
        *,
        takes_inputs: bool,
        needs_target: bool,
        has_loss: bool,
        chunk_specs: tuple[Any, Any, Any],
        data: Iterable[tuple[Any, Any]] | None,
        naming: Callable[[], AbstractContextManager[None]],
    ) -> None:
        self._world = world
        self._microbatches = microbatches
        self._takes_inputs = takes_inputs
        self._needs_target = needs_target
        self._has_loss = has_loss
        self._chunk_specs = chunk_specs
        self._data: Iterator[tuple[Any, Any]] | None = None if data is None else iter(data)
        self._naming = naming
        self._thread: WaitingThread | None = None

    def for_training(self, args: tuple[Any, ...], kwargs: dict[str, Any], target: Any) -> GetBatch:
        """What gets this rank's part of a training step's batch; from `data=` if nothing is given.

        Raises:
            ValueError: If something is missing.
        """
        if self._needs_target and not self._has_loss:
            raise ValueError(
                f"rank {self._world.rank} owns the last stage and has no loss_fn: "
                f"give Runtime(..., loss_fn=...)"
            )
        if not args and not kwargs and target is None and self._data is not None:
            return partial(self._next, self._data)
        return partial(_whole, self._checked(args, kwargs, target, training=True))

    def for_evaluation(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], target: Any
    ) -> GetBatch:
        """As `for_training`, without `data=`; the target may be absent."""
        if "update" in kwargs:
            raise ValueError("update= is reserved for train_step: an evaluation never updates")
        if self._needs_target and target is not None and not self._has_loss:
            raise ValueError(
                f"eval_step on rank {self._world.rank} got a target and has no loss_fn: give "
                f"Runtime(..., loss_fn=...), or leave the target out"
            )
        return partial(_whole, self._checked(args, kwargs, target, training=False))

    def close(self) -> None:
        """Let the thread end; twice is harmless."""
        if self._thread is not None:
            self._thread.close()

    def _checked(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], target: Any, *, training: bool
    ) -> Batch:
        """This rank's part of the batch, with all in it that the rank needs."""
        batch = Batch(args, kwargs, target, self._microbatches, *self._chunk_specs)
        if self._takes_inputs and not batch.has_inputs:
            raise ValueError(
                f"rank {self._world.rank} owns a stage that takes inputs and got none: pass the "
                f"inputs to the step or build the Runtime with data="
            )
        if training and self._needs_target and target is None:
            raise ValueError(
                f"train_step on rank {self._world.rank}, which owns the last stage, got no "
                f"target: pass target= or build the Runtime with data="
            )
        return batch

    async def _next(self, data: Iterator[tuple[Any, Any]]) -> Batch:
        """The next of `data=`, fetched on a thread: loading may block."""
        if self._thread is None:
            self._thread = WaitingThread(self._world.clock, name="rrfp-data")
        with self._naming():
            item = (await self._thread.submit(partial(next, data, _NO_MORE))).value
        if item is _NO_MORE:
            raise DataExhausted(
                f"data= of rank {self._world.rank} has no further batch: end the loop earlier or "
                f"give an iterator that repeats"
            )
        if not isinstance(item, tuple | list) or len(item) != 2:
            raise ValueError(
                f"data= gave a {type(item).__name__}, not a pair: yield (inputs, target)"
            )
        inputs, target = item
        if isinstance(inputs, Mapping):
            return self._checked((), dict(inputs), target, training=True)
        args = inputs if isinstance(inputs, tuple) else (inputs,)
        return self._checked(args, {}, target, training=True)


async def _whole(batch: Batch) -> Batch:
    return batch
