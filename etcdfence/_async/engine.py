"""How the coroutines of one event loop run flows.

Calls go over the loop's own transport. Everything that must work without the loop (renewal, closing, undoing
what a cancelled call has set in motion) is the common engine's and uses its threads.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from functools import partial
from typing import TypeVar

from etcdfence._aside import aside
from etcdfence._engine import Engine, GaveBack, Holding, SharedLease, gave_back, noted
from etcdfence._flow import AsyncCaller, AsyncTransport, Flow, adrive
from etcdfence._flows import leases
from etcdfence._flows.fencing import Lane
from etcdfence._flows.pacing import Pace
from etcdfence._host import AsyncBounded, AsyncHost, Host
from etcdfence._keys import Keys
from etcdfence._txns import Tenure
from etcdfence.errors import Misuse

T = TypeVar("T")


class AsyncEngine(Engine):
    def __init__(
        self, host: Host, transport: AsyncTransport, keys: Keys, patience: float, on_close: Callable[[], None]
    ) -> None:
        super().__init__(host, keys, patience, on_close)
        self.transport = transport
        self.loop = asyncio.get_running_loop()
        self.async_host = AsyncHost(host, transport)

    def require_usable(self) -> None:
        super().require_usable()
        self.require_own_loop()

    def require_own_loop(self) -> None:
        if _running_loop() is not self.loop:
            raise Misuse("this coordinator belongs to another event loop; call connect_async() in each loop")

    async def run(self, flow: Callable[[Pace], Flow[T]], seconds: float | None = None) -> T:
        """Run a flow that must have ended after so many seconds (None: the patience)."""
        pace = Pace(self.host.now() + (self.patience if seconds is None else seconds))
        return await self.adrive(flow(pace), AsyncBounded(self.async_host, pace.deadline))

    async def adrive(self, flow: Flow[T], caller: AsyncCaller) -> T:
        try:
            return await adrive(flow, caller)
        finally:
            if self.host.regressed is not None:  # rare, and worth a thread: the look must not depend on this task
                self.look_back_in_background()

    async def acquire(self, action: Callable[[], Awaitable[T]]) -> T:
        """Run everything between the first request of an acquire and the lease being known here; closing waits
        for it."""
        me = object()
        try:
            self.acquiring.append(me)
            self.require_open()
            self.holdings()  # puts away what was dropped meanwhile
            return await action()
        finally:
            self.acquired_by(me)

    async def commit(
        self,
        holding: Holding,
        flow: Callable[[Lane, Pace], Flow[T]],
        seconds: float | None = None,
        even_released: bool = False,
    ) -> T:
        """Run a flow of this tenure's lane when it is its turn."""

        async def in_turn() -> T:
            with self.committing(holding, even_released):
                return await self.run(lambda pace: flow(holding.lane, pace), seconds)

        self.require_usable()
        return await holding.turn.run_async(self.patience if seconds is None else seconds, in_turn)

    async def revoke_async(self, tenure: Tenure, seconds: float) -> GaveBack:
        """Give back the etcd lease, as `revoke` does."""
        if tenure.shared:
            return GaveBack.NO
        bid = leases.Bid(lease_ids=[tenure.guard.lease_id])
        with noted(tenure.task):
            await self.run(lambda pace: leases.revoke(bid, pace), seconds)
        return gave_back(bid)

    async def close_session_async(self, session: SharedLease, seconds: float) -> None:
        await aside(partial(self.close_session, session, self.host.now() + seconds), "etcdfence-close-session")

    def call_in_loop(self, action: Callable[..., object], *arguments: object) -> None:
        """From any thread; nothing happens where the loop has ended."""
        try:
            self.loop.call_soon_threadsafe(action, *arguments)
        except RuntimeError:
            return

    def finally_close(self) -> None:
        super().finally_close()
        self.transport.abandon()

    async def close_async(self, seconds: float) -> None:
        """Close from this loop, or from any other one."""
        self.closing = True
        self.call_in_loop(self.transport.interrupt)
        try:
            await aside(partial(self.close, self.host.now() + seconds), "etcdfence-close")
        finally:
            if asyncio.get_running_loop() is self.loop:
                await self.transport.close()
            else:
                self.call_in_loop(self._close_transport)

    def _close_transport(self) -> None:
        """In the own loop, for a close that was called in another one."""
        self._closing_transport = self.loop.create_task(self.transport.close())


def _running_loop() -> asyncio.AbstractEventLoop | None:
    try:
        return asyncio.get_running_loop()
    except RuntimeError:
        return None
