"""Sizes that calls of `generate` share: few programs, and the texts of exact sizes."""

import warnings

import jax
import numpy as np
import pytest

import turbojax as tj
from tests.models import hf_helpers as hf
from tests.models import tiny
from turbojax import models
from turbojax.app.generate import run as text
from turbojax.app.text_model import TextModel
from turbojax.caches.comparison.kinds import KIVI
from turbojax.models import GREEDY, Sampling
from turbojax.models.generation import session as generation
from turbojax.models.generation import steps
from turbojax.models.generation.padding import bucket, cache_bucket, prompt_bucket
from turbojax.models.text.tokenizer import NumberTokenizer

SMALL_BLOCKS = tj.TurboConfig(block_kv=16, buffer_size=16, block_q=16)
WARM = Sampling(temperature=0.9, top_p=0.95, seed=3)
# For comparison, without programs of their own; `test_baseline_kinds.py` generates with some.
COMPARED = (*KIVI.names, "int8", "int4", "e4m3")
CACHES = {
    **{name: models.cache_by_name(name, 2) for name in models.CACHE_NAMES if name not in COMPARED},
    "16-token blocks": SMALL_BLOCKS,
}
LIMIT = 250


@pytest.fixture(scope="module")
def model() -> models.Decoder:
    return models.unstack(tiny.transformer(max_length=LIMIT))


@pytest.fixture(scope="module")
def gemma(decoder, request) -> models.Decoder:
    """With windows, soft caps and groups of heads; or windows with a RoPE of their own."""
    return decoder(request.param)


@pytest.fixture
def compiled():
    """How many programs were compiled so far, of any size; reading one from disk counts."""
    seconds = []

    def listen(event: str, duration: float, **_: object) -> None:
        if event == "/jax/core/compile/backend_compile_duration":
            seconds.append(duration)

    jax.monitoring.register_event_duration_secs_listener(listen)
    yield lambda: len(seconds)
    jax.monitoring.unregister_event_duration_listener(listen)


def prompts(batch: int, length: int, vocab: int = 64) -> np.ndarray:
    rng = np.random.default_rng(length)
    return rng.integers(vocab, size=(batch, length), dtype=np.int32)


def exactly(model, tokens, new, sampling=GREEDY, **options) -> np.ndarray:
    """What `generate` gives with sizes as they are."""
    session = models.start(model, tokens, max_length=tokens.shape[1] + new, **options)
    return np.stack(list(models.stream(session, new, sampling=sampling)), axis=1)


def test_sizes_are_few_and_not_much_larger():
    sizes = [bucket(n) for n in range(1, 5001)]
    for n, size in enumerate(sizes, 1):
        assert n <= size == bucket(size) < max(n + 64, 1.25 * n)
        assert cache_bucket(n, 100, 10**6) == size + 128
    assert sorted(set(sizes[:1024])) == [32, *range(64, 513, 64), 640, 768, 896, 1024]
    assert sizes == sorted(sizes)
    # The model's limit is a size, too.
    assert (prompt_bucket(97, 100), cache_bucket(97, 3, 100), cache_bucket(5, 3, 40)) == (
        100,
        100,
        40,
    )
    assert bucket(np.int32(70)) == 128


@pytest.mark.fuzz
@pytest.mark.parametrize("cache", ["exact", "4bit", "paged"])
def test_twenty_lengths_compile_one_pair_of_programs_for_each_size(model, cache, compiled):
    def run(length, new):
        tokens = prompts(1, length)
        # Lists and 64 bits are no programs of their own.
        given = [tokens, jax.device_put(tokens), tokens.astype(np.int64), tokens.tolist()][
            length % 4
        ]
        models.generate(model, given, max_new_tokens=new, cache=CACHES[cache])

    lengths = range(3, 123, 6)
    sizes = {bucket(length) for length in lengths}
    assert (len(lengths), sizes) == (20, {32, 64, 128})
    begun = compiled()
    prefills, decodes = steps.run_prompts._cache_size(), steps.next_tokens._cache_size()
    for length in lengths:
        run(length, 4)
    assert steps.run_prompts._cache_size() - prefills <= len(sizes)
    assert steps.next_tokens._cache_size() - decodes <= len(sizes)
    # Besides these two: empty caches for each size, and once the choice of a token.
    assert compiled() - begun <= 3 * len(sizes) + 1
    begun = compiled()
    for length, new in [(4, 3), (31, 32), (32, 7), (34, 20), (63, 4), (101, 5), (128, 9)]:
        run(length, new)
    assert compiled() == begun


@pytest.mark.quick(slow=1)
@pytest.mark.parametrize("options", ["lengths", "attention_mask", "prefill_batch_size"])
def test_batches_of_other_lengths_compile_nothing(model, compiled, options):
    def run(first, second, width):
        tokens, lengths = prompts(2, width), np.array([first, second])
        given = {
            "lengths": {"lengths": lengths},
            "prefill_batch_size": {"lengths": lengths, "prefill_batch_size": 1},
            "attention_mask": {"attention_mask": np.arange(width) >= width - lengths[:, None]},
        }[options]
        models.generate(model, tokens, max_new_tokens=4, **given)

    run(40, 3, 45)
    begun = compiled()
    # What counts is the longest prompt: not the width, nor the shorter one.
    for first, second, width in [(50, 3, 50), (1, 64, 70), (33, 33, 90)]:
        run(first, second, width)
    assert compiled() == begun


@pytest.mark.fuzz
@pytest.mark.parametrize("length", [5, 45, 70])
@pytest.mark.parametrize("cache", CACHES)
def test_texts_are_those_of_exact_sizes(model, cache, length):
    tokens, options = prompts(2, length), {"cache": CACHES[cache]}
    for sampling in (GREEDY, WARM):
        given = {"max_new_tokens": 12, "sampling": sampling, **options}
        new = models.generate(model, tokens, **given)
        np.testing.assert_array_equal(new, exactly(model, tokens, 12, sampling, **options))
    held = np.array([length, 4])
    ragged = models.generate(model, tokens, **given, lengths=held, prefill_batch_size=1)
    wanted = exactly(model, tokens, 12, WARM, **options, lengths=held, prefill_batch_size=1)
    np.testing.assert_array_equal(ragged, wanted)
    mask = np.arange(length)[None] < held[:, None]
    left = np.stack([np.roll(row, length - n) for row, n in zip(tokens, held, strict=True)])
    padded = models.generate(model, left, **given, attention_mask=mask[:, ::-1])
    np.testing.assert_array_equal(padded, ragged)


@pytest.mark.fuzz
@pytest.mark.parametrize("gemma", ["gemma2", "gemma3-odd"], indirect=True)
@pytest.mark.parametrize("cache", CACHES)
def test_windows_and_caps_do_not_see_the_padding(gemma, cache):
    tokens, options = prompts(2, 45, hf.VOCAB), {"cache": CACHES[cache]}
    options["lengths"] = np.array([45, 6])
    new = models.generate(gemma, tokens, max_new_tokens=20, **options)
    np.testing.assert_array_equal(new, exactly(gemma, tokens, 20, **options))


def test_what_fits_a_model_still_fits(model):
    tokens = prompts(1, LIMIT - 5)
    new = models.generate(model, tokens, max_new_tokens=np.int64(5))
    np.testing.assert_array_equal(new, exactly(model, tokens, 5))
    with pytest.raises(ValueError, match=r"251 tokens, 245 of the longest .* max_length=250"):
        models.generate(model, tokens, max_new_tokens=6)


def test_errors_name_the_sizes_that_were_given(model):
    tokens = prompts(1, 10)
    with pytest.raises(ValueError, match=r"lengths=\[11\] must be between 0 and 10"):
        models.generate(model, tokens, max_new_tokens=2, lengths=np.array([11]))
    with pytest.raises(ValueError, match=r"lengths=\[0\] must be at least 1"):
        models.generate(model, tokens, max_new_tokens=2, lengths=np.array([0]))
    with pytest.raises(ValueError, match=r"tokens.shape=\(10,\) must be \[B, T\]"):
        models.generate(model, tokens[0], max_new_tokens=2)
    with pytest.raises(ValueError, match=r"tokens.shape=\(\) must be \[B, T\]"):
        models.generate(model, 3, max_new_tokens=2)
    with pytest.raises(ValueError, match=r"cache=\['exact'\] must be 'exact'"):
        models.generate(model, tokens, max_new_tokens=2, cache=["exact"])
    run = {"max_new_tokens": LIMIT, "cache": "exact"}
    with pytest.raises(ValueError, match="max_length=260 must be at most the model's 250"):
        text.run(TextModel(model, NumberTokenizer(64)), tokens, **run)


@pytest.mark.fuzz
def test_longrope_has_the_factors_of_the_tokens_asked_for(tmp_path):
    """The tiny Phi-3 was made for 32 tokens, and caches for 20 and 10 of them hold 64."""
    decoder = models.load_decoder(hf.write("phi3-longrope", tmp_path))
    tokens = prompts(1, 20, hf.VOCAB)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        short = models.generate(decoder, tokens, max_new_tokens=12)
    np.testing.assert_array_equal(short, exactly(decoder, tokens, 12))
    with pytest.warns(UserWarning, match=r"(?s)up to 32 tokens.*here to 34") as caught:
        long = models.generate(decoder, tokens, max_new_tokens=14)
    assert [warning.filename for warning in caught] == [__file__]
    with pytest.warns(UserWarning, match="LongRoPE"):
        np.testing.assert_array_equal(long, exactly(decoder, tokens, 14))
    assert not np.array_equal(short, long[:, :12])


@pytest.mark.fuzz
@pytest.mark.parametrize("policy", ["window", "topk"])
def test_prompts_of_pooled_attention_keep_their_size(model, policy):
    pooled = models.pooled_by_name(policy, window=16 if policy == "window" else None, block_size=16)
    tokens, options = prompts(1, 45), {"pooled_prefill": pooled}
    new = models.generate(model, tokens, max_new_tokens=6, **options)
    np.testing.assert_array_equal(new, exactly(model, tokens, 6, **options))
    decodes = steps.next_tokens._cache_size()
    models.generate(model, tokens[:, :40], max_new_tokens=7, **options)
    assert steps.next_tokens._cache_size() == decodes


@pytest.mark.slow
def test_the_command_shares_sizes_and_counts_what_it_allocates(model, compiled):
    source = TextModel(model, NumberTokenizer(64))

    def run(length, new):
        options = {"max_new_tokens": new, "cache": "4bit"}
        return text.run(source, prompts(1, length), **options)

    report = run(20, 5)
    begun = compiled()
    other = run(30, 8)
    assert compiled() == begun
    allocated = models.init_caches(model, 1, 64, CACHES["4bit"])
    for each, length in ((report, 20), (other, 30)):
        assert (each.prompt_tokens, each.cache_bytes) == (length, allocated.nbytes)
        assert each.compression_ratio == allocated.compression_ratio
    session = generation.start(model, prompts(1, 20), max_length=25, cache=CACHES["4bit"])
    assert session.caches.max_length == 25
