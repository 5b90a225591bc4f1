"""MemoryEtcd: the pure model as a server in this process, and transports to it in both colours."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Callable
from typing import Any, Final, TypeVar, cast

from etcdfence._requests import Request, Wait, Waited
from etcdfence.errors import Closed, OutcomeUnknown
from etcdfence.testing import memory
from etcdfence.testing.clock import VirtualClock
from etcdfence.testing.memory import State

T = TypeVar("T")
STUCK: Final = 30.0  # seconds of real time in which nobody changes the store or moves the clock


def stuck() -> RuntimeError:
    return RuntimeError(
        f"nothing has happened for {STUCK:g} s to end this wait: let another thread or task change the store, or"
        " move the virtual clock with clock.advance(seconds)"
    )


class MemoryEtcd:
    """An etcd without members, disks or wires. `state` is everything it knows; time passes with its clock."""

    def __init__(self, clock: VirtualClock | None = None, state: State | None = None) -> None:
        self.clock = clock or VirtualClock()
        self._state = state or State(now=self.clock.now())
        self._changed = threading.Condition()
        self._listeners: list[Callable[[], None]] = []
        self._paused = False
        self.clock.on_advance(self._tick)

    @property
    def state(self) -> State:
        return self._state

    def answer(self, request: Request[T]) -> T:
        """One request, as etcd would answer it now. OutcomeUnknown while it is paused: nobody answers."""
        if self._paused:
            raise OutcomeUnknown("the in-memory etcd is paused and answers nobody")
        return self._change(lambda state: memory.step(state, request))

    def expire(self, lease_id: int) -> None:
        """End a lease now, as if its TTL had run out."""
        self._change(lambda state: (memory.expire(state, lease_id), None))

    def compact(self) -> None:
        """Forget everything before the present revision."""
        self._change(lambda state: (memory.compact(state, state.revision), None))

    def pause(self) -> None:
        """Answer nobody until `resume`; time goes on, and so do the ends of leases."""
        self._paused = True

    def resume(self) -> None:
        self._paused = False

    def restart(self) -> None:
        """As a restart of the server: all data is there, and every lease has its whole TTL again."""
        self._change(lambda state: (memory.restarted(state), None))

    def transport(self) -> MemoryTransport:
        return MemoryTransport(self)

    def transport_async(self) -> AsyncMemoryTransport:
        return AsyncMemoryTransport(self)

    def listen(self, listener: Callable[[], None]) -> Callable[[], None]:
        """Call this after every change, until what is returned is called."""
        self._listeners.append(listener)
        return lambda: self._listeners.remove(listener)

    def wait(self, wait: Waiting) -> Waited:
        """Look again after every change until there is an answer."""
        if self.clock.mine:
            return self._wait_moving_the_clock(wait)
        with self._changed:
            while (found := wait.look()) is None:
                if not self._changed.wait(STUCK):
                    raise stuck()
            return found

    def _wait_moving_the_clock(self, wait: Waiting) -> Waited:
        while (found := wait.look()) is None:
            ends = [lease.expires for lease in self._state.leases]
            self.clock.advance_to_event(min([wait.until, *ends]))
        return found

    def wake(self) -> None:
        with self._changed:
            self._changed.notify_all()
        for listener in list(self._listeners):
            listener()

    def _tick(self) -> None:
        self._change(lambda state: (state, None))

    def _change(self, step: Callable[[State], tuple[State, T]]) -> T:
        with self._changed:
            present = memory.advance(self._state, self.clock.now() - self._state.now)
            try:
                self._state, reply = step(present)
            except BaseException:
                self._state = present
                raise
        self.wake()
        return reply


class Waiting:
    """A wait, looked at after every change."""

    def __init__(self, etcd: MemoryEtcd, request: Wait) -> None:
        self._etcd, self._request = etcd, request
        self.until = etcd.clock.now() + request.timeout
        self.interrupted = False

    def look(self) -> Waited | None:
        if self.interrupted:
            raise Closed("this coordinator was closed while waiting")
        reply: Any = memory.step(self._etcd.state, self._request)[1]
        if isinstance(reply, Waited):
            return reply
        return Waited.TIMED_OUT if self._etcd.clock.now() >= self.until else None


class _Transport:
    def __init__(self, etcd: MemoryEtcd) -> None:
        self._etcd = etcd
        self._waits: set[Waiting] = set()
        self._closed = self._interrupted = False

    def interrupt(self) -> None:
        self._interrupted = True
        for wait in list(self._waits):
            wait.interrupted = True
        self._etcd.wake()

    def _require_open(self) -> None:
        if self._closed:
            raise Closed("this coordinator is closed")

    def _begin(self, request: Wait) -> Waiting:
        if self._interrupted:
            raise Closed("this coordinator is being closed")
        wait = Waiting(self._etcd, request)
        self._waits.add(wait)
        return wait


class MemoryTransport(_Transport):
    """For threads. A wait ends when another thread changes the store or moves the clock."""

    def call(self, request: Request[T], within: float) -> T:  # noqa: ARG002 - an answer takes no time
        self._require_open()
        if not isinstance(request, Wait):
            return self._etcd.answer(request)
        wait = self._begin(request)
        try:
            return cast("T", self._etcd.wait(wait))
        finally:
            self._waits.discard(wait)

    def close(self) -> None:
        self._closed = True
        self.interrupt()


class AsyncMemoryTransport(_Transport):
    """For coroutines. A wait ends when anybody changes the store or moves the clock."""

    async def call(self, request: Request[T], within: float) -> T:  # noqa: ARG002 - an answer takes no time
        self._require_open()
        await asyncio.sleep(0)  # a point at which a cancellation can come, as on any wire
        if not isinstance(request, Wait):
            return self._etcd.answer(request)
        loop, changed = asyncio.get_running_loop(), asyncio.Event()

        def wake() -> None:
            with contextlib.suppress(RuntimeError):  # the loop has ended, and the wait with it
                loop.call_soon_threadsafe(changed.set)

        wait, forget = self._begin(request), self._etcd.listen(wake)
        try:
            while (found := wait.look()) is None:
                try:
                    async with asyncio.timeout(STUCK):
                        await changed.wait()
                except TimeoutError:
                    raise stuck() from None
                changed.clear()
            return cast("T", found)
        finally:
            self._waits.discard(wait)
            forget()

    async def close(self) -> None:
        self.abandon()

    def abandon(self) -> None:
        self._closed = True
        self.interrupt()
