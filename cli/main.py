"""The application, and the one place that turns an exception into a message and an exit code."""

from __future__ import annotations

import io
import os
import sys
from typing import Annotated

import typer

from . import cluster, data, lease, output, queue, rehearse, run, task

EPILOG = (
    "Exit codes: 0 ok, 1 error, 2 usage, 3 not found, 4 held by another, 5 ownership lost, 6 stale, 7 uncertain,"
    " 8 refused by policy, 9 etcd unreachable, 10 permission denied, 124 time-out, 130 interrupt."
)

app = typer.Typer(
    name="etcdfence",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    epilog=EPILOG,
    help="Own tasks on etcd, and let etcd itself refuse what is stale.",
)
app.add_typer(lease.app, name="lease")
app.add_typer(task.app, name="task")
app.add_typer(queue.app, name="queue")
app.add_typer(data.app, name="data")
app.command()(run.run)
app.add_typer(rehearse.app, name="rehearse")
app.command()(cluster.init)
app.command()(cluster.status)
app.command()(cluster.dev)


def _version(wanted: bool) -> None:
    if wanted:
        from etcdfence import __version__

        output.say(f"etcdfence {__version__}")
        raise typer.Exit


@app.callback()
def options(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="print the version and exit")
    ] = False,
) -> None:
    """Own tasks on etcd, and let etcd itself refuse what is stale."""


def exit_code(error: Exception) -> int:
    """The first family that fits decides; the list is ordered from the special to the general."""
    from etcdfence import errors

    table: tuple[tuple[type[Exception], int], ...] = (
        (errors.NotFound, 3),
        (errors.Held, 4),
        (errors.OwnershipRefused, 5),
        (errors.LeaseReleased, 5),
        (errors.SessionLost, 5),
        (errors.Unverified, 5),
        (errors.Conflict, 6),
        (errors.OutcomeUnknown, 7),
        (errors.TaskClosed, 8),
        (errors.UnresolvedEffects, 8),
        (errors.Unavailable, 9),
        (errors.PermissionDenied, 10),
        (errors.Misuse, 2),
    )
    return next((code for kind, code in table if isinstance(error, kind)), 1)


def main() -> None:
    """The console command `etcdfence`."""
    from etcdfence.errors import EtcdFenceError

    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")  # a terminal that knows fewer letters than we print
    try:
        app()
    except EtcdFenceError as error:
        output.note(f"etcdfence: {error}")
        output.note(f"  {error.advice}")
        sys.exit(exit_code(error))
    except KeyboardInterrupt:
        sys.exit(130)
    except BrokenPipeError:
        # Whoever read our output has gone; keep Python from complaining about it once more at its exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(1)
    except OSError as error:
        output.note(f"etcdfence: {error}")
        sys.exit(1)


if __name__ == "__main__":
    main()
