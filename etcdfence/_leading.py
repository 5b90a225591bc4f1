"""What a Leadership of either colour is: its plan, and what it can say of itself without asking anybody."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from etcdfence._handle import LeaseHandle
from etcdfence.model import Periods, Standing

log = logging.getLogger("etcdfence.leadership")
L = TypeVar("L", bound=LeaseHandle)


@dataclass(frozen=True, slots=True)
class Plan:
    name: str
    identity: str
    periods: Periods
    drain: float | None


@dataclass(frozen=True, slots=True)
class Election:
    """A plan, and what to call."""

    plan: Plan
    on_started: Callable[..., Any]
    on_stopped: Callable[[], Any] | None
    on_new_leader: Callable[[str | None], Any] | None


class LeadershipHandle(Generic[L]):
    def __init__(self, election: Election) -> None:
        self._plan, self._election = election.plan, election
        self._lease: L | None = None  # while this one leads
        self._working: L | None = None  # what the work was begun under, while it goes on
        self._leader: str | None = None

    @property
    def name(self) -> str:
        return self._plan.name

    @property
    def identity(self) -> str:
        """How this candidate appears to others. For people: two candidates may go by the same one."""
        return self._plan.identity

    @property
    def lease(self) -> L | None:
        """The lease while this one leads, for guards and fenced writes; None while it does not."""
        return self._lease

    @property
    def leading(self) -> bool:
        """Whether this one may believe that it leads. Never a permission to write: that is what the fence is
        for."""
        lease = self._lease
        return lease is not None and lease.standing is Standing.HELD

    @property
    def leader(self) -> str | None:
        """The identity of the leader, as last observed; None unless there is an `on_new_leader`."""
        return self._leader

    @property
    def healthy(self) -> bool:
        """For a liveness probe. False while the work goes on although its lease is over or was not renewed for two
        periods: somebody should end this process before the lease runs out. Without work it is healthy."""
        lease = self._working
        if lease is None:
            return True
        overdue = min(2 * self._plan.periods.retry_period + 1, self._plan.periods.renew_deadline)
        return not lease._belief.over and lease._belief.age <= overdue

    def _tell(self, leader: str | None) -> None:
        if leader == self._leader:
            return
        self._leader = leader
        if self._election.on_new_leader is not None:
            try:
                self._election.on_new_leader(leader)
            except BaseException:
                log.exception("on_new_leader failed")

    def __repr__(self) -> str:
        state = "leading" if self.leading else f"leader={self._leader!r}"
        return f"<{type(self).__name__} {self.name!r} identity={self.identity!r} {state}>"
