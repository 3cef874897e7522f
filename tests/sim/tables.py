"""Cost tables for the tests: even, random, and full of ties; as JSON and as Costs."""

import json
import random
from pathlib import Path

from rrfp_async.sim.costs import Costs
from tests.sim.event_simulation import Tables

NAMES = ("forward_s", "backward_input_s", "weight_s", "activation_delay_s", "gradient_delay_s")
STYLES = ("random", "undelayed", "delayed", "grid", "still grid", "zeros")
"""Tables of `drawn`: the last three hold values of a grid, so that much happens at once."""


def even(
    stages: int,
    microbatches: int,
    *,
    forward_s: float = 1.0,
    backward_s: float = 2.0,
    delay_s: float = 0.0,
) -> Tables:
    """Every task of a kind and every transfer the same."""
    values = (forward_s, backward_s / 2, backward_s / 2, delay_s, delay_s)
    return {
        name: [[value] * microbatches for _ in range(stages)]
        for name, value in zip(NAMES, values, strict=True)
    }


def drawn(source: random.Random, stages: int, microbatches: int, style: str) -> Tables:
    """Random tables of one of the STYLES."""

    def cost(name: str) -> float:
        delay = name.endswith("delay_s")
        match style:
            case "random":
                return source.uniform(0.0, 2.0) if delay else source.lognormvariate(0.0, 1.0)
            case "undelayed":
                return 0.0 if delay else source.lognormvariate(0.0, 1.0)
            case "delayed":
                return source.lognormvariate(1.0, 1.0) if delay else source.uniform(0.1, 1.0)
            case "grid":
                return source.choice([0.0, 0.1, 0.2, 0.7] if delay else [0.1, 0.2, 0.3])
            case "still grid":
                return 0.0 if delay else source.choice([0.1, 0.2, 0.3])
        return source.choice([0.0, 0.0, 0.1, 0.3])

    return {
        name: [[cost(name) for _ in range(microbatches)] for _ in range(stages)] for name in NAMES
    }


def costs_of(tables: Tables) -> Costs:
    """The tables as rrfp_async takes them."""
    return Costs(**{name: tuple(map(tuple, rows)) for name, rows in tables.items()})


def written(tables: object, path: Path) -> str:
    """Write the tables as `--costs` reads them; returns the path."""
    path.write_text(json.dumps(tables), encoding="utf-8")
    return str(path)
