"""The block that a loss cancels; after the model of `asyncio.timeout`.

A cancellation asked for here is taken back on leaving the block, and one that somebody else asked for meanwhile
goes on: `Task.cancelling` counts them.
"""

from __future__ import annotations

import asyncio

from etcdfence.errors import Misuse


class Scope:
    """Entered by being made, in the task whose block it is."""

    def __init__(self) -> None:
        task = asyncio.current_task()
        if task is None:
            raise Misuse("a lease is entered in a task; run this coroutine with asyncio.run or create_task")
        self._task, self._before = task, task.cancelling()
        self._active, self._cancelled = True, False

    def cancel(self, why: str) -> None:
        if self._active:
            self._active, self._cancelled = False, True
            self._task.cancel(why)

    async def leave(self, error: BaseException | None) -> bool:
        """Whether `error` is the cancellation that was asked for here, or would be: a body that ended without
        noticing it must not meet it in whatever it awaits next."""
        self._active = False
        if not self._cancelled:
            return False
        others = self._task.uncancel() > self._before
        if others:
            return False
        if isinstance(error, asyncio.CancelledError):
            return True
        if error is None:
            try:
                await asyncio.sleep(0)
            except asyncio.CancelledError:
                if self._task.cancelling() > self._before:
                    raise
            return True
        return False
