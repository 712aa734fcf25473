"""Sinks, offsets and float32 parts of decoding over every kind of cache, in plain JAX."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import turbojax as tj
from turbojax import fireq, k8v4, paged
from turbojax.attention.options import Options
from turbojax.caches import exact as exact_attention
from turbojax.caches import init_layer_cache
from turbojax.caches.comparison import kivi
from turbojax.caches.exact import cache as exact

HEADS, KV_HEADS, HEAD_DIM, ROOM, PAGE = 4, 2, 64, 192, 64
LENGTHS = (150, 70, 0)
SINKS = np.array([0.5, -1.0, 2.0, -np.inf], np.float32)
CONFIG = tj.TurboConfig(softmax="exact", block_kv=32, buffer_size=32)
KINDS = ("exact", "kv4", "k8v4", "4bit", "auto", "turbo4", "fp8_e4m3")
# Kinds whose code another kind shares.
SOME = [
    pytest.param(kind, marks=pytest.mark.slow if kind in ("k8v4", "fp8_e4m3") else ())
    for kind in KINDS
]
OPTIONS = {
    "plain": {},
    "window": {"local_window_size": (40, 0)},
    "cap": {"logits_soft_cap": 2.0, "scale": 0.3},
}


@functools.cache
def tensors():
    rng = np.random.default_rng(5)
    shapes = [(len(LENGTHS), ROOM, KV_HEADS, HEAD_DIM)] * 2
    return [jnp.asarray(rng.standard_normal(s), jnp.float32) for s in shapes]


@functools.cache
def queries(tokens):
    rng = np.random.default_rng(tokens)
    return jnp.asarray(rng.standard_normal((len(LENGTHS), tokens, HEADS, HEAD_DIM)), jnp.float32)


def filled(kind, first=0, stops=LENGTHS, dtype=jnp.float32):
    """A cache, or pages with their table and lengths, of tokens ``first`` to `stops`."""
    key, value = (x[:, first:].astype(dtype) for x in tensors())
    lengths = jnp.maximum(jnp.asarray(stops, jnp.int32) - first, 0)
    batch, room = key.shape[:2]
    sizes = (batch, room, KV_HEADS, HEAD_DIM)
    if kind == "exact":
        empty = exact.init_cache(*sizes, dtype=dtype)
        return exact.append(empty, key, value, lengths=lengths)
    if kind in ("kv4", "k8v4"):
        of = fireq if kind == "kv4" else k8v4
        return of.append(of.init_cache(*sizes, dtype=dtype), key, value, lengths=lengths)
    if kind == "4bit":
        # Scales of the buffers that do not depend on which tokens come first.
        scales = {"key_scale": jnp.float32(0.04), "value_scale": jnp.float32(0.04)}
        empty = tj.init_cache(*sizes, config=CONFIG, dtype=dtype, **scales)
        return tj.append(empty, key, value, lengths=lengths)
    pages = -(-room // PAGE)
    tables = jnp.arange(batch * pages, dtype=jnp.int32).reshape(batch, pages)
    pool = paged.init_paged_cache(
        batch * pages, PAGE, KV_HEADS, HEAD_DIM, kv_dtype=kind, dtype=dtype
    )
    none = jnp.zeros(batch, jnp.int32)
    return paged.append(pool, key, value, tables, none, new_lengths=lengths), tables, lengths


def decode(kind, query, cache, **options):
    options = {"return_residual": True, "implementation": "xla", **options}
    if isinstance(cache, tuple):
        return paged.paged_attention(query, *cache, **options)
    run = {
        "exact": tj.decode,
        "kv4": fireq.decode,
        "k8v4": k8v4.decode,
        "4bit": tj.decode,
    }
    return run[kind](query, cache, **options)


def oracle(query, begins, lengths, sinks, *, scale=None, local_window_size=None, **rest):
    """Exact attention to the tensors in float64; positions are those of tokens."""
    cap = rest.get("logits_soft_cap")
    key, value = (np.asarray(x, np.float64) for x in tensors())
    query = np.asarray(query, np.float64)
    out, lse = np.zeros(query.shape), np.full(query.shape[:3], -np.inf)
    scale = HEAD_DIM**-0.5 if scale is None else scale
    for b, t, n in np.ndindex(query.shape[:3]):
        position, h = begins[b] + t, n // (HEADS // KV_HEADS)
        seen = np.arange(ROOM) < min(lengths[b], position + 1)
        if local_window_size is not None:
            seen &= np.arange(ROOM) >= position - local_window_size[0]
        scores = key[b, seen, h] @ query[b, t, n] * scale
        scores = scores if cap is None else cap * np.tanh(scores / cap)
        sink = np.exp(-np.inf if sinks is None else float(sinks[n]))
        total = np.exp(scores).sum() + sink
        with np.errstate(divide="ignore"):
            lse[b, t, n] = np.log(total)
        if total:
            out[b, t, n] = np.exp(scores) @ value[b, seen, h] / total
    return out, lse


def with_sinks(lse):
    """The log-sum-exp with sinks, and what is left of the output, of those without."""
    total = np.logaddexp(lse, SINKS)
    seen = np.isfinite(lse)
    return total, np.where(seen, np.exp(np.where(seen, lse, 0) - np.where(seen, total, 0)), 0)


def close(got, want, limit=3e-6):
    for x, y in zip(got, want, strict=True):
        np.testing.assert_allclose(np.asarray(x, np.float64), y, atol=limit, rtol=limit)


@pytest.mark.quick(2, slow=0)
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
@pytest.mark.parametrize("where", ["newest", "offset"])
@pytest.mark.parametrize("kind", ["exact", "auto"])
def test_exact_kinds_match_float64(kind, where, options):
    query, lengths = queries(3), np.array(LENGTHS)
    begins, given = lengths - 3, {}
    if where == "offset":  # among the keys, at their end, and far behind
        begins = np.array([100, 69, 400])
        given = {"query_offset": jnp.asarray(begins + 30), "key_offset": 30}
    for sinks in (None, SINKS):
        got = decode(kind, query, filled(kind), sinks=sinks, **given, **options)
        close(got, oracle(query, begins, lengths, sinks, **options))


@pytest.mark.quick(slow=1)
@pytest.mark.parametrize("tokens", [1, 3])
@pytest.mark.parametrize("kind", SOME)
def test_sinks_take_their_share(kind, tokens):
    query, cache = queries(tokens), filled(kind)
    real = {} if kind == "exact" else {"query_seq_lengths": jnp.array([tokens, 1, 1])}
    for options in OPTIONS.values():
        plain, plain_lse = (
            np.asarray(x, np.float64) for x in decode(kind, query, cache, **real, **options)
        )
        got, lse = decode(kind, query, cache, sinks=SINKS, **real, **options)
        want, share = with_sinks(plain_lse)
        want_out = plain * share[..., None]
        if real and tokens > 1:  # padding keeps 0 and -inf
            want[1:, 1:], want_out[1:, 1:] = -np.inf, 0
        close((got, lse), (want_out, want))


@pytest.mark.quick(slow=1)
@pytest.mark.parametrize("kind", SOME)
def test_outputs_are_rounded_once(kind):
    """In 16 bits, sinks are applied to what was not rounded yet; float32 is on request."""
    query, cache = queries(1), filled(kind, dtype=jnp.bfloat16)
    query = query.astype(jnp.bfloat16)
    wide, lse = decode(kind, query, cache, sinks=SINKS, output_dtype=jnp.float32)
    got, same_lse = decode(kind, query, cache, sinks=SINKS)
    assert (wide.dtype, got.dtype) == (jnp.float32, jnp.bfloat16)
    np.testing.assert_array_equal(got, wide.astype(jnp.bfloat16))
    np.testing.assert_array_equal(lse, same_lse)


@pytest.mark.quick(slow=1)
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
@pytest.mark.parametrize("tokens", [1, 3])
@pytest.mark.parametrize("kind", SOME)
def test_parts_of_a_text_in_two_caches_merge_to_the_whole(kind, tokens, options):
    split = 64
    query, lengths = queries(tokens), jnp.asarray(LENGTHS, jnp.int32)
    want = decode(kind, query, filled(kind), sinks=SINKS, **options)
    begin = jnp.maximum(lengths - tokens, 0)
    real = {} if kind == "exact" else {"query_seq_lengths": jnp.minimum(lengths, tokens)}
    if kind == "exact":  # it has no padding: the empty sequence's queries are before its begin
        query, begin = query[:2], begin[:2]
        want = tuple(x[:2] for x in want)
    parts = []
    for first, stops in ((0, np.minimum(LENGTHS, split)), (split, LENGTHS)):
        cache = filled(kind, first, stops)
        if kind == "exact":
            cache = jax.tree.map(lambda x: x[:2], cache)
        sinks = SINKS if first == 0 else None  # of one part alone
        offsets = {"query_offset": begin, "key_offset": first}
        wide = {"output_dtype": jnp.float32, **real, **offsets, **options}
        parts.append(decode(kind, query, cache, sinks=sinks, **wide))
    got = tj.merge_attention(*(jnp.stack(x) for x in zip(*parts, strict=True)))
    seen = [*range(2 if kind == "exact" else len(LENGTHS))]
    if kind != "exact":
        seen = [0, 1]  # the last one is empty: padding in parts, a query before it in the whole
    close([x[jnp.array(seen)] for x in got], [np.asarray(x)[seen] for x in want], 2e-5)


@pytest.mark.quick(1, slow=1)
@pytest.mark.parametrize("kind", SOME)
def test_key_offset_alone_moves_nothing_and_bits_do_not_depend_on_the_batch(kind):
    query, cache = queries(1), filled(kind)
    want = decode(kind, query, cache, sinks=SINKS, local_window_size=20)
    moved = decode(kind, query, cache, sinks=SINKS, local_window_size=20, key_offset=7)
    for x, y in zip(want, moved, strict=True):
        np.testing.assert_array_equal(x, y)
    if isinstance(cache, tuple):
        pool, tables, lengths = cache
        alone = decode(
            kind, query[:1], (pool, tables[:1], lengths[:1]), sinks=SINKS, local_window_size=20
        )
        np.testing.assert_array_equal(alone[0], want[0][:1])


def test_exact_decode_has_a_gradient_with_sinks():
    query, cache = queries(1), filled("exact")

    def loss(query, sinks):
        out, lse = decode("exact", query, cache, sinks=sinks)
        return jnp.sum(out**2) + jnp.sum(jnp.where(jnp.isfinite(lse), lse, 0))

    sinks = jnp.asarray([0.5, -1.0, 2.0, 0.1], jnp.float32)
    d_query, d_sinks = jax.grad(loss, (0, 1))(query, sinks)
    step = 1e-2
    for n in range(HEADS):
        change = jnp.zeros(HEADS).at[n].set(step)
        slope = (loss(query, sinks + change) - loss(query, sinks - change)) / (2 * step)
        np.testing.assert_allclose(d_sinks[n], slope, rtol=2e-3, atol=2e-3)
    assert np.all(np.isfinite(d_query))
    # The last sequence is empty: with a sink of -inf too nothing has weight there.
    d_query, d_sinks = jax.grad(loss, (0, 1))(query, jnp.asarray(SINKS))
    assert np.all(np.isfinite(d_query))
    assert np.all(np.isfinite(d_sinks))
    assert d_sinks[3] == 0


@pytest.mark.slow
def test_kivi_takes_sinks():
    key, value = tensors()
    empty = kivi.init_cache(len(LENGTHS), ROOM, KV_HEADS, HEAD_DIM, dtype=jnp.float32)
    cache = kivi.append(empty, key, value, lengths=jnp.asarray(LENGTHS))
    query = queries(1)
    plain, lse = tj.decode(query, cache, return_residual=True)
    got, total = tj.decode(query, cache, sinks=SINKS, return_residual=True)
    want, share = with_sinks(np.asarray(lse, np.float64))
    close((got, total), (plain * share[..., None], want))


REFUSED = {
    "shape": ({"sinks": jnp.zeros(3)}, ValueError, "one per query head"),
    "dtype": ({"sinks": jnp.zeros(4, jnp.int32)}, TypeError, "sinks"),
    "output": ({"output_dtype": jnp.float64}, ValueError, "must be float32"),
    "negative": ({"query_offset": -1}, ValueError, "query_offset="),
    "offsets": ({"query_offset": jnp.zeros(2, jnp.int32)}, ValueError, "one per sequence"),
    "kind": ({"key_offset": 1.5}, TypeError, "key_offset"),
}


@pytest.mark.parametrize(("options", "error", "words"), REFUSED.values(), ids=REFUSED)
def test_refusals(options, error, words):
    for kind in ("exact", "kv4", "4bit", "auto"):
        with pytest.raises(error, match=words):
            decode(kind, queries(1), filled(kind), **options)


@pytest.mark.parametrize("kind", ["exact", "kv4", "k8v4", "4bit"])
def test_a_rolling_buffer_takes_no_query_offset(kind):
    cache = init_layer_cache(
        1,
        512,
        KV_HEADS,
        HEAD_DIM,
        kind=CONFIG if kind == "4bit" else kind,
        dtype=jnp.float32,
        local_window_size=20,
    )
    with pytest.raises(NotImplementedError, match="query_offset must be None: the cache keeps"):
        decode(kind, queries(1)[:1], cache, query_offset=3, local_window_size=(19, 0))


@pytest.mark.parametrize("kind", KINDS)
def test_kernels_refuse_offsets_in_words(kind, monkeypatch):
    """Where a query is not what they take it for; one query without a window is made to be."""
    cache = filled(kind)
    monkeypatch.setattr("turbojax._device.gpu_compute_capability", lambda: 9.0)
    options = {"implementation": "mosaic_gpu", "query_offset": 3, "local_window_size": (5, 0)}
    with pytest.raises(NotImplementedError, match="it has no query_offset"):
        decode(kind, queries(1), cache, **options)


@pytest.mark.quick(1, slow=0)
@pytest.mark.parametrize(
    ("kind", "tokens", "name"),
    [
        ("4bit", 1, "turbojax_decode_hopper"),
        ("kv4", 1, "turbojax_paged_hopper"),
        ("exact", 3, "turbojax_paged_hopper"),
        ("turbo4", 1, "turbojax_paged_hopper"),
        ("auto", 40, "turbojax_paged_join_hopper"),
        ("auto", 600, "turbojax_paged_prompt_hopper"),
    ],
)
def test_kernels_with_sinks_and_float32_are_lowered_for_hopper(kind, tokens, name, monkeypatch):
    cache = filled(kind, dtype=jnp.bfloat16)
    query = jax.ShapeDtypeStruct((len(LENGTHS), tokens, HEADS, HEAD_DIM), jnp.bfloat16)
    monkeypatch.setattr("turbojax._device.gpu_compute_capability", lambda: 9.0)
    wide = {} if tokens == 600 else {"output_dtype": jnp.float32}

    def call(query, cache, sinks):
        return decode(kind, query, cache, implementation="mosaic_gpu", sinks=sinks, **wide)

    traced = jax.jit(call).trace(query, cache, jnp.asarray(SINKS))
    text = traced.lower(lowering_platforms=("cuda",)).as_text()
    assert name in text
    out = jax.eval_shape(call, query, cache, jnp.asarray(SINKS))[0]
    assert out.dtype == (jnp.float32 if wide else jnp.bfloat16)


def test_long_prompts_in_float32_are_refused_in_words(monkeypatch):
    cache = filled("auto", dtype=jnp.bfloat16)
    query = jnp.zeros((len(LENGTHS), 600, HEADS, HEAD_DIM), jnp.bfloat16)
    monkeypatch.setattr("turbojax._device.gpu_compute_capability", lambda: 9.0)
    words = "1200 queries of a KV head must be at most 1024 for float32 outputs"
    with pytest.raises(NotImplementedError, match=words):
        decode("auto", query, cache, implementation="mosaic_gpu", output_dtype=jnp.float32)


@pytest.mark.parametrize("option", ["sinks", "query_offset", "output_dtype", "return_residual"])
def test_cudnn_refuses_options_in_words(option):
    values = {"sinks": SINKS, "query_offset": 3, "output_dtype": jnp.float32}
    options = {"return_residual": False, option: values.get(option, True)}
    words = {"output_dtype": "float32 output", "return_residual": "log-sum-exp"}.get(option, option)
    with pytest.raises(NotImplementedError, match=f"cudnn: it gives .*no {words}"):
        decode("exact", queries(1), filled("exact"), implementation="cudnn", **options)


def test_a_length_out_of_range_is_found_with_an_offset_too():
    """One query without a window is given a shorter cache: that must not hide a wrong length."""
    pool, tables, lengths = filled("auto")
    lengths = lengths.at[0].set(ROOM + 1)
    run = jax.jit(lambda lengths: decode("auto", queries(1), (pool, tables, lengths), **offset))
    offset = {"query_offset": 10}
    out, lse = run(lengths)
    assert np.isnan(out[0]).all()
    assert np.isnan(lse[0]).all()
    assert np.isfinite(out[1:]).all()


def test_exact_prompts_give_what_their_options_say():
    x = jnp.ones((1, 8, 2, 16), jnp.bfloat16)
    options = Options(is_causal=True, scale=0.25, out_dtype="float32")
    assert exact_attention.attend(x, x, x, options=options).dtype == jnp.float32
    options = dataclasses.replace(options, implementation="cudnn")
    with pytest.raises(NotImplementedError, match="no output_dtype=float32"):
        exact_attention.attend(x, x, x, options=options)
