"""Masks in Flax's modules: what Flax computes under them, or an error, or a report and NaN."""

import dataclasses

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.experimental import checkify

import turbojax as tj
from tests.flax import flax_helpers
from tests.flax.flax_helpers import FLOAT
from tests.flax.flax_helpers import MASK_ROUNDING as ROUNDING
from turbojax.flax import MaskWarning, PooledAttentionFn, TurboAttentionFn, _masks

T, S = 9, 13  # queries, and the keys of cross-attention
FNS = {causal: TurboAttentionFn(FLOAT, is_causal=causal) for causal in (False, True)}
QUIET = {causal: dataclasses.replace(fn, warn=False) for causal, fn in FNS.items()}


def operands(tokens=T, keys=T):
    return flax_helpers.operands(tokens=tokens, keys=keys, heads=2)


def valid(lengths, tokens=T):
    return np.arange(tokens)[None] < np.asarray(lengths)[:, None]


def lower(tokens=T, keys=T):
    return (np.arange(keys)[None] <= np.arange(tokens)[:, None])[None, None]


KEYS = valid([T, 5])[:, None, None]
FAR_KEYS = valid([S, 7], S)[:, None, None]
BOTH = KEYS & valid([T, 5])[:, None, :, None]
EVERY = np.ones((2, 1, T, T), bool)
LEFT = (np.arange(T) >= np.array([[0], [3]]))[:, None, None]
PACKED = (np.arange(T)[:, None] // 4 == np.arange(T) // 4)[None, None] & np.ones((2, 1, 1, 1), bool)

# The table of docs/flax.md: is the function causal, is the call, queries, keys, mask, and what
# happens: "equal" to Flax, an error by the shapes alone ("refused"), or "compared": an error
# outside jit, NaN under it.
CASES = {
    "no mask": (False, False, T, T, None, "equal"),
    "no mask, cross": (False, False, T, S, None, "equal"),
    "no mask, causal call": (False, True, T, T, None, "equal"),
    "no mask, causal call, cross": (False, True, T, S, None, "equal"),
    "no mask, causal function, cross": (True, False, T, S, None, "refused"),
    "no mask, causal function, one query": (True, False, 1, S, None, "refused"),
    "no mask, both causal, cross": (True, True, T, S, None, "equal"),
    "padding": (False, False, T, T, KEYS, "equal"),
    "padding, cross": (False, False, T, S, FAR_KEYS, "equal"),
    "padding, causal call": (False, True, T, T, KEYS, "equal"),
    "padding, both causal": (True, True, T, T, KEYS, "equal"),
    "padding, causal function": (True, False, T, T, KEYS, "refused"),
    "padding, causal function, cross": (True, False, T, S, FAR_KEYS, "refused"),
    "everything": (False, False, T, T, EVERY, "equal"),
    "everything, causal call": (False, True, T, T, EVERY, "equal"),
    "everything, causal function": (True, False, T, T, EVERY, "compared"),
    "everything in one row, causal function": (True, False, T, T, EVERY[..., :1, :], "refused"),
    "everything, causal function, cross": (True, False, T, S, np.ones((2, 1, T, S)), "compared"),
    "padding of both, causal function": (True, False, T, T, BOTH, "compared"),
    "one key too many, causal function": (
        True,
        False,
        T,
        T,
        lower() | (EVERY & PACKED),
        "compared",
    ),
    "causal": (True, False, T, T, lower(), "equal"),
    "causal and padding": (True, False, T, T, lower() & BOTH, "equal"),
    "causal, cross": (True, False, T, S, lower(T, S), "equal"),
    "causal, plain function": (False, False, T, T, lower(), "compared"),
    "one query": (False, False, 1, S, FAR_KEYS, "equal"),
    "one query, causal function": (True, False, 1, S, FAR_KEYS, "equal"),
    "left padding": (False, False, T, T, LEFT, "compared"),
    "packed": (False, False, T, T, PACKED, "compared"),
}


def flax_results(arrays, mask, is_causal):
    """What nnx and linen compute; linen has no `is_causal`, so there it is in the mask."""
    mask = None if mask is None else jnp.asarray(mask)
    yield nnx.dot_product_attention(*arrays, mask=mask, is_causal=is_causal)
    if is_causal:
        causal = jnp.asarray(lower(arrays[0].shape[1], arrays[1].shape[1]))
        mask = causal if mask is None else mask.astype(bool) & causal
    yield nn.dot_product_attention(*arrays, mask=mask)


@pytest.mark.quick(1, slow=0)
@pytest.mark.parametrize("name", CASES)
def test_a_mask_gives_what_flax_gives_or_is_refused(name):
    causal, call_causal, tokens, keys, mask, outcome = CASES[name]
    arrays = operands(tokens, keys)
    given = {"mask": None if mask is None else jnp.asarray(mask), "is_causal": call_causal}
    fn = QUIET[causal]
    calls = [fn, jax.jit(fn, static_argnames="is_causal")]
    if outcome == "refused":
        for call in calls:
            with pytest.raises(ValueError, match="is_causal=False"):
                call(*arrays, **given)
        return
    eager, jitted = calls
    if outcome == "compared":
        with pytest.raises(ValueError, match=r"^mask of sequences .* must hide"):
            eager(*arrays, **given)
        assert jnp.isnan(jitted(*arrays, **given)).any()
        outs = []
    else:
        outs = [call(*arrays, **given) for call in calls]
    full = np.ones((2, 1, tokens, keys), bool) if mask is None else np.asarray(mask) != 0
    full = np.broadcast_to(full & (lower(tokens, keys) | (not call_causal)), (2, 1, tokens, keys))
    for expected in flax_results(arrays, mask, call_causal):
        for out in outs:
            # Of queries that see nothing, Flax gives the mean of all values.
            seeing = np.broadcast_to(full.any(-1)[:, 0, :, None, None], out.shape)
            np.testing.assert_allclose(out[seeing], expected[seeing], rtol=0, atol=ROUNDING)
            assert not np.asarray(out)[~seeing].any()


@pytest.mark.parametrize("tokens", [T, 1])
def test_decoding_adds_the_new_token_also_where_the_call_is_causal(tokens):
    """One query under a mask is the newest token shown; to Flax it is the first one of all."""
    arrays = operands(1, S)
    out = FNS[tokens > 1](*arrays, mask=jnp.asarray(FAR_KEYS), is_causal=True)
    expected = nn.dot_product_attention(*arrays, mask=jnp.asarray(FAR_KEYS))
    np.testing.assert_allclose(out, expected, rtol=0, atol=ROUNDING)


def modules(fn, x):
    """The same layer in nnx and in linen: functions of inputs and a mask."""
    layer = nnx.MultiHeadAttention(2, 16, decode=False, attention_fn=fn, rngs=nnx.Rngs(0))
    yield lambda q, kv, mask: layer(q, kv, mask=mask)
    twin = nn.MultiHeadDotProductAttention(num_heads=2, attention_fn=fn)
    variables = nn.MultiHeadDotProductAttention(num_heads=2).init(jax.random.key(0), x)
    yield lambda q, kv, mask: twin.apply(variables, q, kv, mask=mask)


@pytest.mark.slow
def test_a_causal_function_in_modules_is_never_silently_causal():
    """Self-attention under a mask that shows everything, and cross-attention with and without."""
    x, y = (jax.random.normal(jax.random.key(n), (2, n, 16)) for n in (T, S))
    whole = np.ones((2, 1, T, S), bool)
    for call in modules(FNS[True], x):
        for kv, mask in ((x, EVERY), (x, KEYS), (y, FAR_KEYS), (y, whole), (y, None)):
            with pytest.raises(ValueError, match="is_causal=False"):
                call(x, kv, None if mask is None else jnp.asarray(mask))
    for call in modules(QUIET[True], x):
        assert jnp.isnan(jax.jit(call)(x, y, jnp.asarray(whole))).all()


@pytest.mark.slow
def test_pooled_functions_compare_masks_as_well():
    fn = PooledAttentionFn(tj.levels.LocalWindow(8), 8, 8, is_causal=True)
    with pytest.raises(ValueError, match="must hide the keys after each query"):
        fn(*operands(), mask=jnp.asarray(EVERY))
    with pytest.raises(ValueError, match="cross-attention"):
        fn(*operands(T, S))
    assert jnp.isfinite(fn(*operands(), mask=jnp.asarray(lower()))).all()


def test_a_mask_for_adding_to_scores_is_told():
    for hidden in (-1e9, -jnp.inf):
        with pytest.raises(ValueError, match="mask holds -(1e|inf).*not added to scores"):
            QUIET[True](*operands(), mask=jnp.where(jnp.asarray(lower()), 0, hidden))


def test_a_window_hides_more_than_the_mask():
    fn = TurboAttentionFn(FLOAT, is_causal=True, local_window_size=(2, 0))
    distance = np.arange(T)[:, None] - np.arange(T)
    near = lower() & (distance <= 2)
    arrays = operands()
    expected = nn.dot_product_attention(*arrays, mask=jnp.asarray(near))
    for mask in (lower(), near):
        out = fn(*arrays, mask=jnp.asarray(mask))
        np.testing.assert_allclose(out, expected, rtol=0, atol=ROUNDING)


# Reports under jit --------------------------------------------------------------------------------


@pytest.fixture
def forgotten(monkeypatch):
    """No function has warned yet."""
    monkeypatch.setattr(_masks, "_warned", set())


def finish(call, *arrays, **options):
    """Calls, and waits for what the program has to say."""
    out = jax.block_until_ready(call(*arrays, **options))
    jax.effects_barrier()
    return out


def stacked(good, bad):
    return jnp.stack([jnp.asarray(good), jnp.asarray(bad)])


def transforms(fn):
    """Functions of operands and a mask, which some of them join to one that fits."""

    def loss(query, key, value, mask):
        return fn(query, key, value, mask=mask).sum()

    def scanned(query, key, value, mask):
        def step(total, mask):
            return total + loss(query, key, value, mask), None

        return jax.lax.scan(step, jnp.zeros(()), stacked(KEYS, mask))[0]

    return {
        "jit": loss,
        "grad of scan": jax.grad(scanned),
        "vmap": lambda *x: jax.vmap(loss, (None, None, None, 0))(*x[:3], stacked(KEYS, x[3])),
        "remat": jax.grad(jax.checkpoint(loss)),
        "grad": jax.grad(loss),
        "scan": scanned,
    }


TRANSFORMS = list(transforms(None))


@pytest.mark.quick(1, slow=0)
@pytest.mark.parametrize("name", TRANSFORMS)
def test_the_first_call_warns_and_no_other(name, forgotten):
    call, arrays = jax.jit(transforms(FNS[False])[name]), operands()
    finish(call, *arrays, jnp.asarray(KEYS))  # a warning would be an error here
    with pytest.warns(MaskWarning) as caught:
        finish(call, *arrays, jnp.asarray(LEFT))
    finish(call, *arrays, jnp.asarray(LEFT))
    (message,) = [str(warning.message) for warning in caught]
    assert "mask of 1 of 2 sequences, the first one is 1, must hide keys" in message
    assert "NaN" in message
    assert "warn=False" in message


def test_each_function_warns_once_and_layers_share_theirs(forgotten):
    def two_layers(*arrays, mask):
        return FNS[False](FNS[False](*arrays, mask=mask), *arrays[1:], mask=mask)

    with pytest.warns(MaskWarning) as caught:
        finish(jax.jit(two_layers), *operands(), mask=jnp.asarray(PACKED))
    assert len(caught) == 1
    with pytest.warns(MaskWarning, match="must hide the keys after each query") as caught:
        finish(jax.jit(FNS[True]), *operands(), mask=jnp.asarray(EVERY))
    assert len(caught) == 1


def test_a_warning_that_is_an_error_stays_one(forgotten):
    """A filter may make an error of it, in every call that has such a mask."""
    call = jax.jit(FNS[False])
    for _ in range(2):
        with pytest.raises(Exception, match="must hide keys"):
            finish(call, *operands(), mask=jnp.asarray(LEFT))
    assert not _masks._warned


def test_warnings_can_be_switched_off(forgotten):
    """Then nothing of them is in the program; nor is there where no mask is traced."""
    arrays, mask = operands(), jnp.asarray(LEFT)
    text = {
        warn: jax.jit(fn).lower(*arrays, mask=mask).as_text()
        for warn, fn in ((True, FNS[False]), (False, QUIET[False]))
    }
    assert "callback" in text[True]
    assert "callback" not in text[False]
    assert "callback" not in jax.jit(FNS[False]).lower(*arrays).as_text()
    out = finish(jax.jit(QUIET[False]), *arrays, mask=mask)  # a warning would be an error
    assert jnp.isnan(out[1]).all()
    assert jnp.isfinite(out[0]).all()


@pytest.mark.quick(1, slow=0)
@pytest.mark.parametrize("name", ["jit", "grad", "remat", "scan"])
def test_checkify_finds_it(name):
    """Also where there is no warning. jax itself loses checks in the gradient of a scan."""
    call = transforms(QUIET[False])[name]
    checked, arrays = jax.jit(checkify.checkify(call)), operands()
    error, _ = checked(*arrays, jnp.asarray(KEYS))
    assert error.get() is None
    error, _ = checked(*arrays, jnp.asarray(LEFT))
    with pytest.raises(checkify.JaxRuntimeError, match="mask of 1 of 2 sequences, the first one"):
        error.throw()
