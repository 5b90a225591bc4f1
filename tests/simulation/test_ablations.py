"""Each safeguard taken away: the explorer must then find a schedule that breaks the invariant it is there for.

A safeguard is a compare of a transaction, taken out on the wire, or a decision of a flow, replaced by the one
that looks good enough.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import pytest

from etcdfence import _txns
from etcdfence._flow import Flow
from etcdfence._flows import fencing, leases, renewals, tasks, turns, watching
from etcdfence._keys import prefix_end
from etcdfence._records import ValueRecord, read
from etcdfence._requests import Compare, Delete, FreshLeaseId, Grant, KeepAlive, Now, Put, Range, Target, Txn, Wait
from etcdfence.errors import LeaseExists, OutcomeUnknown, OwnershipRefused, Unavailable
from etcdfence.model import Verdict
from etcdfence.testing.explore import Fault, Invariant, Scenario, explore, replay

from . import scenarios as at
from .invariants import (
    CLAIMED_IN_TURN,
    CONFIRMED_IS_TRUE,
    CROWNED_BY_ETCD,
    DEFINITE,
    ENDS_ARE_TRUE,
    EXACTLY_ONCE,
    EXPECTATIONS_HOLD,
    FENCED,
    GRANTED_ONCE,
    HISTORY_STANDS,
    IN_ORDER,
    NO_GHOST,
    NO_GHOST_IN_LINE,
    NOBODY_SLEEPS,
    NOTHING_IS_MISSED,
    ONE_OWNER,
    ONE_TENURE,
    OVER_IS_OVER,
    PROTECTION_STAYS,
    TRIMMED_AS_READ,
)
from .programs import JOB, KEYS

Matching = Callable[[Txn, Compare], bool]
pytestmark = pytest.mark.deep


def compares(*keys: bytes, target: Target | None = None, operand: object = None) -> Matching:
    """Compares of these keys (or of keys below them, where they end in a slash)."""

    def match(_: Txn, compare: Compare) -> bool:
        return (
            any(compare.key == key or (key.endswith(b"/") and compare.key.startswith(key)) for key in keys)
            and target in (None, compare.target)
            and operand in (None, compare.operand)
        )

    return match


def only(of: Callable[[Txn], bool], match: Matching) -> Matching:
    return lambda txn, compare: of(txn) and match(txn, compare)


def claims(txn: Txn) -> bool:
    return any(isinstance(operation, Put) and operation.key == JOB.owner for operation in txn.success)


def enters(txn: Txn) -> bool:
    return any(isinstance(operation, Put) and operation.key.startswith(JOB.queue) for operation in txn.success)


K = KEYS.data("k")


def borrows(txn: Txn) -> bool:
    """A write without a marker."""
    puts = [operation.key for operation in txn.success if isinstance(operation, Put)]
    return K in puts and not any(key.startswith(JOB.markers) for key in puts)


def seals(txn: Txn) -> bool:
    return any(isinstance(operation, Put) and b'"sealed":true' in operation.value for operation in txn.success)


def marks_lost(txn: Txn) -> bool:
    return len(txn.compares) == 1 and any(
        isinstance(operation, Put) and b'"how":"lost"' in operation.value for operation in txn.success
    )


def trims(txn: Txn) -> bool:
    return txn.compares != () and not any(isinstance(operation, Put | Range) for operation in txn.success)


@dataclass(frozen=True)
class Ablation:
    """`match` says which compares are taken out; `faults`, `events` and `kinds` how far one has to look."""

    name: str
    scenario: Scenario
    breaks: Invariant
    match: Matching
    faults: int = 0
    events: int = 0

    def without(self, txn: Txn) -> Txn:
        return replace(txn, compares=tuple(one for one in txn.compares if not self.match(txn, one)))


COMPARES = [
    Ablation("claim: no owner", at.CLAIMS, ONE_OWNER, only(claims, compares(JOB.owner))),
    Ablation("claim: attempt never ran", at.CLAIMS, ONE_TENURE, only(claims, compares(JOB.attempts)), faults=1),
    Ablation("claim: not closed", at.COMPLETING, CLAIMED_IN_TURN, only(claims, compares(JOB.closed))),
    Ablation("claim: epoch", at.EPOCHS, CLAIMED_IN_TURN, only(claims, compares(KEYS.epoch))),
    Ablation("claim: nobody in line", at.LINE, CLAIMED_IN_TURN, only(claims, compares(JOB.queue))),
    Ablation(
        "claim: own place in line",
        at.THROWN_OUT_AND_PASSED,
        CLAIMED_IN_TURN,
        only(claims, lambda txn, compare: compares(JOB.queue)(txn, compare) and not compare.range_end),
    ),
    Ablation(
        "line: attempt never ran", at.OWNS_AND_STAYS, NO_GHOST_IN_LINE, only(enters, compares(JOB.attempts)), 1
    ),
    Ablation("line: epoch", at.CLOSED_MEANWHILE, NO_GHOST_IN_LINE, only(enters, compares(KEYS.epoch))),
    Ablation("borrowed: guard", at.BORROWED, FENCED, only(borrows, compares(JOB.owner)), events=1),
    Ablation("borrowed: the key as read", at.BORROWED_CREATE, EXPECTATIONS_HOLD, only(borrows, compares(K))),
    Ablation("claim: not reserved", at.LINE, CLAIMED_IN_TURN, only(claims, compares(JOB.reserve))),
    Ablation("seal: attempt never ran", at.CLAIMS, HISTORY_STANDS, only(seals, compares(JOB.attempts)), 1, 1),
    Ablation("mark lost: as it was read", at.LOSING, HISTORY_STANDS, only(marks_lost, compares(JOB.attempts)), 1),
    Ablation("guard: revision", at.FOREIGN_HAND, FENCED, compares(JOB.owner, target=Target.MOD)),
    Ablation("guard: lease", at.RESTORED, FENCED, compares(JOB.owner, target=Target.LEASE)),
    Ablation("guard: epoch", at.EPOCHS, FENCED, compares(KEYS.epoch, target=Target.VALUE)),
    Ablation("write marker, once", at.WRITES, EXACTLY_ONCE, compares(JOB.markers), faults=1),
    Ablation("write marker, in order", at.WRITES, IN_ORDER, compares(JOB.markers), faults=1),
    Ablation("expect=ABSENT", at.EXPECTATIONS, EXPECTATIONS_HOLD, compares(KEYS.family("data"))),
    Ablation("complete: not closed", at.CANCELLED_TASK, HISTORY_STANDS, compares(JOB.closed)),
    Ablation("complete: the record", at.COMPLETING, EXPECTATIONS_HOLD, compares(JOB.record)),
    Ablation("complete: no open effects", at.COMPLETING, EXPECTATIONS_HOLD, compares(JOB.open)),
    Ablation(
        "known to be over",
        at.TOLD_AND_RESTORED,
        OVER_IS_OVER,
        lambda txn, compare: not claims(txn) and not seals(txn) and compares(JOB.attempts)(txn, compare),
    ),
    Ablation("refusal: first", at.REFUSALS, HISTORY_STANDS, compares(JOB.refusals, operand=0), faults=1),
    Ablation("refusal: next", at.REFUSALS, HISTORY_STANDS, compares(JOB.refusals, target=Target.MOD), faults=1),
    Ablation("epoch: founded once", at.LOOKING, HISTORY_STANDS, compares(KEYS.epoch, target=Target.CREATE)),
    Ablation("trim: as it was read", at.TRIMMING, TRIMMED_AS_READ, only(trims, compares(JOB.refusals))),
]


@pytest.mark.parametrize("ablation", COMPARES, ids=lambda one: one.name)
def test_without_a_compare(ablation: Ablation) -> None:
    looked = replace(
        ablation.scenario, faults=ablation.faults, events=ablation.events, invariants=(ablation.breaks,)
    )
    ablated = replace(looked, without=ablation.without)
    found = explore(ablated, most_states=300_000).violation
    assert found is not None and found.invariant == ablation.breaks.name
    again, _ = replay(ablated, found.schedule)
    assert again is not None and again.what == found.what


# --- decisions ---------------------------------------------------------------------------------------------


def nobodys(*_: object) -> None:
    """What is found under the own attempt's name is not taken for the own tenure."""


def seal_by_reading(ask: _txns.Claim, _pace: object) -> Flow[None]:
    yield from _txns.reading(Range(ask.attempt_key))


def settle_by_reading(lane: fencing.Lane, _pace: object) -> Flow[None]:
    reply = yield from _txns.reading(*lane.tenure.evidence_reads)
    marker = reply.reads[2].first
    if marker is None or marker.mod_revision == lane.seen:
        lane.decide(Verdict.NOT_APPLIED)


def grant_again(bid: leases.Bid, ttl: int, pace: Any) -> Flow[None]:
    lease_id = yield from FreshLeaseId()
    bid.lease_ids.append(lease_id)
    while True:
        try:
            reply = yield from Grant(lease_id, ttl)
        except LeaseExists:
            bid.granted = ttl
            return
        except (OutcomeUnknown, Unavailable) as error:
            yield from pace.again(error)
        else:
            bid.granted = reply.ttl
            return


def believe_the_keepalive(lanes: Any, *_: object) -> Flow[list[Any]]:
    sent = yield from Now()
    yield from KeepAlive(tuple(lane.tenure.guard.lease_id for lane in lanes), 1.0)
    return [renewals.Renewed(sent) for _ in lanes]


def protects_nothing(_: object) -> Flow[bool]:
    yield from Now()
    return True


def never_doubtful(bid: leases.Bid, *rest: Any) -> _txns.Tenure:
    bid.doubtful = False
    return TENURE(bid, *rest)


def not_over(lane: fencing.Lane, change: _txns.Change, pace: Any) -> Any:
    lane.over = False
    return COMMIT(lane, change, pace)


def with_every_marker(found: Any, *also: bytes) -> Txn:
    """Trims the markers of attempts that stay, too."""
    txn = REMOVE(found, *also)
    return replace(txn, success=(*txn.success, Delete(JOB.markers, prefix_end(JOB.markers))))


def content(lane: fencing.Lane, change: _txns.Change, pace: Any) -> Any:
    """An ending that is refused is taken for one that happened."""
    try:
        return (yield from COMMIT(lane, change, pace))
    except OwnershipRefused:
        lane.ended = change.ends
        return fencing.Committed(0, change.write_id), None


def stamped_late(lane: fencing.Lane, ttls: Any, sent: Any) -> Any:
    return renewals.Renewed(replace(sent, clock=sent.clock + 1))


def believe_the_watch(bid: leases.Bid, ask: _txns.Claim, _pace: Any) -> Flow[Any]:
    """Whoever is woken takes the task for its own."""
    yield from Now()
    return _txns.Won(9, 1, None, None)


def always_my_turn(taken: _txns.Taken) -> bool:
    return bool(taken.place) and not (taken.owner or taken.reserved)


def enter_for_good(ask: _txns.Claim) -> Txn:
    """An entry that does not end with its waiter."""
    return ENTER(replace(ask, wait_lease=0))


def leave_by_looking(bid: leases.Bid, answer: Any, _pace: Any) -> Flow[None]:
    """What went unanswered is left to itself."""
    yield from _txns.reading(Range(bid.present.attempt_key))
    yield from _txns.leave(bid.present)
    bid.settled()


def leave_it(*_: object) -> Flow[None]:
    yield from Now()


def listen_from_now(keys: Any, task: Any, before: Any, pace: Any) -> Flow[Any]:
    """Waits for what happens after it has asked, and misses what happened before."""
    present = yield from watching.look(keys, task, pace)
    yield from Wait(task.owner, present.revision + 1, 30.0, puts=True)
    return (yield from watching.look(keys, task, pace))


def any_value(_owner: Any, kv: Any) -> str | None:
    record = read(ValueRecord, kv) if kv else None
    return record.value if isinstance(record, ValueRecord) else None


REMOVE, ENTER = _txns.remove, _txns.enter
TWO_FAULTS = replace(
    at.RIVALS, kinds=frozenset({Fault.DELAYED, Fault.LOST_REPLY, Fault.LOST_REQUEST, Fault.PAUSED})
)
TENURE, COMMIT = leases.tenure_of, fencing.commit
DECISIONS = [
    ("adopting the own claim", _txns, "_mine", nobodys, TWO_FAULTS, DEFINITE, 2, 0),
    ("sealing a claim before it is refused", leases, "seal", seal_by_reading, TWO_FAULTS, DEFINITE, 2, 0),
    ("sealing a write before it is refused", fencing, "seal", settle_by_reading, at.EXPECTATIONS, DEFINITE, 1, 0),
    ("settling by a committed transaction", fencing, "seal", settle_by_reading, at.SETTLING, DEFINITE, 1, 0),
    ("a grant is not repeated", leases, "grant", grant_again, at.CLAIMS, GRANTED_ONCE, 1, 0),
    ("renewal reads the owner", renewals, "renew", believe_the_keepalive, at.RENEWALS, CONFIRMED_IS_TRUE, 0, 1),
    (
        "records that protect stay",
        tasks,
        "_no_longer_protects",
        protects_nothing,
        at.TRIMMING,
        PROTECTION_STAYS,
        0,
        0,
    ),
    ("a doubtful claim is recorded as such", leases, "tenure_of", never_doubtful, at.DOUBTFUL, ONE_TENURE, 1, 0),
    ("a marker goes with its attempt", _txns, "remove", with_every_marker, at.MARKERS, EXACTLY_ONCE, 1, 0),
    ("an ending is reported when it was applied", tasks, "commit", content, at.OPERATOR, ENDS_ARE_TRUE, 0, 0),
    (
        "a renewal counts from its sending",
        renewals,
        "_renewal",
        stamped_late,
        at.RENEWALS,
        CONFIRMED_IS_TRUE,
        1,
        0,
    ),
    ("a watch is no proof", leases, "answer_to", believe_the_watch, at.IN_LINE, CROWNED_BY_ETCD, 0, 1),
    (
        "only the first in line claims",
        _txns.Taken,
        "my_turn",
        property(always_my_turn),
        at.BEHIND,
        CLAIMED_IN_TURN,
        0,
        0,
    ),
    ("an entry ends with its waiter", _txns, "enter", enter_for_good, at.CRASHED_IN_LINE, NOBODY_SLEEPS, 0, 2),
    ("leaving settles what is open", turns, "_settle", leave_by_looking, at.GIVING_UP_LATE, DEFINITE, 1, 2),
    ("a tenure that was given up is ended", turns, "_end", leave_it, at.GIVING_UP_FREE, NO_GHOST, 1, 0),
    (
        "an observer asks from where it looked",
        watching,
        "next_look",
        listen_from_now,
        at.OBSERVING,
        NOTHING_IS_MISSED,
        0,
        0,
    ),
    ("a lost handle stays lost", fencing, "commit", not_over, at.TOLD_AND_RESTORED, OVER_IS_OVER, 0, 0),
]


@pytest.mark.parametrize(
    ("module", "name", "instead", "scenario", "breaks", "faults", "events"),
    [row[1:] for row in DECISIONS],
    ids=[str(row[0]) for row in DECISIONS],
)
def test_without_a_decision(
    monkeypatch: pytest.MonkeyPatch,
    module: Any,
    name: str,
    instead: Any,
    scenario: Scenario,
    breaks: Invariant,
    faults: int,
    events: int,
) -> None:
    looked = replace(scenario, faults=faults, events=events, invariants=(breaks,))
    assert explore(looked, most_states=300_000).violation is None
    monkeypatch.setattr(module, name, instead)
    found = explore(looked, most_states=300_000).violation
    assert found is not None and found.invariant == breaks.name
    again, _ = replay(looked, found.schedule)
    assert again is not None and again.what == found.what
