"""What an engine's requests may wish for: texts and log-probabilities, against a whole pass."""

import dataclasses
import math

import numpy as np
import pytest

from tests.benchmarks.sampler_helpers import Row, changed, log_softmax
from tests.serving.engine_helpers import TINY, logits_without_a_cache
from turbojax.models import (
    AllowedTokens,
    Engine,
    Penalties,
    Request,
    Sampling,
)

VOCABULARY = TINY.vocab_size


def after(tokens: tuple[int, ...]) -> np.ndarray:
    """Tokens of the other parity than the last, and none of the first ten."""
    parity = 1 - tokens[-1] % 2 if tokens else 0
    numbers = np.arange(VOCABULARY)
    return (numbers % 2 == parity) & (numbers >= 10)


WISHES = [
    {"logprobs": 5},
    {"penalties": Penalties(1.4, 0.3, 0.2)},
    {"penalties": Penalties(frequency=-0.5), "logprobs": 0},
    {"logit_bias": {11: 0.4, 12: 0.4, 0: -math.inf}, "logprobs": 20},
    {"constraint": AllowedTokens(after, VOCABULARY), "logprobs": 1},
    {"constraint": AllowedTokens(after, VOCABULARY), "penalties": Penalties(1.2, 0.5)},
    {},
]


def engine(model, **options) -> Engine:
    settings = {"num_pages": 60, "page_size": 16, "max_sequences": 8, "max_length": 64}
    return Engine(model, **{"step_tokens": 256, **settings, **options})


def requests(sampling: Sampling | None = None) -> list[Request]:
    rng = np.random.default_rng(1)
    return [
        Request(
            rng.integers(0, VOCABULARY, 3 + 5 * i).tolist(),
            14,
            sampling=Sampling() if sampling is None else dataclasses.replace(sampling, seed=i),
            **wish,
        )
        for i, wish in enumerate(WISHES)
    ]


@pytest.mark.slow
def test_greedy_texts_are_those_of_the_definition(model):
    made, wanted = engine(model), requests()
    numbers = [made.add(request) for request in wanted]
    found = made.run()
    results = [found[number] for number in numbers]
    texts = [
        [*request.tokens, *result.tokens] for request, result in zip(wanted, results, strict=True)
    ]
    logits = np.asarray(logits_without_a_cache(model, texts, 64))
    for i, (request, result, text) in enumerate(zip(wanted, results, texts, strict=True)):
        assert result.finish_reason == "length"
        prompt = len(request.tokens)
        for place, token in enumerate(result.tokens):
            raw = logits[i, prompt + place - 1]
            allowed = None if request.constraint is None else after(result.tokens[:place])
            row = Row(request, i, prompt + place, prompt, allowed)
            values = changed(raw, np.asarray(text), row)
            # The engine's logits differ in rounding from those of a whole pass.
            assert values[token] >= values.max() - 1e-4, (i, place)
            if request.logprobs is None:
                continue
            entry, exact = result.logprobs[place], log_softmax(raw)
            assert entry.logprob == pytest.approx(exact[token], abs=1e-4)
            assert len(entry.top) == request.logprobs
            best = np.sort(exact)[::-1][: request.logprobs]
            np.testing.assert_allclose([x for _, x in entry.top], best, atol=1e-4)
        assert (result.logprobs is None) == (request.logprobs is None)
    # The wishes made a difference, and were kept.
    penalized, constrained = texts[1], results[4].tokens
    plain = np.argmax(logits[1, len(wanted[1].tokens) - 1 :], axis=-1)
    assert plain[: len(results[1].tokens)].tolist() != penalized[len(wanted[1].tokens) :]
    assert all(x >= 10 and (x + i) % 2 == constrained[0] % 2 for i, x in enumerate(constrained))


@pytest.mark.slow
def test_a_request_without_a_possible_token_fails_alone(model):
    made = engine(model)
    nothing = made.add(Request([1, 2], 5, constraint=AllowedTokens(lambda _: [], VOCABULARY)))
    soon = made.add(
        Request(
            [1, 2], 5, constraint=AllowedTokens(lambda t: [3] if len(t) < 2 else [], VOCABULARY)
        )
    )
    none = made.add(Request([1, 2], 5, logit_bias=dict.fromkeys(range(VOCABULARY), -math.inf)))
    plain = made.add(Request([1, 2], 5))
    results = made.run()
    assert [results[x].finish_reason for x in (nothing, soon, none, plain)] == [
        "failed",
        "failed",
        "failed",
        "length",
    ]
    assert [results[x].tokens for x in (nothing, soon, none)] == [(), (3, 3), ()]
    assert len(results[plain].tokens) == 5


class Broken(AllowedTokens):
    """Says that its texts are complete, and nothing else."""

    is_complete = True

    def begin(self):
        return self

    def allowed(self):
        raise ArithmeticError("out of order")


def test_a_constraint_that_raises_fails_its_request_alone(model):
    made = engine(model)
    number = made.add(Request([1, 2], 5, constraint=Broken(after, VOCABULARY)))
    plain = made.add(Request([1, 2], 5))
    with pytest.warns(RuntimeWarning, match="constraint raised ArithmeticError: out of order"):
        results = made.run()
    assert (results[number].finish_reason, results[number].tokens) == ("failed", ())
    assert len(results[plain].tokens) == 5


@pytest.mark.parametrize("token", [-1, VOCABULARY])
def test_a_bias_is_of_tokens_of_the_vocabulary(model, token):
    with pytest.raises(ValueError, match=f"token={token} of a request must be within 0..96"):
        engine(model).add(Request([1], 1, logit_bias={token: 1.0}))


def test_a_constraint_is_of_no_larger_vocabulary(model):
    """Where its masks came to a step, they would end the engine with all that runs."""
    constraint = AllowedTokens(lambda _: None, 1000)
    with pytest.raises(ValueError, match="vocab_size=1000 of the constraint must be at most .* 97"):
        engine(model).add(Request([1], 1, constraint=constraint))
