"""What comes late on the virtual cluster, beside the delays of the cost tables.

Messages by which ranks agree take a while, and tensors reach the ranks of a tensor-parallel group
at different times. It says how late things are, not how they are held back.
"""

import random
from collections.abc import Callable
from dataclasses import dataclass

from rrfp_async.ids import Link

_MOST_S = 1e9


@dataclass(frozen=True, slots=True)
class Lateness:
    """How late things come, in seconds.

    Attributes:
        control_s: Each agreement message, from its sending on.
        skew_s: Each tensor that travels between ranks, beyond its own delay: uniform from 0 to
            this, drawn for every transfer of every link, so for each member of a group by itself.
        seed: Of these draws; the same seed and link give the same ones.

    Raises:
        ValueError: If a time is no finite number of at least 0.
    """

    control_s: float = 0.0
    skew_s: float = 0.0
    seed: int = 0

    def __post_init__(self) -> None:
        for name, seconds in (("control delay", self.control_s), ("skew", self.skew_s)):
            if not 0.0 <= seconds <= _MOST_S:
                raise ValueError(
                    f"{name} {seconds} must be seconds, at least 0 and at most {_MOST_S:g}"
                )

    def skews(self, link: Link) -> Callable[[], float]:
        """Draws how late the next transfer on `link` is, in seconds."""
        if not self.skew_s:
            return _not_at_all
        source = random.Random(f"{self.seed}/skew/{link}")
        return lambda: source.uniform(0.0, self.skew_s)


PUNCTUAL = Lateness()
"""Nothing is late."""


def _not_at_all() -> float:
    return 0.0
