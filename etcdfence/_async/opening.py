"""What is opened by awaiting it or by entering it."""

from __future__ import annotations

from collections.abc import Awaitable, Coroutine, Generator
from types import TracebackType
from typing import Any, Generic, Protocol, TypeVar


class Closing(Protocol):
    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...


class Enterable(Closing, Protocol):
    async def __aenter__(self) -> Any: ...


T = TypeVar("T", bound=Enterable)


class Opening(Awaitable[T], Generic[T]):
    """Await it for the thing itself, or enter it with `async with`. Nothing has begun before that, and between the
    opening and the entering there is no point at which a cancellation could leave it behind."""

    def __init__(self, coroutine: Coroutine[Any, Any, T]) -> None:
        self._coroutine = coroutine
        self._opened: T | None = None

    def __await__(self) -> Generator[Any, Any, T]:
        return self._coroutine.__await__()

    async def __aenter__(self) -> T:
        self._opened = await self._coroutine
        await self._opened.__aenter__()
        return self._opened

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._opened is not None:
            await self._opened.__aexit__(kind, error, trace)
