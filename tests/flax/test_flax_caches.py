"""`TurboAttention` and its caches: those of the package, to the bit, and what they refuse."""

import functools

import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import turbojax as tj
from tests.flax.flax_helpers import (
    CHANNELS,
    KINDS,
    KV_HEADS,
    ROUNDING,
    SMALL,
    equal,
    leaves,
    module,
    oracle,
    params,
    tokens,
)
from turbojax.caches import PooledAttention
from turbojax.rotary import Rope


@pytest.mark.slow
def test_progressive_cache_by_its_own_operations():
    """`prefill`, `append` and `decode` of the package, on the module's heads."""
    layer, x = module(cache=SMALL), jnp.asarray(tokens(30))
    layer.init_cache(2, 48)
    angles = Rope(CHANNELS).angles(jnp.broadcast_to(jnp.arange(30)[None], (2, 30)))
    query, key, value = layer.heads(x, angles)
    cache = tj.init_cache(2, 48, KV_HEADS, CHANNELS, config=SMALL, dtype=jnp.float32)
    want, cache = tj.prefill(query[:, :20], key[:, :20], value[:, :20], cache)
    # Programs of other sizes round otherwise in the last bits.
    same = functools.partial(np.testing.assert_allclose, rtol=0, atol=2e-6)
    same(layer.prefill(x[:, :20]), layer.output(want))
    cache = tj.append(cache, key[:, 20:], value[:, 20:])
    want = tj.decode(query[:, 20:], cache)
    # Angles of new tokens are counted from the cache; they are the same numbers.
    same(layer.decode(x[:, 20:]), layer.output(want))


@pytest.mark.slow
def test_prompts_attend_as_whole_sequences_do():
    layer, x = module(cache=SMALL), tokens(30)
    layer.init_cache(2, 48)
    np.testing.assert_array_equal(layer(x), layer.prefill(x))


@pytest.mark.quick(slow=1)
@pytest.mark.parametrize("kind", ["exact", "4bit", "kv4", "paged"])
def test_caches_come_close_to_exact_attention(kind):
    """Of outputs of order 0.5; bounds are some steps of each format."""
    bound = {"exact": ROUNDING, "4bit": 0.15, "kv4": 0.25, "paged": ROUNDING}
    layer, x = module(cache=KINDS[kind]), tokens(24)
    layer.init_cache(2, 48)
    out = np.concatenate(
        [layer.prefill(x[:, :20])] + [layer.decode(x[:, t : t + 1]) for t in range(20, 24)], axis=1
    )
    error = np.abs(out - oracle(params(layer), x)).max()
    assert error < bound[kind]
    if bound[kind] > 0.1:
        assert error > ROUNDING


@pytest.mark.fuzz
def test_pooled_attention_within_sequences_and_prompts():
    pooled = PooledAttention(tj.levels.LocalWindow(8), 8, 8)
    layer, x = module(cache=SMALL, attention=pooled), jnp.asarray(tokens(40))
    angles = Rope(CHANNELS).angles(jnp.broadcast_to(jnp.arange(40)[None], (2, 40)))
    heads = layer.heads(x, angles)
    levels = tj.levels.LocalWindow(8).levels(40, 40, block_q=8, block_kv=8, is_causal=True)
    want = tj.pooled_attention(*heads, levels, block_q=8, block_kv=8, is_causal=True)
    np.testing.assert_array_equal(layer(x), layer.output(want))
    layer.init_cache(2, 48)
    np.testing.assert_array_equal(layer.prefill(x), layer(x))
    assert layer.cache.lengths.tolist() == [40, 40]
    assert jnp.abs(layer(x) - module(cache="exact")(x)).max() > 0.01


# What is refused ----------------------------------------------------------------------------------


@pytest.mark.slow
def test_what_does_not_fit_the_cache():
    layer, x = module(cache=SMALL), tokens(20)
    for call in (layer.prefill, layer.decode):
        with pytest.raises(ValueError, match="there is no cache: call init_cache"):
            call(x)
    layer.init_cache(2, 24)
    with pytest.raises(ValueError, match="must have 2 sequences, as the cache has"):
        layer.prefill(tokens(4, batch=3))
    layer.prefill(x)
    before = leaves(layer.cache)
    with pytest.raises(ValueError, match=r"cache.lengths=\[20, 20\] must be 0 before a prompt"):
        layer.prefill(x)
    with pytest.raises(ValueError, match="max_length=24"):
        layer.decode(x[:, :5])
    # What raised has changed nothing.
    equal(before, layer.cache)
    layer.init_cache(2, 16)
    with pytest.raises(ValueError, match="16"):
        layer.prefill(x)


@pytest.mark.quick(1)
@pytest.mark.parametrize("kind", ["exact", "4bit"])
def test_under_jit_it_is_reported(kind):
    layer, x = module(cache=KINDS[kind]), tokens(20)
    layer.init_cache(2, 24)
    prefill = nnx.jit(lambda layer, x, lengths: layer.prefill(x, lengths))
    decode = nnx.jit(lambda layer, x: layer.decode(x))
    prefill(layer, x, jnp.array([20, 0]))
    assert layer.cache.overflowed.tolist() == [False, False]
    # The first sequence holds something already; the second one may begin.
    out = prefill(layer, x, jnp.array([3, 7]))
    assert layer.cache.lengths.tolist() == [20, 7]
    assert layer.cache.overflowed.tolist() == [True, False]
    assert not out[0].any()
    close_enough = {"exact": ROUNDING, "paged": ROUNDING}.get(kind, 0.3)
    assert np.abs(out[1, :7] - oracle(params(layer), x)[1, :7]).max() < close_enough
    layer.init_cache(2, 24)
    prefill(layer, x, jnp.array([20, 7]))
    decode(layer, x[:, :5])
    assert layer.cache.overflowed.tolist() == [True, False]
    assert layer.cache.lengths.tolist() == [24, 12]


@pytest.mark.quick(slow=1)
@pytest.mark.parametrize("kind", ["4bit", "kv4", "turbo4"])
def test_compressed_caches_have_no_gradient(kind):
    layer, x = module(cache=KINDS[kind]), tokens(8)

    def prefill(layer):
        layer.init_cache(2, 16)
        return layer.prefill(x).sum()

    def decode(layer):
        layer.init_cache(2, 16)
        return layer.decode(x[:, :1]).sum()

    for loss in (prefill, decode):
        with pytest.raises(NotImplementedError, match="has no gradient"):
            nnx.grad(loss)(layer)


@pytest.mark.slow
def test_implementations_are_those_of_the_caches_ops():
    """Exact attention does not know ``"triton"``, nor `turbo_attention` ``"cudnn"``."""
    x = tokens(4)
    paged = module(cache="turbo4", implementation="triton")
    np.testing.assert_array_equal(paged(x), module(cache="turbo4")(x))
    exact = module(cache="exact", attention=SMALL, implementation="cudnn")
    np.testing.assert_array_equal(exact(x), module(cache=SMALL)(x))
    # Where they are of a kind, the name is used: neither runs on this device.
    for options in (
        {"cache": SMALL, "implementation": "mosaic_gpu"},
        {"cache": "kv4", "attention": SMALL, "implementation": "mosaic_gpu"},
        {"cache": "exact", "implementation": "cudnn"},
    ):
        layer = module(**options)
        layer.init_cache(2, 16)
        for call in (layer, layer.prefill):
            with pytest.raises(NotImplementedError, match="cannot run here"):
                call(x)
    layer = module(cache=SMALL, implementation="xla")
    np.testing.assert_array_equal(layer(x), module(cache=SMALL)(x))


@pytest.mark.quick(slow=1)
@pytest.mark.parametrize("kind", ["exact", "4bit", "kv4", "paged"])
@pytest.mark.parametrize("attention", ["exact", SMALL], ids=["exactly", "turbo"])
def test_prompts_attend_as_asked(kind, attention):
    """To their own keys and values, whatever the cache keeps; and they are stored as ever."""
    x, lengths = tokens(20), jnp.array([20, 7])
    asked, plain = module(cache=KINDS[kind], attention=attention), module(cache=KINDS[kind])
    for layer in (asked, plain):
        layer.init_cache(2, 32)
    out, other = asked.prefill(x, lengths), plain.prefill(x, lengths)
    np.testing.assert_array_equal(out, asked(x, lengths=lengths))
    own = {"exact": "exact", "paged": "exact", "4bit": SMALL}.get(kind)
    if attention != own:
        assert jnp.abs(out - other).max() > 16 * ROUNDING
    equal(asked.cache, plain.cache)
