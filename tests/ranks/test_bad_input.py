"""Bad input: every rank gets an error in time that names the value and the ranks."""

import socket
from collections.abc import Callable, Iterator

import pytest

from tests.ranks.conftest import Launch
from tests.ranks.launching import WORKER, ByHand, Job
from tests.ranks.plan import Fault, Plan

pytestmark = [pytest.mark.multiprocess, pytest.mark.timeout(90)]

PEER_TIMEOUT_S = 4.0
SLACK_S = 1.0
CONFIG = {"peer_timeout_s": PEER_TIMEOUT_S}
MOST_PORT = 65_535


def messages(job: Job) -> list[str]:
    """What every rank's failure says, once all have ended; no rank took a step."""
    statuses = job.wait()
    assert all(status not in (0, None) for status in statuses), job.story()
    assert not any(job.events(rank, "step") for rank in range(job.ranks)), job.story()
    return [failure["message"] for failure in job.failures().values()]


def assert_in_time(job: Job) -> None:
    """Every rank failed within the peer timeout after the last one began to open."""
    begun = max(e["time"] for rank in range(job.ranks) for e in job.events(rank, "opening"))
    for rank, failure in job.failures().items():
        assert failure["time"] - begun < PEER_TIMEOUT_S + SLACK_S, f"rank {rank}\n{job.story()}"


@pytest.fixture
def taken_port() -> Iterator[int]:
    """A port of this host that a stranger listens on."""
    with socket.socket() as stranger:
        stranger.bind(("127.0.0.1", 0))
        stranger.listen()
        yield stranger.getsockname()[1]


@pytest.mark.slow
def test_a_topology_of_another_size_is_refused_on_every_rank(launch: Launch) -> None:
    """A ValueError names both numbers, before anything is connected."""
    job = launch(2, Plan(stages=3))
    for message in messages(job):
        assert "topology has 3 ranks" in message
        assert "torchrun started 2" in message
    assert {failure["type"] for failure in job.failures().values()} == {"ValueError"}


@pytest.mark.slow
def test_settings_that_differ_are_named_on_every_rank(launch: Launch) -> None:
    """Rank 2 has another limit and another hint: the setting, both values, both ranks."""
    job = launch(3, Plan(config=CONFIG, config_of={"2": {"limit": 7, "hint": "fb"}}))
    for message in messages(job):
        assert "limit is 7 on rank 2 and auto on rank 0" in message
        assert "hint is fb on rank 2 and auto on rank 0" in message
    assert_in_time(job)


@pytest.mark.slow
@pytest.mark.parametrize("rank", [0, 1])
def test_a_taken_port_is_named_on_every_rank(launch: Launch, taken_port: int, rank: int) -> None:
    """Rank r binds port + r; a stranger has the one of `rank`."""
    job = launch(2, Plan(config={**CONFIG, "port": taken_port - rank}))
    for message in messages(job):
        assert f"rank {rank} cannot bind" in message
        assert str(taken_port) in message
    assert_in_time(job)


@pytest.mark.slow
def test_a_port_that_does_not_exist_is_named_on_every_rank(launch: Launch) -> None:
    """The last port there is leaves none for the second rank."""
    job = launch(2, Plan(config={**CONFIG, "port": MOST_PORT}))
    for message in messages(job):
        assert "rank 1" in message
        assert str(MOST_PORT + 1) in message
    assert_in_time(job)


@pytest.mark.slow
def test_an_address_that_does_not_route_is_named_on_every_rank(launch: Launch) -> None:
    """Rank 1 publishes one; the others cannot reach it, and it is told so as well."""
    job = launch(3, Plan(config=CONFIG, fault=Fault(rank=1, where="no_route")))
    for message in messages(job):
        assert "rank 1 at tcp://" in message
        assert "10.255.255.1" in message
    assert_in_time(job)


@pytest.mark.slow
def test_a_rank_that_never_comes_is_named_by_the_others(launch: Launch) -> None:
    """Rank 1 opens its Runtime long after the peer timeout."""
    fault = Fault(rank=1, where="late_start", after_s=PEER_TIMEOUT_S + 4)
    job = launch(3, Plan(config=CONFIG, fault=fault))
    job.wait()
    begun = job.event(2, "opening")["time"]
    for rank in (0, 2):
        failure = job.event(rank, "failed")
        assert "ranks [1] did not come up within 4.0 s" in failure["message"]
        assert failure["time"] - begun < PEER_TIMEOUT_S + 2 * SLACK_S


@pytest.mark.slow
def test_two_processes_with_the_same_rank_are_named_on_every_rank(
    by_hand: Callable[[int], ByHand],
) -> None:
    """Of three ranks, the second is there twice and the third not at all."""
    hand = by_hand(3)
    for rank in (0, 1, 1):
        hand.start(WORKER, Plan(config=CONFIG).words(), RANK=str(rank))
    for message in messages(hand.job):
        assert "rank 1 is claimed by 2 processes" in message
    assert_in_time(hand.job)


@pytest.mark.slow
def test_a_second_process_with_a_taken_rank_does_not_disturb_a_running_job(
    by_hand: Callable[[int], ByHand],
) -> None:
    """It comes when the job is up: it is refused, the job goes on to its end."""
    hand = by_hand(2)
    plan = Plan(config=CONFIG, forward_s=0.2, steps=8)
    for rank in (0, 1):
        hand.start(WORKER, plan.words(), RANK=str(rank))
    for index in (0, 1):
        hand.job.wait_for(index, "step")
    hand.start(WORKER, plan.words(), RANK="1")
    assert hand.job.wait() == [0, 0, 1], hand.job.story()
    assert "rank 1 is claimed by 2 processes" in hand.job.event(2, "failed")["message"]


@pytest.mark.parametrize(
    "name",
    ["RANK", *(pytest.param(n, marks=pytest.mark.slow) for n in ("WORLD_SIZE", "MASTER_PORT"))],
)
def test_a_missing_variable_of_torchrun_is_named(
    by_hand: Callable[[int], ByHand], name: str
) -> None:
    """At once, with a ValueError that says how to start the program."""
    hand = by_hand(1)
    hand.start(WORKER, Plan().words(), **{name: None})
    assert hand.job.wait() == [1]
    failure = hand.job.event(0, "failed")
    assert failure["type"] == "ValueError"
    assert f"environment variable {name} is None" in failure["message"]
    assert "torchrun" in failure["message"]
    assert failure["time"] - hand.job.event(0, "started")["time"] < PEER_TIMEOUT_S
