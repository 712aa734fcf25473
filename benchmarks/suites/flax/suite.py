"""One attention layer in nnx: Flax's own module against turbojax's, decoding and in training.

Decoding: a token of each sequence through a layer whose cache is nearly full, in device time; the
cache is donated. Training: a forward and a backward pass of `nnx.MultiHeadAttention` with several
functions as its `attention_fn`.
"""

import contextlib
import dataclasses
import functools
import gc
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from benchmarks import timing
from benchmarks.measuring import steps
from benchmarks.measuring.compiling import require_gpu
from benchmarks.measuring.samples import sample
from benchmarks.measuring.work import Needs
from benchmarks.suite import Ceilings, Suite, attempt, timing_facts
from benchmarks.suites.flax import tables as flax_tables
from benchmarks.tables import Row
from turbojax import levels
from turbojax.caches import cache_by_name, init_layer_cache
from turbojax.flax.attention import TurboAttention
from turbojax.flax.attention_fn import PooledAttentionFn, TurboAttentionFn
from turbojax.numerics.config import TurboConfig

DECODE, TRAINING = flax_tables.DECODE, flax_tables.TRAINING

_BFLOAT16 = jnp.dtype(jnp.bfloat16)
# Steps beyond what a cache holds at first: `timing.measure_call` makes at most this many. A
# progressive cache, whose buffer is empty at first, compresses none of them yet.
_STEPS = 64
# Above the rounding of 4-bit caches and of 8-bit attention; a wrong output is off by about 1.
_WRONG = 0.5


@dataclasses.dataclass(frozen=True)
class Layer:
    """An attention layer and what it is given.

    Attributes:
      heads: query heads.
      kv_heads: key/value heads.
      head_dim: channels; the layer is `heads` times as wide.
      batch: sequences.
      tokens: of each sequence, in training; that a cache can hold, in decoding.
    """

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
    """The rows of one layer.

    Attributes:
      operation: `DECODE` or `TRAINING`.
      layer: the layer.
    """

    operation: str
    layer: Layer

    @property
    def cases(self) -> tuple[str, ...]:
        """Its rows, what others are compared with first."""
        if self.operation == DECODE:
            return ("nnx", "nnx-cudnn", "exact", "turbo4", "4bit")
        return ("nnx", "nnx-cudnn", *_OURS)

    def name(self, method: str) -> str:
        """``flax-decode/h32-kv8-d128/b16-s8192/turbo4``."""
        return f"{self.operation}/{self.layer.label}/{method}"


_OURS = {
    "turbo": TurboAttentionFn(),
    "turbo-int8": TurboAttentionFn(TurboConfig.paper()),
    "turbo-fp8": TurboAttentionFn(TurboConfig(mode="fp8")),
    "pooled": PooledAttentionFn(levels.TopK()),
}
"""Functions for `nnx.MultiHeadAttention`; the module says that it is causal."""


def _groups() -> list[Group]:
    """What matters most first: a run may be stopped by the clock."""
    return [
        Group(DECODE, Layer(32, 8, 128, 16, 8192)),
        Group(DECODE, Layer(32, 32, 128, 16, 8192)),
        Group(TRAINING, Layer(16, 16, 128, 2, 8192)),
    ]


def _quick_groups() -> list[Group]:
    """Tiny layers: whether everything runs, and nothing about speed."""
    return [Group(DECODE, Layer(4, 2, 16, 2, 256)), Group(TRAINING, Layer(2, 2, 16, 1, 256))]


def run(
    rows: list[tuple[Group, str]],
    ceilings: Ceilings,
    on_row: Callable[[Row], None],
    *,
    repetitions: int | None = None,
    deadline: float = float("inf"),
) -> None:
    """See `benchmarks.suite.Run`; everything is compiled before anything is measured."""
    groups = list(dict.fromkeys(group for group, _ in rows))
    chosen = {group: [method for other, method in rows if other == group] for group in groups}
    compiled = {}
    if time.monotonic() <= deadline:
        lowerings = [[functools.partial(_lower, g, m) for m in chosen[g]] for g in groups]
        futures = steps.compile_groups(lowerings)
        for group, found in zip(groups, futures, strict=True):
            compiled |= dict(zip([(group, m) for m in chosen[group]], found, strict=True))
    for group in groups:
        expected: dict[str, Any] = {}
        for method in chosen[group]:
            measure = functools.partial(
                _measure, group, method, compiled, expected, ceilings, repetitions
            )
            attempt(describe(group, method), measure, on_row, deadline)
            gc.collect()


def _measure(
    group: Group,
    method: str,
    compiled: dict[tuple[Group, str], Any],
    expected: dict[str, Any],
    ceilings: Ceilings,
    repetitions: int | None,
) -> Row:
    function = compiled.pop((group, method)).result()
    measure = _measure_decode if group.operation == DECODE else _measure_training
    return measure(group.layer, method, function, expected, ceilings, repetitions)


def describe(group: Group, method: str) -> Row:
    """What is known of a row before it runs."""
    layer = group.layer
    return {
        "name": group.name(method),
        "operation": group.operation,
        "label": layer.label,
        "method": method,
        "batch": layer.batch,
        "tokens": layer.tokens,
        "heads": layer.heads,
        "kv_heads": layer.kv_heads,
        "head_dim": layer.head_dim,
        "hidden_size": layer.size,
    }


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
    """Normal numbers ``[B, count, D]``."""
    [x] = sample(seed, batch=1, tokens=layer.batch, heads=count, dim=layer.size)
    return x


def _lower(group: Group, method: str) -> jax.stages.Lowered:
    """A decode step, or a forward and a backward pass."""
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
    ceilings: Ceilings,
    repetitions: int | None,
) -> Row:
    _, (params, cache, x) = _decode_arguments(layer, method)
    cache_bytes, weight_bytes = timing.nbytes(cache), timing.nbytes(params)
    call = steps.Steps(compiled, params, cache, x)
    del cache
    facts = _error(call(), expected.setdefault("nnx" if _is_nnx(method) else "ours", {}), method)
    taken = timing.measure_call(call, repetitions=repetitions)
    needs = Needs(cache_bytes + weight_bytes + 2 * timing.nbytes(x), 0.0, "bf16")
    sizes = {"cache_bytes": cache_bytes, "weight_bytes": weight_bytes}
    return _facts(taken, needs, ceilings, compiled) | sizes | facts


def _error(out: Any, expected: dict[str, Any], method: str) -> Row:
    """The difference from the first output of its kind, which is kept.

    Raises:
      ArithmeticError: if it is not finite, or so large that it is wrong; pooled attention is meant
        to differ.
    """
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


def _facts(
    taken: timing.Timing,
    needs: Needs,
    ceilings: Ceilings,
    compiled: Callable[..., Any],
) -> Row:
    analysis = compiled.memory_analysis()
    return {
        "status": "ok",
        **timing_facts(taken),
        "temporary_bytes": getattr(analysis, "temp_size_in_bytes", None),
        **needs.facts(taken.microseconds, ceilings),
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
    ceilings: Ceilings,
    repetitions: int | None,
) -> Row:
    _, arguments = _training_arguments(layer, method)
    facts = _error(compiled(*arguments)[:2], expected, method)
    taken = timing.measure(compiled, arguments, repetitions=repetitions)
    tokens = layer.batch * layer.tokens
    # Of each product one forward and two backward; attention computes its scores once more.
    projections = 3 * 2.0 * tokens * layer.num_weights
    attention = 3.5 * 2.0 * tokens * layer.tokens * layer.size
    needs = Needs(timing.nbytes(arguments), projections + attention, "bf16")
    return _facts(taken, needs, ceilings, compiled) | facts


def with_ratios(rows: list[Row]) -> list[Row]:
    """The rows with `speedup_over`: Flax's module as it comes, and with cuDNN."""
    done = {(row["label"], row["method"]): row for row in rows if row["status"] == "ok"}
    return [_with_ratio(row, done) for row in rows]


def _with_ratio(row: Row, done: dict[tuple[str, str], Row]) -> Row:
    if row["status"] != "ok":
        return row
    bases = {name: done.get((row["label"], name)) for name in flax_tables.BASELINES}
    over = {name: base["us"] / row["us"] for name, base in bases.items() if base}
    found = {**row, "speedup_over": over}
    base = done.get((row["label"], "nnx"))
    if row["operation"] == DECODE and base:
        found["smaller_than_nnx"] = base["cache_bytes"] / row["cache_bytes"]
    return found


SUITE = Suite(
    name="flax",
    groups=_groups,
    quick_groups=_quick_groups,
    run=run,
    with_ratios=with_ratios,
    one_line=flax_tables.one_line,
    formats=("bf16",),
    # XLA's attention holds the scores of all heads in training.
    environment={"XLA_PYTHON_CLIENT_MEM_FRACTION": "0.93"},
    tables=flax_tables.TABLES,
    plots=flax_tables.PLOTS,
)
