"""What the benchmarks' command lines have in common: lists and counts, refused with their value."""

import argparse
from collections.abc import Callable, Collection


def count(word: str) -> int:
    """A whole number of at least 1."""
    if not word.isdecimal() or int(word) < 1:
        raise argparse.ArgumentTypeError(f"{word!r}: give a whole number of at least 1")
    return int(word)


def counts(least: int = 1) -> Callable[[str], list[int]]:
    """Whole numbers with commas between them, as in 4,8."""

    def read(words: str) -> list[int]:
        numbers = [int(word) if word.isdecimal() else -1 for word in words.split(",")]
        if min(numbers) < least:
            raise argparse.ArgumentTypeError(
                f"{words!r}: give whole numbers of at least {least}, as in 4,8"
            )
        return numbers

    return read


def among(known: Collection[str]) -> Callable[[str], list[str]]:
    """Words of `known` with commas between them."""

    def read(words: str) -> list[str]:
        for word in words.split(","):
            if word not in known:
                raise argparse.ArgumentTypeError(f"{word!r} is none of {', '.join(known)}")
        return words.split(",")

    return read
