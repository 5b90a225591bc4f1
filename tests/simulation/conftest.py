"""What the explorer visited is printed at the end of a run."""

from __future__ import annotations

import pytest

from etcdfence.testing.explore import Report

REPORTS = pytest.StashKey[list[Report]]()


@pytest.fixture
def reports(pytestconfig: pytest.Config) -> list[Report]:
    return pytestconfig.stash.setdefault(REPORTS, [])


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    for report in config.stash.get(REPORTS, []):
        terminalreporter.write_line(str(report))
