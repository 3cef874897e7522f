"""A rank for tests of grids: what its mesh is, and how gradients are clipped on it.

    torchrun --nproc-per-node 8 tests/ranks/worker_mesh.py PP,DP,TP [WHAT]

WHAT is made-before, clip, boom, die or leave:

made-before: the program has initialised torch.distributed itself. clip: three clipped steps of a
small GPT with the example's plan, beside those of the unpartitioned model. boom: the last rank
fails in a forward while the ranks that share its stage wait for it in theirs. die: rank 0, which
leads them, is killed there. leave: ends right
after a collective, whose thread gets next to no time of the one CPU that all threads share.
"""

import os
import signal
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from gpt import GPTConfig, build_layers, loss_fn, stage_of
from gpt_tensor_parallel import parallelize
from torch import nn

import rrfp_async as r
from tests.ranks.telling import say, tell_failure

MODEL = GPTConfig(context=16, width=32, heads=2, blocks=2)
CLIP = 0.5
STEPS = 3
BATCH = 8


def make_optimizer(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    """Without state, so that the norm matters."""
    return torch.optim.SGD(parameters, lr=0.1)


def batch(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Bytes of all replicas, and what comes next."""
    draw = torch.Generator().manual_seed(step)
    both = torch.randint(0, 256, (2, BATCH, MODEL.context), generator=draw)
    return both[0], both[1]


def show_mesh(world: r.World) -> None:
    """Tell the mesh, and the sums of ranks over each of its groups."""
    if world.mesh is None:
        say("mesh", names=None, initialized=dist.is_initialized())
        return
    sums = []
    for name in world.mesh.mesh_dim_names:
        rank = torch.tensor([world.rank])
        dist.all_reduce(rank, group=world.mesh.get_group(name))
        sums.append(int(rank))
    names, place = list(world.mesh.mesh_dim_names), list(world.mesh.get_coordinate())
    say("mesh", names=names, place=place, sums=sums)


def leave_behind_a_collective(group: Any) -> None:
    """Take part in one that its own thread is late to be done with."""
    dist.all_reduce(torch.ones(1), group=group)  # starts the threads
    for thread in Path("/proc/self/task").iterdir():
        os.sched_setaffinity(int(thread.name), {min(os.sched_getaffinity(0))})
        if "gloo" in (thread / "comm").read_text():
            os.setpriority(os.PRIO_PROCESS, int(thread.name), 19)
    dist.all_reduce(torch.ones(1), group=group)


def reference() -> tuple[list[float], list[float]]:
    """Losses and norms of the unpartitioned model on whole batches."""
    model = stage_of(build_layers(MODEL, 0), 0, 1)
    optimizer = make_optimizer(list(model.parameters()))
    losses, norms = [], []
    for step in range(STEPS):
        inputs, targets = batch(step)
        optimizer.zero_grad()
        loss = loss_fn(model(inputs), targets)
        loss.backward()
        norms.append(float(nn.utils.clip_grad_norm_(model.parameters(), CLIP)))
        optimizer.step()
        losses.append(loss.item())
    return losses, norms


def _boom(*_: object) -> None:
    raise RuntimeError("told boom")


def _die(*_: object) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


async def clip(world: r.World, fault: str = "") -> None:
    """Three clipped steps; in the first one something happens if it is to."""
    topology, place = world.topology, world.place
    stage = stage_of(build_layers(MODEL, 0), place.pp, topology.pp)
    if topology.tp > 1:
        parallelize(stage, world.mesh["tp"])
    if fault == "boom" and world.rank == topology.world_size - 1:
        stage.register_forward_pre_hook(_boom)
    if fault == "die" and world.rank == 0:
        stage.register_forward_pre_hook(_die)
    config = r.Config(microbatches=2)
    losses: list[Any] = []
    norms: list[Any] = []
    async with r.Runtime(
        stage,
        world=world,
        config=config,
        loss_fn=loss_fn,
        optimizer=make_optimizer,
        max_grad_norm=CLIP,
    ) as runtime:
        for step in range(STEPS):
            own, target = (t.tensor_split(topology.dp)[place.dp] for t in batch(step))
            result = await runtime.train_step(own, target=target)
            losses.append(result.loss)
            norms.append(result.grad_norm)
    wanted = dict(zip(("reference_losses", "reference_norms"), reference(), strict=True))
    say("clipped", losses=losses, norms=norms, **wanted)


def main() -> int:
    """Run the command line."""
    torch.set_num_threads(1)
    pp, dp, tp = map(int, sys.argv[1].split(","))
    if sys.argv[2:] == ["made-before"]:
        dist.init_process_group("gloo")
    world = r.torchrun_world(r.Topology(pp, dp=dp, tp=tp))
    show_mesh(world)
    if sys.argv[2:] == ["clip"]:
        r.run(lambda: clip(world))
    if sys.argv[2:] in (["boom"], ["die"]):
        try:
            r.run(lambda: clip(world, sys.argv[2]))
        except r.RrfpError as error:
            tell_failure(error)
    if sys.argv[2:] == ["leave"]:
        leave_behind_a_collective(world.mesh.get_group("dp"))
    world.close()
    return 0


if __name__ == "__main__":
    sys.exit(main())
