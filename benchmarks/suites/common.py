"""What the cases of the attention suite share: calls, inputs, and errors against exact results."""

import concurrent.futures
import dataclasses
import functools
from collections.abc import Callable, Iterable
from typing import Any, Literal

import jax
import jax.numpy as jnp

from benchmarks import timing
from benchmarks.shapes import Shape
from benchmarks.suites.accounting import Work
from turbojax import TurboConfig

# Channels of a KV head that are larger in keys, as in trained models, and how much.
_OUTLIER_CHANNELS, _OUTLIER_FACTOR = 3, 5.0

Error = dict[str, float]
Choice = Literal["short", "thorough", "hopper", "hopper-short"]
"""Which rows of a shape: some or all of them, or those of the suite of Hopper's kernels."""


@dataclasses.dataclass(frozen=True)
class Call:
    """Something to time.

    Attributes:
      function: jitted by the caller; arrays and pytrees in and out.
      arguments: what it is called with.
      work: what it must do.
      error: of its output, against exact float32 arithmetic on the same inputs.
      facts: more for the row.
    """

    function: Callable[..., Any]
    arguments: tuple[Any, ...]
    work: Work
    error: Callable[[Any], Error]
    facts: dict[str, Any] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True)
class Case:
    """One row to be measured.

    Attributes:
      method: what runs, a part of the row's name: ``"cudnn"``, ``"turbo-4bit"``.
      implementation: of ours, or None.
      build: makes the call from the group's inputs. Raises NotImplementedError if it cannot.
    """

    method: str
    implementation: str | None
    build: Callable[[Any], Call]

    def name(self, operation: str, shape: Shape) -> str:
        """``decode/llama3-8b/b16-s32768/turbo-4bit/triton``."""
        parts = [operation, shape.label, self.method, self.implementation]
        return "/".join(part for part in parts if part)


def require_gpu(what: str) -> None:
    """Raises NotImplementedError without a GPU."""
    if not timing.on_gpu():
        raise NotImplementedError(f"{what} needs a GPU, not {jax.default_backend()}")


def compile_side_by_side(
    lowerings: Iterable[Callable[[], jax.stages.Lowered]],
) -> list[concurrent.futures.Future[Any]]:
    """Compiles side by side, and waits: nothing compiles while something is timed.

    Args:
      lowerings: called one after the other, since Mosaic's lowering keeps global state. What one
        raises is in its future.
    """

    def lowered(lower: Callable[[], jax.stages.Lowered]) -> Callable[[], Any]:
        try:
            return lower().compile
        except Exception as error:
            return functools.partial(_raise, error)

    with concurrent.futures.ThreadPoolExecutor() as pool:
        return [pool.submit(lowered(lower)) for lower in lowerings]


def _raise(error: Exception) -> None:
    raise error


def failure(error: Exception) -> dict[str, str]:
    """What a row says about the error that ended it."""
    lines = str(error).strip().splitlines()
    reason = lines[0][:400] if lines else type(error).__name__
    if isinstance(error, NotImplementedError):
        return {"status": "not run", "reason": reason}
    return {"status": "failed", "reason": f"{type(error).__name__}: {reason}"}


@functools.partial(jax.jit, static_argnames=("batch", "tokens", "heads", "dim", "outliers"))
def sample(
    seed: int, *, batch: int, tokens: int, heads: int, dim: int, outliers: bool = False
) -> jax.Array:
    """Normal numbers ``[batch, tokens, heads, dim]``, sampled in float32, as bfloat16.

    Args:
      seed: of the numbers.
      batch: first axis.
      tokens: second axis.
      heads: third axis.
      dim: last axis.
      outliers: whether a few channels of each head are larger.
    """
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


@jax.jit
def exact_rows(query: jax.Array, key: jax.Array, value: jax.Array, visible: jax.Array) -> jax.Array:
    """Attention of some rows in float32 at full precision.

    Args:
      query: ``[B, R, N, H]``.
      key: ``[B, S, K, H]``.
      value: ``[B, S, K, H]``.
      visible: int32 ``[R]``; row `r` sees the first ``visible[r]`` keys.

    Returns:
      float32 ``[B, R, N, H]``.
    """
    batch, rows, heads, dim = query.shape
    kv_heads = key.shape[2]
    q = query.reshape(batch, rows, kv_heads, heads // kv_heads, dim).astype(jnp.float32)
    dot = functools.partial(jnp.einsum, precision=jax.lax.Precision.HIGHEST)
    scores = dot("brkgh,bskh->bkgrs", q, key.astype(jnp.float32)) * dim**-0.5
    mask = jnp.arange(key.shape[1])[None] < visible[:, None]
    p = jax.nn.softmax(jnp.where(mask[None, None, None], scores, -jnp.inf), axis=-1)
    out = dot("bkgrs,bskh->brkgh", p, value.astype(jnp.float32))
    return out.reshape(batch, rows, heads, dim)


@jax.jit
def _errors(got: jax.Array, want: jax.Array) -> dict[str, jax.Array]:
    got, want = got.astype(jnp.float32), want.astype(jnp.float32)
    difference = got - want
    return {
        "cosine": jnp.sum(got * want) / (jnp.linalg.norm(got) * jnp.linalg.norm(want)),
        "relative_l1": jnp.sum(jnp.abs(difference)) / jnp.sum(jnp.abs(want)),
        "rmse": jnp.sqrt(jnp.mean(difference**2)),
    }


def errors(got: jax.Array, want: jax.Array) -> Error:
    """Cosine similarity, relative L1 and root mean squared error, over all elements.

    Raises:
      ArithmeticError: if the output is not finite.
    """
    if got.shape != want.shape:
        raise ValueError(f"{got.shape=} must equal {want.shape=}")
    if not jnp.all(jnp.isfinite(got)):
        raise ArithmeticError("the output is not finite")
    return {name: float(value) for name, value in _errors(jnp.ravel(got), jnp.ravel(want)).items()}


def turbo_configs(kv_heads: int) -> dict[str, TurboConfig]:
    """The caches of the suite by name."""
    half = kv_heads // 2
    return {
        "4bit": TurboConfig(),
        "2/4bit": TurboConfig(num_low_bit_key_heads=half, num_low_bit_value_heads=half),
        "3bit": TurboConfig(key_bits=3, value_bits=3),
        "2bit": TurboConfig(key_bits=2, value_bits=2),
    }
