"""The Coordinator for threads: a thin shell that checks arguments and runs flows."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Self

from etcdfence import _host, _timing
from etcdfence._flows import fencing, leases, tasks
from etcdfence._requests import Members
from etcdfence._sync.engine import EXIT_SECONDS, Engine
from etcdfence._sync.lease import Lease
from etcdfence._txns import Tenure
from etcdfence.errors import EtcdFenceError, Held, Misuse
from etcdfence.model import (
    Doubt,
    Entry,
    Loss,
    MemberStatus,
    Owner,
    TaskDescription,
    TaskName,
    checked_name,
)

log = logging.getLogger("etcdfence")

CLOSE_SECONDS = 10.0  # for an explicit close(); leases not given back by then end with their TTL


@dataclass(frozen=True, slots=True)
class Identity:
    """How a worker appears in records. For people only: ownership is decided by lease and generation."""

    holder: str
    host: str
    pid: int


class Coordinator:
    """One namespace of one etcd. Made by `etcdfence.connect`; may be used from any thread; close it, or use it
    as a context manager. `patience` (seconds) is how long a call keeps trying before it raises Unavailable or
    OutcomeUnknown."""

    def __init__(self, engine: Engine, epoch: leases.Epoch, identity: Identity) -> None:
        self._engine, self._epoch, self._identity = engine, epoch, identity

    @property
    def namespace(self) -> str:
        return self._engine.keys.namespace

    @property
    def epoch(self) -> int:
        """The epoch's number, as last seen."""
        return self._epoch.number

    # --- owning --------------------------------------------------------------------------------------------

    def try_acquire(
        self,
        task: TaskName,
        *,
        ttl: int = 15,
        holder: str | None = None,
        on_lost: Callable[[Lease, Loss], None] | None = None,
        on_unverified: Callable[[Lease, Doubt], None] | None = None,
    ) -> Lease:
        """Own the task now, or raise Held (somebody does, and who), or TaskClosed (it is finished).

        `ttl` is in whole seconds: how long after the last sign of life the task becomes free. `on_lost` and
        `on_unverified` are called in a thread of their own. OutcomeUnknown: the claim may have landed; nobody
        renews it, so it ends with its TTL.
        """
        return self._acquire(task, ttl, 0.0, holder, on_lost, on_unverified)

    def acquire(
        self,
        task: TaskName,
        *,
        ttl: int = 15,
        wait: float | None = None,
        holder: str | None = None,
        on_lost: Callable[[Lease, Loss], None] | None = None,
        on_unverified: Callable[[Lease, Doubt], None] | None = None,
    ) -> Lease:
        """Own the task, waiting up to `wait` seconds (None: without limit) for its owner to go; then Held."""
        limit = None if wait is None else _timing.checked_seconds(wait, "wait")
        return self._acquire(task, ttl, limit, holder, on_lost, on_unverified)

    def _acquire(
        self,
        task: TaskName,
        ttl: int,
        wait: float | None,
        holder: str | None,
        on_lost: Callable[[Lease, Loss], None] | None,
        on_unverified: Callable[[Lease, Doubt], None] | None,
    ) -> Lease:
        self._engine.require_open()
        for callback, name in ((on_lost, "on_lost"), (on_unverified, "on_unverified")):
            if callback is not None and not callable(callback):
                raise Misuse(f"{name} must be a function of two arguments, not {callback!r}")
        wish = leases.Wish(
            keys=self._engine.keys.task(task),
            holder=self._identity.holder if holder is None else checked_name(holder, "holder"),
            host=self._identity.host,
            pid=self._identity.pid,
            ttl=_timing.checked_ttl(ttl),
            epoch=self._epoch,
        )
        until = None if wait is None else _host.clock() + wait
        return self._engine.acquire(lambda: self._lease(wish, until, on_lost, on_unverified))

    def _lease(
        self,
        wish: leases.Wish,
        until: float | None,
        on_lost: Callable[[Lease, Loss], None] | None,
        on_unverified: Callable[[Lease, Doubt], None] | None,
    ) -> Lease:
        tenure = self._own(wish, until)
        try:
            return Lease(self._engine, tenure, on_lost, on_unverified)
        except RuntimeError as error:  # no thread can be started that would renew it
            self._engine.revoke(tenure, 1.0)
            raise EtcdFenceError(f"{tenure.task} cannot be kept: {error}") from error

    def _own(self, wish: leases.Wish, until: float | None) -> Tenure:
        bid = leases.Bid()
        try:
            flow = leases.acquire(bid, wish, self._engine.patience, until)
            outcome = self._engine.drive(flow, self._engine.host)
        except BaseException:
            self._withdraw(bid, wish)
            raise
        if isinstance(outcome, Tenure):
            bid.lease_ids.remove(outcome.guard.lease_id)
            self._withdraw(bid, wish)  # grants that went unanswered, if there were any
            guard = outcome.guard
            self._epoch = leases.Epoch(guard.epoch_key, guard.epoch_value, outcome.epoch)
            return outcome
        self._withdraw(bid, wish)
        raise self._held(wish, outcome.owner)

    def _held(self, wish: leases.Wish, owner: Owner | None) -> Held:
        ours = {holding.tenure.guard.lease_id for holding in self._engine.holdings()}
        mine = owner is not None and owner.lease_id in ours
        namesake = owner is not None and owner.holder == wish.holder and not mine
        return Held(wish.keys.task, owner, mine=mine, namesake=namesake)

    def _withdraw(self, bid: leases.Bid, wish: leases.Wish) -> None:
        """Undo what an acquire left behind. Where etcd does not answer, go on in the background for as long as
        the leases can live; after that nothing of the bid can land any more."""
        if not bid.lease_ids or self._engine.host.forked:
            return

        def undo(seconds: float) -> None:
            try:
                self._engine.finish(lambda pace: leases.withdraw(bid, pace), seconds)
            except EtcdFenceError as error:
                log.info("an abandoned claim of %s is not undone yet: %s", wish.keys.task, error)

        if not bid.doubtful:
            undo(1.0)
        if bid.lease_ids:
            threading.Thread(target=undo, args=(wish.ttl,), name="etcdfence-withdraw", daemon=True).start()

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
        self._engine.close(_host.clock() + _timing.checked_seconds(timeout, "timeout"))

    def __enter__(self) -> Self:
        self._engine.require_open()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close(CLOSE_SECONDS if error is None else EXIT_SECONDS)

    def __repr__(self) -> str:
        return f"<Coordinator namespace={self.namespace!r}{' closed' if self._engine.closing else ''}>"
