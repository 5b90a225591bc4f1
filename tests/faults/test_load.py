"""Many of everything: leases, threads, cycles, losses and outages, and what is left of them."""

from __future__ import annotations

import asyncio
import gc
import itertools
import json
import os
import random
import subprocess
import sys
import textwrap
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

import etcdfence
from etcdfence import (
    Closed,
    Coordinator,
    Held,
    Lease,
    LeaseLost,
    Loss,
    LossReason,
    Superseded,
    Unavailable,
)
from etcdfence.server import LocalEtcd, free_ports

from ..support.raw import Raw
from ..support.waiting import eventually, pass_time

Connect = Callable[..., Coordinator]
TASKS, CYCLES, THREADS = 8, 50, 64


# --- many threads ------------------------------------------------------------------------------------------


class Exclusive:
    """Notes who is inside, and whether there ever were two."""

    def __init__(self) -> None:
        self.inside = [0] * TASKS
        self.clashes = 0
        self.generations: list[list[int]] = [[] for _ in range(TASKS)]
        self.free = [threading.Semaphore(0) for _ in range(TASKS)]

    def enter(self, task: int, generation: int) -> None:
        self.inside[task] += 1
        self.clashes += self.inside[task] > 1
        self.generations[task].append(generation)

    def leave(self, task: int) -> None:
        self.inside[task] -= 1


@pytest.mark.req("P-11")
@pytest.mark.field(36, 19)
@pytest.mark.parametrize("how", ["alone", "in a session"])
def test_many_threads_on_one_coordinator(connect: Connect, how: str) -> None:
    """64 threads x 50 cycles on 8 tasks; then the same again, and the coordinator is closed in the middle."""
    coordinator, exclusive = connect(), Exclusive()
    where: Any = coordinator.session(ttl=30) if how == "in a session" else coordinator
    cycles, not_mine = CYCLES if how == "in a session" else CYCLES // 5, list[Held]()

    def cycle(number: int) -> None:
        task = number % TASKS
        while True:
            try:
                with where.acquire(f"job-{task}", wait=60 if number % 4 else None) as lease:
                    exclusive.enter(task, lease.generation)
                    lease.put(f"k-{task}", str(number))
                    exclusive.leave(task)
                exclusive.free[task].release()
                return
            except Held as held:
                not_mine.extend([] if held.mine else [held])
                exclusive.free[task].acquire(timeout=0.2)

    with ThreadPoolExecutor(THREADS) as pool:
        list(pool.map(cycle, range(THREADS * cycles)))
    assert exclusive.clashes == 0
    assert not not_mine  # a sibling has it: nobody waits for himself
    assert sum(map(len, exclusive.generations)) == THREADS * cycles
    assert all(len(set(found)) == len(found) for found in exclusive.generations)
    begun, ended = threading.Event(), []

    def until_closed(number: int) -> None:
        try:
            while True:
                begun.set()
                cycle(number)
        except Exception as error:
            ended.append((type(error), str(error)))

    threads = [threading.Thread(target=until_closed, args=(n,)) for n in range(THREADS)]
    for thread in threads:
        thread.start()
    begun.wait(10)
    coordinator.close()
    for thread in threads:
        thread.join(1.0)
    assert not any(thread.is_alive() for thread in threads)
    told = {kind for kind, _ in ended}
    assert told <= {Closed, LeaseLost, etcdfence.LeaseReleased}, ended
    assert Closed in told


def test_closing_ends_what_waits_in_line(connect: Connect) -> None:
    holder, waiter = connect(), connect()
    holder.acquire("job")
    ended: list[Exception] = []

    def wait() -> None:
        try:
            waiter.acquire("job")
        except Exception as error:
            ended.append(error)

    threads = [threading.Thread(target=wait) for _ in range(20)]
    for thread in threads:
        thread.start()
    eventually("all are in line", lambda: len(holder.waiters()) == 20)
    closer = threading.Thread(target=waiter.close)
    closer.start()
    for thread in threads:
        thread.join(1.0)
    assert [type(error) for error in ended] == [Closed] * 20
    closer.join(10)
    assert holder.waiters() == []


@pytest.mark.field(19)
def test_a_handle_goes_from_hand_to_hand(connect: Connect, endpoint: str, namespace: str) -> None:
    """Any thread and any task may use it; and one that was released late never touches its successor."""
    coordinator = connect()
    old = coordinator.acquire("job")
    with ThreadPoolExecutor(1) as pool:
        pool.submit(old.put, "k", "from a thread").result(10)
        pool.submit(old.release).result(10)
    new = coordinator.acquire("job")
    old.release()
    with pytest.raises((etcdfence.LeaseReleased, Superseded)):
        old.put("k", "late")
    new.check()

    async def main() -> None:
        async with etcdfence.connect_async(endpoint, namespace=namespace) as theirs:
            first = await theirs.acquire("another")
            await asyncio.gather(*(asyncio.create_task(first.put(f"k{n}", "v")) for n in range(2)))
            await asyncio.create_task(first.release())
            second = await theirs.acquire("another")
            await first.release()
            await second.check()
            assert second.generation > first.generation

    asyncio.run(main())


# --- nothing piles up --------------------------------------------------------------------------------------


def sockets() -> int:
    """Open sockets of this process."""
    found = 0
    for entry in os.listdir("/proc/self/fd"):
        try:
            found += os.readlink(f"/proc/self/fd/{entry}").startswith("socket:")
        except OSError:  # the directory's own, which is closed by now
            continue
    return found


def resident() -> int:
    """Kilobytes."""
    status = Path("/proc/self/status").read_text().splitlines()
    return int(next(line for line in status if line.startswith("VmRSS")).split()[1])


@pytest.mark.req("P-13")
@pytest.mark.field(63, 18)
def test_nothing_is_left_of_thousands_of_cycles(own_etcd: LocalEtcd, namespace: str) -> None:
    """10,000 cycles of claim and release, 1,000 tries in vain, 200 connects and closes."""
    raw = Raw(own_etcd.endpoint)

    def leases() -> list[Any]:
        found: list[Any] = raw.gateway("/v3/lease/leases", {}).get("leases", [])
        return found

    def connect() -> Coordinator:
        return etcdfence.connect(own_etcd.endpoint, namespace=namespace)

    def some(cycles: int, tries: int, connects: int) -> None:
        with connect() as coordinator, coordinator.session(ttl=60) as session:
            for n in range(cycles):
                session.acquire(f"job-{n % 4}").release()
        with connect() as holder, connect() as other:
            lease = holder.acquire("held")
            for n in range(tries):
                with pytest.raises(Held):
                    other.acquire("held", wait=0 if n % 50 else 0.01)
            lease.check()
        for _ in range(connects):
            with connect() as coordinator:
                coordinator.acquire("once").release()

    def left() -> tuple[int, int, int, int]:
        gc.collect()
        return len(leases()), len(raw.below(b"/etcdfence/")), threading.active_count(), sockets()

    some(1000, 100, 20)
    eventually("it is quiet", lambda: left()[0] == 0)
    before, memory = left(), resident()
    some(9000, 900, 180)
    eventually(f"as before: {before}", lambda: left()[0::2] == before[0::2] and left()[3] <= before[3])
    assert left()[1] <= 6 * 4 * 32  # the last few attempts and entries of each task
    assert resident() < memory + 16_000
    raw.close()


@pytest.mark.field(13)
def test_quick_cycles_leave_no_lease_without_a_renewer(connect: Connect) -> None:
    coordinator, chance = connect(), random.Random(13)
    for _ in range(500):
        coordinator.acquire("job", ttl=2).release()
        threading.Event().wait(chance.random() / 200)
    held = [coordinator.acquire("job", ttl=2)]
    for n in range(5):
        threading.Event().wait(chance.random() / 20)
        held.append(coordinator.acquire(f"job-{n}", ttl=2))
    pass_time(6)
    for lease in held:
        lease.check()
    assert len([thread for thread in threading.enumerate() if thread.name == "etcdfence-renewal"]) >= 1
    assert len(coordinator._engine.renewer._leases) == len(held)


# --- many losses -------------------------------------------------------------------------------------------


@pytest.mark.req("promise-5")
@pytest.mark.field(6)
def test_fifty_leases_revoked_at_once(connect: Connect, raw: Raw) -> None:
    """Each is told, claims its task anew from within what tells it, and nobody goes on under the old one."""
    coordinator = connect()
    again: dict[str, Lease] = {}
    told: list[LossReason] = []

    def lost(lease: Lease, loss: Loss) -> None:
        told.append(loss.reason)
        again[lease.task] = coordinator.acquire(lease.task, ttl=6, wait=20)

    held = [coordinator.acquire(f"job-{n}", ttl=6, on_lost=lost) for n in range(50)]
    for lease in held:
        raw.revoke(lease.receipt.lease_id)
    eventually("all own again", lambda: len(again) == 50, 20)
    assert set(told) == {LossReason.REVOKED}
    for lease in held:
        with pytest.raises(Superseded):
            lease.put(lease.task, "stale")
        assert again[lease.task].generation > lease.generation
        again[lease.task].put(lease.task, "new")
    assert len(told) == 50


@pytest.mark.req("promise-5")
@pytest.mark.field(35)
@pytest.mark.parametrize("does", ["release", "close", "acquire", "write", "raise", "sleep"])
def test_what_is_called_about_a_loss_may_do_anything(
    connect: Connect, raw: Raw, does: str, caplog: pytest.LogCaptureFixture
) -> None:
    coordinator, done, wake = connect(), threading.Event(), threading.Event()

    def lost(lease: Lease, _: Loss) -> None:
        try:
            actions[does](lease)
        except (LeaseLost, Superseded):
            """What a call on a lost lease says."""
        finally:
            done.set()

    def fails(_: Lease) -> None:
        raise ZeroDivisionError

    actions: dict[str, Callable[[Lease], object]] = {
        "release": lambda lease: lease.release(),
        "close": lambda _: coordinator.close(),
        "acquire": lambda lease: coordinator.acquire(lease.task, ttl=2, wait=10),
        "write": lambda lease: lease.put("k", "v"),
        "raise": fails,
        "sleep": lambda _: wake.wait(60),
    }
    others = [coordinator.acquire(f"other-{n}", ttl=2) for n in range(3)]
    with coordinator.session(ttl=2) as session:
        fellow, doomed = session.acquire("fellow"), coordinator.acquire("doomed", ttl=2, on_lost=lost)
        in_session = session.acquire("doomed too", on_lost=lost)
        raw.revoke(doomed.receipt.lease_id)
        raw.delete(in_session._tenure.keys.owner)
        eventually("it was lost", lambda: doomed.loss and in_session.loss, 10)
        if does != "sleep":
            assert done.wait(15)
        if does != "close":
            pass_time(3)  # longer than the TTL: they have been renewed
            for lease in (*others, fellow):
                lease.check()
        wake.set()


# --- an outage ---------------------------------------------------------------------------------------------

OUTAGE = """
import json, logging, os, resource, sys, threading, time
import etcdfence
logged = []
class Counted(logging.Handler):
    def emit(self, record):
        logged.append(record.getMessage())
logging.getLogger("etcdfence").addHandler(Counted())
logging.getLogger("etcdfence").setLevel(logging.INFO)
coordinator = etcdfence.connect(sys.argv[1], namespace="n")
other = etcdfence.connect(sys.argv[1], namespace="n")
session = coordinator.session(ttl=10)
held = [coordinator.acquire(f"job-{n}", ttl=10) for n in range(10)]
held += [session.acquire(f"shared-{n}") for n in range(10)]
got = []
def wait(task):
    lease = other.acquire(task, ttl=10, wait=3600)
    got.append((time.monotonic(), task))
threads = [threading.Thread(target=wait, args=(lease.task,), daemon=True) for lease in held]
for thread in threads: thread.start()
while len(coordinator.waiters()) < 20: time.sleep(0.05)
print("ready", flush=True)
sys.stdin.readline()
used = time.process_time()
sys.stdin.readline()
used, threads_then, lines = time.process_time() - used, threading.active_count(), len(logged)
print(json.dumps({"cpu": used, "threads": threads_then, "lines": lines}), flush=True)
sys.stdin.readline()
began = time.monotonic()
for lease in held:
    try:
        lease.release()
    except etcdfence.Refused:
        pass
for thread in threads: thread.join(30)
print(json.dumps({"got": len(got), "after": max(at for at, _ in got) - began if got else None}), flush=True)
os._exit(0)
"""


@pytest.mark.field(53)
def test_an_outage_costs_little_and_is_over_in_seconds(own_etcd: LocalEtcd) -> None:
    """20 leases (10 of them in a session) and 20 waits in one process, while etcd is off for 20 seconds;
    ETCDFENCE_TEST_OUTAGE=300 makes it five minutes."""
    seconds = float(os.environ.get("ETCDFENCE_TEST_OUTAGE", "20"))
    process = subprocess.Popen(
        [sys.executable, "-c", OUTAGE, own_etcd.endpoint],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        bufsize=1,
    )
    assert process.stdin is not None and process.stdout is not None
    try:
        assert process.stdout.readline() == "ready\n"
        own_etcd.kill()
        process.stdin.write("\n")
        pass_time(seconds)
        process.stdin.write("\n")
        during = json.loads(process.stdout.readline())
        own_etcd.start()
        process.stdin.write("\n")
        after = json.loads(process.stdout.readline())
    finally:
        process.kill()
        process.communicate()
    assert during["cpu"] < 0.05 * seconds, during
    assert during["threads"] < 20 + 60, during  # the waits' own threads, gRPC's and ours
    assert during["lines"] < 40 * (1 + seconds / 2), during
    assert after["got"] == 20
    assert after["after"] < 10, after


def all_go_on(counts: list[int]) -> None:
    before = list(counts)
    eventually("all go on", lambda: all(map(int.__gt__, counts, before)), 30)


@pytest.mark.field(69)
def test_claims_go_on_after_crashes_of_the_server(own_etcd: LocalEtcd, namespace: str) -> None:
    stop, counts = threading.Event(), [0] * 10
    with etcdfence.connect(own_etcd.endpoint, namespace=namespace, patience=15.0) as coordinator:

        def cycle(number: int) -> None:
            while not stop.is_set():
                try:
                    coordinator.acquire(f"job-{number}", ttl=10, wait=10).release()
                    counts[number] += 1
                except (Unavailable, etcdfence.OutcomeUnknown, etcdfence.OwnershipRefused, Held):
                    continue

        threads = [threading.Thread(target=cycle, args=(n,)) for n in range(10)]
        for thread in threads:
            thread.start()
        for _ in range(5):
            all_go_on(counts)
            own_etcd.kill()
            own_etcd.start()
        all_go_on(counts)
        stop.set()
        for thread in threads:
            thread.join(30)
        assert not any(thread.is_alive() for thread in threads)
    with pytest.raises(Closed):
        coordinator.acquire("job")


@pytest.mark.field(69)
def test_a_wait_for_a_server_that_is_not_there_ends_in_time(own_etcd: LocalEtcd, namespace: str) -> None:
    with etcdfence.connect(own_etcd.endpoint, namespace=namespace) as coordinator:
        own_etcd.kill()
        clock = coordinator._engine.host.now
        began = clock()
        with pytest.raises((Unavailable, etcdfence.OutcomeUnknown)):
            coordinator.acquire("job", wait=3)
        assert clock() - began < 5
    with pytest.raises(Unavailable):
        etcdfence.connect(f"http://127.0.0.1:{free_ports(1)[0]}", patience=1.0)


# --- nothing is kept in the process ------------------------------------------------------------------------


@pytest.mark.req("S0-19")
def test_a_worker_keeps_nothing_on_disk(endpoint: str, namespace: str, tmp_path: Path, connect: Connect) -> None:
    """Its directory and its home are emptied, and taken away, between its steps."""
    body = textwrap.dedent(
        """
        import os, shutil, sys
        import etcdfence
        with etcdfence.connect(sys.argv[1], namespace=sys.argv[2]) as coordinator:
            with coordinator.session() as session, session.acquire("job") as lease:
                lease.put("k", "1")
                shutil.rmtree(os.environ["HOME"])
                lease.put("k", "2")
                lease.check()
                print(os.listdir(os.environ["TMPDIR"]))
        """
    )
    home, work = tmp_path / "home", tmp_path / "tmp"
    home.mkdir()
    work.mkdir()
    done = subprocess.run(
        [sys.executable, "-c", body, endpoint, namespace],
        cwd=home,
        env={**os.environ, "HOME": str(home), "TMPDIR": str(work), "PYTHONPATH": os.getcwd()},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "[]\n", "")
    assert connect().get("k").value == b"2"
    assert connect().acquire("job", wait=0).generation > 0


@pytest.mark.req("S0-21")
def test_two_lookers_never_name_two_owners_of_one_revision(connect: Connect) -> None:
    coordinator, named = connect(), dict[int, set[int | None]]()
    lock, stop = threading.Lock(), threading.Event()
    coordinator.acquire("job").release()

    def look() -> None:
        looker = connect()
        while not stop.is_set():
            seen = looker.describe("job")
            with lock:
                named.setdefault(seen.revision, set()).add(seen.generation)

    threads = [threading.Thread(target=look) for _ in range(3)]
    for thread in threads:
        thread.start()
    for _ in itertools.repeat(None, 60):
        coordinator.acquire("job").release()
    stop.set()
    for thread in threads:
        thread.join(20)
    assert len(named) > 10
    assert all(len(owners) == 1 for owners in named.values()), named
