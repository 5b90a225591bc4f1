"""Other etcd releases, and the cluster that scripts/compose.yaml describes."""

from __future__ import annotations

import asyncio
import shlex
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import yaml

import etcdfence
from etcdfence import LeaseLost, LossReason, Superseded
from etcdfence.server import LocalEtcd, find, free_ports

from ..support.raw import Raw
from ..support.releases import releases
from ..support.waiting import eventually

COMPOSE = Path(__file__).parents[2] / "scripts" / "compose.yaml"


def binaries() -> list[Any]:
    if not releases():
        return [pytest.param(None, marks=pytest.mark.skip(reason="ETCDFENCE_TEST_ETCDS names no other releases"))]
    return [pytest.param(path, id=path.parent.name) for path in releases()]


@pytest.mark.server
@pytest.mark.parametrize("wire", ["grpc", "gateway"])
@pytest.mark.parametrize("binary", binaries())
def test_the_story_on_another_release(binary: Path, wire: str) -> None:
    """Claim, fenced write, renewal, loss, refusal, a line, a session, completion."""
    with (
        LocalEtcd(binary=binary) as etcd,
        etcdfence.connect(etcd.endpoint, namespace="n", transport=wire) as coordinator,
    ):
        assert coordinator.members()[0].version == binary.parent.name
        raw = Raw(etcd.endpoint)
        stale = coordinator.acquire("job", ttl=2)
        stale.put("k", "1", expect=etcdfence.ABSENT)
        renewed = stale._belief.renewed_at
        eventually("renewed", lambda: stale._belief.renewed_at > renewed + 1)
        raw.delete(stale._tenure.keys.owner)
        loss = stale.wait_lost(5)
        assert loss is not None
        assert loss.reason is LossReason.TAKEN_AWAY
        with coordinator.acquire("job", ttl=2) as successor:
            successor.put("k", "2")
            with pytest.raises(Superseded):
                stale.put("k", "stale")
        assert coordinator.get("k").value == b"2"
        _waits_in_line(coordinator)
        task = coordinator.acquire(etcdfence.TaskKey("op", "scope"))
        task.complete("done", {"revision": 1})
        assert coordinator.describe(etcdfence.TaskKey("op", "scope")).result == "done"
        raw.close()


def _waits_in_line(coordinator: etcdfence.Coordinator) -> None:
    """Two wait behind a third, in a session; first come, first served."""
    order: list[int] = []
    with coordinator.session(ttl=10) as session, ThreadPoolExecutor(2) as pool:
        lease = session.acquire("line")

        def wait(number: int) -> None:
            with session.acquire("line", wait=30):
                order.append(number)

        for number in range(2):
            pool.submit(wait, number)
            eventually("it is in line", lambda number=number: len(coordinator.waiters()) == number + 1)
        lease.proclaim("here")
        assert next(coordinator.observe("line")).value == "here"
        lease.release()
    assert order == [0, 1]


@pytest.mark.server
@pytest.mark.parametrize("wire", ["grpc", "gateway"])
@pytest.mark.parametrize("binary", binaries())
def test_coroutines_on_another_release(binary: Path, wire: str) -> None:
    """Claim, write, waiting for a key to go, loss in the middle of a block."""

    async def story(etcd: LocalEtcd) -> None:
        async with etcdfence.connect_async(etcd.endpoint, namespace="n", transport=wire) as coordinator:
            async with coordinator.acquire("job", ttl=5) as lease:
                waiting = asyncio.create_task(_generation(coordinator))
                await lease.put("k", "1")
                await asyncio.sleep(0)
            assert await waiting > lease.generation
            raw = Raw(etcd.endpoint)
            with pytest.raises(LeaseLost):
                async with coordinator.acquire("job", ttl=2) as lease:
                    raw.revoke(lease.receipt.lease_id)
                    await asyncio.sleep(20)
            raw.close()

    with LocalEtcd(binary=binary) as etcd:
        asyncio.run(asyncio.wait_for(story(etcd), 60))


async def _generation(coordinator: etcdfence.AsyncCoordinator) -> int:
    async with coordinator.acquire("job", ttl=5, wait=30) as lease:
        return lease.generation


@pytest.mark.server
def test_the_cluster_of_the_compose_file(tmp_path: Path) -> None:
    """Its three command lines, with names and ports of this machine put in for those of containers."""
    services: dict[str, Any] = yaml.safe_load(COMPOSE.read_text(encoding="utf-8"))["services"]
    ports = dict(zip(services, zip(free_ports(3), free_ports(3), strict=True), strict=True))
    members = []
    for name, service in services.items():
        client, peer = ports[name]
        words = shlex.split(service["command"])
        assert words[0] == "etcd"
        flags = [_localised(word, client, peer, ports) for word in words[1:] if not word.startswith("--data-dir")]
        members.append(LocalEtcd(binary=find(), data_dir=tmp_path / name, port=client, flags=flags))
        assert service["ports"] == [f"127.0.0.1:2379{name[-1]}:2379"]
    try:
        for member in members:
            member.launch()
        for member in members:
            eventually("healthy", member.healthy, 30)
        with etcdfence.connect([member.endpoint for member in members], namespace="n") as coordinator:
            assert [member.error for member in coordinator.members()] == ["", "", ""]
            with coordinator.acquire("job") as lease:
                lease.put("k", "v")
    finally:
        for member in members:
            member.stop()


def _localised(word: str, client: int, peer: int, ports: dict[str, tuple[int, int]]) -> str:
    word = word.replace("0.0.0.0:2379", f"127.0.0.1:{client}").replace("0.0.0.0:2380", f"127.0.0.1:{peer}")
    for name, (_, its_peer) in ports.items():
        word = word.replace(f"{name}:2380", f"127.0.0.1:{its_peer}")
    return word
