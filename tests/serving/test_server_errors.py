"""What the server refuses, and how it says so."""

import json
import re
import socket

import httpx
import openai
import pytest

from tests.serving.fake_engine import FakeEngine
from tests.serving.server_helpers import NAME, running, until
from turbojax import server
from turbojax.server.fields import MOST_BRACKETS, ApiError, Fields

PROMPT = (
    "prompt=%s must be a text, a list of texts, a list of tokens within 0..255 or a list of such"
)


@pytest.fixture(scope="module")
def served(fake, tokenizer):
    limits = server.Limits(body_bytes=100_000, prompt_tokens=1000, choices=8)
    with running(fake, tokenizer, limits=limits) as found:
        yield found


def error_of(answer: httpx.Response, status: int) -> dict:
    assert answer.status_code == status, answer.text
    assert answer.headers["content-type"] == "application/json"
    error = answer.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    return error


def refused(http, path: str, body: dict) -> dict:
    return error_of(http.post(path, json=body), 400)


COMMON = [
    ("temperature", "hot", "temperature='hot' must be a number of 0 or more"),
    ("temperature", -0.5, "temperature=-0.5 must be a number of 0 or more"),
    ("temperature", True, "temperature=True must be a number of 0 or more"),
    ("temperature", 1e-50, "temperature=1e-50 must be 0, or positive and finite in float32"),
    ("temperature", 10**400, "must be a number of 0 or more"),
    ("top_p", 0, "top_p=0 must be a number above 0 and at most 1"),
    ("top_p", 1.5, "top_p=1.5 must be a number above 0 and at most 1"),
    ("top_k", 1.5, "top_k=1.5 must be an integer within -1..2147483647"),
    ("top_k", -2, "top_k=-2 must be an integer"),
    ("min_p", 2, "min_p=2 must be a number within 0..1"),
    ("seed", "x", "seed='x' must be an integer"),
    ("seed", 2**63, "must be an integer within"),
    ("presence_penalty", 3, "presence_penalty=3 must be a number within -2..2"),
    ("frequency_penalty", -3, "frequency_penalty=-3 must be a number within -2..2"),
    ("repetition_penalty", 0, "repetition_penalty=0 must be a number within 1e-06..1e+06"),
    ("repetition_penalty", 1e-7, "repetition_penalty=1e-07 must be a number within"),
    ("repetition_penalty", 1e300, "repetition_penalty=1e+300 must be a number within"),
    ("max_tokens", 1.0, "max_tokens=1.0 must be an integer"),
    ("max_tokens", -1, "max_tokens=-1 must be an integer"),
    ("n", 0, "n=0 must be an integer within 1..8"),
    ("n", 9, "n=9 must be an integer within 1..8"),
    ("stop", [""], "stop=[''] must be a text or a list of texts, none of them empty"),
    ("stop", 7, "stop=7 must be a text or a list of texts"),
    ("stop", ["x"] * 17, "must be 16 texts at most"),
    ("stop", ["x", "y" * 257], "must be of texts of 256 characters at most"),
    ("stop_token_ids", [256], "stop_token_ids=[256] must be a list of tokens within 0..255"),
    ("stop_token_ids", 3, "stop_token_ids=3 must be a list of tokens within 0..255"),
    ("ignore_eos", 1, "ignore_eos=1 must be true or false"),
    ("logit_bias", [], "logit_bias=[] must be an object"),
    ("logit_bias", {"x": 1}, "logit_bias has the key 'x', must be a token within 0..255"),
    ("logit_bias", {"256": 1}, "logit_bias has the key '256', must be a token within 0..255"),
    ("logit_bias", {"007": 1}, "logit_bias has the key '007', must be a token within 0..255"),
    ("logit_bias", {"7": 101}, "logit_bias.7=101 must be a number within -100..100"),
    ("stream", "yes", "stream='yes' must be true or false"),
    ("stream_options", {"include_usage": True}, "must be given with stream=true only"),
    ("priority", 0.5, "priority=0.5 must be an integer"),
    ("timeout", 0, "timeout=0 must be a number above 0"),
    ("timeout", "1", "timeout='1' must be a number above 0"),
    ("user", 7, "user=7 must be a text"),
    ("metadata", 7, "metadata=7 must be an object"),
    ("store", True, "store=True: nothing is stored"),
    ("service_tier", "flex", "service_tier='flex': there is one tier"),
    ("temprature", 1, "temprature is not known here"),
    ("model", None, "model=None must be 'tiny', the model that is served"),
    ("model", 7, "model=7 must be a text"),
    ("guided_regex", 7, "guided_regex=7 must be a text"),
    ("guided_grammar", {}, "guided_grammar={} must be a text"),
    ("guided_json", 7, "guided_json=7 must be a JSON schema"),
    ("guided_json", "{", "Expecting"),
    ("response_format", "json", "response_format='json' must be an object"),
    ("response_format", {"type": "xml"}, "response_format.type='xml' must be text, json_object or"),
    ("response_format", {"type": "json_schema"}, "response_format.json_schema=None must be an"),
    (
        "response_format",
        {"type": "json_schema", "json_schema": {"schema": 7}},
        "response_format.json_schema.schema=7 must be a JSON schema",
    ),
    ("response_format", {"type": "text", "x": 1}, "response_format.x is not known here"),
]
COMPLETIONS = [
    ("prompt", None, PROMPT % "None"),
    ("prompt", [], PROMPT % r"[]"),
    ("prompt", [[]], PROMPT % r"[[]]"),
    ("prompt", ["a", [1]], "prompt=['a', [1]] must be a text"),
    ("prompt", [256], PROMPT % "[256]"),
    ("prompt", {}, PROMPT % "{}"),
    ("prompt", ["a"] * 9, "prompt has 9 texts, must have at most 8"),
    ("prompt", "a" * 1000, "prompt has 1001 tokens, must have at most 1000"),
    ("max_tokens", 5000, "prompt has 2 tokens, which with 5000 new ones must be at most 4096"),
    ("max_tokens", 0, "max_tokens=0 must be at least 1: prompts alone are not scored"),
    ("suffix", "end", "suffix='end': text is added at its end only"),
    ("logprobs", 21, "logprobs=21 must be an integer within 0..20"),
    ("logprobs", True, "logprobs=True must be an integer within 0..20"),
    ("best_of", 9, "best_of=9 must be an integer within 1..8"),
    ("messages", [], "messages is not known here"),
]
CHATS = [
    ("messages", None, "messages=None must be a list of messages, at least one"),
    ("messages", [], "messages=[] must be a list of messages, at least one"),
    ("messages", ["hello"], "messages[0]='hello' must be an object"),
    ("messages", [{"content": "a"}], "messages[0].role=None must be one of system, developer"),
    ("messages", [{"role": "cat", "content": "a"}], "messages[0].role='cat' must be one of"),
    ("messages", [{"role": "user"}], "messages[0].content=None must be a text or a list of parts"),
    (
        "messages",
        [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}],
        "must be of type text: conversations are text; images are for turbojax.models.generate",
    ),
    ("messages", [{"role": "user", "content": "a" * 1000}], "must have at most 1000"),
    ("tools", [{"type": "function"}], "functions are not called here"),
    ("tool_choice", "required", "tool_choice='required': functions are not called here"),
    ("functions", [{}], "functions are not called here"),
    ("modalities", ["audio"], "modalities=['audio']: conversations are text"),
    ("audio", {}, "audio={}: conversations are text"),
    ("web_search_options", {}, "nothing is looked up"),
    ("prediction", {}, "answers are not predicted by clients"),
    ("reasoning_effort", "low", "goes into chat_template_kwargs"),
    ("verbosity", "low", "goes into chat_template_kwargs"),
    ("logprobs", 1, "logprobs=1 must be true or false"),
    ("top_logprobs", 3, "top_logprobs=3 must be given with logprobs=true only"),
    ("max_completion_tokens", 0, "max_completion_tokens=0 must be an integer of 1 or more"),
    ("chat_template_kwargs", [], "chat_template_kwargs=[] must be an object"),
    ("chat_template_kwargs", {"messages": 1}, "variables must not hold 'messages'"),
    ("prompt", "a", "prompt is not known here"),
    ("best_of", 1, "best_of is not known here"),
]


def check_refusal(error: dict, field: str, words: str) -> None:
    assert words in error["message"]
    assert error["type"] == "invalid_request_error"
    # What a template does with its variables is the fault of the messages as well.
    roots = {field, "messages"} if field == "chat_template_kwargs" else {field}
    roots |= {"prompt"} if field == "max_tokens" else set()
    assert re.split(r"[.\[]", error["param"])[0] in roots


def named(cases):
    return [pytest.param(*case, id=f"{case[0]}={str(case[1])[:20]}") for case in cases]


@pytest.mark.parametrize(("field", "value", "words"), named([*COMMON, *COMPLETIONS]))
def test_completions_refuse(http, fake, field, value, words):
    seen = len(fake.seen)
    body = {"model": NAME, "prompt": "a", field: value}
    check_refusal(refused(http, "/v1/completions", body), field, words)
    assert len(fake.seen) == seen


@pytest.mark.parametrize(("field", "value", "words"), named([*COMMON, *CHATS]))
def test_chats_refuse(http, fake, field, value, words):
    seen = len(fake.seen)
    body = {"model": NAME, "messages": [{"role": "user", "content": "a"}], field: value}
    check_refusal(refused(http, "/v1/chat/completions", body), field, words)
    assert len(fake.seen) == seen


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"echo": True, "logprobs": 1}, "echo=True must be false with logprobs"),
        ({"n": 2, "best_of": 1}, "best_of=1 must be an integer within 2..8"),
        ({"best_of": 2, "stream": True}, "best_of=2 must be 1, as n is, with stream=true"),
        ({"prompt": ["a", "b", "c"], "n": 3}, "n=3 must be an integer within 1..2"),
        ({"guided_regex": "a", "guided_json": {}}, "only one of response_format, guided_json"),
        (
            {"guided_regex": "a", "response_format": {"type": "json_object"}},
            "only one of response_format",
        ),
        (
            {"stream": True, "stream_options": {"include_obfuscation": True}},
            "stream_options.include_obfuscation=True: chunks are not padded",
        ),
        (
            {"stream": True, "stream_options": {"usage": True}},
            "stream_options.usage is not known here",
        ),
    ],
)
def test_fields_that_do_not_fit_together(http, fields, words):
    body = {"model": NAME, "prompt": "a", **fields}
    assert words in refused(http, "/v1/completions", body)["message"]


def test_two_limits_that_differ(http):
    body = {"model": NAME, "messages": [{"role": "user", "content": "a"}]}
    body |= {"max_tokens": 3, "max_completion_tokens": 4}
    error = refused(http, "/v1/chat/completions", body)
    assert "max_tokens=3 must be max_completion_tokens=4, or left out" in error["message"]
    body["max_tokens"] = 4
    assert http.post("/v1/chat/completions", json=body).status_code == 200


@pytest.mark.parametrize(
    ("body", "words"),
    [
        (b"", "the body is not JSON"),
        (b"{", "the body is not JSON"),
        (b"[]", "the body is [], must be a JSON object"),
        (b'{"model": "\xff"}', "the body is not JSON"),
        (b'{"model": "\\ud800"}', "half a surrogate pair"),
        (b'{"n": 1, "n": 2}', "n is given twice"),
        (b"[" * 10_000, "nested"),
        (b'{"temperature": NaN, "model": "tiny", "prompt": "a"}', "temperature=nan must be"),
    ],
)
def test_bodies_that_are_no_requests(http, body, words):
    error = error_of(http.post("/v1/completions", content=body), 400)
    assert words in error["message"]


def test_long_values_are_not_repeated(http):
    body = {
        "model": NAME,
        "prompt": "a",
        "temperature": "x" * 50_000,
    }
    assert len(refused(http, "/v1/completions", body)["message"]) < 1000
    body = {"model": NAME, "prompt": "a", "x" * 50_000: 1}
    assert len(refused(http, "/v1/completions", body)["message"]) < 1000


def test_what_the_engine_alone_knows(http, fake):
    # The fake engine refuses what is longer than its pages, as a real one does.
    fake.max_length, before = 50, fake.max_length
    try:
        error = refused(http, "/v1/completions", {"model": NAME, "prompt": "a", "max_tokens": 60})
    finally:
        fake.max_length = before
    assert error["message"] == "62 tokens must be at most 50"


def test_unknown_models_and_paths(served, http):
    with served.client() as client:
        with pytest.raises(openai.NotFoundError, match="model='gpt' is not served here") as found:
            client.completions.create(model="gpt", prompt="a")
        assert (found.value.param, found.value.code) == ("model", "model_not_found")
        with pytest.raises(openai.NotFoundError, match="is not served here"):
            client.models.retrieve("a/b")
    assert error_of(http.get("/v1/nothing"), 404)["message"] == "GET /v1/nothing: Not Found"
    assert "Method Not Allowed" in error_of(http.get("/v1/completions"), 405)["message"]


def test_bodies_of_many_objects_are_not_read():
    for body in (b"[" + b"[]," * MOST_BRACKETS + b"0]", b"[" + b"{}," * MOST_BRACKETS + b"0]"):
        with pytest.raises(ApiError, match=r"has 500001 of \[ and {, must have at most") as caught:
            Fields.of_body(body)
        assert caught.value.status == 413
    assert Fields.of_body(b'{"a": [' + b"[]," * (MOST_BRACKETS - 2) + b"0]}").raw("a")[-1] == 0


@pytest.mark.fuzz
def test_bodies_that_do_not_come(served, http, monkeypatch):
    monkeypatch.setattr("turbojax.server.connections._BODY_SECONDS", 0.1)
    with socket.create_connection(("127.0.0.1", int(served.url.rpartition(":")[2]))) as slow:
        slow.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 40\r\n\r\n{")
        slow.settimeout(10)
        answer = b"".join(iter(lambda: slow.recv(4096), b"")).decode()
    assert answer.startswith("HTTP/1.1 408")
    assert "the body took longer than 0.1 seconds to come" in answer
    assert http.get("/health").status_code == 200


def test_large_bodies(http):
    body = {"model": NAME, "prompt": "a" * 100_000}
    error = error_of(http.post("/v1/completions", json=body), 413)
    assert error["message"] == "the body must have at most 100000 bytes"
    assert error["code"] == "body_too_large"

    def parts():
        for _ in range(20):
            yield b" " * 10_000

    # In chunks nobody knows how many there will be. The server may close before all is sent.
    try:
        answer = http.post("/v1/completions", content=parts())
    except (httpx.WriteError, httpx.RemoteProtocolError):
        return
    error_of(answer, 413)


def test_keys(tokenizer):
    fake = FakeEngine(tokenizer=tokenizer)
    with running(fake, tokenizer, api_keys=["secret", "other", "cléà"]) as found:
        for key in ("secret", "other"):
            with found.client(api_key=key) as client:
                assert client.models.list().data
                assert client.completions.create(model=NAME, prompt="a").choices
        with found.client(api_key="secre") as client:
            with pytest.raises(openai.AuthenticationError, match="Bearer KEY") as caught:
                client.completions.create(model=NAME, prompt="a")
            assert caught.value.code == "invalid_api_key"
        with found.http() as http:
            error = error_of(http.get("/v1/models"), 401)
            assert error["type"] == "authentication_error"
            assert http.get("/v1/models").headers["www-authenticate"] == "Bearer"
            headers = {"Authorization": "Basic secret"}
            error_of(http.get("/v1/models/tiny", headers=headers), 401)
            # The last byte is a space in Latin-1.
            headers = {"Authorization": "Bearer cléà".encode()}
            assert http.get("/v1/models", headers=headers).status_code == 200
            headers = {"Authorization": "Bearer schl\xfcssel".encode("latin-1")}
            error_of(http.get("/v1/models", headers=headers), 401)
            # Whoever watches the server needs no key.
            assert http.get("/health").status_code == 200
            assert http.get("/metrics").status_code == 200
    with pytest.raises(ValueError, match="an API key must not be empty"):
        running(fake, tokenizer, api_keys=[""]).__enter__()


def test_a_full_queue(tokenizer):
    fake = FakeEngine(tokenizer=tokenizer, max_sequences=1)
    fake.gate.clear()
    limits = server.Limits(retry_seconds=7)
    with running(fake, tokenizer, max_waiting=2, limits=limits) as found, found.http() as http:
        body = {"model": NAME, "prompt": "a", "max_tokens": 5}
        # Both wait: neither has a token.
        body_of_two = {**body, "n": 2, "stream": True}
        with http.stream("POST", "/v1/completions", json=body_of_two) as streaming:
            until(lambda: len(fake.live) == 2)
            answer = http.post("/v1/completions", json=body)
            error = error_of(answer, 429)
            assert answer.headers["retry-after"] == "7"
            assert error["type"] == "rate_limit_error"
            assert error["code"] == "queue_full"
            assert "2 requests wait, 1 more must be at most max_waiting=2" in error["message"]
            with found.client() as client, pytest.raises(openai.RateLimitError):
                client.completions.create(**body)
            # More than ever can wait is no matter of coming again.
            error_of(http.post("/v1/completions", json={**body, "n": 3}), 400)
            fake.gate.set()
            assert "[DONE]" in streaming.read().decode()
        # Of two prompts one would fit: neither runs.
        fake.gate.clear()
        with http.stream("POST", "/v1/completions", json={**body, "stream": True}) as streaming:
            until(lambda: len(fake.live) == 1)
            error_of(http.post("/v1/completions", json={**body, "prompt": ["a", "b"]}), 429)
            fake.gate.set()
            streaming.read()
        until(lambda: not fake.live)
        assert http.post("/v1/completions", json=body).status_code == 200


def test_limits_are_checked():
    with pytest.raises(ValueError, match="choices=0 must be at least 1"):
        server.Limits(choices=0)
    with pytest.raises(TypeError, match=r"body_bytes=1\.5 must be an integer"):
        server.Limits(body_bytes=1.5)
    with pytest.raises(ValueError, match="prompt_tokens=-1"):
        server.Limits(prompt_tokens=-1)


def test_addresses():
    with server.listen("127.0.0.1", 0) as first:
        port = first.getsockname()[1]
        assert server.address_of(first) == f"http://127.0.0.1:{port}"
        with pytest.raises(OSError, match="[Aa]ddress already in use"):
            server.listen("127.0.0.1", port)
    with pytest.raises(ValueError, match=r"port=70000 must be within 0\.\.65535"):
        server.listen("127.0.0.1", 70000)
    if socket.has_ipv6:
        with server.listen("::1", 0) as found:
            assert server.address_of(found).startswith("http://[::1]:")


def test_errors_are_json():
    error = ApiError("what", status=500, param="x", code="y")
    told = {"message": "what", "type": "server_error", "param": "x", "code": "y"}
    assert json.loads(error.response().body) == {"error": told}
