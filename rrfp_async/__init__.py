"""Readiness-first pipeline-parallel training for PyTorch.

Names are loaded when first used: `import rrfp_async.arbiter` loads no torch. This is the one
lazy place.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rrfp_async.config import Config
    from rrfp_async.errors import (
        BusError,
        CheckpointError,
        CodecError,
        DataExhausted,
        ProtocolError,
        RrfpError,
        StateError,
        StepFailed,
        TransferError,
    )
    from rrfp_async.from_pipe import stages_from_pipe
    from rrfp_async.gpu.delays import Delays
    from rrfp_async.hints import Admissible, HintOrder, RankedHint, Schedule
    from rrfp_async.ids import Edge, TaskId, TaskKind
    from rrfp_async.launch import run, run_local
    from rrfp_async.metrics import Metrics
    from rrfp_async.partition import split_sequential
    from rrfp_async.progress import Progress
    from rrfp_async.result import StepResult
    from rrfp_async.runtime import Runtime
    from rrfp_async.tasks.batch import Microbatches
    from rrfp_async.tasks.chunk_spec import REPLICATE, TensorChunkSpec
    from rrfp_async.tasks.generators import Phase, rng_stream
    from rrfp_async.tasks.loss import TokenMean
    from rrfp_async.tasks.weight_grad_store import WeightGradStore, weight_grad_store
    from rrfp_async.topology import Topology
    from rrfp_async.torchrun import torchrun_world
    from rrfp_async.world import World, local_world, with_delays

_ROOM_OF = {
    "Admissible": "hints",
    "BusError": "errors",
    "CheckpointError": "errors",
    "CodecError": "errors",
    "Config": "config",
    "DataExhausted": "errors",
    "Delays": "gpu.delays",
    "Edge": "ids",
    "HintOrder": "hints",
    "Metrics": "metrics",
    "Microbatches": "tasks.batch",
    "Phase": "tasks.generators",
    "Progress": "progress",
    "ProtocolError": "errors",
    "REPLICATE": "tasks.chunk_spec",
    "RankedHint": "hints",
    "RrfpError": "errors",
    "Runtime": "runtime",
    "Schedule": "hints",
    "StateError": "errors",
    "StepFailed": "errors",
    "StepResult": "result",
    "TaskId": "ids",
    "TaskKind": "ids",
    "TensorChunkSpec": "tasks.chunk_spec",
    "TokenMean": "tasks.loss",
    "Topology": "topology",
    "TransferError": "errors",
    "WeightGradStore": "tasks.weight_grad_store",
    "World": "world",
    "local_world": "world",
    "rng_stream": "tasks.generators",
    "run": "launch",
    "run_local": "launch",
    "split_sequential": "partition",
    "stages_from_pipe": "from_pipe",
    "torchrun_world": "torchrun",
    "weight_grad_store": "tasks.weight_grad_store",
    "with_delays": "world",
}

__all__ = [
    "REPLICATE",
    "Admissible",
    "BusError",
    "CheckpointError",
    "CodecError",
    "Config",
    "DataExhausted",
    "Delays",
    "Edge",
    "HintOrder",
    "Metrics",
    "Microbatches",
    "Phase",
    "Progress",
    "ProtocolError",
    "RankedHint",
    "RrfpError",
    "Runtime",
    "Schedule",
    "StateError",
    "StepFailed",
    "StepResult",
    "TaskId",
    "TaskKind",
    "TensorChunkSpec",
    "TokenMean",
    "Topology",
    "TransferError",
    "WeightGradStore",
    "World",
    "local_world",
    "rng_stream",
    "run",
    "run_local",
    "split_sequential",
    "stages_from_pipe",
    "torchrun_world",
    "weight_grad_store",
    "with_delays",
]


def __getattr__(name: str) -> Any:
    room = _ROOM_OF.get(name)
    if room is None:
        raise AttributeError(f"module 'rrfp_async' has no attribute {name!r}")
    return getattr(import_module(f"rrfp_async.{room}"), name)


def __dir__() -> list[str]:
    return sorted(__all__)
