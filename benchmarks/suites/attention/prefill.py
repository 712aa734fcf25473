"""Prefill: attention within a prompt, from bfloat16 to bfloat16."""

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp

import turbojax as tj
from benchmarks import timing
from benchmarks.measuring import work
from benchmarks.measuring.compiling import require_gpu
from benchmarks.measuring.samples import Error, errors, exact_rows, sample_all
from benchmarks.shapes import Shape
from benchmarks.suites.attention import cudnn_fp8
from benchmarks.suites.attention.cases import (
    Call,
    Case,
    Choice,
)

OPERATION = "prefill"
# Errors are taken over this many scores per head, in rows spread over the first sequence.
_COMPARED_SCORES = 2**21
_XLA_TOKENS = 2048
SOFTMAXES = {"sas": tj.SAS(), "sas2": tj.SAS(base="2"), "exact": "exact"}


class Inputs:
    """A prompt's query, key and value."""

    def __init__(self, shape: Shape):
        self.shape = shape
        self.query, self.key, self.value = sample_all(shape, queries=shape.tokens)

    @functools.cached_property
    def rows(self) -> jax.Array:
        """int32 ``[R]``: the rows that are compared."""
        count = max(1, min(self.shape.tokens, _COMPARED_SCORES // self.shape.tokens))
        return jnp.arange(count) * self.shape.tokens // count + self.shape.tokens // count - 1

    @property
    def seen(self) -> tuple[jax.Array, jax.Array, jax.Array, int | None]:
        """Key, value, how many keys the compared rows see, and of these how many at most."""
        tokens = self.shape.tokens
        visible = self.rows + 1 if self.shape.is_causal else jnp.full_like(self.rows, tokens)
        return self.key[:1], self.value[:1], visible, self.shape.window

    @functools.cached_property
    def expected(self) -> jax.Array:
        """float32 ``[1, R, N, H]``: of the rows that are compared, exact."""
        return exact_rows(self.query[:1, self.rows], *self.seen)

    def error(self, out: jax.Array) -> Error:
        """Of an output ``[B, S, N, H]``."""
        return errors(out[:1, self.rows], self.expected)


def exact_attention(shape: Shape, implementation: str) -> Callable[..., jax.Array]:
    """jax's own attention of query, key and value."""
    if implementation == "cudnn":
        require_gpu("cuDNN")

    options = {"is_causal": shape.is_causal, "local_window_size": shape.local_window}

    def attend(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
        # jax's own function promotes bfloat16 with float32 inside.
        with jax.numpy_dtype_promotion("standard"):
            return jax.nn.dot_product_attention(q, k, v, implementation=implementation, **options)

    return attend


def _exact(inputs: Inputs, implementation: str) -> Call:
    attend = exact_attention(inputs.shape, implementation)
    needed = work.prefill_work(inputs.shape, "bf16")
    return Call(attend, (inputs.query, inputs.key, inputs.value), needed, inputs.error)


def _cudnn_fp8(inputs: Inputs) -> Call:
    """The peer of the 8-bit modes, see `cudnn_fp8`."""
    require_gpu("cuDNN")
    shape = inputs.shape
    group = shape.heads.query // shape.heads.kv
    key, value = (cudnn_fp8.quantized(x, group) for x in (inputs.key, inputs.value))
    return Call(
        functools.partial(cudnn_fp8.attend, is_causal=shape.is_causal),
        (cudnn_fp8.quantized(inputs.query), key, value),
        work.prefill_work(shape, "fp8"),
        lambda out: inputs.error(cudnn_fp8.dequantized(out)),
    )


def _pallas(inputs: Inputs) -> Call:
    """The kernel that jax ships. It knows no groups of heads: keys are repeated beforehand."""
    require_gpu("jax's Pallas kernel")
    from jax.experimental.pallas.ops.gpu import attention

    shape = inputs.shape
    group = shape.heads.query // shape.heads.kv

    def attend(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
        return attention.mha(q, k, v, None, shape.heads.dim**-0.5, shape.is_causal)

    repeated = [jnp.repeat(x, group, axis=2) for x in (inputs.key, inputs.value)]
    needed = work.prefill_work(shape, "bf16")
    return Call(attend, (inputs.query, *repeated), needed, inputs.error)


def _turbo(inputs: Inputs, config: tj.TurboConfig, implementation: str | None) -> Call:
    tokens = inputs.shape.batch * inputs.shape.tokens
    if implementation == "xla" and timing.on_gpu() and tokens > _XLA_TOKENS:
        raise NotImplementedError(f"plain JAX on {tokens} tokens: more than {_XLA_TOKENS}")
    attend = functools.partial(
        tj.turbo_attention,
        config=config,
        is_causal=inputs.shape.is_causal,
        local_window_size=inputs.shape.local_window,
        implementation=implementation,
    )
    return Call(
        attend,
        (inputs.query, inputs.key, inputs.value),
        work.prefill_work(inputs.shape, config.mode),
        inputs.error,
        {"block": config.block_kv},
    )


def _cached(inputs: Inputs, config: tj.TurboConfig, implementation: str) -> Call:
    """Attention that also stores the prompt, in a cache made inside."""
    shape = inputs.shape
    sizes = (shape.batch, shape.tokens, shape.heads.kv, shape.heads.dim)

    def attend(q: jax.Array, k: jax.Array, v: jax.Array) -> tuple[jax.Array, tj.ProgressiveCache]:
        cache = tj.init_cache(*sizes, config=config, dtype=k.dtype)
        options = {"is_causal": shape.is_causal, "implementation": implementation}
        return tj.prefill(q, k, v, cache, **options)

    return Call(
        attend,
        (inputs.query, inputs.key, inputs.value),
        work.prefill_work(shape, config.mode),
        lambda result: inputs.error(result[0]),
        {"block": config.block_kv},
    )


# Mode, softmax, block, implementation; the first ones are the suite's short form.
_HOPPER = (
    ("int8_fp8", "exact", 64, "mosaic_gpu"),
    ("fp8", "exact", 64, "mosaic_gpu"),
    ("int8", "sas", 128, "mosaic_gpu"),
    ("int8_fp8", "exact", 128, "mosaic_gpu"),
    ("fp8", "exact", 128, "mosaic_gpu"),
    ("int8", "sas", 64, "mosaic_gpu"),
    ("int8_fp8", "sas", 128, "mosaic_gpu"),
    ("int8", "exact", 128, "mosaic_gpu"),
)
_SHORT = (
    ("int8", "sas", 64, "mosaic_gpu"),
    ("fp8", "exact", 128, "mosaic_gpu"),
    ("int8", "sas", 64, "triton"),
    ("int8", "sas2", 128, "triton"),
    ("fp8", "exact", 128, "jax_triton"),
    ("int8_fp8", "exact", 128, "jax_triton"),
)
_THOROUGH = (
    *_HOPPER,
    *(row for row in _SHORT if row not in _HOPPER),
    ("int8", "sas", 128, "triton"),
    ("int8", "exact", 128, "triton"),
    ("int8_fp8", "sas2", 128, "triton"),
    ("fp8", "sas2", 128, "triton"),
    ("float", "exact", 128, "triton"),
    ("float", "sas", 128, "triton"),
    ("int8", "sas", 64, "jax_triton"),
    ("int8", "sas2", 128, "jax_triton"),
    ("int8_fp8", "sas", 128, "jax_triton"),
    ("int8_fp8", "sas2", 128, "jax_triton"),
    ("fp8", "sas", 128, "jax_triton"),
    ("fp8", "sas2", 128, "jax_triton"),
    ("fp8", "exact", 64, "jax_triton"),
)


def cases(shape: Shape, choice: Choice) -> list[Case]:
    """The rows of one shape, what others are compared with first.

    ``"thorough"``: every mode with every softmax that makes sense.
    """
    rows = [Case("cudnn", None, functools.partial(_exact, implementation="cudnn"))]

    def ours(
        mode: str, softmax: str, block: int, implementation: str, cached: bool = False
    ) -> Case:
        config = tj.TurboConfig(
            mode=mode,
            softmax=SOFTMAXES[softmax],
            block_q=block,
            block_kv=block,
            buffer_size=block,
        )
        make = _cached if cached else _turbo
        build = functools.partial(make, config=config, implementation=implementation)
        method = f"turbo-{mode}-{softmax}-{block}" + ("-cached" if cached else "")
        return Case(method, implementation, build)

    if choice == "default":
        build = functools.partial(_turbo, config=tj.TurboConfig(), implementation=None)
        return [*rows, Case("turbo-default", None, build)]
    if choice.startswith("hopper") and shape.window is None:
        rows.append(Case("e4m3-cudnn", None, _cudnn_fp8))
    if choice == "hopper-short":
        return [*rows, *(ours(*row) for row in _HOPPER[:3])]
    if choice == "hopper":
        cached = [ours(*row, cached=True) for row in _HOPPER[:3:2]]
        return [*rows, *(ours(*row) for row in _HOPPER), *cached]
    rows += [ours(*row) for row in (_THOROUGH if choice == "thorough" else _SHORT)]
    rows.append(Case("pallas", None, _pallas))
    rows.append(Case("xla", None, functools.partial(_exact, implementation="xla")))
    if shape.batch * shape.tokens <= _XLA_TOKENS:
        rows.append(ours("int8", "sas", 64, "xla"))
    return rows
