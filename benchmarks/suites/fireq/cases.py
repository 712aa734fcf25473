"""FireQ's suite's rows: products, the feed-forward layer, rounding, decode from KV4 and K8V4."""

import functools
import itertools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks import timing
from benchmarks.measuring.calls import Arrays, Call, Case, Group, close, compared_rows
from benchmarks.measuring.work import Needs, decode_work
from benchmarks.shapes import Shape
from benchmarks.suites.attention import decode
from benchmarks.suites.attention.cases import Case as AttentionCase
from turbojax import fireq, k8v4
from turbojax._device import needs_hopper
from turbojax.caches.token_scaled import cache as kv4
from turbojax.fireq import Fp8Tokens, Int4Weight
from turbojax.quantizers import quantize_tokens

# The operations of the suites, as they begin the rows' names.
MATMUL, FFN, QUANTIZE, DECODE = "matmul", "feed-forward", "quantize", "kv4-decode"
KERNELS = ("mosaic_gpu", "triton")
_BFLOAT16 = 2
_EPS = 1e-5
# Of jax's kernel: tokens of a tile are at least as many.
_FEWEST = 16
_ONE_TILE = 64


def matmul(
    size: int,
    outputs: int,
    tokens: int,
    *,
    implementations: tuple[str, ...] = KERNELS,
    with_bf16_scales: bool = False,
) -> Group:
    """``x W^T`` of `tokens` rows: XLA in bfloat16 and e4m3, jax's kernel of int8 weights, and ours.

    ``int4`` begins with tokens in e4m3, ``int4-activations`` with bfloat16 ones, which it rounds,
    and ``w4a16`` does not.
    """
    sizes = (size, outputs, tokens)
    cases = [
        Case("bf16", None, "bf16", functools.partial(_dense_product, sizes, unit="bf16")),
        Case("fp8", None, "fp8", functools.partial(_dense_product, sizes, unit="fp8")),
        Case("jax-int8", None, "int8", functools.partial(mixed_product, sizes)),
    ]
    for i, implementation in enumerate(implementations):
        ours = functools.partial(_int4_product, sizes, implementation)
        cases.append(Case("int4", implementation, "int4", ours))
        if i == 0:
            whole = functools.partial(ours, quantize=True)
            cases.append(Case("int4-activations", implementation, "int4", whole))
            unrounded = functools.partial(_w4a16_product, sizes, implementation)
            cases.append(Case("w4a16", implementation, "int4", unrounded))
        if i == 0 and with_bf16_scales:
            scales = functools.partial(ours, scale_dtype="bf16")
            cases.append(Case("int4-bf16-scales", implementation, "int4", scales))
    label = f"k{size}-n{outputs}/m{tokens}"
    facts = {"inputs": size, "outputs": outputs, "tokens": tokens}
    return Group(MATMUL, label, facts, tuple(cases))


def _xla_product(x: jax.Array, w: jax.Array) -> jax.Array:
    return jnp.einsum("mk,nk->mn", x, w, preferred_element_type=jnp.bfloat16)


def _dense_product(sizes: tuple[int, int, int], arrays: Arrays, *, unit: str) -> Call:
    size, outputs, tokens = sizes
    if unit == "bf16":
        x = arrays.get(activations, tokens, size)
        w = arrays.get(dense, outputs, size)
    else:
        x = arrays.get(tokens_of, tokens, size).codes
        w = arrays.get(dense_fp8, outputs, size)
    needs = product_needs(sizes, (x, w), unit)
    return Call(_xla_product, (x, w), needs, check_product, (x, w))


def _int4_product(
    sizes: tuple[int, int, int],
    implementation: str,
    arrays: Arrays,
    *,
    scale_dtype: str = "e4m3",
    quantize: bool = False,
) -> Call:
    size, outputs, tokens = sizes
    w = arrays.get(int4, outputs, size, scale_dtype)
    x8 = arrays.get(tokens_of, tokens, size)
    x = arrays.get(activations, tokens, size) if quantize else x8
    needs = product_needs(sizes, (x, w), "fp8")
    multiply = functools.partial(fireq.matmul, implementation=implementation)
    return Call(multiply, (x, w), needs, check_product, (x8, w))


def mixed_product(sizes: tuple[int, int, int], arrays: Arrays) -> Call:
    """``W x^T`` of ``(inputs, outputs, tokens)`` by jax's own kernel; of few tokens 16 columns.

    It takes weights of plain int8, twice the bytes of INT4, without scales, and tokens as columns.
    """
    refusal = needs_hopper()
    if refusal is not None:
        raise NotImplementedError(refusal)
    from jax.experimental.pallas.ops.gpu import hopper_mixed_type_matmul_mgpu as kernel

    size, outputs, tokens = sizes
    w = arrays.get(_weights, outputs, size)
    x = arrays.get(_columns, max(tokens, _FEWEST), size)
    config = kernel.TuningConfig(**mixed_settings(kernel, x.shape[1]))

    def multiply(w: jax.Array, x: jax.Array) -> jax.Array:
        return kernel.mixed_matmul_kernel(w, x, out_dtype=jnp.bfloat16, config=config)

    needs = product_needs(sizes, (w, x), "bf16")
    return Call(multiply, (w, x), needs, _check_mixed, (w, x))


def mixed_settings(kernel: Any, tokens: int) -> dict[str, Any]:
    """Few tokens in one tile, with the faster of two settings on an H200; many in tiles of 128."""
    rows, columns = kernel.MatmulDimension.M, kernel.MatmulDimension.N
    if tokens <= _ONE_TILE:
        few = {"tile_m": 64, "tile_n": tokens, "tile_k": 128, "epi_tile_n": tokens}
        return {**few, "max_concurrent_steps": 6, "wg_dimension": rows, "grid_minor_dim": rows}
    many = {"tile_m": 128, "tile_n": 128, "tile_k": 64, "max_concurrent_steps": 4}
    width = 8 if tokens > 2 * 128 else 1
    return {**many, "wg_dimension": rows, "grid_minor_dim": columns, "grid_tile_width": width}


def _weights(outputs: int, size: int) -> jax.Array:
    """int8 ``[outputs, size]``: the weights of the others, times 32."""
    w = dense_fp8(outputs, size).astype(jnp.float32) * 32
    return jnp.clip(jnp.round(w), -127, 127).astype(jnp.int8)


def _columns(tokens: int, size: int) -> jax.Array:
    """bfloat16 ``[size, tokens]``."""
    return activations(tokens, size).T


def _check_mixed(
    out: jax.Array, w: jax.Array, x: jax.Array
) -> tuple[jax.Array, jax.Array, jax.Array]:
    rows = np.unique(compared_rows(out.shape[1]))
    want = product(values(x.T[rows]), values(w))
    return out.T[rows], want, jnp.all(jnp.isfinite(out))


def _w4a16_product(sizes: tuple[int, int, int], implementation: str, arrays: Arrays) -> Call:
    size, outputs, tokens = sizes
    w = arrays.get(int4, outputs, size, "f16")
    x = arrays.get(activations, tokens, size)
    multiply = functools.partial(fireq.matmul, activations="bf16", implementation=implementation)
    needs = product_needs(sizes, (x, w), "bf16")
    return Call(multiply, (x, w), needs, check_product, (x, w))


def feed_forward(
    model: str,
    size: int,
    inner: int,
    tokens: int,
    *,
    implementations: tuple[str, ...] = KERNELS,
) -> Group:
    """``(silu(x G^T) * (x U^T)) D^T``, from bfloat16 to bfloat16."""
    sizes = (size, inner, tokens)
    cases = [
        Case("bf16", None, "bf16", functools.partial(_dense_layer, sizes, apart=False)),
        Case("bf16-apart", None, "bf16", functools.partial(_dense_layer, sizes, apart=True)),
    ]
    for implementation in implementations:
        ours = functools.partial(_int4_layer, sizes, implementation)
        cases.append(Case("int4", implementation, "int4", ours))
    facts = {"model": model, "inputs": size, "outputs": inner, "tokens": tokens}
    return Group(FFN, f"{model}/m{tokens}", facts, tuple(cases))


def _layer_needs(sizes: tuple[int, int, int], weights: Any, unit: str) -> Needs:
    """Of the layer; what lies between its products need not be written."""
    size, inner, tokens = sizes
    return Needs(
        timing.nbytes(weights) + 2 * tokens * size * _BFLOAT16, 6.0 * tokens * size * inner, unit
    )


def _dense_layer(sizes: tuple[int, int, int], arrays: Arrays, *, apart: bool) -> Call:
    size, inner, tokens = sizes
    x = arrays.get(activations, tokens, size)
    gate_up = arrays.get(dense_gate_and_up, inner, size)
    down = arrays.get(dense, size, inner)

    def together(x: jax.Array, gate_up: jax.Array, down: jax.Array) -> jax.Array:
        gate, up = jnp.split(_xla_product(x, gate_up), 2, axis=1)
        return _xla_product(jax.nn.silu(gate) * up, down)

    def separate(x: jax.Array, gate: jax.Array, up: jax.Array, down: jax.Array) -> jax.Array:
        return _xla_product(jax.nn.silu(_xla_product(x, gate)) * _xla_product(x, up), down)

    def check(
        out: jax.Array, x: jax.Array, gate_up: jax.Array, down: jax.Array
    ) -> tuple[jax.Array, jax.Array, jax.Array]:
        rows = compared_rows(out.shape[0])
        gate, up = jnp.split(_float_product(x[rows], gate_up), 2, axis=1)
        want = _float_product(jax.nn.silu(gate) * up, down)
        return out[rows], want, jnp.all(jnp.isfinite(out))

    operands = (x, gate_up, down)
    needs = _layer_needs(sizes, operands[1:], "bf16")
    if not apart:
        return Call(together, operands, needs, check, operands)
    return Call(separate, (x, *jnp.split(gate_up, 2), down), needs, check, operands)


def _float_product(x: Any, w: Any) -> jax.Array:
    return product(values(x), values(w))


def _int4_layer(sizes: tuple[int, int, int], implementation: str, arrays: Arrays) -> Call:
    size, inner, tokens = sizes
    x = arrays.get(activations, tokens, size)
    gate_up = arrays.get(gate_and_up, inner, size)
    down = arrays.get(int4, size, inner)
    multiply = functools.partial(fireq.matmul, implementation=implementation)

    def layer(x: jax.Array, gate_up: Int4Weight, down: Int4Weight) -> jax.Array:
        return multiply(multiply(x, gate_up, activation="swiglu"), down)

    def check(
        out: jax.Array, x: jax.Array, gate_up: Int4Weight, down: Int4Weight
    ) -> tuple[jax.Array, jax.Array, jax.Array]:
        rows = compared_rows(out.shape[0])
        gate, up = jnp.split(_float_product(quantize_tokens(x[rows]), gate_up), 2, axis=1)
        inner = (jax.nn.silu(gate) * up).astype(x.dtype)
        want = _float_product(quantize_tokens(inner), down)
        return out[rows], want, jnp.all(jnp.isfinite(out))

    operands = (x, gate_up, down)
    return Call(layer, operands, _layer_needs(sizes, operands[1:], "fp8"), check, operands)


def quantize(
    tokens: int, size: int, *, with_norm: bool, implementations: tuple[str, ...] = KERNELS
) -> Group:
    """Activations to e4m3, with RMSNorm before it or not."""
    cases = tuple(
        Case(
            "e4m3",
            name,
            "xla" if name == "xla" else "kernel",
            functools.partial(_quantize, tokens, size, with_norm, name),
        )
        for name in ("xla", *implementations)
    )
    label = f"{'norm' if with_norm else 'plain'}-{tokens}x{size}"
    return Group(QUANTIZE, label, {"tokens": tokens, "inputs": size, "norm": with_norm}, cases)


def _quantize(tokens: int, size: int, with_norm: bool, implementation: str, arrays: Arrays) -> Call:
    x = arrays.get(activations, tokens, size)
    scale = jnp.ones(size, jnp.float32)

    def plain(x: jax.Array) -> Fp8Tokens:
        return fireq.quantize_activation(x, implementation=implementation)

    def normed(x: jax.Array, scale: jax.Array) -> Fp8Tokens:
        return fireq.rms_norm_quantize(x, scale, _EPS, implementation=implementation)

    def check(out: Fp8Tokens, x: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
        rows = compared_rows(x.shape[0])
        want = x[rows].astype(jnp.float32)
        if with_norm:
            want = want * jax.lax.rsqrt(jnp.mean(want**2, axis=-1, keepdims=True) + _EPS)
        got = values(jax.tree.map(lambda leaf: leaf[rows], out))
        return got, want, jnp.all(jnp.isfinite(values(out)))

    arguments = (x, scale) if with_norm else (x,)
    needs = Needs(timing.nbytes(arguments) + tokens * (size + _BFLOAT16), 0.0, "fp8")
    return Call(normed if with_norm else plain, arguments, needs, check, (x,))


def decode_kv4(shape: Shape, *, implementations: tuple[str, ...] = KERNELS) -> Group:
    """One query token a sequence: cuDNN in bfloat16, TurboAttention's 4-bit cache, KV4, K8V4."""
    cases = []
    for case in decode.cases(shape, "short"):
        if case.method.startswith("cudnn") or case.method == "turbo-4bit":
            family = "cudnn" if case.implementation is None else "turbo"
            build = functools.partial(_decode_of, shape, case)
            cases.append(Case(case.method, case.implementation, family, build))
    for kind, implementation in itertools.product(_INIT, implementations):
        build = functools.partial(_decode_scaled, shape, kind, implementation)
        cases.append(Case(kind, implementation, kind, build))
    facts = {"model": shape.model, "batch": shape.batch, "tokens": shape.tokens}
    return Group(DECODE, shape.label, facts, tuple(cases))


def _decode_of(shape: Shape, case: AttentionCase, arrays: Arrays) -> Call:
    call = case.build(arrays.get(decode.Inputs, shape))
    needs = Needs(call.work.amount, 0.0, "bf16")
    return Call(
        call.function, call.arguments, needs, errors=lambda out: {"against_exact": call.error(out)}
    )


def _decode_scaled(shape: Shape, kind: str, implementation: str, arrays: Arrays) -> Call:
    """Errors are against the definition, on the same cache; and against exact attention."""
    made = arrays.get(decode.Inputs, shape)
    cache = arrays.get(_scaled_cache, shape, kind, made)
    # Codes and scales of the tokens held, of both sides.
    sides = (cache.key_codes, cache.key_scale, cache.value_codes, cache.value_scale)
    per_token = sum(x.nbytes // x.shape[2] for x in sides)
    held = made.length * per_token
    needs = Needs(decode_work(shape, held).amount, 0.0, "bf16")
    first = made.query[:1], jax.tree.map(lambda x: x[:1], cache)

    def errors(out: jax.Array) -> dict[str, Any]:
        if not jnp.all(jnp.isfinite(out)):
            raise ArithmeticError("the output is not finite")
        defined = close(out[:1], _defined_decode(*first))
        return {**defined, "against_exact": made.error(out)}

    attend = functools.partial(fireq.decode, implementation=implementation)
    return Call(attend, (made.query, cache), needs, errors=errors)


_INIT = {"kv4": fireq.init_cache, "k8v4": k8v4.init_cache}


def _scaled_cache(shape: Shape, kind: str, made: decode.Inputs) -> kv4.TokenScaledCache:
    return _fill(kind, shape.tokens, made.key, made.value, made.lengths)


@functools.partial(jax.jit, static_argnums=(0, 1))
def _fill(
    kind: str, capacity: int, key: jax.Array, value: jax.Array, lengths: jax.Array
) -> kv4.TokenScaledCache:
    batch, _, heads, dim = key.shape
    empty = _INIT[kind](batch, capacity, heads, dim, dtype=key.dtype)
    return kv4.store_prompt(empty, key, value, lengths)


_defined_decode = jax.jit(functools.partial(fireq.decode, implementation="xla"))


@functools.partial(jax.jit, static_argnums=1)
def _normal(seed: int, shape: tuple[int, ...]) -> jax.Array:
    return jax.random.normal(jax.random.key(seed), shape, jnp.float32)


def activations(tokens: int, size: int) -> jax.Array:
    """bfloat16 ``[tokens, size]``."""
    return _normal(0, (tokens, size)).astype(jnp.bfloat16)


def tokens_of(tokens: int, size: int) -> Fp8Tokens:
    """The activations in e4m3."""
    return fireq.quantize_activation(activations(tokens, size), implementation="xla")


def dense(outputs: int, inputs: int, seed: int = 1) -> jax.Array:
    """A weight in bfloat16, ``[outputs, inputs]``, of standard deviation ``inputs**-0.5``."""
    return (_normal(seed, (outputs, inputs)) * inputs**-0.5).astype(jnp.bfloat16)


def dense_fp8(outputs: int, inputs: int) -> jax.Array:
    """The weight in e4m3, times the root of its inputs."""
    return _normal(1, (outputs, inputs)).astype(jnp.float8_e4m3fn)


def int4(outputs: int, inputs: int, scale_dtype: str = "e4m3", seed: int = 1) -> Int4Weight:
    """The weight in 4 bits, its standard deviation as a factor of the outputs."""
    w = _normal(seed, (outputs, inputs))
    return fireq.quantize_weight(w, scale_dtype=scale_dtype, output_scale=inputs**-0.5)


def gate_and_up(inner: int, size: int) -> Int4Weight:
    """Both weights of a gated product in 4 bits."""
    return fireq.gate_and_up(int4(inner, size, seed=1), int4(inner, size, seed=2))


def dense_gate_and_up(inner: int, size: int) -> jax.Array:
    """The same in bfloat16, ``[2 inner, size]``, the gate first."""
    return jnp.concatenate([dense(inner, size, 1), dense(inner, size, 2)])


def values(x: jax.Array | Fp8Tokens | Int4Weight) -> jax.Array:
    """What an operand stands for, in float32."""
    if isinstance(x, Fp8Tokens):
        return x.codes.astype(jnp.float32) * x.scale.astype(jnp.float32)[..., None]
    if isinstance(x, Int4Weight):
        return fireq.dequantize(x)
    return x.astype(jnp.float32)


def product_needs(sizes: tuple[int, int, int], operands: Any, unit: str) -> Needs:
    """Of a product of ``(inputs, outputs, tokens)``, whose result is in bfloat16."""
    size, outputs, tokens = sizes
    moved = timing.nbytes(operands) + tokens * outputs * 2
    return Needs(moved, 2.0 * tokens * outputs * size, unit)


def product(x: jax.Array, w: jax.Array) -> jax.Array:
    """``x w^T`` in float32 of a few rows.

    A sum and no matrix product: XLA need not search for the fastest way, and nothing is rounded.
    """
    return jnp.sum(x[:, None] * w[None], axis=-1)


def check_product(
    out: jax.Array, x: jax.Array | Fp8Tokens, w: jax.Array | Int4Weight
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Compares a product in any format with that of its own operands in float32."""
    rows = compared_rows(out.shape[0])
    some = jax.tree.map(lambda leaf: leaf[rows], x)
    return out[rows], product(values(some), values(w)), jnp.all(jnp.isfinite(out))
