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

from benchmarks import (
    choosing,
    fireq_tables,
    flax_tables,
    model_tables,
    paged_tables,
    pooled_tables,
    quality_tables,
    readme,
    tables,
)
from benchmarks.plots import PLOTS
from benchmarks.stored import dated, newest
from benchmarks.tables import Result
from turbojax import _writing

if TYPE_CHECKING:
    from matplotlib.figure import Figure

DOCS = readme.ROOT / "docs"
# Where plots lie, in the docs.
_PLOTS_FOLDER = "benchmarks"
_DIGEST = "Source"
# The model whose rows the short tables show.
SUMMARY_MODEL = "llama3-8b"


def digest(result: Result) -> str:
    """A short fingerprint of a result."""
    text = json.dumps(result, sort_keys=True).encode()
    return hashlib.sha256(text).hexdigest()[:16]


def page_tables(results: Path) -> dict[str, Callable[[], str]]:
    """The tables of the docs whose results are there."""
    found: dict[str, Callable[[], str]] = {}
    if attention := newest(results, ("attention",)):
        found |= _attention_tables(*attention)
    if hopper := newest(results, ("hopper",)):
        found["hopper"] = functools.partial(_hopper_section, *hopper)
        found["decode summary"] = functools.partial(_decode_summary, *hopper)
        found["prefill summary"] = functools.partial(_prefill_summary, *hopper)
    for prefixes, labels in _TABLES.items():
        if result := newest(results, prefixes):
            found |= {label: functools.partial(draw, *result) for label, draw in labels.items()}
    for prefixes, (draw, labels) in _SECTIONS.items():
        if result := newest(results, prefixes):
            for label, operation in labels.items():
                found[label] = functools.partial(draw, *result, operation)
    if all(dated(results, name) for name in choosing.NEEDED):
        found["headline"] = functools.partial(choosing.headline_table, results)
        found["choosing"] = functools.partial(choosing.choosing_table, results)
    return found


def _attention_tables(name: str, result: Result) -> dict[str, Callable[[], str]]:
    footer = tables.source(name, result)

    def section(table: Callable[[Result], str], picture: str = "") -> Callable[[], str]:
        return lambda: f"{picture}{table(result)}\n\n{footer}"

    def rows(operation: str) -> Callable[[], str]:
        return lambda: tables.details_table(result, operation)

    return {
        "ceilings": section(tables.ceilings_table),
        "decode": section(tables.decode_table, _picture("decode_speed.png")),
        "decode rows": rows("decode"),
        "prefill": section(tables.prefill_table, _picture("prefill_speed.png")),
        "prefill rows": rows("prefill"),
        "compress": section(tables.compress_table),
        "compress rows": rows("compress"),
    }


def _hopper_section(name: str, result: Result) -> str:
    rates = tables.ceilings_table(result)
    return f"{tables.hopper_table(result)}\n\n{rates}\n\n{tables.source(name, result)}"


def _decode_summary(name: str, result: Result) -> str:
    table = tables.decode_table(result, tables.SUMMARY_DECODE_METHODS, SUMMARY_MODEL)
    return f"{table} {tables.source(name, result)}"


def _prefill_summary(name: str, result: Result) -> str:
    table = tables.prefill_table(result, SUMMARY_MODEL, short=True)
    return f"{table} {tables.source(name, result)}"


def _throughput_section(name: str, result: Result) -> str:
    table = tables.throughput_table(result)
    notes = [note[0].upper() + note[1:] for note in result.get("notes", ())]
    if settings := result.get("settings"):
        shape = f"prompts of {settings['prompt']} tokens and {settings['new']} new ones"
        notes.insert(0, f"A model of the shape {settings['model']}, {shape}")
    text = "".join(f"{note}. " for note in notes)
    source = tables.source(name, result)
    return f"{_picture('throughput.png')}{table}\n\n{text}{source}"


_ALT = {
    "decode_speed.png": "Decode: speed over cuDNN on bfloat16 by shape and cache",
    "prefill_speed.png": "Prefill: TFLOP/s by shape, mode and softmax",
    "throughput.png": "Generation: tokens per second against the batch size",
}


def _picture(name: str) -> str:
    return f"![{_ALT[name]}]({name})\n\n"


# By what results are called (the date follows): tables of the whole result.
_TABLES: Mapping[tuple[str, ...], Mapping[str, Callable[[str, Result], str]]] = {
    ("demo",): {"demo": quality_tables.demo_table},
    ("cache_quality",): {
        "quality": quality_tables.quality_table,
        "page costs": quality_tables.pages_sentence,
    },
    ("generate", "throughput"): {"throughput": _throughput_section},
    ("pooled",): {"pooled summary": pooled_tables.summary},
    ("pooled_training",): {"pooled training": pooled_tables.training_section},
    ("fireq",): {"fireq summary": fireq_tables.summary},
    ("paged",): {"paged summary": paged_tables.summary},
    ("flax",): {"flax summary": flax_tables.summary},
    ("families",): {
        "families": model_tables.families_section,
        "families summary": model_tables.families_summary,
    },
    ("loading",): {"loading": model_tables.loading_section},
    ("first_calls",): {"first calls": model_tables.first_calls_section},
}
# And tables of one of its operations.
_SECTIONS: Mapping[tuple[str, ...], tuple[Callable[[str, Result, str], str], Mapping[str, str]]] = {
    ("pooled",): (
        pooled_tables.page_section,
        {
            "pooled forward": pooled_tables.FORWARD,
            "pooled gradient": pooled_tables.GRADIENT,
            "pooled selection": pooled_tables.SELECT,
        },
    ),
    ("fireq",): (
        fireq_tables.page_section,
        {
            "fireq matmul": fireq_tables.MATMUL,
            "fireq feed-forward": fireq_tables.FFN,
            "fireq quantize": fireq_tables.QUANTIZE,
            "fireq decode": fireq_tables.DECODE,
        },
    ),
    ("fireq_model",): (fireq_tables.page_section, {"fireq model": fireq_tables.MODEL}),
    ("paged",): (
        paged_tables.page_section,
        {
            "paged decode": paged_tables.DECODE,
            "paged page size": paged_tables.PAGES,
            "paged chunk": paged_tables.CHUNK,
            "paged append": paged_tables.APPEND,
        },
    ),
    ("engine",): (paged_tables.page_section, {"engine": paged_tables.ENGINE}),
    ("flax",): (
        flax_tables.page_section,
        {"flax decode": flax_tables.DECODE, "flax training": flax_tables.TRAINING},
    ),
}


def plots(results: Path) -> dict[str, tuple[Callable[[Result], "Figure"], Result]]:
    """The plots whose results are there: name, what draws them, and of what."""
    found = {}
    for name, (prefixes, draw) in PLOTS.items():
        if result := newest(results, prefixes):
            found[name] = (draw, result[1])
    return found


def _drawn_from(path: Path) -> str | None:
    """The digest that a plot carries."""
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
    """The pages with every marked region replaced by its table.

    Args:
      texts: pages by name.
      chosen: tables by name.

    Raises:
      ValueError: if not exactly one page has the markers of a table.
    """
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
    """The command `report`."""
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
