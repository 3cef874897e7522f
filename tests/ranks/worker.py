"""A rank for tests: runs the plans on its command line, one after another, and tells what happens.

    torchrun --nproc-per-node 2 tests/ranks/worker.py [at-once] PLAN...

Every line on standard output is a JSON object: event, rank, time (`time.monotonic`) and more.
"""

import asyncio
import json
import os
import sys
import time
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

import rrfp_async as r
from rrfp_async.bus.zeromq import ZeroMqBus
from tests.ranks.plan import Fault, Plan
from tests.ranks.telling import say, tell_failure

NO_ROUTE = "tcp://10.255.255.1:9"


class Boom(Exception):
    """What the faulty parts raise."""


class _BackwardFails(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor) -> Tensor:
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        raise _boom("backward")


class Block(nn.Module):
    """A stage: (samples, width) and the microbatch's number per sample in and, but last, out."""

    def __init__(self, plan: Plan, rank: int, stage: int, *, last: bool) -> None:
        super().__init__()
        torch.manual_seed(stage)
        self.linear = nn.Linear(plan.width, plan.width)
        self.step = 0
        self._plan = plan
        self._rank = rank
        self._last = last

    def forward(self, hidden: Tensor, mark: Tensor) -> Tensor | tuple[Tensor, Tensor]:
        time.sleep(self._plan.forward_s)
        if self._struck("forward", mark):
            raise _boom("forward")
        if self._struck("hang", mark):
            say("hang")
            time.sleep(3600)
        hidden = self.linear(hidden)
        if self._struck("backward", mark):
            hidden = _BackwardFails.apply(hidden)
        return hidden if self._last else (hidden, mark)

    def _struck(self, where: str, mark: Tensor) -> bool:
        fault = self._plan.fault_at(self._rank, where, self.step)
        return fault is not None and int(mark[0]) == fault.microbatch


def _boom(where: str) -> Boom:
    say("boom", where=where)
    return Boom(f"told {where}")


def publish_an_address_that_does_not_route() -> None:
    """From now on this process's cards show one, and no ipc."""
    bind = ZeroMqBus.bind

    def misled(bus: ZeroMqBus) -> str:
        return json.dumps({**json.loads(bind(bus)), "tcp": NO_ROUTE, "ipc": None})

    ZeroMqBus.bind = misled  # type: ignore[method-assign] # this process only


class Life:
    """One plan on one rank."""

    def __init__(self, plan: Plan, world: r.World, number: int) -> None:
        self.plan = plan
        self.world = world
        self.number = number
        self.rank = world.rank
        stage = world.place.pp
        self.stage = Block(plan, self.rank, stage, last=stage == world.topology.last_stage)
        settings = {"microbatches": plan.microbatches, **plan.config}
        config = r.Config(**settings, **plan.config_of.get(str(self.rank), {}))
        self.runtime = r.Runtime(
            self.stage,
            world=world,
            config=config,
            loss_fn=self._loss,
            optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.01),
            data=self._data(),
        )

    async def run(self) -> bool:
        """Live it; returns whether all went well."""
        try:
            await self._live()
        except Exception as error:
            tell_failure(error, number=self.number)
            if self.plan.then == "again":
                await self._try_again()
            return False
        finally:
            if self.plan.then in ("close", "again"):
                await self.runtime.close()
        say("done", number=self.number)
        return True

    async def _live(self) -> None:
        if fault := self._fault("late_start"):
            await asyncio.sleep(fault.after_s)
        if self._fault("no_route"):
            publish_an_address_that_does_not_route()
        say("opening", number=self.number)
        await self.runtime.__aenter__()
        say("open", number=self.number)
        for step in range(self.plan.steps):
            self.stage.step = step
            if await self._strike_before(step):
                return
            result = await self._step(step)
            say("step", number=self.number, step=step, loss=result.loss)
        if self.plan.then == "twice":
            await self.runtime.close()
            await self.runtime.close()
        elif self.plan.then == "idle":
            say("idle")
            await asyncio.sleep(3600)

    async def _strike_before(self, step: int) -> bool:
        """What goes wrong before a step; returns whether the program is to return."""
        if fault := self._fault("late_step", step) or self._fault("absent", step):
            await asyncio.sleep(fault.after_s)
        if self._fault("crash", step) and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
            os._exit(7)
        if self._fault("raise", step):
            say("leaving")
            raise Boom("told raise")
        if self._fault("return", step):
            say("leaving")
            return True
        return False

    async def _step(self, step: int) -> r.StepResult:
        fault = self._fault("cancel", step)
        if fault is None:
            return await self.runtime.train_step()
        task = asyncio.create_task(self.runtime.train_step())
        await asyncio.sleep(fault.after_s)
        say("cancel")
        task.cancel()
        try:
            return await task
        except asyncio.CancelledError:
            raise Boom("told cancel") from None

    async def _try_again(self) -> None:
        try:
            await self.runtime.train_step()
        except r.StateError as error:
            say("refused", number=self.number, message=str(error))

    def _fault(self, where: str, step: int | None = None) -> Fault | None:
        return self.plan.fault_at(self.rank, where, step)

    def _data(self) -> Iterator[tuple[Any, Tensor]]:
        plan = self.plan
        mark = torch.arange(plan.microbatches).repeat_interleave(plan.rows)
        for step in range(plan.steps + 1):
            if self._fault("data", step):
                raise _boom("data")
            draw = torch.Generator().manual_seed(1000 + step)  # other Runtimes draw meanwhile
            inputs, target = torch.randn(2, len(mark), plan.width, generator=draw).unbind()
            yield (inputs, mark), torch.cat([target, mark[:, None]], dim=1)

    def _loss(self, output: Tensor, target: Tensor) -> Tensor:
        fault = self._fault("loss", self.stage.step)
        if fault is not None and int(target[0, -1]) == fault.microbatch:
            raise _boom("loss")
        return nn.functional.mse_loss(output, target[:, :-1])


async def _run(plans: list[Plan], *, at_once: bool) -> bool:
    topology = r.Topology(plans[0].stages, dp=plans[0].dp) if plans[0].stages else None
    try:
        world = r.torchrun_world(topology)
        lives = [Life(plan, world, number) for number, plan in enumerate(plans)]
    except Exception as error:
        tell_failure(error)
        return False
    if at_once:
        return all(await asyncio.gather(*(life.run() for life in lives)))
    well = [await life.run() for life in lives]
    if plans[-1].then in ("close", "again"):
        world.close()
    return all(well)


def main() -> int:
    """Run the command line."""
    say("started")
    torch.set_num_threads(1)
    words = sys.argv[1:]
    at_once = words[0] == "at-once"
    plans = [Plan.parse(word) for word in words[at_once:]]
    well = r.run(lambda: _run(plans, at_once=at_once))
    say("ending")
    return 0 if well else 1


if __name__ == "__main__":
    sys.exit(main())
