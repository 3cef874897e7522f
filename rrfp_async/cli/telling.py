"""What a command says beside its output."""

from rich.console import Console


def print_error(text: str) -> None:
    """One line on stderr, as it is."""
    Console(stderr=True).print(text, markup=False, highlight=False, soft_wrap=True)
