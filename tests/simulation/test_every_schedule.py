"""Every schedule of every scenario keeps every invariant; and the search is as wide as it claims to be."""

from __future__ import annotations

import ast
import math
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import coverage
import pytest

import etcdfence
from etcdfence._flows.fencing import KEPT_FATES, Lane
from etcdfence.model import Verdict
from etcdfence.testing.explore import Fault, Report, Scenario, explore, replay

from . import scenarios
from .invariants import ALL
from .programs import Worker, put
from .scenarios import CLAIMS, DEEP, QUICK, THREE

FLOWS = Path(etcdfence.__file__).parent / "_flows"


class Explored:
    """What the quick set visits, each scenario once in a run, while the branches taken in `_flows` are noted."""

    def __init__(self, directory: Path) -> None:
        self.cover = coverage.Coverage(branch=True, include=[f"{FLOWS}/*"], data_file=str(directory / "coverage"))
        self.reports: dict[tuple[Any, ...], Report] = {}

    def report(self, scenario: Scenario) -> Report:
        key = (scenario.name, scenario.faults, scenario.events, scenario.kinds)
        if key not in self.reports:
            self.also(lambda: self.reports.update({key: explore(scenario)}))
        return self.reports[key]

    def also(self, action: Callable[[], object]) -> None:
        self.cover.start()
        try:
            action()
        finally:
            self.cover.stop()

    def everything(self) -> list[Report]:
        return [self.report(scenario) for scenario in QUICK]


@pytest.fixture(scope="module")
def explored(tmp_path_factory: pytest.TempPathFactory) -> Explored:
    return Explored(tmp_path_factory.mktemp("explored"))


def named(scenario: Scenario) -> str:
    return f"{scenario.name}, {scenario.faults} faults, {scenario.events} events"


@pytest.mark.req("S2-77", "S2-83", "S2-84", "P-33", "promise-1", "promise-2", "promise-3", "promise-4")
@pytest.mark.field(43, 66, 79, 82)
@pytest.mark.parametrize("scenario", QUICK, ids=named)
def test_every_schedule(scenario: Scenario, explored: Explored, reports: list[Report]) -> None:
    report = explored.report(scenario)
    reports.append(report)
    assert report.violation is None, str(report.violation)
    assert report.complete and report.schedules > 0


@pytest.mark.deep
@pytest.mark.parametrize("scenario", DEEP, ids=named)
def test_every_schedule_of_more_faults(scenario: Scenario, reports: list[Report]) -> None:
    report = explore(scenario)
    reports.append(report)
    assert report.violation is None, str(report.violation)


def test_every_kind_of_fault_is_tried(explored: Explored) -> None:
    tried: Counter[Fault] = Counter()
    for report in explored.everything():
        tried.update(report.tried)
    assert set(tried) == set(Fault), f"never tried: {set(Fault) - set(tried)}"
    assert min(tried.values()) > 10, tried


def test_every_branch_of_the_flows_is_taken(explored: Explored) -> None:
    explored.everything()
    explored.also(forget_old_fates)
    missed: dict[str, Any] = {}
    for path in sorted(FLOWS.glob("*.py")):
        analysis, inside = explored.cover._analyze(str(path)), inside_functions(path)
        lines, decided = sorted(analysis.missing & inside), inside - matches(path)
        branches = {line: to for line, to in analysis.missing_branch_arcs().items() if line in decided}
        if lines or branches:
            missed[path.name] = (lines, branches)
    assert not missed


def forget_old_fates() -> None:
    """What takes a thousand lost answers, and so no explored schedule, to reach."""
    lane = Lane(None, 0.0)  # type: ignore[arg-type]  # a tenure is not looked at
    lane.unsettled = [str(number) for number in range(KEPT_FATES + 1)]
    lane.decide(Verdict.NOT_APPLIED)
    assert len(lane.fates) == KEPT_FATES and "0" not in lane.fates


def inside_functions(path: Path) -> set[int]:
    """The lines of function bodies; the rest runs when a module is imported."""
    found: set[int] = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.FunctionDef):
            found.update(range(node.body[0].lineno, (node.end_lineno or 0) + 1))
    return found


def matches(path: Path) -> set[int]:
    """The lines of `case` patterns: how their jumps are attributed to lines differs between interpreters. What
    follows each pattern counts as lines."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    return {node.pattern.lineno for node in ast.walk(tree) if isinstance(node, ast.match_case)}


def test_every_scenario_is_explored_and_checks_every_invariant() -> None:
    known = {value.name for value in vars(scenarios).values() if isinstance(value, Scenario)}
    assert known == {scenario.name for scenario in QUICK}
    checked = [name for scenario in QUICK for name in scenario.invariants]
    assert set(checked) == set(ALL)


# --- the explorer itself -----------------------------------------------------------------------------------


def test_a_schedule_is_replayed_step_by_step() -> None:
    scenario = replace(CLAIMS, faults=1, events=0)
    violation, told = replay(scenario, ["A", "B", "A lost reply", "B", "A"])
    assert violation is None
    assert [line.split("  ")[0] for line in told] == ["A", "B", "A lost reply", "B", "A"]
    assert "Grant(" in told[0] and "Txn(" in told[2]
    with pytest.raises(ValueError, match="not possible here; possible: "):
        replay(scenario, ["A", "A", "B", "expires 1001"])


def test_the_number_of_schedules_is_that_of_the_interleavings() -> None:
    """Of two that only write, three steps against three: six over three."""
    report = explore(Scenario("two writers", (_writer("O"), _writer("P")), (), faults=0, events=0))
    assert (report.schedules, report.longest) == (20, 6)
    prefixes = sum(math.comb(mine + theirs, mine) for mine in range(4) for theirs in range(4))
    assert report.states == prefixes  # every order of writes leaves other revisions behind


def _writer(name: str) -> Any:
    return scenarios.outsider(
        name, *[scenarios.writes(scenarios.Put(name.encode() + b"%d" % n, b"")) for n in range(3)]
    )


def test_a_search_that_is_cut_short_says_so() -> None:
    report = explore(replace(THREE, faults=1), most_states=1000)
    assert not report.complete
    assert "not every schedule" in str(report)


def test_what_a_program_raises_is_a_violation() -> None:
    def fails(_: Any) -> Any:
        raise ZeroDivisionError("in the program")
        yield

    report = explore(replace(CLAIMS, programs=(Worker("A", (put("k", "1"), fails)).program(),)))
    assert report.violation is not None
    assert "no program fails: A: ZeroDivisionError('in the program')" in str(report.violation)
    assert str(report.violation).count("'A',") == 3
