"""How a worker tells what happens: one JSON object a line on standard output."""

import json
import os
import sys
import time
from typing import Any

import rrfp_async as r

_FIELDS = ("rank", "step", "stage", "task", "microbatch", "cause", "records")


def say(event: str, **fields: Any) -> None:
    """Write one line, whole, at once: several threads may."""
    by = os.environ.get("RANK")
    told = {"event": event, "by": by, "time": time.monotonic(), **fields}
    sys.stdout.write(json.dumps(told) + "\n")
    sys.stdout.flush()


def tell_failure(error: BaseException, **fields: Any) -> None:
    """Tell an exception; a `StepFailed` with what it names, under `failed`."""
    if isinstance(error, r.StepFailed):
        fields["failed"] = {name: getattr(error, name) for name in _FIELDS}
    cause = type(error.__cause__).__name__ if error.__cause__ else None
    say("failed", type=type(error).__name__, message=str(error), cause=cause, **fields)
