"""Waiting for one's turn, in threads."""

from __future__ import annotations

import threading

from etcdfence.errors import Unavailable


class Turn:
    """One at a time. Unlike a lock held across a request, what is guarded is only the decision whose turn it
    is, and waiting for it is bounded."""

    def __init__(self) -> None:
        self._free = threading.Condition()
        self._taken = False

    def take(self, seconds: float) -> Taking:
        """`with turn.take(10):` has the turn until its block ends; Unavailable if it is not free in time."""
        return Taking(self, seconds)

    def begin(self, seconds: float) -> None:
        with self._free:
            if self._taken and not self._free.wait_for(lambda: not self._taken, seconds):
                raise Unavailable(f"another write of this lease was still under way after {seconds:g} s")
            self._taken = True

    def end(self) -> None:
        with self._free:
            self._taken = False
            self._free.notify()


class Taking:
    def __init__(self, turn: Turn, seconds: float) -> None:
        self._turn, self._seconds = turn, seconds

    def __enter__(self) -> None:
        self._turn.begin(self._seconds)

    def __exit__(self, *_: object) -> None:
        self._turn.end()
