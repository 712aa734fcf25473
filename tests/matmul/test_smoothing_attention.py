"""RPN, CRS and their statistics: the bound of Theorem 3.1, and scores that stay the same."""

import hypothesis
import hypothesis.extra.numpy
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.grids import pairwise
from turbojax.smoothing import (
    KeyStatistics,
    channel_rope_scale,
    rope_preserving_norm,
    scale_rotated,
)

EPS32, EPS64 = np.finfo(np.float32).eps, np.finfo(np.float64).eps


# RoPE and attention scores in float64, independent of turbojax.


def frequencies(pairs: int, kind: str, seed: int = 0) -> np.ndarray:
    """Per pair: plain RoPE, Llama 3's (low frequencies 8 times lower, a ramp between), or any."""
    plain = 500000.0 ** (-np.arange(pairs) / pairs)
    if kind == "plain":
        return plain
    if kind == "arbitrary":
        return np.random.default_rng(seed).uniform(-2, 2, pairs)
    wavelength, context, low, high = 2 * np.pi / plain, 8192, 1.0, 4.0
    ramp = np.clip((context / wavelength - low) / (high - low), 0, 1)
    return plain * ((1 - ramp) / 8 + ramp)


def rotate(x: np.ndarray, freq: np.ndarray, positions: np.ndarray | None = None) -> np.ndarray:
    """`x` [T, heads, H]: channels i and i + H/2 are rotated by position times frequency i."""
    positions = np.arange(x.shape[0]) if positions is None else positions
    angle = (positions[:, None] * freq)[:, None, :]
    i, j = x[..., : freq.size], x[..., freq.size :]
    cos, sin = np.cos(angle), np.sin(angle)
    return np.concatenate([i * cos - j * sin, j * cos + i * sin], axis=-1)


def pair_norms(x: np.ndarray) -> np.ndarray:
    """[..., H] -> [..., H/2]."""
    half = x.shape[-1] // 2
    return np.sqrt(x[..., :half] ** 2 + x[..., half:] ** 2)


def scores(query: np.ndarray, key: np.ndarray) -> np.ndarray:
    """[T, N, H] and [S, K, H] -> [N, T, S]."""
    key = np.repeat(key, query.shape[1] // key.shape[1], axis=1)
    return np.einsum("tnh,snh->nts", query, key)


def uneven_keys(tokens=50, heads=3, size=16, seed=0) -> np.ndarray:
    """[T, K, H] with a bias and a spread per channel: a few are far larger than others."""
    rng = np.random.default_rng(seed)
    spread = np.exp(1.5 * rng.standard_normal((heads, size)))
    return (rng.standard_normal((tokens, heads, size)) + rng.standard_normal(size)) * spread


def both(channels: np.ndarray) -> np.ndarray:
    """A factor per pair as one per channel."""
    return np.concatenate([channels, channels], axis=-1)


def rpn64(norms: np.ndarray, **options) -> np.ndarray:
    with jax.enable_x64(True):
        exclude = options.pop("exclude", None)
        exclude = None if exclude is None else jnp.asarray(exclude)
        scale = np.asarray(rope_preserving_norm(jnp.asarray(norms), exclude=exclude, **options))
    assert scale.dtype == np.float64
    return scale


def crs64(absmax: np.ndarray, **options) -> tuple[np.ndarray, np.ndarray]:
    with jax.enable_x64(True):
        scale, chosen = channel_rope_scale(jnp.asarray(absmax), **options)
    return np.asarray(scale), np.asarray(chosen)


KEYS = hypothesis.extra.numpy.arrays(
    np.float64,
    st.sampled_from([(1, 1, 2), (4, 1, 6), (3, 2, 4)]),  # few, because each compiles
    # Next to the smallest normal number, factors count as zero.
    elements=st.floats(-1e6, 1e6).map(lambda x: x if abs(x) > 1e-250 else 0.0),
)


# RoPE-preserving normalization.


@pytest.mark.parametrize("rope", ["plain", "llama3", "arbitrary"])
@pytest.mark.parametrize("alpha", [8.0, 1.0, 0.3])
def test_theorem_3_1_holds_for_every_token_before_and_after_rope(rope, alpha):
    key = uneven_keys()
    scale = rpn64(pair_norms(key).max(0), alpha=alpha)
    smoothed = key / both(scale)
    assert (pair_norms(smoothed) <= (1 + 4 * EPS64) / alpha).all()
    rotated = rotate(smoothed, frequencies(8, rope))
    assert (pair_norms(rotated) <= (1 + 8 * EPS64) / alpha).all()
    assert (np.abs(rotated) <= (1 + 8 * EPS64) / alpha).all()
    # And no better than it must be: some token of each pair is at the bound.
    np.testing.assert_allclose(pair_norms(rotated).max(0), 1 / alpha, rtol=8 * EPS64)


@hypothesis.given(
    key=KEYS,
    alpha=st.floats(0.01, 100),
    seed=st.integers(0, 99),
)
def test_theorem_3_1_by_hypothesis(key, alpha, seed):
    norms = np.hypot(*np.split(key, 2, axis=-1)).max(0)
    scale = rpn64(norms, alpha=alpha)
    assert (scale[norms == 0] == 1).all()
    rotated = rotate(key / both(scale), frequencies(key.shape[-1] // 2, "arbitrary", seed))
    for x in (key / both(scale), rotated):
        length = np.hypot(*np.split(x, 2, axis=-1))
        assert (length <= (1 + 16 * EPS64) / alpha).all()


def test_rpn_in_float32_is_the_definition():
    key = uneven_keys()
    norms = pair_norms(key).max(0).astype(np.float32)
    got = rope_preserving_norm(jnp.asarray(norms))
    assert got.dtype == jnp.float32
    np.testing.assert_array_equal(got, 8 * norms)
    np.testing.assert_array_equal(jax.jit(rope_preserving_norm)(norms), got)
    for dtype in (jnp.float16, jnp.bfloat16):
        narrow = jnp.asarray(norms, dtype)
        got = rope_preserving_norm(narrow)
        assert got.dtype == jnp.float32
        np.testing.assert_array_equal(got, 8 * np.asarray(narrow, np.float32))


def test_rpn_leaves_excluded_and_zero_pairs_alone():
    norms = np.array([[3.0, 0.0, 2.0, 1e-39]])
    exclude = np.array([[True, False, False, False]])
    got = rope_preserving_norm(norms.astype(np.float32), exclude=jnp.asarray(exclude))
    np.testing.assert_array_equal(got, [[1, 1, 16, 1]])


@pytest.mark.parametrize(
    ("norms", "options", "error", "message"),
    [
        (np.ones((2, 4), np.int32), {}, TypeError, "floating point"),
        (np.ones(4, np.float32), {}, ValueError, "2 axes"),
        (np.ones((0, 4), np.float32), {}, ValueError, "none empty"),
        (np.array([[1, np.nan]], np.float32), {}, ValueError, "finite"),
        (np.array([[1, np.inf]], np.float32), {}, ValueError, "finite"),
        (np.array([[1, -1]], np.float32), {}, ValueError, "negative"),
        (np.ones((1, 2), np.float32), {"alpha": 0.0}, ValueError, "alpha=0.0 must be positive"),
        (np.ones((1, 2), np.float32), {"alpha": None}, TypeError, "alpha=None"),
        (np.ones((1, 2), np.float32), {"exclude": np.ones((1, 2))}, TypeError, "must be bool"),
        (np.ones((1, 2), np.float32), {"exclude": np.ones((2, 1), bool)}, ValueError, "equal"),
    ],
)
def test_rpn_refuses(norms, options, error, message):
    with pytest.raises(error, match=message):
        rope_preserving_norm(norms, **options)


# Channel-wise RoPE scaling.


@pytest.mark.quick(1, slow=0)
@pytest.mark.parametrize("num_pairs", [0, 1, 3, 8])
def test_crs_is_its_definition_for_the_pairs_with_the_largest_outliers(num_pairs):
    absmax = np.abs(uneven_keys()).max(0)
    scale, chosen = crs64(absmax, num_pairs=num_pairs, beta=5.0)
    largest = np.maximum(absmax[:, :8], absmax[:, 8:])
    want = np.zeros((3, 8), bool)
    for head in range(3):
        want[head, sorted(range(8), key=lambda i: -largest[head, i])[:num_pairs]] = True
    np.testing.assert_array_equal(chosen, want)
    np.testing.assert_array_equal(scale, np.where(both(want), 5 * absmax, 1))


@pytest.mark.slow
@hypothesis.given(
    key=KEYS,
    beta=st.floats(0.01, 100),
    data=st.data(),
)
def test_crs_bounds_what_it_scales(key, beta, data):
    num_pairs = data.draw(st.integers(0, key.shape[-1] // 2))
    absmax = np.abs(key).max(0)
    scale, chosen = crs64(absmax, num_pairs=num_pairs, beta=beta)
    assert (chosen.sum(1) == num_pairs).all()
    scaled = both(chosen) & (absmax > 0)
    assert (np.abs(key / scale)[:, scaled] <= (1 + 4 * EPS64) / beta).all()
    assert (scale[~scaled] == 1).all()
    # No pair left out has a larger channel than one that is in.
    largest = np.maximum(*np.split(absmax, 2, axis=-1))
    for head, mask in zip(largest, chosen, strict=True):
        if 0 < mask.sum() < mask.size:
            assert head[~mask].max() <= head[mask].min()


def test_crs_breaks_ties_by_the_lower_pair():
    _, chosen = channel_rope_scale(jnp.ones((1, 8)), num_pairs=2)
    np.testing.assert_array_equal(chosen, [[True, True, False, False]])


def test_crs_without_rpn_brings_outliers_to_the_size_of_the_others():
    absmax = np.array(
        [
            [1.0, 50, 3, 2, 20, 4],  # pair 1 is chosen; the others' median is 2.5
            [0.0, 7, 0, 0, 1, 0],  # no others but zeros: among themselves, median 4
            [0.0, 0, 0, 0, 0, 0],
        ]
    )
    scale, chosen = crs64(absmax, num_pairs=1, beta=None)
    np.testing.assert_array_equal(chosen[:2], [[False, True, False]] * 2)
    np.testing.assert_array_equal(scale[0], [1, 20, 1, 1, 8, 1])
    np.testing.assert_array_equal(scale[1], [1, 7 / 4, 1, 1, 1 / 4, 1])
    np.testing.assert_array_equal(scale[2], 1)
    scale, _ = crs64(absmax, num_pairs=3, beta=None)
    np.testing.assert_allclose(scale[0], absmax[0] / 3.5, rtol=2 * EPS64)


def test_crs_dtypes_and_jit():
    absmax = jnp.asarray(np.abs(uneven_keys()).max(0), jnp.bfloat16)
    for beta in (8.0, None):
        scale, chosen = channel_rope_scale(absmax, num_pairs=3, beta=beta)
        assert (scale.dtype, chosen.dtype) == (jnp.float32, jnp.bool_)
        scale_jit, chosen_jit = jax.jit(
            lambda x, b=beta: channel_rope_scale(x, num_pairs=3, beta=b)
        )(absmax)
        np.testing.assert_allclose(scale_jit, scale, rtol=2 * EPS32)
        np.testing.assert_array_equal(chosen_jit, chosen)


@pytest.mark.parametrize(
    ("absmax", "options", "error", "message"),
    [
        (np.ones((1, 8), np.int32), {}, TypeError, "floating point"),
        (np.ones((1, 7), np.float32), {}, ValueError, "even number"),
        (np.ones((1, 8), np.float32), {"num_pairs": 5}, ValueError, "num_pairs=5 must be .* 4"),
        (np.ones((1, 8), np.float32), {}, ValueError, "num_pairs=8 must be between 0 and .* 4"),
        (np.ones((1, 8), np.float32), {"num_pairs": -1}, ValueError, "num_pairs=-1"),
        (np.ones((1, 8), np.float32), {"num_pairs": 2.0}, TypeError, "num_pairs=2.0"),
        (np.ones((1, 16), np.float32), {"beta": -1.0}, ValueError, "beta=-1.0"),
        (np.full((1, 16), np.nan, np.float32), {}, ValueError, "finite"),
        (-np.ones((1, 16), np.float32), {}, ValueError, "negative"),
    ],
)
def test_crs_refuses(absmax, options, error, message):
    with pytest.raises(error, match=message):
        channel_rope_scale(absmax, **options)


# Scores.


@pytest.mark.parametrize(
    ("group", "rope", "use"),
    pairwise(
        group=[(6, 3), (4, 1), (1, 1)],
        rope=["plain", "llama3", "arbitrary"],
        use=["rpn", "crs", "rpn+crs"],
    ),
)
def test_scores_stay_the_same(group, rope, use):
    """RPN before RoPE on both sides, CRS after it, in float64."""
    heads, kv_heads = group
    key = uneven_keys(heads=kv_heads)
    query = uneven_keys(tokens=20, heads=heads, seed=1)
    freq = frequencies(8, rope)
    positions = np.arange(20) + 30
    before = scores(rotate(query, freq, positions), rotate(key, freq))
    exclude, scale = None, np.ones((kv_heads, 16))
    if "crs" in use:
        absmax = np.abs(rotate(key, freq)).max(0)
        scale, exclude = crs64(absmax, num_pairs=2, beta=8.0 if "rpn" in use else None)
    if "rpn" in use:
        norm = both(rpn64(pair_norms(key).max(0), exclude=exclude))
        key = key / norm
        query = query * np.repeat(norm, heads // kv_heads, axis=0)
    query, key = rotate(query, freq, positions), rotate(key, freq)
    with jax.enable_x64(True):
        query, key = (np.asarray(x) for x in scale_rotated(*map(jnp.asarray, (query, key, scale))))
    assert key.dtype == query.dtype == np.float64
    error = np.abs(scores(query, key) - before).max()
    assert error <= 100 * EPS64 * scores(np.abs(query), np.abs(key)).max()
    assert np.abs(before).max() > 1
    if use == "rpn+crs":  # in which case all channels are bounded
        assert np.abs(key).max() <= (1 + 16 * EPS64) / 8


@pytest.mark.parametrize("dtype", [jnp.float16, jnp.bfloat16, jnp.float32])
def test_scaling_after_rope_rounds_once(dtype):
    query = jnp.asarray(uneven_keys(heads=4, seed=1)[None], dtype)
    key = jnp.asarray(uneven_keys(heads=2)[None], dtype)
    scale = np.exp(np.random.default_rng(3).standard_normal((2, 16))).astype(np.float32)
    scaled_query, scaled_key = jax.jit(scale_rotated)(query, key, jnp.asarray(scale))
    assert scaled_query.dtype == scaled_key.dtype == dtype
    # The reciprocal and the product in float32, then the dtype's own rounding.
    rtol = 3 * EPS32 + (0 if dtype == jnp.float32 else float(jnp.finfo(dtype).eps) / 2)
    wide = scale.astype(np.float64)
    np.testing.assert_allclose(
        np.asarray(scaled_key, np.float64), np.asarray(key, np.float64) / wide, rtol=rtol, atol=3e-8
    )
    np.testing.assert_allclose(
        np.asarray(scaled_query, np.float64),
        np.asarray(query, np.float64) * np.repeat(wide, 2, axis=0),
        rtol=rtol,
        atol=3e-8,
    )


def test_scaling_after_rope_refuses_shapes_that_do_not_fit():
    query, key, scale = jnp.ones((5, 4, 8)), jnp.ones((5, 2, 8)), jnp.ones((2, 8))
    for wrong in (
        (query, key, jnp.ones((4, 8))),
        (query, jnp.ones((5, 2, 6)), scale),
        (jnp.ones((5, 4, 6)), key, scale),
        (jnp.ones((5, 3, 8)), key, scale),
    ):
        with pytest.raises(ValueError, match="must"):
            scale_rotated(*wrong)


# Statistics.


def test_statistics_are_maxima_over_all_tokens():
    key = uneven_keys(60).astype(np.float32).reshape(2, 30, 3, 16)
    rotated = key[..., ::-1].copy()
    got = KeyStatistics.init(3, 16).update(key[:, :20], rotated[:, :20])
    got = got.update(key[:, 20:], rotated[:, 20:])
    assert int(got.tokens) == 60
    got.validate()
    norms = pair_norms(key.astype(np.float64)).max((0, 1))
    np.testing.assert_allclose(got.pair_norm, norms, rtol=4 * EPS32)
    np.testing.assert_array_equal(got.absmax, np.abs(rotated).max((0, 1)))
    assert got.pair_norm.dtype == got.absmax.dtype == jnp.float32


def test_statistics_norms_neither_overflow_nor_vanish():
    """Squares of these would."""
    key = np.array([[[3e30, 3e-30, 4e30, 4e-30]]], np.float32)
    got = KeyStatistics.init(1, 4).update(key, key)
    np.testing.assert_allclose(got.pair_norm, [[5e30, 5e-30]], rtol=4 * EPS32)
    half = KeyStatistics.init(1, 4).update(*[jnp.asarray([[[6e4, 1, 6e4, 1]]], jnp.float16)] * 2)
    assert np.isfinite(half.pair_norm).all()


def test_statistics_in_float64():
    key = uneven_keys()
    with jax.enable_x64(True):
        got = KeyStatistics.init(3, 16).update(jnp.asarray(key), jnp.asarray(key))
        norm = np.asarray(got.pair_norm)
        got.validate()
    assert norm.dtype == np.float64
    np.testing.assert_allclose(norm, pair_norms(key).max(0), rtol=4 * EPS64)


def test_statistics_ignore_masked_tokens():
    key = uneven_keys(12).astype(np.float32).reshape(2, 6, 3, 16)
    mask = np.ones((2, 6), bool)
    mask[1, 3:] = False
    padded = np.where(mask[..., None, None], key, np.nan)
    got = KeyStatistics.init(3, 16).update(padded, 2 * padded, jnp.asarray(mask))
    want = KeyStatistics.init(3, 16).update(key[mask], 2 * key[mask])
    jax.tree.map(np.testing.assert_array_equal, got, want)
    assert int(got.tokens) == 9
    nothing = KeyStatistics.init(3, 16).update(key, key, jnp.zeros((2, 6), bool))
    with pytest.raises(ValueError, match="tokens=0"):
        nothing.validate()


def test_statistics_of_parts_merge_in_any_order_and_under_scan():
    key = uneven_keys(24).astype(np.float32).reshape(4, 6, 3, 16)
    empty = KeyStatistics.init(3, 16)
    want = empty.update(key, 2 * key)
    parts = [empty.update(k, 2 * k) for k in key]
    merged = parts[3].merge(parts[0]).merge(parts[2].merge(parts[1]))
    jax.tree.map(np.testing.assert_array_equal, merged, want)
    scanned, _ = jax.lax.scan(lambda s, k: (s.update(k, 2 * k), None), empty, jnp.asarray(key))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=2 * EPS32), scanned, want)


def test_statistics_of_one_token_have_no_other_axis_to_reduce():
    key = uneven_keys(1).astype(np.float32)[0]
    got = KeyStatistics.init(3, 16).update(key, key)
    np.testing.assert_array_equal(got.absmax, np.abs(key))
    assert int(got.tokens) == 1


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_a_key_that_is_not_finite_is_found_later(bad):
    key = uneven_keys(64).astype(np.float32)
    key[13, 1, 4] = bad
    got = jax.jit(lambda k: KeyStatistics.init(3, 16).update(k, k).update(k[:5], k[:5]))(key)
    assert np.argwhere(np.isnan(got.pair_norm)).tolist() == [[1, 4]]
    assert np.argwhere(np.isnan(got.absmax)).tolist() == [[1, 4]]
    with pytest.raises(ValueError, match="finite"):
        got.validate()
    with pytest.raises(ValueError, match="finite"):
        rope_preserving_norm(got.pair_norm)
    with pytest.raises(ValueError, match="finite"):
        channel_rope_scale(got.absmax)


def test_statistics_refuse():
    with pytest.raises(ValueError, match="even"):
        KeyStatistics.init(3, 15)
    empty = KeyStatistics.init(3, 16)
    with pytest.raises(ValueError, match="tokens=0 must be at least 1"):
        empty.validate()
    key = np.ones((5, 3, 16), np.float32)
    for wrong, error in [
        ((key[:, :2], key[:, :2]), ValueError),
        ((key[:0], key[:0]), ValueError),
        ((key, key[:4]), ValueError),
        ((key, key, jnp.ones(4, bool)), ValueError),
        ((key.astype(np.int32), key), TypeError),
    ]:
        with pytest.raises(error, match="must"):
            empty.update(*wrong)
    with pytest.raises(ValueError, match="two channels per pair"):
        KeyStatistics(empty.pair_norm[:2], empty.absmax, jnp.ones((), jnp.int32)).validate()
