"""The gateway for coroutines: each call in a thread.

A call whose coroutine is cancelled goes on in its thread; what it sends may be applied, so its outcome is unknown,
as it is for any request that nobody hears the answer of. Waits have threads of their own: they last, and must not
keep other calls waiting. One that is cancelled is hung up.
"""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, Final, TypeVar, cast

from etcdfence._aside import aside
from etcdfence._requests import Request, Wait
from etcdfence.errors import Closed
from etcdfence.transports.gateway import GatewayTransport

T = TypeVar("T")
CALLS: Final = 64  # at a time; more than that wait for a thread


class InThread:
    def __init__(self, transport: GatewayTransport) -> None:
        self._transport = transport
        self._calls = ThreadPoolExecutor(CALLS, thread_name_prefix="etcdfence-call")
        self._closed = False

    async def call(self, request: Request[T], within: float) -> T:
        if self._closed:
            raise Closed("this coordinator is closed")
        if isinstance(request, Wait):
            return cast("T", await self._wait(request, within))
        loop = asyncio.get_running_loop()
        try:
            return await loop.run_in_executor(self._calls, self._transport.call, request, within)
        except asyncio.CancelledError:
            if self._cancelled_by_closing():
                raise Closed("this coordinator was closed before the request was sent") from None
            raise

    def _cancelled_by_closing(self) -> bool:
        task = asyncio.current_task()
        return self._closed and (task is None or not task.cancelling())

    async def _wait(self, request: Wait, within: float) -> Any:
        self._transport.expect(request)
        try:
            return await aside(partial(self._transport.call, request, within), "etcdfence-wait")
        except asyncio.CancelledError:
            self._transport.hang_up(request)
            raise

    def interrupt(self) -> None:
        self._transport.interrupt()

    async def close(self) -> None:
        self.abandon()

    def abandon(self) -> None:
        self._closed = True
        self._transport.close()
        self._calls.shutdown(wait=False, cancel_futures=True)
