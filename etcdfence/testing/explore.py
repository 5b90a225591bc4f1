"""Every schedule of a few flows, with faults: the third driver, beside `drive` and `adrive`.

Worlds are visited level by level, each once, so the first violation found has a shortest schedule; it prints as
a list that `replay` takes.
"""

from __future__ import annotations

import gc
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from etcdfence.testing.processes import Cancelled, Note, Program
from etcdfence.testing.worlds import Applied, Fault, Invariant, Moves, Restore, Scenario, Snapshot, World

__all__ = [
    "Applied",
    "Cancelled",
    "Fault",
    "Invariant",
    "Note",
    "Program",
    "Report",
    "Restore",
    "Scenario",
    "Snapshot",
    "Violation",
    "World",
    "explore",
    "replay",
]


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
        self._applied, self._told, self._always, self._at_rest = (
            [(one.name, getattr(one, hook)) for one in scenario.invariants if getattr(one, hook)]
            for hook in ("applied", "told", "always", "at_rest")
        )
        self.moves = Moves(scenario, lambda applied, move: self._ask(self._applied, applied, move=move))
        self.root = self.moves.beginning()

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
        self.report.complete = self.report.complete and self.report.violation is None
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
                for name, fault, new in self.moves.of(world):
                    self.report.steps += 1
                    resting = resting and fault is not None
                    if fault is not None:
                        self.report.tried[fault] += 1
                    self._check_notes(world, new)
                    if new in following:
                        following[new] += paths
                    else:
                        following[new], came[new] = paths, (world, name)
                        self._check(new)
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

    def _check_notes(self, before: World, world: World) -> None:
        """However a world is reached: whether what was said on the way was true may differ."""
        for old, node in zip(before.nodes, world.nodes, strict=True):
            if node is not old:
                for note in node.notes[len(old.notes) :]:
                    self._ask(self._told, world, note)

    def _check(self, world: World) -> None:
        for node in world.nodes:
            if node.failure is not None:
                raise _Broken("no program fails", f"{node.program.name}: {node.failure!r}") from node.failure
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
                moves = {move.name: move for move in self.moves.of(world)}
                if name not in moves:  # a step that was refused by an invariant has raised already
                    raise ValueError(f"step {number}, {name!r}, is not possible here; possible: {sorted(moves)}")
                trace.append(self._line(name, world))
                before, world = world, moves[name].world
                self._check_notes(before, world)
                self._check(world)
            if all(move.fault is not None for move in self.moves.of(world)):
                self._ask(self._at_rest, world)
        except _Broken as broken:
            return Violation(broken.invariant, broken.what, tuple(schedule)), trace
        return None, trace

    def _line(self, name: str, world: World) -> str:
        node = next((node for node in world.nodes if name.split(" ")[0] == node.program.name), None)
        if node is None or node.request is None:
            return f"{name:<28} at revision {world.store.revision}"
        return f"{name:<28} {node.request!r}"
