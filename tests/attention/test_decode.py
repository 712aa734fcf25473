"""The contract of `decode`, and of `prefill`: oracle, options, NaN.

What a cache holds is held to its own oracle elsewhere: here attention over what `dequantize` reads
is compared with the float64 oracle.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import turbojax as tj
from tests import oracles
from tests.attention.attention_helpers import EXACT, MODES, SAS_E
from tests.attention.decode_helpers import (
    BASE,
    BATCH,
    HEAD_DIM,
    HEADS,
    KV_HEADS,
    SOFTMAXES,
    STATIC,
    append,
    assert_matches_oracle,
    decode,
    dequantized,
    empty,
    filled,
    lengths_of,
    queries,
    random,
    splits,
    store,
    stored,
    tokens,
    under,
)
from tests.caches.cache_helpers import assert_same_bits
from tests.contracts.implementations import ON_CPU, interpreted, kernel_is_slow


def modes(cases):
    return pytest.mark.parametrize(("implementation", "mode"), cases)


# What is multiplied is int8, or not rounded: programs that most tests of four queries share.
both_numbers = modes([("triton", "int8"), ("xla", "float"), ("xla", "int8")])
# The same for tests of one query.
some_modes = modes([("xla", "int8"), ("xla", "float"), ("triton", "int8")])
# For tests of bits, which compile with all optimizations.
bits = modes([("xla", "int8"), ("xla", "float"), ("triton", "float"), ("triton", "int8")])
SMALL = (("block_q", 16), ("block_kv", 16), ("buffer_size", 16))

# Against the oracle ------------------------------------------------------------------------------


FAST = [
    ("int8", "sas-e", "xla"),
    ("float", "sas-e", "xla"),
    ("int8", "sas-e", "triton"),
    ("float", "exact", "triton"),
]
REST = [
    ("int8", "exact", "triton"),
    ("int8", "sas-2", "triton"),
    ("int8", "exact", "xla"),
]


@pytest.mark.quick(1, slow=0)
@pytest.mark.parametrize(("mode", "softmax", "implementation"), [*FAST, *REST])
def test_equals_the_oracle(implementation, mode, softmax):
    """Blocks, buffer, or both; mixed 2- and 4-bit heads; the last four tokens' queries."""
    assert_matches_oracle(queries(4), stored(mode, SOFTMAXES[softmax]), implementation)


@pytest.mark.quick(1, slow=0)
@some_modes
def test_one_query_equals_the_oracle(implementation, mode):
    assert_matches_oracle(queries(1), stored(mode), implementation)


@kernel_is_slow
def test_every_8_bit_mode_decodes_in_int8(implementation):
    """The mode is that of whole prompts; what a cache stores are integers."""
    want = decode(queries(1), stored("int8"), implementation)
    for mode in ("int8_fp8", "fp8"):
        got = decode(queries(1), stored(mode), implementation)
        for a, b in zip(got, want, strict=True):
            np.testing.assert_array_equal(a, b)


OPTIONS = {
    "several": {"logits_soft_cap": 3.0, "local_window_size": (40, 0), "scale": 0.3},
    "soft cap": {"logits_soft_cap": 3.0},
    "window": {"local_window_size": (40, 0)},
    "narrow window, scale": {"local_window_size": 3, "scale": 0.3},
    "negative scale": {"scale": -0.3},
    "no scale": {"scale": 0.0},
}


@pytest.mark.quick(first=1, slow=0)
@pytest.mark.parametrize(
    ("name", "implementation"),
    [
        ("several", "xla"),
        ("soft cap", "xla"),
        ("narrow window, scale", "xla"),
        ("no scale", "xla"),
        ("negative scale", "triton"),
        ("window", "triton"),
    ],
)
def test_options(name, implementation):
    assert_matches_oracle(queries(4), stored(), implementation, **OPTIONS[name])


@pytest.mark.quick(1)
@pytest.mark.parametrize(
    ("implementation", "dtype"), [("xla", jnp.bfloat16), ("triton", jnp.float16)]
)
def test_half_precision(implementation, dtype):
    cache = filled(SMALL, (70, 3), (0, 0), KV_HEADS, HEAD_DIM, dtype=dtype)
    query = queries(2, 8, 2, dtype=dtype)
    assert_matches_oracle(query, under(cache), implementation)


HALF = (("num_low_bit_key_heads", 1), ("num_low_bit_value_heads", 1))
# Configuration; (prompt, added) of each sequence; query heads, KV heads, head dim, queries; rest.
CASES = {
    "several tokens, window": (
        (*SMALL, *HALF, ("low_bits", 3)),
        [(100, 9), (20, 2), (0, 2)],
        (4, 2, 64, 3),
        {"local_window_size": (25, 0)},
    ),
    "long blocks, symmetric window": (
        (("block_kv", 128), ("buffer_size", 128), ("key_bits", 3), ("value_bits", 3)),
        [(300, 60)],
        (2, 2, 128, 1),
        {"local_window_size": 150},
    ),
    "ragged": (HALF, [(70, 30), (0, 40), (0, 0), (64, 0)], (4, 2, 80, 1), {}),
    "wide, eight queries a key, soft cap, scale": (
        (("block_kv", 32), ("buffer_size", 64), ("key_bits", 2), ("value_bits", 2)),
        [(90, 20)],
        (8, 1, 256, 1),
        {"logits_soft_cap": 4.0, "scale": 0.2},
    ),
    "mixed bits, long buffer": (
        (
            ("value_bits", 3),
            ("num_low_bit_key_heads", 3),
            ("num_low_bit_value_heads", 1),
            ("buffer_size", 128),
        ),
        [(0, 200), (140, 7)],
        (4, 4, 64, 2),
        {},
    ),
}
GRID = [
    ("several tokens, window", "xla", "int8", "exact"),
    ("long blocks, symmetric window", "xla", "fp8", "sas-e"),
    ("ragged", "triton", "int8", "sas-2"),
    ("wide, eight queries a key, soft cap, scale", "triton", "int8_fp8", "sas-e"),
    ("mixed bits, long buffer", "triton", "float", "sas-2"),
]


def test_the_grid_meets_every_mode_and_softmax():
    cases, implementations, of_modes, softmaxes = map(set, zip(*GRID, strict=True))
    assert (cases, implementations) == (set(CASES), set(ON_CPU))
    assert (of_modes, softmaxes) == (set(MODES), set(SOFTMAXES))


@pytest.mark.quick(slow=1)
@pytest.mark.parametrize(("case", "implementation", "mode", "softmax"), GRID)
def test_shapes_equal_the_oracle(case, implementation, mode, softmax):
    """Other heads, head dims, blocks, buffers and bits, after a prompt and appends."""
    fields, sequences, (heads, kv_heads, head_dim, count), options = CASES[case]
    cache = filled(fields, *zip(*sequences, strict=True), kv_heads, head_dim)
    query = queries(count, 1, len(sequences), heads, head_dim)
    cache = under(cache, mode, SOFTMAXES[softmax])
    assert_matches_oracle(query, cache, implementation, **options)


@pytest.mark.quick(slow=1)
@pytest.mark.parametrize(("implementation", "window"), [("xla", None), ("triton", 300)])
def test_long_caches(implementation, window):
    """Thousands of tokens, more than are read at a time, in a cache not filled to its end."""
    cache = under(filled((), (0, 0), (2430, 1100), 1, 64, max_length=2600))
    query = queries(1, 2, 2, 2)
    assert_matches_oracle(query, cache, implementation, local_window_size=window)


@pytest.mark.quick(first=1, slow=0)
@pytest.mark.parametrize("left", [75, 74, 73])
def test_windows_that_end_between_what_is_read_at_a_time(left):
    """Places in blocks begin after the first token: position 1,024 is in the first 1,024 places."""
    cache = under(filled((("block_kv", 8),), (0,), (1100,), 1, 64, max_length=1104))
    query = queries(1, 2, 1, 2)
    assert_matches_oracle(query, cache, "xla", local_window_size=(left, 0))


def test_blocks_narrower_than_a_kernels_tile():
    """A tile of the buffer has padding then, where the next block's tokens lie.

    The window begins with the last token of a block, the sixteenth after the first token.
    """
    cache = under(filled((("block_kv", 16),), (0,), (61,), 1, 64, max_length=64))
    assert cache.buffer_lengths.tolist() == [29]
    assert_matches_oracle(queries(1, 2, 1, 2), cache, "triton", local_window_size=(44, 0))


# Edges -------------------------------------------------------------------------------------------


@kernel_is_slow
def test_queries_before_the_beginning(implementation):
    """More queries than tokens: those that come before the first token see nothing."""
    query = queries(20, 9)
    assert_matches_oracle(query, stored(), implementation)
    out, lse = decode(query, stored(), implementation)
    np.testing.assert_array_equal(out[2, :6], 0)
    assert np.isneginf(lse[2, :6]).all()
    assert np.isfinite(lse[2, 6:]).all()


@pytest.mark.quick(1)
@some_modes
def test_an_empty_cache(implementation, mode):
    cache = empty(dataclasses.replace(BASE, mode=mode), BATCH, 256, KV_HEADS, HEAD_DIM)
    out, lse = decode(queries(1, 10), cache, implementation)
    np.testing.assert_array_equal(out, np.zeros(out.shape))
    np.testing.assert_array_equal(lse, np.full(lse.shape, -np.inf))


@pytest.mark.quick(1, slow=0)
@modes([("triton", "int8"), ("xla", "int8")])
def test_one_token_returns_its_value(implementation, mode):
    """Whatever the query: its weight is the only one. Queries before it see nothing."""
    key, value = (random(seed, BATCH, 20, KV_HEADS, HEAD_DIM) for seed in (1, 2))
    cache = append(empty(BASE, BATCH, 256, KV_HEADS, HEAD_DIM), key, value, [1, 1, 1])
    want = np.repeat(dequantized(cache)[1][:, :1], 2, axis=2)
    out, _ = decode(queries(4, 4), under(cache, mode), implementation)
    np.testing.assert_array_equal(out[:, :3], np.zeros((BATCH, 3, HEADS, HEAD_DIM)))
    np.testing.assert_allclose(out[:, 3:], want, rtol=1e-5)


# Meaning and errors ------------------------------------------------------------------------------


@pytest.mark.quick(1)
def test_float_and_exact_is_attention_over_what_is_stored(implementation):
    """Nothing rounded but what the cache rounded: plain attention over `dequantize`."""
    cache, query = stored("float", EXACT), queries(1, 11)
    key, value = dequantized(cache)
    there = np.arange(key.shape[1]) < cache.lengths[:, None, None]
    want = oracles.plain_attention(query, key, value, mask=there)
    np.testing.assert_allclose(decode(query, cache, implementation)[0], want, atol=3e-6)


def test_int8_errs_by_its_quantizers_alone():
    """Exact softmax: int8 is exact attention of rounded queries over the cache, up to P.

    A weight is rounded by at most half of 1/119 of its split's largest. In plain JAX: the kernel is
    held to the oracle of the same.
    """
    cache, query = stored("int8", EXACT), queries(1, 5)
    codes, scale = oracles.quantize_int8(query, -1)
    rounded = codes * scale[..., None].astype(np.float64)
    key, value = (x.astype(np.float64) for x in dequantized(cache))
    k, v = (np.repeat(np.moveaxis(x, 2, 1), 2, 1) for x in (key, value))
    scores = np.moveaxis(rounded, 2, 1) @ np.swapaxes(k, -1, -2) / 8
    here = np.arange(key.shape[1]) < cache.lengths[:, None, None, None]
    scores = np.where(here, scores, -np.inf)
    p = np.exp(scores - scores.max(-1, keepdims=True))
    want = np.moveaxis(p @ v / p.sum(-1, keepdims=True), 1, 2)
    bound = np.zeros((*p.shape[:-1], 64))
    for b, parts in enumerate(splits(cache)):
        for split in parts:
            part = p[b][..., split]
            step = np.broadcast_to(part.max(-1, keepdims=True) / 238, part.shape)
            bound[b] += step @ np.abs(v[b][:, split])
    bound = np.moveaxis(bound / p.sum(-1, keepdims=True), 1, 2)
    error = np.abs(decode(query, cache)[0].astype(np.float64) - want)
    assert (error <= bound + 1e-5).all()
    assert error.mean() < 4e-3
    # And that is little: the weights' rounding, and the query's, which moves scores by a percent.
    unrounded = decode(query, stored("float", EXACT))[0]
    got = decode(query, cache)[0]
    assert np.abs(got - unrounded).mean() < 0.01 * np.abs(value).max()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("implementation", "mode", "softmax", "limit"),
    [
        ("xla", "float", "sas-2", 1e-5),
        ("triton", "int8", "sas-e", 5e-3),
    ],
)
def test_constant_values_come_back(implementation, mode, softmax, limit):
    """A constant V is returned however long the cache: no split decays another."""
    cache = empty(tj.TurboConfig(), 1, 4200, 1, 64)
    cache = append(cache, tokens(7, 1, 4150, 1, 64), np.full((1, 4150, 1, 64), 1.5, np.float32))
    back = dequantized(cache)[1][0, :4150]
    assert np.abs(back / 1.5 - 1).max() < 0.01
    out, _ = decode(queries(1, 7, 1, 2), under(cache, mode, SOFTMAXES[softmax]), implementation)
    # A block's code and the buffer's may round the constant differently.
    assert ((out >= back.min() * (1 - limit)) & (out <= back.max() * (1 + limit))).all()


# What must not matter ----------------------------------------------------------------------------


@pytest.mark.quick(1, slow=0)
@modes([("xla", "int8"), ("triton", "float")])
def test_several_queries_equal_one_at_a_time(implementation, mode):
    """Decoding four tokens at once equals decoding after each of four appends.

    At a state of the cache in which all of them are buffered, so that nothing is compressed
    between: then the queries differ in their masks alone.
    """
    cache, query = stored(mode), queries(4, 15)
    key, value = (random(seed, BATCH, 4, KV_HEADS, HEAD_DIM) for seed in (13, 14))
    steps = []
    for t in range(4):
        cache = append(cache, key[:, t : t + 1], value[:, t : t + 1])
        steps.append(decode(query[:, t : t + 1], cache, implementation)[0])
    together, _ = decode(query, cache, implementation)
    np.testing.assert_allclose(together, np.concatenate(steps, axis=1), atol=2e-6)


@pytest.mark.quick(slow=1)
@pytest.mark.optimized
@bits
def test_the_batch_never_changes_a_bit(implementation, mode):
    """Each sequence with its neighbours exchanged, and by itself."""
    cache, query = stored(mode), queries(1, 19)
    together, _ = decode(query, cache, implementation)
    rolled = jax.tree.map(lambda x: np.roll(x, 1, 0), (query, cache))
    np.testing.assert_array_equal(np.roll(decode(*rolled, implementation)[0], -1, 0), together)
    alone = jax.tree.map(lambda x: x[1:2], (query, cache))
    np.testing.assert_array_equal(decode(*alone, implementation)[0][0], together[1])


@pytest.mark.quick(1, slow=0)
@pytest.mark.optimized
@bits
def test_what_lies_past_the_lengths_never_changes_a_bit(implementation, mode):
    """Unused blocks and buffer slots may hold anything."""
    cache, query = stored(mode), queries(1, 20)
    blocks = (cache.lengths - cache.buffer_lengths) // BASE.block_kv

    def dirty(side):
        used = np.arange(side.block_scale.shape[2])[None] < blocks[:, None]
        slots = np.arange(BASE.buffer_size)[None] < cache.buffer_lengths[:, None]
        return dataclasses.replace(
            side,
            block_scale=np.where(used[:, None], side.block_scale, np.float32(np.nan)),
            codes=tuple(
                np.where(used[:, None, :, None, None], x, np.uint8(255)) for x in side.codes
            ),
            buffer=np.where(slots[:, None, :, None], side.buffer, np.int8(101)),
        )

    spoiled = dataclasses.replace(cache, key=dirty(cache.key), value=dirty(cache.value))
    for a, b in zip(
        decode(query, cache, implementation), decode(query, spoiled, implementation), strict=True
    ):
        np.testing.assert_array_equal(a, b)


@pytest.mark.quick(1, slow=0)
@pytest.mark.optimized
@bits
def test_two_runs_give_the_same_bits(implementation, mode):
    cache, query = stored(mode), queries(1, 25)
    first, second = (decode(query, cache, implementation) for _ in range(2))
    for a, b in zip(first, second, strict=True):
        np.testing.assert_array_equal(a, b)


# Non-finite tokens -------------------------------------------------------------------------------


@pytest.mark.parametrize("side", ["key", "value"])
@both_numbers
def test_non_finite_tokens_are_not_hidden(implementation, mode, side):
    """A NaN that is appended reaches the queries of its heads, and no others."""
    cache, query = stored(mode), queries(4, 21)
    clean, _ = decode(query, cache, implementation)
    new = {name: random(22 + i, BATCH, 20, KV_HEADS, HEAD_DIM) for i, name in enumerate("kv")}
    new[side[0]][0, 0, 0, 3] = np.nan
    cache = append(cache, new["k"], new["v"], [1, 0, 0])
    got, _ = decode(query, cache, implementation)
    assert np.isnan(got[0, 3, :2]).all()
    assert np.isfinite(got[0, :, 2:]).all()
    np.testing.assert_array_equal(got[1:], clean[1:])


@functools.cache
def _seventy_nine(how, side, bad):
    """A cache of 79 tokens, of which the one at 40 is bad in the second head."""
    both = [tokens(8 + i, 1, 79, 2, 64) for i in (0, 1)]
    if side is not None:
        both[side][0, 40, 1, 9] = bad
    start = empty(tj.TurboConfig(**dict(SMALL)), 1, 100, 2, 64)
    return {"appended": append, "prompt": store}[how](start, *both)


@pytest.mark.quick(1)
@pytest.mark.parametrize(
    ("implementation", "mode", "how", "side", "bad"),
    [
        ("xla", "int8", "prompt", 0, np.nan),
        ("triton", "int8", "appended", 1, -np.inf),
        ("xla", "float", "appended", 0, np.inf),
    ],
)
def test_non_finite_tokens_reach_who_sees_them(implementation, mode, how, side, bad):
    """Queries that see the token turn NaN; those that cannot see its block keep their bits.

    Queries stand at 19..78 and see 12 tokens back. The token at 40 lies in the block 32..47; from
    the next block on appended tokens are NaN, and of a prompt only what is buffered, from 64.
    """
    query = queries(60, 8, 1, 2)

    def run(*spoiled):
        cache = under(_seventy_nine(how, *spoiled), mode)
        return decode(query, cache, implementation, local_window_size=12)[0][0]

    clean, got = run(None, None), run(side, bad)
    at = dict(zip(range(19, 79), range(60), strict=True))
    np.testing.assert_array_equal(got[:, :1], clean[:, :1])
    np.testing.assert_array_equal(got[: at[32]], clean[: at[32]])
    assert np.isnan(got[at[40] : at[53], 1:]).all()
    assert np.isnan(got[at[64] :, 1:]).all()
    if how == "prompt":
        np.testing.assert_array_equal(got[at[60] : at[64]], clean[at[60] : at[64]])
    else:
        assert np.isnan(got[at[48] :, 1:]).all()


def test_a_nan_block_outside_the_window_stays_there():
    cache, query = stored(), queries(4, 24)
    scale = cache.value.block_scale.copy()
    scale[0, :, 0] = np.nan
    spoiled = dataclasses.replace(cache, value=dataclasses.replace(cache.value, block_scale=scale))
    assert np.isnan(decode(query, spoiled)[0][0]).all()
    narrow = [decode(query, c, local_window_size=(40, 0))[0] for c in (spoiled, cache)]
    np.testing.assert_array_equal(*narrow)


TOKENS = 128
_prefill = jax.jit(tj.prefill, static_argnames=(*STATIC, "is_causal"))
_attend = jax.jit(
    tj.turbo_attention, static_argnames=("config", "is_causal", "implementation", "return_residual")
)
OPERANDS = (
    queries(TOKENS, 40),
    random(41, BATCH, TOKENS, KV_HEADS, HEAD_DIM),
    random(42, BATCH, TOKENS, KV_HEADS, HEAD_DIM),
)


def prefill(implementation, config=BASE, lengths=(TOKENS,) * BATCH, **options):
    """((output, residual), cache)."""
    cache = empty(config, BATCH, 192, KV_HEADS, HEAD_DIM)
    options |= {"implementation": implementation, "return_residual": True}
    with interpreted(implementation):
        return _prefill(*OPERANDS, cache, key_value_seq_lengths=lengths_of(lengths), **options)


@pytest.mark.quick(slow=1)
@pytest.mark.parametrize(
    ("mode", "implementation", "is_causal"),
    [("int8", "xla", True), ("int8", "triton", True), ("int8_fp8", "xla", False)],
)
def test_prefill_attends_as_turbo_attention_does(implementation, mode, is_causal):
    """Residual included: attention sees stage-1 codes, whatever is stored, in the same bits."""
    config = dataclasses.replace(BASE, mode=mode, softmax=SAS_E)
    lengths = (TOKENS, 33, 0)
    results, cache = prefill(implementation, config, lengths, is_causal=is_causal)
    want = _attend(
        *OPERANDS,
        config=config,
        is_causal=is_causal,
        query_seq_lengths=lengths_of(lengths),
        key_value_seq_lengths=lengths_of(lengths),
        implementation="xla",
        return_residual=True,
    )
    tolerances = (1e-6, 1e-6) if implementation == "xla" else (2e-5, 2e-6)
    for a, b, tolerance in zip(results, want, tolerances, strict=True):
        np.testing.assert_allclose(a, b, atol=tolerance)
    np.testing.assert_array_equal(cache.lengths, lengths)
    if implementation != "xla":
        assert_same_bits(cache, prefill("xla", config, lengths, is_causal=is_causal)[1])


@pytest.mark.slow
def test_prefill_is_causal_by_default():
    default, causal = prefill("xla"), prefill("xla", is_causal=True)
    jax.tree.map(np.testing.assert_array_equal, default[0], causal[0])
    jax.tree.map(np.testing.assert_array_equal, default[1], causal[1])


@pytest.mark.slow
def test_decoding_continues_the_prompt():
    """Attention over a prompt's last token, by prefill and by decode: equal up to stage 2.

    With 4 bits the two outputs of one and the same query agree to a few percent of V.
    """
    config = tj.TurboConfig.paper(block_q=32, block_kv=32)
    (out, _), cache = prefill("xla", config)
    error = np.abs(decode(OPERANDS[0][:, -1:], cache, "xla")[0] - np.asarray(out[:, -1:]))
    assert error.mean() < 0.05 * np.abs(OPERANDS[2]).mean()
