"""Promise 3 through a TCP proxy that swallows answers: every acknowledged write is there once, in order."""

from __future__ import annotations

import itertools
import json
import threading
from collections.abc import Callable

import pytest

from etcdfence import Coordinator, OutcomeUnknown, Unavailable, Verdict

from ..support.proxy import Proxy
from ..support.raw import Raw
from ..support.waiting import eventually

Connect = Callable[..., Coordinator]


@pytest.mark.req("promise-3", "promise-4")
@pytest.mark.field(28)
def test_swallowed_answers(connect: Connect, endpoint: str, raw: Raw) -> None:
    with Proxy(endpoint) as proxy:
        coordinator = connect(proxy.endpoint, request_timeout=0.5, patience=20.0)
        lease = coordinator.acquire("job", ttl=60)
        data = coordinator._engine.keys.data("log")
        log: list[int] = []
        for n in range(40):
            if n % 4 == 3:
                swallowed = proxy.swallowed
                proxy.swallow()
                healer = threading.Thread(
                    target=lambda s=swallowed: (
                        eventually("an answer was swallowed", lambda: proxy.swallowed > s + 20),
                        proxy.heal(),
                    )
                )
                healer.start()
            log.append(n)
            lease.put("log", json.dumps(log))
            if n % 4 == 3:
                healer.join(10)
            assert raw.get(data).version == n + 1  # applied once
        assert json.loads(raw.get(data).value) == list(range(40))


@pytest.mark.req("promise-4")
def test_a_read_has_no_unknown_outcome(connect: Connect, endpoint: str) -> None:
    with Proxy(endpoint) as proxy:
        coordinator = connect(proxy.endpoint, request_timeout=0.3, patience=0.5)
        proxy.swallow()
        for read in (lambda: coordinator.get("k"), lambda: coordinator.describe("job"), coordinator.tasks):
            with pytest.raises(Unavailable):
                read()


@pytest.mark.req("promise-4")
def test_whatever_a_caller_was_told_is_true(connect: Connect, endpoint: str, raw: Raw) -> None:
    """Short patience: calls end as done, unavailable or unknown; afterwards the store agrees with each."""
    with Proxy(endpoint) as proxy:
        coordinator = connect(proxy.endpoint, request_timeout=0.3, patience=0.5)
        lease = coordinator.acquire("job", ttl=60)
        faults = itertools.cycle([proxy.swallow, proxy.cut, proxy.heal])
        done: list[int] = []
        not_applied: list[int] = []
        unknown: dict[int, OutcomeUnknown] = {}
        for n in range(12):
            next(faults)()
            try:
                lease.put(f"k{n}", "v")
                done.append(n)
            except OutcomeUnknown as error:
                unknown[n] = error
            except Unavailable:
                not_applied.append(n)
        proxy.heal()
        eventually("reachable again", lambda: _written(lease, "reachable"))
        for n, error in unknown.items():
            (done if lease.settle(error) is Verdict.APPLIED else not_applied).append(n)
        assert unknown
        present = [n for n in range(12) if raw.get(coordinator._engine.keys.data(f"k{n}")) is not None]
        assert sorted(done) == present
        assert sorted([*done, *not_applied]) == list(range(12))


def _written(lease: object, key: str) -> bool:
    try:
        lease.put(key, "v")  # type: ignore[attr-defined]
    except (Unavailable, OutcomeUnknown):
        return False
    return True
