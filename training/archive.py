r"""The corpus as one compressed file, for a machine that has none of its packages.

    pip download --no-deps --only-binary=:all: -d wheels sympy pandas ...
    python -m training.archive --out runs/corpus.xz --wheels wheels

`python -m training.train_embedded_model --corpus runs/corpus.xz` then trains on it. The stream is
that of the machine that made the file, bit for bit; what it was made of is in the log as ever.
"""

import argparse
import hashlib
import json
import lzma
from collections.abc import Callable
from pathlib import Path
from typing import Any

from training import corpus
from training.corpus import Corpus
from turbojax import _writing
from turbojax.finetune.documents import Document
from turbojax.models import held_out_modules

# Files of a package are alike, and packages copy from each other: the window holds all of them.
_FILTERS: list[dict[str, Any]] = [
    {
        "id": lzma.FILTER_LZMA2,
        "preset": 6,  # the highest takes twice as long for two in a hundred
        "dict_size": 2**28,
        "lc": 4,  # text: what follows depends on the whole byte before, not on its address
        "lp": 0,
        "pb": 0,
    }
]


def write(
    path: Path, content: Corpus, report: Callable[[int, int], None] = lambda read, written: None
) -> int:
    """Writes a corpus to a file.

    Args:
      path: the file: an xz stream of a line of JSON, what is in it, and of the documents, one
        after the other.
      content: the corpus.
      report: called after every document with the bytes of text so far, and those of the file.

    Returns:
      The file's bytes.
    """
    packages = list(dict.fromkeys((d.package, d.licence) for d in content.documents))
    number = {package: i for i, (package, _) in enumerate(packages)}
    header = {
        "manifest": content.manifest,
        "repeats": content.repeats,
        "packages": packages,
        "documents": [(number[d.package], len(d.data), d.name) for d in content.documents],
    }
    compressor = lzma.LZMACompressor(check=lzma.CHECK_SHA256, filters=_FILTERS)
    with _writing.replacing(path) as draft, draft.open("wb") as file:
        file.write(compressor.compress(json.dumps(header).encode() + b"\n"))
        done = 0
        for document in content.documents:
            file.write(compressor.compress(document.data))
            done += len(document.data)
            report(done, file.tell())
        file.write(compressor.flush())
    return path.stat().st_size


def read(path: Path) -> Corpus:
    """The corpus in a file.

    Args:
      path: of `write`.

    Raises:
      FileNotFoundError: if there is none.
      ValueError: if it is damaged, no such file, or its stream is not the one it was made of.
    """
    try:
        with lzma.open(path) as file:
            header = json.loads(file.readline())
            documents = []
            for package, size, name in header["documents"]:
                title, licence = header["packages"][package]
                documents.append(Document(title, licence, name, file.read(size)))
            content = Corpus(tuple(documents), header["repeats"], header["manifest"])
            wanted = content.manifest["sha256"]
    except (lzma.LZMAError, EOFError, KeyError, TypeError, ValueError) as error:
        raise ValueError(f"{path} must be a file of training.archive: {error}") from error
    found = hashlib.sha256(content.stream().tobytes()).hexdigest()
    if found != wanted:
        raise ValueError(f"{path} holds a stream with SHA-256 {found}, must be {wanted}")
    return content


class _Report:
    """Prints how far a file is, once in so many bytes."""

    _EVERY = 20_000_000

    def __init__(self) -> None:
        self._said = 0

    def __call__(self, read: int, written: int) -> None:
        if read // self._EVERY > self._said // self._EVERY:
            self._said = read
            print(f"{read:,} bytes of text, {written:,} written", flush=True)


def main(arguments: list[str] | None = None) -> None:
    """Collects what is installed and in wheels, and writes the file."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True, help="the file to write")
    parser.add_argument("--wheels", type=Path, help="folder of wheels of further packages")
    parser.add_argument("--leave-out", nargs="*", default=[], help="packages that are not wanted")
    parser.add_argument("--library-repeats", type=int, default=3, help="of the standard library")
    args = parser.parse_args(arguments)
    content = corpus.collect(
        held_out_modules(),
        library_repeats=args.library_repeats,
        wheels=args.wheels,
        leave_out=args.leave_out,
    )
    args.out.parent.mkdir(parents=True, exist_ok=True)
    size = write(args.out, content, _Report())
    print(f"{content.manifest['total_bytes']:,} bytes of text in {args.out}, {size:,} bytes")


if __name__ == "__main__":
    main()
