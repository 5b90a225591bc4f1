"""Waiting for one's turn, in threads."""

from __future__ import annotations

import math
import threading
from collections import deque
from collections.abc import Callable
from typing import Final, TypeVar

from etcdfence.errors import Unavailable

T = TypeVar("T")
LOOK_AGAIN: Final = 0.1  # seconds, for the case that whoever should have woken us was interrupted


class Turn:
    """One at a time, in the order of coming. Unlike a lock held across a request, what is guarded is only the
    decision whose turn it is, and waiting for it is bounded.

    Ctrl-C may come between any two steps. So one's place in the line is taken and given up by single operations
    of the interpreter, inside one `try`, and nobody relies on being woken.
    """

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._line: deque[object] = deque()  # whoever is first has the turn

    def run(self, seconds: float, action: Callable[[], T]) -> T:
        """Run `action` when it is its turn; Unavailable, and nothing run, if that takes longer."""
        me = object()
        try:
            self._line.append(me)
            if self._line[0] is not me:
                self._await(me, seconds)
            return action()
        finally:
            if me in self._line:
                self._line.remove(me)
            if self._line:
                with self._changed:
                    self._changed.notify_all()

    def _await(self, me: object, seconds: float) -> None:
        with self._changed:
            for _ in range(math.ceil(seconds / LOOK_AGAIN)):
                if self._changed.wait_for(lambda: self._line[0] is me, LOOK_AGAIN):
                    return
        raise Unavailable(f"another write of this lease was still under way after {seconds:g} s")
