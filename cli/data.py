"""etcdfence data: users' data keys, fenced."""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from etcdfence.model import Absent

from . import output, views
from .options import Context, Endpoints, Format, Namespace, Output, connected

app = typer.Typer(no_args_is_help=True, help="Data: keys that are written under a fence.")
Key = Annotated[str, typer.Argument(help="a data key", metavar="KEY")]
Value = Annotated[str, typer.Argument(help="the value; - reads it from standard input", metavar="VALUE")]
Expect = Annotated[
    str | None, typer.Option(help="write only if the key still has this revision, or is 'absent'", metavar="REV")
]


@app.callback()
def main() -> None:
    """Read data keys, and write them under the lease of `etcdfence run`."""


@app.command("put")
def put(
    key: Key,
    value: Value,
    expect: Expect = None,
    endpoints: Endpoints = None,
    namespace: Namespace = None,
    context: Context = None,
) -> None:
    """Write a data key from a command that runs under `etcdfence run`; refused (5) once its lease is over.

    Prints the revision of the write. 6 where --expect did not hold, 7 where the answer was lost and nobody knows.
    """
    from etcdfence import running

    task, token, lease_id = running.told(os.environ)
    content = _read() if value == "-" else value
    wanted = _expected(expect)
    with connected(endpoints, namespace, context) as coordinator:
        guard = coordinator.guard(task, token, lease_id)
        output.say(coordinator.put(task, guard, key, content, expect=wanted).revision)


@app.command("show")
def show(
    key: Key,
    endpoints: Endpoints = None,
    namespace: Namespace = None,
    context: Context = None,
    form: Output = Format.TABLE,
) -> None:
    """Show a data key, its revision, and which write made it; exit code 3 where it is not there."""
    from etcdfence import ABSENT, NotFound

    with connected(endpoints, namespace, context) as coordinator:
        entry = coordinator.get(key)
    if entry.revision is ABSENT:
        raise NotFound(f"there is no data key {key!r}")
    output.show_one(views.entry_row(entry), views.ENTRY, form)


def _read() -> bytes:
    from etcdfence import Misuse

    if sys.stdin is None:
        raise Misuse("the value was to be read from standard input, which is closed")
    return sys.stdin.buffer.read()


def _expected(text: str | None) -> int | Absent | None:
    from etcdfence import ABSENT

    if text is None or text == "absent":
        return None if text is None else ABSENT
    if not text.isascii() or not text.isdigit():
        raise typer.BadParameter(f"--expect is a revision in decimal digits, or absent, not {text!r}")
    return int(text)
