"""Coroutine tests need a loop to come back to."""

from tests.loops import main_thread_loop

__all__ = ["main_thread_loop"]
