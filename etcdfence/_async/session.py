"""The Session for coroutines: many leases on one etcd lease."""

from __future__ import annotations

from collections.abc import Callable
from types import TracebackType
from typing import TYPE_CHECKING, Self

from etcdfence import _timing
from etcdfence._async.engine import AsyncEngine
from etcdfence._async.lease import AsyncLease
from etcdfence._async.opening import Opening
from etcdfence._desk import CLOSE_SECONDS, SessionHandle
from etcdfence._engine import EXIT_SECONDS, SharedLease, Terms
from etcdfence.model import Doubt, Loss, TaskName

if TYPE_CHECKING:
    from etcdfence._async.coordinator import AsyncCoordinator


class AsyncSession(SessionHandle):
    """Made by `AsyncCoordinator.session`; close it, or use it as an async context manager. Its etcd lease is
    renewed whether anything is held in it or not. SessionLost: the etcd lease is gone, with all that hung on
    it."""

    _engine: AsyncEngine

    def __init__(self, coordinator: AsyncCoordinator, engine: AsyncEngine, shared: SharedLease) -> None:
        super().__init__(engine, shared)
        self._coordinator = coordinator

    def try_acquire(
        self,
        task: TaskName,
        *,
        holder: str | None = None,
        max_silence: float | None = None,
        on_lost: Callable[[AsyncLease, Loss], object] | None = None,
        on_unverified: Callable[[AsyncLease, Doubt], object] | None = None,
        cancel_on_loss: bool = True,
    ) -> Opening[AsyncLease]:
        """As `AsyncCoordinator.try_acquire`. With `max_silence` a lease whose work reports no progress is
        released."""
        terms = Terms(self._shared.ttl, max_silence, self._shared)
        return self._coordinator._acquire(task, 0.0, holder, terms, on_lost, on_unverified, cancel_on_loss, self)

    def acquire(
        self,
        task: TaskName,
        *,
        wait: float | None = None,
        holder: str | None = None,
        max_silence: float | None = None,
        on_lost: Callable[[AsyncLease, Loss], object] | None = None,
        on_unverified: Callable[[AsyncLease, Doubt], object] | None = None,
        cancel_on_loss: bool = True,
    ) -> Opening[AsyncLease]:
        """As `AsyncCoordinator.acquire`. A wait has an etcd lease of its own, which ends with it."""
        terms = Terms(self._shared.ttl, max_silence, self._shared)
        return self._coordinator._acquire(task, wait, holder, terms, on_lost, on_unverified, cancel_on_loss, self)

    async def close(self, timeout: float = CLOSE_SECONDS) -> None:
        """Give back everything that is held here (`loss.reason` closed), and the etcd lease. Twice is no error."""
        await self._engine.close_session_async(self._shared, _timing.checked_seconds(timeout, "timeout"))

    async def __aenter__(self) -> Self:
        self._engine.require_open()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close(CLOSE_SECONDS if error is None else EXIT_SECONDS)
