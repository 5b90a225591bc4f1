"""Who may import what, the sizes the code is held to, and that no flow is left undriven."""

from __future__ import annotations

import ast
import inspect
import statistics
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import etcdfence

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "etcdfence"

VALUES = {"errors", "model"}
VOCABULARY = VALUES | {"_requests", "_flow"}
DECISIONS = VOCABULARY | {"_keys", "_records", "_txns", "_states", "_timing"}
SHELL = DECISIONS | {
    "_flows",
    "_host",
    "_edits",
    "_renewal",
    "_turn",
    "_engine",
    "_handle",
    "_leading",
    "_desk",
    "_aside",
}
EVERYTHING = SHELL | {"_sync", "_async", "_connect", "config", "server", "transports", "rehearsals", "testing"}

MAY_IMPORT: dict[str, set[str]] = {
    "__init__": {"errors", "model", "_sync", "_async", "_connect"},
    "errors": {"model"},  # for annotations only
    "model": {"errors"},
    "_requests": {"model"},
    "_flow": {"_requests", "errors"},
    "_keys": VALUES,
    "_records": {"_requests", "model"},
    "_timing": VALUES,
    "_states": VALUES,
    "_txns": VALUES | {"_requests", "_keys", "_records"},
    "_flows": DECISIONS | {"_flows"},
    "_edits": {"errors", "model", "_keys", "_records", "_flows"},
    "_turn": {"errors"},
    "_aside": set(),
    "_host": {"_flow", "_requests", "errors"},
    "_renewal": {"_timing", "errors", "model"},
    "_engine": SHELL - {"_handle", "_desk"},
    "_handle": SHELL - {"_desk"},
    "_leading": {"_handle", "model"},
    "_desk": SHELL - {"_handle"},
    "_sync": SHELL | {"_sync"},
    "_async": SHELL | {"_async"},
    "testing": VOCABULARY | {"testing"},
    "testing.kit": EVERYTHING,
    "testing.plugin": {"server", "testing"},
    "config": {"errors"},
    "server": {"errors"},
    "_connect": EVERYTHING,
    "transports": {"_requests", "_aside", "errors", "model", "transports"},
    "rehearsals": EVERYTHING | {"__init__"},
    "running": VALUES | {"_sync"},  # for annotations only
}
IO = {"asyncio", "threading", "socket", "subprocess", "grpc", "etcd3gw", "logging", "os"}
CHANCE = {"time", "datetime", "random", "uuid", "secrets"}
MUST_NOT: dict[str, set[str]] = {
    **dict.fromkeys(
        ["errors", "model", "_requests", "_flow", "_keys", "_records", "_timing", "_states"], IO | CHANCE
    ),
    "_txns": IO | CHANCE,
    "_flows": IO | CHANCE,
    "_edits": IO | CHANCE,
    "_renewal": {"asyncio", "grpc", "etcd3gw"} | CHANCE,
    "_engine": {"asyncio", "grpc", "etcd3gw"} | CHANCE,
    "_handle": IO - {"logging"} | CHANCE,
    "_desk": IO | CHANCE,
    "_leading": IO - {"logging"} | CHANCE,
    "_sync": {"asyncio", "grpc", "etcd3gw"} | CHANCE,
    "_async": {"threading", "grpc", "etcd3gw"} | CHANCE,
    "cli": {"grpc", "etcd3gw", "click"},
}


def modules(top: Path) -> list[Path]:
    return [path for path in sorted(top.rglob("*.py")) if "_pb" not in path.parts]


def parsed(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


def imports(tree: ast.Module) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def layer(path: Path) -> str:
    inside = ".".join(path.relative_to(PACKAGE).with_suffix("").parts)
    return inside if inside in MAY_IMPORT else inside.split(".")[0]


@pytest.mark.parametrize("path", modules(PACKAGE), ids=str)
def test_imports_go_down(path: Path) -> None:
    me = layer(path)
    for name in imports(parsed(path)):
        parts = name.split(".")
        if parts[0] == "etcdfence":
            target = (
                parts[1] if (PACKAGE / parts[1]).is_dir() or (PACKAGE / f"{parts[1]}.py").exists() else "__init__"
            )
            assert target in MAY_IMPORT[me] | ({"_flows"} if me == "_flows" else set()), f"{path}: {name}"
        assert parts[0] not in MUST_NOT.get(me, set()), f"{path}: {name}"


@pytest.mark.parametrize("path", modules(ROOT / "cli"), ids=str)
def test_the_command_line_knows_public_names_only(path: Path) -> None:
    for name in imports(parsed(path)):
        assert name.split(".")[0] not in MUST_NOT["cli"], name
        private = [part for part in name.split(".") if part.startswith("_") and part != "__version__"]
        assert not name.startswith("etcdfence") or not private, name


@pytest.mark.req("S2-33")
def test_only_one_module_reads_clocks() -> None:
    """And only for its own records: nothing else in the library could compare wall clocks of two machines."""
    clocks = {
        layer(path)
        for path in modules(PACKAGE)
        for name in imports(parsed(path))
        if name.split(".")[0] in {"time", "datetime"}
    }
    assert clocks <= {
        "_host",
        "server",
        "running",
        "rehearsals",
        "testing",
    }  # a virtual clock only formats its own time


def functions(tree: ast.AST) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    return (node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef))


def is_flow(function: ast.FunctionDef | ast.AsyncFunctionDef) -> bool:
    return "Flow[" in ast.unparse(function.returns) if function.returns else False


@pytest.mark.req("P-29")
def test_both_colours_have_the_same_names() -> None:
    """Methods, parameters, defaults and properties; what the asynchronous ones have beside is said here."""
    more = {"acquire": {"cancel_on_loss"}, "try_acquire": {"cancel_on_loss"}}
    for one, other in (
        (etcdfence.Coordinator, etcdfence.AsyncCoordinator),
        (etcdfence.Lease, etcdfence.AsyncLease),
        (etcdfence.Transaction, etcdfence.AsyncTransaction),
        (etcdfence.Session, etcdfence.AsyncSession),
        (etcdfence.Leadership, etcdfence.AsyncLeadership),
    ):
        names = {name for name in dir(one) if not name.startswith("_")}
        assert names == {name for name in dir(other) if not name.startswith("_")}
        for name in names:
            if callable(getattr(one, name)):
                here = inspect.signature(getattr(one, name)).parameters
                there = inspect.signature(getattr(other, name)).parameters
                assert set(there) - set(here) == more.get(name, set()), name
                assert [(key, here[key].default) for key in here] == [(key, there[key].default) for key in here]


def test_a_flow_is_never_called_without_yield_from() -> None:
    trees = [parsed(path) for path in modules(PACKAGE / "_flows")]
    flows = {function.name for tree in trees for function in functions(tree) if is_flow(function)} | {"again"}
    for tree in trees:
        driven = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.YieldFrom)}
        for node in ast.walk(tree):
            if isinstance(node, ast.Call) and called_flow(node.func) in flows:
                assert id(node) in driven, f"{ast.unparse(node)}, line {node.lineno}"


def called_flow(function: ast.expr) -> str:
    """The name of what is called, if it can be a flow: a plain name, or one of a module of flows (or a Pace)."""
    if isinstance(function, ast.Attribute):
        owner = getattr(function.value, "id", "")
        return (
            function.attr
            if owner in {"leases", "fencing", "tasks", "turns", "watching", "borrowing", "pace"}
            else ""
        )
    return getattr(function, "id", "")


def test_flows_call_no_callbacks_and_iterate_no_sets() -> None:
    for path in modules(PACKAGE / "_flows"):
        for node in ast.walk(parsed(path)):
            assert not isinstance(node, ast.Set | ast.SetComp), f"{path}:{node.lineno}"
            if isinstance(node, ast.Call):
                assert getattr(node.func, "id", "") not in {"set", "frozenset"}, f"{path}:{node.lineno}"


def length(function: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    body = function.body[1:] if ast.get_docstring(function) is not None else function.body
    return (body[-1].end_lineno or 0) - body[0].lineno + 1 if body else 0


def test_sizes() -> None:
    paths = modules(PACKAGE) + modules(ROOT / "cli")
    lengths = sorted(length(function) for path in paths for function in functions(parsed(path)))
    assert statistics.median(lengths) <= 7
    assert lengths[int(len(lengths) * 0.9)] <= 30
    assert lengths[-1] <= 60
    for path in paths:
        assert len(path.read_text(encoding="utf-8").splitlines()) <= 600, path


def test_commands_are_thin() -> None:
    for path in modules(ROOT / "cli"):
        for function in functions(parsed(path)):
            if any("command" in ast.unparse(decorator) for decorator in function.decorator_list):
                assert length(function) <= 12, f"{path}: {function.name}"


def test_no_type_is_ignored_outside_transports() -> None:
    for path in modules(PACKAGE) + modules(ROOT / "cli"):
        if "transports" not in path.parts:
            assert "type: ignore" not in path.read_text(encoding="utf-8"), path


@pytest.mark.req("P-30")
def test_the_public_names_are_typed(tmp_path: Path) -> None:
    """A program of somebody else's, checked strictly against the installed package: what it may do passes, and
    each of its mistakes is found."""
    assert (PACKAGE / "py.typed").exists()
    done = subprocess.run(
        [sys.executable, "-m", "mypy", "--strict", f"--cache-dir={tmp_path}", "tests/typing/public.py"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=140,
        check=False,
    )
    assert done.returncode == 0, done.stdout
