"""`turbojax.bounds` against dense masks made pair by pair, and attention with such bounds.

`key_bounds` beside all other options, against a float64 oracle: `tests/tools/test_modifiers.py`.
"""

import doctest
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import turbojax as tj
from tests.attention.attention_helpers import MODES, SAS_E, tensors
from tests.contracts.implementations import interpreted

TOKENS = 24


def dense(bounds, size=TOKENS):
    """The mask ``[B, T, S]`` that bounds stand for."""
    start, end = (np.asarray(x)[:, :, None] for x in bounds)
    assert start.dtype == end.dtype == np.int32
    keys = np.arange(size)
    return (start <= keys) & (keys < end)


def pairs(shows, batch=2):
    """The mask of which ``shows(b, query, key)`` says each element."""
    return np.array(
        [[[shows(b, q, k) for k in range(TOKENS)] for q in range(TOKENS)] for b in range(batch)]
    )


def test_prefix_lm():
    lengths = np.array([0, 9])
    found = jax.jit(tj.bounds.prefix_lm, static_argnums=1)(jnp.asarray(lengths), TOKENS)
    want = pairs(lambda b, q, k: k <= q or k < lengths[b])
    np.testing.assert_array_equal(dense(found), want)


# An image at the start, two side by side, one of a token, one at the end; text alone.
TYPES = np.array(
    [[1] * 3 + [0] * 2 + [5] * 4 + [6] * 3 + [0] * 3 + [1] + [0] * 3 + [2] * 5, [0] * 24]
)
IMAGES = np.cumsum(np.diff(TYPES, prepend=-1) != 0, axis=1)


@pytest.mark.parametrize("left", [None, 0, 2, 6])
def test_image_blocks(left):
    """As Transformers' masks of Gemma 3: causal, within a window or not, or of the same image."""
    found = jax.jit(functools.partial(tj.bounds.image_blocks, local_window_size=left))(TYPES)

    def shows(b, q, k):
        is_one_image = TYPES[b, q] != 0 and IMAGES[b, q] == IMAGES[b, k]
        return is_one_image or (k <= q and (left is None or q - k <= left))

    np.testing.assert_array_equal(dense(found), pairs(shows))


@pytest.mark.parametrize("size", [0, 3, (5, 0), (2, 40)])
def test_window(size):
    left, right = size if isinstance(size, tuple) else (size, size)
    found = tj.bounds.window(2, TOKENS, size)
    np.testing.assert_array_equal(dense(found), pairs(lambda b, q, k: -left <= k - q <= right))


def test_segments_and_what_all_show():
    ids = np.array([[4] * 10 + [-1] * 9 + [7] * 5, [0] * 24])
    found = jax.jit(tj.bounds.segments)(ids)
    np.testing.assert_array_equal(dense(found), ids[:, :, None] == ids[:, None])
    both = tj.bounds.intersect(found, tj.bounds.window(2, TOKENS, (3, 1)))
    want = pairs(lambda b, q, k: ids[b, q] == ids[b, k] and -3 <= k - q <= 1)
    np.testing.assert_array_equal(dense(both), want)


def test_docstrings():
    result = doctest.testmod(tj.bounds)
    assert result.attempted
    assert not result.failed


@pytest.mark.parametrize(
    ("make", "error", "words"),
    [
        (
            lambda b: b.prefix_lm(np.array([3, 9]), 8),
            ValueError,
            r"=\[3, 9\] must be between 0 and 8",
        ),
        (lambda b: b.prefix_lm(3, 8), ValueError, r"prefix_lengths.shape=\(\) must be \[B\]"),
        (lambda b: b.prefix_lm(np.array([0.5]), 8), TypeError, "prefix_lengths.dtype=float"),
        (lambda b: b.image_blocks(np.array([1, 0])), ValueError, r"token_types.shape=\(2,\) must"),
        (lambda b: b.image_blocks(TYPES, local_window_size=-1), ValueError, "must be one or two"),
        (lambda b: b.window(1, 0, 3), ValueError, "tokens=0"),
        (lambda b: b.window(1, 4, None), ValueError, "must be one or two integers"),
        (
            lambda b: b.segments(np.array([[2, 2, 3, 3], [0, 1, 1, 0]])),
            ValueError,
            "segment_ids of sequence 1 have 0 again after others",
        ),
        (lambda b: b.intersect(), ValueError, r"of shapes \[\] must be some"),
        (
            lambda b: b.intersect(b.window(1, 4, 1), b.window(2, 4, 1)),
            ValueError,
            r"\[\(1, 4\), \(2, 4\)\]",
        ),
    ],
)
def test_refusals(make, error, words):
    with pytest.raises(error, match=words):
        make(tj.bounds)


# Blocks of 64 keys: bounds hide whole ones, parts of them, or nothing.
LONG = 200


@functools.partial(jax.jit, static_argnames=("mode", "implementation", "is_causal", "window"))
def with_gradients(q, k, v, bounds, *, mode, implementation, is_causal=False, window=None):
    def call(*x):
        return tj.turbo_attention(
            *x,
            config=tj.TurboConfig(mode=mode, block_q=64, block_kv=64, softmax=SAS_E),
            is_causal=is_causal,
            local_window_size=window,
            key_bounds=bounds,
            implementation=implementation,
            return_residual=True,
        )

    out, pull = jax.vjp(call, q, k, v)
    return out, pull(jax.tree.map(jnp.cos, out))


@pytest.mark.quick(0, slow=1)
@pytest.mark.parametrize("mode", MODES)
def test_bounds_that_say_what_options_say_give_their_bits(mode):
    """Causality and a window, as bounds: outputs and gradients in every mode."""
    q, k, v = tensors(3, 2, LONG, LONG, 4, 2, 32)
    of_options = {"is_causal": True, "window": (70, 0)}
    run = functools.partial(with_gradients, q, k, v, mode=mode, implementation="xla")
    want = run(None, **of_options)
    got = run(tj.bounds.window(2, LONG, (70, 0)))
    again = run(tj.bounds.window(2, LONG, (90, 3)), **of_options)
    jax.tree.map(np.testing.assert_array_equal, got, want)
    jax.tree.map(np.testing.assert_array_equal, again, want)


@pytest.mark.quick(0, slow=1)
@pytest.mark.parametrize("mode", ["int8", "fp8"])
def test_triton_in_modes_that_round(mode):
    """An image that begins and ends within blocks of keys; weights in 8 bits may differ by one."""
    q, k, v = tensors(5, 1, LONG, LONG, 2, 1, 32)
    types = jnp.zeros((1, LONG), int).at[:, 50:150].set(1)
    call = functools.partial(
        tj.turbo_attention,
        config=tj.TurboConfig(mode=mode, block_q=64, block_kv=64, softmax=SAS_E),
        key_bounds=tj.bounds.image_blocks(types),
    )
    with interpreted("triton"):
        got = call(q, k, v, implementation="triton")
    want = call(q, k, v, implementation="xla")
    step = {"int8": 1 / 119, "fp8": 2**-4}[mode]
    np.testing.assert_allclose(got, want, atol=step * np.abs(v).max() / 4)


@pytest.mark.parametrize("implementation", ["xla", "triton"])
def test_what_bounds_hide_has_no_part_in_anything(implementation):
    """NaN in keys that no query of a block of 64 sees; and queries that see nothing at all."""
    q, k, v = tensors(4, 1, LONG, LONG, 2, 1, 32)
    start, end = tj.bounds.segments(jnp.repeat(jnp.array([[0, 1]]), LONG // 2, axis=1))
    end = end.at[:, 120:130].set(start[:, 120:130])
    run = functools.partial(with_gradients, mode="float", implementation=implementation)
    with interpreted(implementation):
        (out, lse), gradients = run(q, k, v, (start, end))
        (spoiled, _), _ = run(q, k.at[:, 150].set(jnp.nan), v, (start, end))
    assert (np.asarray(out[:, 120:130]) == 0).all()
    assert np.isneginf(lse[:, 120:130]).all()
    assert (np.asarray(gradients[0][:, 120:130]) == 0).all()
    np.testing.assert_array_equal(spoiled[:, :100], out[:, :100])
    np.testing.assert_array_equal(spoiled[:, 120:130], 0)
    assert np.isnan(spoiled[:, 130:]).all()
    assert np.isfinite(out).all()
