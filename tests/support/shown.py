"""What the tests must show, and whether they have: `python -m tests.support.shown FILE…` fails where an entry of
tests/requirements.toml is in none of the files that runs with `--shown FILE` have written."""

from __future__ import annotations

import sys
import tomllib
from pathlib import Path

REQUIREMENTS = Path(__file__).parents[1] / "requirements.toml"


def listed() -> dict[str, str]:
    """Every id of the list with its sentence; public failures are called field-N."""
    document = tomllib.loads(REQUIREMENTS.read_text(encoding="utf-8"))
    found = {f"{entry['id']}": entry["shows"] for entry in document["requirement"]}
    return found | {f"field-{entry['number']}": entry["shows"] for entry in document["field"]}


def main(files: list[str]) -> int:
    shown = {line for file in files for line in Path(file).read_text(encoding="utf-8").split()}
    missing = sorted(set(listed()) - shown)
    print(
        f"{len(shown)} of {len(listed())} entries shown"
        + (f"; not shown: {', '.join(missing)}" if missing else "")
    )
    return 1 if missing else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
