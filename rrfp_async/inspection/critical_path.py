"""Why a task began no sooner: back over what it waited for, to where time was lost.

A task begins when its device is free and its inputs are there. Whichever came last is what held
it up: the task before it on the device, or the task elsewhere that made the input, and its way.
Walking on from there gives the critical path. It does not know how that is told.
"""

import enum
import statistics
from collections import defaultdict
from dataclasses import dataclass, field, replace

from rrfp_async.ids import Edge, TaskId, TaskKind
from rrfp_async.inspection.lines import IdleSpan, TaskSpan, TransferSpan
from rrfp_async.inspection.report import FAR, kind_times, latency_s
from rrfp_async.inspection.run import RankStep, Run, is_backward

_GAP_S = 50e-6  # shorter gaps on a device are dispatching, and no idle spans are written of them
_SHARE = 0.25  # of the time to be explained that one cause must account for
_HOPS_MOST = 100_000


class Why(enum.Enum):
    """What a task waited for last."""

    DEVICE = "the device"
    ACTIVATION = "an activation"
    GRADIENT = "a gradient"
    OWN = "a task of its own rank"
    START = "the step's beginning"
    UNKNOWN = "what was not recorded"


@dataclass(frozen=True, slots=True)
class Hop:
    """One task on the path, and what it waited for.

    Attributes:
        rank: Where it ran.
        span: When.
        why: What it waited for last.
        cause: The task that it waited for.
        cause_rank: Where that ran.
        transfer: What brought its input, if that was it.
        way_s: How long that took, from the task that made it.
        idle: The idle span right before it.
        member: The rank that lacked the input: this one, or another that runs the task with it.
    """

    rank: int
    span: TaskSpan
    why: Why
    cause: TaskId | None = None
    cause_rank: int | None = None
    transfer: TransferSpan | None = None
    way_s: float = 0.0
    idle: IdleSpan | None = None
    member: int | None = None


class Fault(enum.Enum):
    """What a wait comes down to."""

    SLOW_TASK = "slow task"
    SLOW_STAGE = "slow stage"
    SLOW_TRANSFER = "slow transfer"
    LIMIT = "limit"
    FIXED_ORDER = "fixed order"
    NOTHING = "nothing"


@dataclass(frozen=True, slots=True)
class FirstCause:
    """Where the time was lost.

    Attributes:
        fault: What it was.
        rank: On which rank; of a transfer, the receiver.
        task: The task: slow, or held back, or whose tensors were slow.
        edge: The edge, of a transfer.
        source: The sending rank, of a transfer.
        took_s: How long the task or the way took.
        usual_s: What is usual for it.
        excess_s: What was lost by it, over the whole path.
        idle: The idle span, of a limit or a fixed order.
        also: Beside something slow, the limit or fixed order that kept ready tasks from filling
            the wait.
    """

    fault: Fault
    rank: int | None = None
    task: TaskId | None = None
    edge: Edge | None = None
    source: int | None = None
    took_s: float = 0.0
    usual_s: float = 0.0
    excess_s: float = 0.0
    idle: IdleSpan | None = None
    also: "FirstCause | None" = None


@dataclass(slots=True)
class Usual:
    """What is usual in the run: durations of tasks and ways, in seconds."""

    run: Run
    of_stage: dict[tuple[int, int, TaskKind], float] = field(default_factory=dict)
    of_kind: dict[TaskKind, float] = field(default_factory=dict)
    of_way: dict[tuple[Edge, bool], float] = field(default_factory=dict)
    of_ways: float = 0.0

    def __post_init__(self) -> None:
        kinds: dict[TaskKind, list[float]] = defaultdict(list)
        for key, times in kind_times(self.run).items():
            self.of_stage[key] = times.median_s
            kinds[times.kind].append(times.median_s)
        self.of_kind = {kind: statistics.median(times) for kind, times in kinds.items()}
        ways: dict[tuple[Edge, bool], list[float]] = defaultdict(list)
        for step in self.run.rank_steps():
            for spans in step.receives.values():
                for span in spans:
                    ways[span.edge, is_backward(span.task.kind)].append(latency_s(self.run, span))
        self.of_way = {key: statistics.median(times) for key, times in ways.items()}
        self.of_ways = statistics.median(self.of_way.values()) if self.of_way else 0.0


def path_back(run: Run, rank: int, span: TaskSpan) -> list[Hop]:
    """The critical path that ends with a task, from there back; the last hop knows no cause."""
    hops: list[Hop] = []
    seen: set[tuple[int, TaskId]] = set()
    where, now = rank, span
    while (where, now.task) not in seen and len(hops) < _HOPS_MOST:
        seen.add((where, now.task))
        hop = _hop(run, where, now)
        hops.append(hop)
        if hop.cause is None or hop.cause_rank is None:
            break
        step = run.rank_step(hop.cause_rank, now.step)
        before = step.spans.get(hop.cause) if step else None
        if before is None:
            break
        where, now = hop.cause_rank, before
    return hops


def _hop(run: Run, rank: int, span: TaskSpan) -> Hop:
    step = run.rank_step(rank, span.step)
    assert step is not None  # the span is from it
    idle = _idle_before(step, span)
    before = _before_on_device(step, span)
    received, member = _last_of_group(run, step, span)
    free_s = before.end_s if before else -float("inf")
    if received is not None and received.end_s > free_s:
        why = Why.GRADIENT if is_backward(received.task.kind) else Why.ACTIVATION
        way_s = latency_s(run, received)
        return Hop(rank, span, why, received.task, received.peer, received, way_s, idle, member)
    if before is not None and span.start_s - before.end_s <= _GAP_S:
        return Hop(rank, span, Why.DEVICE, before.task, rank, idle=idle)
    if idle is not None and idle.waits and idle.waits[0].rank not in (None, rank):
        wait = idle.waits[0]  # the receive was not recorded
        return Hop(rank, span, Why.UNKNOWN, wait.source, wait.rank, idle=idle)
    if before is None:
        return Hop(rank, span, Why.START, idle=idle)
    return Hop(rank, span, Why.OWN, before.task, rank, idle=idle)


def _last_of_group(
    run: Run, step: RankStep, span: TaskSpan
) -> tuple[TransferSpan | None, int | None]:
    """What came last of what the ranks that run the task together needed, and to which."""
    members = (run.rank_step(rank, step.step) for rank in run.group_of(step.rank))
    came = ((_last_input(member, span), member.rank) for member in members if member)
    found = [(received, rank) for received, rank in came if received]
    return max(found, key=lambda each: each[0].end_s, default=(None, None))


def _idle_before(step: RankStep, span: TaskSpan) -> IdleSpan | None:
    idle = step.idle_at(span.start_s - _GAP_S / 2)
    return idle if idle and abs(idle.end_s - span.start_s) <= 20 * _GAP_S else None


def _before_on_device(step: RankStep, span: TaskSpan) -> TaskSpan | None:
    earlier = (other for other in step.spans.values() if other.end_s <= span.start_s + _GAP_S)
    earlier = (other for other in earlier if other.start_s < span.start_s)
    return max(earlier, key=lambda other: other.end_s, default=None)


def _last_input(step: RankStep, span: TaskSpan) -> TransferSpan | None:
    """What came last of what the task needed from other ranks."""
    task = span.task
    needed = [
        received
        for made, spans in step.receives.items()
        if made.microbatch == task.microbatch
        for received in spans
        if (made.kind is TaskKind.F and task.kind is TaskKind.F and _into(received, task))
        or (is_backward(made.kind) and is_backward(task.kind) and _out_of(received, task))
    ]
    return max(needed, key=lambda received: received.end_s, default=None)


def _into(received: TransferSpan, task: TaskId) -> bool:
    return received.edge.target == task.stage


def _out_of(received: TransferSpan, task: TaskId) -> bool:
    return received.edge.source == task.stage


def first_cause(usual: Usual, hops: list[Hop], lost_s: float) -> FirstCause:
    """What on the path cost at least a quarter of `lost_s`, the nearest first.

    A single slow task or transfer comes before a stage or an edge that is always slow, and both
    before the limit or fixed order that kept ready tasks from filling the wait: that is told
    beside them, and is the cause where nothing was slow.

    Args:
        usual: What is usual in the run.
        hops: The path, from the task that waited backwards.
        lost_s: How long it waited.
    """
    least_s = max(_SHARE * lost_s, _GAP_S)
    slow = _slow(usual, hops, least_s)
    held = _first_held_back(hops, least_s)
    if slow is None:
        return held or FirstCause(Fault.NOTHING)
    return replace(slow, also=held)


def _slow(usual: Usual, hops: list[Hop], least_s: float) -> FirstCause | None:
    for at, hop in enumerate(hops):
        found = _at_hop(usual, hop, least_s, itself=at == 0)
        if found is not None:
            return found
    return _always_slow(usual, hops, least_s)


def _first_held_back(hops: list[Hop], least_s: float) -> FirstCause | None:
    found = (_held_back(hop) for hop in hops)
    return next((held for held in found if held and held.excess_s >= least_s), None)


def _held_back(hop: Hop) -> FirstCause | None:
    idle = hop.idle
    if idle is None or idle.cause not in ("limit", "fixed order"):
        return None
    fault = Fault.LIMIT if idle.cause == "limit" else Fault.FIXED_ORDER
    task = idle.ready[0] if idle.ready else None
    return FirstCause(fault, hop.rank, task, excess_s=idle.duration_s, idle=idle)


def _at_hop(usual: Usual, hop: Hop, least_s: float, *, itself: bool) -> FirstCause | None:
    """What was slow at this hop: its task, unless that is what waited, or its input's way."""
    if not itself:
        took_s = hop.span.duration_s
        key = hop.rank, hop.span.task.stage, hop.span.task.kind
        usual_s = usual.of_stage.get(key, took_s)
        if took_s > FAR * usual_s and took_s - usual_s >= least_s:
            return FirstCause(
                Fault.SLOW_TASK,
                hop.rank,
                hop.span.task,
                took_s=took_s,
                usual_s=usual_s,
                excess_s=took_s - usual_s,
            )
    if hop.transfer is not None:
        usual_s = min(_usual_way_s(usual, hop.transfer), usual.of_ways)
        if hop.way_s > FAR * usual_s and hop.way_s - usual_s >= least_s:
            return _slow_transfer(hop, usual_s, hop.way_s - usual_s)
    return None


def _usual_way_s(usual: Usual, transfer: TransferSpan) -> float:
    return usual.of_way.get((transfer.edge, is_backward(transfer.task.kind)), 0.0)


def _slow_transfer(hop: Hop, usual_s: float, excess_s: float) -> FirstCause:
    assert hop.transfer is not None  # the caller has looked
    return FirstCause(
        Fault.SLOW_TRANSFER,
        hop.rank if hop.member is None else hop.member,
        hop.transfer.task,
        edge=hop.transfer.edge,
        source=hop.transfer.peer,
        took_s=hop.way_s,
        usual_s=usual_s,
        excess_s=excess_s,
    )


def _always_slow(usual: Usual, hops: list[Hop], least_s: float) -> FirstCause | None:
    """The stage or edge that is slower than the others, if the path lost enough there in sum."""
    lost_s: dict[tuple[str, int, object], float] = defaultdict(float)
    example: dict[tuple[str, int, object], Hop] = {}
    for hop in hops[1:]:
        kind = hop.span.task.kind
        usual_s = usual.of_kind.get(kind, 0.0)
        if usual.of_stage.get((hop.rank, hop.span.task.stage, kind), 0.0) > FAR * usual_s:
            key = ("stage", hop.rank, hop.span.task.stage)
            lost_s[key] += hop.span.duration_s - usual_s
            example.setdefault(key, hop)
    for hop in hops:
        if hop.transfer is not None and _usual_way_s(usual, hop.transfer) > FAR * usual.of_ways:
            link = ("edge", hop.rank, (hop.transfer.edge, hop.why))
            lost_s[link] += hop.way_s - usual.of_ways
            example[link] = max(example.get(link, hop), hop, key=lambda other: other.way_s)
    worst = max(lost_s, key=lambda key: lost_s[key], default=None)
    if worst is None or lost_s[worst] < least_s:
        return None
    hop = example[worst]
    if worst[0] == "edge":
        return _slow_transfer(hop, usual.of_ways, lost_s[worst])
    kind = hop.span.task.kind
    return FirstCause(
        Fault.SLOW_STAGE,
        hop.rank,
        hop.span.task,
        took_s=usual.of_stage[hop.rank, hop.span.task.stage, kind],
        usual_s=usual.of_kind[kind],
        excess_s=lost_s[worst],
    )
