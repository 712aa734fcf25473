"""What is the Triton attention kernel's own: real models' heads, refusals, gradient, lowering.

Numerics that every implementation shares are in `test_turbo_attention.py`.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import turbojax as tj
from benchmarks.shapes import MODELS
from tests.attention.attention_helpers import (
    EXACT,
    MODES,
    SAS_2,
    SAS_E,
    attend,
    changed,
    standard,
    tensors,
)
from tests.grids import pairwise
from tests.kernels.kernel_helpers import lower_for_cuda, modifiers_of
from turbojax._device import interpret_kernels
from turbojax.attention.options import Options
from turbojax.attention.turbo import triton


@pytest.fixture(autouse=True)
def _interpreted():
    with interpret_kernels():
        yield


def run(query, key, value, config, **options):
    if options.get("key_value_seq_lengths") is not None:
        options["key_value_seq_lengths"] = jnp.asarray(options["key_value_seq_lengths"], jnp.int32)
    options |= {"implementation": "triton", "return_residual": True}
    return attend(query, key, value, config=config, **options)


@pytest.mark.quick(slow=1)
@pytest.mark.parametrize("name", ["falcon-7b", "gemma2-9b", "stablelm-3b"])
def test_heads_of_real_models(name):
    """Odd groups, 71 heads to one, head dims 64 to 256: against the reference."""
    heads = MODELS[name]
    q, k, v = tensors(4, 1, 9, 70, heads.query, heads.kv, heads.dim)
    config = tj.TurboConfig.paper(softmax=EXACT)
    want = attend(q, k, v, config=config, implementation="xla", return_residual=True)
    for got, expected in zip(run(q, k, v, config), want, strict=True):
        np.testing.assert_allclose(got, expected, atol=2e-5)


@pytest.mark.quick(1)
@pytest.mark.parametrize(
    ("mode", "softmax"),
    [("int8", SAS_E), ("fp8", SAS_E), ("float", EXACT)],
)
def test_nan_reaches_exactly_what_it_reaches_in_the_reference(mode, softmax):
    q, k, v = standard()
    k = changed(k, (0, 70, 1, 3), np.nan)
    v = changed(v, (1, 3, 0, 0), np.inf)
    q = changed(q, (1, 140, 3, 0), -np.inf)
    lengths = np.array([150, 80, 0], np.int32)
    options = {"is_causal": True, "key_value_seq_lengths": lengths}
    config = tj.TurboConfig(mode=mode, softmax=softmax)
    got = run(q, k, v, config, **options)
    want = attend(q, k, v, config=config, implementation="xla", return_residual=True, **options)
    for a, b in zip(got, want, strict=True):
        np.testing.assert_array_equal(np.isnan(a), np.isnan(b))
        np.testing.assert_array_equal(np.isinf(a), np.isinf(b))
    assert np.isnan(got[0]).any()
    assert not np.isnan(got[0]).all()


@pytest.mark.quick(slow=1)
@pytest.mark.parametrize("mode", ["int8", "fp8", "float"])
def test_nan_survives_maxima_that_lose_it(mode, monkeypatch):
    """On a GPU a maximum of NaN and a number is the number; interpreted kernels keep NaN."""
    q, k, v = standard()
    k = changed(k, (0, 70, 1, 3), np.nan)
    config = tj.TurboConfig(mode=mode, softmax=SAS_E, block_q=64, block_kv=64)
    options = {"is_causal": True, "return_residual": True}
    want = attend(q, k, v, config=config, implementation="xla", **options)
    highest, maximum = jnp.max, jnp.maximum

    def number(x, other):
        is_float = jnp.issubdtype(jnp.asarray(x).dtype, jnp.floating)
        return jnp.where(x == x, x, other) if is_float else x

    with monkeypatch.context() as patched:
        patched.setattr(jnp, "max", lambda x, **axis: highest(number(x, -jnp.inf), **axis))
        patched.setattr(jnp, "maximum", lambda a, b: maximum(number(a, b), number(b, a)))
        arguments = {"implementation": "triton", **options}
        got = tj.turbo_attention(q, k, v, config=config, **arguments)
    for a, b in zip(got, want, strict=True):
        np.testing.assert_array_equal(np.isnan(a), np.isnan(b))
    assert np.isnan(got[0]).any()


@pytest.mark.quick(1)
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16], ids=["bf16", "f16"])
def test_infinite_values_stay_infinite_in_half_precision(dtype):
    """A weight is two numbers there, of which the second may be 0 or negative."""
    q, k, v = tensors(5, 1, 70, 70, 2, 1, 64, dtype)
    v = v.at[0, 3, 0, 0].set(jnp.inf).at[0, 5, 0, 1].set(-jnp.inf).at[0, 6, 0, 2].set(jnp.nan)
    config = tj.TurboConfig(mode="float", softmax=EXACT)
    got, _ = run(q, k, v, config)
    want, _ = attend(q, k, v, config=config, implementation="xla", return_residual=True)
    got, want = (np.asarray(x.astype(jnp.float32)) for x in (got, want))
    np.testing.assert_array_equal(got[..., :3], want[..., :3])
    assert np.isposinf(got[..., 0]).all()
    assert np.isfinite(got[..., 3:]).all()


REFUSED = {
    "short blocks": ({"block_kv": 16, "buffer_size": 64}, 64, "block_kv=16 must be at least 32"),
    "odd blocks": ({"block_kv": 24, "buffer_size": 48}, 64, "block_kv=24 must be"),
    "wide heads": ({}, 320, "head_dim=320 must be a multiple of 8 up to 256"),
    "too large a tile": (
        {"mode": "float", "block_kv": 128, "buffer_size": 128},
        256,
        "take 131072 bytes of shared memory, must be at most 65536",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refusals(name):
    options, dim, message = REFUSED[name]
    q, k, v = tensors(7, 1, 8, 8, 2, 1, dim)
    with pytest.raises(NotImplementedError, match=message):
        run(q, k, v, tj.TurboConfig.paper(**options))


@pytest.mark.optimized
@pytest.mark.slow
def test_vmap_and_scan_give_the_same_bits():
    q, k, v = tensors(6, 3, 20, 70, 2, 1, 64)
    one = functools.partial(
        tj.turbo_attention, config=tj.TurboConfig.paper(), implementation="triton"
    )
    want = one(q, k, v)
    np.testing.assert_array_equal(want, one(q, k, v))
    # A scan of a vmap of single sequences.
    singles = tuple(np.asarray(x)[:, None, None] for x in (q, k, v))
    _, mapped = jax.lax.scan(lambda c, x: (c, jax.vmap(one)(*x)), None, singles)
    np.testing.assert_array_equal(mapped[:, 0, 0], want)


@pytest.mark.slow
def test_the_gradient_is_straight_through():
    """As that of plain JAX."""
    config = tj.TurboConfig.paper()
    q, k, v = tensors(6, 3, 20, 70, 2, 1, 64)

    @functools.partial(jax.jit, static_argnums=3)
    def gradient(q, k, v, name):
        def loss(q, k, v):
            out = tj.turbo_attention(q, k, v, config=config, implementation=name)
            return jnp.sum(jnp.sin(out))

        return jax.grad(loss, argnums=(0, 1, 2))(q, k, v)

    for a, b in zip(gradient(q, k, v, "triton"), gradient(q, k, v, "xla"), strict=True):
        np.testing.assert_allclose(a, b, atol=1e-5)


MODIFIERS = (
    "query_offset",
    "key_offset",
    "query_segment_ids",
    "key_value_segment_ids",
    "sinks",
    "bias",
    "alibi_slopes",
    "key_bounds",
)
LOWERED = pairwise(mode=MODES, softmax=[SAS_E, SAS_2, EXACT], dim=[128, 96])[::2]
DTYPES = {128: jnp.bfloat16, 96: jnp.float32}


@pytest.mark.quick(1, slow=0)
@pytest.mark.parametrize(("mode", "softmax", "dim"), LOWERED)
def test_lowers_for_cuda(mode, softmax, dim):
    dtype = DTYPES[dim]
    masked = dim == 96
    cap = 5.0 if masked else None
    options = Options(masked, (30, 5) if masked else None, scale=0.1, logits_soft_cap=cap)
    call = functools.partial(
        triton.attention,
        config=tj.TurboConfig(mode=mode, softmax=softmax),
        options=options,
    )
    x = jax.ShapeDtypeStruct((2, 200, 4, dim), dtype)
    kv = jax.ShapeDtypeStruct((2, 200, 2, dim), dtype)
    length = jax.ShapeDtypeStruct((2,), jnp.int32)
    text = lower_for_cuda(call, x, kv, kv, length, length)
    assert "turbojax_attention" in text


@pytest.mark.fuzz
@pytest.mark.parametrize(
    "names",
    [MODIFIERS, MODIFIERS[:4], ("key_bounds",)],
    ids=["all", "without additions", "bounds alone"],
)
def test_lowers_for_cuda_with_modifiers(names):
    def of(*shape, dtype=jnp.int32):
        return jax.ShapeDtypeStruct(shape, dtype)

    call = functools.partial(
        triton.attention,
        config=tj.TurboConfig(mode="int8"),
        options=Options(True, None, scale=0.1, out_dtype="float32"),
    )
    x, kv = of(2, 200, 4, 128, dtype=jnp.bfloat16), of(2, 200, 2, 128, dtype=jnp.bfloat16)
    modifiers = modifiers_of(names, 2, 200, 200, 4)
    text = lower_for_cuda(call, x, kv, kv, of(2), of(2), modifiers=modifiers)
    assert "turbojax_attention" in text
