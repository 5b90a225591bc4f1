"""A blocking action for a coroutine, in a thread of its own that nobody has to wait for.

The default executor of an event loop belongs to its user and may be busy; closing must not stand in that line.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Callable
from functools import partial
from typing import TypeVar

T = TypeVar("T")


async def aside(action: Callable[[], T], name: str) -> T:
    """Run it to its end, whether or not this coroutine is cancelled meanwhile."""
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

    threading.Thread(target=run, name=name, daemon=True).start()
    return await done
