"""etcdfence lease: who owns what, and for how long."""

from __future__ import annotations

import typer

from . import output, views
from .options import Context, Endpoints, Format, Lock, Namespace, Output, Task, connected, named

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

    with connected(endpoints, namespace, context) as coordinator:
        found = coordinator.describe(named(task, lock=lock))
    if found.owner is None:
        raise NotFound(f"nobody owns {found.task}; it is {found.state}")
    output.show_one(views.task_row(found), views.LEASE, form)
