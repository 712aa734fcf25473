"""Segments, bounds, offsets, bias, slopes, sinks, float32 parts and values of another head dim.

In mode "float" with the exact softmax the result is exact attention, held to a float64 oracle in
all pairs of options, gradients too. What rounding modes do with an option is held to calls
without it, of which the result must be the same: cut apart, moved, or merged.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import turbojax as tj
from tests import oracles
from tests.attention.attention_helpers import EXACT, FLOAT, MODES, SAS_E, tensors
from tests.contracts.implementations import interpreted
from tests.grids import pairwise

BATCH, TOKENS, SIZE, HEADS, KV_HEADS, HEAD_DIM = 2, 90, 110, 4, 2, 16
EPS = float(jnp.finfo(jnp.float32).eps)
STATIC = (
    "config",
    "scale",
    "is_causal",
    "local_window_size",
    "logits_soft_cap",
    "output_dtype",
    "implementation",
    "return_residual",
)
attend = jax.jit(tj.turbo_attention, static_argnames=STATIC)

BIASES = {
    "no bias": None,
    "whole": (BATCH, HEADS, TOKENS, SIZE),
    "of heads": (1, HEADS, TOKENS, SIZE),
    "of keys": (BATCH, 1, 1, SIZE),
}
GRID = pairwise(
    segments=("none", "packed", "shuffled"),
    bounds=("none", "prefix", "any"),
    offsets=("none", "of queries", "both"),
    bias=tuple(BIASES),
    slopes=(False, True),
    sinks=("none", "some"),
    seen=("all", "causal", "causal window", "window"),
    cap=(None, 3.0),
    lengths=(False, True),
)


def options_of(segments, bounds, offsets, bias, slopes, sinks, seen, cap, lengths):
    """A case of the grid as arguments, in numpy: those that are static, and arrays."""
    rng = np.random.default_rng(5)
    static = {"logits_soft_cap": cap, "is_causal": seen.startswith("causal")}
    if seen.endswith("window"):
        static["local_window_size"] = (40, 0 if static["is_causal"] else 7)
    arrays = {}
    if segments != "none":
        ids = [rng.integers(0, 4, (BATCH, n)) for n in (TOKENS, SIZE)]
        if segments == "packed":
            ids = [np.sort(x) for x in ids]
        arrays |= dict(zip(("query_segment_ids", "key_value_segment_ids"), ids, strict=True))
    if bounds == "prefix":
        ends = np.maximum(np.arange(TOKENS) + 1, np.array([[30], [77]]))
        arrays["key_bounds"] = np.zeros_like(ends), ends
    elif bounds == "any":  # empty ones, and some beyond all keys, on either side
        arrays["key_bounds"] = tuple(rng.integers(-30, 150, (2, BATCH, TOKENS)))
        arrays["key_bounds"][1][:, ::7] = np.iinfo(np.int32).max
        arrays["key_bounds"][0][:, ::5] = np.iinfo(np.int32).min
    if offsets != "none":
        arrays["query_offset"] = np.array([20, 3])
    if offsets == "both":
        arrays["key_offset"] = np.array([0, 30])
    if BIASES[bias] is not None:
        arrays["bias"] = rng.normal(size=BIASES[bias])
        arrays["bias"][..., 5:9] = -np.inf
    if slopes:
        arrays["alibi_slopes"] = np.array([0.25, 0.1, 0.02, 0.0])
    if sinks == "some":
        arrays["sinks"] = np.array([0.5, -1.0, 3.0, -20.0])
    if lengths:
        arrays |= {
            "query_seq_lengths": np.array([90, 37]),
            "key_value_seq_lengths": np.array([101, 0]),
        }
    floats = ("bias", "alibi_slopes", "sinks")
    return static, {
        k: jax.tree.map(lambda x, k=k: np.asarray(x, np.float32 if k in floats else np.int32), v)
        for k, v in arrays.items()
    }


@functools.cache
def operands():
    rng = np.random.default_rng(6)
    q, k, _ = tensors(7, BATCH, TOKENS, SIZE, HEADS, KV_HEADS, HEAD_DIM)
    v = rng.normal(size=(BATCH, SIZE, KV_HEADS, HEAD_DIM))
    d_out, d_residual = rng.normal(size=q.shape), rng.normal(size=q.shape[:3])
    return tuple(np.asarray(x, np.float32) for x in (q, k, v, d_out, d_residual))


def oracle_arguments(q, k, static, arrays):
    """The oracle's scores, and what it takes beside them."""
    of_scores = {
        n: x for n, x in (static | arrays).items() if n not in ("sinks", "logits_soft_cap")
    }
    scores = oracles.scores_of(BATCH, HEADS, q.shape[1], k.shape[1], **of_scores)
    real = None
    if "query_seq_lengths" in arrays:
        real = np.arange(q.shape[1]) < arrays["query_seq_lengths"][:, None]
    rest = {"sinks": arrays.get("sinks"), "logits_soft_cap": static.get("logits_soft_cap")}
    return scores, rest | {"real": real}


def assert_near(got, want, scale=1.0):
    """Within float32's rounding of sums of hundred terms of size `scale`; -inf where wanted."""
    got, want = np.asarray(got, np.float64), np.asarray(want)
    np.testing.assert_array_equal(np.isneginf(got), np.isneginf(want))
    finite = np.isfinite(want)
    assert np.abs(got[finite] - want[finite]).max(initial=0) <= 64 * EPS * scale


@pytest.mark.quick(1, slow=0)
@pytest.mark.parametrize("case", GRID, ids=lambda case: " ".join(map(str, case)))
def test_equals_the_oracle(case):
    static, arrays = options_of(*case)
    q, k, v, d_out, d_residual = operands()
    scores, rest = oracle_arguments(q, k, static, arrays)
    want = oracles.attention_with_modifiers(q, k, v, scores, **rest)
    names = [
        "query",
        "key",
        "value",
        *(n for n in ("bias", "alibi_slopes", "sinks") if n in arrays),
    ]

    @jax.jit
    def run(values, d_out, d_residual):
        def call(values):
            given = jax.tree.map(jnp.asarray, arrays) | values
            return tj.turbo_attention(config=FLOAT, return_residual=True, **static, **given)

        results, pull = jax.vjp(call, values)
        return results, pull((d_out, d_residual))[0]

    values = {"query": q, "key": k, "value": v} | {n: arrays[n] for n in names[3:]}
    (out, lse), gradients = run({n: jnp.asarray(x) for n, x in values.items()}, d_out, d_residual)
    assert_near(out, want[0], np.abs(v).max())
    assert_near(lse, want[1], 1 + np.abs(want[1][np.isfinite(want[1])]).max(initial=0))
    wanted = oracles.gradients_with_modifiers(
        q, k, v, scores, d_out, d_residual, bias=arrays.get("bias"), **rest
    )
    for name in names:
        assert gradients[name].shape == values[name].shape
        # Gradients of slopes are sums over all pairs, each times a distance.
        largest = 110 if name == "alibi_slopes" else 1
        assert_near(gradients[name], wanted[name], largest * max(1, np.abs(wanted[name]).max()))


@pytest.mark.quick(4, slow=4)
@pytest.mark.parametrize("case", GRID, ids=lambda case: " ".join(map(str, case)))
def test_triton_equals_the_oracle(case):
    static, arrays = options_of(*case)
    q, k, v, *_ = operands()
    scores, rest = oracle_arguments(q, k, static, arrays)
    want = oracles.attention_with_modifiers(q, k, v, scores, **rest)
    given = jax.tree.map(jnp.asarray, arrays)
    with interpreted("triton"):
        out, lse = attend(
            q, k, v, config=FLOAT, implementation="triton", return_residual=True, **static, **given
        )
    assert_near(out, want[0], np.abs(v).max())
    assert_near(lse, want[1], 1 + np.abs(want[1][np.isfinite(want[1])]).max(initial=0))


@pytest.mark.quick(1, slow=0)
@pytest.mark.parametrize("implementation", ["xla", "triton"])
def test_slopes_where_nothing_is_masked(implementation):
    """Whole blocks without a mask have additions too."""
    static, arrays = options_of("none", "none", "none", "no bias", True, "none", "all", None, False)
    q, k, v, *_ = operands()
    scores, rest = oracle_arguments(q, k, static, arrays)
    want, _ = oracles.attention_with_modifiers(q, k, v, scores, **rest)
    given = jax.tree.map(jnp.asarray, arrays)
    with interpreted(implementation):
        out = attend(q, k, v, config=FLOAT, implementation=implementation, **static, **given)
    assert_near(out, want, np.abs(v).max())


def test_gradients_of_the_oracle_are_differences():
    """The oracle itself: directional derivatives, by finite differences in float64."""
    static, arrays = options_of(
        "packed", "none", "both", "of keys", True, "some", "causal", 3.0, False
    )
    arrays["bias"] = np.where(np.isinf(arrays["bias"]), 0, arrays["bias"])
    q, k, v, d_out, d_residual = operands()
    q, k, v, d_out, d_residual = (x[:, :20] for x in (q, k, v, d_out, d_residual))
    arrays = {n: x[:, :20] if "ids" in n else x for n, x in arrays.items()}
    arrays["bias"] = arrays["bias"][..., :20]

    def loss(moved):
        given = {n: moved.get(n, x) for n, x in arrays.items()}
        scores, rest = oracle_arguments(q, k, static, given)
        out, lse = oracles.attention_with_modifiers(
            *(moved.get(n, x) for n, x in (("query", q), ("key", k), ("value", v))), scores, **rest
        )
        return (out * d_out).sum() + (np.where(np.isfinite(lse), lse, 0) * d_residual).sum()

    scores, rest = oracle_arguments(q, k, static, arrays)
    found = oracles.gradients_with_modifiers(
        q, k, v, scores, d_out, d_residual, bias=arrays["bias"], **rest
    )
    all_values = {"query": q, "key": k, "value": v} | arrays
    rng = np.random.default_rng(8)
    for name in ("query", "key", "value", "bias", "alibi_slopes", "sinks"):
        x = all_values[name]
        # float32 inputs: a step that they hold exactly.
        step = (rng.integers(-1, 2, x.shape) * 2.0**-9).astype(np.float32)
        difference = loss({name: x + step}) - loss({name: x - step})
        exact = (x + step).astype(np.float64) - (x - step).astype(np.float64)
        assert abs(difference - (found[name] * exact).sum()) < 1e-4 * max(1, abs(difference)), name


@pytest.mark.quick(1, slow=0)
@pytest.mark.parametrize("mode", MODES)
def test_segments_are_sequences(mode):
    """Packed sequences that begin with a block give the bits of each by itself."""
    config = tj.TurboConfig(mode=mode, block_q=64, block_kv=64)
    # With one scale of all values, e4m3 ones must be of one size to be comparable.
    q, k, v = tensors(3, 1, 192, 192, 2, 1, 32)
    v = v.at[:, jnp.array([0, 64, 128])].set(9.0)
    ids = jnp.repeat(jnp.array([[7, 2, 5]]), 64, axis=1)
    packed, lse = attend(
        *(q, k, v),
        config=config,
        is_causal=True,
        query_segment_ids=ids,
        key_value_segment_ids=ids,
        return_residual=True,
    )
    for first in (0, 64, 128):
        part = (x[:, first : first + 64] for x in (q, k, v))
        alone = attend(*part, config=config, is_causal=True, return_residual=True)
        np.testing.assert_array_equal(packed[:, first : first + 64], alone[0])
        np.testing.assert_array_equal(lse[:, first : first + 64], alone[1])


@pytest.mark.quick(1, slow=0)
@pytest.mark.parametrize("mode", MODES)
def test_a_part_at_an_offset_is_a_part_of_the_whole(mode):
    config = tj.TurboConfig(mode=mode, block_q=64, block_kv=64, softmax=SAS_E)
    q, k, v = tensors(4, 2, 256, 256, 2, 1, 32)
    options = {"config": config, "is_causal": True, "local_window_size": (100, 0)}
    whole = attend(q, k, v, return_residual=True, **options)
    part = attend(q[:, 128:192], k, v, query_offset=128, return_residual=True, **options)
    for got, want in zip(part, whole, strict=True):
        np.testing.assert_array_equal(got, want[:, 128:192])


@pytest.mark.quick(1, slow=0)
@pytest.mark.parametrize("mode", MODES)
def test_merged_parts_are_the_whole(mode):
    """Keys in two parts, each with its offset, merged in float32: as near as sums are."""
    config = tj.TurboConfig(mode=mode, block_q=64, block_kv=64, softmax=EXACT)
    q, k, v = tensors(5, 2, 64, 256, 2, 1, 32)
    v = v.at[:, jnp.array([0, 128])].set(9.0)
    options = {"config": config, "is_causal": True, "query_offset": 170, "return_residual": True}
    options |= {"output_dtype": jnp.float32}
    want = attend(q, k, v, **options)
    parts = [
        attend(q, k[:, half], v[:, half], key_offset=half.start, **options)
        for half in (slice(0, 128), slice(128, 256))
    ]
    got = tj.merge_attention(*(jnp.stack(x) for x in zip(*parts, strict=True)))
    # Weights are rounded beside another maximum in each part.
    step = {"float": EPS, "int8": 1 / 119, "int8_fp8": 2**-4, "fp8": 2**-4}[mode]
    assert np.abs(got[0] - want[0]).max() <= 4 * step
    np.testing.assert_allclose(got[1], want[1], atol=16 * EPS * 8)


def test_merging_is_exact_about_nothing():
    out = jnp.stack([jnp.zeros((1, 1, 2, 4)), jnp.ones((1, 1, 2, 4))])
    lse = jnp.array([[[[-jnp.inf, -jnp.inf]]], [[[-jnp.inf, 2.0]]]])
    merged, total = tj.merge_attention(out, lse)
    np.testing.assert_array_equal(merged[0, 0], [[0.0] * 4, [1.0] * 4])
    np.testing.assert_array_equal(total[0, 0], [-np.inf, 2.0])
    with pytest.raises(ValueError, match=r"residuals\.shape=\(1, 1, 1, 2\) the same without H"):
        tj.merge_attention(out, lse[:1])
    with pytest.raises(TypeError, match="float16"):
        tj.merge_attention(out, lse.astype(jnp.float16))


def test_output_dtype_is_of_the_sums():
    """A float32 output is what the 16-bit one is rounded from."""
    q, k, v = tensors(9, 1, 64, 64, 2, 2, 16, jnp.bfloat16)
    fine = attend(q, k, v, config=FLOAT, output_dtype=jnp.float32)
    assert fine.dtype == jnp.float32
    np.testing.assert_array_equal(fine.astype(jnp.bfloat16), attend(q, k, v, config=FLOAT))
    with pytest.raises(ValueError, match="output_dtype=.*bfloat16.* must be float32"):
        tj.turbo_attention(q, k, v, output_dtype=jnp.bfloat16)


@pytest.mark.slow
def test_values_of_another_head_dim():
    q, k, _ = tensors(11, 2, 40, 50, 4, 2, 24)
    v = jnp.asarray(np.random.default_rng(0).normal(size=(2, 50, 2, 16)), jnp.float32)
    wide = jnp.pad(v, ((0, 0), (0, 0), (0, 0), (0, 8)))

    def run(v, **options):
        def call(*x):
            return tj.turbo_attention(*x, is_causal=True, **options)[..., :16]

        out, pull = jax.vjp(call, q, k, v)
        return out, pull(jnp.ones_like(out))

    (out, grads), (want, wanted) = run(v), run(wide)
    np.testing.assert_array_equal(out, want)
    for got, x in zip(grads, (*wanted[:2], wanted[2][..., :16]), strict=True):
        np.testing.assert_allclose(got, x, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("arguments", "error", "words"),
    [
        (
            {"query_segment_ids": np.zeros((1, 4), int)},
            ValueError,
            "query_segment_ids need key_value",
        ),
        ({"key_value_segment_ids": np.zeros((1, 4), int)}, ValueError, "need query_segment_ids"),
        (
            {
                "query_segment_ids": np.zeros((1, 4), int),
                "key_value_segment_ids": np.zeros((1, 5), int),
            },
            ValueError,
            r"key_value_segment_ids\.shape=\(1, 5\) must be \(1, 4\)",
        ),
        (
            {"query_segment_ids": np.zeros((1, 4)), "key_value_segment_ids": np.zeros((1, 4))},
            TypeError,
            "float64|float32",
        ),
        (
            {"key_bounds": (np.zeros((1, 4), int),) * 3},
            TypeError,
            r"must be a pair \(start, end\) of integer arrays",
        ),
        (
            {"key_bounds": (np.zeros((1, 4), int), np.zeros((4,), int))},
            ValueError,
            r"end of key_bounds has shape \(4,\), must be \(1, 4\)",
        ),
        (
            {"key_bounds": (np.zeros((1, 4)), np.zeros((1, 4), int))},
            TypeError,
            "start of key_bounds.dtype=float",
        ),
        ({"query_offset": -1}, ValueError, r"query_offset=-1 must be between 0 and 536870912"),
        ({"key_offset": np.array([1, 2])}, ValueError, r"key_offset\.shape=\(2,\) must be \(\) or"),
        ({"query_offset": 1.5}, TypeError, "query_offset"),
        ({"bias": np.zeros((2, 1, 4, 4), np.float32)}, ValueError, r"bias\.shape=\(2, 1, 4, 4\)"),
        ({"bias": np.zeros((1, 1, 4, 4), int)}, TypeError, "bias"),
        (
            {"alibi_slopes": np.zeros(3, np.float32)},
            ValueError,
            r"alibi_slopes\.shape=\(3,\) must be",
        ),
        (
            {"sinks": np.zeros((1, 2), np.float32)},
            ValueError,
            r"sinks\.shape=\(1, 2\) must be \(2,\)",
        ),
    ],
)
def test_refusals(arguments, error, words):
    x = jnp.ones((1, 4, 2, 16))
    with pytest.raises(error, match=words):
        tj.turbo_attention(x, x, x, **arguments)


def test_nan_of_another_segment_stays_there():
    """In mode "float" what a query does not see cannot reach it; a NaN sink reaches its head."""
    q, k, v = tensors(12, 1, 40, 40, 2, 2, 16)
    ids = jnp.repeat(jnp.array([[0, 1]]), 20, axis=1)
    given = {"query_segment_ids": ids, "key_value_segment_ids": ids, "config": FLOAT}
    clean = attend(q, k, v, **given)
    spoiled = attend(q, k.at[:, 25].set(jnp.nan), v, **given)
    np.testing.assert_array_equal(spoiled[:, :20], clean[:, :20])
    assert np.isnan(spoiled[:, 20:]).all()
    out = attend(q, k, v, config=FLOAT, sinks=jnp.array([jnp.nan, 0.0]))
    assert np.isnan(out[:, :, 0]).all()
    assert np.isfinite(out[:, :, 1]).all()


@pytest.mark.quick(1, slow=0)
@pytest.mark.parametrize("gradient", ["float", "8bit"])
def test_nan_flows_back_to_nothing_from_what_sees_but_a_sink(gradient):
    config = tj.TurboConfig(mode="int8", block_q=64, block_kv=64, gradient=gradient)
    q, k, v = tensors(14, 1, 40, 40, 2, 2, 16)
    ids = jnp.repeat(jnp.array([[0, 1]]), 20, axis=1)
    alone = {"query_segment_ids": ids, "key_value_segment_ids": jnp.zeros_like(ids)}

    @jax.jit
    def gradients(d_out, d_lse):
        def call(q, k, v, sinks):
            static = {"config": config, "return_residual": True}
            return tj.turbo_attention(q, k, v, sinks=sinks, **alone, **static)

        return jax.vjp(call, q, k, v, jnp.array([0.5, -jnp.inf]))[1]((d_out, d_lse))

    d_out, d_lse = jnp.ones_like(q), jnp.ones(q.shape[:3])
    want = gradients(d_out, d_lse)
    # The log-sum-exps of these 20 queries are the first head's sink.
    of_others = gradients(d_out, d_lse.at[:, 20:].set(0))[3]
    np.testing.assert_allclose(want[3] - of_others, [20, 0], atol=1e-4)
    for got, x in zip(gradients(d_out.at[:, 20:].set(jnp.nan), d_lse), want, strict=True):
        np.testing.assert_array_equal(got, x)


@pytest.mark.slow
def test_under_vmap_and_scan():
    q, k, v = tensors(13, 2, 40, 40, 2, 2, 16)
    ids = jnp.asarray(np.sort(np.random.default_rng(1).integers(0, 3, (2, 40))), jnp.int32)
    sinks = jnp.array([0.3, -0.2])

    def one(q, k, v, ids, offset):
        q, k, v, ids = (x[None] for x in (q, k, v, ids))
        return tj.turbo_attention(
            *(q, k, v),
            config=FLOAT,
            is_causal=True,
            query_segment_ids=ids,
            key_value_segment_ids=ids,
            key_bounds=(ids, 30 + 5 * ids),
            query_offset=offset,
            sinks=sinks,
        )[0]

    offsets = jnp.array([0, 3])
    want = jnp.stack([one(*(x[b] for x in (q, k, v, ids, offsets))) for b in range(2)])
    mapped = jax.jit(jax.vmap(one))(q, k, v, ids, offsets)
    np.testing.assert_allclose(mapped, want, rtol=1e-5, atol=1e-6)
    scanned = jax.lax.scan(lambda c, x: (c, one(*x)), 0, (q, k, v, ids, offsets))[1]
    np.testing.assert_allclose(scanned, want, rtol=1e-5, atol=1e-6)
