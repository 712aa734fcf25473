"""What lines of `turbojax serve` may ask for: samples, likelihoods, the form of a result."""

import json
import re
import sys

import jax.numpy as jnp
import jsonschema
import pytest

from turbojax import models
from turbojax.app import text_model
from turbojax.app.serve import run as serving
from turbojax.app.serve.requests import digest, read_requests
from turbojax.app.serve.settings import Settings
from turbojax.models import Engine, Request, Sampling
from turbojax.models.engine.requests import best_of
from turbojax.models.generation.sampling import Penalties
from turbojax.models.text.tokenizer import NumberTokenizer

# With it, texts are the same whatever else runs.
SETTINGS = Settings(page_size=16, reproducible=True, max_sequences=4, step_tokens=16)
SCHEMA = {
    "type": "object",
    "properties": {"a": {"type": "integer", "minimum": 0, "maximum": 99}, "b": {"enum": ["x"]}},
    "required": ["a", "b"],
    "additionalProperties": False,
}
DRAWN = {"prompt": "abc", "max_new_tokens": 6, "temperature": 1.0, "seed": 5}
LINES = {
    "samples": {**DRAWN, "n": 2, "best_of": 4},
    "all samples": {**DRAWN, "n": 3},
    "logprobs": {"prompt": "abc", "max_new_tokens": 4, "logprobs": 3},
    "no top": {"prompt": "abc", "max_new_tokens": 4, "logprobs": 0},
    "plain": {"prompt": "abc", "max_new_tokens": 4},
    "schema": {
        **DRAWN,
        "max_new_tokens": 60,
        "json_schema": SCHEMA,
        "logit_bias": {str(ord(space)): -100 for space in " \t\r\n"},
    },
    "regex": {**DRAWN, "max_new_tokens": 60, "regex": "(ab){2,3}c"},
    "grammar": {**DRAWN, "max_new_tokens": 60, "grammar": 'start: "x" "y"+ "z"'},
    "bias": {"prompt": "abc", "max_new_tokens": 3, "logit_bias": {"66": 1e5}},
    "forbidden": {"prompt": "abc", "max_new_tokens": 3, "logit_bias": {"66": 1e5, "67": 1e6}},
    "presence": {"prompt": "abc", "max_new_tokens": 20, "presence_penalty": 1e5},
    "frequency": {"prompt": "abc", "max_new_tokens": 3, "frequency_penalty": 1.5},
    "repetition": {"prompt": "abc", "max_new_tokens": 3, "repetition_penalty": 1.5},
    "late": {"prompt": "abc", "timeout": 1e-6},
    "in time": {"prompt": "abc", "max_new_tokens": 4, "timeout": 1000, "priority": -3},
}


@pytest.fixture(scope="module")
def model(tiny_folder):
    return text_model.find_text_model(tiny_folder, jnp.dtype(jnp.float32)).load()


def requests_of(tokenizer, lines):
    content = "\n".join(json.dumps(line) for line in lines).encode()
    found = read_requests(content, tokenizer, 100)
    assert not found.bad, found.bad
    return found.requests


def run(model, lines, settings=SETTINGS, **options):
    results = list[dict]()
    requests = requests_of(model.tokenizer, lines)
    serving.serve(model, requests, settings, emit=results.append, **options)
    return results


@pytest.fixture(scope="module")
def results(model):
    found = run(model, [{"id": name, **line} for name, line in LINES.items()])
    assert len(found) == len(LINES)
    # In files they are lines of JSON that other programs read, too: no NaN and no infinity.
    found = json.loads(json.dumps(found, allow_nan=False))
    return {result["id"]: result for result in found}


@pytest.fixture(scope="module")
def samples(model):
    """The same samples by the engine alone."""
    engine = Engine(
        model.decoder,
        num_pages=40,
        page_size=16,
        max_sequences=4,
        step_tokens=16,
        max_length=104,
        reproducible=True,
    )
    request = Request(model.tokenizer.encode("abc"), 6, sampling=Sampling(1.0, seed=5), logprobs=0)
    numbers = engine.add_samples(request, 4)
    found = engine.run()
    return [found[number] for number in numbers]


@pytest.mark.slow
def test_all_samples_come_in_their_order(results, samples):
    found = results["all samples"]
    texts = [found["tokens"], *(one["tokens"] for one in found["others"])]
    assert texts == [list(one.tokens) for one in samples[:3]]
    assert len(set(map(tuple, texts))) > 1
    assert all(len(one["text"]) and one["finish_reason"] == "length" for one in found["others"])


@pytest.mark.slow
def test_the_best_samples_are_the_most_likely(results, samples):
    found, best = results["samples"], best_of(samples, 2)
    assert [found["tokens"], found["others"][0]["tokens"]] == [list(x.tokens) for x in best]
    assert len(found["others"]) == 1
    # They were compared, and not asked for.
    assert "logprobs" not in found


@pytest.mark.slow
def test_logprobs(results):
    found = results["logprobs"]
    assert found["tokens"] == results["plain"]["tokens"] == results["no top"]["tokens"]
    assert len(found["logprobs"]) == len(found["top_logprobs"]) == 4
    for token, logprob, top in zip(
        found["tokens"], found["logprobs"], found["top_logprobs"], strict=True
    ):
        # The greedy token is the most likely one.
        assert top[0] == [token, logprob]
        values = [value for _, value in top]
        assert values == sorted(values, reverse=True)
        assert len(top) == 3
        assert max(values) < 0
    assert results["no top"]["logprobs"] == found["logprobs"]
    assert "top_logprobs" not in results["no top"]
    assert "logprobs" not in results["plain"]


def test_results_look_as_asked(results):
    jsonschema.validate(json.loads(results["schema"]["text"]), SCHEMA)
    assert re.fullmatch("(ab){2,3}c", results["regex"]["text"])
    assert re.fullmatch("xy+z", results["grammar"]["text"])
    # This tokenizer has no end token: the grammar's end is the text's.
    for name in ("schema", "regex", "grammar"):
        assert results[name]["finish_reason"] == "stop"


def test_logits_that_change(results):
    assert results["bias"]["text"] == "BBB"
    assert results["forbidden"]["text"] == "CCC"
    tokens = results["presence"]["tokens"]
    assert len(set(tokens)) == len(tokens) == 20


def test_a_request_that_is_late(results):
    late = results["late"]
    assert (late["finish_reason"], late["tokens"], late["text"]) == ("timeout", [], "")
    assert late["first_token_seconds"] is None
    assert results["in time"]["tokens"] == results["plain"]["tokens"]


def test_lines_become_requests(model):
    [one, two] = requests_of(
        model.tokenizer,
        [
            {
                "prompt": "a",
                "repetition_penalty": 2,
                "presence_penalty": -1,
                "frequency_penalty": 0.5,
                "logit_bias": {"3": -1, "200": 4.5},
                "logprobs": 20,
                "priority": -4,
                "timeout": 3,
                "stop": ["end"],
            },
            {"prompt": "a", "temperature": 1, "n": 2, "best_of": 3},
        ],
    )
    request = one.request
    assert request.penalties == Penalties(2, -1, 0.5)
    assert request.logit_bias == {3: -1.0, 200: 4.5}
    assert (request.logprobs, request.priority, request.timeout) == (20, -4, 3)
    assert (one.stop, request.stop_strings) == (("end",), ("end",))
    assert (one.count, one.samples, one.shows_logprobs) == (1, 1, True)
    assert (two.count, two.samples, two.shows_logprobs) == (2, 3, False)
    assert two.request.logprobs == 0  # to compare


def test_digests_tell_requests_apart(model):
    plain = {"prompt": "a", "temperature": 1.0, "seed": 3}
    more = [
        {},
        {"repetition_penalty": 2},
        {"presence_penalty": 2},
        {"logit_bias": {"3": 1}},
        {"logprobs": 0},
        {"logprobs": 3},
        {"timeout": 5},
        {"n": 2},
        {"best_of": 2},
        {"best_of": 2, "logprobs": 0},
        {"json_schema": SCHEMA},
        {"json_schema": {**SCHEMA, "properties": dict(reversed(SCHEMA["properties"].items()))}},
        {"json_schema": True},
        {"regex": "a"},
        {"grammar": 'start: "a"'},
    ]
    found = [digest(x, "m") for x in requests_of(model.tokenizer, [{**plain, **x} for x in more])]
    assert len(set(found)) == len(more)
    # What changes no text does not count. The order of a schema's properties does.
    same = [{"priority": 4}, {"repetition_penalty": 1}, {"n": 1}, {"logit_bias": {}}]
    assert {digest(x, "m") for x in requests_of(model.tokenizer, [plain | x for x in same])} == {
        found[0]
    }


BAD = [
    ({"n": 0}, "n=0 must be within 1..128"),
    ({"n": 129, "temperature": 1}, "n=129 must be within 1..128"),
    ({"n": True}, "n=True must be an integer"),
    ({"n": 3, "best_of": 2, "temperature": 1}, "best_of=2 must be at least n=3"),
    ({"n": 2}, "2 samples need a temperature above 0"),
    ({"best_of": 2.0}, "best_of=2.0 must be an integer"),
    ({"logprobs": 21}, "logprobs=21 must be within 0..20"),
    ({"logprobs": "x"}, "logprobs='x' must be an integer"),
    ({"priority": 1.5}, "priority=1.5 must be an integer"),
    ({"timeout": 0}, "timeout=0.0 must be positive"),
    ({"timeout": "soon"}, "timeout is a str, must be a Python number"),
    ({"repetition_penalty": 0}, "repetition=0 must be within 1e-06..1e6"),
    ({"presence_penalty": "x"}, "presence is a str, must be a Python number"),
    ({"logit_bias": [1]}, "must be an object of numbers by token"),
    ({"logit_bias": {"a": 1}}, "'a' in logit_bias must be a token"),
    ({"logit_bias": {"-1": 1}}, "'-1' in logit_bias must be a token"),
    ({"logit_bias": {"1": 1, "01": 2}}, "'01' in logit_bias must be a token"),
    ({"logit_bias": {"1": "x"}}, "logit_bias[1] is a str, must be a Python number"),
    ({"json_schema": {"type": "strng"}}, "JSON schema cannot be used: Invalid type: strng"),
    ({"json_schema": "{}"}, "schema='{}' must be a mapping"),
    ({"regex": "("}, "unclosed group"),
    ({"regex": 3}, "pattern=3 must be text"),
    ({"grammar": "start: x"}, 'unknown name: "x"'),
    ({"regex": "a", "json_schema": {}}, "json_schema and regex: a line must have one of them"),
]


@pytest.mark.parametrize(("more", "message"), BAD, ids=[message for _, message in BAD])
def test_bad_lines(model, more, message):
    line = json.dumps({"prompt": "a", **more}).encode()
    [bad] = read_requests(line, model.tokenizer, 8).bad
    assert message in bad.reason


def test_a_tokenizer_that_no_grammar_fits():
    [bad] = read_requests(b'{"prompt": "1", "regex": "a"}', NumberTokenizer(97), 8).bad
    assert "results of a NumberTokenizer cannot follow a grammar" in bad.reason


def test_a_missing_package_is_no_bad_line(monkeypatch):
    monkeypatch.setitem(sys.modules, "llguidance", None)
    with pytest.raises(ImportError, match="a grammar needs the package llguidance"):
        read_requests(b'{"prompt": "1", "regex": "a"}', models.ByteTokenizer(), 8)


@pytest.mark.slow
def test_priorities(model):
    lines = [
        {"id": priority, "prompt": "abc", "max_new_tokens": 2, "priority": priority}
        for priority in (3, 1, 2)
    ]
    one = Settings(page_size=16, max_sequences=1)
    assert [result["id"] for result in run(model, lines, one)] == [1, 2, 3]
