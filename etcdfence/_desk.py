"""What a Coordinator of either colour knows without asking anybody, and how a wish is made of arguments."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import dataclass, replace
from inspect import iscoroutinefunction
from typing import Any, Final

from etcdfence import _timing
from etcdfence._edits import Edits
from etcdfence._engine import Engine, SharedLease, Terms
from etcdfence._flow import Flow
from etcdfence._flows import borrowing, leases
from etcdfence._flows.pacing import Pace
from etcdfence._keys import TaskKeys
from etcdfence._leading import Plan
from etcdfence._txns import Taken, Tenure
from etcdfence.errors import Closed, Held, LeaseLost, Misuse
from etcdfence.model import Absent, Committed, Guard, Loss, LossReason, Periods, TaskName, Token, checked_name

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
        LeaseLost where the token's epoch is not the present one (as last seen)."""
        if not isinstance(token, Token):
            raise Misuse(f"a token is needed, not {token!r}")
        keys, epoch = self._engine.keys.task(task), self._epoch
        if token.epoch != epoch.number:
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
        if terms.session is not None and terms.session.closed:
            raise Closed("this session is closed; its leases were given back")
        if terms.max_silence is not None and not _timing.checked_seconds(terms.max_silence, "max_silence"):
            raise Misuse("max_silence must be longer than zero seconds")
        return leases.Wish(
            keys=self._engine.keys.task(task),
            holder=self._identity.holder if holder is None else checked_name(holder, "holder"),
            host=self._identity.host,
            pid=self._identity.pid,
            ttl=_timing.checked_ttl(terms.ttl),
            epoch=self._epoch,
            ours=self._engine.lease_ids(),
            period=terms.ttl.retry_period if isinstance(terms.ttl, Periods) else None,
        )

    def _task(self, task: TaskName) -> TaskKeys:
        return self._engine.keys.task(task)

    def _plan(self, name: str, identity: str | None, periods: Periods, drain: float | None) -> Plan:
        self._engine.require_open()
        self._engine.keys.task(checked_name(name, "the name of a leadership"))
        holder = self._identity.holder if identity is None else checked_name(identity, "identity")
        return Plan(name, holder, periods, None if drain is None else _timing.checked_seconds(drain, "drain"))

    def _until(self, wait: float | None) -> float | None:
        """The moment on the local clock up to which to wait; None: without limit."""
        return None if wait is None else self._engine.host.now() + _timing.checked_seconds(wait, "wait")

    def _bid(self, terms: Terms) -> leases.Bid:
        return leases.Bid(shared=terms.session.shared() if terms.session else None)

    def _won(self, bid: leases.Bid, tenure: Tenure, terms: Terms) -> Tenure:
        """The tenure is no longer the bid's to withdraw; the epoch may have been raised meanwhile, and a session
        renewed."""
        bid.taken_up(tenure)
        guard = tenure.guard
        self._epoch = leases.Epoch(guard.epoch_key, guard.epoch_value, tenure.epoch)
        return replace(tenure, granted_at=terms.session.belief.renewed_at) if terms.session else tenure

    def _held(self, wish: leases.Wish, taken: Taken) -> Held:
        owner = taken.owner
        mine = owner is not None and owner.lease_id in (*wish.ours, *self._engine.lease_ids())
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
