"""Coordinator and Lease for threads: thin shells that check arguments, run flows and remember what they say."""

from __future__ import annotations

import atexit
import logging
import threading
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from types import TracebackType
from typing import Any, Self, TypeVar

from etcdfence import _host, _timing
from etcdfence._edits import Edits, checked_document, checked_evidence
from etcdfence._flow import Flow, drive
from etcdfence._flows import fencing, leases, tasks
from etcdfence._flows.fencing import Lane
from etcdfence._flows.pacing import Pace
from etcdfence._host import Bounded, Host
from etcdfence._keys import Keys
from etcdfence._records import TaskRecord, read
from etcdfence._renewal import Belief, Confirmed, Outcome, Renewer
from etcdfence._requests import Members
from etcdfence._turn import Turn
from etcdfence._txns import Tenure
from etcdfence.errors import (
    EtcdFenceError,
    Held,
    LeaseReleased,
    Misuse,
    OutcomeUnknown,
    OwnershipRefused,
    Unavailable,
    Unverified,
)
from etcdfence.model import (
    Absent,
    Committed,
    Doubt,
    Entry,
    Guard,
    Loss,
    LossReason,
    MemberStatus,
    Owner,
    Receipt,
    Standing,
    TaskDescription,
    TaskName,
    Token,
    Verdict,
    checked_name,
)

log = logging.getLogger("etcdfence")
log.addHandler(logging.NullHandler())  # a library prints nothing unless its user asks for it
T = TypeVar("T")

CLOSE_SECONDS = 10.0  # for an explicit close(); leases not given back by then end with their TTL
EXIT_SECONDS = 2.0  # the same when the interpreter ends


@dataclass(frozen=True, slots=True)
class Identity:
    """How a worker appears in records. For people only: ownership is decided by lease and generation."""

    holder: str
    host: str
    pid: int


class GaveBack(Enum):
    YES = "etcd has revoked the lease"
    NO = "etcd did not answer; the lease ends with its TTL"


class Coordinator:
    """One namespace of one etcd. Made by `etcdfence.connect`; may be used from any thread; close it, or use it
    as a context manager. `patience` (seconds) is how long a call keeps trying before it raises Unavailable or
    OutcomeUnknown."""

    def __init__(
        self,
        host: Host,
        keys: Keys,
        epoch: leases.Epoch,
        identity: Identity,
        patience: float,
        on_close: Callable[[], None],
    ) -> None:
        self._host, self._keys, self._epoch, self._identity = host, keys, epoch, identity
        self._patience, self._on_close = patience, on_close
        self._lock = threading.RLock()
        self._lanes: dict[Belief, Lane] = {}
        self._turns: dict[Belief, Turn] = {}
        self._closing = False
        self._renewer = Renewer(self._renew, _host.clock)
        _open.add(self)

    @property
    def namespace(self) -> str:
        return self._keys.namespace

    @property
    def epoch(self) -> int:
        """The epoch's number, as last seen."""
        return self._epoch.number

    # --- owning --------------------------------------------------------------------------------------------

    def try_acquire(
        self,
        task: TaskName,
        *,
        ttl: int = 15,
        holder: str | None = None,
        on_lost: Callable[[Lease, Loss], None] | None = None,
        on_unverified: Callable[[Lease, Doubt], None] | None = None,
    ) -> Lease:
        """Own the task now, or raise Held (somebody does, and who), or TaskClosed (it is finished).

        `ttl` is in whole seconds: how long after the last sign of life the task becomes free. `on_lost` and
        `on_unverified` are called in a thread of their own. OutcomeUnknown: the claim may have landed; nobody
        renews it, so it ends with its TTL.
        """
        return self._acquire(task, ttl, 0.0, holder, on_lost, on_unverified)

    def acquire(
        self,
        task: TaskName,
        *,
        ttl: int = 15,
        wait: float | None = None,
        holder: str | None = None,
        on_lost: Callable[[Lease, Loss], None] | None = None,
        on_unverified: Callable[[Lease, Doubt], None] | None = None,
    ) -> Lease:
        """Own the task, waiting up to `wait` seconds (None: without limit) for its owner to go; then Held."""
        limit = None if wait is None else _timing.checked_seconds(wait, "wait")
        return self._acquire(task, ttl, limit, holder, on_lost, on_unverified)

    def _acquire(
        self,
        task: TaskName,
        ttl: int,
        wait: float | None,
        holder: str | None,
        on_lost: Callable[[Lease, Loss], None] | None,
        on_unverified: Callable[[Lease, Doubt], None] | None,
    ) -> Lease:
        self._require_open()
        wish = leases.Wish(
            keys=self._keys.task(task),
            holder=self._identity.holder if holder is None else checked_name(holder, "holder"),
            host=self._identity.host,
            pid=self._identity.pid,
            ttl=_timing.checked_ttl(ttl),
            epoch=self._epoch,
        )
        until = None if wait is None else _host.clock() + wait
        lease = Lease(self, self._own(wish, until), on_lost, on_unverified)
        if self._closing:
            lease._close()
            self._require_open()
        return lease

    def _own(self, wish: leases.Wish, until: float | None) -> Tenure:
        bid = leases.Bid()
        try:
            pace = Pace(_host.clock() + self._patience)
            outcome = drive(leases.acquire(bid, wish, pace, until), self._host)
        except BaseException:
            self._withdraw(bid, wish)
            raise
        if isinstance(outcome, Tenure):
            bid.lease_ids.remove(outcome.guard.lease_id)
            self._withdraw(bid, wish)  # grants that went unanswered, if there were any
            return outcome
        self._withdraw(bid, wish)
        raise self._held(wish, outcome.owner)

    def _held(self, wish: leases.Wish, owner: Owner | None) -> Held:
        with self._lock:
            ours = {lane.tenure.guard.lease_id for lane in self._lanes.values()}
        mine = owner is not None and owner.lease_id in ours
        namesake = owner is not None and owner.holder == wish.holder and not mine
        return Held(wish.keys.task, owner, mine=mine, namesake=namesake)

    def _withdraw(self, bid: leases.Bid, wish: leases.Wish) -> None:
        """Undo what an acquire left behind. Where etcd does not answer, go on in the background for as long as
        the leases can live; after that nothing of the bid can land any more."""
        if not bid.lease_ids or self._host.forked:
            return

        def undo(seconds: float) -> None:
            try:
                self._run(lambda pace: leases.withdraw(bid, pace), seconds)
            except EtcdFenceError as error:
                log.info("an abandoned claim of %s is not undone yet: %s", wish.keys.task, error)

        if not bid.doubtful:
            undo(1.0)
        if bid.lease_ids:
            threading.Thread(target=undo, args=(wish.ttl,), name="etcdfence-withdraw", daemon=True).start()

    # --- looking -------------------------------------------------------------------------------------------

    def describe(self, task: TaskName) -> TaskDescription:
        """Everything the store says of one task, at one revision; NotFound where it says nothing."""
        self._require_open()
        keys = self._keys.task(task)
        return self._run(lambda pace: tasks.describe(self._keys, keys, pace))

    def tasks(self, *, owned_only: bool = False) -> list[TaskDescription]:
        """All tasks of the namespace by name, without attempts and history; `owned_only`: those with an owner."""
        self._require_open()
        return self._run(lambda pace: tasks.tasks(self._keys, pace, owned_only=owned_only))

    def get(self, key: str) -> Entry:
        """A data key's value and revision (None and ABSENT where it is not there), read linearizably."""
        self._require_open()
        keys = self._keys.data(key), self._keys.provenance(key)
        return self._run(lambda pace: fencing.get(key, *keys, pace))

    def members(self) -> Sequence[MemberStatus]:
        """What each endpoint says of itself; one that does not answer is listed with its error."""
        self._require_open()
        return self._host.call(Members())

    # --- ending --------------------------------------------------------------------------------------------

    def close(self, timeout: float = CLOSE_SECONDS) -> None:
        """Give back every lease (`loss.reason` closed), stop renewing and close the connections.

        Takes at most about `timeout` seconds; a lease that could not be given back ends with its TTL. In a
        process forked from the one that connected it does nothing: the leases are the parent's.
        """
        if self._host.forked:
            return
        until = _host.clock() + _timing.checked_seconds(timeout, "timeout")
        with self._lock:
            if self._closing:
                return
            self._closing = True
            held = list(self._lanes.items())
        for belief, _ in held:
            belief.lose(Loss(LossReason.CLOSED))
        self._renewer.close()
        for belief, lane in held:
            self._give_back(belief, lane, until)
        self._host.close()
        self._on_close()

    def _give_back(self, belief: Belief, lane: Lane, until: float) -> None:
        left = until - _host.clock()
        if left <= 0:
            return
        try:
            with self._turns[belief].take(left):
                self._run(lambda pace: tasks.end(lane, tasks.Ending("released", "closed"), pace), left)
        except EtcdFenceError as error:
            log.info("%s could not be released: %s", lane.tenure.task, error)
        self._revoke(lane, until - _host.clock())

    def _revoke(self, lane: Lane, seconds: float) -> GaveBack:
        """Give back the etcd lease; only this tenure's owner key hangs on it, so this frees the task even where
        the release itself went unheard. Failing that the lease runs out by itself."""
        bid = leases.Bid(lease_ids=[lane.tenure.guard.lease_id])
        try:
            if seconds > 0:
                self._run(lambda pace: leases.revoke(bid, pace), seconds)
        except EtcdFenceError as error:
            log.info("the etcd lease of %s ends with its TTL: %s", lane.tenure.task, error)
        return GaveBack.NO if bid.lease_ids else GaveBack.YES

    def __enter__(self) -> Self:
        self._require_open()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"<Coordinator namespace={self.namespace!r}{' closed' if self._closing else ''}>"

    # --- for leases ----------------------------------------------------------------------------------------

    def _require_open(self) -> None:
        self._host.require_usable()
        if self._closing:
            raise Misuse("this coordinator is closed; call etcdfence.connect() again")

    def _run(self, flow: Callable[[Pace], Flow[T]], seconds: float | None = None) -> T:
        """Run a flow that must have ended after so many seconds (None: the coordinator's patience)."""
        pace = Pace(_host.clock() + (self._patience if seconds is None else seconds))
        return drive(flow(pace), Bounded(self._host, pace.deadline))

    def _enter(self, belief: Belief, lane: Lane, turn: Turn) -> None:
        with self._lock:
            self._lanes[belief] = lane
            self._turns[belief] = turn
        self._renewer.add(belief)

    def _leave(self, belief: Belief) -> None:
        self._renewer.remove(belief)
        with self._lock:
            self._lanes.pop(belief, None)
            self._turns.pop(belief, None)

    def _renew(self, beliefs: Sequence[Belief], limit: float) -> Sequence[Outcome]:
        with self._lock:
            lanes = [self._lanes.get(belief) for belief in beliefs]
        present = [lane for lane in lanes if lane is not None]
        found = iter(drive(leases.renew(present, self._keys.epoch, self._host.seen, limit), self._host))
        outcomes = [Doubt.NOT_RENEWED if lane is None else _outcome(lane, next(found)) for lane in lanes]
        restored = Loss(LossReason.STORE_RESTORED)
        if restored in outcomes:
            self._lose_all(restored)
        return outcomes

    def _lose_all(self, loss: Loss) -> None:
        with self._lock:
            beliefs = list(self._lanes)
        for belief in beliefs:
            belief.lose(loss)
        self._host.forget_store()


def _outcome(lane: Lane, found: leases.RenewalOutcome) -> Outcome:
    if not isinstance(found, leases.Renewed):
        return found
    lane.renewed_at = found.sent.clock
    return Confirmed(found.sent.clock, found.sent.wall)


_open: weakref.WeakSet[Coordinator] = weakref.WeakSet()


@atexit.register
def _close_all() -> None:
    """A process that ends normally gives its leases back; its threads are gone, so nobody works under them."""
    for coordinator in list(_open):
        coordinator.close(EXIT_SECONDS)


def _dropped(coordinator: Coordinator, belief: Belief) -> None:
    """The last reference to a lease went away without release. Stop renewing it; it ends with its TTL. Nothing
    is sent from here: a finaliser runs anywhere, at any time."""
    if coordinator._host.forked:
        return
    if not belief.over:
        log.warning("a lease on %s was dropped without release(); it ends with its TTL", belief.task)
    belief.release()
    coordinator._leave(belief)


class Lease:
    """Ownership of one task. Made by `Coordinator.acquire`; leaving its `with` block releases it.

    Any thread may use it; fenced writes of one lease go out one after the other. After a loss the handle never
    comes back to life.
    """

    def __init__(
        self,
        coordinator: Coordinator,
        tenure: Tenure,
        on_lost: Callable[[Lease, Loss], None] | None,
        on_unverified: Callable[[Lease, Doubt], None] | None,
    ) -> None:
        self._coordinator, self._tenure = coordinator, tenure
        self._lane = Lane(tenure, tenure.granted_at)
        self._turn = Turn()
        self._belief = Belief(tenure.task, tenure.generation, tenure.granted, tenure.granted_at, _host.clock)
        # Only a callback makes the belief, which the renewal thread holds, refer back to the handle.
        if on_lost is not None:
            self._belief.on_loss = lambda loss: on_lost(self, loss)
        if on_unverified is not None:
            self._belief.on_doubt = lambda doubt: on_unverified(self, doubt)
        coordinator._enter(self._belief, self._lane, self._turn)
        weakref.finalize(self, _dropped, coordinator, self._belief).atexit = False

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
        self._require_live()
        if self._belief.loss is not None:
            raise fencing.ownership_refused(self._tenure, self._belief.loss)
        return self._tenure.guard

    def check(self) -> None:
        """Ask etcd, linearizably; return only if the lease is held now, and verified in time.

        For the moment before a consequential action. It permits no later write: between the check and the
        action everything may change, which is what guards and fenced writes are for.
        """
        self._require_live()
        loss = self._coordinator._run(lambda pace: leases.check(self._lane, pace))
        if loss is not None:
            self._belief.lose(loss)
            raise fencing.ownership_refused(self._tenure, loss)
        if self.standing is not Standing.HELD:
            raise Unverified(f"{self.task}: etcd names this owner still, but {self._why_not_held()}")

    def _why_not_held(self) -> str:
        return f"the lease is {self.standing} ({self.doubt or 'over'})"

    def wait_lost(self, timeout: float | None = None) -> Loss | None:
        """Wait until the lease is lost, at most `timeout` seconds; None when it is not."""
        limit = None if timeout is None else _timing.checked_seconds(timeout, "timeout")
        self._belief.lost.wait(limit)
        return self._belief.loss

    def get(self, key: str) -> Entry:
        """A data key's value and revision; use the revision as `expect=` of a later write."""
        return self._coordinator.get(key)

    # --- writing -------------------------------------------------------------------------------------------

    def put(self, key: str, value: bytes | str, *, expect: int | Absent | None = None) -> Committed:
        """Write a data key under the fence. `expect`: the revision the key must still have, or ABSENT; without
        it the write is blind. Raises Superseded or LeaseLost (refused by etcd itself), Conflict, TooLarge,
        Unavailable (not applied), OutcomeUnknown (`settle` decides it).
        """
        edits = Edits(self._coordinator._keys)
        edits.put(key, value, expect=expect)
        return self._write(edits)

    def delete(self, key: str, *, expect: int | Absent | None = None) -> Committed:
        """Delete a data key under the fence; one that is not there is no error (unless `expect` says so)."""
        edits = Edits(self._coordinator._keys)
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
        write_id = unknown.write_id
        if write_id is None:
            raise Misuse("this error is not about a fenced write; repeat the call that raised it")
        return self._commit(lambda lane, pace: fencing.settle(lane, write_id, pace))

    def _commit(self, flow: Callable[[Lane, Pace], Flow[T]], seconds: float | None = None) -> T:
        """Always ask etcd, whatever this process believes; only a handle that was given back is refused here,
        or one whose store is known to be another."""
        coordinator = self._coordinator
        coordinator._host.require_usable()
        with self._turn.take(coordinator._patience if seconds is None else seconds):
            self._require_live()
            try:
                return coordinator._run(lambda pace: flow(self._lane, pace), seconds)
            except OwnershipRefused as refused:
                self._belief.lose(refused.loss)
                raise

    def _require_live(self) -> None:
        self._coordinator._host.require_usable()
        if self._belief.released:
            raise LeaseReleased(f"generation {self.generation} of {self.task} was given back by this process")
        loss = self._belief.loss
        if loss is not None and loss.reason in (LossReason.CLOSED, LossReason.STORE_RESTORED):
            raise fencing.ownership_refused(self._tenure, loss)

    # --- ending --------------------------------------------------------------------------------------------

    def complete(self, result: Any, evidence: Mapping[str, Any]) -> None:
        """Close the task for good with its result. `evidence` says where the result can be verified.

        Only for a TaskKey: a lock or a leadership never closes. Repeating it after OutcomeUnknown is safe.
        """
        self._require_task("complete")
        self._end(
            tasks.Ending(
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
        self._end(tasks.Ending("failed", reason, closes=None if retry else "failed"))

    def _require_task(self, call: str) -> None:
        if ":" not in self._tenure.keys.segment:
            raise Misuse(f"{call} closes a task for good; {self.task!r} is a plain lock, which never closes")

    def _end(self, ending: tasks.Ending) -> None:
        self._commit(lambda lane, pace: tasks.end(lane, ending, pace))
        self._finish()

    def release(self) -> None:
        """Give the task back now. Twice is no error; Superseded or LeaseLost if it was not ours any more.

        Renewal stops at once, so a release that meets no etcd ends with the TTL all the same.
        """
        self._release(None)

    def _release(self, seconds: float | None) -> None:
        self._coordinator._host.require_usable()
        if self._belief.released:
            return
        self._coordinator._renewer.remove(self._belief)
        try:
            self._commit(lambda lane, pace: tasks.end(lane, tasks.Ending("released"), pace), seconds)
        except (Unavailable, OutcomeUnknown):
            if self._finish() is GaveBack.NO:
                raise
        except EtcdFenceError:
            self._finish()
            raise
        else:
            self._finish()

    def abandon(self) -> None:
        """Stop renewing and say nothing: the task becomes free when the TTL has passed. For a caller that
        cannot vouch that its work has stopped."""
        self._coordinator._host.require_usable()
        self._belief.release()
        self._coordinator._leave(self._belief)

    def _finish(self) -> GaveBack:
        self.abandon()
        return self._coordinator._revoke(self._lane, 1.0)

    def _close(self) -> None:
        self._belief.lose(Loss(LossReason.CLOSED))
        self.abandon()

    def __enter__(self) -> Self:
        self._require_live()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Release. A loss is raised only over a body that ended well; the body's own exception stays, with the
        loss as a note. A release that met no etcd is logged: what the body wrote is acknowledged all the same.
        """
        interrupted = error is not None and not isinstance(error, Exception)
        try:
            self._release(EXIT_SECONDS if interrupted else None)
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
        super().__init__(lease._coordinator._keys)
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
