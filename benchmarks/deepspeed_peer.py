"""DeepSpeed's pipeline engine (1F1B) as a row of `versus_torch`, where it can be imported.

DeepSpeed is none of our requirements; `unavailable` says whether it is here and how to get it. It
is a source package that needs compile nothing for CPU, but setuptools of at least 70.1 to build.
Its ranks talk over the default process group and must be started by torchrun: it reads
`LOCAL_RANK`.
"""

import contextlib
import importlib
import io
import logging
import os
import sys
from types import ModuleType
from typing import Any

import torch
from torch import nn

from benchmarks.peers import Peer, System, loss_fn

INSTALL = (
    "DS_ACCELERATOR=cpu DS_BUILD_OPS=0 pip install --no-build-isolation "
    "-c constraints.txt deepspeed==0.19.8"
)

DEEPSPEED = System("deepspeed", "1F1B")
"""The row."""


def unavailable() -> str | None:
    """Why there can be no such row, and what to do; None if there can."""
    try:
        _load()
    except (ImportError, AttributeError, OSError, RuntimeError, ValueError) as error:
        return f"deepspeed cannot be imported ({error!r}); install it: {INSTALL}"
    return None


def _load() -> ModuleType:
    """Import it for the CPU (it chooses a device once); it may warn, but not on stdout."""
    os.environ.setdefault("DS_ACCELERATOR", "cpu")
    importlib.import_module("deepspeed.pipe")
    for handler in logging.getLogger("DeepSpeed").handlers:
        if isinstance(handler, logging.StreamHandler):
            handler.setStream(sys.stderr)
    return importlib.import_module("deepspeed")


class DeepSpeedPeer(Peer):
    """One stage a rank in a PipelineEngine, over the default process group.

    A step ends with that of an optimizer, which changes nothing here: SGD with a rate of 0.
    """

    def __init__(self, system: System, rank: int, pp: int, microbatches: int, rows: int) -> None:
        super().__init__(system, rank, pp, microbatches, rows)
        if system.chunks != 1:
            raise ValueError(f"{system.chunks} stages a rank: DeepSpeed's 1F1B takes 1")
        with contextlib.redirect_stdout(io.StringIO()):  # it prints its plan
            self._engine = self._engine_of(_load(), rank, pp, rows)
        self._engine.zero_grad = lambda: None  # else its step ends with no gradients to compare
        self._samples = [(part, part) for part in self.batch.tensor_split(microbatches)]

    def _engine_of(self, deepspeed: ModuleType, rank: int, pp: int, rows: int) -> Any:
        """An engine around this rank's layer; of other ranks' it only counts placeholders."""
        # Else it compiles an all-reduce through shared memory, of which a pipeline has no use.
        deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
        deepspeed.init_distributed(dist_backend="gloo", verbose=False)
        (own,) = self.layers
        module = deepspeed.pipe.PipelineModule(
            [own if stage == rank else nn.Identity() for stage in range(pp)],
            num_stages=pp,
            partition_method="uniform",
            loss_fn=loss_fn,
        )
        engine, *_ = deepspeed.initialize(
            model=module,
            optimizer=torch.optim.SGD(own.parameters(), lr=0.0),
            config={
                "train_micro_batch_size_per_gpu": rows,
                "gradient_accumulation_steps": self.microbatches,
                "gradient_clipping": 0.0,  # off: it is 1.0 unless told, and costs an all-reduce
                "steps_per_print": 1_000_000_000,
            },
        )
        return engine

    async def step(self) -> None:
        """Blocks."""
        self._engine.train_batch(iter(self._samples))
