"""The same training with torch.distributed.pipelining's 1F1B, for comparison.

Takes the stages that the example builds for our runtime, under torchrun.
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.pipelining import PipelineStage, Schedule1F1B

LossFn = Callable[[Any, Any], torch.Tensor]
MakeOptimizer = Callable[[list[torch.nn.Parameter]], torch.optim.Optimizer]


class TorchEngine:
    """One rank of a Schedule1F1B over gloo, a stage a rank.

    Args:
        stage: This rank's module.
        microbatches: How many a batch is split into, equally.
        loss_fn: As for `rrfp_async.Runtime`.
        make_optimizer: Likewise.

    Raises:
        ValueError: If torchrun did not start this process.
    """

    def __init__(
        self,
        stage: torch.nn.Module,
        *,
        microbatches: int,
        loss_fn: LossFn,
        make_optimizer: MakeOptimizer,
    ) -> None:
        if not dist.is_torchelastic_launched():
            raise ValueError("--engine torch needs a process for every rank: start with torchrun")
        if not dist.is_initialized():
            dist.init_process_group("gloo")
        self._rank, self._ranks = dist.get_rank(), dist.get_world_size()
        self._optimizer = make_optimizer(list(stage.parameters()))
        pipeline_stage = PipelineStage(stage, self._rank, self._ranks, torch.device("cpu"))
        self._schedule = Schedule1F1B(pipeline_stage, microbatches, loss_fn=loss_fn)

    def step(self, inputs: torch.Tensor, target: torch.Tensor) -> float | None:
        """Train on a batch `(batch, context)`; the mean loss, on the last rank only."""
        self._optimizer.zero_grad()
        losses: list[torch.Tensor] = []
        args = (inputs,) if self._rank == 0 else ()
        if self._rank == self._ranks - 1:
            self._schedule.step(*args, target=target, losses=losses, return_outputs=False)
        else:
            self._schedule.step(*args, return_outputs=False)
        self._optimizer.step()
        return torch.stack(losses).mean().item() if losses else None

    def loss_for_all(self, loss: float | None) -> float:
        """The last rank's loss, on every rank."""
        shared = torch.tensor([0.0 if loss is None else loss], dtype=torch.float64)
        dist.broadcast(shared, self._ranks - 1)
        return float(shared)

    def close(self) -> None:
        """Leave the process group, when every rank is done."""
        dist.barrier()
        dist.destroy_process_group()
