"""`python -m rrfp_async`: the command line."""

import sys

from rrfp_async.cli import main

if __name__ == "__main__":
    sys.exit(main())
