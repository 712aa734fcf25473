"""One decode step of whole models of several families, through caches of several kinds.

Real shapes, random weights, caches filled with random tokens. The time of a step is wall time, of
many steps in a row that are waited for once, as in generation; that of its kernels is reported
beside it. What one would run instead is the faster of the exact cache (cuDNN where it can, else
XLA) and of pages of tokens as they are (Triton).
"""

import dataclasses
import functools
import gc
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks import plots, tables, timing
from benchmarks.measuring import steps
from benchmarks.measuring.steps import Lower
from benchmarks.measuring.work import Needs
from benchmarks.suite import (
    Asked,
    Latest,
    Measure,
    Rows,
    Suite,
    each,
    joined,
    kernel_facts,
    over_baselines,
    temporary_bytes,
    with_figure,
)
from benchmarks.tables import Result, Row
from turbojax import models
from turbojax.caches import LayerCache, cache_by_name, init_layer_cache
from turbojax.models.generation import session as generation
from turbojax.models.generation.caching import init_caches, windows_of_layers

if TYPE_CHECKING:
    from matplotlib.figure import Figure

OPERATION = "model-decode"
CACHES = {
    "exact": "exact, bf16",
    "paged": "pages, bf16",
    "fp8_e4m3": "fp8 pages, e4m3",
    "turbo4": "turbo4 pages",
    "4bit": "4-bit",
    "k8v4": "K8V4",
}
"""Kinds of caches, and what tables call them."""
UNCOMPRESSED = {"exact": "over exact", "paged": "over pages"}
PLOT = (
    "families_speed.png",
    "Decode steps of whole models: speed over the faster uncompressed cache",
)

Fill = Mapping[int | None, Callable[..., Any]]
"""Compiled functions that fill some sequences of a layer's cache, by the layer's window."""

# Sequences that are filled at a time.
_FILLED_AT_A_TIME = 4
# As many as the buffer of a progressive cache holds: it is compressed once.
_STEPS = 64
_LEAST_STEPS, _MOST_SECONDS = 20, 2.5
_KERNEL_STEPS = 3
# One before the clock starts, one to see how long it takes, one before kernels are timed.
_OTHER_STEPS = 2 + _KERNEL_STEPS + 1
# Rounding changes logits by a tenth or so; a wrong output by about 1.
_WRONG = 0.5


@dataclasses.dataclass(frozen=True)
class Group:
    """A model of `models.SHAPES`, whose caches can hold `tokens` tokens of `batch` sequences."""

    model: str
    batch: int
    tokens: int

    cases = ("exact", "paged", "fp8_e4m3", "k8v4", "turbo4", "4bit")

    def name(self, cache: str) -> str:
        """``model-decode/gemma-2-9b/b16-s8192/turbo4``."""
        return joined(OPERATION, self.model, self.label, cache)

    def describe(self, cache: str) -> Row:
        config = self.config
        options = {config.attention_options(layer) for layer in range(config.num_layers)}
        return {
            "operation": OPERATION,
            "label": self.label,
            "method": cache,
            "model": self.model,
            "batch": self.batch,
            "tokens": self.tokens,
            "layers": config.num_layers,
            "heads": config.num_heads,
            "kv_heads": config.num_kv_heads,
            "head_dim": config.head_dim,
            "windows": sorted({x.local_window_size for x in options if x.local_window_size}),
            "all_layers_have_windows": all(x.local_window_size for x in options),
            "soft_cap": config.attention_soft_cap,
        }

    @property
    def label(self) -> str:
        """``b16-s8192``."""
        return f"b{self.batch}-s{self.tokens}"

    @property
    def config(self) -> models.TransformerConfig:
        return models.SHAPES[self.model]

    @property
    def held(self) -> int:
        """Tokens that caches hold before the first step, so that all steps fit."""
        return self.tokens - _STEPS - _OTHER_STEPS

    def kind(self, cache: str) -> models.CacheKind:
        return cache_by_name(cache, self.config.num_kv_heads)


def _groups() -> list[Group]:
    """At most the model's context."""
    names = (
        "llama-3.1-8b",
        "mistral-7b",
        "qwen-2.5-7b",
        "gemma-2-9b",
        "gemma-3-4b",
        "phi-3-mini",
    )
    return [Group(name, 16, min(8192, models.SHAPES[name].max_length)) for name in names]


def begin(rows: Rows, asked: Asked) -> Measure:
    """Compiles all steps before anything is measured, see `suite.each`.

    `repetitions` are steps that are timed, at most 64.
    """
    compiled = steps.compile_rows(rows, _lowerings)
    inputs = Latest(Inputs)

    def measured(group: Group, cache: str) -> Row:
        gc.collect()  # what the last row made
        made: Inputs = inputs.of(group)
        step, *found = (future.result() for future in compiled.pop((group, cache)))
        fill = dict(zip(dict.fromkeys(_windows(group, cache)), found, strict=True))
        return measure(made, cache, step, fill, asked)

    return measured


def _windows(group: Group, cache: str) -> tuple[int | None, ...]:
    """For every layer what its cache must keep; None for all tokens."""
    config = group.config
    return windows_of_layers(config, (group.kind(cache),) * config.num_layers)


def _lowerings(group: Group, cache: str) -> list[Lower]:
    """What lowers a step, and what fills its layers' caches, one for each window."""
    fills = [
        functools.partial(_lower_fill, group, cache, window)
        for window in dict.fromkeys(_windows(group, cache))
    ]
    return [functools.partial(_lower, group, cache), *fills]


def _lower(group: Group, cache: str) -> jax.stages.Lowered:

    def arguments() -> tuple[Any, ...]:
        model = models.random_decoder(group.config)
        caches = init_caches(model, group.batch, group.tokens, group.kind(cache))
        return model, (caches, jnp.zeros(group.batch, jnp.int32)), _tokens(group)

    return jax.jit(_step, donate_argnums=1).lower(*jax.eval_shape(arguments))


def _lower_fill(group: Group, cache: str, window: int | None) -> jax.stages.Lowered:
    layer = jax.eval_shape(functools.partial(_empty, group, group.kind(cache), window))
    number, first = jnp.uint32(0), jnp.int32(0)
    return steps.fill.lower(
        layer,
        number,
        first,
        count=min(group.batch, _FILLED_AT_A_TIME),
        tokens=group.held,
        kv_heads=group.config.num_kv_heads,
        head_dim=group.config.head_dim,
        dtype=jnp.dtype(jnp.bfloat16),
    )


def _empty(group: Group, kind: models.CacheKind, window: int | None) -> LayerCache:
    config = group.config
    sizes = (group.batch, group.tokens, config.num_kv_heads, config.head_dim)
    return init_layer_cache(*sizes, kind=kind, dtype=jnp.bfloat16, local_window_size=window)


def _step(
    model: models.Decoder, state: tuple[models.ModelCaches, jax.Array], tokens: jax.Array
) -> tuple[jax.Array, tuple[models.ModelCaches, jax.Array]]:
    caches, lengths = state
    caches, logits, lengths = generation.decode_step(
        model, caches, tokens, lengths, implementation=None
    )
    return logits, (caches, lengths)


def _tokens(group: Group) -> jax.Array:
    rng = np.random.default_rng(0)
    return jnp.asarray(rng.integers(group.config.vocab_size, size=group.batch, dtype=np.int32))


class Inputs:
    """A model's weights, and what its first step gives with the exact cache once that is known."""

    def __init__(self, group: Group) -> None:
        self.group = group
        self.model = jax.block_until_ready(models.random_decoder(group.config))
        self.exact: jax.Array | None = None

    def caches(self, cache: str, fill: Fill) -> models.ModelCaches:
        group = self.group
        layers = []
        for number, window in enumerate(_windows(group, cache)):
            layer = _empty(group, group.kind(cache), window)
            for first in range(0, group.batch, min(group.batch, _FILLED_AT_A_TIME)):
                layer = fill[window](layer, jnp.uint32(number), jnp.int32(first))
            layers.append(layer)
        return jax.block_until_ready(models.ModelCaches(tuple(layers)))


def measure(
    inputs: Inputs,
    cache: str,
    compiled: Callable[..., Any],
    fill: Fill,
    asked: Asked,
) -> Row:
    """Times steps of the model through a full cache."""
    group = inputs.group
    caches = inputs.caches(cache, fill)
    cache_bytes, lengths = caches.nbytes, jnp.full(group.batch, group.held, jnp.int32)
    call = steps.Steps(compiled, inputs.model, (caches, lengths), _tokens(group))
    needed = _needed_bytes(inputs.model, caches)
    del caches
    logits = jax.block_until_ready(call())
    facts: Row = {}
    if inputs.exact is not None or cache == "exact":
        facts["relative_l2"] = steps.difference(
            logits, logits if inputs.exact is None else inputs.exact
        )
        if facts["relative_l2"] > _WRONG:
            raise ArithmeticError(f"the logits are wrong: relative L2 {facts['relative_l2']}")
    if cache == "exact":
        inputs.exact = logits
    seconds = timing._wall(call, 1)
    count = asked.repetitions or max(_LEAST_STEPS, min(_STEPS, round(_MOST_SECONDS / seconds)))
    count = min(count, _STEPS)
    seconds = timing._wall(call, count)
    microseconds = 1e6 * seconds
    needs = Needs(needed, 0.0, "bf16")
    return {
        "status": "ok",
        "us": microseconds,
        "clock": "wall",
        "repetitions": count,
        "first_length": group.held + 2,
        "tokens_per_second": group.batch / seconds,
        "cache_bytes": cache_bytes,
        "weight_bytes": inputs.model.nbytes,
        **temporary_bytes(compiled),
        **needs.facts(microseconds, asked.ceilings),
        **facts,
        **_kernels(call),
    }


def _needed_bytes(model: models.Decoder, caches: models.ModelCaches) -> float:
    """Bytes that a step reads: weights (a few rows of the embeddings), and what windows show."""
    needed = float(model.nbytes)
    if model.lm_head is not None:
        needed -= timing.nbytes(model.embedding)
    for i, layer in enumerate(caches.layers):
        window = model.config.attention_options(i).local_window_size
        held = getattr(layer, "room", caches.max_length)
        share = 1.0 if window is None else min(1.0, window / held)
        needed += share * layer.nbytes
    return needed


def _kernels(call: steps.Steps) -> Row:
    """Time of a step on the device, the median of some, and its longest kernels."""
    kernels = timing._cupti(call, _KERNEL_STEPS) if timing.on_gpu() else None
    if kernels is None:
        return {"device_us": None, "kernels": []}
    totals = [sum(us for _, us in launches) for launches in kernels]
    longest = timing._by_kernel(kernels)
    return {
        "device_us": float(np.median(totals)),
        "kernels": kernel_facts(longest),
    }


_PLACE = ("model", "label")
_over = over_baselines({OPERATION: tuple(UNCOMPRESSED)}, "method", ("operation", *_PLACE))
_smaller = with_figure(
    "smaller_than_exact",
    "exact",
    _PLACE,
    lambda row, base: base["cache_bytes"] / row["cache_bytes"],
)


def with_ratios(rows: list[Row]) -> list[Row]:
    """The rows with what they are over uncompressed caches: in speed, and in bytes."""
    return _smaller(_over(rows))


# What the docs show -------------------------------------------------------------------------------


def attention(row: Row) -> str:
    """What a model's attention is like: ``16 heads on 8 of 256, windows of 4,096, cap 50``."""
    parts = [f"{row['heads']} heads on {row['kv_heads']} of {row['head_dim']}"]
    if row["windows"]:
        sizes = " and ".join(f"{size:,}" for size in row["windows"])
        some = "" if row["all_layers_have_windows"] else " in some layers"
        parts.append(f"windows of {sizes}{some}")
    if row["soft_cap"] is not None:
        parts.append(f"scores capped at {row['soft_cap']:g}")
    return ", ".join(parts)


_NAMES = (
    ("model", lambda row: row["model"]),
    ("batch x tokens", tables.batch_and_tokens),
    ("cache", lambda row: CACHES[row["method"]]),
)
_COLUMNS = (
    ("ms a step", tables.shown_as("us", "{:.2f}", 1e3)),
    *tables.over(UNCOMPRESSED),
    ("kernels, ms", tables.shown_as("device_us", "{:.2f}", 1e3)),
    ("tokens per second", tables.shown_as("tokens_per_second", "{:,.0f}")),
    ("cache, GB", tables.shown_as("cache_bytes", "{:.2f}", 1e9)),
    ("smaller", tables.shown_as("smaller_than_exact", "{:.2f}x")),
    ("of bandwidth", tables.shown_as("percent_of_ceiling", "{:.0f} %")),
    ("logits, relative L2", tables.shown_as("relative_l2", "{:.3f}")),
)


def families_table(result: Result) -> str:
    return tables.operation_table(result, OPERATION, _NAMES, _COLUMNS)


def _shapes_sentence(result: Result) -> str:
    rows = {row["model"]: row for row in result["rows"]}
    said = "; ".join(f"{model}: {attention(row)}" for model, row in rows.items())
    return f"Attention: {said}. "


def summary_table(result: Result) -> str:
    """Milliseconds of a step by model, and how much smaller the caches are."""
    places = {
        f"{model}, {tables.batch_and_tokens(next(iter(rows.values())))}": rows
        for model, rows in _by_model(result).items()
    }
    measured = {cache for rows in places.values() for cache in rows}
    titles = {cache: title for cache, title in CACHES.items() if cache in measured}
    return tables.pivot("model, batch x tokens", places, titles, _time_and_size)


def _time_and_size(row: Row) -> str:
    text, cache = f"{row['us'] / 1e3:.1f} ms", row["method"]
    if cache == "exact":
        return f"{text}, {row['cache_bytes'] / 1e9:.1f} GB"
    if cache == "paged" or "smaller_than_exact" not in row:
        return text
    smaller = f"{row['smaller_than_exact']:.1f}x smaller"
    return f"{tables.with_ratio(text, _over_uncompressed(row))}, {smaller}"


_SUMMARY = (
    "One decode step of the whole model, all layers and logits: wall time of many in a row, "
    "random weights, full caches. In brackets the speed over that of the faster uncompressed "
    "cache: the exact one, which is cuDNN's attention where a model has neither windows nor "
    "caps nor heads wider than 128 and otherwise XLA's, or pages, which are Triton's. "
)


def _over_uncompressed(row: Row) -> float:
    """The speed over that of the faster cache without compression."""
    return min(row["speedup_over"].values())


def _by_model(result: Result) -> dict[str, dict[str, Row]]:
    rows = tables.finished(result, OPERATION)
    return tables.nested(rows, lambda row: row["model"], lambda row: row["method"])


def families_bars(result: Result) -> plots.Ratios:
    """By model and cache: the speed over the faster uncompressed cache, and milliseconds."""
    return {
        f"{model}\n{tables.batch_and_tokens(next(iter(rows.values())))}": {
            CACHES[cache]: (_over_uncompressed(row), f"{row['us'] / 1e3:.1f} ms")
            for cache, row in rows.items()
        }
        for model, rows in _by_model(result).items()
        if any(row.get("speedup_over") for row in rows.values())
    }


def speed_plot(result: Result) -> "Figure":
    title = f"One decode step of the whole model on {result['device']}"
    label = "times as fast as the faster uncompressed cache"
    return plots.of_ratios(families_bars(result), title, label, bar=0.2)


families_summary = tables.section(summary_table, note=_SUMMARY)
SUITE = Suite(
    name="families",
    groups=_groups,
    quick_groups=lambda: [Group("tiny", 2, 192)],
    run=each(begin),
    with_ratios=with_ratios,
    formats=(),
    # Exact caches of the largest model take most of 80 GB.
    environment={"XLA_PYTHON_CLIENT_MEM_FRACTION": "0.93"},
    tables={
        "families": tables.section(
            families_table, plot=PLOT, note=_shapes_sentence, rates=tables.COPY
        ),
        "families summary": families_summary,
    },
    plots={PLOT[0]: speed_plot},
)
