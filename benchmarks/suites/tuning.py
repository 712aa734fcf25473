"""What `python -m benchmarks tune` tunes: kernels, shapes and candidates."""

import functools
import itertools
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp

import turbojax as tj
from benchmarks.shapes import Shape
from benchmarks.suites import decode, prefill
from benchmarks.suites.common import turbo_configs
from benchmarks.tune import Problem
from turbojax.ops.turbo_attention import mosaic_decode, mosaic_gpu
from turbojax.ops.turbo_attention.masking import Visibility

_LLAMA, _NARROW = "llama3-8b", "llama3.2-1b"
DECODE_SHAPES = [(16, 32768), (1, 131072), (64, 4096), (16, 4096), (1, 1024), (1, 4096)]
DECODE_SHAPES += [(16, 1024), (1, 32768), (4, 1024), (4, 4096)]
PREFILL_SHAPES = [(_LLAMA, 2, 8192), (_LLAMA, 1, 32768), (_NARROW, 2, 8192)]
PREFILL_MODES = [("int8_fp8", "exact"), ("fp8", "exact"), ("int8", "sas"), ("int8_fp8", "sas")]
# Stages, whether scores are computed ahead, and of eight exponentials how many are multiplied.
PREFILL_LAUNCHES = [(4, True, 0), (4, False, 0), (3, True, 0), (4, True, 1), (4, True, 2)]
# Relative to the splits of the default.
_SPLITS = (0.5, 0.75, 1.0, 1.25, 1.5)


def problems() -> Iterator[Problem]:
    """All of them, what matters most first."""
    for (batch, tokens), bits in itertools.product(DECODE_SHAPES, ("4bit", "2/4bit")):
        if bits == "4bit" or batch * tokens > 2**16:
            yield _decode(Shape(_LLAMA, batch, tokens), bits)
    for (model, batch, tokens), is_causal, (mode, softmax) in itertools.product(
        PREFILL_SHAPES, (False, True), PREFILL_MODES
    ):
        yield _prefill(Shape(model, batch, tokens, is_causal), mode, softmax)


def _clusters(splits: int, tokens: int) -> tuple[int, ...]:
    """Programs that merge among themselves: none, or all of a short cache."""
    return (1, splits) if 1 < splits <= 8 and tokens <= 4096 else (1,)


def _first(default: Any, others: Iterator[Any]) -> tuple[Any, ...]:
    """The default before the others, each once."""
    return tuple(dict.fromkeys([default, *others]))


def _decode(shape: Shape, bits: str) -> Problem:
    heads = shape.heads
    config = turbo_configs(heads.kv)[bits]
    query = jax.ShapeDtypeStruct((shape.batch, 1, heads.query, heads.dim), jnp.bfloat16)
    sizes = (shape.batch, shape.tokens, heads.kv, heads.dim)
    cache = jax.eval_shape(lambda: tj.init_cache(*sizes, config=config))
    default = mosaic_decode.default_launch(query, cache)
    splits = {max(1, round(share * default.splits)) for share in _SPLITS}
    candidates = (
        mosaic_decode.Launch(count, 1, stages, cluster)
        for count, stages in itertools.product(sorted(splits), (1, 2, 3))
        for cluster in _clusters(count, shape.tokens)
    )

    def build() -> tuple[tuple[Any, ...], Callable[[Any], Callable[..., Any]]]:
        inputs = decode.Inputs(shape)
        lengths = jnp.ones(shape.batch, jnp.int32)
        run = functools.partial(
            mosaic_decode.decode,
            scale=heads.dim**-0.5,
            visibility=Visibility(True, None),
            logits_soft_cap=None,
        )
        arguments = inputs.query, inputs.turbo(config), lengths
        return arguments, lambda launch: functools.partial(run, launch=launch)

    place = mosaic_decode.shape_of(query, cache)
    name = f"decode/{shape.label}/{bits}"
    return Problem(
        name, "mosaic_decode", **place, candidates=_first(default, candidates), build=build
    )


def _prefill(shape: Shape, mode: str, softmax: str) -> Problem:
    heads = shape.heads
    config = tj.TurboConfig(
        mode=mode, softmax=prefill.SOFTMAXES[softmax], block_q=128, block_kv=128, buffer_size=128
    )
    query, key = (
        jax.ShapeDtypeStruct((shape.batch, shape.tokens, n, heads.dim), jnp.bfloat16)
        for n in (heads.query, heads.kv)
    )
    visibility = Visibility(shape.is_causal, None)
    default = mosaic_gpu.default_launch(query, config)
    candidates = (
        mosaic_gpu.Launch(stages, False, ahead, multiplied)
        for stages, ahead, multiplied in PREFILL_LAUNCHES
    )

    def build() -> tuple[tuple[Any, ...], Callable[[Any], Callable[..., Any]]]:
        inputs = prefill.Inputs(shape)
        lengths = jnp.full(shape.batch, shape.tokens, jnp.int32)
        run = functools.partial(
            mosaic_gpu.attention,
            config=config,
            scale=heads.dim**-0.5,
            visibility=visibility,
            logits_soft_cap=None,
        )
        arguments = inputs.query, inputs.key, inputs.value, lengths, lengths
        return arguments, lambda launch: functools.partial(run, launch=launch)

    place = mosaic_gpu.shape_of(query, key, config, visibility)
    every = _first(default, candidates)
    name = f"prefill/{shape.label}/{mode}-{softmax}"
    return Problem(name, "mosaic_gpu", **place, candidates=every, build=build)
