"""Waiting for one's turn, in threads."""

from __future__ import annotations

import threading
from collections import deque

from etcdfence.errors import Unavailable


class Turn:
    """One at a time, in the order of coming. Unlike a lock held across a request, what is guarded is only the
    decision whose turn it is, and waiting for it is bounded."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._line: deque[object] = deque()  # whoever is first has the turn

    def take(self, seconds: float) -> Taking:
        """`with turn.take(10):` has the turn until its block ends; Unavailable if it is not free in time."""
        return Taking(self, seconds)

    def begin(self, seconds: float) -> None:
        me = object()
        with self._changed:
            self._line.append(me)
            if self._line[0] is me:
                return
            try:
                if not self._changed.wait_for(lambda: self._line[0] is me, seconds):
                    raise Unavailable(f"another write of this lease was still under way after {seconds:g} s")
            except BaseException:
                self._line.remove(me)
                self._changed.notify_all()
                raise

    def end(self) -> None:
        with self._changed:
            self._line.popleft()
            self._changed.notify_all()


class Taking:
    def __init__(self, turn: Turn, seconds: float) -> None:
        self._turn, self._seconds = turn, seconds

    def __enter__(self) -> None:
        self._turn.begin(self._seconds)

    def __exit__(self, *_: object) -> None:
        self._turn.end()
