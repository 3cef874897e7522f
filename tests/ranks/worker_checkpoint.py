"""A rank for tests: loads a checkpoint, trains, and saves one.

torchrun --nproc-per-node 2 tests/ranks/worker_checkpoint.py PLAN

The plan is a JSON object: `load` and `save` (paths or null), `steps`, `peer_timeout_s`, whether a
`default_group` of torch's is there before, and whether rank 1 is to `hang` as it writes.
"""

import json
import sys
import time
from typing import Any

import torch
import torch.distributed as dist

import rrfp_async as r
from rrfp_async.checkpoint.storage import Saving
from tests.ranks.telling import say, tell_failure
from tests.runtime.checkpoints import build, cut, momentum, step


def _hang_on_rank_1() -> None:
    write = Saving.write

    def hanging(saving: Saving, state: Any) -> None:
        write(saving, state)
        if saving._rank == 1:
            say("hanging")
            time.sleep(3600)

    Saving.write = hanging  # type: ignore[method-assign] # this process only


async def _main(plan: dict[str, Any]) -> bool:
    async with r.torchrun_world() as world:
        stages = cut(
            world.topology.num_stages, seed=world.topology.num_stages if plan["load"] else 0
        )
        settings = {"peer_timeout_s": plan["peer_timeout_s"]}
        async with build(world, stages, momentum, settings=settings) as runtime:
            try:
                if plan["load"]:
                    say("loaded", extra=await runtime.load(plan["load"]))
                losses = [await step(runtime) for _ in range(plan["steps"])]
                say("trained", losses=losses, steps=runtime.steps_trained)
                await runtime.save(plan["save"], extra={"by": world.rank})
                say("saved", default_group=dist.is_initialized())
            except Exception as error:
                tell_failure(error)
                return False
    return True


def main() -> int:
    """Run the command line."""
    torch.set_num_threads(1)
    plan = json.loads(sys.argv[1])
    if plan["default_group"]:
        dist.init_process_group("gloo")
    if plan["hang"]:
        _hang_on_rank_1()
    well = r.run(lambda: _main(plan))
    if plan["default_group"]:
        dist.destroy_process_group()
    return 0 if well else 1


if __name__ == "__main__":
    sys.exit(main())
