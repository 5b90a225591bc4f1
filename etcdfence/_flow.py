"""How a flow meets the world: `drive` and `adrive` are its only drivers, one for each colour.

A flow is a generator that yields requests and is sent replies. It decides; the driver acts. What goes wrong
is thrown into the flow at the request that met it, so that a flow handles a lost reply where it can happen.
"""

from __future__ import annotations

from collections.abc import Generator
from typing import Any, Protocol, TypeVar

from etcdfence._requests import Request
from etcdfence.errors import EtcdFenceError

T = TypeVar("T")
Flow = Generator[Request[Any], Any, T]


class Transport(Protocol):
    """One wire to etcd. `call` answers within so many seconds, or raises one of the families of
    `etcdfence.errors`. A request that brings a limit of its own is held to the shorter one.

    It never repeats a request by itself: only a flow knows which requests may be repeated.
    """

    def call(self, request: Request[T], within: float) -> T: ...

    def interrupt(self) -> None:
        """End waits that are under way, and refuse new ones, with Closed."""

    def close(self) -> None: ...


class AsyncTransport(Protocol):
    """The same for coroutines. A call that is cancelled is a call whose outcome is unknown."""

    async def call(self, request: Request[T], within: float) -> T: ...

    def interrupt(self) -> None: ...

    async def close(self) -> None: ...

    def abandon(self) -> None:
        """Close what can be closed without the event loop, which may have ended."""


class Caller(Protocol):
    """What `drive` needs: something that answers requests, those about time and chance included."""

    def call(self, request: Request[T]) -> T: ...


class AsyncCaller(Protocol):
    """What `adrive` needs."""

    async def call(self, request: Request[T]) -> T: ...


def drive(flow: Flow[T], caller: Caller) -> T:
    """Run a flow to its end and return what it returns.

    An interrupt (KeyboardInterrupt and the like) is not thrown into the flow: it closes it. A flow therefore
    notes what it is about to send before it yields it (see `_flows.fencing.Lane`).
    """
    try:
        request = next(flow)
        while True:
            try:
                reply = caller.call(request)
            except EtcdFenceError as error:
                request = flow.throw(error)
            else:
                request = flow.send(reply)
    except StopIteration as stop:
        result: T = stop.value
        return result
    finally:
        flow.close()


async def adrive(flow: Flow[T], caller: AsyncCaller) -> T:
    """The same for coroutines; a cancellation closes the flow as an interrupt does."""
    try:
        request = next(flow)
        while True:
            try:
                reply = await caller.call(request)
            except EtcdFenceError as error:
                request = flow.throw(error)
            else:
                request = flow.send(reply)
    except StopIteration as stop:
        result: T = stop.value
        return result
    finally:
        flow.close()
