"""Rows for output, from what the library returns."""

from __future__ import annotations

import base64
from dataclasses import asdict
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any

from .output import Columns

if TYPE_CHECKING:
    from etcdfence import Entry, MemberStatus, Observation, TaskDescription, Waiter

LEASE = Columns(
    table=("task", "generation", "holder", "host", "pid", "granted_ttl", "expires_in", "state"),
    wide=("token", "expires_at", "attempt", "lease", "revision"),
)
LEASE_SHEET = Columns(
    table=(*LEASE.table, "liveness", "since", "waiters", "line"),
    wide=LEASE.wide,
)
OBSERVATION = Columns(
    table=("task", "generation", "holder", "host", "pid", "value"),
    wide=("attempt", "lease", "granted_ttl", "revision"),
)
WAITER = Columns(
    table=("task", "position", "holder", "host", "pid", "since"),
    wide=("attempt", "lease", "revision"),
)
ENTRY = Columns(
    table=("key", "value", "revision", "task", "generation", "at"),
    wide=("encoding", "attempt", "write"),
    name="key",
)
TASK = Columns(
    table=("task", "kind", "state", "generation", "holder", "expires_in", "last_ended"),
    wide=("token", "attempt", "lease", "revision"),
)
TASK_SHEET = Columns(
    table=(
        *TASK.table,
        "token",
        "attempt",
        "result",
        "attempts",
        "refusals",
        "history",
        "unreadable",
    ),
    wide=("host", "pid", "granted_ttl", "expires_at", "lease", "revision"),
)
MEMBER = Columns(
    table=("endpoint", "version", "role", "db_size", "revision", "alarms", "error"),
    wide=("cluster_id", "member_id"),
    name="endpoint",
)


def task_row(task: TaskDescription) -> dict[str, Any]:
    """Identity, attempt and generation are fields of their own; times are seconds, `expires_at` is UTC.

    The time left is etcd's own count; `expires_at` adds it to this machine's clock, for people.
    """
    owner, last = task.owner, task.last_attempt
    return {
        "task": task.task,
        "kind": task.kind,
        "state": str(task.state),
        "generation": _number(owner.generation if owner else None),
        "token": f"{task.epoch}.{owner.generation}" if owner else None,
        "holder": owner.holder if owner else None,
        "host": owner.host if owner else None,
        "pid": owner.pid if owner else None,
        "attempt": owner.attempt if owner else last.id if last else None,
        "lease": f"{owner.lease_id:x}" if owner else None,
        "granted_ttl": owner.granted_ttl if owner else None,
        "expires_in": task.expires_in,
        "expires_at": _moment(task.expires_in),
        "last_ended": last.ended if last else None,
        "epoch": _number(task.epoch),
        "revision": _number(task.revision),
    }


def lease_sheet(task: TaskDescription) -> dict[str, Any]:
    """With how alive the owner is by etcd's count, since when it owns (by its own clock), and who waits."""
    last = task.last_attempt
    return {
        **task_row(task),
        "liveness": str(task.liveness) if task.liveness else None,
        "since": last.started if last else None,
        "waiters": len(task.line),
        "line": [waiter_row(waiter) for waiter in task.line],
    }


def waiter_row(waiter: Waiter) -> dict[str, Any]:
    return {
        "task": waiter.task,
        "position": waiter.position,
        "holder": waiter.holder,
        "host": waiter.host,
        "pid": waiter.pid,
        "since": waiter.since,
        "attempt": waiter.attempt,
        "lease": f"{waiter.lease_id:x}",
        "revision": _number(waiter.revision),
    }


def observation_row(seen: Observation) -> dict[str, Any]:
    owner = seen.owner
    return {
        "task": seen.task,
        "generation": _number(owner.generation if owner else None),
        "holder": owner.holder if owner else None,
        "host": owner.host if owner else None,
        "pid": owner.pid if owner else None,
        "value": seen.value,
        "attempt": owner.attempt if owner else None,
        "lease": f"{owner.lease_id:x}" if owner else None,
        "granted_ttl": owner.granted_ttl if owner else None,
        "revision": _number(seen.revision),
    }


def entry_row(entry: Entry) -> dict[str, Any]:
    """A value that is not text is shown as base64, and `encoding` says so."""
    value, encoding = _text(entry.value or b"")
    made = entry.provenance
    return {
        "key": entry.key,
        "value": value,
        "encoding": encoding,
        "revision": str(entry.revision),
        "task": made.task if made else None,
        "generation": _number(made.generation if made else None),
        "attempt": made.attempt if made else None,
        "write": made.write_id if made else None,
        "at": made.at if made else None,
    }


def _text(value: bytes) -> tuple[str, str]:
    try:
        return value.decode(), "text"
    except UnicodeDecodeError:
        return base64.b64encode(value).decode(), "base64"


def task_sheet(task: TaskDescription) -> dict[str, Any]:
    more = {
        "result": task.result,
        "attempts": [asdict(attempt) for attempt in task.attempts],
        "refusals": [_texts(refusal) for refusal in task.refusals],
        "history": [_texts(entry) for entry in task.history],
        "unreadable": list(task.unreadable),
    }
    return {**task_row(task), **more}


def member_row(member: MemberStatus) -> dict[str, Any]:
    return {
        "endpoint": member.endpoint,
        "version": member.version,
        "role": None if member.error else "leader" if member.leader else "follower",
        "db_size": member.db_size,
        "revision": _number(member.revision or None),
        "alarms": list(member.alarms),
        "error": member.error or None,
        "cluster_id": f"{member.cluster_id:x}",
        "member_id": f"{member.member_id:x}",
    }


def _texts(record: dict[str, Any]) -> dict[str, Any]:
    """A stored record with its 64-bit numbers as text."""
    wide = {"generation", "revision", "current"}
    return {key: _number(value) if key in wide else _inner(value) for key, value in record.items()}


def _inner(value: Any) -> Any:
    return (
        [_texts(one) for one in value]
        if isinstance(value, list | tuple) and value and isinstance(value[0], dict)
        else value
    )


def _number(value: int | None) -> str | None:
    return None if value is None else str(value)


def _moment(seconds: int | None) -> str | None:
    if seconds is None:
        return None
    return (datetime.now(UTC) + timedelta(seconds=seconds)).isoformat(timespec="seconds")
