"""Gradients of `turbo_attention` through Mosaic GPU on a Hopper GPU, against the definition in XLA.

Weights and the scores' gradients are rounded to 16 bits before they multiply, results once more:
three roundings of half a unit each, which together make less than one unit of the result's norm.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import turbojax as tj
from tests.attention.attention_helpers import EXACT, SAS_E, tensors
from tests.gpu.gpu_helpers import on_hopper
from turbojax.attention.options import Options
from turbojax.attention.turbo import gradient_reference, mosaic_gradient, reference
from turbojax.attention.turbo.operands import Backward

pytestmark = [pytest.mark.gpu, on_hopper]

MODES = ("int8", "int8_fp8", "fp8")
# Tokens, keys, heads, KV heads, head dim; options; lengths of three queries and keys.
CASES = {
    "one token": ((1, 1, 1, 1, 64), {}, None),
    "causal": ((384, 384, 4, 2, 128), {"is_causal": True}, None),
    "all": ((256, 520, 4, 2, 128), {}, None),
    "more queries": ((520, 130, 2, 1, 64), {"is_causal": True}, None),
    "one KV head": ((200, 200, 7, 1, 128), {"is_causal": True}, None),
    "ragged": ((300, 290, 4, 2, 128), {"is_causal": True}, ((300, 17, 0), (290, 17, 5))),
    "ragged, all": ((70, 290, 2, 2, 64), {}, ((70, 64, 1), (0, 128, 129))),
    "window": ((600, 600, 2, 1, 64), {"is_causal": True, "window": (257, 7)}, None),
    "two-sided window": ((300, 200, 2, 1, 128), {"window": (50, 30)}, None),
    "cap": ((300, 300, 2, 1, 80), {"is_causal": True, "logits_soft_cap": 5.0}, None),
    "256 channels": ((300, 300, 2, 1, 256), {"is_causal": True}, None),
    "200 channels": ((130, 150, 2, 2, 200), {"window": (60, 90)}, ((130, 70, 5), (150, 70, 60))),
    "everything": (
        (310, 290, 4, 2, 64),
        {"is_causal": True, "window": (200, 3), "logits_soft_cap": 5.0},
        ((310, 280, 0), (290, 0, 133)),
    ),
}
UNIT = {"bfloat16": 2.0**-8, "float16": 2.0**-10, "float32": 2.0**-8}


# Queries and keys that share a scale, in turn.
BLOCKS = [(64, 64), (128, 128), (64, 128), (192, 64), (256, 64)]


def config(mode, gradient="float", blocks=(64, 64), softmax=EXACT):
    return tj.TurboConfig(
        mode=mode,
        gradient=gradient,
        softmax=softmax,
        block_q=blocks[0],
        block_kv=blocks[1],
        buffer_size=blocks[1],
    )


def arguments(case, config, dtype=jnp.bfloat16, seed=1, scale=0.09):
    """What a gradient takes, from the forward pass of the definition; and its options."""
    (tokens, size, heads, kv_heads, head_dim), changes, lengths = CASES[case]
    options = Options(**{"is_causal": False, "scale": scale} | changes)
    q, k, v = tensors(seed, 3, tokens, size, heads, kv_heads, head_dim, dtype)
    rng = np.random.default_rng(seed + 1)
    d_out = jnp.asarray(rng.normal(size=q.shape), dtype)
    d_residual = jnp.asarray(rng.normal(size=q.shape[:3]), jnp.float32)
    of_both = [jnp.asarray(n, jnp.int32) for n in lengths or ((tokens,) * 3, (size,) * 3)]
    out, residual = reference.attention(q, k, v, *of_both, config=config, options=options)
    arrays = Backward(q, k, v, *of_both, out, residual, d_out, d_residual)
    return arrays, {"config": config, "options": options, "is_ragged": lengths is not None}


def check(got, want, unit):
    """Norms of the errors: of all, and of 64 tokens of a head each."""
    for x, y in zip(got[:3], want[:3], strict=True):
        assert (x.shape, x.dtype) == (y.shape, y.dtype)
        x, y = (np.asarray(a, np.float64) for a in (x, y))
        assert np.isfinite(x).all()
        assert np.linalg.norm(x - y) <= unit * np.linalg.norm(y) + 1e-6
        begins = np.arange(0, x.shape[1], 64)
        errors, sizes = (
            np.sqrt(np.add.reduceat((a**2).sum(-1), begins, axis=1)) for a in (x - y, y)
        )
        assert (errors <= 2 * unit * sizes + unit / 4 * np.sqrt(np.mean(sizes**2)) + 1e-6).all()


GRID = [
    (case, MODES[(i + k) % 3], ("float", "8bit")[(i // 2 + k) % 2], BLOCKS[(i + 2 * k) % 5])
    for k in range(2)
    for i, case in enumerate(CASES)
]


@pytest.mark.quick(5)
@pytest.mark.parametrize(("case", "mode", "gradient", "blocks"), GRID)
def test_equals_the_definition(case, mode, gradient, blocks):
    arrays, static = arguments(case, config(mode, gradient, blocks))
    got = mosaic_gradient.gradient(arrays, **static)
    check(got, gradient_reference.gradient(arrays, **static), UNIT["bfloat16"])


@pytest.mark.quick(3)
@pytest.mark.parametrize("gradient", ["float", "8bit"])
@pytest.mark.parametrize("case", ["all", "ragged", "window", "256 channels", "everything"])
def test_ping_pong_changes_no_bit(case, gradient):
    arrays, static = arguments(case, config("fp8", gradient))
    launch = mosaic_gradient.default_launch(
        CASES[case][0][-1], static["config"], is_plain=False, changes_scores=True
    )
    got, want = (
        mosaic_gradient.gradient(arrays, **static, launch=launch._replace(ping_pong=x))
        for x in (True, False)
    )
    for x, y in zip(got[:3], want[:3], strict=True):
        np.testing.assert_array_equal(np.asarray(x, np.float32), np.asarray(y, np.float32))


@pytest.mark.quick(3)
@pytest.mark.parametrize("gradient", ["float", "8bit"])
@pytest.mark.parametrize("case", ["all", "causal", "ragged", "window"])
def test_wide_slots_change_no_bit(case, gradient):
    arrays, static = arguments(case, config("int8_fp8", gradient))
    wide = mosaic_gradient.default_launch(CASES[case][0][-1], static["config"])
    assert wide.is_wide
    launches = (wide, wide._replace(is_wide=False, queries=4))
    got, want = (mosaic_gradient.gradient(arrays, **static, launch=x) for x in launches)
    np.testing.assert_array_equal(np.asarray(got[0], np.float32), np.asarray(want[0], np.float32))


@pytest.mark.parametrize("case", ["causal", "ragged", "window"])
def test_without_rounding(case):
    arrays, static = arguments(case, config("float"))
    got = mosaic_gradient.gradient(arrays, **static)
    check(got, gradient_reference.gradient(arrays, **static), UNIT["bfloat16"])


@pytest.mark.quick(2)
@pytest.mark.parametrize("dtype", [jnp.float16, jnp.float32], ids=["f16", "f32"])
@pytest.mark.parametrize(("mode", "gradient"), [("int8", "8bit"), ("fp8", "float")])
def test_dtypes_and_a_negative_scale(dtype, mode, gradient):
    arrays, static = arguments("causal", config(mode, gradient), dtype, scale=-0.09)
    got = mosaic_gradient.gradient(arrays, **static)
    check(got, gradient_reference.gradient(arrays, **static), UNIT[jnp.dtype(dtype).name])


@pytest.mark.quick(4)
@pytest.mark.parametrize("gradient", ["float", "8bit"])
@pytest.mark.parametrize(
    "dtype", [jnp.bfloat16, jnp.float16, jnp.float32], ids=["bf16", "f16", "f32"]
)
def test_a_row_that_sees_one_key_moves_nothing(dtype, gradient):
    """Its weight is 1 whatever the score is."""
    q, k, v = tensors(8, 2, 70, 1, 2, 1, 64, dtype)
    call = functools.partial(tj.turbo_attention, config=config("fp8", gradient))
    _, pull = jax.vjp(call, q, k, v)
    d_out = jnp.asarray(np.random.default_rng(9).normal(size=q.shape), dtype)
    d_q = np.asarray(pull(d_out)[0], np.float64)
    # Outputs in 16 bits are rounded once more than the values.
    assert np.abs(d_q).max() <= 2.0**-6 * float(jnp.abs(k).max())


@pytest.mark.parametrize("gradient", ["float", "8bit"])
def test_small_gradients_in_float16(gradient):
    """Those of a mean: scores' gradients would be below the smallest numbers of float16."""
    arrays, static = arguments("ragged", config("int8", gradient), jnp.float16)
    arrays = arrays._replace(
        d_out=(arrays.d_out.astype(jnp.float32) * 2.0**-14).astype(jnp.float16),
        d_residual=arrays.d_residual * 2.0**-14,
    )
    got = mosaic_gradient.gradient(arrays, **static)
    want = gradient_reference.gradient(arrays, **static)
    for x, y in zip(got[:3], want[:3], strict=True):
        x, y = (np.asarray(a, np.float64) for a in (x, y))
        # Results are float16 themselves: half of their smallest step each.
        floor = 2.0**-25 * np.sqrt(y.size)
        assert np.linalg.norm(x - y) <= UNIT["float16"] * np.linalg.norm(y) + floor


@pytest.mark.parametrize("mode", MODES)
def test_lengths_beyond_the_arrays(mode):
    """Under `jit` they act as the nearest bound, of queries too."""
    q, k, v = tensors(6, 3, 200, 200, 2, 1, 64, jnp.bfloat16)

    @jax.jit
    def pulled(of_queries, of_keys):
        call = functools.partial(
            tj.turbo_attention,
            config=config(mode),
            query_seq_lengths=of_queries,
            key_value_seq_lengths=of_keys,
        )
        out, pull = jax.vjp(call, q, k, v)
        return out, *pull(jnp.ones_like(out))

    most = np.iinfo(np.int32).max
    got = pulled(jnp.asarray([most, 100, -3]), jnp.asarray([most, 1000, 150]))
    want = pulled(jnp.asarray([200, 100, 0]), jnp.asarray([200, 200, 150]))
    jax.tree.map(np.testing.assert_array_equal, got, want)


@pytest.mark.quick(1)
@pytest.mark.parametrize("gradient", ["float", "8bit"])
def test_bits_are_the_same_in_every_run_and_batch(gradient):
    """Also of a sequence by itself: no sum knows what else is in the batch."""
    arrays, static = arguments("ragged", config("int8_fp8", gradient))
    first, second = (mosaic_gradient.gradient(arrays, **static) for _ in range(2))
    jax.tree.map(np.testing.assert_array_equal, first, second)
    alone = mosaic_gradient.gradient(Backward(*(x[1:2] for x in arrays)), **static)
    for x, y in zip(alone[:3], first[:3], strict=True):
        np.testing.assert_array_equal(x[0], y[1])


@pytest.mark.quick(4)
@pytest.mark.parametrize("case", ["ragged", "everything", "more queries"])
@pytest.mark.parametrize("mode", MODES)
def test_padding_and_blind_rows_have_no_gradient_and_no_say(case, mode):
    arrays, static = arguments(case, config(mode, "8bit"))
    want = mosaic_gradient.gradient(arrays, **static)
    q, k, v, of_queries, of_keys, out, residual, d_out, d_residual = arrays
    there = [jnp.arange(x.shape[1])[None] < n[:, None] for x, n in ((q, of_queries), (k, of_keys))]
    blind = residual == -jnp.inf

    def spoiled(x, there):
        return jnp.where(there[:, :, None, None], x, jnp.nan)

    q, k, v = (spoiled(x, t) for x, t in ((q, there[0]), (k, there[1]), (v, there[1])))
    d_out = jnp.where(blind[..., None], jnp.nan, d_out)
    d_residual = jnp.where(blind, jnp.nan, d_residual)
    dirty = Backward(q, k, v, of_queries, of_keys, out, residual, d_out, d_residual)
    got = mosaic_gradient.gradient(dirty, **static)
    jax.tree.map(np.testing.assert_array_equal, got, want)
    assert (np.asarray(got[0])[np.asarray(blind)] == 0).all()
    for x in got[1:3]:
        assert (np.asarray(x)[~np.asarray(there[1])] == 0).all()


@pytest.mark.parametrize("gradient", ["float", "8bit"])
@pytest.mark.parametrize("which", [0, 1, 2])
def test_bad_values_reach_those_who_see_them(which, gradient):
    """NaN in a query, key or value of the first sequence, at token 200."""
    call = functools.partial(tj.turbo_attention, config=config("int8", gradient), is_causal=True)
    arrays = list(tensors(3, 2, 384, 384, 2, 1, 64, jnp.bfloat16))
    arrays[which] = arrays[which].at[0, 200].set(jnp.nan)
    out, pull = jax.vjp(call, *arrays)
    d_q, d_k, d_v = (np.asarray(x, np.float32) for x in pull(jnp.ones_like(out)))
    for x in (d_q, d_k, d_v):
        assert np.isfinite(x[1]).all()
    if which == 0:  # its block of queries
        assert np.isnan(d_q[0, 192:256]).all()
        assert np.isnan(d_k[0, :192]).all()
        assert np.isfinite(d_q[0, :192]).all()
        assert np.isfinite(d_q[0, 256:]).all()
        assert np.isfinite(d_k[0, 256:]).all()
    else:
        assert np.isnan(d_q[0, 256:]).all()
        assert np.isnan(d_k[0]).all()
        assert np.isfinite(d_q[0, :192]).all()
        # A value has no say in its own gradient.
        assert (np.isnan(d_v[0]) if which == 1 else np.isfinite(d_v[0])).all()


@pytest.mark.quick(1)
@pytest.mark.parametrize("softmax", [EXACT, SAS_E], ids=["exact", "sas"])
def test_training_by_the_public_call(softmax):
    """The default path: kernels forward and backward, near the gradient of exact attention."""
    q, k, v = tensors(4, 2, 700, 700, 4, 2, 128, jnp.bfloat16)
    d_out = jnp.asarray(np.random.default_rng(5).normal(size=q.shape), jnp.bfloat16)

    def pulled(config, dtype):
        arrays = [x.astype(dtype) for x in (q, k, v)]
        call = functools.partial(tj.turbo_attention, config=config, is_causal=True)
        return jax.vjp(call, *arrays)[1](d_out.astype(dtype))

    exact = pulled(tj.TurboConfig(mode="float", softmax=EXACT), jnp.float32)
    for mode, gradient, bound in (("int8", "float", 0.03), ("fp8", "8bit", 0.06)):
        got = pulled(config(mode, gradient, softmax=softmax), jnp.bfloat16)
        for x, y in zip(got, exact, strict=True):
            x, y = (np.asarray(a, np.float64) for a in (x, y))
            assert np.linalg.norm(x - y) <= bound * np.linalg.norm(y)


@pytest.mark.quick(1)
@pytest.mark.parametrize("mode", MODES)
def test_weights_of_a_capped_forward_pass_sum_to_one(mode):
    """Gradients of the values then sum to those of the outputs, over all tokens."""
    q, k, v = tensors(7, 2, 300, 300, 2, 1, 128, jnp.bfloat16)
    call = functools.partial(
        tj.turbo_attention, config=config(mode), is_causal=True, logits_soft_cap=50.0, scale=1.0
    )
    out, pull = jax.vjp(call, q, k, v)
    d_value = np.asarray(pull(jnp.ones_like(out))[2], np.float64)
    total = out[0, :, :, 0].size
    np.testing.assert_allclose(d_value.sum((1, 2)), total, rtol=2.0**-8)
