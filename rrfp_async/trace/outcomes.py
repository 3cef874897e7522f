"""What the recorder reads of tensors and of a step's result, whose types it does not know."""

from typing import Protocol


class Sized(Protocol):
    """A tensor, as far as a record goes."""

    @property
    def nbytes(self) -> int:
        """What it takes, in bytes."""


class StepTimes(Protocol):
    """What a step came to; see `StepResult`."""

    @property
    def step_s(self) -> float:
        """All of it; the next four sum to it."""

    @property
    def compute_s(self) -> float:
        """Tasks held the device."""

    @property
    def blocking_s(self) -> float:
        """The device had nothing to do."""

    @property
    def coordination_s(self) -> float:
        """The ranks agreed."""

    @property
    def other_s(self) -> float:
        """The rest."""

    @property
    def loss(self) -> float | None:
        """The batch's."""

    @property
    def peak_in_flight(self) -> int:
        """The most forwards at once."""
