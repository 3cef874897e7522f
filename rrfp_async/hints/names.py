"""What `hint=` may be: a name, a file, an object; and the order that one rank works with."""

import copy
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from rrfp_async.hints.base import HintOrder
from rrfp_async.hints.loop_placement import interleaved, interleaved_zero_bubble, looped_bfs
from rrfp_async.hints.published import (
    LOOP,
    V_OF_TWO,
    PublishedSchedule,
    gpipe,
    one_forward_one_backward,
    zero_bubble_h1,
)
from rrfp_async.hints.recorded import from_torch, is_torch_schedule, read_csv, read_log
from rrfp_async.hints.rounds import DirectionPriority, RoundHint
from rrfp_async.hints.schedule import Execution, ListedOrder, Schedule
from rrfp_async.hints.v_placement import dual_pipe_v, zero_bubble_v
from rrfp_async.topology import Topology


@dataclass(frozen=True, slots=True)
class NamedHint:
    """A hint that has a name, one line about it, and what makes it."""

    summary: str
    make: Callable[[], HintOrder | Schedule]


AUTO = "auto"
"""The hint of whoever sets none."""

HINTS: Mapping[str, NamedHint] = MappingProxyType(
    {
        AUTO: NamedHint(
            "the default: bfw-deep, but a stage whose backward does not gain by it is not split",
            lambda: RoundHint(forward_first=False, splits=True, deep=True),
        ),
        "bf": NamedHint(
            "rounds of one backward, then one forward",
            lambda: RoundHint(forward_first=False),
        ),
        "bfw": NamedHint(
            "as bf with the backward split: weight gradients only where nothing else is ready",
            lambda: RoundHint(forward_first=False, splits=True),
        ),
        "bf-deep": NamedHint(
            "as bf, but of several chunks the one nearest to the end first",
            lambda: RoundHint(forward_first=False, deep=True),
        ),
        "bfw-deep": NamedHint(
            "as bfw, but of several chunks the one nearest to the end first",
            lambda: RoundHint(forward_first=False, splits=True, deep=True),
        ),
        "fb": NamedHint(
            "rounds of one forward, then one backward", lambda: RoundHint(forward_first=True)
        ),
        "b-priority": NamedHint(
            "a backward whenever one is ready", lambda: DirectionPriority(forward_first=False)
        ),
        "f-priority": NamedHint(
            "a forward whenever one is ready", lambda: DirectionPriority(forward_first=True)
        ),
        "gpipe": NamedHint(
            "a list: all forwards, then all backwards", lambda: PublishedSchedule("gpipe", gpipe)
        ),
        "1f1b": NamedHint(
            "a list: forwards until the pipeline is full, then backward and forward in turn",
            lambda: PublishedSchedule("1f1b", one_forward_one_backward),
        ),
        "zb-h1": NamedHint(
            "a list: 1f1b with the backward split and weight gradients put off, at 1f1b's memory",
            lambda: PublishedSchedule("zb-h1", zero_bubble_h1, splits=True),
        ),
        "looped-bfs": NamedHint(
            "a list: all forwards chunk after chunk, then back; chunks in a loop",
            lambda: PublishedSchedule("looped-bfs", looped_bfs, needs=LOOP),
        ),
        "interleaved": NamedHint(
            "a list: 1f1b of several chunks a rank in turn, in rounds; chunks in a loop",
            lambda: PublishedSchedule("interleaved", interleaved, needs=LOOP),
        ),
        "interleaved-zb": NamedHint(
            "a list: interleaved with the backward split, weight gradients put off",
            lambda: PublishedSchedule(
                "interleaved-zb", interleaved_zero_bubble, needs=LOOP, splits=True
            ),
        ),
        "zbv": NamedHint(
            "a list: zero bubble for two chunks a rank placed in a V",
            lambda: PublishedSchedule("zbv", zero_bubble_v, needs=V_OF_TWO, splits=True),
        ),
        "dualpipev": NamedHint(
            "a list: a forward of one, then a backward of the other of two chunks placed in a V",
            lambda: PublishedSchedule("dualpipev", dual_pipe_v, needs=V_OF_TWO, splits=True),
        ),
    }
)
"""The hints that have a name."""

FILES: Mapping[str, tuple[str, Callable[[str], Schedule]]] = MappingProxyType(
    {
        "csv:FILE": ("a list: a schedule in torch.distributed.pipelining's CSV format", read_csv),
        "replay:DIR": (
            "a list: what an earlier run dispatched, from its trace_dir; binding unless told not",
            read_log,
        ),
    }
)
"""The hints that are read, by the form of their name."""


def resolve_hint(hint: Any) -> HintOrder | Schedule:
    """What `hint` stands for: an order as a prototype for every rank, or a schedule for all.

    Raises:
        ValueError: If it is not known, or what it names cannot be read.
    """
    if isinstance(hint, HintOrder):
        return _copy_of(hint)
    if isinstance(hint, Schedule):
        return hint
    if is_torch_schedule(hint):
        return from_torch(hint)
    if isinstance(hint, str):
        return _resolve_name(hint)
    raise ValueError(
        f"hint {hint!r} of type {type(hint).__name__} is no hint order: use one of {_known()}, an "
        f"instance of a class derived from rrfp_async.HintOrder, or a schedule object of "
        f"torch.distributed.pipelining"
    )


def make_order(
    resolved: HintOrder | Schedule, topology: Topology, rank: int, execution: Execution
) -> HintOrder:
    """The order that `rank` works with, its own."""
    if isinstance(resolved, Schedule):
        return ListedOrder(resolved, topology, rank, execution)
    return _copy_of(resolved)


def _resolve_name(hint: str) -> HintOrder | Schedule:
    if hint in HINTS:
        return HINTS[hint].make()
    for form, (_, read) in FILES.items():
        prefix = form[: form.index(":") + 1]
        if hint.startswith(prefix):
            return read(hint.removeprefix(prefix))
    raise ValueError(f"hint {hint!r} is not known: use one of {_known()}, or a HintOrder object")


def _known() -> str:
    return ", ".join((*HINTS, *FILES))


def _copy_of(hint: HintOrder) -> HintOrder:
    try:
        return copy.deepcopy(hint)
    except Exception as error:  # whatever its parts raise
        raise ValueError(
            f"hint {hint.name!r} cannot be copied ({error}), but every rank works on a copy of "
            f"its own: keep only plain data in it, or define __deepcopy__"
        ) from error
