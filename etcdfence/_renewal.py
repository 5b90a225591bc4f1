"""The renewal thread: one for all leases of a coordinator, in both colours.

It asks for a round when leases are due and applies what the round says; when they are due and what may be
believed meanwhile are decided in `_timing`. Nothing that goes wrong in a round ends the thread, and if the
thread ended all the same, no lease would stay `held`: the standing is computed from the clock.
Callbacks run in threads of their own, so that none can keep another lease from being renewed.
"""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Protocol

from etcdfence import _timing
from etcdfence._timing import Rhythm
from etcdfence.errors import EtcdFenceError, PermissionDenied
from etcdfence.model import Doubt, Loss, LossReason, Standing


class Clock(Protocol):
    """What renewal needs of the host's clock."""

    def now(self) -> float: ...

    def wait(self, changed: threading.Condition, seconds: float) -> None: ...

    def serve(self, thread: threading.Thread) -> None: ...


log = logging.getLogger("etcdfence.renewal")


@dataclass(frozen=True, slots=True)
class Confirmed:
    """etcd confirmed the lease for a renewal sent at `clock` (seconds); `wall` is for people."""

    clock: float
    wall: str


Outcome = Confirmed | Doubt | Loss
IDLE = 2.0  # seconds without a lease after which the thread ends


class Belief:
    """What this process believes of one lease. Threads share it; the lock guards its decisions."""

    def __init__(
        self,
        name: str,
        rhythm: Rhythm,
        granted_at: float,
        clock: Callable[[], float],
        max_silence: float | None = None,
    ) -> None:
        self.name, self.rhythm, self.granted, self.max_silence = name, rhythm, rhythm.granted, max_silence
        self.on_loss: Callable[[Loss], None] | None = None
        self.on_doubt: Callable[[Doubt], None] | None = None
        self.on_over: Callable[[], None] | None = None  # quick, and called where the end was noticed
        self.finished = threading.Event()  # lost or released
        self._clock = clock
        self._lock = threading.RLock()  # a finaliser may come in the middle of a decision
        self._renewed = granted_at
        self._renewed_wall: str | None = None
        self._progressed = clock()
        self._due = rhythm.next_renewal(granted_at)
        self._failures = 0
        self._loss: Loss | None = None
        self._doubt: Doubt | None = None
        self.released = False
        self.ending = False  # our own ending is under way: that the owner key is gone may be its doing
        self.doubt_told = False

    @property
    def standing(self) -> Standing:
        return _timing.standing(self._clock(), self.deadline, self._loss, self.released)

    @property
    def deadline(self) -> float:
        return self.rhythm.deadline(self._renewed)

    def progress(self) -> None:
        """The work is alive."""
        self._progressed = self._clock()

    @property
    def silent(self) -> bool:
        """Whether the work has reported no progress for longer than it may."""
        return self.max_silence is not None and self._clock() - self._progressed > self.max_silence

    @property
    def age(self) -> float:
        """Seconds since the last renewal that etcd confirmed was sent."""
        return self._clock() - self._renewed

    @property
    def renewed_at(self) -> float:
        return self._renewed

    @property
    def loss(self) -> Loss | None:
        return self._loss

    @property
    def doubt(self) -> Doubt | None:
        """Why the lease is unverified, while it is."""
        if self.standing is not Standing.UNVERIFIED:
            return None
        return self._doubt or Doubt.UNREACHABLE

    @property
    def over(self) -> bool:
        return self.released or self._loss is not None

    def release(self) -> None:
        with self._lock:
            self.released = True
        self._finish()

    def lose(self, loss: Loss) -> None:
        """The first loss counts and is told once; a released lease cannot be lost any more."""
        with self._lock:
            if self.over:
                return
            told = Loss(loss.reason, loss.current, self._renewed_wall)
            self._loss = told
        self._finish()
        _tell(self.on_loss, told)
        level = logging.INFO if told.reason is LossReason.CLOSED else logging.WARNING
        log.log(level, "lost %s: %s", self.name, told.reason)

    def _finish(self) -> None:
        self.finished.set()
        if self.on_over is not None:
            self.on_over()

    def apply(self, outcome: Outcome) -> None:
        match outcome:
            case Loss() if self.ending:
                self._failed(Doubt.NOT_RENEWED)
            case Loss():
                self.lose(outcome)
            case Doubt():
                self._failed(outcome)
            case Confirmed(clock, wall):
                with self._lock:
                    if clock >= self._renewed:
                        self._renewed, self._renewed_wall = clock, wall
                        self._due = self.rhythm.next_renewal(clock)
                    self._failures, self._doubt, self.doubt_told = 0, None, False

    def _failed(self, doubt: Doubt) -> None:
        with self._lock:
            self._due = self._clock() + _timing.retry_delay(self._failures, self.granted)
            self._failures += 1
            self._doubt = doubt

    def next_event(self) -> float:
        """When this lease next needs the thread: to be renewed, or to be told that it is in doubt."""
        return self._due if self.doubt_told else min(self._due, self.deadline)

    def due(self, now: float) -> bool:
        return self._due <= now

    def late(self, now: float) -> float:
        """How many seconds a renewal is overdue by more than a period; 0 where it is not."""
        late = now - self._due
        return late if late > self.rhythm.period else 0.0

    def tell_doubt(self) -> None:
        with self._lock:
            if self.doubt_told or self.over or self._clock() < self.deadline:
                return
            self.doubt_told = True
        doubt = self.doubt or Doubt.UNREACHABLE
        _tell(self.on_doubt, doubt)
        log.warning("%s is unverified: %s", self.name, doubt)


def _tell(callback: Callable[..., None] | None, *arguments: object) -> None:
    if callback is None:
        return

    def call() -> None:
        try:
            callback(*arguments)
        except Exception:  # of the user's own; it must not be the end of anything else
            log.exception("a callback about a lease failed")

    try:
        threading.Thread(target=call, name="etcdfence-callback", daemon=True).start()
    except RuntimeError as error:  # the interpreter is ending, or the machine is out of threads
        log.warning("a callback could not be called: %s", error)


def doubt_from(error: Exception) -> Doubt:
    if isinstance(error, PermissionDenied):
        return Doubt.CREDENTIALS_REFUSED
    return Doubt.UNREACHABLE if isinstance(error, EtcdFenceError) else Doubt.INTERNAL_ERROR


class Work(Enum):
    GOES_ON = "there are leases to renew"
    DONE = "closed, or nothing was held for a while; the next lease starts a new thread"


def _notice_stall(leases: Sequence[Belief], now: float) -> None:
    """Rounds are short against the TTL, so a thread that is a whole period late was kept from running."""
    late = max((lease.late(now) for lease in leases), default=0.0)
    if late > 0:
        log.warning(
            "the renewal thread could not run for %.1f s: either this process was suspended, or some code held the"
            " interpreter's lock (a C extension that does not release it)",
            late,
        )


class Renewer:
    """`round` renews some leases, each of its requests within so many seconds, and returns an outcome for each,
    in their order; it may raise anything."""

    def __init__(self, round: Callable[[Sequence[Belief], float], Sequence[Outcome]], clock: Clock) -> None:
        self._round, self._clock = round, clock
        self._leases: list[Belief] = []
        # Callers take the lock itself: one that is interrupted on leaving a condition would leave it locked.
        self._lock = threading.RLock()
        self._changed = threading.Condition(self._lock)
        self._thread: threading.Thread | None = None
        self._closed = False

    def add(self, lease: Belief) -> None:
        """Renew this lease from now on. RuntimeError, and nothing added, where no thread can be started."""
        with self._lock:
            if self._closed:
                return
            if self._thread is None or not self._thread.is_alive():
                self._thread = threading.Thread(target=self._run, name="etcdfence-renewal", daemon=True)
                self._thread.start()
                self._clock.serve(self._thread)
            self._leases = [*self._leases, lease]
            self._changed.notify()

    def remove(self, lease: Belief) -> None:
        """After this no new renewal of the lease begins; one that is under way may still be answered."""
        with self._lock:
            self._leases = [one for one in self._leases if one is not lease]

    def close(self) -> None:
        with self._lock:
            self._closed = True
            self._leases = []
            self._changed.notify()

    def _run(self) -> None:
        while True:
            try:
                if self._step() is Work.DONE:
                    return
            except Exception:  # noqa: BLE001 - a handler of the user's logging, say; no lease may suffer for it
                self._stumbled()

    def _step(self) -> Work:
        with self._changed:
            self._leases = [lease for lease in self._leases if not lease.over]
            self._await_leases()
            if self._closed or not self._leases:
                self._thread = None
                return Work.DONE
            leases, now = self._leases, self._clock.now()
            pause = min(lease.next_event() for lease in leases) - now
            if pause > 0:
                self._clock.wait(self._changed, pause)
                return Work.GOES_ON
        _notice_stall(leases, now)
        self._serve(leases, now)
        return Work.GOES_ON

    def _await_leases(self) -> None:
        until = self._clock.now() + IDLE
        while not (self._closed or self._leases) and self._clock.now() < until:
            self._clock.wait(self._changed, until - self._clock.now())

    def _stumbled(self) -> None:
        with self._changed:
            self._changed.wait(IDLE / 10)  # whatever it was, do not repeat it in a tight circle
        with contextlib.suppress(Exception):  # it may have been the logging itself
            log.exception("the renewal thread stumbled and goes on")

    def _serve(self, leases: Sequence[Belief], now: float) -> None:
        # Those that are nearly due come along, so that leases taken one by one end up in common rounds.
        if any(lease.due(now) for lease in leases):
            soon = [lease for lease in leases if lease.due(now + lease.rhythm.period / 4)]
            deadlines = [lease.deadline for lease in leases if not lease.doubt_told]
            limit = _timing.request_limit(now, min(lease.granted for lease in soon), deadlines)
            for lease, outcome in zip(soon, self._outcomes(soon, limit), strict=True):
                lease.apply(outcome)
        for lease in leases:
            lease.tell_doubt()

    def _outcomes(self, leases: Sequence[Belief], limit: float) -> Sequence[Outcome]:
        try:
            return self._round(leases, limit)
        except EtcdFenceError as error:
            log.info("renewal of %d leases failed: %s", len(leases), error)
            return [doubt_from(error)] * len(leases)
        except Exception as error:  # whatever it is, the leases must go on being renewed
            log.exception("renewal of %d leases failed", len(leases))
            return [doubt_from(error)] * len(leases)
