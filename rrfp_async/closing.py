"""Closing what must be closed, whatever happens to the coroutine that does it."""

import asyncio
from collections.abc import Callable


async def surely(close: Callable[[], object]) -> None:
    """Run the blocking `close` on a thread of the loop's default executor and wait for it.

    Unlike with `asyncio.to_thread`, a cancelled caller stops waiting but `close` still runs: a
    rank's close is cancelled by the failure of its neighbour just when both go down.
    """
    await asyncio.shield(asyncio.get_running_loop().run_in_executor(None, close))
