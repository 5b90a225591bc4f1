"""Writing with a guard and nothing else: for a process that was handed the token of a lease it does not hold.

It has no lane, and so no marker to find out by what became of a lost answer. The data key's own revision has to
do: each try compares the one that was read before it. Where the key has moved after an unanswered try, and not
to this write, nobody knows.
"""

from __future__ import annotations

from dataclasses import dataclass

from etcdfence import _txns
from etcdfence._flow import Flow
from etcdfence._flows.fencing import Edit, entry_of, operations
from etcdfence._flows.pacing import Pace, unanswered
from etcdfence._keys import TaskKeys
from etcdfence._records import ProvenanceRecord, owner_of
from etcdfence._requests import KeyValue, Range, Stamp, Stamped, Txn, TxnReply
from etcdfence.errors import (
    Conflict,
    EtcdFenceError,
    LeaseLost,
    OutcomeUnknown,
    OwnershipRefused,
    Superseded,
    Unavailable,
)
from etcdfence.model import ABSENT, Absent, Committed, Guard, Loss, LossReason


def write(guard: Guard, keys: TaskKeys, edit: Edit, expect: int | Absent | None, pace: Pace) -> Flow[Committed]:
    """Put or delete one data key under somebody's guard. An unanswered try that would have created the key is not
    sent again: created, and deleted by another, it would be created twice."""
    stamp = yield from Stamp()
    seen = yield from _read(guard, keys, edit, pace)
    blind = False
    while True:
        if not seen.evidence.guard_holds(guard):
            raise _refusal(guard, keys, seen.evidence)
        if expect is not None and seen.revision != (0 if expect is ABSENT else expect):
            raise Conflict((edit.name,))
        try:
            reply, blind = yield from _answered(_try(guard, keys, edit, seen, stamp), seen, blind, pace)
        except OutcomeUnknown as error:
            raise OutcomeUnknown(f"{edit.name} may have been written: {error}") from error
        if reply.succeeded:
            return Committed(reply.header.revision, stamp.id)
        before, seen = seen, _Seen.of(reply)
        if seen.made_by == stamp.id:
            return Committed(seen.revision, stamp.id)
        if blind and seen.revision != before.revision:
            raise OutcomeUnknown(f"{edit.name} has changed, and whether by this write as well is not known")
        yield from pace.again(Unavailable(f"{edit.name} keeps changing"))


def _answered(txn: Txn, seen: _Seen, blind: bool, pace: Pace) -> Flow[tuple[TxnReply, bool]]:
    """etcd's answer, and whether a try went unanswered before it. What comes of a later try, or keeps it from
    being made, is no answer to that one."""
    txn = _txns.checked_size(txn)
    try:
        while True:
            try:
                return (yield from txn), blind
            except OutcomeUnknown as error:
                if not seen.revision:
                    raise
                blind = True
                yield from pace.again(error)
            except Unavailable as error:
                yield from pace.again(error)
    except EtcdFenceError as error:
        raise (OutcomeUnknown(str(error)) if blind else error) from error


@dataclass(frozen=True, slots=True)
class _Seen:
    evidence: _txns.Evidence
    data: KeyValue | None
    beside: KeyValue | None

    @classmethod
    def of(cls, reply: TxnReply) -> _Seen:
        owner, epoch, last, data, beside = (found.first for found in reply.reads)
        return cls(_txns.Evidence(reply.header.revision, owner, epoch, None, None, last), data, beside)

    @property
    def revision(self) -> int:
        return self.data.mod_revision if self.data else 0

    @property
    def made_by(self) -> str | None:
        """The write that made the present revision, where a fenced one did."""
        provenance = entry_of("", self.data, self.beside).provenance
        return provenance.write_id if provenance else None


def _reads(guard: Guard, keys: TaskKeys, edit: Edit) -> tuple[Range, ...]:
    return tuple(Range(key) for key in (guard.owner_key, guard.epoch_key, keys.last, edit.data, edit.beside))


def _read(guard: Guard, keys: TaskKeys, edit: Edit, pace: Pace) -> Flow[_Seen]:
    while True:
        try:
            return _Seen.of((yield from _txns.reading(*_reads(guard, keys, edit))))
        except (OutcomeUnknown, Unavailable) as error:
            yield from pace.again(unanswered(error))


def _try(guard: Guard, keys: TaskKeys, edit: Edit, seen: _Seen, stamp: Stamped) -> Txn:
    """The guard, and the data key as it was seen."""
    owner = seen.evidence.owner
    provenance = ProvenanceRecord(
        task=keys.task,
        generation=guard.generation,
        attempt=owner_of(owner).attempt if owner else "",
        write=stamp.id,
        at=stamp.wall,
    )
    return Txn(
        (*_txns.guard_compares(guard), _txns.unmoved(edit.data, seen.revision)),
        operations(edit, provenance.to_bytes()),
        _reads(guard, keys, edit),
    )


def _refusal(guard: Guard, keys: TaskKeys, evidence: _txns.Evidence) -> OwnershipRefused:
    loss = _txns.loss_seen(guard, "", evidence) or Loss(LossReason.GONE)
    kind = Superseded if loss.reason is LossReason.SUPERSEDED else LeaseLost
    return kind(task=keys.task, generation=guard.generation, loss=loss, revision=evidence.revision)
