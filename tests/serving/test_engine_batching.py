"""What the engine generates does not depend on what else it does, and is right."""

import dataclasses

import pytest

from tests.serving.engine_helpers import (
    greedy_without_a_cache,
    make,
    requests_of,
    run_one,
    shallow_model,
)
from turbojax import models
from turbojax.models import Engine, Finished, Request


@pytest.fixture(scope="module")
def model() -> models.Decoder:
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
def test_greedy_text_is_that_of_the_model_without_a_cache(model, prompts, kv_dtype):
    """Of numbers as they are: `test_engine.py`."""
    tokens = run(make(model, kv_dtype=kv_dtype), requests_of(prompts, 0.0))
    assert tokens == greedy_without_a_cache(model, prompts, tokens, kv_dtype)
    assert len(set(tokens)) > 1


@pytest.mark.slow
def test_text_does_not_depend_on_what_else_happens(model, prompts):
    """Of turbo4 pages: `test_engine_fuzz.py`."""
    wanted = requests_of(prompts, 0.8)
    # Another size of everything than below, so another program, too.
    small = {"num_pages": 10, "step_tokens": 11, "max_sequences": 3, "reproducible": True}
    single = make(model, prefix_caching=False, **small)
    alone = [run_one(single, request) for request in wanted]
    # On a CPU one implementation runs everything, so that results' pages have the same bits, too.
    roomy = make(model, cache_results=True, reproducible=True)
    assert run(roomy, wanted) == alone
    assert roomy.statistics().preemptions == 0
    assert roomy.statistics().reused_tokens > 0
    # Again, now that prompts and results are in the pool.
    assert run(roomy, wanted) == alone
    tight = make(model, prefix_caching=False, **small)
    assert run(tight, wanted) == alone
    assert tight.statistics().preemptions > 0
    shared = make(model, **small)
    assert run(shared, wanted[::-1]) == alone[::-1]
    assert shared.statistics().reused_tokens > 0
