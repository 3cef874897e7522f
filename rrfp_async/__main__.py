"""`python -m rrfp_async`, installed as `rrfp`: the command line."""

import sys

from rrfp_async.cli import main


def run() -> None:
    """Run the command line and leave with its status."""
    sys.exit(main())


if __name__ == "__main__":
    run()
