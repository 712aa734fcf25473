"""What is static in a call of attention: checked once, hashable, and what jax means by it."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from turbojax.attention import pooled as pooled_attention
from turbojax.attention.options import Options, Visibility
from turbojax.attention.pooled.static import PooledOptions
from turbojax.caches import AttentionOptions
from turbojax.caches import exact as exact_attention
from turbojax.caches import paged as paged_attention
from turbojax.caches.exact import api as exact_api
from turbojax.caches.exact import cache as exact
from turbojax.caches.paged.pool import init_paged_cache
from turbojax.caches.progressive import init_cache
from turbojax.caches.progressive.kind import PROGRESSIVE
from turbojax.caches.token_scaled import cache as kv4
from turbojax.caches.token_scaled.kind import KV4
from turbojax.caches.whole import attend_within


def complete(head_dim=64, **given):
    plain = {"scale": None, "is_causal": True, "local_window_size": None, "logits_soft_cap": None}
    return Options.complete(head_dim, **{**plain, **given})


def test_what_is_not_given_is_completed():
    assert complete() == Options(True, scale=1 / 8)
    assert complete(16, is_causal=False, local_window_size=3) == Options(False, (3, 3), scale=0.25)


def test_equal_options_are_one_program():
    """Numbers of numpy, a list and an integer window: one form, one hash, one trace."""
    traced = []

    @functools.partial(jax.jit, static_argnames="options")
    def call(x, options):
        traced.append(options)
        return x * options.scale

    given = (
        Options(True, (2, 2), scale=0.5, logits_soft_cap=3.0),
        complete(scale=np.float32(0.5), is_causal=np.bool_(True), local_window_size=[2, 2],
                 logits_soft_cap=3),
        complete(4, local_window_size=np.int64(2), logits_soft_cap=3.0),
    )  # fmt: skip
    assert len(set(given)) == 1
    assert [call(jnp.ones(()), options) for options in given] == [0.5] * 3
    assert len(traced) == 1
    assert [type(x) for x in (given[1].scale, given[1].is_causal, *given[1].window)] == [
        float, bool, int, int,
    ]  # fmt: skip
    call(jnp.ones(()), dataclasses.replace(given[0], is_causal=False))
    assert len(traced) == 2


def test_nobody_changes_them():
    with pytest.raises(dataclasses.FrozenInstanceError):
        complete().scale = 1.0


WRONG = {
    "scale": [("1", TypeError, "scale is a str"), (float("nan"), ValueError, "scale=nan")],
    "logits_soft_cap": [
        (0.0, ValueError, "logits_soft_cap=0.0 must be positive and finite"),
        (float("inf"), ValueError, "logits_soft_cap=inf must be finite"),
        (jnp.ones(()), TypeError, "logits_soft_cap is a .*, must be a Python number"),
    ],
    "local_window_size": [
        (-1, ValueError, "local_window_size=-1 must be one or two integers >= 0"),
        ((1, 2, 3), ValueError, r"local_window_size=\(1, 2, 3\)"),
        (True, ValueError, "local_window_size=True"),
    ],
}


@pytest.mark.parametrize(
    ("name", "x", "error", "words"), [(name, *case) for name in WRONG for case in WRONG[name]]
)
def test_errors_name_argument_and_value(name, x, error, words):
    """Whoever makes them: a user's call, or a part of turbojax that names the fields."""
    with pytest.raises(error, match=words):
        complete(**{name: x})
    field = "window" if name == "local_window_size" else name
    with pytest.raises(error, match=words):
        Options(**{"is_causal": True, "scale": 1.0, field: x})


@pytest.mark.parametrize("window", [None, 1, 5, 2**40])
def test_a_layers_options_count_the_token_itself(window):
    given = AttentionOptions(0.3, window, 7.0)
    left = None if window is None else (min(window - 1, 2**30), 0)
    assert given.complete(64) == Options(True, left, scale=0.3, logits_soft_cap=7.0)


def test_a_layers_scale_is_completed_for_its_heads():
    assert AttentionOptions().complete(16) == Options(True, scale=0.25)


CASES = [(causal, window) for causal in (False, True) for window in (None, (0, 0), (2, 1), (9, 0))]


@pytest.mark.quick(6, slow=0)
@pytest.mark.parametrize(("causal", "window"), CASES)
def test_the_mask_is_that_of_jax(causal, window):
    """Of `jax.nn.dot_product_attention` with equal values: row sums of its mask."""
    options = Visibility(causal, window)
    place, lengths = jnp.arange(7)[None], jnp.array([7, 4])
    mask = np.asarray(options.mask(place, place, lengths))
    position = np.arange(7)
    want = np.ones((2, 7, 7), bool) & (position[None, None] < np.array([7, 4])[:, None, None])
    if causal:
        want &= (position[None] <= position[:, None])[None]
    if window is not None:
        distance = position[None] - position[:, None]
        want &= ((distance >= -window[0]) & (distance <= window[1]))[None]
    np.testing.assert_array_equal(mask, want)
    # What each key weighs, seen through values that are unit vectors.
    key = jnp.zeros((2, 7, 1, 8))
    value = jnp.broadcast_to(jnp.eye(7, 8)[None, :, None], key.shape)
    weights = jax.nn.dot_product_attention(
        key, key, value, is_causal=causal, local_window_size=window, key_value_seq_lengths=lengths
    )
    rows = want.any(-1)
    np.testing.assert_array_equal(np.asarray(weights)[:, :, 0, :7][rows] > 0, want[rows])


@pytest.mark.parametrize(("causal", "window"), CASES)
def test_outside_the_range_nothing_is_seen(causal, window):
    options = Visibility(causal, window)
    place, lengths = np.arange(7), jnp.array([6, 4])
    mask = np.asarray(options.mask(jnp.asarray(place)[None], jnp.asarray(place)[None], lengths))
    for first in range(7):
        for last in range(first, 7):
            start, stop = options.key_range(jnp.int32(first), jnp.int32(last), lengths)
            outside = (place < int(start)) | (place >= int(stop))
            assert not mask[:, first : last + 1][:, :, outside].any()


def test_pooled_options_refuse_what_pooled_attention_cannot():
    plain = {"scale": 1.0, "block_q": 8, "block_kv": 8}
    for more in ({"window": (1, 1)}, {"logits_soft_cap": 2.0}):
        with pytest.raises(NotImplementedError, match="no window and no cap"):
            PooledOptions(True, **plain, **more)
    with pytest.raises(ValueError, match="block_kv=12 must be a multiple of 8"):
        PooledOptions(True, **{**plain, "block_kv": 12})


QUERY = jnp.ones((1, 2, 2, 64))
TABLES, LENGTHS = jnp.zeros((1, 1), jnp.int32), jnp.array([2])
ENTRIES = {
    "turbo": lambda o: PROGRESSIVE.decode(
        QUERY, init_cache(1, 64, 2, 64, dtype=jnp.float32), options=o
    ),
    "kv4": lambda o: KV4.decode(QUERY, kv4.init_cache(1, 64, 2, 64, dtype=jnp.float32), options=o),
    "exact": lambda o: exact_api.decode(
        QUERY, exact.init_cache(1, 64, 2, 64, dtype=jnp.float32), options=o
    ),
    "exact prompt": lambda o: exact_attention.attend(QUERY, QUERY, QUERY, options=o),
    "pages": lambda o: paged_attention.attend(
        QUERY, init_paged_cache(1, 16, 2, 64, dtype=jnp.float32), TABLES, LENGTHS, options=o
    ),
}


@pytest.mark.parametrize("entry", ENTRIES)
def test_newest_tokens_attend_causally_or_not_at_all(entry):
    """An option that the op does not have is refused, not ignored."""
    with pytest.raises(ValueError, match="options.is_causal=False must be True"):
        ENTRIES[entry](Options(False, scale=1.0))


def test_arrays_are_checked_by_the_entries_too():
    half = QUERY.astype(jnp.bfloat16)
    cache = init_cache(1, 64, 2, 64, dtype=jnp.float32)
    options = Options(True, scale=1.0)
    with pytest.raises(TypeError, match="query.dtype=bfloat16"):
        PROGRESSIVE.decode(half, cache, options=options)
    with pytest.raises(TypeError, match="key.dtype=float32 must equal query.dtype=bfloat16"):
        attend_within(half, QUERY, QUERY, None, cache.config)
    blocks = PooledOptions(True, scale=1.0, block_q=8, block_kv=8)
    with pytest.raises(ValueError, match="levels.shape"):
        pooled_attention.attend(QUERY, QUERY, QUERY, jnp.ones((1, 1, 2, 2), int), options=blocks)
