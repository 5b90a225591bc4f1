"""The Lease for coroutines, and the transactions made under it. What asks etcd is awaited; the rest is not."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Mapping
from types import TracebackType
from typing import Any, Self, TypeVar

from etcdfence import _timing
from etcdfence._async.engine import AsyncEngine
from etcdfence._async.scope import Scope
from etcdfence._edits import Edits, checked_document, checked_evidence
from etcdfence._engine import Terms
from etcdfence._flow import Flow
from etcdfence._flows import fencing, renewals
from etcdfence._flows.fencing import Lane
from etcdfence._flows.pacing import Pace
from etcdfence._handle import Commit, LeaseHandle, Play, Revoke, about
from etcdfence._txns import Ending, Tenure
from etcdfence.errors import OutcomeUnknown
from etcdfence.model import Absent, Committed, Doubt, Entry, Loss, Verdict, checked_name

T = TypeVar("T")


class AsyncLease(LeaseHandle):
    """Ownership of one task. Made by `AsyncCoordinator.acquire`; leaving its `async with` block releases it, and
    losing it cancels the block, unless `acquire` was told otherwise.

    It is renewed by a thread, so a body that blocks the event loop keeps its lease; one that keeps the
    interpreter's lock in a C call does not, and hears of it at its first write. Fenced writes of one lease go
    out one after the other. After a loss the handle never comes back to life.
    """

    _engine: AsyncEngine

    def __init__(
        self,
        engine: AsyncEngine,
        tenure: Tenure,
        terms: Terms,
        on_lost: Callable[[AsyncLease, Loss], object] | None,
        on_unverified: Callable[[AsyncLease, Doubt], object] | None,
        cancel_on_loss: bool,
    ) -> None:
        super().__init__(engine, tenure, terms)
        self._on_lost, self._cancel_on_loss = on_lost, cancel_on_loss
        self._over = asyncio.Event()
        self._scope: Scope | None = None
        lost, over = about(self, AsyncLease._lost), self._over.set
        self._belief.on_loss = lambda loss: engine.call_in_loop(lost, loss)
        self._belief.on_over = lambda: engine.call_in_loop(over)
        if on_unverified is not None:
            unverified = about(self, on_unverified)
            self._belief.on_doubt = lambda doubt: engine.call_in_loop(unverified, doubt)
        engine.enter(self._holding)

    def _lost(self, loss: Loss) -> None:
        """In the loop, soon after the loss was known."""
        if self._scope is not None:
            self._scope.cancel(f"{self.task}, generation {self.generation}, was lost: {loss.reason}")
        if self._on_lost is not None:
            self._on_lost(self, loss)

    # --- asking --------------------------------------------------------------------------------------------

    async def check(self) -> None:
        """Ask etcd, linearizably; return only if the lease is held now, and verified in time.

        For the moment before a consequential action. It permits no later write: between the check and the
        action everything may change, which is what guards and fenced writes are for.
        """
        self._engine.require_live(self._holding)
        self._require_held(await self._engine.run(lambda pace: renewals.check(self._holding.lane, pace)))

    async def wait_lost(self, timeout: float | None = None) -> Loss | None:
        """Wait until the lease is lost, at most `timeout` seconds; None when it is not, or was given back."""
        self._engine.require_own_loop()
        limit = None if timeout is None else _timing.checked_seconds(timeout, "timeout")
        if not self._belief.over:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(limit):
                    await self._over.wait()
        return self._belief.loss

    async def get(self, key: str) -> Entry:
        """A data key's value and revision; use the revision as `expect=` of a later write."""
        self._engine.require_open()
        keys = self._engine.keys.data(key), self._engine.keys.provenance(key)
        return await self._engine.run(lambda pace: fencing.get(key, *keys, pace))

    # --- writing -------------------------------------------------------------------------------------------

    async def put(self, key: str, value: bytes | str, *, expect: int | Absent | None = None) -> Committed:
        """Write a data key under the fence. `expect`: the revision the key must still have, or ABSENT; without
        it the write is blind. Raises Superseded or LeaseLost (refused by etcd itself), Conflict, TooLarge,
        Unavailable (not applied), OutcomeUnknown (`settle` decides it). A cancelled put may have been applied;
        the next write of the lease finds out.
        """
        edits = Edits(self._engine.keys)
        edits.put(key, value, expect=expect)
        return await self._write(edits)

    async def delete(self, key: str, *, expect: int | Absent | None = None) -> Committed:
        """Delete a data key under the fence; one that is not there is no error (unless `expect` says so)."""
        edits = Edits(self._engine.keys)
        edits.delete(key, expect=expect)
        return await self._write(edits)

    async def proclaim(self, value: str) -> Committed:
        """Show a value to those who `observe` the task, for as long as this lease holds it: where the leader
        can be reached, say. A fenced write; the last one counts."""
        checked_name(value, "a proclaimed value")
        return await self._commit(lambda lane, pace: fencing.proclaim(lane, value, pace))

    def transaction(self) -> AsyncTransaction:
        """Several writes as one: `async with lease.transaction() as tx:` collects them and commits on leaving."""
        return AsyncTransaction(self)

    async def _write(self, edits: Edits) -> Committed:
        return await self._commit(
            lambda lane, pace: fencing.write(lane, edits.edits.values(), edits.checks.values(), pace)
        )

    async def settle(self, unknown: OutcomeUnknown) -> Verdict:
        """What became of a write that ended in OutcomeUnknown. May itself raise OutcomeUnknown or Unavailable
        when etcd does not answer; ask again then."""
        write_id, known = self._to_settle(unknown)
        if known is not None:
            return known
        return await self._engine.commit(
            self._holding, lambda lane, pace: fencing.settle(lane, write_id, pace), even_released=True
        )

    async def _commit(self, flow: Callable[[Lane, Pace], Flow[T]]) -> T:
        return await self._engine.commit(self._holding, flow)

    # --- ending --------------------------------------------------------------------------------------------

    async def complete(self, result: Any, evidence: Mapping[str, Any]) -> None:
        """Close the task for good with its result. `evidence` says where the result can be verified.

        Only for a TaskKey: a lock or a leadership never closes. Repeating it after OutcomeUnknown is safe.
        """
        self._require_task("complete")
        closing = Ending(
            "completed",
            closes="completed",
            result=checked_document(result, "a result"),
            evidence=checked_evidence(evidence),
        )
        await self._ending(self._ends(closing))

    async def fail(self, reason: str, *, retry: bool = True) -> None:
        """End this attempt as failed. The task is ready for another (`retry`), or closed for good."""
        checked_name(reason, "a reason")
        if not retry:
            self._require_task("fail(retry=False)")
        await self._ending(self._ends(Ending("failed", reason, closes=None if retry else "failed")))

    async def _ending(self, play: Play[None]) -> None:
        """Cancelled after the tenure has ended, what is left is given back in the background."""
        try:
            await self._play(play)
        except asyncio.CancelledError:
            if self._holding.lane.ended is not None:
                self._engine.give_back_in_background(self._holding)
            raise

    async def release(self) -> None:
        """Give the task back now. Twice is no error; Superseded or LeaseLost if it was not ours any more.

        Renewal stops at once, so a release that meets no etcd ends with the TTL all the same.
        """
        await self._giving_back(self._releases())

    async def _giving_back(self, play: Play[None]) -> None:
        """A release that is cancelled in its middle goes on in the background: the caller has given up waiting,
        not the wish to release."""
        try:
            await self._play(play)
        except asyncio.CancelledError:
            self._engine.give_back_in_background(self._holding)
            raise

    async def __aenter__(self) -> Self:
        self._engine.require_live(self._holding)
        if self._cancel_on_loss:
            self._scope = Scope()
            if self._belief.loss is not None:  # before there was a scope to cancel
                self._engine.give_back_in_background(self._holding)
                raise fencing.ownership_refused(self._tenure, self._belief.loss)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Release. A loss is raised over a body that ended well, and instead of the cancellation that it caused;
        any other exception of the body stays."""
        scope, self._scope = self._scope, None
        try:
            ours = scope is not None and await scope.leave(error)
        except asyncio.CancelledError:
            self._engine.give_back_in_background(self._holding)
            raise
        loss = self._belief.loss if ours or error is None else None
        if loss is None:
            await self._giving_back(self._leaves(error))
            return
        await self._giving_back(self._leaves(error or asyncio.CancelledError()))  # says nothing of its own
        raise fencing.ownership_refused(self._tenure, loss) from error

    async def _play(self, play: Play[T]) -> T:
        try:
            step = next(play)
            while True:
                try:
                    done = await self._perform(step)
                except BaseException as error:  # noqa: BLE001 - the play knows what to do about it
                    step = play.throw(error)
                else:
                    step = play.send(done)
        except StopIteration as stop:
            result: T = stop.value
            return result

    async def _perform(self, step: Commit | Revoke) -> Any:
        if isinstance(step, Commit):
            return await self._engine.commit(self._holding, *step)
        return await self._engine.revoke_async(self._tenure, step.seconds)


class AsyncTransaction(Edits):
    """Writes that are applied together or not at all, under the fence. A key read with `get` is expected to be
    unchanged when the transaction commits. `committed` is set once it has."""

    def __init__(self, lease: AsyncLease) -> None:
        super().__init__(lease._engine.keys)
        self._lease = lease
        self.committed: Committed | None = None

    async def get(self, key: str) -> Entry:
        """Read a key and expect its revision; Conflict at commit if it changed after this."""
        entry = await self._lease.get(key)
        self.expect(key, entry.revision)
        return entry

    async def commit(self) -> Committed:
        """Apply everything now. `async with` does it on leaving."""
        self.require_committable(self.committed)
        self.committed = await self._lease._write(self)
        return self.committed

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None and self.committed is None:
            await self.commit()
