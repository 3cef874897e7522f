"""Traces of schema 2 of a pipeline whose costs are given, faults among them.

Orders come from the event simulation or from 1F1B, times from the longest way through tasks and
transfers. Nothing of rrfp_async is used: readers are tested on what docs/trace.md says.
"""

import json
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.sim.event_simulation import Tables, event_simulation, one_f_one_b
from tests.sim.tables import even

Span = tuple[float, float]
Line = dict[str, Any]

GAP_S = 50e-6
STEP_GAP_S = 0.001
PARTS = ("compute_s", "blocking_s", "coordination_s", "other_s")
REASON = "higher-ranked tasks were not ready or not admissible"


def tables(stages: int, microbatches: int, *, delay_s: float = 0.0002) -> Tables:
    """F takes 1 ms, B takes 2 ms, and every transfer `delay_s`."""
    return even(stages, microbatches, forward_s=1e-3, backward_s=2e-3, delay_s=delay_s)


@dataclass(slots=True)
class Planted:
    """A pipeline of a stage a rank, and what happened in a step of it.

    Args:
        tables: What tasks and transfers cost.
        limit: Forwards in flight; with one, the event simulation orders the tasks by `bf`.
        offsets_s: What is to be added to each rank's clock; its lines are written without.
    """

    tables: Tables
    limit: int | None = None
    offsets_s: Sequence[float] = ()
    spans: dict[str, Span] = field(default_factory=dict)
    arrivals: dict[str, Span] = field(default_factory=dict)
    orders: list[list[str]] = field(default_factory=list)

    def __post_init__(self) -> None:
        if self.limit is None:
            lists = [one_f_one_b(s, self.stages, self.microbatches) for s in range(self.stages)]
            self.orders = [[f"{s}{k}{j}" for k, j in tasks] for s, tasks in enumerate(lists)]
        else:
            outcome = event_simulation(self.tables, "bf", limit=self.limit, ordered=True)
            self.orders = outcome.orders
        self._run()

    @property
    def stages(self) -> int:
        return len(self.tables["forward_s"])

    @property
    def microbatches(self) -> int:
        return len(self.tables["forward_s"][0])

    @property
    def makespan_s(self) -> float:
        return max(end_s for _, end_s in self.spans.values())

    def _run(self) -> None:
        """Every task once its device is free and its input is there, round the ranks in turn."""
        at = [0] * self.stages
        while any(at[s] < len(self.orders[s]) for s in range(self.stages)):
            before = list(at)
            for s in range(self.stages):
                while at[s] < len(self.orders[s]) and self._begin(s, at[s]):
                    at[s] += 1
            assert at != before, "the orders do not fit together"

    def _begin(self, s: int, place: int) -> bool:
        task = self.orders[s][place]
        needed = source_of(task, self.stages)
        if needed is not None and needed not in self.arrivals:
            return False
        free_s = self.spans[self.orders[s][place - 1]][1] if place else 0.0
        start_s = max(free_s, self.arrivals[needed][1] if needed else 0.0)
        end_s = start_s + self._cost(task)
        self.spans[task] = start_s, end_s
        _, kind, j = parts_of(task)
        name = "activation_delay_s" if kind == "F" else "gradient_delay_s"
        self.arrivals[task] = end_s, end_s + self.tables[name][s][j]
        return True

    def _cost(self, task: str) -> float:
        s, kind, j = parts_of(task)
        names = ("forward_s",) if kind == "F" else ("backward_input_s", "weight_s")
        return sum(self.tables[name][s][j] for name in names)

    def lines(self, rank: int, steps: int = 1) -> list[Line]:
        """What the rank writes."""
        lines = [self.head(rank)]
        for step in range(steps):
            shift_s = 100.0 + step * (self.makespan_s + STEP_GAP_S) - self._offset_s(rank)
            lines += [_shifted(line, step, shift_s) for line in self._step(rank)]
        return lines

    def head(self, rank: int) -> Line:
        n = self.stages
        return {
            "event": "run",
            "schema": 2,
            "rank": rank,
            "pp": n,
            "dp": 1,
            "tp": 1,
            "stages": n,
            "owners": list(range(n)),
            "owned": [rank],
            "edges": [[s, s + 1] for s in range(n - 1)],
            "hint": "bf",
            "limit": self.limit or "auto",
            "microbatches": self.microbatches,
            "host": "here",
            "pid": 1,
            "clock_offset_s": self._offset_s(rank),
            "clock_error_s": 1e-6,
            "simulated": True,
            "version": "0.1.0",
        }

    def _offset_s(self, rank: int) -> float:
        return self.offsets_s[rank] if self.offsets_s else 0.0

    def _step(self, rank: int) -> list[Line]:
        own, free_s, lines = self.orders[rank], 0.0, []
        for place, task in enumerate(own):
            start_s, end_s = self.spans[task]
            if start_s - free_s >= GAP_S:
                lines.append(self._idle(own, place, free_s, start_s))
            lines.append(self._dispatch(rank, own, place, start_s - free_s))
            lines.append({"event": "task", "task": task, "start_s": start_s, "end_s": end_s})
            lines += self._transfers(rank, task)
            free_s = end_s
        if self.makespan_s - free_s >= GAP_S:
            lines.append(idle_line(free_s, self.makespan_s, "others"))
        compute_s = sum(self._cost(task) for task in own)
        begin = {
            "event": "step_begin",
            "time_s": 0.0,
            "training": True,
            "update": True,
            "sizes": [],
        }
        end = {
            "event": "step_end",
            "time_s": self.makespan_s,
            "step_s": self.makespan_s,
            **dict(zip(PARTS, (compute_s, self.makespan_s - compute_s, 0.0, 0.0), strict=True)),
            "loss": 2.5,
            "peak_in_flight": self.limit or self.microbatches,
        }
        return [begin, *lines, end]

    def _dispatch(self, rank: int, own: list[str], place: int, waited_s: float) -> Line:
        return {
            "event": "dispatch",
            "schema": 2,
            "rank": rank,
            "stage": rank,
            "task": own[place],
            "hint_position": None,
            "ready": 1,
            "passed_over": own[place + 1 : place + 3],
            "reason": REASON,
            "waited_s": waited_s,
            "time_s": self.spans[own[place]][0],
        }

    def _transfers(self, rank: int, task: str) -> list[Line]:
        found = []
        source = source_of(task, self.stages)
        if source is not None:
            found.append(self._transfer(source, rank, parts_of(source)[0], "receive"))
        to = target_of(task, self.stages)
        if to is not None:
            found.append(self._transfer(task, rank, to, "send"))
        return found

    def _transfer(self, task: str, rank: int, peer: int, direction: str) -> Line:
        start_s, end_s = self.arrivals[task]
        return {
            "event": "transfer",
            "task": task,
            "edge": sorted((rank, peer)),
            "direction": direction,
            "peer": peer,
            "bytes": 4096,
            "packed": False,
            "start_s": start_s,
            "end_s": end_s,
        }

    def _idle(self, own: list[str], place: int, start_s: float, end_s: float) -> Line:
        """Ready but not run at the beginning can only be forwards that limit or order held back."""
        ready, waits = [], []
        for task in own[place:]:
            source = source_of(task, self.stages)
            if source is None or self.arrivals[source][1] <= start_s:
                if parts_of(task)[1] == "F":
                    ready.append(task)
            elif len(waits) < 4:
                of_rank = parts_of(source)[0]
                waits.append(
                    {
                        "task": task,
                        "for": "activation" if parts_of(task)[1] == "F" else "gradient",
                        "edge": sorted((of_rank, parts_of(task)[0])),
                        "of": source,
                        "rank": of_rank,
                    }
                )
        done = [parts_of(task)[1] for task in own[:place]]
        held = "fixed order" if self.limit is None else "limit"
        line = idle_line(start_s, end_s, held if ready else "nothing ready")
        line |= {"ready": ready, "waits": waits, "in_flight": done.count("F") - done.count("B")}
        return line | {"bound": self.limit or self.microbatches}

    def write(self, folder: Path, steps: int = 1) -> Path:
        """Write every rank's file; returns the folder."""
        folder.mkdir(parents=True, exist_ok=True)
        for rank in range(self.stages):
            write_lines(folder, rank, self.lines(rank, steps))
        return folder


def idle_line(start_s: float, end_s: float, cause: str) -> Line:
    """An idle span that waited for nothing in particular."""
    span = {"event": "idle", "start_s": start_s, "end_s": end_s, "cause": cause}
    return span | {"ready": [], "in_flight": 0, "bound": 8, "waits": []}


def write_lines(folder: Path, rank: int, lines: Sequence[Line]) -> Path:
    """Write a rank's file."""
    path = folder / f"rank{rank}.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    return path


def parts_of(task: str) -> tuple[int, str, int]:
    """Stage, kind and microbatch of a word."""
    kind = "F" if "F" in task else "B"
    stage, microbatch = task.split(kind)
    return int(stage), kind, int(microbatch)


def source_of(task: str, stages: int) -> str | None:
    """The task of another rank that makes its input."""
    s, kind, j = parts_of(task)
    if kind == "F":
        return f"{s - 1}F{j}" if s else None
    return f"{s + 1}B{j}" if s + 1 < stages else None


def target_of(task: str, stages: int) -> int | None:
    """The stage that its result goes to."""
    s, kind, _ = parts_of(task)
    if kind == "F":
        return s + 1 if s + 1 < stages else None
    return s - 1 if s else None


def _shifted(line: Line, step: int, shift_s: float) -> Line:
    moved = {name: line[name] + shift_s for name in ("time_s", "start_s", "end_s") if name in line}
    return {**line, "step": step, **moved}


def by_event(lines: Sequence[Line]) -> dict[str, list[Line]]:
    """The lines by what they tell."""
    found = defaultdict(list)
    for line in lines:
        found[line["event"]].append(line)
    return found
