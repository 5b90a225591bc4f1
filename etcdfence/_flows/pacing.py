"""How long a call keeps trying."""

from __future__ import annotations

from dataclasses import dataclass

from etcdfence import _timing
from etcdfence._flow import Flow
from etcdfence._requests import Now, Sleep
from etcdfence.errors import EtcdFenceError, Unavailable


@dataclass(slots=True)
class Pace:
    """The time left for one call, until `deadline` on the local clock, and how often it has tried."""

    deadline: float
    tries: int = 0

    def again(self, error: EtcdFenceError) -> Flow[None]:
        """Wait before the next try; where no time is left for one, raise what the last one met."""
        pause = _timing.backoff(self.tries)
        self.tries += 1
        now = yield from Now()
        if now.clock + pause >= self.deadline:
            raise error
        yield from Sleep(pause)


def unanswered(error: EtcdFenceError) -> Unavailable:
    """What a lost answer means for a request that changes nothing (or only what may be done twice): no outcome is
    unknown, it simply was not answered."""
    return error if isinstance(error, Unavailable) else Unavailable(str(error))


def pace_for(seconds: float) -> Flow[Pace]:
    now = yield from Now()
    return Pace(now.clock + seconds)
