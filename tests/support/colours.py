"""Both colours and every wire behind one face, so that the suite of the API is written once.

`Blocking` makes an asynchronous object look like the synchronous one: each call runs in an event loop of its own
thread and is waited for. `MemoryRaw` is what `Raw` is, for an etcd in memory.
"""

from __future__ import annotations

import asyncio
import inspect
import threading
from collections.abc import Iterator
from concurrent.futures import Future, wait
from typing import Any

import pytest

from etcdfence._async import AsyncCoordinator, AsyncLease, AsyncSession, AsyncTransaction
from etcdfence._requests import Delete, KeyValue, Put, Range, Revoke, TimeToLive, Txn
from etcdfence.testing import MemoryEtcd

from .raw import Raw
from .waiting import VIRTUAL, eventually

SECONDS = 120.0  # no single call of the suite takes as long


class Loop:
    """An event loop in a thread."""

    def __init__(self) -> None:
        self.loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self.loop.run_forever, name="test-loop", daemon=True)
        self._thread.start()

    def call(self, method: Any, *arguments: Any, **named: Any) -> Any:
        """Call in the loop, and await what comes back if it wants to be."""

        async def outcome() -> Any:
            found = method(*arguments, **named)
            return await found if inspect.isawaitable(found) else found

        return self.wrapped(_waited(asyncio.run_coroutine_threadsafe(outcome(), self.loop)))

    def wrapped(self, found: Any) -> Any:
        if inspect.isasyncgen(found):
            return self._one_by_one(found)
        ours = AsyncCoordinator | AsyncLease | AsyncSession | AsyncTransaction
        return Blocking(self, found) if isinstance(found, ours) else found

    def _one_by_one(self, found: Any) -> Iterator[Any]:
        try:
            while True:
                yield self.call(found.__anext__)
        except StopAsyncIteration:
            return
        finally:
            self.call(found.aclose)

    def stop(self) -> None:
        self.loop.call_soon_threadsafe(self.loop.stop)
        self._thread.join(10)
        self.loop.close()


def _waited(future: Future[Any]) -> Any:
    """On a virtual clock whoever waits moves it; see VirtualClock."""
    if VIRTUAL and VIRTUAL[0].mine:
        wait([future], 0.1)  # most calls wait for nothing
        eventually("the call has ended", future.done, SECONDS)
    return future.result(SECONDS)


class Blocking:
    def __init__(self, loop: Loop, inner: Any) -> None:
        self.__dict__.update(_loop=loop, _inner=inner)

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._inner, name)
        if not inspect.ismethod(found):
            return found
        return lambda *arguments, **named: self._loop.call(found, *arguments, **named)

    def __repr__(self) -> str:
        return repr(self._inner)

    def __enter__(self) -> Any:
        self._loop.call(self._inner.__aenter__)
        return self

    def __exit__(self, *about: Any) -> None:
        self._loop.call(self._inner.__aexit__, *about)


def store_beside(variant: str, request: pytest.FixtureRequest) -> Iterator[Any]:
    """A hand on the store of this variant that no code of the library is on the way to."""
    if "memory" in variant:
        found: Any = MemoryRaw(request.getfixturevalue("memory").etcd)
    else:
        found = Raw(request.getfixturevalue("endpoint"))
    yield found
    found.close()


class MemoryRaw:
    def __init__(self, etcd: MemoryEtcd) -> None:
        self.etcd = etcd

    def get(self, key: bytes) -> KeyValue | None:
        return self.etcd.state.get(key)

    def below(self, prefix: bytes) -> list[bytes]:
        return [kv.key for kv in self.etcd.state.kvs if kv.key.startswith(prefix)]

    def revisions(self, prefix: bytes) -> dict[bytes, int]:
        return {kv.key: kv.mod_revision for kv in self.etcd.state.kvs if kv.key.startswith(prefix)}

    def put(self, key: bytes, value: bytes, lease: int = 0) -> None:
        self.etcd.answer(Txn((), (Put(key, value, lease),)))

    def delete(self, key: bytes) -> int:
        reply = self.etcd.answer(Txn((), (Range(key), Delete(key))))
        return len(reply.reads[0].kvs)

    def revoke(self, lease_id: int) -> None:
        assert self.etcd.answer(Revoke(lease_id)).found

    def ttl(self, lease_id: int) -> int:
        return self.etcd.answer(TimeToLive(lease_id)).ttl

    def compact(self) -> None:
        self.etcd.compact()

    def close(self) -> None:
        """Nothing is open."""
