"""Where settings, transport and shell are put together.

The underscore is needed: a module called `connect` would take the place of the function of that name in the
package as soon as anybody imported it.
"""

from __future__ import annotations

import asyncio
import os
import secrets
import socket
import sys
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Any, Final

from etcdfence import config
from etcdfence._aside import aside
from etcdfence._async import AsyncCoordinator, AsyncEngine
from etcdfence._async.opening import Opening
from etcdfence._desk import Identity
from etcdfence._flow import AsyncTransport, Transport, adrive, drive
from etcdfence._flows import leases
from etcdfence._flows.pacing import Pace
from etcdfence._host import SYSTEM, AsyncBounded, AsyncHost, Bounded, Clock, Host
from etcdfence._keys import Keys
from etcdfence._sync import Coordinator, SyncEngine
from etcdfence._timing import checked_seconds
from etcdfence.errors import Misuse
from etcdfence.model import checked_name
from etcdfence.server import LocalEtcd

EMBEDDED: Final = "embedded:"


def connect(
    endpoints: str | Sequence[str] | None = None,
    *,
    namespace: str | None = None,
    transport: str | None = None,
    data_prefix: str | None = None,
    context: str | None = None,
    holder: str | None = None,
    request_timeout: float = 5.0,
    patience: float = 10.0,
) -> Coordinator:
    """Connect to etcd and return a Coordinator for one namespace; what is None is found as the CLI finds it.

    endpoints        "http://host:port", several separated by commas or in a list; or "embedded:", which starts
                     a private etcd that ends with the coordinator
    transport        "grpc", or "gateway" for etcd's HTTP gateway
    data_prefix      where data keys live in etcd; by default below the namespace. With a prefix of your own
                     the fence protects keys that other programs know
    holder           how this worker appears in records (for people only), by default host, pid and chance
    request_timeout  seconds for one request
    patience         seconds for one call, repetitions included

    The first connect to a namespace creates its epoch. Raises Unavailable where no member answers, Misuse for
    settings that cannot be.
    """
    settings = config.load(
        endpoints=endpoints,
        namespace=namespace,
        data_prefix=data_prefix,
        transport=transport,
        context=context,
    )
    with ExitStack() as undo:
        urls, stop = _endpoints(settings.endpoints, undo)
        coordinator = over(
            _wire(settings.transport, urls),
            namespace=settings.namespace,
            data_prefix=settings.data_prefix,
            holder=holder,
            request_timeout=request_timeout,
            patience=patience,
            on_close=stop,
            prove=settings.transport == "gateway",
        )
        undo.pop_all()
    return coordinator


def connect_async(
    endpoints: str | Sequence[str] | None = None,
    *,
    namespace: str | None = None,
    transport: str | None = None,
    data_prefix: str | None = None,
    context: str | None = None,
    holder: str | None = None,
    request_timeout: float = 5.0,
    patience: float = 10.0,
) -> Opening[AsyncCoordinator]:
    """The same for coroutines: `async with connect_async(…) as coordinator:`, or await it. The coordinator belongs
    to the event loop it was connected in; each loop connects for itself."""
    settings = config.load(
        endpoints=endpoints,
        namespace=namespace,
        data_prefix=data_prefix,
        transport=transport,
        context=context,
    )

    async def opened() -> AsyncCoordinator:
        with ExitStack() as undo:
            urls, stop = await _endpoints_async(settings.endpoints, undo)
            coordinator = await over_async(
                _async_wire(settings.transport, urls),
                _wire(settings.transport, urls),
                namespace=settings.namespace,
                data_prefix=settings.data_prefix,
                holder=holder,
                request_timeout=request_timeout,
                patience=patience,
                on_close=stop,
                prove=settings.transport == "gateway",
            )
            undo.pop_all()
        return coordinator

    return Opening("connect_async", opened)


def over(
    transport: Transport,
    *,
    namespace: str,
    data_prefix: str = "",
    holder: str | None = None,
    request_timeout: float = 5.0,
    patience: float = 10.0,
    on_close: Callable[[], None] = lambda: None,
    clock: Clock = SYSTEM,
    prove: bool = False,
) -> Coordinator:
    """A Coordinator over a transport of your own; it closes the transport when it is closed. `prove`: begin with
    transactions that must fail, for a wire that could lose a comparison without a word."""
    try:
        host, keys, seconds, identity = _parts(
            transport, clock, namespace, data_prefix, holder, request_timeout, patience
        )
        pace = Pace(host.now() + seconds)
        epoch = drive(leases.find_epoch(keys.epoch, pace), Bounded(host, pace.deadline))
        if prove:
            drive(leases.prove_compares(epoch.key, pace), Bounded(host, pace.deadline))
    except BaseException:
        transport.close()
        raise
    return Coordinator(SyncEngine(host, keys, seconds, on_close), epoch, identity)


async def over_async(
    transport: AsyncTransport,
    background: Transport,
    *,
    namespace: str,
    data_prefix: str = "",
    holder: str | None = None,
    request_timeout: float = 5.0,
    patience: float = 10.0,
    on_close: Callable[[], None] = lambda: None,
    clock: Clock = SYSTEM,
    prove: bool = False,
) -> AsyncCoordinator:
    """An AsyncCoordinator over transports of your own: one for its calls, and one for what its threads do
    (renewal, and giving back what a cancelled call has left). It closes both when it is closed."""
    try:
        host, keys, seconds, identity = _parts(
            background, clock, namespace, data_prefix, holder, request_timeout, patience
        )
        pace = Pace(host.now() + seconds)
        caller = AsyncBounded(AsyncHost(host, transport), pace.deadline)
        epoch = await adrive(leases.find_epoch(keys.epoch, pace), caller)
        if prove:
            await adrive(leases.prove_compares(epoch.key, pace), caller)
    except BaseException:
        background.close()
        await transport.close()
        raise
    return AsyncCoordinator(AsyncEngine(host, transport, keys, seconds, on_close), epoch, identity)


def _require_real_threads() -> None:
    """Under gevent or eventlet a thread is a coroutine that runs when others let it: a lease would go unrenewed,
    and gRPC, which blocks outside of Python, would stop everything. Better none than one that freezes."""
    gevent, eventlet = sys.modules.get("gevent.monkey"), sys.modules.get("eventlet.patcher")
    patched = (gevent is not None and gevent.is_module_patched("threading")) or (
        eventlet is not None and eventlet.is_monkey_patched("thread")
    )
    if patched:
        raise Misuse(
            "threads are monkey-patched (gevent or eventlet), so leases would not be renewed while other green"
            " threads run; use etcdfence in a process without monkey-patching, or connect_async in asyncio"
        )


def _parts(
    transport: Transport,
    clock: Clock,
    namespace: str,
    data_prefix: str,
    holder: str | None,
    request_timeout: float,
    patience: float,
) -> tuple[Host, Keys, float, Identity]:
    _require_real_threads()
    keys, identity = Keys(namespace, data_prefix), _identity(holder)
    host = Host(transport, _longer_than_zero(request_timeout, "request_timeout"), clock)
    return host, keys, _longer_than_zero(patience, "patience"), identity


def _wire(transport: str, urls: Sequence[str]) -> Transport:
    """Only the transport that is used is imported."""
    if transport == "gateway":
        from etcdfence.transports.gateway import GatewayTransport

        return GatewayTransport(urls)
    from etcdfence.transports.grpc import GrpcTransport

    return GrpcTransport(urls)


def _async_wire(transport: str, urls: Sequence[str]) -> AsyncTransport:
    if transport == "gateway":
        from etcdfence.transports.gateway import GatewayTransport
        from etcdfence.transports.in_thread import InThread

        return InThread(GatewayTransport(urls))
    from etcdfence.transports.grpc_aio import GrpcAioTransport

    return GrpcAioTransport(urls)


def _longer_than_zero(value: object, what: str) -> float:
    seconds = checked_seconds(value, what)
    if not seconds:
        raise Misuse(f"{what} must be longer than zero seconds")
    return seconds


def _endpoints(endpoints: tuple[str, ...], undo: ExitStack) -> tuple[tuple[str, ...], Callable[[], Any]]:
    if not _embedded(endpoints):
        return endpoints, lambda: None
    server = LocalEtcd().start()
    undo.callback(server.stop)
    return (server.endpoint,), server.stop


async def _endpoints_async(
    endpoints: tuple[str, ...], undo: ExitStack
) -> tuple[tuple[str, ...], Callable[[], Any]]:
    """Starting a server blocks, so a thread does it; one whose caller was cancelled stops it again."""
    if not _embedded(endpoints):
        return endpoints, lambda: None
    wanted = True

    def start() -> LocalEtcd:
        server = LocalEtcd().start()
        if not wanted:
            server.stop()
        return server

    try:
        server = await aside(start, "etcdfence-server")
    except asyncio.CancelledError:
        wanted = False
        raise
    undo.callback(server.stop)
    return (server.endpoint,), server.stop


def _embedded(endpoints: tuple[str, ...]) -> bool:
    if EMBEDDED in endpoints and len(endpoints) > 1:
        raise Misuse(f"{EMBEDDED!r} stands for a whole etcd; it cannot be mixed with other endpoints")
    return EMBEDDED in endpoints


def _identity(holder: str | None) -> Identity:
    host, pid = socket.gethostname(), os.getpid()
    name = f"{host}-{pid}-{secrets.token_hex(3)}" if holder is None else checked_name(holder, "holder")
    return Identity(name, host, pid)
