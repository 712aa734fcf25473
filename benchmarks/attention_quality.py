"""What 8-bit attention costs on real text: mode x softmax x block, without a cache.

`python -m benchmarks.attention_quality --out benchmarks/results/attention_quality.json`

The embedded model reads whole windows of the held-out modules, causally, and `turbo_attention`
attends in every layer. The cost is what it adds to the bits of exact attention: the same model in
bfloat16, whose queries, keys and values attend in float32. ``bfloat16`` is what a user would run
instead. The error is that of the attention's output, on random normal tensors and on the queries,
keys and values of each layer.

Kernels are those that dispatch takes, so a result is of its device. `--quick` is a small sample of
the same: does everything run?
"""

import concurrent.futures
import functools
import itertools
import math
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, get_args

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from rich.progress import Progress

from benchmarks import stored, summary, tables
from benchmarks.cache_quality import held_out_windows, mean_and_error
from turbojax import SAS, TurboConfig, models
from turbojax._environment import environment
from turbojax.attention.options import PLAIN
from turbojax.attention.turbo.api import ATTENTION
from turbojax.caches.whole import WholeAttention, attend_within
from turbojax.numerics.config import Mode

SOFTMAXES: dict[str, Any] = {"exact": "exact", "sas": SAS(), "sas2": SAS(base="2")}
BLOCKS = (64, 128)
MODES = tuple(mode for mode in get_args(Mode) if mode != "float")
QUICK = {"context": 160, "per_file": 1}
# Plain float32 in blocks: what everything is compared with.
_EXACT = TurboConfig(mode="float", softmax="exact", block_q=512, block_kv=512, buffer_size=512)
_HeadTensors = tuple[jax.Array, jax.Array, jax.Array]


def config_of(mode: str, softmax: str, block: int) -> TurboConfig:
    """The configuration of a row, which is called ``mode-softmax-block``."""
    made: Any = {"mode": mode, "softmax": SOFTMAXES[softmax]}
    return TurboConfig(**made, block_q=block, block_kv=block)


def rows() -> dict[str, WholeAttention]:
    """What is measured, by name: attention in the model's dtype, then every combination."""
    every = itertools.product(MODES, SOFTMAXES, BLOCKS)
    return {"bfloat16": "exact"} | {f"{m}-{s}-{b}": config_of(m, s, b) for m, s, b in every}


def exact_attention(query: jax.Array, key: jax.Array, value: jax.Array) -> jax.Array:
    """Causal attention in float32; ``[B, T, N, H]`` in the query's dtype."""
    wide = (x.astype(jnp.float32) for x in (query, key, value))
    return attend_within(*wide, None, _EXACT, implementation="xla").astype(query.dtype)


def attend_by(attention: WholeAttention | None) -> models.Attend:

    def attend(query, key, value, cache=None, options=None):  # type: ignore[no-untyped-def]
        del options  # the embedded model's layers have neither windows nor caps
        if attention is None:
            return exact_attention(query, key, value), cache
        return attend_within(query, key, value, None, attention), cache

    return attend


@functools.partial(jax.jit, static_argnames=("graph", "attention"))
def _bits(
    state: Any, batches: jax.Array, *, graph: Any, attention: WholeAttention | None
) -> jax.Array:
    """Bits of every target of windows ``[n, b, T + 1]``, one batch after the other."""
    model, attend = nnx.merge(graph, state), attend_by(attention)

    def score(tokens: jax.Array) -> jax.Array:
        log_p = jax.nn.log_softmax(model(tokens[:, :-1], attend=attend), axis=-1)
        chosen = jnp.take_along_axis(log_p, tokens[:, 1:, None], axis=-1)[..., 0]
        return chosen * (-1 / math.log(2))

    return jax.lax.map(score, batches)


def layer_tensors(model: models.Transformer, tokens: jax.Array) -> _HeadTensors:
    """Queries, keys and values ``[layers, T, heads, H]`` of one window, under exact attention."""

    def attend(query, key, value, cache, options=None):  # type: ignore[no-untyped-def]
        del cache, options
        return exact_attention(query, key, value), (query, key, value)

    nothing = jnp.zeros(model.config.num_layers)
    _, found = model(tokens[None], attend=attend, caches=nothing)
    query, key, value = (x[:, 0] for x in found)
    return query, key, value


def with_random(tensors: _HeadTensors) -> _HeadTensors:
    """The layers' tensors, and one more "layer" of random normal numbers."""

    def add(x: jax.Array, key: jax.Array) -> jax.Array:
        # Drawn in float32: bfloat16's have no tails.
        numbers = jax.random.normal(key, (1, *x.shape[1:]), jnp.float32)
        return jnp.concatenate([x, numbers.astype(x.dtype)])

    query, key, value = map(add, tensors, jax.random.split(jax.random.key(0), 3))
    return query, key, value


@functools.partial(jax.jit, static_argnames="attention")
def _errors(
    tensors: _HeadTensors, want: jax.Array, *, attention: WholeAttention
) -> tuple[jax.Array, jax.Array]:
    """Relative L1 and L2 of each layer's output ``[layers]``."""
    got = attend_within(*tensors, None, attention).astype(jnp.float32)
    axes = (1, 2, 3)
    l1 = jnp.sum(jnp.abs(got - want), axes) / jnp.sum(jnp.abs(want), axes)
    l2 = jnp.sum((got - want) ** 2, axes) / jnp.sum(want**2, axes)
    return l1, jnp.sqrt(l2)


def _facts_of_errors(l1: jax.Array, l2: jax.Array) -> dict[str, Any]:
    by_layer = {"relative_l1": np.asarray(l1), "relative_l2": np.asarray(l2)}
    return {
        "random": {name: float(x[-1]) for name, x in by_layer.items()},
        "by_layer": {name: [round(float(e), 6) for e in x[:-1]] for name, x in by_layer.items()},
    }


def _implementation(tensors: _HeadTensors, attention: WholeAttention) -> str | None:
    """What dispatch takes here."""
    if not isinstance(attention, TurboConfig):
        return None
    names = ("query", "key", "value")
    static = {"config": attention, "options": PLAIN.complete(tensors[0].shape[-1])}
    return ATTENTION.select(None, **dict(zip(names, tensors, strict=True)), **static).name


def measure(
    context: int,
    per_file: int,
    batch: int,
    dtype: Any,
    progress: Progress,
    pattern: str = "",
    on_row: Callable[[str, dict[str, Any]], None] = lambda *_: None,
) -> dict[str, Any]:
    model = models.load(dtype=dtype)
    cut = held_out_windows(context, per_file)
    tokens = np.concatenate(list(cut.values()))
    batch = math.gcd(batch, len(tokens))
    batches = jnp.asarray(tokens.reshape(-1, batch, tokens.shape[1]))
    graph, state = nnx.split(model)

    def by_windows(scores: jax.Array) -> np.ndarray:
        return np.asarray(scores).reshape(len(tokens), -1).mean(axis=1, dtype=np.float64)

    found = {name: attention for name, attention in rows().items() if re.search(pattern, name)}
    task = progress.add_task("exact", total=len(found) + 1)
    exact = by_windows(_bits(state, batches, graph=graph, attention=None))
    tensors = with_random(layer_tensors(model, jnp.asarray(tokens[0, :-1])))
    want = exact_attention(*(x.astype(jnp.float32) for x in tensors))
    measured: dict[str, Any] = {}

    def programs(attention: WholeAttention) -> tuple[Any, Any]:
        scoring = _bits.lower(state, batches, graph=graph, attention=attention)
        return scoring.compile(), _errors.lower(tensors, want, attention=attention).compile()

    # Nearly all of the time is compilation, which other threads can do.
    pool = concurrent.futures.ThreadPoolExecutor()
    compiled = {name: pool.submit(programs, attention) for name, attention in found.items()}
    for name, attention in found.items():
        progress.update(task, advance=1, description=name)
        bits, errors = compiled[name].result()
        by_window = by_windows(bits(state, batches))
        mean, error = mean_and_error(by_window - exact)
        measured[name] = {
            "implementation": _implementation(tensors, attention),
            "bits_per_byte": float(by_window.mean()),
            "cost": mean,
            "cost_standard_error": error,
            "cost_by_window": [round(float(x), 6) for x in by_window - exact],
            **_facts_of_errors(*errors(tensors, want)),
        }
        on_row(name, measured[name])
    pool.shutdown()
    progress.advance(task)
    return {
        "modules": len(cut),
        "windows": len(tokens),
        "context": context,
        "dtype": jnp.dtype(dtype).name,
        "shape": list(tensors[0].shape[1:]),
        "kv_heads": tensors[1].shape[2],
        "exact_bits_per_byte": float(exact.mean()),
        "attention": measured,
    }


def main(arguments: Sequence[str] | None = None) -> None:
    parser = stored.parser(__doc__.splitlines()[0], required=False, quick=True)
    parser.add_argument("--context", type=int, default=4096, help="bytes of a window")
    parser.add_argument("--windows-per-file", type=int, default=4)
    parser.add_argument("--batch", type=int, default=8, help="windows that run at once")
    parser.add_argument("--dtype", default="bfloat16", choices=("float32", "bfloat16"))
    parser.add_argument("--rows", default="", help="only rows whose names this expression finds")
    given = parser.parse_args(arguments)
    sizes = {"context": given.context, "per_file": given.windows_per_file}
    with Progress() as progress:
        result = measure(
            **(QUICK if given.quick else sizes),
            batch=given.batch,
            dtype=given.dtype,
            progress=progress,
            pattern=given.rows,
            on_row=lambda name, row: progress.console.print(
                f"{name}: {row['cost']:+.5f} ± {row['cost_standard_error']:.5f}, random L1 "
                f"{row['random']['relative_l1']:.4f}, layers "
                f"{min(row['by_layer']['relative_l1']):.4f} to "
                f"{max(row['by_layer']['relative_l1']):.4f}",
                highlight=False,
            ),
        )
    stored.save(given.out, {**environment(), **result})


def numerics_table(results: Path) -> str:
    """Speed, error and cost of every row, from the newest results."""
    figures = summary.Figures(results)
    quality = figures.result("attention_quality")
    default, lines = TurboConfig(), []
    for name, row in quality["attention"].items():
        if name == "bfloat16":
            continue
        mode, softmax, block = name.split("-")
        speeds = [figures.speed("hopper", place.format(name)) for place in _PLACES]
        cost = f"{row['cost']:+.4f} ± {row['cost_standard_error']:.4f}"
        layers = row["by_layer"]["relative_l2"]
        errors = [f"{row['random']['relative_l2']:.3f}", f"{min(layers):.3f} to {max(layers):.3f}"]
        line = [f"`{mode}`", _SOFTMAX_NAMES[softmax], block, *speeds, *errors, cost]
        is_default = config_of(mode, softmax, int(block)) == default
        lines.append([f"**{cell}**" for cell in line] if is_default else line)
    header = [
        *("mode", "softmax", "block", "over cuDNN", "causal", "error, random", "error, layers"),
        "bits per byte",
    ]
    exact = quality["attention"].get("bfloat16")
    plain = (
        f" Exact attention in bfloat16: {exact['cost']:+.4f} ± {exact['cost_standard_error']:.4f}."
        if exact
        else ""
    )
    note = (
        f"{quality['windows']} windows of {quality['context']:,} bytes, at most "
        f"{-(-quality['windows'] // quality['modules'])} of each of {quality['modules']} modules."
    )
    return f"{tables.table(header, lines)}\n\n{note}{plain} {figures.devices()}"


_SOFTMAX_NAMES = {"exact": "exact", "sas": "SAS", "sas2": "SAS, base 2"}
# Speeds are of whole calls: 2 sequences of 8k tokens, full and causal.
_PLACES = tuple(
    f"prefill/llama3-8b/b2-s8192{causal}/turbo-{{}}/mosaic_gpu" for causal in ("", "-causal")
)


if __name__ == "__main__":
    main()
