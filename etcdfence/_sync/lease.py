"""The Lease for threads, and the transactions made under it."""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable, Mapping
from types import TracebackType
from typing import Any, Self, TypeVar

from etcdfence import _host, _timing
from etcdfence._edits import Edits, checked_document, checked_evidence
from etcdfence._flow import Flow
from etcdfence._flows import fencing, leases, tasks
from etcdfence._flows.fencing import Lane
from etcdfence._flows.pacing import Pace
from etcdfence._records import TaskRecord, read
from etcdfence._sync.engine import EXIT_SECONDS, Engine, GaveBack, Holding
from etcdfence._txns import Ending, Tenure
from etcdfence.errors import EtcdFenceError, LeaseReleased, Misuse, OutcomeUnknown, Unavailable, Unverified
from etcdfence.model import (
    Absent,
    Committed,
    Doubt,
    Entry,
    Guard,
    Loss,
    LossReason,
    Receipt,
    Standing,
    Token,
    Verdict,
    checked_name,
)

log = logging.getLogger("etcdfence")
T = TypeVar("T")


def _about(lease: Lease, callback: Callable[[Lease, Any], None]) -> Callable[[Any], None]:
    """A callback about a lease that does not keep the lease alive: renewal must not go on for nobody."""
    reference = weakref.ref(lease)

    def tell(what: Any) -> None:
        present = reference()
        if present is not None:
            callback(present, what)

    return tell


class Lease:
    """Ownership of one task. Made by `Coordinator.acquire`; leaving its `with` block releases it.

    Any thread may use it; fenced writes of one lease go out one after the other. After a loss the handle never
    comes back to life.
    """

    def __init__(
        self,
        engine: Engine,
        tenure: Tenure,
        on_lost: Callable[[Lease, Loss], None] | None,
        on_unverified: Callable[[Lease, Doubt], None] | None,
    ) -> None:
        self._engine, self._tenure = engine, tenure
        self._holding = Holding(tenure, engine.host.store)
        # First of all, so that an interrupted start is not renewed for nobody.
        weakref.finalize(self, engine.drop, self._holding).atexit = False
        self._belief = self._holding.belief
        if on_lost is not None:
            self._belief.on_loss = _about(self, on_lost)
        if on_unverified is not None:
            self._belief.on_doubt = _about(self, on_unverified)
        engine.enter(self._holding)

    # --- what it is ----------------------------------------------------------------------------------------

    @property
    def task(self) -> str:
        return self._tenure.task

    @property
    def generation(self) -> int:
        """The mod revision of the owner key: 1 or more, larger for every later owner within an epoch."""
        return self._tenure.generation

    @property
    def token(self) -> Token:
        """The fencing token for destinations outside etcd: (epoch, generation), compared as a pair."""
        return Token(self._tenure.epoch, self._tenure.generation)

    @property
    def attempt(self) -> str:
        """The id of this tenure's attempt."""
        return self._tenure.attempt.attempt

    @property
    def receipt(self) -> Receipt:
        """What etcd answered to the claim."""
        tenure = self._tenure
        return Receipt(
            task=tenure.task,
            holder=tenure.attempt.holder,
            token=self.token,
            lease_id=tenure.guard.lease_id,
            revision=tenure.generation,
            cluster_id=tenure.cluster_id,
            claimed_at=tenure.attempt.started,
        )

    @property
    def ttl(self) -> int:
        """Seconds that etcd granted."""
        return self._tenure.granted

    @property
    def payload(self) -> Any:
        """The payload in the task record as it stood at the claim; None where there is none."""
        record = read(TaskRecord, self._tenure.record) if self._tenure.record else None
        return record.payload if isinstance(record, TaskRecord) else None

    @property
    def standing(self) -> Standing:
        """What this process may believe now; asks nobody. It is never a permission to write."""
        return self._belief.standing

    @property
    def loss(self) -> Loss | None:
        """How the lease was lost, or None."""
        return self._belief.loss

    @property
    def doubt(self) -> Doubt | None:
        """Why the lease is unverified, while it is."""
        return self._belief.doubt

    @property
    def expires_in(self) -> float:
        """Seconds until the lease becomes unverified if no renewal succeeds; 0 once it is over."""
        if self._belief.over:
            return 0.0
        return max(0.0, self._belief.deadline - _host.clock())

    def __repr__(self) -> str:
        return f"<Lease {self.task!r} generation={self.generation} {self.standing}>"

    # --- asking --------------------------------------------------------------------------------------------

    def guard(self) -> Guard:
        """The comparisons of the fence, for a transaction of your own (see `Guard`)."""
        self._engine.require_live(self._holding)
        if self._belief.loss is not None:
            raise fencing.ownership_refused(self._tenure, self._belief.loss)
        return self._tenure.guard

    def check(self) -> None:
        """Ask etcd, linearizably; return only if the lease is held now, and verified in time.

        For the moment before a consequential action. It permits no later write: between the check and the
        action everything may change, which is what guards and fenced writes are for.
        """
        self._engine.require_live(self._holding)
        loss = self._engine.run(lambda pace: leases.check(self._holding.lane, pace)) or self._belief.loss
        if loss is not None and loss.reason is LossReason.ENDED:
            raise LeaseReleased(f"this attempt at {self.task} was ended by this process")
        if loss is not None:
            self._belief.lose(loss)
            raise fencing.ownership_refused(self._tenure, loss)
        if self.standing is not Standing.HELD:
            raise Unverified(f"{self.task}: etcd names this owner still, but {self._why_not_held()}")

    def _why_not_held(self) -> str:
        return f"the lease is {self.standing} ({self.doubt or 'over'})"

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
        write_id = unknown.write_id if isinstance(unknown, OutcomeUnknown) else None
        if write_id is None:
            raise Misuse("this error is not about a fenced write; repeat the call that raised it")
        fate = self._holding.lane.fates.get(write_id)
        if fate is not None:
            return fate.verdict
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
        self._end(
            Ending(
                "completed",
                closes="completed",
                result=checked_document(result, "a result"),
                evidence=checked_evidence(evidence),
            )
        )

    def fail(self, reason: str, *, retry: bool = True) -> None:
        """End this attempt as failed. The task is ready for another (`retry`), or closed for good."""
        checked_name(reason, "a reason")
        if not retry:
            self._require_task("fail(retry=False)")
        self._end(Ending("failed", reason, closes=None if retry else "failed"))

    def _require_task(self, call: str) -> None:
        if ":" not in self._tenure.keys.segment:
            raise Misuse(f"{call} closes a task for good; {self.task!r} is a plain lock, which never closes")

    def _end(self, ending: Ending) -> None:
        self._belief.ending = True
        try:
            again = self._holding.lane.ended is not None  # then only whether it is the same ending is asked
            self._engine.commit(
                self._holding, lambda lane, pace: tasks.end(lane, ending, pace), even_released=again
            )
        finally:
            self._belief.ending = False
        self._finish()

    def release(self) -> None:
        """Give the task back now. Twice is no error; Superseded or LeaseLost if it was not ours any more.

        Renewal stops at once, so a release that meets no etcd ends with the TTL all the same.
        """
        self._release(None)

    def _release(self, seconds: float | None) -> None:
        self._engine.host.require_usable()
        if self._holding.given_back:
            return
        self._belief.ending = True  # and stays so: nothing renews this lease any more
        self._engine.renewer.remove(self._belief)
        try:
            released = Ending("released")
            self._engine.commit(
                self._holding, lambda lane, pace: tasks.end(lane, released, pace), seconds, even_released=True
            )
        except (Unavailable, OutcomeUnknown):
            if self._finish(0.5) is GaveBack.NO:
                raise
        except EtcdFenceError:
            self._finish()
            raise
        except BaseException:  # Ctrl-C: nobody renews this lease any more, and it must not look held
            self._stop()
            raise
        else:
            self._finish()

    def abandon(self) -> None:
        """Stop renewing and say nothing: the task becomes free when the TTL has passed. For a caller that
        cannot vouch that its work has stopped."""
        self._engine.host.require_usable()
        self._stop()
        self._holding.given_back = True

    def _stop(self) -> None:
        self._belief.release()
        self._engine.leave(self._holding)

    def _finish(self, seconds: float = 1.0) -> GaveBack:
        self._stop()
        outcome = self._engine.revoke(self._tenure, seconds)
        self._holding.given_back = outcome is GaveBack.YES or self._holding.lane.ended is not None
        return outcome

    def __enter__(self) -> Self:
        self._engine.require_live(self._holding)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Release. A loss is raised only over a body that ended well; the body's own exception stays, with the
        loss as a note. A release that met no etcd is logged: what the body wrote is acknowledged all the same.
        """
        try:
            self._release(None if error is None else EXIT_SECONDS)
        except (Unavailable, OutcomeUnknown) as unheard:
            log.warning("%s could not be released and ends with its TTL: %s", self.task, unheard)
        except EtcdFenceError as refused:
            if error is None:
                raise
            error.add_note(f"etcdfence: {refused}")


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
        if self.committed is not None:
            raise Misuse("this transaction was committed already; begin another")
        if not self.edits and not self.checks:
            raise Misuse("this transaction is empty; put, delete or expect something first")
        self.committed = self._lease._write(self)
        return self.committed

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None and self.committed is None:
            self.commit()
