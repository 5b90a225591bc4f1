"""What a Coordinator of either colour knows without asking anybody, and how a wish is made of arguments."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import dataclass, replace
from inspect import iscoroutinefunction
from typing import Any, Final

from etcdfence import _timing
from etcdfence._edits import Edits
from etcdfence._engine import Engine, Holding, SharedLease, Terms
from etcdfence._flow import Flow
from etcdfence._flows import borrowing, leases
from etcdfence._flows.pacing import Pace
from etcdfence._keys import TaskKeys
from etcdfence._leading import Plan
from etcdfence._txns import Taken, Tenure
from etcdfence.errors import Held, LeaseLost, Misuse, Stopped, Unavailable
from etcdfence.model import Absent, Committed, Guard, Loss, LossReason, Periods, TaskName, Token, checked_name

OVERTIME: Final = 2.0  # seconds that a request may take beyond the end of a wait
CLOSE_SECONDS: Final = 10.0  # for an explicit close(); leases not given back by then end with their TTL


@dataclass(frozen=True, slots=True)
class Identity:
    """How a worker appears in records. For people only: ownership is decided by lease and generation."""

    holder: str
    host: str
    pid: int


class Desk:
    def __init__(self, engine: Engine, epoch: leases.Epoch, identity: Identity) -> None:
        self._engine, self._epoch, self._identity = engine, epoch, identity

    @property
    def namespace(self) -> str:
        return self._engine.keys.namespace

    @property
    def epoch(self) -> int:
        """The epoch's number, as last seen."""
        return self._epoch.number

    def __repr__(self) -> str:
        state = " closed" if self._engine.closing else ""
        return f"<{type(self).__name__} namespace={self.namespace!r}{state}>"

    def guard(self, task: TaskName, token: Token, lease_id: int) -> Guard:
        """The guard of a lease that another process holds and has told of: its token, and its etcd lease id.
        LeaseLost where its epoch is over."""
        if not isinstance(token, Token):
            raise Misuse(f"a token is needed, not {token!r}")
        keys, epoch = self._engine.keys.task(task), self._epoch
        if token.epoch > epoch.number:
            raise Unavailable(f"epoch {token.epoch} is newer than what this coordinator has seen; connect again")
        if token.epoch < epoch.number:
            loss = Loss(LossReason.EPOCH_RAISED)
            raise LeaseLost(task=keys.task, generation=token.generation, loss=loss, revision=None)
        return Guard(keys.owner, token.generation, lease_id, epoch.key, epoch.value)

    def _write_with(
        self, guard: Guard, task: TaskName, key: str, value: bytes | str, expect: int | Absent | None
    ) -> Callable[[Pace], Flow[Committed]]:
        if not isinstance(guard, Guard):
            raise Misuse(f"a guard is needed, as lease.guard() or coordinator.guard() gives it, not {guard!r}")
        self._engine.require_open()
        keys, edits = self._engine.keys.task(task), Edits(self._engine.keys)
        edits.put(key, value, expect=expect)
        if guard.owner_key != keys.owner:
            raise Misuse(f"this guard is not one of {keys.task}")
        return lambda pace: borrowing.write(guard, keys, edits.edits[key], expect, pace)

    def _wish(
        self, task: TaskName, holder: str | None, terms: Terms, **callbacks: Callable[..., Any] | None
    ) -> leases.Wish:
        """What is wanted; Misuse for arguments that cannot be, before anything is sent."""
        self._engine.require_open()
        for name, callback in callbacks.items():
            if callback is not None and (not callable(callback) or iscoroutinefunction(callback)):
                raise Misuse(f"{name} must be a plain function of two arguments, not {callback!r}")
        if terms.session is not None:
            self._engine.require_session(terms.session)
        if terms.max_silence is not None and not _timing.checked_seconds(terms.max_silence, "max_silence"):
            raise Misuse("max_silence must be longer than zero seconds")
        return leases.Wish(
            keys=self._engine.keys.task(task),
            holder=self._identity.holder if holder is None else checked_name(holder, "holder"),
            host=self._identity.host,
            pid=self._identity.pid,
            ttl=_timing.checked_ttl(terms.ttl),
            epoch=self._epoch,
            ours=self._engine.attempts,
            period=terms.ttl.retry_period if isinstance(terms.ttl, Periods) else None,
        )

    def _task(self, task: TaskName) -> TaskKeys:
        return self._engine.keys.task(task)

    def _plan(
        self,
        name: str,
        identity: str | None,
        periods: Periods,
        drain: float | None,
        waits: tuple[str, ...],
        **callbacks: Callable[..., Any] | None,
    ) -> Plan:
        """`waits`: the callbacks that are coroutine functions."""
        self._engine.require_open()
        self._engine.keys.task(checked_name(name, "the name of a leadership"))
        for what, callback in callbacks.items():
            if callback is not None and (
                not callable(callback) or iscoroutinefunction(callback) != (what in waits)
            ):
                kind = "a coroutine function" if what in waits else "a plain function"
                raise Misuse(f"{what} must be {kind}, not {callback!r}")
        holder = self._identity.holder if identity is None else checked_name(identity, "identity")
        return Plan(name, holder, periods, None if drain is None else _timing.checked_seconds(drain, "drain"))

    def _until(self, wait: float | None) -> float | None:
        """The moment on the local clock up to which to wait; None: without limit."""
        return None if wait is None else self._engine.host.now() + wait

    def _bid(self, terms: Terms) -> leases.Bid:
        bid = leases.Bid(shared=terms.session.shared() if terms.session else None)
        self._engine.bids.append(bid)
        return bid

    def _won(self, bid: leases.Bid, wish: leases.Wish, outcome: Tenure | Taken, terms: Terms) -> Tenure:
        """The tenure, or Held. The epoch may have been raised meanwhile, and a session renewed."""
        if isinstance(outcome, Taken):
            raise self._held(bid, wish, outcome)
        guard = outcome.guard
        self._epoch = leases.Epoch(guard.epoch_key, guard.epoch_value, outcome.epoch)
        return replace(outcome, granted_at=terms.session.belief.renewed_at) if terms.session else outcome

    def _require_wanted(self, terms: Terms, stopped: Callable[[], bool] | None) -> Callable[[], None] | None:
        """What ends a wait before its time: its session, or whoever had asked for it."""
        session, engine = terms.session, self._engine
        if session is None and stopped is None:
            return None

        def require_wanted() -> None:
            if session is not None:
                engine.require_session(session)
            if stopped is not None and stopped():
                raise Stopped("the wait was stopped")

        return require_wanted

    def _kept(self, holding: Holding) -> None:
        """A session that was closed while something was claimed in it gives that back as well."""
        if holding.session is not None and holding.session.closed:
            self._engine.require_session(holding.session)

    def _held(self, bid: leases.Bid, wish: leases.Wish, taken: Taken) -> Held:
        owner = taken.owner
        mine = bid.mine or (owner is not None and owner.attempt in self._engine.attempts())
        namesake = owner is not None and owner.holder == wish.holder and not mine
        return Held(wish.keys.task, owner, mine=mine, namesake=namesake, line=taken.line)


class SessionHandle:
    """What the Session of either colour knows without asking anybody."""

    def __init__(self, engine: Engine, shared: SharedLease) -> None:
        self._engine, self._shared = engine, shared
        weakref.finalize(self, shared.drop).atexit = False

    @property
    def ttl(self) -> int:
        """Seconds that etcd granted."""
        return self._shared.granted

    @property
    def lease_id(self) -> int:
        """The id of the etcd lease that everything acquired here hangs on."""
        return self._shared.lease_id

    @property
    def loss(self) -> Loss | None:
        """How the session's etcd lease was lost, or None."""
        return self._shared.belief.loss

    def __repr__(self) -> str:
        state = " closed" if self._shared.closed else f" lost ({self.loss.reason})" if self.loss else ""
        return f"<{type(self).__name__} {self._shared.lease_id:x} ttl={self.ttl}{state}>"
