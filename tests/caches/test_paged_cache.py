"""`PagedCache` against float64 oracles: what is stored, where, and what a wrong call says."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import tests.oracles.paged as oracle
from tests.caches.cache_helpers import assert_same_bits
from turbojax import polar
from turbojax.caches.paged import formats
from turbojax.caches.paged import pool as paged

KINDS = ("auto", "fp8_e4m3", "fp8_e5m2", "int8", "turbo4", "k8v4", "int8_v4", "turbo_k3v2")
BATCH, HEADS, HEAD_DIM, PAGES, SIZE = 3, 2, 32, 12, 16
TABLES = np.array([[7, 2, 9], [0, 11, -1], [4, 1, 5]], np.int32)

append = jax.jit(paged.append)
gather = jax.jit(paged.gather, static_argnames="dtype")


def new(kind, dtype=jnp.float32, pages=PAGES, size=SIZE, **options):
    return paged.init_paged_cache(
        pages, size, HEADS, HEAD_DIM, kv_dtype=kind, dtype=dtype, **options
    )


def random_tokens(count, seed, dtype=jnp.float32, batch=BATCH):
    rng = np.random.default_rng(seed)
    shape = (batch, count, HEADS, HEAD_DIM)
    return tuple(jnp.asarray(rng.normal(size=shape) * 3, dtype) for _ in range(2))


def integers(*values):
    return np.array(values, np.int32)


def signs_of(cache):
    return np.asarray(cache.rotation.signs, np.float64)


def through(cache, x, side, scale=1.0):
    """What the cache makes of keys (`side` is 0) or values (1), in float64."""
    signs = signs_of(cache) if oracle.has_codes(cache.kv_dtype) else None
    return oracle.through(x, cache.kv_dtype, side, scale=scale, signs=signs)


def assert_close(got, want, has_codes):
    """Exact where no sum is taken; for codes within the float32 rounding of a rotation.

    A rotated vector has log2(32) = 5 additions and three products per coordinate, each within half
    a unit of the vector's length. Now and then a norm rounds to float16 the other way than in
    float64.
    """
    got, want = np.asarray(got, np.float64), np.asarray(want, np.float64)
    if not has_codes or not got.size:
        np.testing.assert_array_equal(got, want)
        return
    error = np.abs(got - want) / np.linalg.norm(want, axis=-1, keepdims=True)
    assert (error <= 2.0**-10).all()
    assert (error <= 8 * 2.0**-24).all(-1).mean() >= 0.9


# What is stored ----------------------------------------------------------------------------------


@pytest.mark.quick(slow=1)
@pytest.mark.parametrize(
    ("dtype", "kind"),
    [
        (jnp.float32, "turbo4"),
        (jnp.float16, "fp8_e4m3"),
        (jnp.bfloat16, "turbo4"),
        (jnp.bfloat16, "k8v4"),
        (jnp.float32, "int8"),
        (jnp.float16, "int8_v4"),
        (jnp.float32, "turbo_k4v2"),
        (jnp.float16, "turbo_k3v4"),
        (jnp.float32, "turbo_k2v3"),
    ],
)
def test_tokens_come_back_as_the_codec_makes_them(kind, dtype):
    """Ragged, in two calls, over pages out of order; what is past a length reads as zero."""
    names = oracle.fp8_names(kind)
    scales = [scale if name else 1 for scale, name in zip((0.3, 2.0), names, strict=True)]
    cache = new(kind, dtype, key_scale=scales[0], value_scale=scales[1])
    key, value = random_tokens(40, 1, dtype)
    cut, total = integers(21, 0, 16), integers(40, 24, 37)
    cache = append(cache, key[:, :21], value[:, :21], TABLES, integers(0, 0, 0), new_lengths=cut)
    rest = [
        jnp.stack([jnp.roll(x[b], -int(cut[b]), axis=0)[:24] for b in range(BATCH)])
        for x in (key, value)
    ]
    cache = append(cache, *rest, TABLES, cut, new_lengths=total - cut)
    cache.validate()
    assert int(cache.dropped_tokens) == 0
    sides = gather(cache, TABLES, total, dtype=jnp.float32)
    for side, (got, x, scale) in enumerate(zip(sides, (key, value), scales, strict=True)):
        assert got.shape == (BATCH, 3 * SIZE, HEADS, HEAD_DIM)
        for b, length in enumerate(total):
            want = through(cache, x[b, :length], side, np.float32(scale))
            if names[side]:
                want = want.astype(np.float32)  # the product rounds, in float64 it does not
            assert_close(got[b, :length], want, oracle.code_bits(kind)[side])
            np.testing.assert_array_equal(got[b, length:], 0)
    shown = gather(cache, TABLES, total)
    assert [x.dtype for x in shown] == [jnp.dtype(dtype)] * 2


@pytest.mark.quick(1, slow=0)
@pytest.mark.parametrize("kind", ["turbo4", "turbo_k3v2", "turbo_k2v3"])
def test_layout_of_codes(kind):
    """Token 20 of sequence 0 is slot 4 of its second page; bytes and norms are the codec's."""
    cache = new(kind)
    key, value = random_tokens(40, 2)
    cache = append(cache, key, value, TABLES, integers(0, 0, 0), new_lengths=integers(40, 0, 0))
    signs, bits = signs_of(cache), oracle.code_bits(kind)
    for x, stored, norm, count in (
        (key, cache.key, cache.key_norm, bits[0]),
        (value, cache.value, cache.value_norm, bits[1]),
    ):
        _, packed, norms = oracle.encoded(x[0], signs, count)
        assert stored.shape == (PAGES, HEADS, SIZE, HEAD_DIM * count // 8)
        for token in (0, 15, 16, 20, 39):
            page, slot = TABLES[0][token // SIZE], token % SIZE
            np.testing.assert_array_equal(stored[page, :, slot], packed[token])
            got = np.asarray(norm[page, :, slot]).view(np.uint16).astype(int)
            assert np.abs(got - norms[token].view(np.uint16).astype(int)).max() <= 1
    untouched = np.setdiff1d(np.arange(PAGES), TABLES[0])
    np.testing.assert_array_equal(cache.key[untouched], 0)


def awkward(kind):
    """Values that are hard to round to 8 bits: ties and their neighbours, subnormals, extremes."""
    dtype = oracle.FP8[kind]
    finite = np.arange(256, dtype=np.uint8).view(dtype).astype(np.float32)
    finite = np.sort(finite[np.isfinite(finite)])
    ties = (finite[1:] + finite[:-1]) / 2
    near = [np.nextafter(ties, np.float32(sign * 1e9)) for sign in (1, -1)]
    rng = np.random.default_rng(3)
    random = rng.normal(size=6000) * 2.0 ** rng.integers(-30, 6, size=6000)
    largest = finite[-1]
    beyond = np.float32([largest * 1.001, -largest * 1.01, 3e38, np.inf, -np.inf, np.nan])
    return np.concatenate([finite, ties, *near, random, [1e-40, -0.0], beyond]).astype(np.float32)


@pytest.mark.quick(1)
@pytest.mark.optimized
@pytest.mark.parametrize("kind", oracle.FP8)
def test_fp8_is_rounded_to_the_bit(kind):
    x = awkward(kind)
    run = functools.partial(paged.to_fp8, dtype=jnp.dtype(oracle.FP8[kind]))
    for scale in (1.0, 0.7):
        want = oracle.fp8(x, kind, scale)
        nan = np.isnan(want.astype(np.float32))
        assert nan.any()
        for call in (run, jax.jit(run)):
            got = np.asarray(call(jnp.asarray(x), jnp.float32(scale)))
            np.testing.assert_array_equal(np.isnan(got.astype(np.float32)), nan)
            np.testing.assert_array_equal(got.view(np.uint8)[~nan], want.view(np.uint8)[~nan])


def vectors_for_int8(dtype):
    """Ties between integers and their neighbours, scales of all sizes, what has none."""
    rng = np.random.default_rng(9)
    x = rng.normal(size=(3000, HEAD_DIM)) * 10.0 ** rng.uniform(-9, 6.5, size=(3000, 1))
    scales = rng.integers(1024, 2048, (2000, 1))
    halves = (rng.integers(-127, 127, (2000, HEAD_DIM)) + 0.5) * scales
    halves[:, :1] = 127 * scales - 63.5  # half a step less would be the next scale
    halves *= 2.0 ** rng.integers(-24, -4, (2000, 1))
    x = np.concatenate([x, halves, np.nextafter(halves, 0), np.zeros((2, HEAD_DIM))])
    x[-1] = -0.0
    for value in (2.0**-25, 2.0**-25 * 1.01, 1e-40, 127 * 65504, 127 * 65520, np.inf, np.nan):
        alone, beside = np.zeros(HEAD_DIM), rng.normal(size=HEAD_DIM)
        alone[3] = beside[5] = value
        x = np.concatenate([x, [alone, -beside]])
    with np.errstate(over="ignore"):
        return x.astype(np.float32).astype(jnp.dtype(dtype))


@pytest.mark.quick(1)
@pytest.mark.optimized
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16, jnp.float16])
def test_int8_is_rounded_to_the_bit(dtype):
    x = vectors_for_int8(dtype)
    numbers, scales = oracle.int8(x)
    assert np.isnan(scales).sum() >= 4
    assert (np.abs(numbers.astype(int)).max(-1) >= 127).mean() > 0.6
    for call in (formats.to_int8, jax.jit(formats.to_int8)):
        got_numbers, got_scales = call(jnp.asarray(x))
        np.testing.assert_array_equal(got_numbers, numbers)
        np.testing.assert_array_equal(got_scales, scales)


@pytest.mark.quick(1, slow=0)
@pytest.mark.parametrize("kind", ["auto", "fp8_e4m3", "turbo4", "k8v4", "int8", "turbo_k3v2"])
def test_what_is_not_finite_spoils_its_own_token_and_head_alone(kind):
    key, value = random_tokens(20, 4)
    clean = append(new(kind), key, value, TABLES[:, :2].clip(0), integers(0, 0, 0))
    bad_key = key.at[0, 17, 1, 3].set(jnp.nan)
    bad_value = value.at[2, 4, 0, 31].set(-jnp.inf)
    cache = paged.append(new(kind), bad_key, bad_value, TABLES, integers(0, 0, 0))
    cache.validate()
    before = gather(clean, TABLES, integers(20, 20, 20))
    after = gather(cache, TABLES, integers(20, 20, 20))
    for got, want, place in zip(after, before, [(0, 17, 1), (2, 4, 0)], strict=True):
        got, want = np.array(got), np.array(want)
        assert not np.isfinite(got[place]).all()
        got[place] = want[place]
        np.testing.assert_array_equal(got, want)


RANGE = {
    "fp8_e4m3": (0.5, 225.0, r"value\[1, 2\] holds values beyond 224.*fp8_e4m3.*value_scale=0.5"),
    "fp8_e5m2": (1.0, -60000.0, r"value\[1, 2\] holds values beyond 57344"),
    "turbo4": (1.0, 70000.0, r"value\[1, 2\] has a norm beyond 65504"),
    "k8v4": (1.0, 70000.0, r"value\[1, 2\] has a norm beyond 65504, the largest that k8v4 stores"),
    "int8": (
        1.0,
        -8.4e6,
        r"value\[1, 2\] holds values beyond 8319008, the largest that int8 stores",
    ),
    "turbo_k4v2": (1.0, 200000.0, r"value\[1, 2\] has a norm beyond 65504.*turbo_k4v2"),
}


@pytest.mark.quick(1, slow=0)
@pytest.mark.parametrize("kind", RANGE)
def test_values_beyond_the_format(kind):
    """An error, NaN under `jit`; where `new_lengths` leaves them out, neither."""
    scale, huge, message = RANGE[kind]
    cache = new(kind, value_scale=scale)
    key, value = random_tokens(3, 5)
    value = value.at[1, 2, 0, 0].set(huge)
    with pytest.raises(ValueError, match=message):
        paged.append(cache, key, value, TABLES, integers(0, 0, 0))
    paged.append(cache, key, value, TABLES, integers(0, 0, 0), new_lengths=integers(3, 2, 3))
    stored = append(cache, key, value, TABLES, integers(0, 0, 0))
    shown = np.asarray(gather(stored, TABLES, integers(3, 3, 3))[1])
    bad = np.isnan(shown).any(-1)
    assert np.argwhere(bad).tolist() == [[1, 2, 0]]


def test_keys_beyond_8_bits_beside_values_of_4():
    cache = new("k8v4", key_scale=0.5)
    key, value = random_tokens(3, 5)
    key = key.at[1, 2, 0, 0].set(-225.0)
    with pytest.raises(ValueError, match=r"key\[1, 2\] holds values beyond 224.*k8v4.*key_scale=0"):
        paged.append(cache, key, value, TABLES, integers(0, 0, 0))
    stored = append(cache, key, value, TABLES, integers(0, 0, 0))
    shown = np.asarray(gather(stored, TABLES, integers(3, 3, 3))[0])
    assert np.argwhere(np.isnan(shown)).tolist() == [[1, 2, 0, 0]]


# Where it is stored ------------------------------------------------------------------------------


@pytest.mark.quick(slow=1)
@pytest.mark.parametrize("kind", ["auto", "turbo4", "k8v4", "int8_v4"])
def test_how_tokens_are_split_into_calls_does_not_matter(kind):
    """Nor who else is in the batch."""
    key, value = random_tokens(33, 6)
    zero = integers(0, 0, 0)
    tables = np.array([[7, 2, 9], [0, 11, 3], [4, 1, 5]])
    at_once = append(new(kind), key, value, tables, zero)
    pieces = new(kind)
    for start, stop in ((0, 1), (1, 2), (2, 18), (18, 33)):
        new_tokens = (x[:, start:stop] for x in (key, value))
        pieces = append(pieces, *new_tokens, tables, zero + start)
    assert_same_bits(pieces, at_once)
    alone = new(kind)
    for b in (2, 0, 1):
        one = slice(b, b + 1)
        alone = append(alone, key[one], value[one], tables[one], zero[one])
    assert_same_bits(alone, at_once)


@pytest.mark.quick(1, slow=0)
@pytest.mark.optimized
@pytest.mark.parametrize(
    ("size", "kind"),
    [(128, "turbo4"), (32, "fp8_e4m3"), (64, "turbo_k3v2"), (16, "k8v4"), (64, "int8")],
)
def test_pages_and_their_size_do_not_change_bits(kind, size):
    key, value = random_tokens(130, 7, batch=1)
    count = -(-130 // size)
    order = np.random.default_rng(size).permutation(count + 3)[None, :count]
    got, want = (
        gather(
            append(new(kind, pages=count + 3, size=size), key, value, t, integers(0)),
            t,
            integers(130),
        )
        for t in (order, np.arange(count)[None])
    )
    assert_same_bits(got, want)
    tables = np.arange(1)[None]
    narrow = append(new(kind, pages=1, size=16), key[:, :16], value[:, :16], tables, integers(0))
    assert_same_bits([x[:, :16] for x in got], list(gather(narrow, tables, integers(16))))


def lose(tables, lengths, new_lengths=None, count=20):
    """A call under `jit`: the cache, and the one that has only the tokens with a place."""
    key, value = random_tokens(count, 8)
    tables, lengths = np.asarray(tables), np.asarray(lengths)
    return append(new("auto"), key, value, tables, lengths, new_lengths=new_lengths), key


def test_no_page_is_an_error_and_counted_under_jit():
    tables = [[7, -1, 9], [0, PAGES, -1], [4, 1, 5]]
    key, value = random_tokens(20, 8)
    with pytest.raises(ValueError, match=r"block_tables\[0, 1\]=-1 is needed.*within 0..11"):
        paged.append(new("auto"), key, value, tables, integers(0, 0, 0))
    cache, _ = lose(tables, integers(0, 0, 0))
    assert int(cache.dropped_tokens) == 8
    shown, _ = gather(cache, tables, integers(16, 16, 20))
    np.testing.assert_array_equal(shown[:2, :16], key[:2, :16])
    np.testing.assert_array_equal(shown[2, :20], key[2])
    untouched = np.setdiff1d(np.arange(PAGES), [7, 0, 4, 1])
    np.testing.assert_array_equal(cache.key[untouched], 0)
    again = append(cache, key, value, tables, integers(0, 0, 0))
    assert int(again.dropped_tokens) == 16


def test_past_the_table_is_an_error_and_counted_under_jit():
    key, value = random_tokens(20, 8)
    with pytest.raises(ValueError, match=r"lengths \[20, 30, 60\].*at most 48.*3 pages of 16"):
        paged.append(new("auto"), key, value, TABLES, integers(0, 10, 40))
    cache, _ = lose(TABLES.clip(0), integers(0, 0, 40))
    assert int(cache.dropped_tokens) == 12
    np.testing.assert_array_equal(cache.key[5, :, 8:], np.swapaxes(key[2, :8], 0, 1))


@pytest.mark.parametrize("length", [-1, -20, 2**31 - 4, -(2**31)])
def test_lengths_out_of_range(length):
    key, value = random_tokens(3, 9)
    lengths = integers(0, 0, length)
    with pytest.raises(ValueError, match="must be between 0 and 48"):
        paged.append(new("auto"), key, value, TABLES, lengths)
    got = append(new("auto"), key, value, TABLES, lengths)
    # Of three tokens at -1, -0 + 0 and 1, two have a place.
    placed = max(3 + length, 0) if length < 0 else 0
    assert int(got.dropped_tokens) == 3 - placed


def test_new_lengths_out_of_range_under_jit():
    """Negative counts as nothing; tokens that were promised and not given are counted."""
    cache, key = lose(TABLES.clip(0), integers(0, 0, 0), integers(-4, 25, 20))
    assert int(cache.dropped_tokens) == 5
    shown, _ = gather(cache, TABLES.clip(0), integers(0, 20, 20))
    np.testing.assert_array_equal(shown[1:, :20], key[1:])
    np.testing.assert_array_equal(cache.key[7], 0)


def test_two_tokens_for_one_place():
    """Shared pages may be named, as long as only one sequence writes to a slot."""
    key, value = random_tokens(4, 10)
    shared = [[3, 5, 6], [3, 7, 8], [3, 9, 10]]
    paged.append(new("auto"), key, value, shared, integers(16, 17, 20))
    paged.append(new("auto"), key, value, shared, integers(0, 4, 8))
    with pytest.raises(ValueError, match=r"slot 7 of page 3.*must be copied"):
        paged.append(new("auto"), key, value, shared, integers(0, 4, 7))
    one = [[3, 3, 6], [0, 7, 8], [1, 9, 10]]
    paged.append(new("auto"), key, value, one, integers(14, 0, 0), new_lengths=integers(4, 4, 4))


def test_reading_what_is_out_of_range():
    """An error; under `jit` NaN for that sequence, which sees nobody else's page."""
    key, value = random_tokens(48, 11)
    tables = np.array([[7, 2, 9], [0, 11, 3], [4, 1, 5]])
    cache = append(new("turbo4"), key, value, tables, integers(0, 0, 0))
    want = gather(cache, tables, integers(48, 48, 48))
    bad = {
        r"lengths=\[48, 49, 48\] must be between 0 and 48": (tables, integers(48, 49, 48)),
        r"lengths=\[48, -1, 48\]": (tables, integers(48, -1, 48)),
        r"block_tables\[1, 2\]=-1 is needed": (np.where(tables == 3, -1, tables), None),
        r"block_tables\[1, 2\]=12 is needed": (np.where(tables == 3, PAGES, tables), None),
    }
    for message, (table, lengths) in bad.items():
        lengths = integers(48, 48, 48) if lengths is None else lengths
        with pytest.raises(ValueError, match=message):
            paged.gather(cache, table, lengths)
        for got, x in zip(gather(cache, table, lengths), want, strict=True):
            np.testing.assert_array_equal(got[jnp.array([0, 2])], x[jnp.array([0, 2])])
            assert np.isnan(np.asarray(got[1])).all()
    # An entry that is not needed may be anything.
    short = np.where(tables == 3, -7, tables)
    assert_same_bits(
        gather(cache, short, integers(48, 32, 0)), gather(cache, tables, integers(48, 32, 0))
    )


# Transforms --------------------------------------------------------------------------------------


@pytest.mark.quick(1)
@pytest.mark.parametrize("kind", ["auto", "turbo4"])
def test_scan_over_tokens(kind):
    key, value = random_tokens(6, 12)

    def step(carry, x):
        cache, lengths = carry
        return (paged.append(cache, *(y[:, None] for y in x), TABLES, lengths), lengths + 1), None

    steps = tuple(jnp.swapaxes(x, 0, 1) for x in (key, value))
    start = (new(kind), jnp.zeros(BATCH, jnp.int32))
    (got, _), _ = jax.lax.scan(step, start, steps)
    assert_same_bits(got, append(new(kind), key, value, TABLES, integers(0, 0, 0)))


def check_donated(kind, dtype, copies):
    """Every array's memory is reused, and, without `copies`, nothing of its size held besides."""
    cache, tokens = new(kind, dtype, pages=1024), random_tokens(1, 13, dtype)
    arguments = (*tokens, jnp.asarray(TABLES), jnp.zeros(BATCH, jnp.int32))
    compiled = jax.jit(paged.append, donate_argnums=0).lower(cache, *arguments).compile()
    memory = compiled.memory_analysis()
    assert memory.alias_size_in_bytes >= cache.nbytes - 16
    assert copies or memory.temp_size_in_bytes < cache.nbytes // 16
    want = append(cache, *arguments)
    assert_same_bits(compiled(cache, *arguments), want)
    assert cache.key.is_deleted()


@pytest.mark.quick(1, slow=0)
@pytest.mark.parametrize("kind", KINDS)
def test_a_donated_pool_is_reused(kind):
    """XLA for CPUs has no scatter of 8-bit floats and converts the pool to float16 and back."""
    check_donated(kind, jnp.float32, copies=any(oracle.fp8_names(kind)))


@pytest.mark.gpu
@pytest.mark.parametrize("kind", KINDS)
def test_a_donated_pool_is_not_copied_on_a_gpu(kind):
    check_donated(kind, jnp.bfloat16, copies=False)


def test_gradients_are_refused():
    key, value = random_tokens(1, 14)

    def loss(key):
        return jnp.sum(paged.append(new("auto"), key, value, TABLES, integers(0, 0, 0)).key)

    with pytest.raises(NotImplementedError, match="append has no gradient"):
        jax.grad(loss)(key)


def test_every_way_to_store_pages_is_known_here():
    assert set(SIZES) == set(paged.KV_DTYPES)


# Size and checks ---------------------------------------------------------------------------------


SIZES = {
    "auto": 512,
    "fp8_e4m3": 256,
    "fp8_e5m2": 256,
    "int8": 260,
    "turbo4": 132,
    "k8v4": 194,
    "int8_v4": 196,
    "turbo_k4v3": 116,
    "turbo_k4v2": 100,
    "turbo_k3v4": 116,
    "turbo_k3v3": 100,
    "turbo_k3v2": 84,
    "turbo_k2v4": 100,
    "turbo_k2v3": 84,
    "turbo_k2v2": 68,
}


@pytest.mark.parametrize("kind", SIZES)
def test_size(kind):
    """At 128 channels, keys and values; turbo4's pool holds 3.87 times the tokens of bfloat16's."""
    bytes_per_head = SIZES[kind]
    cache = paged.init_paged_cache(10, 64, 8, 128, kv_dtype=kind)
    assert cache.token_bytes == 8 * bytes_per_head
    assert cache.page_bytes == 64 * cache.token_bytes
    scales = 4 * sum(name is not None for name in oracle.fp8_names(kind))
    assert cache.nbytes == 10 * cache.page_bytes + scales + 4
    assert cache.compression_ratio == 512 / bytes_per_head
    assert (cache.num_pages, cache.page_size, cache.num_kv_heads) == (10, 64, 8)
    assert (cache.head_dim, cache.dtype) == (128, jnp.bfloat16)
    huge = jax.eval_shape(lambda: paged.init_paged_cache(2**17, 64, 8, 128, kv_dtype=kind))
    assert huge.nbytes > 2**32
    assert huge.compression_ratio == cache.compression_ratio


def test_the_rotation_is_that_of_the_seed():
    cache = new("turbo4", seed=5)
    assert_same_bits(cache.rotation, polar.rotation(HEAD_DIM, 5))
    with pytest.raises(ValueError, match="kv_dtype='auto' has no rotation"):
        _ = new("auto").rotation
    key, value = random_tokens(5, 15)
    other = append(new("turbo4", seed=6), key, value, TABLES, integers(0, 0, 0))
    cache = append(cache, key, value, TABLES, integers(0, 0, 0))
    assert not np.array_equal(other.key, cache.key)


BROKEN = {
    "norm": ("turbo4", {"key_norm": None}, "cache.key_norm is None, must be float16"),
    "scale": ("turbo4", {"key_scale": jnp.ones(())}, r"key_scale is float32\[\], must be None"),
    "dtype": ("fp8_e4m3", {"value": jnp.zeros((12, 2, 16, 32))}, "value is float32.*float8_e4m3fn"),
    "shape": ("auto", {"value": jnp.zeros((12, 2, 16, 16))}, r"value is .*16\], must be .*32\]"),
    "negative": ("fp8_e5m2", {"value_scale": jnp.float32(-1)}, "value_scale=-1.0 must be positive"),
    "side": ("k8v4", {"value_scale": jnp.ones(())}, "value_scale is float32.*must be None"),
    "key's norm": ("k8v4", {"value_norm": None}, "value_norm is None, must be float16"),
    "int8's scale": ("int8", {"key_norm": None}, "key_norm is None, must be float16"),
    "integers": ("int8_v4", {"key": jnp.zeros((12, 2, 16, 32))}, "key is float32.*must be int8"),
    "packed": ("turbo_k3v2", {"key": jnp.zeros((12, 2, 16, 16), jnp.uint8)}, r"16, 12\]"),
    "dropped_tokens": (
        "auto",
        {"dropped_tokens": jnp.int32(-1)},
        "cache.dropped_tokens=-1 must not be negative",
    ),
}


@pytest.mark.parametrize("name", BROKEN)
def test_validate_names_what_is_broken(name):
    kind, changes, message = BROKEN[name]
    new(kind).validate()
    jax.jit(lambda c: c.validate())(new(kind))
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(new(kind), **changes).validate()


KEY = jnp.zeros((BATCH, 2, HEADS, HEAD_DIM))
ZERO = np.zeros(BATCH, np.int32)
init = functools.partial(paged.init_paged_cache, 4, 16, 1, 32)


def add(cache=None, key=KEY, value=KEY, tables=TABLES, lengths=ZERO, **options):
    return paged.append(
        new("auto") if cache is None else cache, key, value, tables, lengths, **options
    )


WRONG = {
    "page size": (
        ValueError,
        lambda: paged.init_paged_cache(4, 48, 1, 32),
        "page_size=48 must be one of 16, 32, 64, 128",
    ),
    "pages": (ValueError, lambda: paged.init_paged_cache(0, 16, 1, 32), "num_pages=0.*at least 1"),
    "fraction": (TypeError, lambda: paged.init_paged_cache(4.0, 16, 1, 32), "num_pages=4.0"),
    "head dim": (ValueError, lambda: paged.init_paged_cache(4, 16, 1, 36), "head_dim=36"),
    "kind": (ValueError, lambda: init(kv_dtype="int7"), "kv_dtype='int7' must be one of auto"),
    "dtype": (TypeError, lambda: init(dtype=jnp.int8), "int8 must be bfloat16"),
    "scale": (ValueError, lambda: init(kv_dtype="fp8_e4m3", key_scale=0.0), "key_scale=0.0.*posit"),
    "no scale": (TypeError, lambda: init(kv_dtype="fp8_e4m3", key_scale=None), "key_scale is None"),
    "scale of turbo4": (ValueError, lambda: init(value_scale=2.0), "value_scale=2.0 has no use"),
    "scale of int8": (
        ValueError,
        lambda: init(kv_dtype="int8", key_scale=2.0),
        "key_scale=2.0 has no use with kv_dtype='int8': only fp8 has one scale",
    ),
    "seed of int8": (ValueError, lambda: init(kv_dtype="int8", seed=1), "seed=1 has no use"),
    "seed of auto": (ValueError, lambda: init(kv_dtype="auto", seed=1), "seed=1 has no use"),
    "scale of values": (
        ValueError,
        lambda: init(kv_dtype="k8v4", key_scale=2.0, value_scale=3.0),
        "value_scale=3.0 has no use with kv_dtype='k8v4'",
    ),
    "head dim of 3 bits": (
        ValueError,
        lambda: paged.init_paged_cache(4, 16, 1, 12, kv_dtype="turbo_k4v3"),
        "head_dim=12 must be a multiple of 8 for codes of 3 bits",
    ),
    "head dim of values": (
        ValueError,
        lambda: paged.init_paged_cache(4, 16, 1, 36, kv_dtype="k8v4"),
        "head_dim=36 must be a power of two",
    ),
    "seed": (TypeError, lambda: init(seed=0.5), "seed=0.5 must be an integer"),
    "cache": (TypeError, lambda: add(KEY), "must be a PagedCache"),
    "key's dtype": (TypeError, lambda: add(new("auto", jnp.bfloat16)), "float32.*bfloat16"),
    "key's heads": (ValueError, lambda: add(key=KEY[:, :, :1], value=KEY[:, :, :1]), r"T, 2, 32\]"),
    "value": (ValueError, lambda: add(value=KEY[:, :1]), "value.shape.*must equal"),
    "tables": (ValueError, lambda: add(tables=TABLES[:2]), r"\(2, 3\) must be \[3, max_pages\]"),
    "flat tables": (ValueError, lambda: add(tables=TABLES[0]), r"must be \[3, max_pages\]"),
    "no pages": (ValueError, lambda: add(tables=TABLES[:, :0]), "no axis empty"),
    "tables' dtype": (TypeError, lambda: add(tables=TABLES * 1.0), "block_tables.dtype=float32"),
    "lengths": (ValueError, lambda: add(lengths=ZERO[:2]), r"lengths.shape=\(2,\) must be \(3,\)"),
    "lengths' dtype": (TypeError, lambda: add(lengths=ZERO * 1.0), "lengths.dtype=float32"),
    # jnp.asarray makes 0 of 2**32.
    "wide lengths": (
        ValueError,
        lambda: add(lengths=ZERO + np.int64(2**32)),
        "lengths holds 4294967296",
    ),
    "wide new": (
        ValueError,
        lambda: add(new_lengths=ZERO + np.int64(2**32)),
        "new_lengths holds 4294967296",
    ),
    "wide tables": (
        ValueError,
        lambda: add(tables=TABLES.astype(np.int64) + 2**32),
        r"block_tables\[0, 0\]=2147483647 is needed",
    ),
    "new": (ValueError, lambda: add(new_lengths=ZERO + 3), r"new_lengths=\[3, 3, 3\].*0 and 2"),
    "read": (TypeError, lambda: paged.gather(KEY, TABLES, ZERO), "must be a PagedCache"),
    "read dtype": (
        TypeError,
        lambda: paged.gather(new("auto"), TABLES, ZERO, dtype=jnp.int32),
        "dtype=int32 must be floating",
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_call_says_what_is_wrong(name):
    error, call, message = WRONG[name]
    with pytest.raises(error, match=message):
        call()
