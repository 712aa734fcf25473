"""Files and folders that are replaced whole, whatever interrupts it."""

import errno
import functools
import os
import resource
import stat
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import numpy as np
import pytest

from turbojax import _writing
from turbojax.caches import stored_file as storage

OWNED = {"config", "a", "b"}


def replace(folder, files):
    with _writing.replacing_files(folder, files=files, owned=OWNED, last="config") as draft:
        for name, text in files.items():
            (draft / name).parent.mkdir(exist_ok=True)
            (draft / name).write_text(text)


def contents(folder):
    return {
        str(path.relative_to(folder)): path.read_text()
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }


OLD = {"config": "old", "a": "old", "b": "old", "other": "mine"}
NEW = {"config": "new", "a": "new", "more/c": "new"}
BOTH = {**NEW, "other": "mine"}


class TestFile:
    def test_is_replaced(self, tmp_path):
        file = tmp_path / "x.txt"
        _writing.write_text(file, "one")
        _writing.write_text(file, "two")
        assert contents(tmp_path) == {"x.txt": "two"}

    def test_an_exception_leaves_it(self, tmp_path):
        file = tmp_path / "x.txt"
        _writing.write_text(file, "one")

        def interrupted():
            with _writing.replacing(file) as draft:
                draft.write_text("tw")
                raise KeyboardInterrupt

        with pytest.raises(KeyboardInterrupt):
            interrupted()
        assert contents(tmp_path) == {"x.txt": "one"}

    def test_the_draft_has_the_ending(self, tmp_path):
        with _writing.replacing(tmp_path / "x.png") as draft:
            assert draft.name == "x.png"
            assert draft != tmp_path / "x.png"
        assert [x.name for x in tmp_path.iterdir()] == ["x.png"]

    def test_it_keeps_its_permissions_and_links(self, tmp_path):
        file, link = tmp_path / "x", tmp_path / "link"
        file.write_text("one")
        file.chmod(0o640)
        link.symlink_to(file)
        _writing.write_text(link, "two")
        assert link.is_symlink()
        assert file.read_text() == "two"
        assert stat.S_IMODE(file.stat().st_mode) == 0o640

    def test_what_is_no_ordinary_file_is_written_to(self):
        _writing.write_text(os.devnull, "x")
        assert not os.path.isfile(os.devnull)

    def test_a_pipe_is_written_to(self):
        """Its path is a link to something that has no path."""
        receive, send = os.pipe()
        _writing.write_text(f"/dev/fd/{send}", "x")
        os.close(send)
        with os.fdopen(receive) as pipe:
            assert pipe.read() == "x"

    def test_permissions_are_those_of_new_files_and_the_umask_stays(self, tmp_path, monkeypatch):
        """To set it, be it for a moment, is to set it for other threads."""
        before = os.umask(0o027)
        try:
            with monkeypatch.context() as patch:
                patch.delattr(os, "umask")
                _writing.write_text(tmp_path / "x", "one")
                replace(tmp_path / "folder", NEW)
        finally:
            os.umask(before)
        files = [tmp_path / "x", *(tmp_path / "folder" / name for name in NEW)]
        assert {stat.S_IMODE(path.stat().st_mode) for path in files} == {0o640}
        assert stat.S_IMODE((tmp_path / "folder" / "more").stat().st_mode) == 0o750

    def test_what_is_read_only_is_refused(self, tmp_path, monkeypatch):
        file = tmp_path / "x"
        _writing.write_text(file, "one")
        monkeypatch.setattr(os, "access", lambda path, mode: mode != os.W_OK)
        with pytest.raises(PermissionError, match=f"must be a file that can be written: '{file}'"):
            _writing.write_text(file, "two")
        _writing.write_text(tmp_path / "y", "new")
        assert contents(tmp_path) == {"x": "one", "y": "new"}

    @pytest.mark.parametrize("number", [errno.EACCES, errno.EROFS])
    def test_a_file_in_a_folder_that_is_read_only(self, tmp_path, monkeypatch, number):
        make = tempfile.mkdtemp

        def refuse(dir=None, **kwargs):
            if dir == tmp_path:
                raise OSError(number, os.strerror(number), str(dir))
            return make(dir=dir, **kwargs)

        monkeypatch.setattr(tempfile, "mkdtemp", refuse)
        self._in_place(tmp_path / "x", monkeypatch, number)
        with pytest.raises(OSError, match=os.strerror(number)):
            _writing.write_text(tmp_path / "y", "new")
        assert contents(tmp_path) == {"x": "two"}

    @pytest.mark.parametrize("number", [errno.EBUSY, errno.EXDEV])
    def test_a_file_that_is_mounted_by_itself(self, tmp_path, monkeypatch, number):
        self._in_place(tmp_path / "x", monkeypatch, number)
        assert contents(tmp_path) == {"x": "two"}

    def _in_place(self, file, monkeypatch, error):
        """Where nothing can be renamed, the file stays the same one, with the whole text."""
        file.write_text("one, longer")
        number = file.stat().st_ino

        def refuse(*_):
            raise OSError(error, os.strerror(error))

        monkeypatch.setattr(os, "replace", refuse)

        def interrupted():
            with _writing.replacing(file) as draft:
                draft.write_text("tw")
                raise KeyboardInterrupt

        with pytest.raises(KeyboardInterrupt):
            interrupted()
        assert file.read_text() == "one, longer"
        _writing.write_text(file, "two")
        assert file.stat().st_ino == number

    def test_what_a_killed_writer_left_goes_and_what_a_living_one_has_stays(self, tmp_path):
        left = tmp_path / ".x.abc.part"
        left.mkdir()
        (left / "x").write_text("half")
        (left / ".turbojax-lock").write_text("1\n")
        with _writing.replacing(tmp_path / "x") as living:
            living.write_text("one")
            assert not left.exists()
            _writing.write_text(tmp_path / "x", "two")
        assert contents(tmp_path) == {"x": "one"}

    def test_many_writers(self, tmp_path):
        """Every text is whole; the last one wins."""

        def work(number):
            for _ in range(50):
                _writing.write_text(tmp_path / "x", f"{number}" * 1000)

        threads = [threading.Thread(target=work, args=[i]) for i in range(4)]
        for thread in threads:
            thread.start()
        while any(thread.is_alive() for thread in threads):
            if (tmp_path / "x").exists():
                assert len(text := (tmp_path / "x").read_text()) == 1000
                assert len(set(text)) == 1
        assert list(contents(tmp_path)) == ["x"]

    def test_refusals(self, tmp_path):
        with pytest.raises(FileNotFoundError, match="none' must be a folder, to write x"):
            _writing.write_text(tmp_path / "none" / "x", "")
        with pytest.raises(IsADirectoryError, match="must be a file, not a folder"):
            _writing.write_text(tmp_path, "")

    @pytest.mark.parametrize("own", [True, False])
    def test_a_full_disk_names_the_file(self, tmp_path, own):
        """A file of at most 100 bytes, so that it is the system that refuses."""
        limits = resource.getrlimit(resource.RLIMIT_FSIZE)
        file = tmp_path / "x"
        write = functools.partial(_writing.write_bytes, file, bytes(1000))
        if not own:
            write = functools.partial(storage.write, file, {}, {"x": np.zeros(1000)})
        _writing.write_text(file, "one")
        resource.setrlimit(resource.RLIMIT_FSIZE, (100, limits[1]))
        try:
            with pytest.raises(OSError, match=f"File too large: '{file}'"):
                write()
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        assert contents(tmp_path) == {"x": "one"}


class TestFolder:
    def test_is_replaced_and_other_files_stay(self, tmp_path):
        replace(tmp_path / "x", OLD)
        replace(tmp_path / "x", NEW)
        assert contents(tmp_path / "x") == BOTH

    def test_an_exception_leaves_it(self, tmp_path):
        replace(tmp_path, OLD)
        with pytest.raises(TypeError, match="must be str"):
            replace(tmp_path, {**NEW, "b": None})
        assert contents(tmp_path) == OLD

    def test_without_links(self, tmp_path, monkeypatch):
        def refuse(*_):
            raise OSError(errno.EPERM, "no links here")

        monkeypatch.setattr(os, "link", refuse)
        replace(tmp_path, OLD)
        replace(tmp_path, NEW)
        assert contents(tmp_path) == BOTH

    def test_every_interruption_leaves_the_old_or_the_new(self, tmp_path, monkeypatch):
        """Before and after every call that changes the folder; then a reader, or a writer."""
        calls, stop = [], [-1]

        def counted(function):
            def call(*args, **kwargs):
                for when in ("before", "after"):
                    if len(calls) == stop[0]:
                        raise KeyboardInterrupt
                    calls.append((function.__name__, when))
                    if when == "before":
                        result = function(*args, **kwargs)
                return result

            return call

        for name in ("link", "rename", "replace", "fsync"):
            monkeypatch.setattr(os, name, counted(getattr(os, name)))
        seen = set()
        for point in range(10_000):
            stop[0] = -1
            folder = tmp_path / f"{point}"
            replace(folder, OLD)
            calls.clear()
            stop[0] = point
            try:
                replace(folder, NEW)
            except KeyboardInterrupt:
                pass
            else:
                break
            stop[0] = -1
            place = _writing.current(folder, "config")
            now = {name: (place / name).read_text() for name in ("config", "a")}
            assert now in ({"config": "old", "a": "old"}, {"config": "new", "a": "new"})
            seen.add(now["config"])
            if point % 2:
                _writing.finish(folder, last="config")
                assert contents(folder) == (BOTH if now["config"] == "new" else OLD)
            replace(folder, {"config": "third", "b": "third"})
            assert {x: y for x, y in contents(folder).items() if x in OWNED} == {
                "config": "third",
                "b": "third",
            }
            assert not list(folder.glob(".turbojax*"))
        assert seen == {"old", "new"}
        assert point > 20

    def test_other_programs_never_see_both(self, tmp_path, monkeypatch):
        replace(tmp_path, OLD)
        seen = []
        rename = os.replace

        def look(*args):
            seen.append({name: (tmp_path / name).is_file() for name in ("config", "a")})
            rename(*args)
            seen.append({x: (tmp_path / x).read_text() for x in OWNED if (tmp_path / x).is_file()})

        monkeypatch.setattr(os, "replace", look)
        replace(tmp_path, NEW)
        assert not any(x.get("config") == "old" for x in seen[1:])
        assert seen[-1] == {"config": "new", "a": "new"}
        assert not seen[-2]["config"]


class TestExclusive:
    def test_a_second_writer_is_refused(self, tmp_path):
        with (
            _writing.exclusive(tmp_path),
            pytest.raises(BlockingIOError, match=rf"another program \(process {os.getpid()}\)"),
        ):
            replace(tmp_path, NEW)
        assert contents(tmp_path) == {}
        replace(tmp_path, NEW)

    def test_a_lock_that_was_left_does_not_matter(self, tmp_path):
        (tmp_path / ".turbojax-lock").write_text("1\n")
        _writing.require_free(tmp_path)
        replace(tmp_path, NEW)
        assert contents(tmp_path) == NEW

    def test_a_folder_that_is_read_only_is_free(self, tmp_path, monkeypatch):
        """Whether or not a lock was left there."""
        (tmp_path / ".turbojax-lock").write_text("1\n")
        whole = Path.open

        def refuse(path, mode="r", *args, **kwargs):
            if mode != "r" and path.is_relative_to(tmp_path):
                raise PermissionError(errno.EACCES, "Permission denied", str(path))
            return whole(path, mode, *args, **kwargs)

        monkeypatch.setattr(Path, "open", refuse)
        _writing.require_free(tmp_path)

    def test_a_look_is_refused_while_somebody_writes(self, tmp_path):
        with (
            _writing.exclusive(tmp_path),
            pytest.raises(BlockingIOError, match=rf"another program \(process {os.getpid()}\)"),
        ):
            _writing.require_free(tmp_path)

    def test_a_writer_waits_for_those_who_only_look(self, tmp_path):
        inside = threading.Event()

        def look():
            with _writing.exclusive(tmp_path):
                inside.set()
                time.sleep(0.02)

        thread = threading.Thread(target=look)
        thread.start()
        inside.wait()
        replace(tmp_path, NEW)
        thread.join()
        assert contents(tmp_path) == NEW

    def test_without_the_module_of_locks(self, tmp_path):
        """As on Windows."""
        code = """
import sys, types
from pathlib import Path
sys.modules["fcntl"] = None
package = sys.modules["turbojax"] = types.ModuleType("turbojax")
package.__path__ = [sys.argv[2]]  # not all of it, which takes long
from turbojax import _writing
folder = Path(sys.argv[1])
for text in ("one", "two"):
    with _writing.replacing_files(folder, files=["a"], owned=["a"], last="a") as draft:
        (draft / "a").write_text(text)
    _writing.write_text(folder / "b", text)
_writing.require_free(folder)
_writing.finish(folder, last="a")
"""
        command = [sys.executable, "-c", code, str(tmp_path), str(Path(_writing.__file__).parent)]
        done = subprocess.run(command, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        assert contents(tmp_path) == {"a": "two", "b": "two"}

    def test_a_folder_that_does_not_exist_is_free(self, tmp_path):
        _writing.require_free(tmp_path / "none")
        assert not (tmp_path / "none").exists()

    def test_one_at_a_time(self, tmp_path):
        """Of threads that try again and again, one is inside at any time."""
        inside, most, entered = [], [], []

        def work():
            for _ in range(200):
                try:
                    with _writing.exclusive(tmp_path):
                        inside.append(1)
                        most.append(len(inside))
                        entered.append(1)
                        inside.pop()
                except BlockingIOError:
                    pass

        threads = [threading.Thread(target=work) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert max(most) == 1
        assert len(entered) >= 20
