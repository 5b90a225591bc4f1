"""What the values of etcdfence's own keys hold: JSON with a format number.

Unknown fields survive a rewrite (a newer version may have put them there). A record with a higher format
number is never rewritten, only reported; an unreadable one never stops a listing.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from etcdfence._requests import KeyValue
from etcdfence.model import Attempt, Owner, Provenance

FORMAT: Final = 1


class Record(BaseModel):
    model_config = ConfigDict(extra="allow", frozen=True)

    format: int = FORMAT

    def to_bytes(self) -> bytes:
        return self.model_dump_json(exclude_none=True).encode()


R = TypeVar("R", bound=Record)


@dataclass(frozen=True, slots=True)
class Unreadable:
    key: str
    why: str

    def __str__(self) -> str:
        return f"{self.key}: {self.why}"


def read(kind: type[R], kv: KeyValue) -> R | Unreadable:
    """The record in a key's value, or why it cannot be read."""
    key = kv.key.decode(errors="replace")
    try:
        record = kind.model_validate_json(kv.value)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"]) or "value"
        return Unreadable(key, f"not a {kind.__name__}: {where}: {first['msg']}")
    if record.format > FORMAT:
        return Unreadable(key, f"written in format {record.format}; this version reads up to {FORMAT}")
    return record


class EpochRecord(Record):
    number: int
    id: str


class OwnerRecord(Record):
    attempt: str
    holder: str
    host: str
    pid: int
    ttl: int
    epoch: int
    period: float | None = None


class ValueRecord(Record):
    """What an owner proclaims beside its owner key."""

    generation: int
    value: str


class WaiterRecord(Record):
    """Who is in line. The entry hangs on a lease that its waiter renews, so that it ends with the waiter."""

    attempt: str
    holder: str
    host: str
    pid: int
    since: str


class End(BaseModel):
    """How an attempt ended; `write` is the id of the commit that ended it, `generation` its tenure."""

    model_config = ConfigDict(extra="allow", frozen=True)

    how: Literal["released", "completed", "failed", "lost"]
    at: str
    write: str
    generation: int
    reason: str | None = None


class AttemptRecord(Record):
    """Created by a claim, together with the owner key: its create revision is the generation. A `sealed` one
    was created instead of a claim that must never land. `doubtful`: a try of its claim went unanswered, so the
    record must outlive its etcd lease (hexadecimal, as etcdctl shows it)."""

    attempt: str
    holder: str
    host: str
    pid: int
    lease: str = Field(pattern="^[0-9a-f]{1,16}$")
    started: str
    ended: End | None = None
    sealed: bool = False
    doubtful: bool = False

    def view(self) -> Attempt:
        end = self.ended
        return Attempt(
            id=self.attempt,
            holder=self.holder,
            host=self.host,
            pid=self.pid,
            started=self.started,
            ended="sealed" if self.sealed else end.how if end else None,
            ended_at=end.at if end else None,
            reason=end.reason if end else None,
        )


class TaskRecord(Record):
    """The durable record of a task. Changed by submit, complete, fail and operators, never by a claim."""

    operation: str | None = None
    scope: str | None = None
    version: int | None = None
    payload: Any = None
    result: Any = None
    evidence: Any = None
    reason: str | None = None


class ClosedRecord(Record):
    state: Literal["completed", "failed", "cancelled"]
    attempt: str
    generation: int
    at: str


class RefusedTry(BaseModel):
    """One stale write that etcd refused at `revision`, when the newest known generation was `current`."""

    model_config = ConfigDict(extra="allow", frozen=True)

    write: str
    keys: tuple[str, ...]
    at: str
    revision: int
    current: int | None = None


class RefusalRecord(Record):
    """How often a generation wrote after its end, and the last few tries."""

    generation: int
    attempt: str
    holder: str
    count: int
    tries: tuple[RefusedTry, ...]


class HistoryRecord(Record):
    event: str
    at: str
    generation: int
    attempt: str
    holder: str
    reason: str | None = None


class ProvenanceRecord(Record):
    task: str
    generation: int
    attempt: str
    write: str
    at: str

    def view(self) -> Provenance:
        return Provenance(self.task, self.generation, self.attempt, self.write, self.at)


def owner_of(kv: KeyValue) -> Owner:
    """Who an owner key names. One that cannot be read still owns the task; its holder is then unknown."""
    record = read(OwnerRecord, kv)
    if isinstance(record, Unreadable):
        return Owner("", "(unreadable owner record)", "", 0, 0, 0, kv.mod_revision, kv.lease)
    return Owner(
        attempt=record.attempt,
        holder=record.holder,
        host=record.host,
        pid=record.pid,
        granted_ttl=record.ttl,
        epoch=record.epoch,
        generation=kv.mod_revision,
        lease_id=kv.lease,
        renew_period=record.period,
    )
