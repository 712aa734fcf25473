"""Inputs of attention, exact results, and errors against them."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from benchmarks import timing
from benchmarks.shapes import Shape

# Channels of a KV head that are larger in keys, as in trained models, and how much.
_OUTLIER_CHANNELS, _OUTLIER_FACTOR = 3, 5.0

Error = dict[str, float]


def require_gpu(what: str) -> None:
    """Raises NotImplementedError without a GPU."""
    if not timing.on_gpu():
        raise NotImplementedError(f"{what} needs a GPU, not {jax.default_backend()}")


@functools.partial(jax.jit, static_argnames=("batch", "tokens", "heads", "dim", "outliers"))
def sample(
    seed: int, *, batch: int, tokens: int, heads: int, dim: int, outliers: bool = False
) -> jax.Array:
    """Normal numbers ``[batch, tokens, heads, dim]``, sampled in float32, as bfloat16."""
    key = jax.random.key(seed)
    x = jax.random.normal(key, (batch, tokens, heads, dim), jnp.float32)
    if outliers:
        order = jnp.argsort(jax.random.uniform(jax.random.fold_in(key, 1), (heads, dim)), axis=-1)
        x = x * jnp.where(order < _OUTLIER_CHANNELS, _OUTLIER_FACTOR, 1.0)[None, None]
    return x.astype(jnp.bfloat16)


def sample_all(shape: Shape, queries: int) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Query ``[B, queries, N, H]``, key and value ``[B, S, K, H]``."""
    heads = shape.heads
    make = functools.partial(sample, batch=shape.batch, dim=heads.dim)
    return (
        make(0, tokens=queries, heads=heads.query),
        make(1, tokens=shape.tokens, heads=heads.kv, outliers=True),
        make(2, tokens=shape.tokens, heads=heads.kv),
    )


def exact_attention(implementation: str, **options: Any) -> Callable[..., jax.Array]:
    """jax's own attention of query, key, value and, if they are given, lengths of sequences."""
    if implementation == "cudnn":
        require_gpu("cuDNN")

    def attend(
        q: jax.Array, k: jax.Array, v: jax.Array, lengths: jax.Array | None = None
    ) -> jax.Array:
        # jax's own function promotes bfloat16 with float32 inside.
        with jax.numpy_dtype_promotion("standard"):
            return jax.nn.dot_product_attention(
                q, k, v, key_value_seq_lengths=lengths, implementation=implementation, **options
            )

    return attend


# Without XLA's trials of several kernels, on a device where another process measures.
_quiet = functools.partial(jax.jit, compiler_options={"xla_gpu_autotune_level": 0})


def _exact_rows(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    visible: jax.Array,
    window: int | None = None,
) -> jax.Array:
    batch, rows, heads, dim = query.shape
    kv_heads = key.shape[2]
    q = query.reshape(batch, rows, kv_heads, heads // kv_heads, dim).astype(jnp.float32)
    dot = functools.partial(jnp.einsum, precision=jax.lax.Precision.HIGHEST)
    scores = dot("brkgh,bskh->bkgrs", q, key.astype(jnp.float32)) * dim**-0.5
    place = jnp.arange(key.shape[1])[None]
    mask = place < visible[:, None]
    if window is not None:
        mask &= place >= visible[:, None] - 1 - window
    p = jax.nn.softmax(jnp.where(mask[None, None, None], scores, -jnp.inf), axis=-1)
    out = dot("bkgrs,bskh->brkgh", p, value.astype(jnp.float32))
    return out.reshape(batch, rows, heads, dim)


@_quiet
def exact_rows(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    visible: jax.Array,
    window: int | None = None,
) -> jax.Array:
    """Attention of some rows in float32 at full precision: ``[B, R, N, H]``.

    Row `r` sees the first ``visible[r]`` keys, of these only `window` before the last one.
    """
    return _exact_rows(query, key, value, visible, window)


@_quiet
def exact_gradient(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    visible: jax.Array,
    window: int | None,
    d_out: jax.Array,
) -> jax.Array:
    """The query's gradient of `exact_rows`, of `d_out`'s shape and float32."""

    def attend(query: jax.Array) -> jax.Array:
        return _exact_rows(query, key, value, visible, window)

    _, pull = jax.vjp(attend, query.astype(jnp.float32))
    [gradient] = pull(d_out.astype(jnp.float32))
    return gradient


@jax.jit
def _errors(got: jax.Array, want: jax.Array) -> tuple[jax.Array, dict[str, jax.Array]]:
    got, want = (jnp.ravel(x).astype(jnp.float32) for x in (got, want))
    difference = got - want
    return jnp.all(jnp.isfinite(got)), {
        "cosine": jnp.sum(got * want) / (jnp.linalg.norm(got) * jnp.linalg.norm(want)),
        "relative_l1": jnp.sum(jnp.abs(difference)) / jnp.sum(jnp.abs(want)),
        "relative_l2": jnp.linalg.norm(difference) / jnp.linalg.norm(want),
        "rmse": jnp.sqrt(jnp.mean(difference**2)),
    }


def errors(got: jax.Array, want: jax.Array) -> Error:
    """Cosine similarity, relative L1 and L2 and root mean squared error, over all elements."""
    if got.shape != want.shape:
        raise ValueError(f"{got.shape=} must equal {want.shape=}")
    is_finite, found = _errors(got, want)
    if not is_finite:
        raise ArithmeticError("the output is not finite")
    return {name: float(value) for name, value in found.items()}
