"""A bias in Hopper's attention kernels without a GPU: what lanes load and add; lowering.

Lanes load from arrays of bytes, as they do from global memory; the rest as in
`test_mosaic_softmax.py` and `test_mosaic_gradient.py`.
"""

import functools
import itertools
import types

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

import turbojax as tj
from pallas_kernels.mosaic import bias as biases
from pallas_kernels.mosaic import softmax
from pallas_kernels.mosaic.hopper.gradient import bias as of_bias
from pallas_kernels.mosaic.hopper.gradient import elementwise, tiles
from tests.attention.attention_helpers import EXACT
from tests.kernels.kernel_helpers import lower_for_cuda
from tests.oracles import warp
from tests.oracles.fragments import accumulator, fragments
from turbojax.ops.optional_arrays import Extras
from turbojax.ops.options import Options
from turbojax.ops.turbo_attention import mosaic_gpu, mosaic_gradient
from turbojax.ops.turbo_attention.api import ATTENTION
from turbojax.ops.turbo_attention.gradient import GRADIENT
from turbojax.ops.turbo_attention.operands import bias_of_hopper

BATCH, HEADS, TOKENS, SIZE = 2, 3, 75, 140
DTYPES = {"float32": np.float32, "bfloat16": ml_dtypes.bfloat16, "float16": np.float16}
KINDS = {
    "full": (BATCH, HEADS, TOKENS, SIZE),
    "one for all": (1, 1, TOKENS, SIZE),
    "one for sequences": (1, HEADS, TOKENS, SIZE),
    "row": (BATCH, HEADS, 1, SIZE),
    "row for heads": (BATCH, 1, 1, SIZE),
}
B, HEAD = 1, 2
CAUSAL = Options(True, scale=0.1)


def a_bias(kind, dtype):
    """Some of it hides keys, some marks rows."""
    rng = np.random.default_rng(4)
    x = rng.normal(size=KINDS[kind]) * 3
    x[rng.random(x.shape) < 0.1] = -np.inf
    return x.astype(DTYPES[dtype])


def of_pairs(x, query, key, rows, columns):
    """The definition: float64 ``[rows, columns]`` from a first query and a first key on."""
    b, n = min(B, x.shape[0] - 1), min(HEAD, x.shape[1] - 1)
    at = np.minimum(query + np.arange(rows), x.shape[2] - 1)
    keys = np.minimum(key + np.arange(columns), x.shape[3] - 1)
    return x[b, n][at][:, keys].astype(np.float64)


def patch(monkeypatch, fake):
    """Lanes in numpy; words that lanes loaded stay a list."""

    class of_words(fake):
        @classmethod
        def scalars(cls, a):
            return a if isinstance(a, list) else super().scalars(a)

    barrier = types.SimpleNamespace(optimization_barrier=lambda x: x)
    for module in (biases, softmax, elementwise):
        monkeypatch.setattr(module, "lane", warp)
        monkeypatch.setattr(module, "fragments", of_words)
        monkeypatch.setattr(module, "mgpu", barrier)
        for name in ("Float", "Int"):
            monkeypatch.setattr(module, name, getattr(warp, name))


def load(f, x, *scalars, **static):
    """What a lane's function of loads finds; and what is static of the bias."""
    kind = biases.Bias(x.shape, x.dtype.name)
    line = int(kind.line(jnp.int32(B), jnp.int32(HEAD)))
    start = warp.Pointer(np.frombuffer(x.tobytes(), np.uint8).copy())
    given = [warp.Int(np.full(32, n)) for n in (line, *scalars)]
    with np.errstate(all="ignore"):
        return f(start, *given, x=kind, **static), kind


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", KINDS)
def test_what_lanes_load(monkeypatch, kind, dtype):
    """Of tiles in the middle, and past the last query and key."""
    x = a_bias(kind, dtype)
    for query, key in ((0, 0), (64, 64), (70, 128)):
        patch(monkeypatch, fragments)
        words, static = load(biases._in_fours, x, query, key, SIZE, tile=64)
        rows = np.asarray(fragments.of_rows(biases.numbers(words, static)))
        seen = np.arange(key, key + 64) < SIZE
        want = of_pairs(x, query, key, 16, 64)
        np.testing.assert_array_equal(rows[:, seen], want[:, seen])
        patch(monkeypatch, accumulator)
        words, static = load(biases._in_pairs, x, query, key)
        rows = np.asarray(accumulator.of_rows(biases.numbers(words, static)))
        np.testing.assert_array_equal(rows[:, seen], want[:, seen])
        f = biases._of_two_keys if static.is_row else biases._in_columns
        words, static = load(f, x, query, key)
        rows = accumulator.of_rows(biases.numbers(words, static, rows_are_keys=True))
        np.testing.assert_array_equal(rows, of_pairs(x, query, key, 64, 16).T)


def test_what_is_not_there_is_not_loaded(monkeypatch):
    patch(monkeypatch, fragments)
    x = a_bias("full", "float32")
    words, static = load(biases._in_fours, x, 0, 0, 0, tile=64)
    assert all(np.isnan(v.value).all() for row in biases.numbers(words, static) for v in row)


@pytest.mark.parametrize("ahead", [False, True])
@pytest.mark.parametrize("cap", [None, 3.0])
@pytest.mark.parametrize(("kind", "dtype"), [("full", "bfloat16"), ("row", "float32")])
def test_softmax_of_scores_with_a_bias(monkeypatch, kind, dtype, cap, ahead):
    """Log-sum-exps against float64; a row that sees nothing; NaN under -inf, and not."""
    patch(monkeypatch, fragments)
    x, rng = a_bias(kind, dtype), np.random.default_rng(3)
    if kind == "full":
        x[B, HEAD, 3] = -np.inf
    policy = softmax.Policy(softmax.Exponential(), False, None, 0, cap)
    scores = rng.normal(size=(16, 128)).astype(np.float32) * 3
    hidden = np.isneginf(of_pairs(x, 0, 0, 16, 128))
    first = 20  # the first query's position: causality hides keys, too
    hidden |= np.arange(128) > first + np.arange(16)[:, None]
    scores[hidden] = np.nan  # whatever hides it
    scores[5, np.flatnonzero(~hidden[5])[1]] = np.nan
    m, l = np.full((16, 4), -np.inf, np.float32), np.zeros((16, 4), np.float32)
    for j in range(2):
        words, static = load(biases._in_fours, x, 0, 64 * j, SIZE, tile=64)
        factor = np.float32(0.5 if cap is not None else 0.5 * policy.exponential.unit)
        limits = np.int32(first - 64 * j), np.int32(SIZE - 64 * j)
        given = (scores[:, 64 * j : 64 * j + 64], (factor,), limits, policy)
        tile, one = softmax.seen(*given, of_pairs=(words, static)), (np.float32(1),)
        if ahead:
            top, m, alpha = softmax.maxima(tile, m, one, policy)
            arguments = softmax.arguments(tile, m, one, policy)
            _, l, _ = softmax.weigh(arguments, top, m, alpha, l, policy)
        else:
            _, m, l, *_ = softmax.step(tile, m, l, one, policy)
    out = np.ones((16, 16), np.float32)
    found, lse = softmax.finish(out, m, l, np.int32(16), np.float32(1), policy, 16, 16)
    whole = scores * 0.5
    whole = whole if cap is None else cap * np.tanh(whole / cap)
    whole = np.where(hidden, -np.inf, whole + of_pairs(x, 0, 0, 16, 128))
    with np.errstate(invalid="ignore"):
        want = np.logaddexp.reduce(whole, axis=1)
    assert np.isnan(want).sum() == 1
    atol = 3e-5 if cap is None else cap * 2**-11  # the hardware's tanh
    np.testing.assert_allclose(lse[:, 0], want, rtol=1e-6, atol=atol)
    if kind == "full":
        assert want[3] == -np.inf
        assert (found[3] == 0).all()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("query", "key"), [(64, 64), (70, 128)])
def test_what_lanes_store(monkeypatch, query, key, dtype):
    """Of tiles in the middle, and past the last query and key: there nothing."""
    patch(monkeypatch, accumulator)
    shape = (BATCH, HEADS, TOKENS, SIZE)
    kind = biases.Bias(shape, dtype)
    memory = np.frombuffer(np.full(shape, 9, DTYPES[dtype]).tobytes(), np.uint8).copy()
    values = np.random.default_rng(0).normal(size=(16, 64)).astype(np.float32)
    line = int(kind.line(jnp.int32(B), jnp.int32(HEAD)))
    given = [warp.Int(np.full(32, n)) for n in (line, query, key)]
    biases._store(warp.Pointer(memory), accumulator.by_row(values), *given, x=kind)
    got = memory.view(DTYPES[dtype]).reshape(shape)
    want = np.full(shape, 9, DTYPES[dtype])
    rows, columns = min(16, TOKENS - query), min(64, SIZE - key)
    want[B, HEAD, query : query + rows, key : key + columns] = values[:rows, :columns]
    np.testing.assert_array_equal(got, want)


@pytest.mark.parametrize("kind", [(2, 4, 300, 8), (1, 4, 300, 8), (1, 1, 300, 8), (2, 1, 1, 300)])
def test_every_pair_is_added_to_one_tile_of_the_gradient(kind):
    """Of all sequences, heads, queries and keys, where their bias is."""
    batch, heads, tokens = 2, 4, 300
    x = dict.fromkeys(tiles.Operands._fields)
    x["q"], x["k"] = jnp.zeros((batch, tokens, heads, 1)), jnp.zeros((batch, 300, 2, 1))
    x["query_lengths"] = x["key_lengths"] = jnp.asarray([300, 200])
    x["bias"] = jnp.zeros(kind)
    s = types.SimpleNamespace(left=None, right=0)
    count = kind[0] * kind[1] * -(-kind[2] // 128) * -(-kind[3] // 128)
    seen = []
    for number in range(count):
        work = of_bias._Work(jnp.int32(number), tiles.Operands(**x), s)
        for i in range(work.steps):
            step = work.step(jnp.int32(i))
            b, head, h, query, key = (int(a) for a in step[:5])
            assert h == head // 2
            assert int(work.key) == key
            assert (int(work.b), int(work.head)) == (b % kind[0], head % kind[1])
            assert kind[2] == 1 or int(work.row) * 128 == query
            length = (300, 200)[b]
            assert bool(step.is_seen) == (query < length and key < length and key <= query + 127)
            seen.append((b, head, query, key))
    keys = range(0, kind[3], 128)
    every = itertools.product(range(batch), range(heads), (0, 128, 256), keys)
    assert sorted(seen) == list(every)


def operands(shape, dtype, head_dim, size):
    """Shapes of queries, keys, values, lengths and a bias."""
    q, k = (jax.ShapeDtypeStruct((2, n, 4, head_dim), jnp.bfloat16) for n in (300, size))
    lengths = jax.ShapeDtypeStruct((2,), jnp.int32)
    return (q, k, k, lengths, lengths), Extras(bias=jax.ShapeDtypeStruct(shape, dtype))


LOWERED = [
    ((1, 4, 300, 150), jnp.bfloat16, "fp8", 128, 150),
    ((2, 1, 1, 152), jnp.bfloat16, "int8_fp8", 64, 152),
    ((1, 1, 300, 152), jnp.float32, "int8", 128, 152),
    ((2, 4, 1, 150), jnp.float32, "fp8", 128, 150),
    ((2, 4, 300, 152), jnp.float16, "fp8", 256, 152),
    ((1, 4, 300, 152), jnp.bfloat16, "fp8", 64, 152),
]


@pytest.mark.quick(1, slow=2)
@pytest.mark.parametrize("case", LOWERED, ids=lambda case: "-".join(map(str, case[0])))
def test_attention_lowers(case):
    """Kinds, dtypes, head dims; keys that are no multiple of 4."""
    shape, dtype, mode, head_dim, size = case
    arrays, extras = operands(shape, dtype, head_dim, size)
    static = {"config": tj.TurboConfig(mode=mode, softmax=EXACT), "options": CAUSAL}
    run = functools.partial(mosaic_gpu.attention, **static)
    assert "mosaic_gpu" in lower_for_cuda(lambda *x: run(*x[:-1], extras=x[-1]), *arrays, extras)


@pytest.mark.quick(slow=2)
@pytest.mark.parametrize("case", LOWERED, ids=lambda case: "-".join(map(str, case[0])))
def test_gradients_lower(case):
    shape, dtype, mode, head_dim, size = case
    arrays, extras = operands(shape, dtype, head_dim, size)
    config = tj.TurboConfig(mode=mode, softmax=EXACT, gradient="8bit")
    run = functools.partial(mosaic_gradient.gradient, config=config, options=CAUSAL)
    rows = jax.ShapeDtypeStruct((2, 300, 4), jnp.float32)
    arrays = (*arrays, arrays[0], rows, arrays[0], rows, extras)
    assert "mosaic_gpu" in lower_for_cuda(lambda *x: run(*x[:-1], extras=x[-1]), *arrays)


@pytest.mark.parametrize(
    ("block_kv", "rows", "dtype", "ahead"),
    [
        (64, 300, jnp.bfloat16, True),
        (64, 1, jnp.float32, True),
        (64, 300, jnp.float32, False),
        (128, 300, jnp.bfloat16, False),
    ],
)
def test_launches_of_a_bias(block_kv, rows, dtype, ahead):
    """Tiles of one block; ahead where a tile's bias has registers, in turns never."""
    query = jax.ShapeDtypeStruct((2, 300, 4, 128), jnp.bfloat16)
    bias = jax.ShapeDtypeStruct((1, 4, rows, 300), dtype)
    config = tj.TurboConfig(block_kv=block_kv, buffer_size=block_kv)
    found = mosaic_gpu.default_launch(query, config, bias=bias)
    assert (found.tile, found.ahead, found.in_turns) == (block_kv, ahead, False)


def test_keys_are_padded_only_where_they_must_be():
    x = jnp.ones((1, 2, 3, 8), jnp.bfloat16)
    assert bias_of_hopper(Extras(bias=x)) is x
    assert bias_of_hopper(Extras(bias=x[..., :5])).shape == (1, 2, 3, 8)
    assert bias_of_hopper(Extras()) is None


@pytest.mark.parametrize("registry", [ATTENTION, GRADIENT])
def test_hoppers_kernels_are_the_default(registry, hopper):
    x = jax.ShapeDtypeStruct((1, 8, 2, 64), jnp.bfloat16)
    given = {"query": x, "key": x, "value": x, "options": Options(False, scale=0.1)}
    ends = jax.ShapeDtypeStruct((1, 8), jnp.int32)
    for extras in (
        Extras(bias=jax.ShapeDtypeStruct((1, 1, 8, 8), jnp.bfloat16)),
        Extras(key_bounds=(ends, ends)),
    ):
        chosen = registry.select(None, **given, config=tj.TurboConfig(), extras=extras)
        assert chosen.name == "mosaic_gpu"
