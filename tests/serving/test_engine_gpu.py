"""The engine compiled for a GPU: tokens depend on nothing else, or are right within rounding."""

import dataclasses
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.serving.engine_helpers import make, real_prompts, requests_of, run_one
from turbojax import models
from turbojax.models import Draft, Engine, Finished, NGram, Request, Sampling, causal_attention
from turbojax.models.engine import engine, programs

pytestmark = pytest.mark.gpu


@pytest.mark.quick(2)
@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.parametrize("kv_dtype", ["auto", "fp8_e4m3", "int8", "turbo4", "k8v4"])
def test_text_does_not_depend_on_what_else_happens(kv_dtype, temperature):
    whole = models.unstack(models.load(dtype=jnp.bfloat16))
    _check(whole, requests_of(real_prompts(), temperature), kv_dtype)


def test_a_quantized_model():
    shape = dataclasses.replace(models.SHAPES["tiny"], hidden_size=256, head_dim=128, num_heads=4)
    model = models.random_quantized_decoder(shape, dtype=jnp.bfloat16)
    _check(model, requests_of(real_prompts(), 0.0), "turbo4")


def _check(model, wanted, kv_dtype):
    single = make(model, kv_dtype=kv_dtype, prefix_caching=False, reproducible=True)
    alone = [run_one(single, request) for request in wanted]
    for options in (
        {"num_pages": 40},
        {"num_pages": 10},
        {"num_pages": 10, "prefix_caching": False},
    ):
        made = make(model, kv_dtype=kv_dtype, reproducible=True, **options)
        numbers = [made.add(request) for request in wanted]
        results = made.run()
        assert [results[number].tokens for number in numbers] == alone, options
    assert made.statistics().preemptions > 0


@pytest.mark.quick(1)
@pytest.mark.parametrize("kv_dtype", ["auto", "fp8_e4m3", "turbo4"])
def test_texts_stay_the_same_where_pages_behind_windows_are_freed(kv_dtype):
    config = dataclasses.replace(
        models.SHAPES["tiny"], head_dim=128, num_layers=3, local_windows=(24, None, 24)
    )
    model = models.random_decoder(config, dtype=jnp.bfloat16)
    with mock.patch.object(engine, "windows_of", return_value=(None,)):
        kept = make(model, kv_dtype=kv_dtype, prefix_caching=False, reproducible=True)
    wanted = requests_of(real_prompts(), 0.0)
    alone = [run_one(kept, request) for request in wanted]
    for num_pages in (40, 10):
        made = make(model, kv_dtype=kv_dtype, num_pages=num_pages, reproducible=True)
        numbers = [made.add(request) for request in wanted]
        results = made.run()
        assert [results[number].tokens for number in numbers] == alone
    assert made.statistics().preemptions > 0
    assert [group.window for group in made.statistics().groups] == [None, 24]


@pytest.mark.quick(2)
@pytest.mark.parametrize("kv_dtype", ["auto", "fp8_e4m3", "int8", "turbo4", "k8v4"])
@pytest.mark.parametrize("windows", [(24, None), (24, 24), (64, 64)])
def test_nan_in_pages_that_a_window_has_left_reaches_nobody(kv_dtype, windows):
    """Tables on the device keep the numbers of pages that others have by then."""
    config = dataclasses.replace(
        models.SHAPES["tiny"], head_dim=128, num_layers=2, local_windows=windows
    )
    plain = models.random_decoder(config, dtype=jnp.bfloat16)
    embedding = plain.embedding.at[7].set(jnp.nan)
    model = dataclasses.replace(plain, embedding=embedding, lm_head=plain.embedding)
    made = make(model, kv_dtype=kv_dtype, num_pages=12, max_sequences=2, prefix_caching=False)
    good = made.add(Request([1, 2, 3] * 15, 60))
    reasons = {}
    while good not in reasons:
        if made.statistics().running < 2 and made.statistics().waiting == 0:
            made.add(Request([4, 7, 5] * 9, 6))
        for event in made.step():
            if isinstance(event, Finished):
                reasons[event.request_id] = event.result.finish_reason
    assert reasons.pop(good) == "length"
    assert set(reasons.values()) == {"failed"}
    assert len(reasons) > 5


# By how much log-probabilities may be off those of the model without a cache, at most.
OFF = {"auto": 0.2, "fp8_e4m3": 0.6, "int8": 0.3, "turbo4": 1.5, "k8v4": 1.5, "turbo_k4v3": 4.0}
# In the mean a wrong token costs far more.
MEAN_OFF = 0.1
NEW, LENGTH = 24, 768


@pytest.fixture(scope="module")
def model() -> models.Decoder:
    return models.unstack(models.load(dtype=jnp.bfloat16))


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    """Python of this file, from a few tokens to more than a step's."""
    with open(__file__, "rb") as file:
        text = file.read()
    cuts = (0, 5), (0, 100), (7, 40), (100, 400), (0, 700), (0, 90), (300, 620), (50, 51)
    return [[0, *text[first:end]] for first, end in cuts]


def steps_of(model: models.Decoder, prompts, results) -> tuple[np.ndarray, np.ndarray]:
    """Log-probabilities of each result's tokens, and of the most likely ones, without a cache."""
    tokens = np.zeros((len(prompts), LENGTH), np.int32)
    for row, prompt, result in zip(tokens, prompts, results, strict=True):
        row[: len(prompt) + len(result)] = [*prompt, *result]

    def attend(query, key, value, cache, options=None, sinks=None):
        return causal_attention(query, key, value, cache)

    @jax.jit
    def run(decoder, tokens):
        positions = jnp.broadcast_to(jnp.arange(LENGTH)[None], tokens.shape)
        hidden, _ = decoder.hidden(tokens, positions, attend, (None,) * decoder.config.num_layers)
        return jax.nn.log_softmax(decoder.logits(hidden), axis=-1)

    found = np.asarray(run(model, jnp.asarray(tokens)))
    chosen, best = [], []
    for row, prompt, result in zip(found, prompts, results, strict=True):
        at = len(prompt) - 1 + np.arange(len(result))
        chosen.append(row[at, list(result)])
        best.append(row[at].max(axis=-1))
    return np.array(chosen), np.array(best)


def run_all(made: Engine, wanted: list[Request]) -> list:
    numbers = [made.add(request) for request in wanted]
    results = made.run()
    return [results[number] for number in numbers]


@pytest.mark.quick(3)
@pytest.mark.parametrize("speculation", [None, "ngram", "draft"])
@pytest.mark.parametrize("kv_dtype", list(OFF))
def test_greedy_tokens_are_about_the_most_likely(model, prompts, kv_dtype, speculation):
    """A wrong page, place or length would make them unlikely."""
    how = {
        None: None,
        "ngram": NGram(),
        "draft": Draft(
            dataclasses.replace(
                model,
                layers=model.layers[:2],
                config=dataclasses.replace(model.config, num_layers=2),
            )
        ),
    }
    made = make(
        model,
        kv_dtype=kv_dtype,
        num_pages=120,
        max_sequences=6,
        max_length=LENGTH,
        step_tokens=512,
        reproducible=False,
        speculation=how[speculation],
    )
    # Beginnings of other requests that follow: some of these find their pages.
    wanted = [Request(prompt, NEW) for prompt in (*prompts, *prompts)]
    results = run_all(made, wanted)
    chosen, best = steps_of(model, [*prompts, *prompts], [result.tokens for result in results])
    off = best - chosen
    print(kv_dtype, speculation, "off", off.max(), off.mean())
    assert off.max() < OFF[kv_dtype]
    assert off.mean() < MEAN_OFF
    held = made.statistics()
    assert held.reused_tokens > 0
    if speculation is not None:
        assert held.steps_of_speculation > 0
        assert held.accepted_tokens > 0


@pytest.mark.parametrize("kv_dtype", ["auto", "turbo4"])
def test_log_probabilities_are_those_of_the_model(model, prompts, kv_dtype):
    made = make(
        model,
        kv_dtype=kv_dtype,
        num_pages=400,
        max_length=LENGTH,
        step_tokens=512,
        reproducible=False,
    )
    sampling = Sampling(temperature=0.8, top_p=0.9, seed=3)
    wanted = [Request(prompt, NEW, sampling=sampling, logprobs=2) for prompt in prompts]
    results = run_all(made, wanted)
    chosen, best = steps_of(model, prompts, [result.tokens for result in results])
    told = np.array([[x.logprob for x in result.logprobs] for result in results])
    top = np.array([[x.top[0][1] for x in result.logprobs] for result in results])
    assert np.abs(top - best).max() < OFF[kv_dtype]
    assert np.abs(told - chosen).mean() < OFF[kv_dtype] / 3


def test_nothing_is_compiled_while_it_serves(model, prompts):
    made = make(
        model,
        kv_dtype="turbo4",
        num_pages=400,
        max_length=LENGTH,
        step_tokens=512,
        reproducible=False,
    )
    made.compile()
    before = programs.count_traced()
    drawn = Sampling(temperature=0.7, top_k=20)
    wanted = [Request(p, NEW, sampling=s) for p in prompts for s in (Sampling(), drawn)]
    run_all(made, wanted)
    assert programs.count_traced() == before
