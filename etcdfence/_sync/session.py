"""The Session for threads: many leases on one etcd lease."""

from __future__ import annotations

from collections.abc import Callable
from types import TracebackType
from typing import TYPE_CHECKING, Self

from etcdfence import _timing
from etcdfence._desk import CLOSE_SECONDS, SessionHandle
from etcdfence._engine import EXIT_SECONDS, SharedLease, Terms
from etcdfence._sync.engine import SyncEngine
from etcdfence._sync.lease import Lease
from etcdfence.model import Doubt, Loss, TaskName

if TYPE_CHECKING:
    from etcdfence._sync.coordinator import Coordinator


class Session(SessionHandle):
    """Made by `Coordinator.session`; close it, or use it as a context manager. Its etcd lease is renewed whether
    anything is held in it or not. SessionLost: the etcd lease is gone, with all that hung on it."""

    _engine: SyncEngine

    def __init__(self, coordinator: Coordinator, engine: SyncEngine, shared: SharedLease) -> None:
        super().__init__(engine, shared)
        self._coordinator = coordinator

    def try_acquire(
        self,
        task: TaskName,
        *,
        holder: str | None = None,
        max_silence: float | None = None,
        on_lost: Callable[[Lease, Loss], None] | None = None,
        on_unverified: Callable[[Lease, Doubt], None] | None = None,
    ) -> Lease:
        """As `Coordinator.try_acquire`. With `max_silence` a lease whose work reports no progress is released."""
        terms = Terms(self._shared.ttl, max_silence, self._shared)
        return self._coordinator._acquire(task, 0.0, holder, terms, on_lost, on_unverified)

    def acquire(
        self,
        task: TaskName,
        *,
        wait: float | None = None,
        holder: str | None = None,
        max_silence: float | None = None,
        on_lost: Callable[[Lease, Loss], None] | None = None,
        on_unverified: Callable[[Lease, Doubt], None] | None = None,
    ) -> Lease:
        """As `Coordinator.acquire`. A wait has an etcd lease of its own, which ends with it."""
        terms = Terms(self._shared.ttl, max_silence, self._shared)
        return self._coordinator._acquire(task, wait, holder, terms, on_lost, on_unverified)

    def close(self, timeout: float = CLOSE_SECONDS) -> None:
        """Give back everything that is held here (`loss.reason` closed), and the etcd lease. Twice is no error."""
        self._engine.close_session(
            self._shared, self._engine.host.now() + _timing.checked_seconds(timeout, "timeout")
        )

    def __enter__(self) -> Self:
        self._engine.require_open()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close(CLOSE_SECONDS if error is None else EXIT_SECONDS)
