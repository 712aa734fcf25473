"""What the embedded model's successors read: licences, what is dropped, wheels, the archive."""

import dataclasses
import email
import hashlib
import lzma
import zipfile
from pathlib import Path

import numpy as np
import pytest

from training import archive, corpus
from turbojax.finetune.documents import (
    Document,
    HeldOut,
    reason_to_drop,
    select,
    standard_library,
)


def metadata(**fields):
    lines = [f"{name.replace('_', '-')}: {value}" for name, value in fields.items()]
    return email.message_from_string("\n".join(lines))


class TestLicences:
    @pytest.mark.parametrize(
        "fields",
        [
            {"License_Expression": "MIT"},
            {"License_Expression": "BSD-3-Clause AND (Apache-2.0 OR MIT)"},
            {"License": "BSD 3-Clause"},
            {"License": "Apache License, Version 2.0"},
            {"License": "Apache 2.0 License"},
            {"Classifier": "License :: OSI Approved :: Python Software Foundation License"},
            # An expression decides even where an old field says nothing useful.
            {"License_Expression": "ISC", "License": "see file"},
        ],
    )
    def test_permissive(self, fields):
        assert corpus.permissive_licence(metadata(**fields))

    @pytest.mark.parametrize(
        "fields",
        [
            {},
            {"License": "see LICENSE"},
            {"License": "GPL-3.0"},
            {"License_Expression": "LGPL-2.1-or-later"},
            {"License_Expression": "MIT AND MPL-2.0"},
            {"License_Expression": "LicenseRef-NVIDIA-Proprietary"},
            {"License": "NVIDIA Proprietary Software"},
            {"Classifier": "License :: OSI Approved :: GNU General Public License (GPL)"},
            {"Classifier": "License :: Other/Proprietary License"},
            {"Classifier": "License :: OSI Approved"},
            {"License_Expression": "AGPL-3.0-only", "License": "MIT"},
        ],
    )
    def test_not_permissive(self, fields):
        assert corpus.permissive_licence(metadata(**fields)) is None


def code(seed: int, lines: int = 40) -> bytes:
    """Lines long enough to count as text that was copied."""
    rows = (
        f"    result_{seed}_{i} = function_of_module(seed_{seed}, line_{i})" for i in range(lines)
    )
    return "\n".join(rows).encode()


def document(name: str, data: bytes) -> Document:
    return Document("package 1.0", "MIT", name, data)


class TestSelection:
    def test_drops_what_resembles_a_held_out_module(self):
        held_out = HeldOut({"textwrap.py": code(1)})
        near_copy = code(2, 100) + b"\n" + b"\n".join(code(1).splitlines()[:9])
        quotation = code(2, 100) + b"\n" + b"\n".join(code(1).splitlines()[:8])
        documents = [
            document("other/textwrap.py", code(3)),
            document("vendored_copy.py", near_copy),
            document("quotation.py", quotation),
        ]
        kept, dropped, resembling = select(documents, held_out)
        assert [d.name for d in kept] == ["quotation.py"]
        assert dropped == {"held out": 2}
        assert len(resembling) == 2

    @pytest.mark.parametrize(
        ("name", "data", "reason"),
        [
            ("a.py", b"x = 1\n", "size"),
            ("a.py", code(1, 20_000), "size"),
            ("pip/_vendor/distro.py", code(1), "vendored"),
            ("a.py", b"# GNU Lesser General Public License\n" + code(1), "licence notice"),
            ("a.py", b"# caf\xe9\n" + code(1), "not UTF-8"),
            ("a.py", b"\0" + code(1), "not text"),
            ("a.py", b"table = [" + b"123, " * 100 + b"]", "generated"),
            ("a.py", b'text = "' + b"a" * 2000 + b'"', "generated"),
            ("a.py", code(1), None),
        ],
    )
    def test_reasons(self, name, data, reason):
        assert reason_to_drop(document(name, data)) == reason

    def test_copies_are_kept_once_and_order_depends_on_contents_alone(self):
        documents = [document(f"{i}.py", code(i)) for i in range(5)]
        again = [document("copy.py", code(0)), *reversed(documents)]
        first = select(documents, HeldOut({}))[0]
        second, dropped, _ = select(again, HeldOut({}))
        assert dropped == {"copy": 1}
        stream = corpus.pack(first)
        np.testing.assert_array_equal(stream, corpus.pack(second))
        assert stream[0] == stream[-1] == 0
        assert sorted(stream.tobytes().strip(b"\0").split(b"\0")) == sorted(d.data for d in first)

    def test_repeats(self):
        twice = corpus.pack([document("a.py", code(1))], repeats={"package 1.0": 2})
        assert twice.tobytes() == (b"\0" + code(1)) * 2 + b"\0"

    @pytest.mark.slow
    def test_standard_library_and_packages_are_found(self):
        names = {d.name for d, _ in zip(standard_library(), range(50), strict=False)}
        assert all(name.endswith(".py") and "site-packages" not in name for name in names)
        package = next(iter(corpus.installed_packages()))
        assert package.licence
        assert package.name.endswith(".py")


def write_wheel(folder: Path, name: str, licence: str, files: dict[str, bytes]) -> None:
    about = f"Metadata-Version: 2.4\nName: {name}\nVersion: 1.0\nLicense-Expression: {licence}\n"
    with zipfile.ZipFile(folder / f"{name}-1.0-py3-none-any.whl", "w") as wheel:
        wheel.writestr(f"{name}-1.0.dist-info/METADATA", about)
        for path, data in files.items():
            wheel.writestr(path, data)


class TestArchive:
    def test_wheels_of_permissive_licences_are_read(self, tmp_path):
        write_wheel(tmp_path, "Free", "MIT", {"free/b.py": code(1), "free/a.c": code(2)})
        write_wheel(tmp_path, "bound", "GPL-3.0-only", {"bound/a.py": code(3)})
        found = list(corpus.packages_of_wheels(tmp_path))
        assert found == [Document("free 1.0", "MIT", "free/b.py", code(1))]

    @pytest.fixture
    def content(self) -> corpus.Corpus:
        documents = tuple(document(f"{i}.py", code(i)) for i in range(5))
        repeats = {"package 1.0": 2}
        stream = corpus.pack(documents, repeats=repeats)
        digest = hashlib.sha256(stream.tobytes()).hexdigest()
        return corpus.Corpus(documents, repeats, {"sha256": digest})

    def test_comes_back_bit_for_bit(self, tmp_path, content):
        path = tmp_path / "corpus.xz"
        assert archive.write(path, content) == path.stat().st_size < 2000
        found = archive.read(path)
        assert found == content
        np.testing.assert_array_equal(found.stream(), content.stream())

    def test_damage_is_an_error(self, tmp_path, content):
        path = tmp_path / "corpus.xz"
        archive.write(path, dataclasses.replace(content, manifest={"sha256": "another"}))
        with pytest.raises(ValueError, match="must be another"):
            archive.read(path)
        archive.write(path, content)
        data = bytearray(path.read_bytes())
        data[len(data) // 2] ^= 1
        path.write_bytes(data)
        with pytest.raises(ValueError, match="must be a file of training.archive"):
            archive.read(path)
        path.write_bytes(lzma.compress(b'{"documents": []}\n'))
        with pytest.raises(ValueError, match=r"must be a file of training.archive.*repeats"):
            archive.read(path)
        path.write_bytes(b"text")
        with pytest.raises(ValueError, match="must be a file of training.archive"):
            archive.read(path)

    def test_collecting_takes_wheels_that_are_not_installed(self, tmp_path, monkeypatch):
        write_wheel(tmp_path, "pytest", "MIT", {"pytest/another.py": code(1)})
        write_wheel(tmp_path, "more", "MIT", {"more/a.py": code(2), "more/textwrap.py": code(3)})
        write_wheel(tmp_path, "unwanted", "MIT", {"unwanted/a.py": code(4)})
        library = [Document("python 3", "PSF-2.0", "z.py", code(5))]
        installed = [Document("pytest 9", "MIT", "pytest/a.py", code(6))]
        monkeypatch.setattr(corpus, "standard_library", lambda: library)
        monkeypatch.setattr(corpus, "installed_packages", lambda: installed)
        found = corpus.collect(
            ["textwrap.py"], library_repeats=2, wheels=tmp_path, leave_out=["unwanted"]
        )
        packages = [d.package for d in found.documents]
        assert packages == ["more 1.0", "pytest 9", "python 3"]
        assert found.repeats == {"python 3": 2}
        assert found.stream().tobytes().count(code(5)) == 2
        assert found.manifest["resembling_held_out"] == ["more 1.0: more/textwrap.py (textwrap.py)"]
