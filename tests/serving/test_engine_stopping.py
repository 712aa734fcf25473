"""Texts that end a request of the engine, wherever in its tokens they begin and end."""

import dataclasses

import pytest

from tests.serving.engine_device import CONFIG, make, on
from tests.serving.engine_texts import VOCABULARY, expected
from turbojax import models
from turbojax.models import Finished, NewToken, Request

PROMPT = [1, 2, 3]


def whole(count=40):
    """What a request gets that nothing ends."""
    return expected(Request(PROMPT, count))[0]


def text_of(tokens):
    return "".join(f"{token} " for token in tokens)


def until(stops):
    """The fewest tokens whose text holds one of these."""
    tokens = whole()
    return next(tokens[:n] for n in range(1, 41) if any(s in text_of(tokens[:n]) for s in stops))


def engine(tokenizer=None, slots=2):
    made, device = make(8, slots, 16, prefixes=True)
    made.admission = dataclasses.replace(made.admission, tokenizer=tokenizer)
    return made, device


def run(request, tokenizer):
    """Its events, to the end; others run beside it."""
    made, device = engine(tokenizer)
    made.add(Request([4, 1], 45))
    number = made.add(request)
    with on(device):
        return [event for event in made.stream() if event.request_id == number]


def check(request, tokenizer, tokens, reason="stop"):
    events = run(request, tokenizer)
    assert [e.token for e in events if isinstance(e, NewToken)] == list(tokens)
    *_, last = events
    assert isinstance(last, Finished)
    assert (last.result.tokens, last.result.finish_reason) == (tuple(tokens), reason)


@pytest.mark.quick(41, slow=0)
@pytest.mark.parametrize("size", [1, 2, 3, 4, 7])
@pytest.mark.parametrize("start", range(9))
def test_a_text_is_found_across_tokens(start, size):
    stop = text_of(whole())[start : start + size]
    tokens = until([stop])
    check(Request(PROMPT, 40, stop_strings=[stop]), models.NumberTokenizer(VOCABULARY), tokens)


def test_the_first_of_several_texts_and_tokens_ends_it():
    numbers = models.NumberTokenizer(VOCABULARY)
    tokens = whole()
    early, late = text_of(tokens[4:8]), text_of(tokens[10:16])
    assert len(until([early])) < len(until([late]))
    check(Request(PROMPT, 40, stop_strings=(late, early)), numbers, until([early]))
    stop = next(t for t in tokens if t not in tokens[: tokens.index(t)] and t != tokens[0])
    both = Request(PROMPT, 40, (stop,), stop_strings=(late,))
    check(both, numbers, tokens[: tokens.index(stop) + 1])
    never = Request(PROMPT, 40, stop_strings=["no such text"])
    check(never, numbers, tokens, "length")
    # The last token that there may be completes it.
    exact = until([early])
    check(Request(PROMPT, len(exact), stop_strings=[early]), numbers, exact)


def test_a_text_of_the_prompt_does_not_end_it():
    request = Request([2, 2, 2, 2, *PROMPT], 8, stop_strings=["2 2 2 2 "])
    tokens, _ = expected(Request(request.tokens, 8))
    assert "2 2 2 2 " not in text_of(tokens)
    check(request, models.NumberTokenizer(VOCABULARY), tokens, "length")


def test_a_character_of_two_tokens():
    """Tokens are bytes, of which two make an e with an accent."""
    table = "é".encode() + b"abc"

    class Accents(models.ByteTokenizer):
        def stream(self, prompt=()):
            decode = super().stream([table[token] for token in prompt])
            return lambda token: decode(None if token is None else table[token])

    def text(tokens):
        return bytes(table[token] for token in tokens).decode(errors="replace")

    for first in range(VOCABULARY):
        prompt = [first, 3, 3]
        tokens = expected(Request(prompt, 60))[0]
        if "é" in text(tokens):
            break
    number = next(n for n in range(61) if "é" in text(tokens[:n]))
    check(Request(prompt, 60, stop_strings=["é"]), Accents(), tokens[:number])


def test_a_text_that_is_written_like_a_special_token():
    class Special(models.NumberTokenizer):
        def special_token(self, text):
            return tokens[5] if text == "<end>" else None

    tokens = whole()
    end = tokens.index(tokens[5])
    check(Request(PROMPT, 40, stop_strings=["<end>"]), Special(VOCABULARY), tokens[: end + 1])


def test_stop_texts_need_a_tokenizer():
    made, device = engine()
    with pytest.raises(ValueError, match=r"stop_strings=\('x',\) need a tokenizer"):
        made.add(Request(PROMPT, 4, stop_strings=["x"]))
    number = made.add(Request(PROMPT, 4))
    with on(device):
        assert made.run()[number].tokens == whole(4)


def test_an_engine_takes_a_tokenizer_of_its_model():
    model = models.random_decoder(CONFIG)
    made = models.Engine(model, num_pages=3, tokenizer=models.NumberTokenizer(5))
    assert made.add(Request([1], 1, stop_strings=["3"])) == 0
    with pytest.raises(ValueError, match="tokenizer has 6 tokens, must be at most the model's 5"):
        models.Engine(model, num_pages=3, tokenizer=models.NumberTokenizer(6))
