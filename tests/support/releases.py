"""Which etcd releases the tests can use besides the one that the finder finds."""

from __future__ import annotations

import os
from pathlib import Path

from etcdfence.server import find

ETCDS = os.environ.get("ETCDFENCE_TEST_ETCDS")


def releases() -> list[Path]:
    """The binaries below $ETCDFENCE_TEST_ETCDS, oldest first."""
    found = Path(ETCDS).glob("*/etcd") if ETCDS else ()
    return sorted(found, key=lambda path: [int(part) for part in path.parent.name.split(".")])


def newest() -> Path:
    """For crash and partition tests, which 3.5.1 (the embedded one) is not fit for: the newest that there is."""
    return (releases() or [find()])[-1]
