"""Prefill: attention within a prompt, from bfloat16 to bfloat16; training: with its gradient."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

import turbojax as tj
from benchmarks import timing
from benchmarks._compat import cudnn_attention
from benchmarks.measuring import work
from benchmarks.measuring.samples import (
    Error,
    errors,
    exact_attention,
    exact_gradient,
    exact_rows,
    require_gpu,
    sample,
    sample_all,
)
from benchmarks.shapes import Shape
from benchmarks.suites.attention.cases import Call, Case, Choice, Operation

# Errors are taken over this many scores per head, in rows spread over the first sequence.
_COMPARED_SCORES = 2**21
_XLA_TOKENS = 2048
# Of samples, whose standard deviation is 1 and some of whose channels are louder.
_SCALE = 16.0
# Conversion makes NaN of what is beyond.
_LARGEST = 448.0
SOFTMAXES = {"sas": tj.SAS(), "sas2": tj.SAS(base="2"), "exact": "exact"}


class Inputs:
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


def exact_of(shape: Shape, implementation: str) -> Callable[..., jax.Array]:
    options = {"is_causal": shape.is_causal, "local_window_size": shape.local_window}
    return exact_attention(implementation, **options)


def _exact(inputs: Inputs, implementation: str) -> Call:
    attend = exact_of(inputs.shape, implementation)
    needed = work.prefill_work(inputs.shape, "bf16")
    return Call(attend, (inputs.query, inputs.key, inputs.value), needed, inputs.error)


def quantized(x: jax.Array, group: int = 1) -> jax.Array:
    """Samples in e4m3, each KV head repeated for the heads of its group."""
    scaled = jnp.clip(x.astype(jnp.float32) * _SCALE, -_LARGEST, _LARGEST)
    codes = scaled.astype(jnp.float8_e4m3fn)
    return jnp.repeat(codes, group, axis=2) if group > 1 else codes


def dequantized(out: jax.Array) -> jax.Array:
    """`attend`'s output in bfloat16."""
    return (out.astype(jnp.float32) / _SCALE).astype(jnp.bfloat16)


def attend_in_e4m3(q: jax.Array, k: jax.Array, v: jax.Array, *, is_causal: bool) -> jax.Array:
    """cuDNN's attention of `quantized` operands ``[B, S, N, H]``; see `dequantized`.

    jax reaches it only through a private module, on which nothing but this row depends. The call is
    not charged for quantizing, nor for having as many KV heads as heads.
    """
    cudnn = cudnn_attention()
    mask = cudnn.MaskType.CAUSAL if is_causal else cudnn.MaskType.NO_MASK
    one = jnp.ones((1, 1, 1, 1), jnp.float32)
    params = dict.fromkeys(cudnn.fp8_params_keys, one)
    # Weights are at most 1: their scale uses the range of e4m3.
    params |= {"scale_s": 256 * one, "descale_s": one / 256}
    out, *_ = cudnn.dot_product_attention(
        *(q, k, v),
        scale=q.shape[-1] ** -0.5 / _SCALE**2,
        mask_type=mask,
        use_fp8=True,
        fp8_params=params,
    )
    return out


def _cudnn_fp8(inputs: Inputs) -> Call:
    require_gpu("cuDNN")
    shape = inputs.shape
    group = shape.heads.query // shape.heads.kv
    key, value = (quantized(x, group) for x in (inputs.key, inputs.value))
    return Call(
        functools.partial(attend_in_e4m3, is_causal=shape.is_causal),
        (quantized(inputs.query), key, value),
        work.prefill_work(shape, "fp8"),
        lambda out: inputs.error(dequantized(out)),
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


PREFILL = Operation("prefill", Inputs, cases)


# Training: forward and backward in one call -------------------------------------------------------


class TrainingInputs(Inputs):
    """A prompt's query, key and value, and the cotangent of its output."""

    def __init__(self, shape: Shape):
        super().__init__(shape)
        heads = shape.heads
        self.d_out = sample(
            3, batch=shape.batch, tokens=shape.tokens, heads=heads.query, dim=heads.dim
        )

    @functools.cached_property
    def expected_gradient(self) -> jax.Array:
        """float32 ``[1, R, N, H]``: of the query's rows that are compared, exact."""
        query, d_out = (x[:1, self.rows] for x in (self.query, self.d_out))
        return exact_gradient(query, *self.seen, d_out)

    def gradient_error(self, results: tuple[jax.Array, ...]) -> Error:
        return errors(results[1][:1, self.rows], self.expected_gradient)


def _both(
    inputs: TrainingInputs, attend: Callable[..., Any], mode: str, gradient: str, **facts: Any
) -> Call:
    def run(q: jax.Array, k: jax.Array, v: jax.Array, d_out: jax.Array) -> tuple[jax.Array, ...]:
        out, pull = jax.vjp(attend, q, k, v)
        return out, *pull(d_out)

    return Call(
        run,
        (inputs.query, inputs.key, inputs.value, inputs.d_out),
        work.training_work(inputs.shape, mode, gradient),
        inputs.gradient_error,
        facts,
    )


def _cudnn_both(inputs: TrainingInputs) -> Call:
    return _both(inputs, exact_of(inputs.shape, "cudnn"), "bf16", "float")


def _turbo_both(
    inputs: TrainingInputs, config: tj.TurboConfig, implementation: str | None = "mosaic_gpu"
) -> Call:
    attend = functools.partial(
        tj.turbo_attention,
        config=config,
        is_causal=inputs.shape.is_causal,
        local_window_size=inputs.shape.local_window,
        implementation=implementation,
    )
    return _both(inputs, attend, config.mode, config.gradient, block=config.block_kv)


def training_cases(shape: Shape, choice: Choice) -> list[Case]:
    del shape
    modes = [("fp8", "float"), ("fp8", "8bit")]
    if choice == "hopper":
        modes += [("int8_fp8", "float"), ("int8_fp8", "8bit"), ("int8", "8bit")]
    rows = [Case("cudnn", None, _cudnn_both)]
    if choice == "default":
        build = functools.partial(_turbo_both, config=tj.TurboConfig(), implementation=None)
        return [*rows, Case("turbo-default", None, build)]
    for mode, gradient in modes:
        config = tj.TurboConfig(mode=mode, softmax="exact", gradient=gradient)
        build = functools.partial(_turbo_both, config=config)
        rows.append(Case(f"turbo-{mode}-exact-gradient-{gradient}", "mosaic_gpu", build))
    return rows


TRAINING = Operation("training", TrainingInputs, training_cases)
