"""Claims against a real etcd: lost replies, late arrivals, and what happens without each safeguard."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

import pytest

import etcdfence
from etcdfence import Coordinator, Held, Lease, LossReason, OutcomeUnknown, Unavailable
from etcdfence._requests import (
    Compare,
    Grant,
    Header,
    Request,
    Revoke,
    RevokeReply,
    TxnReply,
    Wait,
    Waited,
)
from etcdfence.server import LocalEtcd

from ..support.raw import Raw
from ..support.tape import Tape, a, is_claim, is_seal
from ..support.waiting import eventually, pass_time

Taped = Callable[..., tuple[Coordinator, Tape]]
Connect = Callable[..., Coordinator]


def is_attempt(compare: Compare) -> bool:
    return b"/attempt/" in compare.key


@pytest.mark.req("promise-1")
@pytest.mark.field(30)
def test_a_claim_whose_reply_was_lost_is_adopted(taped: Taped, raw: Raw) -> None:
    coordinator, tape = taped()
    tape.lose_reply(is_claim)
    with coordinator.try_acquire("job") as lease:
        kv = raw.get(coordinator._engine.keys.task("job").owner)
        assert (lease.generation, lease.receipt.lease_id) == (kv.mod_revision, kv.lease)
        lease.put("k", "v")
        assert lease._tenure.attempt.doubtful


def late_claim(taped: Taped, raw: Raw, without: Callable[[Compare], bool]) -> bool:
    """The first try of a claim arrives when its tenure is over, while its etcd lease still lives."""
    coordinator, tape = taped()
    tape.without = without
    tape.delay(is_claim)
    lease = coordinator.try_acquire("job", ttl=60)
    owner = coordinator._engine.keys.task("job").owner
    raw.delete(owner)
    tape.deliver()
    ghost = raw.get(owner) is not None
    raw.revoke(lease.receipt.lease_id)
    return ghost


@pytest.mark.req("promise-1")
@pytest.mark.field(84)
def test_a_late_claim_never_owns_again(taped: Taped, raw: Raw) -> None:
    assert not late_claim(taped, raw, lambda _: False)


@pytest.mark.req("promise-1")
def test_without_the_attempt_key_a_late_claim_owns_for_nobody(taped: Taped, raw: Raw) -> None:
    assert late_claim(taped, raw, is_attempt)


def unanswered_claim(taped: Taped, connect: Connect, raw: Raw, *, sealed: bool) -> bool:
    """B's claim is on its way while A owns, its repetition is answered "held", and what B gives back afterwards is
    lost. Then A goes, and B's first try arrives."""
    holder = connect().try_acquire("job")
    coordinator, tape = taped()
    tape.delay(is_claim)
    tape.fault(a(Revoke), lambda *_: RevokeReply(found=True), once=False)  # answered, but never reaches etcd
    if not sealed:
        tape.fault(is_seal, lambda *_: TxnReply(Header(0, 0), True, ()))
    with pytest.raises(Held) as held:
        coordinator.try_acquire("job", ttl=60)
    assert held.value.owner is not None and held.value.owner.generation == holder.generation
    holder.release()
    tape.deliver()
    kv = raw.get(coordinator._engine.keys.task("job").owner)
    if kv is not None:
        raw.revoke(kv.lease)
    return kv is not None


@pytest.mark.req("promise-1", "promise-4")
def test_held_is_definite(taped: Taped, connect: Connect, raw: Raw) -> None:
    assert not unanswered_claim(taped, connect, raw, sealed=True)


@pytest.mark.req("promise-4")
def test_without_the_seal_a_refused_claim_owns_later(taped: Taped, connect: Connect, raw: Raw) -> None:
    assert unanswered_claim(taped, connect, raw, sealed=False)


@pytest.mark.req("promise-1")
def test_a_losers_seal_leaves_the_holder_alone(taped: Taped, connect: Connect, raw: Raw) -> None:
    holder = connect().try_acquire("job")
    coordinator, tape = taped()
    tape.delay(is_claim)
    with pytest.raises(Held):
        coordinator.try_acquire("job")
    assert any(is_seal(request) for request in tape.sent)
    assert raw.get(coordinator._engine.keys.task("job").owner).mod_revision == holder.generation
    holder.put("k", "still mine")
    holder.check()
    holder.release()


@pytest.mark.req("promise-1")
def test_the_seal_finds_a_claim_that_landed_and_adopts_it(taped: Taped, connect: Connect, raw: Raw) -> None:
    """The late claim lands between the answer "held" and the seal."""
    holder = connect().try_acquire("job")
    coordinator, tape = taped()
    tape.delay(is_claim)

    def act(tape: Tape, request: object, within: float) -> object:
        holder.release()
        tape.deliver()
        return tape.wire.call(request, within)  # type: ignore[arg-type]

    tape.fault(is_seal, act)
    with coordinator.try_acquire("job") as lease:
        assert raw.get(coordinator._engine.keys.task("job").owner).mod_revision == lease.generation
        lease.put("k", "v")


@pytest.mark.req("promise-4", "S0-4")
@pytest.mark.field(30)
def test_a_claim_that_stays_unanswered_is_unknown_and_is_undone(taped: Taped, raw: Raw) -> None:
    coordinator, tape = taped(patience=0.5)
    tape.lose_reply(is_claim, once=False)
    tape.raises(is_seal, OutcomeUnknown("no answer"), once=False)
    with pytest.raises(OutcomeUnknown):
        coordinator.try_acquire("job", ttl=60)
    owner = coordinator._engine.keys.task("job").owner
    assert raw.get(owner) is not None  # it had landed
    tape.heal()
    eventually("the claim that nobody holds is given back", lambda: raw.get(owner) is None)


@pytest.mark.req("S0-4")
def test_an_unanswered_grant_is_never_sent_twice(taped: Taped, raw: Raw) -> None:
    coordinator, tape = taped()
    tape.lose_reply(a(Grant))
    with coordinator.try_acquire("job", ttl=60) as lease:
        first, second = [request.lease_id for request in tape.sent if isinstance(request, Grant)]
        assert second == lease.receipt.lease_id != first
        eventually("the stray lease is given back", lambda: raw.ttl(first) <= 0)


@pytest.mark.req("promise-4")
def test_a_claim_that_was_never_sent_is_unavailable(taped: Taped) -> None:
    coordinator, tape = taped(patience=0.3)
    tape.raises(is_claim, Unavailable("no member"), once=False)
    with pytest.raises(Unavailable):
        coordinator.try_acquire("job")
    assert not any(is_seal(request) for request in tape.sent)


@pytest.mark.field(30)
@pytest.mark.req("S0-14", "S2-10")
def test_of_two_claims_with_lost_replies_exactly_one_wins(taped: Taped) -> None:
    """Same name, same host, same pid: the attempt decides, not who it says it is."""
    workers = [taped(holder="worker") for _ in range(2)]
    outcomes: list[object] = []
    barrier = threading.Barrier(2)

    def claim(coordinator: Coordinator) -> None:
        barrier.wait(10)
        try:
            outcomes.append(coordinator.try_acquire("job"))
        except Held as held:
            outcomes.append(held)

    for _, tape in workers:
        tape.lose_reply(is_claim)
    threads = [threading.Thread(target=claim, args=(coordinator,)) for coordinator, _ in workers]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    assert sorted(type(outcome).__name__ for outcome in outcomes) == ["Held", "Lease"]


@pytest.mark.req("promise-1", "S0-10")
def test_a_claim_under_an_old_epoch_goes_on_under_the_new_one(taped: Taped, raw: Raw) -> None:
    coordinator, tape = taped()
    raw.put(coordinator._engine.keys.epoch, b'{"format":1,"number":7,"id":"raised"}')
    with coordinator.try_acquire("job") as lease:
        assert lease.token.epoch == coordinator.epoch == 7
        lease.put("k", "v")
    claims = len([request for request in tape.sent if is_claim(request)])
    coordinator.try_acquire("job").release()
    assert len([request for request in tape.sent if is_claim(request)]) == claims + 1


@pytest.mark.req("promise-2", "S0-10")
def test_raising_the_epoch_ends_every_tenure(taped: Taped, raw: Raw) -> None:
    coordinator, _ = taped()
    lease = coordinator.try_acquire("job", ttl=60)
    raw.put(coordinator._engine.keys.epoch, b'{"format":1,"number":7,"id":"raised"}')
    with pytest.raises(Exception, match="epoch_raised"):
        lease.put("k", "v")
    assert lease.loss is not None and lease.loss.reason is LossReason.EPOCH_RAISED
    assert coordinator.get("k").value is None


@pytest.mark.req("promise-1")
def test_the_predecessor_is_marked_lost(connect: Connect, raw: Raw) -> None:
    first = connect().try_acquire("job")
    raw.revoke(first.receipt.lease_id)
    coordinator = connect()
    with coordinator.try_acquire("job"):
        ended = {attempt.id: attempt.ended for attempt in coordinator.describe("job").attempts}
        assert ended[first.attempt] == "lost"


def test_acquire_waits_without_polling(coordinator: Coordinator, taped: Taped) -> None:
    """While the owner stays, a waiter sends nothing; when it goes, one more claim."""
    lease = coordinator.acquire("job")
    waiter, tape = taped()
    got: list[Lease] = []
    thread = threading.Thread(target=lambda: got.append(waiter.acquire("job", wait=20)))
    thread.start()
    eventually("it watches", lambda: tape.wire._waits)
    sent = len(tape.sent)
    pass_time(1)
    assert (len(tape.sent), got) == (sent, [])
    lease.release()
    thread.join(10)
    assert got[0].generation > lease.generation
    assert len([request for request in tape.sent if is_claim(request)]) == 2
    got[0].release()


@pytest.mark.field(41, 42)
def test_a_waiter_whose_history_was_compacted_reads_anew(taped: Taped, coordinator: Coordinator, raw: Raw) -> None:
    """Between its look and its watch the task goes free, and that is compacted away: the watch says so, and the
    waiter claims at once instead of listening to silence."""
    lease = coordinator.acquire("job", ttl=60)
    waiter, tape = taped(patience=10.0)

    def act(tape: Tape, request: Request[Any], within: float) -> Any:
        lease.release()
        with coordinator.acquire("another", ttl=60):
            """More history, which is compacted away as well."""
        raw.compact()
        found.append(tape.wire.call(request, within))
        return found[0]

    found: list[Any] = []
    tape.fault(a(Wait), act)
    began = time.monotonic()
    with waiter.acquire("job", wait=20) as mine:
        assert time.monotonic() - began < 5
        assert found == [Waited.COMPACTED]
        assert mine.generation > lease.generation


@pytest.mark.field(63)
def test_a_waiter_holds_one_etcd_lease(own_etcd: LocalEtcd, namespace: str) -> None:
    """That of its place in line, which becomes the one of its tenure; nothing is left of either."""
    raw = Raw(own_etcd.endpoint)
    with (
        etcdfence.connect(own_etcd.endpoint, namespace=namespace) as holder,
        etcdfence.connect(own_etcd.endpoint, namespace=namespace) as waiter,
    ):
        lease = holder.acquire("job", ttl=60)
        got: list[Lease] = []
        thread = threading.Thread(target=lambda: got.append(waiter.acquire("job", ttl=60, wait=20)))
        thread.start()
        eventually("it waits", holder.waiters)

        def leases() -> set[int]:
            return {int(one["ID"]) for one in raw.gateway("/v3/lease/leases", {}).get("leases", [])}

        (place,) = holder.waiters()
        assert leases() == {lease.receipt.lease_id, place.lease_id}
        lease.release()
        thread.join(10)
        assert got[0].receipt.lease_id == place.lease_id
        got[0].release()
        assert leases() == set()
    raw.close()
