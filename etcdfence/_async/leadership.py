"""Leader election for coroutines: work stops first, then the lease goes."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Awaitable
from typing import TYPE_CHECKING, Any, TypeVar

from etcdfence._async.lease import AsyncLease
from etcdfence._engine import Terms
from etcdfence._leading import Election, LeadershipHandle
from etcdfence.errors import EtcdFenceError, Misuse, OutcomeUnknown, OwnershipRefused, Unavailable
from etcdfence.model import Standing

if TYPE_CHECKING:
    from etcdfence._async.coordinator import AsyncCoordinator

T = TypeVar("T")
log = logging.getLogger("etcdfence.leadership")


class AsyncLeadership(LeadershipHandle[AsyncLease]):
    """Made by `AsyncCoordinator.lead`. Await `run()`; to end it, call `stop()` or cancel it."""

    def __init__(self, coordinator: AsyncCoordinator, election: Election) -> None:
        super().__init__(election)
        self._coordinator = coordinator
        self._stop = asyncio.Event()
        self._running = False

    def stop(self) -> None:
        """Let `run()` return: the work is cancelled, and when it has ended the leadership is released. From any
        thread."""
        self._coordinator._engine.call_in_loop(self._stop.set)

    async def run(self) -> None:
        """Wait for the leadership, lead, and after a loss wait again, until `stop()`. Raises what on_started
        raised, when the leadership has been released; a silent etcd is waited for."""
        if self._running:
            raise Misuse(f"the leadership {self.name!r} is being run already")
        self._running = True
        watcher = asyncio.create_task(self._tell_leaders()) if self._election.on_new_leader else None
        try:
            while not self._stop.is_set():
                await self._once()
        finally:
            self._running = False
            if watcher is not None:
                watcher.cancel()
                await asyncio.wait([watcher])

    async def _once(self) -> None:
        opening = self._coordinator._acquire(
            self.name, None, self.identity, Terms(self._plan.periods), None, None, False
        )
        try:
            lease = await self._unless_stopped(opening)
        except (Unavailable, OutcomeUnknown, OwnershipRefused) as error:
            log.warning("%s: no claim could be made: %s", self.name, error)
            await self._pause()
        else:
            if lease is not None:
                await self._serve(lease)

    async def _pause(self) -> None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self._plan.periods.retry_period):
                await self._stop.wait()

    async def _unless_stopped(self, action: Awaitable[T]) -> T | None:
        """What comes of an action; None where it was cancelled because of stop()."""

        async def awaited() -> T:
            return await action

        doing, stop = asyncio.create_task(awaited()), asyncio.create_task(self._stop.wait())
        try:
            await asyncio.wait([doing, stop], return_when=asyncio.FIRST_COMPLETED)
            if not doing.done():
                doing.cancel()
                await asyncio.wait([doing])
        except asyncio.CancelledError:
            doing.cancel()
            doing.add_done_callback(self._not_wanted)
            raise
        finally:
            stop.cancel()
        return None if doing.cancelled() else doing.result()

    def _not_wanted(self, done: asyncio.Task[Any]) -> None:
        """A lease that came about while nobody waited for it any more."""
        if not done.cancelled() and done.exception() is None:
            self._coordinator._engine.give_back_in_background(done.result()._holding)

    # --- one time of leading -------------------------------------------------------------------------------

    async def _serve(self, lease: AsyncLease) -> None:
        """From the lease being ours to the lease being given back."""
        over = asyncio.Event()
        lease._belief.on_doubt = lambda _: self._coordinator._engine.call_in_loop(over.set)
        if lease.standing is not Standing.HELD:  # before there was anybody to tell
            await self._give_back(lease, stopped=True)
            return
        self._lease = self._working = lease
        work = asyncio.create_task(self._work(lease, over), name=f"etcdfence-lead-{self.name}")
        try:
            await self._until_over(lease, over)
        finally:
            work.cancel()
            await self._wind_down(lease, work)
        if work.done() and not work.cancelled():
            work.result()  # what on_started raised

    async def _until_over(self, lease: AsyncLease, over: asyncio.Event) -> None:
        waits = [asyncio.create_task(one.wait()) for one in (over, lease._over, self._stop)]
        try:
            await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for one in waits:
                one.cancel()

    async def _work(self, lease: AsyncLease, over: asyncio.Event) -> Any:
        try:
            await self._election.on_started(lease)
        except BaseException:
            over.set()
            raise

    async def _wind_down(self, lease: AsyncLease, work: asyncio.Task[Any]) -> None:
        """Wait for the work to end. Cancelled in that, the lease is renewed on and given back when it has
        ended."""
        try:
            await asyncio.wait([work], timeout=self._plan.drain)
        except asyncio.CancelledError:
            work.add_done_callback(lambda _: self._gone(lease, give_back=True))
            raise
        self._lease = None
        if work.done():
            self._working = None
        try:
            await self._give_back(lease, stopped=work.done())
        finally:
            if self._election.on_stopped is not None:
                self._election.on_stopped()
        if not work.done():  # no second work beside one that has not ended
            stop = asyncio.create_task(self._stop.wait())
            try:
                await asyncio.wait([work, stop], return_when=asyncio.FIRST_COMPLETED)
            finally:
                stop.cancel()
                work.add_done_callback(lambda _: self._gone(lease, give_back=False))

    def _gone(self, lease: AsyncLease, *, give_back: bool) -> None:
        """The work has ended after all."""
        self._lease = None if self._lease is lease else self._lease
        self._working = None if self._working is lease else self._working
        if give_back:
            self._coordinator._engine.give_back_in_background(lease._holding)
            if self._election.on_stopped is not None:
                self._election.on_stopped()

    async def _give_back(self, lease: AsyncLease, *, stopped: bool) -> None:
        try:
            if stopped:
                await lease.release()
            else:
                log.warning("%s: the work has not stopped in time; the lease is left to run out", self.name)
                lease.abandon()
        except EtcdFenceError as error:
            log.info("%s: the leadership was not released: %s", self.name, error)

    # --- what others do ------------------------------------------------------------------------------------

    async def _tell_leaders(self) -> None:
        while True:
            try:
                async for seen in self._coordinator.observe(self.name):
                    self._tell(seen.owner.holder if seen.owner else None)
            except (Unavailable, OutcomeUnknown):
                await asyncio.sleep(self._plan.periods.retry_period)
            except EtcdFenceError as error:
                log.warning("%s: its leaders are not watched any more: %s", self.name, error)
                return
