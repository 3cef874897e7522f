"""Ranks on two hosts: the same bits, and whoever dies is named on both."""

import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.ranks.hosts import EXAMPLE, Hosts, reason_against, two_hosts
from tests.ranks.test_bits import WORDS, bits, reference

pytestmark = [pytest.mark.multiprocess, pytest.mark.slow, pytest.mark.timeout(150)]

UP_WITHIN_S = 60.0
ENDS_WITHIN_S = 60.0
GRACE_S = 5.0
PEER_TIMEOUT_S = 30.0  # the default, which the example leaves
RENDEZVOUS = ("static", "c10d")
FOR_EVER = ("--steps", "100000")


@pytest.fixture
def hosts(tmp_path: Path) -> Iterator[Hosts]:
    """Two hosts, joined by a cable."""
    if reason := reason_against():
        pytest.skip(reason)
    with two_hosts(tmp_path) as hosts:
        yield hosts


def _until_training(hosts: Hosts) -> None:
    """Wait until rank 0 has told of its first step."""
    hosts.wait_until(
        lambda: any("step " in text for text in hosts.written("stderr").values()),
        within_s=UP_WITHIN_S,
    )


@pytest.mark.parametrize("rendezvous", RENDEZVOUS)
def test_two_hosts_train_to_the_bits_of_the_unpartitioned_model(
    hosts: Hosts, rendezvous: str
) -> None:
    """Two ranks on each, started as the README says: losses and every gradient are equal."""
    hosts.torchrun(rendezvous, EXAMPLE, *WORDS)
    assert hosts.wait(within_s=UP_WITHIN_S + ENDS_WITHIN_S) == [0, 0], hosts.story()
    result = hosts.result()
    assert result["ranks"] == 4
    assert bits(result) == reference()
    assert hosts.left() == []


def test_replicas_on_two_hosts_average_over_the_cable(hosts: Hosts) -> None:
    """Four replicas, two on each host, with ZeRO-1 over torch's own groups: equal to the bit.

    gloo's own choice of an interface is one that the other host does not reach.
    """
    hosts.torchrun("static", EXAMPLE, *WORDS, "--dp", "4", "--batch", "32", "--zero1")
    assert hosts.wait(within_s=UP_WITHIN_S + ENDS_WITHIN_S) == [0, 0], hosts.story()
    digests = hosts.result()["replica_grad_sha256"]
    assert digests == digests[:1] * 4
    assert hosts.left() == []


@pytest.mark.parametrize("rendezvous", RENDEZVOUS)
def test_a_rank_killed_on_the_far_host_is_named_on_both(hosts: Hosts, rendezvous: str) -> None:
    """SIGKILL mid-training: all three survivors end in time and name the rank, torchrun fails."""
    hosts.torchrun(rendezvous, EXAMPLE, *FOR_EVER)
    _until_training(hosts)
    ranks = hosts.ranks()
    assert sorted(ranks) == [0, 1, 2, 3]
    victim = max(rank for rank, process in ranks.items() if process.host == 1)
    survivors = {rank: process for rank, process in ranks.items() if rank != victim}
    struck = time.monotonic()
    os.kill(ranks[victim].pid, signal.SIGKILL)
    hosts.wait_until(lambda: not set(hosts.ranks()) & set(survivors), within_s=ENDS_WITHIN_S)
    assert time.monotonic() - struck < PEER_TIMEOUT_S + GRACE_S
    told = hosts.written("stderr")
    assert {process.host for process in survivors.values()} == {0, 1}
    for rank, process in survivors.items():
        words = told[process.host, process.local_rank]
        assert f"error on rank {rank}: step" in words, hosts.story()
        assert f"failed on rank {victim}: " in words, hosts.story()
        assert "Traceback" not in words, words
    assert 0 not in hosts.wait(within_s=ENDS_WITHIN_S), hosts.story()
    assert hosts.left() == []


def test_a_cable_that_is_pulled_is_told_on_both_hosts(hosts: Hosts) -> None:
    """No packet says so: heartbeats find it, and every rank names one across the cable."""
    hosts.torchrun("static", EXAMPLE, *FOR_EVER)
    _until_training(hosts)
    ranks = hosts.ranks()
    cut = time.monotonic()
    hosts.cut_cable()
    hosts.wait_until(lambda: not hosts.ranks(), within_s=PEER_TIMEOUT_S + ENDS_WITHIN_S)
    assert time.monotonic() - cut < PEER_TIMEOUT_S + GRACE_S
    told = hosts.written("stderr")
    for rank, process in ranks.items():
        words = told[process.host, process.local_rank]
        far = [other for other, there in ranks.items() if there.host != process.host]
        assert f"error on rank {rank}: step" in words, hosts.story()
        assert any(f"failed on rank {other}: the connection" in words for other in far), words
