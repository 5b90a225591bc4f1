"""Long lines and many claims, and what goes wrong in them, on a real etcd."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest

import etcdfence
from etcdfence import Coordinator, Held, Lease
from etcdfence._requests import Request, Revoke, Txn
from etcdfence.server import LocalEtcd

from ..support.metrics import requests
from ..support.proxy import Proxy
from ..support.raw import Raw
from ..support.tape import Tape, a, is_claim, puts
from ..support.waiting import eventually

Connect = Callable[..., Coordinator]
Taped = Callable[..., tuple[Coordinator, Tape]]
# A release with the end of its etcd lease, a claim, and a look by the one that is now next (which then watches the
# owner: one more stream, and etcd does not count those).
PER_HAND_OVER = {"Txn": 3, "LeaseRevoke": 1}


class Helper:
    """A process of the test's own that speaks line by line. What it says of its line is read over."""

    def __init__(self, module: str, *arguments: object) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-m", f"tests.support.{module}", *map(str, arguments)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            bufsize=1,
        )

    def says(self) -> str:
        assert self.process.stdout is not None
        return self.process.stdout.readline().strip()

    def tell(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write("\n")

    def end(self) -> None:
        self.process.kill()
        self.process.communicate()


@pytest.fixture
def helper() -> Iterator[Callable[..., Helper]]:
    made: list[Helper] = []

    def make(module: str, *arguments: object) -> Helper:
        made.append(Helper(module, *arguments))
        return made[-1]

    yield make
    for one in made:
        one.end()


Help = Callable[..., Helper]


# --- many claims -------------------------------------------------------------------------------------------


@pytest.mark.req("S2-12", "promise-1", "S0-21")
def test_a_thousand_claims_from_four_processes_give_one_lease(
    own_etcd: LocalEtcd, namespace: str, helper: Help
) -> None:
    """The server stands still while they are sent, so that none is answered before all are under way."""
    helpers = [helper("claimers", own_etcd.endpoint, namespace, 250) for _ in range(4)]
    assert [one.says() for one in helpers] == ["ready"] * 4
    own_etcd.pause()
    try:
        for one in helpers:
            one.tell()
        assert [one.says() for one in helpers] == ["sent"] * 4
    finally:
        own_etcd.resume()
    answers = [json.loads(one.says()) for one in helpers]
    won = [generation for answer in answers for generation in answer["won"]]
    assert len(won) == 1
    assert sum(answer["held"] for answer in answers) == 999
    assert {named for answer in answers for named in answer["named"]} == set(won)
    with etcdfence.connect(own_etcd.endpoint, namespace=namespace) as looker:
        seen = looker.describe("job")
        assert (seen.generation, len(seen.attempts)) == (won[0], 1)


# --- long lines --------------------------------------------------------------------------------------------


def hand_over(waiters: Helper, owner: int) -> int:
    """Let the owner go; the next one is the one behind it. Its generation."""
    waiters.tell()
    word, index, generation = waiters.says().split()
    assert (word, int(index)) == ("owns", owner + 1)
    return int(generation)


@pytest.mark.req("P-1")
@pytest.mark.field(60)
@pytest.mark.parametrize("length", [10, 300])
def test_each_hand_over_costs_the_same_few_requests(
    own_etcd: LocalEtcd, namespace: str, helper: Help, length: int
) -> None:
    with etcdfence.connect(own_etcd.endpoint, namespace=namespace) as holder:
        lease = holder.acquire("job", ttl=600)
        waiters = helper("waiters", own_etcd.endpoint, namespace, length, 600)
        assert waiters.says() == "in line"
        lease.release()
        assert waiters.says().split()[:2] == ["owns", "0"]
        generations = [hand_over(waiters, 0)]
        eventually("the next one watches", lambda: len(holder.waiters()) == length - 2)
        before = _quiet(own_etcd)
        generations += [hand_over(waiters, owner) for owner in range(1, 6)]
        spent = _quiet(own_etcd) - before
        assert generations == sorted(generations)
        assert {name: count / 5 for name, count in spent.items()} == PER_HAND_OVER


def _quiet(etcd: LocalEtcd) -> Counter[str]:
    """The counts, once they stand still."""
    seen: list[Counter[str]] = [Counter()]

    def unchanged() -> bool:
        seen.append(requests(etcd.endpoint))
        return seen[-1] == seen[-2]

    eventually("nothing more is asked", unchanged)
    return seen[-1]


@pytest.mark.req("P-1", "S0-6")
@pytest.mark.field(60)
def test_a_long_line_goes_on_whatever_happens_to_it(own_etcd: LocalEtcd, namespace: str, helper: Help) -> None:
    """Three hundred wait. The owner is killed; etcd is killed and restarted; a waiter is killed; the lease of one
    is revoked, the entry of another deleted. Nobody else loses his place, and etcd is not asked for new leases."""
    raw = Raw(own_etcd.endpoint)
    owner = helper("waiters", own_etcd.endpoint, namespace, 1, 3)
    with etcdfence.connect(own_etcd.endpoint, namespace=namespace) as looker:
        assert owner.says().startswith("owns 0 ")
        killed = helper("waiters", own_etcd.endpoint, namespace, 1, 3)
        assert killed.says() == "in line"
        waiters = helper("waiters", own_etcd.endpoint, namespace, 298, 30)
        assert waiters.says() == "in line"
        first, *line = looker.waiters()
        assert len(line) == 298
        killed.process.kill()
        owner.process.kill()
        word, index, _ = waiters.says().split()  # once both leases have run out
        assert (word, index) == ("owns", "0")
        assert looker.waiters() == _moved_up(line[1:])
        own_etcd.kill()
        own_etcd.start()
        granted = requests(own_etcd.endpoint)["LeaseGrant"]
        hand_over(waiters, 0)
        assert looker.waiters() == _moved_up(line[2:])
        assert requests(own_etcd.endpoint)["LeaseGrant"] == granted
        raw.revoke(line[2].lease_id)
        raw.delete(looker._engine.keys.task("job").queue + line[3].attempt.encode())
        waiters.tell()
        assert waiters.says().split()[:2] == ["owns", "4"]  # the two are behind all others now
        eventually("both are in line again", lambda: len(looker.waiters()) == 295, 30)
        back = {one.attempt for one in looker.waiters()[-2:]}
        assert line[3].attempt in back
        assert first.attempt not in back
        hand_over(waiters, 4)
    raw.close()


def _moved_up(line: list[Any]) -> list[Any]:
    return [replace(one, position=n) for n, one in enumerate(line, start=1)]


@pytest.mark.field(59)
def test_a_waiter_with_a_short_ttl_does_not_take_from_an_owner_with_a_long_one(connect: Connect) -> None:
    slow = connect()
    lease = slow.acquire("job", ttl=30)
    slow._engine.renewer.remove(lease._belief)
    with pytest.raises(Held):
        connect().acquire("job", ttl=2, wait=5)
    lease.check()


# --- on a bad wire -----------------------------------------------------------------------------------------


def enters(request: Request[Any]) -> bool:
    return puts(b"/queue/")(request)


def leaves(request: Request[Any]) -> bool:
    return (
        isinstance(request, Txn) and any(b"/queue/" in op.key for op in request.success) and not request.read_only
    )


@pytest.mark.req("P-2", "promise-4")
@pytest.mark.field(18)
def test_a_late_try_to_get_in_line_leaves_no_ghost(taped: Taped, connect: Connect, raw: Raw) -> None:
    """The first try arrives when its wait is over and its lease, which nobody could revoke, is still alive."""
    holder = connect().acquire("job")
    coordinator, tape = taped()
    tape.delay(enters)
    tape.raises(a(Revoke), etcdfence.OutcomeUnknown("no answer"), once=False)
    with pytest.raises(Held):
        coordinator.acquire("job", ttl=60, wait=0.5)
    entry = next(op for op in tape.delayed[0].success if b"/queue/" in op.key)  # type: ignore[attr-defined]
    assert raw.ttl(entry.lease) > 0
    (answer,) = tape.deliver()
    assert not answer.succeeded
    assert raw.below(coordinator._engine.keys.task("job").queue) == []
    holder.release()
    connect().try_acquire("job").release()


@pytest.mark.req("promise-4")
def test_without_the_attempt_key_a_late_try_to_get_in_line_is_a_ghost(
    taped: Taped, connect: Connect, raw: Raw
) -> None:
    connect().acquire("job")
    coordinator, tape = taped()
    tape.without = lambda compare: b"/attempt/" in compare.key
    tape.delay(enters)
    tape.raises(a(Revoke), etcdfence.OutcomeUnknown("no answer"), once=False)
    with pytest.raises(Held):
        coordinator.acquire("job", ttl=60, wait=0.5)
    tape.deliver()
    assert len(raw.below(coordinator._engine.keys.task("job").queue)) == 1


@pytest.mark.req("promise-1", "promise-4")
def test_a_late_claim_from_the_line_owns_for_nobody(taped: Taped, connect: Connect, raw: Raw) -> None:
    """In a session, whose lease lives on: the claim of the one at the head is held up, a reserve bars its
    repetition, and it gives up. Then the claim arrives."""
    holder = connect().acquire("job")
    coordinator, tape = taped(patience=5.0)
    keys = coordinator._engine.keys.task("job")
    with coordinator.session(ttl=60) as session:

        def act(tape: Tape, request: Request[Any], _within: float) -> Any:
            tape.delayed.append(request)
            raw.put(keys.reserve, b"{}")
            raise etcdfence.OutcomeUnknown("no answer in time")

        outcome: list[Any] = []

        def wait() -> None:
            try:
                outcome.append(session.acquire("job", wait=3))
            except Held as held:
                outcome.append(held)

        thread = threading.Thread(target=wait)
        thread.start()
        eventually("it waits", coordinator.waiters)
        tape.fault(is_claim, act)
        holder.release()
        thread.join(20)
        assert isinstance(outcome[0], Held)
        raw.delete(keys.reserve)
        (answer,) = tape.deliver()
        assert not answer.succeeded
        assert (raw.get(keys.owner), raw.below(keys.queue)) == (None, [])
        with session.try_acquire("job"):
            """It is free."""


@pytest.mark.req("P-2")
@pytest.mark.field(18)
def test_a_leave_that_is_lost_costs_the_line_nothing(taped: Taped, connect: Connect, raw: Raw) -> None:
    """Neither the leave nor the revoke reach etcd: the entry ends with its lease, which nobody renews, and whoever
    waits behind it moves up."""
    holder = connect().acquire("job")
    coordinator, tape = taped(patience=1.0)
    lost = etcdfence.Unavailable("the link is cut")
    with pytest.raises(Held):

        def cut(tape: Tape, request: Request[Any], _within: float) -> Any:
            raise lost

        tape.fault(lambda request: leaves(request) and not enters(request), cut, once=False)
        tape.fault(a(Revoke), cut, once=False)
        coordinator.acquire("job", ttl=8, wait=0.5)
    assert len(raw.below(coordinator._engine.keys.task("job").queue)) == 1
    got: list[Lease] = []
    behind = connect()
    thread = threading.Thread(target=lambda: got.append(behind.acquire("job", wait=20)))
    thread.start()
    holder.release()
    thread.join(20)
    assert got[0].generation > holder.generation


@pytest.mark.field(18)
def test_a_hundred_tries_in_vain_with_a_link_that_breaks(
    endpoint: str, namespace: str, connect: Connect, raw: Raw
) -> None:
    holder, third = connect().acquire("job"), connect()
    with (
        Proxy(endpoint) as proxy,
        etcdfence.connect(proxy.endpoint, namespace=namespace, patience=0.6, request_timeout=0.5) as unlucky,
    ):
        for n in range(100):
            wait = 0.0 if n % 2 else 0.02
            timer = threading.Timer(0.01, proxy.cut) if n % 5 == 0 else None
            if timer:
                timer.start()
            with pytest.raises((Held, etcdfence.Unavailable, etcdfence.OutcomeUnknown)) as failed:
                unlucky.acquire("job", ttl=2, wait=wait)
            if timer:
                timer.join()
                proxy.heal()
            else:
                eventually("the link is back", lambda: failed.type is Held or unlucky.members()[0].error == "")
        keys = unlucky._engine.keys.task("job")
        eventually("nobody is in line", lambda: not raw.below(keys.queue), 20)
        holder.release()
        with third.acquire("job", wait=5):
            """It is free for others at once."""
