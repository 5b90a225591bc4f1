"""Every transaction, built as a value from values, and what its answer means.

Rules that hold for all of them:

- Flat, and a Range never names a revision (see `_requests.Range`).
- Compares are evaluated on the state before the transaction, ranges inside it see its own earlier puts.
- "Absent" protects against nothing that arrives late: a key can be absent, present and absent again. So each
  transaction that changes something compares a key that is created once or moves with every change: the
  attempt key (claim, seal) or the write marker (everything an owner commits).
- Every failure branch reads what is needed to say why.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Final, Literal

from etcdfence._keys import TaskKeys, prefix_end
from etcdfence._records import (
    AttemptRecord,
    ClosedRecord,
    OwnerRecord,
    ProvenanceRecord,
    TaskRecord,
    Unreadable,
    WaiterRecord,
    owner_of,
    read,
)
from etcdfence._requests import (
    Compare,
    Delete,
    KeyValue,
    Operation,
    Order,
    Put,
    Range,
    RangeReply,
    Target,
    Txn,
    TxnReply,
)
from etcdfence.errors import Conflict, EtcdFenceError, TooLarge, UnresolvedEffects
from etcdfence.model import Guard, Loss, LossReason, Owner

MAX_OPERATIONS: Final = 128  # etcd's --max-txn-ops, for each of compares, success and failure
MAX_BYTES: Final = 1_500_000  # below etcd's --max-request-bytes of 1.5 MiB, with room for the envelope
RECORD, CLOSED, OPEN_EFFECTS = "the task record", "the closing record", "open effects"


def absent(key: bytes) -> Compare:
    return Compare(Target.CREATE, key, 0)


def nothing_below(prefix: bytes) -> Compare:
    """CREATE == 0 over a range holds exactly when the range is empty."""
    return Compare(Target.CREATE, prefix, 0, prefix_end(prefix))


def unmoved(key: bytes, revision: int) -> Compare:
    """The key still has this mod revision; 0 stands for a key that is not there."""
    return Compare(Target.MOD, key, revision)


def below(prefix: bytes, *, limit: int = 0, order: Order = Order.KEY, keys_only: bool = False) -> Range:
    return Range(prefix, prefix_end(prefix), limit, order, keys_only)


def guard_compares(guard: Guard) -> tuple[Compare, ...]:
    return tuple(Compare(Target(target), key, operand) for _, target, key, operand in guard.for_stub())


# --- the epoch ---------------------------------------------------------------------------------------------


def found_epoch(key: bytes, value: bytes) -> Txn:
    """Create the epoch once; else read it. The key is never deleted, so a late duplicate changes nothing."""
    return Txn((absent(key),), (Put(key, value), Range(key)), (Range(key),))


def founded(reply: TxnReply) -> KeyValue:
    """The epoch key that either branch of `found_epoch` has read."""
    kv = reply.reads[0].first
    if kv is None:  # etcd reads its own put back; anything else is not etcd
        raise EtcdFenceError("etcd answered without the namespace's epoch key")
    return kv


def reading(*ranges: Range, timeout: float | None = None) -> Txn:
    """Linearizable reads at one revision."""
    return Txn((), ranges, (), timeout)


def must_fail(epoch_key: bytes) -> tuple[Txn, ...]:
    """Transactions that succeed only where a part of a comparison gets lost on its way: its target, its number, or
    the end of its range. Each numeric comparison of the guard then turns into one with zero, which holds for a key
    that is not there."""
    nobody = epoch_key + b"/nobody's"
    numbers = [Compare(target, nobody, 1) for target in (Target.MOD, Target.CREATE, Target.LEASE)]
    nothing_around_the_epoch = Compare(Target.CREATE, epoch_key[:-1], 0, epoch_key + b"\0")
    return tuple(Txn((compare,), ()) for compare in (*numbers, nothing_around_the_epoch))


# --- claim -------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Claim:
    """What one attempt asks for. The etcd lease has been granted; the attempt id is fresh. `wait_lease` is what
    its place in line hangs on, `place` the create revision of its entry there (0: it is not in line)."""

    keys: TaskKeys
    attempt: AttemptRecord
    owner: OwnerRecord
    lease_id: int
    epoch_key: bytes
    epoch_value: bytes
    wait_lease: int = 0
    place: int = 0

    @property
    def attempt_key(self) -> bytes:
        return self.keys.attempt(self.attempt.attempt)

    @property
    def entry_key(self) -> bytes:
        return self.keys.queue + self.attempt.attempt.encode()


def claim(ask: Claim) -> Txn:
    """Take the task if nobody has it, it is kept for nobody, and this attempt never ran; and if nobody is in line,
    or the own entry is still there. Whoever claims from the line has seen itself at its head, which it stays.

    The compare on the attempt key is what makes a repeated or late claim harmless: one attempt has at most
    one tenure, ever. The owner key is read back after its put, in the same branch: the generation is its own
    mod revision.
    """
    keys, attempt = ask.keys, ask.attempt.to_bytes()
    in_line = Compare(Target.CREATE, ask.entry_key, ask.place)
    return Txn(
        compares=(
            absent(keys.owner),
            absent(ask.attempt_key),
            absent(keys.closed),
            Compare(Target.VALUE, ask.epoch_key, ask.epoch_value),
            in_line if ask.place else nothing_below(keys.queue),
            absent(keys.reserve),
        ),
        success=(
            Range(keys.last),
            Range(keys.record),
            Put(keys.owner, ask.owner.to_bytes(), ask.lease_id),
            Put(ask.attempt_key, attempt),
            Put(keys.last, attempt),
            Range(keys.owner),
            *([Delete(ask.entry_key)] if ask.place else []),
        ),
        failure=standing_of(ask),
    )


def standing_of(ask: Claim) -> tuple[Range, ...]:
    """What says how an attempt stands: with the task, and in its line (who is ahead only where its place is
    known)."""
    keys = ask.keys
    line = below(keys.queue, limit=1, order=Order.CREATE_DESCENDING, keys_only=True)
    return (
        Range(keys.owner),
        Range(ask.attempt_key),
        Range(keys.closed),
        Range(ask.epoch_key),
        Range(keys.record),
        Range(keys.reserve, keys_only=True),
        Range(ask.entry_key, keys_only=True),
        replace(line, max_create=max(ask.place - 1, 0)),
    )


@dataclass(frozen=True, slots=True)
class Won:
    generation: int
    cluster_id: int
    record: KeyValue | None
    predecessor: KeyValue | None


@dataclass(frozen=True, slots=True)
class Ran:
    """The attempt exists already: an earlier try was applied at `began`. `generation` while it owns the task."""

    generation: int | None
    began: int
    cluster_id: int
    record: KeyValue | None


@dataclass(frozen=True, slots=True)
class Shut:
    state: str
    record: KeyValue | None


@dataclass(frozen=True, slots=True)
class OtherEpoch:
    epoch: KeyValue | None


@dataclass(frozen=True, slots=True)
class Taken:
    """By an owner, by others in line, or kept for somebody. `line` counts those in line; `place` is the create
    revision of the own entry (0: none), `ahead` the entry before it; `revision` is where to wait from."""

    owner: Owner | None
    revision: int
    reserved: bool = False
    line: int = 0
    place: int = 0
    ahead: bytes | None = None

    @property
    def my_turn(self) -> bool:
        return bool(self.place) and not (self.owner or self.reserved or self.ahead)

    def blocking(self, keys: TaskKeys) -> bytes:
        """The one key that whoever is in line waits for: the entry ahead; at the head the owner, or the
        reserve."""
        return self.ahead or (keys.owner if self.owner else keys.reserve)


ClaimAnswer = Won | Ran | Shut | OtherEpoch | Taken


def claim_answer(ask: Claim, reply: TxnReply) -> ClaimAnswer:
    if reply.succeeded:
        last, record, owner = (found.first for found in reply.reads)
        if owner is None:  # etcd reads its own put back; anything else is not etcd
            raise EtcdFenceError("etcd accepted the claim but did not return the owner key")
        return Won(owner.mod_revision, reply.header.cluster_id, record, last)
    return stands(ask, reply)


def stands(ask: Claim, reply: TxnReply) -> Ran | Shut | OtherEpoch | Taken:
    """What the reads of `standing_of` say."""
    owner, attempt, closed, epoch, record, reserve, entry = (found.first for found in reply.reads[:7])
    before = reply.reads[7]
    if attempt is not None:
        return Ran(_mine(ask, owner), attempt.create_revision, reply.header.cluster_id, record)
    if closed is not None:
        return Shut(closed_state(closed) or "its closing record cannot be read", record)
    if epoch is None or epoch.value != ask.epoch_value:
        return OtherEpoch(epoch)
    return Taken(
        owner_of(owner) if owner else None,
        reply.header.revision,
        reserve is not None,
        before.count,
        entry.create_revision if entry else 0,
        before.first.key if ask.place and before.first else None,
    )


def enter(ask: Claim) -> Txn:
    """Get in line: an entry on the wait lease. Repeated it changes nothing, for an entry keeps its create
    revision. The compare on the attempt key is what keeps a late try from leaving an entry behind: an attempt
    that has run, or was sealed, has no place in line; nor has one of another epoch, whose line was cleared.
    That a task is closed is read: its entry goes with the lease, which ends with the attempt."""
    attempt = ask.attempt
    waiter = WaiterRecord(
        attempt=attempt.attempt,
        holder=attempt.holder,
        host=attempt.host,
        pid=attempt.pid,
        since=attempt.started,
    )
    put = Put(ask.entry_key, waiter.to_bytes(), ask.wait_lease)
    return Txn(
        compares=(absent(ask.attempt_key), Compare(Target.VALUE, ask.epoch_key, ask.epoch_value)),
        success=(put, *standing_of(ask)),
        failure=standing_of(ask),
    )


def leave(ask: Claim) -> Txn:
    """Give up the place in line, where every try of this attempt was answered. (Else it is sealed.) The entry
    bears the attempt's name, so nobody else's can be meant."""
    return Txn((), (Delete(ask.entry_key),))


def _mine(ask: Claim, owner: KeyValue | None) -> int | None:
    mine = owner is not None and owner.lease == ask.lease_id and owner_of(owner).attempt == ask.attempt.attempt
    return owner.mod_revision if owner is not None and mine else None


def closed_state(closed: KeyValue) -> str | None:
    """How a task was closed; None where its tombstone cannot be read. It is closed all the same."""
    record = read(ClosedRecord, closed)
    return None if isinstance(record, Unreadable) else record.state


def task_result(record: KeyValue | None) -> object:
    found = read(TaskRecord, record) if record else None
    return found.result if isinstance(found, TaskRecord) else None


def seal(ask: Claim) -> Txn:
    """Create the attempt key as sealed, so that no request of it which is still on its way can land: no claim, and
    no entry in line. One that is there goes."""
    sealed = ask.attempt.model_copy(update={"sealed": True})
    return Txn(
        (absent(ask.attempt_key),),
        (Put(ask.attempt_key, sealed.to_bytes()), Delete(ask.entry_key)),
        (Range(ask.keys.owner), Range(ask.keys.record), Range(ask.attempt_key)),
    )


def landed(ask: Claim, reply: TxnReply) -> Ran | None:
    """What a refused seal found: a tenure of this attempt, or (None) an earlier try of the same seal."""
    owner, record, attempt = (found.first for found in reply.reads)
    found = read(AttemptRecord, attempt) if attempt else None
    if attempt is None or (isinstance(found, AttemptRecord) and found.sealed):
        return None
    return Ran(_mine(ask, owner), attempt.create_revision, reply.header.cluster_id, record)


def mark_lost(keys: TaskKeys, predecessor: AttemptRecord, made_at: int, ended: AttemptRecord) -> Txn:
    """Give an attempt that stopped without a word its end, unless somebody has touched it since its claim."""
    key = keys.attempt(predecessor.attempt)
    return Txn((unmoved(key, made_at),), (Put(key, ended.to_bytes()),))


# --- what an owner commits ---------------------------------------------------------------------------------


@dataclass(frozen=True)
class Tenure:
    """One ownership: the values that never change while it lasts. `granted_at` is the local clock at the
    sending of the grant (seconds), `granted` the TTL that etcd granted (seconds)."""

    keys: TaskKeys
    guard: Guard
    attempt: AttemptRecord
    epoch: int
    granted: int
    granted_at: float
    cluster_id: int
    record: KeyValue | None = None
    shared: bool = False  # its etcd lease is a session's

    @property
    def task(self) -> str:
        return self.keys.task

    @property
    def generation(self) -> int:
        return self.guard.generation

    @cached_property
    def marker(self) -> bytes:
        return self.keys.marker(self.generation)

    @cached_property
    def attempt_key(self) -> bytes:
        return self.keys.attempt(self.attempt.attempt)

    @cached_property
    def _provenance(self) -> bytes:
        record = ProvenanceRecord(
            task=self.task,
            generation=self.generation,
            attempt=self.attempt.attempt,
            write="WRITE",
            at="AT",
        )
        form = record.to_bytes().replace(b"%", b"%%")
        return form.replace(b'"write":"WRITE"', b'"write":"%b"').replace(b'"at":"AT"', b'"at":"%b"')

    def provenance(self, write_id: str, at: str) -> bytes:
        """The record beside each data key of one write. Between the writes of a tenure only these two texts
        differ, neither of which needs an escape in JSON; building it anew was a tenth of a write's time."""
        return self._provenance % (write_id.encode(), at.encode())

    @cached_property
    def guard_compares(self) -> tuple[Compare, ...]:
        return guard_compares(self.guard)

    @cached_property
    def evidence_reads(self) -> tuple[Range, ...]:
        return (
            Range(self.guard.owner_key),
            Range(self.guard.epoch_key),
            Range(self.marker),
            Range(self.attempt_key),
            Range(self.keys.last),
        )


@dataclass(frozen=True, slots=True)
class Expectation:
    """A compare beside the guard, with the name to report when it does not hold."""

    name: str
    compare: Compare

    def read(self) -> Range:
        return Range(self.compare.key, self.compare.range_end, keys_only=True)

    def broken_by(self, found: RangeReply) -> bool:
        """As etcd evaluates it: a missing key, or an empty range, counts as one with all numbers zero."""
        wanted = self.compare.operand
        if not found.kvs:
            return wanted != 0
        create = self.compare.target is Target.CREATE
        return any((kv.create_revision if create else kv.mod_revision) != wanted for kv in found.kvs)


@dataclass(frozen=True, slots=True)
class Ending:
    """How a worker ends its tenure. `closes`: the task is finished for good, with this result and evidence."""

    how: Literal["released", "completed", "failed"]
    reason: str | None = None
    closes: Literal["completed", "failed"] | None = None
    result: Any = None
    evidence: Any = None


@dataclass(frozen=True, slots=True)
class Change:
    """One commit of an owner. `names` are the users' keys in it; one that `ends` the tenure takes the marker
    away instead of moving it."""

    write_id: str
    operations: tuple[Operation, ...] = ()
    expectations: tuple[Expectation, ...] = ()
    names: tuple[str, ...] = ()
    ends: Ending | None = None
    reads: tuple[Range, ...] = ()


def commit(tenure: Tenure, seen: int, change: Change) -> Txn:
    """Guard, write marker and expectations; then the change, and the marker moved to its write id.

    Every try of one change compares the same marker revision, and the first to be applied moves it: no other
    try can follow, and none can land after a later change.
    """
    ending = Delete(tenure.marker) if change.ends else Put(tenure.marker, change.write_id.encode())
    return Txn(
        compares=(
            *tenure.guard_compares,
            unmoved(tenure.marker, seen),
            *[expected.compare for expected in change.expectations],
        ),
        success=(*change.operations, ending, *change.reads),
        failure=(*tenure.evidence_reads, *[expected.read() for expected in change.expectations]),
    )


def checked_size(txn: Txn) -> Txn:
    """TooLarge where etcd would refuse the transaction for its size, before anything is sent."""
    most = max(len(txn.compares), len(txn.success), len(txn.failure))
    if most > MAX_OPERATIONS:
        raise TooLarge(f"this write needs {most} operations in one transaction; etcd takes {MAX_OPERATIONS}")
    size = sum([len(op.key) + len(op.value) for op in txn.success if isinstance(op, Put)])
    if size > MAX_BYTES:
        raise TooLarge(f"this write has {size} bytes of keys and values; at most {MAX_BYTES} fit one transaction")
    return txn


@dataclass(frozen=True, slots=True)
class Evidence:
    """What the failure branch of a commit saw, at one revision."""

    revision: int
    owner: KeyValue | None
    epoch: KeyValue | None
    marker: KeyValue | None
    attempt: KeyValue | None
    last: KeyValue | None
    expected: tuple[RangeReply, ...] = ()

    @classmethod
    def of(cls, reply: TxnReply, start: int = 0) -> Evidence:
        """From the five `evidence_reads` that begin at `start`; what follows them was read for expectations."""
        owner, epoch, marker, attempt, last = (found.first for found in reply.reads[start : start + 5])
        return cls(reply.header.revision, owner, epoch, marker, attempt, last, reply.reads[start + 5 :])

    def guard_holds(self, guard: Guard) -> bool:
        return (
            self.owner is not None
            and self.owner.mod_revision == guard.generation
            and self.owner.lease == guard.lease_id
            and self.epoch is not None
            and self.epoch.value == guard.epoch_value
        )

    def ended_by(self) -> str | None:
        """The write id of the commit that ended this attempt, if one did."""
        record = read(AttemptRecord, self.attempt) if self.attempt else None
        return record.ended.write if isinstance(record, AttemptRecord) and record.ended else None


def objection(task: str, change: Change, evidence: Evidence) -> EtcdFenceError:
    """Why a change was refused although the guard holds."""
    pairs = zip(change.expectations, evidence.expected, strict=True)
    broken = [(expected.name, found) for expected, found in pairs if expected.broken_by(found)]
    for name, found in broken:
        if name == OPEN_EFFECTS:
            return UnresolvedEffects(
                task, tuple(kv.key.decode(errors="replace").rsplit("/", 1)[1] for kv in found.kvs)
            )
    return Conflict(tuple(name for name, _ in broken))


def known_to_be_over(tenure: Tenure) -> Expectation:
    """What a tenure that etcd has declared over expects of its further writes: it cannot hold together with the
    guard, since an attempt's key is never removed before its owner key. They are sent and refused by etcd as
    ever, even by a store that was restored to a time when the tenure was alive."""
    return Expectation("the attempt", absent(tenure.attempt_key))


def loss_seen(guard: Guard, attempt: str, evidence: Evidence) -> Loss | None:
    """How the tenure ended, as far as the keys alone tell. None: the owner key is gone and nothing says why."""
    owner = evidence.owner
    if owner is not None and owner.mod_revision > guard.generation:
        return Loss(LossReason.SUPERSEDED, current=owner.mod_revision)
    if owner is not None and (owner.mod_revision < guard.generation or owner.lease != guard.lease_id):
        return Loss(LossReason.STORE_RESTORED)
    if evidence.epoch is None or evidence.epoch.value != guard.epoch_value:
        return Loss(LossReason.EPOCH_RAISED)
    last = read(AttemptRecord, evidence.last) if evidence.last else None
    if evidence.last is None or not isinstance(last, AttemptRecord) or last.attempt == attempt:
        return None
    current = last.ended.generation if last.ended else evidence.last.mod_revision
    if current < guard.generation:
        return Loss(LossReason.STORE_RESTORED)
    if current == guard.generation:  # its own end, seen by somebody who does not know the attempt
        return None
    return Loss(LossReason.SUPERSEDED, current=current)


# --- endings -----------------------------------------------------------------------------------------------


def retention_counts(keys: TaskKeys) -> tuple[Range, ...]:
    """How many attempts, histories and refusals a task has; read along with an ending."""
    return tuple(
        Range(prefix, prefix_end(prefix), count_only=True)
        for prefix in (keys.attempts, keys.histories, keys.refusals)
    )


def remove(found: Iterable[KeyValue], *also: bytes) -> Txn:
    """Delete records as they were read; `also` are keys that go with them."""
    kvs = tuple(found)
    return Txn(
        tuple(unmoved(kv.key, kv.mod_revision) for kv in kvs),
        (*(Delete(kv.key) for kv in kvs), *(Delete(key) for key in also)),
    )
