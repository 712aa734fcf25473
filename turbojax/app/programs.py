"""Compiled programs that the commands keep on disk, so that the next run need not compile them.

It is jax's persistent compilation cache, in a folder of the user's. jax's own limit on its size
(`jax_compilation_cache_max_size`) is not used: it needs a further package, and a process that is
killed between the two files that it writes for a program makes it fail at every later program.
"""

import contextlib
import hashlib
import os
import platform
import re
import warnings
from pathlib import Path
from typing import Annotated, Any

import platformdirs
import typer

CompilationCache = Annotated[
    bool,
    typer.Option(
        "--compilation-cache/--no-compilation-cache",
        help="Keep compiled programs for later runs, in a cache folder of yours or in "
        "JAX_COMPILATION_CACHE_DIR.",
    ),
]

MOST_BYTES = 2**30
"""What the folder may hold; the programs that were used least recently go first."""

# Small programs are kept too: there are many, which together take seconds to compile.
_LEAST_SECONDS = 0.1
_TROUBLE = re.compile(
    r"Error (reading|writing) persistent compilation cache entry for '(.*?)': (.*)"
)


def use(enabled: bool, command: str) -> None:
    """Has jax keep compiled programs, or, if not `enabled`, neither read nor write any.

    Where the user has chosen a folder (`JAX_COMPILATION_CACHE_DIR`), jax's settings stay as they
    are. A folder that cannot be written to is one line on standard error, with `command`, such as
    ``"turbojax serve"``.
    """
    import jax

    if not enabled:
        jax.config.update("jax_enable_compilation_cache", False)
        return
    if jax.config.jax_compilation_cache_dir is not None:  # type: ignore[attr-defined]
        return
    parent = folder()
    try:
        programs = parent / _processor()
        programs.mkdir(mode=0o700, parents=True, exist_ok=True)
        if not os.access(programs, os.R_OK | os.W_OK | os.X_OK):
            raise PermissionError(f"no permission to write to {programs}")
        remove_oldest(parent, MOST_BYTES)
    except OSError as error:
        typer.echo(
            f"{command}: compiled programs are not kept: {error} "
            "(--no-compilation-cache does without)",
            err=True,
        )
        return
    jax.config.update("jax_compilation_cache_dir", str(programs))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", _LEAST_SECONDS)
    _mend(programs, command)


def folder() -> Path:
    """Where programs are kept, in a folder for each kind of processor."""
    return platformdirs.user_cache_path("turbojax", appauthor=False) / "programs"


def remove_oldest(parent: Path, most_bytes: int) -> None:
    """Removes the programs that were used least recently until the others take fewer bytes."""
    found = list[tuple[float, int, Path]]()
    for path in parent.rglob("*-cache"):
        # Another process may have removed it.
        with contextlib.suppress(FileNotFoundError):
            status = path.stat()
            found.append((max(status.st_atime, status.st_mtime), status.st_size, path))
    total = sum(size for _, size, _ in found)
    for _, size, path in sorted(found):
        if total <= most_bytes:
            return
        path.unlink(missing_ok=True)
        total -= size


def _processor() -> str:
    """A name for the kind of processor, which jax's key leaves out.

    Programs for a CPU hold its instructions, and several machines may share the folder.
    """
    kind = f"{platform.system()} {platform.machine()} "
    with contextlib.suppress(OSError):
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
        names = ("model name", "flags", "Features", "CPU part")
        kind += " ".join(sorted({line for line in lines if line.startswith(names)}))
    return f"{platform.machine() or 'cpu'}-{hashlib.sha256(kind.encode()).hexdigest()[:12]}"


def _mend(programs: Path, command: str) -> None:
    """Removes a program that cannot be read, so that it is compiled and kept anew.

    A process may have been killed while it wrote the file; jax would warn, compile, and leave the
    file as it is. Programs that cannot be written are reported once: they only cost time.
    """
    show, told = warnings.showwarning, False

    def shown(message: Warning | str, *details: Any, **more: Any) -> None:
        nonlocal told
        trouble = _TROUBLE.match(str(message))
        if trouble is None:
            show(message, *details, **more)
        elif trouble[1] == "reading":
            for path in programs.glob(f"{trouble[2]}-*-cache"):
                path.unlink(missing_ok=True)
        elif not told:
            told = True
            typer.echo(f"{command}: compiled programs are not kept: {trouble[3]}", err=True)

    warnings.showwarning = shown
    # "always", since by default a warning from one place is shown once.
    warnings.filterwarnings("always", _TROUBLE.pattern, UserWarning)
