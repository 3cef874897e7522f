"""What a user holds: one rank's Runtime, built from its stages, that runs steps with its peers.

Checks arguments before anything starts, turns a batch into a request for the dispatcher, and
steps the optimizer. It does not know in which order tasks run or how anything travels.
"""

import warnings
from collections.abc import Coroutine, Iterable, Iterator, Mapping, Sequence
from contextlib import AsyncExitStack, contextmanager
from functools import partial
from os import PathLike
from types import TracebackType
from typing import Any, Self

import torch

from rrfp_async.agreed import agreed_settings
from rrfp_async.bus.base import Bus
from rrfp_async.checkpoint.checkpoint import Checkpointer
from rrfp_async.checkpoint.part import Names, Part
from rrfp_async.closing import surely
from rrfp_async.config import Config
from rrfp_async.dispatcher import Dispatcher
from rrfp_async.errors import StateError
from rrfp_async.feed import Feed
from rrfp_async.grid import counted_ranks
from rrfp_async.guard import Guard
from rrfp_async.metrics import Meter, Metrics
from rrfp_async.result import StepResult, result_of
from rrfp_async.session import Session
from rrfp_async.tasks.build import MakeOptimizer, build_optimizer, build_stages, build_update
from rrfp_async.tasks.generators import Streams
from rrfp_async.tasks.loss import Loss, LossFn, Reduction, check_reduction
from rrfp_async.tasks.step import StepReport, StepRequest
from rrfp_async.tasks.update import verdict
from rrfp_async.trace.recorder import Recorder, open_recorder
from rrfp_async.world import World


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
        names: For checkpoints, where a parameter's name in its stage is not its name in the
            unpartitioned model: `names(stage, name_in_stage)` returns the latter.
        data: An iterator of (inputs, target) for `train_step()` without arguments, on the ranks
            that consume them. Inputs are a tensor, a tuple of positional arguments or a dict of
            keyword arguments.

    Raises:
        ValueError: If an argument does not fit the rank or the topology, or a listed hint breaks a
            rule.

    Attributes:
        optimizer: The optimizer, or None; learning-rate schedulers need it.
        steps_trained: Training steps that have ended well, those before a loaded save included.
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
        names: Names | None = None,
        data: Iterable[tuple[Any, Any]] | None = None,
    ) -> None:
        check_reduction(loss_reduction)
        self._world = world
        self._config = config
        loss = None if loss_fn is None else Loss(loss_fn, loss_reduction)
        self._stages = build_stages(
            stages,
            world.topology,
            world.place.pp,
            loss,
            split=config.splits,
            insist=config.insists_on_split,
            count_bytes=config.activation_budget_bytes is not None,
            make_streams=partial(
                Streams, world.generators, world.device.torch_device, 0, replica=world.place.dp
            ),
        )
        config.check_order(world.topology)
        config.check_agreement(world.topology)
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
        self._resources = AsyncExitStack()
        self._feed = Feed(
            world,
            config.microbatches,
            takes_inputs=any(stage.is_source for stage in self._stages.values()),
            needs_target=any(stage.is_last for stage in self._stages.values()),
            has_loss=loss_fn is not None,
            chunk_specs=(args_chunk_spec, kwargs_chunk_spec, target_chunk_spec),
            data=data,
            naming=self._naming_this_rank,
        )
        self._resources.callback(self._feed.close)
        self._seed = torch.initial_seed() if config.seed is None else config.seed
        self._names = names
        self.steps_trained = 0
        self._steps_evaluated = 0
        self._checkpointer: Checkpointer | None = None
        self._dispatcher: Dispatcher | None = None
        self._session: Session | None = None
        self._bus: Bus | None = None
        self._recorder = Recorder()
        self._guard = Guard(world)
        self._meter = Meter(lambda: self._update.scale_used)
        self._gradients_used = True

    def parameters(self) -> list[torch.nn.Parameter]:
        """The parameters of this rank's stages, each once, in order."""
        modules = [stage.module for stage in self._stages.values()]
        return list({id(p): p for module in modules for p in module.parameters()}.values())

    async def __aenter__(self) -> Self:
        """Open the connections and the trace; between processes, wait for every other rank."""
        if self._guard.closed or self._dispatcher is not None:
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
        self._checkpointer = Checkpointer(
            Part({i: s.module for i, s in self._stages.items()}, self.optimizer, self._names),
            world=self._world,
            store=wires.store,
            come_within_s=self._config.stall_timeout_s,
            silent_within_s=self._config.peer_timeout_s,
        )
        self._session = Session(
            bus=wires.bus,
            rank=self._world.rank,
            topology=self._world.topology,
            settings=agreed_settings(self._config, self._world.topology),
            clock=self._world.clock,
            stall_timeout_s=self._config.stall_timeout_s,
            begins_together=self._world.begins_together,
            judge=partial(verdict, counted=counted_ranks(self._world.topology)),
        )
        self._resources.callback(self._session.say_farewell)
        self._recorder = open_recorder(self._world.whose(self._config))
        if self._recorder.keeps:
            self._resources.push_async_callback(surely, self._recorder.close)
        self._dispatcher = Dispatcher(
            world=self._world,
            wires=wires,
            config=self._config,
            stages=self._stages,
            recorder=self._recorder,
            session=self._session,
            meter=self._meter,
        )

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if error is not None and self._session is not None and self._guard.failure is None:
            self._recorder.failed(self._session.tell_failure(error), None)
        await self.close()

    async def close(self) -> None:
        """Tell the other ranks, close the connections and the trace. Twice is harmless."""
        self._guard.closed = True
        if self._guard.failure is not None and self._world.end_collectives is not None:
            await surely(self._world.end_collectives)
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
        return await self._guarded(self._train(args, kwargs, target, update), "train")

    async def eval_step(self, *args: Any, target: Any = None, **kwargs: Any) -> StepResult:
        """Run forwards only, in eval mode and without gradients; otherwise as `train_step`.

        The target may be absent: then there is no loss. Parameters, their gradients and the
        modules' training modes are as before.
        """
        return await self._guarded(self._evaluate(args, kwargs, target), "eval")

    async def save(self, path: str | PathLike[str], *, extra: dict[str, Any] | None = None) -> None:
        """Write all ranks' state as one checkpoint of torch.distributed.checkpoint.

        Every rank calls it, between two steps. Names are the unpartitioned model's, so `load` may
        put the state on any number of ranks and stages. An older checkpoint stays until this one
        is whole. After an error or a cancellation, which end it everywhere, steps can go on.

        Args:
            path: A folder on a file system that every rank sees; made if need be.
            extra: More to keep, such as a scheduler's state: tensors, plain values, and lists and
                dicts of them. A key that several ranks give is taken from the lowest.

        Raises:
            ValueError: If two stages hold the same name, a value cannot be kept, or something else
                is at `path`; the same on every rank.
            StateError: If the Runtime is closed, failed or busy, or holds gradients without update.
            CheckpointError: If a rank cannot write or is not there; the same on every rank.
        """
        with self._between_steps() as checkpointer:
            if not self._gradients_used:
                raise StateError(
                    "save() after a step with update=False would lose its gradients: save after a "
                    "step that updates"
                )
            run = {"steps_trained": self.steps_trained, "seed": str(self._seed)}
            run |= self._update.state()
            await checkpointer.save(path, run=run, extra=extra or {})

    async def load(self, path: str | PathLike[str], *, optimizer: bool = True) -> dict[str, Any]:
        """Take over what `save` has written, on however many ranks, before a step or the first.

        Every rank calls it. Gradients without update are dropped. What stages draw goes on as it
        would have, unless `Config.seed` says otherwise.

        Args:
            path: The folder given to `save`, or another DCP checkpoint whose `model` is such.
            optimizer: False leaves the optimizers and the loss scale as they are.

        Returns:
            The `extra` of `save`, equal on every rank, with tensors on the CPU.

        Raises:
            ValueError: If there is no checkpoint, or its names, shapes, dtypes or optimizer groups
                are not this pipeline's; the same on every rank, and nothing is changed.
            StateError: If the Runtime is closed, failed or busy.
            CheckpointError: If a rank cannot read or is not there; the same on every rank.
        """
        with self._between_steps() as checkpointer:
            loaded = await checkpointer.load(path, optimizer=optimizer)
            self.steps_trained = loaded.run.get("steps_trained", self.steps_trained)
            if self._config.seed is None:
                self._seed = int(loaded.run.get("seed", self._seed))
            if optimizer:
                self._update.restore(loaded.run)
            self._gradients_used = True
            return loaded.extra

    @contextmanager
    def _between_steps(self) -> Iterator[Checkpointer]:
        self._guard.check()
        self._open()
        assert self._checkpointer is not None  # an open Runtime has one
        self._guard.busy = True
        try:
            yield self._checkpointer
        finally:
            self._guard.busy = False

    async def _train(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], target: Any, update: bool
    ) -> StepReport:
        get = self._feed.for_training(args, kwargs, target)
        told = self._update.report if update and self._reports else None
        number, zero = self.steps_trained, self._gradients_used
        request = StepRequest(True, update, number, self._seed, zero, get, told)
        report = await self._open().run_step(request)
        self.steps_trained += 1
        self._gradients_used = update
        if update:
            with self._naming_this_rank(report.step):
                await self._apply(report)
        return report

    async def _apply(self, report: StepReport) -> None:
        if report.verdict is not None:
            await self._world.device.run(partial(self._update.apply, report.verdict))
        elif self.optimizer is not None:
            await self._world.device.run(self.optimizer.step)

    async def _evaluate(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], target: Any
    ) -> StepReport:
        get = self._feed.for_evaluation(args, kwargs, target)
        request = StepRequest(False, False, self._steps_evaluated, self._seed, False, get)
        report = await self._open().run_step(request)
        self._steps_evaluated += 1
        return report

    @contextmanager
    def _naming_this_rank(self, step: int | None = None) -> Iterator[None]:
        """Turn what the user's code raises outside a task into the end of the step."""
        try:
            yield
        except Exception as error:
            if self._session is None:
                raise
            raise self._session.failed(error, step=step) from error

    def metrics(self) -> Metrics:
        """Counters, gauges and histograms since the Runtime was opened; StateError before that."""
        return self._meter.snapshot()

    async def _guarded(self, step: Coroutine[Any, Any, StepReport], mode: str) -> StepResult:
        """Run a step if the Runtime's state allows it; tell every rank if it fails."""
        try:
            self._guard.check()
            self._open()
        except StateError:
            step.close()
            raise
        self._guard.busy, begun = True, self._world.clock()
        self._recorder.open_step(begun)
        try:
            result = result_of(await step, self._world.clock() - begun)
            self._recorder.end_step(result)
            self._meter.stepped(mode, result)
            return result
        except BaseException as error:
            self._guard.failure = error
            if self._session is not None and self._bus is not None:
                failed = self._session.tell_failure(error)
                self._recorder.failed(failed, self._open().report_at_end)
                self._bus.close()  # whom the message cannot reach sees the end instead
            raise
        finally:
            self._guard.busy = False

    def _open(self) -> Dispatcher:
        if self._dispatcher is None:
            raise StateError("this Runtime is not open: use `async with Runtime(...) as runtime:`")
        return self._dispatcher

    def __del__(self) -> None:
        if getattr(self, "_dispatcher", None) is not None and not self._guard.closed:
            warnings.warn("a Runtime was never closed", ResourceWarning, stacklevel=2)
