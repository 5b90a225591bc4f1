"""Where settings, transport and shell are put together.

The underscore is needed: a module called `connect` would take the place of the function of that name in the
package as soon as anybody imported it.
"""

from __future__ import annotations

import os
import secrets
import socket
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Final

from etcdfence import _host, config
from etcdfence._flow import Transport, drive
from etcdfence._flows import leases
from etcdfence._flows.pacing import Pace
from etcdfence._host import Bounded, Host
from etcdfence._keys import Keys
from etcdfence._sync import Coordinator, Engine, Identity
from etcdfence._timing import checked_seconds
from etcdfence.errors import Misuse
from etcdfence.model import checked_name
from etcdfence.server import LocalEtcd
from etcdfence.transports.grpc import GrpcTransport

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
            GrpcTransport(urls),
            namespace=settings.namespace,
            data_prefix=settings.data_prefix,
            holder=holder,
            request_timeout=request_timeout,
            patience=patience,
            on_close=stop,
        )
        undo.pop_all()
    return coordinator


def over(
    transport: Transport,
    *,
    namespace: str,
    data_prefix: str = "",
    holder: str | None = None,
    request_timeout: float = 5.0,
    patience: float = 10.0,
    on_close: Callable[[], None] = lambda: None,
) -> Coordinator:
    """A Coordinator over a transport of your own; it closes the transport when it is closed."""
    try:
        keys, identity = Keys(namespace, data_prefix), _identity(holder)
        host = Host(transport, _longer_than_zero(request_timeout, "request_timeout"))
        seconds = _longer_than_zero(patience, "patience")
        pace = Pace(_host.clock() + seconds)
        epoch = drive(leases.find_epoch(keys.epoch, pace), Bounded(host, pace.deadline))
    except BaseException:
        transport.close()
        raise
    return Coordinator(Engine(host, keys, seconds, on_close), epoch, identity)


def _longer_than_zero(value: object, what: str) -> float:
    seconds = checked_seconds(value, what)
    if not seconds:
        raise Misuse(f"{what} must be longer than zero seconds")
    return seconds


def _endpoints(endpoints: tuple[str, ...], undo: ExitStack) -> tuple[tuple[str, ...], Callable[[], None]]:
    if EMBEDDED not in endpoints:
        return endpoints, lambda: None
    if len(endpoints) > 1:
        raise Misuse(f"{EMBEDDED!r} stands for a whole etcd; it cannot be mixed with other endpoints")
    server = LocalEtcd().start()
    undo.callback(server.stop)
    return (server.endpoint,), server.stop


def _identity(holder: str | None) -> Identity:
    host, pid = socket.gethostname(), os.getpid()
    name = f"{host}-{pid}-{secrets.token_hex(3)}" if holder is None else checked_name(holder, "holder")
    return Identity(name, host, pid)
