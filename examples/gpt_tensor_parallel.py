"""A stage of the GPT that several ranks compute together: a plan for torch's parallelize_module.

Attention is divided by heads, the feed-forward layer by channels. Norms, embedding and head are
computed by every rank.
"""

from typing import Any

import torch
from gpt import Attention, Block
from torch import nn
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)


def parallelize(stage: nn.Module, mesh: Any) -> nn.Module:
    """Leave each rank of the one-dimensional `mesh` its shard of every block of `stage`.

    Raises:
        ValueError: If the heads cannot be divided.
    """
    for layer in stage.children():
        if isinstance(layer, Block):
            _keep_heads_together(layer.attention, mesh.size())
            plan = {
                "attention.qkv": ColwiseParallel(),
                "attention.out": RowwiseParallel(),
                "up": ColwiseParallel(),
                "down": RowwiseParallel(),
            }
            parallelize_module(layer, mesh, plan)
    return stage


@torch.no_grad()
def _keep_heads_together(attention: Attention, ranks: int) -> None:
    """Reorder the rows of q, k and v so that each rank's shard is q, k and v of its own heads."""
    if attention.heads % ranks:
        raise ValueError(f"{attention.heads} heads cannot be divided by --tp {ranks}")
    attention.heads //= ranks
    own_rows = attention.heads * attention.head_width
    for parameter in attention.qkv.parameters():
        by_part = parameter.unflatten(0, (3, ranks, own_rows))
        parameter.copy_(by_part.transpose(0, 1).flatten(0, 2).clone())
