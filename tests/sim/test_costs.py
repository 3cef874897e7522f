"""Costs: what a file must hold, and what a draw is like."""

import math
import statistics
from pathlib import Path
from typing import Any

import pytest

from rrfp_async.sim.costs import JITTERS, PROFILES, Costs, draw_costs, read_costs
from tests.sim.tables import NAMES, even, written

NOT_NUMBERS = [-0.001, math.nan, math.inf, -math.inf, True, False, "0.1", None, [0.1], {}]


def drawn(**changed: Any) -> Costs:
    """A small draw with everything random in it, but for what is changed."""
    arguments = {"stages": 6, "microbatches": 8, "profile": "multimodal", "jitter": "J2"}
    return draw_costs(**{**arguments, "delay_s": 0.005, "seed": 3, **changed})


# -- files ------------------------------------------------------------------------------------


def test_a_file_is_read_as_it_stands(tmp_path: Path) -> None:
    """Rows are stages, columns microbatches; whole numbers and zeros are numbers too."""
    tables: dict[str, Any] = even(2, 3)
    tables["forward_s"] = [[1, 0, 0.5], [0.25, 1e-9, 2]]
    costs = read_costs(written(tables, tmp_path / "costs.json"))
    assert costs.forward_s == ((1, 0, 0.5), (0.25, 1e-9, 2))
    assert (costs.stages, costs.microbatches) == (2, 3)
    assert costs.work_s(1) == pytest.approx(2.25 + 1e-9 + 6.0, abs=0, rel=1e-15)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("bad", NOT_NUMBERS, ids=repr)
def test_a_bad_entry_is_named(name: str, bad: object, tmp_path: Path) -> None:
    """Table, stage, microbatch and the value."""
    tables: dict[str, Any] = even(3, 4)
    tables[name][1][2] = bad
    with pytest.raises(ValueError, match=rf"{name}\[1\]\[2\] is .*at least 0"):
        read_costs(written(tables, tmp_path / "costs.json"))


@pytest.mark.parametrize("cost", [10**400, 1e308], ids=["10**400", "1e308"])
def test_costs_beyond_all_reason_are_refused(cost: float, tmp_path: Path) -> None:
    """They are finite, but their sums or their floats are not."""
    tables: dict[str, Any] = even(3, 4)
    tables["weight_s"] = [[cost] * 4 for _ in range(3)]
    with pytest.raises(ValueError, match="cost"):
        read_costs(written(tables, tmp_path / "costs.json"))


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(
    "rows",
    [
        [[1.0] * 4] * 2,
        [[1.0] * 4] * 4,
        [[1.0] * 3] * 3,
        [[1.0] * 4, [1.0] * 3, [1.0] * 4],
        [[], [], []],
        [],
    ],
    ids=["stage missing", "stage too many", "microbatch missing", "ragged", "no column", "no row"],
)
def test_a_table_of_another_shape_is_refused(name: str, rows: object, tmp_path: Path) -> None:
    """Every table has a row per stage and a number per microbatch."""
    tables = {**even(3, 4), name: rows}
    with pytest.raises(ValueError, match=r"has rows of .*give every table a row per stage"):
        read_costs(written(tables, tmp_path / "costs.json"))


@pytest.mark.parametrize("rows", [[], [[]], [[], []]])
def test_empty_tables_are_refused(rows: object, tmp_path: Path) -> None:
    """A step has at least one stage and one microbatch."""
    with pytest.raises(ValueError, match="give every table a row per stage"):
        read_costs(written(dict.fromkeys(NAMES, rows), tmp_path / "costs.json"))


@pytest.mark.parametrize("rows", [1.0, "x", None, {}, [1.0, 2.0], ["ab", "cd"], [[1.0], 1.0]])
def test_what_is_no_table_is_refused(rows: object, tmp_path: Path) -> None:
    """A list of lists, nothing else."""
    tables = {**even(2, 1), "gradient_delay_s": rows}
    with pytest.raises(ValueError, match="gradient_delay_s must be an array"):
        read_costs(written(tables, tmp_path / "costs.json"))


@pytest.mark.parametrize("name", NAMES)
def test_a_missing_table_is_refused(name: str, tmp_path: Path) -> None:
    """All five are given, also where all are zero."""
    tables = even(2, 2)
    del tables[name]
    with pytest.raises(ValueError, match=f"exactly .*{name}"):
        read_costs(written(tables, tmp_path / "costs.json"))


def test_a_table_too_many_is_refused(tmp_path: Path) -> None:
    """A misspelled name must not be passed over."""
    with pytest.raises(ValueError, match=r"hold .*forward, .*exactly"):
        read_costs(written({"forward": [[1.0]], **even(1, 1)}, tmp_path / "costs.json"))


@pytest.mark.parametrize("content", [[], [[1.0]], 1.0, "forward_s", None, {}])
def test_what_is_no_object_of_tables_is_refused(content: object, tmp_path: Path) -> None:
    """An empty object included."""
    with pytest.raises(ValueError, match="give a JSON object with exactly forward_s"):
        read_costs(written(content, tmp_path / "costs.json"))


@pytest.mark.parametrize(
    "content",
    [b"", b"  \n", b"{", b"forward_s: 1", b"{'forward_s': 1}", b"\xff\xfe\x00", b"[" * 100_000],
    ids=["empty", "blank", "cut", "yaml", "python", "bytes", "deep"],
)
def test_what_is_not_json_is_refused(content: bytes, tmp_path: Path) -> None:
    """The message names the file."""
    path = tmp_path / "costs.json"
    path.write_bytes(content)
    with pytest.raises(ValueError, match=r"costs\.json cannot be read"):
        read_costs(path)


def test_a_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    """A folder is no file either."""
    with pytest.raises(ValueError, match=r"none\.json cannot be read"):
        read_costs(tmp_path / "none.json")
    with pytest.raises(ValueError, match="cannot be read"):
        read_costs(tmp_path)


# -- draws ------------------------------------------------------------------------------------


def test_the_same_arguments_give_the_same_costs() -> None:
    """Another seed gives others, in every random table."""
    assert drawn() == drawn()
    other = drawn(seed=4)
    assert all(getattr(drawn(), name) != getattr(other, name) for name in NAMES)


@pytest.mark.parametrize("profile", PROFILES)
@pytest.mark.parametrize("shape", [(1, 1), (1, 5), (7, 1), (4, 9)])
def test_a_draw_has_the_shape_asked_for(profile: str, shape: tuple[int, int]) -> None:
    """However small."""
    costs = drawn(profile=profile, stages=shape[0], microbatches=shape[1])
    assert (costs.stages, costs.microbatches) == shape


def test_an_llm_has_even_stages_and_a_longer_last_one() -> None:
    """F, I and W take 10 ms; the last stage 1.25 times as long."""
    costs = drawn(profile="llm", jitter="J0")
    for name in NAMES[:3]:
        rows = getattr(costs, name)
        assert rows[:-1] == ((0.01,) * 8,) * 5
        assert rows[-1] == (0.0125,) * 8


def test_an_encoder_varies_and_the_rest_does_not() -> None:
    """The first third only: one lognormal(0, 0.6) factor a microbatch."""
    costs = drawn(jitter="J0", stages=9, microbatches=4000)
    for name in NAMES[:3]:
        rows = getattr(costs, name)
        assert rows[3:-1] == ((0.01,) * 4000,) * 5
        assert rows[-1] == (0.0125,) * 4000
        for row in rows[:3]:
            logarithms = [math.log(cost / 0.01) for cost in row]
            assert statistics.fmean(logarithms) == pytest.approx(0.0, abs=0.05)
            assert statistics.stdev(logarithms) == pytest.approx(0.6, abs=0.05)


@pytest.mark.parametrize("level", JITTERS)
def test_jitter_is_as_published(level: str) -> None:
    """With even tasks of 10 ms: how often they sleep, how long, and how long at most."""
    probability, base_s, factor = {
        "J0": (0.0, 0.0, 0.0),
        "J1": (0.1, 0.005, 0.5),
        "J2": (0.2, 0.010, 1.0),
        "J3": (0.3, 0.015, 1.5),
    }[level]
    costs = drawn(profile="llm", jitter=level, stages=11, microbatches=1500)
    typical_s = factor * max(base_s, 0.01)
    for name in NAMES[:3]:
        slept = [cost - 0.01 for row in getattr(costs, name)[:-1] for cost in row]
        sleeps = [each for each in slept if each > 1e-12]
        assert len(sleeps) / len(slept) == pytest.approx(probability, abs=0.02)
        assert min(slept) == pytest.approx(0.0, abs=1e-12)
        if sleeps:
            assert statistics.fmean(sleeps) == pytest.approx(typical_s, rel=0.05)
            assert 0.5 * typical_s <= min(sleeps) <= max(sleeps) <= 1.5 * typical_s


def test_jitter_follows_the_running_average() -> None:
    """On a stage whose tasks take long, J1's sleeps are long: a * e, not a * base."""
    costs = drawn(jitter="J1", stages=3, microbatches=3000)
    still = drawn(profile="llm", jitter="J0", stages=3, microbatches=3000)
    last = zip(costs.forward_s[-1], still.forward_s[-1], strict=True)
    sleeps = [cost - own for cost, own in last if cost - own > 1e-12]
    assert statistics.fmean(sleeps) == pytest.approx(0.5 * 0.0125, rel=0.1)
    assert max(sleeps) <= 1.5 * 0.5 * 0.0125 + 1e-12


def test_kinds_and_stages_sleep_independently() -> None:
    """Drawn per stage, kind and microbatch."""
    costs = drawn(profile="llm", jitter="J3", microbatches=400)
    rows = [getattr(costs, name)[stage] for name in NAMES[:3] for stage in range(5)]
    assert len({tuple(cost > 0.011 for cost in row) for row in rows}) == len(rows)


@pytest.mark.parametrize("profile", PROFILES)
def test_levels_of_one_seed_are_paired(profile: str) -> None:
    """PAPER 8 compares levels on paired seeds: jitter adds sleeps and changes nothing else."""
    still, shaken = (drawn(profile=profile, jitter=level) for level in ("J0", "J3"))
    assert shaken.activation_delay_s == still.activation_delay_s
    assert shaken.gradient_delay_s == still.gradient_delay_s
    for name in NAMES[:3]:
        for before, after in zip(getattr(still, name), getattr(shaken, name), strict=True):
            assert all(b <= a + 1e-12 for b, a in zip(before, after, strict=True))


def test_delays_are_lognormal_about_the_median() -> None:
    """Sigma 1, each direction of its own; and none at all for 0."""
    costs = drawn(delay_s=0.005, stages=10, microbatches=600)
    for name in NAMES[3:]:
        delays = [delay for row in getattr(costs, name) for delay in row]
        assert statistics.median(delays) == pytest.approx(0.005, rel=0.05)
        assert statistics.stdev(map(math.log, delays)) == pytest.approx(1.0, abs=0.05)
    assert costs.activation_delay_s != costs.gradient_delay_s
    still = drawn(delay_s=0.0)
    assert still.activation_delay_s == still.gradient_delay_s == ((0.0,) * 8,) * 6


@pytest.mark.parametrize(
    ("argument", "bad"),
    [
        ("stages", 0),
        ("stages", -1),
        ("microbatches", 0),
        ("profile", "gpt"),
        ("profile", ""),
        ("jitter", "J4"),
        ("jitter", "j1"),
        ("delay_s", -0.1),
        ("delay_s", math.nan),
        ("delay_s", math.inf),
    ],
)
def test_a_bad_argument_is_named(argument: str, bad: object) -> None:
    """With what would be right."""
    with pytest.raises(ValueError, match=argument.removesuffix("_s")):
        drawn(**{argument: bad})
