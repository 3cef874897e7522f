"""The main thread's own event loop while tests run.

pytest-asyncio asks for the current loop before it sets its own, which makes one on Python 3.11
that nobody closes: at the end of the run it is a ResourceWarning, and warnings are errors. Every
room whose tests are coroutines imports this fixture into its conftest.
"""

import asyncio
from collections.abc import Iterator

import pytest


@pytest.fixture(scope="session", autouse=True)
def main_thread_loop() -> Iterator[None]:
    """Set a loop before the first coroutine test, close it after the last."""
    loop = asyncio.new_event_loop()
    asyncio.set_event_loop(loop)
    yield
    asyncio.set_event_loop(None)
    loop.close()
