"""Answers of the server in chunks, and clients that hang up."""

import asyncio
import functools
import json
import socket

import httpx
import pytest

from tests.serving import server_helpers
from tests.serving.fake_engine import FakeEngine
from tests.serving.server_helpers import NAME, running, until
from turbojax.models.engine.asynchronous import AsyncEngine
from turbojax.server.requests import read_completion
from turbojax.server.responses import Answer
from turbojax.server.service import Limits, Service


@pytest.fixture(scope="module")
def fake(tokenizer):
    return FakeEngine(tokenizer=tokenizer, delay=0.001)


complete = functools.partial(server_helpers.complete, stream=True)
chat = functools.partial(server_helpers.chat, stream=True)


def pieces(chunks) -> dict[int, list[str]]:
    """The texts of each choice, the last of which ends it: with the reason as its last member."""
    found: dict[int, list[str]] = {}
    for chunk in chunks:
        for choice in chunk.choices:
            of_choice = found.setdefault(choice.index, [])
            text = choice.text if hasattr(choice, "text") else choice.delta.content
            of_choice += [text] if text else []
            of_choice += [choice.finish_reason] if choice.finish_reason else []
    return found


def test_much_that_was_not_read_holds_up_no_others(tokenizer):
    body = {"model": NAME, "prompt": "a", "max_tokens": 2000, "stream": True}

    async def turns(engine) -> int:
        service = Service(engine, tokenizer, NAME, Limits())
        answer = Answer(service, read_completion(service, json.dumps(body).encode()))
        await answer.begin()
        until(lambda: not engine._live)
        count = 0

        async def others():
            nonlocal count
            while True:
                await asyncio.sleep(0)
                count += 1

        task = asyncio.ensure_future(others())
        chunks = [chunk async for chunk in answer.chunks()]
        task.cancel()
        service.close()
        assert len("".join(chunk["choices"][0]["text"] for chunk in chunks)) == 2000
        return count

    with AsyncEngine(FakeEngine(tokenizer=tokenizer)) as engine:
        assert asyncio.run(turns(engine)) > 20


def test_a_completion_in_chunks(client):
    chunks = list(complete(client, max_tokens=9))
    [texts] = pieces(chunks).values()
    assert len(texts) > 4  # one for each token, but for those that come together
    assert "".join(texts[:-1]) == "[\0hello] "
    assert texts[-1] == "length"
    assert {chunk.object for chunk in chunks} == {"text_completion"}
    assert len({chunk.id for chunk in chunks}) == 1
    assert "usage" not in chunks[0].model_fields_set


def test_a_chat_in_chunks(client):
    chunks = list(chat(client, max_tokens=20, n=2, stop="assist"))
    assert chunks[0].choices[0].delta.role == "assistant"
    assert {chunk.object for chunk in chunks} == {"chat.completion.chunk"}
    found = pieces(chunks)
    assert sorted(found) == [0, 1]
    for texts in found.values():
        assert "".join(texts[:-1]) == "[<user>hello\n<"
        assert texts[-1] == "stop"
        # What may be the beginning of the stop text is not sent.
        assert not [text for text in texts[:-1] if "a" in text]
    ends = [chunk.choices[0] for chunk in chunks if chunk.choices[0].finish_reason]
    assert [choice.delta.content for choice in ends] == [None, None]


def test_what_looks_like_a_stop_text_comes_later(client):
    [texts] = pieces(complete(client, "abcabd", max_tokens=12, stop="abx")).values()
    assert "".join(texts[:-1]) == "[\0abcabd] [\0"
    [texts] = pieces(complete(client, "ab", max_tokens=4, stop="abx")).values()
    assert "".join(texts[:-1]) == "[\0ab"


def test_several_prompts_and_the_echo(client):
    chunks = list(complete(client, ["one", "two"], max_tokens=9, n=2, echo=True))
    found = pieces(chunks)
    wanted = [f"{text}[\0{text}] [\0" for text in ("one", "one", "two", "two")]
    assert ["".join(found[i][:-1])[:12] for i in range(4)] == wanted
    assert [found[i][0] for i in range(4)] == ["one", "one", "two", "two"]


def test_no_character_is_split(client):
    text = "é\N{SNOWMAN}\N{GRINNING FACE}"
    [texts] = pieces(complete(client, text, max_tokens=11)).values()
    assert "".join(texts[:-1]) == f"[\0{text}"
    assert set("".join(texts[:-1])) == set(f"[\0{text}")
    # Where the text ends inside one, that is shown at the end.
    [texts] = pieces(complete(client, text, max_tokens=10)).values()
    assert texts[-2:] == ["\N{REPLACEMENT CHARACTER}", "length"]


def test_usage_comes_last(client):
    options = {"include_usage": True}
    for chunks, prompt in (
        (list(complete(client, max_tokens=9, n=2, stream_options=options)), 6),
        (list(chat(client, max_tokens=9, n=2, stream_options=options)), 23),
    ):
        assert chunks[-1].choices == []
        usage = chunks[-1].usage
        counts = (usage.prompt_tokens, usage.completion_tokens, usage.total_tokens)
        assert counts == (prompt, 18, prompt + 18)
        assert all(chunk.usage is None for chunk in chunks[:-1])
        assert all("usage" in chunk.model_fields_set for chunk in chunks[:-1])


def test_logprobs_come_with_their_text(client):
    chunks = complete(client, "é", max_tokens=50, logprobs=1, stop="] [")
    tokens, offsets, told = [], [], ""
    for chunk in chunks:
        [choice] = chunk.choices
        told += choice.text
        if choice.logprobs:
            tokens += choice.logprobs.tokens
            offsets += choice.logprobs.text_offset
            assert all(offset < len(told) for offset in choice.logprobs.text_offset)
    assert tokens == ["[", "\0", r"bytes:\xc3", r"bytes:\xa9"]
    assert offsets == [0, 1, 2, 2]
    chunks = [c.choices[0] for c in chat(client, max_tokens=3, logprobs=True, top_logprobs=1)]
    entries = [entry for c in chunks if c.logprobs for entry in c.logprobs.content]
    assert [entry.token for entry in entries] == ["[", "<", "u"]
    assert [entry.top_logprobs[0].token for entry in entries] == ["[", "<", "u"]


def test_the_stream_as_it_is_sent(served):
    body = {"model": NAME, "prompt": "a", "max_tokens": 3, "stream": True}
    with served.http() as http:
        answer = http.post("/v1/completions", json=body)
    assert answer.headers["content-type"] == "text/event-stream; charset=utf-8"
    assert answer.headers["cache-control"] == "no-cache"
    *events, last, nothing = answer.text.split("\n\n")
    assert (last, nothing) == ("data: [DONE]", "")
    assert all(json.loads(event.removeprefix("data: "))["model"] == NAME for event in events)


def test_an_error_comes_before_the_stream_begins(served):
    body = {"model": NAME, "prompt": "a", "max_tokens": 5000, "stream": True}
    with served.http() as http:
        answer = http.post("/v1/completions", json=body)
    assert answer.status_code == 400
    assert answer.json()["error"]["code"] == "context_length_exceeded"


def test_a_failure_in_the_middle(tokenizer):
    import openai

    def four_and_nothing(request):
        return [*b"abcd", -1]

    fake = FakeEngine(tokenizer=tokenizer, delay=0.01, texts=four_and_nothing)
    with running(fake, tokenizer) as found, found.client() as client:
        texts = []
        with pytest.raises(openai.APIError, match="logits were NaN") as caught:
            texts += [chunk.choices[0].text for chunk in complete(client)]
        assert caught.value.body["code"] == "generation_failed"
        with pytest.raises(openai.InternalServerError, match="logits were NaN"):
            complete(client, stream=False)
        with found.http() as http:
            body = {"model": NAME, "prompt": "a", "stream": True}
            told = http.post("/v1/completions", json=body).text.split("\n\n")
        assert '"text":"a"' in told[0]
        assert "generation_failed" in told[-3]
        assert told[-2:] == ["data: [DONE]", ""]


@pytest.mark.parametrize("stream", [True, False])
def test_hanging_up_aborts(served, fake, stream):
    finished, steps = fake.finished, fake.steps
    body = {"model": NAME, "prompt": ["a", "b"], "max_tokens": 4000, "n": 2, "stream": stream}
    with served.http() as http:
        if stream:
            with http.stream("POST", "/v1/completions", json=body) as answer:
                next(answer.iter_lines())
        else:
            with pytest.raises(httpx.ReadTimeout):
                http.post("/v1/completions", json=body, timeout=0.1)
    until(lambda: fake.finished == finished + 4)
    assert fake.steps - steps < 2000
    assert not fake.live


def test_hanging_up_while_waiting_in_the_queue(served, fake, client):
    blocking = complete(client, ["x"] * 4, max_tokens=4000)
    next(iter(blocking))
    seen, finished = len(fake.seen), fake.finished
    body = {"model": NAME, "prompt": "a", "max_tokens": 9}
    with served.http() as http, pytest.raises(httpx.ReadTimeout):
        http.post("/v1/completions", json=body, timeout=0.1)
    until(lambda: fake.finished == finished + 1)
    assert len(fake.seen) == seen + 1
    assert len(fake.live) == 4
    blocking.close()
    until(lambda: not fake.live)


def test_hanging_up_in_the_middle_of_a_body(served, fake):
    address = served.url.removeprefix("http://").split(":")
    with socket.create_connection((address[0], int(address[1]))) as connection:
        head = "POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 100\r\n\r\n{"
        connection.sendall(head.encode())
    with served.http() as http:
        counted = 'turbojax_http_responses_total{path="/v1/completions",status="499"}'
        until(lambda: counted in http.get("/metrics").text)
    assert not fake.live


def test_a_client_that_does_not_read_holds_up_nobody(served, fake, client):
    address = served.url.removeprefix("http://").split(":")
    body = json.dumps(
        {"model": NAME, "prompt": "a", "max_tokens": 3000, "stream": True, "logprobs": 20}
    ).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n"
    with socket.create_connection((address[0], int(address[1]))) as connection:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        connection.sendall(head.encode() + body)
        until(lambda: fake.live)
        [texts] = pieces(complete(client, max_tokens=9)).values()
        assert texts[-1] == "length"
    until(lambda: not fake.live)
