"""What the README says, held to the code: its links, its promises and its commands."""

from __future__ import annotations

import asyncio
import os
import re
import runpy
import signal
import subprocess
import sys
import textwrap
import threading
from pathlib import Path
from typing import Any

import pytest

import etcdfence
from etcdfence.server import LocalEtcd
from etcdfence.testing import MemoryKit

from .support.raw import Raw
from .support.waiting import eventually

ROOT = Path(__file__).parents[1]
TEXT = (ROOT / "README.md").read_text(encoding="utf-8")


def test_links_lead_to_something() -> None:
    for target in re.findall(r"\]\((?!http)([^)#]+)", TEXT):
        assert (ROOT / target).exists(), target


def test_named_tests_exist() -> None:
    """Every promise names its tests as file::function."""
    named = re.findall(r"`(tests/[\w/]+\.py)::(\w+)`", TEXT)
    assert len(named) >= 10
    for path, function in named:
        assert f"def {function}(" in (ROOT / path).read_text(encoding="utf-8"), f"{path}::{function}"


@pytest.mark.req("S2-20")
def test_the_table_of_lifetimes_names_each_primitive() -> None:
    rows = re.search(r"## How long each thing lives\n(.*?)\n## ", TEXT, re.DOTALL)
    assert rows is not None
    for primitive in ("process", "connection", "etcd lease", "owner key", "transaction"):
        assert re.search(rf"^\| {primitive} ", rows[1], re.MULTILINE), primitive
    assert "co-operation of all writers" in rows[1]


def test_the_table_of_controls_is_there() -> None:
    header = "| control | helps with | does not prove |"
    assert header in TEXT
    rows = TEXT.split(header)[1].split("\n\n")[0]
    for control in ("atomic claim", "lease", "fencing", "idempotency key"):
        assert f"| {control} |" in rows


@pytest.mark.req("first-write")
def test_the_first_example_runs_as_it_stands(
    endpoint: str,
    namespace: str,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """The controller author's first fenced write, taken from the page."""
    (example,) = re.findall(r"```python\n# first\.py\n(.*?)```", TEXT, re.DOTALL)
    program = tmp_path / "first.py"
    program.write_text(textwrap.dedent(example))
    monkeypatch.setenv("ETCDFENCE_ENDPOINTS", endpoint)
    monkeypatch.setenv("ETCDFENCE_NAMESPACE", namespace)
    runpy.run_path(str(program), run_name="__main__")
    assert "wrote revision" in capsys.readouterr().out


def test_the_two_commands_exist() -> None:
    for command in ("scripts/demo", "scripts/test"):
        assert command in TEXT
        assert (ROOT / command).stat().st_mode & 0o111


@pytest.mark.req("P-29")
def test_the_asynchronous_example_runs_as_it_stands(
    endpoint: str, namespace: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    (example,) = re.findall(r"```python\n(async with etcdfence.*?)```", TEXT, re.DOTALL)
    monkeypatch.setenv("ETCDFENCE_ENDPOINTS", endpoint)
    monkeypatch.setenv("ETCDFENCE_NAMESPACE", namespace)
    with etcdfence.connect() as coordinator, coordinator.acquire("seed") as lease:
        lease.put("report/total", "6")
    scope: dict[str, Any] = {"etcdfence": etcdfence}
    exec("async def main():\n" + textwrap.indent(example, "    "), scope)
    asyncio.run(scope["main"]())
    with etcdfence.connect() as coordinator:
        assert coordinator.get("report/total").value == b"7"


@pytest.mark.req("P-32")
def test_the_example_of_a_test_passes(etcdfence_memory: MemoryKit) -> None:
    (example,) = re.findall(r"```python\n(def test_.*?)```", TEXT, re.DOTALL)
    scope: dict[str, Any] = {"etcdfence": etcdfence, "pytest": pytest}
    exec(example, scope)
    scope["test_a_worker_that_is_overtaken"](etcdfence_memory)


@pytest.mark.req("P-13")
def test_the_example_of_a_session_runs_as_it_stands(endpoint: str, namespace: str) -> None:
    (example,) = re.findall(r"```python\n(with coordinator\.session.*?)```", TEXT, re.DOTALL)
    with etcdfence.connect(endpoint, namespace=namespace) as coordinator:
        exec(example, {"coordinator": coordinator})
        assert [coordinator.get(f"{name}/seen").value for name in "abc"] == [b"yes"] * 3


class Replica:
    def __init__(self, program: Path, name: str, environment: dict[str, str]) -> None:
        self.name, self.lines = name, list[str]()
        self.process = subprocess.Popen(
            [sys.executable, str(program)],
            env={**os.environ, **environment, "REPLICA": name, "PYTHONPATH": str(ROOT)},
            stdout=subprocess.PIPE,
            text=True,
        )
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        with self.process.stdout as said:
            self.lines.extend(line.strip() for line in said)

    def end(self) -> None:
        self.process.kill()
        self.process.wait()
        self._reader.join(10)

    def said(self, line: str) -> bool:
        return any(line in one for one in self.lines)


@pytest.mark.req("S0-20", "P-4", "P-17", "promise-2")
@pytest.mark.field(21)
def test_the_controller_with_a_replica_killed_and_one_stopped(
    own_etcd: LocalEtcd, namespace: str, tmp_path: Path
) -> None:
    (example,) = re.findall(r"```python\n# controller\.py\n(.*?)```", TEXT, re.DOTALL)
    assert len(example.splitlines()) < 50
    program = tmp_path / "controller.py"
    program.write_text(example.replace("lease_duration=15, renew_deadline=10, retry_period=2", QUICK))
    where = {"ETCDFENCE_ENDPOINTS": own_etcd.endpoint, "ETCDFENCE_NAMESPACE": namespace}
    raw, started = Raw(own_etcd.endpoint), list[Replica]()

    def replica(name: str) -> Replica:
        started.append(Replica(program, name, where))
        return started[-1]

    def status(spec: str, by: Replica) -> None:
        for name in ("red", "green", "blue"):
            raw.put(f"/registry/widgets/{name}/spec".encode(), spec.encode())
        for name in ("red", "green", "blue"):
            key, wanted = f"/registry/widgets/{name}/status".encode(), f"{spec} by {by.name}".encode()
            eventually(f"{name} is {wanted!r}", lambda key=key, wanted=wanted: _value(raw, key) == wanted, 20)

    try:
        one = replica("one")
        status("1", one)
        two, three = replica("two"), replica("three")
        with etcdfence.connect(own_etcd.endpoint, namespace=namespace) as looker:
            eventually("two wait", lambda: len(looker.waiters()) == 2, 20)
            order = {waiter.holder: waiter.position for waiter in looker.waiters()}
            second, third = sorted((two, three), key=lambda replica: order[replica.name])
            one.process.kill()
            status("2", second)
            assert next(looker.observe("widget-controller")).value == f"http://{second.name}:8080"
            second.process.send_signal(signal.SIGSTOP)
            status("3", third)
            before = raw.revisions(b"/registry/widgets/")
            second.process.send_signal(signal.SIGCONT)
            eventually("it knows", lambda: second.said(f"{second.name} has stopped"), 20)
            assert raw.revisions(b"/registry/widgets/") == before
            eventually("it waits again", lambda: len(looker.waiters()) == 1, 20)
            third.process.terminate()
            assert third.process.wait(20) == 0
            eventually("its work ended first", lambda: third.said(f"{third.name} has stopped"))
            status("4", second)
            second.process.terminate()
            assert second.process.wait(20) == 0
            eventually("nobody leads", lambda: next(looker.observe("widget-controller")).owner is None)
    finally:
        for each in started:
            each.end()
        raw.close()


QUICK = "lease_duration=3, renew_deadline=2, retry_period=0.4"


def _value(raw: Raw, key: bytes) -> bytes | None:
    kv = raw.get(key)
    return kv.value if kv else None
