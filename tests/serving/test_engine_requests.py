"""What a request may ask for, and what it refuses; which of several results is the best."""

import dataclasses
import math

import numpy as np
import pytest

from turbojax.models import (
    AllowedTokens,
    Penalties,
    Request,
    Result,
    Sampling,
    TokenLogprobs,
    best_of,
)


def test_a_request_has_what_was_asked_for():
    constraint = AllowedTokens(lambda _: None, 8)
    request = Request(
        [1],
        penalties=Penalties(1.2, np.float32(0.5), -1),
        logit_bias={np.int64(3): np.float32(0.5), 4: -math.inf, 5: 2},
        constraint=constraint,
        logprobs=np.int32(20),
        priority=-3,
        timeout=2,
    )
    assert request.penalties == Penalties(1.2, 0.5, -1.0)
    assert [type(x) for x in dataclasses.astuple(request.penalties)] == [float] * 3
    assert request.logit_bias == {3: 0.5, 4: -math.inf, 5: 2.0}
    assert {type(x) for pair in request.logit_bias.items() for x in pair} == {int, float}
    assert request.constraint is constraint
    assert (request.logprobs, request.priority, request.timeout) == (20, -3, 2)


def test_a_request_asks_for_nothing_by_itself():
    request = Request([1])
    assert request.penalties == Penalties() == Penalties(1.0, 0.0, 0.0)
    assert request.logit_bias == {}
    assert request.constraint is request.logprobs is request.timeout is None
    assert request.priority == 0


def test_a_bias_that_changes_later_does_not_change_the_request():
    given = {1: 0.5}
    request = Request([1], logit_bias=given)
    given[2] = 1.0
    assert request.logit_bias == {1: 0.5}


class NoConstraint:
    """Has no `begin`."""


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"penalties": 1.2}, TypeError, "penalties=1.2 must be Penalties"),
        ({"penalties": None}, TypeError, "penalties=None must be Penalties"),
        ({"logit_bias": [1]}, TypeError, r"logit_bias=\[1\] must be a mapping of tokens to numb"),
        ({"logit_bias": None}, TypeError, "logit_bias=None must be a mapping"),
        ({"logit_bias": {"1": 1.0}}, TypeError, "a token of logit_bias='1' must be an integer"),
        ({"logit_bias": {1.0: 1.0}}, TypeError, "a token of logit_bias=1.0 must be an integer"),
        ({"logit_bias": {True: 1.0}}, TypeError, "a token of logit_bias=True must be an integer"),
        ({"logit_bias": {1: "a"}}, TypeError, r"logit_bias\[1\] is a str, must be a Python numb"),
        ({"logit_bias": {1: None}}, TypeError, r"logit_bias\[1\]=None must be a number"),
        ({"logit_bias": {1: True}}, TypeError, r"logit_bias\[1\]=True must be a number"),
        ({"logit_bias": {1: math.nan}}, ValueError, r"logit_bias\[1\]=.* must be finite"),
        ({"logit_bias": {1: math.inf}}, ValueError, r"logit_bias\[1\]=.* must be finite"),
        ({"logit_bias": {1: 1e39}}, ValueError, r"logit_bias\[1\]=1e\+39 must be within float32"),
        ({"logit_bias": {1: -1e39}}, ValueError, r"logit_bias\[1\]=-1e\+39 must be within float"),
        ({"logit_bias": {1: 10**400}}, ValueError, r"logit_bias\[1\]=.* must be finite"),
        ({"constraint": NoConstraint()}, TypeError, "constraint=.*NoConstraint.* must be a Constr"),
        ({"constraint": len}, TypeError, "constraint=.*len.* must be a Constraint"),
        ({"logprobs": -1}, ValueError, "logprobs=-1 must be within 0..20"),
        ({"logprobs": 21}, ValueError, "logprobs=21 must be within 0..20"),
        ({"logprobs": True}, TypeError, "logprobs=True must be an integer"),
        ({"logprobs": 1.0}, TypeError, "logprobs=1.0 must be an integer"),
        ({"priority": 0.5}, TypeError, "priority=0.5 must be an integer"),
        ({"priority": None}, TypeError, "priority=None must be an integer"),
        ({"timeout": 0}, ValueError, "timeout=.* must be positive"),
        ({"timeout": -1.5}, ValueError, "timeout=.* must be positive"),
        ({"timeout": math.nan}, ValueError, "timeout=.* must be finite"),
        ({"timeout": math.inf}, ValueError, "timeout=.* must be finite"),
        ({"timeout": "1"}, TypeError, "timeout is a str, must be a Python number"),
        ({"timeout": True}, TypeError, "timeout=True must be a number"),
        (
            {"stop_strings": "end"},
            TypeError,
            r"stop_strings='end' must be several texts, not one: \['end'\]",
        ),
        ({"stop_strings": [""]}, ValueError, "must not hold an empty text"),
        ({"stop_strings": [3]}, TypeError, "a member of stop_strings=3 must be a text"),
        ({"tokens": []}, ValueError, "must be at least one"),
        ({"tokens": [1.5]}, TypeError, "a member of tokens=1.5 must be an integer"),
        ({"tokens": [1], "max_new_tokens": 0}, ValueError, "max_new_tokens=0 must be at least 1"),
        ({"tokens": [1], "stop_tokens": ["a"]}, TypeError, "a member of stop_tokens='a' must"),
        ({"tokens": [1], "sampling": 0.7}, TypeError, "sampling=0.7 must be a Sampling"),
    ],
)
def test_a_request_refuses(options, error, message):
    with pytest.raises(error, match=message):
        Request(**{"tokens": [1], **options})


def test_a_request_takes_arrays_and_can_be_compared():
    made = Request(np.array([1, 2]), stop_tokens=np.array([7]))
    assert made == Request((1, 2), stop_tokens=(7,))
    assert made.tokens == (1, 2)
    assert made.total == 130


def test_a_request_reads_an_iterator_once():
    request = Request(iter([1, 2]), 3, stop_tokens=(x for x in (4, 5)))
    assert (request.tokens, request.stop_tokens) == ((1, 2), (4, 5))
    assert Request([1], stop_strings=iter("ab")).stop_strings == ("a", "b")


def test_requests_are_keys():
    """Equal ones are the same key, also with a bias, which is a mapping."""
    made = [Request([1], logit_bias={2: x}, sampling=Sampling(seed=3)) for x in (0.5, 0.5, 1.0)]
    assert len(set(made)) == 2
    assert made[0] in {made[1]: None}


@pytest.mark.parametrize("name", ["repetition", "presence", "frequency"])
@pytest.mark.parametrize(
    ("value", "error", "message"),
    [
        (None, TypeError, "=None must be a number"),
        (True, TypeError, "=True must be a number"),
        ("1", TypeError, " is a str, must be a Python number"),
        (math.nan, ValueError, "=.* must be finite"),
        (math.inf, ValueError, "=.* must be finite"),
        (2e6, ValueError, r"=2000000.0 must be within .*\.\.1e6"),
        (-2e6, ValueError, r"=-2000000.0 must be within .*\.\.1e6"),
    ],
)
def test_penalties_refuse(name, value, error, message):
    with pytest.raises(error, match=name + message):
        Penalties(**{name: value})


@pytest.mark.parametrize("value", [0, 0.0, -1.0, 1e-7])
def test_a_repetition_is_positive(value):
    with pytest.raises(ValueError, match=r"repetition=.* must be within 1e-06\.\.1e6"):
        Penalties(repetition=value)


def result(*logprobs: float, known: bool = True) -> Result:
    tokens = tuple(range(len(logprobs)))
    entries = tuple(TokenLogprobs(x) for x in logprobs) if known else None
    return Result(tokens, "length", 1, 0, 0, 0.0, None, 0.0, entries)


def test_the_best_are_the_most_likely_in_the_mean():
    poor, good, long, empty = result(-3.0), result(-1.0, -2.0), result(*[-1.0] * 9), result()
    assert best_of([poor, good, long]) == [long]
    # What has no tokens, for instance as it failed at once, is no good answer.
    assert best_of([empty, poor, long, good], 4) == [long, good, poor, empty]
    assert best_of(iter([poor, good]), 1) == [good]


def test_equal_ones_stay_in_their_order():
    first, second = result(-1.0), result(-1.0, -1.0)
    assert best_of([first, second], 2) == [first, second]
    assert best_of([second, first], 2) == [second, first]


@pytest.mark.parametrize(
    ("results", "count", "error", "message"),
    [
        ([result(-1.0, known=False)], 1, ValueError, "logprobs are None, must be a number"),
        ([result(-1.0)], 0, ValueError, "count=0 must be at least 1"),
        ([result(-1.0)], -1, ValueError, "count=-1 must be at least 1"),
        ([result(-1.0)], 2, ValueError, "count=2 must be at most the number of results, 1"),
        ([], 1, ValueError, "count=1 must be at most the number of results, 0"),
        ([result(-1.0)], 1.0, TypeError, "count=1.0 must be an integer"),
    ],
)
def test_best_of_refuses(results, count, error, message):
    with pytest.raises(error, match=message):
        best_of(results, count)
