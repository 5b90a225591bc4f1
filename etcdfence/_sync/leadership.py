"""Leader election for threads: work stops first, then the lease goes."""

from __future__ import annotations

import logging
import threading
from typing import TYPE_CHECKING, Final

from etcdfence._engine import Terms
from etcdfence._leading import Election, LeadershipHandle
from etcdfence._sync.lease import Lease
from etcdfence.errors import EtcdFenceError, Misuse, OutcomeUnknown, OwnershipRefused, Stopped, Unavailable
from etcdfence.model import Standing

if TYPE_CHECKING:
    from etcdfence._sync.coordinator import Coordinator

log = logging.getLogger("etcdfence.leadership")
LOOK_AGAIN: Final = 0.1  # seconds


class Leadership(LeadershipHandle[Lease]):
    """Made by `Coordinator.lead`. `run()` blocks; everything else may be called from any thread."""

    def __init__(self, coordinator: Coordinator, election: Election) -> None:
        super().__init__(election)
        self._coordinator = coordinator
        self._stopped = False
        self._running = threading.Lock()
        self._never = threading.Event()

    def stop(self) -> None:
        """Let `run()` return: the work is told to stop, and then the leadership is released. For good. May be
        called from a signal handler: it sets an attribute, which is looked at ten times a second."""
        self._stopped = True

    def run(self) -> None:
        """Wait for the leadership, lead, and after a loss wait again, until `stop()`. Raises what on_started
        raised, when the leadership has been released; a silent etcd is waited for."""
        if not self._running.acquire(blocking=False):
            raise Misuse(f"the leadership {self.name!r} is being run already")
        over = threading.Event()
        try:
            watcher = self._watch_others(over)
            while not self._stopped:
                self._once()
            if watcher:
                over.set()
                watcher.join(5.0)
        finally:
            over.set()
            self._running.release()

    def _once(self) -> None:
        try:
            lease = self._coordinator._acquire(
                self.name, None, self.identity, Terms(self._plan.periods), None, None, lambda: self._stopped
            )
        except Stopped:
            return
        except (Unavailable, OutcomeUnknown, OwnershipRefused) as error:
            if not self._stopped:
                log.warning("%s: no claim could be made: %s", self.name, error)
            self._pause(self._plan.periods.retry_period)
        else:
            self._serve(lease)

    def _pause(self, seconds: float) -> None:
        now = self._coordinator._engine.host.now
        until = now() + seconds
        while not self._stopped and now() < until:
            self._never.wait(LOOK_AGAIN)

    # --- one time of leading -------------------------------------------------------------------------------

    def _serve(self, lease: Lease) -> None:
        """From the lease being ours to the lease being given back."""
        stopping, failures = threading.Event(), list[BaseException]()
        work = threading.Thread(
            target=self._work, args=(lease, stopping, failures), name=f"etcdfence-lead-{self.name}", daemon=True
        )
        try:
            lease._belief.on_over = stopping.set
            lease._belief.on_doubt = lambda _: stopping.set()
            if lease.standing is not Standing.HELD:  # before there was anybody to tell
                return
            self._lease = self._working = lease
            work.start()
            while not (stopping.is_set() or self._stopped):
                stopping.wait(LOOK_AGAIN)
        finally:
            stopping.set()
            self._wind_down(lease, work)
        while work.is_alive() and not self._stopped:  # no second work beside one that has not ended
            work.join(LOOK_AGAIN)
        if not work.is_alive():
            self._working = None
        if failures:
            raise failures[0]

    def _work(self, lease: Lease, stopping: threading.Event, failures: list[BaseException]) -> None:
        try:
            self._election.on_started(lease, stopping)
        except BaseException as error:  # noqa: BLE001 - raised by run(), in the thread of whoever called it
            failures.append(error)
            stopping.set()

    def _wind_down(self, lease: Lease, work: threading.Thread) -> None:
        begun = work.ident is not None
        try:
            if begun:
                work.join(self._plan.drain)
        finally:
            self._lease = None
            stopped = not work.is_alive()
            if stopped:
                self._working = None
            try:
                self._give_back(lease, stopped=stopped)
            finally:
                if begun and self._election.on_stopped is not None:
                    self._election.on_stopped()

    def _give_back(self, lease: Lease, *, stopped: bool) -> None:
        try:
            if stopped:
                lease.release()
            else:
                log.warning("%s: the work has not stopped in time; the lease is left to run out", self.name)
                lease.abandon()
        except EtcdFenceError as error:
            log.info("%s: the leadership was not released: %s", self.name, error)

    # --- what others do ------------------------------------------------------------------------------------

    def _watch_others(self, over: threading.Event) -> threading.Thread | None:
        if self._election.on_new_leader is None:
            return None
        watcher = threading.Thread(target=self._tell_leaders, args=(over,), name="etcdfence-leaders", daemon=True)
        watcher.start()
        return watcher

    def _tell_leaders(self, over: threading.Event) -> None:
        def require_wanted() -> None:
            if over.is_set():
                raise Stopped("nobody watches any more")

        task = self._coordinator._task(self.name)
        while not over.is_set():
            try:
                for seen in self._coordinator._observed(task, require_wanted):
                    require_wanted()
                    self._tell(seen.owner.holder if seen.owner else None)
            except Stopped:
                return
            except (Unavailable, OutcomeUnknown):
                over.wait(self._plan.periods.retry_period)
            except EtcdFenceError as error:
                log.warning("%s: its leaders are not watched any more: %s", self.name, error)
                return
