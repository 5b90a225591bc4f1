"""The situations that are explored, each with every schedule of so many faults and events.

`QUICK` is what `scripts/check` runs; `DEEP` allows more faults, and three workers, and runs in `scripts/test`.
Between them every flow is covered with two workers at least.
"""

from __future__ import annotations

from typing import Any

from etcdfence._flows import fencing, leases, tasks
from etcdfence._records import AttemptRecord, End, RefusalRecord
from etcdfence._requests import Compare, Delete, Put, Target, Txn
from etcdfence._txns import absent
from etcdfence.testing.explore import Program, Restore, Scenario, Snapshot
from etcdfence.testing.memory import State

from .invariants import ALL, HISTORY_STANDS, journal
from .programs import (
    COMPLETED,
    FAILED,
    FAILED_FOR_GOOD,
    JOB,
    KEYS,
    Worker,
    begun,
    checking,
    create,
    delete,
    going_on,
    looking,
    outsider,
    put,
    reader,
    renewing,
    settling,
    stubborn,
    writes,
)

SECOND_EPOCH = b'{"format":1,"number":2,"id":"second"}'
TOMBSTONE = b'{"format":1,"state":"cancelled","attempt":"","generation":1,"at":""}'
PAYLOAD = b'{"format":1,"operation":"op","scope":"job","version":1,"payload":{"a":1}}'


def scenario(name: str, *programs: Program | Worker, **options: Any) -> Scenario:
    return Scenario(
        name,
        tuple(one.program() if isinstance(one, Worker) else one for one in programs),
        **{"store": begun(), "invariants": ALL, "journal": journal, "reliable": frozenset("OP"), **options},
    )


def attempt(name: str, *, lease: int, ended: bool = True, **more: Any) -> Put:
    end = End(how="released", at="t", write="w", generation=1) if ended else None
    base = {"holder": "h", "host": "h", "pid": 1, "lease": f"{lease:x}", "started": "t", "ended": end}
    return Put(JOB.attempt(name), AttemptRecord(attempt=name, **base, **more).to_bytes())


def refusal(generation: int, count: int) -> Put:
    record = RefusalRecord(generation=generation, attempt="o", holder="h", count=count, tries=())
    return Put(JOB.refusal(generation), record.to_bytes())


# A revision that comes again can let a late note about a lost attempt pass; such a note is for people only.
IN_A_RESTORED_STORE = tuple(one for one in ALL if one is not HISTORY_STANDS)

A, B, C = (Worker(name, (put("k", name.lower()),)) for name in "ABC")

CLAIMS = scenario("two claim, write and release", A, B)
THREE = scenario("three claim, write and release", A, B, C)
WAITING = scenario(
    "one waits for the other",
    Worker("A", (put("k", "a"),)),
    Worker("B", (put("k", "b"),), waits=None),
)
PATIENT = scenario("two wait, for a while", Worker("A", (), waits=5.0), Worker("B", (), waits=5.0))
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
    Worker("B", ends=COMPLETED),
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
    Worker("A", (stubborn, checking)),
    outsider("O", Txn((Compare(Target.LEASE, JOB.owner, 1001),), (Put(JOB.owner, b"{}", 1001),))),
)
EPOCHS = scenario(
    "the epoch is raised, with and without the owner key",
    Worker("A", (put("k", "a"), renewing)),
    Worker("B", (put("k", "b"),)),
    outsider("O", writes(Put(KEYS.epoch, SECOND_EPOCH))),
)
LINE = scenario(
    "somebody is in line, and the task is kept for somebody",
    A,
    outsider("O", writes(Put(JOB.queue + b"first", b"{}")), writes(Delete(JOB.queue + b"first"))),
    outsider("P", writes(Put(JOB.reserve, b"{}")), writes(Delete(JOB.reserve))),
)
RESTORED = scenario(
    "the store is restored to a time when the task was free, or owned",
    Worker("A", (stubborn, stubborn)),
    Worker("B", (put("k", "b"),)),
    outsider("O", Snapshot(), Restore()),
    invariants=IN_A_RESTORED_STORE,
)
TOLD_AND_RESTORED = scenario(
    "a worker hears of its loss before the store is restored to its lifetime",
    Worker("A", (renewing, stubborn)),
    outsider("O", Snapshot(), writes(Delete(JOB.owner)), Restore()),
    invariants=IN_A_RESTORED_STORE,
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
    reader("A", looking(lambda pace: tasks.trim(JOB, pace))),
    Worker("B"),
    reader("C", looking(lambda pace: tasks.trim(JOB, pace))),
    outsider("O", writes(refusal(3, 2))),
    store=begun(
        attempt("sealed", lease=77, ended=False, sealed=True),
        attempt("plain", lease=78),
        attempt("unended", lease=79, ended=False),
        Put(JOB.attempt("unreadable"), b"?"),
        refusal(3, 1),
    ),
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
    B,
    store=State(),
)
