"""Worlds, and every step that leads from one to another.

A world is the store, a process for each program, the requests that are still on their way, and how many faults
are left. A request and its answer are one step: between the two its sender does nothing that anybody could
see. What can happen to a request instead is a `Fault`. Processes are asynchronous: one that is not chosen for
a while is one that is paused, and "late" says that its clock has passed every deadline it had meanwhile.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Final, NamedTuple

from etcdfence._requests import (
    Grant,
    KeepAlive,
    KeepAliveReply,
    Operation,
    Request,
    Revoke,
    TimeToLive,
    Txn,
    Wait,
    Waited,
)
from etcdfence.errors import EtcdFenceError, OutcomeUnknown, PermissionDenied, Unavailable
from etcdfence.testing import memory, processes
from etcdfence.testing.memory import PENDING, State, compact, expire, step
from etcdfence.testing.processes import Cancelled, Node, Program


class Fault(StrEnum):
    """What can happen instead of "sent, applied, answered"."""

    LOST_REQUEST = "lost request"
    LOST_REPLY = "lost reply"
    DELAYED = "delayed"  # nothing is heard; the request arrives at any later time, or never
    # Answered, and a second copy arrives at any later time, or never. Of requests that changed the store: a copy
    # of one that was refused could be applied later, which no client can prevent; gRPC over TCP sends none.
    DUPLICATED = "duplicated"
    REFUSED = "refused"  # definitely not applied: no member could take it
    DENIED = "denied"  # definitely not applied: the credentials were not accepted
    PAUSED = "paused"  # answered, but its sender hears of it only after all of its deadlines
    LIED = "lied"  # a keepalive that answers as if a lease that is gone were alive, or the reverse
    TIMED_OUT = "timed out"  # a wait for a key
    COMPACTED = "compacted"  # the history that a wait reads
    EXPIRED = "expired"  # a lease, at any time
    CRASHED = "crashed"  # a process, which starts again with nothing but the store
    CANCELLED = "cancelled"  # a call, by its own process: with the request unsent, or applied, or on its way


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
class Snapshot(Request[None]):
    """Keep the store as it is, for a later Restore."""


@dataclass(frozen=True, slots=True)
class Restore(Request[None]):
    """Put the kept store in the place of the present one; its leases have their whole TTL again."""


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
    grants_first  whether a grant means nothing to the others; not so where a program restores the store
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
    grants_first: bool = True


Answer = tuple[State, Any, tuple[Hashable, ...]]


class Move(NamedTuple):
    """One step: its name in a schedule, the fault it is (if it is one), and where it leads."""

    name: str
    fault: Fault | None
    world: World


class Moves:
    """The steps that are possible in the worlds of one scenario. `check` looks at each request that changed the
    store, once, with the name of its step."""

    def __init__(self, scenario: Scenario, check: Callable[[Applied, str], None]) -> None:
        self.scenario, self._check = scenario, check
        self._stores: dict[State, State] = {}
        self._known: dict[tuple[State, Node], Answer] = {}
        self._network, self._event_kinds = scenario.kinds & WIRE, scenario.kinds & EVENTS

    def beginning(self) -> World:
        nodes = tuple(processes.begun(program, number) for number, program in enumerate(self.scenario.programs))
        return World(self._same(self.scenario.store), nodes, (), self.scenario.faults, self.scenario.events, ())

    def of(self, world: World) -> Iterator[Move]:
        """A grant under a fresh id means nothing to anybody else, so it comes first: every schedule in which
        others go before it has a twin in which they go after."""
        independent = self.scenario.grants_first
        granting = [at for at, node in enumerate(world.nodes) if independent and isinstance(node.request, Grant)]
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
        restored = self._same(memory.restarted(world.kept or world.store))
        done = Applied(node.program.name, node.notes, world.store, Restore(), None, restored)
        journal = world.journal + self.scenario.journal(done)
        return Move(node.program.name, None, new._replace(store=restored, journal=journal))

    def _crash(self, world: World, at: int, node: Node) -> Iterator[Move]:
        if node.program.name not in self.scenario.crashing:
            return
        again = node.program.again
        successor = processes.restarted(node, again) if again else processes.ended(node)
        nodes = (*world.nodes[:at], successor, *world.nodes[at + 1 :])
        if isinstance(node.request, Txn | Grant | Revoke):
            flying = world._replace(
                nodes=nodes, events=world.events - 1, flights=_with_flight(world.flights, node)
            )
            yield Move(f"{node.program.name} crashed, on its way", Fault.CRASHED, flying)
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
        waiting = any(isinstance(node.request, Wait) for node in world.nodes)
        if waiting and Fault.COMPACTED in self._event_kinds and world.store.compacted < world.store.revision:
            store = self._same(compact(world.store, world.store.revision))
            yield Move("compacts", Fault.COMPACTED, world._replace(store=store, events=world.events - 1))

    # --- the store -------------------------------------------------------------------------------------

    def _same(self, store: State) -> State:
        return self._stores.setdefault(store, store)

    def _answer(self, store: State, node: Node, move: str) -> Answer:
        """The store after a request, its reply (or the error raised), and what goes into the journal."""
        known = self._known.get((store, node))
        if known is None:
            known = self._known[store, node] = self._worked_out(store, node, move)
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
        self._check(applied, move)
        return after, reply, self.scenario.journal(applied)


def _with_flight(flights: tuple[Node, ...], node: Node) -> tuple[Node, ...]:
    return tuple(sorted((*flights, node), key=lambda one: (one.program.name, one.depth)))


def _possible(request: Request[Any] | None, changing: bool) -> frozenset[Fault]:
    """The faults that make a difference to a request."""
    if isinstance(request, KeepAlive):
        return frozenset({Fault.LOST_REQUEST, Fault.LIED, Fault.DENIED})
    if isinstance(request, Wait | TimeToLive) or (isinstance(request, Txn) and request.read_only):
        return frozenset({Fault.LOST_REQUEST, Fault.REFUSED, Fault.DENIED})
    found = {Fault.LOST_REQUEST, Fault.DELAYED, Fault.REFUSED, Fault.DENIED}
    if changing:
        found |= {Fault.LOST_REPLY}
    if changing and isinstance(request, Txn):  # a grant that came twice could not be told from the first
        found |= {Fault.DUPLICATED}
    return frozenset(found)


def _lie(node: Node, store: State) -> KeepAliveReply:
    """Alive for what is gone, gone for what is alive."""
    request = node.request
    assert isinstance(request, KeepAlive)
    return KeepAliveReply({one: 0 if store.lease(one) else 10 for one in request.lease_ids})
