"""How threads run flows: one call at a time in each thread, one commit at a time in each lane."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TypeVar

from etcdfence._engine import Engine, Holding
from etcdfence._flow import Flow
from etcdfence._flows.fencing import Lane
from etcdfence._flows.pacing import Pace
from etcdfence._host import Bounded

T = TypeVar("T")


class SyncEngine(Engine):
    def run(self, flow: Callable[[Pace], Flow[T]], seconds: float | None = None) -> T:
        """Run a flow that must have ended after so many seconds (None: the patience)."""
        pace = Pace(self.host.now() + (self.patience if seconds is None else seconds))
        return self.drive(flow(pace), Bounded(self.host, pace.deadline))

    def acquire(self, action: Callable[[], T]) -> T:
        """Run everything between the first request of an acquire and the lease being known here; closing waits
        for it (but not for its own thread, which a signal handler may have interrupted)."""
        me = threading.get_ident()
        try:
            self.acquiring.append(me)
            self.require_open()
            self.holdings()  # puts away what was dropped meanwhile
            return action()
        finally:
            self.acquired_by(me)

    def commit(
        self,
        holding: Holding,
        flow: Callable[[Lane, Pace], Flow[T]],
        seconds: float | None = None,
        even_released: bool = False,
    ) -> T:
        """Run a flow of this tenure's lane when it is its turn."""

        def in_turn() -> T:
            with self.committing(holding, even_released):
                return self.run(lambda pace: flow(holding.lane, pace), seconds)

        self.require_usable()
        return holding.turn.run(self.patience if seconds is None else seconds, in_turn)
