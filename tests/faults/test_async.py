"""What is particular to coroutines: scopes, cancellation, event loops, and renewal beside a blocked loop."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import random
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest

import etcdfence
from etcdfence import AsyncCoordinator, Held, LeaseLost, LossReason, Misuse, Superseded, Unavailable
from etcdfence._connect import over_async
from etcdfence._requests import Request, Wait, Waited
from etcdfence.server import LocalEtcd
from etcdfence.transports.gateway import GatewayTransport
from etcdfence.transports.grpc import GrpcTransport
from etcdfence.transports.grpc_aio import GrpcAioTransport
from etcdfence.transports.in_thread import InThread

from ..support.raw import Raw
from ..support.waiting import eventually, pass_time

WIRES = pytest.mark.parametrize("wire", ["grpc", "gateway"])


def run(main: Callable[..., Awaitable[Any]], *arguments: Any) -> Any:
    async def bounded() -> Any:
        async with asyncio.timeout(60):
            return await main(*arguments)

    return asyncio.run(bounded())


async def condition(what: str, found: Callable[[], Any], within: float = 10.0) -> None:
    async with asyncio.timeout(within):
        while not found():
            await asyncio.sleep(0.01)


# --- losing ------------------------------------------------------------------------------------------------


@WIRES
@pytest.mark.req("S2-34", "promise-5")
def test_a_loss_cancels_the_block_and_says_why(endpoint: str, raw: Raw, namespace: str, wire: str) -> None:
    async def main() -> None:
        told: list[Any] = []
        async with etcdfence.connect_async(endpoint, namespace=namespace, transport=wire) as coordinator:
            entered = False
            with pytest.raises(LeaseLost) as lost:
                async with coordinator.acquire("job", ttl=2, on_lost=lambda *about: told.append(about)) as lease:
                    entered = True
                    raw.revoke(lease.receipt.lease_id)
                    try:
                        await asyncio.sleep(30)
                    except asyncio.CancelledError:
                        told.append("cancelled")
                        raise
            assert entered and lost.value.loss.reason is LossReason.REVOKED
            assert isinstance(lost.value.__cause__, asyncio.CancelledError)
            assert (told[0][0] is lease, told[1]) == (True, "cancelled")
            assert lease.loss is not None and await lease.wait_lost() == lease.loss
            task = asyncio.current_task()
            assert task is not None and task.cancelling() == 0
            for call in (lease.check, lambda: lease.put("k", "v")):
                with pytest.raises((LeaseLost, etcdfence.LeaseReleased)):
                    await call()
            with pytest.raises((LeaseLost, etcdfence.LeaseReleased)):
                lease.guard()
            async with coordinator.acquire("job", ttl=2) as again:
                await again.put("k", "v")

    run(main)


def test_a_block_may_choose_to_go_on(endpoint: str, raw: Raw, namespace: str) -> None:
    async def main() -> None:
        async with etcdfence.connect_async(endpoint, namespace=namespace) as coordinator:
            with pytest.raises(LeaseLost):
                async with coordinator.acquire("job", ttl=2, cancel_on_loss=False) as lease:
                    raw.revoke(lease.receipt.lease_id)
                    loss = await lease.wait_lost(20)
                    assert loss is not None and loss.reason is LossReason.REVOKED
                    with pytest.raises(LeaseLost):
                        await lease.put("k", "v")
                    await asyncio.sleep(0)

    run(main)


def test_a_loss_met_by_a_write_is_that_writes_error(endpoint: str, raw: Raw, namespace: str) -> None:
    """The block hears of its loss from its own call: the cancellation that follows does not come on top."""

    async def main() -> None:
        async with etcdfence.connect_async(endpoint, namespace=namespace) as coordinator:
            with pytest.raises(Superseded):
                async with coordinator.acquire("job", ttl=30) as lease:
                    raw.delete(lease._tenure.keys.owner)
                    async with (
                        etcdfence.connect_async(endpoint, namespace=namespace) as other,
                        other.acquire("job"),
                    ):
                        pass
                    await lease.put("k", "v")
            await asyncio.sleep(0.05)  # nothing comes after the block

    run(main)


@pytest.mark.req("S2-34")
def test_cancellations_from_outside_are_nobody_elses(endpoint: str, raw: Raw, namespace: str) -> None:
    """A time limit around the block, one inside it, a task group, and a cancellation together with a loss."""

    async def main() -> None:
        async with etcdfence.connect_async(endpoint, namespace=namespace) as coordinator:
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(0.2), coordinator.acquire("job"):
                    await asyncio.sleep(30)
            async with coordinator.acquire("job") as lease:
                with pytest.raises(TimeoutError):
                    async with asyncio.timeout(0.1):
                        await asyncio.sleep(30)
                await lease.put("k", "v")
            with pytest.raises(ExceptionGroup) as grouped:
                async with asyncio.TaskGroup() as group:
                    group.create_task(_hold(coordinator, "job"))
                    group.create_task(_fail())
            assert [type(error) for error in grouped.value.exceptions] == [ZeroDivisionError]
            assert raw.get(coordinator._engine.keys.task("job").owner) is None

            for order in ("loss first", "loss last"):
                task = asyncio.create_task(_hold(coordinator, "job"))
                await condition("it owns", coordinator._engine.holdings)
                (holding,) = coordinator._engine.holdings()
                for what in ("loss", "cancel") if order == "loss first" else ("cancel", "loss"):
                    if what == "cancel":
                        task.cancel()
                    else:
                        holding.belief.lose(etcdfence.Loss(LossReason.REVOKED))
                with pytest.raises(asyncio.CancelledError):
                    await task

    run(main)


def test_a_cancellation_that_comes_while_a_lost_block_is_left_goes_on(endpoint: str, namespace: str) -> None:
    """The body swallows the cancellation that its loss has caused, and ends; the one from outside falls into the
    very moment of leaving."""

    async def main() -> None:
        async with etcdfence.connect_async(endpoint, namespace=namespace) as coordinator:

            async def body() -> None:
                async with coordinator.acquire("job", ttl=60) as lease:
                    lease._belief.lose(etcdfence.Loss(LossReason.REVOKED))
                    with contextlib.suppress(asyncio.CancelledError):
                        await asyncio.sleep(30)
                    asyncio.get_running_loop().call_soon(task.cancel)

            task = asyncio.create_task(body())
            with pytest.raises(asyncio.CancelledError):
                await task
            assert task.cancelled()
            await condition("nothing is held", lambda: not coordinator._engine.holdings())

    run(main)


async def _hold(coordinator: AsyncCoordinator, task: str) -> None:
    async with coordinator.acquire(task, ttl=60):
        await asyncio.sleep(30)


async def _fail() -> None:
    await asyncio.sleep(0.2)
    raise ZeroDivisionError


# --- cancelling --------------------------------------------------------------------------------------------


class Stopping:
    """A transport that stops at one request, before it is sent or after it was answered, until it is cancelled."""

    def __init__(self, inner: Any) -> None:
        self.inner = inner
        self.stop_at: tuple[int, str] | None = None
        self.sent: list[Request[Any]] = []
        self.stopped = asyncio.Event()

    async def call(self, request: Any, within: float) -> Any:
        number = len(self.sent)
        self.sent.append(request)
        if self.stop_at == (number, "before"):
            await self._stop()
        reply = await self.inner.call(request, within)
        if self.stop_at == (number, "after"):
            await self._stop()
        return reply

    async def _stop(self) -> None:
        self.stopped.set()
        await asyncio.sleep(60)

    def interrupt(self) -> None:
        self.inner.interrupt()

    async def close(self) -> None:
        await self.inner.close()

    def abandon(self) -> None:
        self.inner.abandon()


@asynccontextmanager
async def stopping(endpoint: str, namespace: str, wire: str) -> AsyncIterator[tuple[AsyncCoordinator, Stopping]]:
    gateway = wire == "gateway"
    inner = InThread(GatewayTransport([endpoint])) if gateway else GrpcAioTransport([endpoint])
    behind = GatewayTransport([endpoint]) if gateway else GrpcTransport([endpoint])
    transport = Stopping(inner)
    async with await over_async(transport, behind, namespace=namespace, patience=3.0) as coordinator:
        transport.sent.clear()
        yield coordinator, transport


def leases(etcd: LocalEtcd, raw: Raw) -> list[str]:
    return [one["ID"] for one in raw.gateway("/v3/lease/leases", {}).get("leases", [])]


@WIRES
@pytest.mark.field(66)
@pytest.mark.parametrize("phase", ["before", "after"])
@pytest.mark.parametrize("number", range(5))
def test_a_call_cancelled_at_any_request_leaves_nothing(
    own_etcd: LocalEtcd, namespace: str, wire: str, number: int, phase: str
) -> None:
    """A whole life (grant, claim, write, end, revoke), cancelled before or after each of its requests."""
    raw = Raw(own_etcd.endpoint)

    async def life(coordinator: AsyncCoordinator) -> None:
        async with coordinator.acquire("job", ttl=60) as lease:
            await lease.put("k", "v")

    async def main() -> None:
        async with stopping(own_etcd.endpoint, namespace, wire) as (coordinator, transport):
            transport.stop_at = (number, phase)
            task = asyncio.create_task(life(coordinator))
            await transport.stopped.wait()
            transport.stop_at = None
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            owner = coordinator._engine.keys.task("job").owner
            await condition("no owner, no lease", lambda: not raw.get(owner) and not leases(own_etcd, raw), 2.0)
            assert not coordinator._engine.holdings()
            async with coordinator.try_acquire("job") as lease:
                await lease.put("k", "next")

    run(main)
    raw.close()


@pytest.mark.field(66)
def test_acquires_cancelled_at_random_leave_nothing(own_etcd: LocalEtcd, namespace: str) -> None:
    raw, dice = Raw(own_etcd.endpoint), random.Random(3)

    async def main() -> int:
        cancelled = 0
        async with etcdfence.connect_async(own_etcd.endpoint, namespace=namespace) as coordinator:
            for _ in range(500):
                try:
                    async with asyncio.timeout(dice.random() * 0.006), coordinator.acquire("job", ttl=60) as lease:
                        await lease.put("k", "v")
                except TimeoutError:
                    cancelled += 1
            owner = coordinator._engine.keys.task("job").owner
            await condition("all is given back", lambda: not raw.get(owner) and not leases(own_etcd, raw), 2.0)
            assert not coordinator._engine.holdings()
        return cancelled

    assert 50 < run(main) < 500
    raw.close()


@WIRES
@pytest.mark.req("promise-3")
@pytest.mark.parametrize("phase", ["before", "after"])
def test_a_cancelled_write_is_settled_by_the_next_one(
    endpoint: str, raw: Raw, namespace: str, wire: str, phase: str
) -> None:
    """In its thread it may still be under way: it is applied at most once, and never after a later write."""

    async def main() -> None:
        async with (
            stopping(endpoint, namespace, wire) as (coordinator, transport),
            coordinator.acquire("job", ttl=60) as lease,
        ):
            transport.stop_at = (len(transport.sent), phase)
            task = asyncio.create_task(lease.put("k", "cancelled"))
            await transport.stopped.wait()
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            transport.stop_at = None
            await lease.put("l", "next")
            entry = await lease.get("k")
            assert entry.value == (b"cancelled" if phase == "after" else None)
            versions = raw.get(coordinator._engine.keys.data("k"))
            assert versions is None or versions.version == 1

    run(main)


def test_a_cancelled_waiter_does_not_block_the_line(endpoint: str, namespace: str) -> None:
    async def main() -> None:
        async with (
            stopping(endpoint, namespace, "grpc") as (coordinator, transport),
            coordinator.acquire("job", ttl=60) as lease,
        ):
            transport.stop_at = (len(transport.sent), "before")
            first = asyncio.create_task(lease.put("k", "0"))
            await transport.stopped.wait()
            later = [asyncio.create_task(lease.put("k", str(n))) for n in range(1, 6)]
            await condition("all are in line", lambda: len(lease._holding.turn._line) == 6)
            later[1].cancel()
            first.cancel()
            transport.stop_at = None
            outcomes = await asyncio.gather(first, *later, return_exceptions=True)
            cancelled = [n for n, one in enumerate(outcomes) if isinstance(one, asyncio.CancelledError)]
            assert cancelled == [0, 2]
            revisions = [one.revision for one in outcomes if isinstance(one, etcdfence.Committed)]
            assert revisions == sorted(revisions) and len(revisions) == 4
            assert (await lease.get("k")).value == b"5"

    run(main)


def test_a_turn_is_waited_for_within_bounds(endpoint: str, namespace: str) -> None:
    async def main() -> None:
        async with (
            stopping(endpoint, namespace, "grpc") as (coordinator, transport),
            coordinator.acquire("job", ttl=60) as lease,
        ):
            transport.stop_at = (len(transport.sent), "before")
            stuck = asyncio.create_task(lease.put("k", "stuck"))
            await transport.stopped.wait()
            with pytest.raises(Unavailable, match="still under way"):
                await lease.put("k", "next")
            stuck.cancel()

    run(main)


def test_cancelled_reads_cost_no_server(own_etcd: LocalEtcd, namespace: str) -> None:
    """Cancelled on the wire they would: etcd 3.5.1 panics over a read-only transaction that is given up."""

    async def main() -> None:
        async with (
            etcdfence.connect_async(own_etcd.endpoint, namespace=namespace) as coordinator,
            coordinator.acquire("job", ttl=60) as lease,
        ):
            await lease.put("k", "v" * 1000)
            dice = random.Random(5)
            for _ in range(60):
                reads = [asyncio.create_task(lease.get("k")) for _ in range(20)]
                await asyncio.sleep(dice.random() * 0.003)
                for read in reads:
                    read.cancel()
                await asyncio.gather(*reads, return_exceptions=True)
            assert (await lease.get("k")).value == b"v" * 1000

    run(main)
    assert own_etcd.healthy()


def test_a_wait_hung_up_too_late_disturbs_nobody(endpoint: str, raw: Raw, namespace: str) -> None:
    """What is given up after it has ended must not be taken for a later wait that lies at the same place."""
    wire = GatewayTransport([endpoint])
    ended = Wait(f"/{namespace}/k".encode(), raw.revision() + 1, 0.05)
    assert wire.call(ended, 5) is Waited.TIMED_OUT
    wire.hang_up(ended)
    assert wire.call(ended, 5) is Waited.TIMED_OUT
    wire.close()


def test_a_closed_coordinator_ends_waits_and_gives_back(endpoint: str, raw: Raw, namespace: str) -> None:
    async def main() -> None:
        first = await etcdfence.connect_async(endpoint, namespace=namespace)
        lease = await first.acquire("job", ttl=60)
        waiter = await etcdfence.connect_async(endpoint, namespace=namespace)
        waiting = asyncio.create_task(_hold(waiter, "job"))
        await condition("it waits", lambda: waiter._engine.transport._waits)  # type: ignore[attr-defined]
        await waiter.close()
        with pytest.raises(etcdfence.Closed):
            await waiting
        await first.close()
        assert lease.loss is not None and lease.loss.reason is LossReason.CLOSED
        assert await lease.wait_lost() == lease.loss
        assert raw.get(lease._tenure.keys.owner) is None
        with pytest.raises(etcdfence.Closed):
            await lease.put("k", "v")

    run(main)


@WIRES
@pytest.mark.field(66)
@pytest.mark.parametrize("phase", ["before", "after"])
@pytest.mark.parametrize("number", [2, 3])
def test_a_completion_cancelled_in_its_middle_leaves_no_lease(
    own_etcd: LocalEtcd, namespace: str, wire: str, number: int, phase: str
) -> None:
    """Without a block around it: in the commit itself the lease may live on; once it has ended, nothing does."""
    raw = Raw(own_etcd.endpoint)

    async def main() -> None:
        async with stopping(own_etcd.endpoint, namespace, wire) as (coordinator, transport):
            lease = await coordinator.acquire(etcdfence.TaskKey("op", "scope"), ttl=60)
            transport.stop_at = (number, phase)
            task = asyncio.create_task(lease.complete(1, {"revision": 1}))
            await transport.stopped.wait()
            transport.stop_at = None
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            await lease.complete(1, {"revision": 1})
            assert await lease.wait_lost(5) is None
            await condition("no lease", lambda: not leases(own_etcd, raw), 2.0)
            with pytest.raises(etcdfence.TaskClosed):
                await coordinator.acquire(etcdfence.TaskKey("op", "scope"))

    run(main)
    raw.close()


def test_an_ending_that_is_found_out_later_ends_the_handle(own_etcd: LocalEtcd, namespace: str) -> None:
    """`fail` is cancelled after etcd has applied it; the next write hears of it, and everything is given back."""
    raw = Raw(own_etcd.endpoint)

    async def main() -> None:
        async with stopping(own_etcd.endpoint, namespace, "grpc") as (coordinator, transport):
            lease = await coordinator.acquire("job", ttl=60)
            waiting = asyncio.create_task(lease.wait_lost())
            transport.stop_at = (2, "after")
            task = asyncio.create_task(lease.fail("it broke"))
            await transport.stopped.wait()
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            transport.stop_at = None
            with pytest.raises(etcdfence.Refused):
                await lease.put("k", "v")
            assert await asyncio.wait_for(waiting, 5) is None
            assert lease.standing is etcdfence.Standing.RELEASED
            await condition("no lease", lambda: not leases(own_etcd, raw), 2.0)
            assert not coordinator._engine.holdings()

    run(main)
    raw.close()


def test_closing_waits_for_what_is_being_undone(own_etcd: LocalEtcd, namespace: str) -> None:
    raw = Raw(own_etcd.endpoint)

    async def main() -> None:
        for phase in ("before", "after"):
            for number in (0, 1):
                async with stopping(own_etcd.endpoint, namespace, "grpc") as (coordinator, transport):
                    transport.stop_at = (number, phase)
                    task = asyncio.create_task(_hold(coordinator, "job"))
                    await transport.stopped.wait()
                    task.cancel()
                    with pytest.raises(asyncio.CancelledError):
                        await task
                assert not leases(own_etcd, raw)

    run(main)
    raw.close()


def test_closing_stands_in_no_line_of_its_users(endpoint: str, namespace: str) -> None:
    """The loop's default executor is full of somebody's slow work."""
    gate = threading.Event()

    async def main() -> None:
        coordinator = await etcdfence.connect_async(endpoint, namespace=namespace)
        await coordinator.acquire("job", ttl=60)
        slow = [asyncio.create_task(asyncio.to_thread(gate.wait, 30)) for _ in range(64)]
        await asyncio.sleep(0)
        async with asyncio.timeout(5):
            await coordinator.close()
        gate.set()
        await asyncio.gather(*slow)

    try:
        run(main)
    finally:
        gate.set()


@WIRES
def test_closing_under_many_calls_ends_them_as_ours(endpoint: str, namespace: str, wire: str) -> None:
    async def main() -> None:
        coordinator = await etcdfence.connect_async(endpoint, namespace=namespace, transport=wire)
        lease = await coordinator.acquire("job", ttl=60)
        calls = [asyncio.create_task(lease.get(f"k{n}")) for n in range(150)]
        await asyncio.sleep(0)
        await coordinator.close()
        outcomes = await asyncio.gather(*calls, return_exceptions=True)
        strange = [one for one in outcomes if not isinstance(one, etcdfence.Entry | etcdfence.EtcdFenceError)]
        assert strange == []

    run(main)


@WIRES
@pytest.mark.field(67)
def test_another_loop_is_refused_and_nothing_changes(endpoint: str, raw: Raw, namespace: str, wire: str) -> None:
    async def begin() -> Any:
        coordinator = await etcdfence.connect_async(endpoint, namespace=namespace, transport=wire)
        return coordinator, await coordinator.acquire("job", ttl=60)

    async def elsewhere() -> None:
        for call in (
            lease.check,
            lambda: lease.put("k", "v"),
            lambda: lease.get("k"),
            lambda: lease.wait_lost(1),
            lambda: lease.fail("no"),
            lease.release,
            lease.__aenter__,
            lambda: coordinator.describe("job"),
        ):
            with pytest.raises(Misuse, match="another event loop"):
                await call()
        assert lease.standing is etcdfence.Standing.HELD
        await coordinator.close()

    coordinator, lease = run(begin)
    with pytest.raises(Misuse, match="another event loop"):
        coordinator.acquire("other")
    run(elsewhere)
    assert raw.get(lease._tenure.keys.owner) is None


# --- loops -------------------------------------------------------------------------------------------------

LOOPS = """
    import asyncio, sys, gc, time
    import etcdfence

    endpoint, namespace, wire = sys.argv[1:]

    async def life(number, close=True):
        coordinator = await etcdfence.connect_async(endpoint, namespace=namespace, transport=wire)
        async with coordinator.acquire("job", ttl=60) as lease:
            await lease.put("k", str(number))
        if close:
            await coordinator.close()
        return coordinator

    async def used_elsewhere(coordinator):
        try:
            await coordinator.get("k")
        except etcdfence.Misuse as error:
            print("refused:", error)
        await coordinator.close()

    async def left_holding():
        coordinator = await etcdfence.connect_async(endpoint, namespace=namespace, transport=wire)
        return coordinator, await coordinator.acquire("left", ttl=60)

    for number in range(3):
        asyncio.run(life(number))
    asyncio.run(used_elsewhere(asyncio.run(life(3, close=False))))
    coordinator, lease = asyncio.run(left_holding())
    print("standing after its loop:", lease.standing)
    asyncio.run(coordinator.close())
    print("loss:", lease.loss.reason)
    kept = asyncio.run(left_holding())  # given back when the interpreter ends
    gc.collect()
    print("done")
"""


@WIRES
@pytest.mark.field(67)
def test_one_process_many_loops(endpoint: str, raw: Raw, namespace: str, wire: str) -> None:
    """Warnings are errors, and nothing may be said on standard error: no task destroyed, no loop closed."""
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", textwrap.dedent(LOOPS), endpoint, namespace, wire],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, "")
    said = done.stdout.splitlines()
    assert said[0] == (
        "refused: this coordinator belongs to another event loop; call connect_async() in each loop"
    )
    assert said[1:] == ["standing after its loop: held", "loss: closed", "done"]
    eventually("all is given back", lambda: not raw.below(f"/etcdfence/{namespace}/owner/".encode()), 5.0)


def test_an_acquire_that_is_never_awaited_is_reported(endpoint: str, namespace: str) -> None:
    async def main() -> None:
        async with etcdfence.connect_async(endpoint, namespace=namespace) as coordinator:
            with pytest.warns(RuntimeWarning, match="never awaited"):
                coordinator.acquire("job")
            with pytest.raises(Misuse, match="plain function"):
                coordinator.acquire("job", on_lost=_hold)
            opening = coordinator.acquire("job")
            lease = await opening
            with pytest.raises(Misuse, match="awaited already"):
                await opening
            await lease.release()

    run(main)


# --- renewal beside the loop -------------------------------------------------------------------------------


def computing(seconds: float) -> None:
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        pass


@pytest.mark.field(11)
@pytest.mark.req("S2-13", "S2-78")
@pytest.mark.parametrize("block", [pass_time, computing])
def test_a_blocked_loop_costs_no_lease(
    endpoint: str, namespace: str, block: Callable[[float], None], caplog: pytest.LogCaptureFixture
) -> None:
    async def main() -> None:
        async with (
            etcdfence.connect_async(endpoint, namespace=namespace) as coordinator,
            coordinator.acquire("job", ttl=2) as lease,
        ):
            await lease.put("k", "before")
            block(7.0)
            await lease.check()
            await lease.put("k", "after")

    run(main)
    assert "could not run" not in caplog.text


@pytest.mark.field(11)
@pytest.mark.req("S2-78")
def test_a_held_interpreter_lock_costs_the_lease_and_is_named(
    endpoint: str, namespace: str, caplog: pytest.LogCaptureFixture
) -> None:
    async def main() -> None:
        async with etcdfence.connect_async(endpoint, namespace=namespace) as coordinator:
            with pytest.raises(LeaseLost):
                async with coordinator.acquire("job", ttl=2) as lease:
                    ctypes.PyDLL(None).sleep(6)  # a C call that keeps the interpreter's lock
                    await lease.put("k", "stale")
            assert (await coordinator.get("k")).value is None

    run(main)
    assert "held the interpreter's lock" in caplog.text


def test_renewal_is_the_same_thread_in_both_colours(endpoint: str, namespace: str) -> None:
    async def main() -> None:
        async with etcdfence.connect_async(endpoint, namespace=namespace) as coordinator:
            held = [await coordinator.acquire(f"job-{n}", ttl=2) for n in range(5)]
            names = [thread.name for thread in threading.enumerate()]
            assert names.count("etcdfence-renewal") == 1
            renewed = [lease._belief.renewed_at for lease in held]
            await condition(
                "all are renewed",
                lambda: all(lease._belief.renewed_at > at for lease, at in zip(held, renewed, strict=True)),
            )

    run(main)


# --- many tasks --------------------------------------------------------------------------------------------


@WIRES
@pytest.mark.req("S2-77")
def test_many_tasks_at_once(endpoint: str, namespace: str, wire: str) -> None:
    """A hundred waiters do not keep calls waiting, and of all that claim one thing one owns it."""

    async def main() -> None:
        where: dict[str, Any] = {"endpoints": endpoint, "namespace": namespace, "transport": wire}
        async with etcdfence.connect_async(**where) as coordinator, etcdfence.connect_async(**where) as other:
            async with coordinator.acquire("job", ttl=60) as lease:
                waiters = [asyncio.create_task(_short(other)) for _ in range(100)]
                while len(await coordinator.waiters()) < 100:
                    await asyncio.sleep(0.05)
                await asyncio.gather(*(lease.put(f"k{n}", str(n)) for n in range(64)))
                outcomes = await asyncio.gather(
                    *(coordinator.try_acquire("once", ttl=60) for _ in range(64)), return_exceptions=True
                )
                won = [one for one in outcomes if isinstance(one, etcdfence.AsyncLease)]
                assert len(won) == 1
                assert all(isinstance(one, Held) for one in outcomes if one is not won[0])
                await won[0].release()
            assert sorted(await asyncio.gather(*waiters)) == sorted({*[w.result() for w in waiters]})

    run(main)


async def _short(coordinator: AsyncCoordinator) -> int:
    async with coordinator.acquire("job", ttl=60, wait=60) as lease:
        return lease.generation
