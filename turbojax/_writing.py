"""Writing without losing: files and folders that readers see as they were, or whole and new.

A file is written beside its place under a name of its own, brought to the disk, and renamed.

The files of a folder (a checkpoint's) are written into a hidden folder inside it. That is renamed
to `_NEW`: from then on it is what the folder holds, see `current`. Then its files get their places,
`_NEW` goes, and other programs see them too. An interruption before the renaming leaves the old
files as they were; one after it leaves the new ones in `_NEW`, and the next reader or writer goes
on from there, see `finish`. `_NEW` says which files it replaces, so that it does not replace what
another program wrote after the interruption.
"""

import contextlib
import errno
import glob
import json
import os
import re
import secrets
import shutil
import stat
import tempfile
import time
from collections.abc import Collection, Iterator
from pathlib import Path

from safetensors import SafetensorError

from turbojax import _json, _locks
from turbojax._locks import exclusive as exclusive
from turbojax._locks import require_free as require_free

_NEW = ".turbojax-new"
_DRAFT = ".turbojax-draft-"
_REPLACED = ".turbojax-replaced"
"""In `_NEW`: the versions of the files that it replaces, as JSON."""
_PART = ".part"

Version = tuple[int, int, int]
"""What changes if a file is replaced or written to: its number, size and time."""

# Without locks, a draft older than this was left by a killed writer. A writer that has filled its
# folder needs less time than that to put the files in place.
_LEFT_SECONDS, _PUBLISH_SECONDS = 24 * 3600, 1.0
# A file may be writable where its folder is not, or be a mount point.
_NO_DRAFT = (errno.EACCES, errno.EPERM, errno.EROFS)
_NO_RENAMING = (*_NO_DRAFT, errno.EBUSY, errno.EXDEV)


# Files -------------------------------------------------------------------------------------------


@contextlib.contextmanager
def replacing(path: str | os.PathLike[str]) -> Iterator[Path]:
    """A file to write, which takes the place of `path` when the block ends.

    After an exception, `path` is what it was. A process that is killed may leave a hidden folder
    ``.NAME.*.part``, which the next writer removes. Of several writers the last one wins. Anything
    but an ordinary file, such as a pipe, or ``/dev/stdout`` when it is one, is written directly.

    A file in a folder that is read-only, or a file that is a mount of its own, as in containers,
    cannot be replaced. What was written is copied into it at the end: if that is interrupted or
    fails, a part of the file is new.

    The file yielded is empty and has the same name. Permissions stay. A link stays too: what it
    points to is replaced. Raises FileNotFoundError if there is no such folder, PermissionError if
    the file is there and must not be written, OSError if it cannot be written.
    """
    # The link itself, not its target: that of a link to a pipe has no path.
    if os.path.exists(path) and not os.path.isfile(path):
        if os.path.isdir(path):
            raise IsADirectoryError(f"{str(path)!r} must be a file, not a folder")
        yield Path(path)
        return
    target = Path(os.path.realpath(path))
    if not target.parent.is_dir():
        raise FileNotFoundError(f"{str(target.parent)!r} must be a folder, to write {target.name}")
    if target.exists() and not os.access(target, os.W_OK):
        raise PermissionError(errno.EACCES, "must be a file that can be written", str(path))
    _remove_left(target)
    with _named_errors(path), _draft_folder(target) as folder:
        draft = folder / target.name
        draft.touch()
        # A new file has what the system gives new files.
        mode = stat.S_IMODE((target if target.exists() else draft).stat().st_mode)
        yield draft
        draft.chmod(mode)
        _sync(draft)
        _put(draft, target)
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
    """A hidden folder, locked while its writer lives; removed at the end.

    It is beside the file, or elsewhere if the file exists and none can be made there.
    """
    folder = None
    try:
        try:
            folder = Path(
                tempfile.mkdtemp(dir=target.parent, prefix=f".{target.name}.", suffix=_PART)
            )
        except OSError as error:
            if error.errno not in _NO_DRAFT or not target.exists():
                raise
            folder = Path(tempfile.mkdtemp(suffix=_PART))
        with (folder / _locks.NAME).open("w", encoding="utf-8") as lock:
            # Where there are no locks, this file stays empty, and the folder is not removed if its
            # writer is killed.
            with contextlib.suppress(BlockingIOError):
                if _locks.lock(lock):
                    lock.write(f"{os.getpid()}\n")
                    lock.flush()
            yield folder
    finally:
        if folder is not None:
            _remove(folder)


def _remove_left(target: Path) -> None:
    """Removes what writers of a file that were killed have left."""
    for left in target.parent.glob(f".{glob.escape(target.name)}.*{_PART}"):
        with contextlib.suppress(OSError), (left / _locks.NAME).open("r+", encoding="utf-8") as own:
            if _locks.lock(own) and own.read():  # an empty one is about to be locked
                _remove(left)


def _put(draft: Path, target: Path) -> None:
    """Gives a file the content of the draft, in one step where that is possible."""
    try:
        os.replace(draft, target)
    except OSError as error:
        if error.errno not in _NO_RENAMING or not target.exists():
            raise
        shutil.copyfile(draft, target)
        _sync(target)


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


def current(folder: Path, last: str) -> Path:
    """Where the files of `replacing_files` are to be read just now: in `_NEW`, or in the folder.

    They are in the folder if they have their places, or another program has written there since.
    """
    new = folder / _NEW
    if new.is_symlink() or not new.is_dir():
        return folder
    # Removed before the first file is put in place, and back after the others.
    if version_of(folder / last) is None:
        return new
    replaced = _replaced(new)
    same = last in replaced and all(version_of(folder / x) == y for x, y in replaced.items())
    return new if same else folder


def find(folder: Path, name: str, last: str) -> Path:
    """Where one file of a folder is to be read just now; the file need not exist."""
    place = current(folder, last)
    if place == folder or os.path.lexists(place / name) or name in _replaced(place):
        return place / name
    return folder / name


def version(found: os.stat_result) -> Version:
    """A value that changes if the file is replaced or written to."""
    return found.st_ino, found.st_size, found.st_mtime_ns


def version_of(file: Path) -> Version | None:
    """See `version`; None if there is no such file."""
    try:
        return version(file.stat())
    except (FileNotFoundError, NotADirectoryError):
        return None


@contextlib.contextmanager
def replacing_files(
    folder: str | os.PathLike[str], *, files: Collection[str], owned: Collection[str], last: str
) -> Iterator[Path]:
    """A hidden folder to fill, whose files replace those of `folder` when the block ends.

    After an exception in the block, the old files are what they were. A later error, such as a full
    disk, may leave the new files in `_NEW`: they are complete, readers that ask `current` see them,
    and the next reader or writer puts them in their places. An OSError says so. At no time do such
    readers see files of both kinds.

    Where there are no locks, all this holds for one writer at a time: a second one is not refused,
    and either of the two may fail.

    Args:
      folder: what gets the files; created if it does not exist. A second writer is refused.
      files: names of all files that the block writes.
      owned: patterns of names: old files that go even if the block writes none of their name.
        Others stay.
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
    with exclusive(target) as locked, _named_errors(target):
        if not locked:
            _wait_for_others(target)
        if os.path.lexists(target / _NEW):
            _settle(target, last)
        for left in target.glob(f"{_DRAFT}*"):
            if locked or _is_old(left):
                _remove(left)
        draft = target / _draft_name()
        try:
            draft.mkdir()
            yield draft
            _complete(draft, target, files, {*owned, last})
            _make_current(draft, target)
        except BaseException:
            _remove(draft)
            raise
        _sync_folder(target)
        with _saved_errors(target):
            _publish(target, last)


def finish(folder: Path, *, last: str) -> None:
    """Puts the files of an interrupted `replacing_files` in place, if nobody is writing now.

    Where the folder is read-only or has no locks they stay where they are; `current` finds them.
    """
    if (folder / _NEW).is_dir():
        with contextlib.suppress(OSError), exclusive(folder, patience=0) as locked:
            if locked and (folder / _NEW).is_dir():
                _settle(folder, last, keep_unused=True)


def _wait_for_others(folder: Path) -> None:
    """Waits until another writer, who only has to put files in place, is done."""
    deadline = time.monotonic() + _PUBLISH_SECONDS
    while (folder / _NEW).exists() and time.monotonic() < deadline:
        time.sleep(0.01)


def _is_old(path: Path) -> bool:
    """Whether the writer of this is gone; without locks only its age tells."""
    try:
        return time.time() - path.stat().st_mtime > _LEFT_SECONDS
    except FileNotFoundError:
        return False


def _complete(draft: Path, target: Path, files: Collection[str], owned: Collection[str]) -> None:
    """Brings a draft to the disk, with the versions of what it replaces.

    A missing file (FileNotFoundError) means that another program took the draft for an abandoned
    one.
    """
    found = _files(draft)
    for path in found:
        _sync(path)
    missing = [name for name in files if not (draft / name).is_file()]
    if missing:
        message = "was removed before it was complete, by another program"
        raise FileNotFoundError(errno.ENOENT, message, str(target / missing[0]))
    old = {path for pattern in owned for path in target.glob(pattern)}
    versions = {path.relative_to(target).as_posix(): version_of(path) for path in sorted(old)}
    (draft / _REPLACED).write_text(json.dumps(versions), encoding="utf-8")
    _sync(draft / _REPLACED)
    for folder in {draft, *(path.parent for path in found)}:
        _sync_folder(folder)


def _make_current(draft: Path, folder: Path) -> None:
    try:
        os.rename(draft, folder / _NEW)
    except OSError as error:
        if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
            raise
        raise BlockingIOError(
            f"{str(folder)!r} is being written by another program: wait for it, or choose another "
            "folder"
        ) from error


@contextlib.contextmanager
def _saved_errors(folder: Path) -> Iterator[None]:
    """Makes errors say that the new files exist nevertheless."""
    try:
        yield
    except OSError as error:
        message = (
            f"{str(folder)!r} is saved in {_NEW}, but could not be put in place: "
            f"{error.strerror or error}"
        )
        raise OSError(error.errno or errno.EIO, message, error.filename) from error


def _settle(folder: Path, last: str, keep_unused: bool = False) -> None:
    """Finishes with `_NEW`: puts its files in place if they are current, or removes it.

    With `keep_unused` it stays if another program has written there since.
    """
    new = folder / _NEW
    if current(folder, last) == new:
        _publish(folder, last)
    elif not keep_unused or _is_same(new / last, folder / last):
        _drop_new(folder)


def _publish(folder: Path, last: str) -> None:
    """Puts the files of `_NEW` in their places; to be repeated after an interruption."""
    new = folder / _NEW
    names = [path.relative_to(new).as_posix() for path in _files(new)]
    names = [name for name in names if name not in (_REPLACED, last)]
    old = [name for name in _replaced(new) if name not in names]
    (folder / last).unlink(missing_ok=True)
    for name in old:
        if _is_inside(folder, name) and (folder / name).is_file():
            (folder / name).unlink()
    for name in names:
        _place(folder, name)
    for place in {folder, *((folder / name).parent for name in names)}:
        _sync_folder(place)
    if (new / last).is_file():
        _place(folder, last)
    _sync_folder(folder)
    _drop_new(folder)


def _drop_new(folder: Path) -> None:
    """Removes `_NEW` in one step: half of it would be read as if it were whole."""
    gone = folder / _draft_name()
    try:
        os.rename(folder / _NEW, gone)
    finally:
        _remove(gone)


def _place(folder: Path, name: str) -> None:
    """Puts a file of `_NEW` in its place in the folder, in one step; it stays in `_NEW` too."""
    source, place = folder / _NEW / name, folder / name
    part = place.with_name(f"{_DRAFT}{place.name}")
    if not _is_inside(folder, name):
        raise OSError(errno.EXDEV, "must lie in its folder, not behind a link", str(place))
    part.unlink(missing_ok=True)
    # A link is not renamed to another one to the same file: nothing would happen.
    if _is_same(place, source):
        return
    place.parent.mkdir(parents=True, exist_ok=True)
    try:
        try:
            os.link(source, part)
        except OSError:  # a file system without links
            shutil.copy2(source, part)
            _sync(part)
        os.replace(part, place)
    except BaseException:
        part.unlink(missing_ok=True)
        raise


def _replaced(new: Path) -> dict[str, Version]:
    """The versions of the files that `_NEW` replaces; none if it does not say."""
    try:
        found = _json.read_object(new / _REPLACED)
    except (OSError, ValueError):
        return {}
    return {
        name: (x[0], x[1], x[2])
        for name, x in found.items()
        if isinstance(x, list) and len(x) == 3 and "\0" not in name
    }


def _is_inside(folder: Path, name: str) -> bool:
    """Whether this is a file in the folder: names and links may come from anywhere."""
    parent = (folder / name).parent.resolve()
    return ".." not in Path(name).parts and parent.is_relative_to(folder.resolve())


def _is_same(one: Path, other: Path) -> bool:
    return one.exists() and other.exists() and one.samefile(other)


def _draft_name() -> str:
    return f"{_DRAFT}{secrets.token_hex(8)}"


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)


def _files(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*") if path.is_file())


def _sync(file: Path) -> None:
    # Windows refuses it for a file that is open only for reading.
    with file.open("r+b" if os.name == "nt" else "rb") as opened:
        os.fsync(opened.fileno())


def _sync_folder(folder: Path) -> None:
    # Not every file system can do it; without it the newest state may be lost, not the older one.
    with contextlib.suppress(OSError):
        handle = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)
