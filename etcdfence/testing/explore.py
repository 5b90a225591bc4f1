"""Every schedule of a few flows, with faults: the third driver, beside `drive` and its asynchronous twin.

A *program* is a flow whose every input is a reply, so a process is known by the replies it has had: that
history is a node of a tree, worked out once however many schedules pass through it. A *world* is the store, a
node for each process, the requests that are still on their way, and how many faults are left. Worlds are
visited level by level, each once, so the first violation found has a shortest schedule.

A request and its answer are one step: between the two its sender does nothing that anybody could see. What
can happen to a request instead is a `Fault`. Processes are asynchronous: one that is not chosen for a while
is one that is paused, and `late` says that its clock has passed every deadline it had meanwhile.
"""

from __future__ import annotations

import gc
from collections import Counter
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Final, NamedTuple

from etcdfence._flow import Flow
from etcdfence._requests import (
    Delete,
    FreshId,
    FreshLeaseId,
    Grant,
    Instant,
    KeepAlive,
    KeepAliveReply,
    Now,
    Operation,
    Put,
    Request,
    Revoke,
    Sleep,
    Stamp,
    Stamped,
    TimeToLive,
    Txn,
    Waited,
    WaitGone,
)
from etcdfence.errors import EtcdFenceError, OutcomeUnknown, PermissionDenied, Unavailable
from etcdfence.testing.memory import PENDING, State, compact, expire, restarted, step

LATE: Final = 1e6  # seconds by which a clock jumps: past every deadline
WALL: Final = "2000-01-01T00:00:00.000+00:00"


class Fault(StrEnum):
    """What can happen instead of "sent, applied, answered"."""

    LOST_REQUEST = "lost request"
    LOST_REPLY = "lost reply"
    DELAYED = "delayed"  # nothing is heard; the request arrives at any later time, or never
    DUPLICATED = "duplicated"  # answered, and a second copy arrives at any later time, or never
    REFUSED = "refused"  # definitely not applied: no member could take it
    DENIED = "denied"  # definitely not applied: the credentials were not accepted
    PAUSED = "paused"  # answered, but its sender hears of it only after all of its deadlines
    LIED = "lied"  # a keepalive that answers as if a lease that is gone were alive, or the reverse
    TIMED_OUT = "timed out"  # a wait for a key
    COMPACTED = "compacted"  # the history that a wait reads
    EXPIRED = "expired"  # a lease, at any time
    CRASHED = "crashed"  # a process, which starts again with nothing but the store
    CANCELLED = "cancelled"  # a call, by its own process: with the request unsent, or applied, or on its way


class Cancelled(BaseException):
    """Thrown into a program in the middle of a request, as Ctrl-C or the cancelling of a task would be."""


WIRE: Final = frozenset(
    {
        Fault.LOST_REQUEST,
        Fault.LOST_REPLY,
        Fault.DELAYED,
        Fault.DUPLICATED,
        Fault.REFUSED,
        Fault.DENIED,
        Fault.PAUSED,
        Fault.LIED,
        Fault.CANCELLED,
    }
)
EVENTS: Final = frozenset(Fault) - WIRE


@dataclass(frozen=True, slots=True)
class Note(Request[None]):
    """A program tells the invariants what its caller was told."""

    what: Hashable


@dataclass(frozen=True, slots=True)
class Snapshot(Request[None]):
    """Keep the store as it is, for a later Restore."""


@dataclass(frozen=True, slots=True)
class Restore(Request[None]):
    """Put the kept store in the place of the present one; its leases have their whole TTL again."""


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


# --- worlds ------------------------------------------------------------------------------------------------


class World(NamedTuple):
    """`flights` are nodes whose request is still on its way; `journal` is what the scenario records of the
    requests that were applied."""

    store: State
    nodes: tuple[Node, ...]
    flights: tuple[Node, ...]
    faults: int
    events: int
    journal: tuple[Hashable, ...]
    kept: State | None = None


class Applied(NamedTuple):
    """A request that changed the store: what it found and what it left behind, and what its sender had noted."""

    program: str
    notes: tuple[Hashable, ...]
    before: State
    request: Request[Any]
    reply: Any
    after: State

    @property
    def operations(self) -> tuple[Operation, ...]:
        """Those of the branch that a transaction took."""
        if not isinstance(self.request, Txn):
            return ()
        return self.request.success if self.reply.succeeded else self.request.failure


@dataclass(frozen=True, slots=True)
class Invariant:
    """A sentence about every schedule. Each check returns what is wrong, or None.

    applied   looks at each request that changed the store
    told      looks at each note of a program, in the world in which it was made
    always    looks at each world
    at_rest   looks at worlds in which nothing more will happen of itself
    """

    name: str
    applied: Callable[[Applied], str | None] | None = None
    told: Callable[[World, Any], str | None] | None = None
    always: Callable[[World], str | None] | None = None
    at_rest: Callable[[World], str | None] | None = None


@dataclass(frozen=True)
class Scenario:
    """Programs over one store, with so many faults on the wire and events (see WIRE and EVENTS) in one schedule.

    journal     what to remember of an applied request, as a tuple of values
    without     takes safeguards out of the transactions on their way, for ablation tests
    crashing    the programs that may crash, cancelling: those that may be cancelled,
    reliable    those whose requests meet no fault of the wire
    """

    name: str
    programs: tuple[Program, ...]
    invariants: tuple[Invariant, ...]
    faults: int = 1
    events: int = 1
    kinds: frozenset[Fault] = frozenset(Fault)
    store: State = field(default_factory=State)
    journal: Callable[[Applied], tuple[Hashable, ...]] = lambda _: ()
    without: Callable[[Txn], Txn] = lambda txn: txn
    crashing: frozenset[str] = frozenset()
    cancelling: frozenset[str] = frozenset()
    reliable: frozenset[str] = frozenset()


@dataclass(frozen=True, slots=True)
class Violation:
    invariant: str
    what: str
    schedule: tuple[str, ...]

    def __str__(self) -> str:
        steps = "\n".join(f"    {move!r}," for move in self.schedule)
        return f"{self.invariant}: {self.what}\nschedule = [\n{steps}\n]"


@dataclass(slots=True)
class Report:
    """What was visited. `schedules` counts whole schedules, from the beginning to rest; `tried` the faults."""

    scenario: str
    states: int = 0
    steps: int = 0
    schedules: int = 0
    longest: int = 0
    tried: Counter[Fault] = field(default_factory=Counter[Fault])
    violation: Violation | None = None
    complete: bool = True

    def __str__(self) -> str:
        faults = ", ".join(f"{kind} {count}" for kind, count in sorted(self.tried.items()))
        what = "every schedule" if self.complete else "not every schedule"
        return (
            f"{self.scenario}: {what}: {self.schedules:.4g} schedules of up to {self.longest} steps,"
            f" {self.states} states, {self.steps} steps; {faults or 'no faults'}"
        )


Answer = tuple[State, Any, tuple[Hashable, ...]]


class Move(NamedTuple):
    """One step: its name in a schedule, the fault it is (if it is one), and where it leads."""

    name: str
    fault: Fault | None
    world: World


def explore(scenario: Scenario, *, most_states: int | None = None) -> Report:
    """Visit every schedule of a scenario, or as many levels as fit into `most_states`; stop at a violation."""
    return _Explorer(scenario).explore(most_states)


def replay(scenario: Scenario, schedule: Sequence[str]) -> tuple[Violation | None, list[str]]:
    """Walk one schedule: the violation it leads to, if it does, and each step with its request and answer."""
    return _Explorer(scenario).replay(schedule)


@contextmanager
def _uncollected() -> Iterator[None]:
    """Millions of live tuples and no garbage: the collector would only walk them, again and again."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


class _Broken(Exception):
    """`move`: the step that broke it, where the step was not made."""

    def __init__(self, invariant: str, what: str, move: str = "") -> None:
        super().__init__(what)
        self.invariant, self.what, self.move = invariant, what, move


class _Explorer:
    def __init__(self, scenario: Scenario) -> None:
        self.scenario, self.report = scenario, Report(scenario.name)
        self.stores: dict[State, State] = {}
        self.answers: dict[tuple[State, Node], Answer] = {}
        nodes = tuple(_begun(program, number) for number, program in enumerate(scenario.programs))
        store = self._same(scenario.store)
        self.root = World(store, nodes, (), scenario.faults, scenario.events, ())
        self._applied, self._told, self._always, self._at_rest = (
            [(one.name, getattr(one, hook)) for one in scenario.invariants if getattr(one, hook)]
            for hook in ("applied", "told", "always", "at_rest")
        )
        self._network, self._event_kinds = scenario.kinds & WIRE, scenario.kinds & EVENTS

    # --- the walk --------------------------------------------------------------------------------------

    def explore(self, most: int | None) -> Report:
        levels: list[dict[World, tuple[World, str] | None]] = [{self.root: None}]
        frontier = {self.root: 1}
        with _uncollected():
            while frontier and self.report.violation is None:
                self.report.states += len(frontier)
                if most is not None and self.report.states > most:
                    self.report.complete = False
                    break
                frontier = self._level(frontier, levels)
        self.report.longest = len(levels) - 1
        return self.report

    def _level(
        self, frontier: dict[World, int], levels: list[dict[World, tuple[World, str] | None]]
    ) -> dict[World, int]:
        following: dict[World, int] = {}
        came: dict[World, tuple[World, str] | None] = {}
        world, name = self.root, ""
        try:
            for world, paths in frontier.items():
                resting = True
                for name, fault, new in self._moves(world):
                    self.report.steps += 1
                    resting = resting and fault is not None
                    if fault is not None:
                        self.report.tried[fault] += 1
                    if new in following:
                        following[new] += paths
                        name = ""
                        continue
                    following[new], came[new] = paths, (world, name)
                    self._check(world, new)
                    name = ""
                if resting:
                    self.report.schedules += paths
                    self._ask(self._at_rest, world)
        except _Broken as broken:
            path, name = self._path(levels, world), broken.move or name
            schedule = (*path, name) if name else path
            self.report.violation = Violation(broken.invariant, broken.what, schedule)
        if following:
            levels.append(came)
        return following

    @staticmethod
    def _path(levels: list[dict[World, tuple[World, str] | None]], world: World) -> tuple[str, ...]:
        names: list[str] = []
        for level in reversed(levels):
            before = level.get(world)
            if before is not None:
                world, name = before
                names.append(name)
        return tuple(reversed(names))

    def _check(self, before: World, world: World) -> None:
        for old, node in zip(before.nodes, world.nodes, strict=True):
            if node.failure is not None:
                raise _Broken("no program fails", f"{node.program.name}: {node.failure!r}") from node.failure
            for note in node.notes[len(old.notes) :]:
                self._ask(self._told, world, note)
        self._ask(self._always, world)

    def _ask(self, checks: Sequence[tuple[str, Callable[..., str | None]]], *about: Any, move: str = "") -> None:
        for name, check in checks:
            wrong = check(*about)
            if wrong:
                raise _Broken(name, wrong, move)

    def replay(self, schedule: Sequence[str]) -> tuple[Violation | None, list[str]]:
        world, trace = self.root, list[str]()
        try:
            for number, name in enumerate(schedule):
                moves = {move.name: move for move in self._moves(world)}
                if name not in moves:  # a step that was refused by an invariant has raised already
                    raise ValueError(f"step {number}, {name!r}, is not possible here; possible: {sorted(moves)}")
                trace.append(self._line(name, world))
                before, world = world, moves[name].world
                self._check(before, world)
            if all(move.fault is not None for move in self._moves(world)):
                self._ask(self._at_rest, world)
        except _Broken as broken:
            return Violation(broken.invariant, broken.what, tuple(schedule)), trace
        return None, trace

    def _line(self, name: str, world: World) -> str:
        node = next((node for node in world.nodes if name.split(" ")[0] == node.program.name), None)
        if node is None or node.request is None:
            return f"{name:<28} at revision {world.store.revision}"
        return f"{name:<28} {node.request!r}"

    # --- what can happen next --------------------------------------------------------------------------

    def _moves(self, world: World) -> Iterator[Move]:
        """A grant under a fresh id means nothing to anybody else, so it comes first: every schedule in which
        others go before it has a twin in which they go after."""
        granting = [at for at, node in enumerate(world.nodes) if isinstance(node.request, Grant)]
        if granting:
            yield from self._process(world, granting[0], world.nodes[granting[0]])
            return
        for at, node in enumerate(world.nodes):
            yield from self._process(world, at, node)
        for number, flight in enumerate(world.flights):
            rest = world.flights[:number] + world.flights[number + 1 :]
            yield self._arrival(world, flight, rest)
        if world.events:
            yield from self._store_events(world)

    def _process(self, world: World, at: int, node: Node) -> Iterator[Move]:
        if node.request is not None:
            yield from self._answers(world, at, node)
            if world.events and Fault.CRASHED in self._event_kinds:
                yield from self._crash(world, at, node)

    def _answers(self, world: World, at: int, node: Node) -> Iterator[Move]:
        request, name = node.request, node.program.name
        if isinstance(request, Snapshot | Restore):
            yield self._administration(world, at, node)
            return
        store, reply, journal = self._answer(world.store, node, name)
        unharmed = not world.faults or name in self.scenario.reliable
        faults = frozenset[Fault]() if unharmed else self._network
        if reply is PENDING:
            if world.events and Fault.TIMED_OUT in self._event_kinds:
                waited = self._goes_on(world, at, Waited.TIMED_OUT, late=True, events=1)
                yield Move(f"{name} timed out", Fault.TIMED_OUT, waited)
        else:
            yield Move(name, None, self._goes_on(world, at, reply, store=store, journal=journal))
            if Fault.PAUSED in faults:
                paused = self._goes_on(world, at, reply, store=store, journal=journal, late=True, faults=1)
                yield Move(f"{name} paused", Fault.PAUSED, paused)
        changing = store is not world.store
        for fault in sorted(faults & _possible(request, changing)):
            yield from self._faulty(world, at, node, fault, store, reply, journal)
        if Fault.CANCELLED in faults and name in self.scenario.cancelling:
            yield from self._cancelled(world, at, node, store, journal, changing)

    def _cancelled(
        self, world: World, at: int, node: Node, store: State, journal: tuple[Hashable, ...], changing: bool
    ) -> Iterator[Move]:
        name = f"{node.program.name} {Fault.CANCELLED}"
        unsent = self._goes_on(world, at, Cancelled(), faults=1)
        yield Move(name, Fault.CANCELLED, unsent)
        if changing:
            applied = self._goes_on(world, at, Cancelled(), store=store, journal=journal, faults=1)
            yield Move(f"{name}, applied", Fault.CANCELLED, applied)
        if isinstance(node.request, Txn | Grant | Revoke):
            flying = unsent._replace(flights=_with_flight(world.flights, node))
            yield Move(f"{name}, on its way", Fault.CANCELLED, flying)

    def _faulty(
        self,
        world: World,
        at: int,
        node: Node,
        fault: Fault,
        store: State,
        reply: Any,
        journal: tuple[Hashable, ...],
    ) -> Iterator[Move]:
        name = f"{node.program.name} {fault}"
        flights = _with_flight(world.flights, node)
        match fault:
            case Fault.DUPLICATED:
                new = self._goes_on(world, at, reply, store=store, journal=journal, faults=1)
                yield Move(name, fault, new._replace(flights=flights))
                return
            case Fault.LIED:
                yield Move(name, fault, self._goes_on(world, at, _lie(node, world.store), faults=1))
                return
            case Fault.REFUSED:
                error: EtcdFenceError = Unavailable("no member could take it")
            case Fault.DENIED:
                error = PermissionDenied("permission denied")
            case _:
                error = OutcomeUnknown("no answer")
        if fault is not Fault.LOST_REPLY:
            store, journal = world.store, ()
        for late in (False, True):
            new = self._goes_on(world, at, error, store=store, journal=journal, late=late, faults=1)
            if fault is Fault.DELAYED:
                new = new._replace(flights=flights)
            yield Move(f"{name}, late" if late else name, fault, new)

    def _goes_on(
        self,
        world: World,
        at: int,
        outcome: Any,
        *,
        store: State | None = None,
        journal: tuple[Hashable, ...] = (),
        late: bool = False,
        faults: int = 0,
        events: int = 0,
    ) -> World:
        nodes = world.nodes
        child = nodes[at].after(outcome, late)
        return World(
            world.store if store is None else store,
            (*nodes[:at], child, *nodes[at + 1 :]),
            world.flights,
            world.faults - faults,
            world.events - events,
            world.journal + journal if journal else world.journal,
            world.kept,
        )

    def _administration(self, world: World, at: int, node: Node) -> Move:
        new = self._goes_on(world, at, None)
        if isinstance(node.request, Snapshot):
            return Move(node.program.name, None, new._replace(kept=world.store))
        restored = self._same(restarted(world.kept or world.store))
        done = Applied(node.program.name, node.notes, world.store, Restore(), None, restored)
        journal = world.journal + self.scenario.journal(done)
        return Move(node.program.name, None, new._replace(store=restored, journal=journal))

    def _crash(self, world: World, at: int, node: Node) -> Iterator[Move]:
        if node.program.name not in self.scenario.crashing:
            return
        again = node.program.again
        successor = _restarted(node, again) if again else _ended(node)
        nodes = (*world.nodes[:at], successor, *world.nodes[at + 1 :])
        yield Move(
            f"{node.program.name} crashed", Fault.CRASHED, world._replace(nodes=nodes, events=world.events - 1)
        )

    def _arrival(self, world: World, flight: Node, rest: tuple[Node, ...]) -> Move:
        name = f"arrives {flight.program.name} {flight.depth}"
        store, _, journal = self._answer(world.store, flight, name)
        new = world._replace(store=store, flights=rest, journal=world.journal + journal)
        return Move(name, None, new)

    def _store_events(self, world: World) -> Iterator[Move]:
        if Fault.EXPIRED in self._event_kinds:
            for lease in world.store.leases:
                store = self._same(expire(world.store, lease.id))
                new = world._replace(store=store, events=world.events - 1)
                yield Move(f"expires {lease.id}", Fault.EXPIRED, new)
        waiting = any(isinstance(node.request, WaitGone) for node in world.nodes)
        if waiting and Fault.COMPACTED in self._event_kinds and world.store.compacted < world.store.revision:
            store = self._same(compact(world.store, world.store.revision))
            yield Move("compacts", Fault.COMPACTED, world._replace(store=store, events=world.events - 1))

    # --- the store -------------------------------------------------------------------------------------

    def _same(self, store: State) -> State:
        return self.stores.setdefault(store, store)

    def _answer(self, store: State, node: Node, move: str) -> Answer:
        """The store after a request, its reply (or the error raised), and what goes into the journal."""
        known = self.answers.get((store, node))
        if known is None:
            known = self.answers[store, node] = self._worked_out(store, node, move)
        return known

    def _worked_out(self, store: State, node: Node, move: str) -> Answer:
        request: Any = node.request
        if isinstance(request, Txn):
            request = self.scenario.without(request)
        try:
            after, reply = step(store, request)
        except EtcdFenceError as error:
            return store, error, ()
        after = self._same(after)
        if after is store:
            return after, reply, ()
        applied = Applied(node.program.name, node.notes, store, request, reply, after)
        self._ask(self._applied, applied, move=move)
        return after, reply, self.scenario.journal(applied)


def _begun(program: Program, number: int) -> Node:
    node = Node(program, program.flow, number + 1)
    node.made_by = (node.ids, False)  # what its ids count from, for replays
    return node.start()


def _restarted(node: Node, again: Callable[[], Flow[Any]]) -> Node:
    """The program that follows a crash: a tree of its own below the node that crashed."""
    key = "crashed"
    if key not in node.children:
        fresh = Node(node.program, again, 0)
        fresh.ids = node.ids + 500
        fresh.made_by, fresh.notes, fresh.depth = (fresh.ids, False), (*node.notes, "crashed"), node.depth + 1
        fresh.jumps = 0
        node.children[key] = fresh.start()
    return node.children[key]


def _ended(node: Node) -> Node:
    key = "ended"
    if key not in node.children:
        fresh = Node(node.program, node.origin, 0)
        fresh.notes, fresh.depth = (*node.notes, "crashed"), node.depth + 1
        node.children[key] = fresh
    return node.children[key]


def _with_flight(flights: tuple[Node, ...], node: Node) -> tuple[Node, ...]:
    return tuple(sorted((*flights, node), key=lambda one: (one.program.name, one.depth)))


def _possible(request: Request[Any] | None, changing: bool) -> frozenset[Fault]:
    """The faults that make a difference to a request."""
    if isinstance(request, KeepAlive):
        return frozenset({Fault.LOST_REQUEST, Fault.LIED, Fault.DENIED})
    if isinstance(request, WaitGone | TimeToLive) or (isinstance(request, Txn) and not _writes(request)):
        return frozenset({Fault.LOST_REQUEST, Fault.REFUSED, Fault.DENIED})
    found = {Fault.LOST_REQUEST, Fault.DELAYED, Fault.REFUSED, Fault.DENIED}
    if changing:
        found |= {Fault.LOST_REPLY}
    if changing and isinstance(request, Txn):  # a grant that came twice could not be told from the first
        found |= {Fault.DUPLICATED}
    return frozenset(found)


def _writes(txn: Txn) -> bool:
    return any(isinstance(operation, Put | Delete) for operation in (*txn.success, *txn.failure))


def _lie(node: Node, store: State) -> KeepAliveReply:
    """Alive for what is gone, gone for what is alive."""
    request = node.request
    assert isinstance(request, KeepAlive)
    return KeepAliveReply({one: 0 if store.lease(one) else 10 for one in request.lease_ids})
