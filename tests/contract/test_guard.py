"""The guard inside transactions of other clients: it must let the owner pass and refuse everybody else."""

from __future__ import annotations

import base64
from collections.abc import Callable
from typing import Any

import etcd3gw
import pytest

from etcdfence import Coordinator, Guard, Lease
from etcdfence.transports._pb import etcdfence_wire_pb2 as pb

from ..support.raw import Raw

KEY = b"/controller/status"


def b64(data: bytes) -> str:
    return base64.b64encode(data).decode()


def through_etcd3gw(endpoint: str, guard: Guard, value: bytes) -> bool:
    host, port = endpoint.removeprefix("http://").split(":")
    client = etcd3gw.Etcd3Client(host=host, port=int(port), api_path="/v3/")
    answer = client.transaction(
        {
            "compare": guard.for_etcd3gw(),
            "success": [{"request_put": {"key": b64(KEY), "value": b64(value)}}],
            "failure": [],
        }
    )
    return bool(answer.get("succeeded", False))


def through_a_stub(endpoint: str, guard: Guard, value: bytes) -> bool:
    compares = []
    for result, target, key, operand in guard.for_stub():
        field: dict[str, Any] = {{"MOD": "mod_revision", "LEASE": "lease", "VALUE": "value"}[target]: operand}
        compares.append(pb.Compare(result=result, target=target, key=key, **field))
    put = pb.RequestOp(request_put=pb.PutRequest(key=KEY, value=value))
    raw = Raw(endpoint)
    try:
        return bool(raw.txn(pb.TxnRequest(compare=compares, success=[put])).succeeded)
    finally:
        raw.close()


Write = Callable[[str, Guard, bytes], bool]
both = pytest.mark.parametrize("write", [through_etcd3gw, through_a_stub])


def lose_the_owner_key(lease: Lease, raw: Raw) -> None:
    raw.delete(lease._tenure.keys.owner)


def lose_the_lease(lease: Lease, raw: Raw) -> None:
    raw.revoke(lease.receipt.lease_id)


def lose_to_a_successor(lease: Lease, raw: Raw) -> None:
    raw.delete(lease._tenure.keys.owner)
    raw.put(lease._tenure.keys.owner, b"{}")


def move_the_owner_key(lease: Lease, raw: Raw) -> None:
    raw.put(lease._tenure.keys.owner, b"{}", lease.receipt.lease_id)


def raise_the_epoch(lease: Lease, raw: Raw) -> None:
    raw.put(lease._tenure.guard.epoch_key, b'{"format":1,"number":9,"id":"raised"}')


@both
@pytest.mark.req("promise-2", "generation-zero")
@pytest.mark.parametrize(
    "lose", [lose_the_owner_key, lose_the_lease, lose_to_a_successor, move_the_owner_key, raise_the_epoch]
)
def test_the_guard_passes_and_then_refuses(
    write: Write, lose: Callable[[Lease, Raw], None], coordinator: Coordinator, raw: Raw, endpoint: str
) -> None:
    lease = coordinator.acquire("controller", ttl=60)
    guard = lease.guard()
    assert write(endpoint, guard, b"of the owner")
    assert raw.get(KEY).value == b"of the owner"
    lose(lease, raw)
    assert not write(endpoint, guard, b"stale")
    assert raw.get(KEY).value == b"of the owner"
    raw.delete(lease._tenure.keys.owner)


@pytest.mark.req("promise-2")
def test_every_comparison_of_the_guard_decides_alone(coordinator: Coordinator, raw: Raw, endpoint: str) -> None:
    """Each of the three, made wrong by itself, refuses the write."""
    guard = coordinator.acquire("controller").guard()
    wrong = [
        Guard(guard.owner_key, guard.generation + 1, guard.lease_id, guard.epoch_key, guard.epoch_value),
        Guard(guard.owner_key, guard.generation, guard.lease_id + 1, guard.epoch_key, guard.epoch_value),
        Guard(guard.owner_key, guard.generation, guard.lease_id, guard.epoch_key, b"another epoch"),
    ]
    for write in (through_etcd3gw, through_a_stub):
        assert write(endpoint, guard, b"right")
        assert [write(endpoint, one, b"wrong") for one in wrong] == [False, False, False]
