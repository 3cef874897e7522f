"""The dispatch benchmark measures what it says; how fast that is, no test decides."""

from benchmarks import dispatch


async def test_every_arrival_on_the_idle_rank_is_clocked_from_header_to_start() -> None:
    """Two steps of four microbatches leave the second step's four samples, all positive."""
    samples = await dispatch.paths_us(microbatches=4, steps=2)
    assert len(samples) == 4
    assert all(sample > 0.0 for sample in samples)


def test_the_choice_is_clocked_with_that_many_ready_tasks() -> None:
    """A median above nothing for a rounds order and a ranked one."""
    assert dispatch.choose_us("bf", 8) > 0.0
    assert dispatch.choose_us("f-priority", 8) > 0.0
