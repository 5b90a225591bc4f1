"""Ending a tenure, and reading what the store says of tasks.

An ending deletes the owner key and the marker and gives the attempt its end, in one transaction under the
guard and the marker: it can never touch a successor, and after a lost reply the attempt itself says whether
it was this commit that ended it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any, TypeVar

from etcdfence import _txns
from etcdfence._flow import Flow
from etcdfence._flows.fencing import Lane, commit
from etcdfence._flows.pacing import Pace, pace_for, unanswered
from etcdfence._keys import Keys, TaskKeys, parse_segment
from etcdfence._records import (
    AttemptRecord,
    ClosedRecord,
    End,
    EpochRecord,
    HistoryRecord,
    Record,
    RefusalRecord,
    TaskRecord,
    Unreadable,
    WaiterRecord,
    owner_of,
    read,
)
from etcdfence._requests import (
    Delete,
    FreshId,
    Instant,
    KeyValue,
    Now,
    Operation,
    Order,
    Put,
    Range,
    RangeReply,
    TimeToLive,
    TxnReply,
)
from etcdfence._states import task_state
from etcdfence._txns import Ending
from etcdfence.errors import (
    Conflict,
    EtcdFenceError,
    LeaseReleased,
    NotFound,
    OutcomeUnknown,
    OwnershipRefused,
    TaskClosed,
    Unavailable,
)
from etcdfence.model import TaskDescription, TaskKey, Waiter

KEPT = 20  # attempts, history entries and refusals that stay of each task
SLACK = 10  # how many more may pile up before a release trims them in one go
TRIM_SECONDS = 2.0


def end(lane: Lane, ending: Ending, pace: Pace) -> Flow[None]:
    """End the tenure, once. Repeating the ending that was applied does nothing, and a release is content with any
    ending of ours; another one is refused, for it never happened.

    A task record that changed meanwhile (a payload submitted again, say) is read again and kept; only the
    result is ours to add.
    """
    record = lane.tenure.record
    while lane.ended is None:
        change = yield from _change(lane, ending, record)
        try:
            _, reply = yield from commit(lane, change, pace)
        except Conflict as conflict:
            if _txns.RECORD not in conflict.changed:
                raise
            yield from pace.again(conflict)
            record = yield from _record(lane.tenure.keys, pace)
        except OwnershipRefused:
            if lane.ended is None:
                raise
        else:
            yield from _trim_if_due(lane.tenure.keys, reply)
    if ending.how != "released" and lane.ended != ending:
        raise _ended_otherwise(lane.tenure.task, lane.ended)


def _ended_otherwise(task: str, ended: Ending) -> EtcdFenceError:
    if ended.closes:
        return TaskClosed(task, ended.closes, ended.result)
    return LeaseReleased(f"this attempt at {task} had already ended: {ended.how}")


def _change(lane: Lane, ending: Ending, record: KeyValue | None) -> Flow[_txns.Change]:
    tenure, keys = lane.tenure, lane.tenure.keys
    write_id = yield from FreshId()
    now = yield from Now()
    end_of = End(how=ending.how, at=now.wall, write=write_id, generation=tenure.generation, reason=ending.reason)
    attempt = tenure.attempt.model_copy(update={"ended": end_of}).to_bytes()
    lane.entries += 1
    history = HistoryRecord(
        event=ending.how,
        at=now.wall,
        generation=tenure.generation,
        attempt=tenure.attempt.attempt,
        holder=tenure.attempt.holder,
        reason=ending.reason,
    )
    change = _txns.Change(
        write_id,
        operations=(
            Delete(keys.owner),
            Delete(keys.value),
            Put(tenure.attempt_key, attempt),
            Put(keys.last, attempt),
            Put(keys.history(tenure.generation, lane.entries), history.to_bytes()),
        ),
        ends=ending,
        reads=_txns.retention_counts(keys),
    )
    return _closing(tenure, change, ending, record, now) if ending.closes else change


def _closing(
    tenure: _txns.Tenure, change: _txns.Change, ending: Ending, record: KeyValue | None, now: Instant
) -> _txns.Change:
    keys = tenure.keys
    closed = ClosedRecord(
        state=ending.closes or "completed",
        attempt=tenure.attempt.attempt,
        generation=tenure.generation,
        at=now.wall,
    )
    expectations = [
        _txns.Expectation(_txns.CLOSED, _txns.absent(keys.closed)),
        _txns.Expectation(_txns.RECORD, _txns.unmoved(keys.record, record.mod_revision if record else 0)),
    ]
    if ending.closes == "completed":
        expectations.append(_txns.Expectation(_txns.OPEN_EFFECTS, _txns.nothing_below(keys.open)))
    puts: tuple[Operation, ...] = (
        Put(keys.record, _finished(keys, ending, record).to_bytes()),
        Put(keys.closed, closed.to_bytes()),
    )
    return replace(
        change,
        operations=(*change.operations, *puts),
        expectations=tuple(expectations),
        names=("result",),
    )


def _finished(keys: TaskKeys, ending: Ending, record: KeyValue | None) -> TaskRecord:
    present = read(TaskRecord, record) if record else TaskRecord(**_named(keys))
    if isinstance(present, Unreadable):
        raise EtcdFenceError(f"the task record would be overwritten, but cannot be read: {present}")
    added = {"result": ending.result, "evidence": ending.evidence, "reason": ending.reason}
    return present.model_copy(update=added)


def _named(keys: TaskKeys) -> dict[str, Any]:
    name = TaskKey.parse(keys.segment)
    return {"operation": name.operation, "scope": name.scope, "version": name.version}


def _record(keys: TaskKeys, pace: Pace) -> Flow[KeyValue | None]:
    reply = yield from _read((Range(keys.record),), pace)
    return reply.reads[0].first


def _read(ranges: Sequence[Range], pace: Pace) -> Flow[TxnReply]:
    """Linearizable reads, repeated until they are answered or the time is up."""
    while True:
        try:
            return (yield from _txns.reading(*ranges))
        except (OutcomeUnknown, Unavailable) as error:
            yield from pace.again(unanswered(error))


# --- retention ---------------------------------------------------------------------------------------------


def _trim_if_due(keys: TaskKeys, reply: TxnReply | None) -> Flow[None]:
    """Best effort after an ending: what is not trimmed now is trimmed by a later one."""
    if reply is None or all(found.count <= KEPT + SLACK for found in reply.reads):
        return
    try:
        yield from trim(keys, (yield from pace_for(TRIM_SECONDS)))
    except EtcdFenceError:
        return


def trim(keys: TaskKeys, pace: Pace, kept: int = KEPT) -> Flow[None]:
    """Delete all but the `kept` newest attempts, history entries and refusals of a task.

    What still protects against a request on its way stays: an attempt that is sealed, has no end, or whose
    claim had an unanswered try goes only once its etcd lease is gone (then no try of it can land). A marker
    goes together with its attempt, never before: a writer that finds its attempt knows that its marker was not
    trimmed.
    """
    prefixes = (keys.attempts, keys.histories, keys.refusals)
    by_age = [_txns.below(prefix, order=Order.CREATE_ASCENDING) for prefix in prefixes]
    reply = yield from _read(by_age, pace)
    attempts, *others = (found.kvs[: max(0, len(found.kvs) - kept)] for found in reply.reads)
    doomed = [kv for kvs in others for kv in kvs]
    for attempt in attempts:
        doomed += [attempt] if (yield from _no_longer_protects(attempt)) else []
    for some in _batches(doomed):
        markers = (keys.marker(kv.create_revision) for kv in some if kv.key.startswith(keys.attempts))
        yield from _txns.remove(some, *markers)


def _no_longer_protects(attempt: KeyValue) -> Flow[bool]:
    record = read(AttemptRecord, attempt)
    if isinstance(record, Unreadable):
        return False
    if record.ended and not record.doubtful:
        return True
    lease = yield from TimeToLive(int(record.lease, 16))
    return lease.granted_ttl == 0  # a lease that is about to end reports a TTL of 0 for up to a second


def _batches(kvs: Sequence[KeyValue], size: int = 60) -> Iterator[Sequence[KeyValue]]:
    for start in range(0, len(kvs), size):
        yield kvs[start : start + size]


# --- reading -----------------------------------------------------------------------------------------------


def describe(keys: Keys, task: TaskKeys, pace: Pace) -> Flow[TaskDescription]:
    """Everything about one task, at one revision; the time left comes from etcd's own count."""
    newest = Order.CREATE_DESCENDING
    reply = yield from _read(
        (
            Range(keys.epoch),
            Range(task.owner),
            Range(task.last),
            Range(task.closed),
            Range(task.record),
            _txns.below(task.attempts, limit=KEPT, order=newest),
            _txns.below(task.refusals, limit=KEPT, order=newest),
            _txns.below(task.histories, limit=KEPT, order=newest),
            _txns.below(task.queue, order=Order.CREATE_ASCENDING),
        ),
        pace,
    )
    epoch, owner, last, closed, record = (found.first for found in reply.reads[:5])
    line = reply.reads[8].kvs
    if not any((owner, last, closed, record, line)):
        raise NotFound(f"nothing is recorded about {task.task} in namespace {keys.namespace}")
    trouble: list[str] = []
    attempts = _readable(AttemptRecord, reply.reads[5], trouble)
    refusals = _readable(RefusalRecord, reply.reads[6], trouble)
    history = _readable(HistoryRecord, reply.reads[7], trouble)
    basis = _basis(task, owner, last, closed, trouble)
    return replace(
        basis,
        epoch=_epoch_number(epoch, trouble),
        revision=reply.header.revision,
        expires_in=(yield from _expires_in(owner)),
        attempts=tuple(one.view() for one in attempts),
        refusals=tuple(one.model_dump(exclude_none=True) for one in refusals),
        history=tuple(one.model_dump(exclude_none=True) for one in history),
        result=_txns.task_result(record),
        line=tuple(_waiter(task.task, kv, n) for n, kv in enumerate(line, start=1)),
        unreadable=tuple(trouble),
    )


def _waiter(task: str, kv: KeyValue, position: int) -> Waiter:
    """One that cannot be read is in line all the same."""
    record = read(WaiterRecord, kv)
    attempt = kv.key.rsplit(b"/", 1)[1].decode(errors="replace")
    if isinstance(record, Unreadable):
        return Waiter(task, position, "(unreadable)", "", 0, "", attempt, kv.lease, kv.create_revision)
    return Waiter(
        task=task,
        position=position,
        holder=record.holder,
        host=record.host,
        pid=record.pid,
        since=record.since,
        attempt=attempt,
        lease_id=kv.lease,
        revision=kv.create_revision,
    )


def waiters(keys: Keys, pace: Pace) -> Flow[list[Waiter]]:
    """Everybody in line in a namespace, by task and position."""
    prefix = keys.family("queue")
    reply = yield from _read((_txns.below(prefix, order=Order.CREATE_ASCENDING),), pace)
    lines: dict[str, list[KeyValue]] = {}
    for kv in reply.reads[0].kvs:
        segment, _, attempt = kv.key[len(prefix) :].decode(errors="replace").partition("/")
        task = task_of(keys, segment)
        if task is not None and attempt:
            lines.setdefault(task.task, []).append(kv)
    return [_waiter(task, kv, n) for task in sorted(lines) for n, kv in enumerate(lines[task], start=1)]


def _basis(
    task: TaskKeys,
    owner: KeyValue | None,
    last: KeyValue | None,
    closed: KeyValue | None,
    trouble: list[str],
) -> TaskDescription:
    """The part of a description that listings share: identity, owner, last attempt and the state they give."""
    before = read(AttemptRecord, last) if last else None
    if isinstance(before, Unreadable):
        trouble.append(str(before))
    tombstone = read(ClosedRecord, closed) if closed else None
    if isinstance(tombstone, Unreadable):
        trouble.append(str(tombstone))
    attempt = before.view() if isinstance(before, AttemptRecord) else None
    return TaskDescription(
        task=task.task,
        kind="task" if ":" in task.segment else "lock",
        state=task_state(
            owned=owner is not None,
            last_ended=None if attempt is None else attempt.ended is not None,
            # Closed in a way we cannot read: nobody may take it for done, and a person has to look.
            closed=(_txns.closed_state(closed) or "failed") if closed else None,
        ),
        epoch=0,
        revision=0,
        owner=owner_of(owner) if owner else None,
        expires_in=None,
        last_attempt=attempt,
        unreadable=tuple(trouble),
    )


R = TypeVar("R", bound=Record)


def _readable(kind: type[R], found: RangeReply, trouble: list[str]) -> list[R]:
    records = [read(kind, kv) for kv in found.kvs]
    trouble += [str(record) for record in records if isinstance(record, Unreadable)]
    return [record for record in records if not isinstance(record, Unreadable)]


def _epoch_number(epoch: KeyValue | None, trouble: list[str]) -> int:
    """Zero where there is none, or none that can be read: that must not stop a listing."""
    record = read(EpochRecord, epoch) if epoch else None
    if isinstance(record, Unreadable):
        trouble.append(str(record))
    return record.number if isinstance(record, EpochRecord) else 0


def task_of(keys: Keys, segment: str) -> TaskKeys | None:
    """The keys of a task, from the segment of one of them; None where it is nobody's name."""
    try:
        task = keys.task(parse_segment(segment))
    except EtcdFenceError:
        return None
    return task if task.segment == segment else None


def _expires_in(owner: KeyValue | None) -> Flow[int | None]:
    if owner is None or not owner.lease:
        return None
    return (yield from TimeToLive(owner.lease)).ttl


def tasks(keys: Keys, pace: Pace, *, owned_only: bool = False) -> Flow[list[TaskDescription]]:
    """All tasks of a namespace in the order of their names (or those that have an owner), without their
    attempts and histories. Keys that are nobody's task names are left out."""
    families = ("owner",) if owned_only else ("owner", "last", "closed", "task")
    prefixes = [keys.family(family) for family in families]
    epoch_read = Range(keys.epoch)
    reply = yield from _read((epoch_read, *map(_txns.below, prefixes)), pace)
    epoch = reply.reads[0].first
    found: dict[str, dict[str, KeyValue]] = {}
    for family, prefix, scan in zip(families, prefixes, reply.reads[1:], strict=True):
        for kv in scan.kvs:
            segment = kv.key[len(prefix) :].decode(errors="replace")
            found.setdefault(segment, {})[family] = kv
    described: list[TaskDescription] = []
    for segment in sorted(found):
        parts = found[segment]
        task = task_of(keys, segment)
        if task is None:
            continue  # somebody's own key below our prefix; `describe` of a real name never meets it
        basis = _basis(task, parts.get("owner"), parts.get("last"), parts.get("closed"), [])
        described.append(
            replace(
                basis,
                epoch=_epoch_number(epoch, []),
                revision=reply.header.revision,
                expires_in=(yield from _expires_in(parts.get("owner"))),
            )
        )
    return described
