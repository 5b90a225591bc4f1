"""Promise 5: renewal keeps a lease, and every way of losing one is noticed in time with its own reason."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from typing import Any

import pytest

from etcdfence import (
    Coordinator,
    Doubt,
    Lease,
    LeaseLost,
    Loss,
    LossReason,
    OutcomeUnknown,
    PermissionDenied,
    Standing,
    Superseded,
    Unavailable,
    Unverified,
)
from etcdfence._host import SYSTEM
from etcdfence._requests import KeepAlive, KeepAliveReply, Range, Request, Txn
from etcdfence.server import LocalEtcd

from ..support.proxy import Proxy
from ..support.raw import Raw
from ..support.tape import Tape, a
from ..support.waiting import eventually, pass_time

Taped = Callable[..., tuple[Coordinator, Tape]]
Connect = Callable[..., Coordinator]


class Told:
    """Collects what the callbacks say."""

    def __init__(self) -> None:
        self.losses: list[Loss] = []
        self.doubts: list[Doubt] = []
        self.standing_inside: list[Standing] = []

    def lost(self, lease: Lease, loss: Loss) -> None:
        self.standing_inside.append(lease.standing)
        self.losses.append(loss)

    def unverified(self, _lease: Lease, doubt: Doubt) -> None:
        self.doubts.append(doubt)


def renewals(tape: Tape) -> int:
    return len([request for request in tape.sent if isinstance(request, KeepAlive)])


@pytest.mark.req("S0-5", "S2-13")
def test_an_idle_owner_is_renewed_and_writes_nothing(taped: Taped, raw: Raw) -> None:
    coordinator, tape = taped()
    with coordinator.acquire("job", ttl=2) as lease:
        mine = coordinator._engine.keys.root.encode()
        before = raw.revisions(mine)
        sent = len(tape.sent)
        eventually("six renewals: twice the TTL", lambda: renewals(tape) >= 6, 15)
        assert lease.standing is Standing.HELD
        assert raw.get(coordinator._engine.keys.task("job").owner).mod_revision == lease.generation
        assert raw.revisions(mine) == before
        reads = [request for request in tape.sent[sent:] if isinstance(request, Txn)]
        assert reads
        assert all(isinstance(operation, Range) for request in reads for operation in request.success)


@pytest.mark.req("S0-4", "S0-8", "S2-21")
def test_a_silent_owner_loses_the_task_after_its_ttl(taped: Taped, connect: Connect) -> None:
    coordinator, tape = taped()
    silent = coordinator.acquire("job", ttl=2)
    tape.raises(a(KeepAlive), Unavailable("no member"), once=False)
    with connect().acquire("job", ttl=2, wait=10) as successor:
        assert successor.generation > silent.generation
        tape.heal()
        loss = silent.wait_lost(10)
        assert loss is not None
        assert (loss.reason, loss.current) == (LossReason.SUPERSEDED, successor.generation)
        owners = {connect().describe("job").generation, coordinator.describe("job").generation}
        assert owners == {successor.generation}


@pytest.mark.req("S2-25", "promise-5")
@pytest.mark.field(15)
def test_reason_owner_key_taken_away(connect: Connect, raw: Raw) -> None:
    """A plain `etcdctl del` while the etcd lease lives on."""
    told, coordinator = Told(), connect()
    lease = coordinator.acquire("job", ttl=3, on_lost=told.lost)
    raw.delete(coordinator._engine.keys.task("job").owner)
    loss = lease.wait_lost(3)
    assert loss is not None and loss.reason is LossReason.TAKEN_AWAY
    eventually("the callback", lambda: told.losses == [loss])
    assert raw.ttl(lease.receipt.lease_id) > 0


@pytest.mark.req("S2-25", "promise-5")
@pytest.mark.field(15, 4)
def test_reason_lease_revoked(taped: Taped, raw: Raw) -> None:
    """The next keepalive is answered with TTL 0; one loss, one callback, no storm of retries."""
    told = Told()
    coordinator, tape = taped()
    lease = coordinator.acquire("job", ttl=3, on_lost=told.lost)
    granted_at = lease._belief.renewed_at
    eventually("a renewal was confirmed", lambda: lease._belief.renewed_at > granted_at)
    raw.revoke(lease.receipt.lease_id)
    loss = lease.wait_lost(3)
    assert loss is not None and loss.reason is LossReason.REVOKED
    assert loss.last_renewed is not None
    eventually("the callback", lambda: told.losses == [loss])
    asked = renewals(tape)
    pass_time(1.5)
    assert renewals(tape) == asked
    assert told.losses == [loss]
    assert told.standing_inside == [Standing.LOST]


@pytest.mark.field(4)
@pytest.mark.req("promise-5", "S2-30")
@pytest.mark.parametrize("absent", [False, True])
def test_ttl_zero_alone_is_no_loss(taped: Taped, absent: bool) -> None:
    """A deposed leader was seen to say it of live leases: the owner key decides. The field may be absent, too."""
    coordinator, tape = taped()
    told = Told()
    with coordinator.acquire("job", ttl=3, on_lost=told.lost) as lease:

        def act(_tape: Tape, request: KeepAlive, _within: float) -> KeepAliveReply:
            return KeepAliveReply({} if absent else dict.fromkeys(request.lease_ids, 0))

        tape.fault(a(KeepAlive), act)
        eventually("a renewal after the lie", lambda: renewals(tape) >= 3)
        lease.check()
        assert lease.standing is Standing.HELD
        assert told.losses == []


@pytest.mark.req("S2-25", "S2-29", "S2-31", "promise-5")
@pytest.mark.field(15)
def test_reason_unreachable_then_expired(connect: Connect, endpoint: str) -> None:
    """Unverified before the TTL has passed, consequential work refused; lost once etcd can be asked."""
    told = Told()
    with Proxy(endpoint) as proxy:
        coordinator = connect(proxy.endpoint, patience=1.0)
        lease = coordinator.acquire("job", ttl=2, on_lost=told.lost, on_unverified=told.unverified)
        proxy.cut()
        eventually("unverified", lambda: lease.standing is Standing.UNVERIFIED, 2.0)
        assert lease.doubt is Doubt.UNREACHABLE
        eventually("the callback", lambda: told.doubts == [Doubt.UNREACHABLE])
        assert lease.expires_in == 0
        with pytest.raises(Unavailable):
            lease.check()
        assert lease.loss is None  # nobody has said so yet
        pass_time(2)
        proxy.heal()
        loss = lease.wait_lost(10)
        assert loss is not None and loss.reason is LossReason.EXPIRED
        with pytest.raises(LeaseLost):
            lease.guard()


@pytest.mark.req("S2-29", "S2-31")
def test_check_refuses_an_unverified_lease_although_etcd_names_its_owner(taped: Taped, raw: Raw) -> None:
    """Somebody else keeps the etcd lease alive, so that the owner key stays past the local deadline."""
    coordinator, tape = taped()
    lease = coordinator.acquire("job", ttl=3)
    tape.raises(a(KeepAlive), OutcomeUnknown("no answer"), once=False)

    def unverified() -> bool:
        tape.wire.call(KeepAlive((lease.receipt.lease_id,), 2.0), 2.0)
        return lease.standing is Standing.UNVERIFIED

    eventually("unverified", unverified, 5)
    with pytest.raises(Unverified, match="unreachable"):
        lease.check()
    assert raw.get(coordinator._engine.keys.task("job").owner).mod_revision == lease.generation
    lease.put("k", "v")  # a fenced write is still decided by etcd


@pytest.mark.req("promise-5", "S2-25")
@pytest.mark.field(15)
def test_reason_closed(connect: Connect, raw: Raw) -> None:
    told, coordinator = Told(), connect()
    lease = coordinator.acquire("job", on_lost=told.lost)
    coordinator.close()
    assert lease.loss is not None and lease.loss.reason is LossReason.CLOSED
    eventually("the callback", lambda: [loss.reason for loss in told.losses] == [LossReason.CLOSED])
    assert raw.get(coordinator._engine.keys.task("job").owner) is None
    assert raw.ttl(lease.receipt.lease_id) <= 0


@pytest.mark.req("promise-5")
def test_refused_credentials_make_a_lease_unverified(taped: Taped) -> None:
    told = Told()
    coordinator, tape = taped()
    lease = coordinator.acquire("job", ttl=2, on_unverified=told.unverified)
    tape.raises(a(KeepAlive), PermissionDenied("invalid auth token"), once=False)
    eventually("unverified", lambda: lease.doubt is Doubt.CREDENTIALS_REFUSED, 4)
    eventually("the callback", lambda: told.doubts == [Doubt.CREDENTIALS_REFUSED])


@pytest.mark.req("S0-5")
@pytest.mark.field(10)
def test_no_single_exception_ends_renewal(taped: Taped, caplog: pytest.LogCaptureFixture) -> None:
    coordinator, tape = taped()
    errors: list[Exception] = [
        ConnectionResetError("reset by peer"),
        OutcomeUnknown("DEADLINE_EXCEEDED"),
        Unavailable("UNAVAILABLE"),
        OutcomeUnknown("UNKNOWN"),
        ValueError("Error parsing message"),
        RuntimeError("a metrics hook of the user"),
    ]
    with coordinator.acquire("job", ttl=3) as lease:
        for error in errors:
            before = renewals(tape)
            tape.raises(a(KeepAlive), error)
            eventually("a failed renewal and a good one after it", lambda n=before: renewals(tape) >= n + 2)
            assert lease.standing is Standing.HELD
        lease.put("k", "v")
    assert "renewal of 1 leases failed" in caplog.text


@pytest.mark.req("S0-5")
@pytest.mark.field(10)
@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_if_the_renewal_thread_dies_all_the_same_nothing_stays_held(taped: Taped) -> None:
    coordinator, tape = taped()
    lease = coordinator.acquire("first", ttl=2)

    def act(*_: object) -> None:
        raise SystemExit  # not an Exception: it ends the thread

    tape.fault(a(KeepAlive), act)
    eventually("the thread is dead", lambda: not coordinator._engine.renewer._thread.is_alive())  # type: ignore[union-attr]
    eventually("unverified", lambda: lease.standing is Standing.UNVERIFIED, 4)
    with coordinator.acquire("second", ttl=2) as second:  # the next lease brings a new thread
        n = renewals(tape)
        eventually("renewals again", lambda: renewals(tape) >= n + 2)
        assert second.standing is Standing.HELD


@pytest.mark.field(12)
@pytest.mark.req("S0-5")
def test_a_member_that_swallows_answers_is_given_up_in_time(connect: Connect, endpoint: str) -> None:
    """One member: tries are bounded, so that one of them comes after the member is well again."""
    with Proxy(endpoint) as proxy:
        coordinator = connect(proxy.endpoint)
        with coordinator.acquire("job", ttl=6) as lease:
            proxy.swallow()
            eventually("a renewal was sent and swallowed", lambda: proxy.swallowed > 0, 5)
            eventually("it was given up", lambda: lease._belief._failures > 0, 3)
            proxy.heal()
            eventually("renewed", lambda: lease._belief._failures == 0, 5)
            assert lease.standing is Standing.HELD
            lease.put("k", "v")


@pytest.mark.field(1)
@pytest.mark.req("promise-2", "promise-5", "S0-16", "S2-36")
def test_a_partitioned_holder_is_told_and_refused(connect: Connect, endpoint: str) -> None:
    told = Told()
    with Proxy(endpoint) as proxy:
        ours = connect(proxy.endpoint, patience=3.0)
        lease = ours.acquire("job", ttl=2, on_lost=told.lost, on_unverified=told.unverified)
        last_sign_of_life = lease._belief.renewed_at
        proxy.cut()
        successor = connect().acquire("job", ttl=10, wait=10)
        successor.put("result", "B")
        eventually("told", lambda: told.doubts)
        assert lease._belief.deadline - last_sign_of_life < 2  # by its own clock, before its TTL was over
        pass_time(1)
        proxy.heal()
        with pytest.raises(Superseded) as refused:
            lease.put("result", "A")
        assert refused.value.revision is not None  # etcd's own answer, not a local belief
        assert (refused.value.generation, refused.value.current) == (lease.generation, successor.generation)
        entry = connect().get("result")
        assert entry.value == b"B"
        assert entry.provenance is not None and entry.provenance.generation == successor.generation
        eventually("told again", lambda: [loss.reason for loss in told.losses] == [LossReason.SUPERSEDED])


@pytest.mark.field(8)
@pytest.mark.req("promise-5", "S2-34")
def test_an_old_handle_never_comes_back_to_life(connect: Connect, raw: Raw) -> None:
    told, coordinator = Told(), connect()
    lease = coordinator.acquire("job", ttl=2, on_lost=told.lost)
    raw.revoke(lease.receipt.lease_id)
    assert lease.wait_lost(5) is not None
    eventually("the callback", lambda: told.standing_inside)
    assert told.standing_inside == [Standing.LOST]
    again = coordinator.acquire("job", ttl=2)
    assert again.generation > lease.generation
    assert lease.standing is Standing.LOST
    for refused in (lease.guard, lease.check, lambda: lease.put("k", "v"), lambda: lease.release()):
        with pytest.raises((LeaseLost, Superseded)):
            refused()
    again.check()
    again.release()


@pytest.mark.field(14)
@pytest.mark.req("P-3")
def test_releases_in_the_middle_of_a_renewal(taped: Taped, raw: Raw) -> None:
    coordinator, tape = taped(patience=10.0)
    in_flight, go_on = threading.Event(), threading.Event()

    def act(tape: Tape, request: KeepAlive, within: float) -> KeepAliveReply:
        in_flight.set()
        assert go_on.wait(20)
        return tape.wire.call(request, within)

    leases = [coordinator.acquire(f"job-{n}", ttl=60) for n in range(200)]
    for lease in leases:
        lease._belief._due = 0.0  # all due now
    tape.fault(a(KeepAlive), act)
    with coordinator._engine.renewer._changed:
        coordinator._engine.renewer._changed.notify()
    assert in_flight.wait(10)
    for lease in leases:
        lease.release()
    go_on.set()
    ids = {lease.receipt.lease_id for lease in leases}
    sent = len(tape.keepalives())
    eventually("the round is over", lambda: not coordinator._engine.renewer._leases)
    assert raw.below(coordinator._engine.keys.family("owner")) == []
    assert all(raw.ttl(lease_id) <= 0 for lease_id in list(ids)[:20])
    with coordinator.acquire("another", ttl=2):
        eventually("another renewal", lambda: len(tape.keepalives()) > sent)
    assert not ids & set(tape.keepalives()[sent:])
    assert all(lease.standing is Standing.RELEASED for lease in leases)


@pytest.mark.req("S2-22", "S2-23", "S2-24", "S0-15")
def test_a_loser_cannot_extend_its_successors_lease(taped: Taped, connect: Connect, raw: Raw) -> None:
    """A's renewals name A's own etcd lease; B's count down untouched, and A is told."""
    coordinator, tape = taped()
    loser = coordinator.acquire("job", ttl=2)
    raw.delete(coordinator._engine.keys.task("job").owner)
    successor_coordinator = connect()
    successor = successor_coordinator.acquire("job", ttl=30)
    mine = successor.receipt.lease_id
    assert loser.wait_lost(5) is not None
    assert mine not in tape.keepalives()
    description = coordinator.describe("job")
    assert description.generation == successor.generation
    assert description.expires_in is not None and 0 < description.expires_in <= 30
    assert abs(description.expires_in - raw.ttl(mine)) <= 1
    successor.release()


@pytest.mark.req("S0-5")
def test_a_thousand_leases_share_rounds(taped: Taped, raw: Raw) -> None:
    coordinator, tape = taped(patience=10.0)
    leases = [coordinator.acquire(f"job-{n}", ttl=30) for n in range(250)]
    before = len(tape.sent)
    for lease in leases:
        lease._belief._due = 0.0
    with coordinator._engine.renewer._changed:
        coordinator._engine.renewer._changed.notify()
    eventually("all renewed", lambda: all(lease._belief._due > 0 for lease in leases))
    round_of_requests = tape.sent[before:]
    assert [type(request).__name__ for request in round_of_requests] == ["KeepAlive", "Txn", "Txn", "Txn"]
    assert max(len(request.success) for request in round_of_requests if isinstance(request, Txn)) <= 101
    assert all(lease.standing is Standing.HELD for lease in leases)


@pytest.mark.req("S2-32", "S2-33")
@pytest.mark.parametrize("rate", [0.5, 1.5])
def test_a_clock_that_runs_wrong_changes_when_not_who(
    rate: float, connect: Connect, raw: Raw, monkeypatch: pytest.MonkeyPatch
) -> None:
    true_clock = SYSTEM.now
    monkeypatch.setattr(SYSTEM, "now", lambda: true_clock() * rate)
    coordinator = connect()
    lease = coordinator.acquire("job", ttl=3)
    owner = coordinator._engine.keys.task("job").owner
    pass_time(5)
    assert raw.get(owner).mod_revision == lease.generation
    lease.put("k", "v")
    raw.revoke(lease.receipt.lease_id)
    with pytest.raises(LeaseLost):  # whatever the clock says, etcd's word counts
        lease.put("k", "w")


@pytest.mark.field(57)
@pytest.mark.req("S2-33")
@pytest.mark.parametrize("year", ["1999", "2099"])
def test_a_wall_clock_that_jumps_changes_nothing(
    year: str, connect: Connect, monkeypatch: pytest.MonkeyPatch
) -> None:
    coordinator = connect()
    with coordinator.acquire("job", ttl=2) as lease:
        monkeypatch.setattr(SYSTEM, "wall", lambda: f"{year}-01-01T00:00:00.000+00:00")
        before = lease._belief.renewed_at
        eventually("renewed three times", lambda: lease._belief.renewed_at > before + 1.5)
        lease.put("k", "v")
        assert lease.standing is Standing.HELD
        with pytest.raises(Exception, match="owned by"):
            connect().acquire("job", wait=0.3)
    assert coordinator.describe("job").last_attempt.ended_at.startswith(year)  # type: ignore[union-attr]


@pytest.mark.field(56)
@pytest.mark.req("S2-21")
def test_a_ttl_below_the_servers_minimum_is_refused_with_its_number(connect: Connect) -> None:
    with LocalEtcd(flags=["--heartbeat-interval=500", "--election-timeout=5000"]) as slow:
        coordinator = connect(slow.endpoint)
        with pytest.raises(Exception, match=r"ttl=1 s cannot be granted; the shortest this server grants is 8 s"):
            coordinator.acquire("job", ttl=1)
        with coordinator.acquire("job", ttl=8) as lease:
            assert lease.ttl == 8
            assert lease._belief.granted == coordinator.describe("job").owner.granted_ttl == 8  # type: ignore[union-attr]
            assert 0 < lease._belief._due - lease._belief.renewed_at < 8 / 2
        coordinator.close()


def test_the_callback_thread_does_not_hold_renewal_up(connect: Connect, raw: Raw) -> None:
    coordinator, released = connect(), threading.Event()
    lease = coordinator.acquire("lost", ttl=2, on_lost=lambda *_: released.wait(30))
    with coordinator.acquire("kept", ttl=2) as kept:
        raw.revoke(lease.receipt.lease_id)
        assert lease.wait_lost(5)
        before = kept._belief.renewed_at
        eventually("the other lease is renewed", lambda: kept._belief.renewed_at > before)
        released.set()


def test_losing_is_logged(connect: Connect, raw: Raw, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        coordinator = connect()
        lease = coordinator.acquire("job", ttl=2)
        raw.revoke(lease.receipt.lease_id)
        assert lease.wait_lost(5)
        eventually("it is logged", lambda: f"lost job (generation {lease.generation}): revoked" in caplog.text)


@pytest.mark.req("S0-5", "promise-5")
def test_many_losses_at_once_cost_no_healthy_lease(taped: Taped, raw: Raw) -> None:
    """Thirty leases are revoked while every second look at how they were lost goes unanswered."""
    coordinator, tape = taped(patience=10.0)
    told = Told()
    doomed = [coordinator.acquire(f"doomed-{n}", ttl=2) for n in range(30)]
    healthy = coordinator.acquire("healthy", ttl=2, on_unverified=told.unverified)
    looks = [0]

    def second_look(request: Request[Any]) -> bool:
        if isinstance(request, Txn) and request.elsewhere:
            looks[0] += 1
            return looks[0] % 2 == 1
        return False

    def hang(_tape: Tape, request: Txn, _within: float) -> object:
        pass_time(request.timeout or 1.0)
        raise OutcomeUnknown("no answer in time")

    tape.fault(second_look, hang, once=False)
    for lease in doomed:
        raw.revoke(lease.receipt.lease_id)
    for lease in doomed:
        assert lease.wait_lost(10)
    before = healthy._belief.renewed_at
    eventually("renewed twice more", lambda: healthy._belief.renewed_at > before + 1)
    assert healthy.standing is Standing.HELD
    assert told.doubts == []
    assert {lease.loss.reason for lease in doomed if lease.loss} <= {LossReason.REVOKED, LossReason.EXPIRED}
