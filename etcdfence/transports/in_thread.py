"""A synchronous transport for coroutines: each call in a thread of its own kind of pool.

A call whose coroutine is cancelled goes on in its thread; what it sends may be applied, so its outcome is unknown,
as it is for any request that nobody hears the answer of. Waits have threads of their own: they last, and must not
keep other calls waiting.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, Final, TypeVar, cast

from etcdfence._flow import Transport
from etcdfence._requests import Request, WaitGone
from etcdfence.errors import Closed

T = TypeVar("T")
CALLS: Final = 64  # at a time; more than that wait for a thread


class InThread:
    def __init__(self, transport: Transport) -> None:
        self._transport = transport
        self._calls = ThreadPoolExecutor(CALLS, thread_name_prefix="etcdfence-call")
        self._closed = False

    async def call(self, request: Request[T], within: float) -> T:
        if self._closed:
            raise Closed("this coordinator is closed")
        if isinstance(request, WaitGone):
            waited: Any = await _in_own_thread(partial(self._transport.call, request, within))
            return cast("T", waited)
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._calls, self._transport.call, request, within)

    def interrupt(self) -> None:
        self._transport.interrupt()

    async def close(self) -> None:
        self.abandon()

    def abandon(self) -> None:
        self._closed = True
        self._transport.close()
        self._calls.shutdown(wait=False, cancel_futures=True)


async def _in_own_thread(action: Callable[[], T]) -> T:
    loop = asyncio.get_running_loop()
    done: asyncio.Future[T] = loop.create_future()

    def tell(settle: Callable[[], None]) -> None:
        if not done.cancelled():
            settle()

    def run() -> None:
        try:
            result = action()
        except BaseException as error:  # noqa: BLE001 - it belongs to whoever waits
            settle = partial(done.set_exception, error)
        else:
            settle = partial(done.set_result, result)
        with contextlib.suppress(RuntimeError):  # the loop has ended, and whoever waited with it
            loop.call_soon_threadsafe(tell, settle)

    threading.Thread(target=run, name="etcdfence-wait", daemon=True).start()
    return await done
