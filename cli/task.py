"""etcdfence task: what the store says of tasks."""

from __future__ import annotations

from typing import Annotated

import typer

from . import output, views
from .options import Context, Endpoints, Format, Lock, Namespace, Output, Task, connected, named

app = typer.Typer(no_args_is_help=True, help="Tasks: their state, attempts, refusals and history.")
State = Annotated[list[str] | None, typer.Option(help="only tasks in this state; may be repeated")]


@app.command("list")
def list_tasks(
    state: State = None,
    endpoints: Endpoints = None,
    namespace: Namespace = None,
    context: Context = None,
    form: Output = Format.TABLE,
) -> None:
    """List the tasks of the namespace by name."""
    wanted = _states(state or [])
    with connected(endpoints, namespace, context) as coordinator:
        rows = [views.task_row(task) for task in coordinator.tasks() if not wanted or task.state in wanted]
    output.show_list(rows, views.TASK, form)


@app.command("show")
def show_task(
    task: Task,
    lock: Lock = False,
    endpoints: Endpoints = None,
    namespace: Namespace = None,
    context: Context = None,
    form: Output = Format.TABLE,
) -> None:
    """Show everything the store says of one task; exit code 3 where it says nothing."""
    wanted = named(task, lock=lock)
    with connected(endpoints, namespace, context) as coordinator:
        found = coordinator.describe(wanted)
    output.show_one(views.task_sheet(found), views.TASK_SHEET, form)


def _states(names: list[str]) -> set[str]:
    from etcdfence import TaskState

    known = [str(state) for state in TaskState]
    for name in names:
        if name not in known:
            raise typer.BadParameter(f"{name!r} is not a state; states are {', '.join(known)}")
    return set(names)
