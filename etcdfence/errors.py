"""Every exception of etcdfence, ordered by what the caller may do next.

    Refused         a definite no: nothing was changed, and trying the same again gives the same answer
    Unavailable     definitely not applied: safe to try again
    OutcomeUnknown  may have been applied, now or later; never report it as failed
    Misuse          a bug in the calling code; nothing was sent

Nothing else leaves the library. Each exception has `.advice`, one sentence for a person.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from etcdfence.model import Loss, Owner


class EtcdFenceError(Exception):
    """The root of the family; catch it to catch everything that etcdfence raises."""

    advice = "See the message."


class Refused(EtcdFenceError):
    """A definite no. Nothing was changed."""

    advice = "The answer is final; decide again from what the store says now."


class Unavailable(EtcdFenceError):
    """The request was definitely not applied."""

    advice = "Nothing was changed. Try again, and check that the endpoints name running etcd members."


class OutcomeUnknown(EtcdFenceError):
    """The request may have been applied, or may still be.

    `write_id` names a fenced write that the lease's `settle` can decide; it is None for other requests.
    Reading the store does not settle it: a timed-out request was seen to commit after linearizable reads
    had shown it absent. Only another committed transaction does.
    """

    advice = "Do not treat this as failed. Ask lease.settle(error), or repeat the same call on the same lease."

    def __init__(self, message: str, *, write_id: str | None = None) -> None:
        super().__init__(message)
        self.write_id = write_id


class Misuse(EtcdFenceError):
    """The calling code asked for something that can never work. Nothing was sent."""

    advice = "Correct what was asked for; the message says what is expected."


class Closed(Misuse):
    """The coordinator was closed, or belongs to the process this one was forked from."""

    advice = "Call etcdfence.connect() again, once in every process."


class Held(Refused):
    """Somebody owns the task. `owner` says who, `mine` whether it is this coordinator.

    `owner` is None when nobody owns it at the moment but others are ahead in line, or it is kept for somebody;
    `line` is how many were in line. What this coordinator owns (`mine`) it does not wait for without limit:
    handles may be used by all of its threads and tasks, so it might wait for itself. `namesake`: the owner goes
    by the same holder name but is another worker; names are for people and decide nothing, two workers should
    not share one.
    """

    advice = "Wait with acquire(), look at the present owner with describe(), or leave the task alone."

    def __init__(
        self, task: str, owner: Owner | None, *, mine: bool = False, namesake: bool = False, line: int = 0
    ) -> None:
        self.task, self.owner, self.mine, self.namesake, self.line = task, owner, mine, namesake, line
        waiting = f"; {line} in line" if line else ""
        super().__init__(f"{task} is {self._by()}{waiting}; no new attempt was begun")

    def _by(self) -> str:
        if self.owner is None:
            return "kept for others who are ahead in line" if self.line else "kept for a named worker"
        whose = "this coordinator" if self.mine else f"{self.owner.holder!r} on {self.owner.host}"
        clash = ", another worker under the same name" if self.namesake else ""
        return f"owned by {whose}{clash} with generation {self.owner.generation}"


class TaskClosed(Refused):
    """The task is completed, failed or cancelled; `state` says which and `result` what it left."""

    advice = "The work is done; use the recorded result. A corrected request needs a new version of the key."

    def __init__(self, task: str, state: str, result: Any = None) -> None:
        self.task, self.state, self.result = task, state, result
        super().__init__(f"{task} is closed: {state}")


class OwnershipRefused(Refused):
    """What Superseded and LeaseLost share: this generation may not write any more.

    `revision` is the store revision of etcd's answer, or None when no answer was needed.
    """

    advice = "Stop this work. Another acquire() starts a new attempt with a higher generation."

    def __init__(self, message: str, *, task: str, generation: int, loss: Loss, revision: int | None) -> None:
        super().__init__(message)
        self.task, self.generation, self.loss, self.revision = task, generation, loss, revision


class Superseded(OwnershipRefused):
    """A later generation exists: `current` is the newest one known, `generation` the refused one."""

    def __init__(self, *, task: str, generation: int, loss: Loss, revision: int | None) -> None:
        self.current = loss.current
        super().__init__(
            f"generation {generation} of {task} was superseded by {loss.current}; nothing was changed",
            task=task,
            generation=generation,
            loss=loss,
            revision=revision,
        )


class LeaseLost(OwnershipRefused):
    """The lease is over and no later owner is known; `loss.reason` says how it ended."""

    def __init__(self, *, task: str, generation: int, loss: Loss, revision: int | None) -> None:
        super().__init__(
            f"generation {generation} of {task} is over ({loss.reason}); nothing was changed",
            task=task,
            generation=generation,
            loss=loss,
            revision=revision,
        )


class LeaseReleased(Refused):
    """This handle was released or abandoned by its own process; nothing was sent."""

    advice = "Acquire the task again; a released handle never comes back to life."


class Unverified(Refused):
    """etcd has not confirmed the lease within its time, so consequential work must not begin on it."""

    advice = "Wait until lease.standing is 'held' again, or stop; fenced writes are still decided by etcd."


class Conflict(Refused):
    """A compared key had moved. `changed` names the keys whose revision was not the expected one."""

    advice = "Read the named keys again, decide again, and write with the new revisions."

    def __init__(self, changed: tuple[str, ...]) -> None:
        self.changed = changed
        super().__init__(f"changed since they were read: {', '.join(changed)}; nothing was written")


class UnresolvedEffects(Refused):
    """The task has effects that are prepared or uncertain; it cannot be completed over them."""

    advice = "Settle each named effect first: look at its destination, then record what was found."

    def __init__(self, task: str, effects: tuple[str, ...]) -> None:
        self.task, self.effects = task, effects
        super().__init__(f"{task} has unresolved effects: {', '.join(effects)}")


class PermissionDenied(Refused):
    """etcd refused the credentials or the key range."""

    advice = "Check the user, its role and the key range it was granted."


class TooLarge(Refused):
    """The write exceeds what one etcd transaction takes (by default 1.5 MiB or 128 operations)."""

    advice = "Store less in one write: split the keys over several fenced writes, or keep large values elsewhere."


class SessionLost(Refused):
    """The session's etcd lease is gone, and with it every lease that was acquired in it."""

    advice = "Open another session(); the tasks are free for whoever claims them first."


class Stopped(Refused):
    """A wait was ended by whoever had asked for it."""

    advice = "Nothing is left behind; ask again when it is wanted again."


class LeaseNotFound(Refused):
    """A put named an etcd lease that no longer exists; etcd refused the whole transaction."""


class LeaseExists(Refused):
    """A grant asked for an etcd lease id that is in use."""


class NotFound(Refused):
    """Nothing is recorded under that name."""

    advice = "Check the spelling and the namespace; `etcdfence task list` shows what there is."
