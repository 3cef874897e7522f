"""What tasks and transfers cost on the virtual cluster: tables, read from a file or drawn.

A table has a row per stage and a column per microbatch, in seconds. A draw holds everything that
is random, so that several orders can be compared on the same one.
"""

import json
import math
import random
import reprlib
from collections.abc import Mapping
from dataclasses import dataclass, fields
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any

from rrfp_async.ids import TaskId, TaskKind

Table = tuple[tuple[float, ...], ...]

TASK_S = 0.010
"""What F, I and W take each on an ordinary stage, in seconds."""

_ENCODER_SIGMA = 0.6
_DELAY_SIGMA = 1.0
_MOST_S = 1e9
_MEMORY = 0.9  # of the running average of a task's own time


@dataclass(frozen=True, slots=True)
class Costs:
    """The costs of one step, each a table `[stage][microbatch]` in seconds.

    Attributes:
        forward_s: Of F.
        backward_input_s: Of I; B takes this and `weight_s`.
        weight_s: Of W.
        activation_delay_s: From the end of F on a stage until its result has arrived.
        gradient_delay_s: From the end of B or I on a stage until its result has arrived.

    Raises:
        ValueError: If tables differ in shape or hold anything but finite numbers of at least 0.
    """

    forward_s: Table
    backward_input_s: Table
    weight_s: Table
    activation_delay_s: Table
    gradient_delay_s: Table

    def __post_init__(self) -> None:
        for field in fields(self):
            _check(field.name, getattr(self, field.name), self.forward_s)

    @property
    def stages(self) -> int:
        """How many stages there are."""
        return len(self.forward_s)

    @property
    def microbatches(self) -> int:
        """How many microbatches there are."""
        return len(self.forward_s[0])

    def task_s(self, task: TaskId) -> float:
        """How long `task` holds the device, in seconds."""
        stage, microbatch = task.stage, task.microbatch
        if task.kind is TaskKind.F:
            return self.forward_s[stage][microbatch]
        if task.kind is TaskKind.I:
            return self.backward_input_s[stage][microbatch]
        if task.kind is TaskKind.W:
            return self.weight_s[stage][microbatch]
        return self.backward_input_s[stage][microbatch] + self.weight_s[stage][microbatch]

    def work_s(self, stage: int) -> float:
        """All the work of `stage`, in seconds."""
        tables = (self.forward_s, self.backward_input_s, self.weight_s)
        return math.fsum(cost for table in tables for cost in table[stage])

    def merged(self, chunks: int) -> "Costs":
        """The same work in fewer stages: every `chunks` in a row become one.

        Nothing has to be sent within one.
        """
        firsts = range(0, self.stages, chunks)

        def summed(table: Table) -> Table:
            groups = (table[first : first + chunks] for first in firsts)
            return tuple(tuple(map(math.fsum, zip(*group, strict=True))) for group in groups)

        return Costs(
            summed(self.forward_s),
            summed(self.backward_input_s),
            summed(self.weight_s),
            tuple(self.activation_delay_s[first + chunks - 1] for first in firsts),
            tuple(self.gradient_delay_s[first] for first in firsts),
        )

    @property
    def total_s(self) -> float:
        """All work and all delays, one after the other: nothing can take longer."""
        tables = (getattr(self, field.name) for field in fields(self))
        return math.fsum(cost for table in tables for row in table for cost in row)


def read_costs(path: str | Path) -> Costs:
    """Costs from a JSON object that holds the five tables as arrays.

    Raises:
        ValueError: If the file cannot be read or its tables break a rule.
    """
    try:
        tables = json.loads(Path(path).read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ValueError(f"costs {path} cannot be read ({error}): name a JSON file") from error
    names = [field.name for field in fields(Costs)]
    if not isinstance(tables, dict) or sorted(tables) != sorted(names):
        got = ", ".join(map(str, tables)) if isinstance(tables, dict) else type(tables).__name__
        raise ValueError(
            f"costs {path} hold {got}: give a JSON object with exactly {', '.join(names)}"
        )
    return Costs(**{name: _table(name, tables[name]) for name in names})


@dataclass(frozen=True, slots=True)
class Jitter:
    """Random sleeps of tasks (arXiv 2605.18750, evaluation).

    A task sleeps with `probability`, for `factor * max(base_s, e) * (0.5 + U(0, 1))` seconds, where
    e is the running average of its stage's and kind's own times, starting at the first.
    """

    probability: float
    base_s: float
    factor: float


JITTERS: Mapping[str, Jitter] = MappingProxyType(
    {
        "J0": Jitter(0.0, 0.0, 0.0),
        "J1": Jitter(0.1, 0.005, 0.5),
        "J2": Jitter(0.2, 0.010, 1.0),
        "J3": Jitter(0.3, 0.015, 1.5),
    }
)
"""The paper's levels."""


@dataclass(frozen=True, slots=True)
class Profile:
    """How the work is spread over stages and microbatches.

    Attributes:
        last_factor: How many times as long as an ordinary stage the last one takes.
        encoder_share: The part of the stages, from the first on, that are an encoder whose work
            varies from microbatch to microbatch, by one lognormal(0, 0.6) factor each.
    """

    last_factor: float = 1.0
    encoder_share: float = 0.0


PROFILES: Mapping[str, Profile] = MappingProxyType(
    {"llm": Profile(1.25), "multimodal": Profile(1.25, encoder_share=1 / 3)}
)
"""Those of the command line."""


def draw_costs(
    *,
    stages: int,
    microbatches: int,
    profile: str | Profile,
    jitter: str,
    delay_s: float,
    seed: int,
    task_s: float = TASK_S,
    encoder_scale: float = 1.0,
    replica: int = 0,
) -> Costs:
    """Draw the costs of a step; the same arguments give the same costs.

    Draws of one seed are paired: another jitter or delay changes nothing else.

    Args:
        stages: At least 1.
        microbatches: At least 1.
        profile: One of `PROFILES`, or another.
        jitter: One of `JITTERS`, drawn for every stage, kind (F, I, W) and microbatch.
        delay_s: Median of the transfers' delays, lognormal with sigma 1. 0 for none.
        seed: Of the draws.
        task_s: What F, I and W take each on an ordinary stage, in seconds; 10 ms.
        encoder_scale: How many times as long the encoder's stages take, in the median.
        replica: Of the pipeline, from 0: each has jitter, delays and microbatches of its own.

    Raises:
        ValueError: If an argument breaks its rule.
    """
    _check_draw(stages, microbatches, profile, jitter)
    spread = PROFILES[profile] if isinstance(profile, str) else profile
    for name, seconds in (("delay", delay_s), ("task time", task_s)):
        if not 0.0 <= seconds <= _MOST_S:
            raise ValueError(
                f"{name}={seconds} must be seconds, at least 0 and at most {_MOST_S:g}"
            )
    source = f"{seed}/{replica}" if replica else f"{seed}"
    draws = partial(_source, source, stages, microbatches)  # a stream for each table
    factors = _factors(stages, microbatches, spread, encoder_scale, draws("encoder"))
    times = tuple(tuple(factor * task_s for factor in row) for row in factors)
    kinds = [_jittered(times, JITTERS[jitter], draws(kind)) for kind in "FIW"]
    delays = [
        _delays(stages, microbatches, delay_s, draws(what)) for what in ("activation", "gradient")
    ]
    return Costs(*kinds, *delays)


def _source(seed: str, stages: int, microbatches: int, what: str) -> random.Random:
    return random.Random(f"{seed}/{stages}/{microbatches}/{what}")


def _factors(
    stages: int, microbatches: int, profile: Profile, scale: float, source: random.Random
) -> Table:
    """How many times an ordinary stage's work each stage has, per microbatch."""
    encoder = [1.0] * microbatches
    encoders = math.floor(stages * profile.encoder_share)
    if profile.encoder_share:
        draw = partial(source.lognormvariate, 0.0, _ENCODER_SIGMA)
        encoder = [scale * draw() for _ in range(microbatches)]
    rows = []
    for stage in range(stages):
        row = encoder if stage < encoders else [1.0] * microbatches
        last = profile.last_factor if stage == stages - 1 else 1.0
        rows.append(tuple(last * factor for factor in row))
    return tuple(rows)


def _jittered(own: Table, jitter: Jitter, source: random.Random) -> Table:
    """The times of one kind: its own, and the sleeps."""
    rows = []
    for row in own:
        average_s = row[0]
        times = []
        for own_s in row:
            average_s = _MEMORY * average_s + (1.0 - _MEMORY) * own_s
            sleeps = source.random() < jitter.probability
            sleep_s = jitter.factor * max(jitter.base_s, average_s) * (0.5 + source.random())
            times.append(own_s + (sleep_s if sleeps else 0.0))
        rows.append(tuple(times))
    return tuple(rows)


def _delays(stages: int, microbatches: int, median_s: float, source: random.Random) -> Table:
    return tuple(
        tuple(median_s * source.lognormvariate(0.0, _DELAY_SIGMA) for _ in range(microbatches))
        for _ in range(stages)
    )


def _check_draw(stages: int, microbatches: int, profile: str | Profile, jitter: str) -> None:
    for name, value in (("stages", stages), ("microbatches", microbatches)):
        if value < 1:
            raise ValueError(f"{name}={value} must be at least 1: give {name}=1 or more")
    if isinstance(profile, str) and profile not in PROFILES:
        raise ValueError(f"profile {profile!r} is not known: use one of {', '.join(PROFILES)}")
    if jitter not in JITTERS:
        raise ValueError(f"jitter {jitter!r} is not known: use one of {', '.join(JITTERS)}")


def _table(name: str, rows: Any) -> Table:
    if not isinstance(rows, list) or not all(isinstance(row, list) for row in rows):
        raise ValueError(f"{name} must be an array [stage][microbatch]: give a list of lists")
    return tuple(tuple(row) for row in rows)


def _check(name: str, table: Any, like: Table) -> None:
    shape, wanted = [len(row) for row in table], [len(row) for row in like]
    if not wanted or not wanted[0] or len(set(wanted)) > 1 or shape != wanted:
        raise ValueError(
            f"{name} has rows of {_counted(shape)} numbers, forward_s of {_counted(wanted)}: give "
            f"every table a row per stage and a number per microbatch"
        )
    for stage, row in enumerate(table):
        for microbatch, cost in enumerate(row):
            number = isinstance(cost, int | float) and not isinstance(cost, bool)
            if not number or not 0.0 <= cost <= _MOST_S:
                raise ValueError(
                    f"cost {name}[{stage}][{microbatch}] is {reprlib.repr(cost)}: give seconds, "
                    f"at least 0 and at most {_MOST_S:g}"
                )


def _counted(lengths: list[int]) -> str:
    return f"{lengths[:4]}{' and more' if len(lengths) > 4 else ''}"
