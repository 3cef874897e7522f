"""The paper's evaluation on the virtual cluster: its ratios beside what the cost model gives.

arXiv 2605.18750 measured real models on RTX 4090s; here tasks cost what `costs.draw_costs` says, so
the trends can be compared and the numbers only looked at. docs/simulation.md does both. Nothing
here was fitted to the paper.
"""

import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace

from rrfp_async.config import Config
from rrfp_async.sim.cluster import VirtualCluster
from rrfp_async.sim.costs import draw_costs


@dataclass(frozen=True, slots=True)
class Setting:
    """A pipeline of the grid; see `costs.draw_costs`."""

    stages: int
    microbatches: int
    profile: str
    jitter: str = "J0"
    delay_s: float = 0.005
    encoder_scale: float = 1.0


@dataclass(frozen=True, slots=True)
class Order:
    """How a rank orders its tasks."""

    hint: str
    binding: bool = False


@dataclass(frozen=True, slots=True)
class Row:
    """One number of the paper and ours.

    Attributes:
        topic: What the paper varied.
        setting: Where on that scale.
        measure: What the numbers are.
        paper: The paper's.
        ours: The median over the seeds.
    """

    topic: str
    setting: str
    measure: str
    paper: float
    ours: float


BF, BFW = Order("bf"), Order("bfw")
ONE_F_ONE_B, ZERO_BUBBLE = Order("1f1b", binding=True), Order("zb-h1", binding=True)
LANGUAGE = Setting(16, 64, "llm", "J2")
VISION = Setting(16, 48, "multimodal", "J1")

Makespans = Callable[[Setting, Order], Sequence[float]]
"""The makespans of every seed."""


def paper_grid(seeds: int, done: Callable[[], None] = lambda: None) -> list[Row]:
    """Every row. Takes minutes for a few seeds.

    Args:
        seeds: Draws per pipeline, at least 1; every order meets the same ones.
        done: Called after every simulated step.

    Raises:
        ValueError: If `seeds` is below 1.
    """
    if seeds < 1:
        raise ValueError(f"seeds={seeds} must be at least 1: give seeds=1 or more")
    known: dict[tuple[Setting, Order], Sequence[float]] = {}

    def makespans(setting: Setting, order: Order) -> Sequence[float]:
        if (setting, order) not in known:
            known[setting, order] = _simulate(setting, order, seeds, done)
        return known[setting, order]

    return [row for part in _PARTS for row in part(makespans)]


def _simulate(
    setting: Setting, order: Order, seeds: int, done: Callable[[], None]
) -> Sequence[float]:
    config = Config(
        microbatches=setting.microbatches, hint=order.hint, binding=order.binding or None
    )
    found = []
    for seed in range(seeds):
        costs = draw_costs(**asdict(setting), seed=seed)
        found.append(VirtualCluster(costs, config).run_step().makespan_s)
        done()
    return found


def _ratio(
    makespans: Makespans, above: tuple[Setting, Order], below: tuple[Setting, Order]
) -> float:
    pairs = zip(makespans(*above), makespans(*below), strict=True)
    return statistics.median(one / other for one, other in pairs)


def _speedup(makespans: Makespans, setting: Setting, order: Order) -> float:
    return _ratio(makespans, (setting, ONE_F_ONE_B), (setting, order))


def _orders(makespans: Makespans) -> Iterator[Row]:
    """ZB, BF and BFW over 1F1B on language and on multimodal models."""
    cases: Mapping[str, tuple[Setting, tuple[float, float, float]]] = {
        "GPT3-Large, PP8": (replace(LANGUAGE, stages=8), (1.10, 1.43, 1.56)),
        "GPT3-Large, PP16": (LANGUAGE, (1.20, 1.66, 1.77)),
        "Qwen3-1.7B + ViT-H, PP8": (replace(VISION, stages=8), (1.16, 1.92, 2.02)),
        "Qwen3-1.7B + ViT-H, PP16": (VISION, (1.22, 2.01, 2.09)),
        "LLaMA3-8B + ViT-5B, PP32": (
            replace(VISION, stages=32, microbatches=64),
            (1.16, 2.25, 2.77),
        ),
        "Qwen3-32B + InternViT, PP64": (
            replace(VISION, stages=64, microbatches=64),
            (1.09, 1.80, 1.84),
        ),
    }
    for name, (setting, numbers) in cases.items():
        named = zip(("ZB", "BF", "BFW"), (ZERO_BUBBLE, BF, BFW), numbers, strict=True)
        for measure, order, paper in named:
            ours = _speedup(makespans, setting, order)
            yield Row("orders", name, f"{measure} over 1F1B", paper, ours)


def _depth(makespans: Makespans) -> Iterator[Row]:
    for stages, paper in ((4, 1.07), (8, 1.94), (16, 2.01)):
        setting = replace(VISION, stages=stages)
        ours = _speedup(makespans, setting, BF)
        yield Row("depth", f"PP{stages}", "BF over 1F1B", paper, ours)


def _jitter(makespans: Makespans) -> Iterator[Row]:
    papers = {"J1": (2.82, 1.81), "J2": (11.27, 6.82), "J3": (18.06, 11.36)}
    for level, numbers in papers.items():
        for name, order, paper in zip(("1F1B", "BF"), (ONE_F_ONE_B, BF), numbers, strict=True):
            base = replace(VISION, stages=8, jitter="J0")
            shaken = replace(base, jitter=level)
            slowdown = _ratio(makespans, (shaken, order), (base, order)) - 1.0
            yield Row("jitter", level, f"{name} slower than at J0, %", paper, 100.0 * slowdown)


def _hints(makespans: Makespans) -> Iterator[Row]:
    setting = replace(VISION, stages=8)
    for hint, paper in (("fb", 0.45), ("b-priority", 0.84), ("f-priority", 4.92)):
        slower = _ratio(makespans, (setting, Order(hint)), (setting, BF)) - 1.0
        yield Row("hint", hint, "slower than BF, %", paper, 100.0 * slower)


def _imbalance(makespans: Makespans) -> Iterator[Row]:
    encoders = (
        ("ViT-L", 0.5, 1.73),
        ("ViT-H", 1.0, 1.89),
        ("ViT-g", 1.5, 2.04),
        ("ViT-Big", 2.0, 2.16),
    )
    for name, scale, paper in encoders:
        ours = _speedup(makespans, replace(VISION, encoder_scale=scale), BF)
        yield Row("imbalance", f"{name} (x{scale:g})", "BF over 1F1B", paper, ours)


def _batch(makespans: Makespans) -> Iterator[Row]:
    for size, microbatches, paper in ((64, 16, 1.98), (128, 32, 2.14), (192, 48, 2.18)):
        ours = _speedup(makespans, replace(VISION, microbatches=microbatches), BF)
        yield Row("batch", f"gbs {size} ({microbatches} microbatches)", "BF over 1F1B", paper, ours)


_PARTS = (_orders, _depth, _jitter, _hints, _imbalance, _batch)


def count_simulations(seeds: int) -> int:
    """How many steps `paper_grid` simulates."""
    asked: set[tuple[Setting, Order]] = set()

    def note(setting: Setting, order: Order) -> Sequence[float]:
        asked.add((setting, order))
        return [1.0]

    for part in _PARTS:
        list(part(note))
    return len(asked) * seeds
