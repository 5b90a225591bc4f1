"""Getting, keeping and checking ownership.

A claim whose answer was lost is the dangerous one: it may land long after its caller has turned away. So
nothing definite is said of it before it has been settled by a committed transaction: the same claim again, or
a seal that creates its attempt key. A late claim then fails on that key.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Generator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, cast

from etcdfence import _txns
from etcdfence._flow import Flow
from etcdfence._flows.pacing import Pace, unanswered
from etcdfence._keys import TaskKeys
from etcdfence._records import AttemptRecord, End, EpochRecord, OwnerRecord, Unreadable, read
from etcdfence._requests import (
    FreshId,
    FreshLeaseId,
    Grant,
    KeyValue,
    Now,
    Revoke,
    Sleep,
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
from etcdfence.model import Guard, Loss, LossReason

if TYPE_CHECKING:
    pass

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
    seconds. `ours` asks for the attempts that the same coordinator holds: what it owns it does not wait for
    without limit."""

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
    mine        what was asked for was owned by the same coordinator, and was not waited for
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
    mine: bool = False

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
