"""A command under a lease: it runs as long as the lease is held, and ends when it is not.

The command is started without a shell, as the leader of a process group of its own; signals that we get go on
to that group. When the lease is lost, or cannot be verified in time, the group is told to end (SIGTERM), and
what is left of it after a grace period is killed. The lease is released when the whole group has ended: work
stops first.

Should this process itself be killed, the kernel ends the command where it can (Linux); what the command has
started in turn goes on then, and nothing renews the lease for it.
"""

from __future__ import annotations

import contextlib
import logging
import os
import re
import select
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Self

from etcdfence.errors import EtcdFenceError, Misuse, OwnershipRefused
from etcdfence.model import Standing, TaskKey, TaskName, Token

if TYPE_CHECKING:
    from etcdfence._sync import Coordinator, Lease

log = logging.getLogger("etcdfence.run")

FORWARDED: Final = tuple(
    getattr(signal, name)
    for name in ("SIGINT", "SIGTERM", "SIGHUP", "SIGQUIT", "SIGUSR1", "SIGUSR2", "SIGCONT", "SIGWINCH")
    if hasattr(signal, name)
)
ENDING: Final = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2)
STOPPING: Final = (signal.SIGTSTP, signal.SIGTTIN, signal.SIGTTOU)
LONGEST: Final = 100_000_000.0  # seconds
LOOK_AGAIN: Final = 0.05  # seconds, for what nobody tells of: the parent's end, and the end of a whole group
PARENT_SECONDS: Final = 0.5
KILLED_SECONDS: Final = 2.0
UNKNOWN: Final = 255  # the exit code of a command that somebody else has collected
# What the command is started by, so that the kernel ends it when we are killed. A program of its own, because code
# of ours between fork and exec would run in a copy of a process that has gRPC's threads, and was seen to abort
# there.
PR_SET_PDEATHSIG: Final = 1
LAUNCH: Final = f"""
import ctypes, os, signal, sys
parent = os.getppid()
for number in (signal.SIGPIPE, signal.SIGXFSZ):
    signal.signal(number, signal.SIG_DFL)
if sys.platform == "linux":
    ctypes.CDLL(None).prctl({PR_SET_PDEATHSIG}, {int(signal.SIGTERM)}, 0, 0, 0)
if os.getppid() != parent:
    sys.exit({128 + signal.SIGTERM})
try:
    os.execv(sys.argv[1], sys.argv[2:])
except OSError as error:
    print(f"etcdfence: {{sys.argv[2]}} cannot be run: {{error.strerror}}", file=sys.stderr)
    sys.exit(126)
"""
LAUNCHER: Final = (sys.executable, "-I", "-S", "-c", LAUNCH)


class Signalled(BaseException):
    """A signal that ends us before there is a command to hand it on to. Not an Exception: nothing else may take it
    for a failure of its own."""

    def __init__(self, number: int) -> None:
        super().__init__(signal.Signals(number).name)
        self.number = number


class Why(Enum):
    """Why the command has ended."""

    BY_ITSELF = "by itself"
    LOST = "the lease was lost"
    TIME_UP = "its time was up"


@dataclass(frozen=True, slots=True)
class Ended:
    """`code` as a shell shows it: the command's own, or 128 + n where signal n ended it. `left`: something of its
    process group could not be ended."""

    why: Why
    code: int
    left: bool = False


def find(command: Sequence[str]) -> str:
    """The program of a command, before anything is claimed for it. Misuse where there is none that can be run."""
    if not command:
        raise Misuse("a command is needed, after `--`")
    program = shutil.which(command[0])
    if program is None:
        raise Misuse(f"{command[0]!r} is not a program that can be run here")
    return program


_came: list[int] = []  # signals that were to end us
_inside: list[None] = []  # one for each `ended_by_signals` that we are in


@contextmanager
def ended_by_signals() -> Iterator[None]:
    """While nothing runs: a signal that would end us raises Signalled in the main thread, so that everything is
    given back on the way out, which a second one does not disturb. Those that were ignored from the start (nohup)
    stay ignored. May be nested."""

    def end(number: int, _frame: object) -> None:
        _came.append(number)
        if len(_came) == 1:
            raise Signalled(number)

    _inside.append(None)
    try:
        with handling(end, ENDING):
            if _came and len(_inside) == 1:  # before there was anybody to raise it
                raise Signalled(_came[0])
            yield
    finally:
        _inside.pop()
        if not _inside:
            _came.clear()


def note_signals() -> None:
    """For a program that does nothing else: from now on to its end no signal ends it in the middle of
    something, be it before its first step or after its last."""
    for number in ENDING:
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, lambda number, _: _came.append(number))


def ignore_signals() -> None:
    """For a program that is about to end: Python takes its handlers away before it has ended."""
    for number in ENDING:
        signal.signal(number, signal.SIG_IGN)


def no_more_signals() -> None:
    """The command has begun: what comes is for it, and nothing disturbs what is done when it has ended."""
    _came.append(0)


@contextmanager
def handling(handler: Callable[[int, Any], None], signals: Sequence[signal.Signals]) -> Iterator[None]:
    before = {number: signal.getsignal(number) for number in signals}
    try:
        for number in signals:
            if before[number] is not signal.SIG_IGN:
                signal.signal(number, handler)
        yield
    finally:
        for number, old in before.items():
            signal.signal(number, old)


class _What(Enum):
    SIGNAL = "a signal for the command"
    LOST = "the lease is lost, or cannot be verified"
    STOPPED = "the command was stopped, by Ctrl-Z say"
    EXITED = "the command has ended"
    NOTHING = "something may be due"


class Command:
    """One command under a lease. `lost` may be called from any thread, at any time; `run` once, in the main
    thread.

    grace         seconds between SIGTERM and SIGKILL
    max_runtime   seconds after which the command is ended, None: no limit
    with_parent   end the command when the process that started this one ends
    """

    def __init__(
        self,
        command: Sequence[str],
        *,
        grace: float = 10.0,
        max_runtime: float | None = None,
        with_parent: bool = False,
    ) -> None:
        self._program, self._command = find(command), list(command)
        self._grace, self.with_parent = _seconds(grace, "grace"), with_parent
        self._max_runtime = None if max_runtime is None else _seconds(max_runtime, "max_runtime")
        self._events: deque[tuple[_What, int]] = deque()
        # What wakes the main thread: events, and signals, which may reach the process in another thread.
        self._woken, self._waker = socket.socketpair()
        self._woken.setblocking(False)
        self._waker.setblocking(False)
        self._parent = os.getppid()
        self._why = Why.BY_ITSELF
        self._time_up_at: float | None = None
        self._kill_at: float | None = None
        self.held: Callable[[], bool] = lambda: True  # asked after we were stopped

    def lost(self, *_: object) -> None:
        """The lease is lost, or cannot be verified: end the command."""
        self._tell(_What.LOST)

    def _tell(self, what: _What, number: int = 0) -> None:
        self._events.append((what, number))
        with contextlib.suppress(BlockingIOError):  # it is full of wake-ups
            self._waker.send(b"!")

    @property
    def orphaned(self) -> bool:
        """Whether the process that started us has ended, and that is to be our end as well."""
        return self.with_parent and os.getppid() != self._parent

    def run(self, environment: Mapping[str, str]) -> Ended:
        """Run it to its end, and that of everything in its process group: nothing of it is left, whatever goes
        wrong here."""
        chosen = (*FORWARDED, *STOPPING)
        with (
            _collecting_children(),
            _woken_by_signals(self._waker),
            handling(lambda number, _: self._tell(_What.SIGNAL, number), chosen),
            _Terminal() as tty,
        ):
            child = self._start(environment)
            try:
                no_more_signals()
                tty.group = child.pid
                if self._max_runtime is not None:
                    self._time_up_at = time.monotonic() + self._max_runtime
                threading.Thread(target=self._await, args=(child,), name="etcdfence-command", daemon=True).start()
                code = self._attend(child.pid, tty)
            except BaseException:
                self._kill_at = time.monotonic()
                _signal(child.pid, signal.SIGTERM)
                raise
            finally:
                self._end_what_is_left(child.pid, tty)
        return Ended(self._why, code if code >= 0 else 128 - code, _alive(child.pid))

    def _start(self, environment: Mapping[str, str]) -> subprocess.Popen[bytes]:
        try:
            words = [*LAUNCHER, self._program, *self._command]
            return subprocess.Popen(words, env=dict(environment), process_group=0)
        except OSError as error:
            raise EtcdFenceError(f"{self._command[0]} cannot be run: {error.strerror}") from error

    def _await(self, child: subprocess.Popen[bytes]) -> None:
        """Tell what becomes of the command. The Popen is told as well: left alone, it would collect a child
        that has ended when it is collected itself."""
        code = UNKNOWN
        try:
            while True:
                _, status = os.waitpid(child.pid, os.WUNTRACED)
                if not os.WIFSTOPPED(status):
                    code = os.waitstatus_to_exitcode(status)
                    return
                self._tell(_What.STOPPED, os.WSTOPSIG(status))
        except ChildProcessError:
            log.error("somebody else has collected the command; how it ended is not known")
        finally:
            child.returncode = code
            self._tell(_What.EXITED, code)

    def _attend(self, group: int, tty: _Terminal) -> int:
        """Hand on signals, and end the command when that is due, until it has ended."""
        while True:
            what, number = self._next()
            if what is _What.EXITED:
                return number
            self._heed(what, number, group, tty)
            self._do_what_is_due(group)

    def _heed(self, what: _What, number: int, group: int, tty: _Terminal) -> None:
        match what:
            case _What.LOST:
                self._lost(group)
            case _What.STOPPED if number in (signal.SIGTTIN, signal.SIGTTOU):
                tty.wanted = True
                if not tty.ours:  # so that the shell knows, and can give it to us
                    self._stop(group, tty)
                if tty.ours:
                    tty.hand_over()
                    _signal(group, signal.SIGCONT)
            case _What.STOPPED if tty.the_commands:
                self._stop(group, tty)
                self._continue(group, tty)
            case _What.SIGNAL if number in STOPPING:
                _signal(group, signal.SIGTSTP)
                self._stop(group, tty)
                self._continue(group, tty)
            case _What.SIGNAL if number == signal.SIGCONT:
                self._continue(group, tty)
            case _What.SIGNAL:
                _signal(group, number)
                if number in ENDING:
                    _signal(group, signal.SIGCONT)  # one that is stopped must hear it

    def _stop(self, group: int, tty: _Terminal) -> None:
        """Stop as the command has been stopped, with all of our job. A job that nobody could continue is not
        stopped by the kernel, and goes on at once."""
        tty.take_back()
        _signal(group, signal.SIGSTOP)
        ours = signal.signal(signal.SIGTSTP, signal.SIG_DFL)
        os.killpg(os.getpgrp(), signal.SIGTSTP)
        signal.signal(signal.SIGTSTP, ours)

    def _continue(self, group: int, tty: _Terminal) -> None:
        """Go on, if the lease has lasted."""
        tty.hand_over()
        if not self.held():
            self._lost(group)
        _signal(group, signal.SIGCONT)

    def _next(self) -> tuple[_What, int]:
        due = [one for one in (self._kill_at or self._time_up_at,) if one is not None]
        pauses = [max(0.0, one - time.monotonic()) for one in due] + [PARENT_SECONDS] * self.with_parent
        return self._event(min(pauses, default=None))

    def _event(self, within: float | None) -> tuple[_What, int]:
        if not self._events:
            select.select([self._woken], [], [], within)
            with contextlib.suppress(BlockingIOError):
                self._woken.recv(4096)
        return self._events.popleft() if self._events else (_What.NOTHING, 0)

    def _do_what_is_due(self, group: int) -> None:
        now = time.monotonic()
        if self._time_up_at is not None and now >= self._time_up_at:
            self._end(group, Why.TIME_UP)
        if self.orphaned:
            self._end(group, Why.BY_ITSELF)
        if self._kill_at is not None and now >= self._kill_at:
            _signal(group, signal.SIGKILL)
            self._kill_at = now + PARENT_SECONDS

    def _lost(self, group: int) -> None:
        self._end(group, Why.LOST)
        self._why = Why.LOST  # whatever else was the reason before

    def _end(self, group: int, why: Why) -> None:
        """Once: the first reason counts."""
        if self._kill_at is None:
            self._why, self._kill_at = why, time.monotonic() + self._grace
            _signal(group, signal.SIGTERM)
            _signal(group, signal.SIGCONT)  # one that is stopped must hear it

    def _end_what_is_left(self, group: int, tty: _Terminal) -> None:
        """What the command has left running in its group: told to end, then killed. A zombie that nobody collects
        (in a container without an init) looks as if it were still there, so this does not go on for ever."""
        until = None
        while _signal(group, 0) and (until is None or time.monotonic() < until):
            self._end(group, self._why)
            if self._kill_at is not None and time.monotonic() >= self._kill_at:
                until = until or time.monotonic() + KILLED_SECONDS
            self._do_what_is_due(group)
            self._heed(*self._event(LOOK_AGAIN), group, tty)
        if (_What.LOST, 0) in self._events:
            self._why = Why.LOST


def _seconds(value: float, what: str) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= LONGEST:
        raise Misuse(f"{what} is a number of seconds from 0 to {LONGEST:.0f}, not {value!r}")
    return float(value)


@contextmanager
def _woken_by_signals(waker: socket.socket) -> Iterator[None]:
    before = signal.set_wakeup_fd(waker.fileno(), warn_on_full_buffer=False)
    try:
        yield
    finally:
        signal.set_wakeup_fd(before)


@contextmanager
def _collecting_children() -> Iterator[None]:
    """Where SIGCHLD is ignored, the kernel collects children, and nobody learns how they ended."""
    before = signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    try:
        yield
    finally:
        signal.signal(signal.SIGCHLD, before)


def _signal(group: int, number: int) -> bool:
    """Whether there was anybody to send it to."""
    try:
        os.killpg(group, number)
    except ProcessLookupError:
        return False
    except PermissionError:  # somebody is there, with rights of his own
        return True
    return True


def _alive(group: int) -> bool:
    """Whether anybody is left in a process group, other than zombies."""
    if not _signal(group, 0):
        return False
    try:
        found = [entry.read_text().rsplit(")", 1)[1].split() for entry in _stats()]
    except OSError:
        return True
    return any(int(fields[2]) == group and fields[0] != "Z" for fields in found) if found else True


def _stats() -> Iterator[Path]:
    return (path for path in Path("/proc").glob("[0-9]*/stat") if path.exists())


class _Terminal:
    """Who reads from our controlling terminal: the command, once it has wanted to and while we are in the
    foreground. Until then what is typed there (Ctrl-C, Ctrl-Z) is for us, and handed on."""

    def __init__(self) -> None:
        self.group, self.wanted = 0, False
        try:
            self._file = os.open("/dev/tty", os.O_RDWR | os.O_CLOEXEC | os.O_NOCTTY)
        except OSError:
            self._file = -1

    @property
    def _foreground(self) -> int:
        """The process group that has it; 0 where it is not ours, or gone."""
        try:
            return os.tcgetpgrp(self._file) if self._file >= 0 else 0
        except OSError:
            return 0

    @property
    def ours(self) -> bool:
        return self._foreground == os.getpgrp()

    @property
    def the_commands(self) -> bool:
        return self.group != 0 and self._foreground == self.group

    def hand_over(self) -> None:
        if self.wanted and self.ours:
            self._give_to(self.group)

    def take_back(self) -> None:
        if self.the_commands:
            self._give_to(os.getpgrp())

    def _give_to(self, group: int) -> None:
        with _ignoring(signal.SIGTTOU), contextlib.suppress(OSError):  # gone, or the command has ended already
            os.tcsetpgrp(self._file, group)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.take_back()
        if self._file >= 0:
            os.close(self._file)


@contextmanager
def _ignoring(number: signal.Signals) -> Iterator[None]:
    """Whoever hands on a terminal from the background is stopped, unless it ignores this signal."""
    before = signal.signal(number, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(number, before)


# --- with a lease ------------------------------------------------------------------------------------------


def run(
    coordinator: Coordinator, task: TaskName, command: Command, *, ttl: int, wait: float | None, holder: str | None
) -> Ended:
    """Acquire the task and run the command under it. Held where somebody else has it; Signalled where a signal
    came before the command was started."""
    with ended_by_signals():
        with _ended_with_parent(command):
            lease = coordinator.acquire(
                task, ttl=ttl, wait=wait, holder=holder, on_lost=command.lost, on_unverified=command.lost
            )
        command.held = lambda: lease.standing is Standing.HELD
        try:
            ended = command.run({**os.environ, **environment(lease, task)})
        except BaseException as error:
            lease.__exit__(type(error), error, None)
            raise
        return _given_back(lease, ended)


def _given_back(lease: Lease, ended: Ended) -> Ended:
    if ended.left:
        log.warning("something of the command could not be ended; %s is left to run out", lease.task)
        lease.abandon()
        return ended
    try:
        lease.release()
    except OwnershipRefused:
        return Ended(Why.LOST, ended.code)
    except EtcdFenceError as error:  # what the command did is done all the same
        log.warning("%s could not be released and ends with its TTL: %s", lease.task, error)
    return ended


@contextmanager
def _ended_with_parent(command: Command) -> Iterator[None]:
    """Before there is a command, the end of our parent is for us what a SIGTERM is."""
    done = threading.Event()

    def watch() -> None:
        while not command.orphaned:
            if done.wait(PARENT_SECONDS):
                return
        os.kill(os.getpid(), signal.SIGTERM)

    if command.with_parent:
        threading.Thread(target=watch, name="etcdfence-parent", daemon=True).start()
    try:
        yield
    finally:
        done.set()


def environment(lease: Lease, task: TaskName) -> dict[str, str]:
    """What a command is told of its lease."""
    return {
        "ETCDFENCE_TASK": lease.task,
        "ETCDFENCE_TASK_KIND": "task" if isinstance(task, TaskKey) else "lock",
        "ETCDFENCE_TOKEN": str(lease.token),
        "ETCDFENCE_GENERATION": str(lease.generation),
        "ETCDFENCE_LEASE": f"{lease.receipt.lease_id:x}",
    }


def told(variables: Mapping[str, str]) -> tuple[TaskName, Token, int]:
    """The task, the token and the etcd lease id that `environment` has told; Misuse where they are not there."""
    missing = [
        name for name in ("ETCDFENCE_TASK", "ETCDFENCE_TOKEN", "ETCDFENCE_LEASE") if not variables.get(name)
    ]
    if missing:
        raise Misuse(f"{missing[0]} is not set; this is for commands that run under `etcdfence run`")
    name, kind = variables["ETCDFENCE_TASK"], variables.get("ETCDFENCE_TASK_KIND", "lock")
    lease = variables["ETCDFENCE_LEASE"]
    if not re.fullmatch("[0-9a-f]{1,16}", lease):
        raise Misuse(f"ETCDFENCE_LEASE={lease!r} is not a hexadecimal etcd lease id")
    task = TaskKey.parse(name) if kind == "task" else name
    return task, Token.parse(variables["ETCDFENCE_TOKEN"]), int(lease, 16)
