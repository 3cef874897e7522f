"""Which modules' backwards can be split, found before they run.

Knows what in a module stands in the way; not how the split is done.
"""

import ast
import functools
import inspect
import textwrap
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn.parameter import is_lazy

_KEPT_SHARE_MOST = 0.25
_WRAPPERS = ("FullyShardedDataParallel", "DistributedDataParallel", "FSDPModule")


@dataclass(frozen=True, slots=True)
class SplitSupport:
    """How a module's backward can be split.

    Attributes:
        mode: `deferral`, or `full`: not at all.
        reason: Why not; empty for `deferral`.
    """

    mode: str
    reason: str = ""


def split_support(module: torch.nn.Module, *, insist: bool = True) -> SplitSupport:
    """What can be told of `module` without running it.

    Args:
        module: The stage's.
        insist: Whether it is to be split also where that does not pay: gradients of parameters
            outside `nn.Linear` are computed by I and kept, in full, until W. An embedding of many
            words would be kept for every microbatch in flight.
    """
    reason = next(_obstacles(module), None)
    if reason is None and not insist and _kept_share(module) > _KEPT_SHARE_MOST:
        reason = "too many of its parameters are outside nn.Linear"
    return SplitSupport("deferral") if reason is None else SplitSupport("full", reason)


def _kept_share(module: torch.nn.Module) -> float:
    """The part of the parameters' elements whose gradients I is sure to compute.

    Those of torch's own modules, Linear apart. What others do with theirs, only a run tells.
    """
    kept = total = 0
    for part in module.modules():
        own = sum(map(_elements, part.parameters(recurse=False)))
        total += own
        if type(part).__module__.startswith("torch.nn.") and type(part) is not torch.nn.Linear:
            kept += own
    return kept / total if total else 0.0


def _elements(parameter: torch.nn.Parameter) -> int:
    """How many gradients it gets; none that are known before a lazy module's first forward."""
    wanted = parameter.requires_grad and not is_lazy(parameter)
    return parameter.numel() if wanted else 0


def _obstacles(module: torch.nn.Module) -> Iterator[str]:
    for name, part in module.named_modules():
        where = f"module {name!r}" if name else "the module"
        kinds = [kind.__name__ for kind in type(part).__mro__]
        if "OptimizedModule" in kinds or getattr(part, "_compiled_call_impl", None) is not None:
            yield f"{where} is compiled"
        if found := next((kind for kind in kinds if kind in _WRAPPERS), None):
            yield f"{where} is wrapped by {found}"
        if _is_reentrant(part):
            yield f"{where} uses reentrant checkpointing"
    for name, parameter in module.named_parameters():
        if parameter._backward_hooks or getattr(parameter, "_post_accumulate_grad_hooks", None):
            yield f"parameter {name!r} has hooks"
        if is_shard(parameter):
            yield f"parameter {name!r} is a DTensor"


def _is_reentrant(part: torch.nn.Module) -> bool:
    """Whether its checkpoint wrapper, or its source, asks for reentrant checkpointing."""
    wrapped = getattr(part, "checkpoint_impl", None)
    if wrapped is not None:
        return getattr(wrapped, "name", "") == "REENTRANT"
    return _asks_for_reentrant(type(part).forward)


@functools.cache  # a function does not change its source
def _asks_for_reentrant(forward: Callable[..., Any]) -> bool:
    """Whether the source has a call with `use_reentrant=True`."""
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(forward)))
    except (OSError, TypeError, SyntaxError):
        return False
    keywords = (
        keyword
        for node in ast.walk(tree)
        if isinstance(node, ast.Call)
        for keyword in node.keywords
        if keyword.arg == "use_reentrant"
    )
    return any(
        isinstance(keyword.value, ast.Constant) and keyword.value.value is True
        for keyword in keywords
    )


def is_shard(parameter: torch.nn.Parameter) -> bool:
    """Whether it is a DTensor: this rank's shard of a parameter, or a replica of one."""
    return "DTensor" in (type(parameter).__name__, type(parameter.data).__name__)
