"""The story of a wait, in sentences: what was ready, what was missing, from whom, and why.

Written from the critical path. Of a failed run it tells the failure first, with the stall reports.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from rrfp_async.ids import TaskId
from rrfp_async.inspection.critical_path import (
    Fault,
    FirstCause,
    Hop,
    Usual,
    Why,
    first_cause,
    path_back,
)
from rrfp_async.inspection.failure import failure_story
from rrfp_async.inspection.lines import IdleSpan, TaskSpan
from rrfp_async.inspection.report import check_step
from rrfp_async.inspection.run import RankStep, Run
from rrfp_async.inspection.wording import idle_words, moment, names, seconds, wait_words

_HOPS_TOLD = 12


@dataclass(frozen=True, slots=True)
class Story:
    """An explanation: its sentences, and what they come down to (None for a failure)."""

    lines: tuple[str, ...]
    cause: FirstCause | None


def explain(
    run: Run,
    *,
    rank: int | None = None,
    at_s: float | None = None,
    task: TaskId | None = None,
    step: int | None = None,
) -> Story:
    """Explain a moment of a rank, a task, or for neither the failure or the longest wait.

    Args:
        run: The run.
        rank: Whose moment; of a task, only needed with replicas.
        at_s: The moment, in seconds since the first step began.
        task: The task.
        step: Of the task, by default the last step that every rank ended; of the moment or the
            failure, which must then lie in it.

    Raises:
        ValueError: If what is asked for is not in the records.
    """
    check_step(run, step)
    if rank is not None and rank not in run.ranks:
        raise ValueError(f"rank {rank} has no file in {run.folder}: it holds {_held(run)}")
    if not run.timed:
        raise ValueError(f"{run.folder} has no times (schema 1): record again to explain it")
    if task is not None:
        if at_s is not None:
            raise ValueError(f"--task {task} and --at {at_s} are two questions: give one")
        return _of_task(run, task, rank, run.last_step() if step is None else step)
    if at_s is not None:
        if rank is None:
            raise ValueError(f"--at {at_s} is a moment of some rank: give --rank too")
        return _of_moment(run, rank, at_s, step)
    failed = failure_story(run, rank, step=step)
    if failed:
        return Story(tuple(failed), None)
    return _of_longest(run, rank, step)


def _of_task(run: Run, task: TaskId, rank: int | None, step: int) -> Story:
    for rank_step in run.rank_steps(step):
        if rank in (None, rank_step.rank) and task in rank_step.spans:
            return _of_span(run, rank_step, rank_step.spans[task])
    for rank_step in run.rank_steps(step):
        if rank in (None, rank_step.rank) and task in rank_step.voids:
            told = f"{task} did not run in step {step}: nothing wanted a gradient of it"
            return Story((told,), None)
    where = "" if rank is None else f" on rank {rank}"
    failed = failure_story(run, step=step)
    if failed:
        return Story((f"{task} did not run in step {step}{where}.", *failed), None)
    raise ValueError(f"task {task} is not in step {step}{where}: {_recorded(run, task, step)}")


def _recorded(run: Run, task: TaskId, step: int) -> str:
    """What there is of the task's stage, or else of which stages there is anything."""
    tasks = [other for rank_step in run.rank_steps(step) for other in rank_step.spans]
    of_stage = [other for other in tasks if other.stage == task.stage]
    if not of_stage:
        stages = ", ".join(map(str, sorted({other.stage for other in tasks})))
        return f"what is recorded there is of stages {stages or 'none'}"
    kinds = ", ".join(sorted({other.kind.value for other in of_stage}))
    last = max(other.microbatch for other in of_stage)
    return f"stage {task.stage} ran {kinds} of microbatches up to {last}"


def _of_moment(run: Run, rank: int, at_s: float, step: int | None) -> Story:
    trace = run.ranks[rank]
    steps = [one for number, one in trace.steps.items() if step in (None, number)]
    for rank_step in steps:
        idle = rank_step.idle_at(at_s)
        if idle is not None:
            return _of_idle(run, rank_step, idle)
        span = rank_step.span_at(at_s)
        if span is not None:
            return _of_span(run, rank_step, span)
    if trace.failure is not None and at_s >= _end_s(steps) and step in (None, trace.failure.step):
        return Story(tuple(failure_story(run, rank)), None)
    for rank_step in steps:
        extent = rank_step.extent_s()
        if extent and extent[0] <= at_s <= extent[1]:
            told = (
                f"At {moment(at_s)} rank {rank} was between two tasks of step {rank_step.step}, "
                f"idle for less than 50 µs, or agreeing with the others on the step."
            )
            return Story((told,), None)
    where = "" if step is None else f" of step {step}"
    raise ValueError(
        f"rank {rank} recorded nothing{where} at {at_s} s: its times{where} reach from "
        f"{_begun_s(steps):.6f} to {_end_s(steps):.6f} s since the first step began"
    )


def _held(run: Run) -> str:
    first, last = min(run.ranks), max(run.ranks)
    if len(run.ranks) == last - first + 1 > 1:
        return f"ranks {first} to {last}"
    return f"rank {', '.join(map(str, run.ranks))}"


def _begun_s(steps: Sequence[RankStep]) -> float:
    extents = (step.extent_s() for step in steps)
    return min((extent[0] for extent in extents if extent), default=0.0)


def _end_s(steps: Sequence[RankStep]) -> float:
    extents = (step.extent_s() for step in steps)
    return max((extent[1] for extent in extents if extent), default=0.0)


def _of_longest(run: Run, rank: int | None, step: int | None) -> Story:
    waits = [
        (idle.duration_s, rank_step, idle)
        for rank_step in run.rank_steps(run.last_step() if step is None else step)
        for idle in rank_step.idles
        if rank in (None, rank_step.rank) and idle.cause != "others"
    ]
    if not waits:
        raise ValueError(f"nobody waited there in {run.folder}: give --task or --rank and --at")
    _, rank_step, idle = max(waits, key=lambda wait: wait[0])
    return _of_idle(run, rank_step, idle, "The longest wait: ")


def _of_idle(run: Run, step: RankStep, idle: IdleSpan, opening: str = "") -> Story:
    lines = [
        f"{opening}Rank {step.rank} idled for {seconds(idle.duration_s)}, from "
        f"{moment(idle.start_s)} to {moment(idle.end_s)} in step {step.step}: {idle_words(idle)}."
    ]
    lines += _missing(idle)
    if idle.cause == "others":
        return _after_others(run, step, idle, lines)
    after = min(
        (span for span in step.spans.values() if span.start_s >= idle.end_s - 1e-9),
        key=lambda span: span.start_s,
        default=None,
    )
    if after is None:
        lines.append("Nothing ran after it: the step ended, or failed.")
        return Story((*lines, *failure_story(run, step.rank)), None)
    lines.append(f"It ended with {after.task}, which began at {moment(after.start_s)}.")
    return _with_path(run, step.rank, after, idle.duration_s, lines)


def _missing(idle: IdleSpan) -> list[str]:
    lines = []
    if idle.ready and idle.cause == "limit":
        lines.append(
            f"Ready were {names(list(idle.ready))}, forwards all: one may begin once a backward "
            f"has ended here."
        )
    elif not idle.ready:
        lines.append(f"Nothing was ready; {idle.in_flight} forwards were in flight.")
    if len(idle.waits) > 1:
        told = "; ".join(map(wait_words, idle.waits[1:]))
        lines.append(f"Ranked next and missing as well: {told}.")
    return lines


def _after_others(run: Run, step: RankStep, idle: IdleSpan, lines: list[str]) -> Story:
    """The rank was done: what kept the step going is the task that ended last anywhere."""
    last = max(
        (
            (span.end_s, other.rank, span)
            for other in run.rank_steps(step.step)
            for span in other.spans.values()
        ),
        key=lambda found: found[0],
    )
    _, rank, span = last
    lines.append(
        f"The last task of the step was {span.task} on rank {rank}, until {moment(span.end_s)}."
    )
    return _with_path(run, rank, span, idle.duration_s, lines)


def _of_span(run: Run, step: RankStep, span: TaskSpan) -> Story:
    lines = [
        f"{span.task} ran on rank {step.rank} in step {step.step} from {moment(span.start_s)} to "
        f"{moment(span.end_s)}, {seconds(span.duration_s)}."
    ]
    made = step.decision(span.task)
    if made is not None:
        place = "" if made.hint_position is None else f", at place {made.hint_position} of its hint"
        lines.append(
            f"It was chosen among {made.ready} ready{place}, after {seconds(made.waited_s)} "
            f"without work: {made.reason}."
        )
        if made.passed_over:
            lines.append(
                f"Ranked higher, but not ready or not admissible: {names(list(made.passed_over))}."
            )
    hops = path_back(run, step.rank, span)
    idle = hops[0].idle
    if idle is not None:
        lines.append(
            f"Before it the rank idled for {seconds(idle.duration_s)}: {idle_words(idle)}."
        )
        lines += _missing(idle)
    return _with_path(run, step.rank, span, idle.duration_s if idle else 0.0, lines)


def _with_path(run: Run, rank: int, span: TaskSpan, lost_s: float, lines: list[str]) -> Story:
    usual = Usual(run)
    hops = path_back(run, rank, span)
    cause = first_cause(usual, hops, lost_s)
    told = _told_hops(hops, _at(hops, cause))
    return Story((*lines, *told, *_verdicts(cause)), cause)


def _at(hops: list[Hop], cause: FirstCause) -> int:
    """The place of the first cause on the path."""
    for at, hop in enumerate(hops):
        moved = hop.transfer is not None and hop.transfer.task == cause.task
        if (hop.span.task == cause.task and hop.rank == cause.rank) or moved:
            return at
        if cause.idle is not None and hop.idle is cause.idle:
            return at
    return len(hops) - 1


def _told_hops(hops: list[Hop], until: int) -> list[str]:
    """The path in sentences, tasks that followed one another on a device drawn together."""
    told: list[str] = []
    at = 0
    while at < len(hops) and at <= until:
        begun = at
        while at < until and hops[at].why is Why.DEVICE:
            at += 1
        if at > begun:
            told.append(_busy(hops[begun], hops[at]))
        if hops[at].why is not Why.DEVICE:
            told.append(_hop_words(hops[at]))
        at += 1
    if len(told) > _HOPS_TOLD:
        left_out = f"  ({len(told) - _HOPS_TOLD} more steps back)"
        return [*told[: _HOPS_TOLD - 2], left_out, *told[-2:]]
    return told


def _busy(last: Hop, first: Hop) -> str:
    return (
        f"- Rank {last.rank} was busy before {last.span.task} without a gap from "
        f"{moment(first.span.start_s)}, with {first.span.task} and what followed."
    )


def _hop_words(hop: Hop) -> str:
    task = f"{hop.span.task} on rank {hop.rank}"
    match hop.why:
        case Why.ACTIVATION | Why.GRADIENT:
            assert hop.transfer is not None  # that is why
            group = "" if hop.member in (None, hop.rank) else f" on rank {hop.member} of its group"
            return (
                f"- {task} waited for {hop.why.value}{group}: {hop.cause} of rank "
                f"{hop.cause_rank}, there at {moment(hop.transfer.end_s)}, {seconds(hop.way_s)} "
                f"after that had ended (edge {hop.transfer.edge})."
            )
        case Why.OWN:
            return f"- {task} came after {hop.cause} on the same rank."
        case Why.START:
            return f"- {task} was the first there: nothing held it up but the step's beginning."
        case Why.DEVICE:
            return f"- {task} came right after {hop.cause} on the same device."
    return f"- {task} waited for {hop.cause} of rank {hop.cause_rank}; how it came is not recorded."


def _verdicts(cause: FirstCause) -> list[str]:
    lines = [f"First cause: {_cause_words(cause)}."]
    if cause.also is not None:
        lines.append(f"And: {_cause_words(cause.also)}.")
    return lines


def _cause_words(cause: FirstCause) -> str:
    took = f"{seconds(cause.took_s)} instead of {seconds(cause.usual_s)}"
    match cause.fault:
        case Fault.SLOW_TASK:
            return f"a slow task: {cause.task} on rank {cause.rank} took {took}"
        case Fault.SLOW_STAGE:
            assert cause.task is not None  # an example of the stage's tasks
            return (
                f"a slow rank: {cause.task.kind.value} of stage {cause.task.stage} on rank "
                f"{cause.rank} takes {took} as elsewhere; all its tasks on the whole way back "
                f"took {seconds(cause.excess_s)} more than others'"
            )
        case Fault.SLOW_TRANSFER:
            return (
                f"a slow transfer: {cause.task} was {took} on its way from rank {cause.source} "
                f"to rank {cause.rank} (edge {cause.edge})"
            )
        case Fault.LIMIT:
            assert cause.idle is not None  # that is where it was met
            return (
                f"the limit on rank {cause.rank}: {cause.idle.in_flight} forwards in flight of at "
                f"most {cause.idle.bound} while {names(list(cause.idle.ready))} stood ready; a "
                f"higher limit costs memory"
            )
        case Fault.FIXED_ORDER:
            assert cause.idle is not None  # that is where it was met
            return (
                f"the fixed order on rank {cause.rank}: {names(list(cause.idle.ready))} stood "
                f"ready, and the order had another task next; binding=False runs what is ready"
            )
    return "nothing was slow and no limit held: the pipeline fills or drains, or the work is uneven"
