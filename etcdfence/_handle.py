"""The lease as a handle: everything about it that asks nobody, and how a tenure is ended, for both colours.

What must happen around the commits of an ending (stop renewing, release the handle, give the etcd lease back)
is written once, as *plays*: generators that yield what is to be awaited and are sent what came of it. Each
colour performs them in its own way.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable, Generator
from typing import Any, NamedTuple, TypeVar

from etcdfence._engine import EXIT_SECONDS, Engine, GaveBack, Holding, Terms
from etcdfence._flow import Flow
from etcdfence._flows import fencing, tasks
from etcdfence._flows.fencing import Lane
from etcdfence._flows.pacing import Pace
from etcdfence._records import TaskRecord, read
from etcdfence._txns import Ending, Tenure
from etcdfence.errors import (
    EtcdFenceError,
    LeaseReleased,
    Misuse,
    OutcomeUnknown,
    OwnershipRefused,
    Unavailable,
    Unverified,
)
from etcdfence.model import Doubt, Guard, Loss, LossReason, Receipt, Standing, Token, Verdict

log = logging.getLogger("etcdfence")
T = TypeVar("T")


class Commit(NamedTuple):
    """Run this flow of the lane when it is its turn."""

    flow: Callable[[Lane, Pace], Flow[Any]]
    seconds: float | None = None
    even_released: bool = False


class Revoke(NamedTuple):
    """Give back the etcd lease; answered with GaveBack."""

    seconds: float


Play = Generator[Commit | Revoke, Any, T]


H = TypeVar("H")


def about(handle: H, callback: Callable[[H, Any], object]) -> Callable[[Any], None]:
    """A callback about a lease that does not keep the lease alive: renewal must not go on for nobody."""
    reference = weakref.ref(handle)

    def tell(what: Any) -> None:
        present = reference()
        if present is not None:
            callback(present, what)

    return tell


class LeaseHandle:
    """What the Lease of either colour knows without asking anybody."""

    def __init__(self, engine: Engine, tenure: Tenure, terms: Terms) -> None:
        self._engine, self._tenure = engine, tenure
        self._holding = Holding(tenure, terms, engine.host.store, engine.host.clock)
        # First of all, so that an interrupted start is not renewed for nobody.
        weakref.finalize(self, engine.drop, self._holding).atexit = False
        self._belief = self._holding.belief

    @property
    def task(self) -> str:
        return self._tenure.task

    @property
    def generation(self) -> int:
        """The mod revision of the owner key: 1 or more, larger for every later owner within an epoch."""
        return self._tenure.generation

    @property
    def token(self) -> Token:
        """The fencing token for destinations outside etcd: (epoch, generation), compared as a pair."""
        return Token(self._tenure.epoch, self._tenure.generation)

    @property
    def attempt(self) -> str:
        """The id of this tenure's attempt."""
        return self._tenure.attempt.attempt

    @property
    def receipt(self) -> Receipt:
        """What etcd answered to the claim."""
        tenure = self._tenure
        return Receipt(
            task=tenure.task,
            holder=tenure.attempt.holder,
            token=self.token,
            lease_id=tenure.guard.lease_id,
            revision=tenure.generation,
            cluster_id=tenure.cluster_id,
            claimed_at=tenure.attempt.started,
        )

    @property
    def ttl(self) -> int:
        """Seconds that etcd granted."""
        return self._tenure.granted

    @property
    def payload(self) -> Any:
        """The payload in the task record as it stood at the claim; None where there is none."""
        record = read(TaskRecord, self._tenure.record) if self._tenure.record else None
        return record.payload if isinstance(record, TaskRecord) else None

    @property
    def standing(self) -> Standing:
        """What this process may believe now; asks nobody. It is never a permission to write."""
        return self._belief.standing

    @property
    def loss(self) -> Loss | None:
        """How the lease was lost, or None."""
        return self._belief.loss

    @property
    def doubt(self) -> Doubt | None:
        """Why the lease is unverified, while it is."""
        return self._belief.doubt

    @property
    def expires_in(self) -> float:
        """Seconds until the lease becomes unverified if no renewal succeeds; 0 once it is over."""
        if self._belief.over:
            return 0.0
        return max(0.0, self._belief.deadline - self._engine.host.now())

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.task!r} generation={self.generation} {self.standing}>"

    def guard(self) -> Guard:
        """The comparisons of the fence, for a transaction of your own (see `Guard`)."""
        self._engine.require_live(self._holding)
        if self._belief.loss is not None:
            raise fencing.ownership_refused(self._tenure, self._belief.loss)
        return self._tenure.guard

    def progress(self) -> None:
        """Say that the work is alive, for a lease that was acquired with `max_silence`; every acknowledged write
        says it as well. Asks nobody."""
        self._belief.progress()

    def abandon(self) -> None:
        """Stop renewing and say nothing: the task becomes free when the TTL has passed. For a caller that
        cannot vouch that its work has stopped. Asks nobody. Misuse in a session, which is renewed for others."""
        self._engine.require_usable()
        if self._tenure.shared:
            raise Misuse(f"{self.task} is held in a session, which lives on; release it, or close the session")
        self._stop()
        self._holding.given_back = True

    # --- decisions of both colours -------------------------------------------------------------------------

    def _require_held(self, found: Loss | None) -> None:
        """What `check` makes of etcd's answer."""
        loss = found or self._belief.loss
        if loss is not None and loss.reason is LossReason.ENDED:
            raise LeaseReleased(f"this attempt at {self.task} was ended by this process")
        if loss is not None:
            self._belief.lose(loss)
            raise fencing.ownership_refused(self._tenure, loss)
        if self.standing is not Standing.HELD:
            why = f"the lease is {self.standing} ({self.doubt or 'over'})"
            raise Unverified(f"{self.task}: etcd names this owner still, but {why}")

    def _to_settle(self, unknown: OutcomeUnknown) -> tuple[str, Verdict | None]:
        """The write that an error is about, and its verdict where that is known already."""
        write_id = unknown.write_id if isinstance(unknown, OutcomeUnknown) else None
        if write_id is None:
            raise Misuse("this error is not about a fenced write; repeat the call that raised it")
        fate = self._holding.lane.fates.get(write_id)
        return write_id, fate.verdict if fate else None

    def _require_task(self, call: str) -> None:
        if ":" not in self._tenure.keys.segment:
            raise Misuse(f"{call} closes a task for good; {self.task!r} is a plain lock, which never closes")

    def _stop(self) -> None:
        self._belief.release()
        self._engine.leave(self._holding)

    # --- plays ---------------------------------------------------------------------------------------------

    def _ends(self, ending: Ending) -> Play[None]:
        self._belief.ending = True
        try:
            again = self._holding.lane.ended is not None  # then only whether it is the same ending is asked
            yield Commit(lambda lane, pace: tasks.end(lane, ending, pace), even_released=again)
        finally:
            self._belief.ending = False
        yield from self._finishes()

    def _releases(self, seconds: float | None = None) -> Play[None]:
        """Renewal stops at once, so a release that meets no etcd ends with the TTL all the same."""
        self._engine.require_usable()
        if self._holding.given_back:
            return
        self._belief.ending = True  # and stays so: nothing renews this lease any more
        self._engine.renewer.remove(self._belief)
        released = Ending("released")
        try:
            yield Commit(lambda lane, pace: tasks.end(lane, released, pace), seconds, even_released=True)
        except (Unavailable, OutcomeUnknown):
            if (yield from self._finishes(0.5)) is GaveBack.NO:
                self._goes_on_releasing()
                raise
        except OwnershipRefused:
            yield from self._finishes()
            raise
        except EtcdFenceError:  # credentials refused, say: it may be accepted yet
            yield from self._finishes()
            self._goes_on_releasing()
            raise
        except BaseException:  # Ctrl-C: nobody renews this lease any more, and it must not look held
            self._stop()
            self._engine.give_back_in_background(self._holding)
            raise
        else:
            yield from self._finishes()

    def _goes_on_releasing(self) -> None:
        """What hangs on a session's lease does not end by itself."""
        if self._tenure.shared and self._holding.lane.ended is None:
            self._engine.give_back_in_background(self._holding)

    def _finishes(self, seconds: float = 1.0) -> Play[GaveBack]:
        self._stop()
        outcome: GaveBack = yield Revoke(seconds)
        self._holding.given_back = outcome is GaveBack.YES or self._holding.lane.ended is not None
        return outcome

    def _leaves(self, error: BaseException | None) -> Play[None]:
        """Release on leaving a block. A loss is raised only over a body that ended well; the body's own exception
        stays, with the loss as a note. A release that met no etcd is logged: what the body wrote is acknowledged
        all the same."""
        try:
            yield from self._releases(None if error is None else EXIT_SECONDS)
        except (Unavailable, OutcomeUnknown) as unheard:
            log.warning("%s could not be released and ends with its TTL: %s", self.task, unheard)
        except EtcdFenceError as refused:
            if error is None:
                raise
            error.add_note(f"etcdfence: {refused}")
