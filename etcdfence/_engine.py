"""What a coordinator and its leases share, in both colours: the leases that are held, their renewal, and the end.

Renewal runs in a thread and closing must work wherever it is called, so both use the synchronous host. How the
calls of users are run is added by each colour.
"""

from __future__ import annotations

import atexit
import logging
import queue
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from enum import Enum
from typing import TypeVar

from etcdfence._flow import Caller, Flow, drive
from etcdfence._flows import fencing, leases, renewals, tasks, turns
from etcdfence._flows.fencing import Lane
from etcdfence._flows.pacing import Pace
from etcdfence._host import Bounded, Clock, Host
from etcdfence._keys import Keys
from etcdfence._renewal import Belief, Confirmed, Outcome, Renewer
from etcdfence._requests import Header
from etcdfence._timing import Rhythm
from etcdfence._turn import Turn
from etcdfence._txns import Ending, Tenure
from etcdfence.errors import Closed, EtcdFenceError, LeaseReleased, OwnershipRefused, SessionLost
from etcdfence.model import Doubt, Loss, LossReason, Periods

log = logging.getLogger("etcdfence")
log.addHandler(logging.NullHandler())  # a library prints nothing unless its user asks for it
T = TypeVar("T")
AGAIN = 0.3  # seconds between tries to give something back
EXIT_SECONDS = 1.5  # for giving back when the interpreter ends, or a block is left by an exception
# After these nothing of a session is ours any more, though its owner keys may hang on its living etcd lease.
PUT_OUT = (LossReason.EPOCH_RAISED, LossReason.STORE_RESTORED)
SECOND_OPINION = 2.0  # seconds for asking again after a reply from an older store


class GaveBack(Enum):
    YES = "etcd has revoked the lease"
    NO = "etcd did not answer; the lease ends with its TTL"


def gave_back(bid: leases.Bid) -> GaveBack:
    return GaveBack.NO if bid.lease_ids else GaveBack.YES


@contextmanager
def noted(whose: str) -> Iterator[None]:
    """A lease that could not be revoked is no error of the caller's."""
    try:
        yield
    except EtcdFenceError as error:
        log.info("the etcd lease of %s ends with its TTL: %s", whose, error)


_engines: weakref.WeakSet[Engine] = weakref.WeakSet()


@atexit.register
def _close_all() -> None:
    """A process that ends normally gives its leases back; its threads are gone, so nobody works under them."""
    for engine in list(_engines):
        if engine.host.forked:
            continue
        try:
            engine.close(engine.host.now() + EXIT_SECONDS)
        except Exception:  # the others must be closed all the same
            log.exception("a coordinator could not be closed")


class SharedLease:
    """The etcd lease of a session, renewed for itself whether anything hangs on it or not."""

    def __init__(self, lease_id: int, ttl: int | Periods, granted: int, granted_at: float, clock: Clock) -> None:
        self.lease_id, self.ttl, self.granted = lease_id, ttl, granted
        self.belief = Belief(f"session {lease_id:x}", Rhythm.of(ttl, granted), granted_at, clock.now)
        self.closed = self.finished = self.dropped = False

    def drop(self) -> None:
        """Called by a finaliser: nobody can acquire in this session any more. What is held in it goes on."""
        self.dropped = True

    def shared(self) -> leases.Shared:
        return leases.Shared(self.lease_id, self.granted, self.belief.renewed_at)


@dataclass(frozen=True, slots=True)
class Terms:
    """What was agreed when a lease was acquired, beside the wish for it."""

    ttl: int | Periods
    max_silence: float | None = None
    session: SharedLease | None = None


class Holding:
    """One tenure in this process: its lane, whose turn it is there, and what is believed of it. `store` counts the
    stores that this process has seen follow each other: the tenure belongs to that one."""

    def __init__(self, tenure: Tenure, terms: Terms, store: int, clock: Clock) -> None:
        self.tenure, self.store, self.session = tenure, store, terms.session
        self.lane = Lane(tenure, tenure.granted_at)
        self.turn = Turn()
        self.belief = Belief(
            f"{tenure.task} (generation {tenure.generation})",
            Rhythm.of(terms.ttl, tenure.granted),
            tenure.granted_at,
            clock.now,
            terms.max_silence,
        )
        self.given_back = False  # nothing is left to do at etcd
        self.leaving = False  # a thread is giving it back


class Engine:
    """`patience` (seconds) is how long one call keeps trying."""

    def __init__(self, host: Host, keys: Keys, patience: float, on_close: Callable[[], None]) -> None:
        self.host, self.keys, self.patience, self._on_close = host, keys, patience, on_close
        self.closing = self.closed = False
        self._lock = threading.RLock()  # a signal handler may call us in the middle of a call
        self._holdings: dict[Belief, Holding] = {}
        self._sessions: dict[Belief, SharedLease] = {}
        self._dropped: queue.SimpleQueue[Holding] = queue.SimpleQueue()
        self.bids: list[leases.Bid] = []
        self.acquiring: list[object] = []  # whoever is at it: threads by their number, or tasks
        self._acquired_lock = threading.RLock()
        self.acquired = threading.Condition(self._acquired_lock)
        self._background: list[threading.Thread] = []
        self._one_closes = threading.RLock()  # a signal handler may close in the middle of closing
        self.renewer = Renewer(self._renew, host.clock)
        _engines.add(self)

    def require_usable(self) -> None:
        self.host.require_usable()

    def require_open(self) -> None:
        self.require_usable()
        if self.closing:
            raise Closed("this coordinator is closed")

    def drive(self, flow: Flow[T], caller: Caller) -> T:
        """Run a flow, and look into it when a reply came from an older store than the one that was known."""
        try:
            return drive(flow, caller)
        finally:
            self.look_back()

    def look_back(self) -> None:
        regressed = self.host.regressed
        if regressed is not None:
            self._ask_again(*regressed)

    def look_back_in_background(self) -> None:
        self._in_background("etcdfence-look-back", self.look_back)

    def _ask_again(self, known: Header, store: int) -> None:
        try:
            bounded = Bounded(self.host, self.host.now() + SECOND_OPINION)
            back = drive(renewals.went_back(self.keys.epoch, known, SECOND_OPINION), bounded)
        except EtcdFenceError as error:
            log.warning("a reply came from an older store than before; asking again failed: %s", error)
            return
        if back:
            self._begin_anew(store)
        else:
            self.host.regressed = None

    def _begin_anew(self, store: int) -> None:
        """Another store has taken the place of this one: every lease of it is over."""
        log.warning("the store went back in time: it was restored, or replaced")
        for holding in self.holdings():
            if holding.store <= store:
                holding.belief.lose(Loss(LossReason.STORE_RESTORED))
        self.host.forget_store(store)

    # --- what is held --------------------------------------------------------------------------------------

    def enter(self, holding: Holding) -> None:
        with self._lock:
            self._holdings[holding.belief] = holding
        self.renewer.add(holding.belief)

    def open_session(self, bid: leases.Bid, ttl: int | Periods) -> SharedLease:
        """Keep the etcd lease that was granted last. EtcdFenceError where no thread can be started to renew it."""
        session = SharedLease(bid.lease_ids[-1], ttl, bid.granted, bid.sent, self.host.clock)
        try:
            self.renewer.add(session.belief)
        except RuntimeError as error:
            raise EtcdFenceError(f"a session cannot be kept: {error}") from error
        with self._lock:
            self._sessions[session.belief] = session
        bid.lease_ids.remove(session.lease_id)
        return session

    def leave(self, holding: Holding) -> None:
        self.renewer.remove(holding.belief)
        with self._lock:
            self._holdings.pop(holding.belief, None)

    def drop(self, holding: Holding) -> None:
        """Called by a finaliser, which runs anywhere and at any time: it only leaves a note. Renewal ends now, as
        that of any released lease; the rest is done when somebody next looks at the holdings."""
        if not (holding.given_back or holding.leaving):
            holding.belief.released = True
            self._dropped.put(holding)

    def _put_away(self, holding: Holding) -> None:
        if holding.belief.loss is None:
            log.warning("a lease on %s was dropped without release()", holding.tenure.task)
        self.leave(holding)
        if holding.session is not None:
            self.give_back_in_background(holding)

    def _drain(self) -> Iterator[Holding]:
        for _ in range(self._dropped.qsize()):  # what is put back meanwhile is for the next time
            with suppress(queue.Empty):
                yield self._dropped.get_nowait()

    def holdings(self) -> list[Holding]:
        for holding in self._drain():
            try:
                self._put_away(holding)
            except BaseException:  # interrupted: somebody has to come back to it
                self._dropped.put(holding)
                raise
        with self._lock:
            held = list(self._holdings.values())
            sessions = list(self._sessions.values())
        for session in sessions:
            mine = [holding for holding in held if holding.session is session]
            losses = [holding.belief.loss for holding in mine]
            over = next((loss for loss in losses if loss and loss.reason in PUT_OUT), None)
            if over is not None or (session.dropped and not mine):
                self._end_session_in_background(session, over)
        return held

    def attempts(self) -> tuple[str, ...]:
        """The attempts that own something here, as far as is known, and those that are about to."""
        bids = [bid.ask.attempt.attempt for bid in list(self.bids) if bid.ask is not None]
        return (*bids, *(one.tenure.attempt.attempt for one in self.holdings() if not one.belief.over))

    def require_live(self, holding: Holding) -> None:
        """A handle that was given back is refused here, or one whose store is known to be another. Whatever else
        this process believes, etcd is asked."""
        self.require_usable()
        self.require_same_store(holding)
        tenure, belief = holding.tenure, holding.belief
        if belief.released and belief.loss is not None:
            raise fencing.ownership_refused(tenure, belief.loss)
        if belief.released:
            raise LeaseReleased(f"generation {tenure.generation} of {tenure.task} was given back by this process")

    def require_same_store(self, holding: Holding) -> None:
        tenure, belief = holding.tenure, holding.belief
        if belief.loss is not None and belief.loss.reason in (LossReason.CLOSED, LossReason.STORE_RESTORED):
            raise fencing.ownership_refused(tenure, belief.loss)

    @contextmanager
    def committing(self, holding: Holding, even_released: bool) -> Iterator[None]:
        """What stands around a flow of a tenure's lane: may it begin, and what does its end say of the lease. Once
        the tenure has ended by our own doing, the handle is released before the next in line has its turn."""
        if even_released:
            self.require_same_store(holding)
        else:
            self.require_live(holding)
        holding.lane.over = holding.lane.over or holding.belief.loss is not None
        try:
            yield
            holding.belief.progress()
        except OwnershipRefused as refused:
            if holding.lane.ended is None:
                holding.belief.lose(refused.loss)
            raise
        finally:
            if holding.lane.ended is not None:
                holding.belief.release()
                self._ended_unheard(holding)

    def _ended_unheard(self, holding: Holding) -> None:
        """An ending of ours that was found out by another call than the one that asked for it: nobody else is
        about to give back the etcd lease."""
        if not (holding.belief.ending or holding.given_back or holding.leaving):
            self.give_back_in_background(holding)

    def acquired_by(self, me: object) -> None:
        if me in self.acquiring:
            self.acquiring.remove(me)
        with self._acquired_lock:  # not the condition: interrupted on its way out it would stay locked
            self.acquired.notify_all()

    def give_back_in_background(self, holding: Holding) -> None:
        """For a release that was itself cancelled: its renewal has stopped, and what is left ends with the TTL at
        the latest."""

        def give_back() -> None:
            until = self.host.now() + holding.tenure.granted
            self._give_back(holding, until, patient=True)
            while not holding.given_back and holding.session is not None and self.host.now() < until:
                self.host.clock.sleep(AGAIN, threading.Event())
                self._give_back(holding, until, patient=True)
            if holding.session is not None and not holding.given_back:
                self._end_session(holding.session, f"{holding.tenure.task} could not be released")

        self.leave(holding)
        if not (holding.given_back or holding.leaving):
            holding.leaving = True
            if not self._in_background("etcdfence-release", give_back) and holding.session is not None:
                holding.leaving = False
                self._dropped.put(holding)  # to be tried again in the next round

    def withdraw(
        self, bid: leases.Bid, what: str, ttl: int, session: SharedLease | None = None, *, here: bool
    ) -> None:
        """Undo what an acquire left behind. Where etcd does not answer, or not `here`, go on in the background for
        as long as the leases can live; after that nothing of the bid can land any more. In a session it can, so
        one whose claim could not be settled by then is ended."""
        if not bid.open or self.host.forked:
            return

        def undo(seconds: float) -> None:
            try:
                self.finish(lambda pace: turns.withdraw(bid, pace), seconds)
            except EtcdFenceError as error:
                log.info("%s was given up, and is not undone yet: %s", what, error)

        def undo_in_the_end() -> None:
            undo(ttl)
            if session is not None and bid.present_is_open:
                self._end_session(session, f"a claim of {what} could not be settled")

        try:
            if here and not (bid.doubtful or bid.unanswered):
                undo(1.0)
        finally:
            if bid.open:
                self._in_background("etcdfence-withdraw", undo_in_the_end)

    def _in_background(self, name: str, action: Callable[[], None]) -> bool:
        """Something that is owed to etcd and that nobody waits for, except the end of the coordinator. False
        where no thread can be started for it."""
        thread = threading.Thread(target=action, name=name, daemon=True)
        try:
            thread.start()
        except RuntimeError as error:  # the interpreter is ending, or the machine is out of threads
            log.warning("%s cannot be done now: %s", name, error)
            return False
        with self._lock:
            self._background = [one for one in (*self._background, thread) if one.is_alive()]
        return True

    # --- giving back ---------------------------------------------------------------------------------------

    def revoke(self, tenure: Tenure, seconds: float) -> GaveBack:
        """Give back the etcd lease; only this tenure's owner key hangs on it, so this frees the task even where
        the release itself went unheard. Failing that the lease runs out by itself. A session's is not touched."""
        if tenure.shared:
            return GaveBack.NO
        bid = leases.Bid(lease_ids=[tenure.guard.lease_id])
        with noted(tenure.task):
            if seconds > 0:
                self.finish(lambda pace: leases.revoke(bid, pace), seconds)
        return gave_back(bid)

    def close_session(self, session: SharedLease, until: float) -> None:
        """End its leases as closed and give its etcd lease back, until then (local clock). Nobody renews it
        from the beginning of this, so what an interrupt leaves behind ends with the TTL; and it can be called
        again."""
        if session.finished or self.host.forked:
            return
        session.closed = True
        session.belief.release()
        self.renewer.remove(session.belief)
        held = [one for one in self.holdings() if one.session is session and not one.given_back]
        for holding in held:
            holding.belief.lose(Loss(LossReason.CLOSED))
        for holding in held:
            self._give_back(holding, until)
            self.leave(holding)
        self._revoke_session(session, until)

    def _revoke_session(self, session: SharedLease, until: float) -> None:
        session.belief.release()
        self.renewer.remove(session.belief)
        bid = leases.Bid(lease_ids=[session.lease_id])
        with noted(session.belief.name):
            self.finish(lambda pace: leases.revoke(bid, pace), max(0.0, until - self.host.now()))
        session.finished = True
        with self._lock:
            self._sessions.pop(session.belief, None)

    def require_session(self, session: SharedLease) -> None:
        """SessionLost or Closed where nothing can be acquired in it any more."""
        loss = session.belief.loss
        if loss is not None:
            raise SessionLost(f"this session is over ({loss.reason})")
        if session.closed:
            raise Closed("this session is closed; its leases were given back")

    def _end_session_in_background(self, session: SharedLease, loss: Loss | None) -> None:
        if not session.closed:
            session.closed = True
            if loss is not None:
                session.belief.lose(loss)
            session.belief.release()
            self.renewer.remove(session.belief)  # whatever comes of the rest, it runs out
            self._in_background(
                "etcdfence-session", lambda: self._revoke_session(session, self.host.now() + session.granted)
            )

    def _end_session(self, session: SharedLease, why: str) -> None:
        """What hangs on it and nobody holds must not live on with it."""
        log.warning("%s is ended: %s", session.belief.name, why)
        self.close_session(session, self.host.now() + session.granted)

    def close(self, until: float) -> None:
        """End every lease as closed, and give back what can be given back until then (local clock).

        Interrupted by Ctrl-C it can be called again, and is when the interpreter ends.
        """
        if not self._one_closes.acquire(timeout=max(0.0, until - self.host.now())):
            return  # another thread is at it
        try:
            if self.closed:
                return
            self.closing = True
            self.host.interrupt()
            self._await_acquires(until)
            for holding in self._all_closed():
                self._give_back(holding, until)
            for session in list(self._sessions.values()):
                self.close_session(session, until)
            for thread in self._background:
                thread.join(max(0.0, until - self.host.now()))
            self.finally_close()
        finally:
            self._one_closes.release()

    def finally_close(self) -> None:
        if not self.closed:
            self.renewer.close()
            self.host.close()
            self._on_close()
            self.closed = True

    def _await_acquires(self, until: float) -> None:
        """For half of the time at most: the other half is for giving back."""
        me, left = threading.get_ident(), (until - self.host.now()) / 2
        with self.acquired:
            self.acquired.wait_for(lambda: all(one == me for one in list(self.acquiring)), max(0.0, left))

    def _all_closed(self) -> list[Holding]:
        held = [holding for holding in self.holdings() if not (self.closed or holding.given_back)]
        for holding in held:
            holding.belief.lose(Loss(LossReason.CLOSED))
        return held

    def _give_back(self, holding: Holding, until: float, reason: str = "closed", *, patient: bool = False) -> None:
        """`patient`: a write of this lease that is under way may take its time."""
        left = until - self.host.now()
        if left <= 0:
            return
        try:
            ending = Ending("released", reason)
            holding.turn.run(
                left if patient else min(left, 1.0),
                lambda: self.finish(lambda pace: tasks.end(holding.lane, ending, pace), left),
            )
        except OwnershipRefused as refused:  # nothing of it is left at etcd but its lease; and see PUT_OUT
            holding.given_back = True
            holding.belief.lose(refused.loss)
            if holding.session is not None and refused.loss.reason in PUT_OUT:
                self._end_session_in_background(holding.session, refused.loss)
        except EtcdFenceError as error:
            log.info("%s could not be released: %s", holding.tenure.task, error)
        outcome = self.revoke(holding.tenure, until - self.host.now())
        holding.given_back |= outcome is GaveBack.YES or holding.lane.ended is not None

    def _give_back_silent(self, holding: Holding) -> None:
        """A lease whose work reports no progress, in a session that lives on: etcd is told first, and the holder
        when it is true."""

        def give_back() -> None:
            try:
                until = self.host.now() + holding.tenure.granted
                self._give_back(holding, until, "no progress was reported", patient=True)
                if holding.lane.ended is not None:
                    holding.belief.lose(Loss(LossReason.SILENT))
                if holding.given_back:
                    self.leave(holding)
            finally:
                holding.leaving = holding.belief.ending = False

        if not (holding.leaving or holding.belief.ending):
            holding.leaving = holding.belief.ending = True
            if not self._in_background("etcdfence-silent", give_back):
                holding.leaving = holding.belief.ending = False

    def finish(self, flow: Callable[[Pace], Flow[T]], seconds: float) -> T:
        """Run a flow that gives something back: it goes on while everything else is being ended."""
        pace = Pace(self.host.now() + seconds)
        return drive(flow(pace), Bounded(self.host, pace.deadline, closing=True))

    # --- renewal -------------------------------------------------------------------------------------------

    def _renew(self, beliefs: Sequence[Belief], limit: float) -> Sequence[Outcome]:
        self.holdings()  # puts away what was dropped meanwhile
        with self._lock:
            holdings = [self._holdings[belief] for belief in beliefs if belief in self._holdings]
            sessions = [self._sessions[belief] for belief in beliefs if belief in self._sessions]
        for holding in holdings:
            holding.lane.quiet = holding.belief.silent
            if holding.lane.quiet and holding.session is not None:
                self._give_back_silent(holding)
        lanes, spare = [holding.lane for holding in holdings], [session.shared() for session in sessions]
        found = self.drive(renewals.renew(lanes, spare, self.keys.epoch, self.host.seen, limit), self.host)
        asked = [holding.belief for holding in holdings] + [session.belief for session in sessions]
        outcomes = dict(zip(asked, map(_outcome, found), strict=True))
        for holding in holdings:
            outcome = outcomes[holding.belief]
            if isinstance(outcome, Confirmed):
                holding.lane.renewed_at = outcome.clock
        return [outcomes.get(belief, Doubt.NOT_RENEWED) for belief in beliefs]


def _outcome(found: renewals.RenewalOutcome) -> Outcome:
    return Confirmed(found.sent.clock, found.sent.wall) if isinstance(found, renewals.Renewed) else found
