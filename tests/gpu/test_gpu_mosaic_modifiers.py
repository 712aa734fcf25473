"""Segments, bounds, biases, slopes, sinks, float32 parts, narrower values on a Hopper GPU.

Prefill and its gradient through Mosaic GPU against the definition in XLA, all options in pairs.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import turbojax as tj
from tests.attention.attention_helpers import EXACT, FLOAT, SAS_E, tensors
from tests.gpu.gpu_helpers import EIGHT_BIT_MODES as MODES
from tests.gpu.gpu_helpers import assert_same_nan, error, on_hopper
from tests.grids import pairwise
from turbojax.attention.options import Options
from turbojax.attention.score_modifiers import ScoreModifiers
from turbojax.attention.turbo import gradient_reference, mosaic_gpu, mosaic_gradient, reference
from turbojax.attention.turbo.operands import Backward

pytestmark = [pytest.mark.gpu, on_hopper]

BATCH, TOKENS, SIZE, HEADS, KV_HEADS = 3, 330, 410, 4, 2
OPTIONS = {
    "all": {},
    "causal": {"is_causal": True},
    "causal window": {"is_causal": True, "window": (150, 0)},
    "window, cap": {"window": (90, 60), "logits_soft_cap": 5.0},
}
# Shapes of a bias, and whether it has the queries' dtype.
BIASES = {
    "none": None,
    "full": ((BATCH, HEADS, TOKENS, SIZE), False),
    "full, own dtype": ((BATCH, HEADS, TOKENS, SIZE), True),
    "one for sequences": ((1, HEADS, TOKENS, SIZE), True),
    "one for all": ((1, 1, TOKENS, SIZE), False),
    "row": ((1, HEADS, 1, SIZE), False),
    "row for heads": ((BATCH, 1, 1, SIZE), True),
}
CASES = pairwise(
    segments=("packed", "shuffled", "none", "images", "any bounds"),
    offsets=("none", "both"),
    bias=list(BIASES),
    slopes=(False, True),
    sinks=(False, True),
    seen=list(OPTIONS),
    ragged=(True, False),
    head_dim=((128, 128), (64, 64), (192, 128), (80, 48)),
    out_dtype=(None, "float32"),
    mode=MODES,
    softmax=(EXACT, SAS_E),
    rounding=("float", "8bit"),
    dtype=(jnp.bfloat16, jnp.float16, jnp.float32),
)


def ids(rng, kind, tokens):
    """Segments of tens of tokens, in order or not: int32 ``[B, tokens]``."""
    x = rng.integers(0, 5, (BATCH, tokens // 30 + 1)).repeat(30, axis=1)[:, :tokens]
    return jnp.asarray(np.sort(x, axis=1) if kind == "packed" else x, jnp.int32)


def a_bias(kind, dtype):
    """Some of it hides keys, and for one query of a head all."""
    shape, is_own = BIASES[kind]
    rng = np.random.default_rng(5)
    x = rng.normal(size=shape) * 2
    x[rng.random(shape) < 0.1] = -np.inf
    if shape[2] > 1:
        x[0, -1, 40] = -np.inf
    return jnp.asarray(x, dtype if is_own else jnp.float32)


def call_of(segments, offsets, bias, slopes, sinks, seen, ragged, head_dim, out_dtype, dtype):
    """Queries, keys, values and lengths; options and modifiers."""
    rng = np.random.default_rng(7)
    q, k, v = tensors(7, BATCH, TOKENS, SIZE, HEADS, KV_HEADS, head_dim[0], dtype)
    given = {}
    if segments == "images":
        types = ids(rng, "packed", TOKENS)
        given["key_bounds"] = tj.bounds.image_blocks((types % 2) * types)
    elif segments == "any bounds":
        given["key_bounds"] = tuple(jnp.asarray(rng.integers(0, SIZE + 1, (2, BATCH, TOKENS))))
    elif segments != "none":
        given["query_segment_ids"] = ids(rng, segments, TOKENS)
        given["key_value_segment_ids"] = ids(rng, segments, SIZE)
    if offsets == "both":
        given["query_offset"] = jnp.asarray([100, 0, 7], jnp.int32)
        given["key_offset"] = jnp.asarray([3, 50, 0], jnp.int32)
    if bias != "none":
        given["bias"] = a_bias(bias, dtype)
    if slopes:
        given["alibi_slopes"] = jnp.asarray(2.0 ** -np.arange(4, 4 + HEADS), jnp.float32)
    if sinks:
        given["sinks"] = jnp.asarray([0.5, 6.0, -jnp.inf, 2.0], jnp.float32)
    lengths = ((TOKENS, 130, 0), (SIZE, 77, 200)) if ragged else ((TOKENS,) * 3, (SIZE,) * 3)
    of_both = [jnp.asarray(n, jnp.int32) for n in lengths]
    changes = {"is_causal": False, "scale": 0.1, "out_dtype": out_dtype} | OPTIONS[seen]
    return (q, k, v[..., : head_dim[1]], *of_both), Options(**changes), ScoreModifiers(**given)


def rms(x):
    x = np.asarray(x, np.float64)
    x = x[np.isfinite(x)]
    return np.sqrt(np.mean(np.square(x))) if x.size else 0.0


@pytest.mark.quick(6)
@pytest.mark.parametrize("case", CASES, ids=lambda case: "-".join(map(str, case[:10])))
def test_attention_equals_the_definition(case):
    *what, mode, softmax, _, dtype = case
    arrays, options, modifiers = call_of(*what, dtype)
    config = tj.TurboConfig(mode=mode, softmax=softmax)
    static = {"options": options, "modifiers": modifiers}
    got = mosaic_gpu.attention(*arrays, config=config, **static)
    want = reference.attention(*arrays, config=config, **static)
    exact = reference.attention(*arrays, config=FLOAT, **static)
    assert got[0].dtype == options.dtype_of_output(arrays[0])
    assert got[0].shape == want[0].shape
    for ours, theirs, truth, bound in zip(got, want, exact, (1e-2, 1e-3), strict=True):
        scale, eps = rms(truth), float(jnp.finfo(ours.dtype).eps)
        allowed = max(bound * scale, 2**0.5 * error(theirs, truth)) + eps * scale
        assert error(ours, theirs) <= allowed
        assert error(ours, truth) <= 1.25 * error(theirs, truth) + (1e-3 + eps) * scale


@pytest.mark.quick(4)
@pytest.mark.parametrize("case", CASES, ids=lambda case: "-".join(map(str, case[:10])))
def test_gradients_equal_the_definition(case):
    *what, mode, _, rounding, dtype = case
    arrays, options, modifiers = call_of(*what, dtype)
    if arrays[0].shape[3] > 128 and {"query_segment_ids", "key_bounds"} & set(modifiers.given):
        rounding = "8bit"  # what is refused otherwise
    config = tj.TurboConfig(mode=mode, softmax=EXACT, gradient=rounding)
    static = {"config": config, "options": options, "modifiers": modifiers}
    out, residual = reference.attention(*arrays, **static)
    rng = np.random.default_rng(8)
    d_out = jnp.asarray(rng.normal(size=out.shape), out.dtype)
    d_residual = jnp.asarray(rng.normal(size=residual.shape), jnp.float32)
    arrays = Backward(*arrays, out, residual, d_out, d_residual)
    got = mosaic_gradient.gradient(arrays, **static)
    again = mosaic_gradient.gradient(arrays, **static)
    jax.tree.map(np.testing.assert_array_equal, got, again)
    want = gradient_reference.gradient(arrays, **static)
    # Cotangents of float32 outputs multiply in bfloat16.
    in_half = jnp.dtype(dtype) == jnp.float16 and options.out_dtype is None
    unit = 2.0**-10 if in_half else 2.0**-8
    for x, y in zip(got[:3], want[:3], strict=True):
        assert (x.shape, x.dtype) == (y.shape, y.dtype)
        x, y = (np.asarray(a, np.float64) for a in (x, y))
        assert np.linalg.norm(x - y) <= 1.5 * unit * np.linalg.norm(y) + 1e-6
    ours, theirs = (x[3].bias for x in (got, want))
    assert (ours is None) == (theirs is None)
    if ours is not None:
        assert (ours.shape, ours.dtype) == (theirs.shape, theirs.dtype)
        ours, theirs = (np.asarray(a, np.float64) for a in (ours, theirs))
        # Rows and heads that share a bias cancel in part; their roundings do not.
        assert np.linalg.norm(ours - theirs) <= 2.5 * unit * np.linalg.norm(theirs) + 1e-6
    ours, theirs = (x[3].alibi_slopes for x in (got, want))
    assert (ours is None) == (theirs is None)
    if ours is not None:
        of_rows = np.abs(np.asarray(theirs)).max()
        np.testing.assert_allclose(ours, theirs, rtol=0, atol=2.0**-8 * of_rows)


def results(call, *arrays, d_out=None):
    """Output and gradients; of the cosine of the output, if no cotangent is given."""
    out, pull = jax.vjp(call, *arrays)
    return out, *pull(jnp.cos(out) if d_out is None else d_out)


def assert_alike(got, want, unit):
    for x, y in zip(got, want, strict=True):
        x, y = (np.asarray(a, np.float64).ravel() for a in (x, y))
        assert np.linalg.norm(x - y) <= unit * np.linalg.norm(y)


@pytest.mark.quick(3)
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("head_dim", [64, 128])
def test_packed_sequences_are_those_by_themselves(mode, head_dim):
    """Segments of whole blocks share no scale: but for e4m3 values' one, the same gradients."""
    q, k, v = tensors(9, 1, 512, 512, 4, 2, head_dim, jnp.bfloat16)
    # One scale of values for all and for each alone.
    v = v.at[:, ::128].set(9.0)
    packed = jnp.repeat(jnp.arange(4, dtype=jnp.int32), 128)[None]
    call = functools.partial(
        tj.turbo_attention,
        config=tj.TurboConfig(mode=mode, softmax=EXACT),
        is_causal=True,
        implementation="mosaic_gpu",
    )
    d_out = jnp.asarray(np.random.default_rng(9).normal(size=q.shape), q.dtype)
    segments = {"query_segment_ids": packed, "key_value_segment_ids": packed}
    got = results(functools.partial(call, **segments), q, k, v, d_out=d_out)
    *apart, d_apart = (x.reshape(4, 128, *x.shape[2:]) for x in (q, k, v, d_out))
    assert_alike(got, results(call, *apart, d_out=d_apart), 2.0**-8)


@pytest.mark.quick(3)
@pytest.mark.parametrize("mode", MODES)
def test_bounds_say_what_segments_say(mode):
    """Of packed sequences with a window, forward and backward, as the kernels have segments."""
    q, k, v = tensors(9, 2, 700, 700, 4, 2, 128, jnp.bfloat16)
    packed = ids(np.random.default_rng(2), "packed", 700)[:2]
    call = functools.partial(
        tj.turbo_attention,
        config=tj.TurboConfig(mode=mode, softmax=EXACT, gradient="8bit"),
        is_causal=True,
        local_window_size=(300, 0),
        implementation="mosaic_gpu",
    )
    got, want = (
        results(functools.partial(call, **given), q, k, v)
        for given in (
            {"query_segment_ids": packed, "key_value_segment_ids": packed},
            {"key_bounds": tj.bounds.segments(packed)},
        )
    )
    assert_alike(got, want, 2.0**-10)


@pytest.mark.quick(3)
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("kind", ["full", "row"])
@pytest.mark.parametrize("tokens", [699, 1000])
def test_a_bias_says_what_bounds_say(mode, kind, tokens):
    """Minus infinity hides keys, the same results where bounds hide them."""
    q, k, v = tensors(9, 2, tokens, tokens, 4, 2, 128, jnp.bfloat16)
    place = jnp.arange(tokens)
    if kind == "row":
        hides = place >= tokens - 100
        end = jnp.full((2, tokens), tokens - 100)
    else:
        hides = place[None] >= 300 + place[:, None] // 2
        end = jnp.broadcast_to(300 + place // 2, (2, tokens))
    hides = hides.reshape(1, 1, -1, tokens)
    call = functools.partial(
        tj.turbo_attention,
        config=tj.TurboConfig(mode=mode, softmax=EXACT, gradient="8bit"),
        implementation="mosaic_gpu",
    )
    got, want = (
        results(functools.partial(call, **given), q, k, v)
        for given in (
            {"bias": jnp.where(hides, -jnp.inf, 0).astype(jnp.bfloat16)},
            {"key_bounds": (jnp.zeros_like(end), end)},
        )
    )
    # With a bias tiles are smaller, and e4m3 rounds weights relative to other maxima.
    assert_alike(got, want, 2.0**-4)


@pytest.mark.quick(2)
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("kind", ["full", "row"])
def test_nan_of_a_bias_stays_in_its_rows(mode, kind):
    """As in the definition: where a NaN is, and nowhere else."""
    arrays, options, _ = call_of(
        "none", "none", "none", False, False, "all", False, (128, 128), None, jnp.bfloat16
    )
    bias = a_bias(kind, jnp.bfloat16).at[0, 1, -1, 77].set(jnp.nan)
    config = tj.TurboConfig(mode=mode, softmax=EXACT)
    static = {"config": config, "options": options, "modifiers": ScoreModifiers(bias=bias)}
    got, want = mosaic_gpu.attention(*arrays, **static), reference.attention(*arrays, **static)
    assert_same_nan(got, want)
    assert 0 < np.isnan(want[1]).sum() < np.asarray(want[1]).size
