"""The settings of a Runtime: frozen, validated where they are made, equal on every rank.

Only plain values. Nothing is looked up in the environment and no default depends on the machine.
"""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from rrfp_async.hints import AUTO, Execution, HintOrder, Schedule, resolve_hint
from rrfp_async.hints.recorded import ReplayedSchedule
from rrfp_async.limits import FixedLimit
from rrfp_async.topology import Topology

TP_PROTOCOLS = ("leader", "allgather")
"""How ranks that compute a stage together can agree."""

_PORT_MOST = 65_535


@dataclass(frozen=True, slots=True, kw_only=True)
class Config:
    """How a Runtime splits, orders and bounds its work.

    Attributes:
        microbatches: Parts that a whole batch is split into. A step given as `Microbatches` has
            as many as are given.
        hint: `"auto"`, another hint's name (`python -m rrfp_async hints` lists them),
            `"csv:FILE"`, `"replay:DIR"`, a `HintOrder`, a `Schedule`, or a schedule object of
            torch.distributed.pipelining.
        binding: Whether a listed hint is executed as it stands, ready tasks or not: the fixed-order
            baseline. By default only a replay is.
        limit: Forwards in flight per rank, or `"auto"`: from depth, position and measured
            transfer times (docs/backpressure.md). Below the number of stages it costs speed,
            above it costs memory.
        activation_budget_bytes: What the activations kept for backwards may take on a rank, in
            bytes, measured as they are saved; lowers the limit where it must. None for no budget.
        deterministic: Accumulate gradients in microbatch order, whatever the dispatch order was.
            False frees that order, and with it the last bits of a sum.
        return_outputs: Keep every microbatch's output of the last stage for the step's result.
            Evaluation always does. False saves their memory in training.
        peer_timeout_s: Seconds that a peer may take to come up, or be silent, before it is lost.
        stall_timeout_s: Seconds without any progress on any rank after which a step fails; waiting
            for `data=` is part of the step.
        port: First TCP port for control messages between processes; rank r of a host binds
            port + r. 0 takes any free one.
        seed: Of all that stages draw, dropout for one, an int of 0 to 2**64 - 1: masks depend on
            it, the training step, the stage and the microbatch only. None takes the first rank's
            `torch.initial_seed()` as it is when its Runtime is built.
        tp_protocol: How the ranks that compute a stage together agree on every task, where a
            topology has `tp` above 1. `"leader"`: one decides, ahead of time. `"allgather"`: all
            propose and try again until they are of one mind, the RRFP paper's way, to compare.
        trace_dir: Folder for the dispatch log `rank{r}.jsonl`, or None for no log.

    Raises:
        ValueError: If a value breaks its rule.
    """

    microbatches: int
    hint: Any = AUTO
    binding: bool | None = None
    limit: int | Literal["auto"] = "auto"
    activation_budget_bytes: int | None = None
    deterministic: bool = True
    return_outputs: bool = True
    peer_timeout_s: float = 30.0
    stall_timeout_s: float = 120.0
    port: int = 0
    seed: int | None = None
    tp_protocol: Literal["leader", "allgather"] = "leader"
    trace_dir: str | Path | None = None
    order: HintOrder | Schedule = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        _require_count("microbatches", self.microbatches)
        if self.limit != "auto":
            _require_count("limit", self.limit, " or 'auto'")
        if self.activation_budget_bytes is not None:
            _require_count("activation_budget_bytes", self.activation_budget_bytes, " or None")
        for name in ("deterministic", "return_outputs"):
            if not isinstance(getattr(self, name), bool):
                raise ValueError(f"{name}={getattr(self, name)!r} must be True or False")
        for name in ("peer_timeout_s", "stall_timeout_s"):
            _require_seconds(name, getattr(self, name))
        if type(self.port) is not int or not 0 <= self.port <= _PORT_MOST:
            raise ValueError(f"port={self.port!r} must be an int of 0 to {_PORT_MOST}: 0 is any")
        if self.seed is not None and (type(self.seed) is not int or not 0 <= self.seed < 2**64):
            raise ValueError(f"seed={self.seed!r} must be an int of 0 to 2**64 - 1, or None")
        if self.tp_protocol not in TP_PROTOCOLS:
            raise ValueError(
                f"tp_protocol={self.tp_protocol!r} must be one of {', '.join(TP_PROTOCOLS)}"
            )
        if self.trace_dir is not None and not isinstance(self.trace_dir, str | Path):
            raise ValueError(f"trace_dir={self.trace_dir!r} must be a path or None")
        object.__setattr__(self, "order", resolve_hint(self.hint))
        self._check_binding()

    def _check_binding(self) -> None:
        if self.binding is not None and not isinstance(self.binding, bool):
            raise ValueError(f"binding={self.binding!r} must be True, False or None")
        if self.binding and not isinstance(self.order, Schedule):
            raise ValueError(
                f"binding=True executes a list as it stands, but hint {self.hint_name!r} is a "
                f"rule: use one of the lists that `python -m rrfp_async hints` shows, or leave "
                f"binding out"
            )
        if self.execution.binding and self.activation_budget_bytes is not None:
            raise ValueError(
                f"activation_budget_bytes={self.activation_budget_bytes} cannot hold back an order "
                f"that is executed as it stands: leave it out, or set binding=False"
            )

        if isinstance(self.order, ReplayedSchedule) and self.trace_dir is not None:
            self.order.check_not_overwritten(Path(self.trace_dir))

    @property
    def hint_name(self) -> str:
        """What the hint is called in messages, and by what ranks compare theirs."""
        given = isinstance(self.hint, str) and ":" not in self.hint
        return self.hint if given else self.order.name

    @property
    def execution(self) -> Execution:
        """How a listed hint is used."""
        binds = isinstance(self.order, Schedule) and self.order.binds
        return Execution(
            binding=binds if self.binding is None else self.binding,
            deterministic=self.deterministic,
        )

    @property
    def splits(self) -> bool:
        """Whether the hint splits backwards into I and W."""
        return self.order.splits

    @property
    def insists_on_split(self) -> bool:
        """Whether to split also where that does not pay, and to warn where it cannot be done."""
        return self.hint_name != AUTO

    def check_order(self, topology: Topology) -> None:
        """Check a listed hint against the pipeline, before anything starts.

        Raises:
            ValueError: If a list breaks a rule, or `limit` is below the peak of one that is
                executed as it stands; the first fault names row, task and rule.
        """
        if not isinstance(self.order, Schedule):
            return
        execution = self.execution
        for step, microbatches, training in self.order.known_steps(self.microbatches):
            rules = execution.rules(self.order, training=training)
            plan = self.order.plan(topology, microbatches, step, rules)
            if execution.binding and training and self.limit != "auto":
                FixedLimit(self.limit).for_peak(max(plan.peaks))

    def check_agreement(self, topology: Topology) -> None:
        """Check what the ranks of a tensor-parallel group must agree on, before anything starts.

        Raises:
            ValueError: If they cannot.
        """
        budget = self.activation_budget_bytes
        if topology.tp > 1 and self.tp_protocol == "allgather" and budget is not None:
            raise ValueError(
                f"activation_budget_bytes={budget} makes every rank's limit its own, and "
                f"tp_protocol='allgather' needs equal ones: use tp_protocol='leader'"
            )

    def agreed(self) -> tuple[tuple[str, str], ...]:
        """The settings that must be equal on every rank, as (name, value) words."""
        return (
            ("hint", self.hint_name),
            ("binding", str(self.execution.binding)),
            ("limit", str(self.limit)),
            ("activation_budget_bytes", str(self.activation_budget_bytes)),
            ("microbatches", str(self.microbatches)),
            ("deterministic", str(self.deterministic)),
            ("seed", str(self.seed)),
            ("tp_protocol", self.tp_protocol),
            ("peer_timeout_s", str(self.peer_timeout_s)),
            ("stall_timeout_s", str(self.stall_timeout_s)),
        )


def _require_seconds(name: str, value: object) -> None:
    number = isinstance(value, int | float) and not isinstance(value, bool)
    if not number or not 0 < value < float("inf"):  # type: ignore[operator] # it is a number
        raise ValueError(f"{name}={value!r} must be a number of seconds above 0: give {name}=30.0")


def _require_count(name: str, value: object, or_else: str = "") -> None:
    if type(value) is not int or value < 1:
        raise ValueError(
            f"{name}={value!r} must be an int of at least 1{or_else}: give {name}=1 or more"
        )
