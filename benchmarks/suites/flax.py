"""One attention layer in nnx: Flax's own module against turbojax's, decoding and in training.

Decoding: a token of each sequence through a layer whose cache is nearly full, in device time; the
cache is donated. Training: a forward and a backward pass of `nnx.MultiHeadAttention` with several
functions as its `attention_fn`.
"""

import contextlib
import dataclasses
import functools
import gc
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from benchmarks import plots, tables, timing
from benchmarks.measuring import steps
from benchmarks.measuring.samples import require_gpu, sample
from benchmarks.measuring.work import Needs
from benchmarks.suite import (
    Asked,
    Measure,
    Rows,
    Suite,
    each,
    joined,
    over_baselines,
    temporary_bytes,
    timing_facts,
    with_figure,
)
from benchmarks.tables import Result, Row
from turbojax import levels
from turbojax.caches import cache_by_name, init_layer_cache
from turbojax.flax.attention import TurboAttention
from turbojax.flax.attention_fn import PooledAttentionFn, TurboAttentionFn
from turbojax.numerics.config import TurboConfig

if TYPE_CHECKING:
    from matplotlib.figure import Figure

DECODE, TRAINING = "flax-decode", "flax-training"
BASELINES = {"nnx": "over nnx", "nnx-cudnn": "over cuDNN"}
PLOT = ("flax_speed.png", "Attention layers in nnx: speed over Flax's own module")

_BFLOAT16 = jnp.dtype(jnp.bfloat16)
# Steps beyond what a cache holds at first: `timing.measure_call` makes at most this many. A
# progressive cache, whose buffer is empty at first, compresses none of them yet.
_STEPS = 64
# Above the rounding of 4-bit caches and of 8-bit attention; a wrong output is off by about 1.
_WRONG = 0.5


@dataclasses.dataclass(frozen=True)
class Layer:
    """An attention layer and what it is given."""

    heads: int
    kv_heads: int
    head_dim: int
    batch: int
    tokens: int

    @property
    def size(self) -> int:
        """Width of the residual stream."""
        return self.heads * self.head_dim

    @property
    def label(self) -> str:
        """``h32-kv8-d128/b16-s8192``."""
        return f"h{self.heads}-kv{self.kv_heads}-d{self.head_dim}/b{self.batch}-s{self.tokens}"

    @property
    def num_weights(self) -> int:
        """Of the four projections."""
        return 2 * self.size * self.head_dim * (self.heads + self.kv_heads)


@dataclasses.dataclass(frozen=True)
class Group:
    operation: str
    layer: Layer

    @property
    def cases(self) -> tuple[str, ...]:
        if self.operation == DECODE:
            return ("nnx", "nnx-cudnn", "exact", "turbo4", "4bit")
        return ("nnx", "nnx-cudnn", *_OURS)

    def name(self, method: str) -> str:
        """``flax-decode/h32-kv8-d128/b16-s8192/turbo4``."""
        return joined(self.operation, self.layer.label, method)

    def describe(self, method: str) -> Row:
        layer = self.layer
        return {
            "operation": self.operation,
            "label": layer.label,
            "method": method,
            "batch": layer.batch,
            "tokens": layer.tokens,
            "heads": layer.heads,
            "kv_heads": layer.kv_heads,
            "head_dim": layer.head_dim,
            "hidden_size": layer.size,
        }


_OURS = {
    "turbo": TurboAttentionFn(),
    "turbo-int8": TurboAttentionFn(TurboConfig.paper()),
    "turbo-fp8": TurboAttentionFn(TurboConfig(mode="fp8")),
    "pooled": PooledAttentionFn(levels.TopK()),
}
"""Functions for `nnx.MultiHeadAttention`; the module says that it is causal."""


def begin(rows: Rows, asked: Asked) -> Measure:
    """Compiles everything before anything is measured, see `suite.each`."""
    compiled = steps.compile_rows(rows, lambda *row: [functools.partial(_lower, *row)])
    expected: dict[Group, dict[str, Any]] = {}

    def measured(group: Group, method: str) -> Row:
        gc.collect()  # what the last row made
        [function] = (future.result() for future in compiled.pop((group, method)))
        measure = _measure_decode if group.operation == DECODE else _measure_training
        if group not in expected:
            expected.clear()
        return measure(group.layer, method, function, expected.setdefault(group, {}), asked)

    return measured


def _is_nnx(method: str) -> bool:
    return method.startswith("nnx")


def _relaxed(method: str) -> contextlib.AbstractContextManager[None]:
    """Flax's module and jax's attention promote dtypes inside."""
    return jax.numpy_dtype_promotion("standard") if _is_nnx(method) else contextlib.nullcontext()


def _cudnn(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    *,
    mask: jax.Array | None = None,
    is_causal: bool = False,
    **_: Any,
) -> jax.Array:
    """What one would write to have cuDNN attend in Flax's module.

    A mask is that of the module's cache, which shows the first keys: as lengths, since cuDNN would
    otherwise read it as a bias.
    """
    require_gpu("cuDNN")
    lengths = None if mask is None else jnp.sum(mask[:, 0, 0], axis=-1, dtype=jnp.int32)
    return jax.nn.dot_product_attention(
        query,
        key,
        value,
        is_causal=is_causal,
        key_value_seq_lengths=lengths,
        implementation="cudnn",
    )


def _module(layer: Layer, method: str) -> nnx.Module:
    """Flax's module, or ours for a cache of this name. Equal ones have equal weights."""
    options: dict[str, Any] = {"dtype": _BFLOAT16, "param_dtype": _BFLOAT16, "rngs": nnx.Rngs(0)}
    if not _is_nnx(method) and method not in _OURS:
        kind = cache_by_name(method, layer.kv_heads)
        return TurboAttention(
            layer.size, layer.heads, layer.kv_heads, layer.head_dim, cache=kind, **options
        )
    if method != "nnx":
        options["attention_fn"] = _cudnn if method == "nnx-cudnn" else _OURS[method]
    return nnx.MultiHeadAttention(
        layer.heads, layer.size, num_kv_heads=layer.kv_heads, use_bias=False, **options
    )


def _full(layer: Layer, method: str) -> nnx.Module:
    """A module whose cache holds all but some tokens of what it can."""
    # Its weights are left out: they are made by `_params`.
    module = nnx.eval_shape(lambda: _module(layer, method))
    cache = init_layer_cache(
        layer.batch,
        layer.tokens,
        layer.kv_heads,
        layer.head_dim,
        kind=cache_by_name("exact" if _is_nnx(method) else method, layer.kv_heads),
        dtype=_BFLOAT16,
    )
    held = layer.tokens - _STEPS
    count = min(layer.batch, 4)
    for first in range(0, layer.batch, count):
        cache = steps.fill(
            cache,
            np.uint32(0),
            np.int32(first),
            count=count,
            tokens=held,
            kv_heads=layer.kv_heads,
            head_dim=layer.head_dim,
            dtype=_BFLOAT16,
        )
    if isinstance(module, TurboAttention):
        module.kv_cache = nnx.Cache(cache)
    else:
        module.cached_key = nnx.Cache(cache.key)
        module.cached_value = nnx.Cache(cache.value)
        module.cache_index = nnx.Cache(jnp.array(held, jnp.int32))
    return module


def _decode_arguments(layer: Layer, method: str) -> tuple[Any, tuple[Any, Any, jax.Array]]:
    """What a module is, and its weights, its cache and tokens."""
    graph, _, cache = nnx.split(_full(layer, method), nnx.Param, nnx.Cache)
    return graph, (_params(layer, not _is_nnx(method)), cache, _tokens(layer, 1))


@functools.partial(jax.jit, static_argnums=(0, 1))
def _params(layer: Layer, ours: bool) -> Any:
    """The weights of all of Flax's modules of this layer, or of all of ours."""
    return nnx.state(_module(layer, "exact" if ours else "nnx"), nnx.Param)


def _tokens(layer: Layer, count: int, seed: int = 0) -> jax.Array:
    [x] = sample(seed, batch=1, tokens=layer.batch, heads=count, dim=layer.size)
    return x


def _lower(group: Group, method: str) -> jax.stages.Lowered:
    layer = group.layer
    if group.operation == TRAINING:
        graph, arguments = _training_arguments(layer, method, abstract=True)
        with _relaxed(method):
            return jax.jit(functools.partial(_both_passes, graph)).lower(*arguments)
    graphs = []

    def make() -> tuple[Any, ...]:
        graph, arguments = _decode_arguments(layer, method)
        graphs.append(graph)
        return arguments

    arguments = jax.eval_shape(make)
    step = functools.partial(_step, graphs[0])
    with _relaxed(method):
        return jax.jit(step, donate_argnums=1).lower(*arguments)


def _step(graph: Any, params: Any, cache: Any, x: jax.Array) -> tuple[jax.Array, Any]:
    module = nnx.merge(graph, params, cache)
    out = module.decode(x) if isinstance(module, TurboAttention) else module(x, decode=True)
    return out, nnx.state(module, nnx.Cache)


def _measure_decode(
    layer: Layer,
    method: str,
    compiled: Callable[..., Any],
    expected: dict[str, Any],
    asked: Asked,
) -> Row:
    _, (params, cache, x) = _decode_arguments(layer, method)
    cache_bytes, weight_bytes = timing.nbytes(cache), timing.nbytes(params)
    call = steps.Steps(compiled, params, cache, x)
    del cache
    facts = _error(call(), expected.setdefault("nnx" if _is_nnx(method) else "ours", {}), method)
    taken = timing.measure_call(call, repetitions=asked.repetitions)
    needs = Needs(cache_bytes + weight_bytes + 2 * timing.nbytes(x), 0.0, "bf16")
    sizes = {"cache_bytes": cache_bytes, "weight_bytes": weight_bytes}
    return _facts(taken, needs, asked, compiled) | sizes | facts


def _error(out: Any, expected: dict[str, Any], method: str) -> Row:
    """The difference from the first output of its kind, which is kept."""
    name, want = next(iter(expected.items()), (method, out))
    errors = [
        steps.difference(a, b)
        for a, b in zip(jax.tree.leaves(out), jax.tree.leaves(want), strict=True)
    ]
    if max(errors) > _WRONG and method != "pooled":
        raise ArithmeticError(f"the output is wrong: relative L2 {max(errors):.3f} from {name}")
    expected.setdefault(name, want)
    found: Row = {"against": name, "relative_l2": errors[0]}
    return found if len(errors) == 1 else {**found, "gradient_relative_l2": errors[1]}


def _facts(taken: timing.Timing, needs: Needs, asked: Asked, compiled: Any) -> Row:
    return {
        "status": "ok",
        **timing_facts(taken),
        **temporary_bytes(compiled),
        **needs.facts(taken.microseconds, asked.ceilings),
    }


def _training_arguments(
    layer: Layer, method: str, *, abstract: bool = False
) -> tuple[Any, tuple[Any, jax.Array, jax.Array]]:
    """What a module is, and its weights, tokens and the output's cotangent."""

    def make() -> tuple[Any, jax.Array, jax.Array]:
        x, d_out = (_tokens(layer, layer.tokens, seed) for seed in range(2))
        return _params(layer, False), x, d_out

    module = nnx.eval_shape(lambda: _module(layer, method))
    return nnx.graphdef(module), jax.eval_shape(make) if abstract else make()


def _both_passes(
    graph: Any, params: Any, x: jax.Array, d_out: jax.Array
) -> tuple[jax.Array, jax.Array, Any]:
    """The output, and the gradients of the tokens and the weights."""

    def attend(params: Any, x: jax.Array) -> jax.Array:
        return nnx.merge(graph, params)(x, is_causal=True, decode=False)

    out, pull = jax.vjp(attend, params, x)
    d_params, d_x = pull(d_out)
    return out, d_x, d_params


def _measure_training(
    layer: Layer,
    method: str,
    compiled: Callable[..., Any],
    expected: dict[str, Any],
    asked: Asked,
) -> Row:
    _, arguments = _training_arguments(layer, method)
    facts = _error(compiled(*arguments)[:2], expected, method)
    taken = timing.measure(compiled, arguments, repetitions=asked.repetitions)
    tokens = layer.batch * layer.tokens
    # Of each product one forward and two backward; attention computes its scores once more.
    projections = 3 * 2.0 * tokens * layer.num_weights
    attention = 3.5 * 2.0 * tokens * layer.tokens * layer.size
    needs = Needs(timing.nbytes(arguments), projections + attention, "bf16")
    return _facts(taken, needs, asked, compiled) | facts


_over = over_baselines(dict.fromkeys((DECODE, TRAINING), tuple(BASELINES)), "method")
_smaller = with_figure(
    "smaller_than_nnx",
    "nnx",
    ("label", "operation"),
    lambda row, base: base["cache_bytes"] / row["cache_bytes"],
)


def with_ratios(rows: list[Row]) -> list[Row]:
    """The rows with `speedup_over`: Flax's module as it comes, and with cuDNN."""
    decoding = {row["name"]: row for row in _smaller([r for r in rows if r["operation"] == DECODE])}
    return _over([decoding.get(row["name"], row) for row in rows])


# What the docs show -------------------------------------------------------------------------------

METHODS = {
    "nnx": "`nnx.MultiHeadAttention`",
    "nnx-cudnn": "the same through cuDNN",
    "exact": "`TurboAttention`, exact cache",
    "turbo4": "`TurboAttention`, turbo4 pages",
    "4bit": "`TurboAttention`, 4-bit cache",
    "turbo": "with `TurboAttentionFn()`",
    "turbo-int8": "with `TurboAttentionFn`, the paper's int8",
    "turbo-fp8": "with `TurboAttentionFn`, fp8",
    "pooled": "with `PooledAttentionFn`, top-k",
}
"""Modules and functions, as tables call them."""
_SHORT = {
    "nnx-cudnn": "Flax's, cuDNN",
    "exact": "exact cache",
    "turbo4": "turbo4 pages",
    "4bit": "4-bit cache",
    "turbo": "turbo",
    "turbo-int8": "turbo, int8",
    "turbo-fp8": "turbo, fp8",
    "pooled": "pooled, top-k",
}


def layer(row: Row) -> str:
    """``32 heads on 8 of 128, 16 x 8k``."""
    heads = f"{row['heads']} heads on {row['kv_heads']} of {row['head_dim']}"
    return f"{heads}, {tables.batch_and_tokens(row)}"


def _share(row: Row) -> str:
    # What is counted is dense attention's work, of which pooled attention leaves most out.
    return "-" if row["method"] == "pooled" else tables.share_of_ceiling(row)


_NAMES = (("layer, batch x tokens", layer), ("module", lambda row: METHODS[row["method"]]))
_DECODE = (
    *(tables.US, *tables.over(BASELINES), ("wall, us", tables.significant("wall_us"))),
    ("cache, MB", tables.shown_as("cache_bytes", "{:,.0f}", 1e6)),
    ("smaller", tables.shown_as("smaller_than_nnx", "{:.2f}x")),
    *(("of ceiling", _share), tables.L2),
)
_TRAINING = (
    ("ms", tables.shown_as("us", "{:.2f}", 1e3)),
    *tables.over(BASELINES),
    ("wall, ms", tables.shown_as("wall_us", "{:.2f}", 1e3)),
    ("temporaries, GB", tables.shown_as("temporary_bytes", "{:.2f}", 1e9)),
    ("of ceiling", _share),
    ("output, relative L2", tables.shown_as("relative_l2", "{:.4f}")),
    ("gradient", tables.shown_as("gradient_relative_l2", "{:.4f}")),
)


def decode_table(result: Result) -> str:
    return tables.operation_table(result, DECODE, _NAMES, _DECODE)


def training_table(result: Result) -> str:
    names = (_NAMES[0], ("attention", _NAMES[1][1]))
    return tables.operation_table(result, TRAINING, names, _TRAINING)


def _by_layer(result: Result, operation: str) -> dict[str, dict[str, Row]]:
    return tables.nested(tables.finished(result, operation), layer, lambda row: row["method"])


def summary_table(result: Result) -> str:
    """Decoding by layer: microseconds, the speed over Flax's module, and its cache's size."""
    titles = {name: METHODS[name] for name in ("nnx", "nnx-cudnn", "exact", "turbo4", "4bit")}
    return tables.pivot("layer, batch x tokens", _by_layer(result, DECODE), titles, _time_and_size)


def _time_and_size(row: Row) -> str:
    ratio = None if row["method"] == "nnx" else row["speedup_over"].get("nnx")
    time = tables.with_ratio(tables.number(row["us"]), ratio)
    return f"{time}, {row['cache_bytes'] / 1e6:,.0f} MB"


_SUMMARY = (
    "Microseconds of a decode step of one attention layer, projections included, and the size "
    "of its cache; in brackets the speed over Flax's own module. Time of the kernels on the "
    "device. "
)


def bars(result: Result) -> plots.Ratios:
    """By layer and module: the speed over Flax's own module, and milliseconds."""
    groups: plots.Ratios = {}
    for operation, what in ((DECODE, "decoding"), (TRAINING, "training")):
        for place, rows in _by_layer(result, operation).items():
            for method, row in rows.items():
                over = row["speedup_over"].get("nnx")
                if method == "nnx" or over is None:
                    continue
                bar = (over, f"{over:.2f}: {tables.number(row['us'] / 1e3)} ms")
                groups.setdefault(f"{what}\n{place}", {})[_SHORT[method]] = bar
    return groups


def speed_plot(result: Result) -> "Figure":
    title = f"One attention layer in nnx on {result['device']}"
    label = "times as fast as nnx.MultiHeadAttention"
    return plots.of_ratios(bars(result), title, label, bar=0.2, margin=0.35)


SUITE = Suite(
    name="flax",
    groups=lambda: [
        Group(DECODE, Layer(32, 8, 128, 16, 8192)),
        Group(DECODE, Layer(32, 32, 128, 16, 8192)),
        Group(TRAINING, Layer(16, 16, 128, 2, 8192)),
    ],
    quick_groups=lambda: [
        Group(DECODE, Layer(4, 2, 16, 2, 256)),
        Group(TRAINING, Layer(2, 2, 16, 1, 256)),
    ],
    run=each(begin),
    with_ratios=with_ratios,
    formats=("bf16",),
    # XLA's attention holds the scores of all heads in training.
    environment={"XLA_PYTHON_CLIENT_MEM_FRACTION": "0.93"},
    tables={
        "flax summary": tables.section(summary_table, note=_SUMMARY),
        "flax decode": tables.section(decode_table, plot=PLOT, rates=tables.COPY_AND_PRODUCT),
        "flax training": tables.section(training_table, rates=tables.COPY_AND_PRODUCT),
    },
    plots={PLOT[0]: speed_plot},
)
