"""Plain frozen values that callers see. They do no I/O and know no time."""

from __future__ import annotations

import base64
import re
from dataclasses import dataclass
from enum import Enum, StrEnum
from typing import Any, Final, Literal
from urllib.parse import quote, unquote

from etcdfence.errors import Misuse

MAX_INT64: Final = 2**63 - 1


class Absent(Enum):
    """The revision of a key that is not there; pass it as `expect=` to create a key only once."""

    ABSENT = "absent"

    def __repr__(self) -> str:
        return "ABSENT"


ABSENT: Final = Absent.ABSENT


def revision_number(value: object, what: str) -> int:
    """An etcd revision of an existing key: an int of 1 or more.

    A missing key compares as revision 0 in etcd, so 0 (and whatever could turn into it) would make a guard
    that holds for nobody's key; it must be impossible to build.
    """
    if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= MAX_INT64:
        raise Misuse(f"{what} must be an int of 1 or more, not {value!r}")
    return value


_TOKEN_TEXT = re.compile(r"([1-9][0-9]{0,18})\.([1-9][0-9]{0,18})")
_KEY_TEXT = re.compile(r"([^:]+):([^:]+):v([1-9][0-9]{0,18})")


@dataclass(frozen=True, slots=True)
class TaskKey:
    """The business name of a task: which operation, on what, in which version.

    A retry of the same request has the same key; a corrected request has a higher version. Parts that change
    from run to run (a time, a random id, text from a model) do not belong here.
    """

    operation: str
    scope: str
    version: int = 1

    def __post_init__(self) -> None:
        for part, name in ((self.operation, "operation"), (self.scope, "scope")):
            checked_name(part, f"the {name} of a TaskKey")
        revision_number(self.version, "the version of a TaskKey")

    def __str__(self) -> str:
        return f"{quote(self.operation, safe=_READABLE)}:{quote(self.scope, safe=_READABLE)}:v{self.version}"

    @classmethod
    def parse(cls, text: str) -> TaskKey:
        """The inverse of str(); Misuse where the text is not `operation:scope:vN`."""
        match = _KEY_TEXT.fullmatch(text) if isinstance(text, str) else None
        if match is None:
            raise Misuse(f"{text!r} is not of the form operation:scope:vN")
        return cls(unquote(match[1]), unquote(match[2]), int(match[3]))


_READABLE: Final = "/ @+,=&!~*'()"


def checked_name(name: object, what: str) -> str:
    """A name that can become part of a key: text, not empty, no NUL, valid UTF-8."""
    if not isinstance(name, str):
        raise Misuse(f"{what} must be text, not {type(name).__name__}")
    if not name or "\0" in name:
        raise Misuse(f"{what} must not be {'empty' if not name else 'made with a NUL character'}")
    try:
        name.encode()
    except UnicodeEncodeError as error:
        raise Misuse(f"{what} is not valid Unicode text: {error.reason}") from error
    return name


TaskName = str | TaskKey


@dataclass(frozen=True, slots=True, order=True)
class Token:
    """The fencing token to show destinations outside etcd: ordered as a pair, larger is newer."""

    epoch: int
    generation: int

    def __post_init__(self) -> None:
        revision_number(self.epoch, "an epoch")
        revision_number(self.generation, "a generation")

    def __str__(self) -> str:
        return f"{self.epoch}.{self.generation}"

    @classmethod
    def parse(cls, text: str) -> Token:
        """The inverse of str(); Misuse where the text is not `epoch.generation` in decimal digits."""
        match = _TOKEN_TEXT.fullmatch(text) if isinstance(text, str) else None
        if match is None:
            raise Misuse(f"{text!r} is not of the form epoch.generation")
        return cls(int(match[1]), int(match[2]))


Comparison = tuple[Literal["EQUAL"], Literal["MOD", "LEASE", "VALUE"], bytes, int | bytes]


@dataclass(frozen=True, slots=True)
class Guard:
    """The comparisons that hold only for the present owner; put them into a transaction of your own.

    Three of them, each with a task of its own: the owner key still has the revision of this tenure; it hangs
    on this tenure's etcd lease (after a store restore the same revision can be handed out again, a lease id
    cannot); the epoch is the one the tenure began under. A transaction that carries a guard is refused by
    etcd once the tenure is over. It has no write marker: a lost reply of such a transaction stays unknown.
    """

    owner_key: bytes
    generation: int
    lease_id: int
    epoch_key: bytes
    epoch_value: bytes

    def __post_init__(self) -> None:
        revision_number(self.generation, "a generation")
        revision_number(self.lease_id, "an etcd lease id")
        if not (self.owner_key and self.epoch_key and self.epoch_value):
            raise Misuse("a guard needs the owner key, the epoch key and the value of the epoch")

    def for_stub(self) -> tuple[Comparison, ...]:
        """(result, target, key, operand) rows; set them on the Compare messages of any etcd stub."""
        return (
            ("EQUAL", "MOD", self.owner_key, self.generation),
            ("EQUAL", "LEASE", self.owner_key, self.lease_id),
            ("EQUAL", "VALUE", self.epoch_key, self.epoch_value),
        )

    def for_etcd3gw(self) -> list[dict[str, str]]:
        """The `compare` list of `etcd3gw.Etcd3Client.transaction`.

        Integers travel as decimal text, bytes as base64: the JSON mapping that etcd's gateway reads.
        """
        return [
            {"result": result, "target": target, "key": _b64(key), _OPERAND[target]: _json_operand(operand)}
            for result, target, key, operand in self.for_stub()
        ]


_OPERAND: Final = {"MOD": "mod_revision", "LEASE": "lease", "VALUE": "value"}


def _b64(data: bytes) -> str:
    return base64.b64encode(data).decode("ascii")


def _json_operand(operand: int | bytes) -> str:
    return str(operand) if isinstance(operand, int) else _b64(operand)


class Standing(StrEnum):
    """What a holder may believe of its lease."""

    HELD = "held"
    UNVERIFIED = "unverified"
    LOST = "lost"
    RELEASED = "released"


class LossReason(StrEnum):
    EXPIRED = "expired"
    REVOKED = "revoked"
    SUPERSEDED = "superseded"
    TAKEN_AWAY = "taken_away"
    EPOCH_RAISED = "epoch_raised"
    STORE_RESTORED = "store_restored"
    CLOSED = "closed"
    ENDED = "ended"
    SILENT = "silent"
    GONE = "gone"


class Doubt(StrEnum):
    """Why a lease is not verified at the moment."""

    UNREACHABLE = "unreachable"
    CREDENTIALS_REFUSED = "credentials_refused"
    NOT_RENEWED = "not_renewed"
    SILENT = "silent"
    INTERNAL_ERROR = "internal_error"


MIN_SECONDS: Final = 0.01
MAX_SECONDS: Final = 9_000_000_000  # etcd grants no longer TTL
JITTER: Final = 1.2  # a pause between two tries is lengthened at random by up to this factor in client-go


@dataclass(frozen=True, slots=True)
class Periods:
    """How a lease is kept, in seconds, by the names and the rules of Kubernetes' leader election.

    lease_duration  how long after the last sign of life the task becomes free (the TTL: whole seconds)
    renew_deadline  how long after the last renewal the holder still believes in its lease; the rest is its margin
    retry_period    how often it renews, or tries to

    Pass it as `ttl=`. Each must leave room for the next: lease_duration > renew_deadline > 1.2 * retry_period.
    """

    lease_duration: int = 15
    renew_deadline: float = 10.0
    retry_period: float = 2.0

    def __post_init__(self) -> None:
        whole = isinstance(self.lease_duration, int) and not isinstance(self.lease_duration, bool)
        if not whole or not 1 <= self.lease_duration <= MAX_SECONDS:
            raise Misuse(f"lease_duration is a whole number of seconds from 1, not {self.lease_duration!r}")
        for name in ("renew_deadline", "retry_period"):
            value = getattr(self, name)
            number = isinstance(value, int | float) and not isinstance(value, bool)
            if not number or not MIN_SECONDS <= value <= MAX_SECONDS:
                raise Misuse(f"{name} is a number of seconds from {MIN_SECONDS}, not {value!r}")
        if not self.lease_duration > self.renew_deadline:
            raise Misuse(
                f"lease_duration ({self.lease_duration} s) must be longer than renew_deadline"
                f" ({self.renew_deadline} s), or the holder believes in a lease that has run out"
            )
        if not self.renew_deadline > JITTER * self.retry_period:
            raise Misuse(
                f"renew_deadline ({self.renew_deadline} s) must be longer than {JITTER} * retry_period"
                f" ({self.retry_period} s), or a single late renewal ends the lease"
            )


@dataclass(frozen=True, slots=True)
class Loss:
    """How a lease ended.

    reason        machine-readable, one of LossReason: `taken_away` is an owner key that went while its etcd
                  lease lived on; `ended` an ending of our own whose answer had been lost; `silent` a lease of a
                  session whose work had reported no progress; `gone` an owner key that went for a cause that
                  could not be asked
    current       the newest known generation of the task, where there is a later one
    last_renewed  when etcd last confirmed the lease, ISO 8601 by this machine's wall clock (for people)
    """

    reason: LossReason
    current: int | None = None
    last_renewed: str | None = None


class Verdict(StrEnum):
    """What became of a fenced write whose answer had been lost."""

    APPLIED = "applied"
    NOT_APPLIED = "not_applied"
    UNKNOWN = "unknown"


class TaskState(StrEnum):
    WAITING = "waiting"
    OWNED = "owned"
    STALLED = "stalled"
    COMPLETED = "completed"
    FAILED = "failed"
    CANCELLED = "cancelled"


@dataclass(frozen=True, slots=True)
class Receipt:
    """What etcd answered to the claim: the evidence of an ownership. `revision` is the store's at the claim (and
    the owner key's own, which is the generation); `claimed_at` is this machine's wall clock, for people."""

    task: str
    holder: str
    token: Token
    lease_id: int
    revision: int
    cluster_id: int
    claimed_at: str


@dataclass(frozen=True, slots=True)
class Owner:
    """Who owns a task, as its owner key says. `granted_ttl` and `renew_period` (None: not known) are in
    seconds."""

    attempt: str
    holder: str
    host: str
    pid: int
    granted_ttl: int
    epoch: int
    generation: int
    lease_id: int
    renew_period: float | None = None


@dataclass(frozen=True, slots=True)
class Waiter:
    """Somebody in line for a task. `position` counts from 1; `revision` is the create revision of the entry, which
    the order goes by; `lease_id` is what the entry hangs on; `since` is the waiter's wall clock, for people."""

    task: str
    position: int
    holder: str
    host: str
    pid: int
    since: str
    attempt: str
    lease_id: int
    revision: int


@dataclass(frozen=True, slots=True)
class Observation:
    """Who owned a task at one revision of the store (None: nobody), and what that owner has proclaimed."""

    task: str
    owner: Owner | None
    value: str | None
    revision: int


class Liveness(StrEnum):
    """What etcd's own count says of an owner: renewed in time, not renewed for a while, or run out."""

    ALIVE = "alive"
    LATE = "late"
    EXPIRED = "expired"


@dataclass(frozen=True, slots=True)
class Provenance:
    """Which write made the present revision of a data key."""

    task: str
    generation: int
    attempt: str
    write_id: str
    at: str


@dataclass(frozen=True, slots=True)
class Entry:
    """A data key as it was read. `value` is None and `revision` ABSENT where the key is not there.

    `provenance` is None unless a fenced write made exactly this revision.
    """

    key: str
    value: bytes | None
    revision: int | Absent
    provenance: Provenance | None = None


@dataclass(frozen=True, slots=True)
class Committed:
    """An acknowledged fenced write: applied exactly once, at this store revision."""

    revision: int
    write_id: str


@dataclass(frozen=True, slots=True)
class Attempt:
    """One tenure of one worker. `ended` is None while it runs (or when it stopped without a word)."""

    id: str
    holder: str
    host: str
    pid: int
    started: str
    ended: str | None
    ended_at: str | None
    reason: str | None


@dataclass(frozen=True, slots=True)
class TaskDescription:
    """Everything the store says of one task, read at one revision.

    `expires_in` (seconds) comes from etcd's own LeaseTimeToLive; it is None where nobody owns the task, and
    zero or less when the lease has run out and etcd has not yet taken the key away. `unreadable` lists
    records that this version cannot read. `line` is who waits, the first one first.
    """

    task: str
    kind: Literal["task", "lock"]
    state: TaskState
    epoch: int
    revision: int
    owner: Owner | None
    expires_in: int | None
    last_attempt: Attempt | None
    attempts: tuple[Attempt, ...] = ()
    refusals: tuple[dict[str, Any], ...] = ()
    history: tuple[dict[str, Any], ...] = ()
    result: Any = None
    unreadable: tuple[str, ...] = ()
    line: tuple[Waiter, ...] = ()

    @property
    def liveness(self) -> Liveness | None:
        """Whether the owner renews its lease: by the time that etcd says is left of it, and no clock of ours. Late
        is an owner whose last renewal is a period and a half (and a second, for etcd counts whole ones) old."""
        if self.owner is None or self.expires_in is None:
            return None
        if self.expires_in <= 0:
            return Liveness.EXPIRED
        period = self.owner.renew_period or self.owner.granted_ttl / 3
        late = self.owner.granted_ttl - self.expires_in > 1.5 * period + 1
        return Liveness.LATE if late else Liveness.ALIVE

    @property
    def generation(self) -> int | None:
        return self.owner.generation if self.owner else None


@dataclass(frozen=True, slots=True)
class MemberStatus:
    """What one etcd member says of itself; `error` is set where it did not answer."""

    endpoint: str
    version: str = ""
    leader: bool = False
    db_size: int = 0
    revision: int = 0
    cluster_id: int = 0
    member_id: int = 0
    alarms: tuple[str, ...] = ()
    error: str = ""
