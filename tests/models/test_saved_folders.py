"""Checkpoints after an interrupted save: what readers take, and what the next save does."""

import contextlib
import errno
import json
import os
import shutil
import time

import numpy as np
import pytest

from turbojax import _writing, models
from turbojax.models.checkpoint import folder as _folder

NEW = ".turbojax-new"


def save(folder, kind, **options):
    """A checkpoint whose every tensor is `kind`."""
    tensors = [
        _folder.Tensor(f"t{i}", np.dtype(np.float32), (4,), lambda: np.full(4, kind, "f"))
        for i in range(2)
    ]
    _folder.write(folder, {"kind": kind, "vocab_size": 300}, tensors, **options)


def read(folder):
    """The kind of the config and those of the tensors, which are to be one."""

    def read_one(place):
        found = _folder.stored_tensors(place).values()
        return {_folder.read_config(place)["kind"], *(float(x.read()[0]) for x in found)}

    return _folder.steady(folder, read_one)


def hidden(folder):
    return [path.name for path in folder.glob(".turbojax*")]


@contextlib.contextmanager
def interrupted(name, *, after=0):
    """Interrupts this function of `_writing`, the first time or after some calls."""
    whole, calls = getattr(_writing, name), []

    def interrupt(*args, **kwargs):
        calls.append(name)
        if len(calls) > after:
            raise KeyboardInterrupt
        return whole(*args, **kwargs)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_writing, name, interrupt)
        with pytest.raises(KeyboardInterrupt):
            yield


@pytest.fixture
def other(tmp_path):
    """What another program has written: a checkpoint of kind 7."""
    save(tmp_path / "other", 7)
    return tmp_path / "other"


@pytest.fixture
def folder(tmp_path):
    save(tmp_path / "x", 1)
    return tmp_path / "x"


@pytest.fixture
def busy(monkeypatch):
    """Nobody gets a lock, as in a folder that is read-only."""

    def refuse(*_, **__):
        raise PermissionError(errno.EACCES, "Permission denied")

    def set_busy():
        monkeypatch.setattr(_writing, "exclusive", refuse)

    return set_busy


def copy(source, folder, names):
    for name in names:
        (folder / name).unlink(missing_ok=True)
        shutil.copyfile(source / name, folder / name)


class TestOtherPrograms:
    """Whoever writes after an interrupted save is newer than that."""

    @pytest.mark.parametrize("read_only", [False, True])
    @pytest.mark.parametrize("options", [{}, {"max_shard_bytes": 16}])
    def test_what_they_wrote_stays(self, folder, other, busy, read_only, options):
        with interrupted("_publish"):
            save(folder, 2, **options)
        copy(other, folder, ["model.safetensors", "config.json"])
        if read_only:
            busy()
        assert read(folder) == {7}
        assert (folder / "config.json").read_bytes() == (other / "config.json").read_bytes()

    def test_the_next_save_replaces_it(self, folder, other):
        with interrupted("_publish"):
            save(folder, 2)
        copy(other, folder, ["model.safetensors", "config.json"])
        save(folder, 3)
        assert read(folder) == {3}
        assert not hidden(folder)

    def test_weights_alone(self, folder, other):
        with interrupted("_publish"):
            save(folder, 2)
        copy(other, folder, ["model.safetensors"])
        assert read(folder) == {1, 7}

    def test_through_links(self, folder, other):
        """A program that writes into the files, of which there were two names."""
        with interrupted("_drop_new"):
            save(folder, 2)
        assert (folder / NEW / "config.json").samefile(folder / "config.json")
        for name in ("model.safetensors", "config.json"):
            shutil.copyfile(other / name, folder / name)
        assert read(folder) == {7}
        assert not hidden(folder)

    @pytest.mark.parametrize("places", [0, 1, 2])
    @pytest.mark.parametrize("read_only", [False, True])
    def test_what_nobody_touched_comes_to_its_end(self, folder, busy, places, read_only):
        with interrupted("_place", after=places) if places < 2 else interrupted("_drop_new"):
            save(folder, 2)
        if read_only:
            busy()
        assert read(folder) == {2}
        assert bool(hidden(folder)) == read_only

    def test_names_of_a_hostile_folder_lead_nowhere_else(self, folder, tmp_path):
        mine = tmp_path / "mine"
        mine.mkdir()
        (mine / "a").write_text("mine")
        with interrupted("_place"):
            save(folder, 2)
        names = ["../mine/a", str(mine / "a"), "link/a", "\0"]
        (folder / "link").symlink_to(mine)
        record = json.dumps({name: [1, 2, 3] for name in names})
        (folder / NEW / ".turbojax-replaced").write_text(record)
        assert read(folder) == {2}
        assert (mine / "a").read_text() == "mine"
        with interrupted("_place"):
            save(folder, 3)
        (folder / NEW / "link").mkdir()
        (folder / NEW / "link" / "a").write_text("theirs")
        assert read(folder) == {3}
        assert (mine / "a").read_text() == "mine"


class TestWithoutLocks:
    @pytest.fixture(autouse=True)
    def no_locks(self, monkeypatch):
        import fcntl

        def refuse(*_):
            raise OSError(errno.ENOLCK, "No locks available")

        monkeypatch.setattr(fcntl, "flock", refuse)
        monkeypatch.setattr(_writing, "_PUBLISH_SECONDS", 0.02)

    def test_a_second_writer_leaves_the_draft_of_the_first(self, tmp_path):
        """Both are whole; the one that ends last wins."""

        def make():
            save(tmp_path, 2)
            return np.full(4, 1, "f")

        tensor = _folder.Tensor("t", np.dtype(np.float32), (4,), make)
        _folder.write(tmp_path, {"kind": 1}, [tensor])
        assert read(tmp_path) == {1}

    def test_a_draft_that_lost_a_file_is_not_saved(self, folder, tmp_path, monkeypatch):
        (tmp_path / "a").write_text("a")
        files = _writing._files

        def without_one(draft):
            (draft / "a").unlink()
            return files(draft)

        monkeypatch.setattr(_writing, "_files", without_one)
        with pytest.raises(FileNotFoundError, match="removed before it was complete"):
            save(folder, 2, companions={"a": tmp_path / "a"})
        assert read(folder) == {1}
        assert not [name for name in hidden(folder) if "draft" in name]

    def test_old_drafts_go(self, tmp_path):
        for name in ("young", "old"):
            (tmp_path / f".turbojax-draft-{name}").mkdir()
        then = time.time() - 25 * 3600
        os.utime(tmp_path / ".turbojax-draft-old", (then, then))
        save(tmp_path, 1)
        assert [x for x in hidden(tmp_path) if "draft" in x] == [".turbojax-draft-young"]

    def test_readers_only_read(self, folder):
        with interrupted("_place"):
            save(folder, 2)
        assert read(folder) == {2}
        assert not (folder / "config.json").exists()
        save(folder, 3)
        assert read(folder) == {3}


def test_a_full_disk_at_the_end_says_that_it_is_saved(folder):
    def refuse(number):
        def call(*_):
            raise OSError(number, os.strerror(number))

        return call

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "link", refuse(errno.EPERM))
        patch.setattr(shutil, "copy2", refuse(errno.ENOSPC))
        message = "is saved in .turbojax-new, but could not be put in place: No space left"
        with pytest.raises(OSError, match=message) as error:
            save(folder, 2)
        assert error.value.errno == errno.ENOSPC
        assert read(folder) == {2}
    assert read(folder) == {2}
    assert not hidden(folder)


def tokenizer(folder, kind, words):
    """A tokenizer of so many words, and what goes with it."""
    folder.mkdir()
    vocabulary = {f"{i}": i for i in range(words)}
    model = {"type": "WordLevel", "vocab": vocabulary, "unk_token": "0"}
    content = {"version": "1.0", "added_tokens": [], "model": model}
    nothing = ("truncation", "padding", "normalizer", "pre_tokenizer", "post_processor", "decoder")
    texts = {
        "tokenizer.json": json.dumps(content | dict.fromkeys(nothing)),
        "tokenizer_config.json": json.dumps({"bos_token": kind}),
        "generation_config.json": json.dumps({"eos_token_id": words - 1}),
        "chat_template.jinja": kind,
        "additional_chat_templates/tool_use.jinja": kind,
    }
    (folder / "additional_chat_templates").mkdir()
    for name, text in texts.items():
        (folder / name).write_text(text)
    return {name: folder / name for name in texts}


def seen(folder):
    found = models.load_tokenizer(folder)
    return found.vocab_size, found.special_tokens, found.eos_token_ids, found.chat_template


class TestCompanions:
    def test_a_tokenizer_is_that_of_the_weights(self, tmp_path, busy):
        """While the files have not got their places, too."""
        old, new = tokenizer(tmp_path / "old", "old", 3), tokenizer(tmp_path / "new", "new", 5)
        save(tmp_path / "x", 1, companions=old)
        template = {"default": "old", "tool_use": "old"}
        assert seen(tmp_path / "x") == (3, {"bos_token": "old"}, (2,), template)
        del new["additional_chat_templates/tool_use.jinja"]
        with interrupted("_publish"):
            save(tmp_path / "x", 2, companions=new)
        busy()
        assert seen(tmp_path / "x") == (5, {"bos_token": "new"}, (4,), "new")
        assert (tmp_path / "x" / "chat_template.jinja").read_text() == "old"

    def test_files_that_were_not_saved_with_the_weights(self, folder, tmp_path, busy):
        for name, path in tokenizer(tmp_path / "old", "old", 3).items():
            (folder / name).parent.mkdir(exist_ok=True)
            shutil.copyfile(path, folder / name)
        with interrupted("_publish"):
            save(folder, 2)
        busy()
        assert seen(folder)[0] == 3

    @pytest.mark.parametrize("stop", [False, True])
    def test_those_of_an_older_model_go(self, tmp_path, stop):
        folder, old = tmp_path / "x", tokenizer(tmp_path / "old", "old", 3)
        save(folder, 1, companions=old)
        save(folder, 1)
        assert _folder.find_companions(folder).keys() == old.keys()
        with interrupted("_publish") if stop else contextlib.nullcontext():
            save(folder, 2, companions={})
        assert _folder.find_companions(folder) == {}
        assert type(models.load_tokenizer(folder)) is models.NumberTokenizer
