"""etcdfence run, as a process: codes, signals, losses, terminals, and writing from inside."""

from __future__ import annotations

import contextlib
import json
import os
import pty
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from etcdfence import Coordinator

from ..support.raw import Raw
from ..support.waiting import eventually

CLI = (sys.executable, "-m", "cli")
Start = Callable[..., "subprocess.Popen[str]"]


@pytest.fixture
def start(endpoint: str, namespace: str) -> Iterator[Start]:
    """Start a command; what is still there at the end of the test is killed."""
    started: list[subprocess.Popen[str]] = []
    environment = {
        **{name: value for name, value in os.environ.items() if not name.startswith(("ETCDFENCE_", "ETCDCTL_"))},
        "ETCDFENCE_ENDPOINTS": endpoint,
        "ETCDFENCE_NAMESPACE": namespace,
        "XDG_CONFIG_HOME": "/nonexistent",
        "KEPT": "as it was",
    }

    def start(*arguments: str, **options: Any) -> subprocess.Popen[str]:
        given = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE, **options}
        given["env"] = {**environment, **options.get("env", {})}
        started.append(subprocess.Popen([*CLI, *arguments], text=True, **given))
        return started[-1]

    yield start
    for one in started:
        if one.poll() is None:
            one.kill()
        one.communicate()


def ended(process: subprocess.Popen[str], within: float = 30.0) -> tuple[int, str, str]:
    out, err = process.communicate(timeout=within)
    return process.returncode, out, err


def script(text: str) -> tuple[str, ...]:
    return ("--", sys.executable, "-c", text)


def shell(text: str) -> tuple[str, ...]:
    return ("--", "sh", "-c", text)


def alive(pid: int) -> bool:
    """Whether there is such a process, other than as a zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except FileNotFoundError:
        return False


def told(path: Path) -> str:
    return eventually(f"{path} is written", lambda: path.exists() and path.read_text().strip(), 30) or ""


@pytest.mark.req("P-8")
@pytest.mark.field(100)
@pytest.mark.parametrize(
    ("text", "code"), [("exit 0", 0), ("exit 3", 3), ("exit 5", 5), ("kill -9 $$", 137), ("kill -TERM $$", 143)]
)
def test_exit_codes_are_passed_on(start: Start, coordinator: Coordinator, text: str, code: int) -> None:
    assert ended(start("run", "job", *shell(text))) == (code, "", "")
    assert coordinator.describe("job").attempts[0].ended == "released"


@pytest.mark.req("P-8")
@pytest.mark.field(100, 102)
def test_the_command_knows_its_lease_and_writes_under_it(start: Start, coordinator: Coordinator) -> None:
    names = "ETCDFENCE_TASK ETCDFENCE_TOKEN ETCDFENCE_GENERATION ETCDFENCE_LEASE KEPT"
    inside = " ".join(f'"${name}"' for name in names.split())
    put = f"{sys.executable} -m cli data put"
    text = f"printf '%s\\n' {inside}; {put} result 7; printf 'more' | {put} result - --expect absent; echo $?"
    code, out, err = ended(start("run", "job", *shell(text)))
    task, token, generation, lease, kept, revision, conflict = out.splitlines()
    assert (code, task, kept) == (0, "job", "as it was")
    assert token == f"{coordinator.epoch}.{generation}"
    assert int(lease, 16) > 0
    entry = coordinator.get("result")
    assert (entry.value, str(entry.revision), conflict) == (b"7", revision, "6")
    assert entry.provenance is not None
    assert (entry.provenance.task, str(entry.provenance.generation)) == ("job", generation)
    assert entry.provenance.attempt == coordinator.describe("job").attempts[0].id
    assert "result" in err  # the conflict names its key
    shown = json.loads(ended(start("data", "show", "result", "-o", "json"))[1])
    assert (shown["value"], shown["revision"], shown["generation"]) == ("7", revision, generation)
    again = ended(start("run", "job", *shell(f"{put} result 8 --expect {shown['revision']}")))
    assert again[0] == 0 and int(again[1]) > int(revision)


def test_what_data_commands_refuse(start: Start, coordinator: Coordinator) -> None:
    assert ended(start("data", "show", "nothing"))[0] == 3
    outside = ended(start("data", "put", "k", "v"))
    assert outside[0] == 2 and "ETCDFENCE_TASK is not set" in outside[2]
    lease = coordinator.acquire("job")
    known = {
        "ETCDFENCE_TASK": "job",
        "ETCDFENCE_TOKEN": str(lease.token),
        "ETCDFENCE_LEASE": f"{lease.receipt.lease_id:x}",
    }
    assert ended(start("data", "put", "k", "v", env=known))[0] == 0
    for wrong in (
        {"ETCDFENCE_TOKEN": str(lease.generation)},
        {"ETCDFENCE_TOKEN": f"{lease.token}.0"},
        {"ETCDFENCE_LEASE": str(lease.receipt.lease_id) + "0"},
        {"ETCDFENCE_LEASE": "xyz"},
    ):
        assert ended(start("data", "put", "k", "w", env={**known, **wrong}))[0] == 2, wrong
    assert ended(start("data", "put", "k", "w", "--expect", "-1", env=known))[0] == 2
    newer = f"{coordinator.epoch + 1}.{lease.generation}"
    assert ended(start("data", "put", "k", "w", env={**known, "ETCDFENCE_TOKEN": newer}))[0] == 9
    assert coordinator.get("k").value == b"v"


@pytest.mark.req("S0-8", "promise-2")
@pytest.mark.field(101)
def test_a_command_that_outlives_its_wrapper_is_fenced(
    start: Start, coordinator: Coordinator, tmp_path: Path, raw: Raw
) -> None:
    """The wrapper is killed and cannot tell its grandchild; what that writes is refused once another owns the
    task."""
    note, code = tmp_path / "pid", tmp_path / "code"
    put = f"{sys.executable} -m cli data put k stale"
    late = f"while [ ! -e {tmp_path}/go ]; do sleep 0.05; done; {put}; echo $? > {code}"
    text = f"setsid sh -c '{late}' & echo $$ > {note}; wait"
    wrapper = start("run", "job", "--ttl", "2", *shell(text))
    pid = int(told(note))
    wrapper.kill()
    eventually("the kernel has ended the command", lambda: not alive(pid))
    with coordinator.acquire("job", wait=20) as successor:
        successor.put("k", "the successor's")
        (tmp_path / "go").touch()
        assert told(code) == "5"
    assert coordinator.get("k").value == b"the successor's"


@pytest.mark.field(100)
def test_a_loss_ends_the_whole_group(start: Start, coordinator: Coordinator, raw: Raw, tmp_path: Path) -> None:
    """The command ignores SIGTERM and has a child of its own; both are killed after the grace period."""
    note = tmp_path / "pids"
    text = f"trap '' TERM; sleep 1000 & echo $$ $! > {note}; while :; do sleep 1; done"
    wrapper = start("run", "job", "--ttl", "3", "--grace", "0.5", *shell(text))
    pids = [int(pid) for pid in told(note).split()]
    owner = coordinator.describe("job").owner
    assert owner is not None and all(map(alive, pids))
    raw.revoke(owner.lease_id)
    code, _, err = ended(wrapper)
    assert code == 5
    assert "job was lost" in err
    assert not any(map(alive, pids))


@pytest.mark.field(100)
def test_the_code_for_a_loss_can_be_chosen(
    start: Start, coordinator: Coordinator, raw: Raw, tmp_path: Path
) -> None:
    note = tmp_path / "pid"
    wrapper = start(
        "run", "job", "--ttl", "3", "--loss-exit-code", "99", *shell(f"echo $$ > {note}; exec sleep 1000")
    )
    told(note)
    raw.delete(coordinator._engine.keys.task("job").owner)
    assert ended(wrapper)[0] == 99


@pytest.mark.field(100)
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1])
def test_signals_go_on_to_the_command(start: Start, tmp_path: Path, number: signal.Signals) -> None:
    note = tmp_path / "ready"
    text = (
        "import signal, sys, time, pathlib\n"
        f"signal.signal({int(number)}, lambda n, _: sys.exit(40 + n))\n"
        f"pathlib.Path({str(note)!r}).write_text('ready')\n"
        "while True: time.sleep(0.05)"
    )
    wrapper = start("run", "job", *script(text))
    told(note)
    wrapper.send_signal(number)
    assert ended(wrapper)[0] == 40 + number


@pytest.mark.field(72, 100)
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_while_waiting_leaves_the_line(
    start: Start, coordinator: Coordinator, number: signal.Signals
) -> None:
    lease = coordinator.acquire("job")
    wrapper = start("run", "job", "--wait", "forever", "--", "true")
    eventually("it is in line", coordinator.waiters, 20)
    (row,) = json.loads(ended(start("queue", "list", "-o", "json"))[1])
    assert (row["task"], row["position"], row["pid"]) == ("job", 1, wrapper.pid)
    sheet = json.loads(ended(start("lease", "show", "job", "-o", "json"))[1])
    assert (sheet["waiters"], sheet["line"][0]["pid"], sheet["liveness"]) == (1, wrapper.pid, "alive")
    wrapper.send_signal(number)
    assert ended(wrapper, 5) == (128 + number, "", "")
    assert coordinator.waiters() == []
    lease.check()


def test_the_command_finds_the_usual_signal_dispositions(start: Start) -> None:
    _, out, _ = ended(start("run", "job", "--", "grep", "SigIgn", "/proc/self/status"))
    ignored = int(out.split()[1], 16)
    assert not ignored & (1 << (signal.SIGPIPE - 1))


@pytest.mark.req("P-8")
def test_waiting_for_the_task(start: Start, coordinator: Coordinator) -> None:
    lease = coordinator.acquire("job")
    held = ended(start("run", "job", "--", "true"))
    assert held[0] == 4 and f"generation {lease.generation}" in held[2]
    assert ended(start("run", "job", "--wait", "0.3", "--", "true"))[0] == 4
    waiting = start("run", "job", "--wait", "30", *shell("exit 7"))
    eventually("it is in line", coordinator.waiters, 20)
    lease.release()
    assert ended(waiting)[0] == 7
    assert ended(start("run", "job", "--wait", "soon", "--", "true"))[0] == 2


def test_time_that_is_up(start: Start, coordinator: Coordinator) -> None:
    wrapper = start(
        "run", "job", "--max-runtime", "0.5", "--grace", "0.3", *shell("trap '' TERM; while :; do sleep 1; done")
    )
    assert ended(wrapper)[0] == 124
    assert coordinator.describe("job").attempts[0].ended == "released"


def test_what_the_command_leaves_running_is_ended_before_the_lease_goes(
    start: Start, coordinator: Coordinator, tmp_path: Path
) -> None:
    note = tmp_path / "pid"
    assert ended(start("run", "job", *shell(f"sleep 1000 >/dev/null 2>&1 & echo $! > {note}; exit 0")))[0] == 0
    assert not alive(int(told(note)))


def test_commands_that_cannot_be_run_claim_nothing(start: Start, coordinator: Coordinator) -> None:
    missing = ended(start("run", "job", "--", "no-such-program"))
    assert missing[0] == 2 and "no-such-program" in missing[2]
    assert ended(start("run", "job"))[0] == 2
    assert coordinator.tasks() == []


@pytest.mark.field(101)
def test_with_parent_the_command_ends_with_whoever_started_it(
    start: Start, coordinator: Coordinator, tmp_path: Path, endpoint: str, namespace: str
) -> None:
    note = tmp_path / "pid"
    command = [*CLI, "run", "job", "--with-parent", *shell(f"echo $$ > {note}; exec sleep 1000")]
    text = f"import subprocess; subprocess.Popen({command!r}).wait()"
    parent = subprocess.Popen(
        [sys.executable, "-c", text],
        env={**os.environ, "ETCDFENCE_ENDPOINTS": endpoint, "ETCDFENCE_NAMESPACE": namespace},
    )
    pid = int(told(note))
    owner = coordinator.describe("job").owner
    assert owner is not None and alive(owner.pid)
    parent.kill()
    parent.wait()
    eventually("the command has ended", lambda: not alive(pid), 20)
    eventually("the lease was released", lambda: coordinator.describe("job").owner is None, 20)
    eventually("the wrapper has ended", lambda: not alive(owner.pid), 20)


@pytest.mark.field(101)
def test_when_input_and_parent_go_away_the_command_goes_on(
    start: Start, coordinator: Coordinator, tmp_path: Path
) -> None:
    """As documented: a closed input is the command's affair; and whoever looks finds host and pid."""
    note = tmp_path / "ready"
    wrapper = start("run", "job", *shell(f"cat; echo ready > {note}; exec sleep 1000"), stdin=subprocess.PIPE)
    assert wrapper.stdin is not None
    wrapper.stdin.close()
    told(note)
    owner = coordinator.describe("job").owner
    assert owner is not None and owner.pid == wrapper.pid
    wrapper.stdin = None
    wrapper.terminate()
    assert ended(wrapper)[0] == 143


@pytest.mark.field(101)
def test_a_terminal(start: Start, coordinator: Coordinator, tmp_path: Path) -> None:
    """Ctrl-C at the terminal is for the command; and when the terminal goes away, it hears SIGHUP."""
    for ending, expected in (("\x03", 60 + signal.SIGINT), (None, 60 + signal.SIGHUP)):
        note, result = tmp_path / f"ready{expected}", tmp_path / f"result{expected}"
        text = (
            "import signal, sys, time, pathlib\n"
            "def end(n, _):\n"
            f"    pathlib.Path({str(result)!r}).write_text(str(60 + n))\n"
            "    sys.exit(60 + n)\n"
            "for n in (signal.SIGINT, signal.SIGHUP): signal.signal(n, end)\n"
            f"pathlib.Path({str(note)!r}).write_text('ready')\n"
            "while True: time.sleep(0.05)"
        )
        main, side = pty.openpty()
        wrapper = start(
            "run",
            "job",
            *script(text),
            stdin=side,
            stdout=side,
            stderr=side,
            start_new_session=True,
            preexec_fn=_take,
        )
        os.close(side)
        told(note)
        if ending:
            os.write(main, ending.encode())
            assert wrapper.wait(20) == expected
        os.close(main)
        assert told(result) == str(expected)
        wrapper.wait(20)
        assert coordinator.describe("job").owner is None


def _take() -> None:
    """Make our standard input the terminal of the new session."""
    import fcntl
    import termios

    fcntl.ioctl(0, termios.TIOCSCTTY, 0)


@pytest.mark.field(72)
def test_watching_ends_at_ctrl_c(start: Start, coordinator: Coordinator) -> None:
    watcher = start("lease", "watch", "job", "-o", "jsonl")
    assert watcher.stdout is not None
    assert json.loads(watcher.stdout.readline())["generation"] is None
    lease = coordinator.acquire("job", holder="worker-1")
    seen = json.loads(watcher.stdout.readline())
    assert (seen["task"], seen["generation"], seen["holder"]) == ("job", str(lease.generation), "worker-1")
    lease.proclaim("here")
    assert json.loads(watcher.stdout.readline())["value"] == "here"
    lease.release()
    assert json.loads(watcher.stdout.readline())["holder"] is None
    watcher.send_signal(signal.SIGINT)
    assert ended(watcher, 5)[0::2] == (130, "")


@pytest.mark.field(97)
def test_who_holds_it_since_when_and_is_it_alive(start: Start, coordinator: Coordinator, endpoint: str) -> None:
    lease = coordinator.acquire("held", ttl=30)
    code, out, _ = ended(start("lease", "show", "held", "-o", "json"))
    shown = json.loads(out)
    assert code == 0
    assert (shown["pid"], shown["generation"], shown["liveness"]) == (os.getpid(), str(lease.generation), "alive")
    assert shown["since"] == lease.receipt.claimed_at
    assert 20 <= shown["expires_in"] <= 30
    assert (shown["waiters"], shown["line"]) == (0, [])
    coordinator.acquire("free").release()
    assert ended(start("lease", "show", "free"))[0] == 3
    assert ended(start("lease", "show", "unheard-of"))[0] == 3
    assert ended(start("lease", "show", "held", "--endpoints", "http://127.0.0.1:1"))[0] == 9


@pytest.mark.field(102)
def test_numbers_can_be_handed_on(start: Start, coordinator: Coordinator) -> None:
    """Every number of 64 bits is text in JSON, lease ids are hexadecimal everywhere, and both are taken back."""
    lease = coordinator.acquire("job", holder="h")
    lease.put("k", "v")
    shown = json.loads(ended(start("lease", "show", "job", "-o", "json"))[1])
    entry = json.loads(ended(start("data", "show", "k", "-o", "json"))[1])
    for name in ("generation", "epoch", "revision"):
        assert isinstance(shown[name], str) and shown[name].isdigit()
    assert shown["lease"] == f"{lease.receipt.lease_id:x}"
    env = {
        "ETCDFENCE_TASK": shown["task"],
        "ETCDFENCE_TOKEN": shown["token"],
        "ETCDFENCE_LEASE": shown["lease"],
    }
    assert ended(start("data", "put", "k", "w", "--expect", entry["revision"], env=env))[0] == 0
    decimal = {**env, "ETCDFENCE_LEASE": str(lease.receipt.lease_id)}
    refused = ended(start("data", "put", "k", "x", env=decimal))
    assert refused[0] in (2, 5)
    assert coordinator.get("k").value == b"w"


@pytest.mark.field(100)
def test_a_command_that_ends_at_once_is_not_lost_sight_of(start: Start) -> None:
    """Also where the kernel collects children because SIGCHLD was ignored."""
    for _ in range(5):
        assert ended(start("run", "job", *shell("exit 7")), 10)[0] == 7
    ignored = start("run", "job", *shell("exit 7"), preexec_fn=_ignore_children)
    assert ended(ignored, 10)[0] == 7


def _ignore_children() -> None:
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)


def test_numbers_that_cannot_be_are_refused_before_anything_is_claimed(
    start: Start, coordinator: Coordinator
) -> None:
    for wrong in (("--max-runtime", "inf"), ("--grace", "inf"), ("--max-runtime", "1e10"), ("--holder", "")):
        assert ended(start("run", "job", *wrong, "--", "true"))[0] == 2, wrong
    for command in (("run", "", "--", "true"), ("lease", "show", "")):
        assert ended(start(*command, "--endpoints", "http://127.0.0.1:1"))[0] == 2
    assert coordinator.tasks() == []


@pytest.mark.field(100)
def test_a_second_signal_does_not_disturb_the_clean_up(start: Start, coordinator: Coordinator, raw: Raw) -> None:
    lease = coordinator.acquire("job")
    wrapper = start("run", "job", "--ttl", "60", "--wait", "forever", "--", "true")
    (place,) = eventually("it is in line", coordinator.waiters, 20)
    wrapper.send_signal(signal.SIGTERM)
    wrapper.send_signal(signal.SIGTERM)
    assert ended(wrapper, 10)[0] == 143
    assert coordinator.waiters() == []
    assert raw.ttl(place.lease_id) <= 0
    lease.release()


@pytest.mark.field(101)
def test_with_parent_while_waiting(
    start: Start, coordinator: Coordinator, tmp_path: Path, endpoint: str, namespace: str
) -> None:
    lease = coordinator.acquire("job")
    command = [*CLI, "run", "job", "--with-parent", "--wait", "forever", "--", "touch", str(tmp_path / "ran")]
    parent = subprocess.Popen(
        [sys.executable, "-c", f"import subprocess; subprocess.Popen({command!r}).wait()"],
        env={**os.environ, "ETCDFENCE_ENDPOINTS": endpoint, "ETCDFENCE_NAMESPACE": namespace},
    )
    (place,) = eventually("it is in line", coordinator.waiters, 20)
    parent.kill()
    parent.wait()
    eventually("it has left the line", lambda: not coordinator.waiters(), 20)
    eventually("it has ended", lambda: not alive(place.pid), 20)
    lease.release()
    assert not (tmp_path / "ran").exists()


def test_signals_reach_what_the_command_has_left_running(start: Start, tmp_path: Path) -> None:
    ready, heard = tmp_path / "ready", tmp_path / "heard"
    child = (
        "import signal, pathlib, sys, time\n"
        "signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
        f"signal.signal(signal.SIGUSR1, lambda *_: (pathlib.Path({str(heard)!r}).touch(), sys.exit()))\n"
        f"pathlib.Path({str(ready)!r}).write_text('ready')\n"
        "while True: time.sleep(0.05)"
    )
    program = tmp_path / "child.py"
    program.write_text(child)
    text = f"{sys.executable} {program} </dev/null >/dev/null 2>&1 & while [ ! -e {ready} ]; do sleep 0.05; done"
    wrapper = start("run", "job", "--grace", "20", *shell(text))
    told(ready)
    eventually("the command itself has ended", lambda: wrapper.poll() is None and not _children(wrapper.pid, "sh"))
    wrapper.send_signal(signal.SIGUSR1)
    assert ended(wrapper, 15)[0] == 0
    assert heard.exists()


def _children(pid: int, name: str) -> list[str]:
    """Living children of a process by that name."""
    found = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    return [
        child for child in found if alive(int(child)) and Path(f"/proc/{child}/comm").read_text().strip() == name
    ]


def test_the_command_writes_where_the_wrapper_was_told_to(
    start: Start, coordinator: Coordinator, tmp_path: Path
) -> None:
    """Another context is the file's current one, and has another prefix."""
    config = tmp_path / "config.toml"
    config.write_text('current = "b"\n[contexts.a]\n[contexts.b]\ndata_prefix = "/elsewhere/"\n')
    put = f"{sys.executable} -m cli data put k v"
    assert ended(start("run", "job", "--context", "a", *shell(put), env={"ETCDFENCE_CONFIG": str(config)}))[0] == 0
    assert coordinator.get("k").value == b"v"


def test_closed_standard_streams(start: Start, coordinator: Coordinator) -> None:
    put = f"{sys.executable} -m cli data put k -"
    code, _, err = ended(start("run", "job", *shell(f"{put} <&-")))
    assert code == 2 and "Traceback" not in err
    assert ended(start("run", "job", *shell(f"{sys.executable} -m cli data show nothing 2>&-")))[:2] == (3, "")


@pytest.fixture
def terminal(endpoint: str, namespace: str) -> Iterator[int]:
    """An interactive bash; what is written to the number is typed."""
    main, side = pty.openpty()
    bash = subprocess.Popen(
        ["bash", "--norc", "--noprofile", "-i"],
        stdin=side,
        stdout=side,
        stderr=side,
        env={**os.environ, "ETCDFENCE_ENDPOINTS": endpoint, "ETCDFENCE_NAMESPACE": namespace},
        start_new_session=True,
        preexec_fn=_take,
    )
    os.close(side)
    reading = threading.Thread(target=_read_all, args=(main,), daemon=True)
    reading.start()
    yield main
    os.write(main, b"\x03\nexit\nexit\n")
    with contextlib.suppress(subprocess.TimeoutExpired):
        bash.wait(5)
    bash.kill()
    bash.wait()
    reading.join(10)
    os.close(main)


def _read_all(file: int) -> None:
    with contextlib.suppress(OSError):  # the terminal has gone
        while os.read(file, 65536):
            continue


def typed(terminal: int, line: str) -> None:
    os.write(terminal, line.encode() + b"\n")


def _stands_still(path: Path) -> bool:
    before = path.read_text()
    threading.Event().wait(0.3)
    return path.read_text() == before


@pytest.mark.field(101)
def test_a_job_that_is_stopped_and_continued(terminal: int, coordinator: Coordinator, tmp_path: Path) -> None:
    """Ctrl-Z stops the command, the wrapper and so the renewals; continued after the lease has run out, both end.
    And `bg` leaves the terminal to the shell."""
    beat, code, shell_lives = tmp_path / "beat", tmp_path / "code", tmp_path / "lives"
    command = f"sh -c 'while :; do date +%N > {beat}; sleep 0.05; done' </dev/null"
    for way in ("fg", "bg; wait %1"):
        typed(terminal, f"{' '.join(CLI)} run job --ttl 2 -- {command}")
        eventually("it beats", lambda: beat.exists() and beat.read_text(), 20)
        os.write(terminal, b"\x1a")
        eventually("all is stopped", lambda: _stands_still(beat), 20)
        eventually("its lease has run out", lambda: coordinator.describe("job").owner is None, 20)
        typed(terminal, f"{way}; echo $? > {code}")
        assert told(code) == "5"
        typed(terminal, f"echo yes > {shell_lives}")
        assert told(shell_lives) == "yes"
        for path in (beat, code, shell_lives):
            path.unlink()


@pytest.mark.field(101)
def test_a_job_that_comes_to_the_foreground_reads_the_terminal(
    terminal: int, coordinator: Coordinator, tmp_path: Path
) -> None:
    got = tmp_path / "got"
    typed(terminal, f"{' '.join(CLI)} run job --ttl 9 -- sh -c 'sleep 1; read x; echo $x > {got}' &")
    eventually("it owns", lambda: [task for task in coordinator.tasks() if task.owner], 20)
    typed(terminal, "fg")

    def heard() -> bool:
        typed(terminal, "hello")
        return got.exists()

    eventually("it reads", heard, 20)
    assert told(got) == "hello"
    eventually("it has ended", lambda: not [task for task in coordinator.tasks() if task.owner], 20)


@pytest.mark.field(101)
def test_a_command_that_asks_the_terminal_although_its_input_is_another(
    terminal: int, coordinator: Coordinator, tmp_path: Path
) -> None:
    """As sudo or ssh do; and in a pipeline, whose other end reads the terminal as well."""
    got = tmp_path / "got"
    typed(terminal, f"echo x | {' '.join(CLI)} run job --ttl 9 -- sh -c 'read x </dev/tty; echo $x > {got}'")

    def heard() -> bool:
        typed(terminal, "hello")
        return got.exists()

    eventually("it reads", heard, 20)
    assert told(got) == "hello"
    got.unlink()
    eventually("it has ended", lambda: not [task for task in coordinator.tasks() if task.owner], 20)
    typed(
        terminal,
        f"{' '.join(CLI)} run job --ttl 9 -- sh -c 'sleep 2; echo done > {got}' | (read y </dev/tty; cat)",
    )
    typed(terminal, "something")
    assert told(got) == "done"
    eventually("it has ended", lambda: not [task for task in coordinator.tasks() if task.owner], 20)


@pytest.mark.field(100)
def test_a_signal_after_the_command_has_ended_costs_neither_code_nor_lease(
    start: Start, coordinator: Coordinator, raw: Raw, tmp_path: Path
) -> None:
    """The command ends with a code of its own while signals rain on the wrapper."""
    note = tmp_path / "pid"
    wrapper = start("run", "job", "--ttl", "60", *shell(f"trap '' TERM; echo $$ > {note}; sleep 0.5; exit 7"))
    told(note)
    owner = coordinator.describe("job").owner
    assert owner is not None

    def rains() -> bool:
        wrapper.send_signal(signal.SIGTERM)
        return wrapper.poll() is not None

    eventually("it has ended", rains, 30)
    assert wrapper.returncode == 7
    assert raw.ttl(owner.lease_id) <= 0
