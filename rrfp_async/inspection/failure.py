"""The story of a run that failed: the first cause, what each rank said, and who waited for whom."""

from textwrap import shorten

from rrfp_async.ids import TaskId
from rrfp_async.inspection.lines import Failed, IdleSpan
from rrfp_async.inspection.run import RankStep, Run
from rrfp_async.inspection.wording import moment, wait_words

_REPORTS_MOST = 16
_REPORT_MOST = 400


def failure_words(run: Run, *, step: int | None = None) -> str | None:
    """The first failure in a sentence; None if nothing failed, or not in that step."""
    failures = _failures(run, step)
    return _what(_first(failures)) if failures else None


def failure_story(run: Run, rank: int | None = None, *, step: int | None = None) -> list[str]:
    """The failure in sentences; empty for a run that did not fail.

    Args:
        run: The run.
        rank: Whose report comes first, and with whom the chain of waits begins.
        step: The step that must have failed; None for any.
    """
    failures = _failures(run, step)
    if not failures:
        return []
    first = _first(failures)
    lines = [_what(first)]
    order = sorted(failures, key=lambda other: (other != rank, other))
    lines += [
        f"Rank {told} reported: {_told_report(failures[told].report, whole=told == rank)}."
        for told in order[:_REPORTS_MOST]
        if failures[told].report
    ]
    lines += [f"Rank {dead} wrote no failure: it was killed or cut off." for dead in _silent(run)]
    if first.task is not None:  # what failed is known, and the others only waited
        return lines
    return lines + _chain(run, first.step, rank)


def _failures(run: Run, step: int | None) -> dict[int, Failed]:
    return {
        trace.rank: trace.failure
        for trace in run.ranks.values()
        if trace.failure is not None and step in (None, trace.failure.step)
    }


def _first(failures: dict[int, Failed]) -> Failed:
    return min(failures.values(), key=lambda failure: failure.time_s)


def _told_report(report: str, *, whole: bool) -> str:
    return report if whole else shorten(report, _REPORT_MOST, placeholder=" ... (--rank for all)")


def _what(failure: Failed) -> str:
    where = "" if failure.rank is None else f" on rank {failure.rank}"
    task = "" if failure.task is None else f", in task {failure.task}"
    return (
        f"Step {failure.step} failed at {moment(failure.time_s)}{where}{task}: "
        f"{failure.cause.rstrip('.')}."
    )


def _silent(run: Run) -> list[int]:
    return [trace.rank for trace in run.ranks.values() if trace.failure is None and trace.steps]


def _chain(run: Run, step: int, rank: int | None) -> list[str]:
    """Who waited for whom when it ended, from one rank on until somebody waits for nobody."""
    waiting = [other for other in run.rank_steps(step) if _open_idle(other) is not None]
    here = max(waiting, key=lambda other: other.idles[-1].duration_s, default=None)
    if rank is not None:
        here = run.rank_step(rank, step)
    lines: list[str] = []
    seen: set[int] = set()
    while here is not None and here.rank not in seen:
        seen.add(here.rank)
        idle = _open_idle(here)
        if idle is None or not idle.waits:
            return [*lines, _end(here, idle)]
        wait = idle.waits[0]
        lines.append(f"- Rank {here.rank} waited at the end: {wait_words(wait)}.")
        if wait.rank is None or wait.source is None or wait.rank == here.rank:
            return lines
        there = run.rank_step(wait.rank, step)
        if there is None:
            return [*lines, f"- Rank {wait.rank} recorded nothing of this step: look there first."]
        if wait.source in there.spans:
            return [*lines, _lost_on_the_way(wait.source, there)]
        here = there
    if here is not None:
        lines.append(f"- The waits go round in a circle, back to rank {here.rank}.")
    return lines


def _open_idle(step: RankStep) -> IdleSpan | None:
    """The idle span that nothing ended."""
    if step.ended is not None or not step.idles:
        return None
    last = step.idles[-1]
    later = any(span.start_s >= last.end_s - 1e-9 for span in step.spans.values())
    return None if later else last


def _lost_on_the_way(task: TaskId, there: RankStep) -> str:
    ended_s = there.spans[task].end_s
    left = next((span for span in there.sends if span.task == task), None)
    told = "its transfer never ended" if left is None else f"it left by {moment(left.end_s)}"
    return f"- Rank {there.rank} ran {task} until {moment(ended_s)}, but {told}: look at the edge."


def _end(step: RankStep, idle: IdleSpan | None) -> str:
    if idle is not None:
        return f"- Rank {step.rank} waited for no other rank: {idle.cause}."
    begun = [made.task for made in step.decisions if made.task and made.task not in step.spans]
    if begun:
        return f"- Rank {step.rank} began {begun[-1]} and never ended it: look at that task first."
    return f"- Rank {step.rank} was not waiting: look there first."
