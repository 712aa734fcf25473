"""What the tests of paged attention share: pools with poisoned pages, and a float64 oracle."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np

import tests.oracles.paged as stored_oracle
from tests.oracles.paged import code_bits, fp8_names, has_codes, int8_sides
from turbojax.caches.paged import paged_attention
from turbojax.caches.paged import pool as paged

UNIT = 2.0**-24
# Sides stored unlike each other: between them, codes of all numbers of bits on either.
MIXED = ("k8v4", "turbo_k4v2", "turbo_k3v4", "turbo_k2v3")
KV_DTYPES = ("auto", "fp8_e4m3", "fp8_e5m2", "int8", "turbo4", "int8_v4", *MIXED)
STATIC = ("scale", "local_window_size", "logits_soft_cap", "implementation", "return_residual")
attend = jax.jit(paged_attention, static_argnames=STATIC)
append = jax.jit(paged.append)


def normal(seed, shape, dtype=jnp.float32):
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape), dtype)


def place(lengths, page_size, num_pages, seed=0, width=None):
    """Block tables of sequences of these lengths on pages drawn at random; -1 past their end."""
    needed = [-(-n // page_size) for n in lengths]
    width = max(1, *needed) if width is None else width
    tables = np.full((len(lengths), width), -1, np.int32)
    pages = np.random.default_rng(seed).permutation(num_pages)
    for b, n in enumerate(needed):
        tables[b, :n], pages = pages[:n], pages[n:]
    return tables


def poisoned(cache, seed=5):
    """Every page full of NaN, and of random numbers where what is stored cannot be NaN."""
    nan = functools.partial(jax.tree.map, lambda x: jnp.full_like(x, jnp.nan))

    def side(x):
        if jnp.issubdtype(x.dtype, jnp.floating):
            return nan(x)
        numbers = np.random.default_rng(seed).integers(0, 256, x.shape).astype(np.uint8)
        return jnp.asarray(numbers.view(x.dtype))

    return dataclasses.replace(
        cache,
        key=side(cache.key),
        value=side(cache.value),
        key_norm=nan(cache.key_norm),
        value_norm=nan(cache.value_norm),
    )


@functools.cache
def filled(kv_dtype, lengths, heads=2, head_dim=32, page_size=16, **given):
    """A pool that holds sequences of these lengths, and their tables.

    Of the keys a few channels are loud, as they are in models. What belongs to no sequence is
    poisoned. `given`: `dtype`, `num_pages`, `width` of the tables and `seed` of where pages lie.
    """
    dtype, width = given.get("dtype", jnp.float32), given.get("width")
    num_pages = given.get("num_pages", sum(-(-n // page_size) for n in lengths) + 3)
    shape = (len(lengths), max(1, *lengths), heads, head_dim)
    loud = np.where(np.random.default_rng(head_dim).random(head_dim) < 0.1, 4.0, 1.0)
    key = (np.asarray(normal(1, shape)) * loud).astype(jnp.dtype(dtype))
    scales = zip(("key_scale", "value_scale"), (0.07, 0.03), fp8_names(kv_dtype), strict=True)
    options = {name: scale for name, scale, is_fp8 in scales if is_fp8}
    cache = paged.init_paged_cache(
        num_pages, page_size, heads, head_dim, kv_dtype=kv_dtype, dtype=dtype, **options
    )
    tables = place(lengths, page_size, num_pages, given.get("seed", 0), width)
    cache = append(
        poisoned(cache),
        jnp.asarray(key),
        normal(2, shape, dtype),
        tables,
        np.zeros(len(lengths), np.int32),
        new_lengths=jnp.asarray(lengths, jnp.int32),
    )
    assert int(cache.dropped_tokens) == 0
    return cache, jnp.asarray(tables)


def stored(cache, tables, b, length):
    """Keys and values of sequence `b` in float64 ``[length, K, H]``, written independently."""
    pages = np.asarray(tables)[b, : -(-length // cache.page_size)]

    def tokens(x):
        x = np.asarray(x)[pages]
        return np.moveaxis(x, 1, 2).reshape(-1, x.shape[1], *x.shape[3:])[:length]

    def dense(data, norm, scale, bits):
        x = tokens(data)
        if bits is None and norm is not None:
            return x * tokens(norm)[..., None].astype(np.float64)
        if bits is None:
            return x.astype(np.float64) * (1.0 if scale is None else float(scale))
        codes = stored_oracle.unpacked(x, bits, cache.head_dim)
        rotated = stored_oracle.rotated_values(codes, tokens(norm), bits)
        signs = np.sign(np.asarray(cache.rotation.matrix(), np.float64))
        return rotated @ (signs / np.sqrt(cache.head_dim))

    key_bits, value_bits = code_bits(cache.kv_dtype)
    return (
        dense(cache.key, cache.key_norm, cache.key_scale, key_bits),
        dense(cache.value, cache.value_norm, cache.value_scale, value_bits),
    )


def oracle(query, cache, tables, lengths, *, weight_unit=0.0, query_unit=0.0, **options):
    """Outputs, log-sum-exps and how far float32 may be from them.

    A score is a sum of `H` products, each rounded, times scales: off by ``(H + 8) * 2**-24`` of the
    product of the vectors' lengths, which no sum of absolute values exceeds in whatever basis (a
    butterfly of the codes' rotation adds a rounding each), and by `query_unit` of it where queries
    are rounded. An exponential makes that a relative error of the weight, of which `weight_unit` is
    lost too. Sums over tokens round once a term, the exponential and its argument a few times.
    Where values are codes, an error of weights spreads over the channels when it is rotated back,
    but keeps its length: outputs' slack is that of whole vectors then, the same in each channel.
    """
    q = np.asarray(query, np.float64)
    batch, count, heads, dim = q.shape
    scale, soft_cap = options.get("scale"), options.get("logits_soft_cap")
    window, real = options.get("local_window_size"), options.get("query_seq_lengths")
    scale = dim**-0.5 if scale is None else scale
    out, slack = np.zeros(q.shape), np.zeros(q.shape)
    lse, lse_slack = np.full(q.shape[:3], -np.inf), np.zeros(q.shape[:3])
    for b in range(batch):
        key, value = stored(cache, tables, b, int(lengths[b]))
        n = count if real is None else int(real[b])
        for t, h in np.ndindex(n, heads):
            position = int(lengths[b]) - n + t
            first = 0 if window is None else max(0, position - window[0])
            if position < 0:
                continue
            k = key[first : position + 1, h // (heads // key.shape[1])]
            v = value[first : position + 1, h // (heads // key.shape[1])]
            score = scale * k @ q[b, t, h]
            size = abs(scale) * np.linalg.norm(k, axis=-1) * np.linalg.norm(q[b, t, h])
            error = ((dim + 24) * UNIT + query_unit) * size
            if soft_cap is not None:
                score = soft_cap * np.tanh(score / soft_cap)
                error = error + 16 * UNIT * soft_cap
            top = score.max()
            p = np.exp(score - top)
            error = error + (np.abs(score - top) + np.abs(top) + 8 + len(k)) * 4 * UNIT
            out[b, t, h] = p @ v / p.sum()
            mass, mean = np.abs(v), np.abs(out[b, t, h])
            if code_bits(cache.kv_dtype)[1]:
                mass = np.linalg.norm(v, axis=-1, keepdims=True)
                mean = np.linalg.norm(out[b, t, h])
            # Weights below the normal range of float16 are off by that of its smallest number.
            loss = p * (error + weight_unit) + (2.0**-25 if weight_unit else 0)
            if weight_unit and int8_sides(cache.kv_dtype)[1]:
                # On Hopper weights times scales are integers of 15 bits, relative to the largest.
                scales = np.maximum(np.abs(v).max(axis=-1), 1e-30)
                loss = loss + 2.0**-15 * (p * scales).max() / scales
            spread = loss @ mass + (p @ error + 16 * UNIT * p.sum()) * mean
            slack[b, t, h] = spread / p.sum()
            lse[b, t, h] = top + np.log(p.sum())
            lse_slack[b, t, h] = error.max() + 4 * UNIT * (1 + np.abs(lse[b, t, h]))
    return out, slack, lse, lse_slack


def assert_matches_oracle(
    query, cache, tables, lengths, *, units=(0.0, 0.0), call=attend, **options
):
    """Within the derived bound; outputs in the query's dtype."""
    lengths = np.asarray(lengths, np.int32)
    want, slack, want_lse, lse_slack = oracle(
        query, cache, tables, lengths, weight_unit=units[0], query_unit=units[1], **options
    )
    if options.get("query_seq_lengths") is not None:
        options["query_seq_lengths"] = jnp.asarray(options["query_seq_lengths"], jnp.int32)
    out, lse = call(query, cache, tables, lengths, return_residual=True, **options)
    assert (out.dtype, out.shape) == (query.dtype, query.shape)
    assert (lse.dtype, lse.shape) == (jnp.float32, query.shape[:3])
    own = 0 if query.dtype == jnp.float32 else float(jnp.finfo(query.dtype).eps)
    error, rounding = np.abs(np.asarray(out, np.float64) - want), own * (np.abs(want) + 1e-3)
    if code_bits(cache.kv_dtype)[1]:
        error, rounding, want = (np.linalg.norm(x, axis=-1) for x in (error, rounding, want))
        slack = slack[..., 0]
    excess = error - slack - rounding
    assert excess.max() <= 0, f"beyond the derived tolerance by {excess.max()}"
    lse, finite = np.asarray(lse, np.float64), np.isfinite(want_lse)
    np.testing.assert_array_equal(lse[~finite], want_lse[~finite])
    assert (np.abs(lse[finite] - want_lse[finite]) <= lse_slack[finite]).all()
    # The bound is small.
    typical = np.sqrt(np.mean(np.square(want)))
    assert np.median(slack) <= 0.25 * typical + 1e-30, (np.median(slack), typical)


def kernel_units(cache):
    """What a kernel's rounding of weights and of queries costs; see `oracle`.

    Weights go to the values' dtype, to float16 for fp8, and times norms or scales to bfloat16 for
    codes and int8, all to nearest. Queries go to float16 relative to their largest element: exact
    for those of 16 bits that matter, unless they were rotated, for keys that are codes.
    """
    is_float32 = cache.dtype == jnp.float32
    if cache.kv_dtype == "auto":
        # Three tf32 products leave out that of both low parts.
        return (2.0**-20, 2.0**-20) if is_float32 else (float(jnp.finfo(cache.dtype).eps) / 2, 0.0)
    key_bits, value_bits = code_bits(cache.kv_dtype)
    int8_key, int8_value = int8_sides(cache.kv_dtype)
    # Of int8 keys on Hopper as for codes: 15 bits relative to the largest element.
    query_unit = 2.0**-12 if is_float32 or key_bits or int8_key else 2.0**-20
    has_norms = value_bits or int8_value
    return 2.0**-9 if has_norms else 2.0**-12, query_unit


# Lengths (about tiles, parts and pages, and none), KV heads, head dim, query heads and tokens.
SHAPES = {
    "several, two parts": ((1100, 1024, 3), 1, 32, 2, 5),
    "one query": ((200, 64, 1, 0), 2, 64, 4, 1),
    "head dim 16": ((130, 256), 2, 16, 2, 2),
    "head dim 80": ((50, 129), 1, 80, 7, 1),
    "head dim 96": ((65, 16), 2, 96, 4, 3),
    "head dim 256": ((70, 2), 2, 256, 2, 3),
    "heads of their own": ((40, 30), 3, 48, 3, 4),
    "many rows": ((140, 33), 1, 32, 4, 21),  # the first queries before a tile's end
}


WINDOW = {"local_window_size": (40, 0)}
OPTIONS = {
    "several": {"scale": 0.7, "logits_soft_cap": 3.0, "query_seq_lengths": (3, 1, 0, 2), **WINDOW},
    "scale": {"scale": 0.7},
    "negative scale": {"scale": -0.3},
    "scale of zero": {"scale": 0.0},
    "soft cap": {"logits_soft_cap": 3.0},
    "window": WINDOW,
    "window past a part": {"local_window_size": (60, 5), "long": True},
    "padding": {"query_seq_lengths": (3, 1, 0, 2)},
}


def options_of(name, kv_dtype, dtype=jnp.float32, head_dim=None):
    """A call's arguments and options; lengths differ from the queries' in all ways."""
    head_dim = head_dim or (48 if has_codes(kv_dtype) else 40)
    options = dict(OPTIONS[name])
    lengths = (1111, 70, 0, 2) if options.pop("long", False) else (150, 7, 0, 2)
    cache, tables = filled(kv_dtype, lengths, 2, head_dim, dtype=dtype)
    query = normal(4, (4, 3, 4, cache.head_dim), dtype)
    return (query, cache, tables, lengths), options


def spoil(cache, tables, b, head, position, side="key"):
    """The pool with a NaN in one token of sequence `b`."""
    page, slot = int(tables[b, position // cache.page_size]), position % cache.page_size
    has_norm = getattr(cache, f"{side}_norm") is not None
    name = f"{side}_norm" if has_norm else side
    array = getattr(cache, name)
    at = (page, head, slot) if has_norm else (page, head, slot, 3)
    return dataclasses.replace(cache, **{name: array.at[at].set(jnp.nan)})


def check_nan(call, kv_dtype, dtype=jnp.float32, head_dim=32):
    """A key's NaN reaches what attends to it, a value's no log-sum-exp, a query's itself alone."""
    lengths = np.asarray((150, 140), np.int32)
    clean, tables = filled(kv_dtype, (150, 140), head_dim=head_dim, dtype=dtype)

    def nan_of(query, cache, **options):
        out, lse = call(query, cache, tables, lengths, return_residual=True, **options)
        return np.asarray(jnp.isnan(out)).any(-1), np.isnan(np.asarray(lse))

    query = normal(7, (2, 3, 4, head_dim), dtype)
    none = np.zeros((2, 3, 4), bool)
    assert not nan_of(query, clean)[0].any()
    cache = spoil(spoil(clean, tables, 0, 1, 148), tables, 1, 0, 139, "value")
    rows, lse = nan_of(query, cache)
    want = none.copy()
    want[0, 1:, 2:] = True  # queries stand at 147, 148 and 149
    np.testing.assert_array_equal(lse, want)
    want[1, 2, :2] = True  # at 139 the last of 137, 138 and 139
    np.testing.assert_array_equal(rows, want)
    # The first query alone is near enough.
    rows, _ = nan_of(query, spoil(clean, tables, 0, 0, 100, "value"), local_window_size=(47, 0))
    want = none.copy()
    want[0, 0, :2] = True
    np.testing.assert_array_equal(rows, want)
    for broken in (jnp.inf, jnp.nan):
        rows, _ = nan_of(query.at[1, 2, 3, 0].set(broken), clean)
        want = none.copy()
        want[1, 2, 3] = True
        np.testing.assert_array_equal(rows, want)


def equal(got, want):
    """To the bit, NaN included."""
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_array_equal(
            np.asarray(a.astype(jnp.float32)), np.asarray(b.astype(jnp.float32))
        )


def check_neighbours_and_places(call, kv_dtype, dtype=jnp.float32, head_dim=32):
    """Batch composition, where pages lie and a wider table change no bit of a sequence."""
    lengths = (1090, 70, 129)
    given = {"head_dim": head_dim, "dtype": dtype, "num_pages": 120}
    cache, tables = filled(kv_dtype, lengths, **given)
    query = normal(12, (3, 2, 4, head_dim), dtype)
    want = call(query, cache, tables, np.asarray(lengths, np.int32), return_residual=True)
    for b, n in enumerate(lengths):
        alone = call(
            query[b : b + 1],
            cache,
            tables[b : b + 1],
            np.asarray([n], np.int32),
            return_residual=True,
        )
        equal(alone, [x[b : b + 1] for x in want])
    order = np.asarray([2, 0, 1])
    reordered = call(
        query[order],
        cache,
        tables[order],
        np.asarray(lengths, np.int32)[order],
        return_residual=True,
    )
    equal(reordered, [x[order] for x in want])
    for moved, places in (
        filled(kv_dtype, lengths, **given, seed=77),
        filled(kv_dtype, lengths, **given, width=200),
    ):
        got = call(query, moved, places, np.asarray(lengths, np.int32), return_residual=True)
        equal(got, want)


def without_dead_pages(cache, tables, lengths, counts, left, broken=-1):
    """Tables without the pages before every query's window, and the pool with those poisoned.

    Poisoned is all that the tables do not name then; also what entries of no page stand for where
    they are brought into the pool.
    """
    size, tables = cache.page_size, np.array(tables)
    first = np.maximum(np.asarray(lengths) - np.asarray(counts) - left, 0) // size
    for row, dead, length in zip(tables, first, lengths, strict=True):
        row[:dead] = broken
        row[-(-int(length) // size) :] = broken
    unused = np.setdiff1d(np.arange(cache.num_pages), tables)
    arrays = {
        name: x.at[unused].set(jnp.nan)
        for name in ("key", "value", "key_norm", "value_norm")
        if (x := getattr(cache, name)) is not None and jnp.issubdtype(x.dtype, jnp.floating)
    }
    return dataclasses.replace(cache, **arrays), jnp.asarray(tables), first


def check_windowed_tables(call, kv_dtype, dtype=jnp.float32, head_dim=32, tokens=2):
    """Pages before all windows may be anything, to the bit; one that a query sees may not."""
    lengths, counts, left = (1111, 150, 33, 300), (tokens, tokens // 2, tokens, 0), 40
    cache, tables = filled(kv_dtype, lengths, 2, head_dim, dtype=dtype)
    query = normal(31, (4, tokens, 4, head_dim), dtype)
    given = {
        "query_seq_lengths": jnp.asarray(counts, jnp.int32),
        "local_window_size": (left, 0),
        "return_residual": True,
    }
    held = np.asarray(lengths, np.int32)
    want = call(query, cache, tables, held, **given)
    assert not any(np.isnan(np.asarray(x, np.float32)).any() for x in want)
    for broken in (-1, cache.num_pages, 2**31 - 1):
        poor, dead, first = without_dead_pages(cache, tables, lengths, counts, left, broken)
        assert (first > 1).sum() == 3
        equal(call(query, poor, dead, held, **given), want)
        # The first page that is needed, of the sequence with two queries: its window begins there.
        for at in (first[0], first[1]):
            b = int(at != first[0])
            got = call(query, poor, dead.at[b, at].set(broken), held, **given)
            for x, y in zip(got, want, strict=True):
                is_nan = np.isnan(np.asarray(x, np.float32)).reshape(4, -1)
                assert is_nan[b].all()
                assert is_nan.sum() == is_nan[b].sum()
                equal(np.delete(np.asarray(x), b, 0), np.delete(np.asarray(y), b, 0))


def check_chunks(call, kv_dtype, dtype=jnp.float32, head_dim=32, group=2):
    """A prompt in chunks of any size, down to single tokens: the same bits of every query."""
    length, count, chunk = 1030, 20, (1, 3, 16)
    cache, tables = filled(kv_dtype, (length,), head_dim=head_dim, dtype=dtype)
    query = normal(13, (1, count, 2 * group, head_dim), dtype)
    whole = call(query, cache, tables, np.asarray([length], np.int32), return_residual=True)
    start = 0
    for size in chunk:
        stop = start + size
        # Padded to the largest chunk, as an engine does.
        padded = jnp.zeros((1, 16, 2 * group, head_dim), dtype)
        padded = padded.at[:, :size].set(query[:, start:stop])
        held = np.asarray([length - count + stop], np.int32)
        got = call(
            padded,
            cache,
            tables,
            held,
            query_seq_lengths=jnp.asarray([size], jnp.int32),
            return_residual=True,
        )
        equal([x[:, :size] for x in got], [w[:, start:stop] for w in whole])
        if size == 1:  # decoding
            got = call(query[:, start:stop], cache, tables, held, return_residual=True)
            equal(got, [w[:, start:stop] for w in whole])
        start = stop
    assert start == count


def check_donated(call, kv_dtype, dtype=jnp.float32, head_dim=32):
    """Append and attend in one program that reuses the pool's memory, token by token."""
    cache, tables = filled(kv_dtype, (40, 7), head_dim=head_dim, dtype=dtype)
    cache = jax.tree.map(jnp.copy, cache)

    @functools.partial(jax.jit, donate_argnums=0)
    def step(cache, query, key, value, lengths):
        cache = paged.append(cache, key, value, tables, lengths)
        return cache, call(query, cache, tables, lengths + 1)

    for t in range(3):  # within pages that are held
        lengths = jnp.asarray((40 + t, 7 + t), jnp.int32)
        query, key, value = (
            normal(30 + 3 * t + i, (2, 1, n, head_dim), dtype) for i, n in enumerate((4, 2, 2))
        )
        cache, got = step(cache, query, key, value, lengths)
        equal(got, call(query, cache, tables, lengths + 1))
        units = kernel_units(cache) if call is not attend else (0.0, 0.0)
        assert_matches_oracle(query, cache, tables, lengths + 1, units=units, call=call)
