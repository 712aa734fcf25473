"""OpenAI's own client, synchronous and not, against a real model: what it gets is the engine's."""

import asyncio

import openai
import pytest

from tests.serving.engine_helpers import shallow_model
from tests.serving.server_helpers import (
    NAME,
    TEMPLATE,
    real_engine,
    running,
    tokenizer_with_chats,
    until,
)
from turbojax.models.engine import Request, Result, Sampling, best_of
from turbojax.models.generation.sampling import Penalties

PROMPTS = [
    "def main(names):\n    for name in ",
    "class Reader:\n    def __init__(self",
    "import os\nimport ",
    '"""Tools for text."""\n\nimport sys\n',
]
END = 3
GREEDY = {"model": NAME, "temperature": 0, "max_tokens": 12}


@pytest.fixture(scope="module")
def model():
    return shallow_model()


@pytest.fixture(scope="module")
def alone(model):
    """Runs requests one by one, in an engine that serves nobody else."""
    engine = real_engine(model)

    def run(request: Request, count: int = 1) -> list[Result]:
        numbers = engine.add_samples(request, count)
        results = engine.run()
        return [results[number] for number in numbers]

    return run


@pytest.fixture(scope="module")
def served(model):
    with running(real_engine(model), tokenizer_with_chats()) as found:
        yield found


def tokens_of(text: str) -> list[int]:
    return [0, *text.encode()]


def conversation(said: str) -> tuple[list[dict], list[int]]:
    messages = [{"role": "system", "content": "Code."}, {"role": "user", "content": said}]
    text = f"<system>Code.\n<user>{said}\n<assistant>"
    assert "<{{ message.role }}>" in TEMPLATE
    return messages, list(text.encode())


def text_of(result: Result) -> str:
    return bytes(result.tokens).decode(errors="replace")


@pytest.mark.slow
def test_greedy_texts_are_the_engines(client, alone):
    for prompt in PROMPTS[:2]:
        [result] = alone(Request(tokens_of(prompt), 12, [END]))
        found = client.completions.create(prompt=prompt, **GREEDY)
        assert found.choices[0].text == text_of(result)
        assert found.choices[0].finish_reason == result.finish_reason == "length"
    messages, tokens = conversation("read a file")
    [result] = alone(Request(tokens, 12, [END]))
    found = client.chat.completions.create(messages=messages, **GREEDY)
    assert found.choices[0].message.content == text_of(result)
    assert found.usage.prompt_tokens == len(tokens)


@pytest.mark.slow
def test_samples_are_the_engines(client, alone):
    sampling = Sampling(0.9, top_k=50, top_p=0.95, min_p=0.01, seed=11)
    options = {"temperature": 0.9, "top_p": 0.95, "seed": 11, "n": 3}
    body = {"top_k": 50, "min_p": 0.01}
    results = alone(Request(tokens_of(PROMPTS[0]), 12, [END], sampling), 3)
    found = client.completions.create(prompt=PROMPTS[0], **{**GREEDY, **options}, extra_body=body)
    assert [choice.text for choice in found.choices] == [text_of(result) for result in results]
    assert len({choice.text for choice in found.choices}) == 3
    messages, tokens = conversation("read a file")
    results = alone(Request(tokens, 12, [END], sampling), 3)
    found = client.chat.completions.create(
        messages=messages, **{**GREEDY, **options}, extra_body=body
    )
    assert [c.message.content for c in found.choices] == [text_of(result) for result in results]


@pytest.mark.slow
def test_penalties_bias_and_stops_are_the_engines(client, alone):
    request = Request(
        tokens_of(PROMPTS[0]),
        24,
        [END, ord(")")],
        stop_strings=["in"],
        penalties=Penalties(1.2, 0.5, 0.25),
        logit_bias={ord("["): -100.0, ord("a"): 1.5},
    )
    [result] = alone(request)
    options = {
        "max_tokens": 24,
        "stop": "in",
        "presence_penalty": 0.5,
        "frequency_penalty": 0.25,
        "logit_bias": {str(ord("[")): -100, str(ord("a")): 1.5},
        "extra_body": {"repetition_penalty": 1.2, "stop_token_ids": [ord(")")]},
    }
    [choice] = client.completions.create(prompt=PROMPTS[0], **{**GREEDY, **options}).choices
    whole = text_of(result)
    assert choice.text == (whole if result.finish_reason == "length" else whole[:-2])
    assert choice.finish_reason == result.finish_reason
    assert "[" not in choice.text
    plain = client.completions.create(prompt=PROMPTS[0], **{**GREEDY, "max_tokens": 24})
    assert plain.choices[0].text != choice.text


def test_logprobs_are_the_engines(client, alone):
    [result] = alone(Request(tokens_of(PROMPTS[1]), 12, [END], logprobs=3))
    options = {**GREEDY, "max_tokens": 12}
    found = client.completions.create(prompt=PROMPTS[1], logprobs=3, **options)
    said = found.choices[0].logprobs
    assert said.token_logprobs == [x.logprob for x in result.logprobs]
    assert [sorted(top.values()) for top in said.top_logprobs] == [
        sorted(value for _, value in x.top) for x in result.logprobs
    ]
    assert [max(top.values()) for top in said.top_logprobs] == said.token_logprobs
    messages, tokens = conversation("sort")
    [result] = alone(Request(tokens, 12, [END], logprobs=2))
    found = client.chat.completions.create(
        messages=messages, logprobs=True, top_logprobs=2, **options
    )
    content = found.choices[0].logprobs.content
    assert [entry.logprob for entry in content] == [x.logprob for x in result.logprobs]
    assert [[top.bytes[0] for top in entry.top_logprobs] for entry in content] == [
        [token for token, _ in x.top] for x in result.logprobs
    ]


def test_the_best_are_the_most_likely(client, alone):
    sampling = Sampling(1.5, seed=3)
    results = alone(Request(tokens_of(PROMPTS[2]), 12, [END], sampling, logprobs=0), 6)
    options = {**GREEDY, "temperature": 1.5, "seed": 3, "max_tokens": 12}
    found = client.completions.create(prompt=PROMPTS[2], n=2, best_of=6, **options)
    wanted = [text_of(result) for result in best_of(results, 2)]
    assert [choice.text for choice in found.choices] == wanted
    assert found.usage.completion_tokens == sum(len(result.tokens) for result in results)


def test_streams_say_what_whole_answers_say(client):
    options = {**GREEDY, "n": 2, "temperature": 1, "seed": 5, "max_tokens": 14}
    whole = client.completions.create(prompt=PROMPTS, **options)
    texts = [""] * 8
    for chunk in client.completions.create(prompt=PROMPTS, stream=True, **options):
        texts[chunk.choices[0].index] += chunk.choices[0].text
    assert texts == [choice.text for choice in whole.choices]
    messages, _ = conversation("sort")
    whole = client.chat.completions.create(messages=messages, **options)
    texts = [""] * 2
    for chunk in client.chat.completions.create(messages=messages, stream=True, **options):
        texts[chunk.choices[0].index] += chunk.choices[0].delta.content or ""
    assert texts == [choice.message.content for choice in whole.choices]


@pytest.mark.slow
def test_many_at_a_time(served, alone):
    prompts = [f"{PROMPTS[i % 4]}x{i}" for i in range(9)]

    async def ask(client, i: int) -> str:
        options = {**GREEDY, "prompt": prompts[i], "temperature": i % 2, "seed": i}
        if i % 3:
            return (await client.completions.create(**options)).choices[0].text
        chunks = await client.completions.create(stream=True, **options)
        return "".join([chunk.choices[0].text async for chunk in chunks])

    async def all_of_them() -> list[str]:
        async with served.async_client() as client:
            return await asyncio.gather(*(ask(client, i) for i in range(9)))

    found = asyncio.run(all_of_them())
    for i, text in enumerate(found):
        sampling = Sampling(float(i % 2), seed=i)
        [result] = alone(Request(tokens_of(prompts[i]), 12, [END], sampling))
        assert text == text_of(result)


def figures(served) -> dict[str, float]:
    with served.http() as http:
        lines = [x for x in http.get("/metrics").text.splitlines() if not x.startswith("#")]
    return {name: float(value) for name, value in (x.rsplit(" ", 1) for x in lines)}


def test_prompts_seen_before_are_not_run_again(served, client):
    prompt = "".join(f"name_{i} = {i}\n" for i in range(10))
    first = client.completions.create(prompt=prompt, **GREEDY)
    again = client.completions.create(prompt=prompt, **GREEDY)
    assert first.usage.prompt_tokens_details.cached_tokens == 0
    assert again.usage.prompt_tokens_details.cached_tokens >= 64
    assert again.choices[0].text == first.choices[0].text
    assert 0 < figures(served)["turbojax_prefix_hit_ratio"] < 1


def test_a_timeout_and_the_refusals_of_the_engine(served, client):
    found = client.completions.create(
        prompt="a", **{**GREEDY, "max_tokens": 250}, extra_body={"timeout": 0.01}
    )
    assert found.choices[0].finish_reason == "timeout"
    with served.http() as http:
        body = {"model": NAME, "prompt": "a" * 300}
        error = http.post("/v1/completions", json=body).json()["error"]
        assert error["code"] == "context_length_exceeded"
        assert "301 tokens, which with 16 new ones must be at most 256" in error["message"]


@pytest.mark.fuzz
def test_a_pool_smaller_than_the_longest_request(model):
    smaller = real_engine(model, num_pages=8)
    with running(smaller, tokenizer_with_chats()) as served, served.client() as client:
        body = {"stop_token_ids": list(range(256))}
        said = [{"role": "user", "content": "a"}]
        [choice] = client.chat.completions.create(
            model=NAME, messages=said, extra_body=body
        ).choices
        assert (choice.message.content, choice.finish_reason) == ("", "stop")
        with pytest.raises(openai.BadRequestError, match="need 9 pages, must be at most num_pages"):
            client.completions.create(prompt="a", **{**GREEDY, "max_tokens": 130})


def test_nothing_is_held_afterwards(served, client):
    messages, _ = conversation("read a file")
    stream = client.chat.completions.create(
        model=NAME, messages=messages, n=4, stream=True, extra_body={"ignore_eos": True}
    )
    next(iter(stream))
    stream.close()

    until(lambda: figures(served)["turbojax_requests_running"] == 0)
    found = figures(served)
    assert found["turbojax_requests_waiting"] == 0
    assert found["turbojax_held_tokens"] == 0
    assert found["turbojax_free_pages"] + found["turbojax_cached_pages"] == 64
    assert found["turbojax_page_occupancy"] == 0
    assert found['turbojax_requests_total{outcome="aborted"}'] == 4
    assert found["turbojax_engine_steps_total"] > 0
    assert found["turbojax_engine_wait_seconds_total"] > 0
