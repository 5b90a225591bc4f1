"""Fixtures: a real etcd for everything that needs one, and the list of what the tests must show."""

from __future__ import annotations

import os
import secrets
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import etcdfence
from etcdfence._connect import over
from etcdfence.server import LocalEtcd
from etcdfence.testing import MemoryKit

from .support import waiting
from .support.raw import Raw
from .support.shown import REQUIREMENTS, listed
from .support.tape import Tape

NEEDS_SERVER = {"endpoint", "own_etcd", "cluster", "etcdfence_server"}  # fixtures


# --- the list of what must be shown ------------------------------------------------------------------------


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--shown", metavar="FILE", help="write the ids of tests/requirements.toml that were shown by this run"
    )


def _ids(item: pytest.Item) -> list[str]:
    wanted = [str(name) for mark in item.iter_markers("req") for name in mark.args]
    return wanted + [f"field-{number}" for mark in item.iter_markers("field") for number in mark.args]


class Shown:
    """Which ids a passed test has carried in this run."""

    def __init__(self) -> None:
        self.ids: dict[str, list[str]] = {}
        self.passed: set[str] = set()

    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        for item in items:
            self.ids[item.nodeid] = _ids(item)
            unknown = set(self.ids[item.nodeid]) - set(listed())
            if unknown:
                raise pytest.UsageError(
                    f"{item.nodeid} shows {sorted(unknown)}, which is not in {REQUIREMENTS.name}"
                )

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when == "call" and report.passed and not hasattr(report, "wasxfail"):
            self.passed.update(self.ids.get(report.nodeid, ()))

    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        wanted = session.config.getoption("--shown")
        if wanted:
            Path(wanted).write_text("".join(f"{one}\n" for one in sorted(self.passed)))


def pytest_configure(config: pytest.Config) -> None:
    config.pluginmanager.register(Shown())


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        variant = getattr(item, "callspec", None) and item.callspec.params.get("variant", "")
        on_a_wire = "memory" not in variant if variant else "connect" in getattr(item, "fixturenames", ())
        if on_a_wire or NEEDS_SERVER & set(getattr(item, "fixturenames", ())):
            item.add_marker(pytest.mark.server)


# --- etcd --------------------------------------------------------------------------------------------------


@pytest.fixture(scope="session")
def endpoint() -> Iterator[str]:
    """An etcd for the whole run: the one that $ETCDFENCE_TEST_ENDPOINTS names, or our own."""
    given = os.environ.get("ETCDFENCE_TEST_ENDPOINTS")
    if given:
        yield given.split(",")[0]
        return
    with LocalEtcd() as server:
        yield server.endpoint


@pytest.fixture
def own_etcd() -> Iterator[LocalEtcd]:
    """An etcd for one test, which may stop, kill or fill it."""
    with LocalEtcd() as server:
        yield server


@pytest.fixture
def memory() -> Iterator[MemoryKit]:
    """An etcd in memory; the test waits on its clock."""
    kit = MemoryKit()
    waiting.VIRTUAL.append(kit.clock)
    yield kit
    waiting.VIRTUAL.clear()
    kit.close()


@pytest.fixture
def raw(endpoint: str) -> Iterator[Raw]:
    found = Raw(endpoint)
    yield found
    found.close()


@pytest.fixture
def namespace() -> str:
    return f"test-{secrets.token_hex(6)}"


Connect = Callable[..., etcdfence.Coordinator]


@pytest.fixture
def connect(request: pytest.FixtureRequest, namespace: str) -> Iterator[Connect]:
    """Make coordinators for this test's namespace; they are closed at its end."""
    made: list[etcdfence.Coordinator] = []

    def make(endpoints: Any = None, **options: Any) -> etcdfence.Coordinator:
        where = endpoints or request.getfixturevalue("endpoint")
        made.append(etcdfence.connect(where, **{"namespace": namespace, **options}))
        return made[-1]

    yield make
    for coordinator in made:
        coordinator.close(2.0)


@pytest.fixture
def coordinator(endpoint: str, connect: Connect) -> etcdfence.Coordinator:
    return connect()


@pytest.fixture
def taped(endpoint: str, namespace: str) -> Iterator[Callable[..., tuple[etcdfence.Coordinator, Tape]]]:
    """Make coordinators whose wire is a Tape."""
    made: list[tuple[etcdfence.Coordinator, Tape]] = []

    def make(**options: Any) -> tuple[etcdfence.Coordinator, Tape]:
        tape = Tape(endpoint)
        made.append((over(tape, **{"namespace": namespace, "patience": 2.0, **options}), tape))
        return made[-1]

    yield make
    for coordinator, tape in made:
        tape.heal()
        coordinator.close(2.0)
