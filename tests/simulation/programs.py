"""What workers and operators do, as programs for the explorer.

A worker does what the shells do around the flows, in their order: acquire, write, end, give the etcd lease
back, and after a call that was given up withdraw what it had set in motion. It notes what its caller was told:

    ("claiming", attempt)              a claim of this attempt may be under way
    ("owns", attempt, generation)      ("not owner", attempt)           ("claim unknown", attempt)
    ("wrote", write id, revision)      ("not written", write id)        ("write unknown", write id)
    ("settled", write id, verdict)     ("ended", attempt, how)          ("lost", attempt, reason)
    ("left", attempt)                  something was left to run out, and the caller was told
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, TypeVar

from etcdfence._flow import Flow
from etcdfence._flows import borrowing, fencing, leases, renewals, tasks, turns, watching
from etcdfence._flows.fencing import Check, Edit, Lane
from etcdfence._flows.leases import Bid, Epoch, Shared, Wish
from etcdfence._flows.pacing import Pace, pace_for
from etcdfence._keys import Keys
from etcdfence._records import EpochRecord
from etcdfence._requests import FreshId, Header, Now, Operation, Put, Request, Stamp, Txn, TxnReply
from etcdfence._txns import Change, Ending, Tenure
from etcdfence.errors import EtcdFenceError, OutcomeUnknown, OwnershipRefused
from etcdfence.model import ABSENT, Absent, Guard, Loss, Observation, TaskKey
from etcdfence.testing.explore import Cancelled, Note, Program
from etcdfence.testing.memory import State, step

T = TypeVar("T")
KEYS = Keys("n")
JOB = KEYS.task(TaskKey("op", "job"))
EPOCH = EpochRecord(number=1, id="first").to_bytes()
PATIENCE = 10.0
STOPPED = "Z1"  # the attempt of an owner that stopped before a scenario begins
RELEASED = Ending("released")
COMPLETED = Ending("completed", closes="completed", result="done", evidence={"revision": 1})
FAILED = Ending("failed", "it broke")
FAILED_FOR_GOOD = Ending("failed", "it cannot be done", closes="failed")


def begun(*operations: Operation) -> State:
    """A store with an epoch, and whatever else a scenario begins with."""
    state, _ = step(State(), Txn((), (Put(KEYS.epoch, EPOCH), *operations)))
    return state


def wish(name: str, ttl: int) -> Wish:
    return Wish(JOB, holder=name, host="host", pid=1, ttl=ttl, epoch=Epoch(KEYS.epoch, EPOCH, 1))


Step = Callable[[Lane], Flow[Any]]


@dataclass(frozen=True)
class Worker:
    """`waits`: seconds to wait for the task (0: not at all, None: without limit); then the steps, in order.
    `shares`: in a session, whose etcd lease is given back at the end (or stays, where the tenure does)."""

    name: str
    steps: tuple[Step, ...] = ()
    waits: float | None = 0.0
    ends: Ending | None = RELEASED
    ttl: int = 10
    shares: bool = False

    def program(self, again: Worker | None = None) -> Program:
        return Program(self.name, self.run, again.run if again else None)

    def run(self) -> Flow[None]:
        if not self.shares:
            yield from self._own(None)
            return
        session = Bid()
        try:
            yield from leases.grant(session, self.ttl, (yield from pace_for(PATIENCE)))
            yield from self._own(Shared(session.lease_ids[-1], session.granted, session.sent))
        except (EtcdFenceError, Cancelled):
            yield from Note("no session")
        if self.ends is not None:
            yield from _undo(session)

    def _own(self, shared: Shared | None) -> Flow[None]:
        tenure = yield from owned(self.name, self.waits, self.ttl, shared)
        if tenure is None:
            return
        lane = Lane(tenure, tenure.granted_at)
        try:
            yield from self._work(lane)
        except Cancelled:  # in the middle of giving back
            yield from Note(("left", tenure.attempt.attempt))

    def _work(self, lane: Lane) -> Flow[None]:
        try:
            for one in self.steps:
                yield from one(lane)
            yield from self._end(lane)
        except OwnershipRefused as refused:
            yield from Note(("lost", lane.tenure.attempt.attempt, refused.loss.reason))
            yield from give_back(lane.tenure)
        except (EtcdFenceError, Cancelled):
            yield from self._leave(lane)

    def _end(self, lane: Lane) -> Flow[None]:
        if self.ends is None:
            return
        yield from ended(lane, self.ends)
        yield from give_back(lane.tenure)

    def _leave(self, lane: Lane) -> Flow[None]:
        """What leaving a block does whose body met no etcd, or was interrupted."""
        try:
            yield from ended(lane, RELEASED)
        except OwnershipRefused as refused:
            yield from Note(("lost", lane.tenure.attempt.attempt, refused.loss.reason))
        except (EtcdFenceError, Cancelled):
            yield from Note(("left", lane.tenure.attempt.attempt))
        yield from give_back(lane.tenure)


def ended(lane: Lane, ending: Ending) -> Flow[None]:
    pace = yield from pace_for(PATIENCE)
    ids: list[str] = []
    try:
        yield from tapped(tasks.end(lane, ending, pace), ids)
    except (OutcomeUnknown, Cancelled):
        raise
    except EtcdFenceError:
        for one in ids:
            yield from Note(("not written", one))
        raise
    yield from Note(("ended", lane.tenure.attempt.attempt, ending.how))


def owned(name: str, waits: float | None, ttl: int, shared: Shared | None = None) -> Flow[Tenure | None]:
    """Acquire as the shells do it."""
    bid, attempts = Bid(shared=shared), list[str]()
    flow = turns.acquire(bid, wish(name, ttl), PATIENCE, waits)
    try:
        outcome = yield from tapped(flow, attempts)
    except (OutcomeUnknown, Cancelled):
        yield from _withdraw(bid, attempts, "claim unknown")
        return None
    except EtcdFenceError:
        yield from _withdraw(bid, attempts, "not owner")
        return None
    if isinstance(outcome, Tenure):
        bid.taken_up(outcome)
        yield from _told_of(attempts[:-1], "not owner")
        yield from Note(("owns", outcome.attempt.attempt, outcome.generation))
        yield from _undo(bid)
        return outcome
    yield from _withdraw(bid, attempts, "not owner")
    return None


def _told_of(attempts: Iterable[str], told: str) -> Flow[None]:
    for one in attempts:
        yield from Note((told, one))


def _withdraw(bid: Bid, attempts: list[str], told: str) -> Flow[None]:
    """Of earlier attempts nothing can land any more: each was settled before the next one was begun."""
    yield from _told_of(attempts[:-1], "not owner")
    yield from _told_of(attempts[-1:], told)
    yield from _undo(bid)
    if bid.open:
        yield from _told_of(attempts[-1:], "left")


def _undo(bid: Bid) -> Flow[None]:
    try:
        yield from turns.withdraw(bid, (yield from pace_for(PATIENCE)))
    except (EtcdFenceError, Cancelled):
        return


def give_back(tenure: Tenure) -> Flow[None]:
    bid = Bid(lease_ids=[] if tenure.shared else [tenure.guard.lease_id])
    yield from _undo(bid)
    if bid.lease_ids:
        yield from Note(("left", tenure.attempt.attempt))


# --- what a worker does under its lease --------------------------------------------------------------------


def edit(name: str, value: str | None) -> Edit:
    return Edit(name, KEYS.data(name), KEYS.provenance(name), None if value is None else value.encode())


def put(name: str, value: str, expect: int | Absent | None = None) -> Step:
    checks = () if expect is None else (Check(name, KEYS.data(name), expect),)
    return lambda lane: _written(lane, [edit(name, value)], checks)


def create(name: str, value: str) -> Step:
    return put(name, value, ABSENT)


def delete(name: str) -> Step:
    return lambda lane: _written(lane, [edit(name, None)], ())


def _written(lane: Lane, edits: Iterable[Edit], checks: Iterable[Check]) -> Flow[None]:
    pace = yield from pace_for(PATIENCE)
    ids: list[str] = []
    try:
        committed = yield from tapped(fencing.write(lane, edits, checks, pace), ids)
    except (OutcomeUnknown, Cancelled):
        yield from Note(("write unknown", ids[0]))
        raise
    except EtcdFenceError:
        yield from Note(("not written", ids[0]))
        raise
    yield from Note(("wrote", committed.write_id, committed.revision))


def trimmer(kept: int) -> Callable[[], Flow[Any]]:
    """Trims, and notes the version of every refusal it has read."""

    def heard(_: Request[Any], reply: Any) -> Iterator[Note]:
        for found in reply.reads if isinstance(reply, TxnReply) else ():
            for kv in found.kvs:
                if kv.key.startswith(JOB.refusals):
                    yield Note(("read", kv.key, kv.version))

    def run() -> Flow[None]:
        pace = yield from pace_for(PATIENCE)
        yield from overheard(tasks.trim(JOB, pace, kept), heard)

    return run


def tapped(flow: Flow[T], ids: list[str]) -> Flow[T]:
    """The flow as it is; `ids` gets every id that it was given."""

    def heard(request: Request[Any], reply: Any) -> Iterator[Note]:
        if isinstance(request, Stamp | FreshId):
            ids.append(reply.id if isinstance(request, Stamp) else reply)
        return iter(())

    return overheard(flow, heard)


def overheard(flow: Flow[T], heard: Callable[[Request[Any], Any], Iterator[Note]]) -> Flow[T]:
    """The flow as it is, with notes of what it is answered."""
    outcome: Any = None
    try:
        while True:
            request = flow.throw(outcome) if isinstance(outcome, BaseException) else flow.send(outcome)
            try:
                outcome = yield request
            except BaseException as error:  # goes on into the flow
                outcome = error
            else:
                yield from heard(request, outcome)
    except StopIteration as stop:
        result: T = stop.value
        return result


def going_on(one: Step) -> Step:
    """The step, whatever comes of it short of losing the lease: as a caller that catches and continues."""

    def run(lane: Lane) -> Flow[None]:
        try:
            yield from one(lane)
        except OwnershipRefused:
            raise
        except (EtcdFenceError, Cancelled):
            return

    return run


def settling(one: Step) -> Step:
    """The step; where its outcome is unknown, the caller asks `settle`."""

    def run(lane: Lane) -> Flow[None]:
        try:
            yield from one(lane)
        except OutcomeUnknown as error:
            pace = yield from pace_for(PATIENCE)
            verdict = yield from fencing.settle(lane, error.write_id or "", pace)
            yield from Note(("settled", error.write_id, verdict))

    return run


def settling_later(one: Step, then: Step) -> Step:
    """Does something else first, and asks about the write afterwards; and about one that it never made."""

    def run(lane: Lane) -> Flow[None]:
        try:
            yield from one(lane)
        except OutcomeUnknown as error:
            yield from going_on(then)(lane)
            yield from settling(raising(error))(lane)
        yield from going_on(settling(raising(OutcomeUnknown("of another lease", write_id="?"))))(lane)

    return run


def raising(error: EtcdFenceError) -> Step:
    def run(_: Lane) -> Flow[None]:
        yield from Note(("again", str(error)))
        raise error

    return run


def ending(how: Ending) -> Step:
    """An ending whose caller goes on, whatever comes of it."""

    def run(lane: Lane) -> Flow[None]:
        try:
            yield from ended(lane, how)
        except EtcdFenceError:
            return

    return run


def renewing(lane: Lane) -> Flow[None]:
    """One round of the renewal thread."""
    yield from _renewed(lane, Header(0, 0))


def silently(lane: Lane) -> Flow[None]:
    """A round of the renewal thread for work that reports no progress."""
    lane.quiet = True
    yield from _renewed(lane, Header(0, 0))


def renewing_in_an_older_store(lane: Lane) -> Flow[None]:
    """A round of a process that has seen more of the store than there is now, and asks again."""
    seen = Header(1, 7)
    back = yield from renewals.went_back(KEYS.epoch, seen, 2.0)
    yield from Note(("went back", back))
    yield from _renewed(lane, seen)


def _renewed(lane: Lane, known: Header) -> Flow[None]:
    begun = yield from Now()
    guard, tenure = lane.tenure.guard, lane.tenure
    spare = [Shared(guard.lease_id, tenure.granted, tenure.granted_at)] if tenure.shared else []
    try:
        outcome, *others = yield from renewals.renew([lane], spare, KEYS.epoch, known, 2.0)
    except EtcdFenceError:
        return
    if others and isinstance(others[0], Loss):
        yield from Note(("session over", guard.lease_id, others[0].reason))
    attempt = lane.tenure.attempt.attempt
    if isinstance(outcome, renewals.Renewed):
        lane.renewed_at = outcome.sent.clock
        yield from Note(("stamped", outcome.sent.clock - begun.clock))
        yield from Note(("renewed", attempt))
    elif isinstance(outcome, Loss):
        lane.over = True
        yield from Note(("lost", attempt, outcome.reason))


def checking(lane: Lane) -> Flow[None]:
    pace = yield from pace_for(PATIENCE)
    try:
        loss = yield from renewals.check(lane, pace)
    except EtcdFenceError:
        return
    attempt = lane.tenure.attempt.attempt
    yield from Note(("lost", attempt, loss.reason) if loss else ("checked", attempt))


def stubborn(lane: Lane) -> Flow[None]:
    """A body that goes on writing, whether it was told of its loss or not."""
    pace = yield from pace_for(PATIENCE)
    write_id = yield from FreshId()
    if lane.over:
        yield from Note(("after loss", write_id))
    change = Change(write_id, (Put(KEYS.data("k"), b"late"),), names=("k",))
    try:
        yield from fencing.commit(lane, change, pace)
    except EtcdFenceError:
        return


# --- others ------------------------------------------------------------------------------------------------


def outsider(name: str, *requests: Request[Any]) -> Program:
    """Somebody with etcdctl, or another part of a system: these requests, one after the other."""

    def run() -> Flow[None]:
        for request in requests:
            try:
                yield from request
            except EtcdFenceError:
                return

    return Program(name, run)


def writes(*operations: Operation) -> Txn:
    return Txn((), operations)


def reader(name: str, *flows: Callable[[], Flow[Any]]) -> Program:
    """Flows that only look, one after the other; what they raise for a caller is no failure."""

    def run() -> Flow[None]:
        for flow in flows:
            try:
                yield from flow()
            except EtcdFenceError:
                continue

    return Program(name, run)


def looking(flow: Callable[[Pace], Flow[Any]]) -> Callable[[], Flow[Any]]:
    def run() -> Flow[Any]:
        pace = yield from pace_for(PATIENCE)
        return (yield from flow(pace))

    return run


def observer(name: str, looks: int) -> Program:
    """Watches who owns the job; notes whom it has seen, and with what value."""

    def run() -> Flow[None]:
        task = JOB
        try:
            seen = yield from watching.look(KEYS, task, (yield from pace_for(PATIENCE)))
            found = watching.first(seen, task)
            for _ in range(looks):
                yield from _saw(found)
                after = yield from watching.next_look(KEYS, task, seen, Pace(float("inf")))
                found, seen = after.since(seen), after
            yield from _saw(found)
        except EtcdFenceError:
            return

    return Program(name, run)


def _saw(found: Iterable[Observation]) -> Flow[None]:
    for one in found:
        yield from Note(("saw", one.owner.attempt if one.owner else None, one.value, one.revision))


def onlooker(name: str) -> Program:
    """Looks at everything once, and at who is in line."""

    def run() -> Flow[None]:
        for flow in (
            lambda pace: watching.look(KEYS, None, pace),
            lambda pace: tasks.waiters(KEYS, pace),
        ):
            try:
                yield from flow((yield from pace_for(PATIENCE)))
            except EtcdFenceError:
                continue

    return Program(name, run)


def proclaiming(value: str) -> Step:
    def run(lane: Lane) -> Flow[None]:
        yield from fencing.proclaim(lane, value, (yield from pace_for(PATIENCE)))

    return run


def borrower(name: str, guard: Guard, *values: str, expect: int | Absent | None = None) -> Program:
    """Writes under a guard that it was handed."""

    def run() -> Flow[None]:
        for value in values:
            ids: list[str] = []
            pace = yield from pace_for(PATIENCE)
            try:
                flow = borrowing.write(guard, JOB, edit("k", value), expect, pace)
                committed = yield from tapped(flow, ids)
            except OutcomeUnknown:
                yield from Note(("write unknown", ids[0]))
            except EtcdFenceError:
                for one in ids:
                    yield from Note(("not written", one))
            else:
                yield from Note(("wrote", committed.write_id, committed.revision))

    return Program(name, run)
