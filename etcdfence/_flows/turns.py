"""Waiting in line, and giving up a claim.

First come, first served: by the create revision of the entries under `queue/<task>/`. Each waiter watches the
entry ahead of it; the one at the head watches the owner key, or the reserve. Whoever has seen itself at the
head stays there, since new entries are younger; so a claim from the line only compares that its entry is still
the same.

An entry hangs on a lease that its waiter renews here, in the waiting loop itself: a waiter that is dead, or
blocked, leaves the line with that lease. A watch is a wake-up and no proof, and no entry is a proof either: who
owns the task is decided by the claim alone. In an acquire of its own the owner key hangs on the same etcd lease
later on; in a session the wait has a lease of its own, which ends with the wait.

Whatever was sent and not answered is settled before an attempt is left: by a seal, after which neither a claim
nor an entry of it can land.
"""

from __future__ import annotations

from dataclasses import replace

from etcdfence import _timing, _txns
from etcdfence._flow import Flow
from etcdfence._flows import leases, tasks
from etcdfence._flows.fencing import Lane
from etcdfence._flows.leases import Bid, Wish
from etcdfence._flows.pacing import Pace, pace_for, unanswered
from etcdfence._requests import KeepAlive, Now, Sleep, Wait, Waited
from etcdfence._txns import Claim, ClaimAnswer, Ending, Ran, Shut, Taken, Tenure, Won
from etcdfence.errors import EtcdFenceError, LeaseNotFound, OutcomeUnknown, OwnershipRefused, Unavailable

BROKEN_WATCH = 0.2  # seconds before asking again after a watch that broke
SHORTEST_PATIENCE = 1.0  # seconds for a first answer, however short the wait
KEEPALIVE_LIMIT = 5.0  # seconds
LEAVING = 2.0  # seconds
GIVEN_UP = Ending("released", "the claim had been given up")


def acquire(bid: Bid, wish: Wish, patience: float, until: float | None) -> Flow[Tenure | Taken]:
    """Claim, and where the task is taken get in line `until` a moment on the local clock (None: without limit).

    The first claim is given up when etcd is silent for `patience` seconds, or for the time there is to wait.
    Once in line, a silent etcd does not end the wait before its time.
    """
    pace = yield from _first_pace(patience, until)
    outcome = yield from leases.claim(bid, wish, pace)
    now = yield from Now()
    if (
        isinstance(outcome, Taken)
        and (until is None or now.clock < until)
        and not _for_ever(bid, wish, until, outcome)
    ):
        outcome = yield from wait(bid, wish, until)
    if isinstance(outcome, Taken):
        yield from _try_revoke(bid, (yield from pace_for(LEAVING)))
    return outcome


def _for_ever(bid: Bid, wish: Wish, until: float | None, taken: Taken) -> bool:
    """Whether we would wait for ourselves without limit."""
    bid.mine = until is None and taken.owner is not None and taken.owner.attempt in wish.ours()
    return bid.mine


def _first_pace(patience: float, until: float | None) -> Flow[Pace]:
    now = yield from Now()
    left = patience if until is None or until <= now.clock else max(until - now.clock, SHORTEST_PATIENCE)
    return Pace(now.clock + min(patience, left))


def wait(bid: Bid, wish: Wish, until: float | None) -> Flow[Tenure | Taken]:
    """Be in line until the task is ours, or the time is up; again from the end of the line where the own entry was
    lost."""
    outcome: leases.Outcome = wish
    while isinstance(outcome, Wish):
        pace = Pace(float("inf") if until is None else until)
        if not bid.lease_ids:
            yield from leases.grant(bid, outcome.ttl, pace)
        yield from leases.new_ask(bid, outcome)
        bid.period = min(bid.granted / 3, outcome.period or bid.granted)
        with leases.no_answer_before(bid, wish.keys.task):
            answer = yield from _in_line(bid, outcome, until, pace)
        outcome = yield from leases.outcome_of(bid, outcome, answer, pace)
    if isinstance(outcome, Tenure) and not outcome.shared:
        # The etcd lease of the place is that of the tenure now, and is to be as fresh as a tenure's.
        yield from _renew(bid, bid.sent + bid.period)
        outcome = replace(outcome, granted_at=bid.sent)
    return outcome


def _in_line(bid: Bid, wish: Wish, until: float | None, pace: Pace) -> Flow[ClaimAnswer | None]:
    """What became of one attempt in line: nothing of it can land any more, except for a tenure. Taken: its time is
    up. None: the lease of its entry is gone."""
    answer = yield from _enter(bid, pace)
    while isinstance(answer, Taken):
        pace.tries = 0
        moved = answer.place != bid.present.place
        ask = bid.ask = replace(bid.present, place=answer.place)
        now = yield from Now()
        left = None if until is None else until - now.clock
        if not answer.place:
            answer = yield from _enter(bid, pace)
        elif moved:  # made just now, or anew by a late try: who is ahead is still to be asked
            answer = yield from _look(ask, pace)
        elif answer.my_turn:
            answer = yield from leases.answer_to(bid, ask, pace)
        elif (left is not None and left <= 0) or _for_ever(bid, wish, until, answer):
            break
        elif (yield from _woken(bid, answer, left)) and not answer.ahead:
            answer = yield from leases.answer_to(bid, ask, pace)
        else:
            answer = yield from _look(ask, pace)
    if isinstance(answer, Won | Ran):
        return answer
    return (yield from _leave(bid, answer, pace))


def _enter(bid: Bid, pace: Pace) -> Flow[ClaimAnswer | None]:
    """Get in line. A lost reply is answered by sending the same again: the entry is found. None: the lease that it
    is to hang on is gone."""
    while True:
        bid.in_flight = True
        try:
            reply = yield from _txns.enter(bid.present)
        except OutcomeUnknown as error:
            bid.loose = True
            yield from pace.again(unanswered(error))
        except Unavailable as error:
            yield from pace.again(error)
        except LeaseNotFound:
            return None
        else:
            bid.in_flight = bid.loose or bid.doubtful
            return _txns.stands(bid.present, reply)


def _look(ask: Claim, pace: Pace) -> Flow[ClaimAnswer]:
    while True:
        try:
            return _txns.stands(ask, (yield from _txns.reading(*_txns.standing_of(ask))))
        except (OutcomeUnknown, Unavailable) as error:
            yield from pace.again(unanswered(error))


def _woken(bid: Bid, taken: Taken, left: float | None) -> Flow[bool]:
    """Wait for the one key in the way, and at most until the own lease is to be renewed. False: look again."""
    now = yield from Now()
    due = bid.sent + bid.period
    pause = max(due - now.clock, _timing.retry_delay(0, bid.granted))
    key = taken.blocking(bid.present.keys)
    try:
        word = yield from Wait(key, taken.revision + 1, pause if left is None else min(pause, left))
    except (Unavailable, OutcomeUnknown):
        word = Waited.TIMED_OUT
        yield from Sleep(BROKEN_WATCH)
    yield from _renew(bid, due)
    return word is Waited.WOKEN


def _renew(bid: Bid, due: float) -> Flow[None]:
    """Keep the lease that the entry hangs on. Whether that worked shows when the entry is looked at."""
    sent = yield from Now()
    if sent.clock < due:
        return
    lease_id = bid.lease_ids[-1]
    try:
        reply = yield from KeepAlive((lease_id,), min(KEEPALIVE_LIMIT, bid.granted / 3))
    except (Unavailable, OutcomeUnknown):
        return
    if reply.ttls.get(lease_id, 0) > 0:
        bid.sent = sent.clock


# --- giving up ---------------------------------------------------------------------------------------------


def _leave(bid: Bid, answer: ClaimAnswer | None, pace: Pace) -> Flow[ClaimAnswer | None]:
    """Leave the line for another reason than owning. What is only to be reported does not wait for an etcd that is
    silent; the caller withdraws what is left."""
    reported = isinstance(answer, Taken | Shut)
    try:
        ran = yield from _settle(bid, answer, (yield from pace_for(LEAVING)) if reported else pace)
    except (OutcomeUnknown, Unavailable):
        if bid.doubtful or not reported:
            raise
        return answer
    return ran or answer


def _settle(bid: Bid, answer: ClaimAnswer | None, pace: Pace) -> Flow[Ran | None]:
    """Nothing of the present attempt can land after this, except for a tenure that had."""
    dead = answer is None and bid.shared is None  # nothing can be put on the one lease of all its tries
    if (bid.doubtful or bid.loose) and not dead:
        ran = yield from leases.seal(bid.present, pace)
        if ran is not None:
            bid.in_flight = True
            return ran
    elif answer is not None:
        yield from _left(bid.present, pace)
    bid.settled()
    return None


def _left(ask: Claim, pace: Pace) -> Flow[None]:
    while ask.place:
        try:
            yield from _txns.leave(ask)
        except (OutcomeUnknown, Unavailable) as error:
            yield from pace.again(unanswered(error))
        else:
            return


def _try_revoke(bid: Bid, pace: Pace) -> Flow[None]:
    """What is not revoked stays in the bid, for the caller to withdraw."""
    try:
        yield from leases.revoke(bid, pace)
    except EtcdFenceError:
        return


def withdraw(bid: Bid, pace: Pace) -> Flow[None]:
    """Undo an acquire that was given up: make sure that nothing of it can land, take it out of the line, and give
    back its leases (which ends a tenure that had begun, and kills a claim on its way, since a put on a lease that
    is gone fails). A tenure that had begun in a session is ended. What stays undone outside of a session ends with
    the lease's TTL: nobody renews it."""
    if bid.ask is not None:
        if bid.in_flight or bid.doubtful or bid.loose:
            ran = yield from leases.seal(bid.ask, pace)
            if ran is not None and ran.generation is not None and bid.shared is not None:
                yield from _end(bid, ran.generation, ran, pace)
        else:
            yield from _left(bid.ask, pace)
        bid.settled()
    yield from leases.revoke(bid, pace)


def _end(bid: Bid, generation: int, ran: Ran, pace: Pace) -> Flow[None]:
    tenure = leases.tenure_of(bid, generation, ran)
    try:
        yield from tasks.end(Lane(tenure, tenure.granted_at), GIVEN_UP, pace)
    except OwnershipRefused:
        return  # it had ended by itself
