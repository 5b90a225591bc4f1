"""The Coordinator for threads: a thin shell that checks arguments and runs flows."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from types import TracebackType
from typing import Self

from etcdfence import _timing
from etcdfence._desk import CLOSE_SECONDS, OVERTIME, Desk, Identity
from etcdfence._engine import EXIT_SECONDS, Terms
from etcdfence._flow import Caller
from etcdfence._flows import fencing, leases, tasks, turns, watching
from etcdfence._flows.pacing import Pace
from etcdfence._host import Bounded, Stoppable
from etcdfence._keys import TaskKeys
from etcdfence._leading import Election
from etcdfence._requests import Members
from etcdfence._sync.engine import SyncEngine
from etcdfence._sync.leadership import Leadership
from etcdfence._sync.lease import Lease
from etcdfence._sync.session import Session
from etcdfence._txns import Tenure
from etcdfence.errors import EtcdFenceError
from etcdfence.model import (
    Absent,
    Committed,
    Doubt,
    Entry,
    Guard,
    Loss,
    MemberStatus,
    Observation,
    Periods,
    TaskDescription,
    TaskName,
    Waiter,
)


class Coordinator(Desk):
    """One namespace of one etcd. Made by `etcdfence.connect`; may be used from any thread; close it, or use it
    as a context manager. `patience` (seconds) is how long a call keeps trying before it raises Unavailable or
    OutcomeUnknown."""

    _engine: SyncEngine

    def __init__(self, engine: SyncEngine, epoch: leases.Epoch, identity: Identity) -> None:
        super().__init__(engine, epoch, identity)

    # --- owning --------------------------------------------------------------------------------------------

    def try_acquire(
        self,
        task: TaskName,
        *,
        ttl: int | Periods = 15,
        holder: str | None = None,
        max_silence: float | None = None,
        on_lost: Callable[[Lease, Loss], None] | None = None,
        on_unverified: Callable[[Lease, Doubt], None] | None = None,
    ) -> Lease:
        """Own the task now, or raise Held (somebody does, and who), or TaskClosed (it is finished).

        `ttl` is in whole seconds: how long after the last sign of life the task becomes free; Periods say more.
        `max_silence`: seconds without `progress()` or a write after which the lease is not renewed any more.
        `on_lost` and `on_unverified` are called in a thread of their own. OutcomeUnknown: the claim may have
        landed; nobody renews it, so it ends with its TTL.
        """
        return self._acquire(task, 0.0, holder, Terms(ttl, max_silence), on_lost, on_unverified)

    def acquire(
        self,
        task: TaskName,
        *,
        ttl: int | Periods = 15,
        wait: float | None = None,
        holder: str | None = None,
        max_silence: float | None = None,
        on_lost: Callable[[Lease, Loss], None] | None = None,
        on_unverified: Callable[[Lease, Doubt], None] | None = None,
    ) -> Lease:
        """Own the task, waiting in line up to `wait` seconds (None: without limit); then Held.

        First come, first served. While in line an etcd that is silent does not end the wait before its time. What
        this coordinator owns itself it does not wait for without limit: that is Held (`mine`), whoever asks.
        """
        return self._acquire(task, wait, holder, Terms(ttl, max_silence), on_lost, on_unverified)

    def session(self, ttl: int | Periods = 15) -> Session:
        """One etcd lease for many tasks: `acquire` and `try_acquire` of the session cost one round trip, and so
        does a release. Each lease is lost and released for itself; closing the session gives all of them back."""
        self._engine.require_open()
        seconds = _timing.checked_ttl(ttl)

        def opened() -> Session:
            bid = leases.Bid()
            try:
                self._engine.run(lambda pace: leases.grant(bid, seconds, pace))
                return Session(self, self._engine, self._engine.open_session(bid, ttl))
            finally:
                self._engine.withdraw(bid, "a session", seconds, here=True)

        return self._engine.acquire(opened)

    def _acquire(
        self,
        task: TaskName,
        wait: float | None,
        holder: str | None,
        terms: Terms,
        on_lost: Callable[[Lease, Loss], None] | None,
        on_unverified: Callable[[Lease, Doubt], None] | None,
        stopped: Callable[[], bool] | None = None,
    ) -> Lease:
        wish = self._wish(task, holder, terms, on_lost=on_lost, on_unverified=on_unverified)
        seconds = None if wait is None else _timing.checked_seconds(wait, "wait")

        def lease() -> Lease:
            until, bid = self._until(seconds), self._bid(terms)
            caller = self._caller(until, self._require_wanted(terms, stopped))
            try:
                flow = turns.acquire(bid, wish, self._engine.patience, until)
                outcome = self._engine.drive(flow, caller)
                owned = self._lease(self._won(bid, wish, outcome, terms), terms, on_lost, on_unverified)
                bid.taken_up(owned._tenure)
            except BaseException:
                self._engine.withdraw(bid, wish.keys.task, wish.ttl, terms.session, here=True)
                raise
            finally:
                self._engine.bids.remove(bid)
            try:
                self._engine.withdraw(bid, wish.keys.task, wish.ttl, terms.session, here=True)  # what is left over
                self._kept(owned._holding)
            except BaseException:
                self._engine.give_back_in_background(owned._holding)
                raise
            return owned

        return self._engine.acquire(lease)

    def _lease(
        self,
        tenure: Tenure,
        terms: Terms,
        on_lost: Callable[[Lease, Loss], None] | None,
        on_unverified: Callable[[Lease, Doubt], None] | None,
    ) -> Lease:
        try:
            return Lease(self._engine, tenure, terms, on_lost, on_unverified)
        except RuntimeError as error:  # no thread can be started that would renew it
            raise EtcdFenceError(f"{tenure.task} cannot be kept: {error}") from error

    def _caller(self, until: float | None, require_wanted: Callable[[], None] | None = None) -> Caller:
        """Requests do not go on for long after a wait is over, however silent etcd is."""
        host = self._engine.host
        timely = until is not None and until > host.now()
        caller: Caller = Bounded(host, until + OVERTIME) if until is not None and timely else host
        return Stoppable(caller, host.now, require_wanted) if require_wanted else caller

    def lead(
        self,
        name: str,
        *,
        on_started: Callable[[Lease, threading.Event], object],
        on_stopped: Callable[[], object] | None = None,
        on_new_leader: Callable[[str | None], object] | None = None,
        identity: str | None = None,
        lease_duration: int = 15,
        renew_deadline: float = 10.0,
        retry_period: float = 2.0,
        drain: float | None = None,
    ) -> Leadership:
        """Take part in the election of a leader; `run()` of what is returned does it. The periods (seconds) are
        those of Kubernetes' leader election, see Periods.

        on_started     does the work, in a thread of its own: called with the lease and an event that is set when
                       the work has to stop. It may return and leave the leadership to whatever it has started
        on_stopped     called when the work has stopped
        on_new_leader  called with the holder's identity (or None) whenever somebody else leads, or nobody
        drain          seconds that the work may take to stop; after that the leadership is not released but left
                       to run out, since nobody can say that the work has stopped. None: no limit
        """
        periods = Periods(lease_duration, renew_deadline, retry_period)
        callbacks = {"on_started": on_started, "on_stopped": on_stopped, "on_new_leader": on_new_leader}
        plan = self._plan(name, identity, periods, drain, (), **callbacks)
        election = Election(plan, on_started, on_stopped, on_new_leader)
        return Leadership(self, election)

    # --- writing for somebody else --------------------------------------------------------------------------

    def put(
        self, task: TaskName, guard: Guard, key: str, value: bytes | str, *, expect: int | Absent | None = None
    ) -> Committed:
        """Write a data key under the guard of a lease that another process holds (see `guard`). Refused by etcd
        once that lease is over. Such a write has no marker: a lost answer is settled by the key's own revision,
        or stays OutcomeUnknown."""
        return self._engine.run(self._write_with(guard, task, key, value, expect))

    # --- looking -------------------------------------------------------------------------------------------

    def describe(self, task: TaskName) -> TaskDescription:
        """Everything the store says of one task, at one revision; NotFound where it says nothing."""
        self._engine.require_open()
        keys = self._engine.keys.task(task)
        return self._engine.run(lambda pace: tasks.describe(self._engine.keys, keys, pace))

    def tasks(self, *, owned_only: bool = False) -> list[TaskDescription]:
        """All tasks of the namespace by name, without attempts and history; `owned_only`: those with an owner."""
        self._engine.require_open()
        return self._engine.run(lambda pace: tasks.tasks(self._engine.keys, pace, owned_only=owned_only))

    def waiters(self) -> list[Waiter]:
        """Everybody who is in line for a task of the namespace, by task and position."""
        self._engine.require_open()
        return self._engine.run(lambda pace: tasks.waiters(self._engine.keys, pace))

    def observe(self, task: TaskName | None = None) -> Iterator[Observation]:
        """Who owns the task, now and after every change; without a task, of all tasks that have an owner. Takes no
        part in anything. It goes on through outages and compactions until the iterator is closed (or the
        coordinator: Closed); what changes faster than it looks is told as one change."""
        self._engine.require_open()
        return self._observed(self._engine.keys.task(task) if task is not None else None, None)

    def _observed(self, task: TaskKeys | None, stopped: Callable[[], None] | None) -> Iterator[Observation]:
        keys, caller = self._engine.keys, self._caller(None, stopped)
        seen = self._engine.run(lambda pace: watching.look(keys, task, pace))
        yield from watching.first(seen, task)
        while True:
            found = self._engine.drive(watching.next_look(keys, task, seen, Pace(float("inf"))), caller)
            yield from found.since(seen)
            seen = found

    def get(self, key: str) -> Entry:
        """A data key's value and revision (None and ABSENT where it is not there), read linearizably."""
        self._engine.require_open()
        keys = self._engine.keys.data(key), self._engine.keys.provenance(key)
        return self._engine.run(lambda pace: fencing.get(key, *keys, pace))

    def members(self) -> Sequence[MemberStatus]:
        """What each endpoint says of itself; one that does not answer is listed with its error."""
        self._engine.require_open()
        return self._engine.host.call(Members())

    # --- ending --------------------------------------------------------------------------------------------

    def close(self, timeout: float = CLOSE_SECONDS) -> None:
        """Give back every lease (`loss.reason` closed), stop renewing and close the connections.

        Takes at most about `timeout` seconds; a lease that could not be given back ends with its TTL. In a
        process forked from the one that connected it does nothing: the leases are the parent's.

        Not from a signal handler, as no other call: gRPC's locks are not reentrant, and a handler runs in the
        middle of whatever its thread was doing. Raise an exception there, as Ctrl-C does, or set an event.
        """
        if self._engine.host.forked:
            return
        self._engine.close(self._engine.host.now() + _timing.checked_seconds(timeout, "timeout"))

    def __enter__(self) -> Self:
        self._engine.require_open()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close(CLOSE_SECONDS if error is None else EXIT_SECONDS)
