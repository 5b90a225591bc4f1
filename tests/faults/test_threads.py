"""Many threads, closing in the middle, callbacks, finalisers: nothing hangs, nothing is left behind."""

from __future__ import annotations

import gc
import logging
import os
import signal
import subprocess
import sys
import threading
import time
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import etcdfence
from etcdfence import Closed, Coordinator, Held, Lease, Loss, Misuse, OutcomeUnknown, Standing, Unavailable
from etcdfence._requests import Put, Request, Txn
from etcdfence._turn import Turn
from etcdfence.errors import EtcdFenceError
from etcdfence.server import LocalEtcd

from ..support.raw import Raw
from ..support.tape import Tape, puts
from ..support.waiting import eventually

Taped = Callable[..., tuple[Coordinator, Tape]]
Connect = Callable[..., Coordinator]


def test_turns_are_taken_in_order(coordinator: Coordinator) -> None:
    """Two busy writers and a release: nobody waits longer than those before it."""
    lease = coordinator.acquire("job", ttl=60)
    stop, counts = threading.Event(), [0, 0]

    def write(n: int) -> None:
        while not stop.is_set():
            lease.put(f"k{n}", "v")
            counts[n] += 1

    threads = [threading.Thread(target=write, args=(n,)) for n in range(2)]
    for thread in threads:
        thread.start()
    eventually("each has written", lambda: min(counts) > 50)
    assert max(counts) < 3 * min(counts)
    stop.set()
    for thread in threads:
        thread.join(10)
    lease.release()
    assert coordinator.describe("job").last_attempt.ended == "released"  # type: ignore[union-attr]


def test_a_turn_that_does_not_come_is_given_up(taped: Taped) -> None:
    coordinator, tape = taped(patience=0.3)
    lease = coordinator.acquire("job", ttl=60)
    in_flight, go_on = threading.Event(), threading.Event()

    def act(tape: Tape, request: Request[Any], within: float) -> Any:
        in_flight.set()
        assert go_on.wait(10)
        return tape.wire.call(request, within)

    tape.fault(puts(b"/data/"), act)
    first = threading.Thread(target=lease.put, args=("k", "first"))
    first.start()
    assert in_flight.wait(10)
    with pytest.raises(Unavailable, match="still under way"):
        lease.put("k", "second")
    go_on.set()
    first.join(10)
    lease.put("k", "third")


def test_closing_waits_for_claims_under_way(connect: Connect, raw: Raw) -> None:
    """Nobody is left owning what nobody holds."""
    for _ in range(5):
        coordinator = connect()
        barrier = threading.Barrier(9)
        kept: list[Lease] = []

        def claim(
            n: int,
            coordinator: Coordinator = coordinator,
            barrier: threading.Barrier = barrier,
            kept: list[Lease] = kept,
        ) -> None:
            barrier.wait(10)
            try:
                kept.extend(coordinator.try_acquire(f"job-{n}-{m}", ttl=60) for m in range(20))
            except Closed:
                return

        threads = [threading.Thread(target=claim, args=(n,)) for n in range(8)]
        for thread in threads:
            thread.start()
        barrier.wait(10)
        coordinator.close()
        for thread in threads:
            thread.join(10)
            assert not thread.is_alive()
        left = raw.below(coordinator._engine.keys.family("owner"))
        assert left == []


def test_ctrl_c_never_leaves_a_turn_taken() -> None:
    """Real interrupts, at every moment of taking and giving up a turn: afterwards it is free."""
    turn = Turn()

    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    previous = signal.signal(signal.SIGALRM, interrupted)
    gc.disable()  # an interrupt inside somebody's finaliser would be swallowed there
    hits = 0
    try:
        for n in range(3000):
            try:
                signal.setitimer(signal.ITIMER_REAL, 20e-6 + (n % 100) * 1e-6)
                for _ in range(2000):  # far longer than the timer
                    turn.run(1.0, bool)
            except KeyboardInterrupt:
                hits += 1
                assert not turn._line
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, previous)
        gc.enable()
    assert hits > 2000


def test_a_lease_whose_renewal_cannot_start_is_given_back(
    connect: Connect, raw: Raw, monkeypatch: pytest.MonkeyPatch
) -> None:
    coordinator = connect()

    def start(_self: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patched:
        patched.setattr(threading.Thread, "start", start)
        with pytest.raises(EtcdFenceError, match="cannot be kept"):
            coordinator.acquire("job", ttl=60)
    assert raw.get(coordinator._engine.keys.task("job").owner) is None
    with coordinator.acquire("job", ttl=2) as lease:
        before = lease._belief.renewed_at
        eventually("renewed", lambda: lease._belief.renewed_at > before)


def test_closing_ends_a_wait_at_once(connect: Connect) -> None:
    holder, waiter = connect(), connect()
    holder.acquire("job")
    outcome: list[Exception] = []

    def wait() -> None:
        try:
            waiter.acquire("job")
        except Exception as error:
            outcome.append(error)

    thread = threading.Thread(target=wait)
    thread.start()
    eventually("it watches", lambda: waiter._engine.host._transport._waits)  # type: ignore[attr-defined]
    began = time.monotonic()
    waiter.close()
    thread.join(5)
    assert time.monotonic() - began < 1
    assert [type(error) for error in outcome] == [Closed]


def test_callbacks_may_do_anything(connect: Connect, raw: Raw, caplog: pytest.LogCaptureFixture) -> None:
    coordinator, done = connect(), [threading.Event() for _ in range(3)]

    def release_and_claim(lease: Lease, _loss: Loss) -> None:
        with pytest.raises((EtcdFenceError,)):
            lease.put("k", "v")
        with coordinator.acquire(f"{lease.task}-again", wait=5):
            done[0].set()

    def close(_lease: Lease, _loss: Loss) -> None:
        done[1].wait(10)
        coordinator.close()
        done[2].set()

    first = coordinator.acquire("first", ttl=2, on_lost=release_and_claim)
    second = coordinator.acquire("second", ttl=2, on_lost=close)
    raw.revoke(first.receipt.lease_id)
    assert done[0].wait(10)
    raw.revoke(second.receipt.lease_id)
    assert second.wait_lost(5)
    done[1].set()
    assert done[2].wait(10)


def test_a_dropped_handle_with_a_callback_is_not_renewed_for_ever(connect: Connect, raw: Raw) -> None:
    coordinator = connect()
    coordinator.acquire("job", ttl=2, on_lost=lambda *_: None)
    gc.collect()
    eventually("its owner key has gone", lambda: raw.get(coordinator._engine.keys.task("job").owner) is None, 6)


def test_only_what_was_dropped_is_called_dropped(
    coordinator: Coordinator, caplog: pytest.LogCaptureFixture
) -> None:
    for _ in range(5):
        with coordinator.acquire("released") as lease:
            lease.put("k", "v")
    del lease
    coordinator.acquire("dropped", ttl=2)
    gc.collect()
    assert coordinator._engine.holdings() == []
    assert "a lease on dropped was dropped" in caplog.text
    assert "a lease on released was dropped" not in caplog.text
    assert coordinator._engine._dropped.empty()


def test_a_finaliser_in_the_middle_of_anything_drops_nobody_else(connect: Connect) -> None:
    coordinator = connect()
    kept = coordinator.acquire("kept", ttl=2)
    dropped = coordinator.acquire("dropped", ttl=2)
    renewer = coordinator._engine.renewer
    with renewer._changed, coordinator._engine._lock:  # as if collected inside a decision of either
        del dropped
        gc.collect()
    before = kept._belief.renewed_at
    eventually("the other lease is renewed", lambda: kept._belief.renewed_at > before + 1)
    assert [holding.tenure.task for holding in coordinator._engine.holdings()] == ["kept"]


def test_a_logging_handler_that_raises_ends_no_renewal(connect: Connect, raw: Raw) -> None:
    class Raising(logging.Handler):
        def emit(self, _record: logging.LogRecord) -> None:
            raise RuntimeError("the disk is full")

    handler = Raising()
    coordinator = connect()
    lost = coordinator.acquire("lost", ttl=2)
    kept = coordinator.acquire("kept", ttl=2)
    logging.getLogger("etcdfence").addHandler(handler)
    try:
        raw.revoke(lost.receipt.lease_id)
        assert lost.wait_lost(5)
        before = kept._belief.renewed_at
        eventually("the other lease is renewed", lambda: kept._belief.renewed_at > before + 1)
    finally:
        logging.getLogger("etcdfence").removeHandler(handler)
    assert kept.standing is Standing.HELD


def test_a_closed_coordinator_keeps_no_thread(connect: Connect) -> None:
    """Closed while it holds something, and closed while its thread waits for the next lease."""
    for released in (False, True):
        coordinator = connect()
        lease = coordinator.acquire(f"job-{released}", ttl=60)
        thread = coordinator._engine.renewer._thread
        assert thread is not None
        if released:
            lease.release()
        coordinator.close()
        thread.join(5)
        assert not thread.is_alive()


def test_an_idle_coordinator_keeps_no_thread(connect: Connect) -> None:
    coordinator = connect()
    coordinator.acquire("job").release()
    eventually("the renewal thread has ended", lambda: coordinator._engine.renewer._thread is None)
    with coordinator.acquire("job", ttl=2) as lease:
        before = lease._belief.renewed_at
        eventually("renewed by another", lambda: lease._belief.renewed_at > before)


def test_ctrl_c_inside_release_leaves_nothing_that_looks_held(taped: Taped, raw: Raw) -> None:
    coordinator, tape = taped()
    lease = coordinator.acquire("job", ttl=60)

    def act(*_: object) -> None:
        raise KeyboardInterrupt

    tape.fault(puts(b"/history/"), act)
    with pytest.raises(KeyboardInterrupt):
        lease.release()
    assert lease.standing is Standing.RELEASED
    lease.release()  # again, and now it is heard
    assert raw.get(coordinator._engine.keys.task("job").owner) is None


def test_ctrl_c_inside_close_lets_it_be_closed_again(taped: Taped, raw: Raw) -> None:
    coordinator, tape = taped()
    held = [coordinator.acquire(name, ttl=60) for name in ("one", "two", "three")]

    def act(*_: object) -> None:
        raise KeyboardInterrupt

    tape.fault(puts(b"/history/"), act)
    with pytest.raises(KeyboardInterrupt):
        coordinator.close()
    coordinator.close()
    for lease in held:
        assert raw.get(lease._tenure.keys.owner) is None


def test_many_threads_on_one_coordinator(connect: Connect) -> None:
    """Mutual exclusion over claims and writes of 16 threads on 4 tasks."""
    coordinator = connect()
    inside: dict[str, int] = {}
    clashes: list[str] = []

    def work(n: int) -> None:
        for m in range(15):
            task = f"task-{(n + m) % 4}"
            try:
                lease = coordinator.try_acquire(task)
            except Held:
                continue
            with lease:
                if inside.setdefault(task, n) != n:
                    clashes.append(task)
                lease.put(task, str(n))
                inside.pop(task, None)

    threads = [threading.Thread(target=work, args=(n,)) for n in range(16)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive()
    assert clashes == []


# --- a private etcd ----------------------------------------------------------------------------------------


@pytest.mark.server
@pytest.mark.req("bad-input")
def test_a_port_that_is_taken_is_refused() -> None:
    with LocalEtcd() as first, pytest.raises(Misuse, match=f"port {first.port}"):
        LocalEtcd(port=first.port).start()


@pytest.mark.server
@pytest.mark.req("bad-input")
def test_a_data_directory_that_cannot_be(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_text("in the way")
    with pytest.raises(Misuse, match="cannot be started"):
        LocalEtcd(data_dir=file / "data").start()


@pytest.mark.server
def test_stopping_returns_when_the_server_has_ended() -> None:
    server = LocalEtcd().start()
    directory = server.data_dir
    for end in (server.kill, server.stop):
        port = server.port
        end()
        assert not server.healthy()
        with LocalEtcd(port=port):  # its port is free at once
            pass
        if end == server.kill:
            server.start()
    assert not directory.exists()


@pytest.mark.server
@pytest.mark.parametrize("how", ["SIGKILL", "SIGTERM", "paused"])
def test_nothing_is_left_of_a_private_etcd(how: str) -> None:
    """However its user ends, the server ends and its directory goes."""
    code = """
import etcdfence, signal, sys
coordinator = etcdfence.connect("embedded:")
server = coordinator._engine._on_close.__self__
print(server.endpoint, server.data_dir, flush=True)
if sys.argv[1] == "paused":
    server.pause()
signal.pause()
"""
    process = subprocess.Popen([sys.executable, "-c", code, how], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    endpoint, directory = process.stdout.readline().split()
    if how == "SIGTERM":
        process.terminate()
    else:
        process.kill()
    process.communicate()
    probe = LocalEtcd(port=int(endpoint.rsplit(":", 1)[1]))
    if how != "paused":
        eventually("the server has ended", lambda: not probe.healthy())
        eventually("its directory has gone", lambda: not Path(directory).exists())
    else:
        eventually("it was woken and has ended", lambda: not Path(directory).exists())
    probe.stop()


@pytest.mark.server
@pytest.mark.req("bad-input")
def test_a_server_that_ends_at_once_says_why() -> None:
    with pytest.raises(EtcdFenceError, match="no-such-flag"):
        LocalEtcd(flags=["--no-such-flag"]).start()


@pytest.mark.server
def test_a_forked_child_holds_no_lifeline() -> None:
    code = """
import os, sys, threading
from etcdfence.server import LocalEtcd
server = LocalEtcd().start()
child = os.fork()
if child == 0:
    os.close(1)
    threading.Event().wait(30)
    os._exit(0)
print(server.endpoint, server.data_dir, child, flush=True)
sys.stdin.readline()
"""
    process = subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    endpoint, directory, child = process.stdout.readline().split()
    try:
        process.kill()
        process.communicate()
        probe = LocalEtcd(port=int(endpoint.rsplit(":", 1)[1]))
        eventually("the server has ended", lambda: not probe.healthy())
        eventually("its directory has gone", lambda: not Path(directory).exists())
        probe.stop()
    finally:
        os.kill(int(child), signal.SIGKILL)


@pytest.mark.server
def test_a_forked_child_does_not_end_its_parents_server() -> None:
    code = """
import os, sys
from etcdfence.server import LocalEtcd
with LocalEtcd() as server:
    child = os.fork()
    if child:
        os.waitpid(child, 0)
        print(server.healthy(), flush=True)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.split() == ["True"]


@pytest.mark.req("promise-4")
def test_a_host_that_does_not_resolve_is_unavailable() -> None:
    with pytest.raises(Unavailable):
        etcdfence.connect("http://no-such-host.invalid:2379", patience=0.5)


def test_what_was_sent_is_what_the_tape_says(taped: Taped) -> None:
    """The faulty wire of these tests really is the wire."""
    coordinator, tape = taped()
    with coordinator.acquire("job") as lease:
        lease.put("k", "v")
    written = [request for request in tape.sent if isinstance(request, Txn) and request.success]
    keys = [operation.key for request in written for operation in request.success if isinstance(operation, Put)]
    assert coordinator._engine.keys.data("k") in keys
    assert not any(isinstance(error, OutcomeUnknown) for error in tape.deliver())


@pytest.mark.field(34)
@pytest.mark.parametrize(
    ("module", "asks"), [("gevent.monkey", "is_module_patched"), ("eventlet.patcher", "is_monkey_patched")]
)
def test_green_threads_are_refused_with_a_sentence(
    endpoint: str, monkeypatch: pytest.MonkeyPatch, module: str, asks: str
) -> None:
    """As the two packages say it of themselves; scripts/compat does not install them."""
    said = {"threading": True, "thread": True}
    monkeypatch.setitem(sys.modules, module, types.SimpleNamespace(**{asks: lambda name: said.get(name, False)}))
    with pytest.raises(etcdfence.Misuse, match="monkey-patched"):
        etcdfence.connect(endpoint, namespace="green")
    said.clear()
    etcdfence.connect(endpoint, namespace="green").close()
