"""The engine compiled for a GPU: a request's tokens do not depend on what else it does."""

import dataclasses
from unittest import mock

import jax.numpy as jnp
import pytest

from tests.serving.engine_helpers import make, real_prompts, requests_of, run_one
from turbojax import models
from turbojax.models import Finished, Request
from turbojax.models.engine import engine

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
