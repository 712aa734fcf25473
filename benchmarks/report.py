"""Tables and plots of the docs, and the figures of README.md, from the newest results.

`python -m benchmarks report` writes them; with `--check` it fails if that would change anything.
A table goes between the markers that carry its name, on whichever page of the docs has them. A plot
carries the digest of the result that it was drawn from, since pixels differ between versions of
matplotlib; one whose result has not changed is not drawn again.
"""

import argparse
import functools
import hashlib
import json
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from benchmarks import readme, recorded, summary
from benchmarks.catalogue import SHOWN
from benchmarks.stored import dated, newest
from benchmarks.tables import Result
from turbojax import _writing

if TYPE_CHECKING:
    from matplotlib.figure import Figure

DOCS = readme.ROOT / "docs"
# Where plots lie, in the docs.
_PLOTS_FOLDER = "benchmarks"
_DIGEST = "Source"


def digest(result: Result) -> str:
    text = json.dumps(result, sort_keys=True).encode()
    return hashlib.sha256(text).hexdigest()[:16]


def page_tables(results: Path) -> dict[str, Callable[[], str]]:
    found: dict[str, Callable[[], str]] = {}
    for shown in SHOWN:
        if result := newest(results, shown.results):
            found |= {name: functools.partial(t, *result) for name, t in shown.tables.items()}
    if all(dated(results, name) for name in summary.NEEDED):
        found["headline"] = functools.partial(summary.headline_table, results)
        found["choosing"] = functools.partial(summary.choosing_table, results)
        found["toy"] = functools.partial(summary.toy_table, results)
    if all(dated(results, name) for name in ("attention_quality", "hopper")):
        found["numerics"] = functools.partial(recorded.numerics_table, results)
    return found


def plots(results: Path) -> dict[str, tuple[Callable[[Result], "Figure"], Result]]:
    """The plots whose results are there: name, what draws them, and of what."""
    found = {}
    for shown in SHOWN:
        if shown.plots and (result := newest(results, shown.results)):
            found |= {name: (draw, result[1]) for name, draw in shown.plots.items()}
    return found


def _drawn_from(path: Path) -> str | None:
    from PIL import Image

    if not path.exists():
        return None
    with Image.open(path) as image:
        return image.info.get(_DIGEST)


def _stale_plots(results: Path, folder: Path) -> list[str]:
    found = plots(results).items()
    return [name for name, (_, of) in found if _drawn_from(folder / name) != digest(of)]


def pages(docs: Path) -> dict[str, str]:
    """The pages of the docs by name, such as ``"benchmarks/paged.md"``."""
    every = (path.relative_to(docs) for path in sorted(docs.rglob("*.md")))
    return {
        path.as_posix(): (docs / path).read_text(encoding="utf-8")
        for path in every
        if "_build" not in path.parts
    }


def fill_pages(texts: Mapping[str, str], chosen: Mapping[str, Callable[[], str]]) -> dict[str, str]:
    """The pages with every marked region replaced by its table."""
    filled = dict(texts)
    for name, table in chosen.items():
        holders = [page for page, text in filled.items() if f"<!-- {name} table -->" in text]
        if len(holders) != 1:
            raise ValueError(f"one page must hold '<!-- {name} table -->', but {holders} do")
        filled[holders[0]] = readme.fill(filled[holders[0]], {name: table}, holders[0])
    return filled


def stale(results: Path, docs: Path) -> list[str]:
    """What pages and plots do not show the newest results."""
    texts = pages(docs)
    filled = fill_pages(texts, page_tables(results))
    wrong = [name for name, text in texts.items() if filled[name] != text]
    return wrong + _stale_plots(results, docs / _PLOTS_FOLDER)


def write(results: Path, docs: Path) -> None:
    """Writes the tables of the pages, and draws the plots of new results."""
    texts = pages(docs)
    for name, text in fill_pages(texts, page_tables(results)).items():
        if text != texts[name]:
            _writing.write_text(docs / name, text)
    folder = docs / _PLOTS_FOLDER
    drawn = plots(results)
    for name in _stale_plots(results, folder):
        draw, result = drawn[name]
        with _writing.replacing(folder / name) as draft:
            draw(result).savefig(draft, dpi=110, metadata={_DIGEST: digest(result)})


def run(arguments: argparse.Namespace) -> None:
    path = readme.ROOT / "README.md"
    old = path.read_text(encoding="utf-8")
    if arguments.check:
        wrong = stale(readme.RESULTS, DOCS)
        if readme.fill(old) != old:
            wrong.append(path.name)
        if wrong:
            sys.exit(f"out of date: {', '.join(wrong)}; run python -m benchmarks report")
        return
    write(readme.RESULTS, DOCS)
    _writing.write_text(path, readme.fill(old))
