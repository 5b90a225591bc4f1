"""The Lease for threads, and the transactions made under it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import TracebackType
from typing import Any, Self, TypeVar

from etcdfence import _timing
from etcdfence._edits import Edits, checked_document, checked_evidence
from etcdfence._engine import Terms
from etcdfence._flow import Flow
from etcdfence._flows import fencing, renewals
from etcdfence._flows.fencing import Lane
from etcdfence._flows.pacing import Pace
from etcdfence._handle import Commit, LeaseHandle, Play, Revoke, about
from etcdfence._sync.engine import SyncEngine
from etcdfence._txns import Ending, Tenure
from etcdfence.errors import OutcomeUnknown
from etcdfence.model import Absent, Committed, Doubt, Entry, Loss, Verdict, checked_name

T = TypeVar("T")


class Lease(LeaseHandle):
    """Ownership of one task. Made by `Coordinator.acquire`; leaving its `with` block releases it.

    Any thread may use it; fenced writes of one lease go out one after the other. After a loss the handle never
    comes back to life.
    """

    _engine: SyncEngine

    def __init__(
        self,
        engine: SyncEngine,
        tenure: Tenure,
        terms: Terms,
        on_lost: Callable[[Lease, Loss], None] | None,
        on_unverified: Callable[[Lease, Doubt], None] | None,
    ) -> None:
        super().__init__(engine, tenure, terms)
        if on_lost is not None:
            self._belief.on_loss = about(self, on_lost)
        if on_unverified is not None:
            self._belief.on_doubt = about(self, on_unverified)
        engine.enter(self._holding)

    # --- asking --------------------------------------------------------------------------------------------

    def check(self) -> None:
        """Ask etcd, linearizably; return only if the lease is held now, and verified in time.

        For the moment before a consequential action. It permits no later write: between the check and the
        action everything may change, which is what guards and fenced writes are for.
        """
        self._engine.require_live(self._holding)
        self._require_held(self._engine.run(lambda pace: renewals.check(self._holding.lane, pace)))

    def wait_lost(self, timeout: float | None = None) -> Loss | None:
        """Wait until the lease is lost, at most `timeout` seconds; None when it is not, or was given back."""
        limit = None if timeout is None else _timing.checked_seconds(timeout, "timeout")
        self._belief.finished.wait(limit)
        return self._belief.loss

    def get(self, key: str) -> Entry:
        """A data key's value and revision; use the revision as `expect=` of a later write."""
        self._engine.require_open()
        keys = self._engine.keys.data(key), self._engine.keys.provenance(key)
        return self._engine.run(lambda pace: fencing.get(key, *keys, pace))

    # --- writing -------------------------------------------------------------------------------------------

    def put(self, key: str, value: bytes | str, *, expect: int | Absent | None = None) -> Committed:
        """Write a data key under the fence. `expect`: the revision the key must still have, or ABSENT; without
        it the write is blind. Raises Superseded or LeaseLost (refused by etcd itself), Conflict, TooLarge,
        Unavailable (not applied), OutcomeUnknown (`settle` decides it).
        """
        edits = Edits(self._engine.keys)
        edits.put(key, value, expect=expect)
        return self._write(edits)

    def delete(self, key: str, *, expect: int | Absent | None = None) -> Committed:
        """Delete a data key under the fence; one that is not there is no error (unless `expect` says so)."""
        edits = Edits(self._engine.keys)
        edits.delete(key, expect=expect)
        return self._write(edits)

    def proclaim(self, value: str) -> Committed:
        """Show a value to those who `observe` the task, for as long as this lease holds it: where the leader
        can be reached, say. A fenced write; the last one counts."""
        checked_name(value, "a proclaimed value")
        return self._commit(lambda lane, pace: fencing.proclaim(lane, value, pace))

    def transaction(self) -> Transaction:
        """Several writes as one: `with lease.transaction() as tx:` collects them and commits on leaving."""
        return Transaction(self)

    def _write(self, edits: Edits) -> Committed:
        return self._commit(
            lambda lane, pace: fencing.write(lane, edits.edits.values(), edits.checks.values(), pace)
        )

    def settle(self, unknown: OutcomeUnknown) -> Verdict:
        """What became of a write that ended in OutcomeUnknown. May itself raise OutcomeUnknown or Unavailable
        when etcd does not answer; ask again then."""
        write_id, known = self._to_settle(unknown)
        if known is not None:
            return known
        return self._engine.commit(
            self._holding, lambda lane, pace: fencing.settle(lane, write_id, pace), even_released=True
        )

    def _commit(self, flow: Callable[[Lane, Pace], Flow[T]], seconds: float | None = None) -> T:
        return self._engine.commit(self._holding, flow, seconds)

    # --- ending --------------------------------------------------------------------------------------------

    def complete(self, result: Any, evidence: Mapping[str, Any]) -> None:
        """Close the task for good with its result. `evidence` says where the result can be verified.

        Only for a TaskKey: a lock or a leadership never closes. Repeating it after OutcomeUnknown is safe.
        """
        self._require_task("complete")
        self._play(
            self._ends(
                Ending(
                    "completed",
                    closes="completed",
                    result=checked_document(result, "a result"),
                    evidence=checked_evidence(evidence),
                )
            )
        )

    def fail(self, reason: str, *, retry: bool = True) -> None:
        """End this attempt as failed. The task is ready for another (`retry`), or closed for good."""
        checked_name(reason, "a reason")
        if not retry:
            self._require_task("fail(retry=False)")
        self._play(self._ends(Ending("failed", reason, closes=None if retry else "failed")))

    def release(self) -> None:
        """Give the task back now. Twice is no error; Superseded or LeaseLost if it was not ours any more.

        Renewal stops at once, so a release that meets no etcd ends with the TTL all the same.
        """
        self._play(self._releases())

    def __enter__(self) -> Self:
        self._engine.require_live(self._holding)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Release. A loss is raised only over a body that ended well; the body's own exception stays."""
        self._play(self._leaves(error))

    def _play(self, play: Play[T]) -> T:
        try:
            step = next(play)
            while True:
                try:
                    done = self._perform(step)
                except BaseException as error:  # noqa: BLE001 - the play knows what to do about it
                    step = play.throw(error)
                else:
                    step = play.send(done)
        except StopIteration as stop:
            result: T = stop.value
            return result

    def _perform(self, step: Commit | Revoke) -> Any:
        if isinstance(step, Commit):
            return self._engine.commit(self._holding, *step)
        return self._engine.revoke(self._tenure, step.seconds)


class Transaction(Edits):
    """Writes that are applied together or not at all, under the fence. A key read with `get` is expected to be
    unchanged when the transaction commits. `committed` is set once it has."""

    def __init__(self, lease: Lease) -> None:
        super().__init__(lease._engine.keys)
        self._lease = lease
        self.committed: Committed | None = None

    def get(self, key: str) -> Entry:
        """Read a key and expect its revision; Conflict at commit if it changed after this."""
        entry = self._lease.get(key)
        self.expect(key, entry.revision)
        return entry

    def commit(self) -> Committed:
        """Apply everything now. `with` does it on leaving."""
        self.require_committable(self.committed)
        self.committed = self._lease._write(self)
        return self.committed

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None and self.committed is None:
            self.commit()
