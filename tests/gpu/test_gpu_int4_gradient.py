"""The gradient's kernels of `int4_matmul` compiled: against the definition in XLA and float64."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import turbojax as tj
from tests.gpu.gpu_helpers import on_hopper
from tests.matmul.int4_helpers import random_weight, wide
from tests.oracles import int4 as oracle
from turbojax.matmul.fp8_tokens import scale_quantize
from turbojax.matmul.int4 import mosaic_operands
from turbojax.matmul.int4.weight import scaled_values
from turbojax.models import lora
from turbojax.quantizers import quantize_tokens

pytestmark = [pytest.mark.gpu, on_hopper]

# Tokens, outputs, inputs, activation: whole tiles and odd sizes, few tokens and many.
CASES = {
    "one token": (1, 64, 128, None),
    "few tokens, shared": (17, 4096, 640, None),
    "a tile, shared": (256, 14336, 384, None),
    "odd sizes": (33, 1030, 520, "silu"),
    "odd sizes, gated": (300, 75, 1000, "swiglu"),
    "many tokens": (4096, 768, 4096, None),
    "many tokens, gated": (2049, 704, 640, "swiglu"),
    "an odd number of groups": (129, 192, 384, "gelu"),
}


@functools.lru_cache(maxsize=2)
def operands(case, dtype=jnp.bfloat16):
    rows, outputs, inputs, activation = case
    rng = np.random.default_rng(0)
    weight = random_weight(rng, outputs, inputs, "e4m3", gated=activation == "swiglu")
    x, d_out = (jnp.asarray(rng.normal(size=(rows, n)), dtype) for n in (inputs, outputs))
    return x, weight, d_out


@functools.partial(jax.jit, static_argnames=("activation", "gradient", "implementation"))
def d_x(x, weight, d_out, activation, gradient="e4m3", implementation="mosaic_gpu"):
    options = {"activation": activation, "implementation": implementation}
    call = functools.partial(tj.fireq.matmul, weight=weight, gradient=gradient, **options)
    return jax.vjp(call, x)[1](d_out)[0]


@pytest.mark.parametrize("shape", [(64, 128), (192, 384), (4096, 1024)])
def test_transposed_weights(shape):
    """To the bit, and zeros beyond the last row."""
    from pallas_kernels.mosaic.hopper.matmul.expand import int4_expand_transposed

    weight = random_weight(np.random.default_rng(1), *shape, "e4m3")
    tables = jnp.asarray(mosaic_operands.tables())
    got = jax.jit(int4_expand_transposed)(weight.codes, weight.scales, tables)
    want = np.zeros((shape[1], -(-shape[0] // 128) * 128))
    want[:, : shape[0]] = wide(scaled_values(weight)).T
    np.testing.assert_array_equal(wide(got), want)


@pytest.mark.quick(9)
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
@pytest.mark.parametrize("name", CASES)
def test_equals_the_definition(name, dtype):
    """But for sums in the matrix unit, and near what is not rounded; twice the same bits.

    A result's rounding is within half a unit in the last place, twice: `matrix_unit` says 4e-4 of
    the norm for sums of 1,024, and their parts are independent. Sums before an activation are
    rounded to bfloat16, now and then to another neighbour, and so are cotangents to e4m3; and the
    derivative is that at rounded tokens.
    """
    x, weight, d_out = operands(CASES[name], dtype)
    activation = CASES[name][3]
    got = d_x(x, weight, d_out, activation)
    assert (got.shape, got.dtype) == (x.shape, dtype)
    want = d_x(x, weight, d_out, activation, implementation="xla")
    exact = d_x(x, weight, d_out, activation, gradient="exact")
    for to, allowed in (
        (want, 1e-2 if activation else 3e-3),
        (exact, 0.07 if activation else 0.05),
    ):
        assert np.linalg.norm(wide(got) - wide(to)) <= allowed * np.linalg.norm(wide(to))
    np.testing.assert_array_equal(wide(got), wide(d_x(x, weight, d_out, activation)))


def test_equals_the_oracle():
    """Of what is multiplied, the codes of cotangents and the weight's values, in float64."""
    x, weight, d_out = operands(CASES["few tokens, shared"])
    got = d_x(x, weight, d_out, None)
    scaled = jnp.asarray(wide(d_out) * wide(weight.output_scale)[None, : d_out.shape[1]])
    codes = quantize_tokens(scaled.astype(jnp.bfloat16))
    values = wide(scaled_values(weight))[: d_out.shape[1], : x.shape[1]]
    want = (wide(codes.codes) @ values) * wide(codes.scale)[:, None]
    rounding = oracle.matrix_unit_error(wide(codes.codes), values.T, values.shape[0])
    allowed = rounding * wide(codes.scale)[:, None] + 2.0**-8 * np.abs(want)
    assert (np.abs(wide(got) - want) <= allowed).all()


def test_what_is_not_finite():
    x, weight, d_out = operands(CASES["an odd number of groups"])
    got = d_x(x, weight, d_out.at[3, 5].set(jnp.nan), None)
    np.testing.assert_array_equal(np.isnan(wide(got)).all(1), np.arange(len(x)) == 3)
    np.testing.assert_array_equal(np.isnan(wide(got)).any(1), np.arange(len(x)) == 3)


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16, jnp.float32])
@pytest.mark.parametrize("channels", [46, 300, 14336])
def test_factors_of_channels(channels, dtype):
    """The bits of XLA."""
    rng = np.random.default_rng(0)
    x = jnp.asarray(rng.normal(size=(37, channels)), dtype)
    scale = jnp.asarray(2.0 ** rng.integers(-6, 6, channels) * 1.25, jnp.float32)
    got, want = (
        jax.jit(functools.partial(scale_quantize, implementation=name))(x, scale)
        for name in ("mosaic_gpu", "xla")
    )
    np.testing.assert_array_equal(wide(got.codes), wide(want.codes))
    np.testing.assert_array_equal(wide(got.scale), wide(want.scale))


def test_adapters():
    """A step's gradient of all adapters: in e4m3 near that of exact products, and of XLA's."""
    from turbojax import models
    from turbojax.finetune.lora import token_losses

    config = models.TransformerConfig(
        vocab_size=256,
        hidden_size=256,
        intermediate_size=512,
        num_layers=2,
        num_heads=4,
        num_kv_heads=2,
        head_dim=64,
        max_length=512,
        tie_embeddings=True,
    )
    decoder = models.random_quantized_decoder(config)
    adapters = lora.init_adapters(decoder)
    tokens = jax.random.randint(jax.random.key(0), (2, 257), 0, 256)

    @functools.partial(jax.jit, static_argnames="gradient")
    def step(adapters, gradient):
        def loss(adapters):
            model = lora.with_adapters(decoder, adapters, gradient=gradient)
            return jnp.mean(token_losses(model, tokens))

        return jax.value_and_grad(loss)(adapters)

    (loss, got), (same, want) = (step(adapters, name) for name in ("e4m3", "exact"))
    np.testing.assert_array_equal(loss, same)
    got, want = (np.concatenate([wide(x).ravel() for x in jax.tree.leaves(g)]) for g in (got, want))
    assert np.linalg.norm(got - want) < 0.1 * np.linalg.norm(want)
    assert np.linalg.norm(want) > 0
