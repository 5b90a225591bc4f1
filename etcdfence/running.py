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
import ctypes
import logging
import os
import queue
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING, Any, Final, Self

from etcdfence.errors import EtcdFenceError, Misuse, OutcomeUnknown, OwnershipRefused, Unavailable
from etcdfence.model import TaskKey, TaskName, Token

if TYPE_CHECKING:
    from etcdfence._sync import Coordinator, Lease

log = logging.getLogger("etcdfence.run")

FORWARDED: Final = tuple(
    getattr(signal, name)
    for name in ("SIGINT", "SIGTERM", "SIGHUP", "SIGQUIT", "SIGUSR1", "SIGUSR2", "SIGCONT", "SIGWINCH")
    if hasattr(signal, name)
)
ENDING: Final = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)
LOOK_AGAIN: Final = 0.05  # seconds, for what nobody tells of: the parent's end, and the end of a whole group
PARENT_SECONDS: Final = 0.5
KILLED_SECONDS: Final = 2.0
_PR_SET_PDEATHSIG: Final = 1


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
    """`code` as a shell shows it: the command's own, or 128 + n where signal n ended it."""

    why: Why
    code: int


def find(command: Sequence[str]) -> str:
    """The program of a command, before anything is claimed for it. Misuse where there is none that can be run."""
    if not command:
        raise Misuse("a command is needed, after `--`")
    program = shutil.which(command[0])
    if program is None:
        raise Misuse(f"{command[0]!r} is not a program that can be run here")
    return program


@contextmanager
def ended_by_signals() -> Iterator[None]:
    """While nothing runs: a signal that would end us raises Signalled in the main thread, so that everything is
    given back on the way out. Those that were ignored from the start (nohup) stay ignored."""

    def end(number: int, _frame: object) -> None:
        raise Signalled(number)

    with handling(end, ENDING):
        yield


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
        self._grace, self._max_runtime, self._with_parent = grace, max_runtime, with_parent
        self._events: queue.SimpleQueue[tuple[_What, int]] = queue.SimpleQueue()  # put() may interrupt itself
        self._parent = os.getppid()
        self._why = Why.BY_ITSELF
        self._time_up_at: float | None = None
        self._kill_at: float | None = None

    def lost(self, *_: object) -> None:
        """The lease is lost, or cannot be verified: end the command."""
        self._events.put((_What.LOST, 0))

    def run(self, environment: Mapping[str, str]) -> Ended:
        """Run it to its end, and that of everything in its process group."""
        with handling(lambda number, _: self._events.put((_What.SIGNAL, number)), FORWARDED), _Terminal() as tty:
            group = self._start(environment).pid
            tty.give_to(group)
            if self._max_runtime is not None:
                self._time_up_at = time.monotonic() + self._max_runtime
            threading.Thread(target=self._await, args=(group,), name="etcdfence-command", daemon=True).start()
            code = self._attend(group, tty)
            self._end_what_is_left(group)
        return Ended(self._why, code if code >= 0 else 128 - code)

    def _start(self, environment: Mapping[str, str]) -> subprocess.Popen[bytes]:
        try:
            return subprocess.Popen(
                self._command,
                executable=self._program,
                env=dict(environment),
                process_group=0,
                preexec_fn=_end_with_parent,
            )
        except OSError as error:
            raise EtcdFenceError(f"{self._command[0]} cannot be run: {error.strerror}") from error

    def _await(self, child: int) -> None:
        while True:
            _, status = os.waitpid(child, os.WUNTRACED)
            if not os.WIFSTOPPED(status):
                self._events.put((_What.EXITED, os.waitstatus_to_exitcode(status)))
                return
            self._events.put((_What.STOPPED, 0))

    def _attend(self, group: int, tty: _Terminal) -> int:
        """Hand on signals, and end the command when that is due, until it has ended."""
        while True:
            what, number = self._next()
            match what:
                case _What.EXITED:
                    return number
                case _What.SIGNAL:
                    _signal(group, number)
                case _What.LOST:
                    self._end(group, Why.LOST)
                case _What.STOPPED if tty.mine:
                    tty.stop_with(group)
            self._do_what_is_due(group)

    def _next(self) -> tuple[_What, int]:
        due = [one for one in (self._kill_at or self._time_up_at,) if one is not None]
        pauses = [max(0.0, one - time.monotonic()) for one in due] + [PARENT_SECONDS] * self._with_parent
        try:
            return self._events.get(timeout=min(pauses, default=None))
        except queue.Empty:
            return _What.NOTHING, 0

    def _do_what_is_due(self, group: int) -> None:
        now = time.monotonic()
        if self._time_up_at is not None and now >= self._time_up_at:
            self._end(group, Why.TIME_UP)
        if self._with_parent and os.getppid() != self._parent:
            self._end(group, Why.BY_ITSELF)
        if self._kill_at is not None and now >= self._kill_at:
            _signal(group, signal.SIGKILL)
            self._kill_at = now + PARENT_SECONDS

    def _end(self, group: int, why: Why) -> None:
        """Once: the first reason counts."""
        if self._kill_at is None:
            self._why, self._kill_at = why, time.monotonic() + self._grace
            _signal(group, signal.SIGTERM)
            _signal(group, signal.SIGCONT)  # one that is stopped must hear it

    def _end_what_is_left(self, group: int) -> None:
        """What the command has left running in its group: told to end, then killed. A zombie that nobody collects
        (in a container without an init) looks as if it were still there, so this does not go on for ever."""
        until = None
        while _signal(group, 0) and (until is None or time.monotonic() < until):
            self._end(group, self._why)
            if self._kill_at is not None and time.monotonic() >= self._kill_at:
                until = until or time.monotonic() + KILLED_SECONDS
            self._do_what_is_due(group)
            time.sleep(LOOK_AGAIN)


def _signal(group: int, number: int) -> bool:
    """Whether there was anybody to send it to."""
    try:
        os.killpg(group, number)
    except ProcessLookupError:
        return False
    except PermissionError:  # somebody is there, with rights of his own
        return True
    return True


def _death_signal() -> Callable[[], None]:
    """What the child does between fork and exec; everything that can be looked up is, beforehand."""
    if not sys.platform.startswith("linux"):
        return lambda: None
    prctl = ctypes.CDLL(None).prctl
    return lambda: prctl(_PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)


_end_with_parent: Final = _death_signal()


class _Terminal:
    """Who reads from the terminal: the command while it runs, where it was us, so that Ctrl-C is for the
    command."""

    def __init__(self) -> None:
        self._file = sys.stdin.fileno() if sys.stdin and sys.stdin.isatty() else -1
        self.mine = self._file >= 0 and os.tcgetpgrp(self._file) == os.getpgrp()

    def give_to(self, group: int) -> None:
        if self.mine:
            with _ignoring(signal.SIGTTOU), contextlib.suppress(OSError):  # gone, or the command has ended already
                os.tcsetpgrp(self._file, group)

    def stop_with(self, group: int) -> None:
        """Stop as well, so that the shell can go on; the lease runs out unless we are soon continued."""
        self.give_to(os.getpgrp())
        os.kill(os.getpid(), signal.SIGSTOP)
        self.give_to(group)
        _signal(group, signal.SIGCONT)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.give_to(os.getpgrp())


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
        lease = coordinator.acquire(
            task, ttl=ttl, wait=wait, holder=holder, on_lost=command.lost, on_unverified=command.lost
        )
        try:
            ended = command.run({**os.environ, **environment(lease, task)})
        except BaseException as error:
            lease.__exit__(type(error), error, None)
            raise
        try:
            lease.release()
        except OwnershipRefused:
            return Ended(Why.LOST, ended.code)
        except (Unavailable, OutcomeUnknown) as unheard:
            log.warning("%s could not be released and ends with its TTL: %s", lease.task, unheard)
        return ended


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
