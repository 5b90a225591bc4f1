"""Waiting for one's turn, in threads."""

from __future__ import annotations

import threading
from typing import Self

from etcdfence.errors import Unavailable


class Turn:
    """One at a time. Unlike a lock held across a request, what is guarded is only the decision whose turn it
    is, and waiting for it is bounded."""

    def __init__(self) -> None:
        self._free = threading.Condition()
        self._taken = False

    def take(self, seconds: float) -> Self:
        """Wait at most so long; then `with turn.take(10):` has it until its block ends."""
        with self._free:
            if self._taken and not self._free.wait_for(lambda: not self._taken, seconds):
                raise Unavailable(f"another write of this lease was still under way after {seconds:g} s")
            self._taken = True
        return self

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        with self._free:
            self._taken = False
            self._free.notify()
