"""Fenced writes: applied exactly once, in order, or refused by etcd itself.

Every commit of a tenure compares the guard and the revision of the tenure's write marker, and moves the
marker to its own write id. After a lost reply the same transaction is sent again:

    marker holds my id                       applied
    marker as before, guard holds            not yet (a late try may still come): send again
    guard gone, marker as before             definitely not applied, for good
    marker gone                              unknown, unless an earlier answer had decided it

"As before" includes "never made", and that is told apart from "trimmed long ago" by the attempt record, which
is never removed before the marker of its tenure.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace

from etcdfence import _txns
from etcdfence._flow import Flow
from etcdfence._flows import renewals
from etcdfence._flows.pacing import Pace, unanswered
from etcdfence._records import ProvenanceRecord, RefusalRecord, RefusedTry, ValueRecord, read
from etcdfence._requests import (
    Delete,
    FreshId,
    KeyValue,
    Now,
    Operation,
    Put,
    Range,
    Stamp,
    Txn,
    TxnReply,
)
from etcdfence.errors import (
    EtcdFenceError,
    LeaseLost,
    Misuse,
    OutcomeUnknown,
    OwnershipRefused,
    Superseded,
    Unavailable,
)
from etcdfence.model import ABSENT, Absent, Committed, Entry, Loss, LossReason, Verdict

KEPT_TRIES = 5  # stale tries that a refusal record describes; its count goes on
KEPT_FATES = 1000
REFUSAL_LIMIT = 2.0  # seconds for the note about a refused write


@dataclass(frozen=True, slots=True)
class Fate:
    """What became of a write; `revision` is where it was applied, if it was."""

    verdict: Verdict
    revision: int = 0


@dataclass(slots=True)
class Lane:
    """The commits of one tenure, one at a time: whoever runs a commit has the lane to himself.

    seen        mod revision of the marker as last seen, 0 while it was never made
    unsettled   write ids sent against `seen` whose outcome is not known; at most one of them was applied
    fates       what became of writes whose answer had been lost
    endings     what each unsettled ending would have meant
    ended       the ending of ours that was applied
    over        etcd has declared the tenure over: nothing may be applied any more
    entries     how many history entries this tenure has written
    renewed_at  local clock at the sending of the last renewal that etcd confirmed
    quiet       the work has stopped to report progress: not to be renewed
    """

    tenure: _txns.Tenure
    renewed_at: float
    seen: int = 0
    unsettled: list[str] = field(default_factory=list[str])
    fates: dict[str, Fate] = field(default_factory=dict[str, Fate])
    endings: dict[str, _txns.Ending] = field(default_factory=dict[str, _txns.Ending])
    ended: _txns.Ending | None = None
    over: bool = False
    entries: int = 0
    quiet: bool = False

    def sending(self, change: _txns.Change) -> None:
        self.fates.pop(change.write_id, None)
        if change.write_id not in self.unsettled:
            self.unsettled.append(change.write_id)
        if change.ends:
            self.endings[change.write_id] = change.ends

    def not_sent(self, write_id: str) -> None:
        self.endings.pop(write_id, None)
        if write_id in self.unsettled:
            self.unsettled.remove(write_id)

    def decide(self, others: Verdict, applied: str | None = None, revision: int = 0) -> None:
        """Fix the fate of everything unsettled: `applied` was, at `revision`; the others as said."""
        for write_id in self.unsettled:
            self.fates[write_id] = Fate(Verdict.APPLIED, revision) if write_id == applied else Fate(others)
        self.unsettled.clear()
        self.ended = self.ended or self.endings.get(applied or "")
        self.endings.clear()
        while len(self.fates) > KEPT_FATES:
            del self.fates[next(iter(self.fates))]

    def applied(self, change: _txns.Change, revision: int) -> None:
        """etcd has just applied this one: nothing else that was sent against the same marker ever can be."""
        self.not_sent(change.write_id)
        if self.unsettled:
            self.decide(Verdict.NOT_APPLIED)
        self.seen = revision
        self.ended = self.ended or change.ends

    def moved(self, write_id: str, revision: int) -> None:
        """The marker stands at `revision` with this id. One of ours: it was applied and no other. A stranger's:
        one of ours may have been applied before it."""
        known = write_id in self.unsettled
        self.decide(Verdict.NOT_APPLIED if known else Verdict.UNKNOWN, write_id, revision)
        self.seen = revision

    def learn(self, evidence: _txns.Evidence, guard_holds: bool) -> None:
        """Take from a refused commit whatever it settles; the table at the head of this module."""
        ended_by, marker = evidence.ended_by(), evidence.marker
        if ended_by in self.unsettled and evidence.attempt is not None:
            self.decide(Verdict.NOT_APPLIED, ended_by, evidence.attempt.mod_revision)
            self.seen = 0
        elif marker is not None and marker.mod_revision != self.seen:
            self.moved(marker.value.decode(errors="replace"), marker.mod_revision)
        elif marker is None and (self.seen or not (guard_holds or evidence.attempt)):
            self.decide(Verdict.UNKNOWN)
            self.seen = 0
        elif not guard_holds:
            self.decide(Verdict.NOT_APPLIED)


def commit(lane: Lane, change: _txns.Change, pace: Pace) -> Flow[tuple[Committed, TxnReply | None]]:
    """Bring one change to a definite end; any reply may be lost. The second value is etcd's own reply, None
    where only a later answer showed that the change had been applied.

    Raises Superseded or LeaseLost (guard gone), Conflict or UnresolvedEffects (an expectation did not hold),
    Unavailable (definitely not applied), OutcomeUnknown with the write id (`settle` decides it later).
    """
    if lane.over:
        known = _txns.known_to_be_over(lane.tenure)
        change = replace(change, expectations=(*change.expectations, known))
    try:
        return (yield from _tries(lane, change, pace))
    except OutcomeUnknown:
        raise
    except EtcdFenceError as error:  # whatever it is, it is no answer to a try that is still open
        if change.write_id in lane.unsettled:
            raise _unknown(change.write_id, error) from error
        raise


def _tries(lane: Lane, change: _txns.Change, pace: Pace) -> Flow[tuple[Committed, TxnReply | None]]:
    own, blind = change.write_id, False  # blind: a try against the present marker went unanswered
    while True:
        txn = _txns.checked_size(_txns.commit(lane.tenure, lane.seen, change))
        lane.sending(change)
        try:
            reply = yield from txn
        except OutcomeUnknown as error:
            blind = True
            yield from pace.again(_unknown(own, error))
            continue
        except EtcdFenceError as error:  # this try was not applied
            if not blind:
                lane.not_sent(own)
            if not isinstance(error, Unavailable):
                raise
            yield from pace.again(error)
            continue
        if reply.succeeded:
            lane.applied(change, reply.header.revision)
            return Committed(reply.header.revision, own), reply
        before = lane.seen
        applied = yield from _refused(lane, change, reply, blind, pace)
        if applied:
            return applied, None
        blind = blind and lane.seen == before


def _unknown(write_id: str, error: EtcdFenceError) -> OutcomeUnknown:
    unknown = OutcomeUnknown(f"write {write_id} may have been applied: {error}", write_id=write_id)
    unknown.__cause__ = error
    return unknown


def _refused(lane: Lane, change: _txns.Change, reply: TxnReply, blind: bool, pace: Pace) -> Flow[Committed | None]:
    """What a refused try means: Committed where an earlier try had been applied, None where the change is to
    be sent again, else the error that says why not."""
    own, evidence = change.write_id, _txns.Evidence.of(reply)
    holds, before = evidence.guard_holds(lane.tenure.guard), lane.seen
    lane.learn(evidence, holds)
    fate = lane.fates.get(own)
    if fate is not None and fate.verdict is Verdict.APPLIED:
        return Committed(fate.revision, own)
    if not blind:  # its only try was answered, and the answer was no
        lane.not_sent(own)
        lane.fates.pop(own, None)
    elif fate is not None and fate.verdict is Verdict.UNKNOWN:
        raise OutcomeUnknown(f"write {own}: its marker is gone or was moved by a stranger", write_id=own)
    if not holds:
        raise (yield from _ownership_error(lane, change, evidence))
    if lane.over:
        raise ownership_refused(lane.tenure, Loss(LossReason.STORE_RESTORED), evidence.revision)
    if lane.seen != before:
        return None
    objection = _txns.objection(lane.tenure.task, change, evidence)
    if not blind:
        raise objection
    return (yield from _after_seal(lane, own, objection, pace))


def _after_seal(lane: Lane, own: str, objection: EtcdFenceError, pace: Pace) -> Flow[Committed | None]:
    """An expectation that does not hold now may hold when the lost try arrives. Move the marker, so that it
    never can, and only then report the objection (or that the try had been applied after all)."""
    try:
        yield from seal(lane, pace)
    except OwnershipRefused as lost:
        objection = lost
    except EtcdFenceError as error:
        raise _unknown(own, error) from error
    fate = lane.fates.get(own, Fate(Verdict.UNKNOWN))
    if fate.verdict is Verdict.APPLIED:
        return Committed(fate.revision, own)
    raise _unknown(own, objection) if fate.verdict is Verdict.UNKNOWN else objection


def seal(lane: Lane, pace: Pace) -> Flow[None]:
    """Move the marker and nothing else: whatever was sent before and not applied can never be."""
    yield from commit(lane, _txns.Change((yield from FreshId())), pace)


def settle(lane: Lane, write_id: str, pace: Pace) -> Flow[Verdict]:
    """What became of a write whose caller was told OutcomeUnknown."""
    if write_id in lane.unsettled:
        try:
            yield from seal(lane, pace)
        except OwnershipRefused:
            if write_id in lane.unsettled:  # not even the refusal has decided it
                lane.not_sent(write_id)
                lane.fates[write_id] = Fate(Verdict.UNKNOWN)
        except OutcomeUnknown as error:
            raise _unknown(write_id, error) from error
    if write_id not in lane.fates:
        raise Misuse(f"this lease has no open write {write_id}; ask the lease that raised the error")
    return lane.fates[write_id].verdict


def _ownership_error(lane: Lane, change: _txns.Change, evidence: _txns.Evidence) -> Flow[OwnershipRefused]:
    tenure = lane.tenure
    loss = _txns.loss_seen(tenure.guard, tenure.attempt.attempt, evidence)
    if loss is None and lane.ended:
        loss = Loss(LossReason.ENDED)
    try:
        loss = loss or (yield from renewals.diagnose(lane))
    except EtcdFenceError:
        loss = None
    loss = loss or Loss(LossReason.GONE)
    lane.over = True
    if change.names and lane.ended is None:
        yield from _note_refusal(tenure, change, evidence, loss)
    return ownership_refused(tenure, loss, evidence.revision)


def ownership_refused(tenure: _txns.Tenure, loss: Loss, revision: int | None = None) -> OwnershipRefused:
    kind = Superseded if loss.reason is LossReason.SUPERSEDED else LeaseLost
    return kind(task=tenure.task, generation=tenure.generation, loss=loss, revision=revision)


def _note_refusal(tenure: _txns.Tenure, change: _txns.Change, evidence: _txns.Evidence, loss: Loss) -> Flow[None]:
    """Leave a record of the stale try for operators. Best effort: the refusal stands without it."""
    now = yield from Now()
    stale = RefusedTry(
        write=change.write_id,
        keys=change.names[:20],
        at=now.wall,
        revision=evidence.revision,
        current=loss.current,
    )
    key = tenure.keys.refusal(tenure.generation)
    first = RefusalRecord(
        generation=tenure.generation,
        attempt=tenure.attempt.attempt,
        holder=tenure.attempt.holder,
        count=1,
        tries=(stale,),
    )
    try:
        reply = yield from Txn((_txns.absent(key),), (Put(key, first.to_bytes()),), (Range(key),), REFUSAL_LIMIT)
        kv = reply.reads[0].first if not reply.succeeded else None
        record = read(RefusalRecord, kv) if kv else None
        if kv and isinstance(record, RefusalRecord):
            tries = (*record.tries, stale)[-KEPT_TRIES:]
            more = record.model_copy(update={"count": record.count + 1, "tries": tries})
            yield from Txn((_txns.unmoved(key, kv.mod_revision),), (Put(key, more.to_bytes()),), (), REFUSAL_LIMIT)
    except EtcdFenceError:
        return


# --- users' data -------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Edit:
    """Put `value` under the key `data`, or delete it where it is None; the provenance record lies `beside`."""

    name: str
    data: bytes
    beside: bytes
    value: bytes | None


@dataclass(frozen=True, slots=True)
class Check:
    """The key `data` must still have this revision, or must not be there."""

    name: str
    data: bytes
    revision: int | Absent


def write(lane: Lane, edits: Iterable[Edit], checks: Iterable[Check], pace: Pace) -> Flow[Committed]:
    """Apply all edits in one fenced transaction, if every check holds. A key without one is written blindly."""
    stamp = yield from Stamp()
    edits = tuple(edits)
    provenance = lane.tenure.provenance(stamp.id, stamp.wall)
    change = _txns.Change(
        stamp.id,
        operations=tuple(operation for edit in edits for operation in operations(edit, provenance)),
        expectations=tuple(_expectation(check) for check in checks),
        names=tuple(edit.name for edit in edits),
    )
    committed, _ = yield from commit(lane, change, pace)
    return committed


def proclaim(lane: Lane, value: str, pace: Pace) -> Flow[Committed]:
    """Put a value beside the owner key, on the same etcd lease. The owner key itself is never put again: that
    would move the generation."""
    tenure = lane.tenure
    record = ValueRecord(generation=tenure.generation, value=value)
    write = Put(tenure.keys.value, record.to_bytes(), tenure.guard.lease_id)
    committed, _ = yield from commit(lane, _txns.Change((yield from FreshId()), (write,)), pace)
    return committed


def operations(edit: Edit, provenance: bytes) -> tuple[Operation, Operation]:
    if edit.value is None:
        return Delete(edit.data), Delete(edit.beside)
    return Put(edit.data, edit.value), Put(edit.beside, provenance)


def _expectation(check: Check) -> _txns.Expectation:
    revision = 0 if check.revision is ABSENT else check.revision
    return _txns.Expectation(check.name, _txns.unmoved(check.data, revision))


def get(name: str, data: bytes, beside: bytes, pace: Pace) -> Flow[Entry]:
    """A data key as it is now, with the write that made its revision."""
    while True:
        try:
            reply = yield from _txns.reading(Range(data), Range(beside))
        except (OutcomeUnknown, Unavailable) as error:
            yield from pace.again(unanswered(error))
        else:
            found, provenance = (one.first for one in reply.reads)
            return entry_of(name, found, provenance)


def entry_of(name: str, data: KeyValue | None, beside: KeyValue | None) -> Entry:
    if data is None:
        return Entry(name, None, ABSENT)
    record = read(ProvenanceRecord, beside) if beside and beside.mod_revision == data.mod_revision else None
    made_by = record.view() if isinstance(record, ProvenanceRecord) else None
    return Entry(name, data.value, data.mod_revision, made_by)
