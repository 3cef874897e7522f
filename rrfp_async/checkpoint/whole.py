"""What all ranks hold together, from what each says it holds: who writes what, and does it fit.

Every rank works it out from the same cards and so comes to the same result, or to the same error.
"""

import dataclasses
import json
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Self

from rrfp_async.checkpoint.part import GROUPS, MODEL, STATE, Held, parameter_of

_NAMED_MOST = 5


@dataclass(frozen=True, slots=True)
class Card:
    """What a rank brings.

    Attributes:
        call: What was called, with the path.
        held: Its parameters and buffers.
        optimized: The names of its optimizer's parameters.
        extra: The keys that its user adds.
        save_id: Drawn at random. Rank 0's names the save.
    """

    call: str
    held: list[Held]
    optimized: list[str]
    extra: list[str]
    save_id: str

    def word(self) -> str:
        """The card as a word."""
        return json.dumps(dataclasses.asdict(self))

    @classmethod
    def parse(cls, word: str) -> Self:
        """Read a `word`."""
        fields = json.loads(word)
        return cls(**{**fields, "held": [Held(**each) for each in fields["held"]]})


@dataclass(frozen=True, slots=True)
class Whole:
    """The pipeline's parameters and buffers.

    Attributes:
        held: By name; a tied one as on its lowest stage, which writes it.
        optimized: The names of all optimizers' parameters.
        writer_of: The rank that writes a key of `extra`: the lowest that gives it.
        save_id: What this save is called, by a name that no other has.
    """

    held: dict[str, Held]
    optimized: frozenset[str]
    writer_of: dict[str, int]
    save_id: str

    def left_out(self, stages: Collection[int]) -> set[str]:
        """The names that a rank with `stages` does not write."""
        return {held.name for held in self.held.values() if held.stage not in stages}


def put_together(
    cards: list[Card], *, tied: Collection[str], writers: Collection[int] | None = None
) -> Whole:
    """The whole, from every rank's card in rank order.

    Args:
        cards: One for each rank.
        tied: Names that several stages may hold, with equal values.
        writers: The ranks of the replica that writes; the others hold copies. By default all.

    Raises:
        ValueError: If ranks called different things, or two stages hold the same name.
    """
    for rank, card in enumerate(cards):
        if card.call != cards[0].call:
            raise ValueError(
                f"rank 0 called {cards[0].call}, rank {rank} {card.call}: call the same on every "
                f"rank, with the same path"
            )
    whole: dict[str, Held] = {}
    counted = [card for rank, card in enumerate(cards) if writers is None or rank in writers]
    for held in sorted((h for card in counted for h in card.held), key=lambda held: held.stage):
        first = whole.setdefault(held.name, held)
        if first is not held:
            _check_twice(first, held, tied)
    writer_of: dict[str, int] = {}
    for rank, card in enumerate(cards):
        for key in card.extra:
            writer_of.setdefault(key, rank)
    optimized = frozenset(name for card in cards for name in card.optimized)
    return Whole(whole, optimized, writer_of, cards[0].save_id)


def _check_twice(first: Held, second: Held, tied: Collection[str]) -> None:
    if first.name not in tied:
        raise ValueError(
            f"stages {first.stage} and {second.stage} both hold a {first.name!r}, which the "
            f"unpartitioned model has once: give Runtime(..., names=lambda stage, name: ...), "
            f"which returns a parameter's name there"
        )
    if first.kind != second.kind:
        raise ValueError(
            f"stages {first.stage} and {second.stage} tie {first.name!r}, which is {first.kind} on "
            f"one and {second.kind} on the other: give both the same shape and dtype"
        )


def check_fits(whole: Whole, kinds: Mapping[str, str], path: str, *, optimizer: bool) -> None:
    """Refuse a checkpoint of another model or other optimizers.

    Args:
        whole: What the ranks hold.
        kinds: What the checkpoint holds: each key's kind, see `part.kind_of`.
        path: Where it is.
        optimizer: Whether the optimizers' part is to be loaded too.

    Raises:
        ValueError: Naming what is missing, what is not known here, and what has another kind.
    """
    sections = (MODEL, STATE, GROUPS) if optimizer else (MODEL,)
    saved = {section: _names(kinds, section) for section in (MODEL, STATE, GROUPS)}
    held = {MODEL: whole.held.keys(), STATE: whole.optimized, GROUPS: whole.optimized}
    unknown = [section + name for section in sections for name in saved[section] - held[section]]
    needed = [MODEL + name for name in held[MODEL] - saved[MODEL]]
    if optimizer:
        needed += [GROUPS + name for name in held[GROUPS] - saved[GROUPS]]
    faults = {
        "missing there": needed,
        "not known here": unknown,
        "different": [
            f"{held.name} (there {there}, on stage {held.stage} {held.kind})"
            for held in whole.held.values()
            if (there := kinds.get(MODEL + held.name, held.kind)) != held.kind
        ],
    }
    told = "; ".join(f"{what}: {_some(names)}" for what, names in faults.items() if names)
    if told:
        raise ValueError(
            f"checkpoint {path} does not fit this pipeline. {told}. Build the model and optimizers "
            f"it was saved from, with names= as then; optimizer=False leaves the optimizers alone"
        )


def _names(keys: Iterable[str], section: str) -> set[str]:
    return {parameter_of(key) or "" for key in keys if key.startswith(section)}


def _some(names: list[str]) -> str:
    more = len(names) - _NAMED_MOST
    told = ", ".join(sorted(names)[:_NAMED_MOST])
    return told if more <= 0 else f"{told} and {more} more"
