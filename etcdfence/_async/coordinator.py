"""The Coordinator for coroutines: a thin shell that checks arguments and runs flows."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from types import TracebackType
from typing import Self

from etcdfence import _timing
from etcdfence._async.engine import AsyncEngine
from etcdfence._async.leadership import AsyncLeadership
from etcdfence._async.lease import AsyncLease
from etcdfence._async.opening import Opening
from etcdfence._async.session import AsyncSession
from etcdfence._desk import CLOSE_SECONDS, OVERTIME, Desk, Identity
from etcdfence._engine import EXIT_SECONDS, Terms
from etcdfence._flow import AsyncCaller
from etcdfence._flows import fencing, leases, tasks, turns, watching
from etcdfence._flows.pacing import Pace
from etcdfence._host import AsyncBounded, AsyncStoppable
from etcdfence._leading import Election
from etcdfence._requests import Members
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


class AsyncCoordinator(Desk):
    """One namespace of one etcd, for the coroutines of one event loop. Made by `etcdfence.connect_async`; close
    it, or use it as an async context manager. `patience` (seconds) is how long a call keeps trying before it
    raises Unavailable or OutcomeUnknown. A call that is cancelled leaves nothing behind: what it had set in
    motion is undone by a thread."""

    _engine: AsyncEngine

    def __init__(self, engine: AsyncEngine, epoch: leases.Epoch, identity: Identity) -> None:
        super().__init__(engine, epoch, identity)

    # --- owning --------------------------------------------------------------------------------------------

    def try_acquire(
        self,
        task: TaskName,
        *,
        ttl: int | Periods = 15,
        holder: str | None = None,
        max_silence: float | None = None,
        on_lost: Callable[[AsyncLease, Loss], object] | None = None,
        on_unverified: Callable[[AsyncLease, Doubt], object] | None = None,
        cancel_on_loss: bool = True,
    ) -> Opening[AsyncLease]:
        """Own the task now, or raise Held (somebody does, and who), or TaskClosed (it is finished).

        `ttl` is in whole seconds: how long after the last sign of life the task becomes free; Periods say more.
        `max_silence`: seconds without `progress()` or a write after which the lease is not renewed any more.
        `on_lost` and `on_unverified` are plain functions, called in the event loop. OutcomeUnknown: the claim
        may have landed; nobody renews it, so it ends with its TTL.
        """
        return self._acquire(task, 0.0, holder, Terms(ttl, max_silence), on_lost, on_unverified, cancel_on_loss)

    def acquire(
        self,
        task: TaskName,
        *,
        ttl: int | Periods = 15,
        wait: float | None = None,
        holder: str | None = None,
        max_silence: float | None = None,
        on_lost: Callable[[AsyncLease, Loss], object] | None = None,
        on_unverified: Callable[[AsyncLease, Doubt], object] | None = None,
        cancel_on_loss: bool = True,
    ) -> Opening[AsyncLease]:
        """Own the task, waiting in line up to `wait` seconds (None: without limit); then Held.

        First come, first served. While in line an etcd that is silent does not end the wait before its time. What
        this coordinator owns itself it does not wait for without limit: that is Held (`mine`), whoever asks.

        `async with coordinator.acquire(…) as lease:` cancels its block when the lease is lost (and raises
        LeaseLost or Superseded instead of CancelledError), unless `cancel_on_loss=False`.
        """
        return self._acquire(task, wait, holder, Terms(ttl, max_silence), on_lost, on_unverified, cancel_on_loss)

    def session(self, ttl: int | Periods = 15) -> Opening[AsyncSession]:
        """One etcd lease for many tasks: `acquire` and `try_acquire` of the session cost one round trip, and so
        does a release. Each lease is lost and released for itself; closing the session gives all of them back."""
        self._engine.require_open()
        seconds = _timing.checked_ttl(ttl)

        async def opened() -> AsyncSession:
            bid = leases.Bid()
            try:
                await self._engine.run(lambda pace: leases.grant(bid, seconds, pace))
                return AsyncSession(self, self._engine, self._engine.open_session(bid, ttl))
            finally:
                self._engine.withdraw(bid, "a session", seconds, here=False)

        return Opening("a session", lambda: self._engine.acquire(opened))

    def _acquire(
        self,
        task: TaskName,
        wait: float | None,
        holder: str | None,
        terms: Terms,
        on_lost: Callable[[AsyncLease, Loss], object] | None,
        on_unverified: Callable[[AsyncLease, Doubt], object] | None,
        cancel_on_loss: bool,
        keep: object = None,
    ) -> Opening[AsyncLease]:
        wish = self._wish(task, holder, terms, on_lost=on_lost, on_unverified=on_unverified)
        seconds = None if wait is None else _timing.checked_seconds(wait, "wait")

        async def lease() -> AsyncLease:
            until, bid = self._until(seconds), self._bid(terms)
            caller = self._caller(until, self._require_wanted(terms, None))
            try:
                flow = turns.acquire(bid, wish, self._engine.patience, until)
                outcome = await self._engine.adrive(flow, caller)
                owned = self._lease(
                    self._won(bid, wish, outcome, terms), terms, on_lost, on_unverified, cancel_on_loss
                )
                bid.taken_up(owned._tenure)
            except BaseException:
                self._engine.withdraw(bid, wish.keys.task, wish.ttl, terms.session, here=False)
                raise
            finally:
                self._engine.bids.remove(bid)
            try:
                self._engine.withdraw(
                    bid, wish.keys.task, wish.ttl, terms.session, here=False
                )  # what is left over
                self._kept(owned._holding)
            except BaseException:
                self._engine.give_back_in_background(owned._holding)
                raise
            return owned

        return Opening("an acquire", lambda: self._engine.acquire(lease), keep)

    def _lease(
        self,
        tenure: Tenure,
        terms: Terms,
        on_lost: Callable[[AsyncLease, Loss], object] | None,
        on_unverified: Callable[[AsyncLease, Doubt], object] | None,
        cancel_on_loss: bool,
    ) -> AsyncLease:
        try:
            return AsyncLease(self._engine, tenure, terms, on_lost, on_unverified, cancel_on_loss)
        except RuntimeError as error:  # no thread can be started that would renew it
            raise EtcdFenceError(f"{tenure.task} cannot be kept: {error}") from error

    def _caller(self, until: float | None, require_wanted: Callable[[], None] | None = None) -> AsyncCaller:
        """Requests do not go on for long after a wait is over, however silent etcd is."""
        host, inner = self._engine.host, self._engine.async_host
        timely = until is not None and until > host.now()
        caller: AsyncCaller = AsyncBounded(inner, until + OVERTIME) if until is not None and timely else inner
        return AsyncStoppable(caller, host.now, require_wanted) if require_wanted else caller

    def lead(
        self,
        name: str,
        *,
        on_started: Callable[[AsyncLease], Awaitable[object]],
        on_stopped: Callable[[], object] | None = None,
        on_new_leader: Callable[[str | None], object] | None = None,
        identity: str | None = None,
        lease_duration: int = 15,
        renew_deadline: float = 10.0,
        retry_period: float = 2.0,
        drain: float | None = None,
    ) -> AsyncLeadership:
        """Take part in the election of a leader; awaiting `run()` of what is returned does it. The periods
        (seconds) are those of Kubernetes' leader election, see Periods.

        on_started     does the work: awaited in a task of its own with the lease, and cancelled when it has to
                       stop. It may return and leave the leadership to whatever it has started
        on_stopped     called when the work has stopped
        on_new_leader  called with the holder's identity (or None) whenever somebody else leads, or nobody
        drain          seconds that the work may take to stop; after that the leadership is not released but left
                       to run out, since nobody can say that the work has stopped. None: no limit
        """
        periods = Periods(lease_duration, renew_deadline, retry_period)
        callbacks = {"on_started": on_started, "on_stopped": on_stopped, "on_new_leader": on_new_leader}
        plan = self._plan(name, identity, periods, drain, ("on_started",), **callbacks)
        election = Election(plan, on_started, on_stopped, on_new_leader)
        return AsyncLeadership(self, election)

    # --- writing for somebody else --------------------------------------------------------------------------

    async def put(
        self, task: TaskName, guard: Guard, key: str, value: bytes | str, *, expect: int | Absent | None = None
    ) -> Committed:
        """Write a data key under the guard of a lease that another process holds (see `guard`). Refused by etcd
        once that lease is over. Such a write has no marker: a lost answer is settled by the key's own revision,
        or stays OutcomeUnknown."""
        return await self._engine.run(self._write_with(guard, task, key, value, expect))

    # --- looking -------------------------------------------------------------------------------------------

    async def describe(self, task: TaskName) -> TaskDescription:
        """Everything the store says of one task, at one revision; NotFound where it says nothing."""
        self._engine.require_open()
        keys = self._engine.keys.task(task)
        return await self._engine.run(lambda pace: tasks.describe(self._engine.keys, keys, pace))

    async def tasks(self, *, owned_only: bool = False) -> list[TaskDescription]:
        """All tasks of the namespace by name, without attempts and history; `owned_only`: those with an owner."""
        self._engine.require_open()
        return await self._engine.run(lambda pace: tasks.tasks(self._engine.keys, pace, owned_only=owned_only))

    async def waiters(self) -> list[Waiter]:
        """Everybody who is in line for a task of the namespace, by task and position."""
        self._engine.require_open()
        return await self._engine.run(lambda pace: tasks.waiters(self._engine.keys, pace))

    async def observe(self, task: TaskName | None = None) -> AsyncIterator[Observation]:
        """Who owns the task, now and after every change; without a task, of all tasks that have an owner. Takes no
        part in anything. It goes on through outages and compactions until the iterator is closed (or the
        coordinator: Closed); what changes faster than it looks is told as one change."""
        self._engine.require_open()
        keys, wanted = self._engine.keys, None if task is None else self._engine.keys.task(task)
        seen = await self._engine.run(lambda pace: watching.look(keys, wanted, pace))
        for one in watching.first(seen, wanted):
            yield one
        while True:
            following = watching.next_look(keys, wanted, seen, Pace(float("inf")))
            found = await self._engine.adrive(following, self._engine.async_host)
            for one in found.since(seen):
                yield one
            seen = found

    async def get(self, key: str) -> Entry:
        """A data key's value and revision (None and ABSENT where it is not there), read linearizably."""
        self._engine.require_open()
        keys = self._engine.keys.data(key), self._engine.keys.provenance(key)
        return await self._engine.run(lambda pace: fencing.get(key, *keys, pace))

    async def members(self) -> Sequence[MemberStatus]:
        """What each endpoint says of itself; one that does not answer is listed with its error."""
        self._engine.require_open()
        return await self._engine.async_host.call(Members())

    # --- ending --------------------------------------------------------------------------------------------

    async def close(self, timeout: float = CLOSE_SECONDS) -> None:
        """Give back every lease (`loss.reason` closed), stop renewing and close the connections.

        Takes at most about `timeout` seconds; a lease that could not be given back ends with its TTL. May be
        called in any event loop. In a process forked from the one that connected it does nothing.
        """
        if not self._engine.host.forked:
            await self._engine.close_async(_timing.checked_seconds(timeout, "timeout"))

    async def __aenter__(self) -> Self:
        self._engine.require_open()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close(CLOSE_SECONDS if error is None else EXIT_SECONDS)
