"""Release, complete and fail with lost replies, renewals in between, and other endings before them."""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest

from etcdfence import (
    Closed,
    Coordinator,
    Lease,
    LeaseLost,
    LeaseReleased,
    Loss,
    LossReason,
    OutcomeUnknown,
    PermissionDenied,
    Standing,
    TaskClosed,
    TaskKey,
    TaskState,
    Unavailable,
    Verdict,
)
from etcdfence._requests import KeepAlive, Put, Range, RangeReply, Revoke, Txn, TxnReply

from ..support.raw import Raw
from ..support.tape import Tape, a, is_claim, puts
from ..support.waiting import eventually

Taped = Callable[..., tuple[Coordinator, Tape]]
Connect = Callable[..., Coordinator]
KEY = TaskKey("op", "scope")
is_ending = puts(b"/history/")


@pytest.mark.req("promise-3", "promise-4")
@pytest.mark.parametrize(
    "end",
    [
        lambda lease: lease.release(),
        lambda lease: lease.complete({"n": 1}, {"revision": 1}),
        lambda lease: lease.fail("no paper"),
        lambda lease: lease.fail("no such thing", retry=False),
    ],
)
def test_an_ending_whose_reply_was_lost_is_recognised(
    end: Callable[[Lease], None], taped: Taped, raw: Raw
) -> None:
    coordinator, tape = taped()
    lost: list[Loss] = []
    lease = coordinator.acquire(KEY, on_lost=lambda _lease, loss: lost.append(loss))
    tape.lose_reply(is_ending)
    end(lease)
    found = coordinator.describe(KEY)
    assert found.owner is None
    assert found.last_attempt is not None
    assert found.last_attempt.ended in ("released", "completed", "failed")
    assert len(found.history) == 1
    assert (lease.standing, lease.loss, lost) == (Standing.RELEASED, None, [])


@pytest.mark.req("promise-4")
def test_another_ending_than_the_one_that_was_applied_is_refused(taped: Taped) -> None:
    """fail() is applied, its answer lost; complete() must not report a success that never happened."""
    coordinator, tape = taped(patience=0.5)
    lease = coordinator.acquire(KEY)
    tape.lose_reply(is_ending, once=False)
    with pytest.raises(OutcomeUnknown) as unknown:
        lease.fail("first")
    tape.heal()
    with pytest.raises(LeaseReleased, match="already ended: failed"):
        lease.complete({"n": 1}, {"revision": 1})
    assert coordinator.describe(KEY).state is TaskState.WAITING
    assert lease.settle(unknown.value) is Verdict.APPLIED
    lease.fail("first")  # the same again is no error


@pytest.mark.req("promise-4")
def test_a_write_in_between_does_not_turn_one_ending_into_another(taped: Taped) -> None:
    coordinator, tape = taped(patience=0.5)
    lease = coordinator.acquire(KEY)
    tape.lose_reply(is_ending, once=False)
    with pytest.raises(OutcomeUnknown):
        lease.complete({"n": 1}, {"revision": 1})
    tape.heal()
    with pytest.raises(LeaseLost):
        lease.put("k", "v")
    with pytest.raises(TaskClosed) as closed:
        lease.fail("after all", retry=False)
    assert (closed.value.state, closed.value.result) == ("completed", {"n": 1})
    with pytest.raises(TaskClosed):
        lease.complete({"n": 2}, {"revision": 1})
    lease.complete({"n": 1}, {"revision": 1})
    lease.release()


@pytest.mark.req("promise-4")
def test_settle_works_after_the_block_was_left(taped: Taped) -> None:
    """The natural place to settle: an exception has left the `with`, and with it the lease is released."""
    coordinator, tape = taped(patience=0.5)
    for act, verdict in ((tape.lose_reply, Verdict.APPLIED), (tape.delay, Verdict.NOT_APPLIED)):
        with pytest.raises(OutcomeUnknown) as unknown, coordinator.acquire("job") as lease:
            act(puts(b"/data/"), once=False)
            try:
                lease.put("k", "v")
            finally:
                tape.heal()
        assert lease.standing is Standing.RELEASED
        assert lease.settle(unknown.value) is verdict


@pytest.mark.req("promise-4")
def test_settle_that_stays_unanswered_names_the_same_write(taped: Taped) -> None:
    coordinator, tape = taped(patience=0.3)
    lease = coordinator.acquire("job")
    tape.delay(puts(b"/marker/"), once=False)
    with pytest.raises(OutcomeUnknown) as unknown:
        lease.put("k", "v")
    with pytest.raises(OutcomeUnknown) as again:
        lease.settle(unknown.value)
    assert again.value.write_id == unknown.value.write_id
    tape.heal()
    assert lease.settle(again.value) is Verdict.NOT_APPLIED


@pytest.mark.req("promise-4")
def test_a_release_that_went_unheard_may_be_repeated(taped: Taped, raw: Raw) -> None:
    coordinator, tape = taped(patience=0.3)
    lease = coordinator.acquire("job", ttl=60)
    owner = coordinator._engine.keys.task("job").owner
    tape.raises(is_ending, OutcomeUnknown("no answer"), once=False)
    tape.raises(a(Revoke), OutcomeUnknown("no answer"), once=False)
    with pytest.raises(OutcomeUnknown):
        lease.release()
    assert raw.get(owner) is not None
    tape.heal()
    lease.release()
    assert raw.get(owner) is None


@pytest.mark.req("promise-4")
def test_a_release_that_went_unheard_frees_the_task_by_revoking(taped: Taped, raw: Raw) -> None:
    coordinator, tape = taped(patience=0.3)
    lease = coordinator.acquire("job", ttl=60)
    tape.raises(is_ending, Unavailable("no member"), once=False)
    lease.release()
    assert raw.get(coordinator._engine.keys.task("job").owner) is None
    assert coordinator.describe("job").state is TaskState.STALLED


@pytest.mark.req("promise-4")
@pytest.mark.parametrize(
    "error", [Unavailable("no member"), PermissionDenied("role taken away"), Closed("closed")]
)
def test_an_error_after_an_unanswered_claim_is_no_answer_to_it(error: Exception, taped: Taped, raw: Raw) -> None:
    coordinator, tape = taped(patience=0.4)
    tape.lose_reply(is_claim)
    tape.raises(is_claim, error, once=False)
    with pytest.raises(OutcomeUnknown):
        coordinator.try_acquire("job", ttl=60)
    owner = coordinator._engine.keys.task("job").owner
    tape.heal()
    eventually("the claim that nobody holds is given back", lambda: raw.get(owner) is None)


@pytest.mark.req("promise-4")
@pytest.mark.parametrize(
    "error", [Unavailable("no member"), PermissionDenied("role taken away"), Closed("closed")]
)
def test_an_error_after_an_unanswered_write_is_no_answer_to_it(error: Exception, taped: Taped) -> None:
    coordinator, tape = taped(patience=0.4)
    lease = coordinator.acquire("job")
    tape.lose_reply(puts(b"/data/"))
    tape.raises(puts(b"/data/"), error, once=False)
    with pytest.raises(OutcomeUnknown) as unknown:
        lease.put("k", "v")
    tape.heal()
    assert lease.settle(unknown.value) is Verdict.APPLIED


@pytest.mark.req("promise-4")
def test_closing_while_a_write_waits_to_try_again(taped: Taped) -> None:
    """The write had been applied: it must not end as 'closed, nothing was sent'."""
    coordinator, tape = taped(patience=10.0)
    lease = coordinator.acquire("job")
    sent = threading.Event()

    def act(tape: Tape, request: Txn, within: float) -> object:
        tape.wire.call(request, within)
        sent.set()
        raise OutcomeUnknown("no answer")

    tape.fault(puts(b"/data/"), act, once=False)
    outcome: list[Exception] = []

    def write() -> None:
        try:
            lease.put("k", "v")
        except Exception as error:
            outcome.append(error)

    thread = threading.Thread(target=write)
    thread.start()
    assert sent.wait(10)
    coordinator.close(0.1)
    thread.join(10)
    assert [type(error) for error in outcome] == [OutcomeUnknown]


@pytest.mark.req("promise-5")
@pytest.mark.parametrize("end", [lambda lease: lease.release(), lambda lease: lease.complete(1, {"revision": 1})])
def test_an_orderly_ending_is_no_loss(end: Callable[[Lease], None], taped: Taped) -> None:
    """A renewal reads the store just after etcd has applied the ending and before its writer knows."""
    coordinator, tape = taped(patience=10.0)
    lost: list[Loss] = []
    lease = coordinator.acquire(KEY, ttl=60, on_lost=lambda _lease, loss: lost.append(loss))
    in_round, ended = threading.Event(), threading.Event()

    def slow_round(tape: Tape, request: KeepAlive, within: float) -> object:
        in_round.set()
        assert ended.wait(10)
        return tape.wire.call(request, within)

    def slow_answer(tape: Tape, request: Txn, within: float) -> object:
        answer = tape.wire.call(request, within)
        ended.set()
        eventually("the round has judged", lambda: lease._belief._failures > 0 or lease.loss)
        return answer

    tape.fault(a(KeepAlive), slow_round)
    tape.fault(is_ending, slow_answer)
    lease._belief._due = 0.0
    with coordinator._engine.renewer._changed:
        coordinator._engine.renewer._changed.notify()
    assert in_round.wait(10)
    end(lease)
    assert (lease.standing, lease.loss, lost) == (Standing.RELEASED, None, [])


@pytest.mark.req("promise-5")
def test_a_writer_behind_a_release_is_told_released(coordinator: Coordinator) -> None:
    """Whoever has the next turn finds a released handle, not a lost one, and leaves no refusal."""
    for _ in range(30):
        lease = coordinator.acquire("job")
        outcome: list[Exception | None] = []

        def write(lease: Lease = lease, outcome: list[Exception | None] = outcome) -> None:
            try:
                for _ in range(100):
                    lease.put("k", "v")
            except LeaseReleased as released:
                outcome.append(released)

        threads = [threading.Thread(target=write) for _ in range(3)]
        for thread in threads:
            thread.start()
        lease.release()
        for thread in threads:
            thread.join(10)
        assert {type(error) for error in outcome} == {LeaseReleased}
        assert (lease.standing, lease.loss) == (Standing.RELEASED, None)
    assert coordinator.describe("job").refusals == ()


@pytest.mark.req("promise-5")
def test_an_ending_that_was_applied_unheard_is_told_as_ended(taped: Taped) -> None:
    coordinator, tape = taped(patience=0.3)
    lease = coordinator.acquire(KEY, ttl=2)
    tape.lose_reply(is_ending, once=False)
    with pytest.raises(OutcomeUnknown):
        lease.complete(1, {"revision": 1})
    loss = lease.wait_lost(5)
    assert loss is not None
    assert loss.reason is LossReason.ENDED


@pytest.mark.req("promise-4", "promise-5")
def test_an_ending_that_was_settled_is_no_loss_and_no_refusal(taped: Taped) -> None:
    coordinator, tape = taped(patience=0.3)
    lost: list[Loss] = []
    lease = coordinator.acquire(KEY, ttl=2, on_lost=lambda _lease, loss: lost.append(loss))
    tape.lose_reply(is_ending, once=False)
    with pytest.raises(OutcomeUnknown) as unknown:
        lease.complete(1, {"revision": 1})
    tape.heal()
    assert lease.settle(unknown.value) is Verdict.APPLIED
    assert lease.standing is Standing.RELEASED
    for call in (lambda: lease.put("k", "v"), lease.check):
        with pytest.raises(LeaseReleased):
            call()
    lease.complete(1, {"revision": 1})
    lease.release()
    assert (lease.loss, lost) == (None, [])
    assert coordinator.describe(KEY).refusals == ()


@pytest.mark.req("promise-4")
def test_repeating_an_ending_leaves_no_refusal_record(taped: Taped) -> None:
    coordinator, tape = taped(patience=0.3)
    lease = coordinator.acquire(KEY)
    tape.lose_reply(is_ending, once=False)
    with pytest.raises(OutcomeUnknown):
        lease.complete(1, {"revision": 1})
    tape.heal()
    lease.complete(1, {"revision": 1})
    assert coordinator.describe(KEY).refusals == ()


def test_an_abandoned_handle_ends_nothing(coordinator: Coordinator) -> None:
    lease = coordinator.acquire(KEY, ttl=2)
    lease.abandon()
    with pytest.raises(LeaseReleased):
        lease.complete(1, {"revision": 1})
    lease.release()
    assert coordinator.describe(KEY).state is TaskState.OWNED


@pytest.mark.req("promise-5")
def test_one_stale_read_is_no_loss(taped: Taped) -> None:
    """A renewal is shown a state from before the claim; the second look shows the owner."""
    coordinator, tape = taped()
    lease = coordinator.acquire("job", ttl=2)
    epoch_key = coordinator._engine.keys.epoch

    def stale(tape: Tape, request: Txn, within: float) -> TxnReply:
        true = tape.wire.call(request, within)
        reads = (true.reads[0], *(RangeReply((), 0) for _ in true.reads[1:]))
        header = type(true.header)(true.header.cluster_id, lease.generation - 1)
        return TxnReply(header, True, reads)

    tape.fault(
        lambda request: (
            isinstance(request, Txn) and request.success[:1] == (Range(epoch_key),) and not request.compares
        ),
        stale,
    )
    renewed = lease._belief.renewed_at
    eventually("renewed", lambda: lease._belief.renewed_at > renewed + 1)
    assert lease.loss is None
    lease.check()
    lease.put("k", "v")


@pytest.mark.req("promise-4")
def test_the_same_request_delivered_twice_is_recognised(taped: Taped, raw: Raw) -> None:
    """As by a proxy that repeats: the second answer says no, because the first application was ours."""
    coordinator, tape = taped()
    lease = coordinator.acquire("job")

    def twice(tape: Tape, request: Txn, within: float) -> object:
        tape.wire.call(request, within)
        return tape.wire.call(request, within)

    tape.fault(puts(b"/data/"), twice)
    committed = lease.put("k", "v")
    kv = raw.get(coordinator._engine.keys.data("k"))
    assert (kv.version, kv.mod_revision) == (1, committed.revision)
    tape.fault(is_ending, twice)
    lease.release()
    assert lease.standing is Standing.RELEASED


@pytest.mark.req("promise-1")
def test_an_attempt_that_its_worker_never_ended_outlives_its_lease(
    taped: Taped, connect: Connect, raw: Raw
) -> None:
    """Its claim may have had an unanswered try: thirty successors later that try must still be refused."""
    coordinator, tape = taped()
    tape.delay(is_claim)
    lease = coordinator.try_acquire("job", ttl=60)
    keys = coordinator._engine.keys.task("job")
    raw.delete(keys.owner)
    others = connect()
    for _ in range(40):
        others.acquire("job").release()
    assert keys.attempt(lease.attempt) in raw.below(keys.attempts)
    tape.deliver()
    assert raw.get(keys.owner) is None


@pytest.mark.req("promise-5")
def test_closing_while_workers_leave_their_blocks(connect: Connect, raw: Raw) -> None:
    coordinator = connect()
    leases = [coordinator.acquire(f"job-{n}") for n in range(40)]

    def work(lease: Lease) -> None:
        try:
            with lease:
                lease.wait_lost(20)
        except (Closed, LeaseLost):
            return

    threads = [threading.Thread(target=work, args=(lease,)) for lease in leases]
    for thread in threads:
        thread.start()
    coordinator.close()
    for thread in threads:
        thread.join(10)
    assert raw.below(coordinator._engine.keys.family("owner")) == []
    assert not any(thread.is_alive() for thread in threads)


def test_waiting_outlasts_patience(taped: Taped, connect: Connect) -> None:
    """A watch that breaks after a long wait is no reason to give up."""
    from etcdfence._requests import Wait

    holder = connect().acquire("job")
    coordinator, tape = taped(patience=0.3)
    broken: list[float] = []

    def act(_tape: Tape, _request: Wait, _within: float) -> object:
        broken.append(1)
        if len(broken) == 4:
            holder.release()
        threading.Event().wait(0.2)
        raise OutcomeUnknown("the watch broke")

    tape.fault(a(Wait), act, once=False)
    with coordinator.acquire("job", wait=30) as lease:
        assert lease.generation > holder.generation
    assert len(broken) >= 4


@pytest.mark.req("bad-input")
def test_strangers_keys_disturb_nothing(taped: Taped, raw: Raw) -> None:
    coordinator, _ = taped()
    keys = coordinator._engine.keys.task(KEY)
    raw.put(coordinator._engine.keys.family("owner") + b"a:b:v" + b"9" * 5000, b"x")
    raw.put(coordinator._engine.keys.family("owner") + b"\xff\xfe", b"x")
    assert coordinator.tasks() == []
    raw.put(keys.attempt("zz"), b'{"attempt":"zz","holder":"h","host":"h","pid":1,"lease":"zz","started":"s"}')
    raw.put(keys.open + b"\xff", b"x")
    lease = coordinator.acquire(KEY)
    with pytest.raises(Exception, match="unresolved effects"):
        lease.complete(1, {"revision": 1})
    raw.delete(keys.open + b"\xff")
    lease.release()
    for _ in range(40):
        coordinator.acquire(KEY).release()
    assert keys.attempt("zz") in raw.below(keys.attempts)


def test_puts_helper_matches_puts_only() -> None:
    assert is_ending(Txn((), (Put(b"/history/", b""),)))
    assert not is_ending(Txn((), (Range(b"/history/"),)))
