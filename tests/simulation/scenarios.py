"""The situations that are explored, each with every schedule of so many faults and events.

`QUICK` is what `scripts/check` runs; `DEEP` allows more faults, and three workers, and runs in `scripts/test`;
`DEEPEST` runs on demand.
Between them every flow is covered with two workers at least.
"""

from __future__ import annotations

import json
import os
from dataclasses import replace
from typing import Any

from etcdfence._flows import fencing, leases, tasks
from etcdfence._keys import prefix_end
from etcdfence._records import AttemptRecord, End, RefusalRecord
from etcdfence._requests import Compare, Delete, Grant, Operation, Put, Target, Txn
from etcdfence._txns import absent
from etcdfence.model import ABSENT, Guard
from etcdfence.testing.explore import Fault, Program, Restore, Scenario, Snapshot
from etcdfence.testing.memory import State, step

from .invariants import ALL, HISTORY_STANDS, LOSS_IS_TRUE, NO_GHOST, journal
from .programs import (
    COMPLETED,
    EPOCH,
    FAILED,
    FAILED_FOR_GOOD,
    JOB,
    KEYS,
    STOPPED,
    Worker,
    begun,
    borrower,
    checking,
    create,
    delete,
    ending,
    going_on,
    looking,
    observer,
    onlooker,
    outsider,
    proclaiming,
    put,
    reader,
    renewing,
    renewing_in_an_older_store,
    settling,
    settling_later,
    silently,
    stubborn,
    trimmer,
    writes,
)

SECOND_EPOCH = b'{"format":1,"number":2,"id":"second"}'
TOMBSTONE = b'{"format":1,"state":"cancelled","attempt":"","generation":1,"at":""}'
PAYLOAD = b'{"format":1,"operation":"op","scope":"job","version":1,"payload":{"a":1}}'


USUAL = frozenset(Fault) - {Fault.DENIED}
USUALLY: dict[str, Any] = {
    "store": begun(),
    "invariants": ALL,
    "kinds": USUAL,
    "journal": journal,
    "reliable": frozenset("O"),
}


def scenario(name: str, *programs: Program | Worker, **options: Any) -> Scenario:
    return Scenario(
        name,
        tuple(one.program() if isinstance(one, Worker) else one for one in programs),
        **{
            "store": begun(),
            "invariants": ALL,
            "kinds": USUAL,
            "journal": journal,
            "reliable": frozenset("O"),
            **options,
        },
    )


def written(store: State, *operations: Operation) -> State:
    after, _ = step(store, writes(*operations))
    return after


def leased(store: State, lease_id: int) -> State:
    after, _ = step(store, Grant(lease_id, 10))
    return after


def attempt(name: str, *, lease: int, ended: bool = True, **more: Any) -> Put:
    end = End(how="released", at="t", write="w", generation=1) if ended else None
    base = {"holder": "h", "host": "h", "pid": 1, "lease": f"{lease:x}", "started": "t", "ended": end}
    return Put(JOB.attempt(name), AttemptRecord(attempt=name, **base, **more).to_bytes())


def refusal(generation: int, count: int) -> Put:
    record = RefusalRecord(generation=generation, attempt="o", holder="h", count=count, tries=())
    return Put(JOB.refusal(generation), record.to_bytes())


def owned_already() -> State:
    """By somebody who has stopped without a word: its lease runs out, or not."""
    owner = {"format": 1, "attempt": STOPPED, "holder": "z", "host": "h", "pid": 1, "ttl": 10, "epoch": 1}
    return written(leased(begun(), 99), Put(JOB.owner, json.dumps(owner).encode(), 99))


_OWNER = owned_already().get(JOB.owner)
assert _OWNER is not None
HANDED = Guard(JOB.owner, _OWNER.mod_revision, 99, KEYS.epoch, EPOCH)


# A revision that comes again can let a late note about a lost attempt pass; such a note is for people only.
IN_A_RESTORED_STORE = tuple(one for one in ALL if one is not HISTORY_STANDS)

DENIALS = frozenset({Fault.DELAYED, Fault.DENIED})
# An attempt whose claim was answered may be trimmed (in truth only after twenty others), and then nothing but
# the transport speaks against a second copy of that claim: gRPC over TCP delivers no request twice.
NOT_TWICE = USUAL - {Fault.DUPLICATED}
SEVERAL = frozenset({Fault.DELAYED, Fault.REFUSED})
WHILE_LEAVING = frozenset({Fault.LOST_REQUEST, Fault.TIMED_OUT})
LOST = attempt("lost", lease=77, ended=False)
A, B, C = (Worker(name, (put("k", name.lower()),)) for name in "ABC")

CLAIMS = scenario("two claim, write and release", A, B)
THREE = scenario("three claim, write and release", A, B, C)
WAITING = scenario(
    "one waits for the other",
    Worker("A", (put("k", "a"),)),
    Worker("B", (put("k", "b"),), waits=None),
)
PATIENT = scenario("two wait, for a while", Worker("A", (), waits=5.0), Worker("B", (), waits=5.0))
LATECOMER = scenario(
    "one waits, another comes later",
    Worker("A"),
    Worker("B", waits=None),
    Worker("C"),
)
IN_LINE = scenario(
    "two are in line behind an owner that has stopped",
    Worker("B", waits=None),
    Worker("C", waits=None),
    store=owned_already(),
)
IN_LINE_FOR_A_WHILE = scenario(
    "two are in line for a while, and the owner is taken away",
    Worker("B", waits=5.0),
    Worker("C", waits=None),
    outsider("O", writes(Delete(JOB.owner))),
    store=owned_already(),
)
THROWN_OUT = scenario(
    "an operator takes one that waits out of the line",
    Worker("B", waits=None),
    outsider("O", writes(Delete(JOB.queue, prefix_end(JOB.queue))), writes(Delete(JOB.owner))),
    store=owned_already(),
)
THROWN_OUT_AND_PASSED = scenario(
    "an operator takes the first of two that wait out of the line",
    Worker("B", waits=None),
    Worker("C", waits=None),
    outsider("O", writes(Delete(JOB.queue, JOB.queue + b"C"), Delete(JOB.owner))),
    store=owned_already(),
)
CRASHED_IN_LINE = scenario(
    "one crashes in line, and another waits behind it",
    Worker("B", waits=None),
    Worker("C", waits=None),
    store=owned_already(),
    crashing=frozenset("B"),
    kinds=frozenset({Fault.CRASHED, Fault.EXPIRED, Fault.DELAYED}),
)
OWNS_AND_STAYS = scenario(
    "one gets the task after a while, and keeps it",
    Worker("B", waits=None, ends=None),
    outsider("O", writes(Delete(JOB.owner))),
    store=owned_already(),
)
CLOSED_MEANWHILE = scenario(
    "a task is closed, or its epoch raised, while one waits for it",
    Worker("B", waits=None),
    outsider(
        "O",
        writes(Put(KEYS.epoch, SECOND_EPOCH), Delete(JOB.queue, prefix_end(JOB.queue)), Delete(JOB.owner)),
        writes(Put(JOB.closed, TOMBSTONE)),
    ),
    store=owned_already(),
)
RESERVED = scenario(
    "the task is kept for somebody while one waits for it",
    Worker("B", waits=None),
    outsider("O", writes(Delete(JOB.owner), Put(JOB.reserve, b"{}")), writes(Delete(JOB.reserve))),
    store=owned_already(),
)
SESSIONS = scenario(
    "two own and wait in sessions",
    Worker("A", (put("k", "a"),), shares=True),
    Worker("B", (put("k", "b"),), waits=None, shares=True),
)
SESSION_RENEWALS = scenario(
    "renewal rounds of a session, and of work that is silent",
    Worker("A", (renewing, silently, renewing), shares=True),
    Worker("B", (silently,)),
)
OBSERVING = scenario(
    "one looks on while another proclaims, releases and claims again",
    Worker("A", (proclaiming("here"),)).program(again=Worker("A")),
    observer("V", 6),
    crashing=frozenset("A"),
)
ONLOOKING = scenario(
    "one looks at everything while others wait",
    Worker("B", waits=None),
    onlooker("V"),
    store=written(
        owned_already(),
        Put(JOB.value, b'{"format":1,"generation":1,"value":"of another"}', 99),
        Put(JOB.queue + b"?", b"?"),
        Put(KEYS.family("queue") + b"stray", b"?"),
        Put(KEYS.family("owner") + b"a:stray:name", b"?"),
    ),
)
BORROWED = scenario(
    "one writes under a guard that it was handed, beside somebody with none",
    borrower("P", HANDED, "1"),
    Worker("B", waits=None),
    outsider("O", writes(Put(KEYS.data("k"), b"foreign"))),
    store=written(owned_already(), Put(KEYS.data("k"), b"old")),
)
BORROWED_CREATE = scenario(
    "one creates a key under a guard that it was handed",
    borrower("P", HANDED, "new 1", expect=ABSENT),
    outsider("O", writes(Put(KEYS.data("k"), b"foreign"))),
    store=owned_already(),
)
GIVING_UP = scenario(
    "one gives up waiting in a session, another waits on",
    Worker("B", waits=5.0, shares=True),
    Worker("C", waits=None),
    store=owned_already(),
    cancelling=frozenset("B"),
)
BEHIND = scenario(
    "one is in line behind another that does not look",
    Worker("B", waits=None),
    outsider("O", writes(Delete(JOB.owner)), writes(Delete(JOB.queue + b"A1"))),
    store=written(owned_already(), Put(JOB.queue + b"A1", b"{}")),
)
GIVING_UP_LATE = scenario(
    "one in a session gives up, with a claim still on its way",
    Worker("B", waits=5.0, shares=True),
    outsider("O", writes(Delete(JOB.owner), Put(JOB.reserve, b"{}")), writes(Delete(JOB.reserve))),
    store=owned_already(),
    kinds=frozenset({Fault.DELAYED, Fault.TIMED_OUT}),
)
GIVING_UP_FREE = scenario(
    "one in a session gives up a claim of a free task",
    Worker("B", shares=True, ends=None),
    Worker("C", shares=True),
    cancelling=frozenset("B"),
)
WRITES = scenario(
    "writes of one lease, and a successor",
    Worker("A", (going_on(put("k", "1")), going_on(put("k", "2")), going_on(put("k", "3")))),
    Worker("B", (put("k", "b"),)),
)
EXPECTATIONS = scenario(
    "creating, deleting and creating again, beside somebody without a lease",
    Worker("A", (going_on(create("k", "new 1")), going_on(delete("k")), going_on(create("k", "new 2")))),
    outsider("O", writes(Put(KEYS.data("k"), b"foreign")), writes(Delete(KEYS.data("k")))),
)
SETTLING = scenario(
    "a caller settles what it was not told",
    Worker("A", (settling(put("k", "1")), settling(create("l", "new")), settling(put("k", "2")))),
    B,
)
COMPLETING = scenario(
    "a task is completed while its record changes and an effect is open",
    Worker("A", ends=COMPLETED),
    Worker("B"),
    outsider(
        "O",
        writes(Put(JOB.record, PAYLOAD), Put(JOB.open + b"charge", b"{}")),
        writes(Delete(JOB.open + b"charge")),
    ),
)
CANCELLED_TASK = scenario(
    "a task is closed by somebody else while it is owned",
    Worker("A", ends=COMPLETED),
    Worker("B", ends=FAILED_FOR_GOOD),
    outsider("O", Txn((absent(JOB.closed),), (Put(JOB.closed, TOMBSTONE),))),
)
FAILING = scenario(
    "one fails, the other fails for good", Worker("A", ends=FAILED), Worker("B", ends=FAILED_FOR_GOOD)
)
OPERATOR = scenario(
    "an operator takes the owner key away",
    Worker("A", (stubborn, stubborn)),
    Worker("B", (put("k", "b"),)),
    outsider("O", writes(Delete(JOB.owner))),
)
FOREIGN_HAND = scenario(
    "somebody rewrites the owner key on the same etcd lease",
    Worker("A", (put("k", "a"), checking)),
    outsider("O", Txn((Compare(Target.LEASE, JOB.owner, 1001),), (Put(JOB.owner, b"{}", 1001),))),
)
EPOCHS = scenario(
    "the epoch is raised",
    Worker("A", (put("k", "a"),)),
    Worker("B"),
    outsider("O", writes(Put(KEYS.epoch, SECOND_EPOCH))),
)
LINE = scenario(
    "somebody is in line, and the task is kept for somebody",
    A,
    outsider(
        "O",
        writes(Put(JOB.queue + b"first", b"{}")),
        writes(Delete(JOB.queue + b"first"), Put(JOB.reserve, b"{}")),
        writes(Delete(JOB.reserve)),
    ),
)
RESTORED = scenario(
    "the store is restored to a time when the task was free, or owned",
    Worker("A", (put("k", "a"),)),
    Worker("B", (put("k", "b"),)),
    outsider("O", Snapshot(), Restore()),
    invariants=IN_A_RESTORED_STORE,
    grants_first=False,
)
TOLD_AND_RESTORED = scenario(
    "a worker hears of its loss before the store is restored to its lifetime",
    Worker("A", (settling_later(put("k", "1"), renewing), renewing, stubborn), ends=None),
    outsider("O", Snapshot(), writes(Delete(JOB.owner)), Restore()),
    invariants=IN_A_RESTORED_STORE,
    grants_first=False,
)
RENEWALS = scenario(
    "renewal rounds, and keepalives that lie",
    Worker("A", (renewing, checking, renewing, put("k", "a"))),
    Worker("B", (renewing,)),
)
CRASHES = scenario(
    "a worker crashes and starts again",
    Worker("A", (put("k", "1"), put("k", "2"))).program(again=Worker("A", (put("k", "3"),))),
    B,
    crashing=frozenset("A"),
)
CANCELLING = scenario(
    "a call is given up in its middle",
    Worker("A", (put("k", "1"), put("k", "2"))),
    Worker("B", (put("k", "b"),), waits=5.0),
    cancelling=frozenset("A"),
)
TRIMMING = scenario(
    "two trim while others claim",
    reader("A", trimmer(1)),
    reader("C", trimmer(0)),
    outsider("O", writes(refusal(3, 2))),
    store=begun(
        LOST,
        attempt("sealed", lease=77, ended=False, sealed=True),
        attempt("plain", lease=78),
        Put(JOB.attempt("unreadable"), b"?"),
        refusal(3, 1),
    ),
    kinds=NOT_TWICE,
)
DOUBTFUL = scenario(
    "an attempt whose claim is still on its way is trimmed",
    Worker("A"),
    reader("T", trimmer(0)),
    kinds=NOT_TWICE,
)
LOSING = scenario(
    "the attempt of a lost predecessor is trimmed, and marked as lost",
    Worker("B"),
    reader("T", trimmer(1)),
    store=begun(
        attempt("lost", lease=77, ended=False), replace(attempt("lost", lease=77, ended=False), key=JOB.last)
    ),
)
DUE = scenario(
    "a release finds much to trim",
    Worker("A"),
    Worker("B"),
    store=begun(*(refusal(number, 1) for number in range(1, 32))),
)
REFUSALS = scenario(
    "one that was superseded writes again and again",
    Worker("A", (stubborn, stubborn, stubborn)),
    outsider("O", writes(Delete(JOB.owner))),
)
LOOKING = scenario(
    "readers, while others work",
    reader(
        "A",
        looking(lambda pace: leases.find_epoch(KEYS.epoch, pace)),
        looking(lambda pace: tasks.describe(KEYS, JOB, pace)),
        looking(lambda pace: tasks.tasks(KEYS, pace)),
        looking(lambda pace: fencing.get("k", KEYS.data("k"), KEYS.provenance("k"), pace)),
    ),
    reader("R", looking(lambda pace: leases.find_epoch(KEYS.epoch, pace))),
    store=State(),
)
LOOKING_ON = scenario(
    "a reader, while somebody works",
    reader(
        "R",
        looking(lambda pace: tasks.describe(KEYS, JOB, pace)),
        looking(lambda pace: fencing.get("k", KEYS.data("k"), KEYS.provenance("k"), pace)),
    ),
    B,
)


def at_most(scenario: Scenario, faults: int, events: int) -> Scenario:
    return replace(scenario, faults=faults, events=events)


SETTLING_LATER = scenario(
    "a caller goes on and settles later",
    Worker("A", (settling_later(put("k", "1"), put("k", "2")),)),
    B,
)
ENDED_TWICE = scenario(
    "an ending is followed by another one, and by a look at the lease",
    Worker("A", (ending(COMPLETED), ending(FAILED), checking), ends=None),
    Worker("B", (ending(FAILED), ending(COMPLETED), checking), ends=None),
)
OLDER_STORE = scenario(
    "a process has seen more of the store than there is",
    Worker("A", (renewing_in_an_older_store,), ends=None),
    outsider("O", writes(Put(b"a", b"")), writes(Put(b"b", b"")), writes(Put(b"c", b""))),
    invariants=tuple(one for one in ALL if one not in (LOSS_IS_TRUE, NO_GHOST)),
)
SETTLING_WHAT_WAS_LOST = scenario(
    "a caller settles, and its lease is taken away",
    Worker("A", (settling(put("k", "1")),)),
    outsider("O", writes(Delete(JOB.owner))),
)
ID_IN_USE = scenario("the lease id is in use", A, store=leased(begun(), 1001))
SHORT_TTL = scenario("the server grants a longer TTL than was asked for", Worker("A", ttl=1), B)
UNREADABLE = scenario(
    "records that cannot be read",
    Worker("A", ends=COMPLETED),
    reader(
        "R", looking(lambda pace: tasks.describe(KEYS, JOB, pace)), looking(lambda pace: tasks.tasks(KEYS, pace))
    ),
    store=begun(
        Put(JOB.record, b'{"format":2}'),
        Put(JOB.last, b"?"),
        Put(JOB.attempt("unreadable"), b"?"),
        Put(KEYS.family("owner") + b"a:stray:name", b"?"),
        Put(KEYS.family("last") + b"another%2", b"?"),
    ),
)
UNREADABLE_END = scenario(
    "a tombstone and an epoch that cannot be read",
    A,
    reader(
        "R",
        looking(lambda pace: tasks.describe(KEYS, JOB, pace)),
        looking(lambda pace: leases.find_epoch(KEYS.epoch, pace)),
    ),
    store=written(begun(Put(JOB.closed, b"?")), Put(KEYS.epoch, b"?")),
)

UNHEARD = scenario(
    "a create that meets a key of somebody else's, and hears nothing",
    Worker("A", (going_on(create("k", "new 1")),)),
    outsider("O", writes(Put(KEYS.data("k"), b"foreign"))),
)
UNHEARD_AND_LOST = scenario(
    "a create that meets a key of somebody else's, hears nothing, and has lost its lease",
    Worker("A", (going_on(create("k", "new 1")),)),
    outsider("O", writes(Put(KEYS.data("k"), b"foreign")), writes(Delete(JOB.owner))),
)
RIVALS = scenario("two claim and release", Worker("A"), Worker("B"))
RIVAL_STAYS = scenario("two claim and one keeps it", Worker("A"), Worker("B", ends=None))
NO_EPOCH = scenario("the namespace has no epoch", Worker("A"), B, store=State())
ALONE = scenario("a worker alone settles", Worker("A", (settling(put("k", "1")), settling(put("k", "2")))))

MARKERS = scenario(
    "a task is trimmed while its worker writes",
    Worker("A", (going_on(put("k", "1")), going_on(put("k", "2")))),
    reader("T", trimmer(0)),
    store=begun(attempt("plain", lease=78)),
    kinds=NOT_TWICE,
)
LATE_CLAIM = scenario(
    "an attempt that was marked as lost is trimmed while a claim of it is on its way",
    Worker("A", ends=None),
    outsider("O", writes(Delete(JOB.owner))),
    Worker("B"),
    reader("T", trimmer(0)),
    kinds=frozenset({Fault.DELAYED}),
)
EPOCH_CHECKED = scenario(
    "a holder asks for its lease while the epoch is raised",
    Worker("A", (renewing, checking)),
    outsider("O", writes(Put(KEYS.epoch, SECOND_EPOCH))),
)
PROVING = scenario(
    "two show that comparisons arrive",
    *(reader(name, looking(lambda pace: leases.prove_compares(KEYS.epoch, pace))) for name in "AB"),
)
PROVING_IN_VAIN = scenario(
    "comparisons get lost on their way",
    reader("A", looking(lambda pace: leases.prove_compares(KEYS.epoch, pace))),
    without=lambda txn: replace(txn, compares=()),
)
LARGE = (EPOCHS, COMPLETING, TOLD_AND_RESTORED)
SMALL = (
    CLAIMS,
    WAITING,
    PATIENT,
    IN_LINE,
    THROWN_OUT,
    CRASHED_IN_LINE,
    OWNS_AND_STAYS,
    BEHIND,
    GIVING_UP_LATE,
    GIVING_UP_FREE,
    CLOSED_MEANWHILE,
    RESERVED,
    SESSIONS,
    SESSION_RENEWALS,
    OBSERVING,
    ONLOOKING,
    BORROWED,
    BORROWED_CREATE,
    GIVING_UP,
    WRITES,
    RIVALS,
    RIVAL_STAYS,
    NO_EPOCH,
    UNHEARD,
    UNHEARD_AND_LOST,
    ALONE,
    EXPECTATIONS,
    SETTLING,
    CANCELLED_TASK,
    FAILING,
    REFUSALS,
    FOREIGN_HAND,
    LINE,
    RENEWALS,
    CRASHES,
    CANCELLING,
    TRIMMING,
    DOUBTFUL,
    LOSING,
    DUE,
    LOOKING,
    LOOKING_ON,
    SETTLING_LATER,
    SETTLING_WHAT_WAS_LOST,
    ENDED_TWICE,
    OLDER_STORE,
    ID_IN_USE,
    SHORT_TTL,
    UNREADABLE,
    UNREADABLE_END,
    MARKERS,
    EPOCH_CHECKED,
    PROVING,
    PROVING_IN_VAIN,
)
QUICK = (
    *(at_most(one, *budget) for one in SMALL for budget in ((1, 0), (0, 1))),
    *(at_most(one, 0, 1) for one in LARGE),
    replace(UNHEARD, faults=2, events=0, kinds=SEVERAL),
    replace(ALONE, faults=2, events=0, kinds=SEVERAL),
    replace(RIVAL_STAYS, faults=2, events=0, kinds=SEVERAL),
    replace(RIVAL_STAYS, faults=2, events=0, kinds=DENIALS),
    replace(ALONE, faults=2, events=0, kinds=DENIALS),
    at_most(RESTORED, 0, 0),
    at_most(LATE_CLAIM, 1, 0),
    replace(TOLD_AND_RESTORED, faults=1, events=0, kinds=frozenset({Fault.DELAYED})),
    at_most(OPERATOR, 0, 0),
    at_most(THREE, 0, 0),
    at_most(LATECOMER, 0, 0),
    at_most(IN_LINE_FOR_A_WHILE, 0, 0),
    replace(OWNS_AND_STAYS, faults=1, events=1),
    replace(OWNS_AND_STAYS, faults=0, events=2),
    at_most(GIVING_UP_LATE, 1, 2),
    replace(GIVING_UP_LATE, faults=2, events=1, kinds=WHILE_LEAVING),
    at_most(GIVING_UP_FREE, 1, 1),
    replace(BORROWED, faults=2, events=0, kinds=DENIALS | SEVERAL, programs=BORROWED.programs[::2]),
    replace(SESSION_RENEWALS, faults=2, events=0, kinds=frozenset({Fault.LIED, Fault.REFUSED})),
    at_most(THROWN_OUT_AND_PASSED, 0, 0),
)
DEEP = (
    replace(IN_LINE_FOR_A_WHILE, faults=1, events=0, kinds=frozenset({Fault.DELAYED, Fault.LOST_REPLY})),
    *(at_most(one, 1, 1) for one in (GIVING_UP, RESERVED, THROWN_OUT)),
    *(at_most(one, 1, 0) for one in LARGE),
    *(at_most(one, 1, 1) for one in (CLAIMS, WAITING, PATIENT, FAILING, CANCELLING)),
    *(at_most(one, 1, 1) for one in (EXPECTATIONS, REFUSALS, FOREIGN_HAND, DOUBTFUL, LOSING)),
    replace(RIVALS, faults=2, events=0, kinds=SEVERAL),
    at_most(THREE, 1, 0),
    at_most(THREE, 0, 1),
    at_most(OPERATOR, 0, 1),
)
# Minutes more: ETCDFENCE_TEST_DEEPEST=1 scripts/test -o faulthandler_timeout=0 tests/simulation
DEEPEST = (
    *(at_most(one, 1, 1) for one in (WRITES, CRASHES, RENEWALS)),
    *(at_most(one, 2, 0) for one in (CLAIMS, WRITES)),
    replace(RESTORED, faults=1, events=0, kinds=frozenset({Fault.DELAYED})),
    at_most(RESTORED, 0, 1),
    at_most(IN_LINE, 1, 1),
    at_most(SESSIONS, 1, 1),
    replace(THROWN_OUT_AND_PASSED, faults=1, events=0, kinds=frozenset({Fault.DELAYED, Fault.DUPLICATED})),
)
if os.environ.get("ETCDFENCE_TEST_DEEPEST"):
    DEEP = (*DEEP, *DEEPEST)
