"""The only module that prints. Data goes to standard output, everything else to standard error.

Numbers that etcd counts in 64 bits (generations, revisions, epochs) are text in JSON and YAML, as in etcd's own
JSON: many readers, jq among them, would round them. Nothing that was stored can move the terminal's cursor.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from .options import Format

Row = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Columns:
    """Which fields of a row a table shows, a wide one beside them, and the field that names the row."""

    table: tuple[str, ...]
    wide: tuple[str, ...] = ()
    name: str = "task"


STREAM_WIDTH = 16  # characters; nobody knows the widest cell of what is yet to come
UNITS = {"granted_ttl": "s", "expires_in": "s", "db_size": "B"}  # what a person sees behind the number


def show_list(rows: Sequence[Row], columns: Columns, form: Format) -> None:
    match form:
        case Format.JSON:
            _line(json.dumps(list(rows), indent=2))
        case Format.JSONL:
            for row in rows:
                _line(json.dumps(row))
        case Format.YAML:
            _yaml(list(rows))
        case Format.NAME:
            for row in rows:
                _line(printable(str(row[columns.name])))
        case _:
            _table(rows, columns.table + (columns.wide if form is Format.WIDE else ()))


def show_stream(rows: Iterable[Row], columns: Columns, form: Format) -> None:
    """Rows as they come: JSON one line each, YAML one document each, a table with columns of fixed width."""
    fields = columns.table + (columns.wide if form is Format.WIDE else ())
    if form in (Format.TABLE, Format.WIDE):
        _line("  ".join(field.upper().replace("_", "-").ljust(STREAM_WIDTH) for field in fields).rstrip())
    for row in rows:
        if form is Format.YAML:
            _line("---")
            _yaml(row)
        elif form in (Format.TABLE, Format.WIDE):
            cells = [_cell(row.get(field), UNITS.get(field)) for field in fields]
            _line("  ".join(cell.ljust(STREAM_WIDTH) for cell in cells).rstrip())
        else:
            show_list([row], columns, Format.NAME if form is Format.NAME else Format.JSONL)


def show_one(row: Row, columns: Columns, form: Format) -> None:
    match form:
        case Format.JSON:
            _line(json.dumps(row, indent=2))
        case Format.YAML:
            _yaml(row)
        case Format.JSONL | Format.NAME:
            show_list([row], columns, form)
        case _:
            for line in _sheet(row, columns.table + (columns.wide if form is Format.WIDE else ())):
                _line(line)


def note(text: str) -> None:
    """Something for the person at the terminal, not data."""
    if sys.stderr is not None:  # closed; and print() would take standard output instead
        print(printable(text), file=sys.stderr, flush=True)


def say(text: object) -> None:
    _line(printable(str(text)))


def printable(text: str) -> str:
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode("ascii") for c in text)


def _line(text: str) -> None:
    print(text, flush=True)


def _yaml(value: object) -> None:
    import yaml

    _line(yaml.safe_dump(value, sort_keys=False, allow_unicode=True).rstrip())


def _table(rows: Sequence[Row], fields: Sequence[str]) -> None:
    cells = [[field.upper().replace("_", "-") for field in fields]]
    cells += [[_cell(row.get(field), UNITS.get(field)) for field in fields] for row in rows]
    widths = [max(len(line[column]) for line in cells) for column in range(len(fields))]
    for line in cells:
        _line("  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip())


def _sheet(row: Row, fields: Sequence[str]) -> list[str]:
    width = max(len(field) for field in fields)
    lines: list[str] = []
    for field in fields:
        value, label = row.get(field), f"{field.replace('_', ' ')}:".ljust(width + 2)
        if isinstance(value, list | tuple) and value:
            lines += [label.rstrip(), *(f"  - {_cell(one)}" for one in value)]
        else:
            lines.append(f"{label}{_cell(value, UNITS.get(field))}")
    return lines


def _cell(value: object, unit: str | None = None) -> str:
    if value is None or value == "" or value == [] or value == ():
        return "-"
    if isinstance(value, Mapping):
        return ", ".join(f"{printable(str(key))}={_cell(one)}" for key, one in value.items() if one is not None)
    if isinstance(value, list | tuple):
        return "; ".join(map(_cell, value))
    return printable(f"{value} {unit}" if unit else str(value))
