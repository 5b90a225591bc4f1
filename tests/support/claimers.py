"""A process with many claims of one task, all of them sent before the first is answered.

    python -m tests.support.claimers ENDPOINT NAMESPACE COUNT

Says "ready" with its etcd lease granted; after a line on standard input it claims and says "sent" when every claim
is under way and none has been answered; in the end one line of JSON: how many won, and which generations were
named.
"""

from __future__ import annotations

import asyncio
import json
import sys

import etcdfence
from etcdfence import AsyncLease, Held


async def main(endpoint: str, namespace: str, count: int) -> None:
    options = {"namespace": namespace, "request_timeout": 60.0, "patience": 90.0}
    async with etcdfence.connect_async(endpoint, **options) as coordinator:  # type: ignore[arg-type]
        session = await coordinator.session(ttl=120)
        print("ready", flush=True)
        await asyncio.to_thread(sys.stdin.readline)
        claims = [asyncio.ensure_future(_claim(session)) for _ in range(count)]
        while len(coordinator._engine.acquiring) < count:
            await asyncio.sleep(0)
        print("sent" if not any(claim.done() for claim in claims) else "too late", flush=True)
        outcomes = await asyncio.gather(*claims)
        won = [one.generation for one in outcomes if isinstance(one, AsyncLease)]
        named = {one.owner.generation for one in outcomes if isinstance(one, Held) and one.owner}
        print(json.dumps({"won": won, "held": sum(isinstance(one, Held) for one in outcomes), "named": [*named]}))
        sys.stdout.flush()
        await asyncio.to_thread(sys.stdin.readline)


async def _claim(session: etcdfence.AsyncSession) -> AsyncLease | Held:
    try:
        return await session.try_acquire("job")
    except Held as held:
        return held


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], sys.argv[2], int(sys.argv[3])))
