"""Messages of every type, as hypothesis sees them."""

from hypothesis import strategies as st

from rrfp_async.bus.messages import (
    ClockAsk,
    ClockTold,
    Envelope,
    Failure,
    Farewell,
    GradientReport,
    Header,
    Hello,
    Progress,
    RankDone,
    StepBegin,
    StepEnd,
    TpArrival,
    TpDecision,
    TpProposal,
    Verdict,
)
from rrfp_async.ids import Edge, Layout, Link, TaskId, TaskKind, TensorSpec

counts = st.integers(0, 2**63)
texts = st.text(st.characters(exclude_categories=["Cs"]), max_size=50)
floats = st.floats(allow_nan=False)
tasks = st.builds(TaskId, counts, st.sampled_from(TaskKind), counts)
specs = st.builds(TensorSpec, st.lists(counts, max_size=5).map(tuple), texts, st.booleans())


plain = st.none() | st.booleans() | counts | floats | texts | st.binary(max_size=20)


def many(element: st.SearchStrategy) -> st.SearchStrategy:
    """A short tuple of them."""
    return st.lists(element, max_size=5).map(tuple)


layouts = st.builds(Layout, st.none() | texts, many(st.tuples(counts, plain)))
norms = st.tuples(counts, texts, many(floats))
reports = st.builds(GradientReport, st.none() | many(norms), st.booleans(), st.none() | floats)
times = st.tuples(floats, floats, floats)
verdicts = st.builds(Verdict, st.none() | floats, st.none() | texts, st.booleans())
messages = st.one_of(
    st.builds(Hello, many(st.tuples(texts, texts))),
    st.builds(StepBegin, counts, st.booleans(), st.booleans(), counts, many(counts)),
    st.builds(
        Header,
        counts,
        st.builds(Link, counts, counts),
        counts,
        st.builds(Edge, counts, counts),
        tasks,
        many(st.none() | specs),
        st.none() | st.binary(max_size=200),
        layouts,
    ),
    st.builds(
        RankDone, counts, st.none() | floats, st.none() | reports, st.tuples(floats, floats, floats)
    ),
    st.builds(StepEnd, counts, st.none() | floats, st.none() | verdicts),
    st.builds(
        Failure,
        counts,
        counts,
        st.none() | counts,
        st.none() | texts,
        st.none() | counts,
        texts,
        many(texts),
    ),
    st.builds(Progress, counts, counts, texts),
    st.builds(Farewell, counts),
    st.builds(ClockAsk, counts),
    st.builds(ClockTold, counts, floats),
    st.builds(TpArrival, counts, st.builds(Edge, counts, counts), tasks, floats),
    st.builds(TpDecision, counts, counts, tasks, floats),
    st.builds(TpProposal, counts, counts, tasks, floats),
)
envelopes = st.builds(Envelope, counts, counts, messages)
