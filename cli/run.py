"""etcdfence run: a command under a lease."""

from __future__ import annotations

import os
from typing import Annotated

import typer

from . import output
from .options import Context, Endpoints, Lock, Namespace, Task, named, settings

Command = Annotated[
    list[str], typer.Argument(help="the command and its arguments, after --", metavar="-- COMMAND…")
]
Wait = Annotated[str, typer.Option(help="how long to wait in line for the task: seconds, or forever")]
Ttl = Annotated[int, typer.Option(help="seconds after our last sign of life until the task is free", min=1)]
MaxRuntime = Annotated[float | None, typer.Option(help="seconds after which the command is ended", min=0.0)]
Grace = Annotated[float, typer.Option(help="seconds between SIGTERM and SIGKILL", min=0.0)]
LossCode = Annotated[int, typer.Option(help="exit code when the lease was lost", min=1, max=255)]
WithParent = Annotated[bool, typer.Option("--with-parent", help="end when the process that started us ends")]
Holder = Annotated[str | None, typer.Option(help="how we appear to others")]
TIME_UP = 124


def run(
    task: Task,
    command: Command,
    wait: Wait = "0",
    ttl: Ttl = 15,
    max_runtime: MaxRuntime = None,
    grace: Grace = 10.0,
    loss_exit_code: LossCode = 5,
    with_parent: WithParent = False,
    holder: Holder = None,
    lock: Lock = False,
    endpoints: Endpoints = None,
    namespace: Namespace = None,
    context: Context = None,
) -> None:
    """Run a command as long as we own TASK, and end it when we do not any more.

    Its exit code is passed on (128 + n where signal n ended it); 4 where somebody else owns the task, 5 when
    the lease was lost, 124 when the time was up. No shell is used. Signals go on to the command. It finds its
    lease in ETCDFENCE_TASK, ETCDFENCE_TOKEN, ETCDFENCE_GENERATION and ETCDFENCE_LEASE; `etcdfence data put`
    writes under it.

    When the terminal goes away the command gets SIGHUP, as without us; under nohup it does not. A closed standard
    input is the command's affair. When our parent ends nothing happens, unless --with-parent is given. When we are
    killed (SIGKILL), the command gets SIGTERM on Linux; elsewhere it goes on, without a lease once the TTL is
    over.
    """
    from etcdfence import connect, model, running

    running.note_signals()
    wanted = running.Command(command, grace=grace, max_runtime=max_runtime, with_parent=with_parent)
    seconds, name = _seconds(wait), named(task, lock=lock)
    if holder is not None:
        model.checked_name(holder, "holder")
    os.environ.update(settings(endpoints, namespace, context).environment())
    try:
        with running.ended_by_signals(), connect() as coordinator:
            ended = running.run(coordinator, name, wanted, ttl=ttl, wait=seconds, holder=holder)
    except running.Signalled as signalled:
        raise typer.Exit(128 + signalled.number) from None
    finally:
        running.ignore_signals()
    if ended.why is running.Why.LOST:
        output.note(f"etcdfence: {task} was lost, and the command ended (with code {ended.code})")
        raise typer.Exit(loss_exit_code)
    raise typer.Exit(TIME_UP if ended.why is running.Why.TIME_UP else ended.code)


def _seconds(wait: str) -> float | None:
    if wait == "forever":
        return None
    try:
        return float(wait)
    except ValueError:
        raise typer.BadParameter(f"--wait is a number of seconds, or forever, not {wait!r}") from None
