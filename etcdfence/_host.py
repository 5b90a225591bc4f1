"""What stands between the flows and the machine: clocks, chance, the state of the process, and the transport.

It also remembers the newest store that has been seen, which is how a store that went back in time is noticed.
"""

from __future__ import annotations

import asyncio
import os
import secrets
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from datetime import UTC, datetime
from typing import Any, Final, Protocol, TypeVar, cast

from etcdfence._flow import AsyncCaller, AsyncTransport, Caller, Transport
from etcdfence._requests import (
    FreshId,
    FreshLeaseId,
    Header,
    Instant,
    Now,
    Request,
    Sleep,
    Stamp,
    Stamped,
    TxnReply,
    Wait,
    Waited,
)
from etcdfence.errors import Closed

T = TypeVar("T")
SHORTEST_TRY: Final = 0.5  # seconds
SLICE: Final = 1.0  # seconds
NOTHING_SEEN: Final = Header(0, 0)

# A monotonic clock that counts suspend where there is one: a laptop that slept must not believe its lease.
_CLOCK: Final = getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC)


class Clock(Protocol):
    """Time as the shells know it: the system's, or one that a test advances."""

    def now(self) -> float:
        """Seconds, on a clock that counts suspend and never jumps."""

    def wall(self) -> str:
        """ISO 8601, for people only."""

    def sleep(self, seconds: float, until: threading.Event) -> None:
        """Wait so long, or until the event is set."""

    async def sleep_async(self, seconds: float) -> None: ...

    def wait(self, changed: threading.Condition, seconds: float) -> None:
        """Wait on a condition that is held, at most so long; may return early."""

    def serve(self, thread: threading.Thread) -> None:
        """This thread, which has been started, will wait by this clock."""


class SystemClock:
    def now(self) -> float:
        return time.clock_gettime(_CLOCK)

    def wall(self) -> str:
        return datetime.now(UTC).isoformat(timespec="milliseconds")

    def sleep(self, seconds: float, until: threading.Event) -> None:
        until.wait(seconds)

    async def sleep_async(self, seconds: float) -> None:
        await asyncio.sleep(seconds)

    def wait(self, changed: threading.Condition, seconds: float) -> None:
        changed.wait(seconds)

    def serve(self, thread: threading.Thread) -> None:
        """Nothing to do: real time asks nobody."""


SYSTEM: Final = SystemClock()


class Bounded:
    """A host for one call that must have ended by a certain moment of the local clock. `closing`: it gives
    something back, and goes on trying when other calls are being ended."""

    def __init__(self, host: Host, until: float, *, closing: bool = False) -> None:
        self._host, self._until, self._closing = host, until, closing

    def call(self, request: Request[T]) -> T:
        if self._closing and isinstance(request, Sleep):
            self._host.clock.sleep(request.seconds, threading.Event())
            return cast("T", None)
        return self._host.call(request, self._until)


class Stoppable:
    """Waits and pauses end within about SLICE seconds once `require_wanted` raises that they are to."""

    def __init__(self, inner: Caller, now: Callable[[], float], require_wanted: Callable[[], None]) -> None:
        self._inner, self._now, self._require_wanted = inner, now, require_wanted

    def call(self, request: Request[T]) -> T:
        if isinstance(request, Wait):
            return cast("T", self._wait(request))
        if isinstance(request, Sleep):
            self._require_wanted()
        return self._inner.call(request)

    def _wait(self, request: Wait) -> Waited:
        until = self._now() + request.timeout
        while True:
            self._require_wanted()
            left = until - self._now()
            word = self._inner.call(replace(request, timeout=min(SLICE, max(left, 0.0))))
            if word is not Waited.TIMED_OUT or left <= SLICE:
                return word


class Host:
    """Answers every request of a synchronous flow. Closed, or forked into a child, it refuses at once."""

    def __init__(self, transport: Transport, request_timeout: float, clock: Clock = SYSTEM) -> None:
        self._transport, self._timeout, self.clock = transport, request_timeout, clock
        self._pid = os.getpid()
        self._closed = threading.Event()
        self._interrupted = threading.Event()
        self._seen = NOTHING_SEEN
        self._store = 0  # which store `_seen` is about: counts the times we began anew with another
        # What was known, and of which store, before a reply that was older than it.
        self.regressed: tuple[Header, int] | None = None
        self._lock = threading.RLock()  # a signal handler may call us in the middle of a call
        self.local: dict[type[Request[Any]], Callable[[Any], Any]] = {
            Now: lambda _: Instant(clock.now(), clock.wall()),
            FreshId: lambda _: secrets.token_hex(16),
            Stamp: lambda _: Stamped(secrets.token_hex(16), clock.wall()),
            FreshLeaseId: lambda _: secrets.randbelow(2**63 - 1) + 1,
            Sleep: self._sleep,
        }

    def now(self) -> float:
        return self.clock.now()

    @property
    def forked(self) -> bool:
        return os.getpid() != self._pid

    @property
    def seen(self) -> Header:
        """The cluster id, and the highest revision, of any linearizable reply so far."""
        return self._seen

    def require_usable(self) -> None:
        if self.forked:
            raise Closed("this coordinator belongs to the process this one was forked from")
        if self._closed.is_set():
            raise Closed("this coordinator is closed")

    def call(self, request: Request[T], until: float | None = None) -> T:
        """Answer one request; `until` a moment of the local clock, if there is one."""
        local = self.local.get(type(request))
        if local is not None:
            return cast("T", local(request))
        self.require_usable()
        known, store = self._seen, self._store
        reply = self._transport.call(request, self.within(until))
        if isinstance(reply, TxnReply):
            self.witness(reply.header, known, store)
        return reply

    def within(self, until: float | None) -> float:
        """Not past `until`, but long enough for a healthy etcd to answer: a try cut short is a try unknown."""
        return self._timeout if until is None else min(self._timeout, max(until - self.now(), SHORTEST_TRY))

    @property
    def generation(self) -> int:
        """Which store `seen` is about."""
        return self._store

    @property
    def store(self) -> int:
        """Which store a lease belongs to that has just been claimed: a claim answered while it is being looked
        into whether the store went back belongs to the new one."""
        return self._store + (self.regressed is not None)

    def forget_store(self, store: int) -> None:
        """Begin anew with the store after this one, unless that has been done."""
        with self._lock:
            if store == self._store:
                self._seen, self.regressed = NOTHING_SEEN, None
                self._store += 1

    def interrupt(self) -> None:
        """End every wait and every pause between tries with Closed; requests still go through."""
        self._interrupted.set()
        self._transport.interrupt()

    def close(self) -> None:
        self._closed.set()
        self._interrupted.set()
        if not self.forked:
            self._transport.close()

    def witness(self, header: Header, known: Header, store: int) -> None:
        with self._lock:
            if store != self._store:
                return  # asked of the old store, heard after we had begun anew
            if header.older_than(known):
                self.regressed = known, store
            elif header.revision > self._seen.revision:
                self._seen = header

    def _sleep(self, request: Sleep) -> None:
        self.clock.sleep(spread(request.seconds), self._interrupted)
        self.require_uninterrupted()

    def require_uninterrupted(self) -> None:
        if self._interrupted.is_set():
            raise Closed("this coordinator was closed while a call was waiting to try again")


def spread(seconds: float) -> float:
    """Lengthened at random by up to half."""
    return seconds + seconds * secrets.randbelow(1000) / 2000


class AsyncHost:
    """Answers every request of a flow that coroutines run; what it remembers is the host's, which renewal and
    closing go on using from their threads."""

    def __init__(self, host: Host, transport: AsyncTransport) -> None:
        self.host, self.transport = host, transport

    async def call(self, request: Request[T], until: float | None = None) -> T:
        host = self.host
        if isinstance(request, Sleep):
            await host.clock.sleep_async(spread(request.seconds))
            host.require_uninterrupted()
            return cast("T", None)
        local = host.local.get(type(request))
        if local is not None:
            return cast("T", local(request))
        host.require_usable()
        known, store = host.seen, host.generation
        reply = await self.transport.call(request, host.within(until))
        if isinstance(reply, TxnReply):
            host.witness(reply.header, known, store)
        return reply


class AsyncStoppable:
    """`Stoppable` for coroutines."""

    def __init__(self, inner: AsyncCaller, now: Callable[[], float], require_wanted: Callable[[], None]) -> None:
        self._inner, self._now, self._require_wanted = inner, now, require_wanted

    async def call(self, request: Request[T]) -> T:
        if isinstance(request, Wait):
            return cast("T", await self._wait(request))
        if isinstance(request, Sleep):
            self._require_wanted()
        return await self._inner.call(request)

    async def _wait(self, request: Wait) -> Waited:
        until = self._now() + request.timeout
        while True:
            self._require_wanted()
            left = until - self._now()
            word = await self._inner.call(replace(request, timeout=min(SLICE, max(left, 0.0))))
            if word is not Waited.TIMED_OUT or left <= SLICE:
                return word


class AsyncBounded:
    """`Bounded` for coroutines."""

    def __init__(self, host: AsyncHost, until: float) -> None:
        self._host, self._until = host, until

    async def call(self, request: Request[T]) -> T:
        return await self._host.call(request, self._until)
