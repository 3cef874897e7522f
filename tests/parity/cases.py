"""From a row of the matrix to a case: stages, steps, settings, and what must be seen in its run."""

from typing import Any

import torch
from torch import nn

from tests.parity.axes import LAW, PLACED
from tests.parity.batches import CHUNK_SPECS, Batches, shapes_of
from tests.parity.losses import COUNTS, CrossEntropy
from tests.parity.models import Build, freeze, language_model
from tests.parity.pairwise import Row
from tests.runtime.reference import Case, Step

TIED = ({0: "body.embed.weight", 3: "body.out.weight"},)
LISTED = (0, 0, 1, 1)
HOOKED = 2
"""The stage whose backward cannot be split."""

WITHIN = 1e-9
"""Where gradients are accumulated in a free order, in float64."""

UPDATES = {
    "one": (True,),
    "momentum": (True, True),
    "adamw": (True, True),
    "accumulated": (False, True, True),
}


def momentum(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)


def adamw(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=0.01)


def case_of(row: Row) -> Case:
    """The case that a row stands for."""
    build = Build(
        row["between"],
        row["recompute"] == "checkpoint",
        row["dtype"] == "autocast",
        torch.float32 if row["dtype"] == "autocast" else getattr(torch, row["dtype"]),
    )
    stages = language_model(build, hooked=row["whole"] != "no stage")
    freeze(stages, row["frozen"])
    tied = row["tied"] == "embedding"
    if tied:
        with torch.no_grad():
            stages[3].body.out.weight.copy_(stages[0].body.embed.weight)
    _, chunks, placement = PLACED[row["placement"]]
    by_time = row["arguments"] == "chunk specs"
    return Case(
        stages,
        _steps(row, build),
        row["microbatches"],
        CrossEntropy("sum" if row["loss"] == "sum" else "mean", by_time),
        make_optimizer=adamw if row["steps"] == "adamw" else momentum,
        options=_options(row),
        chunks=chunks,
        placement=LISTED if placement is None else placement,
        count=COUNTS[row["loss"]],
        tied=TIED if tied else (),
        specs=CHUNK_SPECS if by_time else {},
    )


def _options(row: Row) -> dict[str, Any]:
    hint = row["hint"]
    options = {"hint": hint.removesuffix(LAW), "deterministic": row["order"] == "fixed"}
    return {**options, "binding": True} if hint.endswith(LAW) else options


def _steps(row: Row, build: Build) -> list[Step]:
    torch.manual_seed(11)
    ignores = row["loss"] == "tokens"
    batches = Batches(row["arguments"], build.dtype, build.words, build.width, ignores)
    return [
        batches.step(shapes_of(row["shapes"], row["microbatches"], number), update=update)
        for number, update in enumerate(UPDATES[row["steps"]])
    ]


def within(row: Row) -> float:
    """How far a run may be from the reference."""
    return 0.0 if row["order"] == "fixed" else WITHIN


def must_warn(row: Row) -> bool:
    """Whether the hint insists on splitting every stage, and one cannot be."""
    return row["whole"] != "no stage" and row["hint"].removesuffix(LAW) in ("bfw", "zb-h1", "zbv")


def kinds_of(row: Row, stage: int) -> set[str] | None:
    """The kinds of tasks that a stage must run; None where `auto` decides.

    Nothing flows back below the first stage with something to train, and only what trains has a W.
    """
    frozen = {"first": (0, 1), "middle": (1,), "last": (3,)}.get(row["frozen"], ())
    splits = row["hint"].removesuffix(LAW) in ("bfw", "zb-h1", "zbv")
    if row["frozen"] == "first" and stage in frozen:
        return {"F"}
    if row["hint"] == "auto":
        return None
    whole = stage in frozen or (row["whole"] != "no stage" and stage == HOOKED)
    return {"F", "I", "W"} if splits and not whole else {"F", "B"}
