"""What the caller of a step has set for its own thread, and the thread that computes is to have.

torch keeps the number of intra-op threads and autocast per thread. It does not know what is
computed.
"""

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class Ambient:
    """Settings of one thread.

    Attributes:
        num_threads: Intra-op threads. Bits depend on their number.
        device_type: What autocast is for; None without autocast.
        dtype: What it casts to.
        caches: Whether it casts a weight once for all its uses.
    """

    num_threads: int = 1
    device_type: str | None = None
    dtype: torch.dtype | None = None
    caches: bool = True

    @classmethod
    def of_caller(cls, device: torch.device) -> "Ambient":
        """What is set on this thread for computing on `device`."""
        threads, kind = torch.get_num_threads(), device.type
        if not torch.is_autocast_enabled(kind):
            return cls(threads)
        caches = torch.is_autocast_cache_enabled()
        return cls(threads, kind, torch.get_autocast_dtype(kind), caches)

    def adopt_num_threads(self) -> None:
        """Compute with as many threads on this one; a thread keeps the count it began with."""
        if torch.get_num_threads() != self.num_threads:
            torch.set_num_threads(self.num_threads)

    def autocast(self) -> AbstractContextManager[object]:
        """For a forward: autocast, if the caller has it. A backward follows its forward."""
        if self.device_type is None:
            return nullcontext()
        return torch.autocast(self.device_type, self.dtype, cache_enabled=self.caches)
