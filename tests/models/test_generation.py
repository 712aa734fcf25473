"""Sessions, scoring and generation, on a tiny random model."""

import dataclasses
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import turbojax as tj
from tests.models import tiny
from turbojax import _device, models
from turbojax.attention import cudnn
from turbojax.caches import exact as exact_attention
from turbojax.caches.exact import cache as exact
from turbojax.models.generation import session as generation

CACHES = ("exact", "4bit", "2/4bit", "3bit", "2bit")
PAGES = ("paged", "fp8_e4m3", "fp8_e5m2", "paged_int8", "turbo4", "paged_k8v4", "turbo_k3v2")


@pytest.fixture(scope="module")
def model() -> models.Transformer:
    return tiny.transformer(num_layers=2, max_length=256)


@pytest.fixture(scope="module")
def shallow(model) -> models.Transformer:
    """One layer: quicker to compile."""
    return models.Transformer(dataclasses.replace(model.config, num_layers=1), rngs=nnx.Rngs(1))


def _tokens(batch: int, length: int, seed: int = 0) -> jax.Array:
    return jax.random.randint(jax.random.key(seed), (batch, length), 0, 64)


@pytest.mark.slow
def test_scoring_through_the_exact_cache_equals_one_forward_pass(model):
    tokens = _tokens(2, 50)
    session = generation.start(model, tokens[:, :30], max_length=50)
    logits = generation.score(session, tokens[:, 30:])
    expected = model(tokens)[:, 29:-1]
    # All is float32: sums of up to 50 terms in another order, 2 ** -24 each.
    np.testing.assert_allclose(logits, expected, atol=1e-5 * float(jnp.std(expected)))


@pytest.mark.quick(slow=1)
@pytest.mark.parametrize("name", ["4bit", "2/4bit"])
def test_every_named_cache_stays_close_to_the_exact_one(shallow, name):
    tokens = _tokens(1, 120)
    kind = models.cache_by_name(name, 2)
    session = generation.start(shallow, tokens[:, :100], max_length=120, cache=kind)
    logits = generation.score(session, tokens[:, 100:])
    expected = shallow(tokens)[:, 99:-1]
    error = float(jnp.linalg.norm(logits - expected) / jnp.linalg.norm(expected))
    # At most the relative error that the codes themselves have on Gaussian tokens.
    assert error < {"4bit": 0.1, "2/4bit": 0.35}[name]


@pytest.mark.slow
def test_ragged_prompts_generate_what_each_generates_alone(shallow):
    kind = tj.TurboConfig(block_kv=16, buffer_size=16, block_q=16)
    tokens, lengths = _tokens(2, 40), (40, 7)
    together = models.generate(
        shallow, tokens, max_new_tokens=12, cache=kind, lengths=jnp.array(lengths)
    )
    for row, length in enumerate(lengths):
        alone = models.generate(
            shallow, tokens[row : row + 1, :length], max_new_tokens=12, cache=kind
        )
        np.testing.assert_array_equal(together[row], alone[0])


@pytest.mark.slow
def test_generation_is_greedy(shallow):
    """Each new token is the likeliest after all tokens before it, in one causal forward pass."""
    tokens = _tokens(1, 10)
    generated = np.asarray(models.generate(shallow, tokens, max_new_tokens=4))
    text = np.concatenate([np.asarray(tokens), generated[:, :-1].astype(tokens.dtype)], axis=1)
    likeliest = np.argmax(shallow(jnp.asarray(text))[0, 9:], axis=-1)
    np.testing.assert_array_equal(generated[0], likeliest)


@pytest.mark.slow
def test_tokens_are_launched_before_those_of_the_launch_before_are_read(shallow, monkeypatch):
    steps, read = [], []
    step, choose = generation.next_tokens, generation.choose

    class Chosen:
        """Tokens that tell how many steps were begun when the host asks for them."""

        def __init__(self, tokens):
            self.tokens = tokens

        def __array__(self, *_, **__):
            read.append(len(steps))
            return np.asarray(self.tokens)

    def counted(*arguments, **options):
        steps.append(None)
        caches, tokens, fed, lengths = step(*arguments, **options)
        return caches, Chosen(tokens), fed, lengths

    def chosen(*arguments, **options):
        tokens, fed = choose(*arguments, **options)
        return Chosen(tokens), fed

    expected = models.generate(shallow, _tokens(1, 10), max_new_tokens=10)
    monkeypatch.setattr(generation, "next_tokens", counted)
    monkeypatch.setattr(generation, "choose", chosen)
    result = models.generate(shallow, _tokens(1, 10), max_new_tokens=10)
    np.testing.assert_array_equal(result, expected)
    # The first token waits for no launch; four each come from the others, the last one's are not
    # all needed.
    assert read == [0, 2, 3, 3]


def test_tokens_are_yielded_before_the_cache_is_found_full(shallow):
    tokens = generation.stream(generation.start(shallow, _tokens(1, 8), max_length=10), 9)
    for _ in range(3):
        next(tokens)
    with pytest.raises(ValueError, match="the cache is full: longest=10 of 10 tokens"):
        next(tokens)


def test_progress_is_called_once_a_token(shallow):
    seen = []
    session = generation.start(shallow, _tokens(1, 8), max_length=20)
    generation.score(session, _tokens(1, 5), seen.append)
    assert seen == [1] * 5


@pytest.mark.parametrize("name", ["4bit", "turbo4"])
def test_every_array_of_the_caches_is_written_to_its_own_memory(shallow, name):
    """In a layer's memory of another array it would be elsewhere after every step."""
    decoder, kind = models.unstack(shallow), models.cache_by_name(name, 2)
    caches = jax.eval_shape(lambda: models.init_caches(decoder, 1, 64, kind))
    tokens = jax.ShapeDtypeStruct((1,), jnp.int32)
    lowered = generation.decode_step.lower(decoder, caches, tokens, tokens, implementation="xla")
    pairs = re.findall(r"%arg(\d+): [^%]*?tf.aliasing_output = (\d+)", lowered.as_text())
    inputs, outputs = ([int(x) for x in numbers] for numbers in zip(*pairs, strict=True))
    first = len(jax.tree.leaves(decoder))
    assert len(outputs) > 5
    assert inputs == [first + number for number in outputs]


@pytest.mark.slow
def test_a_step_updates_compressed_caches_in_place(shallow):
    decoder = models.unstack(shallow)
    small, analysis = tiny.compiled_step(decoder, 2, 2048, tj.TurboConfig())
    large, larger = tiny.compiled_step(decoder, 2, 8192, tj.TurboConfig())
    assert analysis.alias_size_in_bytes == small
    assert larger.alias_size_in_bytes == large
    # Not even one more array of the cache's length, such as the block scales of one layer's keys.
    scales = 2 * 2 * (8192 - 2048) // 64 * 4
    assert larger.temp_size_in_bytes - analysis.temp_size_in_bytes < scales


def test_appending_to_a_donated_exact_cache_needs_no_copy():
    # In float32: a CPU scatters bfloat16 by way of a wider copy.
    cache = jax.eval_shape(lambda: exact.init_cache(2, 4096, 2, 16, dtype=jnp.float32))
    new = jax.ShapeDtypeStruct((2, 1, 2, 16), jnp.float32)
    append = jax.jit(exact.append, donate_argnums=0)
    analysis = append.lower(cache, new, new).compile().memory_analysis()
    assert analysis.alias_size_in_bytes == cache.nbytes
    assert analysis.temp_size_in_bytes < cache.nbytes / 50


@pytest.mark.gpu
@pytest.mark.parametrize("name", [*CACHES, *PAGES])
def test_a_step_needs_no_copy_of_the_caches_on_a_gpu(name):
    config = dataclasses.replace(models.SHAPES["tiny"], head_dim=64, max_length=32768)
    decoder = models.random_decoder(config)
    kind = models.cache_by_name(name, config.num_kv_heads)
    small, analysis = tiny.compiled_step(decoder, 4, 4096, kind)
    large, larger = tiny.compiled_step(decoder, 4, 32768, kind)
    assert larger.alias_size_in_bytes == large
    growth = larger.temp_size_in_bytes - analysis.temp_size_in_bytes
    # One copy of one layer's keys would be a quarter.
    assert growth < (large - small) / 10


@pytest.mark.gpu
def test_cudnn_decodes_ragged_exact_caches():
    query, key, value = (
        jax.random.normal(jax.random.key(i), (3, length, heads, 128)).astype(jnp.bfloat16)
        for i, (length, heads) in enumerate([(1, 8), (100, 2), (100, 2)])
    )
    cache = exact.append(
        exact.init_cache(3, 130, 2, 128), key, value, lengths=jnp.array([100, 1, 37])
    )
    assert cudnn.unsupported(query, cache.key, decoding=True) is None
    results = [tj.decode(query, cache, implementation=i) for i in ("xla", "cudnn")]
    # bfloat16 outputs, and weights rounded to it: 2 ** -8 of values of about 1.
    np.testing.assert_allclose(*(r.astype(jnp.float32) for r in results), atol=0.03, rtol=2**-7)
    results = [
        exact_attention.attention(key, key, value, implementation=i) for i in ("xla", "cudnn")
    ]
    np.testing.assert_allclose(*(r.astype(jnp.float32) for r in results), atol=0.03, rtol=2**-7)


@pytest.mark.quick(1)
@pytest.mark.parametrize("config", [{}, {"tie_embeddings": True}])
def test_an_unstacked_model_computes_the_same(model, config):
    llama = models.Transformer(dataclasses.replace(model.config, **config), rngs=nnx.Rngs(2))
    decoder = models.unstack(llama)
    tokens = _tokens(2, 9)

    def attend(query, key, value, cache, options=None):
        return exact_attention.attention(query, key, value), cache

    positions = jnp.broadcast_to(jnp.arange(9)[None], (2, 9))
    hidden, _ = decoder.hidden(tokens, positions, attend, (None, None))
    np.testing.assert_allclose(decoder.logits(hidden), llama(tokens), atol=1e-5)
    assert decoder.nbytes == sum(x.nbytes for x in jax.tree.leaves(nnx.state(llama)))
    assert decoder.nbytes == 4 * llama.config.num_parameters


@pytest.mark.slow
def test_a_consumed_model_gives_its_memory_back(model):
    llama = models.Transformer(model.config, rngs=nnx.Rngs(1))
    kernel = llama.blocks.mlp.gate_proj.kernel.get_value()
    decoder = models.unstack(llama, consume=True)
    assert kernel.is_deleted()
    tokens = _tokens(1, 5)
    np.testing.assert_array_equal(
        models.generate(decoder, tokens, max_new_tokens=3),
        models.generate(model, tokens, max_new_tokens=3),
    )


def test_a_random_decoder_has_the_shape_of_its_config():
    decoder = models.random_decoder(models.SHAPES["tiny"])
    assert decoder.nbytes == 2 * models.SHAPES["tiny"].num_parameters
    assert {x.dtype for x in jax.tree.leaves(decoder)} == {jnp.dtype(jnp.bfloat16)}
    first, second = (layer["mlp"]["up_proj"]["kernel"] for layer in decoder.layers)
    assert not np.array_equal(first, second)
    parameters = models.SHAPES["llama-3-8b"].num_parameters
    assert 8.02e9 < parameters < 8.04e9


@pytest.mark.quick(slow=1)
@pytest.mark.parametrize("kind", ["exact", tj.TurboConfig(block_kv=16, buffer_size=16, block_q=16)])
def test_prompts_in_microbatches_give_the_same_session(shallow, kind):
    tokens, lengths = _tokens(5, 20), jnp.array([20, 3, 17, 16, 1])

    def begin(size):
        return generation.start(
            shallow, tokens, max_length=30, cache=kind, lengths=lengths, prefill_batch_size=size
        )

    whole, parts = begin(None), begin(3)
    np.testing.assert_array_equal(whole.lengths, parts.lengths)
    assert whole.longest == parts.longest == 20
    np.testing.assert_allclose(whole.logits, parts.logits, atol=1e-5)
    for a, b in zip(jax.tree.leaves(whole.caches), jax.tree.leaves(parts.caches), strict=True):
        if a.dtype == jnp.float32:
            # Sums of 32 and 48 products, of values about 1, in another order.
            np.testing.assert_allclose(a, b, atol=1e-5)
            continue
        # They round to another code now and then.
        differ = np.mean(np.asarray(a, np.float32) != np.asarray(b, np.float32))
        assert differ < 0.01


@pytest.mark.slow
def test_a_named_implementation_reaches_every_op(shallow):
    tokens = _tokens(1, 8)
    for kind in ("exact", tj.TurboConfig()):
        session = generation.start(shallow, tokens, max_length=16, cache=kind, implementation="xla")
        assert session.step(tokens[:, 0]).implementation == "xla"
        if kind != "exact":  # what exact caches have of that name only decodes
            with pytest.raises((ValueError, NotImplementedError), match="mosaic_gpu"):
                generation.start(
                    shallow, tokens, max_length=16, cache=kind, implementation="mosaic_gpu"
                )
        unable = dataclasses.replace(
            generation.start(shallow, tokens, max_length=16, cache=kind),
            implementation="mosaic_gpu",
        )
        with pytest.raises((ValueError, NotImplementedError), match="mosaic_gpu"):
            unable.step(tokens[:, 0])


def test_cudnn_is_chosen_where_it_can_run(monkeypatch):
    def shape(length, heads, channels=128, dtype=jnp.bfloat16):
        return jax.ShapeDtypeStruct((2, length, heads, channels), dtype)

    query, key = shape(1, 4), shape(64, 2)
    refusal = cudnn.unsupported(query, key)
    if jax.default_backend() != "gpu":
        assert "needs an NVIDIA GPU of compute capability 8.0 or newer, not cpu" in refusal
    monkeypatch.setattr(_device, "gpu_compute_capability", lambda: 7.5)
    assert "not compute capability 7.5" in cudnn.unsupported(query, key)
    monkeypatch.setattr(_device, "gpu_compute_capability", lambda: 9.0)
    monkeypatch.setattr(cudnn, "missing", lambda: None)
    assert cudnn.unsupported(query, key, decoding=True) is None
    for arguments, words in [
        ((shape(1, 4, dtype=jnp.float32), key), "float32 must be bfloat16 or float16"),
        ((shape(1, 4, dtype=jnp.float16), key), "bfloat16 must equal query.dtype=float16"),
        ((shape(1, 4, 160), shape(64, 2, 160)), "160 must be a multiple of 8 and at most 128"),
        ((shape(3, 4), key), "3 queries per sequence must be 1"),
    ]:
        assert words in cudnn.unsupported(*arguments, decoding=True)


def test_nbytes_counts_all_layers(model):
    caches = models.init_caches(model, 3, 100, tj.TurboConfig())
    assert caches.nbytes == sum(x.nbytes for x in jax.tree.leaves(caches))
    layer = tj.init_cache(3, 100, 2, 16, dtype=jnp.float32)
    assert caches.nbytes == 2 * layer.nbytes


def test_bad_calls_say_what_is_wrong(model):
    tokens = _tokens(1, 10)
    with pytest.raises(ValueError, match=r"260 tokens.*max_length=256"):
        models.generate(model, tokens, max_new_tokens=250)
    with pytest.raises(ValueError, match=r"max_new_tokens=0 must be at least 1"):
        models.generate(model, tokens, max_new_tokens=0)
    with pytest.raises(ValueError, match=r"prompts of 10 tokens.*max_length=8"):
        generation.start(model, tokens, max_length=8)
    with pytest.raises(ValueError, match=r"lengths=\[0\] must be at least 1"):
        generation.start(model, tokens, max_length=20, lengths=jnp.array([0]))
    with pytest.raises(ValueError, match=r"lengths=\[11\] must be between 0 and 10"):
        generation.start(model, tokens, max_length=20, lengths=jnp.array([11]))
    with pytest.raises(ValueError, match=r"tokens.shape=\(10,\) must be \[B, T\]"):
        generation.start(model, tokens[0], max_length=20)
    with pytest.raises(ValueError, match="must be 'exact', 'kv4', .*'turbo4'.* or a TurboConfig"):
        models.init_caches(model, 1, 10, "4bit")
    with pytest.raises(ValueError, match=r"tokens in -5..99 must be within 0..63"):
        models.generate(model, jnp.array([[99, -5]]), max_new_tokens=1)
    with pytest.raises(TypeError, match="tokens.dtype=float32 must be an integer"):
        models.generate(model, jnp.ones((1, 4)), max_new_tokens=1)
    with pytest.raises(ValueError, match=r"max_length=1000 must be at most the model's 256"):
        generation.start(model, tokens, max_length=1000)
    with pytest.raises(ValueError, match="prefill_batch_size=0 must be at least 1"):
        generation.start(model, tokens, max_length=20, prefill_batch_size=0)
    with pytest.raises(ValueError, match=r"tokens.shape=\(2,\) must be \(1,\)"):
        generation.start(model, tokens, max_length=20).step(jnp.array([1, 2]))
    session = generation.start(model, tokens, max_length=10)
    with pytest.raises(ValueError, match="the cache is full"):
        session.step(tokens[:, 0])


def test_cache_names():
    assert models.cache_by_name("exact", 4) == "exact"
    assert models.cache_by_name("3bit", 4) == tj.TurboConfig(key_bits=3, value_bits=3)
    half = models.cache_by_name("2/4bit", 4)
    assert (half.num_low_bit_key_heads, half.num_low_bit_value_heads) == (2, 2)
    with pytest.raises(ValueError, match="'5bit' must be one of exact, 4bit"):
        models.cache_by_name("5bit", 4)
    of_three = models.cache_by_name("2/4bit", 3)
    assert (of_three.num_low_bit_key_heads, of_three.num_low_bit_value_heads) == (1, 2)
