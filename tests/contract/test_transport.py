"""What flows may rely on, held against a real etcd: replies, errors and the traps of the protocol."""

from __future__ import annotations

import secrets
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from etcdfence._requests import (
    Compare,
    Delete,
    Grant,
    KeepAlive,
    Members,
    Order,
    Put,
    Range,
    Revoke,
    Target,
    TimeToLive,
    Txn,
    Wait,
    Waited,
)
from etcdfence.errors import (
    Closed,
    LeaseExists,
    LeaseNotFound,
    Misuse,
    OutcomeUnknown,
    TooLarge,
    Unavailable,
)
from etcdfence.server import free_ports

from ..support.proxy import Proxy
from ..support.waiting import eventually
from .wires import NETWORK, OpenWire, Wire

on_a_network = pytest.mark.parametrize("variant", NETWORK, indirect=True)


@pytest.fixture
def key() -> bytes:
    return f"/contract/{secrets.token_hex(6)}/k".encode()


def lease_id() -> int:
    return secrets.randbelow(2**62) + 1


def test_a_transaction_and_its_reads(wire: Wire, key: bytes) -> None:
    """Reads of the success branch see the puts before them; the header names the revision that was made."""
    reply = wire.call(Txn((Compare(Target.CREATE, key, 0),), (Range(key), Put(key, b"1"), Range(key))), 5)
    before, after = reply.reads
    assert reply.succeeded
    assert before.first is None
    assert after.first is not None
    assert (after.first.value, after.first.create_revision) == (b"1", after.first.mod_revision)
    assert reply.header.revision == after.first.mod_revision
    again = wire.call(Txn((Compare(Target.CREATE, key, 0),), (Put(key, b"2"),), (Range(key),)), 5)
    assert not again.succeeded
    assert again.header.revision == reply.header.revision  # nothing was written
    assert again.reads[0].first == after.first


def test_missing_keys_compare_as_zero(wire: Wire, key: bytes) -> None:
    def holds(*compares: Compare) -> bool:
        return wire.call(Txn(compares, ()), 5).succeeded

    assert holds(Compare(Target.MOD, key, 0))
    assert holds(Compare(Target.CREATE, key, 0))
    assert holds(Compare(Target.LEASE, key, 0))
    assert not holds(Compare(Target.VALUE, key, b""))
    assert holds(Compare(Target.CREATE, key, 0, key + b"0"))  # an empty range
    wire.call(Txn((), (Put(key, b""),)), 5)
    assert holds(Compare(Target.VALUE, key, b""))
    assert not holds(Compare(Target.CREATE, key, 0, key + b"0"))
    assert not holds(Compare(Target.MOD, key, 0))


def test_ranges(wire: Wire, key: bytes) -> None:
    prefix = key + b"/"
    for name in (b"b", b"a", b"c"):
        wire.call(Txn((), (Put(prefix + name, name),)), 5)
    end = prefix[:-1] + b"0"

    def found(request: Range) -> list[bytes]:
        return [kv.key.removeprefix(prefix) for kv in wire.call(Txn((), (request,)), 5).reads[0].kvs]

    assert found(Range(prefix, end)) == [b"a", b"b", b"c"]
    assert found(Range(prefix, end, order=Order.CREATE_ASCENDING)) == [b"b", b"a", b"c"]
    assert found(Range(prefix, end, 2, Order.CREATE_DESCENDING)) == [b"c", b"a"]
    counted = wire.call(Txn((), (Range(prefix, end, count_only=True),)), 5).reads[0]
    assert (counted.count, counted.kvs) == (3, ())
    (bare,) = wire.call(Txn((), (Range(prefix, end, 1, keys_only=True),)), 5).reads[0].kvs
    assert (bare.key, bare.value) == (prefix + b"a", b"")
    wire.call(Txn((), (Delete(prefix, end),)), 5)
    assert found(Range(prefix, end)) == []


def test_leases(wire: Wire, key: bytes) -> None:
    lease = lease_id()
    assert wire.call(Grant(lease, 60), 5).ttl == 60
    with pytest.raises(LeaseExists):
        wire.call(Grant(lease, 60), 5)
    wire.call(Txn((), (Put(key, b"v", lease),)), 5)
    left = wire.call(TimeToLive(lease), 5)
    assert (left.granted_ttl, 50 < left.ttl <= 60) == (60, True)
    unknown = lease_id()
    assert wire.call(KeepAlive((lease, unknown), 5), 5).ttls == {lease: 60, unknown: 0}
    assert wire.call(Revoke(lease), 5).found
    assert not wire.call(Revoke(lease), 5).found
    assert wire.call(Txn((), (Range(key),)), 5).reads[0].first is None
    assert wire.call(TimeToLive(lease), 5).ttl <= 0
    with pytest.raises(LeaseNotFound):
        wire.call(Txn((), (Put(key, b"v", lease), Put(key + b"2", b"v"))), 5)
    assert wire.call(Txn((), (Range(key + b"2"),)), 5).reads[0].first is None  # refused whole
    wire.call(Txn((Compare(Target.MOD, key, 9),), (Put(key, b"v", lease),)), 5)  # its branch was not taken
    with pytest.raises(Misuse):
        wire.call(Grant(lease_id(), 9_000_000_001), 5)


def test_many_leases_are_renewed_in_one_exchange(wire: Wire) -> None:
    """Of the longest ids there are; a gateway that has begun to answer reads no further than it has."""
    ids = [2**63 - 1 - n for n in range(120)]
    for one in ids:
        wire.call(Grant(one, 600), 5)
    for _ in range(5):
        assert wire.call(KeepAlive(tuple(ids), 10.0), 10).ttls == dict.fromkeys(ids, 600)
    for one in ids:
        wire.call(Revoke(one), 5)


@on_a_network
def test_a_wait_that_is_interrupted_before_it_was_answered_ends(
    endpoint: str, open_wire: OpenWire, key: bytes
) -> None:
    with Proxy(endpoint) as proxy:
        wire = open_wire([proxy.endpoint])
        wire.call(Txn((), (Range(key),)), 5)
        proxy.swallow()
        outcome: list[object] = []

        def wait() -> None:
            try:
                outcome.append(wire.call(Wait(key, 1, 30), 5))
            except Exception as error:  # the test looks at it
                outcome.append(type(error))

        thread = threading.Thread(target=wait)
        thread.start()
        eventually("it waits", wire.waits)
        wire.close()
        thread.join(5)
        assert outcome == [Closed]


def test_a_small_ttl_is_raised_silently(wire: Wire) -> None:
    lease = lease_id()
    assert wire.call(Grant(lease, 1), 5).ttl > 1
    wire.call(Revoke(lease), 5)


def test_refused_before_it_was_proposed(wire: Wire, key: bytes) -> None:
    with pytest.raises(Misuse, match="duplicate key"):
        wire.call(Txn((), (Put(key, b"1"), Put(key, b"2"))), 5)
    with pytest.raises(TooLarge):
        wire.call(Txn((), tuple(Put(key + b"%d" % n, b"") for n in range(129))), 5)
    with pytest.raises(TooLarge):
        wire.call(Txn((), (Put(key, b"x" * 1_600_000),)), 5)
    with pytest.raises(TooLarge):
        wire.call(Txn((), (Put(key, b"x" * 2_200_000),)), 5)
    assert wire.call(Txn((), (Range(key),)), 5).reads[0].first is None


def test_answers_over_four_megabytes_are_read(wire: Wire, key: bytes) -> None:
    keys = [key + b"/%d" % n for n in range(5)]
    for one in keys:
        wire.call(Txn((), (Put(one, b"x" * 1_000_000),)), 5)
    reads = wire.call(Txn((), tuple(map(Range, keys))), 5).reads
    assert sum(len(kv.value) for found in reads for kv in found.kvs) == 5_000_000
    for one in keys:
        wire.call(Txn((), (Delete(one),)), 5)


@pytest.mark.req("promise-4")
@on_a_network
def test_no_answer_in_time_is_unknown_and_no_connection_is_unavailable(
    endpoint: str, open_wire: OpenWire, key: bytes
) -> None:
    with Proxy(endpoint) as proxy:
        wire = open_wire([proxy.endpoint])
        wire.call(Txn((), (Range(key),)), 5)
        proxy.swallow()
        with pytest.raises(OutcomeUnknown):
            wire.call(Txn((), (Put(key, b"v"),)), 0.5)
        wire.close()
    wire = open_wire([f"http://127.0.0.1:{free_ports(1)[0]}"])
    with pytest.raises(Unavailable):
        wire.call(Txn((), (Range(key),)), 2)
    wire.close()


@pytest.mark.req("promise-4")
@on_a_network
def test_a_connection_that_breaks_after_sending_is_unknown(
    endpoint: str, open_wire: OpenWire, store: Any, key: bytes
) -> None:
    with Proxy(endpoint) as proxy:
        wire = open_wire([proxy.endpoint])
        wire.call(Txn((), (Range(key),)), 5)
        proxy.swallow()
        outcome: list[Exception] = []

        def write() -> None:
            try:
                wire.call(Txn((), (Put(key, b"v"),)), 10)
            except Exception as error:  # the test looks at it
                outcome.append(error)

        thread = threading.Thread(target=write)
        thread.start()
        eventually("etcd has applied it", lambda: store.get(key))
        proxy.cut()
        thread.join(10)
        assert [type(error) for error in outcome] == [OutcomeUnknown]
        wire.close()


@pytest.mark.req("promise-4")
@pytest.mark.field(28)
@on_a_network
def test_no_request_is_ever_sent_twice(endpoint: str, open_wire: OpenWire, key: bytes) -> None:
    """Neither by us nor by gRPC: of a put whose answer is lost, etcd sees one."""
    with Proxy(endpoint) as proxy:
        wire = open_wire([proxy.endpoint, endpoint])
        wire.call(Txn((), (Range(key),)), 5)
        proxy.swallow()
        with pytest.raises(OutcomeUnknown):
            wire.call(Txn((), (Put(key, b"v"), Range(key))), 1.0)
        proxy.heal()
        kv = wire.call(Txn((), (Range(key),)), 5).reads[0].first
        assert kv is not None
        assert kv.create_revision == kv.mod_revision
        wire.close()


@on_a_network
def test_after_a_failure_the_next_member_is_asked(endpoint: str, open_wire: OpenWire, key: bytes) -> None:
    dead = f"http://127.0.0.1:{free_ports(1)[0]}"
    wire = open_wire([dead, endpoint])
    with pytest.raises(Unavailable):
        wire.call(Txn((), (Range(key),)), 2)
    wire.call(Txn((), (Range(key),)), 2)
    first, second = wire.call(Members(), 5)
    assert first.error
    assert (second.error, second.version[:2]) == ("", "3.")
    wire.close()


def test_waiting_for_a_key_to_go(wire: Wire, store: Any, key: bytes) -> None:
    revision = wire.call(Txn((), (Put(key, b"v"),)), 5).header.revision
    assert wire.call(Wait(key, revision + 1, 0.2), 5) is Waited.TIMED_OUT
    said: list[Waited] = []
    thread = threading.Thread(target=lambda: said.append(wire.call(Wait(key, revision + 1, 20), 5)))
    thread.start()
    store.put(key, b"another value does not wake")
    store.delete(key)
    thread.join(10)
    assert said == [Waited.WOKEN]
    assert wire.call(Wait(key, revision + 1, 5), 5) is Waited.WOKEN  # it went before we asked


def test_waiting_for_any_change_below_a_key(wire: Wire, store: Any, key: bytes) -> None:
    revision = wire.call(Txn((), (Put(key + b"/a", b"v"),)), 5).header.revision
    changes = Wait(key + b"/", revision + 1, 20, key + b"0", puts=True)
    assert wire.call(replace(changes, timeout=0.2), 5) is Waited.TIMED_OUT
    said: list[Waited] = []
    thread = threading.Thread(target=lambda: said.append(wire.call(changes, 5)))
    thread.start()
    store.put(key + b"0", b"outside of it")
    store.put(key + b"/b", b"inside")
    thread.join(10)
    assert said == [Waited.WOKEN]
    assert wire.call(replace(changes, puts=False, timeout=0.2), 5) is Waited.TIMED_OUT


def test_a_range_leaves_out_younger_keys(wire: Wire, key: bytes) -> None:
    made = [wire.call(Txn((), (Put(key + b"/%d" % n, b""),)), 5).header.revision for n in range(4)]
    older = Range(key + b"/", key + b"0", 1, Order.CREATE_DESCENDING, max_create=made[2] - 1)
    found = wire.call(Txn((), (older,)), 5).reads[0]
    assert [kv.create_revision for kv in found.kvs] == [made[1]]
    assert found.count == 4


def test_waiting_from_a_compacted_revision(wire: Wire, store: Any, key: bytes) -> None:
    for n in range(5):
        wire.call(Txn((), (Put(key, b"%d" % n),)), 5)
    store.compact()
    assert wire.call(Wait(key, 1, 5), 5) is Waited.COMPACTED


def test_closing_ends_a_wait(wire: Wire, key: bytes) -> None:
    outcome: list[Exception] = []
    revision = wire.call(Txn((), (Put(key, b"v"),)), 5).header.revision

    def wait() -> None:
        try:
            wire.call(Wait(key, revision + 1, 30), 5)
        except Exception as error:  # the test looks at it
            outcome.append(error)

    thread = threading.Thread(target=wait)
    thread.start()
    eventually("it waits", wire.waits)
    wire.close()
    thread.join(5)
    assert not thread.is_alive()
    assert [type(error) for error in outcome] == [Closed]
    with pytest.raises(Closed):
        wire.call(Txn((), ()), 5)


@on_a_network
@pytest.mark.field(43)
@pytest.mark.parametrize(
    ("ask", "expected"),
    [
        (lambda key: Wait(key, 1, 0.5), Waited.TIMED_OUT),
        (lambda _: KeepAlive((1,), 0.5), OutcomeUnknown),
        (lambda _: TimeToLive(1, timeout=0.5), OutcomeUnknown),
        (lambda key: Txn((), (Put(key, b"v"),), timeout=0.5), OutcomeUnknown),
        (lambda _: Revoke(1), OutcomeUnknown),
    ],
    ids=["wait", "keepalive", "time to live", "transaction", "revoke"],
)
def test_a_member_that_falls_silent_keeps_nobody_for_longer_than_asked(
    endpoint: str, open_wire: OpenWire, key: bytes, ask: Callable[[bytes], Any], expected: object
) -> None:
    """It accepts and does not answer: every kind of request ends within its limit; the next goes elsewhere."""
    with Proxy(endpoint) as proxy:
        wire = open_wire([proxy.endpoint, endpoint])
        wire.call(Txn((), (Range(key),)), 5)
        proxy.swallow()
        began = time.monotonic()
        try:
            found: object = wire.call(ask(key), 0.5)
        except Exception as error:  # the test looks at it
            found = type(error)
        assert found is expected
        assert time.monotonic() - began < 3.0
        if expected is OutcomeUnknown:
            wire.call(Txn((), (Range(key),)), 2)


@on_a_network
def test_proxy_variables_are_not_followed(
    monkeypatch: pytest.MonkeyPatch, endpoint: str, open_wire: OpenWire, key: bytes
) -> None:
    for name in ("http_proxy", "HTTP_PROXY", "grpc_proxy", "https_proxy"):
        monkeypatch.setenv(name, f"http://127.0.0.1:{free_ports(1)[0]}")
    wire = open_wire([endpoint])
    wire.call(Txn((), (Range(key),)), 3)
    wire.close()
