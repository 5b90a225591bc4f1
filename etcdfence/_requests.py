"""The closed set of requests that flows may yield, and the replies they get.

Frozen values, so that a list of them is the trace of a schedule. `reply = yield from Range(...)` gives the
reply with its type: a request iterates over itself once and returns what was sent back.

A reply is the server's definite answer. Everything else is raised at the `yield`, as one of the families of
`etcdfence.errors`; in particular OutcomeUnknown where the request may have been, or may yet be, applied.
"""

from __future__ import annotations

from collections.abc import Generator
from dataclasses import dataclass
from enum import Enum, StrEnum
from typing import Any, Generic, TypeVar

from etcdfence.model import MemberStatus

T = TypeVar("T")


class Request(Generic[T]):
    __slots__ = ()

    def __iter__(self) -> Generator[Request[Any], Any, T]:
        reply: T = yield self
        return reply


class Target(StrEnum):
    CREATE = "CREATE"
    MOD = "MOD"
    VERSION = "VERSION"
    VALUE = "VALUE"
    LEASE = "LEASE"


@dataclass(frozen=True, slots=True)
class Compare:
    """`target(key) == operand`. With `range_end` it must hold for every key of the range, and for an empty
    range it is evaluated once against a missing key: CREATE == 0 over a range says that it is empty."""

    target: Target
    key: bytes
    operand: int | bytes
    range_end: bytes = b""


@dataclass(frozen=True, slots=True)
class Put:
    key: bytes
    value: bytes
    lease: int = 0


@dataclass(frozen=True, slots=True)
class Delete:
    key: bytes
    range_end: bytes = b""


class Order(StrEnum):
    KEY = "KEY"
    CREATE_ASCENDING = "CREATE_ASCENDING"
    CREATE_DESCENDING = "CREATE_DESCENDING"


@dataclass(frozen=True, slots=True)
class KeyValue:
    key: bytes
    value: bytes
    create_revision: int
    mod_revision: int
    version: int
    lease: int


@dataclass(frozen=True, slots=True)
class Header:
    cluster_id: int
    revision: int

    def older_than(self, known: Header) -> bool:
        """Whether a linearizable reply comes from another store than the one `known` before it was asked for: the
        cluster id differs, or the revision is lower. Ask a second time before believing it, another member
        where there is one: single members were seen to answer stale reads."""
        return known.cluster_id not in (0, self.cluster_id) or self.revision < known.revision


@dataclass(frozen=True, slots=True)
class RangeReply:
    kvs: tuple[KeyValue, ...]
    count: int

    @property
    def first(self) -> KeyValue | None:
        return self.kvs[0] if self.kvs else None


@dataclass(frozen=True, slots=True)
class Range:
    """A read inside a transaction. There is no field for a revision: one inside a transaction that may write
    can fork the members of a cluster (etcd-io/etcd 18667). `max_create` leaves out keys that were created later
    (0: none); `count` counts them all the same."""

    key: bytes
    range_end: bytes = b""
    limit: int = 0
    order: Order = Order.KEY
    keys_only: bool = False
    count_only: bool = False
    max_create: int = 0


Operation = Put | Delete | Range


@dataclass(frozen=True, slots=True)
class TxnReply:
    """`reads` are the replies of the branch's Range operations, in their order."""

    header: Header
    succeeded: bool
    reads: tuple[RangeReply, ...]


@dataclass(frozen=True, slots=True)
class Txn(Request[TxnReply]):
    """One flat transaction. `timeout` in seconds bounds this one try (None: the transport's own limit);
    `elsewhere` asks another member than the one used last, where there is one."""

    compares: tuple[Compare, ...]
    success: tuple[Operation, ...]
    failure: tuple[Operation, ...] = ()
    timeout: float | None = None
    elsewhere: bool = False

    @property
    def read_only(self) -> bool:
        return all(isinstance(operation, Range) for operation in (*self.success, *self.failure))


@dataclass(frozen=True, slots=True)
class GrantReply:
    ttl: int


@dataclass(frozen=True, slots=True)
class Grant(Request[GrantReply]):
    """Make an etcd lease under an id of our own choice. Never sent twice with the same id: a late first try
    would bring a revoked lease back."""

    lease_id: int
    ttl: int


@dataclass(frozen=True, slots=True)
class RevokeReply:
    found: bool


@dataclass(frozen=True, slots=True)
class Revoke(Request[RevokeReply]):
    lease_id: int


@dataclass(frozen=True, slots=True)
class TimeToLiveReply:
    """`ttl` in seconds, 0 or less when etcd does not know the lease or it has run out."""

    ttl: int
    granted_ttl: int


@dataclass(frozen=True, slots=True)
class TimeToLive(Request[TimeToLiveReply]):
    lease_id: int
    timeout: float | None = None


@dataclass(frozen=True, slots=True)
class KeepAliveReply:
    """Seconds by lease id; 0 (or no entry) where the server did not renew."""

    ttls: dict[int, int]


@dataclass(frozen=True, slots=True)
class KeepAlive(Request[KeepAliveReply]):
    """Renew several leases in one exchange. It does not go through raft: an answer proves no ownership."""

    lease_ids: tuple[int, ...]
    timeout: float


class Waited(Enum):
    WOKEN = "woken"
    TIMED_OUT = "timed out"
    COMPACTED = "compacted"


@dataclass(frozen=True, slots=True)
class Wait(Request[Waited]):
    """Wait until `key` (or with `range_end` any key of the range) is deleted at `from_revision` or later, or, with
    `puts`, put; at most `timeout` seconds. A wake-up, never a proof: read the store (or claim) afterwards."""

    key: bytes
    from_revision: int
    timeout: float
    range_end: bytes = b""
    puts: bool = False


@dataclass(frozen=True, slots=True)
class Members(Request[tuple[MemberStatus, ...]]):
    """Ask every endpoint for its own status."""

    timeout: float = 2.0


@dataclass(frozen=True, slots=True)
class Instant:
    """`clock` in seconds on a clock that counts suspend and never jumps; `wall` ISO 8601 for people only."""

    clock: float
    wall: str


@dataclass(frozen=True, slots=True)
class Now(Request[Instant]):
    pass


@dataclass(frozen=True, slots=True)
class Stamped:
    id: str
    wall: str


@dataclass(frozen=True, slots=True)
class Stamp(Request[Stamped]):
    """A fresh id and the time for people, which is what every write needs."""


@dataclass(frozen=True, slots=True)
class Sleep(Request[None]):
    """At least `seconds`, lengthened at random by up to half: retries of many clients must not line up."""

    seconds: float


@dataclass(frozen=True, slots=True)
class FreshId(Request[str]):
    """An id that nobody else has: 32 hexadecimal digits from the operating system's randomness."""


@dataclass(frozen=True, slots=True)
class FreshLeaseId(Request[int]):
    """A random positive 63-bit number."""
