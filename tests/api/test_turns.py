"""Waiting in line, and sessions, in both colours and over every wire."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import pytest

from etcdfence import (
    Coordinator,
    Held,
    LeaseLost,
    LossReason,
    Misuse,
    Periods,
    SessionLost,
    Standing,
    Superseded,
    TaskClosed,
    TaskKey,
    TaskState,
    TooLarge,
)
from etcdfence.model import Liveness

from ..support.waiting import eventually

Connect = Callable[..., Coordinator]
LONG = 600  # seconds; a wait lease that nothing in a test outlives


class Crowd:
    """Workers that wait for one task, each with a coordinator and a thread of its own."""

    def __init__(self, connect: Connect, raw: Any, task: Any = "job") -> None:
        self._connect, self._raw, self.task = connect, raw, task
        self.looker = connect()
        self.queue = self.looker._engine.keys.task(task).queue
        self._threads = ThreadPoolExecutor(20)
        self.order: list[str] = []

    def in_line(self) -> list[bytes]:
        found: list[bytes] = self._raw.below(self.queue)
        return found

    def joins(self, name: str, **options: Any) -> Future[Any]:
        """Begin to wait, and be in line when this returns."""
        before = len(self.in_line())
        coordinator = self._connect(holder=name)

        def wait() -> Any:
            lease = coordinator.acquire(self.task, **{"ttl": LONG, "wait": 60, **options})
            self.order.append(name)
            return lease

        future = self._threads.submit(wait)
        eventually(f"{name} is in line", lambda: len(self.in_line()) > before or future.done())
        return future


@pytest.fixture
def crowd(connect: Connect, raw: Any) -> Crowd:
    return Crowd(connect, raw)


@pytest.mark.req("P-1", "S0-6")
@pytest.mark.field(60)
def test_first_come_first_served(connect: Connect, crowd: Crowd) -> None:
    lease = connect().acquire("job")
    waiting = [crowd.joins(name) for name in ("first", "second", "third")]
    seen = crowd.looker.describe("job")
    assert [(one.holder, one.position) for one in seen.line] == [("first", 1), ("second", 2), ("third", 3)]
    assert [one.holder for one in crowd.looker.waiters()] == ["first", "second", "third"]
    generations = [lease.generation]
    lease.release()
    for future in waiting:
        got = future.result(20)
        generations.append(got.generation)
        got.release()
    assert crowd.order == ["first", "second", "third"]
    assert generations == sorted(set(generations))
    assert crowd.in_line() == []


@pytest.mark.req("P-1", "P-2", "S2-17")
def test_a_newcomer_does_not_overtake(connect: Connect, crowd: Crowd, raw: Any) -> None:
    lease = connect().acquire("job")
    keys = crowd.looker._engine.keys.task("job")
    raw.put(keys.queue + b"somebody", b"{}")  # in line before all others, and it never claims
    waiting = crowd.joins("first")
    with pytest.raises(Held) as held:
        connect().try_acquire("job")
    assert (held.value.owner and held.value.owner.generation, held.value.line) == (lease.generation, 2)
    lease.release()
    with pytest.raises(Held) as behind:
        connect().try_acquire("job")
    assert (behind.value.owner, behind.value.line) == (None, 2)
    assert "ahead in line" in str(behind.value) and "2 in line" in str(behind.value)
    assert not waiting.done()
    raw.delete(keys.queue + b"somebody")
    assert waiting.result(20).generation > lease.generation


@pytest.mark.req("P-2", "S2-16", "S2-17", "S2-18")
@pytest.mark.field(18, 22)
def test_a_wait_that_ends_in_vain_leaves_nothing_behind(connect: Connect, crowd: Crowd, raw: Any) -> None:
    lease = connect().acquire("job", ttl=LONG)
    planned: list[str] = []
    for wait in (0.3, 0.3):
        with pytest.raises(Held) as held, connect().acquire("job", ttl=LONG, wait=wait):
            planned.append("the body of a wait that failed")
        assert held.value.owner is not None and held.value.owner.generation == lease.generation
    assert not planned
    assert crowd.in_line() == []
    assert len(raw.below(crowd.looker._engine.keys.task("job").attempts)) == 1
    lease.release()
    with connect().acquire("job", wait=0.3):
        """Nobody is in line."""


@pytest.mark.field(2)
def test_a_waiter_that_lost_its_lease_is_never_crowned(connect: Connect, crowd: Crowd, raw: Any) -> None:
    """Its wait lease is revoked in the middle of the wait; it gets in line again, with another lease."""
    lease = connect().acquire("job", ttl=LONG)
    waiting = crowd.joins("waiter", ttl=3)
    (entry,) = crowd.in_line()
    first_lease = raw.get(entry).lease
    raw.revoke(first_lease)
    eventually("it is in line again", lambda: [one for one in crowd.in_line() if one != entry], 20)
    assert not waiting.done()
    lease.release()
    got = waiting.result(20)
    owner = raw.get(got._tenure.keys.owner)
    assert (owner.mod_revision, owner.lease) == (got.generation, got.receipt.lease_id)
    assert owner.lease != first_lease
    got.check()


def test_an_entry_that_was_deleted_by_hand_is_made_again(connect: Connect, crowd: Crowd, raw: Any) -> None:
    lease = connect().acquire("job", ttl=LONG)
    waiting = crowd.joins("waiter", ttl=3)
    (entry,) = crowd.in_line()
    made = raw.get(entry).create_revision
    raw.delete(entry)
    eventually("it is in line again", lambda: raw.get(entry) and raw.get(entry).create_revision > made, 20)
    lease.release()
    waiting.result(20).check()
    assert crowd.in_line() == []


def test_a_waiter_goes_by_and_the_next_one_moves_up(connect: Connect, crowd: Crowd, raw: Any) -> None:
    lease = connect().acquire("job", ttl=LONG)
    gone = crowd.joins("first", wait=0.5)
    waiting = crowd.joins("second")
    eventually("its time is up", gone.done)
    with pytest.raises(Held):
        gone.result(1)
    eventually("the first has left", lambda: len(crowd.in_line()) == 1)
    lease.release()
    assert waiting.result(20).generation > lease.generation


def test_a_task_that_is_closed_meanwhile(connect: Connect, raw: Any) -> None:
    key = TaskKey("notify", "shipment-42")
    crowd = Crowd(connect, raw, key)
    lease = connect().acquire(key)
    waiting = [crowd.joins("first"), crowd.joins("second")]
    lease.complete("sent", {"message": "17"})
    for future in waiting:
        with pytest.raises(TaskClosed) as closed:
            future.result(20)
        assert closed.value.result == "sent"
    assert crowd.in_line() == []


def test_a_reserve_keeps_the_task_from_everybody_in_line(connect: Connect, crowd: Crowd, raw: Any) -> None:
    keys = crowd.looker._engine.keys.task("job")
    raw.put(keys.reserve, b"{}")
    with pytest.raises(Held, match="kept for a named worker"):
        connect().try_acquire("job")
    waiting = crowd.joins("first")
    assert not waiting.done()
    raw.delete(keys.reserve)
    waiting.result(20).check()


@pytest.mark.req("P-11")
@pytest.mark.field(68)
def test_what_this_coordinator_owns_it_does_not_wait_for_without_limit(coordinator: Coordinator) -> None:
    lease = coordinator.acquire("job")
    for wait in (None, 0, 0.3):
        with pytest.raises(Held) as held:
            coordinator.acquire("job", wait=wait)
        assert held.value.mine
        assert str(lease.generation) in str(held.value)
    with coordinator.session() as session, pytest.raises(Held) as in_session:
        session.acquire("job")
    assert in_session.value.mine
    others: list[Held] = []

    def other_thread() -> None:
        with pytest.raises(Held) as held:
            coordinator.acquire("job")
        others.append(held.value)

    thread = threading.Thread(target=other_thread)
    thread.start()
    thread.join(20)
    assert others and others[0].mine


@pytest.mark.req("P-11")
@pytest.mark.field(68)
def test_siblings_in_line_end_when_one_of_them_owns(connect: Connect, crowd: Crowd) -> None:
    """Those with a limit go on waiting; one without would wait for its own coordinator for ever."""
    lease, siblings = connect().acquire("job"), connect(holder="sibling")
    pool = ThreadPoolExecutor(3)
    futures = [pool.submit(siblings.acquire, "job", ttl=6, wait=wait) for wait in (None, None, 60)]
    eventually("all are in line", lambda: len(crowd.in_line()) == 3)
    lease.release()
    owner = eventually("one owns", lambda: crowd.looker.describe("job").owner)
    eventually("the others with no limit have ended", lambda: sum(one.done() for one in futures) >= 2, 20)
    got = [one.result(1) for one in futures if one.done() and one.exception() is None]
    refused = [one.exception() for one in futures if one.done() and one.exception() is not None]
    assert owner.holder == "sibling"
    assert all(isinstance(one, Held) and one.mine for one in refused)
    for one in got:
        one.release()
    if not futures[2].done():
        eventually("the one with a limit owns", futures[2].done)
    futures[2].result(1).release()
    pool.shutdown()


# --- how long ----------------------------------------------------------------------------------------------


@pytest.mark.req("P-6", "S2-26")
@pytest.mark.field(59)
def test_periods_are_held_against_each_other() -> None:
    assert Periods().lease_duration == 15
    for wrong in (
        {"lease_duration": 10, "renew_deadline": 10},
        {"renew_deadline": 2, "retry_period": 2},
        {"renew_deadline": 2.4, "retry_period": 2},
        {"lease_duration": 0},
        {"lease_duration": 15.5},
        {"lease_duration": True},
        {"retry_period": 0},
        {"retry_period": -1},
        {"renew_deadline": "10"},
        {"retry_period": float("nan")},
    ):
        with pytest.raises(Misuse):
            Periods(**wrong)  # type: ignore[arg-type]  # that is the point


@pytest.mark.req("P-6", "S2-26")
def test_periods_decide_when_a_lease_is_renewed_and_believed(coordinator: Coordinator, raw: Any) -> None:
    lease = coordinator.acquire("job", ttl=Periods(60, 40, 7))
    assert lease.ttl == 60
    assert 35 <= lease.expires_in <= 40
    belief = lease._belief
    assert belief.next_event() - belief.renewed_at == pytest.approx(7)
    owner = coordinator.describe("job").owner
    assert owner is not None and owner.renew_period == 7


@pytest.mark.req("S2-26")
def test_a_lease_duration_that_the_server_cannot_grant(coordinator: Coordinator, raw: Any) -> None:
    with pytest.raises(Misuse, match="the shortest this server grants is 2 s"):
        coordinator.acquire("job", ttl=Periods(1, 0.8, 0.2))


@pytest.mark.req("S0-7")
def test_how_alive_an_owner_is_comes_from_etcd(connect: Connect) -> None:
    owner, looker = connect(), connect()
    lease = owner.acquire("job", ttl=6)
    assert looker.describe("job").liveness is Liveness.ALIVE
    owner._engine.renewer.remove(lease._belief)
    eventually("it is late", lambda: looker.describe("job").liveness is Liveness.LATE, 20)
    assert lease.standing in (Standing.HELD, Standing.UNVERIFIED)  # its own belief is not asked
    eventually("it is gone", lambda: looker.describe("job").state is TaskState.STALLED, 20)
    assert looker.describe("job").liveness is None


# --- silence -----------------------------------------------------------------------------------------------


@pytest.mark.field(16)
def test_work_that_reports_no_progress_is_not_renewed(connect: Connect) -> None:
    lost: list[LossReason] = []
    lease = connect().acquire("job", ttl=3, max_silence=1.5, on_lost=lambda _, loss: lost.append(loss.reason))
    steps = iter(range(8))

    def reported() -> bool:
        lease.progress()
        return next(steps, None) is None

    eventually("it has been reporting for a while", reported)
    assert lease.standing is Standing.HELD
    with connect().acquire("job", wait=40) as successor:
        assert successor.generation > lease.generation
        eventually("the silent one was told", lambda: lost, 20)
        with pytest.raises(Superseded):
            lease.put("k", "late")


def test_a_write_is_progress(coordinator: Coordinator) -> None:
    lease = coordinator.acquire("job", ttl=60, max_silence=5)
    before = lease._belief._progressed
    lease.put("k", "v")
    assert lease._belief._progressed >= before
    assert not lease._belief.silent
    for wrong in (0, -1, "5", True):
        with pytest.raises(Misuse):
            coordinator.acquire("other", max_silence=wrong)  # type: ignore[arg-type]  # that is the point


# --- sessions ----------------------------------------------------------------------------------------------


@pytest.mark.req("P-13")
def test_many_leases_on_one_etcd_lease(coordinator: Coordinator, connect: Connect, raw: Any) -> None:
    with coordinator.session(ttl=30) as session:
        held = [session.acquire(f"job-{n}") for n in range(5)]
        keys = [lease._tenure.keys.owner for lease in held]
        assert {raw.get(key).lease for key in keys} == {session.lease_id}
        assert len({lease.generation for lease in held}) == 5
        held[0].release()
        assert raw.get(keys[0]) is None
        for lease in held[1:]:
            lease.check()
            lease.put(f"k/{lease.task}", "v")
        again = session.try_acquire("job-0")
        assert again.generation > held[-1].generation
        with pytest.raises(Held) as held_error:
            session.acquire("job-1")
        assert held_error.value.mine
    assert [raw.get(key) for key in keys] == [None] * 5
    assert raw.ttl(session.lease_id) <= 0
    with pytest.raises(LeaseLost) as closed:
        held[1].put("k", "v")
    assert closed.value.loss.reason is LossReason.CLOSED
    with pytest.raises(Misuse, match="session is closed"):
        session.acquire("job-9")
    with connect().acquire("job-1", wait=0):
        """It is free."""


@pytest.mark.req("P-13")
@pytest.mark.field(16, 63)
def test_each_lease_of_a_session_is_lost_for_itself(coordinator: Coordinator, connect: Connect, raw: Any) -> None:
    with coordinator.session(ttl=3) as session:
        one, other = session.acquire("one"), session.acquire("other")
        raw.delete(one._tenure.keys.owner)
        loss = eventually("it is lost", lambda: one.loss, 20)
        assert loss.reason is LossReason.TAKEN_AWAY
        other.check()
        other.put("k", "v")
        assert session.loss is None
        with connect().acquire("one", wait=0) as successor, pytest.raises(Superseded):
            one.put("k", "stale")
            assert successor
        with pytest.raises(Superseded):
            one.release()
        other.check()
    assert other.loss is not None


@pytest.mark.field(16)
def test_a_silent_lease_of_a_session_is_given_back_alone(
    coordinator: Coordinator, connect: Connect, raw: Any
) -> None:
    with coordinator.session(ttl=3) as session:
        quiet, busy = session.acquire("quiet", max_silence=0.5), session.acquire("busy")
        loss = eventually("it was given back", lambda: quiet.loss, 20)
        assert loss.reason is LossReason.SILENT
        with connect().acquire("quiet", wait=0):
            busy.check()
        with pytest.raises(Superseded):
            quiet.put("k", "late")
        attempt = connect().describe("quiet").attempts[-1]
        assert (attempt.ended, attempt.reason) == ("released", "no progress was reported")


def test_a_session_whose_etcd_lease_is_gone(coordinator: Coordinator, raw: Any) -> None:
    session = coordinator.session(ttl=3)
    lease = session.acquire("job")
    raw.revoke(session.lease_id)
    with pytest.raises(SessionLost):
        session.acquire("another")
    eventually("the lease is lost", lambda: lease.loss, 20)
    eventually("the session knows", lambda: session.loss, 20)
    with pytest.raises(SessionLost):
        session.acquire("another")
    session.close()
    session.close()
    with coordinator.session() as fresh, fresh.acquire("job"):
        assert fresh.loss is None


def test_waiting_in_a_session(coordinator: Coordinator, connect: Connect, crowd: Crowd, raw: Any) -> None:
    lease = connect().acquire("job")
    with coordinator.session(ttl=30) as session:
        with pytest.raises(Held):
            session.acquire("job", wait=0.2)
        assert crowd.in_line() == []
        got: list[Any] = []
        thread = threading.Thread(target=lambda: got.append(session.acquire("job", wait=60)))
        thread.start()
        (entry,) = eventually("it waits", crowd.in_line)
        wait_lease = raw.get(entry).lease
        assert wait_lease != session.lease_id
        lease.release()
        thread.join(20)
        assert raw.get(got[0]._tenure.keys.owner).lease == session.lease_id
        eventually("the wait's own lease is gone", lambda: raw.ttl(wait_lease) <= 0)
        got[0].check()


def test_a_lease_of_a_session_cannot_be_abandoned(coordinator: Coordinator) -> None:
    with coordinator.session() as session, session.acquire("job") as lease:
        with pytest.raises(Misuse, match="session"):
            lease.abandon()
        lease.check()


@pytest.mark.req("S0-20")
def test_an_error_in_a_session_goes_on_unchanged(coordinator: Coordinator, connect: Connect) -> None:
    with pytest.raises(ZeroDivisionError), coordinator.session() as session, session.acquire("job"):
        raise ZeroDivisionError
    with connect().acquire("job", wait=0):
        """It is free."""


# --- looking on --------------------------------------------------------------------------------------------


@pytest.mark.req("P-4", "P-5", "S0-21")
def test_observing_without_taking_part(connect: Connect, raw: Any) -> None:
    looker, owner = connect(), connect(holder="worker-1")
    seen = looker.observe("job")
    first = next(seen)
    assert (first.owner, first.value) == (None, None)
    lease = owner.acquire("job")
    second = next(seen)
    assert second.owner is not None
    assert (second.owner.holder, second.owner.generation) == ("worker-1", lease.generation)
    assert second.revision >= lease.generation > first.revision
    lease.proclaim("http://worker-1:8080")
    assert next(seen).value == "http://worker-1:8080"
    lease.proclaim("http://worker-1:8081")
    third = next(seen)
    assert third.value == "http://worker-1:8081"
    assert third.owner is not None and third.owner.generation == lease.generation
    lease.release()
    assert next(seen).owner is None
    with owner.session() as session, session.acquire("job") as again:
        fourth = next(seen)
        assert (fourth.owner and fourth.owner.generation, fourth.value) == (again.generation, None)
        again.proclaim("here")
        assert next(seen).value == "here"
    last = next(seen)
    assert (last.owner, last.value) == (None, None)
    assert raw.below(looker._engine.keys.family("owner")) == []
    seen.close()


def test_observing_everything(connect: Connect) -> None:
    looker, owner = connect(), connect()
    one = owner.acquire("a/b")
    seen = looker.observe()
    assert next(seen).task == "a/b"
    two = owner.acquire(TaskKey("op", "x"))
    found = next(seen)
    assert (found.task, found.owner and found.owner.generation) == ("op:x:v1", two.generation)
    two.proclaim("v")
    assert next(seen).value == "v"
    one.release()
    gone = next(seen)
    assert (gone.task, gone.owner) == ("a/b", None)
    seen.close()
    assert [task.task for task in looker.tasks(owned_only=True)] == ["op:x:v1"]


def test_a_proclaimed_value_is_fenced_and_checked(connect: Connect, raw: Any) -> None:
    lease = connect().acquire("job", ttl=LONG)
    for wrong in ("", b"bytes", None):
        with pytest.raises(Misuse):
            lease.proclaim(wrong)  # type: ignore[arg-type]  # that is the point
    with pytest.raises(TooLarge):
        lease.proclaim("x" * 2_000_000)
    raw.revoke(lease.receipt.lease_id)
    successor = connect().acquire("job")
    successor.proclaim("the successor's")
    with pytest.raises(Superseded):
        lease.proclaim("stale")
    assert next(connect().observe("job")).value == "the successor's"
