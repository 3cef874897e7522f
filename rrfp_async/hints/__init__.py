"""Hint orders: how the ready tasks of a rank are ranked.

`base` says what one is, `ranked` helps to write one, `rounds` holds the dynamic orders and
`schedule` the listed ones, which are generated (`published`) or read (`recorded`) and checked
(`checks`). `names` finds them.
"""

from rrfp_async.hints.base import Admissible, HintOrder
from rrfp_async.hints.names import AUTO, FILES, HINTS, make_order, resolve_hint
from rrfp_async.hints.ranked import RankedHint, RankedQueue
from rrfp_async.hints.rounds import DirectionPriority, RoundHint
from rrfp_async.hints.schedule import Execution, ListedOrder, Schedule

__all__ = [
    "AUTO",
    "FILES",
    "HINTS",
    "Admissible",
    "DirectionPriority",
    "Execution",
    "HintOrder",
    "ListedOrder",
    "RankedHint",
    "RankedQueue",
    "RoundHint",
    "Schedule",
    "make_order",
    "resolve_hint",
]
