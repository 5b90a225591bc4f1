"""When to renew, and what a holder may believe meanwhile. Pure functions of seconds; they read no clock.

All intervals follow the TTL that etcd *granted*, never the one that was asked for. The local deadline counts
from the moment a successful renewal was *sent*: etcd started the lease's time no earlier than that, so the
deadline is never later than etcd's own. It decides what a holder may believe, never who owns.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final, Self

from etcdfence.errors import Misuse
from etcdfence.model import Loss, Periods, Standing

MAX_TTL: Final = 9_000_000_000  # seconds; etcd refuses more
MAX_WAIT: Final = 100_000_000  # seconds; the operating system's own limit is not far above


@dataclass(frozen=True, slots=True)
class Rhythm:
    """How a granted lease is kept, in seconds: renewed every `period`, believed in for `believed` after the
    sending of the last renewal."""

    granted: int
    period: float
    believed: float

    @classmethod
    def of(cls, ttl: int | Periods, granted: int) -> Self:
        """By default a third of the granted TTL (two renewals may fail before the lease is in danger), and all
        of it but a tenth, which is kept back for clock rates that differ and for the work of stopping."""
        if isinstance(ttl, Periods):
            return cls(granted, ttl.retry_period, ttl.renew_deadline)
        return cls(granted, granted / 3, granted - granted / 10)

    def deadline(self, sent: float) -> float:
        """The last moment at which the holder believes in its lease without hearing from etcd."""
        return sent + self.believed

    def next_renewal(self, sent: float) -> float:
        return sent + self.period


def checked_ttl(ttl: object) -> int:
    """A lease's time to live: whole seconds, or Periods. Anything else is refused with the unit named, because
    seconds mistaken for milliseconds (or a duration object) give a lease of quite another length."""
    ttl = ttl.lease_duration if isinstance(ttl, Periods) else ttl
    if isinstance(ttl, bool) or not isinstance(ttl, int):
        raise Misuse(f"ttl is a whole number of seconds (an int), not {ttl!r}")
    if not 1 <= ttl <= MAX_TTL:
        raise Misuse(f"ttl must be between 1 and {MAX_TTL} seconds, not {ttl}")
    return ttl


def checked_seconds(value: object, what: str) -> float:
    """A span of time to wait: a number of seconds from zero to about three years."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= MAX_WAIT:
        raise Misuse(f"{what} must be a number of seconds from 0 to {MAX_WAIT}, not {value!r}")
    return float(value)


def request_limit(now: float, granted: int, deadlines: Iterable[float]) -> float:
    """How long one request of a renewal (there are two: keepalive and read) may take.

    An eighth of the TTL, so that after a member that swallows requests another one is tried in time; and never
    so long that a lease's deadline would pass unnoticed meanwhile.
    """
    nearest = min(((deadline - now) / 2 for deadline in deadlines), default=granted)
    return float(max(0.1, min(granted / 8, 5.0, nearest)))


def retry_delay(failures: int, granted: int) -> float:
    """Between failed renewals: short against the TTL, growing while etcd stays away."""
    return float(min(0.05 * 2 ** min(failures, 10), max(granted / 12, 0.1), 2.0))


def backoff(tries: int) -> float:
    """Between the tries of one call; the driver adds chance."""
    return float(min(0.02 * 2 ** min(tries, 10), 1.0))


def standing(now: float, deadline: float, loss: Loss | None, released: bool) -> Standing:
    """Computed whenever it is asked for, so that a renewal thread that died cannot keep a lease `held`."""
    if loss is not None:
        return Standing.LOST
    if released:
        return Standing.RELEASED
    return Standing.HELD if now < deadline else Standing.UNVERIFIED


def surely_revoked(now: float, renewed: float, granted: int) -> bool:
    """Whether a vanished lease cannot have expired: etcd never ends one before its TTL has passed since the
    last renewal was received, and it was not received before it was sent."""
    return now < renewed + granted
