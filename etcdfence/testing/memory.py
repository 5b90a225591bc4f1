"""etcd as a pure step: `step(state, request)` gives the state that follows and the reply.

It models etcd, not what etcdfence does with it: revisions, compares, leases, watches and compaction behave as
in a real server, which the contract suite and a differential test hold it to. A refused request raises the
same typed error as over a wire and changes nothing; nothing here reads a clock, time passes by `advance`.

Not modelled: members, authentication, quotas and alarms; sizes count keys and values without the envelope, and
keys created in one transaction sort stably. A key deleted at the very revision of a compaction is still told
of, as by etcd 3.5.30 (older ones forget it).
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from enum import Enum
from operator import attrgetter
from typing import Any, Final, TypeVar, cast

from etcdfence._requests import (
    Compare,
    Delete,
    Grant,
    GrantReply,
    Header,
    KeepAlive,
    KeepAliveReply,
    KeyValue,
    Members,
    Operation,
    Order,
    Put,
    Range,
    RangeReply,
    Request,
    Revoke,
    RevokeReply,
    Target,
    TimeToLive,
    TimeToLiveReply,
    Txn,
    TxnReply,
    Wait,
    Waited,
)
from etcdfence.errors import LeaseExists, LeaseNotFound, Misuse, TooLarge
from etcdfence.model import MemberStatus

T = TypeVar("T")
MAX_OPERATIONS: Final = 128  # --max-txn-ops
MAX_BYTES: Final = 1_572_864  # --max-request-bytes
MAX_TTL: Final = 9_000_000_000
_KEY: Final = attrgetter("key")


class Pending(Enum):
    """The reply to a wait that nothing has ended yet."""

    PENDING = "pending"


PENDING: Final = Pending.PENDING


@dataclass(frozen=True, slots=True)
class LeaseState:
    """`expires` is the moment (seconds on the state's own count) at which the lease ends unless renewed."""

    id: int
    granted: int
    expires: float


@dataclass(frozen=True)
class State:
    """Everything a single etcd knows, as one value. `kvs` are in the order of their keys, `leases` of their ids;
    `deletions` are the (revision, key) pairs that a watch can still be told of."""

    revision: int = 1
    compacted: int = 0
    kvs: tuple[KeyValue, ...] = ()
    leases: tuple[LeaseState, ...] = ()
    deletions: tuple[tuple[int, bytes], ...] = ()
    now: float = 0.0
    min_ttl: int = 2
    cluster_id: int = 1
    _hash: int = field(default=0, init=False, compare=False, repr=False)

    def __hash__(self) -> int:
        """Computed when it is first asked for; equality looks at everything."""
        if not self._hash:
            content = (self.revision, self.compacted, self.kvs, self.leases, self.deletions, self.now)
            object.__setattr__(self, "_hash", hash(content) or 1)
        return self._hash

    @property
    def header(self) -> Header:
        return Header(self.cluster_id, self.revision)

    def get(self, key: bytes) -> KeyValue | None:
        at = bisect_left(self.kvs, key, key=_KEY)
        return self.kvs[at] if at < len(self.kvs) and self.kvs[at].key == key else None

    def lease(self, lease_id: int) -> LeaseState | None:
        return next((lease for lease in self.leases if lease.id == lease_id), None)


def step(state: State, request: Request[T]) -> tuple[State, T]:
    """One request, answered as etcd would; a wait that nothing has ended yet is answered with PENDING. Raises what
    a transport raises for a definite refusal."""
    after, reply = _STEPS[type(request)](state, request)
    return after, cast("T", reply)


# --- transactions ------------------------------------------------------------------------------------------


def _txn(state: State, txn: Txn) -> tuple[State, TxnReply]:
    _require_wellformed(txn)
    succeeded = all(_holds(state, compare) for compare in txn.compares)
    branch = txn.success if succeeded else txn.failure
    _require_leases(state, branch)
    after, reads = state, []
    for operation in branch:
        if isinstance(operation, Put):
            after = _put(after, operation, state.revision + 1)
        elif isinstance(operation, Delete):
            after = _delete(after, _slice(after.kvs, operation.key, operation.range_end), state.revision + 1)
        else:
            reads.append(_range(after.kvs, operation))
    return after, TxnReply(after.header, succeeded, tuple(reads))


def _require_wellformed(txn: Txn) -> None:
    """What etcd checks before it proposes anything (api/v3rpc/key.go)."""
    if max(len(txn.compares), len(txn.success), len(txn.failure)) > MAX_OPERATIONS:
        raise TooLarge("etcdserver: too many operations in txn request")
    if not all(part.key for part in (*txn.compares, *txn.success, *txn.failure)):
        raise Misuse("etcdserver: key is not provided")
    for branch in (txn.success, txn.failure):
        _require_distinct(branch)
    writes = [op for op in (*txn.success, *txn.failure) if isinstance(op, Put)]
    if sum(len(op.key) + len(op.value) for op in writes) > MAX_BYTES:
        raise TooLarge("etcdserver: request is too large")


def _require_distinct(branch: tuple[Operation, ...]) -> None:
    """A key may be put once, and not put and deleted, in one branch; deletes may overlap."""
    puts = [op.key for op in branch if isinstance(op, Put)]
    deletes = [op for op in branch if isinstance(op, Delete)]
    clash = any(_clash(key, op) for op in deletes for key in puts)
    if clash or len(set(puts)) < len(puts):
        raise Misuse("etcdserver: duplicate key given in txn request")


def _require_leases(state: State, branch: tuple[Operation, ...]) -> None:
    for operation in branch:
        if isinstance(operation, Put) and operation.lease and state.lease(operation.lease) is None:
            raise LeaseNotFound("etcdserver: requested lease not found")


def _holds(state: State, compare: Compare) -> bool:
    found = _slice(state.kvs, compare.key, compare.range_end)
    if not found:
        return compare.target is not Target.VALUE and compare.operand == 0
    value = _TARGETS[compare.target]
    return all(value(kv) == compare.operand for kv in found)


_TARGETS: Final[dict[Target, Callable[[KeyValue], int | bytes]]] = {
    Target.CREATE: attrgetter("create_revision"),
    Target.MOD: attrgetter("mod_revision"),
    Target.VERSION: attrgetter("version"),
    Target.VALUE: attrgetter("value"),
    Target.LEASE: attrgetter("lease"),
}


def _clash(key: bytes, delete: Delete) -> bool:
    """As etcd's interval tree sees it: an end of one zero byte lies before everything, so it meets no put."""
    return delete.key <= key < delete.range_end if delete.range_end else key == delete.key


def _slice(kvs: tuple[KeyValue, ...], start: bytes, end: bytes) -> tuple[KeyValue, ...]:
    """The key `start`, or everything from it to before `end`; an `end` of one zero byte is no end at all."""
    low = bisect_left(kvs, start, key=_KEY)
    if not end:
        return kvs[low : low + 1] if low < len(kvs) and kvs[low].key == start else ()
    return kvs[low:] if end == b"\0" else kvs[low : bisect_left(kvs, end, lo=low, key=_KEY)]


def _range(kvs: tuple[KeyValue, ...], request: Range) -> RangeReply:
    found = _slice(kvs, request.key, request.range_end)
    count = len(found)
    if request.count_only:
        return RangeReply((), count)
    if request.max_create:
        found = tuple(kv for kv in found if kv.create_revision <= request.max_create)
    if request.order is not Order.KEY:
        descending = request.order is Order.CREATE_DESCENDING
        found = tuple(sorted(found, key=lambda kv: -kv.create_revision if descending else kv.create_revision))
    if request.limit:
        found = found[: request.limit]
    if request.keys_only:
        found = tuple(replace(kv, value=b"") for kv in found)
    return RangeReply(found, count)


def _put(state: State, put: Put, revision: int) -> State:
    at = bisect_left(state.kvs, put.key, key=_KEY)
    old = state.kvs[at] if at < len(state.kvs) and state.kvs[at].key == put.key else None
    kv = KeyValue(
        key=put.key,
        value=put.value,
        create_revision=old.create_revision if old else revision,
        mod_revision=revision,
        version=old.version + 1 if old else 1,
        lease=put.lease,
    )
    rest = state.kvs[at + 1 :] if old else state.kvs[at:]
    return _with(state, revision=revision, kvs=(*state.kvs[:at], kv, *rest))


def _delete(state: State, gone: Iterable[KeyValue], revision: int) -> State:
    keys = [kv.key for kv in gone]
    if not keys:
        return state
    return _with(
        state,
        revision=revision,
        kvs=tuple(kv for kv in state.kvs if kv.key not in keys),
        deletions=(*state.deletions, *((revision, key) for key in keys)),
    )


def _with(state: State, **changes: Any) -> State:
    return replace(state, **changes)


# --- leases ------------------------------------------------------------------------------------------------


def _grant(state: State, request: Grant) -> tuple[State, GrantReply]:
    if request.ttl > MAX_TTL:
        raise Misuse("etcdserver: too large lease TTL")
    if state.lease(request.lease_id) is not None:
        raise LeaseExists("etcdserver: lease already exists")
    granted = max(request.ttl, state.min_ttl)
    lease = LeaseState(request.lease_id, granted, state.now + granted)
    leases = tuple(sorted((*state.leases, lease), key=lambda one: one.id))
    return _with(state, leases=leases), GrantReply(granted)


def _revoke(state: State, request: Revoke) -> tuple[State, RevokeReply]:
    found = state.lease(request.lease_id) is not None
    return expire(state, request.lease_id), RevokeReply(found)


def expire(state: State, lease_id: int) -> State:
    """End a lease and delete its keys, all in one revision, as running out and a revoke both do."""
    attached = [kv for kv in state.kvs if lease_id and kv.lease == lease_id]
    without = _with(state, leases=tuple(lease for lease in state.leases if lease.id != lease_id))
    return _delete(without, attached, state.revision + 1)


def _time_to_live(state: State, request: TimeToLive) -> tuple[State, TimeToLiveReply]:
    lease = state.lease(request.lease_id)
    if lease is None:
        return state, TimeToLiveReply(-1, 0)
    return state, TimeToLiveReply(int(lease.expires - state.now), lease.granted)


def _keep_alive(state: State, request: KeepAlive) -> tuple[State, KeepAliveReply]:
    wanted = set(request.lease_ids)
    leases = tuple(_renewed(lease, state.now) if lease.id in wanted else lease for lease in state.leases)
    granted = {lease.id: lease.granted for lease in state.leases}
    ttls = {lease_id: granted.get(lease_id, 0) for lease_id in request.lease_ids}
    return (state if leases == state.leases else _with(state, leases=leases)), KeepAliveReply(ttls)


def _renewed(lease: LeaseState, now: float) -> LeaseState:
    return replace(lease, expires=now + lease.granted)


def advance(state: State, seconds: float) -> State:
    """Let time pass; leases that have run out by then end in the order in which they did."""
    state = _with(state, now=state.now + seconds)
    due = sorted((lease.expires, lease.id) for lease in state.leases if lease.expires <= state.now)
    for _, lease_id in due:
        state = expire(state, lease_id)
    return state


def restarted(state: State) -> State:
    """As after a restart or a change of the leader: every lease has its whole TTL again."""
    return _with(state, leases=tuple(_renewed(lease, state.now) for lease in state.leases))


# --- history -----------------------------------------------------------------------------------------------


def _wait(state: State, request: Wait) -> tuple[State, Waited | Pending]:
    if request.from_revision < state.compacted:
        return state, Waited.COMPACTED
    start, end = request.key, request.range_end
    gone = any(at >= request.from_revision and _within(key, start, end) for at, key in state.deletions)
    put = request.puts and any(kv.mod_revision >= request.from_revision for kv in _slice(state.kvs, start, end))
    return state, Waited.WOKEN if gone or put else PENDING


def _within(key: bytes, start: bytes, end: bytes) -> bool:
    return key == start if not end else start <= key and (key < end or end == b"\0")


def compact(state: State, revision: int) -> State:
    """Forget what happened before `revision`; Misuse where etcd would refuse that."""
    if not state.compacted < revision <= state.revision:
        raise Misuse(f"cannot compact at {revision}: compacted {state.compacted}, present {state.revision}")
    kept = tuple(entry for entry in state.deletions if entry[0] >= revision)
    return _with(state, compacted=revision, deletions=kept)


def _members(state: State, _request: Members) -> tuple[State, tuple[MemberStatus, ...]]:
    status = MemberStatus(
        endpoint="memory:",
        version="memory",
        leader=True,
        revision=state.revision,
        cluster_id=state.cluster_id,
        member_id=1,
    )
    return state, (status,)


_STEPS: Final[dict[type[Request[Any]], Callable[[State, Any], tuple[State, Any]]]] = {
    Txn: _txn,
    Grant: _grant,
    Revoke: _revoke,
    TimeToLive: _time_to_live,
    KeepAlive: _keep_alive,
    Wait: _wait,
    Members: _members,
}
