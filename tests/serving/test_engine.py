"""The engine's texts, events, results, statistics, and what it refuses."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.serving.engine_helpers import (
    NEW,
    TINY,
    greedy_without_a_cache,
    make,
    requests_of,
    run_one,
    shallow_model,
)
from turbojax import models
from turbojax.models import Engine, Finished, NewToken, Request, Sampling
from turbojax.models.engine import device
from turbojax.models.engine.requests import Status


@pytest.fixture(scope="module")
def model() -> models.Decoder:
    """One layer: quicker to compile."""
    config = dataclasses.replace(TINY, vocab_size=256, num_layers=1)
    return models.random_decoder(config, dtype=jnp.float32)


@pytest.mark.slow
def test_one_program_runs_every_mix(prompts, monkeypatch):
    model = models.random_decoder(dataclasses.replace(TINY, vocab_size=256), dtype=jnp.float32)
    traces = []
    plain = models.Decoder.hidden

    def counted(self, *arguments):
        traces.append(None)
        return plain(self, *arguments)

    monkeypatch.setattr(models.Decoder, "hidden", counted)
    # A size no other test has: what is compiled is kept by shape.
    sizes = {"num_pages": 9, "max_length": 128, "step_tokens": 13, "max_sequences": 3}
    made = make(model, **sizes, reproducible=True)
    mixed = [
        dataclasses.replace(request, sampling=sampling, stop_tokens=stop)
        for request, sampling, stop in zip(
            requests_of(prompts[:4], 0.0),
            (
                Sampling(),
                Sampling(temperature=1.0, top_k=3),
                Sampling(temperature=0.5, top_p=0.9),
                Sampling(temperature=1.0),
            ),
            ((), (5, 6, 7), (), ()),
            strict=True,
        )
    ]
    numbers = [made.add(request) for request in mixed]
    for _ in range(7):
        made.step()
    made.abort(numbers[0])
    made.run()
    assert made.statistics().steps > 10
    assert len(traces) == 1


@pytest.mark.fuzz
def test_a_quantized_model(prompts):
    sizes = {"hidden_size": 64, "intermediate_size": 64, "head_dim": 32, "num_layers": 1}
    config = dataclasses.replace(TINY, **sizes)
    model = models.random_quantized_decoder(config, dtype=jnp.float32)
    wanted = [Request([t % 97 for t in p[:10]], 40) for p in prompts]
    # Programs of other sizes: `test_text_does_not_depend_on_what_else_happens`.
    sizes = {"kv_dtype": "turbo4", "max_length": 64, "num_pages": 6, "reproducible": True}
    single = make(model, **sizes)
    alone = [run_one(single, request) for request in wanted]
    together = make(model, **sizes)
    numbers = [together.add(request) for request in wanted]
    results = together.run()
    assert [results[number].tokens for number in numbers] == alone
    assert together.statistics().preemptions > 0


@pytest.mark.slow
def test_events_tell_the_results(model, prompts):
    made = make(model)
    wanted = requests_of(prompts[2:4], 0.0)
    numbers = [made.add(request) for request in wanted]
    tokens: dict[int, list[int]] = {number: [] for number in numbers}
    results = {}
    for event in made.stream():
        assert event.request_id not in results
        if isinstance(event, NewToken):
            assert event.index == len(tokens[event.request_id])
            tokens[event.request_id].append(event.token)
        else:
            results[event.request_id] = event.result
    assert made.idle
    assert made.step() == []
    for number, request in zip(numbers, wanted, strict=True):
        result = results[number]
        assert result.tokens == tuple(tokens[number])
        assert (result.finish_reason, result.prompt_tokens) == ("length", len(request.tokens))
        assert 0 <= result.waited_seconds <= result.first_token_seconds <= result.seconds


@pytest.mark.slow
def test_stop_tokens_and_progress(model, prompts):
    made = make(model)
    whole = run_one(made, Request(prompts[0], NEW))
    stop = whole[5]
    counts = []
    number = made.add(Request(prompts[0], NEW, stop_tokens=(stop,)))
    result = made.run(counts.append)[number]
    assert result.finish_reason == "stop"
    assert result.tokens == whole[: whole.index(stop) + 1]
    assert sum(counts) == len(result.tokens)


def test_seeds_differ_and_repeat(model, prompts):
    made = make(model)
    drawn = [
        run_one(made, Request(prompts[2], NEW, sampling=Sampling(temperature=1.0, seed=seed)))
        for seed in (1, 2, 1)
    ]
    assert drawn[0] == drawn[2] != drawn[1]


@pytest.mark.quick(first=1)
@pytest.mark.optimized
@pytest.mark.parametrize("kv_dtype", ["auto", "turbo4", "k8v4"])
def test_swapped_pages_return_to_the_bit(kv_dtype):
    model = models.random_decoder(TINY, dtype=jnp.bfloat16)
    made = make(model, kv_dtype=kv_dtype, num_pages=40, max_length=128)
    caches = jax.tree.map(
        lambda x: x if x.ndim == 0 else _random(x.shape, x.dtype), made._device.caches
    )
    before = jax.device_get(caches)
    pages = tuple(range(3, 40, 2))[:19]  # more than one group, the last one not full
    content = device.fetch_pages(device.read_pages(caches, pages))
    assert all(isinstance(leaf, np.ndarray) for leaf in jax.tree.leaves(content))
    targets = tuple(range(0, 38, 2))
    after = jax.device_get(device.write_pages(caches, targets, content))
    for old, new in zip(jax.tree.leaves(before), jax.tree.leaves(after), strict=True):
        if old.ndim == 0:
            assert old == new
            continue
        wanted = old.copy()
        wanted[list(targets)] = old[list(pages)]
        assert wanted.tobytes() == new.tobytes()
    assert device.content_bytes([content]) >= 19 * 2 * made._device.caches[0].page_bytes


def _random(shape, dtype) -> jax.Array:
    values = np.random.default_rng(len(shape)).normal(scale=50.0, size=shape)
    values.flat[7] = 0.0 if dtype == jnp.uint8 else np.nan
    return jnp.asarray(np.abs(values) if dtype == jnp.uint8 else values).astype(dtype)


@pytest.mark.fuzz
def test_a_llama_is_unstacked(tiny_folder):
    llama = models.load_transformer(tiny_folder, dtype=jnp.float32)
    options = {"num_pages": 4, "max_length": 32, "page_size": 16}
    request = Request([1, 2, 3], 5)
    assert run_one(Engine(llama, **options), request) == run_one(
        Engine(models.unstack(llama), **options), request
    )


@pytest.mark.slow
def test_nan_fails_its_own_request_alone():
    model = models.random_decoder(TINY, dtype=jnp.float32)
    broken = dataclasses.replace(model, embedding=model.embedding.at[7].set(jnp.nan))
    good = Request([1, 2, 3], 6)
    # Greedy over logits that hold no NaN: the head must not be the broken embedding.
    broken = dataclasses.replace(broken, lm_head=model.embedding)
    expected = run_one(make(broken, max_length=64, reproducible=True), good)
    made = make(broken, max_length=64, reproducible=True)
    bad_number, number = made.add(Request([4, 7, 5] * 9, 6)), made.add(good)
    results = made.run()
    assert results[number].tokens == expected
    assert results[number].finish_reason == "length"
    assert (results[bad_number].tokens, results[bad_number].finish_reason) == ((), "failed")
    assert results[bad_number].first_token_seconds is None


@pytest.mark.slow
def test_values_beyond_fp8_fail():
    model = models.random_decoder(TINY, dtype=jnp.float32)
    made = make(model, kv_dtype="fp8_e4m3", key_scale=1e-6, max_length=64)
    number = made.add(Request([1, 2, 3], 6))
    assert made.run()[number].finish_reason == "failed"


@pytest.mark.slow
def test_statistics_and_what_a_pool_holds():
    config = dataclasses.replace(TINY, head_dim=128, num_heads=2, num_layers=1)
    model = models.random_decoder(config, dtype=jnp.bfloat16)
    plain = make(model, max_length=64).statistics()
    small = make(model, kv_dtype="turbo4", max_length=64).statistics()
    # Keys and values of two heads: 128 numbers of 2 bytes; 64 bytes and a norm.
    assert (plain.token_bytes, small.token_bytes) == (2 * 2 * 256, 2 * 2 * 66)
    assert small.compression_ratio == pytest.approx(256 / 66)
    assert plain.token_bytes / small.token_bytes >= 3.7
    assert plain.token_capacity == 640
    assert plain.pool_bytes >= 640 * plain.token_bytes
    assert (plain.steps, plain.tokens_per_second, plain.occupancy) == (0, 0.0, 0.0)

    made = make(model, max_length=64, reproducible=True)
    made.add(Request([1] * 40, 9))
    made.add(Request([2] * 3, 9))
    for _ in range(4):
        made.step()
    during = made.statistics()
    assert (during.running, during.waiting) == (2, 0)
    # Two pieces of the first prompt; the second prompt while the first decodes; both decode.
    assert during.tokens_held == 42 + 4
    assert during.occupancy == pytest.approx(4 / 40)
    made.run()
    after = made.statistics()
    assert (after.new_tokens, after.prompt_tokens, after.finished) == (18, 43, 2)
    assert (after.running, after.occupancy) == (0, 0.0)
    # The full pages of the first prompt.
    assert after.cached_pages == 2
    assert after.tokens_per_second > 0
    assert after.to_json()["occupancy"] == 0.0


@pytest.mark.slow
def test_abort_of_running_and_swapped_requests(model, prompts):
    made = make(model, num_pages=11, prefix_caching=False)
    numbers = [made.add(request) for request in requests_of(prompts, 0.0)]
    for _ in range(200):
        if any(s.status is Status.SWAPPED for s in made._tracker.sequences.values()):
            break
        made.step()
    away = next(n for n, s in made._tracker.sequences.items() if s.status is Status.SWAPPED)
    made.abort(away)
    made.abort(numbers[0], reason="stop")
    results = made.run()
    assert results[away].finish_reason == "aborted"
    assert results[numbers[0]].finish_reason == "stop"
    ended = [i for i, number in enumerate(numbers) if number in results]
    tokens = [results[numbers[i]].tokens for i in ended]
    assert tokens == greedy_without_a_cache(model, [prompts[i] for i in ended], tokens, "auto")
    assert made.statistics().free_pages == 11


def test_abort_refuses(model):
    made = make(model)
    number = made.add(Request([1], 1))
    with pytest.raises(ValueError, match="reason='done' must be 'aborted' or 'stop'"):
        made.abort(number, reason="done")
    with pytest.raises(KeyError, match="request 5 is not known"):
        made.abort(5)
    assert made.run()[number].finish_reason == "length"


@pytest.mark.parametrize(
    ("request_", "error", "message"),
    [
        (Request([97], 1), ValueError, "token=97 of a request must be within 0..96"),
        (Request([-1], 1), ValueError, "token=-1 of a request"),
        (Request([1], 1, stop_tokens=[100]), ValueError, "token=100 of a request"),
        (Request([1] * 60, 5), ValueError, "60 tokens and 5 new ones must be at most max_length"),
        (Request([1] * 40, 10), ValueError, "need 4 pages, must be at most num_pages=3"),
        ([1, 2], TypeError, "request is a list, must be a Request"),
    ],
)
def test_add_refuses_what_can_never_run(request_, error, message):
    made = make(models.random_decoder(TINY, dtype=jnp.float32), num_pages=3, max_length=64)
    with pytest.raises(error, match=message):
        made.add(request_)
    assert made.idle
    # 48 places: the last token needs none.
    made.add(Request([1] * 40, 9))


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"num_pages": 0}, ValueError, "num_pages=0 must be at least 1"),
        ({"page_size": 10}, ValueError, "page_size=10 must be one of"),
        ({"max_sequences": 0}, ValueError, "max_sequences=0 must be at least 1"),
        ({"step_tokens": 0}, ValueError, "step_tokens=0 must be at least 1"),
        ({"step_tokens": 2.5}, TypeError, "step_tokens=2.5 must be an integer"),
        ({"max_length": 129}, ValueError, "max_length=129 must be at most the model's 128"),
        ({"kv_dtype": "int3"}, ValueError, "kv_dtype='int3' must be one of"),
        ({"implementation": "fast"}, ValueError, "implementation='fast' must be None or one of"),
        ({"implementation": "jax_triton"}, NotImplementedError, "has no implementation='jax_tri"),
        (
            {"implementation": "mosaic_gpu"},
            NotImplementedError,
            "with kv_dtype='auto' dtype=float32 must",
        ),
        ({"key_scale": 2.0}, ValueError, "key_scale=2.0 has no use"),
        (
            {"cache_results": True, "prefix_caching": False},
            ValueError,
            "cache_results=True has no use with prefix_caching=False",
        ),
    ],
)
def test_an_engine_refuses(options, error, message):
    with pytest.raises(error, match=message):
        Engine(
            models.random_decoder(TINY, dtype=jnp.float32),
            **{"num_pages": 3, "max_length": 64, **options},
        )


def test_an_engine_needs_a_model():
    with pytest.raises(TypeError, match="model is a str, must be a Transformer"):
        Engine("embedded", num_pages=3)


@pytest.fixture(scope="module")
def real_model() -> models.Decoder:
    """One layer: programs of more compile for longer, and batches go through all alike."""
    whole = shallow_model()
    config = dataclasses.replace(whole.config, num_layers=1)
    return dataclasses.replace(whole, layers=whole.layers[:1], config=config)


def run(made: Engine, wanted: list[Request]) -> list[tuple[int, ...]]:
    """The results' tokens; the first half of the requests comes a few steps late, and last."""
    half = len(wanted) // 2
    numbers = {i: made.add(wanted[i]) for i in range(half, len(wanted))}
    results = {}
    for _ in range(5):
        results |= _finished(made.step())
    numbers |= {i: made.add(wanted[i]) for i in range(half)}
    results |= made.run()
    assert all(result.finish_reason == "length" for result in results.values())
    return [results[numbers[i]].tokens for i in range(len(wanted))]


def _finished(events) -> dict:
    return {event.request_id: event.result for event in events if isinstance(event, Finished)}


@pytest.mark.quick(slow=1)
@pytest.mark.parametrize("kv_dtype", ["fp8_e4m3", "int8", "turbo4", "k8v4", "turbo_k4v3"])
def test_greedy_text_is_that_of_the_model_without_a_cache(real_model, prompts, kv_dtype):
    """Of numbers as they are: `test_abort_of_running_and_swapped_requests`."""
    tokens = run(make(real_model, kv_dtype=kv_dtype), requests_of(prompts, 0.0))
    assert tokens == greedy_without_a_cache(real_model, prompts, tokens, kv_dtype)
    assert len(set(tokens)) > 1


@pytest.mark.slow
def test_text_does_not_depend_on_what_else_happens(real_model, prompts):
    """Of turbo4 pages: `test_engine_fuzz.py`."""
    wanted = requests_of(prompts, 0.8)
    # Another size of everything than below, so another program, too.
    small = {"num_pages": 10, "step_tokens": 11, "max_sequences": 3, "reproducible": True}
    single = make(real_model, prefix_caching=False, **small)
    alone = [run_one(single, request) for request in wanted]
    # On a CPU one implementation runs everything, so that results' pages have the same bits, too.
    roomy = make(real_model, cache_results=True, reproducible=True)
    assert run(roomy, wanted) == alone
    assert roomy.statistics().preemptions == 0
    assert roomy.statistics().reused_tokens > 0
    # Again, now that prompts and results are in the pool.
    assert run(roomy, wanted) == alone
    tight = make(real_model, prefix_caching=False, **small)
    assert run(tight, wanted) == alone
    assert tight.statistics().preemptions > 0
    shared = make(real_model, **small)
    assert run(shared, wanted[::-1]) == alone[::-1]
    assert shared.statistics().reused_tokens > 0
