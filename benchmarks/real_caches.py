"""What caches cost a real language model, and what it finds again through them.

`python -m benchmarks.real_caches --model smollm2 --out benchmarks/results/real_caches_DATE.json`

Windows of text are read through each cache as it is used; a file that is there is gone on with.
``--caches 4bit,kivi4`` picks some; a name may be a file's that `turbojax calibrate` wrote. With
``--recall all``, or some, the rows are what is found again through them.
"""

import sysconfig
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

from benchmarks import machine, stored, tables
from benchmarks.suite import Shown
from benchmarks.tables import Result
from turbojax import evaluation, models
from turbojax.evaluation.recall import RecallMeasure
from turbojax.models.text.tokenizer import load_tokenizer

CACHES = (
    *("4bit", "kivi4", "4bit:buffer_size=64", "4bit:mode=fp8", "int8", "paged_int8"),
    *("paged_int8_v4", "k8v4", "fp8_e4m3", "turbo4", "k4v2", "2/4bit", "3bit", "kv4", "paged_k8v4"),
)
"""What ``--caches all`` measures, in this order."""

DECODED = 448
"""Tokens of a window that are decoded: of 24 windows the exact logits fit what is kept of them."""

RECALLED = (
    *("exact", "paged_int8", "paged_int8_v4", "kivi4", "4bit", "4bit:buffer_size=64", "k4v2"),
    *("2/4bit", "fp8_e4m3", "turbo4", "kv4"),
)
"""What ``--recall all`` asks."""

LENGTHS = (2048, 8192)
"""Tokens of what is asked for in `Recall`."""


class Recall:
    """Copies, values by key, sentences in long texts and in chats, asked of caches.

    The texts that they are in are the windows joined, int32 ``[n, T + 1]`` by the text's name.
    """

    def __init__(
        self,
        decoder: models.Decoder,
        tokenizer: models.Tokenizer,
        windows: dict[str, np.ndarray],
    ) -> None:
        self.decoder = decoder
        self.measure = RecallMeasure(
            {name: x.reshape(-1).tolist() for name, x in windows.items()},
            tokenizer,
            lengths=LENGTHS,
            depths=(0.0, 0.25, 0.5, 0.75, 1.0),
            count=4,
            seed=0,
            max_length=decoder.config.max_length,
            batch_size=10,
        )

    def row(self, name: str) -> dict[str, Any]:
        """What `RecallMeasure` says of the cache of this name."""
        method = evaluation.method(name, self.decoder.config)
        return self.measure(self.decoder, method, lambda done, total: None)


class Caches:
    """A model's exact runs over windows ``[n, T + 1]`` by the text's name, shared by all caches."""

    def __init__(
        self,
        decoder: models.Decoder,
        windows: dict[str, np.ndarray],
        decoded: int = DECODED,
    ) -> None:
        self.decoder = decoder
        self.runs = {
            name: evaluation.ExactRun(
                decoder, tokens, prompt=tokens.shape[1] - 1 - decoded, batch_size=24
            )
            for name, tokens in windows.items()
        }

    def row(self, name: str) -> dict[str, Any]:
        """What the cache of this name costs in bits per token, and its size."""
        method = evaluation.method(name, self.decoder.config)
        scores = {
            text: evaluation.score(self.decoder, run.tokens, method, prompt=run.prompt, exact=run)
            for text, run in self.runs.items()
        }
        costs = {text: (s.bits - s.exact_bits).mean(axis=1) for text, s in scores.items()}
        every, found = np.concatenate(list(costs.values())), list(scores.values())
        # A file may say something else later.
        of_file = {}
        if isinstance(method.cache, tuple):
            of_file = {"layers": [str(kind) for kind in method.cache]}
        return {
            **of_file,
            "cost": float(every.mean()),
            "interval": evaluation.bootstrap(every).ends,
            "cost_by_text": {text: float(x.mean()) for text, x in costs.items()},
            "exact_bits": float(np.mean([s.exact_bits.mean() for s in found])),
            "divergence": float(np.mean([s.divergence.mean() for s in found])),
            "same_choice": float(np.mean([(s.choices == s.exact_choices).mean() for s in found])),
            "compression": found[0].exact_cache_bytes / found[0].cache_bytes,
            "decoded": found[0].bits.shape[1],
        }


def read_windows(model: str, tokens: int, count: int, skip: int = 0) -> dict[str, np.ndarray]:
    """int32 ``[n, tokens + 1]``, up to `count` each: prose, Python's reference; and held-out code.

    The first `skip` are left out: what is chosen by the others is not tuned on these.
    """
    from pydoc_data import topics

    library = Path(sysconfig.get_path("stdlib"))
    paths = [library / name for name in models.held_out_modules()]
    texts = {
        "prose": "\n\n".join(topics.topics[name] for name in sorted(topics.topics)),
        "code": "\n\n".join(path.read_text("utf-8") for path in paths if path.is_file()),
    }
    tokenizer, found = load_tokenizer(model), {}
    for name, text in texts.items():
        stream = np.asarray(tokenizer.encode(text), np.int32)
        whole = len(stream) // (tokens + 1)
        found[name] = stream[: whole * (tokens + 1)].reshape(whole, tokens + 1)[skip:][:count]
    return found


def _measure(
    rows: Caches | Recall, names: str, every: Sequence[str], result: Any, place: str, out: Path
) -> None:
    """The rows of some caches, or of ``all``, that the result does not have yet."""
    for name in every if names == "all" else names.split(","):
        if name not in result[place]:
            result[place][name] = rows.row(name)
            stored.write(out, result)
            print(name, result[place][name], flush=True)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = stored.parser(__doc__)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--tokens", type=int, default=4096, help="of a window")
    parser.add_argument("--windows", type=int, default=24, help="of each text, at most")
    parser.add_argument("--skip", type=int, default=0, help="the first windows of each text")
    parser.add_argument("--caches", default="all", help="comma separated")
    parser.add_argument("--recall", default="", help="comma separated: what these find again")
    given = parser.parse_args(arguments)
    if given.skip < 0:
        parser.error(f"--skip {given.skip} must be at least 0")
    here = machine.describe()
    old = stored.previous(given.out, here)
    windows = read_windows(given.model, given.tokens, given.windows, given.skip)
    settings = {
        "model": Path(given.model).name,
        "tokens": given.tokens,
        "prompt": given.tokens // 2,
        "windows": {name: len(x) for name, x in windows.items()},
        **({"skipped": given.skip} if given.skip else {}),
    }
    if old is not None and old["settings"] != settings:
        parser.error(f"{given.out} is of other settings: {old['settings']}, not {settings}")
    result = {**here, "settings": settings}
    result |= {place: {} if old is None else old.get(place, {}) for place in ("caches", "recall")}
    dtype = "float32" if jax.default_backend() == "cpu" else "bfloat16"
    decoder = models.load_decoder(given.model, dtype=dtype)
    if given.recall:
        recall = Recall(decoder, load_tokenizer(given.model), windows)
        _measure(recall, given.recall, RECALLED, result, "recall", given.out)
    else:
        rows = Caches(decoder, windows, min(DECODED, given.tokens // 2))
        _measure(rows, given.caches, CACHES, result, "caches", given.out)


def caches_table(name: str, result: Result) -> str:
    """What caches cost, with intervals, on each text, that of the least loss first; their sizes."""
    rows = result["caches"]
    lines = [
        [*cost_cells(f"`{cache}`", rows[cache]), f"{rows[cache]['compression']:.2f}x"]
        for cache in sorted(rows, key=lambda x: rows[x]["cost"])
    ]
    header = ["cache", *cost_header(rows), "smaller"]
    return f"{tables.table(header, lines)}\n\n{tables.source(name, result)}"


def recall_table(name: str, result: Result) -> str:
    """Bits per token of right answers at the longest context, and how many are written whole."""
    rows = result["recall"]
    kinds = [kind for kind in _ASKED if kind in next(iter(rows.values()))]
    longest = max(cell["length"] for cell in next(iter(rows.values()))[kinds[0]]["cells"])
    lines = [
        [f"`{cache}`", *(_recalled(row[kind], longest) for kind in kinds)]
        for cache, row in rows.items()
    ]
    header = [f"{longest:,} tokens", *(_ASKED[kind] for kind in kinds)]
    return f"{tables.table(header, lines)}\n\n{tables.source(name, result)}"


_ASKED = {
    "copy": "copy",
    "key_value": "value of a key",
    "needle": "sentence in a text",
    "chat": "sentence in a chat",
}


def _recalled(row: Result, length: int) -> str:
    cells = [cell for cell in row["cells"] if cell["length"] == length]
    bits, whole = (np.mean([cell[x] for cell in cells]) for x in ("bits", "whole"))
    return f"{bits:.2f} ({whole:.0%})"


def cost_header(rows: Result) -> list[str]:
    texts = next(iter(rows.values()))["cost_by_text"]
    return ["bits per token [95 %]", *texts, "KL", "same choice"]


def cost_cells(label: str, row: Result) -> list[str]:
    ends = row["interval"]
    interval = f" [{ends[0]:+.4f}, {ends[1]:+.4f}]" if ends else ""
    return [
        label,
        f"{row['cost']:+.4f}{interval}",
        *(f"{x:+.4f}" for x in row["cost_by_text"].values()),
        f"{row['divergence']:.4f}",
        f"{row['same_choice']:.1%}",
    ]


SHOWN = (
    Shown(("real_caches",), {"real caches": caches_table}),
    Shown(("real_caches_other",), {"real caches other": caches_table}),
    Shown(("real_recall",), {"real recall": recall_table}),
)


if __name__ == "__main__":
    main()
