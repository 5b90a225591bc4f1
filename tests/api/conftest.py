"""The suite of the API in both colours and over every wire, the in-memory etcd included."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

import etcdfence

from ..support.colours import Loop, store_beside

VARIANTS = ("sync memory", "async memory", "sync grpc", "async grpc", "sync gateway", "async gateway")
Connect = Callable[..., Any]


@pytest.fixture(params=VARIANTS)
def variant(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def raw(variant: str, request: pytest.FixtureRequest) -> Iterator[Any]:
    yield from store_beside(variant, request)


@pytest.fixture
def connect(variant: str, request: pytest.FixtureRequest, namespace: str) -> Iterator[Connect]:
    """Make coordinators for this test's namespace; they are closed at its end."""
    colour, wire = variant.split()
    if wire == "memory":
        kit = request.getfixturevalue("memory")
        opening: Connect = kit.connect if colour == "sync" else kit.connect_async
        usual: dict[str, Any] = {"namespace": namespace}
    else:
        opening = etcdfence.connect if colour == "sync" else etcdfence.connect_async
        usual = {
            "namespace": namespace,
            "endpoints": request.getfixturevalue("endpoint"),
            "transport": wire,
        }
    loop = Loop() if colour == "async" else None
    made: list[Any] = []

    def make(**options: Any) -> Any:
        wanted = {**usual, **options}
        made.append(loop.call(lambda: opening(**wanted)) if loop else opening(**wanted))
        return made[-1]

    yield make
    for coordinator in made:
        coordinator.close(2.0)
    if loop:
        loop.stop()


@pytest.fixture
def coordinator(connect: Connect) -> Any:
    return connect()
