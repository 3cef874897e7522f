"""Finds and runs a command, and says how it ended. Loads only the file that the command is in."""

import sys
from collections.abc import Sequence
from importlib import import_module

import typer

from rrfp_async.cli.telling import print_error
from rrfp_async.errors import RrfpError

_FILE_OF = {
    "report": "looking",
    "timeline": "looking",
    "explain": "looking",
    "compare": "looking",
    "export": "looking",
    "hints": "listing",
    "simulate": "simulating",
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit status: 2 for bad input, 1 for a failed run."""
    given = sys.argv[1:] if arguments is None else list(arguments)
    try:
        _app(given)(given, prog_name="rrfp")
    except SystemExit as ended:
        return ended.code if isinstance(ended.code, int) else 0
    except (ValueError, OSError) as error:
        return _tell(error, 2)
    except RrfpError as error:
        return _tell(error, 1)
    return 0


def _app(given: Sequence[str]) -> typer.Typer:
    """The commands of the one file that is needed; all of them if no command is named."""
    app = typer.Typer(
        no_args_is_help=True,
        add_completion=False,
        pretty_exceptions_enable=False,
        help="Readiness-first pipeline-parallel training: see a run, and try one virtually.",
    )
    app.callback()(_nothing)  # so that one command alone is still named
    named = _FILE_OF.get(given[0]) if given else None
    for file in dict.fromkeys(_FILE_OF.values()) if named is None else [named]:
        app.add_typer(import_module(f"rrfp_async.cli.{file}").app)
    return app


def _nothing() -> None:
    pass


def _tell(error: BaseException, status: int) -> int:
    print_error(f"error: {error}")
    return status
