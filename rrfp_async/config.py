"""The settings of a Runtime: frozen, validated where they are made, equal on every rank.

Only plain values. Nothing is looked up in the environment and no default depends on the machine.
"""

from dataclasses import dataclass
from pathlib import Path

from rrfp_async.hints import HintOrder, hint_name, make_hint

_PORT_MOST = 65_535


@dataclass(frozen=True, slots=True, kw_only=True)
class Config:
    """How a Runtime splits, orders and bounds its work.

    Attributes:
        microbatches: Parts that a whole batch is split into. A step given as `Microbatches` has
            as many as are given.
        hint: The name of a hint order (see `rrfp_async.hints.HINTS`) or a `HintOrder`.
        limit: Forwards in flight per rank (PAPER's buffer limit; 32 is its default). Below the
            number of stages it costs speed, above it costs memory.
        deterministic: Accumulate gradients in microbatch order, whatever the dispatch order was.
            False frees that order, and with it the last bits of a sum.
        return_outputs: Keep every microbatch's output of the last stage for the step's result.
            Evaluation always does. False saves their memory in training.
        peer_timeout_s: Seconds that a peer may take to come up, or be silent, before it is lost.
        stall_timeout_s: Seconds without any progress on any rank after which a step fails; waiting
            for `data=` is part of the step.
        port: First TCP port for control messages between processes; rank r of a host binds
            port + r. 0 takes any free one.
        trace_dir: Folder for the dispatch log `rank{r}.jsonl`, or None for no log.

    Raises:
        ValueError: If a value breaks its rule.
    """

    microbatches: int
    hint: str | HintOrder = "bf"
    limit: int = 32
    deterministic: bool = True
    return_outputs: bool = True
    peer_timeout_s: float = 30.0
    stall_timeout_s: float = 120.0
    port: int = 0
    trace_dir: str | Path | None = None

    def __post_init__(self) -> None:
        _require_count("microbatches", self.microbatches)
        _require_count("limit", self.limit)
        for name in ("deterministic", "return_outputs"):
            if not isinstance(getattr(self, name), bool):
                raise ValueError(f"{name}={getattr(self, name)!r} must be True or False")
        for name in ("peer_timeout_s", "stall_timeout_s"):
            _require_seconds(name, getattr(self, name))
        if type(self.port) is not int or not 0 <= self.port <= _PORT_MOST:
            raise ValueError(f"port={self.port!r} must be an int of 0 to {_PORT_MOST}: 0 is any")
        if self.trace_dir is not None and not isinstance(self.trace_dir, str | Path):
            raise ValueError(f"trace_dir={self.trace_dir!r} must be a path or None")
        make_hint(self.hint)

    def agreed(self) -> tuple[tuple[str, str], ...]:
        """The settings that must be equal on every rank, as (name, value) words."""
        return (
            ("hint", hint_name(self.hint)),
            ("limit", str(self.limit)),
            ("microbatches", str(self.microbatches)),
            ("deterministic", str(self.deterministic)),
            ("peer_timeout_s", str(self.peer_timeout_s)),
            ("stall_timeout_s", str(self.stall_timeout_s)),
        )


def _require_seconds(name: str, value: object) -> None:
    number = isinstance(value, int | float) and not isinstance(value, bool)
    if not number or not 0 < value < float("inf"):  # type: ignore[operator] # it is a number
        raise ValueError(f"{name}={value!r} must be a number of seconds above 0: give {name}=30.0")


def _require_count(name: str, value: object) -> None:
    if type(value) is not int or value < 1:
        raise ValueError(f"{name}={value!r} must be an int of at least 1: give {name}=1 or more")
