"""Leader election for threads: work stops first, then the lease goes."""

from __future__ import annotations

import logging
import threading
from typing import TYPE_CHECKING, Final

from etcdfence._engine import Terms
from etcdfence._leading import Election, LeadershipHandle
from etcdfence._sync.lease import Lease
from etcdfence.errors import EtcdFenceError, Misuse, OutcomeUnknown, Stopped, Unavailable
from etcdfence.model import Standing

if TYPE_CHECKING:
    from etcdfence._sync.coordinator import Coordinator

log = logging.getLogger("etcdfence.leadership")
LOOK_AGAIN: Final = 0.2  # seconds


class Leadership(LeadershipHandle[Lease]):
    """Made by `Coordinator.lead`. `run()` blocks; everything else may be called from any thread."""

    def __init__(self, coordinator: Coordinator, election: Election) -> None:
        super().__init__(election)
        self._coordinator = coordinator
        self._stop = threading.Event()
        self._running = threading.Lock()

    def stop(self) -> None:
        """Let `run()` return: the work is told to stop, and then the leadership is released. Only sets an event,
        so it may be called from a signal handler."""
        self._stop.set()

    def run(self) -> None:
        """Wait for the leadership, lead, and after a loss wait again, until `stop()`. Raises what on_started
        raised, when the leadership has been released; a silent etcd is waited for."""
        if not self._running.acquire(blocking=False):
            raise Misuse(f"the leadership {self.name!r} is being run already")
        try:
            watcher = self._watch_others()
            try:
                while not self._stop.is_set():
                    self._once()
            finally:
                self._stop.set()
                if watcher:
                    watcher.join(5.0)
        finally:
            self._running.release()

    def _once(self) -> None:
        try:
            lease = self._coordinator._acquire(
                self.name, None, self.identity, Terms(self._plan.periods), None, None, self._stop.is_set
            )
        except Stopped:
            return
        except (Unavailable, OutcomeUnknown) as error:
            if not self._stop.is_set():
                log.warning("%s: no claim could be made: %s", self.name, error)
            self._stop.wait(self._plan.periods.retry_period)
        else:
            _Term(self, lease).serve()

    # --- what others do ------------------------------------------------------------------------------------

    def _watch_others(self) -> threading.Thread | None:
        if self._election.on_new_leader is None:
            return None
        watcher = threading.Thread(target=self._tell_leaders, name="etcdfence-leaders", daemon=True)
        watcher.start()
        return watcher

    def _tell_leaders(self) -> None:
        while not self._stop.is_set():
            try:
                for seen in self._coordinator._observed(self._coordinator._task(self.name), self._stop.is_set):
                    self._tell(seen.owner.holder if seen.owner else None)
            except Stopped:
                return
            except (Unavailable, OutcomeUnknown):
                self._stop.wait(self._plan.periods.retry_period)
            except EtcdFenceError as error:
                log.warning("%s: its leaders are not watched any more: %s", self.name, error)
                return


class _Term:
    """One time of leading: from the lease being ours to the lease being given back."""

    def __init__(self, leadership: Leadership, lease: Lease) -> None:
        self._leadership, self._lease = leadership, lease
        self._stopping = threading.Event()
        self._failure: BaseException | None = None
        lease._belief.on_over = self._stopping.set
        lease._belief.on_doubt = lambda _: self._stopping.set()
        if lease.standing is not Standing.HELD:  # before there was anybody to tell
            self._stopping.set()

    def serve(self) -> None:
        leadership = self._leadership
        leadership._lease = self._lease
        work = threading.Thread(target=self._work, name=f"etcdfence-lead-{leadership.name}", daemon=True)
        try:
            work.start()
            while not (self._stopping.is_set() or leadership._stop.is_set()):
                self._stopping.wait(LOOK_AGAIN)  # stop() sets one event and no more, for signal handlers
        finally:
            self._stopping.set()
            try:
                if work.ident is not None:
                    work.join(leadership._plan.drain)
            finally:
                self._end(stopped=not work.is_alive())
        if self._failure is not None:
            raise self._failure

    def _work(self) -> None:
        try:
            self._leadership._election.on_started(self._lease, self._stopping)
        except BaseException as error:  # noqa: BLE001 - raised by run(), in the thread of whoever called it
            self._failure = error
            self._stopping.set()

    def _end(self, *, stopped: bool) -> None:
        leadership, on_stopped = self._leadership, self._leadership._election.on_stopped
        try:
            if stopped:
                self._lease.release()
            else:
                log.warning("%s: the work has not stopped in time; the lease is left to run out", leadership.name)
                self._lease.abandon()
        except EtcdFenceError as error:
            log.info("%s: the leadership was not released: %s", leadership.name, error)
        finally:
            leadership._lease = None
        if on_stopped is not None:
            on_stopped()
