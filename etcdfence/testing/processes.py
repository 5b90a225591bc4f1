"""Programs and processes: what the explorer knows of a flow is the history of its replies.

A program is a flow whose every input is a reply. A process is then known by the replies it has had: such a
history is a node of a tree, worked out once however many schedules pass through it. A generator is kept at the
tip of each path and made anew, with the same replies, where a second path branches off.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Any, Final

from etcdfence._flow import Flow
from etcdfence._requests import (
    FreshId,
    FreshLeaseId,
    Instant,
    KeepAliveReply,
    Now,
    Request,
    Sleep,
    Stamp,
    Stamped,
)

LATE: Final = 1e6  # seconds by which a clock jumps: past every deadline
WALL: Final = "2000-01-01T00:00:00.000+00:00"


class Cancelled(BaseException):
    """Thrown into a program in the middle of a request, as Ctrl-C or the cancelling of a task would be."""


@dataclass(frozen=True, slots=True)
class Note(Request[None]):
    """A program tells the invariants what its caller was told."""

    what: Hashable


@dataclass(frozen=True, slots=True)
class Program:
    """`flow` makes the generator anew; it must depend on nothing but replies. `again` runs after a crash."""

    name: str
    flow: Callable[[], Flow[Any]]
    again: Callable[[], Flow[Any]] | None = None


class Node:
    """A process after one history of replies. Its identity is that history."""

    __slots__ = (
        "children",
        "depth",
        "failure",
        "ids",
        "jumps",
        "live",
        "made_by",
        "notes",
        "origin",
        "parent",
        "program",
        "request",
    )

    def __init__(self, program: Program, origin: Callable[[], Flow[Any]], serial: int) -> None:
        self.program, self.origin, self.ids = program, origin, serial * 1000
        self.parent: Node | None = None
        self.made_by: tuple[Any, bool] = (None, False)  # the outcome, and whether the clock jumped
        self.depth = self.jumps = 0
        self.notes: tuple[Hashable, ...] = ()
        self.request: Request[Any] | None = None  # to etcd, waiting for an answer; None once it has ended
        self.failure: BaseException | None = None
        self.children: dict[Hashable, Node] = {}
        self.live: Flow[Any] | None = None

    def start(self) -> Node:
        self.live = self.origin()
        self._run(self.live, None)
        return self

    def after(self, outcome: Any, late: bool) -> Node:
        """The node that follows this one when its request is answered so."""
        key = (_mark(outcome), late)
        child = self.children.get(key)
        if child is None:
            child = self.children[key] = self._child(outcome, late)
        return child

    def _child(self, outcome: Any, late: bool) -> Node:
        generator, self.live = self.live or self._replayed(), None
        child = Node(self.program, self.origin, 0)
        child.parent, child.made_by, child.live = self, (outcome, late), generator
        child.depth, child.ids, child.notes, child.jumps = self.depth + 1, self.ids, self.notes, self.jumps + late
        child._run(generator, outcome)
        return child

    def _replayed(self) -> Flow[Any]:
        """A generator that has had this node's history."""
        outcomes: list[tuple[Any, bool]] = []
        node = self
        while node.parent is not None:
            outcomes.append(node.made_by)
            node = node.parent
        copy = Node(self.program, self.origin, 0)
        copy.ids = node.made_by[0] or 0
        generator = self.origin()
        copy._run(generator, None)
        for outcome, late in reversed(outcomes):
            copy.jumps += late
            copy._run(generator, outcome)
        return generator

    def _run(self, generator: Flow[Any], outcome: Any) -> None:
        """Resume the program until it next asks something of etcd."""
        try:
            while True:
                request = (
                    generator.throw(_fresh(outcome))
                    if isinstance(outcome, BaseException)
                    else generator.send(outcome)
                )
                local = _LOCAL.get(type(request))
                if local is None:
                    self.request = request
                    return
                outcome = local(self, request)
        except StopIteration:
            self.request = None
        except BaseException as error:  # noqa: BLE001 - whatever it is, it is what the exploration has found
            self.request, self.failure = None, error

    def number(self) -> int:
        self.ids += 1
        return self.ids

    def note(self, request: Note) -> None:
        self.notes = (*self.notes, request.what)

    @property
    def clock(self) -> float:
        return self.jumps * LATE


_LOCAL: Final[dict[type, Callable[[Node, Any], Any]]] = {
    Now: lambda node, _: Instant(node.clock, WALL),
    Sleep: lambda _node, _: None,
    FreshId: lambda node, _: f"{node.program.name}{node.number()}",
    Stamp: lambda node, _: Stamped(f"{node.program.name}{node.number()}", WALL),
    FreshLeaseId: lambda node, _: node.number(),
    Note: Node.note,
}


def _fresh(error: BaseException) -> BaseException:
    """Thrown anew each time: an exception collects the tracebacks it has been through."""
    copy = error.__class__.__new__(error.__class__)
    copy.args = error.args
    copy.__dict__.update(error.__dict__)
    return copy


def _mark(outcome: Any) -> Hashable:
    if isinstance(outcome, BaseException):
        return (type(outcome), str(outcome))
    if isinstance(outcome, KeepAliveReply):
        return tuple(outcome.ttls.items())
    found: Hashable = outcome
    return found


def begun(program: Program, number: int) -> Node:
    node = Node(program, program.flow, number + 1)
    node.made_by = (node.ids, False)  # what its ids count from, for replays
    return node.start()


def restarted(node: Node, again: Callable[[], Flow[Any]]) -> Node:
    """The program that follows a crash: a tree of its own below the node that crashed."""
    key = "crashed"
    if key not in node.children:
        fresh = Node(node.program, again, 0)
        fresh.ids = node.ids + 500
        fresh.made_by, fresh.notes, fresh.depth = (fresh.ids, False), (*node.notes, "crashed"), node.depth + 1
        fresh.jumps = 0
        node.children[key] = fresh.start()
    return node.children[key]


def ended(node: Node) -> Node:
    key = "ended"
    if key not in node.children:
        fresh = Node(node.program, node.origin, 0)
        fresh.notes, fresh.depth = (*node.notes, "crashed"), node.depth + 1
        node.children[key] = fresh
    return node.children[key]
