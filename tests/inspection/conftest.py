"""Runs the command line on folders of the test's own."""

from collections.abc import Callable
from typing import NamedTuple

import pytest

from rrfp_async.cli import main


class Ended(NamedTuple):
    """How a command ended."""

    status: int
    out: str
    err: str


@pytest.fixture
def rrfp(capsys: pytest.CaptureFixture[str]) -> Callable[..., Ended]:
    """Run a command: its status, stdout and stderr."""

    def run(*arguments: object) -> Ended:
        status = main([str(argument) for argument in arguments])
        return Ended(status, *capsys.readouterr())

    return run
