"""The axes of the matrix, which of their values go together, and the rows to be run.

Every row trains the same four stages. How a row becomes a case is told in `cases`.
"""

from functools import cache
from typing import Any

from tests.parity.pairwise import Row, Rule, every_pair, every_value

LAW = "!"
"""Ends the name of a hint that is executed as it stands."""

AXES: dict[str, tuple[Any, ...]] = {
    "hint": (
        *("bf", "fb", "bfw", "auto", "1f1b", "1f1b!", "zb-h1", "zb-h1!"),
        *("zbv", "zbv!", "interleaved", "interleaved!", "gpipe", "gpipe!"),
    ),
    "microbatches": (1, 2, 3, 4, 5, 7, 9),
    "placement": ("one", "loop", "v", "listed"),
    "whole": ("no stage", "a hooked stage"),
    "recompute": ("none", "checkpoint"),
    "dtype": ("float32", "float64", "bfloat16", "autocast"),
    "shapes": ("even", "odd", "lengths"),
    "arguments": ("plain", "keywords", "chunk specs"),
    "between": ("tensor", "tuple", "tree"),
    "frozen": ("nothing", "first", "middle", "last", "parts"),
    "loss": ("mean", "tokens", "sum"),
    "steps": ("one", "momentum", "adamw", "accumulated"),
    "order": ("fixed", "free"),
    "tied": ("nothing", "embedding"),
}
"""By axis, its values.

hint: with "!" it is binding. whole: whether a stage has a parameter hook, so that its backward
cannot be split. frozen: whose parameters want no gradient; the first stages, one in the middle,
the last, or every bias and norm. order: whether gradients are accumulated in a fixed order.
"""

PLACED = {"one": (4, 1, "loop"), "loop": (2, 2, "loop"), "v": (2, 2, "v"), "listed": (2, 2, None)}
"""By name of a placement: ranks, chunks a rank, and how the chunks are placed."""

ONE_CHUNK = ("1f1b", "zb-h1", "gpipe")


def _made_for(hint: str, placement: str) -> bool:
    name = hint.removesuffix(LAW)
    if name in ONE_CHUNK:
        return placement == "one"
    fitting = {"zbv": ("v",), "interleaved": ("one", "loop")}
    return placement in fitting.get(name, PLACED)


def _in_equal_rounds(hint: str, placement: str, microbatches: int) -> bool:
    rounds = max(1, microbatches // PLACED[placement][0])
    return hint.removesuffix(LAW) != "interleaved" or microbatches % rounds == 0


RULES = (
    Rule(("hint", "placement"), _made_for),
    Rule(("hint", "placement", "microbatches"), _in_equal_rounds),
    Rule(("order", "dtype"), lambda order, dtype: order == "fixed" or dtype == "float64"),
    Rule(
        ("tied", "frozen"),  # copies are one parameter: both frozen or none
        lambda tied, frozen: tied == "nothing" or frozen not in ("first", "last"),
    ),
)
"""What does not go together: lists made for other pipelines, rounding that cannot be stated."""


@cache
def matrix() -> dict[str, Row]:
    """The rows that hold every pair of values, by name."""
    return {_name(number, row): row for number, row in enumerate(every_pair(AXES, RULES))}


@cache
def sample() -> frozenset[str]:
    """The names of a few rows that hold every value once."""
    chosen = every_value(list(matrix().values()))
    return frozenset(name for name, row in matrix().items() if row in chosen)


def _name(number: int, row: Row) -> str:
    defaults = ("no stage", "none", "nothing", "fixed")
    told = [str(value) for value in row.values() if value not in defaults]
    return f"{number:03d} " + " ".join(told).replace("a hooked stage", "hooked")
