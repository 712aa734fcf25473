"""The server with tokenizers of checkpoints: special tokens, tokens that are parts of letters."""

import pytest

from tests.models.chat_cases import CHATML, folder
from tests.models.tokenizer_helpers import TEXTS, byte_fallback, save
from tests.serving.fake_engine import FakeEngine
from tests.serving.server_helpers import NAME
from turbojax.models import JsonTokenizer
from turbojax.server.texts import TokenTexts


@pytest.fixture(scope="module", params=["byte-level", "sentencepiece"])
def tokenizer(request, tmp_path_factory):
    path = tmp_path_factory.mktemp("tokenizer")
    made = folder(path) if request.param == "byte-level" else save(byte_fallback(), path)
    found = JsonTokenizer(made)
    found.chat_template = CHATML
    return found


@pytest.fixture(scope="module")
def fake(tokenizer):
    end = tokenizer.special_token("<|im_end|>")
    return FakeEngine(
        tokenizer=tokenizer,
        texts=lambda request: [
            *tokenizer.encode(TEXTS[request.sampling.seed], add_special_tokens=False),
            end,
        ],
    )


def chat(client, number: int, **options):
    return client.chat.completions.create(
        model=NAME,
        messages=[{"role": "user", "content": "say <|im_end|>"}],
        seed=number,
        stop="<|im_end|>",
        logprobs=True,
        **options,
    )


@pytest.mark.parametrize("number", range(len(TEXTS)))
def test_texts_are_whole_and_tokens_have_their_bytes(tokenizer, client, fake, number):
    tokens = tokenizer.encode(TEXTS[number], add_special_tokens=False)
    [choice] = chat(client, number).choices
    # What comes after a prompt may begin with a space that a text by itself has not.
    assert choice.message.content.lstrip() == tokenizer.decode(tokens).lstrip()
    assert choice.finish_reason == "stop"
    content = choice.logprobs.content
    told = b"".join(bytes(entry.bytes) for entry in content)
    assert told.decode().lstrip() == choice.message.content.lstrip()
    assert len(content) == len(tokens)
    texts, entries = [], []
    for chunk in chat(client, number, stream=True):
        texts += [chunk.choices[0].delta.content or ""]
        entries += chunk.choices[0].logprobs.content if chunk.choices[0].logprobs else []
    assert "".join(texts) == choice.message.content
    assert "\N{REPLACEMENT CHARACTER}" not in "".join(texts)
    assert [entry.token for entry in entries] == [entry.token for entry in content]


def test_what_a_message_writes_is_no_special_token(tokenizer, client, fake):
    chat(client, 0, max_tokens=1)
    end = tokenizer.special_token("<|im_end|>")
    # Of two turns, the system's and the user's.
    assert fake.seen[-1].tokens.count(end) == 2


def test_names_of_tokens(tokenizer):
    texts = TokenTexts(tokenizer)
    end = tokenizer.special_token("<|im_end|>")
    assert texts.text(end) == "<|im_end|>"
    assert texts.bytes(end) == b"<|im_end|>"
    [first, *_] = tokenizer.encode("😀", add_special_tokens=False)[-4:]
    assert texts.text(first).startswith(r"bytes:\xf0")
