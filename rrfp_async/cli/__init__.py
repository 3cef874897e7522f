"""The command line. It reads options and prints; what it shows is computed elsewhere.

`app` finds the file of a command: looking at records must not wait until torch is loaded.
"""

from rrfp_async.cli.app import main

__all__ = ["main"]
