"""A process with many who wait for one task in one coordinator.

    python -m tests.support.waiters ENDPOINT NAMESPACE COUNT TTL

They get in line one after the other, which "in line" tells. Whoever gets the task says "owns INDEX GENERATION" and
gives it back after one line on standard input.
"""

from __future__ import annotations

import asyncio
import sys

import etcdfence
from etcdfence import AsyncCoordinator


async def main(endpoint: str, namespace: str, count: int, ttl: int) -> None:
    lines: asyncio.Queue[str] = asyncio.Queue()
    reading = asyncio.create_task(_read(lines))
    async with etcdfence.connect_async(endpoint, namespace=namespace) as coordinator:
        waiting = []
        for index in range(count):
            waiting.append(asyncio.create_task(_wait(coordinator, index, ttl, lines)))
            while len(coordinator._engine.transport._waits) <= index and not _owned:  # type: ignore[attr-defined]
                await asyncio.sleep(0.001)
        print("in line", flush=True)
        await asyncio.gather(*waiting)
    reading.cancel()


_owned: list[int] = []


async def _read(lines: asyncio.Queue[str]) -> None:
    reader = asyncio.StreamReader()
    await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
    while line := await reader.readline():
        lines.put_nowait(line.decode())


async def _wait(coordinator: AsyncCoordinator, index: int, ttl: int, lines: asyncio.Queue[str]) -> None:
    async with coordinator.acquire("job", ttl=ttl, wait=3600) as lease:
        _owned.append(index)
        print("owns", index, lease.generation, flush=True)
        await lines.get()


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], sys.argv[2], *map(int, sys.argv[3:5])))
