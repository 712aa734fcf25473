"""Training: attention forward and backward in one call, in bfloat16."""

import functools
from collections.abc import Callable
from typing import Any

import jax

import turbojax as tj
from benchmarks.measuring import work
from benchmarks.measuring.compiling import require_gpu
from benchmarks.measuring.samples import Error, errors, exact_gradient, sample
from benchmarks.shapes import Shape
from benchmarks.suites.attention import prefill
from benchmarks.suites.attention.cases import Call, Case, Choice

OPERATION = "training"


class Inputs(prefill.Inputs):
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
        """Of the query's gradient."""
        return errors(results[1][:1, self.rows], self.expected_gradient)


def _call(
    inputs: Inputs, attend: Callable[..., Any], mode: str, gradient: str, **facts: Any
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


def _cudnn(inputs: Inputs) -> Call:
    require_gpu("cuDNN")
    return _call(inputs, prefill.exact_attention(inputs.shape, "cudnn"), "bf16", "float")


def _turbo(inputs: Inputs, config: tj.TurboConfig) -> Call:
    attend = functools.partial(
        tj.turbo_attention,
        config=config,
        is_causal=inputs.shape.is_causal,
        local_window_size=inputs.shape.local_window,
        implementation="mosaic_gpu",
    )
    return _call(inputs, attend, config.mode, config.gradient, block=config.block_kv)


def cases(shape: Shape, choice: Choice) -> list[Case]:
    """The rows of one shape, what others are compared with first."""
    del shape
    modes = [("fp8", "float"), ("fp8", "8bit")]
    if choice == "hopper":
        modes += [("int8_fp8", "float"), ("int8_fp8", "8bit"), ("int8", "8bit")]
    rows = [Case("cudnn", None, _cudnn)]
    for mode, gradient in modes:
        config = tj.TurboConfig(mode=mode, softmax="exact", gradient=gradient)
        build = functools.partial(_turbo, config=config)
        rows.append(Case(f"turbo-{mode}-exact-gradient-{gradient}", "mosaic_gpu", build))
    return rows
