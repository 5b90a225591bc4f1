"""What must hold in every schedule, each sentence with a name.

Three kinds of evidence: the transaction that was just applied (with the store before and after it), what the
callers were told (the notes of the programs), and the journal: of every applied transaction, which attempts
and writes it made, in the order in which etcd applied them.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from typing import Any

from etcdfence._records import AttemptRecord, ProvenanceRecord, RefusalRecord, Unreadable, owner_of, read
from etcdfence._requests import Delete, Grant, KeyValue, Put, Wait
from etcdfence.model import Verdict
from etcdfence.testing.explore import Applied, Invariant, Restore, World
from etcdfence.testing.memory import State

from .programs import JOB, KEYS, STOPPED

DATA, PROVENANCE = KEYS.family("data"), KEYS.family("provenance")


def journal(applied: Applied) -> tuple[Hashable, ...]:
    """("grant", lease id), ("claim", attempt, generation), ("seal", attempt), ("write", attempt, write id),
    ("moved", attempt, write id) for a marker moved alone, ("end", attempt, write id), ("restored",)."""
    return tuple(_entries(applied))


def _entries(applied: Applied) -> Iterator[Hashable]:
    owner = applied.before.get(JOB.owner)
    if isinstance(applied.request, Restore):
        yield ("restored",)
    if isinstance(applied.request, Grant):
        yield ("grant", applied.request.lease_id)
    bare = sum(isinstance(operation, Put | Delete) for operation in applied.operations) == 1
    for operation in applied.operations:
        if not isinstance(operation, Put):
            continue
        if operation.key == JOB.owner and b"attempt" in operation.value:
            yield ("claim", _attempt_of(applied.after), applied.reply.header.revision)
        elif operation.key.startswith(JOB.markers):
            kind = "moved" if bare else "write"
            yield (kind, owner_of(owner).attempt if owner else None, operation.value.decode())
        elif operation.key.startswith(PROVENANCE) and not any(_puts(applied, JOB.markers)):
            made = read(ProvenanceRecord, KeyValue(operation.key, operation.value, 1, 1, 1, 0))
            assert isinstance(made, ProvenanceRecord)
            yield ("write", made.attempt, made.write)
        elif operation.key.startswith(JOB.attempts):
            record = attempt_in(operation)
            if record.sealed:
                yield ("seal", record.attempt)
            elif record.ended and record.ended.how != "lost":
                yield ("end", record.attempt, record.ended.write)


def attempt_in(put: Put | KeyValue) -> AttemptRecord:
    record = read(AttemptRecord, KeyValue(put.key, put.value, 1, 1, 1, 0))
    assert isinstance(record, AttemptRecord), record
    return record


def _attempt_of(store: State) -> str | None:
    """The attempt that owns the job."""
    owner = store.get(JOB.owner)
    return owner_of(owner).attempt if owner else None


def _told(world: World, *kinds: str) -> Iterator[tuple[str, ...]]:
    for node in world.nodes:
        for note in node.notes:
            if isinstance(note, tuple) and note[0] in kinds:
                yield note


def _puts(applied: Applied, prefix: bytes) -> Iterator[Put]:
    for operation in applied.operations:
        if isinstance(operation, Put) and operation.key.startswith(prefix):
            yield operation


# --- one owner ---------------------------------------------------------------------------------------------


def _no_owner_is_overwritten(applied: Applied) -> str | None:
    before = applied.before.get(JOB.owner)
    if before is not None and any(b'"attempt"' in put.value for put in _puts(applied, JOB.owner)):
        return f"{_attempt_of(applied.after)} took the task from {_attempt_of(applied.before)}, which owned it"
    return None


ONE_OWNER = Invariant("one owner: a task is claimed only while nobody owns it", applied=_no_owner_is_overwritten)


def _one_tenure(world: World) -> str | None:
    claims = [entry[1] for entry in _present(world) if entry[0] == "claim"]
    return f"an attempt owned twice: {claims}" if len(set(claims)) < len(claims) else None


ONE_TENURE = Invariant("an attempt has at most one tenure", always=_one_tenure)


def _restored(world: World) -> bool:
    """After a restore revisions come again, and what was over may be there again; see the README."""
    return ("restored",) in world.journal


def _present(world: World) -> list[Any]:
    """The journal since the last restore: what came before it has been undone."""
    entries: list[Any] = list(world.journal)
    while ("restored",) in entries:
        del entries[: entries.index(("restored",)) + 1]
    return entries


def _rising(world: World) -> str | None:
    generations = [entry[2] for entry in _present(world) if entry[0] == "claim"]
    return None if generations == sorted(set(generations)) else f"generations {generations}"


GENERATIONS_RISE = Invariant("generations rise", always=_rising)


def _epoch_of(owner: State, store: State) -> bool:
    """Whether the owner that one store names belongs to the epoch of another (or the same)."""
    kv, epoch = owner.get(JOB.owner), store.get(KEYS.epoch)
    return kv is not None and epoch is not None and f'"number":{owner_of(kv).epoch},'.encode() in epoch.value


def _line(store: State) -> list[str]:
    """The attempts in line, the first one first."""
    entries = [kv for kv in store.kvs if kv.key.startswith(JOB.queue)]
    entries.sort(key=lambda kv: kv.create_revision)
    return [kv.key.removeprefix(JOB.queue).decode() for kv in entries]


def _in_its_time(applied: Applied) -> str | None:
    """A claim passes over nobody and nothing: no tombstone, no other epoch, no line, no reserve."""
    if not any(b'"attempt"' in put.value for put in _puts(applied, JOB.owner)):
        return None
    before = applied.before
    if before.get(JOB.closed):
        return "a closed task was claimed"
    if not _epoch_of(applied.after, before):
        return "the task was claimed under an epoch that is over"
    line = _line(before)
    if line and line[0] != _attempt_of(applied.after):
        return f"{line[0]} was first in line and was overtaken"
    return "the task was kept for a named worker" if before.get(JOB.reserve) else None


CLAIMED_IN_TURN = Invariant(
    "a claim respects the tombstone, the epoch, the line and the reserve", applied=_in_its_time
)


def _crashed(world: World) -> bool:
    return any("crashed" in node.notes for node in world.nodes)


def _no_ghost(world: World) -> str | None:
    owner = _attempt_of(world.store)
    over = {note[1] for note in _told(world, "ended", "lost")}
    holding = {note[1] for note in _told(world, "owns")} - over
    excused = {note[1] for note in _told(world, "left")} | {STOPPED}
    if not owner or owner in holding | excused or _restored(world) or _crashed(world):
        return None
    return f"at rest {owner} owns the task, and nobody holds it"


NO_GHOST = Invariant("no ownership without a live holder once everything has come to rest", at_rest=_no_ghost)


OBSERVERS = ("V", "W")


def _waiting(world: World) -> list[str]:
    return [node.program.name for node in world.nodes if isinstance(node.request, Wait)]


def _no_ghost_in_line(world: World) -> str | None:
    """An attempt's id begins with the name of its program. Whoever waits has one entry, and others have none."""
    if _restored(world) or _crashed(world):
        return None
    left = {note[1] for note in _told(world, "left")}
    entries = [entry for entry in _line(world.store) if entry not in left]
    for node in world.nodes:
        mine = [entry for entry in entries if entry.startswith(node.program.name)]
        if len(mine) > (node.program.name in _waiting(world)):
            return f"at rest {mine} are in line for {node.program.name}"
    return None


NO_GHOST_IN_LINE = Invariant("nobody is in line who does not wait", at_rest=_no_ghost_in_line)


def _crowned(world: World, note: tuple[Any, ...]) -> str | None:
    if note[0] != "owns" or _restored(world) or ("claim", *note[1:]) in world.journal:
        return None
    return f"{note[1]} was told that it owns the task, and its claim was never applied"


CROWNED_BY_ETCD = Invariant("nobody is told that it owns a task without having claimed it", told=_crowned)


def _truly_lost(world: World) -> str | None:
    owner = _attempt_of(world.store)
    lost = [note for note in _told(world, "lost", "ended") if note[1] == owner]
    alive = lost and _epoch_of(world.store, world.store) and not _restored(world)
    return f"{owner} owns the task, and its worker was told {lost}" if alive else None


LOSS_IS_TRUE = Invariant("who was told that its lease is over does not own the task", always=_truly_lost)

# --- fenced writes -----------------------------------------------------------------------------------------


def _by_the_owner(applied: Applied) -> str | None:
    owner = applied.before.get(JOB.owner)
    for operation in _puts(applied, PROVENANCE):
        record = read(ProvenanceRecord, KeyValue(operation.key, operation.value, 1, 1, 1, 0))
        assert isinstance(record, ProvenanceRecord)
        if owner is None or (record.attempt, record.generation) != (owner_of(owner).attempt, owner.mod_revision):
            return f"a write of {record.attempt}, generation {record.generation}, was accepted over {owner}"
        if not _epoch_of(applied.before, applied.before):
            return f"a write of {record.attempt} was accepted in another epoch"
    return None


FENCED = Invariant("no write is accepted from a stale generation", applied=_by_the_owner)


def _ended_by_the_owner(applied: Applied) -> str | None:
    deleted = any(isinstance(one, Delete) and one.key == JOB.owner for one in applied.operations)
    for operation in _puts(applied, JOB.attempts):
        record = attempt_in(operation)
        mine = record.ended is not None and record.ended.how != "lost"
        if deleted and mine and record.attempt != _attempt_of(applied.before):
            return f"the ending of {record.attempt} took the task from {_attempt_of(applied.before)}"
    return None


ENDS_ITS_OWN = Invariant("an ending ends its own tenure", applied=_ended_by_the_owner)


def _writes(world: World, *kinds: str) -> list[tuple[str, str]]:
    """(attempt, write id) in the order in which they were applied."""
    return [(entry[1], entry[2]) for entry in _present(world) if entry[0] in kinds]


def _once(world: World) -> str | None:
    if _restored(world):  # what was applied before may have been undone, and arrive again
        return None
    ids = [write for _, write in _writes(world, "write", "end")]
    for note in _told(world, "wrote"):
        if ids.count(note[1]) != 1:
            return f"write {note[1]} was acknowledged and applied {ids.count(note[1])} times"
    return f"a write was applied twice: {ids}" if len(set(ids)) < len(ids) else None


EXACTLY_ONCE = Invariant("an acknowledged write is applied exactly once", always=_once)


def _in_order(world: World) -> str | None:
    last: dict[str, int] = {}
    for attempt, write in _writes(world, "write", "end", "moved"):
        number = int(write.lstrip("ABCDEFGHIJKLMNOPQRSTUVWXYZ"))
        if number < last.get(attempt, 0):
            return f"write {write} of {attempt} was applied after a later one"
        last[attempt] = number
    return None


IN_ORDER = Invariant("no write is overtaken by its own past", always=_in_order)


def _definite(world: World) -> str | None:
    if _restored(world):  # which undoes seals, too; hence the epoch, see the README
        return None
    owner = _attempt_of(world.store)
    for note in _told(world, "not owner"):
        if note[1] == owner:
            return f"{note[1]} was refused, and owns the task all the same"
    applied = {write for _, write in _writes(world, "write", "end")}
    for note in _told(world, "not written"):
        if note[1] in applied:
            return f"write {note[1]} was reported as not applied, and was"
    for note in _told(world, "settled"):
        if note[2] is not Verdict.UNKNOWN and (note[1] in applied) != (note[2] is Verdict.APPLIED):
            return f"write {note[1]} was settled as {note[2]}"
    return None


DEFINITE = Invariant("what was definitely not applied never shows up later", always=_definite)

# --- records -----------------------------------------------------------------------------------------------


def _history_stands(applied: Applied) -> str | None:
    """Ends, tombstones and epochs are written once; a count of refusals never goes down; an attempt that was
    trimmed does not come back."""
    before = applied.before
    for operation in _puts(applied, JOB.attempts):
        old, new = before.get(operation.key), attempt_in(operation)
        if old is None and not new.sealed and not any(_puts(applied, JOB.owner)):
            return f"the record of {new.attempt} was trimmed, and is back"
        if old and attempt_in(old).ended and attempt_in(old).ended != new.ended:
            return f"the end of {new.attempt} was rewritten"
        if old and not attempt_in(old).sealed and new.sealed:
            return f"{new.attempt} had run, and was sealed over"
    if before.get(JOB.closed) and any(_puts(applied, JOB.closed)):
        return "the task was closed a second time"
    if before.get(KEYS.epoch) and any(b'"number":1,' in put.value for put in _puts(applied, KEYS.epoch)):
        return "the epoch was founded a second time"
    for operation in _puts(applied, JOB.refusals):
        if _count(before.get(operation.key)) >= _count(applied.after.get(operation.key)):
            return "a refusal was lost from its record"
    return None


def _count(kv: KeyValue | None) -> int:
    record = read(RefusalRecord, kv) if kv else None
    assert not isinstance(record, Unreadable)
    return record.count if record else 0


HISTORY_STANDS = Invariant("what is on record is not rewritten", applied=_history_stands)


def _as_read(applied: Applied) -> str | None:
    """Whoever trims has noted the version of each record it read."""
    known = {note for note in applied.notes if isinstance(note, tuple) and note[0] == "read"}
    if not known:
        return None
    for operation in applied.operations:
        old = applied.before.get(operation.key) if isinstance(operation, Delete) else None
        if old and old.key.startswith(JOB.refusals) and ("read", old.key, old.version) not in known:
            return f"{old.key.decode()} was trimmed in a version that nobody had read"
    return None


TRIMMED_AS_READ = Invariant("a record that changed after it was read is not trimmed", applied=_as_read)


def _protection(applied: Applied) -> str | None:
    """A sealed, unended or doubtful attempt stays while its etcd lease lives."""
    for operation in applied.operations:
        old = applied.before.get(operation.key) if isinstance(operation, Delete) else None
        if old is None or not old.key.startswith(JOB.attempts):
            continue
        record = read(AttemptRecord, old)
        if isinstance(record, Unreadable):
            return f"{record} was trimmed; nobody knows what it protects"
        if (record.sealed or record.doubtful or not record.ended) and applied.before.lease(int(record.lease, 16)):
            return f"the attempt {record.attempt} was trimmed, and a claim of it may be on its way"
    return None


PROTECTION_STAYS = Invariant("what protects against a late claim is not trimmed", applied=_protection)

# --- expectations ------------------------------------------------------------------------------------------


def _expected(applied: Applied) -> str | None:
    """In the scenarios a value that begins with "new" is only ever written with expect=ABSENT."""
    for operation in _puts(applied, DATA):
        if operation.value.startswith(b"new") and applied.before.get(operation.key):
            return f"{operation.key!r} was created over another"
    for operation in _puts(applied, JOB.closed):
        if b'"completed"' in operation.value and any(kv.key.startswith(JOB.open) for kv in applied.before.kvs):
            return "the task was completed over an open effect"
    old = applied.before.get(JOB.record)
    for operation in _puts(applied, JOB.record):
        if old and b'"payload":' in old.value and b'"payload":' not in operation.value:
            return "a payload was lost from the task record"
    return None


EXPECTATIONS_HOLD = Invariant("a write is applied only where its expectations hold", applied=_expected)


def _granted_once(world: World) -> str | None:
    grants = [entry[1] for entry in _present(world) if entry[0] == "grant"]
    return f"granted twice: {grants}" if len(set(grants)) < len(grants) else None


GRANTED_ONCE = Invariant("an etcd lease id is granted once", always=_granted_once)


def _over_is_over(world: World) -> str | None:
    late = {note[1] for note in _told(world, "after loss")}
    written = [write for _, write in _writes(world, "write") if write in late]
    return f"{written}: written by a worker that had been told of its loss" if written else None


OVER_IS_OVER = Invariant("a handle that was declared lost never writes again", always=_over_is_over)


def _true_when_told(world: World, note: tuple[Any, ...]) -> str | None:
    owner = _attempt_of(world.store)
    if note[0] in ("renewed", "checked") and (note[1] != owner or not _epoch_of(world.store, world.store)):
        return f"{note[1]} was told that it is {note[0]}, while {owner} owned the task, or in another epoch"
    if note[0] == "stamped" and note[1] > 0:
        return "a renewal counts from a moment after it was sent"
    return None


CONFIRMED_IS_TRUE = Invariant("a lease is confirmed only while it owns the task", told=_true_when_told)


def _ended(world: World) -> str | None:
    if _restored(world):
        return None
    really = {entry[1] for entry in world.journal if entry[0] == "end"}  # type: ignore[index]
    told = [note for note in _told(world, "ended") if note[1] not in really]
    return f"{told}, and nothing of it was applied" if told else None


ENDS_ARE_TRUE = Invariant("an ending that was acknowledged was applied", always=_ended)


def _saw_truly(world: World, note: tuple[Any, ...]) -> str | None:
    owner = _attempt_of(world.store)
    if note[0] == "saw" and note[1] != owner:
        return f"{note[1]} was seen to own the task, while {owner} did"
    if note[0] == "saw" and note[2] is not None and f'"value":"{note[2]}"'.encode() not in _value_of(world.store):
        return f"{note[2]} was seen as proclaimed, and is not there"
    if note[0] == "session over" and world.store.lease(note[1]) is not None:
        return "a session was told to be over, and its etcd lease lives"
    return None


def _value_of(store: State) -> bytes:
    kv = store.get(JOB.value)
    return kv.value if kv else b""


SEEN_IS_TRUE = Invariant("what is observed was so at that revision", told=_saw_truly)


def _missed(world: World) -> str | None:
    """Of one that waits for the next change, at rest: the last that it saw is what there is."""
    for node in world.nodes:
        saw = [note for note in node.notes if isinstance(note, tuple) and note[0] == "saw"]
        if saw and isinstance(node.request, Wait) and saw[-1][1] != _attempt_of(world.store):
            return f"{node.program.name} saw {saw[-1][1]} last, and {_attempt_of(world.store)} owns the task"
    return None


NOTHING_IS_MISSED = Invariant("whoever observes a task sees its last owner", at_rest=_missed)


def _asleep(world: World) -> str | None:
    """A task is not free that is kept for somebody, or that a waiter is about to get: the first in line, if it is
    alive; if it is not, its entry must be on a lease that runs out. Others than our workers may stay as they
    like."""
    waiting = [name for name in _waiting(world) if name not in OBSERVERS]
    if not waiting or _attempt_of(world.store) or world.store.get(JOB.reserve):
        return None
    for first in _line(world.store)[:1]:
        kv = world.store.get(JOB.queue + first.encode())
        ours = any(first.startswith(node.program.name) for node in world.nodes)
        if not ours or (not first.startswith(tuple(waiting)) and kv and world.store.lease(kv.lease)):
            return None
    return f"{waiting} wait at rest for a task that is free"


NOBODY_SLEEPS = Invariant("nobody goes on waiting for a free task", at_rest=_asleep)

ALL = (
    ONE_OWNER,
    ONE_TENURE,
    GENERATIONS_RISE,
    CLAIMED_IN_TURN,
    NO_GHOST,
    NO_GHOST_IN_LINE,
    CROWNED_BY_ETCD,
    LOSS_IS_TRUE,
    FENCED,
    ENDS_ITS_OWN,
    EXACTLY_ONCE,
    IN_ORDER,
    DEFINITE,
    HISTORY_STANDS,
    TRIMMED_AS_READ,
    PROTECTION_STAYS,
    EXPECTATIONS_HOLD,
    GRANTED_ONCE,
    OVER_IS_OVER,
    CONFIRMED_IS_TRUE,
    ENDS_ARE_TRUE,
    NOBODY_SLEEPS,
    SEEN_IS_TRUE,
    NOTHING_IS_MISSED,
)
