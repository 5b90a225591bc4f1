"""Looking on: who owns a task, or any task, from one change to the next.

What an owner proclaims lies below its owner key, so that one watch covers both. The watch only wakes; what is told
is what was read afterwards, at one revision, so that several changes in a row may be told as one.
"""

from __future__ import annotations

from dataclasses import dataclass

from etcdfence import _txns
from etcdfence._flow import Flow
from etcdfence._flows.pacing import Pace, unanswered
from etcdfence._flows.tasks import task_of
from etcdfence._keys import Keys, TaskKeys, prefix_end
from etcdfence._records import ValueRecord, owner_of, read
from etcdfence._requests import KeyValue, Range, Sleep, Wait
from etcdfence.errors import OutcomeUnknown, Unavailable
from etcdfence.model import Observation

LONGEST_WAIT = 30.0  # seconds for one watch; then the store is asked again
BROKEN_WATCH = 0.2  # seconds before asking again after a watch that broke


@dataclass(frozen=True, slots=True)
class Seen:
    """What one look has shown: everything that is owned, and at which revision."""

    revision: int
    owned: dict[str, Observation]

    def since(self, before: Seen) -> list[Observation]:
        """What has changed, by name; what is owned no more as owned by nobody."""
        changes: list[Observation] = []
        for task in sorted(before.owned | self.owned):
            was, now = before.owned.get(task), self.owned.get(task)
            if now is None:
                changes.append(Observation(task, None, None, self.revision))
            elif was is None or (was.owner, was.value) != (now.owner, now.value):
                changes.append(now)
        return changes


def first(seen: Seen, task: TaskKeys | None) -> list[Observation]:
    """What to tell at the beginning: of one task in any case, of all those that are owned."""
    if task is not None and task.task not in seen.owned:
        return [Observation(task.task, None, None, seen.revision)]
    return [seen.owned[name] for name in sorted(seen.owned)]


def look(keys: Keys, task: TaskKeys | None, pace: Pace) -> Flow[Seen]:
    """Who owns this task, or all of them (None)."""
    prefix = keys.family("owner")
    ranges = [Range(task.owner), Range(task.value)] if task else [_txns.below(prefix)]
    while True:
        try:
            reply = yield from _txns.reading(*ranges)
        except (OutcomeUnknown, Unavailable) as error:
            yield from pace.again(unanswered(error))
        else:
            found = {kv.key: kv for one in reply.reads for kv in one.kvs}
            return Seen(reply.header.revision, _owned(keys, prefix, found, reply.header.revision))


def _owned(keys: Keys, prefix: bytes, found: dict[bytes, KeyValue], revision: int) -> dict[str, Observation]:
    owned: dict[str, Observation] = {}
    for key, kv in found.items():
        task = task_of(keys, key[len(prefix) :].decode(errors="replace"))
        if task is not None:
            value = _value(kv, found.get(task.value))
            owned[task.task] = Observation(task.task, owner_of(kv), value, revision)
    return owned


def _value(owner: KeyValue, kv: KeyValue | None) -> str | None:
    """One that an earlier owner has left behind says nothing of this one."""
    record = read(ValueRecord, kv) if kv else None
    mine = isinstance(record, ValueRecord) and record.generation == owner.mod_revision
    return record.value if isinstance(record, ValueRecord) and mine else None


def next_look(keys: Keys, task: TaskKeys | None, before: Seen, pace: Pace) -> Flow[Seen]:
    """Wait for something to change, and look again."""
    start = task.owner if task else keys.family("owner")
    end = prefix_end(start if task is None else start + b"/")
    try:
        yield from Wait(start, before.revision + 1, LONGEST_WAIT, end, puts=True)
    except (Unavailable, OutcomeUnknown):
        yield from Sleep(BROKEN_WATCH)
    return (yield from look(keys, task, pace))
