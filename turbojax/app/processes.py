"""Options of commands that several processes run together, each with devices of its own."""

import contextlib
from collections.abc import Iterator
from typing import Annotated

import typer

Coordinator = Annotated[
    str | None,
    typer.Option(
        metavar="HOST:PORT",
        envvar="TURBOJAX_COORDINATOR",
        help="Of several processes that run this command together: where the first one listens; "
        "auto under Slurm and Open MPI, which know the other two options.",
        show_default=False,
    ),
]
Count = Annotated[
    int | None,
    typer.Option(
        "--processes", envvar="TURBOJAX_PROCESSES", help="How many there are.", show_default=False
    ),
]
Index = Annotated[
    int | None,
    typer.Option(
        "--process",
        envvar="TURBOJAX_PROCESS",
        help="The number of this one, from 0. The first one writes and prints.",
        show_default=False,
    ),
]
Heartbeat = Annotated[
    float,
    typer.Option(
        envvar="TURBOJAX_HEARTBEAT",
        help="Seconds after which one that is not heard of counts as gone; the others then end.",
    ),
]


@contextlib.contextmanager
def together(
    coordinator: str | None, count: int | None, index: int | None, heartbeat: float
) -> Iterator[bool]:
    """Runs the body with all processes that the options name; alone if they name none.

    Yields whether this is the process that writes and prints. Raises ValueError if an option is
    missing or wrong, OSError as `turbojax.parallel.start`.
    """
    from turbojax import parallel

    if coordinator is None:
        if count is not None or index is not None:
            raise ValueError("--processes and --process are for --coordinator")
        yield True
        return
    where = None if coordinator == "auto" else coordinator
    with parallel.start(where, count, index, heartbeat=heartbeat) as run:
        run.error_code = 2  # as `terminal.one_line_errors` has it
        yield run.index == 0
