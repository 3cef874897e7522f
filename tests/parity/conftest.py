"""What every test of the matrix must leave behind is what one of the Runtime must: nothing."""

from tests.ranks.conftest import launch
from tests.runtime.conftest import made, no_task_is_left

__all__ = ["launch", "made", "no_task_is_left"]
