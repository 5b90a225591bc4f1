"""etcdfence: own a task on etcd, and let etcd itself refuse what is stale.

What it promises, within an epoch; `tests/requirements.toml` and the README name the test of each line:

1. Per task, generations strictly increase, and at any revision at most one generation passes the guard.
2. A write under a generation that is no longer current is refused by etcd itself and changes nothing. Fenced
   writes are always sent to etcd, unless the handle was given back: a local belief never stands in for it.
3. An acknowledged fenced write was applied exactly once, in the order of its lease. A retry after a lost
   reply, or a copy that arrives late, never applies again and never lands after a later write.
4. Every call ends as done, refused with a typed reason, definitely not applied (Unavailable), or unknown with
   a way to settle it (OutcomeUnknown). Unknown is never reported as failed.
5. A holder learns of losing its lease, however it lost it, within one renewal period of reaching etcd. An old
   handle never comes back to life.

What it does not promise: that a paused process stops (expiry is not cancellation); anything about writers that
go around the fence; that an action outside etcd happens once; anything that follows from comparing the clocks
of two machines; that a store restored from a snapshot is noticed by somebody who was not connected before
(raise the epoch after a restore).

A map of the package:

    errors, model               values that callers see
    _requests, _flow            the requests to etcd, and the drivers of flows
    _keys, _records             where everything lives, and what is in it
    _txns, _states, _timing     decisions: every transaction, the state table, the renewal rules
    _flows/                     what etcdfence does, step by step, without I/O
    _renewal, _host, _engine    the renewal thread, the machine, and what is held
    _sync, _async               Coordinator and Lease in both colours; _desk, _handle and _leading are what
                                they share
    transports/                 wires to etcd
    testing/                    an etcd in memory, a virtual clock, the explorer, a pytest plug-in
    _connect, config, server    putting it together; settings; a private etcd
    running                     a command under a lease
    rehearsals/                 failures acted out on a real etcd
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from etcdfence._async import AsyncCoordinator, AsyncLeadership, AsyncLease, AsyncSession, AsyncTransaction
    from etcdfence._connect import connect, connect_async
    from etcdfence._sync import Coordinator, Leadership, Lease, Session, Transaction
    from etcdfence.errors import (
        Closed,
        Conflict,
        EtcdFenceError,
        Held,
        LeaseLost,
        LeaseReleased,
        Misuse,
        NotFound,
        OutcomeUnknown,
        OwnershipRefused,
        PermissionDenied,
        Refused,
        SessionLost,
        Superseded,
        TaskClosed,
        TooLarge,
        Unavailable,
        UnresolvedEffects,
        Unverified,
    )
    from etcdfence.model import (
        ABSENT,
        Attempt,
        Committed,
        Doubt,
        Entry,
        Guard,
        Liveness,
        Loss,
        LossReason,
        MemberStatus,
        Observation,
        Owner,
        Periods,
        Provenance,
        Receipt,
        Standing,
        TaskDescription,
        TaskKey,
        TaskState,
        Token,
        Verdict,
        Waiter,
    )

__version__ = "0.1.0"

__all__ = [
    "connect",
    "connect_async",
    "Coordinator",
    "Lease",
    "Leadership",
    "Session",
    "Periods",
    "Transaction",
    "AsyncCoordinator",
    "AsyncLease",
    "AsyncLeadership",
    "AsyncSession",
    "AsyncTransaction",
    "TaskKey",
    "Token",
    "Guard",
    "ABSENT",
    "Entry",
    "Provenance",
    "Receipt",
    "Committed",
    "Verdict",
    "Standing",
    "Loss",
    "LossReason",
    "Doubt",
    "TaskDescription",
    "TaskState",
    "Owner",
    "Liveness",
    "Observation",
    "Waiter",
    "Attempt",
    "MemberStatus",
    "EtcdFenceError",
    "Refused",
    "Held",
    "OwnershipRefused",
    "Superseded",
    "LeaseLost",
    "LeaseReleased",
    "Unverified",
    "SessionLost",
    "Conflict",
    "TaskClosed",
    "UnresolvedEffects",
    "PermissionDenied",
    "TooLarge",
    "NotFound",
    "Unavailable",
    "OutcomeUnknown",
    "Misuse",
    "Closed",
]

_HOMES = dict.fromkeys(["connect", "connect_async"], "etcdfence._connect")
_HOMES |= dict.fromkeys(["Coordinator", "Lease", "Session", "Leadership", "Transaction"], "etcdfence._sync")
_HOMES |= dict.fromkeys(
    ["AsyncCoordinator", "AsyncLease", "AsyncSession", "AsyncLeadership", "AsyncTransaction"], "etcdfence._async"
)


def __getattr__(name: str) -> Any:
    """Public names are imported when they are first used: `import etcdfence` alone loads no gRPC."""
    if name not in __all__:
        raise AttributeError(f"module 'etcdfence' has no attribute {name!r}")
    homes = [_HOMES[name]] if name in _HOMES else ["etcdfence.errors", "etcdfence.model"]
    for home in map(import_module, homes):
        if hasattr(home, name):
            globals()[name] = getattr(home, name)
            return globals()[name]
    raise AttributeError(f"module 'etcdfence' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
