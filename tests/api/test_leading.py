"""Leadership, in both colours and over every wire."""

from __future__ import annotations

import asyncio
import gc
import threading
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from etcdfence import Coordinator, LeaseLost, LeaseReleased, Misuse, Periods, Standing

from ..support.waiting import eventually, pass_time

Connect = Callable[..., Coordinator]
QUICK = {"lease_duration": 3, "renew_deadline": 2.0, "retry_period": 0.4}


class Candidate:
    """One that takes part, with its work and all that it was told. `stubborn`: its work does not stop when it is
    told to, until `let_go` is set."""

    def __init__(self, coordinator: Any, *, stubborn: bool = False, **options: Any) -> None:
        self.terms: list[int] = []
        self.told: list[str] = []
        self.leaders: list[str | None] = []
        self.failure: BaseException | None = None
        self.stubborn, self.let_go = stubborn, threading.Event()
        self._loop = getattr(coordinator, "_loop", None)
        self._coordinator = coordinator
        usual: dict[str, Any] = {**QUICK, "on_stopped": lambda: self.told.append("stopped")}
        usual["on_new_leader"] = self.leaders.append
        work = self._work_async if self._loop else self._work
        self.leadership = coordinator.lead("controller", **{**usual, "on_started": work, **options})
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            if self._loop:
                self._loop.call(self.leadership.run)
            else:
                self.leadership.run()
        except BaseException as error:  # the test looks at it
            self.failure = error

    def _begin(self, lease: Any) -> None:
        self.terms.append(lease.generation)
        self.told.append("started")

    def _work(self, lease: Any, stopping: threading.Event) -> None:
        self._begin(lease)
        (self.let_go if self.stubborn else stopping).wait(60)
        self.told.append("work ended")

    async def _work_async(self, lease: Any) -> None:
        self._begin(lease)
        try:
            await asyncio.sleep(3600)
        finally:
            while self.stubborn and not self.let_go.is_set():
                await asyncio.sleep(0.01)
            self.told.append("work ended")

    def leads(self) -> Any:
        return eventually(f"{self.leadership.identity} leads", lambda: self.leadership.leading, 30)

    def stops(self) -> None:
        self.leadership.stop()
        self.ended()

    def ended(self) -> None:
        eventually(f"{self.leadership.identity} has ended", lambda: not self._thread.is_alive(), 30)


@pytest.fixture
def candidate(connect: Connect) -> Iterator[Callable[..., Candidate]]:
    made: list[Candidate] = []

    def make(identity: str, **options: Any) -> Candidate:
        made.append(Candidate(connect(), identity=identity, **options))
        return made[-1]

    yield make
    for one in made:
        one.let_go.set()
        one.leadership.stop()
    for one in made:
        one.ended()


Make = Callable[..., Candidate]


@pytest.mark.req("P-4", "P-17")
@pytest.mark.field(21)
def test_one_leads_and_hands_over_when_it_is_stopped(candidate: Make, connect: Connect) -> None:
    first = candidate("a")
    first.leads()
    second = candidate("b")
    eventually("b waits", lambda: connect().waiters())
    assert not second.leadership.leading
    assert second.leadership.healthy
    looker = connect()
    assert looker.describe("controller").owner.holder == "a"  # type: ignore[union-attr]  # it leads
    first.stops()
    second.leads()
    assert first.told == ["started", "work ended", "stopped"]
    assert second.terms > first.terms
    assert first.failure is None
    eventually("a and b are known to b", lambda: second.leaders[-1:] == ["b"])
    assert second.leadership.leader == "b"
    second.stops()
    assert looker.describe("controller").owner is None


@pytest.mark.req("P-4", "promise-5")
@pytest.mark.field(21)
def test_a_leader_that_is_deposed_stops_its_work_and_stands_again(
    candidate: Make, raw: Any, connect: Connect
) -> None:
    one = candidate("a")
    one.leads()
    raw.delete(connect()._engine.keys.task("controller").owner)
    eventually("it leads again", lambda: len(one.terms) == 2, 30)
    assert one.told[:4] == ["started", "work ended", "stopped", "started"]
    assert one.terms == sorted(set(one.terms))


@pytest.mark.field(21)
def test_work_that_does_not_stop_keeps_the_lease_from_being_released(
    candidate: Make, connect: Connect, raw: Any
) -> None:
    one = candidate("a", stubborn=True, drain=0.2)
    one.leads()
    key = connect()._engine.keys.task("controller").owner
    lease_id = raw.get(key).lease
    lease = one.leadership.lease
    one.leadership.stop()
    eventually("it gave up waiting", lambda: "stopped" in one.told, 30)
    assert "work ended" not in one.told
    eventually("the lease has run out", lambda: raw.get(key) is None, 30)
    attempt = connect().describe("controller").attempts[-1]
    assert attempt.ended is None  # nobody has said that it was over
    assert raw.ttl(lease_id) <= 0
    with connect().acquire("controller", wait=0) as successor, pytest.raises((LeaseReleased, LeaseLost)):
        assert successor.generation > one.terms[0]
        assert lease is not None
        one._loop.call(lease.put, "k", "late") if one._loop else lease.put("k", "late")


def test_what_the_work_raises_comes_out_of_run(candidate: Make, connect: Connect) -> None:
    def fails(*_: Any) -> None:
        raise ZeroDivisionError

    async def fails_async(*_: Any) -> None:
        raise ZeroDivisionError

    coordinator: Any = connect()
    one = Candidate(coordinator, on_started=fails_async if hasattr(coordinator, "_loop") else fails)
    one.ended()
    assert isinstance(one.failure, ZeroDivisionError)
    assert one.told == ["stopped"]
    with connect().acquire("controller", wait=0):
        """It was given back."""


def test_work_that_returns_leaves_the_leadership(connect: Connect) -> None:
    async def returns(_: Any) -> None: ...

    coordinator: Any = connect()
    one = Candidate(coordinator, on_started=returns if hasattr(coordinator, "_loop") else lambda *_: None)
    one.leads()
    assert one.leadership.healthy
    one.stops()
    assert one.failure is None


@pytest.mark.req("P-7")
def test_a_probe_is_unhealthy_before_the_lease_runs_out(candidate: Make, connect: Connect) -> None:
    one = candidate("a", stubborn=True, lease_duration=9, renew_deadline=8.0, retry_period=0.5)
    one.leads()
    assert one.leadership.healthy
    lease: Any = one.leadership.lease
    lease._engine.renewer.remove(lease._belief)
    eventually("the probe says so", lambda: not one.leadership.healthy, 20)
    assert connect().describe("controller").owner is not None
    assert lease.loss is None


@pytest.mark.req("P-6")
def test_bad_periods_and_names_are_refused_before_anything_is_sent(connect: Connect) -> None:
    coordinator: Any = connect()
    call = getattr(coordinator, "_inner", coordinator).lead
    for wrong in (
        {"lease_duration": 5, "renew_deadline": 5.0},
        {"renew_deadline": 2.0, "retry_period": 2.0},
        {"drain": -1},
        {"identity": ""},
    ):
        with pytest.raises(Misuse):
            call("controller", on_started=lambda *_: None, **wrong)
    with pytest.raises(Misuse):
        call("", on_started=lambda *_: None)


def test_it_is_run_once_at_a_time(candidate: Make) -> None:
    one = candidate("a")
    one.leads()
    with pytest.raises(Misuse, match="being run already"):
        one._loop.call(one.leadership.run) if one._loop else one.leadership.run()
    assert "leading" in repr(one.leadership) and "identity='a'" in repr(one.leadership)
    assert one.leadership.name == "controller"


@pytest.mark.req("P-4", "S0-20")
def test_the_same_as_a_plain_loop_over_acquire(connect: Connect, raw: Any) -> None:
    terms: list[int] = []
    coordinator, keys = connect(), connect()._engine.keys.task("controller")
    while len(terms) < 2:
        try:
            with coordinator.acquire("controller", ttl=Periods(3, 2.0, 0.4)) as lease:
                terms.append(lease.generation)
                if len(terms) == 1:
                    raw.delete(keys.owner)
                    eventually("it is over", lambda: lease.loss, 20)
                    lease.put("k", "v")
        except LeaseLost:
            continue
    assert terms == sorted(set(terms))


@pytest.mark.req("P-6")
def test_a_lease_won_from_the_line_is_fresh(connect: Connect) -> None:
    """What was kept for the place in line is kept as the periods of the lease ask for."""
    holder = connect().acquire("controller", ttl=60)
    got: list[Any] = []
    waiter: Any = connect()
    thread = threading.Thread(
        target=lambda: got.append(waiter.acquire("controller", ttl=Periods(30, 3.0, 1.0), wait=60))
    )
    thread.start()
    looker = connect()
    eventually("it waits", looker.waiters)
    pass_time(4)
    holder.release()
    eventually("it owns", lambda: got)
    assert got[0].standing is Standing.HELD
    assert got[0].expires_in > 1


def test_a_leadership_is_run_again_after_its_work_has_failed(connect: Connect) -> None:
    failed: list[int] = []

    def once(lease: Any, *_: Any) -> None:
        if not failed:
            failed.append(lease.generation)
            raise ZeroDivisionError

    async def once_async(lease: Any) -> None:
        once(lease)

    coordinator: Any = connect()
    one = Candidate(coordinator, on_started=once_async if hasattr(coordinator, "_loop") else once)
    one.ended()
    assert isinstance(one.failure, ZeroDivisionError)
    one.failure = None
    again = threading.Thread(target=one._run, daemon=True)
    again.start()
    one.leads()
    assert one.leadership.lease.generation > failed[0]  # type: ignore[union-attr]  # it leads
    one.leadership.stop()
    eventually("it has ended", lambda: not again.is_alive(), 30)
    assert one.failure is None


@pytest.mark.req("P-7")
def test_work_that_has_not_ended_is_unhealthy_and_has_no_second_beside_it(
    candidate: Make, connect: Connect, raw: Any
) -> None:
    one = candidate("a", stubborn=True, drain=0.2)
    one.leads()
    raw.delete(connect()._engine.keys.task("controller").owner)
    eventually("it was told", lambda: "stopped" in one.told, 30)
    assert not one.leadership.healthy
    assert not one.leadership.leading
    assert len(one.terms) == 1
    one.let_go.set()
    eventually("it leads again", lambda: len(one.terms) == 2, 30)
    assert one.leadership.healthy


def test_callbacks_of_the_wrong_kind_are_refused(connect: Connect) -> None:
    async def coroutine(*_: Any) -> None: ...

    coordinator: Any = connect()
    lead = getattr(coordinator, "_inner", coordinator).lead
    right: Any = coroutine if hasattr(coordinator, "_loop") else lambda *_: None
    wrong: Any = (lambda *_: None) if hasattr(coordinator, "_loop") else coroutine
    for options in (
        {"on_started": wrong},
        {"on_started": right, "on_stopped": coroutine},
        {"on_started": right, "on_new_leader": coroutine},
        {"on_started": right, "on_stopped": "not a function"},
    ):
        with pytest.raises(Misuse):
            lead("controller", **options)


def test_terms_leave_nothing_behind(connect: Connect, raw: Any) -> None:
    """Neither handles nor threads, over several of them."""
    coordinator: Any = connect()
    seen: list[weakref.ref[Any]] = []

    def remembers(lease: Any, *_: Any) -> None:
        seen.append(weakref.ref(lease))

    async def remembers_async(lease: Any) -> None:
        remembers(lease)

    one = Candidate(coordinator, on_started=remembers_async if hasattr(coordinator, "_loop") else remembers)
    for count in range(1, 4):
        eventually("it leads", lambda count=count: len(seen) == count, 30)
        raw.delete(coordinator._engine.keys.task("controller").owner)
    eventually("it leads", lambda: len(seen) == 4, 30)
    one.stops()

    def gone() -> bool:
        gc.collect()
        return not [ref for ref in seen if ref() is not None]

    eventually("no handle is left", gone)
