"""Wires for the contract suite, and a hand on the store beside them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import pytest

from ..support.colours import Loop, store_beside
from .wires import OPENERS, WIRES, OpenWire, Wire


@pytest.fixture(params=WIRES)
def variant(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def loop() -> Iterator[Loop]:
    found = Loop()
    yield found
    found.stop()


@pytest.fixture
def open_wire(variant: str, loop: Loop) -> Iterator[OpenWire]:
    """Open the test's kind of wire to endpoints; what a test leaves open is closed at its end."""
    opened: list[Wire] = []

    def opening(endpoints: Sequence[str]) -> Wire:
        asynchronous = variant in ("grpc.aio", "gateway in thread")
        transport = loop.call(OPENERS[variant], endpoints) if asynchronous else OPENERS[variant](endpoints)
        opened.append(Wire(transport, loop if asynchronous else None))
        return opened[-1]

    yield opening
    for wire in opened:
        wire.close()


@pytest.fixture
def wire(variant: str, request: pytest.FixtureRequest, loop: Loop) -> Iterator[Wire]:
    if variant.startswith("memory"):
        etcd = request.getfixturevalue("memory").etcd
        in_loop = variant.endswith("async")
        found = Wire(etcd.transport_async() if in_loop else etcd.transport(), loop if in_loop else None)
    else:
        found = request.getfixturevalue("open_wire")([request.getfixturevalue("endpoint")])
    yield found
    found.close()


@pytest.fixture
def store(variant: str, request: pytest.FixtureRequest) -> Iterator[Any]:
    yield from store_beside(variant, request)
