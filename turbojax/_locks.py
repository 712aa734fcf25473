"""Locks of files and folders, where the system and the file system have them.

Windows has no locks of this kind, and some network file systems refuse them or keep them to one
machine. A lock ends with the process that holds it, however the process ends.
"""

import contextlib
import importlib.util
import io
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import IO

NAME = ".turbojax-lock"
EXIST = importlib.util.find_spec("fcntl") is not None  # not on Windows
# Readers hold a lock for a moment, only to look: a writer waits this long for them.
_PATIENCE_SECONDS, _PAUSE_SECONDS = 0.2, 0.01


@contextlib.contextmanager
def exclusive(folder: Path, patience: float = _PATIENCE_SECONDS) -> Iterator[bool]:
    """Keeps others that ask for the same folder out, in this process or another.

    The folder must exist. It holds a file `NAME` meanwhile, which does no harm if it is left
    behind. `patience` is the seconds to wait for another holder.

    Yields whether others are kept out: False where there are no locks. Raises BlockingIOError if
    another still holds the folder.
    """
    path = folder / NAME
    file = _locked(path, patience) if EXIST else None
    if file is None:
        yield False
        return
    with file:
        try:
            yield True
        finally:
            # Removed while it is locked: whoever opened it before finds out, see `_signed`.
            path.unlink(missing_ok=True)


def require_free(folder: Path) -> None:
    """Raises BlockingIOError if somebody is in `exclusive` for this folder, which may not exist."""
    try:
        file = (folder / NAME).open("r", encoding="utf-8")
    except OSError:  # mostly: nobody ever was
        return
    with file:
        deadline = time.monotonic() + _PATIENCE_SECONDS
        while True:
            try:
                lock(file, shared=True)
                return
            except BlockingIOError:
                if time.monotonic() >= deadline:
                    raise _taken(file, folder) from None
            time.sleep(_PAUSE_SECONDS)


def lock(file: IO[str] | io.RawIOBase, *, shared: bool = False) -> bool:
    """Locks an open file, until it is closed or the process ends; False where there are no locks.

    With `shared` others may hold such a lock, too. Raises BlockingIOError if another holds the
    lock.
    """
    if not EXIST:
        return False
    import fcntl

    try:
        fcntl.flock(file, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
    except BlockingIOError:
        raise
    except OSError:  # a file system without locks
        return False
    return True


def _locked(path: Path, patience: float) -> IO[str] | None:
    """The file, open and locked; None where there are no locks."""
    deadline = time.monotonic() + patience
    while True:
        file = None
        try:
            file = path.open("a+", encoding="utf-8")
            if not lock(file):
                file.close()
                return None
            if _signed(file, path):
                return file
            file.close()
        except BlockingIOError:
            assert file is not None
            with file:
                if time.monotonic() >= deadline:
                    raise _taken(file, path.parent) from None
            time.sleep(_PAUSE_SECONDS)
        except BaseException:
            if file is not None:
                file.close()
            raise


def _signed(file: IO[str], path: Path) -> bool:
    """Writes this process into a locked file; False if it is no longer the one at its path."""
    try:
        same = os.path.samestat(path.stat(), os.fstat(file.fileno()))
    except FileNotFoundError:
        return False
    if same:
        file.truncate(0)
        file.write(f"{os.getpid()}\n")
        file.flush()
    return same


def _taken(file: IO[str], folder: Path) -> BlockingIOError:
    file.seek(0)
    owner = file.read().strip() or "unknown"
    return BlockingIOError(
        f"{str(folder)!r} is being written by another program (process {owner}): "
        "wait for it, or choose another folder"
    )
