"""The test kit as its users meet it: fixtures, a clock that the test advances, and what a run says at its end."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import pytest

from etcdfence import Doubt, Held, LeaseLost, LossReason, OutcomeUnknown, Standing, Superseded, Unavailable
from etcdfence.testing import MemoryEtcd, MemoryKit, ServerKit, connect_memory

from .support.waiting import eventually

pytest_plugins = ["pytester"]


@pytest.mark.req("S2-83", "S2-84", "P-32")
def test_expiry_without_sleeping(etcdfence_memory: MemoryKit) -> None:
    """A is paused past its TTL, B takes over, A wakes: all in virtual time."""
    first, second = etcdfence_memory.connect(), etcdfence_memory.connect()
    stale = first.acquire("job", ttl=15)
    stale.put("k", "A's")
    etcdfence_memory.clock.advance(60)
    stale.check()  # renewed on the way
    with pytest.raises(Held):
        second.try_acquire("job")
    first._engine.renewer.remove(stale._belief)  # the worker stalls: nobody renews
    etcdfence_memory.clock.advance(16)
    successor = second.try_acquire("job")
    successor.put("k", "B's")
    with pytest.raises(Superseded):
        stale.put("k", "stale")
    assert second.get("k").value == b"B's"
    assert successor.generation > stale.generation


@pytest.mark.req("S2-78")
def test_failed_renewals(etcdfence_memory: MemoryKit) -> None:
    """Unverified before the TTL has passed, lost once etcd says so, stopped before a successor's first write."""
    told: list[Any] = []
    coordinator = etcdfence_memory.connect(patience=1.0)
    lease = coordinator.acquire(
        "job", ttl=15, on_unverified=lambda _, doubt: told.append(doubt), on_lost=lambda _, loss: told.append(loss)
    )
    etcdfence_memory.pause()
    etcdfence_memory.clock.advance(14)
    assert lease.standing is Standing.UNVERIFIED
    eventually("the doubt is told", lambda: told == [Doubt.UNREACHABLE])
    with pytest.raises((Unavailable, OutcomeUnknown)):
        lease.check()
    etcdfence_memory.clock.advance(5)
    etcdfence_memory.etcd.resume()
    etcdfence_memory.clock.advance(3)
    assert lease.standing is Standing.LOST
    assert lease.loss is not None and lease.loss.reason is LossReason.EXPIRED
    eventually("the loss is told", lambda: lease.loss in told)
    with pytest.raises(LeaseLost):
        lease.put("k", "v")
    etcdfence_memory.connect().acquire("job").put("k", "the successor's")


def test_a_very_long_time_passes_at_once(etcdfence_memory: MemoryKit) -> None:
    coordinators = [etcdfence_memory.connect() for _ in range(3)]
    held = [one.acquire(f"job-{n}-{k}", ttl=15) for n, one in enumerate(coordinators) for k in range(5)]
    etcdfence_memory.clock.advance(10_000)
    assert all(lease.standing is Standing.HELD for lease in held)
    for lease in held:
        lease.check()


def test_the_clock_waits_for_a_thread_that_has_just_begun() -> None:
    for _ in range(100):
        etcd = MemoryEtcd()
        with connect_memory(etcd) as coordinator, coordinator.acquire("job", ttl=15) as lease:
            etcd.clock.advance(100)
            assert lease.standing is Standing.HELD


def test_waiting_moves_the_clock_of_its_maker(etcdfence_memory: MemoryKit) -> None:
    holder, waiter = etcdfence_memory.connect(), etcdfence_memory.connect()
    lease = holder.acquire("job", ttl=15)
    before = etcdfence_memory.clock.now()
    with pytest.raises(Held):
        waiter.acquire("job", wait=40)
    assert 40 <= etcdfence_memory.clock.now() - before < 50
    got: list[int] = []
    thread = threading.Thread(target=lambda: got.append(waiter.acquire("job", wait=40).generation))
    thread.start()
    eventually("it waits", lambda: waiter._engine.host._transport._waits)
    lease.release()
    thread.join(10)
    assert got and got[0] > lease.generation


def test_coroutines_in_memory(etcdfence_memory: MemoryKit) -> None:
    async def main() -> None:
        coordinator = await etcdfence_memory.connect_async()
        other = await etcdfence_memory.connect_async()
        with pytest.raises(LeaseLost):
            async with coordinator.acquire("job", ttl=15) as lease:
                waiting = asyncio.create_task(_generation(other))
                etcdfence_memory.clock.advance(100)
                await lease.check()
                etcdfence_memory.expire(lease)
                etcdfence_memory.clock.advance(6)  # a renewal finds out
                await asyncio.sleep(30)
        assert await waiting > lease.generation

    asyncio.run(main())


async def _generation(coordinator: Any) -> int:
    async with coordinator.acquire("job", wait=30) as lease:
        generation: int = lease.generation
        return generation


def test_a_pause_and_a_restart_in_memory(etcdfence_memory: MemoryKit) -> None:
    coordinator = etcdfence_memory.connect(patience=1.0)
    lease = coordinator.acquire("job", ttl=15)
    etcdfence_memory.pause()
    with pytest.raises(OutcomeUnknown) as unknown:
        lease.put("k", "v")
    etcdfence_memory.restart()
    assert lease.settle(unknown.value) == "not_applied"
    lease.put("k", "w")


@pytest.mark.req("S2-85", "S2-87")
def test_the_same_on_a_server(etcdfence_server: ServerKit, monkeypatch: pytest.MonkeyPatch) -> None:
    coordinator = etcdfence_server.connect(patience=20.0)
    lease = coordinator.acquire("job", ttl=30)
    lease.put("k", "v")
    etcdfence_server.pause()
    monkeypatch.setattr(lease._engine, "patience", 0.5)
    with pytest.raises(OutcomeUnknown):
        lease.put("k", "w")
    monkeypatch.undo()
    etcdfence_server.restart()
    lease.put("k", "x")
    assert coordinator.get("k").value == b"x"
    etcdfence_server.expire(lease)
    with pytest.raises(LeaseLost):
        lease.put("k", "y")

    async def main() -> None:
        async with etcdfence_server.connect_async() as other, other.acquire("job") as mine:
            await mine.put("k", "z")

    asyncio.run(main())


OUTSIDE = """
    import pytest
    from etcdfence import Held

    def test_in_memory(etcdfence_memory):
        lease = etcdfence_memory.connect().acquire("job", ttl=15)
        etcdfence_memory.clock.advance(120)
        lease.check()
        with pytest.raises(Held):
            etcdfence_memory.connect().try_acquire("job")

    def test_a_namespace_of_its_own(etcdfence_memory):
        etcdfence_memory.connect().acquire("job")

    def test_on_a_server(etcdfence_server):
        with etcdfence_server.connect().acquire("job") as lease:
            lease.put("k", "v")
"""


@pytest.mark.server
@pytest.mark.req("S2-87", "P-32")
def test_in_a_project_of_somebody_else(pytester: pytest.Pytester) -> None:
    """Installed is enough; and the summary says what a model does not prove."""
    pytester.makepyfile(OUTSIDE)
    done = pytester.runpytest_subprocess("-q", "-W", "error")
    done.assert_outcomes(passed=3)
    done.stdout.fnmatch_lines(["*proves nothing about a network, a disk or a remote service"])
    unused = pytester.runpytest_subprocess("-q", "-k", "server")
    assert "proves nothing" not in unused.stdout.str()
