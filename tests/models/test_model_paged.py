"""Paged caches as a model's cache: writing, attending and generating."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import turbojax as tj
from tests.models import tiny
from turbojax import models
from turbojax.caches import kinds
from turbojax.caches.paged import kind as paged
from turbojax.caches.paged.pool import KV_DTYPES

KINDS = ("paged", "fp8_e4m3", "fp8_e5m2", "paged_int8", "turbo4", "paged_k8v4", "turbo_k3v2")


@pytest.fixture(scope="module")
def model() -> models.Transformer:
    return tiny.transformer(max_length=2048)


def _normal(seed: int, *shape: int) -> jax.Array:
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape), jnp.float32)


def _dense(query: np.ndarray, key: np.ndarray, value: np.ndarray) -> np.ndarray:
    """Causal attention of one sequence's last queries in float64: [T, N, H], [S, K, H]."""
    query, key, value = (np.asarray(x, np.float64) for x in (query, key, value))
    groups = query.shape[1] // key.shape[1]
    key, value = (np.repeat(x, groups, axis=1) for x in (key, value))
    scores = np.einsum("tnh,snh->nts", query, key) / np.sqrt(query.shape[-1])
    last = len(key) - len(query) + np.arange(len(query))
    scores = np.where(np.arange(len(key))[None] <= last[:, None], scores, -np.inf)
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    weights /= weights.sum(-1, keepdims=True)
    return np.einsum("nts,snh->tnh", weights, value)


@pytest.mark.slow
def test_a_layer_attends_to_what_was_appended():
    layer = paged.init_layer(3, 90, 2, 16, kind="paged", dtype=jnp.float32, page_size=16)
    key, value, query = _normal(0, 3, 70, 2, 16), _normal(1, 3, 70, 2, 16), _normal(2, 3, 70, 4, 16)
    lengths = jnp.array([70, 0, 33])
    layer = paged.append(layer, key, value, lengths=lengths)
    out = tj.decode(query, layer, query_seq_lengths=lengths)
    for row, length in enumerate(lengths.tolist()):
        if length:
            expected = _dense(query[row, :length], key[row, :length], value[row, :length])
            np.testing.assert_allclose(out[row, :length], expected, atol=1e-5)
        assert not np.any(out[row, length:])
    new = _normal(3, 3, 1, 2, 16), _normal(4, 3, 1, 2, 16)
    layer = paged.append(layer, *new)
    np.testing.assert_array_equal(layer.lengths, lengths + 1)
    out = tj.decode(query[:, :1], layer)
    for row, length in enumerate(lengths.tolist()):
        held = [
            np.concatenate([x[row, :length], y[row]])
            for x, y in zip((key, value), new, strict=True)
        ]
        np.testing.assert_allclose(out[row], _dense(query[row, :1], *held), atol=1e-5)


@pytest.mark.quick(slow=1)
@pytest.mark.optimized
@pytest.mark.parametrize(("kind", "is_ragged"), [("turbo4", True), ("paged", False)])
def test_chunks_of_a_prompt_change_no_bit(monkeypatch, kind, is_ragged):
    """Also behind tokens that are in the cache already."""
    key, value, query = _normal(0, 2, 75, 2, 16), _normal(1, 2, 75, 2, 16), _normal(2, 2, 75, 4, 16)
    lengths = jnp.array([75, 41]) if is_ragged else None
    append = jax.jit(paged.append)
    layer = paged.init_layer(2, 80, 2, 16, kind=kind, dtype=jnp.float32, page_size=16)
    if is_ragged:
        layer = append(layer, key[:, :5], value[:, :5])
    layer = append(layer, key, value, lengths=lengths)
    whole = tj.decode(query, layer, query_seq_lengths=lengths)
    monkeypatch.setattr(paged, "QUERY_CHUNK", 16)
    parts = tj.decode(query, layer, query_seq_lengths=lengths)
    np.testing.assert_array_equal(parts, whole)
    assert np.any(np.asarray(parts[0]) != 0)


@pytest.mark.quick(slow=1)
@pytest.mark.parametrize("kind", ["fp8_e4m3", "turbo4"])
def test_a_part_of_the_sequences_is_filled_alone(kind):
    layer = paged.init_layer(4, 40, 2, 16, kind=kind, dtype=jnp.float32, page_size=16)
    key, value, query = _normal(0, 4, 33, 2, 16), _normal(1, 4, 33, 2, 16), _normal(2, 4, 33, 4, 16)
    lengths = jnp.array([33, 5, 20, 0])
    whole = paged.append(layer, key, value, lengths=lengths)

    @jax.jit
    def fill(layer, first):
        part = kinds.take_sequences(layer, first, 2)
        rows = (jax.lax.dynamic_slice_in_dim(x, first, 2) for x in (key, value, lengths, query))
        k, v, n, q = rows
        part = paged.append(part, k, v, lengths=n)
        out = tj.decode(q, part, query_seq_lengths=n)
        return kinds.put_sequences(layer, part, first), out

    second, out_second = fill(layer, 2)
    np.testing.assert_array_equal(second.lengths, [0, 0, 20, 0])
    both, out_first = fill(second, 0)
    for a, b in zip(jax.tree.leaves(both), jax.tree.leaves(whole), strict=True):
        np.testing.assert_array_equal(np.asarray(a, np.float32), np.asarray(b, np.float32))
    np.testing.assert_array_equal(
        jnp.concatenate([out_first, out_second]),
        tj.decode(query, whole, query_seq_lengths=lengths),
    )


@pytest.mark.slow
def test_tokens_past_the_end():
    layer = paged.init_layer(2, 20, 1, 16, kind="paged", dtype=jnp.float32, page_size=16)
    key, value = _normal(0, 2, 18, 1, 16), _normal(1, 2, 18, 1, 16)
    layer = paged.append(layer, key, value, lengths=jnp.array([18, 3]))
    with pytest.raises(ValueError, match=r"lengths \[23, 8\].*at most max_length=20"):
        paged.append(layer, key[:, :5], value[:, :5])
    fuller = jax.jit(paged.append)(layer, key[:, :5], value[:, :5])
    np.testing.assert_array_equal(fuller.lengths, [20, 8])
    np.testing.assert_array_equal(fuller.overflowed, [True, False])
    assert int(fuller.pages.dropped_tokens) == 0
    # The second page of the first sequence has room for more than `max_length`: it stays empty.
    assert not np.any(np.asarray(fuller.pages.key[1, :, 4:]))
    # Nothing landed in the pages of the other sequence.
    np.testing.assert_array_equal(fuller.pages.key[2, 0, :8], jnp.r_[key[1, :3, 0], key[1, :5, 0]])
    assert not np.any(np.asarray(fuller.pages.key[3]))


@pytest.mark.slow
def test_bad_calls_say_what_is_wrong(model):
    with pytest.raises(ValueError, match="kind='kv4' must be one of paged, fp8_e4m3"):
        paged.init_layer(1, 20, 1, 16, kind="kv4")
    with pytest.raises(ValueError, match="max_length=0 must be at least 1"):
        paged.init_layer(1, 0, 1, 16, kind="paged")
    layer = paged.init_layer(2, 20, 1, 16, kind="paged", dtype=jnp.float32)
    one = _normal(0, 1, 3, 1, 16)
    with pytest.raises(ValueError, match="must have 2 sequences"):
        paged.append(layer, one, one)
    with pytest.raises(ValueError, match=r"lengths=\[4, 0\] must be between 0 and 3"):
        paged.append(layer, *(jnp.repeat(one, 2, 0),) * 2, lengths=jnp.array([4, 0]))
    with pytest.raises(ValueError, match="'turbo8' must be one of exact, .*turbo4"):
        models.cache_by_name("turbo8", 2)
    with pytest.raises(NotImplementedError, match="jax_triton"):
        models.start(
            model, tiny.tokens(1, 4), max_length=8, cache="turbo4", implementation="jax_triton"
        )


def test_names_and_sizes(model):
    assert set(KINDS) <= set(paged.PAGED_KINDS) <= set(models.CACHE_NAMES)
    # As kv_dtypes are called, but for what has no meaning of its own or belongs to another cache.
    assert set(KV_DTYPES) - set(paged.PAGED_KINDS) == {"auto", "k8v4", "int8", "int8_v4"}
    for kind in paged.PAGED_KINDS:
        assert models.cache_by_name(kind, 3) == kind
    config = dataclasses.replace(models.SHAPES["llama-3-8b"], num_layers=2)
    decoder = models.Decoder(None, (), None, None, config=config, dtype=jnp.dtype(jnp.bfloat16))
    tokens, heads, layers = 3 * 1024, 8, 2
    for kind, token_bytes in {
        "paged": 2 * 256,
        "fp8_e4m3": 2 * 128,
        "fp8_e5m2": 2 * 128,
        "turbo4": 2 * 66,
        "paged_k8v4": 128 + 66,
        "paged_int8": 2 * 130,
        "paged_int8_v4": 130 + 66,
        "turbo_k4v2": 66 + 34,
    }.items():
        # Shapes are enough, as for the demo's plot.
        caches = jax.eval_shape(lambda kind=kind: models.init_caches(decoder, 3, 1000, kind))
        pages = token_bytes * tokens * heads * layers
        # Beside the pages: tables, lengths, two scales and a counter.
        assert pages <= caches.nbytes <= pages + layers * 4 * (3 * 16 + 3 + 3 + 3)
        assert caches.max_length == 1000
        ratio = 4 * 3 * 1000 * heads * 128 * layers / caches.nbytes
        assert caches.compression_ratio == pytest.approx(ratio)


@pytest.fixture(scope="module")
def one_pass(model) -> jax.Array:
    """Logits without any cache."""
    return model(tiny.tokens(1, 120))[:, 99:-1]


@pytest.mark.quick(slow=1)
@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        ("paged", jnp.float32),
        ("fp8_e5m2", jnp.float32),
        ("turbo4", jnp.bfloat16),
        ("paged_k8v4", jnp.float32),
        ("paged_int8", jnp.float32),
        ("turbo_k4v3", jnp.float32),
    ],
)
def test_every_paged_cache_stays_close_to_one_forward_pass(model, one_pass, name, dtype):
    tokens, expected = tiny.tokens(1, 120), one_pass
    llama = model
    if dtype != jnp.float32:
        llama = models.Transformer(model.config, dtype=dtype, rngs=nnx.Rngs(1))
    kind = models.cache_by_name(name, 2)
    session = models.start(llama, tokens[:, :100], max_length=120, cache=kind)
    assert session.caches.layers[0].pages.dtype == dtype
    logits = models.score(session, tokens[:, 100:])
    error = float(jnp.linalg.norm(logits - expected) / jnp.linalg.norm(expected))
    # What keys and values have of error, each half of 2**-2 for e5m2 and of 2**-3 for e4m3, or
    # 0.0095 of the square for codes of 4 bits and 0.0345 for 3, for int8 half of a 127th of the
    # largest channel, at most four times the root of the mean square; independent: squares add.
    errors = {
        "paged": (1e-5, 1e-5),
        "fp8_e5m2": (2**-3, 2**-3),
        "turbo4": (0.0975, 0.0975),
        "paged_k8v4": (2**-4, 0.0975),
        "paged_int8": (4 / 254, 4 / 254),
        "turbo_k4v3": (0.0975, 0.186),
    }
    bound = float(np.hypot(*errors[name]))
    if dtype == jnp.bfloat16:
        # The model itself, in bfloat16 and without any cache.
        bound += (
            float(jnp.linalg.norm(llama(tokens)[:, 99:-1] - expected))
            / float(jnp.linalg.norm(expected))
            + 2**-8
        )
    assert error < bound
    if name != "paged":
        assert error > 1e-4


@pytest.mark.quick(slow=1)
@pytest.mark.parametrize("factor", [1, 3e4])
def test_keys_beyond_the_range_of_pages_end_generation(model, factor):
    """They become NaN under `jit`; the most likely token of NaN logits would be some token."""
    decoder = models.unstack(model)
    block = dict(decoder.layers[0])
    kernel = block["attention"]["k_proj"]["kernel"] * factor
    block["attention"] = {**block["attention"], "k_proj": {"kernel": kernel}}
    decoder = dataclasses.replace(decoder, layers=(block,))
    tokens, lengths = tiny.tokens(2, 70), jnp.array([70, 7])
    options = {"max_new_tokens": 8, "lengths": lengths, "cache": "fp8_e4m3"}
    if factor == 1:
        assert models.generate(decoder, tokens, **options).shape == (2, 8)
        return
    with pytest.raises(ValueError, match=r"logits of sequences \[0, 1\] hold NaN.*fp8_e4m3 pages"):
        models.generate(decoder, tokens, **options)
    # Kept as they are, they are no error.
    models.generate(decoder, tokens, **{**options, "cache": "paged"})


@pytest.mark.slow
def test_what_stands_in_the_padding_does_not_matter(model):
    lengths = jnp.array([9, 70])
    tokens = tiny.tokens(2, 70)
    garbage = tokens.at[0, 9:].set(63)

    def run(t):
        return models.start(model, t, max_length=80, cache="turbo4", lengths=lengths)

    a, b = run(tokens), run(garbage)
    np.testing.assert_array_equal(a.logits, b.logits)
    for x, y in zip(jax.tree.leaves(a.caches), jax.tree.leaves(b.caches), strict=True):
        np.testing.assert_array_equal(x, y)


@pytest.mark.slow
def test_a_pooled_prompt_fills_the_pages(model):
    tokens = tiny.tokens(2, 70)
    pooled = models.pooled_by_name("window", window=16, block_size=16)
    session = models.start(model, tokens, max_length=80, cache="turbo4", pooled_prefill=pooled)
    plain = models.start(model, tokens, max_length=80, cache="turbo4")
    # One layer: its keys and values do not depend on how the prompt attended.
    for a, b in zip(jax.tree.leaves(session.caches), jax.tree.leaves(plain.caches), strict=True):
        np.testing.assert_array_equal(a, b)


@pytest.mark.fuzz
def test_a_quantized_model_decodes_through_pages():
    config = dataclasses.replace(models.SHAPES["tiny"], num_layers=1)
    decoder = models.random_quantized_decoder(config)
    tokens = tiny.tokens(2, 12)
    logits = []
    for kind in ("paged", "exact"):
        session = models.start(decoder, tokens[:, :-1], max_length=12, cache=kind)
        logits.append(session.step(tokens[:, -1]).logits)
    # Both hold bfloat16. Sums rounded differently tip a few activations to the next e4m3 number,
    # an eighth away at most.
    paged_logits, expected = logits
    error = jnp.linalg.norm(paged_logits - expected) / jnp.linalg.norm(expected)
    assert float(error) < 2**-3


@pytest.mark.slow
def test_a_step_updates_the_pages_in_place(model):
    decoder = models.unstack(model)
    small, analysis = tiny.compiled_step(decoder, 2, 512, "turbo4")
    large, larger = tiny.compiled_step(decoder, 2, 2048, "turbo4")
    assert analysis.alias_size_in_bytes == small
    assert larger.alias_size_in_bytes == large
    growth = larger.temp_size_in_bytes - analysis.temp_size_in_bytes
    # A copy of one layer's keys would be almost a half.
    assert growth < (large - small) / 4


@pytest.mark.quick(2)
@pytest.mark.gpu
@pytest.mark.parametrize("kind", KINDS)
def test_a_kernel_gives_the_logits_of_the_definition(kind):
    """As close to those of the model in float32 as the definition's, which is in bfloat16, too."""
    config = dataclasses.replace(models.SHAPES["tiny"], head_dim=64, max_length=2048)
    half = models.random_decoder(config)
    single = jax.tree.map(lambda x: x.astype(jnp.float32), half)
    single = dataclasses.replace(single, dtype=jnp.dtype(jnp.float32))
    tokens = jax.random.randint(jax.random.key(0), (3, 700), 0, config.vocab_size)
    lengths = jnp.array([700, 64, 513])

    def logits(decoder, implementation):
        session = models.start(
            decoder,
            tokens,
            max_length=720,
            cache=kind,
            lengths=lengths,
            implementation=implementation,
        )
        return models.score(session, tokens[:, :8])

    expected = logits(single, "xla")

    def error(implementation):
        difference = logits(half, implementation) - expected
        return float(jnp.linalg.norm(difference) / jnp.linalg.norm(expected))

    # Each rounding through the layers lands elsewhere once one of them differs, so that twice the
    # error is as good. A kernel rounds weights and queries as well, to 2**-9 relative at most.
    assert 0 < error(None) < 2 * error("xla") + 2**-8
