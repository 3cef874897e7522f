"""A budget in bytes over random events: the limit falls while much is in flight, and nothing stops.

The model of `pipeline_model` with room for everything, and a `BudgetLimit` on each rank that is
told after every forward what it keeps. The ledger then judges order and completeness only.
"""

import random
from dataclasses import replace

from hypothesis import given, note
from hypothesis import strategies as st

from rrfp_async.arbiter import Arbiter, Decision
from rrfp_async.backpressure import Backpressure
from rrfp_async.hints import Execution, make_order, resolve_hint
from rrfp_async.ids import TaskId, TaskKind
from rrfp_async.limits import make_limit
from tests.core.case import Case
from tests.core.pipeline_model import Pipeline, Rank
from tests.core.strategies import TRAINING, chunked_cases

HEAVIEST = 16
"""Bytes that the forward of a microbatch keeps at most."""
ROOM = 10_000
CASES = chunked_cases(limits=st.integers(1, 5) | st.just(40), second=TRAINING)


class Budgeted(Pipeline):
    """Every rank has a budget of `places` heaviest forwards more than the least there is."""

    def __init__(self, case: Case, places: int) -> None:
        super().__init__(replace(case, limits=(ROOM,) * len(case.limits)))
        drawn = random.Random(case.seed + 1)
        weights = (1, drawn.randint(1, HEAVIEST), HEAVIEST)
        self.kept = {
            (stage, microbatch): drawn.choice(weights)
            for stage in range(case.topology.num_stages)
            for microbatch in range(max(step.microbatches for step in case.steps))
        }
        least = case.chunks
        self.most = least + places
        for rank, limit in zip(self._ranks, case.limits, strict=True):
            self._bound(rank, case, limit)

    def _bound(self, rank: Rank, case: Case, limit: int) -> None:
        budgeted = make_limit(limit, case.topology, rank.rank, budget_bytes=self.most * HEAVIEST)
        rank.backpressure = Backpressure(budgeted, chunks=case.chunks)
        execution = Execution(binding=False, deterministic=case.deterministic)
        order = make_order(resolve_hint(case.hint), case.topology, rank.rank, execution)
        rank.arbiter = Arbiter(order, rank.backpressure)

    def _judge(self, rank: Rank, decision: Decision) -> None:
        """What the budget lets in is not the ledger's to know."""

    def _completed(self, rank: Rank, task: TaskId) -> None:
        super()._completed(rank, task)
        if task.kind is TaskKind.F:
            rank.backpressure.measured(kept_bytes=self.kept[task.stage, task.microbatch])


@given(CASES, st.integers(0, 4))
def test_a_budget_never_stops_a_step_and_holds_once_the_heaviest_is_known(
    case: Case, places: int
) -> None:
    """Any placement, hint, split and order of events; forwards of 1 to 16 bytes.

    In the second of two equal steps the peak is what fits; in both, what the limit allows.
    """
    step = max(case.steps, key=lambda step: step.microbatches)
    case = replace(case, steps=(step, step))
    note(f"replay: Budgeted({case!r}, {places})")
    pipeline = Budgeted(case, places)
    bounds = [limit + (case.chunks if case.chunks > 1 else 0) for limit in case.limits]
    peaks = [list(pipeline.run_step(step).peak) for step in case.steps]
    assert all(peak <= bound for step in peaks for peak, bound in zip(step, bounds, strict=True))
    for rank, peak in enumerate(peaks[1]):
        stages = case.topology.stages_of(rank)
        heaviest = max(kept for (stage, _), kept in pipeline.kept.items() if stage in stages)
        assert peak * heaviest <= pipeline.most * HEAVIEST
