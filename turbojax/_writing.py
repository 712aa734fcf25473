"""Writing without losing: files and folders that readers see as they were, or whole and new.

A file is written beside its place under a name of its own, brought to the disk, and renamed.

The files of a folder (a checkpoint's) are written into a hidden folder inside it. That is renamed
to `_NEW`: from then on it is what the folder holds, see `current`. Then its files get their places,
`_NEW` goes, and other programs see them too. An interruption before the renaming leaves the old
files as they were; one after it leaves the new ones in `_NEW`, and the next reader or writer goes
on from there, see `finish`.
"""

import contextlib
import errno
import fcntl
import glob
import os
import re
import shutil
import stat
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO

from safetensors import SafetensorError

_NEW = ".turbojax-new"
_DRAFT = ".turbojax-draft-"
_LOCK = ".turbojax-lock"
_PART = ".part"


# Files -------------------------------------------------------------------------------------------


@contextlib.contextmanager
def replacing(path: str | os.PathLike[str]) -> Iterator[Path]:
    """A file to write, which takes the place of `path` when the block ends.

    After an exception, `path` is what it was. A process that is killed may leave a hidden folder
    ``.NAME.*.part``, which the next writer removes. Of several writers the last one wins. What is
    no ordinary file, such as ``/dev/stdout``, is written as it is.

    Args:
      path: what to replace, with the same permissions; a link stays, and what it points to is
        replaced. Its folder must exist.

    Yields:
      The file to write, empty, of the same name.

    Raises:
      FileNotFoundError: if there is no such folder.
      OSError: if the file cannot be written.
    """
    target = Path(os.path.realpath(path))
    if target.exists() and not target.is_file():
        if target.is_dir():
            raise IsADirectoryError(f"{str(path)!r} must be a file, not a folder")
        yield target
        return
    if not target.parent.is_dir():
        raise FileNotFoundError(f"{str(target.parent)!r} must be a folder, to write {target.name}")
    mode = _mode(target)
    _remove_left(target)
    with _named_errors(path), _draft_folder(target) as folder:
        draft = folder / target.name
        draft.touch()
        yield draft
        draft.chmod(mode)
        _sync(draft)
        os.replace(draft, target)
    _sync_folder(target.parent)


def write_bytes(path: str | os.PathLike[str], content: bytes) -> None:
    """Replaces a file, see `replacing`."""
    with replacing(path) as draft:
        draft.write_bytes(content)


def write_text(path: str | os.PathLike[str], text: str) -> None:
    """Replaces a file by UTF-8 text, see `replacing`."""
    write_bytes(path, text.encode())


@contextlib.contextmanager
def _draft_folder(target: Path) -> Iterator[Path]:
    """A hidden folder beside a file, locked as long as its writer lives; removed at the end."""
    folder = None
    try:
        folder = Path(tempfile.mkdtemp(dir=target.parent, prefix=f".{target.name}.", suffix=_PART))
        with (folder / _LOCK).open("w", encoding="utf-8") as lock:
            # Where the file system has no locks, the lock stays empty, and the folder too if its
            # writer is killed.
            with contextlib.suppress(OSError):
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                lock.write(f"{os.getpid()}\n")
                lock.flush()
            yield folder
    finally:
        if folder is not None:
            _remove(folder)


def _remove_left(target: Path) -> None:
    """Removes what writers of a file left that were killed."""
    for left in target.parent.glob(f".{glob.escape(target.name)}.*{_PART}"):
        with contextlib.suppress(OSError), (left / _LOCK).open("r+", encoding="utf-8") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if lock.read():  # an empty one is about to be locked
                _remove(left)


@contextlib.contextmanager
def _named_errors(path: str | os.PathLike[str]) -> Iterator[None]:
    """Makes errors of a full disk, safetensors' own among them, OSErrors that name `path`."""
    try:
        yield
    except OSError as error:
        if error.errno is None or error.filename is not None:
            raise
        raise OSError(error.errno, error.strerror, str(path)) from error
    except SafetensorError as error:
        number = re.search(r"os error (\d+)", str(error))
        code = int(number[1]) if number else errno.EIO
        raise OSError(code, os.strerror(code), str(path)) from error


# Folders -----------------------------------------------------------------------------------------


def current(folder: Path) -> Path:
    """Where the files of a folder that `replacing_files` writes are to be read just now."""
    return folder / _NEW if (folder / _NEW).is_dir() else folder


@contextlib.contextmanager
def replacing_files(
    folder: str | os.PathLike[str], *, owned: Callable[[str], bool], last: str
) -> Iterator[Path]:
    """A hidden folder to fill, whose files replace those of `folder` when the block ends.

    After an exception, the old files are what they were.

    Args:
      folder: what gets the files; created if it does not exist. A second writer is refused.
      owned: tells by its name which old file goes, if the block writes none of its name. Others
        stay.
      last: the file without which the folder means nothing to other programs: it goes first and
        comes last, so that they never see some files of either kind.

    Yields:
      The folder to fill; folders in it are merged with those there.

    Raises:
      BlockingIOError: if somebody else is writing there.
      OSError: if something cannot be written.
    """
    target = Path(folder)
    target.mkdir(parents=True, exist_ok=True)
    with exclusive(target), _named_errors(target):
        if (target / _NEW).is_dir():
            _publish(target, owned, last)
        for left in target.glob(f"{_DRAFT}*"):
            _remove(left)
        draft = Path(tempfile.mkdtemp(dir=target, prefix=_DRAFT))
        try:
            yield draft
            for path in [*_files(draft), draft]:
                (_sync_folder if path.is_dir() else _sync)(path)
            draft.chmod(_new_mode(0o777))
            os.rename(draft, target / _NEW)
        except BaseException:
            _remove(draft)
            raise
        _sync_folder(target)
        _publish(target, owned, last)


def finish(folder: Path, *, owned: Callable[[str], bool], last: str) -> None:
    """Gives files of an interrupted `replacing_files` their places, if nobody is writing now.

    Where the folder is read-only they stay where they are; `current` finds them.
    """
    if (folder / _NEW).is_dir():
        with contextlib.suppress(OSError), exclusive(folder):
            if (folder / _NEW).is_dir():
                _publish(folder, owned, last)


@contextlib.contextmanager
def exclusive(folder: Path) -> Iterator[None]:
    """Keeps others that ask for the same folder out, in this process or another.

    Args:
      folder: which must exist. A file `_LOCK` lies there meanwhile; it does not matter if one is
        left behind.

    Raises:
      BlockingIOError: if somebody else is in there.
    """
    path = folder / _LOCK
    with _locked(path):
        try:
            yield
        finally:
            # While it is still locked: whoever opened it before finds out, see `_locked`.
            path.unlink(missing_ok=True)


def require_free(folder: Path) -> None:
    """Raises BlockingIOError if somebody is in `exclusive` for this folder, which may not exist."""
    if (folder / _LOCK).exists():
        with exclusive(folder):
            pass


def _locked(path: Path) -> IO[str]:
    """The file, open and locked: closing it, or the end of the process, unlocks it."""
    while True:
        file = None
        try:
            file = path.open("a+", encoding="utf-8")
            if _lock(file, path):
                return file
            file.close()
        except BaseException:
            if file is not None:
                file.close()
            raise


def _lock(file: IO[str], path: Path) -> bool:
    """Locks an open file; False if it is no longer the one at its path."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        file.seek(0)
        owner = file.read().strip() or "unknown"
        raise BlockingIOError(
            f"{str(path.parent)!r} is being written by another program (process {owner}): "
            "wait for it, or choose another folder"
        ) from None
    except OSError:
        # A file system without locks. Files are whole even so: of two writers one cannot rename
        # its folder to `_NEW`.
        return True
    try:
        same = os.path.samestat(path.stat(), os.fstat(file.fileno()))
    except FileNotFoundError:
        return False
    if same:
        file.truncate(0)
        file.write(f"{os.getpid()}\n")
        file.flush()
    return same


def _publish(folder: Path, owned: Callable[[str], bool], last: str) -> None:
    """Gives the files of `_NEW` their places; to be repeated after an interruption."""
    new = folder / _NEW
    names = [path.relative_to(new) for path in _files(new)]
    (folder / last).unlink(missing_ok=True)
    for old in folder.iterdir():
        if owned(old.name) and Path(old.name) not in names:
            old.unlink()
    for name in sorted(names, key=lambda name: str(name) == last):
        _place(new / name, folder / name)
    _sync_folder(folder)
    # In one go: half of it would be read as if it were whole.
    gone = tempfile.mkdtemp(dir=folder, prefix=_DRAFT)
    try:
        os.rename(new, gone)
    finally:
        _remove(Path(gone))


def _place(source: Path, place: Path) -> None:
    """Puts a file in another place, too, in one step."""
    part = place.with_name(f"{_DRAFT}{place.name}")
    part.unlink(missing_ok=True)
    # A link is not renamed to another one to the same file: nothing would happen.
    if place.exists() and place.samefile(source):
        return
    place.parent.mkdir(parents=True, exist_ok=True)
    try:
        os.link(source, part)
    except OSError:  # a file system without links
        shutil.copy2(source, part)
        _sync(part)
    os.replace(part, place)


def _remove(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)


def _files(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*") if path.is_file())


def _mode(target: Path) -> int:
    """Permissions: those of the file that is replaced, or what any new file would get."""
    return stat.S_IMODE(target.stat().st_mode) if target.exists() else _new_mode(0o666)


def _new_mode(wanted: int) -> int:
    # The umask cannot be read without setting it. A file that another thread creates meanwhile is
    # private.
    mask = os.umask(0o077)
    os.umask(mask)
    return wanted & ~mask


def _sync(file: Path) -> None:
    with file.open("rb") as opened:
        os.fsync(opened.fileno())


def _sync_folder(folder: Path) -> None:
    # Not every file system can, and what is lost without it is the newest state, not the older one.
    with contextlib.suppress(OSError):
        handle = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)
