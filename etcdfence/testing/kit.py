"""What the fixtures hand to a test: coordinators in a namespace of its own, and a hand on the server.

The same names in memory and on a real etcd. `expire` ends a lease now, `pause` stops the server from answering,
`restart` lets it answer again, with every lease's whole time to live.
"""

from __future__ import annotations

import secrets
from collections.abc import Awaitable, Coroutine
from typing import Any, Protocol

from etcdfence import _connect
from etcdfence._async import AsyncCoordinator, AsyncLease
from etcdfence._async.opening import Opening
from etcdfence._requests import Revoke
from etcdfence._sync import Coordinator, Lease
from etcdfence.server import LocalEtcd
from etcdfence.testing.wires import MemoryEtcd
from etcdfence.transports.grpc import GrpcTransport


def connect_memory(etcd: MemoryEtcd, *, namespace: str = "test", **options: Any) -> Coordinator:
    """A Coordinator on an etcd in memory, with that etcd's clock. Further options are those of `connect`."""
    return _connect.over(etcd.transport(), namespace=namespace, clock=etcd.clock, **options)


def connect_memory_async(
    etcd: MemoryEtcd, *, namespace: str = "test", **options: Any
) -> Opening[AsyncCoordinator]:
    """The same for coroutines."""

    def opened() -> Coroutine[Any, Any, AsyncCoordinator]:
        wires = etcd.transport_async(), etcd.transport()
        return _connect.over_async(*wires, namespace=namespace, clock=etcd.clock, **options)

    return Opening("connect_memory_async", opened)


class Kit(Protocol):
    """What the fixtures have in common. Coordinators made by it are closed at the end of the test."""

    namespace: str

    def connect(self, **options: Any) -> Coordinator: ...

    def connect_async(self, **options: Any) -> Opening[AsyncCoordinator]: ...

    def expire(self, lease: Lease | AsyncLease) -> None: ...

    def pause(self) -> None: ...

    def restart(self) -> None: ...


class _Closing:
    """The coordinators of one test. Asynchronous ones belong to the test's event loop, which may have ended: their
    leases are given back all the same."""

    def __init__(self) -> None:
        self.namespace = f"test-{secrets.token_hex(6)}"
        self._made: list[Coordinator | AsyncCoordinator] = []

    def _kept(self, coordinator: Coordinator) -> Coordinator:
        self._made.append(coordinator)
        return coordinator

    def _kept_async(self, opening: Awaitable[AsyncCoordinator]) -> Opening[AsyncCoordinator]:
        async def opened() -> AsyncCoordinator:
            coordinator = await opening
            self._made.append(coordinator)
            return coordinator

        return Opening("connect_async", opened)

    def close(self) -> None:
        for coordinator in self._made:
            engine = coordinator._engine
            engine.close(engine.host.now() + 2.0)


class MemoryKit(_Closing):
    """`etcdfence_memory`. `clock` is the test's to advance, `etcd` the server in memory."""

    def __init__(self) -> None:
        super().__init__()
        self.etcd = MemoryEtcd()
        self.clock = self.etcd.clock

    def connect(self, **options: Any) -> Coordinator:
        return self._kept(connect_memory(self.etcd, **{"namespace": self.namespace, **options}))

    def connect_async(self, **options: Any) -> Opening[AsyncCoordinator]:
        return self._kept_async(connect_memory_async(self.etcd, **{"namespace": self.namespace, **options}))

    def expire(self, lease: Lease | AsyncLease) -> None:
        self.etcd.expire(lease.receipt.lease_id)

    def pause(self) -> None:
        self.etcd.pause()

    def restart(self) -> None:
        self.etcd.resume()
        self.etcd.restart()

    def close(self) -> None:
        self.etcd.resume()
        super().close()


class ServerKit(_Closing):
    """`etcdfence_server`, on a private etcd, or on the one that ETCDFENCE_TEST_ENDPOINTS names; that one cannot be
    paused or restarted."""

    def __init__(self, endpoint: str, server: LocalEtcd | None) -> None:
        super().__init__()
        self.endpoint, self.server = endpoint, server
        self._paused = False

    def connect(self, **options: Any) -> Coordinator:
        return self._kept(_connect.connect(self.endpoint, **{"namespace": self.namespace, **options}))

    def connect_async(self, **options: Any) -> Opening[AsyncCoordinator]:
        return self._kept_async(_connect.connect_async(self.endpoint, **{"namespace": self.namespace, **options}))

    def expire(self, lease: Lease | AsyncLease) -> None:
        """By a revoke, which etcd carries out as it does an expiry."""
        transport = GrpcTransport([self.endpoint])
        try:
            transport.call(Revoke(lease.receipt.lease_id), 5.0)
        finally:
            transport.close()

    def pause(self) -> None:
        self._own().pause()
        self._paused = True

    def restart(self) -> None:
        server = self._own()
        if self._paused:
            server.resume()
            self._paused = False
        server.kill()
        server.start()

    def _own(self) -> LocalEtcd:
        if self.server is None:
            raise RuntimeError(f"{self.endpoint} was not started by these tests, so they do not stop it")
        return self.server

    def close(self) -> None:
        if self._paused:
            self._own().resume()
        super().close()
