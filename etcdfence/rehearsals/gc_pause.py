"""The story that etcdfence exists for, with nothing faked.

Two worker processes and a real etcd. A claims a task and is stopped (SIGSTOP) in the middle of its step, as a
long garbage collection would stop it. Its lease runs out, B takes over with a higher generation and writes its
result. A is continued, and its very next statement writes its own, stale result. Then the store itself is read.
"""

from __future__ import annotations

import json
import os
import queue
import secrets
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from typing import Any, Self

from etcdfence import Coordinator, Entry, EtcdFenceError, TaskDescription, connect
from etcdfence._connect import EMBEDDED
from etcdfence._keys import prefix_end
from etcdfence._requests import Delete, Txn
from etcdfence.rehearsals.worker import RESULT, Orders
from etcdfence.server import LocalEtcd

TASK = "nightly-report"
A_SAYS, B_SAYS = "the result of A, computed before the pause", "the result of B"
STEP_SECONDS = 20.0  # for anything that is not the lease running out


@dataclass(frozen=True, slots=True)
class Line:
    """One line of the time line: seconds since the start, who, and what happened."""

    at: float
    who: str
    what: str

    def __str__(self) -> str:
        return f"{self.at:7.2f} s  {self.who:<6} {self.what}"


@dataclass(frozen=True, slots=True)
class Outcome:
    """What the store said in the end. `failures` is empty when the stale write was refused and left no trace."""

    a: dict[str, Any]
    b: dict[str, Any]
    entry: Entry
    description: TaskDescription
    failures: tuple[str, ...]


class Worker:
    """A worker process, and the events it has told."""

    def __init__(self, orders: Orders) -> None:
        self.name = orders.name
        self._events: queue.SimpleQueue[dict[str, Any] | None] = queue.SimpleQueue()
        self._process = subprocess.Popen(
            [sys.executable, "-m", "etcdfence.rehearsals.worker", json.dumps(asdict(orders))],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        threading.Thread(target=self._listen, name=f"listen-{self.name}", daemon=True).start()

    def _listen(self) -> None:
        for line in self._process.stdout or ():
            self._events.put(json.loads(line))
        self._events.put(None)

    def expect(self, *events: str, within: float = STEP_SECONDS) -> dict[str, Any]:
        """The next thing it tells, which must be one of `events`."""
        try:
            told = self._events.get(timeout=within)
        except queue.Empty:
            raise EtcdFenceError(f"worker {self.name} said nothing for {within:g} s") from None
        if told is None or told["event"] not in events:
            raise EtcdFenceError(f"worker {self.name} was to say {' or '.join(events)}, but: {told or 'it ended'}")
        return told

    def answer(self, text: str) -> None:
        if self._process.stdin is not None:
            self._process.stdin.write(text + "\n")
            self._process.stdin.flush()

    def pause(self) -> int:
        """Stop it, and return its pid once the kernel says that it stands still."""
        self._process.send_signal(signal.SIGSTOP)
        _, status = os.waitpid(self._process.pid, os.WUNTRACED)
        if not os.WIFSTOPPED(status):
            raise EtcdFenceError(f"worker {self.name} ended instead of being stopped")
        return self._process.pid

    def resume(self) -> None:
        self._process.send_signal(signal.SIGCONT)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()  # works on a stopped process too
        self._process.communicate()


def run(
    say: Callable[[Line], None], *, endpoints: Sequence[str] = (EMBEDDED,), ttl: int = 3, fenced: bool = True
) -> Outcome:
    """Act it out and return what the store said; `say` is called with each line as it happens.

    Uses a namespace of its own, which is removed afterwards. `fenced=False` runs the same story with plain
    puts, where the stale result must be expected to win.
    """
    began = time.monotonic()

    def tell(who: str, what: str) -> None:
        say(Line(time.monotonic() - began, who, what))

    with ExitStack() as stack:
        if EMBEDDED in endpoints:
            server = stack.enter_context(LocalEtcd())
            endpoints = (server.endpoint,)
            tell("etcd", f"started at {server.endpoint} from {server.binary}")
        namespace = f"rehearsal-{secrets.token_hex(4)}"
        coordinator = stack.enter_context(connect(endpoints, namespace=namespace, holder="observer"))
        stack.callback(_clean, coordinator)
        return _act(stack, coordinator, tuple(endpoints), ttl, fenced, tell)


def _act(
    stack: ExitStack,
    coordinator: Coordinator,
    endpoints: tuple[str, ...],
    ttl: int,
    fenced: bool,
    tell: Callable[[str, str], None],
) -> Outcome:
    wait = ttl * 5 + STEP_SECONDS
    orders = Orders("A", endpoints, coordinator.namespace, TASK, ttl, wait, fenced)
    a = stack.enter_context(Worker(orders))
    claim = a.expect("claimed")
    tell("A", f"owns {TASK!r}: generation {claim['generation']}, token {claim['token']}, TTL {claim['ttl']} s")
    a.expect("asked the model")
    tell("A", "is in the middle of its step, waiting for its model")
    tell("A", f"is stopped: SIGSTOP, pid {a.pause()}")
    b = stack.enter_context(Worker(Orders("B", endpoints, coordinator.namespace, TASK, ttl, wait, fenced)))
    tell("B", "wants the task and waits for A's lease to run out")
    takeover = b.expect("claimed", within=wait)
    tell("B", f"owns {TASK!r}: generation {takeover['generation']}, token {takeover['token']}")
    b.expect("asked the model")
    b.answer(B_SAYS)
    written = b.expect("wrote")
    tell(
        "etcd",
        f"answers B: succeeded={_word(written)} at revision {written['revision']}: {B_SAYS!r} is stored",
    )
    a.answer(A_SAYS)
    tell("A", "is continued: SIGCONT; its next statement writes its result")
    a.resume()
    late = a.expect("wrote", "was refused")
    tell("etcd", f"answers A: succeeded={_word(late)} at revision {late['revision']}")
    if late["event"] == "was refused":
        tell("A", f"got {late['error']}: {late['message']}; its lease now stands as {late['standing']!r}")
    return _judge(coordinator, {**claim, **late}, {**takeover, **written}, fenced, tell)


def _word(event: dict[str, Any]) -> str:
    return str(event["succeeded"]).lower()


def _judge(
    coordinator: Coordinator,
    a: dict[str, Any],
    b: dict[str, Any],
    fenced: bool,
    tell: Callable[[str, str], None],
) -> Outcome:
    entry, description = coordinator.get(RESULT), coordinator.describe(TASK)
    stored = (entry.value or b"").decode()
    tell("store", f"result = {stored!r}, revision {entry.revision}, written by {_writer(entry)}")
    for refusal in description.refusals:
        tell("store", f"refusal record of generation {refusal['generation']}: {json.dumps(refusal['tries'])}")
    checks = {
        "B's generation is not higher than A's": b["generation"] > a["generation"],
        "etcd accepted A's stale write": not a["succeeded"],
        f"the stored result is not B's but {stored!r}": stored == B_SAYS,
        "the stored result was touched after B wrote it": entry.revision == b["revision"],
        "B does not own the task": description.generation == b["generation"],
    }
    if fenced:
        provenance = entry.provenance
        by_b = provenance is not None and provenance.generation == b["generation"]
        checks["the stored result does not name B's generation as its writer"] = by_b
        noted = [refusal["generation"] for refusal in description.refusals]
        checks[f"A's refusal is not on record (recorded generations: {noted})"] = noted == [a["generation"]]
    failures = tuple(failure for failure, holds in checks.items() if not holds)
    for failure in failures:
        tell("FAILED", failure)
    if not failures:
        tell("held", "the stale write was refused by etcd, and the record is B's alone")
    return Outcome(a, b, entry, description, failures)


def _writer(entry: Entry) -> str:
    made_by = entry.provenance
    return f"generation {made_by.generation}" if made_by else "nobody that the fence knows"


def _clean(coordinator: Coordinator) -> None:
    root = coordinator._engine.keys.root.encode()
    coordinator._engine.host.call(Txn((), (Delete(root, prefix_end(root)),)))
