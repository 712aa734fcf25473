"""Attributes what a 4-bit cache costs to its parts, and tries repairs, on a real language model.

`python -m benchmarks.attribution --model smollm2 --out benchmarks/results/attribution_DATE.json`

Windows of text pass the model once for each row; a file that is there is gone on with. On one H200
48 windows of 4,096 tokens take 6 s a row. With ``--caches 4bit,kivi4``, or ``all``, the rows are
these caches, as they are used, in place of simulations; a name may be a file's that
`turbojax calibrate` wrote. With ``--recall`` the rows are what is found again through them.
"""

import functools
import math
import sysconfig
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from rich.progress import Progress

from benchmarks import machine, stored
from benchmarks.attribution.attending import Variant
from benchmarks.attribution.rows import GROUPS
from turbojax import evaluation, models
from turbojax.evaluation.recall import RecallMeasure
from turbojax.evaluation.texts import bootstrap
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


@functools.partial(jax.jit, static_argnames=("graph", "variant"))
def _log_probabilities(
    graph: Any, state: Any, tokens: jax.Array, is_on: jax.Array, variant: Variant
) -> jax.Array:
    """Of the next token at the steps that are decoded: ``[B, T / 2, V]``."""
    logits, _ = nnx.merge(graph, state)(tokens, attend=variant, caches=is_on)
    return jax.nn.log_softmax(logits[:, tokens.shape[1] // 2 :], axis=-1)


@jax.jit
def _compare(got: jax.Array, exact: jax.Array, targets: jax.Array) -> tuple[jax.Array, ...]:
    """Bits of the targets, those of the exact model, the divergence, whether choices are equal."""
    bits = (
        jnp.take_along_axis(x, targets[..., None], axis=-1)[..., 0] * (-1 / math.log(2))
        for x in (got, exact)
    )
    divergence = jnp.sum(jnp.exp(exact) * (exact - got), axis=-1) * (1 / math.log(2))
    return (*bits, divergence, jnp.argmax(got, axis=-1) == jnp.argmax(exact, axis=-1))


class Subject:
    """A model and its windows; exact log-probabilities are computed once."""

    def __init__(
        self, model: models.Transformer, windows: dict[str, np.ndarray], batch: int
    ) -> None:
        self.layers = model.config.num_layers
        self.graph, self.state = nnx.split(model)
        self.windows, self.batch = windows, batch
        self._exact: dict[tuple[str, int], np.ndarray] = {}

    def row(self, variant: Variant, samples: int = 2000) -> dict[str, Any]:
        is_on = jnp.asarray([not variant.layers or i in variant.layers for i in range(self.layers)])
        run = functools.partial(_log_probabilities, self.graph, self.state)
        exact = Variant("exact", key="exact", value="exact", products=False)
        found: dict[str, list[list[np.ndarray]]] = {}
        for name, windows in self.windows.items():
            for first in range(0, len(windows), self.batch):
                part = jnp.asarray(windows[first : first + self.batch])
                inputs, key = part[:, :-1], (name, first)
                if key not in self._exact:
                    everywhere = jnp.ones(self.layers, bool)
                    self._exact[key] = np.asarray(run(inputs, everywhere, exact))
                targets = part[:, inputs.shape[1] // 2 + 1 :]
                compared = _compare(run(inputs, is_on, variant), self._exact[key], targets)
                found.setdefault(name, []).append([np.asarray(x) for x in compared])
        joined = {
            name: [np.concatenate(x) for x in zip(*parts, strict=True)]
            for name, parts in found.items()
        }
        costs = {name: (x[0] - x[1]).mean(axis=1) for name, x in joined.items()}
        every = np.concatenate(list(costs.values()))
        return {
            "cost": float(every.mean()),
            "interval": bootstrap(every, samples=samples).ends,
            "cost_by_text": {name: float(x.mean()) for name, x in costs.items()},
            "exact_bits": float(np.mean([x[1].mean() for x in joined.values()])),
            "divergence": float(np.mean([x[2].mean() for x in joined.values()])),
            "same_choice": float(np.mean([x[3].mean() for x in joined.values()])),
        }


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
    parser.add_argument("--tokens", type=int, default=4096, help="of a window; a multiple of 128")
    parser.add_argument("--windows", type=int, default=24, help="of each text, at most")
    parser.add_argument("--skip", type=int, default=0, help="the first windows of each text")
    parser.add_argument("--batch", type=int, default=2, help="windows that run at once")
    parser.add_argument("--rows", type=int, help="the first rows of each group alone")
    parser.add_argument("--caches", default="", help="comma separated: these, and no simulations")
    parser.add_argument("--recall", default="", help="comma separated: what these find again")
    given = parser.parse_args(arguments)
    if given.tokens < 128 or given.tokens % 128:
        parser.error(f"--tokens {given.tokens} must be a positive multiple of 128")
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
    result = {**here, "settings": settings, "rows": {} if old is None else old["rows"]}
    result["caches"] = {} if old is None else old.get("caches", {})
    result["recall"] = {} if old is None else old.get("recall", {})
    if given.caches or given.recall:
        dtype = "float32" if jax.default_backend() == "cpu" else "bfloat16"
        decoder = models.load_decoder(given.model, dtype=dtype)
        if given.caches:
            rows: Any = Caches(decoder, windows, min(DECODED, given.tokens // 2))
            _measure(rows, given.caches, CACHES, result, "caches", given.out)
        if given.recall:
            rows = Recall(decoder, load_tokenizer(given.model), windows)
            _measure(rows, given.recall, RECALLED, result, "recall", given.out)
        return
    with jax.default_matmul_precision("highest"):
        decoder = models.load(given.model, dtype="float32")
        subject = Subject(decoder, windows, given.batch)
        variants = [v for group in GROUPS.values() for v in group[: given.rows]]
        with Progress() as progress:
            task = progress.add_task("rows", total=len(variants))
            for variant in variants:
                if variant.name not in result["rows"]:
                    result["rows"][variant.name] = subject.row(variant)
                    stored.write(given.out, result)
                progress.advance(task, 1)


if __name__ == "__main__":
    main()
