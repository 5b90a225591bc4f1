"""A clock that moves only when a test moves it."""

from __future__ import annotations

import threading
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from typing import Final

PATIENCE: Final = 10.0  # seconds of real time for a thread that was woken to come to rest again
LOOK_AGAIN: Final = 0.01
FAR_FROM_NOW: Final = 1000.0  # where a virtual clock begins: nothing real is near


class VirtualClock:
    """Time for a coordinator and for MemoryEtcd together.

    `advance` goes from one event to the next: at each it wakes the threads that were waiting for it (the renewal
    thread, that is) and goes on when they have come to rest, so leases are renewed on the way as they would be.
    A pause between two tries of a call passes at once: whoever pauses moves the clock. So does a wait for a task
    in the thread that made the clock; in other threads, and in coroutines, a wait lasts until the clock is moved.
    """

    def __init__(self) -> None:
        self._now = FAR_FROM_NOW
        self._maker = threading.get_ident()
        self._changed = threading.Condition()
        self._waiting: dict[threading.Thread, tuple[float, threading.Condition]] = {}
        self._known: set[threading.Thread] = set()
        self._listeners: list[Callable[[], None]] = []
        self._advancing = threading.RLock()

    def now(self) -> float:
        return self._now

    def wall(self) -> str:
        begun = datetime(2001, 1, 1, tzinfo=UTC)
        return (begun + timedelta(seconds=self._now)).isoformat(timespec="milliseconds")

    @property
    def mine(self) -> bool:
        """Whether this is the thread that made the clock, and so moves it."""
        return threading.get_ident() == self._maker

    def on_advance(self, listener: Callable[[], None]) -> None:
        """Call this, in the thread that moves the clock, after each of its steps."""
        self._listeners.append(listener)

    # --- what the shells ask of a clock --------------------------------------------------------------------

    def sleep(self, seconds: float, until: threading.Event) -> None:
        if not until.is_set():
            self.advance(seconds)

    async def sleep_async(self, seconds: float) -> None:
        self.advance(seconds)

    def wait(self, changed: threading.Condition, seconds: float) -> None:
        """Wait on a held condition until the clock has moved so far, or somebody notifies."""
        me = threading.current_thread()
        with self._changed:
            self._waiting[me] = (self._now + seconds, changed)
            self._known.add(me)
            self._changed.notify_all()
        try:
            changed.wait()
        finally:
            with self._changed:
                self._waiting.pop(me, None)

    def serve(self, thread: threading.Thread) -> None:
        """From now on the clock moves only when this thread has come to rest."""
        with self._changed:
            self._known.add(thread)

    # --- what the test does with it ------------------------------------------------------------------------

    def advance(self, seconds: float) -> None:
        """Move the clock by so many seconds."""
        with self._advancing:
            target = self._now + seconds
            self._settle()
            while (following := self._next()) <= target:
                self._move(following)
            self._move(target)

    def advance_to_event(self, limit: float) -> None:
        """Move the clock to the next moment at which something is due, and at most to `limit`."""
        with self._advancing:
            self._settle()
            self._move(min(self._next(), limit))

    def _next(self) -> float:
        with self._changed:
            return min((due for due, _ in self._waiting.values()), default=float("inf"))

    def _move(self, moment: float) -> None:
        self._now = max(self._now, moment)
        for listener in self._listeners:
            listener()
        self._settle()

    def _settle(self) -> None:
        """Wake every waiting thread, so that each works out anew what it waits for, until all of them wait."""
        with self._changed:
            woken = list(self._waiting.items())
            for thread, _ in woken:
                del self._waiting[thread]
        for _, (_, condition) in woken:
            with condition:
                condition.notify_all()
        with self._changed:
            for _ in range(int(PATIENCE / LOOK_AGAIN)):
                if self._changed.wait_for(self._resting, LOOK_AGAIN):  # a thread that ends tells nobody
                    return
        raise RuntimeError("a thread that waits for the virtual clock did not come to rest")

    def _resting(self) -> bool:
        me = threading.current_thread()
        self._known = {thread for thread in self._known if thread.is_alive()}
        return all(thread is me or thread in self._waiting for thread in self._known)
