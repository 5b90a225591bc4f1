"""etcdfence queue: who waits for what."""

from __future__ import annotations

import typer

from . import output, views
from .options import Context, Endpoints, Format, Namespace, Output, connected

app = typer.Typer(no_args_is_help=True, help="Lines: who waits for what.")


@app.callback()
def main() -> None:
    """Who waits for what, in which order."""


@app.command("list")
def list_waiters(
    endpoints: Endpoints = None,
    namespace: Namespace = None,
    context: Context = None,
    form: Output = Format.TABLE,
) -> None:
    """List everybody in line, by task and position; the first one is next."""
    with connected(endpoints, namespace, context) as coordinator:
        rows = [views.waiter_row(waiter) for waiter in coordinator.waiters()]
    output.show_list(rows, views.WAITER, form)
