"""A stage that sleeps inside autograd: processes' sleeps overlap as GPUs' kernels do.

So a pipeline of more stages than this machine has cores can be timed on it.
"""

import time
from typing import Any

import torch
from torch import nn


class _Sleep(torch.autograd.Function):
    """The identity; takes its time in each direction."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, forward_s: float, backward_s: float) -> torch.Tensor:
        ctx.backward_s = backward_s
        time.sleep(forward_s)
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        time.sleep(ctx.backward_s)
        return gradients[0], None, None


class SleepingStage(nn.Module):
    """A linear layer on `(batch, width)`, then a sleep of so many seconds each way."""

    def __init__(self, width: int, forward_s: float, backward_s: float) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width)
        self.forward_s = forward_s
        self.backward_s = backward_s

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return _Sleep.apply(self.linear(x), self.forward_s, self.backward_s)
