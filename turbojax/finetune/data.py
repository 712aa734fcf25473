"""Training and held-out text of a run."""

import dataclasses
import platform
import sysconfig
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from turbojax.finetune import documents
from turbojax.models import held_out_modules

# Share of the user's own text that is held out where no other is named.
_HELD_OUT_SHARE = 20


@dataclasses.dataclass(frozen=True)
class Corpus:
    """Text to train on, and text to measure with.

    Attributes:
      stream: ``[bytes]`` uint8, byte 0 before every document and after the last one.
      held_out: documents that are not in it, separated by byte 0.
      description: where it came from.
    """

    stream: np.ndarray
    held_out: bytes
    description: str


def standard_library_corpus() -> Corpus:
    """The `*.py` files of this interpreter's standard library, tests of Python included.

    Held out are the modules that the embedded model was not trained on, and what resembles them;
    copies, generated tables and files under another licence are left out. In order of their paths,
    so that the files of a package are neighbours.

    Raises:
      FileNotFoundError: if this interpreter comes without source files.
    """
    library = Path(sysconfig.get_path("stdlib"))
    names = [name for name in held_out_modules() if (library / name).is_file()]
    if not names:
        raise FileNotFoundError(f"{library} holds no source files: name some with --data")
    modules = documents.read_held_out(names)
    kept, _, _ = documents.select(documents.standard_library(), documents.HeldOut(modules))
    stream = documents.join(document.data for document in kept)
    description = f"standard library of Python {platform.python_version()}, {len(kept)} files"
    return Corpus(stream, b"\0".join(modules.values()), description)


def corpus_of(paths: Sequence[Path], held_out: Sequence[Path] = ()) -> Corpus:
    """The text of given files and folders.

    Args:
      paths: what to train on, see `documents.read_texts`.
      held_out: what to measure with; if not given, the last twentieth of the text, which is then
        not trained on.

    Raises:
      FileNotFoundError: if a path does not exist.
      ValueError: if a named file is not text, or there is none.
    """
    contents = documents.read_texts(paths)
    if not contents:
        raise ValueError(f"data={[str(path) for path in paths]} must hold text")
    description = f"{', '.join(map(str, paths))}: {len(contents)} files"
    if held_out:
        return Corpus(
            documents.join(contents), b"\0".join(documents.read_texts(held_out)), description
        )
    stream = documents.join(contents)
    cut = stream.size - stream.size // _HELD_OUT_SHARE
    return Corpus(stream[:cut], stream[cut:].tobytes(), description)
