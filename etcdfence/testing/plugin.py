"""The pytest plug-in: fixtures for tests of what is built on etcdfence; pytest loads it where that is installed.

`etcdfence_memory`   an etcd in memory for each test, with a clock that the test advances (`MemoryKit`)
`etcdfence_server`   a real etcd: one process for each module, a namespace for each test (`ServerKit`)
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:  # imported when a fixture is used: a plug-in is loaded in every run of pytest
    from etcdfence.testing.kit import MemoryKit, ServerKit

DISCLAIMER = (
    "etcdfence_memory: what passed on the in-memory etcd is a statement about state machines;"
    " it proves nothing about a network, a disk or a remote service"
)
_USED = pytest.StashKey[bool]()


@pytest.fixture
def etcdfence_memory(pytestconfig: pytest.Config) -> Iterator[MemoryKit]:
    """An etcd in memory, its clock, and coordinators on it."""
    from etcdfence.testing.kit import MemoryKit

    pytestconfig.stash[_USED] = True
    kit = MemoryKit()
    yield kit
    kit.close()


@pytest.fixture(scope="module")
def _etcdfence_etcd() -> Iterator[tuple[str, object]]:
    import os

    from etcdfence.server import LocalEtcd

    given = os.environ.get("ETCDFENCE_TEST_ENDPOINTS")
    if given:
        yield given, None
        return
    with LocalEtcd() as server:
        yield server.endpoint, server


@pytest.fixture
def etcdfence_server(_etcdfence_etcd: tuple[str, object]) -> Iterator[ServerKit]:
    """A real etcd, and coordinators on it in a namespace of the test's own."""
    from etcdfence.server import LocalEtcd
    from etcdfence.testing.kit import ServerKit

    endpoint, server = _etcdfence_etcd
    kit = ServerKit(endpoint, server if isinstance(server, LocalEtcd) else None)
    yield kit
    kit.close()


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    if config.stash.get(_USED, False):
        terminalreporter.write_line(DISCLAIMER)
