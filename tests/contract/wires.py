"""Every way to etcd that a flow can be given, behind the face of the synchronous transport."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Final

from etcdfence.transports.gateway import GatewayTransport
from etcdfence.transports.grpc import GrpcTransport
from etcdfence.transports.grpc_aio import GrpcAioTransport
from etcdfence.transports.in_thread import InThread

from ..support.colours import Loop

NETWORK: Final = ("grpc", "grpc.aio", "gateway", "gateway in thread")
WIRES: Final = ("memory", "memory async", *NETWORK)


class Wire:
    """A transport of either colour; `waits` says whether a wait is under way."""

    def __init__(self, transport: Any, loop: Loop | None) -> None:
        self._transport, self._loop = transport, loop
        self._waiting: Any = transport._transport if isinstance(transport, InThread) else transport

    def call(self, request: Any, within: float) -> Any:
        return self._run(self._transport.call, request, within)

    def waits(self) -> bool:
        return bool(self._waiting._waits)

    def close(self) -> None:
        self._run(self._transport.close)

    def _run(self, method: Callable[..., Any], *arguments: Any) -> Any:
        return self._loop.call(method, *arguments) if self._loop else method(*arguments)


OpenWire = Callable[[Sequence[str]], Wire]
OPENERS: Final[dict[str, Callable[[Sequence[str]], Any]]] = {
    "grpc": GrpcTransport,
    "grpc.aio": GrpcAioTransport,
    "gateway": GatewayTransport,
    "gateway in thread": lambda endpoints: InThread(GatewayTransport(endpoints)),
}
