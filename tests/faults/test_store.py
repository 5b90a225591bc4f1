"""A store that goes back in time, runs full, or changes its leader."""

from __future__ import annotations

import contextlib
import json
import secrets
import shutil
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

import etcdfence
from etcdfence import Coordinator, EtcdFenceError, LeaseLost, LossReason, OutcomeUnknown, Standing, Verdict
from etcdfence._connect import over
from etcdfence._requests import Compare
from etcdfence.server import LocalEtcd

from ..support.cluster import Cluster
from ..support.raw import Raw
from ..support.releases import newest
from ..support.tape import Tape
from ..support.waiting import eventually

Connect = Callable[..., Coordinator]


class Restorable(LocalEtcd):
    """An etcd whose data can be saved and brought back, as from a snapshot of its disk."""

    def __init__(self) -> None:
        super().__init__(binary=newest())

    def save(self) -> Path:
        self.kill()
        saved = self.data_dir / "saved"
        shutil.copytree(self.data_dir / "data", saved)
        self.start()
        return saved

    def restore(self, saved: Path) -> None:
        self.kill()
        shutil.rmtree(self.data_dir / "data")
        shutil.copytree(saved, self.data_dir / "data")
        self.start()


def owner_after_restore(without: Callable[[Compare], bool]) -> bytes:
    """Generation numbers come twice: A's is handed out again to C by a store restored from before A's claim."""
    with Restorable() as etcd:
        etcdfence.connect(etcd.endpoint, namespace="n").close()  # the epoch is in the snapshot
        saved = etcd.save()
        tape = Tape(etcd.endpoint)
        a_coordinator = over(tape, namespace="n")
        a_coordinator._engine.renewer.close()  # A sleeps: only its write meets the restored store
        a_lease = a_coordinator.acquire("job", ttl=60)
        etcd.restore(saved)
        c_coordinator = etcdfence.connect(etcd.endpoint, namespace="n")
        c_lease = c_coordinator.acquire("job", ttl=60)
        assert c_lease.generation == a_lease.generation
        c_lease.put("k", "C's")
        tape.without = without
        a_lease._holding.lane.seen = c_lease._holding.lane.seen  # a marker that happens to agree must not help
        with contextlib.suppress(EtcdFenceError):
            a_lease.put("k", "A's")
        value = c_coordinator.get("k").value
        for coordinator in (a_coordinator, c_coordinator):
            coordinator.close(1.0)
        assert value is not None
        return value


@pytest.mark.server
@pytest.mark.req("restore", "promise-2", "S0-10")
def test_a_generation_that_comes_twice_is_told_apart_by_the_lease() -> None:
    assert owner_after_restore(lambda _: False) == b"C's"


@pytest.mark.server
@pytest.mark.req("restore")
def test_without_the_lease_compare_a_generation_that_comes_twice_passes() -> None:
    assert owner_after_restore(lambda compare: compare.target == "LEASE") == b"A's"


@pytest.mark.server
@pytest.mark.req("restore", "S0-10", "promise-5")
def test_a_store_that_went_back_ends_every_lease() -> None:
    """The snapshot holds the owner key of one lease: restored, it would pass the guard again."""
    with Restorable() as etcd:
        coordinator = etcdfence.connect(etcd.endpoint, namespace="n")
        kept = coordinator.acquire("in the snapshot", ttl=10)
        saved = etcd.save()
        late = coordinator.acquire("after the snapshot", ttl=10)
        for n in range(5):
            late.put("k", str(n))
        etcd.restore(saved)
        for lease in (kept, late):
            loss = lease.wait_lost(15)
            assert loss is not None and loss.reason is LossReason.STORE_RESTORED
            with pytest.raises(LeaseLost):
                lease.put("k", "after the restore")
        assert coordinator.get("k").value is None
        again = coordinator.acquire("in the snapshot", wait=20)
        again.put("k", "new")
        coordinator.close()


@pytest.mark.server
@pytest.mark.req("restore", "promise-5")
def test_a_handle_that_was_lost_stays_lost_in_a_restored_store() -> None:
    """The snapshot is from the time when the handle owned: its guard and its marker would hold there again."""
    with Restorable() as etcd:
        coordinator = etcdfence.connect(etcd.endpoint, namespace="n")
        coordinator._engine.renewer.close()  # only its own calls meet the store
        lease = coordinator.acquire("job", ttl=60)
        lease.put("k", "before")
        saved = etcd.save()
        raw = Raw(etcd.endpoint)
        raw.delete(lease._tenure.keys.owner)
        with etcdfence.connect(etcd.endpoint, namespace="n") as other, other.acquire("job") as successor:
            successor.put("k", "successor")
            with pytest.raises(etcdfence.Superseded):
                lease.put("k", "stale")
        etcd.restore(saved)
        for _ in range(2):
            with pytest.raises((LeaseLost, etcdfence.Superseded)):
                lease.put("k", "back from the dead")
        assert coordinator.get("k").value == b"before"
        raw.close()
        coordinator.close(1.0)


@pytest.mark.server
@pytest.mark.req("restore", "promise-5")
def test_any_answer_of_a_restored_store_ends_the_leases_at_once() -> None:
    """Not only a renewal notices; and a lease taken from the restored store is not blamed for it."""
    with Restorable() as etcd:
        coordinator = etcdfence.connect(etcd.endpoint, namespace="n")
        coordinator._engine.renewer.close()
        lease = coordinator.acquire("job", ttl=60)
        saved = etcd.save()
        for n in range(5):
            lease.put("k", str(n))
        etcd.restore(saved)
        with pytest.raises(LeaseLost) as lost:
            lease.check()
        assert lost.value.loss.reason is LossReason.STORE_RESTORED
        coordinator.close(1.0)

        unburdened = etcdfence.connect(etcd.endpoint, namespace="n")
        for _ in range(20):
            unburdened.acquire("other").release()
        etcd.restore(saved)
        fresh = unburdened.acquire("a third", ttl=2)
        renewed = fresh._belief.renewed_at
        eventually("renewed", lambda: fresh._belief.renewed_at > renewed + 1)
        assert fresh.loss is None
        unburdened.close(1.0)


@pytest.mark.server
@pytest.mark.req("restore", "promise-5")
def test_two_who_look_into_one_restore_end_only_leases_of_the_old_store() -> None:
    """The second of them is late: by then a lease of the new store is held."""
    with Restorable() as etcd:
        coordinator = etcdfence.connect(etcd.endpoint, namespace="n")
        engine = coordinator._engine
        engine.renewer.close()
        old = coordinator.acquire("old", ttl=60)
        saved = etcd.save()
        for n in range(5):
            old.put("k", str(n))
        etcd.restore(saved)
        known, store = engine.host.seen, engine.host._store
        assert coordinator.get("k").value is None
        assert old.loss is not None
        new = coordinator.acquire("new", ttl=60)
        engine._ask_again(known, store)
        assert new.standing is Standing.HELD
        new.put("k", "v")
        coordinator.close(1.0)


@pytest.mark.server
@pytest.mark.field(29)
@pytest.mark.req("promise-4")
def test_database_space_exceeded_is_unknown_and_is_settled_later() -> None:
    with LocalEtcd(flags=["--quota-backend-bytes=16777216"]) as etcd:
        coordinator = etcdfence.connect(etcd.endpoint, namespace="n", patience=1.0)
        lease = coordinator.acquire("job", ttl=60)
        unknown: list[OutcomeUnknown] = []
        for n in range(40):
            try:
                lease.put(f"big/{n}", secrets.token_bytes(1_000_000))
            except OutcomeUnknown as error:
                unknown.append(error)
                break
        assert unknown
        assert "database space exceeded" in str(unknown[0])
        (member,) = coordinator.members()
        assert any("NOSPACE" in alarm for alarm in member.alarms)
        failed_key = f"big/{n}"
        _make_room(Raw(etcd.endpoint), [coordinator._engine.keys.data(f"big/{m}") for m in range(n)])
        verdict = lease.settle(unknown[0])
        assert verdict in (Verdict.APPLIED, Verdict.NOT_APPLIED)
        assert (coordinator.get(failed_key).value is not None) == (verdict is Verdict.APPLIED)
        lease.put(failed_key, "again")
        kv = Raw(etcd.endpoint).get(coordinator._engine.keys.data(failed_key))
        assert (kv.value, kv.version) == (b"again", 2 if verdict is Verdict.APPLIED else 1)
        coordinator.close()


def _make_room(raw: Raw, spare: list[bytes]) -> None:
    for key in spare:
        raw.delete(key)
    raw.gateway("/v3/kv/compaction", {"revision": str(raw.revision()), "physical": True})
    raw.gateway("/v3/maintenance/defragment", {})
    for alarm in raw.gateway("/v3/maintenance/alarm", {"action": "GET"}).get("alarms", []):
        raw.gateway("/v3/maintenance/alarm", {**alarm, "action": "DEACTIVATE"})
    raw.close()


@pytest.fixture(scope="module")
def cluster() -> object:
    with Cluster() as three:
        yield three


@pytest.mark.req("promise-1", "promise-3", "S0-10")
def test_writes_through_leader_changes_are_applied_once_and_in_order(cluster: Cluster) -> None:
    """The leader is stopped again and again while one lease appends to a log by compare-and-set."""
    coordinator = etcdfence.connect(
        cluster.endpoints, namespace="leader-changes", request_timeout=2.0, patience=20.0
    )
    lease = coordinator.acquire("job", ttl=120)
    done = threading.Event()
    acknowledged: list[int] = []

    def write() -> None:
        try:
            for n in range(150):
                log = json.loads(lease.get("log").value or b"[]")
                _surely(lease, "log", json.dumps([*log, n]))
                acknowledged.append(n)
        finally:
            done.set()

    thread = threading.Thread(target=write)
    thread.start()
    changes = 0
    while not done.is_set():
        mark = len(acknowledged)
        eventually("some writes", lambda m=mark: len(acknowledged) > m + 25 or done.is_set(), 100)
        if done.is_set():
            break
        member = cluster.members[cluster.leader()]
        member.pause()
        try:
            mark = len(acknowledged)
            eventually("writes under another leader", lambda m=mark: len(acknowledged) > m or done.is_set(), 100)
        finally:
            member.resume()
        changes += 1
    thread.join(60)
    assert changes >= 2
    assert acknowledged == list(range(150))
    assert json.loads(coordinator.get("log").value or b"[]") == list(range(150))
    assert lease.standing is Standing.HELD
    lease.check()
    lease.release()
    with coordinator.acquire("job") as successor:
        assert successor.generation > lease.generation
    coordinator.close()


def _surely(lease: etcdfence.Lease, key: str, value: str) -> None:
    """Put, whatever it takes: an unknown outcome is settled, and only what was not applied is repeated."""
    while True:
        try:
            lease.put(key, value)
            return
        except etcdfence.Unavailable:
            continue
        except OutcomeUnknown as error:
            if _settled(lease, error) is Verdict.APPLIED:
                return


def _settled(lease: etcdfence.Lease, unknown: OutcomeUnknown) -> Verdict:
    while True:
        with contextlib.suppress(OutcomeUnknown, etcdfence.Unavailable):
            return lease.settle(unknown)


@pytest.mark.req("S0-5")
def test_a_member_that_dies_costs_no_lease(cluster: Cluster) -> None:
    coordinator = etcdfence.connect(cluster.endpoints, namespace="dead-member", patience=30.0)
    with coordinator.acquire("job", ttl=20) as lease:
        wire = coordinator._engine.host._transport
        member = cluster.members[cluster.endpoints.index(wire._members.current.endpoint)]  # type: ignore[attr-defined]
        member.kill()
        try:
            before = lease._belief.renewed_at
            eventually("renewed through another member", lambda: lease._belief.renewed_at > before, 20)
            lease.put("k", "v")
            assert lease.standing is Standing.HELD
        finally:
            member.start()
    coordinator.close()
