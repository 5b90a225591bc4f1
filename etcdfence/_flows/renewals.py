"""Keeping a lease, and finding out how it was lost.

A renewal is a keepalive and then a look at the owner key: neither alone says that the lease is held. What a look
finds gone is asked for once more, elsewhere, and its reason with it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import islice
from typing import TYPE_CHECKING

from etcdfence import _timing, _txns
from etcdfence._flow import Flow
from etcdfence._flows.leases import Shared
from etcdfence._flows.pacing import Pace, pace_for, unanswered
from etcdfence._requests import Header, Instant, KeepAlive, Now, Range, TimeToLive
from etcdfence.errors import EtcdFenceError, OutcomeUnknown, Unavailable
from etcdfence.model import Doubt, Loss, LossReason

if TYPE_CHECKING:
    from etcdfence._flows.fencing import Lane

READS_PER_REQUEST = 100  # owner keys in one renewal read; etcd takes 128 operations
DIAGNOSES_PER_REQUEST = 20  # of five reads each


@dataclass(frozen=True, slots=True)
class Renewed:
    """etcd renewed the lease and, asked afterwards, named this tenure as the owner. `sent` is the local clock
    at the sending of the renewal."""

    sent: Instant


RenewalOutcome = Renewed | Doubt | Loss


def renew(
    lanes: Sequence[Lane], spare: Sequence[Shared], epoch_key: bytes, known: Header, limit: float
) -> Flow[list[RenewalOutcome]]:
    """One round for all leases that are due: a keepalive, and then linearizable reads of the owner keys and
    the epoch; the outcomes are in the order of `lanes`, and then of `spare`, which are sessions for themselves.

    Both are needed. A keepalive does not go through raft (a deposed leader was seen to renew a lease that had
    been revoked) and knows nothing of the owner key. A keepalive answered with TTL 0 is no proof either: it
    only means that the lease was not renewed, and the owner key decides.
    A lane that is quiet is not renewed, only read. `known` is what had been seen of the store before this round.
    """
    sent = yield from Now()
    ids = [lane.tenure.guard.lease_id for lane in lanes if not lane.quiet] + [one.lease_id for one in spare]
    ttls = (yield from KeepAlive(tuple(dict.fromkeys(ids)), limit)).ttls if ids else {}
    suspects: list[Lane] = []
    remaining = iter(lanes)
    while batch := list(islice(remaining, READS_PER_REQUEST)):
        reads = (Range(epoch_key), *(Range(lane.tenure.guard.owner_key) for lane in batch))
        reply = yield from _txns.reading(*reads, timeout=limit)
        if reply.header.older_than(known):
            reply = yield from replace(_txns.reading(*reads, timeout=limit), elsewhere=True)
            if reply.header.older_than(known):
                return [Loss(LossReason.STORE_RESTORED) for _ in (*lanes, *spare)]
        epoch = reply.reads[0].first
        for lane, found in zip(batch, reply.reads[1:], strict=True):
            evidence = _txns.Evidence(reply.header.revision, found.first, epoch, None, None, None)
            suspects += [] if evidence.guard_holds(lane.tenure.guard) else [lane]
    losses = yield from _diagnose_all(suspects, limit)
    sessions: list[RenewalOutcome] = []
    for one in spare:
        sessions += [(yield from _session_renewal(one, ttls, sent, limit))]
    return [losses.get(id(lane)) or _renewal(lane, ttls, sent) for lane in lanes] + sessions


def _renewal(lane: Lane, ttls: dict[int, int], sent: Instant) -> RenewalOutcome:
    if lane.quiet:
        return Doubt.SILENT
    return Renewed(sent) if ttls.get(lane.tenure.guard.lease_id, 0) > 0 else Doubt.NOT_RENEWED


def _session_renewal(one: Shared, ttls: dict[int, int], sent: Instant, limit: float) -> Flow[RenewalOutcome]:
    """No owner key says whether a session lives; what it is for is to be claimed with, which asks etcd."""
    if ttls.get(one.lease_id, 0) > 0:
        return Renewed(sent)
    try:
        lease = yield from TimeToLive(one.lease_id, timeout=limit)
    except EtcdFenceError:
        return Doubt.NOT_RENEWED
    return Doubt.NOT_RENEWED if lease.granted_ttl > 0 else _ran_out(sent, one.renewed_at, one.granted)


def went_back(epoch_key: bytes, known: Header, limit: float) -> Flow[bool]:
    """The second opinion on a reply that was older than what was known."""
    reply = yield from replace(_txns.reading(Range(epoch_key), timeout=limit), elsewhere=True)
    return reply.header.older_than(known)


def _diagnose_all(suspects: Sequence[Lane], limit: float) -> Flow[dict[int, RenewalOutcome | None]]:
    """How each suspect was lost, or None where it is not, by the identity of its lane. Whatever is not found out
    within `limit` stays in doubt until the next round: the other leases are waiting to be renewed."""
    found: dict[int, RenewalOutcome | None] = {id(lane): Doubt.UNREACHABLE for lane in suspects}
    pace = yield from pace_for(limit)
    for start in range(0, len(suspects), DIAGNOSES_PER_REQUEST):
        some = suspects[start : start + DIAGNOSES_PER_REQUEST]
        reads = [read for lane in some for read in lane.tenure.evidence_reads]
        try:
            reply = yield from replace(_txns.reading(*reads, timeout=limit), elsewhere=True)
            for n, lane in enumerate(some):
                evidence = _txns.Evidence.of(reply, 5 * n)
                found[id(lane)] = yield from _loss(lane, evidence, limit)
                now = yield from Now()
                if now.clock > pace.deadline:
                    return found
        except EtcdFenceError:
            return found
    return found


def diagnose(lane: Lane) -> Flow[Loss | None]:
    """Why a tenure is over. None: it is not, and whoever asked had been shown an old state."""
    reply = yield from replace(_txns.reading(*lane.tenure.evidence_reads), elsewhere=True)
    return (yield from _loss(lane, _txns.Evidence.of(reply)))


def _loss(lane: Lane, evidence: _txns.Evidence, limit: float | None = None) -> Flow[Loss | None]:
    """What the keys say of the end of a tenure, and where they are silent, the etcd lease and the clock.

    A lease that lives on means that the owner key alone was taken away. A lease that is gone before its TTL
    can have passed was revoked; later it may have been either, and is called expired.
    """
    tenure = lane.tenure
    if evidence.guard_holds(tenure.guard):
        return None
    loss = _txns.loss_seen(tenure.guard, tenure.attempt.attempt, evidence)
    if loss is None and (lane.ended or evidence.ended_by() in lane.unsettled):
        loss = Loss(LossReason.ENDED)
    if loss is not None:
        return loss
    lease = yield from TimeToLive(tenure.guard.lease_id, timeout=limit)
    if lease.granted_ttl > 0:
        return Loss(LossReason.TAKEN_AWAY)
    return _ran_out((yield from Now()), lane.renewed_at, tenure.granted)


def _ran_out(now: Instant, renewed_at: float, granted: int) -> Loss:
    early = _timing.surely_revoked(now.clock, renewed_at, granted)
    return Loss(LossReason.REVOKED if early else LossReason.EXPIRED)


def check(lane: Lane, pace: Pace) -> Flow[Loss | None]:
    """Ask etcd whether this tenure owns the task now: None, or how it was lost."""
    tenure = lane.tenure
    while True:
        try:
            reply = yield from _txns.reading(*tenure.evidence_reads)
        except (OutcomeUnknown, Unavailable) as error:
            yield from pace.again(unanswered(error))
        else:
            if _txns.Evidence.of(reply).guard_holds(tenure.guard):
                return None
            return (yield from diagnose(lane))
