"""What splitting the backward costs: I + W beside the fused backward and beside torch's helper.

    python -m benchmarks.split

A stage of GPT blocks on random activations, one thread. Every repetition runs the fused backward,
ours and torch.distributed.pipelining's helper one after the other, so that noise meets all three;
the table shows the medians' ratios. Gradients are compared bit for bit first.
"""

import argparse
import copy
import json
import platform
import statistics
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from datetime import date

import torch
from rich.console import Console
from rich.table import Table
from torch import nn
from torch.distributed.pipelining import _backward as torch_backward

from rrfp_async.tasks.split import Deferral, Deferred

BLOCKS = 4
WIDTHS = (64, 256, 768)
CONTEXT = 128


@dataclass(frozen=True)
class Row:
    """Ratios of median times to the fused backward's, and that in milliseconds.

    `forward` is the forward's with deferring layers to the ordinary forward's.
    """

    width: int
    fused_ms: float
    input_over_fused: float
    both_over_fused: float
    torch_both_over_fused: float
    forward: float


class Block(nn.Module):
    """A pre-norm transformer block `(batch, seq, width)`, as examples/gpt.py has it."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.queries_keys_values = nn.Linear(width, 3 * width)
        self.project = nn.Linear(width, width)
        self.heads = max(1, width // 64)
        self.mlp = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """Causal self-attention and the MLP, each with a residual."""
        batch, seq, width = hidden.shape
        mixed = self.queries_keys_values(self.norm1(hidden))
        parts = mixed.view(batch, seq, 3, self.heads, -1).permute(2, 0, 3, 1, 4).unbind(0)
        seen = nn.functional.scaled_dot_product_attention(*parts, is_causal=True)
        hidden = hidden + self.project(seen.transpose(1, 2).reshape(batch, seq, width))
        return hidden + self.mlp(self.norm2(hidden))


class Stage:
    """A module with activations and the gradient that comes back for its output."""

    def __init__(self, module: nn.Module, x: torch.Tensor, seed: torch.Tensor) -> None:
        self.module = copy.deepcopy(module)
        self.deferral = Deferral(self.module)
        self.x = x.detach().clone().requires_grad_()
        self.seed = seed
        self.times: defaultdict[str, list[float]] = defaultdict(list)

    def clock(self, name: str, run: Callable[[], object]) -> object:
        """Run and note how long it took, in milliseconds."""
        begun = time.perf_counter()
        result = run()
        self.times[name].append((time.perf_counter() - begun) * 1000)
        return result

    def begin(self) -> None:
        """Start without gradients."""
        self.module.zero_grad(set_to_none=True)
        self.x.grad = None

    def gradients(self) -> list[torch.Tensor | None]:
        """Every parameter's."""
        return [parameter.grad for parameter in self.module.parameters()]


def fused(stage: Stage) -> None:
    """Forward, then the backward in one."""
    stage.begin()
    y = stage.clock("forward", lambda: stage.module(stage.x))
    stage.clock("fused", lambda: torch.autograd.backward(y, stage.seed))


def ours(stage: Stage) -> None:
    """Forward with deferring layers, I, W."""
    stage.begin()
    kept = Deferred()
    stage.deferral.install()
    with stage.deferral.forward(kept):
        y = stage.clock("forward", lambda: stage.module(stage.x))
    stage.clock("input", lambda: stage.deferral.backward_input(kept, [y], [stage.seed]))
    stage.clock("weight", kept.accumulate)
    stage.deferral.remove()


def torchs(stage: Stage) -> None:
    """Forward, then torch's helper for I and for W."""
    stage.begin()
    y = stage.module(stage.x)
    weights = list(stage.module.parameters())
    _, groups = stage.clock(
        "input",
        lambda: torch_backward.stage_backward_input([y], [stage.seed], [stage.x], iter(weights)),
    )
    stage.clock("weight", lambda: torch_backward.stage_backward_weight(iter(weights), groups))


def measure(width: int, *, tokens: int, repeats: int) -> Row:
    """The ratios at one width."""
    torch.manual_seed(0)
    module = nn.Sequential(*(Block(width) for _ in range(BLOCKS)))
    shape = (max(1, tokens // CONTEXT), CONTEXT, width)
    x, seed = torch.randn(shape), torch.randn(shape)
    stages = {run: Stage(module, x, seed) for run in (fused, ours, torchs)}
    for _ in range(repeats + 2):
        for run, stage in stages.items():
            run(stage)
    pairs = zip(stages[fused].gradients(), stages[ours].gradients(), strict=True)
    if not all(torch.equal(one, other) for one, other in pairs):
        raise SystemExit(f"gradients differ at width {width}")

    def median(run: Callable[[Stage], None], *names: str) -> float:
        times = [stages[run].times[name][2:] for name in names]
        return statistics.median(map(sum, zip(*times, strict=True)))

    whole = median(fused, "fused")
    return Row(
        width,
        whole,
        median(ours, "input") / whole,
        median(ours, "input", "weight") / whole,
        median(torchs, "input", "weight") / whole,
        median(ours, "forward") / median(fused, "forward"),
    )


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tokens", type=int, default=2048, help="per microbatch")
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    rows = [measure(w, tokens=options.tokens, repeats=options.repeats) for w in WIDTHS]
    if options.json:
        print(json.dumps([asdict(row) for row in rows]))
        return 0
    console = Console(width=100)
    console.print(
        f"{platform.machine()}, Python {platform.python_version()}, torch {torch.__version__}, "
        f"{date.today()}; {BLOCKS} GPT blocks, {options.tokens} tokens, {options.repeats} repeats"
    )
    table = Table("width", "fused, ms", "I / fused", "(I+W) / fused", "torch's (I+W)", "forward")
    for row in rows:
        ratios = (
            row.input_over_fused,
            row.both_over_fused,
            row.torch_both_over_fused,
            row.forward,
        )
        table.add_row(str(row.width), f"{row.fused_ms:.2f}", *(f"{ratio:.3f}" for ratio in ratios))
    console.print(table)
    return 0


if __name__ == "__main__":
    sys.exit(main())
