"""etcdfence init, status and dev: the etcd below."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from . import output, views
from .options import Context, Endpoints, Format, Namespace, Output, connected, end_in_order

Port = Annotated[int, typer.Option(help="port on 127.0.0.1; 0 takes a free one", min=0, max=65535)]
DataDir = Annotated[
    Path | None,
    typer.Option(help="keep the data in this directory; without it they are removed at the end"),
]


def init(endpoints: Endpoints = None, namespace: Namespace = None, context: Context = None) -> None:
    """Make a namespace ready: create its epoch, if it has none. Repeating it changes nothing."""
    with connected(endpoints, namespace, context) as coordinator:
        output.say(f"namespace {coordinator.namespace} is ready, epoch {coordinator.epoch}")


def status(
    endpoints: Endpoints = None,
    namespace: Namespace = None,
    context: Context = None,
    form: Output = Format.TABLE,
) -> None:
    """Show each etcd member with its alarms, and how many tasks are in which state."""
    with connected(endpoints, namespace, context) as coordinator:
        members = [views.member_row(member) for member in coordinator.members()]
        tasks = [str(task.state) for task in coordinator.tasks()]
        facts: dict[str, Any] = {"namespace": coordinator.namespace, "epoch": str(coordinator.epoch)}
    facts["tasks"] = {state: tasks.count(state) for state in sorted(set(tasks))}
    if form in (Format.TABLE, Format.WIDE):
        output.show_list(members, views.MEMBER, form)
        output.say("")
        output.show_one(facts, output.Columns(("namespace", "epoch", "tasks")), form)
    elif form is Format.NAME:
        output.show_list(members, views.MEMBER, form)
    else:
        output.show_one({**facts, "members": members}, views.MEMBER, form)


def dev(port: Port = 2379, data_dir: DataDir = None) -> None:
    """Run a private etcd on loopback until Ctrl-C. For development: it may be an old release."""
    from etcdfence.server import LocalEtcd

    end_in_order()
    with LocalEtcd(port=port or None, data_dir=data_dir) as server:
        output.say(server.endpoint)
        output.note(f"{server.binary} with its data in {server.data_dir}; Ctrl-C ends it. In another terminal:")
        output.note(f"  export ETCDFENCE_ENDPOINTS={server.endpoint}")
        try:
            code = server.wait()
        except KeyboardInterrupt:
            output.note("ending etcd")
            return
        output.note(f"etcd ended by itself with status {code}; its log is {server.log_file}")
        raise typer.Exit(1)
