"""etcdfence lease: who owns what, and for how long."""

from __future__ import annotations

from typing import Annotated

import typer

from . import output, views
from .options import Context, Endpoints, Format, Lock, Namespace, Output, Task, connected, named

OneTask = Annotated[
    str | None, typer.Argument(help="a lock's name, or operation:scope:vN; without it all", metavar="[TASK]")
]
app = typer.Typer(no_args_is_help=True, help="Leases: who owns what, and for how long.")


@app.command("list")
def list_leases(
    endpoints: Endpoints = None,
    namespace: Namespace = None,
    context: Context = None,
    form: Output = Format.TABLE,
) -> None:
    """List the tasks that have an owner. Times are seconds, counted by etcd."""
    with connected(endpoints, namespace, context) as coordinator:
        rows = [views.task_row(task) for task in coordinator.tasks(owned_only=True)]
    output.show_list(rows, views.LEASE, form)


@app.command("show")
def show_lease(
    task: Task,
    lock: Lock = False,
    endpoints: Endpoints = None,
    namespace: Namespace = None,
    context: Context = None,
    form: Output = Format.TABLE,
) -> None:
    """Show who owns a task; exit code 3 where nobody does."""
    from etcdfence import NotFound

    wanted = named(task, lock=lock)
    with connected(endpoints, namespace, context) as coordinator:
        found = coordinator.describe(wanted)
    if found.owner is None:
        raise NotFound(f"nobody owns {found.task}; it is {found.state}")
    output.show_one(views.lease_sheet(found), views.LEASE_SHEET, form)


@app.command("watch")
def watch_leases(
    task: OneTask = None,
    lock: Lock = False,
    endpoints: Endpoints = None,
    namespace: Namespace = None,
    context: Context = None,
    form: Output = Format.TABLE,
) -> None:
    """Show who owns TASK, or every task, and each change from then on, until Ctrl-C.

    Goes on through restarts and outages of etcd. JSON is one line a change.
    """
    wanted = None if task is None else named(task, lock=lock)
    with connected(endpoints, namespace, context) as coordinator:
        rows = (views.observation_row(seen) for seen in coordinator.observe(wanted))
        output.show_stream(rows, views.OBSERVATION, form)
