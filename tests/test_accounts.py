"""A rank's time, split: what it waits for its group although it could compute is coordination."""

from rrfp_async.accounts import Accounts


def test_a_wait_that_agreeing_took_is_moved_from_blocking_to_coordination() -> None:
    """Idle from 0 to 5, ready on all ranks at 3: three seconds are blocking, two agreeing."""
    now = 0.0
    accounts = Accounts(lambda: now)
    accounts.begin_tasks()
    since_s = accounts.idle_since()
    assert since_s == 0.0
    now = 5.0
    accounts.blocked_since(since_s)
    assert accounts.agreed(started_s=5.0, ready_s=3.0) == 2.0
    accounts.computed(5.0, 9.0)
    assert (accounts.compute_s, accounts.blocking_s, accounts.coordination_s) == (4.0, 3.0, 2.0)


def test_what_was_no_blocking_is_not_moved() -> None:
    """A hand-off belongs to neither; a task ready long ago waits for its device."""
    accounts = Accounts(lambda: 0.0)
    accounts.begin_tasks()
    assert accounts.agreed(started_s=0.5, ready_s=0.0) == 0.5
    accounts.computed(0.5, 2.0)
    assert accounts.agreed(started_s=2.0, ready_s=0.0) == 0.0
    assert accounts.agreed(started_s=2.0, ready_s=7.0) == 0.0
    assert (accounts.blocking_s, accounts.coordination_s) == (0.0, 0.0)


def test_a_hand_off_after_blocking_is_not_moved_either() -> None:
    """Idle from 0 to 4 and ready on all ranks at 3, the device begins at 6: one second is moved."""
    now = 0.0
    accounts = Accounts(lambda: now)
    accounts.begin_tasks()
    now = 4.0
    accounts.blocked_since(0.0)
    assert accounts.agreed(started_s=6.0, ready_s=3.0) == 3.0
    assert (accounts.blocking_s, accounts.coordination_s) == (3.0, 1.0)
    accounts.computed(6.0, 7.0)
    assert accounts.agreed(started_s=7.0, ready_s=0.0) == 0.0
    assert (accounts.blocking_s, accounts.coordination_s) == (3.0, 1.0)
