"""What every kind of cache must keep: each line of the table runs through this suite.

Operands are chosen so that a lossy cache gives itself away only where it mixes up tokens, heads or
sequences: keys are orthogonal, values are 1 or -1, and a query looks for one key. So the output
points to that token's value, whatever a cache rounds to. What a kind's errors may be, and that all
options reach its op, `test_layer_cache.py` says of each.
"""

import functools
import re
import typing

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import turbojax as tj
from turbojax import caches as kv
from turbojax.app.options import CACHES
from turbojax.caches import (
    AttentionOptions,
    attend_new_tokens,
    attend_prompt,
    files,
    kind_for,
    kind_of,
)
from turbojax.caches.comparison import Kivi
from turbojax.caches.exact import REPEATABLE
from turbojax.caches.kinds import ALL_KINDS, KINDS, STORED, CacheKind, put_sequences, take_sequences
from turbojax.caches.paged.kind import PAGED_KINDS
from turbojax.caches.progressive.update import APPEND, STORE_PROMPT
from turbojax.models import load_cache, save_cache
from turbojax.numerics.config import TurboConfig

BATCH, ROOM, HEADS, KV_HEADS, CHANNELS = 3, 20, 4, 2, 16
LENGTHS = np.array([13, 6, 1])
TOKENS, STEPS = 13, 3
PLAIN, WINDOW = AttentionOptions(), AttentionOptions(local_window_size=4)

CASES = {name: kv.cache_by_name(name, KV_HEADS) for name in kv.CACHE_NAMES}
CASES |= {x: x for kind in KINDS for x in kind.takes if isinstance(x, str)}
# Blocks that a few tokens fill; those of the names are wider than a test is long.
CASES["small kivi"] = Kivi(bits=4, group_size=4, residual_length=4)
CASES["small gear"] = Kivi(bits=3, group_size=4, residual_length=4, rank=2)
CASES["small blocks"] = TurboConfig(buffer_size=8, block_q=8, block_kv=8, key_bits=4, value_bits=2)
# In the slow tier: what differs from another kind only in the format of its numbers.
SLOW = ("bfloat16", "4bit", "2/4bit", "3bit", "fp8_e4m3", "paged_k8v4", "paged_int8_v4")
# Those for comparison share code; of KIVI and GEAR the small ones have codes.
SLOW += ("kivi4", "gear4", "int8", "e4m3")
# Of the mixes of bits one; the others belong to `make test-fuzz`.
SLOW += ("turbo_k2v3",)


def _tier(name):
    if name in SLOW:
        return [pytest.mark.slow]
    rest = ("turbo_k", "kivi", "gear", "2bit", "fp8_e5m2")
    return [pytest.mark.fuzz] if name.startswith(rest) else []


every_kind = pytest.mark.parametrize(
    "name", [pytest.param(name, marks=_tier(name)) for name in CASES]
)


def data():
    """Queries, keys, values [B, 16, heads, H] of all tokens, and the place each query looks for."""
    rng = np.random.default_rng(0)
    signs = np.array([[1.0]])
    while len(signs) < CHANNELS:  # Hadamard's matrices: rows are orthogonal
        signs = np.block([[signs, signs], [signs, -signs]])
    length = TOKENS + STEPS
    keys = np.stack([[rng.permutation(signs)[:length] for _ in range(KV_HEADS)] for _ in LENGTHS])
    keys = keys.swapaxes(1, 2)
    values = rng.choice([-1.0, 1.0], keys.shape)
    sought = rng.integers(0, np.arange(length)[None, :, None] + 1, (BATCH, length, HEADS))
    queries = np.empty((BATCH, length, HEADS, CHANNELS))
    for b, t, n in np.ndindex(sought.shape):
        queries[b, t, n] = 6 * keys[b, sought[b, t, n], n // (HEADS // KV_HEADS)]
    return queries, keys, values, sought


QUERIES, KEYS, VALUES, SOUGHT = data()


def at(first, count=1):
    """Operands of each sequence's tokens from its own `first` on."""
    rows = np.asarray(first)[:, None] + np.arange(count)
    return [
        jnp.asarray(np.take_along_axis(x, rows[:, :, None, None], 1), jnp.float32)
        for x in (QUERIES, KEYS, VALUES)
    ]


def empty(name, batch=BATCH, room=ROOM):
    sizes = (batch, room, KV_HEADS, CHANNELS)
    return kv.init_layer_cache(*sizes, kind=CASES[name], dtype=jnp.float32)


def points_to(out, value):
    """Whether the angle is below 41 degrees: 2 bits make up to about 30, other values near 90."""
    out = np.asarray(out, np.float64)
    return out @ value > 0.75 * np.linalg.norm(out) * np.linalg.norm(value)


def assert_found(out, first, lengths, window=None):
    """Each real query's output is the value it looks for, if that is in the window."""
    found = 0
    for b, length in enumerate(lengths):
        for t, n in np.ndindex(length, HEADS):
            place = first[b] + t
            wanted = SOUGHT[b, place, n]
            if window is not None and wanted <= place - window:
                continue
            assert points_to(out[b, t, n], VALUES[b, wanted, n // (HEADS // KV_HEADS)]), (b, t, n)
            found += 1
    assert found > HEADS


def assert_same(one, other):
    """What sequences hold is the same, bit for bit; what is past their lengths is of no account."""
    one, other = files.pack(one), files.pack(other)
    assert one.keys() == other.keys()
    for name, x in one.items():
        np.testing.assert_array_equal(x, other[name], name)


@functools.cache
def prompts(options=PLAIN):
    """Prompts of given operands, from a given sequence on: few programs serve all tests."""

    @jax.jit
    def run(cache, lengths, first, *operands):
        return attend_prompt(lengths, first)(*operands, cache, options)

    return run


@functools.cache
def step(options=PLAIN):
    return jax.jit(functools.partial(attend_new_tokens(), options=options))


@functools.cache
def filled(name):
    """What a prompt's attention gives, and the cache then."""
    return prompts()(empty(name), LENGTHS, 0, *at([0] * BATCH, TOKENS))


# The table ---------------------------------------------------------------------------------------


def test_kinds_do_not_share_names():
    for of in (lambda x: [x.cls], lambda x: [x.stored_as]):
        everything = [y for x in STORED for y in of(x)]
        assert len(set(everything)) == len(everything)
    for of in (lambda x: x.names, lambda x: x.takes):
        everything = [y for x in ALL_KINDS for y in of(x)]
        assert len(set(everything)) == len(everything)


def test_type_checkers_know_what_kinds_take():
    known = set()
    for x in typing.get_args(CacheKind):
        known |= set(typing.get_args(x)) or {x}
    # Pages have so many names that they are any string to a type checker.
    known |= set(PAGED_KINDS) if str in known else set()
    assert known - {str} == {x for kind in ALL_KINDS for x in kind.takes}


def test_what_is_no_cache_is_refused():
    with pytest.raises(TypeError, match="cache is a dict, must be one of ExactCache"):
        attend_new_tokens()(*at([0] * BATCH), {})
    with pytest.raises(ValueError, match="'latent_turbo4' or a TurboConfig"):
        kind_for(None)


# Files that were written once must be read: these names never change.
_SCALES = ["block_scale", "buffer_scale", "channel_scale", "channel_zero"]
_SIDE = [*_SCALES, "buffer", "codes.0", "head_slots"]


def _each(*names, by):
    """Names of both sides' arrays."""
    return " ".join(f"{side}{by}{x}" for side in ("key", "value") for x in names)


_SIDES = _each(*_SIDE, by=".")
_BASELINE, _FACTORS = (
    _each("codes", "minimum", "scale", "residual", by="_"),
    _each("left", "right", by="_"),
)
FORMATS = {
    "exact": ("exact", "key overflowed value"),
    "kv4": ("kv4", "key_codes key_scale overflowed value_codes value_scale"),
    "k8v4": ("k8v4", "key_codes key_scale overflowed value_codes value_scale"),
    "4bit": ("progressive", f"buffer_lengths overflowed {_SIDES}"),
    "kivi4": ("kivi", f"overflowed prompt_blocks {_BASELINE}"),
    "gear4": ("kivi", f"overflowed prompt_blocks {_BASELINE} {_FACTORS}"),
    "int4": ("int4", f"overflowed {_each('codes', 'shared.0', 'shared.1', by='_')}"),
    "paged": ("paged_layer", "block_tables overflowed pages.key pages.lost pages.value"),
}


@pytest.mark.quick(3, slow=0)
@pytest.mark.parametrize("name", FORMATS)
def test_formats_on_disk_stay(name):
    kind, arrays = FORMATS[name]
    cache = empty(name)
    described = files.describe(cache)
    assert described["kind"] == kind
    sizes = ["kind", "stacked", "batch_size", "max_length", "num_kv_heads", "head_dim", "dtype"]
    assert list(described)[:7] == sizes
    assert sorted(files.pack(cache)) == sorted([*arrays.split(), "lengths"])


# Each kind ---------------------------------------------------------------------------------------


@every_kind
def test_a_cache_says_what_it_is(name):
    cache, kind = empty(name), kind_for(CASES[name])
    assert kind_of(cache) is kind
    assert type(cache) is kind.cls
    assert (cache.max_length, cache.num_kv_heads, cache.head_dim) == (ROOM, KV_HEADS, CHANNELS)
    assert cache.dtype == ("bfloat16" if name == "bfloat16" else "float32")
    assert cache.lengths.dtype == jnp.int32
    assert cache.lengths.tolist() == [0] * BATCH
    assert cache.overflowed.tolist() == [False] * BATCH
    assert cache.nbytes == sum(x.nbytes for x in jax.tree.leaves(cache))
    values = 2 * 2 * BATCH * ROOM * KV_HEADS * CHANNELS
    assert cache.compression_ratio == pytest.approx(values / cache.nbytes)
    assert kind.why_nan(cache) is None or "NaN" in kind.why_nan(cache)
    if name in kind.names:
        assert kind.by_name(name, KV_HEADS) == CASES[name]


@pytest.mark.quick(slow=1)
@every_kind
def test_tokens_are_found_again(name):
    """A ragged prompt, then new tokens: causal, by heads and by sequences."""
    out, cache = filled(name)
    assert out.shape == (BATCH, TOKENS, HEADS, CHANNELS)
    assert_found(out, [0] * BATCH, LENGTHS)
    for i in range(STEPS):
        assert cache.lengths.tolist() == (LENGTHS + i).tolist()
        out, cache = step()(*at(LENGTHS + i), cache)
        assert_found(out, LENGTHS + i, [1] * BATCH)
    assert cache.overflowed.tolist() == [False] * BATCH


@pytest.mark.quick(1, slow=1)
@every_kind
def test_the_window_reaches_the_op(name):
    out, cache = prompts(WINDOW)(empty(name), LENGTHS, 0, *at([0] * BATCH, TOKENS))
    assert_found(out, [0] * BATCH, LENGTHS, 4)
    far = SOUGHT[0, :TOKENS] <= np.arange(TOKENS)[:, None] - 4
    wanted = VALUES[0][SOUGHT[0, :TOKENS], np.arange(HEADS) // (HEADS // KV_HEADS)]
    assert np.mean(np.sign(np.asarray(out)[0, :TOKENS][far]) == wanted[far]) < 0.9
    _, key, value = at(LENGTHS)
    first = jnp.asarray(np.stack([KEYS[b, 0] for b in range(BATCH)])[:, None], jnp.float32)
    sought = jnp.repeat(6 * first, HEADS // KV_HEADS, 2)
    for options, seen in ((PLAIN, True), (WINDOW, False)):
        out, _ = step(options)(sought, key, value, cache)
        at_first = np.repeat(VALUES[0, 0], HEADS // KV_HEADS, 0)
        assert all(map(points_to, np.asarray(out)[0, 0], at_first)) == seen


@pytest.mark.quick(2, slow=2)
@every_kind
def test_padding_reaches_nothing(name):
    operands = at([0] * BATCH, TOKENS)
    past = np.arange(TOKENS)[None] >= LENGTHS[:, None]
    broken = [jnp.where(past[:, :, None, None], jnp.nan, x) for x in operands]
    out, cache = prompts()(empty(name), LENGTHS, 0, *broken)
    wanted, same = filled(name)
    np.testing.assert_array_equal(np.asarray(out)[~past], np.asarray(wanted)[~past])
    assert_same(cache, same)


@pytest.mark.quick(2, slow=1)
@pytest.mark.parametrize(
    ("name", "bad"),
    [("k8v4", -np.inf), ("exact", np.nan), ("kv4", -np.inf), ("4bit", -np.inf), ("paged", np.nan)],
)
def test_a_query_that_is_not_finite_gives_nan_for_its_head_alone(name, bad):
    """Also where all scores are -inf, as of keys that are all positive."""
    query, key, value = at([0] * BATCH, TOKENS)
    _, cache = prompts()(empty(name), LENGTHS, 0, query, jnp.abs(key) + 1, value)
    query, key, value = at(LENGTHS)
    key = jnp.abs(key) + 1
    wanted, same = step()(query, key, value, cache)
    out, after = step()(query.at[1, 0, 2, 5].set(bad), key, value, cache)
    is_bad = np.zeros((BATCH, HEADS), bool)
    is_bad[1, 2] = True
    np.testing.assert_array_equal(np.isnan(out[:, 0]), np.repeat(is_bad[:, :, None], CHANNELS, 2))
    np.testing.assert_array_equal(np.asarray(out)[:, 0][~is_bad], np.asarray(wanted)[:, 0][~is_bad])
    assert_same(after, same)


@pytest.mark.quick(slow=1)
@every_kind
def test_prompts_in_parts_are_the_same_cache(name):
    """`take` and `put`: one sequence after the other; and one goes on by itself."""
    whole_out, whole = filled(name)
    operands, cache = at([0] * BATCH, TOKENS), empty(name)
    for b, length in enumerate(LENGTHS):
        part = slice(b, b + 1)
        out, cache = prompts()(cache, LENGTHS[part], b, *(x[part] for x in operands))
        np.testing.assert_array_equal(out[0, :length], whole_out[b, :length])
    assert_same(cache, whole)

    part = take_sequences(whole, 1, 1)
    assert part.lengths.tolist() == [LENGTHS[1]]
    new, part = step()(*(x[1:2] for x in at(LENGTHS)), part)
    every, later = step()(*at(LENGTHS), whole)
    np.testing.assert_array_equal(new[0], every[1])
    back = put_sequences(whole, part, 1)
    assert back.lengths.tolist() == [13, 7, 1]
    for i, same in enumerate((whole, later, whole)):
        assert_same(take_sequences(back, i, 1), take_sequences(same, i, 1))


@pytest.mark.quick(slow=1)
@every_kind
def test_something_else_attends_to_the_prompt(name):
    """The cache is filled as if it had attended itself."""
    run = jax.jit(
        lambda cache: attend_prompt(LENGTHS, attention="exact")(*at([0] * BATCH, TOKENS), cache)
    )
    out, cache = run(empty(name))
    assert_found(out, [0] * BATCH, LENGTHS)
    assert_same(cache, filled(name)[1])


@pytest.mark.quick(1, slow=2)
@every_kind
def test_what_has_no_room_is_left_out(name):
    _, cache = filled(name)
    _, key, value = at([0] * BATCH, 10)
    with pytest.raises(ValueError, match="max_length=20"):
        kind_of(cache).append(cache, key, value)
    append = jax.jit(lambda cache, *x, lengths: kind_of(cache).append(cache, *x, lengths=lengths))
    after = append(cache, key, value, lengths=np.array([10, 10, 10]))
    assert after.lengths.tolist() == [20, 16, 11]
    assert after.overflowed.tolist() == [True, False, False]
    fits = append(cache, key, value, lengths=np.array([7, 10, 10]))
    assert fits.overflowed.tolist() == [False] * BATCH
    after, fits = files.pack(after), files.pack(fits)
    for array in after.keys() - {"overflowed"}:
        np.testing.assert_array_equal(after[array], fits[array], array)


@pytest.mark.quick(1, slow=1)
@every_kind
def test_files_hold_what_sequences_hold(name, tmp_path):
    """What comes back is the same cache, with other room if asked, and goes on as it would have."""
    _, cache = filled(name)
    save_cache(tmp_path / "cache", cache)
    loaded, _ = load_cache(tmp_path / "cache")
    assert jax.tree.structure(loaded) == jax.tree.structure(cache)
    assert_same(loaded, cache)
    out, after = step()(*at(LENGTHS), loaded)
    wanted, same = step()(*at(LENGTHS), cache)
    np.testing.assert_array_equal(out, wanted)
    assert_same(after, same)
    loaded, _ = load_cache(tmp_path / "cache", max_length=300)
    wide = empty(name, room=300)
    assert jax.tree.structure(loaded) == jax.tree.structure(wide)
    for got, like in zip(jax.tree.leaves(loaded), jax.tree.leaves(wide), strict=True):
        assert (got.shape, got.dtype) == (like.shape, like.dtype)
    assert_same(loaded, cache)  # the room is not in the file


@every_kind
def test_unknown_implementations_are_refused(name):
    kind, operands = kind_for(CASES[name]), at([0] * BATCH)
    lengths, cache = np.ones(BATCH, np.int32), empty(name)
    for unknown in ("cuda", *{"cudnn", "mosaic_gpu"}.difference(kind.implementations)):
        words = f"implementation='{unknown}' must be None or one of"
        for attend in (attend_prompt(lengths, implementation=unknown), attend_new_tokens(unknown)):
            with pytest.raises(ValueError, match=words):
                jax.eval_shape(attend, *operands, cache)


@pytest.mark.quick(1, slow=2)
@every_kind
def test_repeatable_is_for_every_kind(name):
    """Of those that do not attend exactly it is what they choose themselves."""
    operands, cache, lengths = at([0] * BATCH), empty(name), np.ones(BATCH, np.int32)
    for make in (attend_new_tokens, lambda i: attend_prompt(lengths, implementation=i)):
        # On a CPU what exact caches choose is what repeats, too.
        asked, chosen = (str(jax.make_jaxpr(make(i))(*operands, cache)) for i in (REPEATABLE, None))
        assert asked == chosen


@pytest.mark.parametrize("registry", [APPEND, STORE_PROMPT], ids=lambda x: x.op)
def test_writers_are_chosen_beside_what_only_attends(registry):
    cache, key = empty("small blocks"), at([0] * BATCH)[1]
    chosen = registry.select(None, cache=cache, key=key)
    assert registry.select(registry.beside("jax_triton"), cache=cache, key=key) is chosen
    with pytest.raises(NotImplementedError, match="has no implementation='jax_triton'"):
        registry.select("jax_triton", cache=cache, key=key)
    for name in ("mosaic_gpu", "triton", "xla", None):
        assert registry.beside(name) == name
    with pytest.raises(ValueError, match="implementation='cuda' must be None or one of"):
        registry.select(registry.beside("cuda"), cache=cache, key=key)


def test_the_commands_help_names_every_kind():
    named = set(re.findall(r"[\w/]+", CACHES))
    missing = [name for name in kv.CACHE_NAMES if name not in named]
    # One stands for all pages with bits of their own for keys and for values.
    assert [name for name in missing if not re.fullmatch(r"turbo_k[234]v[234]", name)] == []


@pytest.mark.quick(5, slow=9)
@every_kind
def test_the_verbs_serve_it(name):
    """As layers' attention does; queries that are padding give 0, and what is held comes back."""
    start, count = np.zeros(BATCH, np.int32), np.array([3, 0, 2], np.int32)
    query, key, value = at(start, TOKENS)
    lengths = jnp.asarray(LENGTHS, jnp.int32)
    out, cache = tj.prefill(query, key, value, empty(name), key_value_seq_lengths=lengths)
    assert_found(out, start, LENGTHS)
    query, key, value = at(LENGTHS, STEPS)
    both = tj.append_and_decode(
        query, key, value, cache, lengths=jnp.asarray(count), return_residual=True
    )
    cache = tj.append(cache, key, value, lengths=count)
    np.testing.assert_array_equal(cache.lengths, LENGTHS + count)
    out, lse = tj.decode(query, cache, query_seq_lengths=count, return_residual=True)
    jax.tree.map(np.testing.assert_array_equal, both, ((out, lse), cache))
    assert_found(out, LENGTHS, count)
    is_padding = np.arange(STEPS)[None] >= count[:, None]
    assert (np.asarray(out)[is_padding] == 0).all()
    assert (np.asarray(lse)[is_padding] == -np.inf).all()
    assert np.isfinite(np.asarray(lse)[~is_padding]).all()
    for held, given in zip(tj.dequantize(cache, jnp.float32), (KEYS, VALUES), strict=True):
        assert (held.shape, held.dtype) == ((BATCH, ROOM, KV_HEADS, CHANNELS), jnp.float32)
        for b, length in enumerate(LENGTHS + count):
            assert (np.asarray(held)[b, length:] == 0).all()
            for t, n in np.ndindex(length, KV_HEADS):
                assert points_to(held[b, t, n], given[b, t, n]), (b, t, n)


@pytest.mark.parametrize("name", ["exact", "kv4", "paged"])
def test_of_a_rolling_buffer_what_it_holds_is_dequantized(name):
    sizes, room = (1, 700, KV_HEADS, CHANNELS), 700
    tokens = jnp.asarray(np.random.default_rng(1).normal(size=(1, room, KV_HEADS, CHANNELS)))
    whole, rolling = (
        kv.init_layer_cache(*sizes, kind=name, dtype=jnp.float32, local_window_size=window)
        for window in (None, 20)
    )
    whole, rolling = (tj.append(x, tokens.astype(jnp.float32), -tokens) for x in (whole, rolling))
    assert 20 <= rolling.room < room
    for all_held, held in zip(tj.dequantize(whole), tj.dequantize(rolling), strict=True):
        np.testing.assert_array_equal(held[:, -rolling.room :], all_held[:, -rolling.room :])
        assert not np.asarray(held)[:, : -rolling.room].any()


@pytest.mark.parametrize("window", [None, 3])
def test_a_sequence_alone_holds_what_it_holds_beside_another(window, monkeypatch):
    """Exact caches store a single row in a way of its own where there is one device.

    Past the cache's end, around a ring, and past that one's; some steps without a token.
    """
    monkeypatch.setattr(jax, "device_count", lambda: 1)
    name, room = "exact", 6 if window is None else 275
    alone, both = (
        kv.init_layer_cache(n, room, KV_HEADS, CHANNELS, kind=name, local_window_size=window)
        for n in (1, 2)
    )
    step = jax.jit(lambda cache, x, new: tj.append(cache, x, -x, lengths=new))
    held = 0
    for t, new in enumerate((1, 1, 0, 1, 1, 1, 1, 1, 0) * (1 if window is None else 40)):
        x = np.random.default_rng(t).normal(size=(2, 1, KV_HEADS, CHANNELS))
        x = jnp.asarray(x, jnp.bfloat16)
        alone = step(alone, x[:1], jnp.int32([new]))
        both = step(both, x, jnp.int32([new, 1]))
        held = min(held + new, room)
    assert (alone.lengths.tolist(), alone.room < room) == ([held], window is not None)
    assert alone.overflowed.tolist() == [True]
    for a, b in zip(jax.tree.leaves(alone), jax.tree.leaves(both), strict=True):
        np.testing.assert_array_equal(np.asarray(a, np.float32), np.asarray(b[:1], np.float32))


@pytest.mark.parametrize("name", ["exact", "int8"])
def test_what_exact_attention_lacks_is_refused(name):
    query, key, value = at(np.zeros(BATCH, np.int32), 2)
    with pytest.raises(NotImplementedError, match="return_residual=True must be False"):
        tj.prefill(query, key, value, empty(name), return_residual=True)
    with pytest.raises(ValueError, match="is_causal=False must be True"):
        tj.prefill(query, key, value, empty(name), is_causal=False)
    with pytest.raises(ValueError, match="implementation='triton' must be None or one of"):
        tj.append(empty(name), key, value, implementation="triton")


@pytest.mark.parametrize("name", ["exact", "int8", "kv4", "paged"])
def test_lengths_out_of_range_are_refused(name):
    """Also where many queries attend in chunks, and where lengths are numpy's or Python's."""
    tokens = 600
    query, key = (jnp.ones((1, tokens, n, CHANNELS)) for n in (HEADS, KV_HEADS))
    cache = empty(name, 1, tokens)
    with pytest.raises(ValueError, match=r"lengths=\[601\] must be between 0 and 600"):
        tj.prefill(query, key, key, cache, key_value_seq_lengths=[601])
    out, cache = tj.prefill(query, key, key, cache, key_value_seq_lengths=[5])
    np.testing.assert_allclose(out[0, :5], 1, rtol=0.02)
    with pytest.raises(ValueError, match=r"query_seq_lengths=\[601\] must be between 0 and 600"):
        tj.decode(query, cache, query_seq_lengths=[601])
