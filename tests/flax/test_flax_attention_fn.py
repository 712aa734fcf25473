"""Attention functions in Flax's modules: masks read as lengths, every argument accounted for."""

import dataclasses
import inspect

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import turbojax as tj
from tests.flax.flax_helpers import FLOAT, operands
from tests.flax.flax_helpers import MASK_ROUNDING as ROUNDING
from turbojax.flax import PooledAttentionFn, TurboAttentionFn, attention_fn

PLAIN = TurboAttentionFn(FLOAT)
CAUSAL = TurboAttentionFn(FLOAT, is_causal=True)


def oracle(query, key, value, mask, cap=None):
    """Float64 attention under a mask ``[B, N, T, S]``; rows that see nothing give 0."""
    query, key, value = (np.asarray(x, np.float64) for x in (query, key, value))
    group = query.shape[2] // key.shape[2]
    key, value = (np.repeat(x, group, axis=2) for x in (key, value))
    scores = np.einsum("btnh,bsnh->bnts", query, key) / np.sqrt(query.shape[-1])
    if cap is not None:
        scores = cap * np.tanh(scores / cap)
    mask = np.broadcast_to(mask, scores.shape)
    weights = np.where(mask, np.exp(scores - scores.max(-1, keepdims=True)), 0)
    total = weights.sum(-1, keepdims=True)
    weights = np.divide(weights, total, out=np.zeros_like(weights), where=total > 0)
    return np.einsum("bnts,bsnh->btnh", weights, value)


def valid(lengths, tokens=21):
    return np.arange(tokens)[None] < np.asarray(lengths)[:, None]


def causal_mask(tokens=21, keys=21):
    return np.arange(keys)[None] <= np.arange(tokens)[:, None]


def close(out, expected):
    np.testing.assert_allclose(np.asarray(out), expected, rtol=0, atol=ROUNDING)


# Masks --------------------------------------------------------------------------------------------

KEYS = valid([21, 13])[:, None, None]
BOTH = valid([21, 13])[:, None, :, None] & KEYS
MASKS = {
    "all": (PLAIN, np.ones((2, 1, 21, 21), bool)),
    "keys": (PLAIN, KEYS),
    "keys as numbers": (PLAIN, KEYS.astype(np.float32)),
    "queries and keys": (PLAIN, BOTH),
    "causal": (CAUSAL, causal_mask()[None, None]),
    "causal without batch": (CAUSAL, causal_mask()),
    "causal and keys": (CAUSAL, causal_mask() & KEYS),
    "causal and both": (CAUSAL, causal_mask() & BOTH),
    "every head": (PLAIN, np.repeat(KEYS, 4, axis=1)),
    "nothing": (PLAIN, np.zeros((2, 1, 1, 21), bool)),
    "one sequence has nothing": (PLAIN, valid([21, 0])[:, None, None]),
    "queries alone": (PLAIN, valid([21, 13])[:, None, :, None]),
}


@pytest.mark.quick(3, slow=0)
@pytest.mark.parametrize(("name", "jitted"), [(name, i % 2 > 0) for i, name in enumerate(MASKS)])
def test_masks(name, jitted):
    fn, mask = MASKS[name]
    arrays = operands()
    call = jax.jit(fn) if jitted else fn
    seen = mask & causal_mask() if fn.is_causal else mask
    close(call(*arrays, mask=jnp.asarray(mask)), oracle(*arrays, seen != 0))


@pytest.mark.parametrize(
    ("tokens", "keys", "given"),
    [
        (21, 21, "by the call"),
        (5, 21, "by the call"),
        (21, 21, "by the function"),
        (21, 5, "by the call"),
        (1, 1, "by the function"),
    ],
)
def test_causal_without_a_mask(tokens, keys, given):
    arrays = operands(tokens=tokens, keys=keys)
    out = PLAIN(*arrays, is_causal=True) if given == "by the call" else CAUSAL(*arrays)
    close(out, oracle(*arrays, causal_mask(tokens, keys)))


def test_window_and_cap():
    fn = TurboAttentionFn(FLOAT, is_causal=True, local_window_size=(4, 0), logits_soft_cap=1.5)
    arrays = operands()
    distance = np.arange(21)[:, None] - np.arange(21)[None]
    near = (distance >= 0) & (distance <= 4)
    close(fn(*arrays), oracle(*arrays, near, cap=1.5))
    # The same mask once more as data, and with padding.
    close(fn(*arrays, mask=jnp.asarray(near & BOTH)), oracle(*arrays, near & BOTH, cap=1.5))


@pytest.mark.quick(1)
@pytest.mark.parametrize("batch", [(), (2,), (2, 3)])
def test_any_batch_axes(batch):
    query, key, value = operands(batch, kv_heads=2)
    flat = [np.asarray(x).reshape(-1, *x.shape[-3:]) for x in (query, key, value)]
    lengths = np.resize([21, 13, 4], batch)
    mask = (np.arange(21) < lengths[..., None])[..., None, None, :]
    expected = oracle(*flat, mask.reshape(-1, 1, 1, 21))
    close(PLAIN(query, key, value, mask=jnp.asarray(mask)), expected.reshape(query.shape))


def test_one_mask_for_all_sequences():
    arrays = operands()
    mask = valid([13])[:, None, None]
    close(PLAIN(*arrays, mask=jnp.asarray(mask)), oracle(*arrays, mask))


FIRST = np.array([True, False])[:, None, None, None]  # sequence 0; sequence 1 breaks the rules
PLACE = np.arange(21)
WRONG = {
    "left padding": (PLAIN, FIRST | (PLACE >= 8)),
    "a hole": (PLAIN, FIRST | (PLACE != 3)),
    "causal, unknown to the function": (PLAIN, FIRST | causal_mask()),
    "heads differ": (PLAIN, FIRST | (np.array([21, 21, 20, 21])[:, None, None] > PLACE)),
    "a query of its own": (CAUSAL, causal_mask() & (FIRST | (PLACE != 5)[:, None])),
}


@pytest.mark.quick(2, slow=0)
@pytest.mark.parametrize("name", WRONG)
def test_other_masks_raise_or_are_nan(name):
    """The second sequence's mask cannot be; the first one's result and gradient stay right."""
    fn, mask = WRONG[name]
    fn = dataclasses.replace(fn, warn=False)  # test_flax_masks.py has the warnings
    mask, arrays = jnp.asarray(mask), operands()
    with pytest.raises(ValueError, match=r"mask of sequences \[1\] must hide"):
        fn(*arrays, mask=mask)
    out = jax.jit(fn)(*arrays, mask=mask)
    seen = np.asarray(mask) & (causal_mask() if fn.is_causal else True)
    close(out[:1], oracle(*(x[:1] for x in arrays), seen[:1]))
    assert jnp.isnan(out[1]).all()
    gradient = jax.jit(jax.grad(lambda q: fn(q, *arrays[1:], mask=mask).sum()))(arrays[0])
    assert jnp.isfinite(gradient[0]).all()
    assert jnp.isnan(gradient[1]).all()


@pytest.mark.parametrize("causal", [False, True])
def test_no_mask_is_misread(causal):
    """Whatever the mask: the result is the oracle's under it, or NaN; both occur."""
    rng = np.random.default_rng(0)
    arrays = operands((64,), tokens=3, keys=4, heads=2)
    call = jax.jit(dataclasses.replace(PLAIN, is_causal=causal, warn=False))
    right = wrong = 0
    for density in (0.3, 0.6, 0.9):
        mask = rng.random((64, 1, 3, 4)) < density
        mask[:16] &= (np.arange(4) < rng.integers(0, 5, (16, 1)))[:, None, None]
        mask[:16] |= (np.arange(4) < rng.integers(0, 5, (16, 1)))[:, None, None]
        mask[:32] &= causal_mask(3, 4) | (not causal)
        out = np.asarray(call(*arrays, mask=jnp.asarray(mask)))
        fits = ~np.isnan(out).any((1, 2, 3))
        close(out[fits], oracle(*arrays, mask)[fits])
        right, wrong = right + fits.sum(), wrong + (~fits).sum()
    assert right >= 10
    assert wrong >= 100


@pytest.mark.parametrize("shape", [(3, 1, 1, 21), (2, 1, 1, 20), (2, 3, 1, 21), (1, 2, 1, 1, 21)])
def test_shapes_of_masks(shape):
    with pytest.raises(ValueError, match="must be broadcastable to"):
        PLAIN(*operands(), mask=jnp.ones(shape, bool))


# Other arguments ----------------------------------------------------------------------------------


def test_every_argument_of_flax_is_named():
    """Also of the Flax at hand: linen drops, without a word, what a signature does not name."""
    for fn in (PLAIN, PooledAttentionFn(tj.levels.TopK())):
        named = inspect.signature(fn).parameters
        assert set(inspect.signature(nn.dot_product_attention).parameters) <= set(named)
        missing = set(inspect.signature(nnx.dot_product_attention).parameters) - set(named)
        # nnx's own modules do not pass it.
        assert missing == {"promote_dtype"}
        assert all(x.kind is not x.VAR_KEYWORD for x in named.values())


@pytest.mark.parametrize(
    ("argument", "value"),
    [
        ("bias", np.zeros((1, 4, 21, 21), np.float32)),
        ("precision", jax.lax.Precision.HIGHEST),
        ("module", nnx.Module()),
        ("einsum_dot_general", jax.lax.dot_general),
        ("qk_attn_weights_einsum", jnp.einsum),
        ("attn_weights_value_einsum", jnp.einsum),
        ("input_positions", jnp.zeros((2, 21), jnp.int32)),
    ],
)
def test_refused_arguments(argument, value):
    with pytest.raises(NotImplementedError, match=f"{argument} .* must be None"):
        PLAIN(*operands(), **{argument: value})


def test_dropout():
    arrays, key = operands(), jax.random.key(0)
    with pytest.raises(NotImplementedError, match="dropout_rate=0.1 must be 0"):
        PLAIN(*arrays, dropout_rate=0.1, dropout_rng=key)
    out = PLAIN(*arrays, dropout_rate=0.1, dropout_rng=key, deterministic=True)
    np.testing.assert_array_equal(out, PLAIN(*arrays, broadcast_dropout=False))


def test_dtypes():
    query, key, value = operands()
    half = [x.astype(jnp.bfloat16) for x in (query, key, value)]
    assert PLAIN(*half).dtype == jnp.bfloat16
    out = PLAIN(query, key, value, dtype=jnp.bfloat16)
    np.testing.assert_array_equal(out, PLAIN(*half))
    with jax.numpy_dtype_promotion("standard"):
        mixed = PLAIN(query, half[1], half[2])
    assert mixed.dtype == jnp.float32
    np.testing.assert_array_equal(mixed, PLAIN(query, *(x.astype(jnp.float32) for x in half[1:])))
    with pytest.raises(TypeError, match="must be bfloat16, float16 or float32"):
        PLAIN(query, key, value, dtype=jnp.int32)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda q, k, v: (q[0, 0], k, v), "query.shape"),
        (lambda q, k, v: (q, k[:1], v), "same batch axes"),
        (lambda q, k, v: (q, k, v[:, :3]), "value.shape"),
        (lambda q, k, v: (q, k[:, :, :3], v[:, :, :3]), "multiple of 3 key/value heads"),
    ],
)
def test_shapes(change, message):
    with pytest.raises(ValueError, match=message):
        PLAIN(*change(*operands()))


@pytest.mark.parametrize(
    ("make", "kind", "message"),
    [
        (lambda: TurboAttentionFn("4bit"), TypeError, "must be a TurboConfig"),
        (lambda: TurboAttentionFn(logits_soft_cap=-1.0), ValueError, "logits_soft_cap=-1.0"),
        (lambda: TurboAttentionFn(local_window_size=-1), ValueError, "local_window_size=-1"),
        (lambda: TurboAttentionFn(is_causal="no"), TypeError, "is_causal='no' must be a bool"),
        (lambda: TurboAttentionFn(warn=0), TypeError, "warn=0 must be a bool"),
        (lambda: TurboAttentionFn(implementation="x"), ValueError, "implementation='x' must be"),
        (lambda: PooledAttentionFn("topk"), TypeError, "policy is a str"),
        (
            lambda: PooledAttentionFn(tj.levels.TopK(), is_causal=1),
            TypeError,
            "is_causal=1 must be a bool",
        ),
        (lambda: PooledAttentionFn(tj.levels.TopK(), block_kv=12), ValueError, "multiple of 8"),
        (lambda: PooledAttentionFn(tj.levels.TopK(), block_q=0), ValueError, "block_q=0"),
    ],
)
def test_construction(make, kind, message):
    with pytest.raises(kind, match=message):
        make()


@pytest.mark.slow
def test_equal_functions_share_a_program():
    fns = [TurboAttentionFn(local_window_size=w) for w in (4, (4, 4), [4, 4])]
    assert len(set(fns)) == 1
    assert attention_fn == TurboAttentionFn() != TurboAttentionFn(is_causal=True)
    traces = []

    @nnx.jit
    def apply(layer, x):
        traces.append(1)
        return layer(x)

    for seed, fn in enumerate(fns):
        layer = nnx.MultiHeadAttention(
            2, 16, attention_fn=fn, decode=False, rngs=nnx.Rngs(seed), keep_rngs=False
        )
        apply(layer, jnp.ones((1, 9, 16)))
    assert len(traces) == 1


# In Flax's modules --------------------------------------------------------------------------------


def tokens(length=21, width=32, seed=1):
    return jax.random.normal(jax.random.key(seed), (2, length, width))


def nnx_layer(fn=None, **options):
    options = {} if fn is None else {"attention_fn": fn, **options}
    return nnx.MultiHeadAttention(4, 32, decode=False, rngs=nnx.Rngs(0), **options)


# Two layers of 32 inputs around the attention, of outputs of order 1.
MODULE_ROUNDING = 128 * 2.0**-24


@pytest.mark.quick(1)
@pytest.mark.parametrize("kv_heads", [4, 2])
def test_nnx(kv_heads):
    exact = nnx_layer(nnx.dot_product_attention, num_kv_heads=kv_heads)
    ours = nnx_layer(PLAIN, num_kv_heads=kv_heads)
    x, mask = tokens(), jnp.asarray(KEYS)
    for arguments in ({}, {"is_causal": True}, {"mask": mask}, {"mask": mask, "is_causal": True}):
        # Flax wants the whole mask where it adds causality.
        full = dict(arguments)
        if len(arguments) == 2:
            full["mask"] = jnp.broadcast_to(mask, (2, 4, 21, 21))
        np.testing.assert_allclose(
            ours(x, **arguments), exact(x, **full), rtol=0, atol=MODULE_ROUNDING
        )
    with pytest.raises(NotImplementedError, match="none can be sown"):
        ours(x, sow_weights=True)


@pytest.mark.slow
def test_nnx_gradient():
    """In mode "float" the straight-through gradient is that of exact attention."""

    def loss(layer, x, mask):
        return jnp.square(layer(x, mask=mask)[0]).sum()

    mask = jnp.asarray(causal_mask() & valid([21, 13])[:, None, None])
    grads = [
        jax.tree.leaves(nnx.grad(loss)(layer, tokens(), mask))
        for layer in (nnx_layer(nnx.dot_product_attention), nnx_layer(CAUSAL))
    ]
    # Biases of keys have gradient 0, of terms as large as other parameters' gradients.
    scale = max(float(jnp.abs(x).max()) for x in grads[0])
    for exact, ours in zip(*grads, strict=True):
        np.testing.assert_allclose(ours, exact, rtol=0, atol=MODULE_ROUNDING * scale)


@pytest.mark.quick(1, slow=0)
@pytest.mark.parametrize("window", [None, (3, 0)])
@pytest.mark.parametrize("jitted", [False, True])
def test_nnx_decodes_what_the_whole_pass_gives(jitted, window):
    fn = TurboAttentionFn(FLOAT, is_causal=True, local_window_size=window)
    layer, x = nnx_layer(fn), tokens()
    whole = layer(x)
    layer.init_cache(x.shape)
    step = nnx.jit(lambda layer, x: layer(x, decode=True, is_causal=True))
    if not jitted:
        x, step = x[:, :5], lambda layer, x: layer(x, decode=True)
    out = [step(layer, x[:, t : t + 1]) for t in range(x.shape[1])]
    np.testing.assert_allclose(
        jnp.concatenate(out, axis=1), whole[:, : x.shape[1]], rtol=0, atol=MODULE_ROUNDING
    )


def linen_layer(fn=nn.dot_product_attention, **options):
    return nn.MultiHeadDotProductAttention(num_heads=4, attention_fn=fn, **options)


@pytest.mark.slow
def test_linen():
    x = tokens()
    exact, ours = linen_layer(), linen_layer(CAUSAL)
    variables = exact.init(jax.random.key(0), x)
    mask = nn.combine_masks(
        nn.make_causal_mask(x[..., 0]), nn.make_attention_mask(*[jnp.asarray(valid([21, 13]))] * 2)
    )
    expected = exact.apply(variables, x, mask=mask)
    for apply in (ours.apply, jax.jit(ours.apply)):
        out = apply(variables, x, mask=mask)
        np.testing.assert_allclose(out[0], expected[0], rtol=0, atol=MODULE_ROUNDING)
        np.testing.assert_allclose(out[1, :13], expected[1, :13], rtol=0, atol=MODULE_ROUNDING)
    with pytest.raises(NotImplementedError, match="none can be sown"):
        ours.apply(variables, x, sow_weights=True, mutable=["intermediates"])
    with pytest.raises(NotImplementedError, match="dropout_rate"):
        linen_layer(CAUSAL, dropout_rate=0.5).apply(
            variables, x, deterministic=False, rngs={"dropout": jax.random.key(0)}
        )
    with pytest.raises(NotImplementedError, match="qk_attn_weights_einsum"):
        linen_layer(
            CAUSAL,
            qk_attn_weights_einsum_cls=lambda: jnp.einsum,
            attn_weights_value_einsum_cls=lambda: jnp.einsum,
        ).apply(variables, x)


def test_linen_decodes_what_the_whole_pass_gives():
    layer, x = linen_layer(CAUSAL, decode=True), tokens()
    variables = layer.init(jax.random.key(0), x)
    params, cache = variables["params"], variables["cache"]
    whole = linen_layer(CAUSAL).apply({"params": params}, x)
    step = jax.jit(lambda cache, x: layer.apply({"params": params, **cache}, x, mutable=["cache"]))
    out, cache = [], {"cache": cache}
    for t in range(x.shape[1]):
        new, cache = step(cache, x[:, t : t + 1])
        out.append(new)
    np.testing.assert_allclose(jnp.concatenate(out, 1), whole, rtol=0, atol=MODULE_ROUNDING)


@pytest.mark.slow
def test_the_default_is_turbo_attention():
    """Bit for bit, quantization and all."""
    query, key, value = operands(tokens=150)
    lengths = jnp.array([150, 70])
    expected = tj.turbo_attention(
        query, key, value, is_causal=True, query_seq_lengths=lengths, key_value_seq_lengths=lengths
    )
    mask = valid([150, 70], 150)[:, None]
    mask = mask[..., None] & mask[:, :, None] & causal_mask(150, 150)
    causal = TurboAttentionFn(is_causal=True)
    np.testing.assert_array_equal(causal(query, key, value, mask=jnp.asarray(mask)), expected)
    np.testing.assert_array_equal(
        attention_fn(query, key, value), tj.turbo_attention(query, key, value)
    )


# Pooled attention ---------------------------------------------------------------------------------

POLICIES = {
    "estimated": tj.levels.TopK(),
    "pattern": tj.levels.LocalWindow(8),
}


@pytest.mark.quick(slow=1)
@pytest.mark.parametrize(("causal", "policy"), [(False, "estimated"), (True, "pattern")])
def test_pooled(causal, policy):
    """Bit for bit `pooled_attention` at the levels of the policy; its gradient too."""
    fn = PooledAttentionFn(POLICIES[policy], 8, 8, is_causal=causal)
    arrays = operands(tokens=48, kv_heads=2)
    lengths = jnp.array([48, 30])
    blocks = {"block_q": 8, "block_kv": 8, "is_causal": causal}
    known = {"query_seq_lengths": lengths, "key_value_seq_lengths": lengths}
    if policy == "pattern":
        levels = POLICIES[policy].levels(48, 48, **blocks)
    else:
        levels = tj.select_levels(*arrays[:2], POLICIES[policy], **blocks, **known)
    assert len(np.unique(levels)) > 1

    def by_hand(*arrays):
        return tj.pooled_attention(*arrays, levels, **blocks, **known)

    inside = valid([48, 30], 48)[:, None]
    mask = inside[..., None] & inside[:, :, None] & (causal_mask(48, 48) | (not causal))

    def ours(*arrays):
        return fn(*arrays, mask=jnp.asarray(mask))

    np.testing.assert_array_equal(ours(*arrays), by_hand(*arrays))
    grads = [
        jax.grad(lambda *x, f=f: jnp.square(f(*x)).sum(), (0, 1, 2))(*arrays)
        for f in (ours, by_hand)
    ]
    for got, want in zip(*grads, strict=True):
        np.testing.assert_array_equal(got, want)


def test_pooled_decodes_key_by_key():
    fn = PooledAttentionFn(tj.levels.LocalWindow(16), 16, 16, is_causal=True)
    arrays = operands(tokens=1, keys=100)
    mask = valid([100, 70], 100)[:, None, None]
    close(jax.jit(fn)(*arrays, mask=jnp.asarray(mask)), oracle(*arrays, mask))


@pytest.mark.slow
def test_pooled_in_modules():
    fn = PooledAttentionFn(tj.levels.TopK(), 16, 16, is_causal=True)
    x = tokens(40)
    layer = nnx_layer(fn)
    grads = nnx.grad(lambda layer: jnp.square(layer(x)).sum())(layer)
    for kernel in jax.tree.leaves(nnx.filter_state(grads, nnx.PathContains("kernel"))):
        assert jnp.isfinite(kernel).all()
        assert (kernel != 0).any()
    variables = linen_layer(fn).init(jax.random.key(0), x)
    assert jnp.isfinite(linen_layer(fn).apply(variables, x)).all()
