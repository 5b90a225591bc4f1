"""The Lease and the Coordinator as their users know them, on a real etcd."""

from __future__ import annotations

import dataclasses
import inspect
import json
import threading
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest

import etcdfence
from etcdfence import (
    ABSENT,
    Closed,
    Conflict,
    Coordinator,
    Held,
    LeaseLost,
    LeaseReleased,
    LossReason,
    Misuse,
    NotFound,
    Standing,
    Superseded,
    TaskClosed,
    TaskKey,
    TaskState,
    TooLarge,
    UnresolvedEffects,
)

from ..support.raw import Raw
from ..support.waiting import eventually

Connect = Callable[..., Coordinator]
KEY = TaskKey("notify", "shipment-42")


# --- owning ------------------------------------------------------------------------------------------------


@pytest.mark.req("promise-1", "S0-14", "S0-18", "S2-11", "S2-14", "S0-13")
def test_a_claim_gives_a_receipt_that_the_store_confirms(
    coordinator: Coordinator, connect: Connect, raw: Raw
) -> None:
    lease = coordinator.try_acquire("job", ttl=30, holder="worker-1")
    kv = raw.get(coordinator._engine.keys.task("job").owner)
    receipt = lease.receipt
    assert (receipt.task, receipt.holder, receipt.token.generation) == ("job", "worker-1", kv.mod_revision)
    assert (receipt.lease_id, receipt.revision) == (kv.lease, kv.mod_revision)
    assert receipt.cluster_id == connect().members()[0].cluster_id
    assert receipt.claimed_at.startswith("20")
    reader = connect()
    seen = reader.describe("job")
    assert (seen.task, seen.generation, seen.state) == ("job", lease.generation, TaskState.OWNED)
    assert seen.owner is not None and seen.owner.holder == "worker-1"
    assert seen.expires_in is not None and 25 <= seen.expires_in <= 30
    assert seen.revision >= kv.mod_revision


@pytest.mark.req("promise-1", "S0-10", "S0-14")
def test_generations_rise_over_every_way_of_ending(connect: Connect, raw: Raw) -> None:
    generations: list[int] = []

    def own(end: Callable[[etcdfence.Lease], object]) -> None:
        coordinator = connect()
        lease = coordinator.acquire("job", ttl=2, wait=10)
        generations.append(lease.generation)
        end(lease)

    own(lambda lease: lease.release())
    own(lambda lease: lease.fail("try again"))
    own(lambda lease: lease.abandon())
    own(lambda lease: raw.revoke(lease.receipt.lease_id))
    own(lambda lease: raw.delete(lease._tenure.keys.owner))
    own(lambda lease: lease._engine.close(lease._belief.deadline))
    own(lambda lease: lease.release())
    assert generations == sorted(set(generations))


@pytest.mark.req("S0-14", "S2-10", "P-3")
def test_a_held_task_says_by_whom(coordinator: Coordinator, connect: Connect) -> None:
    lease = coordinator.try_acquire("job", holder="worker-1")
    with pytest.raises(Held) as ours:
        coordinator.try_acquire("job", holder="worker-2")
    assert ours.value.mine
    with pytest.raises(Held) as theirs:
        connect().acquire("job", wait=0.2)
    assert not theirs.value.mine
    assert theirs.value.owner is not None
    assert (theirs.value.owner.holder, theirs.value.owner.generation) == ("worker-1", lease.generation)
    assert "no new attempt was begun" in str(theirs.value)


@pytest.mark.field(73)
@pytest.mark.req("S2-19")
def test_a_name_decides_nothing(connect: Connect, raw: Raw, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two workers with one name, one host and one pid, as cloned machines have."""
    first, second = connect(holder="worker"), connect(holder="worker")
    assert first._identity == second._identity
    lease = first.try_acquire("job")
    with pytest.raises(Held) as held:
        second.try_acquire("job")
    assert held.value.namesake
    assert not held.value.mine
    assert "another worker under the same name" in str(held.value)
    raw.delete(first._engine.keys.task("job").owner)
    successor = second.try_acquire("job")
    with pytest.raises(Superseded):
        lease.put("k", "v")
    successor.put("k", "v")


def test_waiting_for_a_loss_ends_with_the_lease(coordinator: Coordinator) -> None:
    """A watcher thread must not wait for ever for the loss of a lease that was given back."""
    for end in ("release", "abandon"):
        lease = coordinator.acquire(f"job-{end}", ttl=2)
        said: list[etcdfence.Loss | None] = []
        thread = threading.Thread(target=lambda lease=lease, said=said: said.append(lease.wait_lost()))
        thread.start()
        getattr(lease, end)()
        thread.join(10)
        assert said == [None]


def test_a_tombstone_that_cannot_be_read_still_closes(coordinator: Coordinator, raw: Raw) -> None:
    raw.put(coordinator._engine.keys.task(KEY).closed, b'{"format":2}')
    with pytest.raises(TaskClosed, match="cannot be read"):
        coordinator.acquire(KEY)
    found = coordinator.describe(KEY)
    assert found.state is TaskState.FAILED
    assert "ClosedRecord" in found.unreadable[0]


@pytest.mark.req("P-35")
def test_namespaces_do_not_see_each_other(connect: Connect, namespace: str) -> None:
    here, there = connect(), connect(namespace=f"{namespace}-2")
    lease = here.try_acquire("job")
    with there.try_acquire("job") as other:
        other.put("k", "there")
        lease.put("k", "here")
    assert here.get("k").value == b"here"
    assert [task.task for task in there.tasks()] == ["job"]
    assert here.describe("job").state is TaskState.OWNED
    assert there.describe("job").state is TaskState.WAITING


@pytest.mark.field(23)
@pytest.mark.req("promise-1")
def test_a_busy_store_makes_no_false_refusals(coordinator: Coordinator, raw: Raw) -> None:
    """Another client moves the store's revision all the time; only the owner key's own counts."""
    stop, written = threading.Event(), [0]

    def noise() -> None:
        while not stop.is_set():
            raw.put(b"/noise", b"%d" % written[0])
            written[0] += 1

    thread = threading.Thread(target=noise)
    thread.start()
    try:
        for n in range(200):
            with coordinator.try_acquire("job") as lease:
                assert raw.get(coordinator._engine.keys.task("job").owner).mod_revision == lease.generation
                lease.put("k", str(n))
    finally:
        stop.set()
        thread.join(10)
    assert written[0] > 100
    assert coordinator.get("k").value == b"199"


@pytest.mark.field(25, 5)
@pytest.mark.req("promise-1")
def test_the_token_never_moves_under_its_owner(coordinator: Coordinator, raw: Raw) -> None:
    """Every call of the owner leaves the owner key as the claim made it, on the same etcd lease."""
    lease = coordinator.acquire(KEY, ttl=2)
    owner = coordinator._engine.keys.task(KEY).owner

    def untouched() -> None:
        kv = raw.get(owner)
        assert (kv.mod_revision, kv.version, kv.lease) == (lease.generation, 1, lease.receipt.lease_id)

    renewed = lease._belief.renewed_at

    def claim_again() -> None:
        with pytest.raises(Held):
            coordinator.try_acquire(KEY)

    calls: list[Callable[[], object]] = [
        lambda: lease.put("k", "v"),
        lambda: lease.get("k"),
        lambda: lease.delete("k"),
        lambda: lease.transaction().__enter__(),
        lease.check,
        lease.guard,
        lambda: lease.wait_lost(0),
        lambda: coordinator.describe(KEY),
        claim_again,
        lambda: eventually("a renewal", lambda: lease._belief.renewed_at > renewed),
    ]
    for call in calls:
        call()
        untouched()
    raw.put(owner, raw.get(owner).value, raw.get(owner).lease)  # a foreign hand on the owner key
    with pytest.raises((Superseded, LeaseLost)):
        lease.put("k", "v")
    assert lease.loss is not None
    raw.delete(owner)


# --- writing -----------------------------------------------------------------------------------------------


def test_expectations(coordinator: Coordinator) -> None:
    lease = coordinator.acquire("job")
    assert coordinator.get("k") == etcdfence.Entry("k", None, ABSENT)
    made = lease.put("k", "1", expect=ABSENT)
    entry = lease.get("k")
    assert (entry.value, entry.revision) == (b"1", made.revision)
    moved = lease.put("k", b"2", expect=entry.revision)
    for expect in (ABSENT, entry.revision):
        with pytest.raises(Conflict) as conflict:
            lease.put("k", "3", expect=expect)
        assert conflict.value.changed == ("k",)
        with pytest.raises(Conflict):
            lease.delete("k", expect=expect)
    assert lease.get("k").value == b"2"
    lease.delete("k", expect=moved.revision)
    lease.delete("k", expect=ABSENT)
    assert lease.get("k").revision is ABSENT


@pytest.mark.req("P-15")
def test_several_keys_change_together_or_not_at_all(coordinator: Coordinator, raw: Raw) -> None:
    lease = coordinator.acquire("job")
    lease.put("stock", "5")
    with lease.transaction() as tx:
        left = int((tx.get("stock").value or b"0").decode()) - 1
        tx.put("stock", str(left))
        tx.put("order/1", "reserved", expect=ABSENT)
        tx.delete("basket/1")
    assert tx.committed is not None
    assert coordinator.get("stock").revision == coordinator.get("order/1").revision == tx.committed.revision
    with pytest.raises(Conflict) as conflict, lease.transaction() as tx:
        tx.get("stock")
        tx.put("stock", "3")
        tx.put("order/1", "again", expect=ABSENT)
        raw.put(coordinator._engine.keys.data("stock"), b"a stranger's")
    assert set(conflict.value.changed) == {"stock", "order/1"}
    assert coordinator.get("order/1").value == b"reserved"
    with pytest.raises(ZeroDivisionError), lease.transaction() as tx:
        tx.put("order/2", "x")
        raise ZeroDivisionError
    assert coordinator.get("order/2").value is None


@pytest.mark.req("promise-2")
def test_provenance_is_believed_only_for_its_own_revision(coordinator: Coordinator, raw: Raw) -> None:
    lease = coordinator.acquire("job")
    written = lease.put("k", "v")
    provenance = coordinator.get("k").provenance
    assert provenance is not None
    assert (provenance.task, provenance.generation, provenance.attempt, provenance.write_id) == (
        "job",
        lease.generation,
        lease.attempt,
        written.write_id,
    )
    raw.put(coordinator._engine.keys.data("k"), b"around the fence")
    assert coordinator.get("k").provenance is None
    odd = '"write":"WRITE" 100% "at":"AT"'
    coordinator.acquire(odd).put("odd", "v")
    provenance = coordinator.get("odd").provenance
    assert provenance is not None
    assert (provenance.task, len(provenance.write_id)) == (odd, 32)
    coordinator.acquire("WRITE").put("odd", "v")
    assert coordinator.get("odd").provenance.task == "WRITE"  # type: ignore[union-attr]


@pytest.mark.req("P-35")
def test_a_data_prefix_fences_keys_that_others_know(connect: Connect, raw: Raw, namespace: str) -> None:
    coordinator = connect(data_prefix=f"/registry-{namespace}/")
    coordinator.acquire("job").put("pods/a", "running")
    assert raw.get(f"/registry-{namespace}/pods/a".encode()).value == b"running"
    with pytest.raises(Misuse):
        connect(data_prefix="/").acquire("other").put(f"etcdfence/{namespace}/owner/job", "mine now")


# --- losing and leaving ------------------------------------------------------------------------------------


@pytest.mark.req("S0-9", "promise-2")
def test_a_stale_write_is_refused_with_both_generations_and_leaves_a_record(
    coordinator: Coordinator, connect: Connect, raw: Raw, caplog: pytest.LogCaptureFixture
) -> None:
    stale = coordinator.acquire("job")
    stale.put("result", "first")
    raw.delete(coordinator._engine.keys.task("job").owner)
    successor_coordinator = connect()
    successor = successor_coordinator.acquire("job")
    written = successor.put("result", "B's")
    before = raw.get(coordinator._engine.keys.data("result"))
    for n in range(7):
        with pytest.raises(Superseded) as refused:
            stale.put("result", f"stale {n}")
        assert (refused.value.generation, refused.value.current) == (stale.generation, successor.generation)
    after = raw.get(coordinator._engine.keys.data("result"))
    assert (after.value, after.mod_revision) == (before.value, written.revision)
    (refusal,) = successor_coordinator.describe("job").refusals
    assert (refusal["generation"], refusal["count"], len(refusal["tries"])) == (stale.generation, 7, 5)
    assert refusal["tries"][-1]["keys"] == ("result",)
    assert refusal["tries"][-1]["current"] == successor.generation
    assert f"lost job (generation {stale.generation}): superseded" in caplog.text


@pytest.mark.req("S0-9")
def test_superseded_is_known_even_after_the_successor_has_gone(
    coordinator: Coordinator, connect: Connect, raw: Raw
) -> None:
    stale = coordinator.acquire("job")
    raw.delete(coordinator._engine.keys.task("job").owner)
    with connect().acquire("job") as successor:
        pass
    with pytest.raises(Superseded) as refused:
        stale.put("k", "v")
    assert refused.value.current == successor.generation


@pytest.mark.field(20)
@pytest.mark.req("P-3")
def test_leaving_the_block(connect: Connect, raw: Raw) -> None:
    coordinator = connect()
    owner = coordinator._engine.keys.task("job").owner

    with pytest.raises(ValueError, match="the body's own") as raised, coordinator.acquire("job") as lease:
        raw.revoke(lease.receipt.lease_id)
        raise ValueError("the body's own")
    assert any("is over (revoked)" in note for note in raised.value.__notes__)

    with pytest.raises(LeaseLost), coordinator.acquire("job") as lease:
        raw.revoke(lease.receipt.lease_id)

    with pytest.raises(ValueError, match="still held") as raised, coordinator.acquire("job") as lease:
        raise ValueError("still held")
    assert not hasattr(raised.value, "__notes__")
    assert raw.get(owner) is None
    assert raw.ttl(lease.receipt.lease_id) <= 0


@pytest.mark.req("P-3")
def test_release_frees_nobody_elses_task(coordinator: Coordinator, connect: Connect, raw: Raw) -> None:
    stale = coordinator.acquire("job")
    raw.delete(coordinator._engine.keys.task("job").owner)
    successor = connect().acquire("job")
    for end in (stale.release, lambda: stale.fail("late")):
        with pytest.raises((Superseded, LeaseReleased)):
            end()
    successor.check()
    stale.release()  # given back already: no error, no request
    successor.put("k", "v")


@pytest.mark.req("P-3")
def test_a_dropped_handle_touches_no_successor(connect: Connect, raw: Raw) -> None:
    coordinator = connect()
    lease = coordinator.acquire("job", ttl=2)
    belief = lease._belief
    raw.delete(coordinator._engine.keys.task("job").owner)
    successor = connect().acquire("job")
    del lease
    assert belief.released
    eventually("nobody renews it any more", lambda: belief not in coordinator._engine.renewer._leases)
    successor.check()


def test_a_dropped_handle_is_not_renewed(connect: Connect, raw: Raw) -> None:
    coordinator = connect()
    coordinator.acquire("job", ttl=2)
    eventually("its owner key has gone", lambda: raw.get(coordinator._engine.keys.task("job").owner) is None, 6)


def test_release_and_abandon(coordinator: Coordinator, raw: Raw) -> None:
    lease = coordinator.acquire("job", ttl=2)
    lease.release()
    lease.release()
    assert lease.standing is Standing.RELEASED
    assert lease.expires_in == 0
    for call in (
        lease.check,
        lease.guard,
        lambda: lease.put("k", "v"),
        lease.transaction().commit,
    ):
        with pytest.raises((LeaseReleased, Misuse)):
            call()
    assert coordinator.describe("job").state is TaskState.WAITING
    abandoned = coordinator.acquire("job", ttl=2)
    abandoned.abandon()
    assert raw.get(coordinator._engine.keys.task("job").owner) is not None
    eventually("it ran out", lambda: raw.get(coordinator._engine.keys.task("job").owner) is None, 6)
    assert coordinator.describe("job").state is TaskState.STALLED


# --- finishing ---------------------------------------------------------------------------------------------


def test_complete_closes_a_task_for_good(coordinator: Coordinator, raw: Raw) -> None:
    with coordinator.acquire(KEY) as lease:
        written = lease.put("mail", "sent")
        lease.complete({"mails": 1}, {"revision": written.revision})
    found = coordinator.describe(KEY)
    assert (found.state, found.result, found.owner) == (TaskState.COMPLETED, {"mails": 1}, None)
    assert found.last_attempt is not None and found.last_attempt.ended == "completed"
    with pytest.raises(TaskClosed) as closed:
        coordinator.acquire(KEY)
    assert (closed.value.state, closed.value.result) == ("completed", {"mails": 1})
    with coordinator.acquire(TaskKey("notify", "shipment-42", 2)):
        pass
    record = json.loads(raw.get(coordinator._engine.keys.task(KEY).record).value)
    assert (record["operation"], record["scope"], record["version"]) == ("notify", "shipment-42", 1)


def test_fail_makes_ready_or_closes(coordinator: Coordinator) -> None:
    coordinator.acquire(KEY).fail("the printer is on fire")
    found = coordinator.describe(KEY)
    assert found.state is TaskState.WAITING
    assert found.last_attempt is not None
    assert (found.last_attempt.ended, found.last_attempt.reason) == ("failed", "the printer is on fire")
    coordinator.acquire(KEY).fail("no such shipment", retry=False)
    assert coordinator.describe(KEY).state is TaskState.FAILED
    with pytest.raises(TaskClosed) as closed:
        coordinator.try_acquire(KEY)
    assert closed.value.state == "failed"


def test_a_lock_never_closes(coordinator: Coordinator) -> None:
    lease = coordinator.acquire("job")
    with pytest.raises(Misuse):
        lease.complete({}, {"revision": 1})
    with pytest.raises(Misuse):
        lease.fail("no", retry=False)
    lease.check()


def test_complete_keeps_what_others_put_into_the_record(coordinator: Coordinator, raw: Raw) -> None:
    """The record changes between claim and complete; fields of a newer version survive."""
    lease = coordinator.acquire(KEY)
    record = coordinator._engine.keys.task(KEY).record
    raw.put(
        record, b'{"format":1,"operation":"notify","scope":"shipment-42","version":1,"payload":{"a":1},"new":2}'
    )
    lease.complete("done", {"revision": 1})
    found = json.loads(raw.get(record).value)
    assert (found["payload"], found["new"], found["result"]) == ({"a": 1}, 2, "done")


def test_a_record_of_a_newer_format_is_left_alone(coordinator: Coordinator, raw: Raw) -> None:
    record = coordinator._engine.keys.task(KEY).record
    raw.put(record, b'{"format":2,"secret":"of a newer version"}')
    lease = coordinator.acquire(KEY)
    with pytest.raises(etcdfence.EtcdFenceError, match="written in format 2"):
        lease.complete("done", {"revision": 1})
    assert raw.get(record).value == b'{"format":2,"secret":"of a newer version"}'
    lease.release()


def test_unresolved_effects_block_completion(coordinator: Coordinator, raw: Raw) -> None:
    lease = coordinator.acquire(KEY)
    raw.put(coordinator._engine.keys.task(KEY).open + b"charge", b"{}")
    with pytest.raises(UnresolvedEffects) as refused:
        lease.complete("done", {"revision": 1})
    assert refused.value.effects == ("charge",)
    lease.check()
    raw.delete(coordinator._engine.keys.task(KEY).open + b"charge")
    lease.complete("done", {"revision": 1})


def test_a_thousand_tenures_leave_a_bounded_number_of_keys(coordinator: Coordinator, raw: Raw) -> None:
    for n in range(1000):
        with coordinator.acquire("lock") as lease:
            if n % 10 == 0:
                lease.put("k", "v")
    prefix = coordinator._engine.keys.root.encode()
    keys = raw.below(prefix)
    assert len(keys) <= 2 * 30 + 10, keys
    assert not [key for key in keys if b"/marker/" in key or b"/owner/" in key]
    found = coordinator.describe("lock")
    assert found.last_attempt is not None and found.last_attempt.ended == "released"


def test_what_protects_against_a_late_request_is_not_trimmed(coordinator: Coordinator, raw: Raw) -> None:
    """Attempts that are sealed, unended or doubtful stay while their etcd lease lives, with their markers."""
    holding = coordinator.acquire("elsewhere", ttl=60)
    alive = holding.receipt.lease_id
    keys = coordinator._engine.keys.task("lock")
    base = {"format": 1, "holder": "h", "host": "h", "pid": 1, "started": "2026-01-01T00:00:00.000+00:00"}
    kept = {"sealed": {"sealed": True}, "unended": {}, "doubtful": {"doubtful": True, "ended": _end()}}
    for name, more in kept.items():
        raw.put(keys.attempt(name), json.dumps({**base, "attempt": name, "lease": f"{alive:x}", **more}).encode())
        raw.put(keys.marker(raw.get(keys.attempt(name)).create_revision), b"a write id")
    raw.put(keys.attempt("dead"), json.dumps({**base, "attempt": "dead", "lease": "1", "sealed": True}).encode())
    for _ in range(45):
        coordinator.acquire("lock").release()
    present = raw.below(keys.attempts)
    assert {keys.attempt(name) for name in kept} <= set(present)
    assert keys.attempt("dead") not in present
    assert len(raw.below(keys.markers)) == len(kept)


def _end() -> dict[str, Any]:
    return {"how": "released", "at": "2026-01-01T00:00:00.000+00:00", "write": "w", "generation": 1}


# --- reading -----------------------------------------------------------------------------------------------


def test_states_are_told_apart(coordinator: Coordinator, raw: Raw) -> None:
    waiting, owned, stalled, done = (TaskKey("op", name) for name in ("waiting", "owned", "stalled", "done"))
    coordinator.acquire(waiting).release()
    lease = coordinator.acquire(owned)
    gone = coordinator.acquire(stalled)
    raw.revoke(gone.receipt.lease_id)
    coordinator.acquire(done).complete(1, {"revision": 1})
    raw.put(coordinator._engine.keys.family("owner") + b"a:stray:key:with:colons", b"not ours")
    raw.put(coordinator._engine.keys.family("last") + b"unreadable", b"not JSON")
    found = {task.task: task.state for task in coordinator.tasks()}
    assert found == {
        "op:waiting:v1": TaskState.WAITING,
        "op:owned:v1": TaskState.OWNED,
        "op:stalled:v1": TaskState.STALLED,
        "op:done:v1": TaskState.COMPLETED,
        "unreadable": TaskState.WAITING,
    }
    assert [task.task for task in coordinator.tasks(owned_only=True)] == ["op:owned:v1"]
    assert "not a AttemptRecord" in coordinator.describe("unreadable").unreadable[0]
    lease.release()


def test_nothing_is_recorded(coordinator: Coordinator) -> None:
    with pytest.raises(NotFound):
        coordinator.describe("never heard of")


@pytest.mark.field(37)
def test_stray_keys_stop_nobody(coordinator: Coordinator, raw: Raw) -> None:
    """Keys by hand, without lease or sense, at every level of the key space."""
    keys = coordinator._engine.keys
    job = keys.task("job")
    prefixes = [keys.root.encode(), job.attempts, job.markers, job.refusals, job.histories, job.open]
    families = ["owner", "last", "closed", "task", "attempt", "marker", "refusal", "history", "data", "provenance"]
    for prefix in (*prefixes, *map(keys.family, families)):
        for stray in (b"", b"stray", b"a/b/c", b"%zz", b"\xff\xfe"):
            raw.put(prefix + stray, b"\x00not ours")
    with coordinator.acquire("job") as lease:
        lease.put("k", "v")
        assert coordinator.describe("job").state is TaskState.OWNED
        assert "job" in [task.task for task in coordinator.tasks()]
        assert [task.task for task in coordinator.tasks(owned_only=True) if task.task != "stray"] == ["job"]
    for _ in range(35):
        coordinator.acquire("job").release()
    assert raw.get(job.attempts + b"stray") is not None  # nobody knows what it is, so nobody deletes it


# --- at once -----------------------------------------------------------------------------------------------


@pytest.mark.req("S2-77", "S2-84")
@pytest.mark.field(79)
def test_of_many_that_claim_at_once_one_owns(connect: Connect) -> None:
    """Released by one barrier, some of one process and some of others; the losers hear who won."""
    coordinators = [connect() for _ in range(4)]
    for n in range(10):
        outcomes = at_once([lambda one=one, n=n: one.try_acquire(f"job-{n}", ttl=60) for one in coordinators * 2])
        won = [one for one in outcomes if not isinstance(one, Exception)]
        assert len(won) == 1
        lost = [one for one in outcomes if isinstance(one, Held)]
        assert len(lost) == 7
        assert {error.owner.generation for error in lost if error.owner} == {won[0].generation}
        won[0].release()


def at_once(actions: list[Callable[[], Any]]) -> list[Any]:
    barrier, outcomes = threading.Barrier(len(actions)), list[Any]()

    def run(action: Callable[[], Any]) -> None:
        barrier.wait(10)
        try:
            outcomes.append(action())
        except Exception as error:  # the test looks at it
            outcomes.append(error)

    threads = [threading.Thread(target=run, args=(action,)) for action in actions]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert len(outcomes) == len(actions)
    return outcomes


@pytest.mark.field(83)
@pytest.mark.req("S2-84")
def test_two_agents_on_one_run_leave_one_line_of_checkpoints(connect: Connect, raw: Raw) -> None:
    """Both start within moments, twenty times; and one that is overtaken at its fourth checkpoint."""
    agents = [connect(), connect()]
    acted: list[tuple[str, int]] = []

    def work(coordinator: Coordinator, run: str) -> None:
        with coordinator.try_acquire(run, ttl=60) as lease:
            for step in range(10):
                lease.put(f"{run}/{step}", str(lease.generation), expect=ABSENT)
            acted.append((run, lease.generation))

    for n in range(20):
        outcomes = at_once([lambda one=one, n=n: work(one, f"run-{n}") for one in agents])
        held = [one for one in outcomes if isinstance(one, Held)]
        conflicts = [one for one in outcomes if isinstance(one, Conflict)]  # it came when the first had ended
        assert len(held) + len(conflicts) == 1
    assert sorted({run for run, _ in acted}) == sorted(run for run, _ in acted)

    first = agents[0].acquire("paused", ttl=60)
    for step in range(4):
        first.put(f"paused/{step}", str(first.generation))
    raw.delete(first._tenure.keys.owner)
    second = agents[1].acquire("paused", ttl=60)
    with pytest.raises(Superseded):
        first.put("paused/4", str(first.generation))
    for step in range(4, 10):
        second.put(f"paused/{step}", str(second.generation))
    line = [int(agents[0].get(f"paused/{step}").value or b"0") for step in range(10)]
    assert line == [first.generation] * 4 + [second.generation] * 6


@pytest.mark.field(82)
def test_nobody_ever_sees_a_claim_without_a_lease(connect: Connect, raw: Raw) -> None:
    """A sweep beside two hundred claims: every owner key it sees hangs on a lease, and no working task stalls."""
    worker, sweeper = connect(), connect()
    stop, orphans, sweeps = threading.Event(), list[Any](), [0]
    owners = worker._engine.keys.family("owner")

    def sweep() -> None:
        while not stop.is_set():
            kvs = [raw.get(key) for key in raw.below(owners)]
            orphans.extend(kv.key for kv in kvs if kv is not None and not kv.lease)
            orphans.extend(task.task for task in sweeper.tasks() if task.state is TaskState.STALLED)
            sweeps[0] += 1

    thread = threading.Thread(target=sweep)
    thread.start()
    try:
        for n in range(200):
            with worker.try_acquire(f"job-{n % 7}", ttl=60) as lease:
                lease.put("k", str(n))
    finally:
        stop.set()
        thread.join(30)
    assert (orphans, sweeps[0] > 3) == ([], True)


# --- bad input ---------------------------------------------------------------------------------------------


@pytest.fixture
def silent(connect: Connect, raw: Raw) -> Any:
    """A coordinator and a lease; at the end nothing of the test's calls must have reached etcd."""
    coordinator = connect()
    lease = coordinator.acquire(KEY, ttl=60)
    mine = coordinator._engine.keys.root.encode()
    before = raw.revisions(mine)
    yield coordinator, lease
    assert raw.revisions(mine) == before
    assert lease.standing is Standing.HELD


@pytest.mark.field(55)
@pytest.mark.req("bad-input")
@pytest.mark.parametrize("ttl", [0, -1, 0.5, 10**13, "30", timedelta(seconds=30), float("nan"), True, None])
def test_ttl_is_whole_seconds(silent: Any, ttl: Any) -> None:
    coordinator, _ = silent
    with pytest.raises(Misuse, match="seconds"):
        coordinator.acquire("job", ttl=ttl)


@pytest.mark.req("bad-input")
@pytest.mark.parametrize("wait", [-1, float("nan"), float("inf"), 1e10, "1", True])
def test_wait_is_seconds(silent: Any, wait: Any) -> None:
    coordinator, _ = silent
    with pytest.raises(Misuse, match="wait"):
        coordinator.acquire("job", wait=wait)


@pytest.mark.req("bad-input")
@pytest.mark.parametrize("name", ["", "a\0b", "x" * 2000, b"bytes", None, 7, "\ud800"])
def test_names_are_text(silent: Any, name: Any) -> None:
    coordinator, lease = silent
    for call in (
        lambda: coordinator.acquire(name),
        lambda: coordinator.describe(name),
        lambda: TaskKey(name, "scope") and coordinator.acquire(TaskKey(name, "scope")),
    ):
        with pytest.raises(Misuse):
            call()
    if not (isinstance(name, str) and len(name) == 2000):  # data keys may be longer
        with pytest.raises(Misuse):
            lease.put(name, "v")
        with pytest.raises(Misuse):
            coordinator.get(name)


@pytest.mark.req("bad-input")
def test_values_and_expectations(silent: Any) -> None:
    _, lease = silent
    for value in (None, 7, ["a"], object()):
        with pytest.raises(Misuse, match="bytes or text"):
            lease.put("k", value)
    with pytest.raises(Misuse, match="Unicode"):
        lease.put("k", "\ud800")
    for expect in (0, -1, "5", True, 1.0, float("nan"), ""):
        with pytest.raises(Misuse):
            lease.put("k", "v", expect=expect)
    with pytest.raises(Misuse, match="ABSENT"):
        lease.put("k", "v", expect=0)
    with pytest.raises(TooLarge):
        lease.put("k", "x" * 1_600_000)
    with pytest.raises(TooLarge), lease.transaction() as tx:
        for n in range(70):
            tx.put(f"k{n}", "v")
    with pytest.raises(Misuse, match="twice"), lease.transaction() as tx:
        tx.put("k", "1")
        tx.put("k", "2")
    with pytest.raises(Misuse, match="empty"), lease.transaction():
        pass


@pytest.mark.req("bad-input")
def test_results_are_json_and_evidence_is_more_than_a_message(silent: Any) -> None:
    _, lease = silent
    deep: list[Any] = []
    for _ in range(3000):
        deep = [deep]
    shallower: list[Any] = []
    for _ in range(230):
        shallower = [shallower]
    for result in (float("nan"), {1, 2}, object(), "\ud800", deep, shallower):
        with pytest.raises(Misuse, match="JSON"):
            lease.complete(result, {"revision": 1})
    for evidence in ("I did it", {}, None, []):
        with pytest.raises(Misuse, match="evidence"):
            lease.complete(1, evidence)
    with pytest.raises(Misuse):
        lease.fail("")


@pytest.mark.req("bad-input")
@pytest.mark.parametrize(
    "endpoint",
    [
        "",
        "ftp://h:1",
        "http://h",
        "h",
        "http://:2379",
        "http://h:99999",
        "https://h:1",
        "http://h:1/p",
        "http://a b:1",
        7,
    ],
)
def test_endpoints_that_do_not_parse(endpoint: Any) -> None:
    with pytest.raises(Misuse):
        etcdfence.connect([endpoint])


@pytest.mark.req("bad-input")
def test_a_closed_coordinator_refuses_at_once(connect: Connect) -> None:
    coordinator = connect()
    lease = coordinator.acquire("job")
    coordinator.close()
    coordinator.close()
    for call in (
        lambda: coordinator.acquire("other"),
        lambda: coordinator.get("k"),
        lambda: coordinator.tasks(),
        lambda: coordinator.__enter__(),
        lambda: lease.put("k", "v"),
        lambda: lease.check(),
    ):
        with pytest.raises(Closed):
            call()
    assert lease.loss is not None and lease.loss.reason is LossReason.CLOSED


# --- what the API does not have ----------------------------------------------------------------------------


@pytest.mark.req("S0-4", "S0-11", "S2-19", "S2-37")
def test_no_call_writes_or_owns_without_a_lease() -> None:
    """Writes exist on leases only, every acquire has a TTL, and nobody can say 'my generation is …'."""
    public = {name for name in dir(Coordinator) if not name.startswith("_")}
    owning = {"try_acquire", "acquire", "session", "lead"}
    looking = {"namespace", "epoch", "describe", "tasks", "waiters", "observe", "get", "members"}
    assert public == owning | looking | {"guard", "put", "close"}
    assert "guard" in inspect.signature(Coordinator.put).parameters  # which etcd compares
    for name in ("try_acquire", "acquire"):
        assert inspect.signature(getattr(Coordinator, name)).parameters["ttl"].default == 15
    for kind in (Coordinator, etcdfence.Lease, etcdfence.Transaction):
        for name, member in inspect.getmembers(kind, inspect.isfunction):
            if not name.startswith("_") and name != "guard":  # which hands on what etcd then compares
                asserted = {"generation", "token", "owner"} & set(inspect.signature(member).parameters)
                assert not asserted, (kind, name)
    assert inspect.signature(etcdfence.Lease.check).return_annotation == "None"


@pytest.mark.req("S2-19", "generation-zero")
@pytest.mark.parametrize("generation", [0, None, "", -1, "5", True, 1.0, 2**63])
def test_a_generation_that_is_none_cannot_be_built(generation: Any) -> None:
    with pytest.raises(Misuse):
        etcdfence.Guard(b"owner", generation, 1, b"epoch", b"value")
    with pytest.raises(Misuse):
        etcdfence.Token(1, generation)
    guard = etcdfence.Guard(b"owner", 5, 7, b"epoch", b"value")
    with pytest.raises(Misuse):
        dataclasses.replace(guard, generation=generation)
    with pytest.raises(Misuse):
        dataclasses.replace(guard, lease_id=generation)


def test_tokens_are_ordered_as_pairs() -> None:
    tokens = [etcdfence.Token(2, 1), etcdfence.Token(1, 9), etcdfence.Token(1, 10)]
    assert [str(token) for token in sorted(tokens)] == ["1.9", "1.10", "2.1"]
