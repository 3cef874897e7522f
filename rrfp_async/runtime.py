"""What a user holds: one rank's Runtime, built from its stages, that runs steps with its peers.

Checks arguments before anything starts, turns a batch into a request for the dispatcher, and
steps the optimizer. It does not know in which order tasks run or how anything travels.
"""

import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AsyncExitStack, contextmanager
from functools import partial
from types import TracebackType
from typing import Any, Self

import torch

from rrfp_async.agreed import agreed_settings
from rrfp_async.bus.base import Bus
from rrfp_async.closing import surely
from rrfp_async.config import Config
from rrfp_async.dispatcher import Dispatcher
from rrfp_async.errors import DataExhausted, StateError
from rrfp_async.gpu.completion import WaitingThread
from rrfp_async.result import StepResult, result_of
from rrfp_async.session import Session
from rrfp_async.tasks.batch import Batch
from rrfp_async.tasks.build import MakeOptimizer, build_optimizer, build_stages, build_update
from rrfp_async.tasks.loss import Loss, LossFn, Reduction, check_reduction
from rrfp_async.tasks.step import StepReport, StepRequest
from rrfp_async.tasks.update import verdict
from rrfp_async.trace.writer import open_trace
from rrfp_async.world import World

_NO_MORE = object()


class Runtime:
    """One rank of a pipeline. Build one on every rank, in the same order, with the same config.

    Use it as an async context manager; all calls belong to one task of the event loop.

    Args:
        stages: This rank's stage module, or a list of its stage modules, lowest stage first.
        world: This rank's world, from `local_world` or `torchrun_world`.
        config: The settings, equal on every rank.
        loss_fn: `loss_fn(output, target)` -> scalar tensor. It gets outputs of half precision as
            float32. Needed for training on the rank of the last stage; ignored elsewhere.
        loss_reduction: What the batch's loss is. `"mean"`: `loss_fn` is the mean over a
            microbatch's samples, and the batch's the mean over all. `"sum"`: the sum of the
            microbatches'. A function: `loss_fn` is the mean over what that counts in a
            microbatch's target, `TokenMean(ignore_index)` for one.
        optimizer: An optimizer over parameters of this rank's stages, or a function that makes
            one from their list. Without it, gradients are left for the caller.
        max_grad_norm: Before an update, clip the gradients of all ranks by their common 2-norm.
        grad_scaler: This rank's own `torch.amp.GradScaler`, equal on every rank: losses are scaled,
            gradients unscaled before clipping, and the update left out on every rank if any has a
            gradient that is not finite.
        args_chunk_spec: How positional inputs are split, as in torch.distributed.pipelining: a
            `TensorChunkSpec(dim)`, `REPLICATE`, None for dimension 0, or a tree of these, for
            each.
        kwargs_chunk_spec: The same by keyword.
        target_chunk_spec: The same for the target.
        data: An iterator of (inputs, target) for `train_step()` without arguments, on the ranks
            that consume them. Inputs are a tensor, a tuple of positional arguments or a dict of
            keyword arguments.

    Raises:
        ValueError: If an argument does not fit the rank or the topology, or a listed hint breaks a
            rule.

    Attributes:
        optimizer: The optimizer, or None; learning-rate schedulers need it.
    """

    def __init__(
        self,
        stages: torch.nn.Module | Sequence[torch.nn.Module],
        *,
        world: World,
        config: Config,
        loss_fn: LossFn | None = None,
        loss_reduction: Reduction = "mean",
        optimizer: torch.optim.Optimizer | MakeOptimizer | None = None,
        max_grad_norm: float | None = None,
        grad_scaler: torch.amp.GradScaler | None = None,
        args_chunk_spec: Sequence[Any] | None = None,
        kwargs_chunk_spec: Mapping[str, Any] | None = None,
        target_chunk_spec: Any = None,
        data: Iterable[tuple[Any, Any]] | None = None,
    ) -> None:
        check_reduction(loss_reduction)
        self._world = world
        self._config = config
        loss = None if loss_fn is None else Loss(loss_fn, loss_reduction)
        self._stages = build_stages(
            stages,
            world.topology,
            world.rank,
            loss,
            split=config.splits,
            insist=config.insists_on_split,
            count_bytes=config.activation_budget_bytes is not None,
        )
        config.check_order(world.topology)
        self._takes_inputs = any(stage.is_source for stage in self._stages.values())
        self._needs_target = any(stage.is_last for stage in self._stages.values())
        self._loss_fn = loss_fn
        self.optimizer = build_optimizer(optimizer, self.parameters(), world.rank)
        self._update = build_update(
            self.optimizer,
            self._stages,
            world.topology,
            device=world.device.torch_device,
            max_grad_norm=max_grad_norm,
            grad_scaler=grad_scaler,
        )
        if loss is not None:
            loss.scale_by(self._update.loss_scale)
        self._reports = max_grad_norm is not None or self._update.scales
        self._chunk_specs = (args_chunk_spec, kwargs_chunk_spec, target_chunk_spec)
        self._data: Iterator[tuple[Any, Any]] | None = None if data is None else iter(data)
        self._resources = AsyncExitStack()
        self._data_thread: WaitingThread | None = None
        self._dispatcher: Dispatcher | None = None
        self._session: Session | None = None
        self._bus: Bus | None = None
        self._busy = False
        self._closed = False
        self._failure: BaseException | None = None
        self._gradients_used = True

    def parameters(self) -> list[torch.nn.Parameter]:
        """The parameters of this rank's stages, each once, in order."""
        modules = [stage.module for stage in self._stages.values()]
        return list({id(p): p for module in modules for p in module.parameters()}.values())

    async def __aenter__(self) -> Self:
        """Open the connections and the trace; between processes, wait for every other rank."""
        if self._closed or self._dispatcher is not None:
            raise StateError("this Runtime was opened before: build a new one")
        try:
            await self._start()
        except BaseException:
            await self.close()
            raise
        return self

    async def _start(self) -> None:
        wires = await self._resources.enter_async_context(self._world.connect(self._config))
        self._bus = wires.bus
        self._session = Session(
            bus=wires.bus,
            rank=self._world.rank,
            topology=self._world.topology,
            settings=agreed_settings(self._config, self._world.topology),
            clock=self._world.clock,
            stall_timeout_s=self._config.stall_timeout_s,
            judge=verdict,
        )
        self._resources.callback(self._session.say_farewell)
        trace = open_trace(self._config.trace_dir, self._world.rank)
        if self._config.trace_dir is not None:
            self._resources.push_async_callback(surely, trace.close)
        self._dispatcher = Dispatcher(
            world=self._world,
            wires=wires,
            config=self._config,
            stages=self._stages,
            trace=trace,
            session=self._session,
        )

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if error is not None and self._session is not None and self._failure is None:
            self._session.tell_failure(error)
        await self.close()

    async def close(self) -> None:
        """Tell the other ranks, close the connections and the trace. Twice is harmless."""
        self._closed = True
        await self._resources.aclose()

    async def train_step(
        self, *args: Any, target: Any = None, update: bool = True, **kwargs: Any
    ) -> StepResult:
        """Run one training step together with every other rank.

        Every rank calls it; each uses what concerns it: inputs where a stage takes them, the
        target where the loss is. What other ranks are given is ignored. Without any argument the
        next batch is taken from `data=`.

        Args:
            *args: Inputs of the first stage's module: tensors `(batch, ...)`, split along
                dimension 0 into `config.microbatches` parts; plain values; or `Microbatches`.
            target: Second argument of `loss_fn`: a tensor `(batch, ...)` or `Microbatches`.
            update: Whether the step ends in `optimizer.step()`. Without the update, the next
                step adds its gradients to this step's.
            **kwargs: As `args`, by keyword.

        Raises:
            ValueError: If what was given does not fit; the other ranks' step fails.
            StateError: If the Runtime is closed, failed, or busy with another step.
            StepFailed: If the step ended early, on whichever rank.

        Cancelling ends the step on every rank; the Runtime then takes no further steps.
        """
        return await self._guarded(self._train(args, kwargs, target, update))

    async def eval_step(self, *args: Any, target: Any = None, **kwargs: Any) -> StepResult:
        """Run forwards only, in eval mode and without gradients; otherwise as `train_step`.

        The target may be absent: then there is no loss. Parameters, their gradients and the
        modules' training modes are as before.
        """
        if "update" in kwargs:
            error = ValueError("update= is reserved for train_step: an evaluation never updates")
            return await self._guarded(_raiser(error))
        return await self._guarded(self._evaluate(args, kwargs, target))

    async def _train(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], target: Any, update: bool
    ) -> StepResult:
        if self._needs_target and self._loss_fn is None:
            raise ValueError(
                f"rank {self._world.rank} owns the last stage and has no loss_fn: "
                f"give Runtime(..., loss_fn=...)"
            )
        begun = self._world.clock()
        if not args and not kwargs and target is None and self._data is not None:
            get = partial(self._next_batch, self._data)
        else:
            get = partial(self._whole, self._checked(args, kwargs, target, training=True))
        told = self._update.report if update and self._reports else None
        request = StepRequest(True, update, self._gradients_used, get, told)
        report = await self._open().run_step(request)
        self._gradients_used = update
        if update:
            with self._naming_this_rank(report.step):
                await self._apply(report)
        return result_of(report, self._world.clock() - begun)

    async def _apply(self, report: StepReport) -> None:
        if report.verdict is not None:
            await self._world.device.run(partial(self._update.apply, report.verdict))
        elif self.optimizer is not None:
            await self._world.device.run(self.optimizer.step)

    async def _evaluate(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], target: Any
    ) -> StepResult:
        if self._needs_target and target is not None and self._loss_fn is None:
            raise ValueError(
                f"eval_step on rank {self._world.rank} got a target and has no loss_fn: give "
                f"Runtime(..., loss_fn=...), or leave the target out"
            )
        begun = self._world.clock()
        get = partial(self._whole, self._checked(args, kwargs, target, training=False))
        report = await self._open().run_step(StepRequest(False, False, False, get))
        return result_of(report, self._world.clock() - begun)

    def _checked(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], target: Any, *, training: bool
    ) -> Batch:
        """This rank's part of the batch, with all in it that the rank needs."""
        batch = Batch(args, kwargs, target, self._config.microbatches, *self._chunk_specs)
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

    async def _whole(self, batch: Batch) -> Batch:
        return batch

    async def _next_batch(self, data: Iterator[tuple[Any, Any]]) -> Batch:
        """The next of `data=`, fetched on a thread: loading may block."""
        with self._naming_this_rank():
            if self._data_thread is None:
                self._data_thread = WaitingThread(self._world.clock, name="rrfp-data")
                self._resources.callback(self._data_thread.close)
            item = (await self._data_thread.submit(partial(next, data, _NO_MORE))).value
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

    @contextmanager
    def _naming_this_rank(self, step: int | None = None) -> Iterator[None]:
        """Turn what the user's code raises outside a task into the end of the step."""
        try:
            yield
        except Exception as error:
            if self._session is None:
                raise
            raise self._session.failed(error, step=step) from error

    async def _guarded(self, step: Any) -> StepResult:
        """Run a step if the Runtime's state allows it; tell every rank if it fails."""
        try:
            self._check_state()
        except StateError:
            step.close()
            raise
        self._busy = True
        try:
            result: StepResult = await step
            return result
        except BaseException as error:
            self._failure = error
            if self._session is not None and self._bus is not None:
                self._session.tell_failure(error)
                self._bus.close()  # whom the message cannot reach sees the end instead
            raise
        finally:
            self._busy = False

    def _check_state(self) -> None:
        if self._closed:
            raise StateError("this Runtime is closed and takes no further steps: build a new one")
        if self._failure is not None:
            raise StateError(
                f"this Runtime failed ({type(self._failure).__name__}: {self._failure}) and takes "
                f"no further steps: build a new one on every rank"
            ) from self._failure
        if self._busy:
            raise StateError("a step is running on this Runtime: await it before the next")
        if torch.is_autocast_enabled(self._world.device.torch_device.type):
            raise StateError(
                "torch.autocast around a step does not reach the thread that computes: use it "
                "inside the stage's forward"
            )
        self._open()

    def _open(self) -> Dispatcher:
        if self._dispatcher is None:
            raise StateError("this Runtime is not open: use `async with Runtime(...) as runtime:`")
        return self._dispatcher

    def __del__(self) -> None:
        if getattr(self, "_dispatcher", None) is not None and not self._closed:
            warnings.warn("a Runtime was never closed", ResourceWarning, stacklevel=2)


async def _raiser(error: Exception) -> StepResult:
    raise error
