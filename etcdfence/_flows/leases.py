"""Getting, keeping and checking ownership.

A claim whose answer was lost is the dangerous one: it may land long after its caller has turned away. So
nothing definite is said of it before it has been settled by a committed transaction: the same claim again, or
a seal that creates its attempt key. A late claim then fails on that key.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import islice
from typing import TYPE_CHECKING

from etcdfence import _timing, _txns
from etcdfence._flow import Flow
from etcdfence._flows.pacing import Pace, pace_for, unanswered
from etcdfence._keys import TaskKeys
from etcdfence._records import AttemptRecord, End, EpochRecord, OwnerRecord, Unreadable, read
from etcdfence._requests import (
    FreshId,
    FreshLeaseId,
    Grant,
    Header,
    Instant,
    KeepAlive,
    KeyValue,
    Now,
    Range,
    Revoke,
    Sleep,
    TimeToLive,
    Wait,
)
from etcdfence.errors import (
    EtcdFenceError,
    LeaseExists,
    LeaseLost,
    LeaseNotFound,
    Misuse,
    OutcomeUnknown,
    TaskClosed,
    Unavailable,
)
from etcdfence.model import Doubt, Guard, Loss, LossReason

if TYPE_CHECKING:
    from etcdfence._flows.fencing import Lane

READS_PER_REQUEST = 100  # owner keys in one renewal read; etcd takes 128 operations
DIAGNOSES_PER_REQUEST = 20  # of five reads each
LONGEST_WAIT = 30.0  # seconds for one watch; then the store is asked again
LATE_GRANT = (0.1, 0.5)  # seconds after which to look again for a lease whose grant went unanswered
BROKEN_WATCH = 0.2  # seconds before asking again after a watch that broke


@dataclass(frozen=True, slots=True)
class Epoch:
    key: bytes
    value: bytes
    number: int


def epoch_from(kv: KeyValue) -> Epoch:
    record = read(EpochRecord, kv)
    if isinstance(record, Unreadable):
        raise Misuse(f"the namespace's epoch cannot be used: {record}")
    return Epoch(kv.key, kv.value, record.number)


def find_epoch(key: bytes, pace: Pace) -> Flow[Epoch]:
    """Read the namespace's epoch, or create it as number 1. Every try may be repeated."""
    record = EpochRecord(number=1, id=(yield from FreshId()))
    while True:
        try:
            reply = yield from _txns.found_epoch(key, record.to_bytes())
        except (OutcomeUnknown, Unavailable) as error:
            yield from pace.again(unanswered(error))
        else:
            return epoch_from(_txns.founded(reply))


def prove_compares(epoch_key: bytes, pace: Pace) -> Flow[None]:
    """Show that comparisons reach etcd whole, by transactions that must fail. A fence that gets lost on its way
    would let everything pass."""
    remaining = list(_txns.must_fail(epoch_key))
    while remaining:
        try:
            reply = yield from remaining[0]
        except (OutcomeUnknown, Unavailable) as error:
            yield from pace.again(unanswered(error))
        else:
            if reply.succeeded:
                raise Misuse(f"comparisons do not reach etcd whole: it took {remaining[0].compares} as true")
            remaining.pop(0)


@dataclass(frozen=True, slots=True)
class Wish:
    """Who wants which task, for how long (`ttl` seconds) without a sign of life."""

    keys: TaskKeys
    holder: str
    host: str
    pid: int
    ttl: int
    epoch: Epoch


@dataclass(slots=True)
class Bid:
    """What one acquire has set in motion, noted before it is sent. `withdraw` undoes it."""

    lease_ids: list[int] = field(default_factory=list[int])
    unanswered: list[int] = field(default_factory=list[int])  # leases whose grant may still be on its way
    granted: int = 0
    sent: float = 0.0
    ask: _txns.Claim | None = None
    in_flight: bool = False
    doubtful: bool = False

    def not_granted(self, lease_id: int) -> None:
        self.lease_ids.remove(lease_id)
        self.unanswered.remove(lease_id)


def claim(bid: Bid, wish: Wish, pace: Pace) -> Flow[_txns.Tenure | _txns.Taken]:
    """Own the task, or learn who does.

    One round trip beside the grant. A lost reply is answered by sending the same claim again: the attempt key
    tells whether the first one was applied, and then the tenure is adopted. Where the answer could still be
    overtaken by the lost try, the attempt is sealed before anything is reported.
    """
    yield from _grant(bid, wish.ttl, pace)
    while True:
        ask = yield from _ask(bid, wish)
        answer = yield from _settled_answer(bid, ask, pace)
        match answer:
            case None:  # the etcd lease ran out before the claim came through
                yield from _grant(bid, wish.ttl, pace)
            case _txns.Won(generation, _, _, predecessor):
                yield from _mark_lost(wish, ask, generation, predecessor)
                return _tenure(bid, wish, ask, generation, answer)
            case _txns.Ran(int(generation)):
                return _tenure(bid, wish, ask, generation, answer)
            case _txns.Ran(_, began):  # applied, and over again before its answer was heard
                over = Loss(LossReason.GONE)
                yield from pace.again(LeaseLost(task=wish.keys.task, generation=began, loss=over, revision=None))
            case _txns.OtherEpoch(KeyValue() as kv):
                wish = replace(wish, epoch=epoch_from(kv))
            case _txns.OtherEpoch():
                raise Misuse("this namespace has no epoch (was the store wiped?); run: etcdfence init")
            case _txns.Shut(state, record):
                raise TaskClosed(wish.keys.task, state, _txns.task_result(record))
            case _txns.Taken():
                return answer


def _grant(bid: Bid, ttl: int, pace: Pace) -> Flow[None]:
    """An etcd lease under an id of our own. An unanswered grant is not repeated but left to run out (or be
    revoked): its late twin would bring a revoked lease back."""
    while True:
        lease_id = yield from FreshLeaseId()
        bid.lease_ids.append(lease_id)
        bid.unanswered.append(lease_id)
        sent = yield from Now()
        try:
            reply = yield from Grant(lease_id, ttl)
        except LeaseExists:
            bid.not_granted(lease_id)
        except Unavailable as error:
            bid.not_granted(lease_id)
            yield from pace.again(error)
        except OutcomeUnknown as error:
            yield from pace.again(error)
        else:
            bid.unanswered.remove(lease_id)
            if reply.ttl != ttl:
                raise Misuse(f"ttl={ttl} s cannot be granted; the shortest this server grants is {reply.ttl} s")
            bid.granted, bid.sent = reply.ttl, sent.clock
            return


def _ask(bid: Bid, wish: Wish) -> Flow[_txns.Claim]:
    """A claim under a fresh attempt id, on the etcd lease granted last."""
    attempt = yield from FreshId()
    now = yield from Now()
    lease_id = bid.lease_ids[-1]
    bid.ask = _txns.Claim(
        keys=wish.keys,
        attempt=AttemptRecord(
            attempt=attempt,
            holder=wish.holder,
            host=wish.host,
            pid=wish.pid,
            lease=f"{lease_id:x}",
            started=now.wall,
        ),
        owner=OwnerRecord(
            attempt=attempt,
            holder=wish.holder,
            host=wish.host,
            pid=wish.pid,
            ttl=bid.granted,
            epoch=wish.epoch.number,
        ),
        lease_id=lease_id,
        epoch_key=wish.epoch.key,
        epoch_value=wish.epoch.value,
    )
    bid.in_flight = bid.doubtful = False
    return bid.ask


def _settled_answer(bid: Bid, ask: _txns.Claim, pace: Pace) -> Flow[_txns.ClaimAnswer | None]:
    """Send the claim until it is answered, and seal it where an unanswered try could still land. None: etcd
    no longer knows the lease, so no try can land at all."""
    try:
        answer = yield from _answer(bid, ask, pace)
        if bid.doubtful and not isinstance(answer, _txns.Won | _txns.Ran | None):
            answer = (yield from _seal(ask, pace)) or answer
    except OutcomeUnknown:
        raise
    except EtcdFenceError as error:
        if bid.doubtful:  # whatever this error is, it is no answer to the try before it
            raise OutcomeUnknown(f"the claim of {ask.keys.task} may have been applied: {error}") from error
        bid.in_flight = False
        raise
    bid.in_flight = False
    return answer


def _answer(bid: Bid, ask: _txns.Claim, pace: Pace) -> Flow[_txns.ClaimAnswer | None]:
    while True:
        bid.in_flight = True
        try:
            reply = yield from _txns.claim(ask)
        except OutcomeUnknown as error:
            bid.doubtful = True
            yield from pace.again(error)
        except Unavailable as error:
            yield from pace.again(error)
        except LeaseNotFound:
            return None
        else:
            return _txns.claim_answer(ask, reply)


def _seal(ask: _txns.Claim, pace: Pace) -> Flow[_txns.Ran | None]:
    """Make sure that no try of this claim can land any more: None, or Ran where one had landed already."""
    while True:
        try:
            reply = yield from _txns.seal(ask)
        except (OutcomeUnknown, Unavailable) as error:
            yield from pace.again(error)
        else:
            return None if reply.succeeded else _txns.landed(ask, reply)


def _tenure(
    bid: Bid, wish: Wish, ask: _txns.Claim, generation: int, answer: _txns.Won | _txns.Ran
) -> _txns.Tenure:
    return _txns.Tenure(
        keys=wish.keys,
        guard=Guard(wish.keys.owner, generation, ask.lease_id, wish.epoch.key, wish.epoch.value),
        attempt=ask.attempt.model_copy(update={"doubtful": True}) if bid.doubtful else ask.attempt,
        epoch=wish.epoch.number,
        granted=bid.granted,
        granted_at=bid.sent,
        cluster_id=answer.cluster_id,
        record=answer.record,
    )


def _mark_lost(wish: Wish, ask: _txns.Claim, generation: int, last: KeyValue | None) -> Flow[None]:
    """Give the predecessor's attempt its end. Best effort: an attempt that is neither ended nor the last one
    is lost all the same, and the claim must not fail for it."""
    before = read(AttemptRecord, last) if last else None
    if last is None or not isinstance(before, AttemptRecord) or before.ended:
        return
    end = End(
        how="lost",
        at=ask.attempt.started,
        write=ask.attempt.attempt,
        generation=last.mod_revision,
        reason=f"superseded by generation {generation}",
    )
    # Nobody but its own worker knows whether that claim had an unanswered try; so it counts as one that had.
    ended = before.model_copy(update={"ended": end, "doubtful": True})
    try:
        yield from _txns.mark_lost(wish.keys, before, last.mod_revision, ended)
    except EtcdFenceError:
        return


def acquire(bid: Bid, wish: Wish, patience: float, until: float | None) -> Flow[_txns.Tenure | _txns.Taken]:
    """Claim, and while somebody else owns the task wait for the owner key to go, `until` a moment on the
    local clock (None: without limit). Each claim has `patience` seconds. The watch only wakes, and one that
    breaks wakes as well: each claim decides anew."""
    while True:
        pace = yield from pace_for(patience)
        outcome = yield from claim(bid, wish, pace)
        if isinstance(outcome, _txns.Tenure) or outcome.owner is None:
            return outcome
        yield from _try_revoke(bid, pace)
        now = yield from Now()
        left = LONGEST_WAIT if until is None else min(LONGEST_WAIT, until - now.clock)
        if left <= 0:
            return outcome
        try:
            yield from Wait(wish.keys.owner, outcome.revision + 1, left)
        except (Unavailable, OutcomeUnknown):
            yield from Sleep(BROKEN_WATCH)


def revoke(bid: Bid, pace: Pace) -> Flow[None]:
    """Give back every etcd lease of a bid. One whose grant went unanswered may come about after it was not found:
    for a while it is looked for again. One that comes later still holds nothing, and ends with its TTL."""
    while bid.lease_ids:
        lease_id = bid.lease_ids[-1]
        try:
            reply = yield from Revoke(lease_id)
            for pause in LATE_GRANT if lease_id in bid.unanswered else ():
                if reply.found:
                    break
                yield from Sleep(pause)
                reply = yield from Revoke(lease_id)
        except (OutcomeUnknown, Unavailable) as error:
            yield from pace.again(error)
        else:
            bid.lease_ids.pop()


def _try_revoke(bid: Bid, pace: Pace) -> Flow[None]:
    """What is not revoked stays in the bid, for the caller to withdraw."""
    try:
        yield from revoke(bid, pace)
    except EtcdFenceError:
        return


def withdraw(bid: Bid, pace: Pace) -> Flow[None]:
    """Undo an acquire that was given up: first make sure that its claim cannot land, then give back its
    leases (which ends a tenure that had begun, and kills a claim on its way, since a put on a lease that is
    gone fails). What stays undone ends with the lease's TTL: nobody renews it."""
    if bid.in_flight and bid.ask is not None:
        yield from _seal(bid.ask, pace)
        bid.in_flight = False
    yield from revoke(bid, pace)


# --- keeping it --------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Renewed:
    """etcd renewed the lease and, asked afterwards, named this tenure as the owner. `sent` is the local clock
    at the sending of the renewal."""

    sent: Instant


RenewalOutcome = Renewed | Doubt | Loss


def renew(lanes: Sequence[Lane], epoch_key: bytes, known: Header, limit: float) -> Flow[list[RenewalOutcome]]:
    """One round for all leases that are due: a keepalive, and then linearizable reads of the owner keys and
    the epoch; the outcomes are in the order of `lanes`.

    Both are needed. A keepalive does not go through raft (a deposed leader was seen to renew a lease that had
    been revoked) and knows nothing of the owner key. A keepalive answered with TTL 0 is no proof either: it
    only means that the lease was not renewed, and the owner key decides.
    `known` is what had been seen of the store before this round.
    """
    sent = yield from Now()
    ttls = (yield from KeepAlive(tuple(lane.tenure.guard.lease_id for lane in lanes), limit)).ttls
    suspects: list[Lane] = []
    remaining = iter(lanes)
    while batch := list(islice(remaining, READS_PER_REQUEST)):
        reads = (Range(epoch_key), *(Range(lane.tenure.guard.owner_key) for lane in batch))
        reply = yield from _txns.reading(*reads, timeout=limit)
        if reply.header.older_than(known):
            reply = yield from replace(_txns.reading(*reads, timeout=limit), elsewhere=True)
            if reply.header.older_than(known):
                return [Loss(LossReason.STORE_RESTORED) for _ in lanes]
        epoch = reply.reads[0].first
        for lane, found in zip(batch, reply.reads[1:], strict=True):
            evidence = _txns.Evidence(reply.header.revision, found.first, epoch, None, None, None)
            suspects += [] if evidence.guard_holds(lane.tenure.guard) else [lane]
    losses = yield from _diagnose_all(suspects, limit)
    return [losses.get(id(lane)) or _renewal(lane, ttls, sent) for lane in lanes]


def _renewal(lane: Lane, ttls: dict[int, int], sent: Instant) -> RenewalOutcome:
    return Renewed(sent) if ttls.get(lane.tenure.guard.lease_id, 0) > 0 else Doubt.NOT_RENEWED


def went_back(epoch_key: bytes, known: Header, limit: float) -> Flow[bool]:
    """The second opinion on a reply that was older than what was known."""
    reply = yield from replace(_txns.reading(Range(epoch_key), timeout=limit), elsewhere=True)
    return reply.header.older_than(known)


def _diagnose_all(suspects: Sequence[Lane], limit: float) -> Flow[dict[int, RenewalOutcome | None]]:
    """How each suspect was lost, or None where it is not, by the identity of its lane. Whatever is not found out
    within `limit` stays in doubt until the next round: the other leases are waiting to be renewed."""
    found: dict[int, RenewalOutcome | None] = {id(lane): Doubt.UNREACHABLE for lane in suspects}
    pace = yield from pace_for(limit)
    for start in range(0, len(suspects), DIAGNOSES_PER_REQUEST):
        some = suspects[start : start + DIAGNOSES_PER_REQUEST]
        reads = [read for lane in some for read in lane.tenure.evidence_reads]
        try:
            reply = yield from replace(_txns.reading(*reads, timeout=limit), elsewhere=True)
            for n, lane in enumerate(some):
                evidence = _txns.Evidence.of(reply, 5 * n)
                found[id(lane)] = yield from _loss(lane, evidence, limit)
                now = yield from Now()
                if now.clock > pace.deadline:
                    return found
        except EtcdFenceError:
            return found
    return found


def diagnose(lane: Lane) -> Flow[Loss | None]:
    """Why a tenure is over. None: it is not, and whoever asked had been shown an old state."""
    reply = yield from replace(_txns.reading(*lane.tenure.evidence_reads), elsewhere=True)
    return (yield from _loss(lane, _txns.Evidence.of(reply)))


def _loss(lane: Lane, evidence: _txns.Evidence, limit: float | None = None) -> Flow[Loss | None]:
    """What the keys say of the end of a tenure, and where they are silent, the etcd lease and the clock.

    A lease that lives on means that the owner key alone was taken away. A lease that is gone before its TTL
    can have passed was revoked; later it may have been either, and is called expired.
    """
    tenure = lane.tenure
    if evidence.guard_holds(tenure.guard):
        return None
    loss = _txns.loss_seen(tenure.guard, tenure.attempt.attempt, evidence)
    if loss is None and (lane.ended or evidence.ended_by() in lane.unsettled):
        loss = Loss(LossReason.ENDED)
    if loss is not None:
        return loss
    lease = yield from TimeToLive(tenure.guard.lease_id, timeout=limit)
    if lease.granted_ttl > 0:
        return Loss(LossReason.TAKEN_AWAY)
    now = yield from Now()
    early = _timing.surely_revoked(now.clock, lane.renewed_at, tenure.granted)
    return Loss(LossReason.REVOKED if early else LossReason.EXPIRED)


def check(lane: Lane, pace: Pace) -> Flow[Loss | None]:
    """Ask etcd whether this tenure owns the task now: None, or how it was lost."""
    tenure = lane.tenure
    while True:
        try:
            reply = yield from _txns.reading(*tenure.evidence_reads)
        except (OutcomeUnknown, Unavailable) as error:
            yield from pace.again(unanswered(error))
        else:
            if _txns.Evidence.of(reply).guard_holds(tenure.guard):
                return None
            return (yield from diagnose(lane))
