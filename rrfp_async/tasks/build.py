"""From a user's modules and optimizer to stages, checked before anything starts."""

import inspect
from collections.abc import Callable, Sequence
from typing import Any

import torch

from rrfp_async.tasks.generators import Streams
from rrfp_async.tasks.loss import Loss
from rrfp_async.tasks.split_support import is_shard
from rrfp_async.tasks.stage import Stage
from rrfp_async.tasks.update import Update
from rrfp_async.topology import Topology

MakeOptimizer = Callable[[list[torch.nn.Parameter]], torch.optim.Optimizer]

RESERVED = ("target", "update")
"""Keywords of `train_step` that a model's forward cannot have."""


def build_stages(
    stages: torch.nn.Module | Sequence[torch.nn.Module],
    topology: Topology,
    rank: int,
    loss: Loss | None,
    *,
    split: bool = False,
    insist: bool = True,
    count_bytes: bool = False,
    make_streams: Callable[[int], Streams] | None = None,
) -> dict[int, Stage]:
    """The stages of `rank`, by index; with `split`, their backwards in two where that is possible.

    One that cannot be split is warned of, if one must `insist` on it; else those are not split
    either that would not gain by it. With `count_bytes` they count what their forwards keep;
    `make_streams` gives each what it draws from.

    Raises:
        ValueError: If `stages` is not one module for each stage that the rank owns, or a first
            stage's forward wants a keyword that is reserved.
    """
    if isinstance(stages, torch.nn.Module) and not isinstance(stages, torch.nn.ModuleList):
        stages = [stages]
    modules: list[Any] = list(stages)
    owned = topology.stages_of(rank)
    if len(modules) != len(owned):
        raise ValueError(
            f"rank {rank} was given {len(modules)} stage modules, but of the "
            f"{topology.num_stages} stages it owns {list(owned)}: give one module for each, or "
            f"use fewer ranks"
        )
    for module in modules:
        if not isinstance(module, torch.nn.Module):
            raise ValueError(
                f"a stage of rank {rank} is a {type(module).__name__}: give an nn.Module"
            )
    built = {
        index: Stage(
            index,
            module,
            topology,
            loss if index == topology.last_stage else None,
            split=split,
            insist=insist,
            count_bytes=count_bytes,
            streams=None if make_streams is None else make_streams(index),
        )
        for index, module in zip(owned, modules, strict=True)
    }
    _check_tied(built, topology)
    _share(built, topology, rank)
    for stage in built.values():
        _check_reserved(stage)
        stage.split_choice.warn_if_whole()
    return built


def _check_tied(stages: dict[int, Stage], topology: Topology) -> None:
    """Refuse a tied parameter that its stage does not have."""
    for tied in topology.tied_parameters:
        for index, name in tied.owners:
            if index in stages and name not in dict(stages[index].module.named_parameters()):
                raise ValueError(
                    f"tied parameter {name!r} is none of stage {index}: name it as "
                    f"module.named_parameters() does"
                )


def _share(stages: dict[int, Stage], topology: Topology, rank: int) -> None:
    """Where stages of one rank share a parameter, let all but the first use a stand-in.

    Only if it is tied: else, in which order would they add to it?
    """
    tied = {owner: entry for entry in topology.tied_parameters for owner in entry.owners}
    owners: dict[int, tuple[int, str]] = {}
    for index, stage in stages.items():
        for name, parameter in list(stage.module.named_parameters()):
            first = owners.setdefault(id(parameter), (index, name))
            if first == (index, name):
                continue
            if first not in tied or tied[first] is not tied.get((index, name)):
                raise ValueError(
                    f"stages {first[0]} and {index} of rank {rank} share the parameter {name!r}: "
                    f"say so with Topology(tied=[{{{first[0]}: {first[1]!r}, {index}: {name!r}}}]),"
                    f" or give each stage its own"
                )
            stage.stand_in(parameter)


def _check_reserved(stage: Stage) -> None:
    """Refuse a first stage whose forward wants a keyword that the step takes for itself."""
    if not stage.is_source:
        return
    try:
        parameters = inspect.signature(stage.module.forward).parameters.values()
    except (TypeError, ValueError):  # a compiled function that tells no signature
        return
    for parameter in parameters:
        if parameter.name in RESERVED and parameter.kind is not parameter.POSITIONAL_ONLY:
            raise ValueError(
                f"forward of stage {stage.index} has a parameter {parameter.name!r}, which "
                f"train_step reserves for itself ({', '.join(RESERVED)}): rename the parameter"
            )


def build_optimizer(
    optimizer: torch.optim.Optimizer | MakeOptimizer | None,
    parameters: list[torch.nn.Parameter],
    rank: int,
) -> torch.optim.Optimizer | None:
    """The optimizer given or made; None without one, or for a rank without parameters.

    Raises:
        ValueError: If it is no optimizer, holds parameters of others than this rank, or cannot
            divide those it holds.
    """
    if optimizer is None:
        return None
    if not isinstance(optimizer, torch.optim.Optimizer):
        if not callable(optimizer):
            raise ValueError(
                f"optimizer of type {type(optimizer).__name__} is neither a torch optimizer nor "
                f"a function that makes one from a list of parameters"
            )
        if not parameters:
            return None
        optimizer = optimizer(parameters)
    known = {id(parameter) for parameter in parameters}
    held = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    foreign = sum(id(parameter) not in known for parameter in held)
    if foreign:
        raise ValueError(
            f"optimizer of rank {rank} holds {foreign} parameters that are not of this rank's "
            f"stages: build it from their parameters"
        )
    if type(optimizer).__name__ == "ZeroRedundancyOptimizer" and any(map(is_shard, held)):
        raise ValueError(
            f"ZeroRedundancyOptimizer of rank {rank} holds shards (DTensor), which it cannot "
            f"broadcast: use a plain optimizer where topology.tp is above 1"
        )
    return optimizer


def build_update(
    optimizer: torch.optim.Optimizer | None,
    stages: dict[int, Stage],
    topology: Topology,
    *,
    device: torch.device,
    max_grad_norm: float | None,
    grad_scaler: torch.amp.GradScaler | None,
) -> Update:
    """What ends a training step: every parameter belongs to its first stage here, copies to home.

    Raises:
        ValueError: If clipping or scaling is not set as it must be.
    """
    owned: dict[int, list[torch.nn.Parameter]] = {}
    seen: set[int] = set()
    for index, stage in stages.items():
        new = [each for each in stage.module.parameters() if id(each) not in seen]
        seen.update(map(id, new))
        owned[index] = new
    homes = {tied.owners[0] for tied in topology.tied_parameters}
    copies = {owner for tied in topology.tied_parameters for owner in tied.owners[1:]}
    named = {
        (index, name): id(each)
        for index, stage in stages.items()
        for name, each in stage.module.named_parameters()
    }
    counted = {named[owner] for owner in homes if owner in named}
    not_counted = {named[owner] for owner in copies if owner in named} - counted
    return Update(
        optimizer,
        owned,
        device=device,
        max_grad_norm=max_grad_norm,
        grad_scaler=grad_scaler,
        not_counted=not_counted,
    )
