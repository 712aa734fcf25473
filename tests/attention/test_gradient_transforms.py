"""What `turbo_attention` and `pooled_attention` share: their gradients' transforms, memory."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import turbojax as tj
from tests.attention.attention_helpers import tensors
from tests.attention.pooled_helpers import Case, operands

CALLS = {
    "turbo": functools.partial(tj.turbo_attention, is_causal=True),
    "pooled": functools.partial(tj.pooled_attention, block_q=16, block_kv=16, is_causal=True),
}
OPS = pytest.mark.parametrize("op", CALLS)
LENGTHS = (40, 11, 0, 3, 40, 26)


def arrays_of(op, batch=6):
    """Query, key and value; and levels where the op has them."""
    if op == "turbo":
        return tensors(34, batch, 40, 40, 2, 1, 16)
    return operands(Case(40, 40, heads=2, batch=batch, block_q=16, block_kv=16))[:4]


def loss_of(op):
    def loss(*arrays, lengths=None):
        options = {"key_value_seq_lengths": lengths, "return_residual": True}
        out, residual = CALLS[op](*arrays, **options)
        return jnp.sum(jnp.sin(out)) + jnp.sum(jnp.where(jnp.isfinite(residual), residual, 0))

    return loss


def assert_all_close(got, want):
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, atol=2e-5), got, want)


@pytest.mark.slow
@OPS
def test_grad_outside_and_inside_jit(op):
    loss, arrays, lengths = loss_of(op), arrays_of(op), jnp.asarray(LENGTHS, jnp.int32)
    by_all = jax.grad(loss, (0, 1, 2))
    want = by_all(*arrays, lengths=lengths)
    assert_all_close(jax.jit(by_all)(*arrays, lengths=lengths), want)
    np.testing.assert_array_equal(jax.grad(loss, 1)(*arrays, lengths=lengths), want[1])
    assert_all_close(jax.grad(jax.jit(loss), (0, 1, 2))(*arrays, lengths=lengths), want)


@pytest.mark.parametrize("op", ["turbo", pytest.param("pooled", marks=pytest.mark.slow)])
def test_lengths_and_levels_have_no_gradient(op):
    """Integers: jax's float0, not zeros of some dtype."""
    q, k, v, *levels = arrays_of(op)

    def loss(lengths, *levels):
        return loss_of(op)(q, k, v, *levels, lengths=lengths)

    for dtype in (jnp.int8, jnp.int32) if levels else (jnp.int8,):
        given = jnp.full(6, 40, jnp.int32), *(x.astype(dtype) for x in levels)
        for gradient in jax.grad(loss, tuple(range(len(given))), allow_int=True)(*given):
            assert gradient.dtype == jax.dtypes.float0


@pytest.mark.fuzz
@OPS
def test_vmap(op):
    """Over everything at once, and over queries and levels with shared keys."""
    arrays, lengths = arrays_of(op), jnp.asarray(LENGTHS, jnp.int32)
    loss = loss_of(op)

    def by_all(lengths, *arrays):
        return jax.grad(functools.partial(loss, lengths=lengths), (0, 1, 2))(*arrays)

    parts = [x.reshape(3, 2, *x.shape[1:]) for x in (lengths, *arrays)]
    want = jax.jit(by_all)(lengths, *arrays)
    got = jax.jit(jax.vmap(by_all))(*parts)
    assert_all_close(jax.tree.map(lambda x, y: x.reshape(y.shape), got, want), want)
    _, k, v = arrays[:3]
    axes = (0, None, None, 0)[: len(arrays)]
    alone = functools.partial(by_all, None)
    shared = jax.jit(jax.vmap(alone, in_axes=axes))(parts[1], k[:2], v[:2], *parts[4:])
    again = jax.jit(alone)(arrays[0][4:], k[:2], v[:2], *(x[4:] for x in arrays[3:]))
    assert_all_close([x[2] for x in shared], list(again))


@pytest.mark.slow
@OPS
def test_scan_and_remat(op):
    """Through a scanned stack of layers, with levels of their own, kept and recomputed."""
    q, k, v, *levels = arrays_of(op, 1)
    layers = jnp.stack([k, k * 0.5, k + 0.1]), jnp.stack([v, v + 1, -v])
    layers += tuple(jnp.stack([x, x[:, ::-1], jnp.ones_like(x)]) for x in levels)

    def layer(x, given):
        return x + CALLS[op](x, *given), None

    def unrolled(q, *layers):
        for given in zip(*layers, strict=True):
            q, _ = layer(q, given)
        return jnp.sum(jnp.sin(q))

    def scanned(layer, q, *layers):
        return jnp.sum(jnp.sin(jax.lax.scan(layer, q, layers)[0]))

    want = jax.jit(jax.grad(unrolled, (0, 1, 2)))(q, *layers)
    for body in (layer, jax.checkpoint(layer)):
        got = jax.jit(jax.grad(functools.partial(scanned, body), (0, 1, 2)))(q, *layers)
        assert_all_close(got, want)


@OPS
def test_second_derivatives_are_refused(op):
    """Not a silent zero, and not a derivative of the backward pass's own approximation."""
    q, *rest = arrays_of(op, 1)
    for derive_again in (jax.grad, jax.jacrev):
        with pytest.raises(NotImplementedError, match=f"gradient of {op}_attention.*only first"):
            derive_again(lambda x: jax.grad(loss_of(op))(x, *rest).sum())(q)


@OPS
def test_forward_mode_is_refused(op):
    q, *rest = arrays_of(op, 1)
    for function in (loss_of(op), jax.grad(loss_of(op))):
        with pytest.raises(TypeError, match="custom_vjp"):
            jax.jvp(lambda x, of=function: of(x, *rest), (q,), (q,))


def temporary_bytes(tokens, op, differentiate, **options):
    levels = [jax.ShapeDtypeStruct((1, 1, tokens // 128, tokens // 128), jnp.int8)]
    attend = tj.pooled_attention
    if op == "turbo":
        levels, attend = [], tj.turbo_attention

    def call(x, *levels):
        out = attend(x, x, x, *levels, **options)
        return jnp.sum(out) if differentiate else out

    x = jax.ShapeDtypeStruct((1, tokens, 1, 64), jnp.float32)
    call = jax.jit(jax.grad(call) if differentiate else call)
    return call.lower(x, *levels).compile().memory_analysis().temp_size_in_bytes


SLOW = pytest.mark.slow
CAUSAL = {"is_causal": True}
WINDOW = {"local_window_size": 128}


@pytest.mark.parametrize(
    ("op", "mode", "differentiate", "options"),
    [
        ("turbo", "float", False, CAUSAL),
        pytest.param("turbo", "int8", False, CAUSAL, marks=SLOW),
        pytest.param("turbo", None, True, CAUSAL, marks=SLOW),
        pytest.param("turbo", None, True, WINDOW, marks=SLOW),
        pytest.param("pooled", None, False, CAUSAL, marks=SLOW),
        pytest.param("pooled", None, True, CAUSAL, marks=SLOW),
    ],
)
def test_memory_grows_with_tokens_not_with_their_square(op, mode, differentiate, options):
    """Twice the tokens, at most about twice the temporaries; far below one array of T x S."""
    if op == "turbo":
        config = tj.TurboConfig() if mode is None else tj.TurboConfig.paper(mode=mode)
        options = {**options, "config": config}
    small, large = (temporary_bytes(n, op, differentiate, **options) for n in (4096, 8192))
    assert large <= 2.3 * small
    assert large < 8192 * 8192 * 4 / (8 if op == "turbo" else 4)
