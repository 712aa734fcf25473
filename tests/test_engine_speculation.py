"""Speculation on real models: the same texts as without, whatever is guessed and however pages hold."""

import dataclasses
import functools
import itertools
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from engine_helpers import TINY, make
from engine_watching import check_belief

from turbojax import models
from turbojax.models import Request, Sampling
from turbojax.models.engine import Draft, NGram, making

FORMATS = (
    "turbo4",
    "auto",
    "fp8_e4m3",
    "fp8_e5m2",
    "k8v4",
    "turbo_k4v3",
    "turbo_k3v2",
    "turbo_k2v2",
)
# Of a text that repeats itself, of one that does not, and of one token.
PROMPTS = [1, 2, 3, 4] * 5, [7, 3, 9, 1, 8, 8, 40, 96, 2, 5, 11], [5]
WARM = Sampling(0.6, seed=3)
WANTED = [
    *(Request(prompt, 24) for prompt in PROMPTS),
    *(Request(prompt, 24, sampling=WARM) for prompt in PROMPTS[:2]),
    Request(PROMPTS[0], 24, sampling=Sampling(0.8, top_k=5, seed=1)),
]


@functools.cache
def model(seed: int = 0) -> models.Decoder:
    """One layer whose greedy texts soon repeat themselves, as real ones do now and then."""
    config = dataclasses.replace(TINY, num_layers=1)
    return models.random_decoder(config, seed=seed, dtype=jnp.float32)


@pytest.fixture(autouse=True)
def one_size():
    """Programs of one size: each takes a second to compile."""
    with mock.patch.object(making, "decode_sizes", side_effect=lambda slots: (slots,)):
        yield


def texts(made, wanted=WANTED) -> list[tuple[int, ...]]:
    """What these requests get, that come together; the device holds what the host believes."""
    numbers = [made.add(request) for request in wanted]
    results = {}
    while not made.idle:
        for event in made.step():
            if not hasattr(event, "token"):
                results[event.request_id] = event.result
        check_belief(made, jax.device_get(made._device._state))
    assert all(results[number].finish_reason == "length" for number in numbers)
    return [results[number].tokens for number in numbers]


SIZES = {"max_sequences": 3, "max_length": 64, "num_pages": 12}
GUESSING = {
    "ngram": lambda: NGram(3, longest=3, shortest=1),
    "itself": lambda: Draft(model(), 3),
    "another": lambda: Draft(model(1), 3),
}


@functools.cache
def without(kv_dtype: str) -> list[tuple[int, ...]]:
    return texts(make(model(), kv_dtype=kv_dtype, **SIZES))


@pytest.mark.parametrize("how", GUESSING)
@pytest.mark.parametrize(
    "kv_dtype", [FORMATS[0], *(pytest.param(x, marks=pytest.mark.slow) for x in FORMATS[1:])]
)
def test_texts_are_those_without_guesses(kv_dtype, how):
    made = make(model(), kv_dtype=kv_dtype, speculation=GUESSING[how](), **SIZES)
    assert texts(made) == without(kv_dtype)
    after = made.statistics()
    assert after.steps_of_speculation > 0
    if how == "another":
        assert after.acceptance_rate < 0.5
    else:
        assert after.acceptance_rate > 0.3
