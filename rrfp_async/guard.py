"""Whether a Runtime may take a step: open, whole, and not busy with another one."""

import torch

from rrfp_async.errors import StateError
from rrfp_async.world import World


class Guard:
    """The state of one Runtime.

    Attributes:
        closed: It takes no more steps.
        busy: It is in a step, save or load.
        failure: What ended its last step.
    """

    def __init__(self, world: World) -> None:
        self._world = world
        self.closed = self.busy = False
        self.failure: BaseException | None = None

    def check(self) -> None:
        """Refuse what cannot be.

        Raises:
            StateError: Saying why, and what to do.
        """
        if self.closed:
            raise StateError("this Runtime is closed and takes no further steps: build a new one")
        if self.failure is not None:
            raise StateError(
                f"this Runtime failed ({type(self.failure).__name__}: {self.failure}) and takes "
                f"no further steps: build a new one on every rank"
            ) from self.failure
        if self.busy:
            raise StateError("a step, save or load is running on this Runtime: await it first")
        shared = self._world.begins_together and self._world.topology.world_size > 1
        if shared and torch.is_autocast_enabled(self._world.device.torch_device.type):
            raise StateError(
                "torch.autocast is set for the thread of this loop, which other ranks' steps run "
                "on too: with several ranks in a process, use it inside the stages' forward"
            )
