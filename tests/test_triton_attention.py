"""The Triton kernel of `turbo_attention`, interpreted, against the float64 oracle."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from attention_helpers import EXACT, SAS_2, SAS_E, assert_agrees, attend, tensors
from kernel_helpers import lower_for_cuda
from test_turbo_attention import CASES, PAIRS, oracle_of

import turbojax as tj
from benchmarks.shapes import MODELS
from turbojax._device import interpret_kernels
from turbojax.ops.turbo_attention import triton
from turbojax.ops.turbo_attention.masking import Visibility

GRID = [
    pytest.param(case, *pair, id="-".join(map(str, (case, *pair))))
    for i, case in enumerate(CASES)
    for pair in [PAIRS[(2 * i + j) % len(PAIRS)] for j in range(2)]
]


@pytest.fixture(autouse=True)
def _interpreted():
    with interpret_kernels():
        yield


def run(query, key, value, config, **options):
    if options.get("key_value_seq_lengths") is not None:
        options["key_value_seq_lengths"] = jnp.asarray(options["key_value_seq_lengths"], jnp.int32)
    options |= {"implementation": "triton", "return_residual": True}
    return attend(query, key, value, config=config, **options)


def assert_matches_oracle(query, key, value, config, **options):
    out, lse = run(query, key, value, config, **options)
    assert (out.dtype, out.shape) == (query.dtype, query.shape)
    assert_agrees(out, lse, oracle_of(query, key, value, config, **options), value)


def test_the_grid_meets_every_mode_and_softmax():
    assert {param.values[1:] for param in GRID} == set(PAIRS)


@pytest.mark.parametrize(("case", "mode", "softmax"), GRID)
def test_equals_the_oracle(case, mode, softmax):
    options = dict(CASES[case])
    q, k, v = tensors(sum(map(ord, case)), *options.pop("shape"))
    assert_matches_oracle(q, k, v, tj.TurboConfig(mode=mode, softmax=softmax), **options)


@pytest.mark.parametrize(
    ("mode", "block_q", "block_kv"),
    [("int8", 16, 32), ("fp8", 128, 128), ("int8_fp8", 8, 32), ("float", 8, 16)],
)
def test_other_block_sizes(mode, block_q, block_kv):
    """Scales follow the blocks; a program's tile of queries may hold several, or part of one."""
    q, k, v = tensors(1, 1, 150, 150, 2, 1, 64)
    config = tj.TurboConfig(mode=mode, block_q=block_q, block_kv=block_kv, buffer_size=block_kv)
    assert_matches_oracle(q, k, v, config, is_causal=True)


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16], ids=["bf16", "f16"])
@pytest.mark.parametrize("mode", ["int8", "float"])
def test_half_precision_inputs(mode, dtype):
    q, k, v = tensors(2, 1, 70, 130, 2, 1, 64, dtype)
    assert_matches_oracle(q, k, v, tj.TurboConfig(mode=mode), is_causal=True)


@pytest.mark.parametrize("scale", [-0.2, 0.0])
def test_scales_that_are_not_positive(scale):
    """A negative factor turns maxima around; zero makes all scores equal."""
    q, k, v = tensors(3, 1, 20, 90, 2, 1, 64)
    assert_matches_oracle(q, k, v, tj.TurboConfig(softmax=EXACT), scale=scale)


@pytest.mark.parametrize("name", MODELS)
def test_heads_of_real_models(name):
    """Odd groups, 71 heads to one, head dims 64 to 256: against the reference."""
    heads = MODELS[name]
    q, k, v = tensors(4, 1, 9, 70, heads.query, heads.kv, heads.dim)
    config = tj.TurboConfig(softmax=EXACT)
    want = attend(q, k, v, config=config, implementation="xla", return_residual=True)
    for got, expected in zip(run(q, k, v, config), want, strict=True):
        np.testing.assert_allclose(got, expected, atol=2e-5)


@pytest.mark.parametrize("mode", ["int8", "int8_fp8", "fp8", "float"])
@pytest.mark.parametrize("softmax", [SAS_E, EXACT], ids=["sas", "exact"])
def test_nan_reaches_exactly_what_it_reaches_in_the_reference(mode, softmax):
    q, k, v = tensors(5, 2, 150, 150, 4, 2, 64)
    k = k.at[0, 70, 1, 3].set(jnp.nan)
    v = v.at[1, 3, 0, 0].set(jnp.inf)
    q = q.at[1, 140, 3, 0].set(-jnp.inf)
    options = {"is_causal": True, "key_value_seq_lengths": jnp.array([150, 80])}
    config = tj.TurboConfig(mode=mode, softmax=softmax)
    got = run(q, k, v, config, **options)
    want = attend(q, k, v, config=config, implementation="xla", return_residual=True, **options)
    for a, b in zip(got, want, strict=True):
        np.testing.assert_array_equal(np.isnan(a), np.isnan(b))
        np.testing.assert_array_equal(np.isinf(a), np.isinf(b))
    assert np.isnan(got[0]).any()
    assert not np.isnan(got[0]).all()


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
        run(q, k, v, tj.TurboConfig(**options))


def test_transforms():
    """vmap and scan around it, two runs equal, and the straight-through gradient."""
    config = tj.TurboConfig()
    q, k, v = tensors(6, 3, 20, 70, 2, 1, 64)

    def one(q, k, v):
        return tj.turbo_attention(q, k, v, config=config, implementation="triton")

    want = one(q, k, v)
    np.testing.assert_array_equal(want, one(q, k, v))
    singles = [x[:, None] for x in (q, k, v)]
    np.testing.assert_array_equal(jax.vmap(one)(*singles)[:, 0], want)
    _, scanned = jax.lax.scan(lambda c, x: (c, one(*x)), None, tuple(singles))
    np.testing.assert_array_equal(scanned[:, 0], want)

    def loss(q, k, v, name):
        out = tj.turbo_attention(q, k, v, config=config, implementation=name)
        return jnp.sum(jnp.sin(out))

    got = jax.grad(loss, argnums=(0, 1, 2))(q, k, v, "triton")
    expected = jax.grad(loss, argnums=(0, 1, 2))(q, k, v, "xla")
    for a, b in zip(got, expected, strict=True):
        np.testing.assert_allclose(a, b, atol=1e-5)


LOWERED = [
    pytest.param(mode, softmax, dtype, dim, id=f"{mode}-{softmax}-{dtype.__name__}-{dim}")
    for mode in ("int8", "int8_fp8", "fp8", "float")
    for softmax in (SAS_E, SAS_2, EXACT)
    for dtype, dim in ((jnp.bfloat16, 128), (jnp.float32, 96))
]


@pytest.mark.parametrize(("mode", "softmax", "dtype", "dim"), LOWERED)
def test_lowers_for_cuda(mode, softmax, dtype, dim):
    masked = dim == 96
    call = functools.partial(
        triton._attention,
        config=tj.TurboConfig(mode=mode, softmax=softmax),
        scale=0.1,
        visibility=Visibility(masked, (30, 5) if masked else None),
        logits_soft_cap=5.0 if masked else None,
        interpret=False,
    )
    x = jax.ShapeDtypeStruct((2, 200, 4, dim), dtype)
    kv = jax.ShapeDtypeStruct((2, 200, 2, dim), dtype)
    length = jax.ShapeDtypeStruct((2,), jnp.int32)
    text = lower_for_cuda(call, x, kv, kv, length, length)
    assert "turbojax_attention" in text
