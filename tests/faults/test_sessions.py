"""Sessions when something goes wrong: slow wires, interrupts, ends in the middle of something."""

from __future__ import annotations

import asyncio
import gc
import threading
from collections.abc import Callable
from typing import Any

import pytest

import etcdfence
from etcdfence import Closed, Coordinator, Held, LossReason, Misuse, SessionLost, Standing
from etcdfence._requests import Request, Revoke
from etcdfence.testing import MemoryKit

from ..support.proxy import Proxy
from ..support.raw import Raw
from ..support.tape import Tape, a, is_claim, puts
from ..support.waiting import eventually

Connect = Callable[..., Coordinator]
Taped = Callable[..., tuple[Coordinator, Tape]]


def slowly(seconds: float) -> Callable[[Tape, Request[Any], float], Any]:
    def act(tape: Tape, request: Request[Any], within: float) -> Any:
        threading.Event().wait(seconds)
        return tape.wire.call(request, within)

    return act


def interrupted(_tape: Tape, _request: Request[Any], _within: float) -> Any:
    raise KeyboardInterrupt


def ends(request: Request[Any]) -> bool:
    return puts(b"/history/")(request)


@pytest.mark.req("P-13")
def test_a_release_behind_a_slow_write_costs_the_session_nothing(taped: Taped, raw: Raw) -> None:
    coordinator, tape = taped(patience=1.0)
    with coordinator.session(ttl=60) as session:
        slow, other = session.acquire("slow"), session.acquire("other")
        tape.fault(puts(b"/data/"), slowly(2.5))
        written: list[Any] = []
        thread = threading.Thread(target=lambda: written.append(slow.put("k", "v")))
        thread.start()
        eventually("it is being written", lambda: len(slow._holding.turn._line) == 1)
        with pytest.raises(etcdfence.Unavailable):
            slow.release()
        thread.join(10)
        eventually("it was released in the end", lambda: raw.get(slow._tenure.keys.owner) is None)
        other.check()
        assert (len(written), session.loss) == (1, None)


def test_interrupted_after_winning_from_the_line(taped: Taped, connect: Connect, raw: Raw) -> None:
    """The claim was applied; Ctrl-C comes while the lease of the place in line is given back."""
    coordinator, tape = taped()
    holder, outcome = connect().acquire("job"), list[BaseException]()
    session = coordinator.session(ttl=30)

    def wait() -> None:
        try:
            session.acquire("job", wait=20)
        except BaseException as error:
            outcome.append(error)

    thread = threading.Thread(target=wait)
    thread.start()
    eventually("it waits", coordinator.waiters)
    tape.fault(a(Revoke), interrupted)
    holder.release()
    thread.join(20)
    assert isinstance(outcome[0], KeyboardInterrupt)
    gc.collect()
    coordinator._engine.holdings()  # as any later call, or a renewal, does
    key = coordinator._engine.keys.task("job").owner
    eventually("nobody owns it", lambda: raw.get(key) is None)
    session.acquire("job", wait=0).check()
    session.close()


def test_an_interrupted_close_is_closed_again(taped: Taped, raw: Raw) -> None:
    coordinator, tape = taped()
    session = coordinator.session(ttl=60)
    held = [session.acquire(name) for name in "xy"]
    tape.fault(ends, interrupted)
    with pytest.raises(KeyboardInterrupt):
        session.close()
    assert session._shared.belief not in coordinator._engine.renewer._leases  # at the worst it runs out
    session.close()
    assert [raw.get(lease._tenure.keys.owner) for lease in held] == [None, None]
    assert raw.ttl(session.lease_id) <= 0


@pytest.mark.parametrize("end", ["closed", "lost"])
def test_those_who_wait_in_a_session_end_with_it(connect: Connect, raw: Raw, end: str) -> None:
    holder, coordinator = connect(), connect()
    holder.acquire("job", ttl=60)
    session, outcome = coordinator.session(ttl=3), list[BaseException]()

    def wait() -> None:
        try:
            session.acquire("job", wait=60)
        except BaseException as error:
            outcome.append(error)

    thread = threading.Thread(target=wait)
    thread.start()
    eventually("it waits", holder.waiters)
    if end == "closed":
        session.close()
    else:
        raw.revoke(session.lease_id)
    thread.join(10)
    assert [type(error) for error in outcome] == [Closed if end == "closed" else SessionLost]
    eventually("it has left the line", lambda: not holder.waiters())


def test_a_session_that_is_closed_while_something_is_claimed_in_it(taped: Taped, raw: Raw) -> None:
    coordinator, tape = taped()
    session, outcome = coordinator.session(ttl=60), list[Any]()
    tape.fault(is_claim, slowly(1.0))

    def claim() -> None:
        try:
            outcome.append(session.acquire("job"))
        except Exception as error:
            outcome.append(error)

    thread = threading.Thread(target=claim)
    thread.start()
    eventually("it claims", lambda: any(map(is_claim, tape.sent)))
    session.close()
    thread.join(10)
    assert isinstance(outcome[0], Closed | SessionLost)
    eventually("nobody owns it", lambda: raw.get(coordinator._engine.keys.task("job").owner) is None)


@pytest.mark.req("S0-10")
def test_a_raised_epoch_ends_the_session(connect: Connect, raw: Raw) -> None:
    """Its owner keys hang on a living etcd lease and belong to nobody any more."""
    coordinator = connect()
    session = coordinator.session(ttl=3)
    lease = session.acquire("job")
    raw.put(coordinator._engine.keys.epoch, b'{"format":1,"number":7,"id":"raised"}')
    loss = eventually("it is lost", lambda: lease.loss)
    assert loss.reason is LossReason.EPOCH_RAISED
    eventually("its owner key has gone", lambda: raw.get(lease._tenure.keys.owner) is None)
    with pytest.raises(SessionLost, match="epoch_raised"):
        session.acquire("job")


def test_a_lease_that_is_still_being_released_is_not_mine(taped: Taped) -> None:
    coordinator, tape = taped(patience=1.0)
    with coordinator.session(ttl=60) as session:
        kept, released = session.acquire("kept"), session.acquire("released")
        tape.raises(ends, etcdfence.OutcomeUnknown("no answer"), once=False)
        with pytest.raises(etcdfence.OutcomeUnknown):
            released.release()
        with pytest.raises(Held) as held:
            session.acquire("released", wait=0)
        assert not held.value.mine
        tape.heal()
        session.acquire("released", wait=20).check()
        kept.check()


def test_a_wait_ends_in_time_although_etcd_has_fallen_silent(
    endpoint: str, namespace: str, connect: Connect
) -> None:
    connect().acquire("job", ttl=60)
    with Proxy(endpoint) as proxy, etcdfence.connect(proxy.endpoint, namespace=namespace) as coordinator:
        clock, outcome = coordinator._engine.host.now, list[Any]()

        def wait() -> None:
            began = clock()
            try:
                coordinator.acquire("job", ttl=60, wait=2.0)
            except etcdfence.EtcdFenceError as error:
                outcome.append((clock() - began, error))

        thread = threading.Thread(target=wait)
        thread.start()
        eventually("it waits", lambda: connect().waiters())
        proxy.swallow()
        thread.join(20)
        took, error = outcome[0]
        assert isinstance(error, Held | etcdfence.Unavailable | etcdfence.OutcomeUnknown)
        assert took < 7


# --- in asyncio --------------------------------------------------------------------------------------------


def test_tasks_do_not_wait_for_their_own_coordinator_without_limit(etcdfence_memory: MemoryKit) -> None:
    async def main() -> None:
        coordinator = await etcdfence_memory.connect_async()
        outcomes = await asyncio.gather(
            coordinator.acquire("job"), coordinator.acquire("job"), return_exceptions=True
        )
        refused = [one for one in outcomes if isinstance(one, Held)]
        assert len(refused) == 1 and refused[0].mine
        first, second = coordinator.acquire("other"), coordinator.acquire("other")
        lease = await first
        with pytest.raises(Held):
            await second
        await lease.release()
        await coordinator.close()

    asyncio.run(main())


@pytest.mark.parametrize("transport", ["grpc", "gateway"])
def test_a_session_that_nobody_refers_to_lasts_as_long_as_it_is_used(
    endpoint: str, namespace: str, transport: str
) -> None:
    async def main() -> None:
        async with etcdfence.connect_async(endpoint, namespace=namespace, transport=transport) as coordinator:
            lease = await (await coordinator.session(ttl=3)).acquire("job")
            gc.collect()
            await lease.check()
            await asyncio.sleep(0)
            assert lease.standing is Standing.HELD
            lease_id = lease.receipt.lease_id
            await lease.release()
            del lease
            gc.collect()
            coordinator._engine.holdings()  # as any later call, or a renewal, does
            assert lease_id not in [
                one.lease_id for one in coordinator._engine._sessions.values() if not one.closed
            ]

    asyncio.run(main())


def test_a_cancelled_session_leaves_nothing(endpoint: str, namespace: str, raw: Raw) -> None:
    async def main() -> None:
        async with etcdfence.connect_async(endpoint, namespace=namespace) as coordinator:
            for ticks in range(12):
                task = asyncio.ensure_future(_claimed(coordinator))
                for _ in range(ticks):
                    await asyncio.sleep(0)
                task.cancel()
                await asyncio.wait([task])
                if not task.cancelled():
                    await task.result().close()
            with pytest.raises(Misuse):
                await coordinator.session(ttl=0)
            while await coordinator.tasks(owned_only=True):
                await asyncio.sleep(0.05)

    asyncio.run(asyncio.wait_for(main(), 30))


async def _claimed(coordinator: etcdfence.AsyncCoordinator) -> etcdfence.AsyncSession:
    session = await coordinator.session(ttl=10)
    await session.acquire("job", wait=5)
    return session


# --- leadership, cancelled ---------------------------------------------------------------------------------


@pytest.mark.req("P-4")
@pytest.mark.parametrize("uncontended", [True, False])
def test_run_may_be_cancelled_at_any_moment(etcdfence_memory: MemoryKit, uncontended: bool) -> None:
    """Alone, and while taking over from another; once, and twice in a row."""

    async def main(ticks: int, again: int | None) -> None:
        coordinator, other = await etcdfence_memory.connect_async(), await etcdfence_memory.connect_async()
        leadership = coordinator.lead("controller", on_started=_works, on_new_leader=lambda _: None)
        holder = None if uncontended else await other.acquire("controller")
        running = asyncio.ensure_future(leadership.run())
        for tick in range(ticks):
            await asyncio.sleep(0)
            if holder is not None and tick == ticks // 2:
                await holder.release()
        running.cancel()
        for _ in range(again or 0):
            await asyncio.sleep(0)
        if again is not None:
            running.cancel()
        await asyncio.wait([running])
        if holder is not None:
            await holder.release()
        for _ in range(400):
            if not await other.tasks(owned_only=True) and not await other.waiters():
                break
            await asyncio.sleep(0.01)
        else:
            raise AssertionError(f"cancelled after {ticks} ticks, {again}: {await other.tasks(owned_only=True)}")
        await coordinator.close()
        await other.close()
        assert not [task for task in asyncio.all_tasks() if "etcdfence" in task.get_name()]

    for ticks in range(0, 40, 1 if uncontended else 3):
        for again in (None, 0, 1, 3):
            asyncio.run(main(ticks, again))


async def _works(_: etcdfence.AsyncLease) -> None:
    try:
        await asyncio.sleep(3600)
    finally:
        await asyncio.sleep(0)
        await asyncio.sleep(0)


# --- under a guard that was handed on ----------------------------------------------------------------------


@pytest.mark.req("promise-4")
@pytest.mark.parametrize("how", ["closed", "deleted, guard gone", "deleted, guard holds"])
def test_a_borrowed_write_whose_answer_was_lost_is_unknown(
    taped: Taped, connect: Connect, raw: Raw, how: str
) -> None:
    lease = connect().acquire("job", ttl=60)
    coordinator, tape = taped(patience=5.0)
    guard, key = coordinator.guard("job", lease.token, lease.receipt.lease_id), coordinator._engine.keys.data("k")
    if how == "closed":
        coordinator.put("job", guard, "k", "before")

    def applied(tape: Tape, request: Request[Any], within: float) -> Any:
        tape.wire.call(request, within)
        if how == "closed":
            threading.Thread(target=coordinator.close).start()
            eventually("it is being closed", lambda: coordinator._engine.closing)
        else:
            raw.delete(key)
        if how == "deleted, guard gone":
            lease.release()
        raise etcdfence.OutcomeUnknown("the reply was lost on its way")

    tape.fault(puts(b"/data/"), applied)
    with pytest.raises(etcdfence.OutcomeUnknown):
        coordinator.put("job", guard, "k", "v")
    if how != "closed":
        assert raw.get(key) is None  # and it was not written a second time


@pytest.mark.req("promise-2")
def test_why_a_borrowed_guard_does_not_hold(connect: Connect, raw: Raw) -> None:
    lease, borrower = connect().acquire("job"), connect()
    guard = borrower.guard("job", lease.token, lease.receipt.lease_id)
    assert borrower.put("job", guard, "k", "v").revision > lease.generation
    lease.release()
    with pytest.raises(etcdfence.LeaseLost):
        borrower.put("job", guard, "k", "after its end")
    with connect().acquire("job") as successor:
        with pytest.raises(etcdfence.Superseded) as refused:
            borrower.put("job", guard, "k", "under another")
        assert refused.value.current == successor.generation
    for wrong in (lease.token, "guard", None):
        with pytest.raises(Misuse):
            borrower.put("job", wrong, "k", "v")  # type: ignore[arg-type]  # that is the point
    with pytest.raises(Misuse):
        borrower.put("another", guard, "k", "v")
    assert borrower.get("k").value == b"v"
