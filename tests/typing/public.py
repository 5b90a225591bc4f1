"""The public contract, for the type checkers; never run. A line that stops checking is a broken promise."""

from __future__ import annotations

import threading
from typing import Any, assert_type

import etcdfence
from etcdfence import (
    ABSENT,
    AsyncCoordinator,
    AsyncLease,
    Committed,
    Coordinator,
    Doubt,
    Entry,
    Guard,
    Lease,
    Loss,
    Receipt,
    Standing,
    TaskDescription,
    TaskKey,
    Token,
    Verdict,
)
from etcdfence.testing import MemoryKit


def lost(lease: Lease, loss: Loss) -> None:
    assert_type(loss.current, int | None)


def unverified(lease: Lease, doubt: Doubt) -> None:
    assert_type(lease.standing, Standing)


def controller(unknown: etcdfence.OutcomeUnknown, held: etcdfence.Held) -> None:
    with etcdfence.connect("http://127.0.0.1:2379", namespace="n") as coordinator:
        assert_type(coordinator, Coordinator)
        with coordinator.acquire(
            TaskKey("op", "scope"), ttl=15, wait=3, on_lost=lost, on_unverified=unverified
        ) as lease:
            assert_type(lease, Lease)
            assert_type(lease.token, Token)
            assert_type(lease.receipt, Receipt)
            assert_type(lease.put("k", b"v", expect=ABSENT), Committed)
            entry = lease.get("k")
            assert_type(entry, Entry)
            lease.put("k", "v", expect=entry.revision)
            lease.delete("k", expect=entry.revision)
            with lease.transaction() as tx:
                assert_type(tx.get("k"), Entry)
                tx.put("k", "v")
                tx.expect("other", ABSENT)
            assert_type(tx.committed, Committed | None)
            assert_type(lease.guard(), Guard)
            assert_type(lease.wait_lost(1), Loss | None)
            assert_type(lease.settle(unknown), Verdict)
            assert_type(lease.payload, Any)
            lease.complete({"n": 1}, {"revision": 1})
        with coordinator.session(ttl=15) as session:
            assert_type(session, etcdfence.Session)
            assert_type(session.acquire("lock", wait=3, max_silence=5, on_lost=lost), Lease)
            assert_type(session.loss, Loss | None)
        seen = next(coordinator.observe("lock"))
        assert_type(seen, etcdfence.Observation)
        assert_type(seen.value, str | None)
        assert_type(coordinator.waiters(), list[etcdfence.Waiter])
        assert_type(lease.proclaim("here"), Committed)
        leadership = coordinator.lead("controller", on_started=lead, on_new_leader=new_leader, retry_period=1.5)
        assert_type(leadership, etcdfence.Leadership)
        assert_type(leadership.lease, Lease | None)
        assert_type(leadership.run(), None)
        guard = coordinator.guard("lock", Token(1, 2), 3)
        assert_type(coordinator.put("lock", guard, "k", "v", expect=ABSENT), Committed)
        coordinator.acquire("lock", ttl=etcdfence.Periods(15, 10, 2)).release()
        assert_type(coordinator.try_acquire("lock"), Lease)
        assert_type(coordinator.describe("lock"), TaskDescription)
        assert_type(coordinator.tasks(owned_only=True), list[TaskDescription])
        assert_type(held.owner, etcdfence.Owner | None)


def lead(lease: Lease, stopping: threading.Event) -> None:
    assert_type(stopping.wait(1), bool)


def new_leader(identity: str | None) -> None: ...


async def lead_async(lease: AsyncLease) -> None:
    await lease.check()


def lost_async(lease: AsyncLease, loss: Loss) -> None:
    assert_type(lease.loss, Loss | None)


async def asynchronous_controller(unknown: etcdfence.OutcomeUnknown) -> None:
    async with etcdfence.connect_async("http://127.0.0.1:2379", namespace="n", transport="gateway") as coordinator:
        assert_type(coordinator, AsyncCoordinator)
        async with coordinator.acquire("lock", ttl=15, wait=3, on_lost=lost_async, cancel_on_loss=False) as lease:
            assert_type(lease, AsyncLease)
            assert_type(await lease.put("k", b"v", expect=ABSENT), Committed)
            async with lease.transaction() as tx:
                assert_type(await tx.get("k"), Entry)
                tx.put("k", "v")
            assert_type(lease.guard(), Guard)
            assert_type(await lease.wait_lost(1), Loss | None)
            assert_type(await lease.settle(unknown), Verdict)
            await lease.check()
        async with coordinator.session() as session, session.acquire("lock") as another:
            assert_type(another, AsyncLease)
        async for seen in coordinator.observe():
            assert_type(seen, etcdfence.Observation)
        leadership = coordinator.lead("controller", on_started=lead_async, on_new_leader=new_leader)
        assert_type(leadership, etcdfence.AsyncLeadership)
        await leadership.run()
        assert_type(await coordinator.try_acquire("lock"), AsyncLease)
        assert_type(await coordinator.tasks(), list[TaskDescription])
    assert_type(await etcdfence.connect_async(), AsyncCoordinator)


def tests_of_ones_own(etcdfence_memory: MemoryKit) -> None:
    assert_type(etcdfence_memory.connect(), Coordinator)
    etcdfence_memory.clock.advance(60)
