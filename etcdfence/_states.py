"""The life of a task, as a table. A state is derived from keys and never stored."""

from __future__ import annotations

from enum import StrEnum
from typing import Final

from etcdfence.model import TaskState


class Event(StrEnum):
    CLAIM = "claim"
    RELEASE = "release"
    FAIL_RETRY = "fail (retry)"
    LOSE = "lease ends"
    COMPLETE = "complete"
    FAIL = "fail (no retry)"


_OPEN: Final = {Event.CLAIM: TaskState.OWNED}

TRANSITIONS: Final[dict[TaskState, dict[Event, TaskState]]] = {
    TaskState.WAITING: _OPEN,
    TaskState.OWNED: {
        Event.RELEASE: TaskState.WAITING,
        Event.FAIL_RETRY: TaskState.WAITING,
        Event.LOSE: TaskState.STALLED,
        Event.COMPLETE: TaskState.COMPLETED,
        Event.FAIL: TaskState.FAILED,
    },
    TaskState.STALLED: _OPEN,
    TaskState.COMPLETED: {},
    TaskState.FAILED: {},
    TaskState.CANCELLED: {},
}


def task_state(*, owned: bool, last_ended: bool | None, closed: str | None) -> TaskState:
    """The state that the keys say: `closed` is the content of the tombstone, `last_ended` whether the last
    attempt has an end (None: there was none)."""
    if closed is not None:
        return TaskState(closed)
    if owned:
        return TaskState.OWNED
    return TaskState.STALLED if last_ended is False else TaskState.WAITING


def table() -> str:
    """The table as Markdown, one row a transition; the README shows exactly this."""
    rows = ["| state | event | next state |", "|---|---|---|"]
    for state, events in TRANSITIONS.items():
        rows += [f"| {state} | {event} | {after} |" for event, after in events.items()]
        rows += [] if events else [f"| {state} | (none: closed for good) | |"]
    return "\n".join(rows)
