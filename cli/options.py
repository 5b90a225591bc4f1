"""Options that commands share, each with the environment variable that stands for it."""

from __future__ import annotations

import signal
from enum import StrEnum
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from etcdfence import Coordinator, TaskKey
    from etcdfence.config import Settings


class Format(StrEnum):
    TABLE = "table"
    WIDE = "wide"
    JSON = "json"
    JSONL = "jsonl"
    YAML = "yaml"
    NAME = "name"


_WHERE = "Where"
Endpoints = Annotated[
    str | None,
    typer.Option(
        help="etcd members, separated by commas [env: ETCDFENCE_ENDPOINTS, then ETCDCTL_ENDPOINTS]",
        metavar="URL[,URL]",
        rich_help_panel=_WHERE,
    ),
]
Namespace = Annotated[
    str | None,
    typer.Option("--namespace", "-n", help="[env: ETCDFENCE_NAMESPACE]", metavar="NAME", rich_help_panel=_WHERE),
]
Context = Annotated[
    str | None,
    typer.Option(
        help="a context of the configuration file [env: ETCDFENCE_CONTEXT]",
        metavar="NAME",
        rich_help_panel=_WHERE,
    ),
]
Output = Annotated[Format, typer.Option("--output", "-o", help="how to print it")]
Task = Annotated[
    str,
    typer.Argument(
        help="a lock's name, or operation:scope:vN (a lock that looks like this: --lock)", metavar="TASK"
    ),
]
Lock = Annotated[bool, typer.Option("--lock", help="take TASK as a lock's name, whatever it looks like")]


def end_in_order() -> None:
    """For commands that start processes: whatever tells us to end, end as by Ctrl-C and clean up. Also where a
    shell started us with SIGINT ignored."""
    for ending in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(ending, signal.default_int_handler)


def settings(endpoints: str | None, namespace: str | None, context: str | None) -> Settings:
    from etcdfence import config

    return config.load(endpoints=endpoints, namespace=namespace, context=context)


def connected(endpoints: str | None, namespace: str | None, context: str | None) -> Coordinator:
    from etcdfence import connect

    return connect(endpoints, namespace=namespace, context=context, request_timeout=3.0, patience=5.0)


def named(task: str, *, lock: bool) -> str | TaskKey:
    """What a TASK argument names: text of the form operation:scope:vN is a task key unless --lock is given."""
    from etcdfence import Misuse, TaskKey, model

    model.checked_name(task, "a task name")
    if lock:
        return task
    try:
        return TaskKey.parse(task)
    except Misuse:
        return task
