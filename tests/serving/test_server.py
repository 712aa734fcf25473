"""Every field of the server's requests, with an engine that has no model."""

import pytest

from tests.serving.fake_engine import FakeEngine
from tests.serving.server_helpers import NAME, chat, complete, running
from turbojax.models import Sampling
from turbojax.models.generation.sampling import Penalties
from turbojax.models.text.tokenizer import ByteTokenizer


def answered(prompt: str, count: int, *, begun: bool = True) -> str:
    """What the fake engine says, see `fake_engine.answer`; a text begins with byte 0."""
    whole = f"[{chr(0) if begun else ''}{prompt}] "
    return (whole * count)[:count]


def test_a_completion(client, fake):
    found = complete(client)
    [choice] = found.choices
    assert choice.text == answered("hello", 16)
    assert (choice.finish_reason, choice.index, choice.logprobs) == ("length", 0, None)
    assert found.object == "text_completion"
    assert found.model == NAME
    assert found.id.startswith("cmpl-")
    usage = found.usage
    assert (usage.prompt_tokens, usage.completion_tokens, usage.total_tokens) == (6, 16, 22)
    assert usage.prompt_tokens_details.cached_tokens == 0
    assert fake.seen[-1].tokens == (0, *b"hello")


@pytest.mark.parametrize(
    ("prompt", "texts"),
    [
        (["one", "two"], [("one", True), ("two", True)]),
        ([104, 105], [("hi", False)]),
        ([[104, 105], [106]], [("hi", False), ("j", False)]),
        ("", [("", True)]),
    ],
)
def test_prompts_of_all_kinds(client, prompt, texts):
    found = complete(client, prompt, max_tokens=9, n=2, echo=True)
    wanted = [
        ("" if text == prompt and begun else text) + answered(text, 9, begun=begun)
        for text, begun in texts
        for _ in range(2)
    ]
    assert [choice.text for choice in found.choices] == wanted
    assert [choice.index for choice in found.choices] == list(range(len(wanted)))
    assert found.usage.completion_tokens == 9 * len(wanted)


def test_a_chat(client, fake):
    found = chat(client, max_completion_tokens=14)
    [choice] = found.choices
    wanted = "<user>hello\n<assistant>"
    assert bytes(fake.seen[-1].tokens).decode() == wanted
    assert choice.message.content == f"[{wanted}"[:14]
    assert choice.message.role == "assistant"
    assert choice.message.refusal is None
    assert (choice.finish_reason, choice.logprobs) == ("length", None)
    assert found.object == "chat.completion"
    assert found.id.startswith("chatcmpl-")
    assert found.usage.prompt_tokens == len(wanted)


def test_messages_as_templates_know_them(client, fake):
    client.chat.completions.create(
        model=NAME,
        messages=[
            {"role": "developer", "content": "be brief"},
            {
                "role": "user",
                "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}],
            },
            {"role": "assistant", "content": "c", "name": "me"},
        ],
        max_tokens=1,
        extra_body={"chat_template_kwargs": {"thinking": True}},
    )
    wanted = "<system>be brief\n<user>ab\n<assistant>c\n<assistant>..."
    assert bytes(fake.seen[-1].tokens).decode() == wanted
    chat(client, max_tokens=1, extra_body={"add_generation_prompt": False})
    assert bytes(fake.seen[-1].tokens).decode() == "<user>hello\n"


def test_a_chat_without_a_limit_has_the_room_there_is(client, fake):
    chat(client, stop=["]"])
    prompt = len("<user>hello\n<assistant>")
    assert fake.seen[-1].max_new_tokens == 4096 - prompt


@pytest.mark.parametrize("ask", [complete, chat])
def test_options_reach_the_engine(client, fake, ask):
    ask(
        client,
        max_tokens=5,
        temperature=0.5,
        top_p=0.9,
        seed=7,
        presence_penalty=0.25,
        frequency_penalty=-1,
        logit_bias={"65": 3, "66": -100},
        stop=["xyz", "\n\n"],
        user="somebody",
        extra_body={
            "top_k": 40,
            "min_p": 0.1,
            "repetition_penalty": 1.5,
            "priority": -3,
            "timeout": 12.5,
            "stop_token_ids": [200, 7],
            "metadata": {"why": "a test"},
        },
    )
    request = fake.seen[-1]
    assert request.max_new_tokens == 5
    assert request.sampling == Sampling(0.5, top_k=40, top_p=0.9, min_p=0.1, seed=7)
    assert request.penalties == Penalties(1.5, 0.25, -1.0)
    assert request.logit_bias == {65: 3.0, 66: -100.0}
    assert request.stop_strings == ("xyz", "\n\n")
    assert set(request.stop_tokens) == {200, 7, 3}
    assert (request.priority, request.timeout) == (-3, 12.5)
    assert (request.logprobs, request.constraint) == (None, None)


@pytest.mark.parametrize("ask", [complete, chat])
def test_defaults_are_those_of_openai(client, fake, ask):
    ask(client, temperature=None, max_tokens=2)
    request = fake.seen[-1]
    assert request.sampling == Sampling(1.0, seed=request.sampling.seed)
    assert request.penalties == Penalties()
    assert (request.logit_bias, request.stop_strings, request.stop_tokens) == ({}, (), (3,))
    assert (request.priority, request.timeout) == (0, None)
    ask(client, temperature=None, max_tokens=2)
    assert fake.seen[-1].sampling.seed != request.sampling.seed


def test_what_leaves_out_nothing_is_no_restriction(client, fake):
    body = {"top_k": -1, "min_p": 0, "ignore_eos": True}
    complete(client, temperature=0.5, top_p=1, seed=-1, extra_body=body)
    assert fake.seen[-1].sampling == Sampling(0.5, seed=2**32 - 1)
    assert fake.seen[-1].stop_tokens == ()
    # Greedy: the most likely token is always among the most likely ones.
    complete(
        client, temperature=0, top_p=0.5, seed=2**40 + 5, extra_body={"top_k": 3, "min_p": 0.5}
    )
    assert fake.seen[-1].sampling == Sampling(seed=5)


def test_samples_differ_by_their_seeds(client):
    found = complete(client, n=3, temperature=1, seed=5, max_tokens=12)
    assert [choice.text for choice in found.choices] == [
        answered(f"hello#{seed}", 12) for seed in (5, 6, 7)
    ]
    found = chat(client, n=2, temperature=1, seed=5, max_tokens=30)
    assert [choice.message.content for choice in found.choices] == [
        f"[<user>hello\n<assistant>#{seed}] [<user>"[:30] for seed in (5, 6)
    ]


def test_best_of_takes_the_most_likely(tokenizer):
    class Judging(FakeEngine):
        """Thinks the more of a text the smaller the last digit of its seed."""

        def _finish(self, number, reason):
            import dataclasses

            super()._finish(number, reason)
            event = self.events[-1]
            seed = self.seen[number].sampling.seed
            said = tuple(
                dataclasses.replace(x, logprob=-1.0 - seed % 10) for x in event.result.logprobs
            )
            result = dataclasses.replace(event.result, logprobs=said)
            self.events[-1] = dataclasses.replace(event, result=result)

    fake = Judging(tokenizer=tokenizer)
    with running(fake, tokenizer) as found, found.client() as client:
        answer = complete(client, n=2, best_of=4, temperature=1, seed=8, max_tokens=12)
    assert [choice.text for choice in answer.choices] == [
        answered(f"hello#{seed}", 12) for seed in (10, 11)
    ]
    assert [choice.index for choice in answer.choices] == [0, 1]
    assert answer.choices[0].logprobs is None
    assert answer.usage.completion_tokens == 48
    assert {request.logprobs for request in fake.seen} == {0}


def test_a_stop_text_ends_a_text_and_is_none_of_it(client):
    found = complete(client, max_tokens=50, stop="lo]")
    assert (found.choices[0].text, found.choices[0].finish_reason) == ("[\0hel", "stop")
    assert found.usage.completion_tokens == 8
    found = complete(client, max_tokens=50, extra_body={"stop_token_ids": [ord("l")]})
    assert (found.choices[0].text, found.choices[0].finish_reason) == ("[\0he", "stop")


def test_logprobs_of_completions(client):
    said = complete(client, max_tokens=4, logprobs=2).choices[0].logprobs
    assert said.tokens == ["[", "\0", "h", "e"]
    assert said.token_logprobs == [-0.5] * 4
    assert said.text_offset == [0, 1, 2, 3]
    assert said.top_logprobs[2] == {"h": -0.5, "A": -2.65}
    # None is said of what stopped the text.
    said = complete(client, max_tokens=50, logprobs=0, stop="lo]").choices[0].logprobs
    assert said.tokens == ["[", "\0", "h", "e", "l"]
    assert said.top_logprobs == [{}] * 5
    said = complete(client, logprobs=0, extra_body={"stop_token_ids": [ord("h")]})
    assert said.choices[0].logprobs.tokens == ["[", "\0"]


def test_logprobs_of_chats(client):
    said = chat(client, max_tokens=3, logprobs=True, top_logprobs=2).choices[0].logprobs
    assert [entry.token for entry in said.content] == ["[", "<", "u"]
    assert said.content[2].bytes == [ord("u")]
    assert said.content[2].logprob == -0.5
    assert [top.token for top in said.content[2].top_logprobs] == ["u", "A"]
    assert [top.logprob for top in said.content[2].top_logprobs] == [-0.5, -2.65]
    said = chat(client, max_tokens=3, logprobs=True).choices[0].logprobs
    assert [entry.top_logprobs for entry in said.content] == [[]] * 3


def test_logprobs_of_parts_of_characters(client):
    said = complete(client, "é", max_tokens=4, logprobs=1).choices[0].logprobs
    assert said.tokens == ["[", "\0", r"bytes:\xc3", r"bytes:\xa9"]
    assert said.text_offset == [0, 1, 2, 2]
    content = chat(client, "é", max_tokens=9, logprobs=True).choices[0].logprobs.content
    assert bytes(byte for entry in content for byte in entry.bytes).decode() == "[<user>é"


def test_a_text_that_ends_in_half_a_character(client):
    found = complete(client, "é", max_tokens=3)
    assert found.choices[0].text == "[\0\N{REPLACEMENT CHARACTER}"


def test_models(client, http):
    [model] = client.models.list().data
    assert (model.id, model.object, model.owned_by) == (NAME, "model", "turbojax")
    assert client.models.retrieve(NAME).id == NAME
    assert http.get("/v1/models").json()["data"][0]["max_model_len"] == 4096


def test_health(http):
    assert http.get("/health").json() == {"status": "ok"}


def test_metrics(client, http):
    def figures():
        lines = [x for x in http.get("/metrics").text.splitlines() if not x.startswith("#")]
        return {name: float(value) for name, value in (x.rsplit(" ", 1) for x in lines)}

    before = figures()
    complete(client, max_tokens=6, n=2)
    chat(client, max_tokens=40, stop="]")
    http.get("/nothing/of/the/kind")
    http.post("/v1/completions", content=b"?")
    after = figures()

    def grown(name):
        return after[name] - before.get(name, 0)

    assert grown('turbojax_requests_total{outcome="length"}') == 2
    assert grown('turbojax_requests_total{outcome="stop"}') == 1
    assert grown("turbojax_generated_tokens_total") == 6 * 2 + len("[<user>hello\n<assistant>]")
    assert grown("turbojax_prompt_tokens_total") == 6 * 2 + len("<user>hello\n<assistant>")
    assert grown("turbojax_time_to_first_token_seconds_count") == 3
    assert grown("turbojax_time_per_token_seconds_count") == 3
    assert grown("turbojax_request_seconds_count") == 3
    assert grown("turbojax_queue_seconds_count") == 3
    assert grown('turbojax_http_responses_total{path="/v1/completions",status="200"}') == 1
    assert grown('turbojax_http_responses_total{path="/v1/completions",status="400"}') == 1
    assert grown('turbojax_http_responses_total{path="/v1/chat/completions",status="200"}') == 1
    assert grown('turbojax_http_responses_total{path="unknown",status="404"}') == 1
    assert after["turbojax_pages"] == 100
    assert after["turbojax_free_pages"] == 100
    assert after["turbojax_requests_running"] == 0
    assert "process_cpu_seconds_total" not in after
    assert http.get("/metrics").headers["content-type"].startswith("text/plain; version=0.0.4")


def test_timeouts_of_requests(client):
    # The fake engine makes a token in no time, but looks at the clock before each.
    found = complete(client, max_tokens=4000, extra_body={"timeout": 1e-6})
    assert found.choices[0].finish_reason == "timeout"


def test_a_tokenizer_without_a_template():
    tokenizer = ByteTokenizer()
    with running(FakeEngine(tokenizer=tokenizer), tokenizer) as found, found.http() as http:
        body = {"model": NAME, "messages": [{"role": "user", "content": "a"}]}
        answer = http.post("/v1/chat/completions", json=body)
    assert answer.status_code == 400
    assert "no chat template" in answer.json()["error"]["message"]
