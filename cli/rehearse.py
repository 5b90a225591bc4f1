"""etcdfence rehearse: failures acted out on a real etcd."""

from __future__ import annotations

from typing import Annotated

import typer

from . import output
from .options import Context, Endpoints, end_in_order

app = typer.Typer(no_args_is_help=True, help="Rehearsals: act out a failure with real processes and a real etcd.")
WithoutFence = Annotated[
    bool, typer.Option("--without-fence", help="run the same story with plain puts; expect it to fail")
]
Ttl = Annotated[int, typer.Option(help="seconds the workers' leases live without renewal", min=2, max=60)]


@app.callback()
def main() -> None:
    """Act out a failure with real processes and a real etcd."""


@app.command("gc-pause")
def gc_pause(
    without_fence: WithoutFence = False,
    ttl: Ttl = 3,
    endpoints: Endpoints = None,
    context: Context = None,
) -> None:
    """A worker is stopped in its step, loses its lease, wakes, and writes its stale result.

    Exit code 0 when etcd refused the write and the record is its successor's alone, 1 when anything differs.
    Without endpoints (flag, environment or context) it starts an etcd of its own.
    """
    from etcdfence import config
    from etcdfence.rehearsals.gc_pause import run

    end_in_order()
    settings = config.load(endpoints=endpoints, context=context)
    chosen = ("embedded:",) if settings.sources["endpoints"] == "default" else settings.endpoints
    outcome = run(output.say, endpoints=chosen, ttl=ttl, fenced=not without_fence)
    if outcome.failures:
        output.note("the rehearsal FAILED: the stale write changed the record")
        raise typer.Exit(1)
