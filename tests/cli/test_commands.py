"""The command line, as a process: output formats, exit codes, configuration."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import urllib.request
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import yaml

from etcdfence import Coordinator, TaskKey
from etcdfence.server import free_ports

from ..support.proxy import Proxy
from ..support.raw import Raw
from ..support.waiting import eventually

Run = Callable[..., subprocess.CompletedProcess[str]]
COMMANDS: list[list[str]] = [
    [],
    ["init"],
    ["status"],
    ["dev"],
    ["lease"],
    ["lease", "list"],
    ["lease", "show"],
    ["lease", "watch"],
    ["queue"],
    ["queue", "list"],
    ["data"],
    ["data", "put"],
    ["data", "show"],
    ["run"],
    ["task"],
    ["task", "list"],
    ["task", "show"],
    ["rehearse"],
    ["rehearse", "gc-pause"],
]


def etcdfence(
    arguments: Sequence[str], environment: dict[str, str] | None = None, **options: Any
) -> subprocess.CompletedProcess[str]:
    inherited = {
        name: value for name, value in os.environ.items() if not name.startswith(("ETCDFENCE_", "ETCDCTL_"))
    }
    return subprocess.run(
        [sys.executable, "-m", "cli", *arguments],
        capture_output=True,
        text=True,
        timeout=60,
        env={
            **inherited,
            "COLUMNS": "200",
            "NO_COLOR": "1",
            "XDG_CONFIG_HOME": "/nonexistent",
            **(environment or {}),
        },
        **options,
    )


@pytest.fixture
def run(endpoint: str, namespace: str) -> Run:
    where = {"ETCDFENCE_ENDPOINTS": endpoint, "ETCDFENCE_NAMESPACE": namespace}

    def run(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
        return etcdfence(arguments, {**where, **environment})

    return run


@pytest.mark.parametrize("command", COMMANDS)
def test_help_needs_no_etcd(command: list[str]) -> None:
    done = etcdfence([*command, "--help"])
    assert (done.returncode, done.stderr) == (0, "")
    assert "Usage:" in done.stdout


def test_version_and_exit_codes_are_told() -> None:
    assert etcdfence(["--version"]).stdout == "etcdfence 0.1.0\n"
    told = " ".join(re.sub(r"[^\w ,]", " ", etcdfence(["--help"]).stdout).split())
    for code in ("0 ok", "1 error", "2 usage", "3 not found", "4 held", "5 ownership lost", "9 etcd unreachable"):
        assert code in told


def test_init_may_be_repeated(run: Run, raw: Raw, namespace: str) -> None:
    assert run("init").stdout == f"namespace {namespace} is ready, epoch 1\n"
    before = raw.get(f"/etcdfence/{namespace}/epoch".encode())
    assert run("init").returncode == 0
    assert raw.get(f"/etcdfence/{namespace}/epoch".encode()) == before


def test_status(run: Run, coordinator: Coordinator, endpoint: str, namespace: str) -> None:
    coordinator.acquire("a").release()
    lease = coordinator.acquire("b")
    table = run("status")
    assert table.returncode == 0
    assert "leader" in table.stdout
    found = json.loads(run("status", "-o", "json").stdout)
    assert (found["namespace"], found["epoch"]) == (namespace, "1")
    assert found["tasks"] == {"owned": 1, "waiting": 1}
    (member,) = found["members"]
    assert (member["endpoint"], member["role"], member["error"]) == (endpoint, "leader", None)
    assert run("status", "-o", "name").stdout == f"{endpoint}\n"
    lease.release()


@pytest.mark.req("S0-13", "S2-22")
def test_lease_list_and_show(run: Run, coordinator: Coordinator, raw: Raw) -> None:
    lease = coordinator.acquire(TaskKey("notify", "shipment-42"), ttl=30, holder="worker-1")
    coordinator.acquire("released").release()
    (row,) = json.loads(run("lease", "list", "-o", "json").stdout)
    assert row["task"] == "notify:shipment-42:v1"
    assert (row["token"], row["generation"], row["holder"]) == (
        str(lease.token),
        str(lease.generation),
        "worker-1",
    )
    assert row["lease"] == f"{lease.receipt.lease_id:x}"
    assert abs(row["expires_in"] - raw.ttl(lease.receipt.lease_id)) <= 2
    assert row["expires_at"].startswith("20")
    shown = json.loads(run("lease", "show", "notify:shipment-42:v1", "-o", "json").stdout)
    moving = {"expires_in": 0, "expires_at": "", "revision": ""}
    seen = {name: shown.pop(name) for name in ("liveness", "since", "waiters", "line")}
    assert seen == {"liveness": "alive", "since": lease.receipt.claimed_at, "waiters": 0, "line": []}
    assert {**shown, **moving} == {**row, **moving}
    table = run("lease", "list").stdout.splitlines()
    assert table[0].split() == [
        "TASK",
        "GENERATION",
        "HOLDER",
        "HOST",
        "PID",
        "GRANTED-TTL",
        "EXPIRES-IN",
        "STATE",
    ]
    assert "30 s" in table[1]  # units are shown
    assert len(run("lease", "list", "-o", "wide").stdout.splitlines()[0].split()) > len(table[0].split())
    assert run("lease", "list", "-o", "name").stdout == "notify:shipment-42:v1\n"
    lines = run("lease", "list", "-o", "jsonl").stdout.splitlines()
    assert [json.loads(line)["task"] for line in lines] == ["notify:shipment-42:v1"]
    assert yaml.safe_load(run("lease", "list", "-o", "yaml").stdout)[0]["generation"] == str(lease.generation)
    missing = run("lease", "show", "released")
    assert (missing.returncode, missing.stdout) == (3, "")
    assert "nobody owns released" in missing.stderr


def test_task_list_and_show(
    run: Run, coordinator: Coordinator, raw: Raw, connect: Callable[..., Coordinator]
) -> None:
    stale = coordinator.acquire("job")
    raw.delete(coordinator._engine.keys.task("job").owner)
    with connect().acquire("job"), pytest.raises(Exception, match="superseded"):
        stale.put("result", "stale")
    coordinator.acquire(TaskKey("op", "x")).complete({"n": 2**60}, {"revision": 2**60})
    rows = json.loads(run("task", "list", "-o", "json").stdout)
    assert [(row["task"], row["kind"], row["state"]) for row in rows] == [
        ("job", "lock", "waiting"),
        ("op:x:v1", "task", "completed"),
    ]
    only = run("task", "list", "--state", "completed", "-o", "name")
    assert only.stdout == "op:x:v1\n"
    assert run("task", "list", "--state", "bogus").returncode == 2
    shown = json.loads(run("task", "show", "job", "-o", "json").stdout)
    (refusal,) = shown["refusals"]
    assert (refusal["generation"], refusal["count"]) == (str(stale.generation), 1)
    assert refusal["tries"][0]["keys"] == ["result"]
    assert {attempt["ended"] for attempt in shown["attempts"]} == {"lost", "released"}
    assert "refusals:" in run("task", "show", "job").stdout
    assert run("task", "show", "never").returncode == 3
    assert json.loads(run("task", "show", "op:x:v1", "-o", "json").stdout)["result"] == {"n": 2**60}


@pytest.mark.field(39)
@pytest.mark.req("bad-input")
def test_names_of_every_kind_come_back_as_they_went_in(run: Run, coordinator: Coordinator, raw: Raw) -> None:
    names = [
        "a/b", "a%2Fb", "a b", "..", ".", "é", "e\u0301", "🦊", "x" * 1000, "line\nbreak", "tab\t", "a:b",
        "a:b:v1", "team-1", "team-10", "TEAM-1", "\x1b[31mred", "~", "%", "ünï/cödé :v2",
    ]  # fmt: skip
    leases = [coordinator.acquire(name, ttl=60) for name in names]
    keys = raw.below(coordinator._engine.keys.family("owner"))
    assert len(set(keys)) == len(names)
    listed = json.loads(run("lease", "list", "-o", "json").stdout)
    assert sorted(row["task"] for row in listed) == sorted(names)
    for name, lease in zip(names, leases, strict=True):
        shown = json.loads(run("lease", "show", "--lock", "-o", "json", "--", name).stdout)
        assert (shown["task"], shown["generation"]) == (name, str(lease.generation))
    for output in ("table", "name", "wide"):
        printed = run("lease", "list", "-o", output).stdout
        assert "\x1b" not in printed
        assert len(printed.splitlines()) == len(names) + (output != "name")
    assert json.loads(run("lease", "show", "team-1", "-o", "json").stdout)["task"] == "team-1"
    refused = run("lease", "show", "")
    assert (refused.returncode, refused.stdout) == (2, "")
    assert run("lease", "show", "x" * 2000).returncode == 2
    for lease in leases:
        lease.release()


@pytest.mark.req("bad-input")
def test_where_etcd_cannot_be_reached(run: Run) -> None:
    done = run("lease", "list", "--endpoints", f"http://127.0.0.1:{free_ports(1)[0]}")
    assert (done.returncode, done.stdout) == (9, "")
    assert "failed to connect" in done.stderr
    assert "Traceback" not in done.stderr
    for wrong in ("ftp://h:1", "http://h", "https://h:1"):
        done = run("lease", "list", "--endpoints", wrong)
        assert (done.returncode, done.stdout) == (2, "")
        assert "Traceback" not in done.stderr


def test_where_etcd_does_not_answer(run: Run, endpoint: str) -> None:
    with Proxy(endpoint) as proxy:
        proxy.swallow()
        done = run("lease", "list", "--endpoints", proxy.endpoint)
        assert done.returncode == 9
        assert "Traceback" not in done.stderr


def test_settings_come_from_flags_then_environment_then_file(
    run: Run, endpoint: str, namespace: str, tmp_path: Path
) -> None:
    config = tmp_path / "config.toml"
    config.write_text(
        f'current = "here"\n[contexts.here]\nendpoints = ["{endpoint}"]\nnamespace = "{namespace}-file"\n'
        f'[contexts.there]\nendpoints = "{endpoint}"\nnamespace = "{namespace}-there"\n'
    )
    clean = {"ETCDFENCE_ENDPOINTS": "", "ETCDFENCE_NAMESPACE": "", "ETCDFENCE_CONFIG": str(config)}
    assert f"{namespace}-file" in run("init", **clean).stdout
    assert f"{namespace}-there" in run("init", "--context", "there", **clean).stdout
    assert f"{namespace}-there" in run("init", **clean, ETCDFENCE_CONTEXT="there").stdout
    assert f"{namespace}-env" in run("init", **{**clean, "ETCDFENCE_NAMESPACE": f"{namespace}-env"}).stdout
    assert f"{namespace}-flag" in run("init", "-n", f"{namespace}-flag", ETCDFENCE_CONFIG=str(config)).stdout
    old_ways = run("init", ETCDFENCE_ENDPOINTS="", ETCDCTL_ENDPOINTS=endpoint.removeprefix("http://"))
    assert old_ways.returncode == 0
    assert run("init", "--context", "nowhere", **clean).returncode == 2


def test_data_goes_to_a_pipe_that_may_close(run: Run, coordinator: Coordinator, endpoint: str) -> None:
    for n in range(50):
        coordinator.acquire(f"job-{n}").release()
    command = f"{sys.executable} -m cli task list -n {coordinator.namespace} --endpoints {endpoint} | head -n 1"
    done = subprocess.run(command, shell=True, capture_output=True, text=True, timeout=30, check=False)
    assert done.stdout.startswith("TASK")
    assert "Traceback" not in done.stderr
    assert "Exception ignored" not in done.stderr


@pytest.mark.server
@pytest.mark.parametrize("ending", [signal.SIGINT, signal.SIGTERM])
def test_dev_runs_an_etcd_until_it_is_told_to_end(ending: signal.Signals) -> None:
    process = subprocess.Popen(
        [sys.executable, "-m", "cli", "dev", "--port", "0"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        assert process.stdout is not None
        assert process.stderr is not None
        endpoint = process.stdout.readline().strip()
        told = process.stderr.readline() + process.stderr.readline()
        assert f"export ETCDFENCE_ENDPOINTS={endpoint}" in told
        directory = Path(re.search(r"its data in (\S+);", told).group(1))  # type: ignore[union-attr]
        assert etcdfence(["init", "--endpoints", endpoint]).returncode == 0
        process.send_signal(ending)
        process.communicate(timeout=10)
    finally:
        process.kill()
    assert process.returncode == 0
    assert not directory.exists()
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    eventually("its etcd is gone", lambda: _refused(opener, endpoint))


def _refused(opener: Any, endpoint: str) -> bool:
    try:
        opener.open(f"{endpoint}/health", timeout=1).close()
    except OSError:
        return True
    return False


@pytest.mark.server
@pytest.mark.req("S0-22", "S2-38", "promise-2")
@pytest.mark.field(58)
def test_the_rehearsal_holds(run: Run, raw: Raw) -> None:
    done = run("rehearse", "gc-pause", "--ttl", "2")
    assert done.returncode == 0, done.stdout + done.stderr
    a, b = (int(found) for found in re.findall(r"[AB] +owns .*generation (\d+)", done.stdout))
    assert b > a
    assert re.search(r"etcd +answers B: succeeded=true", done.stdout)
    assert re.search(r"etcd +answers A: succeeded=false", done.stdout)
    assert f"got Superseded: generation {a} of nightly-report was superseded by {b}" in done.stdout
    assert f"refusal record of generation {a}" in done.stdout
    assert "result = 'the result of B', revision" in done.stdout
    assert raw.below(b"/etcdfence/rehearsal-") == []


@pytest.mark.server
@pytest.mark.req("S0-22")
def test_the_rehearsal_can_fail(run: Run) -> None:
    """The same story without the fence: the stale result wins, and the command says so with its exit code."""
    done = run("rehearse", "gc-pause", "--ttl", "2", "--without-fence", ETCDFENCE_ENDPOINTS="")
    assert done.returncode == 1
    assert re.search(r"etcd +answers A: succeeded=true", done.stdout)
    assert "result = 'the result of A, computed before the pause'" in done.stdout
    assert "FAILED" in done.stderr
