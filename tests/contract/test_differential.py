"""The in-memory etcd beside a real one: the same requests, chosen at random, get the same replies, field by field.

Every difference that was found is kept as a case of its own in the contract suite. More, on demand:
ETCDFENCE_TEST_WALKS=2000 scripts/test tests/contract/test_differential.py
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule, run_state_machine_as_test

from etcdfence._requests import (
    Compare,
    Delete,
    Grant,
    KeepAlive,
    Operation,
    Order,
    Put,
    Range,
    Request,
    Revoke,
    Target,
    TimeToLive,
    TimeToLiveReply,
    Txn,
    Wait,
    Waited,
)
from etcdfence.errors import EtcdFenceError
from etcdfence.server import LocalEtcd
from etcdfence.testing.memory import PENDING, State, compact, step
from etcdfence.transports.grpc import GrpcTransport

from ..support.raw import Raw

WALKS = int(os.environ.get("ETCDFENCE_TEST_WALKS", "60"))
KEYS = [b"/d/a", b"/d/a/1", b"/d/b", b"/d/c"]
ENDS = [b"", b"", b"", b"/d/b", b"/d0", b"\0", b"/a"]
LEASES = [11, 12, 13]

keys = st.sampled_from(KEYS)
ends = st.sampled_from(ENDS)
values = st.sampled_from([b"", b"x", b"y"])
puts = st.builds(Put, keys | st.just(b""), values, st.sampled_from([0, 0, *LEASES]))
ranges = st.builds(
    Range,
    keys,
    ends,
    st.sampled_from([0, 0, 1, 2]),
    st.sampled_from(Order),
    st.booleans(),
    st.booleans(),
    st.integers(0, 4),
)
deletes = st.builds(Delete, keys, ends)
Drawn = tuple[Target, bytes, int, bytes, bytes]
drawn_compares = st.lists(st.tuples(st.sampled_from(Target), keys, st.integers(0, 9), values, ends), max_size=3)
branches = st.lists(puts | ranges | deletes, max_size=5).map(tuple)


class Beside(RuleBasedStateMachine):
    """`etcd` and `wire` are set for the run: a real etcd that nobody else uses."""

    wire: GrpcTransport
    raw: Raw
    compacted = 0

    @initialize()
    def begin(self) -> None:
        header = self.wire.call(Txn((), ()), 5).header
        self.began = header.revision
        self.state = State(revision=header.revision, compacted=Beside.compacted, cluster_id=header.cluster_id)

    def both(self, request: Request[Any], same: Callable[[Any, Any], bool] = lambda a, b: a == b) -> None:
        try:
            after, modelled = step(self.state, request)
        except EtcdFenceError as error:
            after, modelled = self.state, type(error)
        try:
            real: Any = self.wire.call(request, 5)
        except EtcdFenceError as error:
            real = type(error)
        assert same(modelled, real), f"{request}\nin memory: {modelled}\nfor real:  {real}"
        self.state = after

    @rule(drawn=drawn_compares, success=branches, failure=branches)
    def transaction(
        self, drawn: list[Drawn], success: tuple[Operation, ...], failure: tuple[Operation, ...]
    ) -> None:
        success, failure = self.bounded(success), self.bounded(failure)
        self.both(Txn(tuple(map(self.compare, drawn)), success, failure))

    def bounded(self, branch: tuple[Operation, ...]) -> tuple[Operation, ...]:
        """A bound on create revisions is drawn as the place of a present key."""
        created = [0, *[kv.create_revision for kv in self.state.kvs]]
        return tuple(
            replace(one, max_create=created[one.max_create % len(created)]) if isinstance(one, Range) else one
            for one in branch
        )

    def compare(self, drawn: Drawn) -> Compare:
        """Numbers are drawn as places in a list of those that mean something now: which ones there are depends on
        the server, and what is drawn must not."""
        target, key, place, value, end = drawn
        known = [n for kv in self.state.kvs for n in (kv.create_revision, kv.mod_revision)]
        numbers = {Target.LEASE: [0, *LEASES], Target.VERSION: [0, 1, 2, 3]}.get(
            target, [0, self.state.revision, *known]
        )
        return Compare(target, key, value if target is Target.VALUE else numbers[place % len(numbers)], end)

    @rule(lease=st.sampled_from(LEASES), ttl=st.sampled_from([1, 2, 600, 9_000_000_001]))
    def grant(self, lease: int, ttl: int) -> None:
        if ttl < 60:  # what would run out in the middle of a walk: only what is granted is compared
            self.both(Grant(lease, ttl))
            self.both(Revoke(lease))
        else:
            self.both(Grant(lease, ttl))

    @rule(lease=st.sampled_from(LEASES))
    def revoke(self, lease: int) -> None:
        self.both(Revoke(lease))

    @rule(lease=st.sampled_from(LEASES))
    def time_to_live(self, lease: int) -> None:
        def same(modelled: TimeToLiveReply, real: TimeToLiveReply) -> bool:
            gone = modelled.granted_ttl == real.granted_ttl == 0 and modelled.ttl == real.ttl == -1
            return gone or (modelled.granted_ttl == real.granted_ttl and 0 <= modelled.ttl - real.ttl <= 5)

        self.both(TimeToLive(lease), same)

    @rule(leases=st.lists(st.sampled_from(LEASES), min_size=1, max_size=3, unique=True).map(tuple))
    def keep_alive(self, leases: tuple[int, ...]) -> None:
        self.both(KeepAlive(leases, 5.0))

    @rule(back=st.integers(-1, 8), key=keys, end=ends, puts=st.booleans())
    def wait(self, back: int, key: bytes, end: bytes, puts: bool) -> None:
        start = max(self.began + 1, self.state.revision - back)  # what was before is of another walk
        if start == self.state.compacted:  # releases differ: a key deleted then is told of, or forgotten
            start += 1
        end = end if end > key or end == b"\0" else b""  # etcd ends a watch over nothing at once
        request = Wait(key, start, 2.0, end, puts)
        if step(self.state, request)[1] is PENDING:
            request = Wait(key, start, 0.02, end, puts)
            self.both(request, lambda modelled, real: modelled is PENDING and real is Waited.TIMED_OUT)
        else:
            self.both(request)

    @precondition(lambda self: self.state.revision - max(self.began, self.state.compacted) > 3)
    @rule(back=st.integers(0, 2))
    def compact(self, back: int) -> None:
        revision = self.state.revision - back
        self.state = compact(self.state, revision)
        Beside.compacted = revision
        self.raw.gateway("/v3/kv/compaction", {"revision": str(revision), "physical": True})

    def teardown(self) -> None:
        for lease in LEASES:
            self.wire.call(Revoke(lease), 5)
        self.wire.call(Txn((), (Delete(b"/d", b"/e"),)), 5)


@pytest.fixture
def wires(own_etcd: LocalEtcd) -> Iterator[tuple[GrpcTransport, Raw]]:
    wire, raw = GrpcTransport([own_etcd.endpoint]), Raw(own_etcd.endpoint)
    yield wire, raw
    wire.close()
    raw.close()


@pytest.mark.req("P-32", "P-33")
@pytest.mark.field(26)
def test_random_walks_get_the_same_replies(wires: tuple[GrpcTransport, Raw]) -> None:
    Beside.wire, Beside.raw = wires
    Beside.compacted = 0
    run_state_machine_as_test(
        Beside,
        settings=settings(
            max_examples=WALKS,
            stateful_step_count=60,
            deadline=None,
            suppress_health_check=list(HealthCheck),
        ),
    )
