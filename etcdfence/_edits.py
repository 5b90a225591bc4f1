"""What goes into one fenced write, checked before anything is sent."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from etcdfence._flows.fencing import Check, Edit
from etcdfence._keys import Keys
from etcdfence._records import TaskRecord
from etcdfence.errors import Misuse
from etcdfence.model import ABSENT, Absent, Committed, revision_number


def checked_value(value: object) -> bytes:
    if isinstance(value, str):
        try:
            return value.encode()
        except UnicodeEncodeError as error:
            raise Misuse(f"this value is not valid Unicode text: {error.reason}") from error
    if isinstance(value, bytes):
        return value
    raise Misuse(f"a value is bytes or text, not {type(value).__name__}; encode it first (json.dumps, say)")


def checked_expectation(expect: object) -> int | Absent:
    if expect is ABSENT:
        return ABSENT
    if expect == 0 and not isinstance(expect, bool):
        raise Misuse("expect=0 means 'not there' to etcd; say expect=ABSENT if that is what you expect")
    return revision_number(expect, "expect")


def checked_document(value: object, what: str) -> Any:
    """A JSON value as it will be stored; Misuse where JSON has no such value (NaN, a set, an object), or where it
    could be written but not read again (nested too deeply)."""
    try:
        document = json.loads(json.dumps(value, allow_nan=False))
        TaskRecord.model_validate_json(TaskRecord(result=document).to_bytes())
    except (TypeError, ValueError, RecursionError) as error:
        raise Misuse(f"{what} cannot be stored as JSON: {error}") from error
    return document


def checked_evidence(evidence: object) -> Any:
    if not isinstance(evidence, Mapping) or not evidence:
        raise Misuse(
            "evidence must say where the result can be verified, as a mapping with at least one entry, such as"
            " {'revision': 42} or {'booking': 'B-17'}; a bare message proves nothing"
        )
    return checked_document(evidence, "evidence")


class Edits:
    """The puts, deletes and expectations of one fenced write. A key may be edited once."""

    def __init__(self, keys: Keys) -> None:
        self._keys = keys
        self.edits: dict[str, Edit] = {}
        self.checks: dict[str, Check] = {}

    def put(self, key: str, value: bytes | str, *, expect: int | Absent | None = None) -> None:
        self._add(key, checked_value(value), expect)

    def delete(self, key: str, *, expect: int | Absent | None = None) -> None:
        self._add(key, None, expect)

    def expect(self, key: str, revision: int | Absent) -> None:
        """The write is refused with Conflict unless the key still has this revision (ABSENT: is not there)."""
        check = Check(key, self._keys.data(key), checked_expectation(revision))
        known = self.checks.setdefault(key, check)
        if known != check:
            raise Misuse(f"{key!r} is already expected at {known.revision!r}; it cannot also be at {revision!r}")

    def require_committable(self, committed: Committed | None) -> None:
        if committed is not None:
            raise Misuse("this transaction was committed already; begin another")
        if not self.edits and not self.checks:
            raise Misuse("this transaction is empty; put, delete or expect something first")

    def _add(self, key: str, value: bytes | None, expect: int | Absent | None) -> None:
        edit = Edit(key, self._keys.data(key), self._keys.provenance(key), value)
        if key in self.edits:
            raise Misuse(f"{key!r} is written twice in one transaction; etcd allows it once")
        if expect is not None:
            self.expect(key, expect)
        self.edits[key] = edit
