"""Whole processes: how they end, what they leave, and what a forked child may do."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from etcdfence import Coordinator, TaskState
from etcdfence.server import LocalEtcd

from ..support.proxy import Proxy
from ..support.raw import Raw
from ..support.waiting import eventually

PREAMBLE = """
import sys, os, time, threading
import etcdfence
coordinator = etcdfence.connect(sys.argv[1], namespace=sys.argv[2])
lease = coordinator.acquire("job", ttl=30)
print("owned", lease.generation, flush=True)
"""


class Script:
    """A Python program that has claimed the task `job`."""

    def __init__(self, body: str, endpoint: str, namespace: str) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-c", PREAMBLE + textwrap.dedent(body), endpoint, namespace],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        said = self.process.stdout.readline() if self.process.stdout else ""
        assert said.startswith("owned"), self.process.communicate()
        self.generation = int(said.split()[1])

    def ended(self, within: float) -> tuple[int, str, str]:
        began = time.monotonic()
        out, err = self.process.communicate(timeout=within)
        assert time.monotonic() - began < within
        return self.process.returncode, out, err


@pytest.fixture
def script(endpoint: str, namespace: str) -> Iterator[Callable[..., Script]]:
    made: list[Script] = []

    def make(body: str, where: str = "") -> Script:
        made.append(Script(body, where or endpoint, namespace))
        return made[-1]

    yield make
    for one in made:
        one.process.kill()
        one.process.communicate()


@pytest.mark.req("exit")
@pytest.mark.parametrize(
    ("body", "code"),
    [
        ("", 0),
        ("sys.exit(3)", 3),
        ("raise ValueError('in the body')", 1),
        ("with lease:\n    raise ValueError('in the block')", 1),
        ("threading.Thread(target=lambda: lease.wait_lost(60), daemon=True).start()", 0),
        ("coordinator.acquire('another', on_lost=print)\nother = coordinator.acquire('third', on_lost=print)", 0),
    ],
)
def test_a_process_ends_at_once_and_gives_back(
    body: str, code: int, script: Callable[..., Script], coordinator: Coordinator
) -> None:
    returncode, _, err = script(body).ended(3)
    assert returncode == code, err
    found = coordinator.describe("job")
    assert found.state is TaskState.WAITING
    assert found.last_attempt is not None and found.last_attempt.ended == "released"


@pytest.mark.req("exit")
@pytest.mark.parametrize(
    "body", ["threading.Event().wait(60)", "with lease:\n    threading.Event().wait(60)", "lease.wait_lost(60)"]
)
def test_ctrl_c_ends_a_process_at_once(body: str, script: Callable[..., Script], coordinator: Coordinator) -> None:
    holder = script(body)
    holder.process.send_signal(signal.SIGINT)
    returncode, _, err = holder.ended(3)
    assert returncode == -signal.SIGINT, err
    assert "KeyboardInterrupt" in err
    assert coordinator.describe("job").state is TaskState.WAITING


BUSY = """
other = etcdfence.connect(sys.argv[1], namespace=sys.argv[2])
def quietly(action):
    try:
        action()
    except etcdfence.Closed:
        pass
threading.Thread(target=quietly, args=(lambda: other.acquire("job"),), daemon=True).start()
threading.Thread(target=quietly, args=(lambda: list(other.observe("job")),), daemon=True).start()
while not coordinator.waiters(): time.sleep(0.01)
"""


@pytest.mark.req("exit")
@pytest.mark.field(70)
@pytest.mark.parametrize(
    ("end", "code"),
    [
        ("", 0),
        ("raise ValueError", 1),
        ("with lease:\n    sys.exit(7)", 7),
        ("with coordinator, other:\n    sys.exit(7)", 7),
        ("import signal; os.kill(os.getpid(), signal.SIGINT); time.sleep(60)", -signal.SIGINT),
        ("os._exit(3)", 3),
    ],
)
def test_a_process_that_holds_waits_and_watches_ends_at_once(
    script: Callable[..., Script], coordinator: Coordinator, end: str, code: int
) -> None:
    holder = script(BUSY + end)
    returncode, _, err = holder.ended(3)
    assert returncode == code, err
    assert "Thread-" not in err and "Fatal" not in err  # its threads end without a word
    if code != 3:
        assert coordinator.describe("job").state is TaskState.WAITING
        assert coordinator.waiters() == []


@pytest.mark.req("exit")
def test_a_process_ends_at_once_although_etcd_does_not_answer(
    script: Callable[..., Script], endpoint: str
) -> None:
    with Proxy(endpoint) as proxy:
        holder = script("with lease:\n    threading.Event().wait(60)", proxy.endpoint)
        proxy.swallow()
        holder.process.send_signal(signal.SIGINT)
        returncode, _, _ = holder.ended(3)
        assert returncode == -signal.SIGINT


@pytest.mark.req("exit")
def test_a_process_that_cannot_reach_etcd_at_its_end(script: Callable[..., Script], endpoint: str) -> None:
    with Proxy(endpoint) as proxy:
        holder = script("sys.stdin.readline()", proxy.endpoint)
        proxy.cut()
        holder.process.send_signal(signal.SIGINT)
        holder.ended(3)


@pytest.mark.field(5)
@pytest.mark.req("S0-4")
def test_a_killed_owner_leaves_the_task_claimable(script: Callable[..., Script], coordinator: Coordinator) -> None:
    with subprocess.Popen(
        [
            sys.executable,
            "-c",
            PREAMBLE.replace("ttl=30", "ttl=2") + "lease.put('k','v'); threading.Event().wait(60)",
            coordinator.members()[0].endpoint,
            coordinator.namespace,
        ],
        stdout=subprocess.PIPE,
        text=True,
    ) as holder:
        assert holder.stdout is not None
        generation = int(holder.stdout.readline().split()[1])
        holder.kill()
        began = time.monotonic()
    lease = coordinator.acquire("job", wait=10)
    assert time.monotonic() - began < 2 + 2
    assert lease.generation > generation
    attempts = {attempt.id: attempt for attempt in coordinator.describe("job").attempts}
    assert [attempt.ended for attempt in attempts.values() if attempt.id != lease.attempt] == ["lost"]


@pytest.mark.req("bad-input", "exit")
def test_a_forked_child_is_refused_and_leaves_the_parents_lease_alone(
    script: Callable[..., Script], raw: Raw, coordinator: Coordinator
) -> None:
    holder = script(
        """
        def refused(call):
            try:
                call()
            except etcdfence.Closed as error:
                assert "forked" in str(error), error
                return
            raise AssertionError(call)

        child = os.fork()
        if child == 0:
            for call in (lease.check, lease.guard, lambda: lease.put("k", "child"), lease.release, lease.abandon,
                         lambda: coordinator.acquire("other"), lambda: coordinator.get("k")):
                refused(call)
            coordinator.close()
            try:
                with lease:
                    pass
            except etcdfence.Closed:
                pass
            del lease, coordinator
            sys.exit(7)
        _, status = os.waitpid(child, 0)
        print("child", os.waitstatus_to_exitcode(status), flush=True)
        lease.check()
        lease.put("k", "parent")
        print("parent", lease.standing, flush=True)
        """
    )
    returncode, out, err = holder.ended(15)
    assert (returncode, out.split()) == (0, ["child", "7", "parent", "held"]), err
    assert coordinator.get("k").value == b"parent"


@pytest.mark.req("S0-8", "S2-38")
@pytest.mark.field(58)
def test_a_stopped_process_wakes_into_a_refusal(
    script: Callable[..., Script], connect: Any, endpoint: str
) -> None:
    """SIGSTOP for twice the TTL; the next statements are a check and a fenced write."""
    body = """
        sys.stdin.readline()
        for call in (lease.check, lambda: lease.put("result", "A")):
            try:
                call()
                print("accepted", flush=True)
            except etcdfence.Superseded as refused:
                print(type(refused).__name__, refused.generation, refused.current, lease.standing, flush=True)
        """
    ours = connect()
    process = subprocess.Popen(
        [
            sys.executable,
            "-c",
            PREAMBLE.replace("ttl=30", "ttl=2") + textwrap.dedent(body),
            endpoint,
            ours.namespace,
        ],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert process.stdout is not None
        generation = int(process.stdout.readline().split()[1])
        process.send_signal(signal.SIGSTOP)
        _, status = os.waitpid(process.pid, os.WUNTRACED)
        assert os.WIFSTOPPED(status)
        successor = ours.acquire("job", ttl=30, wait=10)
        written = successor.put("result", "B")
        process.send_signal(signal.SIGCONT)
        out, _ = process.communicate("go on\n", timeout=15)
    finally:
        process.kill()
        process.communicate()
    refusal = ["Superseded", str(generation), str(successor.generation), "lost"]
    assert out.split() == refusal * 2
    entry = ours.get("result")
    assert (entry.value, entry.revision) == (b"B", written.revision)


def test_importing_starts_nothing() -> None:
    """No thread, no gRPC, no etcd3gw, no record models: those come with the first connect."""
    code = """
import sys, threading
import etcdfence
etcdfence.TaskKey, etcdfence.Held, etcdfence.ABSENT
assert threading.active_count() == 1
heavy = ("grpc", "etcd3gw", "pydantic", "google.protobuf", "typer", "yaml")
print([name for name in heavy if name in sys.modules])
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=30, check=True)
    assert done.stdout.strip() == "[]"


def test_a_private_etcd_does_not_outlive_its_starter() -> None:
    """Even a starter that is killed outright: its etcd ends with it."""
    code = """
import sys
from etcdfence.server import LocalEtcd
server = LocalEtcd().start()
print(server.endpoint, server.data_dir, flush=True)
sys.stdin.readline()
"""
    process = subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    endpoint, directory = process.stdout.readline().split()
    process.kill()
    process.communicate()
    probe = LocalEtcd(port=int(endpoint.rsplit(":", 1)[1]))
    eventually("it is gone", lambda: not probe.healthy(), 10)
    probe.stop()
    subprocess.run(["rm", "-rf", directory], check=True)
