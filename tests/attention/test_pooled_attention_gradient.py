"""Gradients of `pooled_attention`, in float64; transforms that `turbo_attention` shares.

That oracle is itself held to finite differences of the forward oracle, with which it shares no
arithmetic. Float32 results may be as far from it as twice what the same gradient in plain float32
is, plus a few units in the last place.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import turbojax as tj
from tests.attention.attention_helpers import tensors
from tests.attention.pooled_helpers import (
    CASES,
    Case,
    api_options,
    assert_as_good_as_plain,
    operands,
    options,
    oracle,
    oracle_gradient,
    plain_gradient,
    worst,
)
from turbojax.attention.pooled import reference
from turbojax.attention.pooled.operands import Backward
from turbojax.attention.pooled.static import PooledOptions

NAMES = [
    *(f"level {r}, causal, ragged" for r in (1, 2, 4, 8)),
    "level 0",
    "mixture",
    "causal, other blocks",
    "one token",
    "grouped queries",
    "one level array",
    "both lengths, causal",
    "odd blocks",
    "queries' block beyond a tile",
]


@functools.partial(jax.jit, static_argnums=5)
def _gradients(arrays, levels, d_out, d_residual, lengths, static):
    def call(q, k, v):
        return tj.pooled_attention(q, k, v, levels, return_residual=True, **dict(static), **lengths)

    return jax.vjp(call, *arrays)[1]((d_out, d_residual))


def gradients(case, q, k, v, levels, d_out, d_residual):
    static, lengths = api_options(case)
    return _gradients((q, k, v), levels, d_out, d_residual, lengths, static)


# In the fast tier groups cut short by lengths, of a mixture; the rest is more of it.
@pytest.mark.quick(first=1, slow=0)
@pytest.mark.parametrize("name", sorted(NAMES, key=lambda name: name != "both lengths, causal"))
def test_equals_the_oracle(name):
    """Cotangents of the output and of the residual, at every level, mixed, ragged and causal."""
    case = CASES[name]
    arrays = operands(case)
    got = gradients(case, *arrays)
    for x, of in zip(got, arrays[:3], strict=True):
        assert (x.shape, x.dtype) == (of.shape, of.dtype)
    want = oracle_gradient(*arrays, **options(case))
    assert_as_good_as_plain(got, want, plain_gradient(*arrays, **options(case)))
    assert (name == "level 0") == (not any(x.any() for x in want))


@pytest.mark.quick(1)
@pytest.mark.parametrize(
    ("name", "dtype"),
    [("both lengths, causal", jnp.bfloat16), ("mixture", jnp.float16)],
)
def test_half_precision(name, dtype):
    """Sums in float32, rounded once.

    The row's `D` takes the output as it was rounded, at most by half a unit in the last place: it
    moves a row's gradients by at most that part of ``|dO| . |O|``, of which the rows' average is
    a fraction of the largest gradient.
    """
    case = CASES[name]
    arrays = operands(case, dtype)
    got = gradients(case, *arrays)
    assert all(x.dtype == dtype for x in got)
    want = oracle_gradient(*arrays, **options(case))
    plain = plain_gradient(*arrays, **options(case))
    assert_as_good_as_plain(got, want, plain, floor=float(jnp.finfo(dtype).eps))


@pytest.mark.quick(1)
@pytest.mark.parametrize("name", ["both lengths, causal", "odd blocks"])
def test_float64(name):
    """The reference is exact where it is given the precision: nothing is off by a little."""
    case = CASES[name]
    arrays = [np.asarray(x) for x in operands(case)]
    arrays = [x if x.dtype == np.int8 else x.astype(np.float64) for x in arrays]
    lengths = [x if x is None else np.int32(x) for x in (case.query_lengths, case.key_lengths)]
    kwargs = options(case)
    static = PooledOptions(**{n: kwargs[n] for n in ("block_q", "block_kv", "scale", "is_causal")})
    with jax.enable_x64(True):
        q, k, v, levels, d_out, d_residual = map(jnp.asarray, arrays)
        shared = (q, k, v, levels, *jax.tree.map(jnp.asarray, lengths))
        results = reference.attention(*shared, options=static)
        got = reference.gradient(Backward(*shared, *results, d_out, d_residual), options=static)
        got = [np.asarray(x) for x in got]
    for x, y in zip(got, oracle_gradient(*arrays, **kwargs), strict=True):
        assert x.dtype == np.float64
        assert worst(x, y) < 1e-12


@pytest.mark.slow
def test_float32_where_64_bits_are_enabled():
    case = CASES["both lengths, causal"]
    arrays = operands(case)
    want = gradients(case, *arrays)
    with jax.enable_x64(True):
        got = gradients(case, *arrays)
    for x, y in zip(got, want, strict=True):
        assert x.dtype == jnp.float32
        np.testing.assert_allclose(x, y, atol=1e-5)


def test_the_oracle_is_the_derivative():
    """Central differences of the float64 oracle along a random direction."""
    case = Case(21, 27, heads=2, block_q=8, block_kv=16, is_causal=True, key_lengths=(27, 13))
    arrays = [np.asarray(x) for x in operands(case, head_dim=4, seed=3)]
    levels, (d_out, d_residual) = arrays[3], (x.astype(np.float64) for x in arrays[4:])
    point = [x.astype(np.float64) for x in arrays[:3]]
    kwargs = options(case, head_dim=4)
    want = oracle_gradient(*point, levels, d_out, d_residual, **kwargs)
    rng = np.random.default_rng(4)
    step = 2.0**-6
    for moving in range(3):  # each operand for itself
        direction = [rng.choice([-1.0, 1.0], x.shape) * (i == moving) for i, x in enumerate(point)]

        def loss(t, direction=direction):
            moved = [x + t * d for x, d in zip(point, direction, strict=True)]
            out, residual = oracle(*moved, levels, **kwargs)
            seen = np.isfinite(residual)
            return (d_out * out).sum() + (d_residual * np.where(seen, residual, 0)).sum()

        # Two step sizes (Richardson): the error is of order step**4.
        coarse = (loss(2 * step) - loss(-2 * step)) / (4 * step)
        fine = (loss(step) - loss(-step)) / (2 * step)
        slope = (want[moving] * direction[moving]).sum()
        assert abs(slope) > 0.5
        np.testing.assert_allclose((4 * fine - coarse) / 3, slope, rtol=1e-5)


def test_the_residual_alone():
    """Its gradient needs no values: theirs is zero. And the sum of both parts is the whole."""
    case = CASES["mixture, causal"]
    q, k, v, levels, d_out, d_residual = operands(case)
    of_residual = gradients(case, q, k, v, levels, jnp.zeros_like(d_out), d_residual)
    assert (np.asarray(of_residual[2]) == 0).all()
    want = oracle_gradient(q, k, v, levels, np.zeros(q.shape), d_residual, **options(case))
    for x, y in zip(of_residual[:2], want[:2], strict=True):
        assert np.abs(y).max() > 0.1
        assert worst(x, y) < 1e-5


def test_padding_and_blind_rows_have_no_gradient_and_no_say():
    """What stands in the padding, its cotangents, and those of rows that see nothing: anything."""
    case = CASES["both lengths, causal"]
    arrays = operands(case)
    want = gradients(case, *arrays)
    blind = np.isneginf(oracle(*arrays[:4], **options(case))[1])
    q, k, v, levels, d_out, d_residual = (np.asarray(x).copy() for x in arrays)
    padding = np.arange(case.tokens) >= np.array(case.query_lengths)[:, None]
    past = np.arange(case.size) >= np.array(case.key_lengths)[:, None]
    assert (blind & ~padding[..., None]).sum() > 100
    q[padding] = np.nan
    k[past], v[past] = np.nan, np.inf
    d_out[blind], d_residual[blind] = np.nan, np.nan
    got = gradients(case, *map(jnp.asarray, (q, k, v, levels, d_out, d_residual)))
    jax.tree.map(np.testing.assert_array_equal, got, want)
    assert (np.asarray(got[0])[blind] == 0).all()
    for x in got[1:]:
        assert (np.asarray(x)[past] == 0).all()


@pytest.mark.quick(3, slow=0)
@pytest.mark.parametrize("of", range(5))
def test_a_bad_value_reaches_only_what_it_has_to_do_with(of):
    """NaN in one token of query, key, value or a cotangent: the other pairs stay finite."""
    case = CASES["mostly skipped"]
    arrays = [np.asarray(x).copy() for x in operands(case)]
    levels = arrays[3]
    # Head 0, the second block of queries, whose levels for the fourth block of keys are 1 and 0.
    levels[:, :, 1], levels[:, :, :, 3] = 0, 0
    levels[0, 0, 1, 3] = 1
    tokens = slice(32, 64), slice(96, 128)
    position = 100 if of in (1, 2) else 40
    arrays[of if of < 3 else of + 1][0, position, 0] = np.nan
    d_q, d_k, d_v = (np.asarray(x) for x in gradients(case, *map(jnp.asarray, arrays)))
    bad = [np.isnan(x).any(-1) for x in (d_q, d_k, d_v)]
    assert bad[0][0, tokens[0], 0].any()
    for x, inside in zip(bad, (tokens[0], tokens[1], tokens[1]), strict=True):
        x[0, inside, 0] = False
        assert not x.any()


def test_two_runs_have_equal_bits():
    case = CASES["both lengths, causal"]
    arrays = operands(case)
    first, second = (gradients(case, *arrays) for _ in range(2))
    jax.tree.map(np.testing.assert_array_equal, first, second)


SMALL = Case(40, 40, heads=2, batch=6, block_q=16, block_kv=16)
OPTIONS = {"block_q": 16, "block_kv": 16, "is_causal": True}


def test_what_is_kept_for_the_backward_pass():
    """Inputs, levels, output and residual, nothing pooled and no scores."""
    q, k, v, levels, *_ = operands(SMALL)
    _, pull = jax.vjp(lambda q, k, v: tj.pooled_attention(q, k, v, levels, **OPTIONS), q, k, v)
    kept = sum(x.nbytes for x in jax.tree.leaves(pull))
    residual = 4 * SMALL.batch * SMALL.tokens * SMALL.heads
    assert kept == 2 * q.nbytes + k.nbytes + v.nbytes + levels.nbytes + residual


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
