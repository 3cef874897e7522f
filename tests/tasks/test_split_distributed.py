"""Stages whose parameters are torch's own distributed kinds: run whole."""

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

from tests.tasks.split_harness import (
    LAST,
    MIDDLE,
    PUT_OFF,
    Case,
    made,
    make_stage,
    run_fused,
    run_split,
)
from tests.tasks.split_models import WIDTH, mlp, randn

X = randn(6, WIDTH)


@pytest.fixture
def one_process() -> Iterator[Any]:
    """A process group of one, and a mesh on it."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield init_device_mesh("cpu", (1,))
    dist.destroy_process_group()


def _tensor_parallel(mesh: Any) -> nn.Module:
    return parallelize_module(mlp(), mesh, {"0": ColwiseParallel(), "2": ColwiseParallel()})


def _sharded(mesh: Any) -> nn.Module:
    return fully_shard(mlp(), mesh=mesh)


@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning")
@pytest.mark.parametrize("place", [LAST, MIDDLE])
@pytest.mark.parametrize("wrap", [_tensor_parallel, _sharded])
def test_distributed_parameters_are_run_whole(
    one_process: Any, wrap: Callable[[Any], nn.Module], place: str
) -> None:
    """DTensor parameters and FSDP2: full, warned of, bit for bit."""
    case = Case("distributed", partial(wrap, one_process), X)
    with pytest.warns(RuntimeWarning, match=r"stage 1.*(DTensor|FSDPModule)"):
        stage = make_stage(case, made(case), place)
    expected = run_fused(case, made(case), place)
    assert expected.differences(run_split(case, stage, PUT_OFF, place)) == []
