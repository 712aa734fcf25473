"""The block lists of pooled attention, against loops over all blocks; wrong calls, the choice."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import turbojax as tj
from turbojax._registry import Implementation, Registry
from turbojax.attention.pooled import api, lists, operands, pooling, segments
from turbojax.attention.pooled.static import LEVELS, PooledOptions
from turbojax.attention.score_modifiers import ScoreModifiers
from turbojax.numerics import rows

# Query tokens, key tokens, block_q, block_kv, is_causal, query lengths, key lengths.
SHAPES = [
    (128, 128, 32, 32, False, None, None),
    (150, 190, 32, 32, True, None, None),
    (150, 150, 16, 64, True, None, None),
    (150, 150, 64, 16, True, None, None),
    (203, 70, 32, 16, True, None, None),
    (130, 133, 32, 32, True, (130, 64, 0), (133, 61, 0)),
    (130, 133, 32, 64, False, (31, 130, 1), (1, 133, 64)),
]


def draw(shape, batch=1, heads=2, seed=0, extra=()):
    tokens, size, block_q, block_kv = shape[:4]
    levels = (batch, heads, -(-tokens // block_q), -(-size // block_kv))
    return np.random.default_rng(seed).choice(np.array([0, *LEVELS, *extra], np.int8), levels)


def arguments(shape):
    tokens, size, block_q, block_kv, is_causal, query_lengths, key_lengths = shape
    found = [None if x is None else jnp.array(x, jnp.int32) for x in (query_lengths, key_lengths)]
    return ((tokens, size), tuple(found)), PooledOptions(
        is_causal, scale=1.0, block_q=block_q, block_kv=block_kv
    )


def sequences(shape):
    """Lengths of queries and keys of each sequence."""
    tokens, size, *_, query_lengths, key_lengths = shape
    return list(zip(query_lengths or [tokens], key_lengths or [size], strict=True))


def groups_of(j, level, block_kv, length):
    """(first, last valid) token of each group of a block that holds a token."""
    starts = range(j * block_kv, (j + 1) * block_kv, level)
    return [(t, min(t + level, length) - 1) for t in starts if t < length]


def sees(shape, i, group, query_length):
    """Positions of the queries of block `i` that see a group."""
    block_q, is_causal = shape[2], shape[4]
    rows = range(i * block_q, min((i + 1) * block_q, query_length))
    return [q for q in rows if not is_causal or group[1] <= q]


@pytest.mark.quick(2, slow=0)
@pytest.mark.parametrize("shape", SHAPES)
def test_lists_by_query_hold_what_a_loop_finds(shape):
    levels = draw(shape)
    rest, static = arguments(shape)
    found = jax.jit(functools.partial(lists.by_query, options=static), static_argnums=1)(
        jnp.asarray(levels), *rest
    )
    blocks, counts = np.asarray(found.blocks), np.asarray(found.counts)
    for b, (query_length, key_length) in enumerate(sequences(shape)):
        for n, i in np.ndindex(levels.shape[1:3]):
            want, complete = [], []
            for level in LEVELS:
                here = []
                for j in np.flatnonzero(levels[0, n, i] == level):
                    groups = groups_of(j, level, static.block_kv, key_length)
                    if any(sees(shape, i, group, query_length) for group in groups):
                        last = (j + 1) * static.block_kv - 1
                        all_see = not static.is_causal or last <= i * static.block_q
                        here.append((int(j), last < key_length and all_see))
                want += [j for j, _ in here]
                complete.append(sum(flag for _, flag in here))
                # The complete ones come first.
                assert [flag for _, flag in here] == sorted((f for _, f in here), reverse=True)
                assert len(here) == counts[b, n, i, LEVELS.index(level)]
            assert blocks[b, n, i, : len(want)].tolist() == want
            assert counts[b, n, i, 4:8].tolist() == complete
            assert counts[b, n, i, 8] == 0


@pytest.mark.slow
def test_a_level_that_is_none_is_counted():
    shape = SHAPES[0]
    levels = np.zeros((1, 1, 4, 4), np.int8)
    levels[0, 0, 2, 1] = 3
    rest, static = arguments(shape)
    counts = lists.by_query(jnp.asarray(levels), *rest, static).counts
    assert counts[0, 0, :, 8].tolist() == [0, 0, 1, 0]


# Each as one program: one by one their operations take longer to compile.
by_every_key = jax.jit(lists.by_every_key, static_argnums=(1, 2, 4))
by_key = jax.jit(lists.by_key, static_argnums=(1, 2, 3, 5))
merge_gradients = jax.jit(operands.merge_gradients, static_argnums=(2, 3))
unpool = jax.jit(pooling.unpool, static_argnums=(2, 3))


# A tile holds at most 16 blocks, so that of 64 rows wants blocks of 32.
@pytest.mark.quick(1, slow=0)
@pytest.mark.parametrize(("shape", "rows"), [*zip(SHAPES[::2], (32, 16, 16, 64), strict=True)])
def test_lists_by_key_hold_what_a_loop_finds(shape, rows):
    levels = draw(shape, seed=1)
    rest, static = arguments(shape)
    every = by_every_key(levels, rows, *rest, static)
    before = 0
    for level in LEVELS:
        found = by_key(levels, level, rows, *rest, static)
        tiles = found.queries.shape[2]
        assert tiles == -(-shape[1] // (rows * level))
        for x, y in zip(found, every, strict=True):
            np.testing.assert_array_equal(x, y[:, :, before : before + tiles])
        before += tiles
        for b, lengths in enumerate(sequences(shape)):
            for n, tile in np.ndindex(levels.shape[1], tiles):
                queries, counts = (np.asarray(x)[b, n, tile] for x in found)
                entries, masked = entries_of(shape, levels[0, n], level, rows, tile, lengths)
                assert queries[: counts[0]].tolist() == entries
                # What needs no mask is not masked for nothing, and what does, is.
                assert counts[1] >= masked
                assert counts[1] <= len(entries)
    assert every.queries.shape[2] == before


def entries_of(shape, levels, level, rows, tile, lengths):
    """Entries of a tile, and how many, the first ones, hold a pair that is not visible."""
    block_kv = shape[3]
    first, last = tile * rows * level, (tile + 1) * rows * level
    entries, masked = [], 0
    for i in range(levels.shape[0]):
        bits, hides = 0, False
        for j in range(levels.shape[1]):
            start, stop = max(first, j * block_kv), min(last, (j + 1) * block_kv)
            if start >= stop or levels[i, j] != level:
                continue
            whole = groups_of(j, level, block_kv, lengths[1])
            if not any(sees(shape, i, group, lengths[0]) for group in whole):
                continue
            bits |= 1 << (j - first // block_kv)
            queries = range(i * shape[2], min((i + 1) * shape[2], lengths[0]))
            for group in whole:
                if start <= group[0] < stop:
                    hides |= len(sees(shape, i, group, lengths[0])) < len(queries)
        if bits:
            entries.append(i << 16 | bits)
            if hides:
                masked = len(entries)
    return entries, masked


def test_a_tile_of_too_many_blocks_is_refused():
    levels = jnp.ones((1, 1, 1, 64), jnp.int8)
    with pytest.raises(ValueError, match="covers 32 blocks, must be <= 16"):
        lists.by_key(
            levels,
            8,
            64,
            (16, 1024),
            (None, None),
            PooledOptions(False, scale=1.0, block_q=16, block_kv=16),
        )


@pytest.mark.quick(1, slow=0)
@pytest.mark.parametrize(
    ("size", "lengths"), [(40, (13, 40)), (37, None), (1, None), (24, (0, 17))]
)
def test_merged_gradients_are_the_sum_of_the_adjoints(size, lengths):
    rng = np.random.default_rng(0)
    key_length = None if lengths is None else jnp.array(lengths, jnp.int32)
    # Kernels may append groups: here some, of NaN, which must not be looked at.
    parts = []
    for level in LEVELS:
        groups = -(-size // level)
        part = rng.normal(size=(2, 3, groups, 8)).astype(np.float32)
        parts.append(np.pad(part, ((0, 0), (0, 0), (0, 3), (0, 0))))
    got = merge_gradients(tuple(parts), key_length, size, jnp.float32)
    want = 0
    for level, part in zip(LEVELS, parts, strict=True):
        there = np.swapaxes(part[:, :, : -(-size // level)], 1, 2)
        want = want + unpool(there, operands.lengths(key_length, 2, size), size, level)
    assert got.shape == (2, size, 3, 8)
    np.testing.assert_allclose(got, want, rtol=2e-6, atol=2e-6)


def test_rows_of_the_gradient():
    rng = np.random.default_rng(0)
    out, d_out = (jnp.asarray(rng.normal(size=(2, 5, 3, 4)), jnp.float32) for _ in range(2))
    residual = jnp.asarray(rng.normal(size=(2, 5, 3)), jnp.float32).at[1, 2, 0].set(-jnp.inf)
    d_residual = jnp.asarray(rng.normal(size=(2, 5, 3)), jnp.float32).at[1, 2, 0].set(jnp.nan)
    spoiled = d_out.at[1, 2, 0, 1].set(jnp.nan)
    cleaned, lse, delta = (
        np.asarray(x) for x in rows.gradient_rows(out, residual, spoiled, d_residual, 8)
    )
    np.testing.assert_array_equal(cleaned, d_out.at[1, 2, 0].set(0))
    assert lse.shape == delta.shape == (2, 3, 8)
    want = np.sum(np.asarray(out, np.float64) * d_out, axis=-1) - np.asarray(d_residual)
    for b, t, n in np.ndindex(2, 5, 3):
        if (b, t, n) == (1, 2, 0):
            assert lse[b, n, t] == np.inf
            assert delta[b, n, t] == 0
        else:
            assert lse[b, n, t] == pytest.approx(float(residual[b, t, n]) / np.log(2), rel=1e-6)
            assert delta[b, n, t] == pytest.approx(float(want[b, t, n]), rel=1e-5, abs=1e-5)
    assert np.all(lse[:, :, 5:] == np.inf)
    assert np.all(delta[:, :, 5:] == 0)


# Query tokens, key tokens, block_q, block_kv, is_causal, rows of a tile.
PACKED = [(150, 150, 16, 16, True, 16), (150, 133, 32, 64, False, 32), (130, 150, 64, 16, True, 16)]


@pytest.mark.quick(slow=1)
@pytest.mark.parametrize("shape", PACKED)
def test_lists_of_packed_sequences(shape):
    """What nobody sees is not in them, and what comes first needs a mask, or none, as they say."""
    tokens, size, block_q, block_kv, is_causal, rows_ = shape
    rng = np.random.default_rng(1)
    ids = [
        np.stack([np.sort(rng.integers(0, 4, n)) for _ in range(2)]).astype(np.int32)
        for n in (tokens, size)
    ]
    shift, lengths = np.array([0, 21]), (np.array([tokens, 77]), np.array([size, 99]))
    modifiers = ScoreModifiers(
        query_offset=jnp.asarray(shift, jnp.int32),
        query_segment_ids=jnp.asarray(ids[0]),
        key_value_segment_ids=jnp.asarray(ids[1]),
    )
    given = tuple(jnp.asarray(x, jnp.int32) for x in lengths)
    asked = draw(shape, batch=2, seed=2)
    static = PooledOptions(is_causal, scale=1.0, block_q=block_q, block_kv=block_kv)
    levels = segments.attended(jnp.asarray(asked), *given, modifiers, block_q, block_kv)
    rest = ((tokens, size), given, static, modifiers)
    by_query = jax.jit(lists.by_query, static_argnums=(1, 3))(levels, *rest)
    every = by_every_key(levels, rows_, *rest)
    levels = np.asarray(levels, int)
    for b, n in np.ndindex(levels.shape[:2]):
        seen = np.zeros(levels.shape[2:], int)
        for i in range(levels.shape[2]):
            queries = range(i * block_q, min((i + 1) * block_q, lengths[0][b]))
            for j in range(levels.shape[3]):
                keys = range(j * block_kv, min((j + 1) * block_kv, lengths[1][b]))
                pairs = [(q, k) for q in queries for k in keys if ids[0][b, q] == ids[1][b, k]]
                if asked[b, n, i, j] == 0 or not pairs:
                    assert levels[b, n, i, j] == 0
                    continue
                mixed = len(set(ids[1][b, list(keys)])) > 1
                assert levels[b, n, i, j] == (1 if mixed else asked[b, n, i, j])
                groups = groups_of(j, levels[b, n, i, j], block_kv, lengths[1][b])
                visible = [
                    ids[0][b, q] == ids[1][b, first] and (not is_causal or last <= q + shift[b])
                    for q in queries
                    for first, last in groups
                ]
                # 1: in the lists, with a mask; 2: without one; 0: it may be in them.
                all_there = len(keys) == block_kv
                seen[i, j] = any(visible) * (1 + (all(visible) and all_there))
        for i in range(levels.shape[2]):
            blocks, counts = (np.asarray(x)[b, n, i] for x in by_query)
            begin = 0
            for number, level in enumerate(LEVELS):
                mine = blocks[begin : begin + counts[number]].tolist()
                begin += counts[number]
                assert {j for j in np.flatnonzero(seen[i]) if levels[b, n, i, j] == level} <= set(
                    mine
                )
                assert all(levels[b, n, i, j] == level for j in mine)
                complete = counts[number + 4]
                assert all(seen[i, j] == 2 for j in mine[:complete])
                assert all(seen[i, j] < 2 for j in mine[complete:])
        assert_key_lists(every, levels[b, n], seen, b, n, rows_, block_kv, size)


def assert_key_lists(every, levels, seen, b, n, rows_, block_kv, size):
    tile = 0
    for level in LEVELS:
        blocks = max(1, rows_ * level // block_kv)
        for u in range(-(-size // (rows_ * level))):
            queries, counts = (np.asarray(x)[b, n, tile] for x in every)
            tile += 1
            found = {}
            for place, entry in enumerate(queries[: counts[0]].tolist()):
                found[entry >> 16] = (entry & 0xFFFF, place < counts[1])
            first = u * rows_ * level // block_kv
            for i in range(levels.shape[0]):
                bits, masked = found.get(i, (0, True))
                for p in range(blocks):
                    j = first + p
                    is_listed = bits >> p & 1
                    if j < levels.shape[1] and levels[i, j] == level and seen[i, j]:
                        assert is_listed
                        assert masked or seen[i, j] == 2 or size % block_kv
                    elif is_listed:
                        assert levels[i, j] == level


QUERY, KEY = jnp.zeros((2, 40, 4, 16)), jnp.zeros((2, 70, 2, 16))
SOME_LEVELS = jnp.ones((2, 4, 2, 3), jnp.int8)


def attend(query=QUERY, key=KEY, value=None, levels=SOME_LEVELS, **kwargs):
    value = key if value is None else value
    kwargs = {"block_q": 32, "block_kv": 32, **kwargs}
    return tj.pooled_attention(query, key, value, levels, **kwargs)


def lengths(*values):
    return jnp.asarray(values, jnp.int32)


# The call, the error, and what its message must say: value, then requirement.
CASES = {
    "query's rank": (lambda: attend(QUERY[0]), ValueError, r"\(40, 4, 16\).*\[B, T, N, H\]"),
    "key's rank": (lambda: attend(key=KEY[0]), ValueError, r"\(70, 2, 16\).*\[B, S, K, H\]"),
    "value's shape": (lambda: attend(value=KEY[:, 1:]), ValueError, r"\(2, 69, 2, 16\).*\(2, 70"),
    "batches": (lambda: attend(QUERY[:1]), ValueError, r"\(1, 40.*\(2, 70.*batch"),
    "head dims": (lambda: attend(QUERY[..., :8]), ValueError, r"4, 8\).*2, 16\).*head dim"),
    "heads": (lambda: attend(QUERY[:, :, :3]), ValueError, "3 query.*multiple of 2"),
    "no keys": (lambda: attend(key=KEY[:, :0]), ValueError, "no axis empty"),
    "integers": (lambda: attend(QUERY.astype(jnp.int8)), TypeError, "int8.*bfloat16"),
    "key's dtype": (lambda: attend(key=KEY.astype(jnp.bfloat16)), TypeError, "bfloat16.*float32"),
    "value's dtype": (lambda: attend(value=KEY.astype(jnp.float16)), TypeError, "float16.*float32"),
    "float levels": (
        lambda: attend(levels=SOME_LEVELS.astype(jnp.float32)),
        TypeError,
        "levels.dtype=float32.*integer",
    ),
    "boolean levels": (
        lambda: attend(levels=SOME_LEVELS.astype(jnp.bool)),
        TypeError,
        "levels.dtype=bool.*integer",
    ),
    "levels' rank": (
        lambda: attend(levels=SOME_LEVELS[0]),
        ValueError,
        r"levels.shape=\(4, 2, 3\).*\(2 or 1, 4 or 1, 2, 3\)",
    ),
    "levels per KV head": (
        lambda: attend(levels=SOME_LEVELS[:, :2]),
        ValueError,
        r"levels.shape=\(2, 2, 2, 3\).*4 or 1",
    ),
    "levels' batch": (
        lambda: attend(levels=jnp.concatenate([SOME_LEVELS, SOME_LEVELS])),
        ValueError,
        r"levels.shape=\(4, 4, 2, 3\).*\(2 or 1",
    ),
    "rows of levels": (
        lambda: attend(levels=SOME_LEVELS[:, :, :1]),
        ValueError,
        r"levels.shape=\(2, 4, 1, 3\).*2, 3\).*blocks of 32 queries",
    ),
    "columns of levels": (
        lambda: attend(block_kv=64),
        ValueError,
        r"levels.shape=\(2, 4, 2, 3\).*2, 2\).*blocks of 64 keys",
    ),
    "level 3": (lambda: attend(levels=3 * SOME_LEVELS), ValueError, r"\[3\].*\(0, 1, 2, 4, 8\)"),
    "level -1": (lambda: attend(levels=-SOME_LEVELS), ValueError, r"\[-1\].*\(0, 1, 2, 4, 8\)"),
    "level that wraps around": (
        lambda: attend(levels=SOME_LEVELS.astype(jnp.int32) + 256),
        ValueError,
        r"\[257\].*\(0, 1, 2, 4, 8\)",
    ),
    "no block_q": (lambda: attend(block_q=0), ValueError, "block_q=0.*at least 1"),
    "no block_kv": (lambda: attend(block_kv=0), ValueError, "block_kv=0.*at least 1"),
    "block_kv": (lambda: attend(block_kv=36), ValueError, "block_kv=36.*multiple of 8"),
    "block_q's type": (lambda: attend(block_q=32.0), TypeError, "block_q=32.0.*integer"),
    "block_kv's type": (lambda: attend(block_kv=True), TypeError, "block_kv=True.*integer"),
    "scale's type": (lambda: attend(scale=jnp.ones(())), TypeError, "scale.*Python number"),
    "infinite scale": (lambda: attend(scale=np.inf), ValueError, "scale=inf.*finite"),
    "keys' length": (
        lambda: attend(key_value_seq_lengths=lengths(70, 71)),
        ValueError,
        r"key_value_seq_lengths=\[70, 71\].*between 0 and 70",
    ),
    "queries' length": (
        lambda: attend(query_seq_lengths=lengths(-1, 40)),
        ValueError,
        r"query_seq_lengths=\[-1, 40\].*between 0 and 40",
    ),
    "lengths' shape": (
        lambda: attend(key_value_seq_lengths=lengths(7)),
        ValueError,
        r"key_value_seq_lengths.shape=\(1,\).*\(2,\)",
    ),
    "lengths' dtype": (
        lambda: attend(query_seq_lengths=jnp.ones(2)),
        TypeError,
        "query_seq_lengths.dtype=float32.*integer",
    ),
    "unknown implementation": (
        lambda: attend(implementation="cuda"),
        ValueError,
        "implementation='cuda'.*one of",
    ),
    "an implementation it has not": (
        lambda: attend(implementation="jax_triton"),
        NotImplementedError,
        "pooled_attention has no implementation='jax_triton'; it has .*'xla'",
    ),
}


@pytest.mark.quick(22, slow=0)
@pytest.mark.parametrize("name", CASES)
def test_error_names_value_and_requirement(name):
    call, error, words = CASES[name]
    with pytest.raises(error, match=words):
        call()


def test_the_good_call_is_good():
    """So that each case above fails for its own reason."""
    out, residual = attend(return_residual=True)
    np.testing.assert_allclose(residual, np.log(70), rtol=1e-6)
    assert (np.asarray(out) == 0).all()


def test_shapes_are_checked_under_jit_too():
    with pytest.raises(ValueError, match=r"levels.shape=\(2, 4, 1, 3\)"):
        jax.jit(lambda levels: attend(levels=levels))(SOME_LEVELS[:, :, :1])


def test_lengths_beyond_the_arrays_act_as_the_nearest_bound_under_jit():
    call = jax.jit(
        lambda a, b: attend(
            QUERY + 1, KEY + 1, query_seq_lengths=a, key_value_seq_lengths=b, return_residual=True
        )
    )
    got = call(lengths(99, -3), lengths(999, 70))
    want = call(lengths(40, 0), lengths(70, 70))
    jax.tree.map(np.testing.assert_array_equal, got, want)
    got, want = (call(lengths(40, 40), lengths(n, 70))[1] for n in (-5, 0))
    np.testing.assert_array_equal(got, want)


def ones(query, key, value, levels, query_length, key_length, *, options, modifiers):
    """Stands for a kernel."""
    return jnp.ones_like(query), jnp.ones(query.shape[:3])


def never(**_):
    return "it never can"


def pretend(monkeypatch, registry, *implementations):
    old = getattr(api, registry)
    pretended = {x.name for x in implementations}
    rest = tuple(x for x in old.implementations if x.name not in pretended)
    monkeypatch.setattr(api, registry, Registry(old.op, (*implementations, *rest)))


def test_a_name_never_falls_back_nor_does_its_gradient(monkeypatch):
    """What cannot be differentiated is refused when it is called."""
    pretend(monkeypatch, "FORWARD", Implementation("triton", ones))
    pretend(monkeypatch, "GRADIENT", Implementation("triton", ones, never))
    words = "^the gradient of pooled_attention cannot run here: triton: it never can"
    with pytest.raises(NotImplementedError, match=words):
        attend(implementation="triton")
    assert (np.asarray(attend()) == 1).all()
    assert (np.asarray(attend(implementation="xla")) == 0).all()
    pretend(monkeypatch, "FORWARD", Implementation("triton", ones, never))
    with pytest.raises(NotImplementedError, match="^pooled_attention cannot run here: triton: it"):
        attend(implementation="triton")


def test_what_implementations_are_asked(monkeypatch):
    """Everything there is to know without looking at values."""
    asked = []

    def unsupported(*, query, key, value, levels, options, modifiers):
        asked.append((query.shape, key.shape, value.shape, levels.dtype, options))
        assert not modifiers.given
        return "not now"

    pretend(monkeypatch, "FORWARD", Implementation("triton", ones, unsupported))
    pretend(monkeypatch, "GRADIENT", Implementation("triton", ones, unsupported))
    attend(levels=SOME_LEVELS.astype(jnp.int32), is_causal=True, scale=2)
    static = api.PooledOptions(block_q=32, block_kv=32, scale=2.0, is_causal=True)
    want = (QUERY.shape, KEY.shape, KEY.shape, jnp.int8, static)
    assert asked == [want, want]
