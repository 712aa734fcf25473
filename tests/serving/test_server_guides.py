"""What answers must look like: the fields that say so, and answers of a model that follow them."""

import concurrent.futures
import json
import re
import threading

import jsonschema
import numpy as np
import pytest

from tests.serving.fake_engine import FakeEngine
from tests.serving.server_helpers import NAME, real_engine, running
from turbojax.models import NumberTokenizer
from turbojax.models.text import grammar

SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 4},
        "kind": {"enum": ["cat", "dog"]},
        "good": {"type": "boolean"},
    },
    "required": ["name", "kind", "good"],
    "additionalProperties": False,
}
LARK = 'start: "yes" | "no" ("!")+\n'
WAYS = [
    ({"guided_regex": "[0-9]{2}"}, b"42", "a"),
    ({"guided_grammar": LARK}, b"yes", "a"),
    ({"guided_json": SCHEMA}, b'{"name":"x","kind":"cat","good":true}', "x"),
    ({"guided_json": json.dumps(SCHEMA)}, b'{"name":"x","kind":"dog","good":true}', "x"),
    ({"response_format": {"type": "json_object"}}, b'{"a": [1]}', "["),
    (
        {
            "response_format": {
                "type": "json_schema",
                "json_schema": {"name": "x", "schema": SCHEMA},
            }
        },
        b'{"name":"x","kind":"cat","good":false}',
        "x",
    ),
]


@pytest.mark.parametrize("name", ["guided_regex", "guided\\u005fregex"])
def test_nobody_else_waits_for_a_grammar(monkeypatch, http, name):
    done, begun = threading.Event(), threading.Semaphore(0)

    def regex(tokenizer, pattern):
        begun.release()
        assert done.wait(30)

    monkeypatch.setattr(grammar, "regex", regex)
    body = {"model": NAME, "prompt": "a", "max_tokens": 2}
    guided = json.dumps(body)[:-1] + f', "{name}": "a"}}'
    with concurrent.futures.ThreadPoolExecutor(12) as clients:
        waiting = [clients.submit(http.post, "/v1/completions", content=guided) for _ in range(12)]
        try:
            for _ in range(8):
                assert begun.acquire(timeout=10)
            assert http.post("/v1/completions", json=body, timeout=10).status_code == 200
        finally:
            done.set()
        assert [answer.result().status_code for answer in waiting] == [200] * 12


def bodies(fields: dict) -> dict[str, dict]:
    said = [{"role": "user", "content": "a"}]
    return {
        "/v1/completions": {"model": NAME, "prompt": "a", "max_tokens": 1, **fields},
        "/v1/chat/completions": {"model": NAME, "messages": said, "max_tokens": 1, **fields},
    }


def allowed(state) -> set[int]:
    bits = np.unpackbits(state.allowed().view(np.uint8), bitorder="little")
    return set(np.flatnonzero(bits).tolist())


@pytest.mark.parametrize(("fields", "text", "wrong"), WAYS, ids=lambda x: str(x)[:30])
def test_guides_reach_the_engine(http, fake, fields, text, wrong):
    for path, body in bodies(fields).items():
        assert http.post(path, json=body).status_code == 200
        state = fake.seen[-1].constraint.begin()
        assert ord(wrong) not in allowed(state)
        for byte in text:
            assert byte in allowed(state)
            state.accept(byte)
        assert state.is_complete


def test_text_is_no_guide(http, fake):
    for path, body in bodies({"response_format": {"type": "text"}}).items():
        assert http.post(path, json=body).status_code == 200
        assert fake.seen[-1].constraint is None


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"guided_regex": "("}, "regular expression"),
        ({"guided_grammar": "start: missing"}, "grammar"),
        ({"guided_json": {"type": "cat"}}, "schema"),
        (
            {
                "response_format": {
                    "type": "json_schema",
                    "json_schema": {"schema": {"not": {"type": "string"}}},
                }
            },
            "schema",
        ),
    ],
)
def test_guides_that_are_none(http, fields, words):
    for path, body in bodies(fields).items():
        answer = http.post(path, json=body)
        error = answer.json()["error"]
        assert answer.status_code == 400, error
        assert error["param"] == next(iter(fields))
        assert words in error["message"]


def test_a_tokenizer_without_bytes():
    tokenizer = NumberTokenizer(256)
    with running(FakeEngine(tokenizer=tokenizer), tokenizer) as served, served.http() as http:
        body = {"model": NAME, "prompt": "1 2", "guided_regex": "a"}
        answer = http.post("/v1/completions", json=body)
        assert answer.status_code == 400
        assert "NumberTokenizer cannot follow a grammar" in answer.json()["error"]["message"]
        body = {"model": NAME, "prompt": "65 66", "max_tokens": 2, "logprobs": 1, "temperature": 0}
        [choice] = http.post("/v1/completions", json=body).json()["choices"]
        assert choice["text"] == "91 65 "
        assert choice["logprobs"]["tokens"] == ["91 ", "65 "]


@pytest.mark.slow
def test_a_models_answers_follow_them(tokenizer):
    with running(real_engine(), tokenizer) as served, served.client() as client:
        said = [{"role": "user", "content": "a cat"}]
        form = {"type": "json_schema", "json_schema": {"name": "pet", "schema": SCHEMA}}
        found = client.chat.completions.create(
            model=NAME, messages=said, response_format=form, n=2, seed=1, max_tokens=200
        )
        for choice in found.choices:
            assert choice.finish_reason == "stop"
            jsonschema.validate(json.loads(choice.message.content), SCHEMA)
        pattern = "[a-c]{3}-[0-9]{2}"
        found = client.completions.create(
            model=NAME, prompt="x = ", temperature=0, extra_body={"guided_regex": pattern}
        )
        assert re.fullmatch(pattern, found.choices[0].text)
        chunks = client.completions.create(
            model=NAME, prompt="x = ", stream=True, extra_body={"guided_grammar": LARK}
        )
        assert re.fullmatch("yes|no!+", "".join(chunk.choices[0].text for chunk in chunks))
