"""Waiting for a condition, bounded; the only place in the tests where time passes on purpose."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")


def eventually(what: str, found: Callable[[], T], within: float = 10.0) -> T:
    """The first true value of `found()`, asked again and again for at most so many seconds."""
    until = time.monotonic() + within
    while True:
        value = found()
        if value:
            return value
        if time.monotonic() > until:
            raise AssertionError(f"not within {within:g} s: {what} (last: {value!r})")
        threading.Event().wait(0.01)


def pass_time(seconds: float) -> None:
    """Let real time pass where the passing of time itself is the fault (a cut link, a stopped process)."""
    threading.Event().wait(seconds)
