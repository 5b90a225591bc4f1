"""Waiting for one's turn, in threads and in coroutines, in one line."""

from __future__ import annotations

import asyncio
import contextlib
import math
import threading
from collections import deque
from collections.abc import Awaitable, Callable
from typing import Final, TypeVar

from etcdfence.errors import Unavailable

T = TypeVar("T")
LOOK_AGAIN: Final = 0.1  # seconds, for the case that whoever should have woken us was interrupted


class Turn:
    """One at a time, in the order of coming. Unlike a lock held across a request, what is guarded is only the
    decision whose turn it is, and waiting for it is bounded.

    Ctrl-C may come between any two steps. So one's place in the line is taken and given up by single operations
    of the interpreter, inside one `try`, and nobody relies on being woken.
    """

    def __init__(self) -> None:
        self._lock = threading.RLock()  # taken itself: interrupted on its way out a condition would stay locked
        self._changed = threading.Condition(self._lock)
        self._line: deque[object] = deque()  # whoever is first has the turn; coroutines stand for themselves

    def run(self, seconds: float, action: Callable[[], T]) -> T:
        """Run `action` when it is its turn; Unavailable, and nothing run, if that takes longer."""
        me = object()
        try:
            self._line.append(me)
            if self._line[0] is not me:
                self._await(me, seconds)
            return action()
        finally:
            if me in self._line:
                self._line.remove(me)
            self._wake()

    async def run_async(self, seconds: float, action: Callable[[], Awaitable[T]]) -> T:
        """The same for a coroutine."""
        me = _Place()
        try:
            self._line.append(me)
            if self._line[0] is not me:
                await self._await_async(me, seconds)
            return await action()
        finally:
            if me in self._line:
                self._line.remove(me)
            self._wake()

    def _wake(self) -> None:
        if self._line:
            with self._lock:
                self._changed.notify_all()
            with contextlib.suppress(IndexError):  # the line has emptied meanwhile
                first = self._line[0]
                if isinstance(first, _Place):
                    first.wake()

    def _await(self, me: object, seconds: float) -> None:
        with self._lock:
            for _ in range(math.ceil(seconds / LOOK_AGAIN)):
                if self._changed.wait_for(lambda: self._line[0] is me, LOOK_AGAIN):
                    return
        raise _too_long(seconds)

    async def _await_async(self, me: _Place, seconds: float) -> None:
        woken = me.await_in_loop()
        if self._line[0] is me:
            return
        for _ in range(math.ceil(seconds / LOOK_AGAIN)):
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(LOOK_AGAIN):  # wait_for may swallow a cancellation before 3.12
                    await woken.wait()
            if self._line[0] is me:
                return
        raise _too_long(seconds)


class _Place:
    """A coroutine's place in the line; any thread may wake whoever waits there."""

    def __init__(self) -> None:
        self._wake: Callable[[], object] | None = None

    def await_in_loop(self) -> asyncio.Event:
        loop, woken = asyncio.get_running_loop(), asyncio.Event()
        self._wake = lambda: loop.call_soon_threadsafe(woken.set)
        return woken

    def wake(self) -> None:
        if self._wake is not None:
            with contextlib.suppress(RuntimeError):  # its loop has ended, and it with it
                self._wake()


def _too_long(seconds: float) -> Unavailable:
    return Unavailable(f"another write of this lease was still under way after {seconds:g} s")
