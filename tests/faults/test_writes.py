"""Promise 3 against a real etcd: lost replies, requests that arrive late, and what happens without the marker."""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest

from etcdfence import (
    ABSENT,
    Conflict,
    Coordinator,
    Lease,
    LeaseLost,
    Misuse,
    OutcomeUnknown,
    Superseded,
    Unavailable,
    Verdict,
)
from etcdfence._requests import Compare, Txn, TxnReply

from ..support.raw import Raw
from ..support.tape import Tape, a, puts
from ..support.waiting import eventually

Taped = Callable[..., tuple[Coordinator, Tape]]


def is_marker(compare: Compare) -> bool:
    return b"/marker/" in compare.key


def applied(tape: Tape) -> list[bool]:
    """Whether each of the late requests was applied when it arrived."""
    return [isinstance(answer, TxnReply) and answer.succeeded for answer in tape.deliver()]


@pytest.mark.req("promise-3")
@pytest.mark.field(28, 31)
def test_a_lost_reply_is_answered_by_the_marker(taped: Taped, raw: Raw) -> None:
    coordinator, tape = taped()
    with coordinator.acquire("job") as lease:
        tape.lose_reply(puts(b"/data/"))
        committed = lease.put("k", "v")
        entry = coordinator.get("k")
        assert entry.value == b"v"
        assert entry.revision == committed.revision
        assert entry.provenance is not None and entry.provenance.write_id == committed.write_id
        assert raw.get(coordinator._engine.keys.data("k")).version == 1  # applied once, though it was sent twice
    assert len([request for request in tape.sent if puts(b"/data/")(request)]) == 2


@pytest.mark.req("promise-3")
@pytest.mark.field(28)
def test_a_write_whose_lease_was_lost_meanwhile_is_still_reported_as_done(taped: Taped, raw: Raw) -> None:
    coordinator, tape = taped()
    lease = coordinator.acquire("job")
    keys = coordinator._engine.keys.task("job")

    def act(tape: Tape, request: object, within: float) -> object:
        tape.wire.call(request, within)  # type: ignore[arg-type]
        raw.delete(keys.owner)
        raise OutcomeUnknown("the reply was lost, and so was the lease")

    tape.fault(puts(b"/data/"), act)
    lease.put("k", "v")
    assert coordinator.get("k").value == b"v"
    with pytest.raises(LeaseLost):
        lease.put("k", "later")


def delete_brings_absent_back(taped: Taped, raw: Raw, without: Callable[[Compare], bool]) -> bytes | None:
    """A create whose first try is late; its repetition is applied, the key is deleted, then the first arrives."""
    coordinator, tape = taped()
    lease = coordinator.acquire("job")
    tape.without = without
    tape.delay(puts(b"/data/"))
    lease.put("k", "created", expect=ABSENT)
    lease.delete("k")
    tape.deliver()
    kv = raw.get(coordinator._engine.keys.data("k"))
    return kv.value if kv else None


@pytest.mark.req("promise-3")
@pytest.mark.field(84)
def test_a_late_create_does_not_undo_a_delete(taped: Taped, raw: Raw) -> None:
    assert delete_brings_absent_back(taped, raw, lambda _: False) is None


@pytest.mark.req("promise-3")
def test_without_the_marker_a_late_create_undoes_a_delete(taped: Taped, raw: Raw) -> None:
    assert delete_brings_absent_back(taped, raw, is_marker) == b"created"


def late_first_try(taped: Taped, raw: Raw, without: Callable[[Compare], bool]) -> bytes:
    """A blind put whose first try arrives after its repetition and after a later write."""
    coordinator, tape = taped()
    lease = coordinator.acquire("job")
    lease.put("k", "zero")
    tape.without = without
    tape.delay(puts(b"/data/"))
    lease.put("k", "one")
    lease.put("k", "two")
    tape.deliver()
    return bytes(raw.get(coordinator._engine.keys.data("k")).value)


@pytest.mark.req("promise-3")
def test_a_late_first_try_never_overtakes_a_later_write(taped: Taped, raw: Raw) -> None:
    assert late_first_try(taped, raw, lambda _: False) == b"two"


@pytest.mark.req("promise-3")
def test_without_the_marker_a_late_first_try_overtakes(taped: Taped, raw: Raw) -> None:
    assert late_first_try(taped, raw, is_marker) == b"one"


@pytest.mark.req("promise-3")
def test_two_threads_of_one_lease_write_one_after_the_other(taped: Taped, raw: Raw) -> None:
    """The second thread's write waits while the first one's is under way, and a late copy of the first is dead."""
    coordinator, tape = taped(patience=10.0)
    lease = coordinator.acquire("job")
    under_way, go_on = threading.Event(), threading.Event()

    def act(tape: Tape, request: object, _within: float) -> object:
        tape.delayed.append(request)  # type: ignore[arg-type]
        under_way.set()
        assert go_on.wait(10)
        raise OutcomeUnknown("no answer in time")

    tape.fault(puts(b"/data/"), act)
    first = threading.Thread(target=lease.put, args=("k", "first"))
    second = threading.Thread(target=lease.put, args=("k", "second"))
    first.start()
    assert under_way.wait(10)
    second.start()
    eventually("the second thread waits for its turn", lambda: len(lease._holding.turn._line) == 2)
    go_on.set()
    first.join(10)
    second.join(10)
    assert applied(tape) == [False]
    assert raw.get(coordinator._engine.keys.data("k")).value == b"second"
    assert raw.get(coordinator._engine.keys.data("k")).version == 2


@pytest.mark.req("promise-2", "promise-3", "S0-17", "S2-36")
@pytest.mark.field(84)
def test_a_late_write_lands_under_no_successor(
    taped: Taped, raw: Raw, connect: Callable[..., Coordinator]
) -> None:
    """Two successors: A's write is on the wire while B owns, writes and goes, and C owns."""
    coordinator, tape = taped()
    a_lease = coordinator.acquire("job")
    owner = coordinator._engine.keys.task("job").owner
    tape.delay(puts(b"/data/"), once=False)
    with pytest.raises(OutcomeUnknown) as unknown:
        a_lease.put("k", "A")
    tape.heal()
    raw.delete(owner)
    b_lease = connect().acquire("job")
    b_lease.put("k", "B")
    raw.delete(owner)
    c_lease = connect().acquire("job")
    assert set(applied(tape)) == {False}
    assert raw.get(coordinator._engine.keys.data("k")).value == b"B"
    for stale in (a_lease, b_lease):
        with pytest.raises(Superseded) as refused:
            stale.put("k", "again")
        assert (refused.value.generation, refused.value.current) == (stale.generation, c_lease.generation)
    assert a_lease.settle(unknown.value) is Verdict.NOT_APPLIED


@pytest.mark.req("promise-3", "promise-4")
def test_a_caller_that_gave_up_learns_the_verdict_from_the_next_write(taped: Taped) -> None:
    coordinator, tape = taped()
    lease = coordinator.acquire("job")
    tape.lose_reply(puts(b"/data/one"), once=False)
    with pytest.raises(OutcomeUnknown) as applied_one:
        lease.put("one", "1")
    tape.heal()
    tape.delay(puts(b"/data/two"), once=False)
    with pytest.raises(OutcomeUnknown) as delayed_one:
        lease.put("two", "2")
    tape.heal()
    lease.put("three", "3")
    assert lease.settle(applied_one.value) is Verdict.APPLIED
    assert lease.settle(delayed_one.value) is Verdict.NOT_APPLIED
    assert set(applied(tape)) == {False}
    assert coordinator.get("one").value == b"1"
    assert coordinator.get("two").value is None


@pytest.mark.req("promise-4")
def test_settle_seals_a_write_that_is_still_on_its_way(taped: Taped) -> None:
    coordinator, tape = taped()
    lease = coordinator.acquire("job")
    tape.delay(puts(b"/data/"), once=False)
    with pytest.raises(OutcomeUnknown) as unknown:
        lease.put("k", "v")
    tape.heal()
    assert lease.settle(unknown.value) is Verdict.NOT_APPLIED
    assert set(applied(tape)) == {False}
    with pytest.raises(Misuse):
        lease.settle(OutcomeUnknown("another", write_id="f" * 32))
    with pytest.raises(Misuse):
        lease.settle(OutcomeUnknown("no write at all"))


def conflict_that_could_come_true(taped: Taped, raw: Raw, *, sealed: bool) -> bytes:
    """A create is delayed; its repetition meets the key present (Conflict); then the key goes, and it arrives."""
    coordinator, tape = taped()
    lease = coordinator.acquire("job")
    data = coordinator._engine.keys.data("k")
    raw.put(data, b"a stranger's")
    tape.delay(puts(b"/data/"))
    if not sealed:  # the seal is answered, but never reaches etcd
        lone_marker = lambda request: (  # noqa: E731
            isinstance(request, Txn) and len(request.success) == 1 and puts(b"/marker/")(request)
        )
        tape.fault(
            lone_marker,
            lambda tape, _request, within: TxnReply(tape.wire.call(Txn((), ()), within).header, True, ()),
        )
    with pytest.raises(Conflict) as conflict:
        lease.put("k", "late", expect=ABSENT)
    assert conflict.value.changed == ("k",)
    raw.delete(data)
    tape.deliver()
    kv = raw.get(data)
    return bytes(kv.value) if kv else b""


@pytest.mark.req("promise-3", "promise-4")
def test_a_conflict_is_definite(taped: Taped, raw: Raw) -> None:
    assert conflict_that_could_come_true(taped, raw, sealed=True) == b""


@pytest.mark.req("promise-4")
def test_without_the_seal_a_reported_conflict_is_applied_later(taped: Taped, raw: Raw) -> None:
    assert conflict_that_could_come_true(taped, raw, sealed=False) == b"late"


@pytest.mark.req("promise-4")
def test_the_seal_of_a_conflict_may_find_the_write_applied(taped: Taped, raw: Raw) -> None:
    """The lost try lands between the answer 'conflict' and the seal: then it counts, with its own revision."""
    coordinator, tape = taped()
    lease = coordinator.acquire("job")
    data = coordinator._engine.keys.data("k")
    raw.put(data, b"a stranger's")
    tape.delay(puts(b"/data/"))

    def act(tape: Tape, request: object, within: float) -> object:
        raw.delete(data)
        tape.deliver()
        return tape.wire.call(request, within)  # type: ignore[arg-type]

    tape.fault(lambda request: isinstance(request, Txn) and len(request.success) == 1, act)
    committed = lease.put("k", "mine", expect=ABSENT)
    assert raw.get(data).value == b"mine"
    assert raw.get(data).mod_revision == committed.revision


@pytest.mark.req("promise-4")
def test_nothing_was_sent_is_unavailable_not_unknown(taped: Taped) -> None:
    coordinator, tape = taped(patience=0.3)
    lease = coordinator.acquire("job")
    tape.raises(puts(b"/data/"), Unavailable("no member"), once=False)
    with pytest.raises(Unavailable):
        lease.put("k", "v")
    tape.heal()
    assert lease._holding.lane.unsettled == []
    lease.put("k", "v")


@pytest.mark.req("promise-4")
def test_an_unanswered_try_followed_by_unavailable_is_unknown(taped: Taped) -> None:
    coordinator, tape = taped(patience=0.5)
    lease = coordinator.acquire("job")
    tape.lose_reply(puts(b"/data/"))
    tape.raises(puts(b"/data/"), Unavailable("no member"), once=False)
    with pytest.raises(OutcomeUnknown) as unknown:
        lease.put("k", "v")
    tape.heal()
    assert lease.settle(unknown.value) is Verdict.APPLIED


@pytest.mark.req("promise-4")
def test_a_marker_that_is_gone_proves_nothing(taped: Taped, raw: Raw) -> None:
    """After the tenure, with attempt and marker trimmed, nobody can know: the write stays unknown for good."""
    coordinator, tape = taped()
    lease: Lease = coordinator.acquire("job")
    keys = coordinator._engine.keys.task("job")
    tape.lose_reply(puts(b"/data/"), once=False)
    with pytest.raises(OutcomeUnknown) as unknown:
        lease.put("k", "v")
    tape.heal()
    for key in (keys.owner, keys.marker(lease.generation), keys.attempt(lease.attempt)):
        raw.delete(key)
    with pytest.raises(LeaseLost):
        lease.put("other", "v")
    assert lease.settle(unknown.value) is Verdict.UNKNOWN


@pytest.mark.req("promise-4")
def test_a_first_write_is_definitely_not_applied_while_its_attempt_is_on_record(taped: Taped, raw: Raw) -> None:
    coordinator, tape = taped()
    lease = coordinator.acquire("job")
    tape.delay(puts(b"/data/"), once=False)
    with pytest.raises(OutcomeUnknown) as unknown:
        lease.put("k", "v")
    tape.heal()
    raw.delete(coordinator._engine.keys.task("job").owner)
    assert lease.settle(unknown.value) is Verdict.NOT_APPLIED
    assert set(applied(tape)) == {False}


@pytest.mark.req("promise-3")
def test_an_interrupted_write_is_settled_by_the_next_one(taped: Taped) -> None:
    """Ctrl-C in the middle of a write: the lane knows that something was sent."""
    coordinator, tape = taped()
    lease = coordinator.acquire("job")

    def act(tape: Tape, request: object, within: float) -> object:
        tape.wire.call(request, within)  # type: ignore[arg-type]
        raise KeyboardInterrupt

    tape.fault(puts(b"/data/"), act)
    with pytest.raises(KeyboardInterrupt):
        lease.put("k", "interrupted")
    lease.put("k", "next")
    assert coordinator.get("k").value == b"next"
    assert [fate.verdict for fate in lease._holding.lane.fates.values()] == [Verdict.APPLIED]


@pytest.mark.req("S2-35", "S2-37", "S0-12")
def test_check_and_write_travel_in_one_request(taped: Taped) -> None:
    coordinator, tape = taped()
    lease = coordinator.acquire("job")
    before = len([request for request in tape.sent if a(Txn)(request)])
    lease.put("k", "v")
    (write,) = [request for request in tape.sent if isinstance(request, Txn)][before:]
    guard = {(str(target), key, operand) for _, target, key, operand in lease.guard().for_stub()}
    assert guard <= {(str(one.target), one.key, one.operand) for one in write.compares}
