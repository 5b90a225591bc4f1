"""For tests of what is built on etcdfence: an etcd in memory, and a clock that the test advances.

    from etcdfence.testing import MemoryEtcd, connect_memory

    etcd = MemoryEtcd()
    with connect_memory(etcd) as coordinator:
        with coordinator.acquire("job", ttl=15) as lease:
            etcd.clock.advance(60)          # renewed on the way: still held
            etcd.expire(lease.receipt.lease_id)

MemoryEtcd models etcd (revisions, compares, leases, watches, compaction) and is held to a real one by the contract
suite of this package; a test that passes on it proves something about your use of ownership, and nothing about
the network, the disks or the services that yours talks to. The pytest plug-in brings the fixtures
`etcdfence_memory` and `etcdfence_server`; `explore` visits every schedule of flows.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from etcdfence.testing.clock import VirtualClock
    from etcdfence.testing.kit import Kit, MemoryKit, ServerKit, connect_memory, connect_memory_async
    from etcdfence.testing.wires import AsyncMemoryTransport, MemoryEtcd, MemoryTransport

__all__ = [
    "AsyncMemoryTransport",
    "Kit",
    "MemoryEtcd",
    "MemoryKit",
    "MemoryTransport",
    "ServerKit",
    "VirtualClock",
    "connect_memory",
    "connect_memory_async",
]


def __getattr__(name: str) -> Any:
    """Imported when first used: the pytest plug-in lives in this package, and every run of pytest loads it."""
    if name in __all__:
        for home in ("clock", "wires", "kit"):
            module = import_module(f"{__name__}.{home}")
            if hasattr(module, name):
                return getattr(module, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
