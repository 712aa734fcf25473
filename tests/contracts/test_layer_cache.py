"""One layer's cache of any kind: options reach the attention, and what cannot attend says so."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import turbojax as tj
from turbojax import caches as layer_cache
from turbojax.caches import AttentionOptions, attend_new_tokens, attend_prompt
from turbojax.caches import exact as exact_attention
from turbojax.caches.comparison import Kivi

BATCH, TOKENS, HEADS, KV_HEADS, CHANNELS = 2, 13, 4, 2, 16
LENGTHS = np.array([13, 6])
KINDS = {
    "exact": "exact",
    "bfloat16": "bfloat16",
    "paged": "paged",
    "turbo4": "turbo4",
    "fp8_e4m3": "fp8_e4m3",
    "kv4": "kv4",
    "k8v4": "k8v4",
    "4bit": tj.TurboConfig(mode="int8", buffer_size=16, block_q=16, block_kv=16),
    "int8": "int8",
    "int4": "int4",
    "e4m3": "e4m3",
    "gear": Kivi(group_size=4, residual_length=4, rank=1),
}
# What outputs may be off by: about twice what they are. Values are up to 3.5, and keys' errors, in
# scores of up to 6, weigh about as much as values' own. So it is twice a value's largest rounding:
# half of 2**-6 (bfloat16 from 2 to 4), of 2**-2 (e4m3 there), of 3.5 / 7 (kv4, and k8v4's values),
# of 0.5 (turbo4's outermost centroids); for 4bit, whose 8-bit buffer holds so few tokens, four
# steps of 3.5 / 127; for int8 two halves of such a step; for int4 and gear two of 7 / 15.
# Exact ones: float32 sums of up to 45 products.
ERRORS = {
    "exact": 2e-5,
    "bfloat16": 2**-6,
    "paged": 2e-5,
    "turbo4": 0.5,
    "fp8_e4m3": 0.25,
    "kv4": 0.5,
    "k8v4": 0.5,
    "4bit": 0.1,
    "int8": 3.5 / 127,
    "int4": 7 / 15,
    "e4m3": 0.25,
    "gear": 7 / 15,
}
OPTIONS = {
    "plain": AttentionOptions(),
    "scale": AttentionOptions(scale=0.6),
    "window": AttentionOptions(local_window_size=4),
    "cap": AttentionOptions(logits_soft_cap=0.8),
    "all": AttentionOptions(0.9, 3, 1.5),
}


def operands(seed=0):
    rng = np.random.default_rng(seed)
    shapes = [(BATCH, TOKENS, heads, CHANNELS) for heads in (HEADS, KV_HEADS, KV_HEADS)]
    return [rng.standard_normal(shape).astype(np.float32) for shape in shapes]


def oracle(query, key, value, options, lengths=LENGTHS):
    """Attention by loops in float64; rows of padding stay zero."""
    out = np.zeros(query.shape)
    scale = CHANNELS**-0.5 if options.scale is None else options.scale
    for b, t, n in np.ndindex(query.shape[:3]):
        if t >= lengths[b]:
            continue
        first = 0 if options.local_window_size is None else t - options.local_window_size + 1
        seen = range(max(first, 0), t + 1)
        kv = n // (HEADS // KV_HEADS)
        scores = np.array([query[b, t, n].astype(float) @ key[b, s, kv] * scale for s in seen])
        if options.logits_soft_cap is not None:
            scores = options.logits_soft_cap * np.tanh(scores / options.logits_soft_cap)
        weights = np.exp(scores - scores.max())
        out[b, t, n] = weights @ value[b, list(seen), kv] / weights.sum()
    return out


def real(x):
    return np.concatenate(
        [np.asarray(x, float)[b, :length].ravel() for b, length in enumerate(LENGTHS)]
    )


@pytest.mark.quick(1, slow=0)
@pytest.mark.parametrize(
    ("kind", "options"),
    [*((kind, "all") for kind in KINDS), ("exact", "plain"), ("4bit", "window")],
)
def test_prompt_then_new_tokens(kind, options):
    """Options through every kind of cache; each moves the result by more than its error."""
    asked = OPTIONS[options]
    query, key, value = operands()
    expected = oracle(query, key, value, asked)
    cache = layer_cache.init_layer_cache(
        BATCH, 32, KV_HEADS, CHANNELS, kind=KINDS[kind], dtype=jnp.float32
    )
    out, cache = attend_prompt(jnp.asarray(LENGTHS))(
        *map(jnp.asarray, (query, key, value)), cache, asked
    )
    bound = ERRORS[kind]
    assert np.abs(real(out) - real(expected)).max() < bound
    assert cache.lengths.tolist() == LENGTHS.tolist()
    if kind == "exact":
        # What stands in the padding is of no account, be it NaN.
        broken = [x.copy() for x in (query, key, value)]
        for x in broken:
            x[1, LENGTHS[1] :] = np.nan
        empty = layer_cache.init_layer_cache(
            BATCH, 32, KV_HEADS, CHANNELS, kind=kind, dtype=x.dtype
        )
        again, held = attend_prompt(jnp.asarray(LENGTHS))(*map(jnp.asarray, broken), empty, asked)
        np.testing.assert_array_equal(real(again), real(out))
        np.testing.assert_array_equal(held.key, cache.key)
    # One more token of each sequence, wherever that ends.
    more = [x[:, :1] for x in operands(1)]
    attend = jax.jit(attend_new_tokens(), static_argnums=4)
    new, cache = attend(*map(jnp.asarray, more), cache, asked)
    for b, length in enumerate(LENGTHS):
        whole = [
            np.concatenate([x[b : b + 1, :length], y[b : b + 1]], 1)
            for x, y in zip((query, key, value), more, strict=True)
        ]
        wanted = oracle(*whole, asked, [length + 1])[0, length]
        assert np.abs(np.asarray(new)[b, 0] - wanted).max() < bound
    if options != "plain":
        plain = oracle(query, key, value, OPTIONS["plain"])
        assert np.abs(real(expected) - real(plain)).max() > 1.5 * bound


@pytest.mark.quick(slow=1)
@pytest.mark.parametrize(
    "asked",
    [
        AttentionOptions(0.6, 20, 1.5),
        AttentionOptions(local_window_size=20),
    ],
    ids=["all", "window"],
)
def test_options_over_compressed_codes(asked):
    """Prompts longer than the buffer: a new token sees codes, which the window cuts in two."""
    lengths, config = [45, 38], KINDS["4bit"]
    rng = np.random.default_rng(0)
    arrays = [
        rng.standard_normal((BATCH, 46, heads, CHANNELS)).astype(np.float32)
        for heads in (HEADS, KV_HEADS, KV_HEADS)
    ]
    cache = layer_cache.init_layer_cache(
        BATCH, 64, KV_HEADS, CHANNELS, kind=config, dtype=jnp.float32
    )
    prompt = [jnp.asarray(x[:, :45]) for x in arrays]
    _, cache = attend_prompt(jnp.array(lengths))(*prompt, cache, asked)
    more = [jnp.asarray(x[:, 45:]) for x in arrays]
    new, cache = attend_new_tokens()(*more, cache, asked)
    moved = 0.0
    for b, length in enumerate(lengths):
        whole = [np.concatenate([x[b : b + 1, :length], x[b : b + 1, 45:]], 1) for x in arrays]
        wanted = oracle(*whole, asked, [length + 1])[0, length]
        # A step of 4 bits over a block's channel is up to 5 / 15; half of it is off at most, and
        # keys' errors, of other signs, move weights by about as much as values' move their mean.
        assert np.abs(np.asarray(new)[b, 0] - wanted).max() < 0.2
        plain = oracle(*whole, OPTIONS["plain"], [length + 1])[0, length]
        moved = max(moved, np.abs(wanted - plain).max())
    assert moved > 0.3


@pytest.mark.parametrize("options", OPTIONS)
def test_without_a_cache(options):
    asked = OPTIONS[options]
    query, key, value = operands()
    out, nothing = layer_cache.causal_attention(*map(jnp.asarray, (query, key, value)), None, asked)
    assert nothing is None
    full = oracle(query, key, value, asked, [TOKENS] * BATCH)
    np.testing.assert_allclose(out, full, atol=2e-5)


@pytest.mark.quick(8, slow=0)
@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("first", [0, 3])
def test_padding_on_either_side(options, first):
    """The same tokens, shifted within the row: the results shift with them."""
    asked = OPTIONS[options]
    query, key, value = operands()
    expected = oracle(query, key, value, asked)
    mask, shifted = np.zeros((BATCH, TOKENS + 3), bool), []
    for b, length in enumerate(LENGTHS):
        mask[b, first : first + length] = True
    for x in (query, key, value):
        wide = np.full((BATCH, TOKENS + 3, *x.shape[2:]), 7.0, np.float32)
        for b, length in enumerate(LENGTHS):
            wide[b, first : first + length] = x[b, :length]
        shifted.append(jnp.asarray(wide))
    out, _ = layer_cache.padded_attention(jnp.asarray(mask))(*shifted, None, asked)
    for b, length in enumerate(LENGTHS):
        np.testing.assert_allclose(out[b, first : first + length], expected[b, :length], atol=2e-5)


@pytest.mark.slow
def test_gradients_with_a_cap():
    """The same as those that JAX takes of the masked attention, which is written out plainly."""
    asked = OPTIONS["all"]
    arrays = tuple(map(jnp.asarray, operands()))
    place = jnp.arange(TOKENS)
    near = (place[:, None] - place[None] < 3) & (place[:, None] >= place[None])
    mask = jnp.broadcast_to(near[None], (BATCH, TOKENS, TOKENS))

    def ours(q, k, v):
        return jnp.sum(layer_cache.causal_attention(q, k, v, None, asked)[0] ** 2)

    def plain(q, k, v):
        return jnp.sum(
            exact_attention.masked_attention(q, k, v, mask, scale=0.9, logits_soft_cap=1.5) ** 2
        )

    for a, b in zip(
        jax.grad(ours, (0, 1, 2))(*arrays), jax.grad(plain, (0, 1, 2))(*arrays), strict=True
    ):
        assert np.abs(b).max() > 0.1
        np.testing.assert_allclose(a, b, atol=2e-5)


@pytest.mark.fuzz
def test_pooled_attention_refuses_windows_and_caps():
    pooled = layer_cache.pooled_by_name("window", window=16, block_size=16)
    query, key, value = map(jnp.asarray, operands())
    for name in ("window", "cap", "all"):
        with pytest.raises(NotImplementedError, match="pooled attention has no window and no cap"):
            pooled(query, key, value, None, OPTIONS[name])
    out, _ = pooled(query, key, value, None, OPTIONS["scale"])
    full = oracle(query, key, value, OPTIONS["scale"], [TOKENS] * BATCH)
    np.testing.assert_allclose(out, full, atol=2e-5)


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"scale": float("nan")}, ValueError, "scale=nan must be finite"),
        ({"local_window_size": 0}, ValueError, "local_window_size=0 must be at least 1"),
        ({"local_window_size": 2.0}, TypeError, "local_window_size=2.0 must be an integer"),
        ({"logits_soft_cap": -1.0}, ValueError, "logits_soft_cap=-1.0 must be positive"),
        ({"logits_soft_cap": "x"}, TypeError, "logits_soft_cap is a str, must be a Python number"),
        ({"logits_soft_cap": jnp.float32(2)}, TypeError, "logits_soft_cap is a .*Array.* number"),
    ],
)
def test_bad_options(arguments, error, message):
    with pytest.raises(error, match=message):
        AttentionOptions(**arguments)


def test_an_unknown_kind_names_the_others():
    with pytest.raises(ValueError, match="cache='8bit' must be 'exact', 'kv4', 'k8v4', 'paged'"):
        layer_cache.init_layer_cache(1, 8, 1, 16, kind="8bit")
