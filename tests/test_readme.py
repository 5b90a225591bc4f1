"""What the README says, held to the code: its links, its promises and its commands."""

from __future__ import annotations

import asyncio
import re
import runpy
import textwrap
from pathlib import Path
from typing import Any

import pytest

import etcdfence
from etcdfence.testing import MemoryKit

ROOT = Path(__file__).parents[1]
TEXT = (ROOT / "README.md").read_text(encoding="utf-8")


def test_links_lead_to_something() -> None:
    for target in re.findall(r"\]\((?!http)([^)#]+)", TEXT):
        assert (ROOT / target).exists(), target


def test_named_tests_exist() -> None:
    """Every promise names its tests as file::function."""
    named = re.findall(r"`(tests/[\w/]+\.py)::(\w+)`", TEXT)
    assert len(named) >= 10
    for path, function in named:
        assert f"def {function}(" in (ROOT / path).read_text(encoding="utf-8"), f"{path}::{function}"


@pytest.mark.req("S2-20")
def test_the_table_of_lifetimes_names_each_primitive() -> None:
    rows = re.search(r"## How long each thing lives\n(.*?)\n## ", TEXT, re.DOTALL)
    assert rows is not None
    for primitive in ("process", "connection", "etcd lease", "owner key", "transaction"):
        assert re.search(rf"^\| {primitive} ", rows[1], re.MULTILINE), primitive
    assert "co-operation of all writers" in rows[1]


def test_the_table_of_controls_is_there() -> None:
    header = "| control | helps with | does not prove |"
    assert header in TEXT
    rows = TEXT.split(header)[1].split("\n\n")[0]
    for control in ("atomic claim", "lease", "fencing", "idempotency key"):
        assert f"| {control} |" in rows


@pytest.mark.req("first-write")
def test_the_first_example_runs_as_it_stands(
    endpoint: str,
    namespace: str,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """The controller author's first fenced write, taken from the page."""
    (example,) = re.findall(r"```python\n# first\.py\n(.*?)```", TEXT, re.DOTALL)
    program = tmp_path / "first.py"
    program.write_text(textwrap.dedent(example))
    monkeypatch.setenv("ETCDFENCE_ENDPOINTS", endpoint)
    monkeypatch.setenv("ETCDFENCE_NAMESPACE", namespace)
    runpy.run_path(str(program), run_name="__main__")
    assert "wrote revision" in capsys.readouterr().out


def test_the_two_commands_exist() -> None:
    for command in ("scripts/demo", "scripts/test"):
        assert command in TEXT
        assert (ROOT / command).stat().st_mode & 0o111


@pytest.mark.req("P-29")
def test_the_asynchronous_example_runs_as_it_stands(
    endpoint: str, namespace: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    (example,) = re.findall(r"```python\n(async with etcdfence.*?)```", TEXT, re.DOTALL)
    monkeypatch.setenv("ETCDFENCE_ENDPOINTS", endpoint)
    monkeypatch.setenv("ETCDFENCE_NAMESPACE", namespace)
    with etcdfence.connect() as coordinator, coordinator.acquire("seed") as lease:
        lease.put("report/total", "6")
    scope: dict[str, Any] = {"etcdfence": etcdfence}
    exec("async def main():\n" + textwrap.indent(example, "    "), scope)
    asyncio.run(scope["main"]())
    with etcdfence.connect() as coordinator:
        assert coordinator.get("report/total").value == b"7"


@pytest.mark.req("P-32")
def test_the_example_of_a_test_passes(etcdfence_memory: MemoryKit) -> None:
    (example,) = re.findall(r"```python\n(def test_.*?)```", TEXT, re.DOTALL)
    scope: dict[str, Any] = {"etcdfence": etcdfence, "pytest": pytest}
    exec(example, scope)
    scope["test_a_worker_that_is_overtaken"](etcdfence_memory)
