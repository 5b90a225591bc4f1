"""The key space: where everything lives under `/etcdfence/<namespace>/`.

A task name becomes exactly one path segment, percent-encoded and injective, so that no name can reach into
another's keys. A plain name never contains a raw ":", the three parts of a TaskKey are joined by it, so the
two kinds cannot collide either. Prefixes end in "/": a scan for team-1 never sees team-10.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Final
from urllib.parse import quote, unquote

from etcdfence.errors import Misuse
from etcdfence.model import TaskKey, TaskName, checked_name

MAX_SEGMENT: Final = 1024  # bytes once encoded; etcd itself has no limit but its request size
MAX_DATA_KEY: Final = 4096


def _segment(name: str, what: str) -> str:
    encoded = quote(checked_name(name, what), safe="")
    if len(encoded) > MAX_SEGMENT:
        raise Misuse(f"{what} takes {len(encoded)} bytes once encoded; at most {MAX_SEGMENT} are allowed")
    return encoded


def task_segment(task: TaskName) -> str:
    """The path segment of a task name. Misuse where the name cannot have one."""
    if isinstance(task, TaskKey):
        parts = (_segment(task.operation, "an operation"), _segment(task.scope, "a scope"))
        return ":".join((*parts, f"v{task.version}"))
    return _segment(task, "a task name")


def parse_segment(segment: str) -> TaskName:
    """The inverse of `task_segment`."""
    return TaskKey.parse(segment) if ":" in segment else unquote(segment)


def prefix_end(prefix: bytes) -> bytes:
    """The end of the range of all keys below a prefix that ends in '/'."""
    return prefix[:-1] + b"0"


@dataclass(frozen=True, slots=True)
class TaskKeys:
    """The keys of one task. `task` is the name as people write it, `segment` as it stands in keys."""

    task: str
    segment: str
    root: str
    owner: bytes
    value: bytes
    last: bytes
    record: bytes
    closed: bytes
    reserve: bytes
    queue: bytes
    open: bytes
    attempts: bytes
    markers: bytes
    refusals: bytes
    histories: bytes

    def attempt(self, attempt: str) -> bytes:
        return self.attempts + attempt.encode()

    def marker(self, generation: int) -> bytes:
        return self.markers + b"%020d" % generation

    def refusal(self, generation: int) -> bytes:
        return self.refusals + b"%020d" % generation

    def history(self, generation: int, number: int) -> bytes:
        return self.histories + b"%020d-%06d" % (generation, number)


@dataclass(frozen=True)
class Keys:
    """The keys of one namespace. `data_prefix` is where users' data keys begin, the namespace's own by default."""

    namespace: str
    data_prefix: str = ""

    def __post_init__(self) -> None:
        _segment(self.namespace, "a namespace")
        if self.data_prefix:
            checked_name(self.data_prefix, "data_prefix")

    @cached_property
    def root(self) -> str:
        return f"/etcdfence/{_segment(self.namespace, 'a namespace')}/"

    @cached_property
    def epoch(self) -> bytes:
        return f"{self.root}epoch".encode()

    def family(self, name: str) -> bytes:
        """The prefix of all keys of one kind, for listings."""
        return f"{self.root}{name}/".encode()

    def task(self, task: TaskName) -> TaskKeys:
        segment, root = task_segment(task), self.root

        def one(family: str) -> bytes:
            return f"{root}{family}/{segment}".encode()

        def many(family: str) -> bytes:
            return f"{root}{family}/{segment}/".encode()

        return TaskKeys(
            task=str(task),
            segment=segment,
            root=root,
            owner=one("owner"),
            value=many("owner") + b"value",
            last=one("last"),
            record=one("task"),
            closed=one("closed"),
            reserve=one("reserve"),
            queue=many("queue"),
            open=many("open"),
            attempts=many("attempt"),
            markers=many("marker"),
            refusals=many("refusal"),
            histories=many("history"),
        )

    @cached_property
    def _provenance(self) -> bytes:
        return self.family("provenance")

    @cached_property
    def _data(self) -> bytes:
        return self.data_prefix.encode() or self.family("data")

    def data(self, key: str) -> bytes:
        if not self.data_prefix:
            return self._data + _data_key(key)
        full = self._data + _data_key(key)
        if full.startswith(b"/etcdfence/"):
            raise Misuse(f"{full.decode()} lies under /etcdfence/, which etcdfence keeps for its own records")
        return full

    def provenance(self, key: str) -> bytes:
        return self._provenance + _data_key(key)


def _data_key(key: object) -> bytes:
    encoded = checked_name(key, "a data key").encode()
    if len(encoded) > MAX_DATA_KEY:
        raise Misuse(f"a data key takes {len(encoded)} bytes; at most {MAX_DATA_KEY} are allowed")
    return encoded
