"""Waiting for a condition, bounded; the only place in the tests where time passes on purpose."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import TypeVar

from etcdfence.testing import VirtualClock

T = TypeVar("T")
VIRTUAL: list[VirtualClock] = []  # the clock of the test that is running, where it has one
POLL = 0.01


def eventually(what: str, found: Callable[[], T], within: float = 10.0) -> T:
    """The first true value of `found()`, asked again and again for at most so many seconds."""
    until = time.monotonic() + within
    while True:
        value = found()
        if value:
            return value
        if time.monotonic() > until:
            raise AssertionError(f"not within {within:g} s: {what} (last: {value!r})")
        _poll()


def pass_time(seconds: float) -> None:
    """Let time pass where the passing of time itself is the fault (a cut link, a stopped process)."""
    if VIRTUAL:
        VIRTUAL[0].advance(seconds)
    else:
        threading.Event().wait(seconds)


def _poll() -> None:
    """On a virtual clock ten times as much of its time passes as of the real one."""
    if VIRTUAL:
        VIRTUAL[0].advance(10 * POLL)
    threading.Event().wait(POLL)
