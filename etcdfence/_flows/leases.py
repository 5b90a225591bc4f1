"""Getting, keeping and checking ownership.

A claim whose answer was lost is the dangerous one: it may land long after its caller has turned away. So
nothing definite is said of it before it has been settled by a committed transaction: the same claim again, or
a seal that creates its attempt key. A late claim then fails on that key.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from itertools import islice
from typing import TYPE_CHECKING, cast

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
)
from etcdfence.errors import (
    EtcdFenceError,
    LeaseExists,
    LeaseLost,
    LeaseNotFound,
    Misuse,
    OutcomeUnknown,
    SessionLost,
    TaskClosed,
    Unavailable,
)
from etcdfence.model import Doubt, Guard, Loss, LossReason

if TYPE_CHECKING:
    from etcdfence._flows.fencing import Lane

READS_PER_REQUEST = 100  # owner keys in one renewal read; etcd takes 128 operations
DIAGNOSES_PER_REQUEST = 20  # of five reads each
LATE_GRANT = (0.1, 0.5)  # seconds after which to look again for a lease whose grant went unanswered


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
    """Who wants which task, for how long (`ttl` seconds) without a sign of life, which it gives every `period`
    seconds. `ours` are the etcd leases
    that the same coordinator holds: what it owns it cannot wait for."""

    keys: TaskKeys
    holder: str
    host: str
    pid: int
    ttl: int
    epoch: Epoch
    ours: Callable[[], Collection[str]] = tuple
    period: float | None = None


@dataclass(frozen=True, slots=True)
class Shared:
    """A session's etcd lease: `granted` seconds, last renewed by a request sent at `renewed_at` (local clock)."""

    lease_id: int
    granted: int
    renewed_at: float


@dataclass(slots=True, eq=False)
class Bid:
    """What one acquire has set in motion, noted before it is sent. `turns.withdraw` undoes it.

    lease_ids   etcd leases of its own; what it owns hangs on the last of them, unless it is `shared`
    unanswered  those whose grant may still be on its way
    granted     the TTL of the last one in seconds, `sent` the local clock at its last renewal; while in line it is
                renewed every `period` seconds
    in_flight   a request of `ask` is under way
    doubtful    a try of its claim went unanswered; `loose`: a try to get in line did
    """

    shared: Shared | None = None
    lease_ids: list[int] = field(default_factory=list[int])
    unanswered: list[int] = field(default_factory=list[int])
    granted: int = 0
    sent: float = 0.0
    period: float = 0.0
    ask: _txns.Claim | None = None
    in_flight: bool = False
    doubtful: bool = False
    loose: bool = False

    def not_granted(self, lease_id: int) -> None:
        self.lease_ids.remove(lease_id)
        self.unanswered.remove(lease_id)

    def settled(self) -> None:
        """Nothing of the present ask can land any more, and it has no place in line."""
        self.in_flight = self.doubtful = self.loose = False
        self.ask = None

    def taken_up(self, tenure: _txns.Tenure) -> None:
        """Somebody holds the tenure now, and the etcd lease that it hangs on: what is left is to be undone."""
        self.settled()
        if not tenure.shared:
            self.lease_ids.remove(tenure.guard.lease_id)

    @property
    def present(self) -> _txns.Claim:
        return cast("_txns.Claim", self.ask)

    @property
    def present_is_open(self) -> bool:
        """Whether something of the present ask may land, or stands in line."""
        ask = self.ask
        return ask is not None and (self.in_flight or self.doubtful or self.loose or ask.place > 0)

    @property
    def open(self) -> bool:
        """Whether something is left to undo."""
        return bool(self.lease_ids) or self.present_is_open


def claim(bid: Bid, wish: Wish, pace: Pace) -> Flow[_txns.Tenure | _txns.Taken]:
    """Own the task, or learn who does.

    One round trip beside the grant. A lost reply is answered by sending the same claim again: the attempt key
    tells whether the first one was applied, and then the tenure is adopted. Where the answer could still be
    overtaken by the lost try, the attempt is sealed before anything is reported.
    """
    if bid.shared is None:
        yield from grant(bid, wish.ttl, pace)
    outcome: Outcome = wish
    while isinstance(outcome, Wish):
        ask = yield from new_ask(bid, outcome)
        answer = yield from _settled_answer(bid, ask, pace)
        outcome = yield from outcome_of(bid, outcome, answer, pace)
    return outcome


Outcome = _txns.Tenure | _txns.Taken | Wish


def outcome_of(bid: Bid, wish: Wish, answer: _txns.ClaimAnswer | None, pace: Pace) -> Flow[Outcome]:
    """What an answer to an attempt means: a tenure, an answer to report, or the wish to make another attempt for.
    None: the etcd lease granted last is gone."""
    match answer:
        case None:  # it ran out before the claim came through, or while in line
            bid.lease_ids.pop()
            yield from grant(bid, wish.ttl, pace)
        case _txns.Won(generation, _, _, predecessor):
            tenure = tenure_of(bid, generation, answer)
            yield from _mark_lost(tenure, predecessor)
            return tenure
        case _txns.Ran(int(generation)):
            return tenure_of(bid, generation, answer)
        case _txns.Ran(_, began):  # applied, and over again before its answer was heard
            bid.settled()
            over = Loss(LossReason.GONE)
            yield from pace.again(LeaseLost(task=wish.keys.task, generation=began, loss=over, revision=None))
        case _txns.OtherEpoch(KeyValue() as kv):
            return replace(wish, epoch=epoch_from(kv))
        case _txns.OtherEpoch():
            raise Misuse("this namespace has no epoch (was the store wiped?); run: etcdfence init")
        case _txns.Shut(state, record):
            raise TaskClosed(wish.keys.task, state, _txns.task_result(record))
        case _txns.Taken():
            return answer
    return wish


def grant(bid: Bid, ttl: int, pace: Pace) -> Flow[None]:
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


def new_ask(bid: Bid, wish: Wish) -> Flow[_txns.Claim]:
    """A claim under a fresh attempt id, on the session's etcd lease or the one granted last."""
    attempt = yield from FreshId()
    now = yield from Now()
    own = bid.lease_ids[-1] if bid.lease_ids else 0
    lease_id, ttl = (bid.shared.lease_id, bid.shared.granted) if bid.shared else (own, bid.granted)
    bid.settled()
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
            ttl=ttl,
            epoch=wish.epoch.number,
            period=wish.period,
        ),
        lease_id=lease_id,
        epoch_key=wish.epoch.key,
        epoch_value=wish.epoch.value,
        wait_lease=own,
    )
    return bid.ask


@contextmanager
def no_answer_before(bid: Bid, task: str) -> Generator[None]:
    """Whatever goes wrong in here is no answer to a claim that went unanswered before."""
    try:
        yield
    except OutcomeUnknown:
        raise
    except EtcdFenceError as error:
        if bid.doubtful:
            raise OutcomeUnknown(f"the claim of {task} may have been applied: {error}") from error
        bid.in_flight = False
        raise


def _settled_answer(bid: Bid, ask: _txns.Claim, pace: Pace) -> Flow[_txns.ClaimAnswer | None]:
    """Send the claim until it is answered, and seal it where an unanswered try could still land. None: etcd
    no longer knows the lease, so no try can land at all."""
    with no_answer_before(bid, ask.keys.task):
        answer = yield from answer_to(bid, ask, pace)
        if bid.doubtful and not isinstance(answer, _txns.Won | _txns.Ran | None):
            ran = yield from seal(ask, pace)
            if ran is not None:
                bid.in_flight = True
                return ran
            bid.settled()
    return answer


def answer_to(bid: Bid, ask: _txns.Claim, pace: Pace) -> Flow[_txns.ClaimAnswer | None]:
    """Send the claim until it is answered. One that was applied stays `in_flight` until somebody has taken up the
    tenure: an acquire that is given up in between has to end it."""
    while True:
        bid.in_flight = True
        try:
            reply = yield from _txns.claim(ask)
        except OutcomeUnknown as error:
            bid.doubtful = True
            yield from pace.again(error)
        except Unavailable as error:
            yield from pace.again(error)
        except LeaseNotFound as error:
            bid.in_flight = bid.doubtful = False
            if bid.shared is None:
                return None
            raise SessionLost(f"the session's etcd lease is gone; {ask.keys.task} was not claimed") from error
        else:
            answer = _txns.claim_answer(ask, reply)
            bid.in_flight = bid.doubtful or isinstance(answer, _txns.Won | _txns.Ran)
            return answer


def seal(ask: _txns.Claim, pace: Pace) -> Flow[_txns.Ran | None]:
    """Make sure that no try of this claim can land any more: None, or Ran where one had landed already."""
    while True:
        try:
            reply = yield from _txns.seal(ask)
        except (OutcomeUnknown, Unavailable) as error:
            yield from pace.again(error)
        else:
            return None if reply.succeeded else _txns.landed(ask, reply)


def tenure_of(bid: Bid, generation: int, answer: _txns.Won | _txns.Ran) -> _txns.Tenure:
    """The tenure that the present ask has become."""
    ask, shared, doubtful = bid.present, bid.shared, bid.doubtful or bid.loose
    return _txns.Tenure(
        keys=ask.keys,
        guard=Guard(ask.keys.owner, generation, ask.lease_id, ask.epoch_key, ask.epoch_value),
        attempt=ask.attempt.model_copy(update={"doubtful": True}) if doubtful else ask.attempt,
        epoch=ask.owner.epoch,
        granted=ask.owner.ttl,
        granted_at=shared.renewed_at if shared else bid.sent,
        cluster_id=answer.cluster_id,
        record=answer.record,
        shared=shared is not None,
    )


def _mark_lost(tenure: _txns.Tenure, last: KeyValue | None) -> Flow[None]:
    """Give the predecessor's attempt its end. Best effort: an attempt that is neither ended nor the last one
    is lost all the same, and the claim must not fail for it."""
    before = read(AttemptRecord, last) if last else None
    if last is None or not isinstance(before, AttemptRecord) or before.ended:
        return
    end = End(
        how="lost",
        at=tenure.attempt.started,
        write=tenure.attempt.attempt,
        generation=last.mod_revision,
        reason=f"superseded by generation {tenure.generation}",
    )
    # Nobody but its own worker knows whether that claim had an unanswered try; so it counts as one that had.
    ended = before.model_copy(update={"ended": end, "doubtful": True})
    try:
        yield from _txns.mark_lost(tenure.keys, before, last.mod_revision, ended)
    except EtcdFenceError:
        return


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


# --- keeping it --------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Renewed:
    """etcd renewed the lease and, asked afterwards, named this tenure as the owner. `sent` is the local clock
    at the sending of the renewal."""

    sent: Instant


RenewalOutcome = Renewed | Doubt | Loss


def renew(
    lanes: Sequence[Lane], spare: Sequence[Shared], epoch_key: bytes, known: Header, limit: float
) -> Flow[list[RenewalOutcome]]:
    """One round for all leases that are due: a keepalive, and then linearizable reads of the owner keys and
    the epoch; the outcomes are in the order of `lanes`, and then of `spare`, which are sessions for themselves.

    Both are needed. A keepalive does not go through raft (a deposed leader was seen to renew a lease that had
    been revoked) and knows nothing of the owner key. A keepalive answered with TTL 0 is no proof either: it
    only means that the lease was not renewed, and the owner key decides.
    A lane that is quiet is not renewed, only read. `known` is what had been seen of the store before this round.
    """
    sent = yield from Now()
    ids = [lane.tenure.guard.lease_id for lane in lanes if not lane.quiet] + [one.lease_id for one in spare]
    ttls = (yield from KeepAlive(tuple(dict.fromkeys(ids)), limit)).ttls if ids else {}
    suspects: list[Lane] = []
    remaining = iter(lanes)
    while batch := list(islice(remaining, READS_PER_REQUEST)):
        reads = (Range(epoch_key), *(Range(lane.tenure.guard.owner_key) for lane in batch))
        reply = yield from _txns.reading(*reads, timeout=limit)
        if reply.header.older_than(known):
            reply = yield from replace(_txns.reading(*reads, timeout=limit), elsewhere=True)
            if reply.header.older_than(known):
                return [Loss(LossReason.STORE_RESTORED) for _ in (*lanes, *spare)]
        epoch = reply.reads[0].first
        for lane, found in zip(batch, reply.reads[1:], strict=True):
            evidence = _txns.Evidence(reply.header.revision, found.first, epoch, None, None, None)
            suspects += [] if evidence.guard_holds(lane.tenure.guard) else [lane]
    losses = yield from _diagnose_all(suspects, limit)
    sessions: list[RenewalOutcome] = []
    for one in spare:
        sessions += [(yield from _session_renewal(one, ttls, sent, limit))]
    return [losses.get(id(lane)) or _renewal(lane, ttls, sent) for lane in lanes] + sessions


def _renewal(lane: Lane, ttls: dict[int, int], sent: Instant) -> RenewalOutcome:
    if lane.quiet:
        return Doubt.SILENT
    return Renewed(sent) if ttls.get(lane.tenure.guard.lease_id, 0) > 0 else Doubt.NOT_RENEWED


def _session_renewal(one: Shared, ttls: dict[int, int], sent: Instant, limit: float) -> Flow[RenewalOutcome]:
    """No owner key says whether a session lives; what it is for is to be claimed with, which asks etcd."""
    if ttls.get(one.lease_id, 0) > 0:
        return Renewed(sent)
    try:
        lease = yield from TimeToLive(one.lease_id, timeout=limit)
    except EtcdFenceError:
        return Doubt.NOT_RENEWED
    return Doubt.NOT_RENEWED if lease.granted_ttl > 0 else _ran_out(sent, one.renewed_at, one.granted)


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
    return _ran_out((yield from Now()), lane.renewed_at, tenure.granted)


def _ran_out(now: Instant, renewed_at: float, granted: int) -> Loss:
    early = _timing.surely_revoked(now.clock, renewed_at, granted)
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
