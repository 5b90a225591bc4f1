"""Importing etcdfence: beside a client that took etcd's names, on both protobuf runtimes, and starting nothing.

Each trial is a process of its own, because a name that was once registered stays. scripts/compat makes the same
trials with real clients, on the lowest and the newest versions.
"""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
FOREIGN = "tests.support.foreign"
runtimes = pytest.mark.parametrize("runtime", ["upb", "python"])


def python(*words: str, runtime: str = "upb") -> subprocess.CompletedProcess[str]:
    """What a new interpreter says in which every warning is an error."""
    return subprocess.run(
        [sys.executable, "-W", "error", *words],
        cwd=ROOT,
        env={**os.environ, "PROTOCOL_BUFFERS_PYTHON_IMPLEMENTATION": runtime},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


def assert_imported(*names: str, runtime: str) -> None:
    done = python("-m", "tests.support.beside", *names, runtime=runtime)
    assert (done.returncode, done.stderr) == (0, "")
    assert f"({runtime})" in done.stdout


@pytest.mark.field(103)
@runtimes
def test_alone(runtime: str) -> None:
    assert_imported("etcdfence", runtime=runtime)


@pytest.mark.field(104)
@runtimes
@pytest.mark.parametrize("names", [("etcdfence", FOREIGN), (FOREIGN, "etcdfence")], ids=["before", "after"])
def test_beside_a_package_that_took_the_names_of_etcd(names: tuple[str, str], runtime: str) -> None:
    assert_imported(*names, runtime=runtime)


SECOND = f"""
from google.protobuf import descriptor_pool
from {FOREIGN} import take
print("imported")
take("of_the_second")
print(*descriptor_pool.Default().FindMessageTypeByName("etcdserverpb.TxnRequest").fields_by_name)
"""


@pytest.mark.field(104)
@runtimes
def test_under_the_names_of_etcd_the_second_package_loses(runtime: str) -> None:
    """The C protobuf refuses it; the pure-Python one hands it the messages of the first."""
    done = python("-c", SECOND, runtime=runtime)
    assert done.stdout.startswith("imported\n")
    assert "of_the_second" not in done.stdout
    assert ("duplicate file name" in done.stderr) == (done.returncode != 0)


@pytest.mark.field(103)
def test_the_generated_code_is_no_newer_than_the_lowest_protobuf() -> None:
    generated = (ROOT / "etcdfence/transports/_pb/etcdfence_wire_pb2.py").read_text(encoding="utf-8")
    made_for = re.search(r"^# Protobuf Python Version: (\d+)\.(\d+)", generated, re.MULTILINE)
    assert made_for is not None and "runtime_version" not in generated
    dependencies = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["dependencies"]
    lowest = [re.match(r"protobuf>=(\d+)\.(\d+)", line) for line in dependencies]
    bounds = [tuple(map(int, found.groups())) for found in lowest if found]
    assert bounds and tuple(map(int, made_for.groups())) <= min(bounds)


STATE = """
import importlib, os, pkgutil, threading

def state():
    with os.scandir("/proc/self/fd") as found:
        opened = sorted(os.readlink(entry.path) for entry in found)
    return threading.enumerate(), len(os.listdir("/proc/self/task")), opened

def import_everything():
    import etcdfence
    for module in pkgutil.walk_packages(etcdfence.__path__, "etcdfence."):
        importlib.import_module(module.name)

"""


@pytest.mark.field(33)
@pytest.mark.parametrize("what", ["import etcdfence", "import_everything()"])
def test_importing_starts_no_thread_and_opens_nothing(what: str) -> None:
    done = python("-c", f"{STATE}\nbefore = state()\n{what}\nafter = state()\nprint(before == after, after)")
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith("True "), done.stdout


def third_party(tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        names = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        for name in names:
            if name.split(".")[0] not in {*sys.stdlib_module_names, "etcdfence", "etcdfence_cli"}:
                yield name


DISTRIBUTIONS = {"grpc": "grpcio", "google": "protobuf", "yaml": "PyYAML"}


@pytest.mark.field(105)
def test_few_dependencies_each_declared_and_none_used_from_the_inside() -> None:
    """What is imported is asked for, with a lower bound; and no private name of another package is relied on."""
    dependencies = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["dependencies"]
    declared = {re.split(r"[>=]", line)[0] for line in dependencies if ">=" in line}
    assert len(declared) <= 8
    paths = [*(ROOT / "etcdfence").rglob("*.py"), *(ROOT / "cli").rglob("*.py")]
    for path in paths:
        for name in third_party(ast.parse(path.read_text(encoding="utf-8"))):
            parts = name.split(".")
            if "_pb" in path.parts or parts[0] == "pytest":  # generated; the plug-in, which only pytest loads
                continue
            assert DISTRIBUTIONS.get(parts[0], parts[0]) in declared, f"{path}: {name}"
            assert not any(part.startswith("_") for part in parts), f"{path}: {name}"
