"""What is opened by awaiting it or by entering it."""

from __future__ import annotations

import warnings
from collections.abc import Awaitable, Callable, Coroutine, Generator
from types import TracebackType
from typing import Any, Generic, Protocol, TypeVar

from etcdfence.errors import Misuse


class Enterable(Protocol):
    async def __aenter__(self) -> Any: ...

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...


T = TypeVar("T", bound=Enterable)


class Opening(Awaitable[T], Generic[T]):
    """Await it for the thing itself, or enter it with `async with`, once. Nothing has begun before that, and
    between the opening and the entering there is no point at which a cancellation could leave it behind."""

    def __init__(self, what: str, begin: Callable[[], Coroutine[Any, Any, T]], keep: object = None) -> None:
        self._what, self._begin, self._keep = what, begin, keep
        self._begun = False
        self._opened: T | None = None

    def _coroutine(self) -> Coroutine[Any, Any, T]:
        if self._begun:
            raise Misuse(f"{self._what} was awaited already; call it again for another one")
        self._begun = True
        return self._kept(self._keep)

    async def _kept(self, keep: object) -> T:
        """`keep` must not be collected before this has ended: the session that a lease is opened in, say."""
        opened = await self._begin()
        del keep
        return opened

    def __await__(self) -> Generator[Any, Any, T]:
        return self._coroutine().__await__()

    async def __aenter__(self) -> T:
        self._opened = await self._coroutine()
        await self._opened.__aenter__()
        return self._opened

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._opened is not None:
            await self._opened.__aexit__(kind, error, trace)

    def __del__(self) -> None:
        if not self._begun:
            warnings.warn(f"{self._what} was never awaited", RuntimeWarning, stacklevel=2)
