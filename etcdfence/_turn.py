"""Waiting for one's turn, in threads."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

from etcdfence.errors import Unavailable


class Turn:
    """One at a time. Unlike a lock held across a request, what is guarded is only the decision whose turn it
    is, and waiting for it is bounded."""

    def __init__(self) -> None:
        self._free = threading.Condition()
        self._taken = False

    @contextmanager
    def take(self, seconds: float) -> Iterator[None]:
        with self._free:
            if not self._free.wait_for(lambda: not self._taken, seconds):
                raise Unavailable(f"another write of this lease was still under way after {seconds:g} s")
            self._taken = True
        try:
            yield
        finally:
            with self._free:
                self._taken = False
                self._free.notify()
