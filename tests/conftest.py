"""How far hypothesis searches, and the main thread's event loop.

The search is `sample` by default, `all` for RRFP_HYPOTHESIS_PROFILE=all.
"""

import asyncio
import os
import signal
from collections.abc import Iterator

import pytest
from hypothesis import HealthCheck, settings

ALL_TIMEOUT_S = 1800

settings.register_profile(
    "sample",
    max_examples=60,
    deadline=None,
    print_blob=True,
    suppress_health_check=[HealthCheck.too_slow],
)
settings.register_profile("all", settings.get_profile("sample"), max_examples=400)
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    # A shell that starts us in the background ignores Ctrl-C for us and for what tests start.
    signal.signal(signal.SIGINT, signal.default_int_handler)

PROFILE = os.environ.get("RRFP_HYPOTHESIS_PROFILE", "sample")
settings.load_profile(PROFILE)


@pytest.fixture(scope="session", autouse=True)
def main_thread_loop() -> Iterator[None]:
    """Set a loop before the first coroutine test, close it after the last.

    pytest-asyncio asks for the current loop before it sets its own, which makes one on Python 3.11
    that nobody closes: at the end of the run it is a ResourceWarning, and warnings are errors.
    """
    loop = asyncio.new_event_loop()
    asyncio.set_event_loop(loop)
    yield
    asyncio.set_event_loop(None)
    loop.close()


def pytest_report_header() -> str:
    """Say which profile is searched with."""
    return f"hypothesis search: {PROFILE} ({settings().max_examples} cases a property)"


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark what searches, and give the long search the time that pytest-timeout would not."""
    for item in items:
        if getattr(getattr(item, "obj", None), "is_hypothesis_test", False):
            item.add_marker(pytest.mark.property)
            if PROFILE == "all":
                item.add_marker(pytest.mark.timeout(ALL_TIMEOUT_S))
