"""The optimizer of the examples, whole or with its state divided among replicas."""

from collections.abc import Callable

import torch

import rrfp_async

LEARNING_RATE = 2e-3


def make_optimizer(parameters: list[torch.nn.Parameter]) -> torch.optim.Optimizer:
    """The same optimizer for the whole model and for a stage."""
    return torch.optim.AdamW(parameters, lr=LEARNING_RATE)


def make_zero1(
    world: rrfp_async.World,
) -> Callable[[list[torch.nn.Parameter]], torch.optim.Optimizer]:
    """The same with its state divided among the replicas (ZeRO-1)."""
    # Here, as its package uses torch.jit when it is imported, which takes time and warns.
    from torch.distributed.optim import ZeroRedundancyOptimizer  # noqa: PLC0415

    return lambda parameters: ZeroRedundancyOptimizer(
        parameters,
        optimizer_class=torch.optim.AdamW,
        process_group=world.mesh.get_group("dp"),
        lr=LEARNING_RATE,
    )
