"""Gradients of `turbo_attention`, straight through its rounding, on every path.

In mode "float" with the exact softmax they are those of exact attention: most tests are about
that. Of the others the weights are those of the forward pass.

The oracle is analytic float64 (`oracles.attention_gradients`), itself held to finite differences.
Float32 results may be as far from it as twice what jax's own gradient of dense float32 attention
is, plus a few units in the last place. Half precision results are rounded once, and a matrix unit
keeps no more than 10 bits of a float32 operand.
"""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import turbojax as tj
from tests import oracles
from tests.attention.attention_helpers import EXACT, FLOAT, MODES, SAS_2, SAS_E, tensors

EPS = float(jnp.finfo(jnp.float32).eps)

# (T, S, N, K) and options. Tiles have 256 tokens, so that most cases have several, and ragged ones.
CASES = {
    "one token": ((1, 1, 1, 1), {}),
    "causal": ((300, 300, 2, 2), {"is_causal": True}),
    "causal, more keys": ((130, 300, 2, 1), {"is_causal": True}),
    "causal, more queries": ((300, 130, 2, 1), {"is_causal": True}),
    "whole tiles": ((512, 256, 1, 1), {"is_causal": True}),
    "grouped queries": ((90, 110, 6, 2), {"scale": 0.3}),
    "window": ((600, 600, 1, 1), {"local_window_size": (257, 7)}),
    "window past the keys": ((300, 40, 1, 1), {"local_window_size": (5, 0)}),
    "both lengths": (
        (300, 300, 2, 1),
        {
            "is_causal": True,
            "query_seq_lengths": (300, 17, 0),
            "key_value_seq_lengths": (290, 17, 5),
        },
    ),
    "everything": (
        (310, 290, 4, 2),
        {
            "is_causal": True,
            "local_window_size": (200, 3),
            "logits_soft_cap": 5.0,
            "scale": 0.4,
            "query_seq_lengths": (310, 280, 0),
            "key_value_seq_lengths": (290, 0, 133),
        },
    ),
}
LENGTHS = ("query_seq_lengths", "key_value_seq_lengths")


def operands(name, dtype=jnp.float32, head_dim=16):
    """Query, key, value, the two cotangents and the mask [B, T, S] of a case."""
    (tokens, size, heads, kv_heads), options = CASES[name]
    batch = 3
    q, k, v = tensors(31, batch, tokens, size, heads, kv_heads, head_dim, dtype)
    rng = np.random.default_rng(32)
    d_out = jnp.asarray(rng.normal(size=q.shape), dtype)
    d_residual = jnp.asarray(rng.normal(size=q.shape[:3]), jnp.float32)
    mask = oracles.visible(
        np.broadcast_to(np.arange(tokens), (batch, tokens)),
        np.arange(size),
        is_causal=options.get("is_causal", False),
        window=options.get("local_window_size"),
        lengths=options.get("key_value_seq_lengths", (size,) * batch),
    )
    real = (
        np.arange(tokens) < np.asarray(options.get("query_seq_lengths", (tokens,) * batch))[:, None]
    )
    return (q, k, v, d_out, d_residual), mask & real[:, :, None]


def _vjp(q, k, v, d_out, d_residual, lengths, config, options):
    def call(q, k, v):
        return tj.turbo_attention(
            q, k, v, config=config, return_residual=True, **dict(options), **lengths
        )

    outputs, pull = jax.vjp(call, q, k, v)
    return outputs, pull((d_out, d_residual))


@functools.partial(jax.jit, static_argnames=("config", "options"))
def _gradients_alone(*arguments, config, options):
    # Without the outputs there is no forward pass to compile.
    return _vjp(*arguments, config, options)[1]


def gradients(arrays, options, config=FLOAT):
    """The three gradients for cotangents of output and residual."""
    static, lengths = split(options)
    return _gradients_alone(*arrays, lengths, config=config, options=static)


def split(options):
    """What is static, hashable, and the lengths."""
    static = tuple((k, v) for k, v in options.items() if k not in LENGTHS)
    return static, {k: jnp.asarray(options[k], jnp.int32) for k in LENGTHS if k in options}


def oracle(arrays, mask, options):
    numbers = {k: v for k, v in options.items() if k in ("scale", "logits_soft_cap")}
    return oracles.attention_gradients(*arrays, mask=mask, **numbers)


@functools.partial(jax.jit, static_argnames=("scale", "logits_soft_cap"))
def plain_gradients(q, k, v, d_out, d_residual, mask, scale=None, logits_soft_cap=None):
    """jax's gradient of dense float32 attention."""

    def call(q, k, v):
        k, v = (jnp.repeat(x, q.shape[2] // x.shape[2], axis=2) for x in (k, v))
        highest = jax.lax.Precision.HIGHEST
        scores = jnp.einsum("btnh,bsnh->btns", q, k, precision=highest)
        scores = scores * (q.shape[-1] ** -0.5 if scale is None else scale)
        if logits_soft_cap is not None:
            scores = logits_soft_cap * jnp.tanh(scores / logits_soft_cap)
        scores = jnp.where(mask[:, :, None], scores, -1e30)
        p = jax.nn.softmax(scores, axis=-1)
        out = jnp.einsum("btns,bsnh->btnh", p, v, precision=highest)
        some = mask.any(-1)[:, :, None]
        lse = jax.nn.logsumexp(scores, axis=-1)
        return jnp.where(some[..., None], out, 0), jnp.where(some, lse, 0)

    return jax.vjp(call, q, k, v)[1]((d_out, d_residual))


def worst(got, want):
    return np.abs(np.asarray(got, np.float64) - want).max()


FAST = ["one token", "grouped queries", "window", "everything"]
SLOW = ["causal, more queries", "whole tiles", "window past the keys"]


@pytest.mark.quick(1, slow=0)
@pytest.mark.parametrize("name", FAST + SLOW)
def test_equals_the_oracle(name):
    """Causality, windows, caps, groups, lengths; cotangents of the output and of the residual."""
    options = CASES[name][1]
    arrays, mask = operands(name)
    want = oracle(arrays, mask, options)
    got = gradients(arrays, options)
    numbers = {k: v for k, v in options.items() if k in ("scale", "logits_soft_cap")}
    plain = plain_gradients(*arrays, mask, **numbers)
    for x, y, z, size, of in zip(got, want.values, plain, want.magnitudes, arrays[:3], strict=True):
        assert (x.shape, x.dtype) == (of.shape, of.dtype)
        assert worst(x, y) <= 2 * worst(z, y) + 8 * EPS * size.max()
        assert worst(z, y) <= 100 * EPS * max(size.max(), 1)  # no licence: it is close itself


@pytest.mark.quick(1)
@pytest.mark.parametrize(
    ("name", "dtype"), [("everything", jnp.bfloat16), ("causal, more keys", jnp.float16)]
)
def test_half_precision(dtype, name):
    """Gradients come in the inputs' dtype, rounded once after float32 sums."""
    options = CASES[name][1]
    arrays, mask = operands(name, dtype)
    want = oracle(arrays, mask, options)
    got = gradients(arrays, options)
    for x, y, size in zip(got, want.values, want.magnitudes, strict=True):
        assert x.dtype == dtype
        allowed = float(jnp.finfo(dtype).eps) * np.abs(y) + 2.0**-10 * size + 1e-6
        assert (np.abs(np.asarray(x, np.float64) - y) <= allowed).all()


@pytest.mark.quick(2)
@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16, jnp.float32])
def test_on_a_gpu(dtype):
    """Compiled for matrix units, with a real head."""
    options = CASES["everything"][1]
    arrays, mask = operands("everything", dtype, head_dim=128)
    want = oracle(arrays, mask, options)
    got = gradients(arrays, options)
    # Kernels round weights to the operands' dtype.
    unit = {"float32": 64 * EPS, "float16": 2.0**-10, "bfloat16": 2.0**-8}[jnp.dtype(dtype).name]
    for x, y, size in zip(got, want.values, want.magnitudes, strict=True):
        allowed = float(jnp.finfo(dtype).eps) * np.abs(y) + unit * (size + size.max() / 100)
        assert (np.abs(np.asarray(x, np.float64) - y) <= allowed).all()


def test_the_oracle_is_the_derivative():
    """Central differences of float64 attention along a random direction."""
    options = {"logits_soft_cap": 2.0, "scale": 0.4}
    (q, k, v, d_out, _), mask = operands("both lengths")
    rng = np.random.default_rng(33)
    step = 2.0**-8
    # Multiples of a power of two: what the oracle rounds to float32 is then exact.
    point = [np.round(np.asarray(x, np.float64) * 2**10) / 2**10 for x in (q, k, v)]
    want = oracle((*point, d_out, np.zeros(q.shape[:3])), mask, options)
    direction = [rng.choice([-1.0, 1.0], x.shape) for x in point]

    def loss(t):
        moved = (x + t * d for x, d in zip(point, direction, strict=True))
        out = oracles.plain_attention(*moved, mask=mask, **options)
        return (np.asarray(d_out, np.float64) * out).sum()

    # Two step sizes (Richardson): the error is of order step**4.
    coarse = (loss(2 * step) - loss(-2 * step)) / (4 * step)
    fine = (loss(step) - loss(-step)) / (2 * step)
    slope = sum((g * d).sum() for g, d in zip(want.values, direction, strict=True))
    np.testing.assert_allclose((4 * fine - coarse) / 3, slope, rtol=1e-5)


def lengths_of(arrays, options):
    """Of queries and keys."""
    batch = arrays[0].shape[0]
    full = ((x.shape[1],) * batch for x in arrays[:2])
    return [options.get(name, n) for name, n in zip(LENGTHS, full, strict=True)]


def straight_through(arrays, mask, options, config):
    """The oracle for what `config` rounds, with what its forward pass gave."""
    q, k, v, d_out, _ = arrays
    of_queries, of_keys = lengths_of(arrays, options)
    d_mode = {"int8": "int8"}.get(config.mode, "fp8") if config.gradient == "8bit" else "float"
    static, lengths = split(options)
    some = mask.any(-1)[:, :, None, None]
    of_queries, of_keys = (of_queries, config.block_q), (of_keys, config.block_kv)

    forward = tj.turbo_attention(
        q, k, v, config=config, return_residual=True, **dict(static), **lengths
    )
    return oracles.attention_gradients(
        *arrays,
        mask=mask,
        scored=(
            oracles.rounded(q, *of_queries, config.mode),
            oracles.rounded(k, *of_keys, config.mode),
        ),
        weighed=(
            oracles.rounded(np.where(some, d_out, 0), *of_queries, d_mode),
            oracles.rounded_values(v, *of_keys, config.mode),
        ),
        forward=forward,
        **{k: v for k, v in options.items() if k in ("scale", "logits_soft_cap")},
    )


ROUNDED = [
    ("everything", "int8", SAS_E, "float"),
    ("everything", "fp8", EXACT, "8bit"),
    ("window", "int8_fp8", EXACT, "8bit"),
    ("grouped queries", "float", SAS_2, "float"),
    ("window past the keys", "int8", SAS_2, "8bit"),
]


@pytest.mark.quick(slow=1)
@pytest.mark.parametrize(("name", "mode", "softmax", "gradient"), ROUNDED)
def test_straight_through_the_rounding(name, mode, softmax, gradient):
    """Weights from the forward pass' own codes and log-sum-exp; `dP` rounded where asked for."""
    config = tj.TurboConfig(
        mode=mode, softmax=softmax, gradient=gradient, block_q=64, block_kv=128, buffer_size=128
    )
    arrays, mask = operands(name)
    options = CASES[name][1]
    want = straight_through(arrays, mask, options, config)
    got = gradients(arrays, options, config)
    for x, y, size in zip(got, want.values, want.magnitudes, strict=True):
        assert worst(x, y) <= 64 * EPS * size.max()


@pytest.mark.quick(1, slow=0)
@pytest.mark.parametrize(
    ("mode", "gradient"),
    [(mode, x) for mode in MODES for x in ("float", "8bit") if (mode, x) != ("float", "8bit")],
)
def test_close_to_the_gradient_of_exact_attention(mode, gradient):
    """Rounding moves gradients by a few percent: of their norm, at most what the docs state."""
    config = tj.TurboConfig(mode=mode, softmax=EXACT, gradient=gradient)
    options = {"is_causal": True}
    arrays, mask = operands("causal", head_dim=64)
    want = oracle(arrays, mask, options)
    got = gradients(arrays, options, config)
    of_operands = {"float": 1e-5, "int8": 0.025, "int8_fp8": 0.035, "fp8": 0.048}[mode]
    of_outputs = 0 if gradient == "float" else 0.019 if mode == "int8" else 0.029
    bound = math.hypot(of_operands, of_outputs)
    for x, y in zip(got, want.values, strict=True):
        assert np.linalg.norm(np.asarray(x) - y) <= bound * np.linalg.norm(y)


@pytest.mark.slow
def test_the_output_is_not_changed_by_differentiating():
    arrays, _ = operands("everything")
    static, lengths = split(CASES["everything"][1])
    vjp = jax.jit(_vjp, static_argnums=(6, 7))
    got, _ = vjp(*arrays, lengths, tj.TurboConfig(), static)
    call = functools.partial(tj.turbo_attention, return_residual=True, **dict(static))
    want = jax.jit(call)(*arrays[:3], **lengths)
    jax.tree.map(np.testing.assert_array_equal, got, want)


def test_two_runs_have_equal_bits():
    arrays, _ = operands("everything")
    first, second = (gradients(arrays, CASES["everything"][1]) for _ in range(2))
    jax.tree.map(np.testing.assert_array_equal, first, second)


def test_padding_and_blind_rows_have_no_gradient_and_no_say():
    """What stands in the padding, its cotangents, and those of rows that see nothing: anything."""
    name = "everything"
    arrays, mask = operands(name)
    options = CASES[name][1]
    want = gradients(arrays, options)
    q, k, v, d_out, d_residual = (np.asarray(x).copy() for x in arrays)
    for b in range(3):
        q[b, options["query_seq_lengths"][b] :] = np.nan
        d_out[b, options["query_seq_lengths"][b] :] = np.nan
        for x in (k, v):
            x[b, options["key_value_seq_lengths"][b] :] = np.inf
    blind = ~mask.any(-1)
    assert blind.sum() > 300
    d_residual[blind] = np.nan
    dirty = tuple(jnp.asarray(x) for x in (q, k, v, d_out, d_residual))
    got = gradients(dirty, options)
    jax.tree.map(np.testing.assert_array_equal, got, want)
    assert (np.asarray(got[0])[blind] == 0).all()
    unseen = ~mask.any(1)
    for x in got[1:]:
        assert (np.asarray(x)[unseen] == 0).all()


@pytest.mark.slow
def test_bad_values_reach_those_who_see_them():
    """NaN in a key or value, of the first sequence, from its block on; padding sees nothing."""
    (q, k, v, *cotangents), _ = operands("causal")
    bad_key = gradients((q, k.at[0, 100].set(jnp.nan), v, *cotangents), {"is_causal": True})
    assert np.isnan(np.asarray(bad_key[0])[0, 100:]).all()
    bad_value = v.at[0, 100].set(jnp.nan)
    seen = gradients((q, k, bad_value, *cotangents), {"is_causal": True})
    assert np.isnan(np.asarray(seen[0])[0, 100:]).all()
    assert np.isfinite(np.asarray(seen[0])[0, :64]).all()
    for x in (*bad_key, *seen):
        assert np.isfinite(np.asarray(x)[1:]).all()

    options = {"is_causal": True, "query_seq_lengths": (64, 300, 300)}
    want = gradients((q, k, v, *cotangents), options)
    unseen = gradients((q, k, bad_value, *cotangents), options)
    jax.tree.map(np.testing.assert_array_equal, unseen, want)


@pytest.mark.quick(1)
@pytest.mark.parametrize("by", [0, 1, 2])
def test_prefill_is_not_differentiable(by):
    """By the query alone neither: only the cache would lose its gradient, silently."""
    q, k, v = tensors(38, 1, 16, 16, 2, 1, 16)
    cache = tj.init_cache(1, 64, 1, 16, dtype=jnp.float32)

    def of_prefill(*qkv, **options):
        return jnp.sum(jax.tree.leaves(tj.prefill(*qkv, cache, **options)[0])[0])

    for options in ({}, {"return_residual": True}):
        with pytest.raises(NotImplementedError, match="^prefill has no gradient"):
            jax.grad(functools.partial(of_prefill, **options), by)(q, k, v)


def sums(q, k, v, lengths=None, **options):
    out, residual = tj.turbo_attention(
        q, k, v, key_value_seq_lengths=lengths, is_causal=True, return_residual=True, **options
    )
    return jnp.sum(jnp.sin(out)) + jnp.sum(jnp.where(jnp.isfinite(residual), residual, 0))


def test_lengths_beyond_the_arrays_act_as_the_nearest_bound():
    """Under `jit`, of queries too."""
    q, k, v = tensors(40, 3, 40, 40, 2, 1, 16)
    by_all = jax.jit(
        jax.grad(
            lambda q, k, v, queries, keys: sums(q, k, v, keys, query_seq_lengths=queries),
            (0, 1, 2),
        )
    )
    most = np.iinfo(np.int32).max
    got = by_all(q, k, v, jnp.asarray([most, 20, -3]), jnp.asarray([most, 1000, 30]))
    want = by_all(q, k, v, jnp.asarray([40, 20, 0]), jnp.asarray([40, 40, 30]))
    jax.tree.map(np.testing.assert_array_equal, got, want)
