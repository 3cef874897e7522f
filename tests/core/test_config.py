"""Settings: frozen, checked where they are made, and an error says value, rule and remedy."""

from collections.abc import Sequence
from dataclasses import FrozenInstanceError
from pathlib import Path
from typing import Any

import pytest

from rrfp_async.config import Config
from rrfp_async.hints import HINTS, Admissible, HintOrder, RankedHint
from rrfp_async.ids import TaskId


class ByMicrobatch(RankedHint):
    """Ranks by age."""

    def rank(self, task: TaskId) -> int:
        return task.microbatch


class LooksLikeAnOrder:
    """Has every method of a hint order, but not its base."""

    def begin_step(self, tasks: Sequence[TaskId]) -> None: ...

    def add(self, task: TaskId) -> None: ...

    def peek(self, admissible: Admissible) -> TaskId | None: ...

    def commit(self, task: TaskId) -> None: ...


def refusal(**settings: Any) -> str:
    """The message that `settings` are refused with."""
    with pytest.raises(ValueError, match=r".") as caught:
        Config(**{"microbatches": 4, **settings})
    return str(caught.value)


def test_only_the_microbatches_must_be_given() -> None:
    """The defaults: hint and limit are automatic, accumulation is ordered."""
    config = Config(microbatches=8)
    assert (config.hint, config.limit, config.deterministic) == ("auto", "auto", True)
    assert (config.return_outputs, config.trace_dir) == (True, None)


def test_the_automatic_hint_splits_and_insists_on_nothing() -> None:
    """Given or left out: it goes by its name, and ranks only."""
    for config in (Config(microbatches=8), Config(microbatches=8, hint="auto")):
        assert (config.hint_name, dict(config.agreed())["hint"]) == ("auto", "auto")
        assert (config.splits, config.insists_on_split) == (True, False)
        assert not config.execution.binding
    assert refusal(binding=True).startswith("binding=True executes a list as it stands, but hint ")


@pytest.mark.parametrize("hint", [*sorted(set(HINTS) - {"auto"}), ByMicrobatch()])
def test_whoever_names_a_hint_insists_on_its_split(hint: str | HintOrder) -> None:
    """Splitting or not: only the automatic hint leaves it to the stages."""
    assert Config(microbatches=1, hint=hint).insists_on_split


@pytest.mark.parametrize(
    ("hint", "splits"),
    [
        *(("auto", True), ("bfw", True), ("bfw-deep", True), ("zb-h1", True), ("zbv", True)),
        *(("bf", False), ("bf-deep", False), ("fb", False), ("1f1b", False)),
        (ByMicrobatch(), False),
    ],
)
def test_a_hint_says_whether_it_splits(hint: str | HintOrder, splits: bool) -> None:
    """Those that rank I and W do."""
    assert Config(microbatches=1, hint=hint).splits is splits


@pytest.mark.parametrize("name", ["microbatches", "limit"])
@pytest.mark.parametrize("value", [0, -1, 1.0, "8", None, True])
def test_a_count_that_is_none_is_refused(name: str, value: object) -> None:
    """The error names the setting with its value, the rule, and what to give."""
    message = refusal(**{name: value})
    assert message.startswith(f"{name}={value!r} ")
    assert "int of at least 1" in message
    assert f"give {name}=1 or more" in message


@pytest.mark.parametrize("name", ["deterministic", "return_outputs"])
@pytest.mark.parametrize("value", [0, 1, "yes", None])
def test_a_switch_that_is_no_bool_is_refused(name: str, value: object) -> None:
    """A truthy word is not True: the error names the setting, its value and the two choices."""
    assert refusal(**{name: value}) == f"{name}={value!r} must be True or False"


def test_a_trace_folder_is_a_path() -> None:
    """Both spellings of a path are taken, anything else is named and refused."""
    assert Config(microbatches=1, trace_dir="traces").trace_dir == "traces"
    assert Config(microbatches=1, trace_dir=Path("traces")).trace_dir == Path("traces")
    assert refusal(trace_dir=7) == "trace_dir=7 must be a path or None"


@pytest.mark.parametrize("name", ["zb", "BF", "", "bf "])
def test_an_unknown_hint_is_refused_with_the_known_ones(name: str) -> None:
    """The error quotes the name and lists every one that would do."""
    message = refusal(hint=name)
    assert f"hint {name!r} is not known" in message
    assert all(known in message for known in HINTS)


@pytest.mark.parametrize("hint", [LooksLikeAnOrder(), ByMicrobatch, 3, None, ["bf"]])
def test_an_object_that_is_no_hint_order_is_refused(hint: object) -> None:
    """Having the methods is not enough: the error names the type, the names and the base class."""
    message = refusal(hint=hint)
    assert f"of type {type(hint).__name__} is no hint order" in message
    assert "HintOrder" in message
    assert all(known in message for known in HINTS)


@pytest.mark.parametrize("hint", [*HINTS, ByMicrobatch()])
def test_every_known_name_and_every_hint_order_is_taken(hint: str | HintOrder) -> None:
    """The setting is kept as it was given."""
    assert Config(microbatches=1, hint=hint).hint is hint


def test_a_config_cannot_be_changed() -> None:
    """What was checked stays as it was checked, and every setting is given by name."""
    config = Config(microbatches=2)
    with pytest.raises(FrozenInstanceError):
        config.limit = 0  # type: ignore[misc]
    with pytest.raises(TypeError):
        Config(2)  # type: ignore[call-arg]


@pytest.mark.parametrize(
    ("changed", "name"),
    [
        ({"hint": "fb"}, "hint"),
        ({"limit": 4}, "limit"),
        ({"microbatches": 3}, "microbatches"),
        ({"deterministic": False}, "deterministic"),
    ],
)
def test_what_ranks_must_agree_on_tells_two_configs_apart(
    changed: dict[str, Any], name: str
) -> None:
    """A difference shows under the name of the setting, and nowhere else."""
    plain = dict(Config(microbatches=2).agreed())
    other = dict(Config(**{"microbatches": 2, **changed}).agreed())
    assert {key for key in plain if plain[key] != other[key]} == {name}


def test_what_ranks_must_agree_on_is_words() -> None:
    """It travels in a hello message: a hint object goes by its class, local settings stay."""
    agreed = Config(microbatches=2, hint=ByMicrobatch(), trace_dir="here").agreed()
    assert agreed == Config(microbatches=2, hint=ByMicrobatch(), return_outputs=False).agreed()
    assert dict(agreed)["hint"] == "ByMicrobatch"
    assert all(isinstance(word, str) for pair in agreed for word in pair)
