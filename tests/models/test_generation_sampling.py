"""Drawing, ending and streaming, on a tiny random model whose tokens are bytes or letters."""

import dataclasses
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.models import tiny
from turbojax import models
from turbojax.models import Sampling
from turbojax.models.generation import session as generation
from turbojax.models.generation.stopping import TextStream
from turbojax.models.text.tokenizer import NumberTokenizer

NEW = 14
WARM = Sampling(temperature=1.0, seed=5)


@pytest.fixture(scope="module")
def model() -> models.Decoder:
    return models.unstack(tiny.transformer(vocab_size=90))


@pytest.fixture(scope="module")
def tokens() -> jax.Array:
    return jnp.asarray(np.random.default_rng(0).integers(90, size=(3, 9)), jnp.int32)


def run(model, tokens, new=NEW, **options) -> np.ndarray:
    return np.asarray(models.generate(model, tokens, max_new_tokens=new, **options))


@pytest.mark.quick(slow=1)
@pytest.mark.parametrize(
    ("cache", "sampling"),
    [
        ("exact", Sampling(temperature=0.8, top_k=20, top_p=0.9, min_p=0.02, seed=2**32 - 2)),
        ("turbo4", WARM),
    ],
)
def test_a_row_does_not_depend_on_the_others(model, tokens, sampling, cache):
    together = run(model, tokens, sampling=sampling, cache=cache)
    others = run(model, tokens.at[0].set(7).at[2].set(3), sampling=sampling, cache=cache)
    np.testing.assert_array_equal(together[1], others[1])
    assert not np.array_equal(together[0], others[0])
    for row in range(3):
        # Row b has the seed of the first plus b, also beyond the largest.
        seed = (sampling.seed + row) % 2**32
        own = dataclasses.replace(sampling, seed=seed)
        alone = run(model, tokens[row : row + 1], sampling=own, cache=cache)
        np.testing.assert_array_equal(alone[0], together[row])


@pytest.mark.slow
def test_seeds_make_equal_prompts_differ_and_runs_repeat(model, tokens):
    same = jnp.tile(tokens[:1], (3, 1))
    first = run(model, same, sampling=WARM)
    assert len({tuple(row) for row in first.tolist()}) == 3
    np.testing.assert_array_equal(run(model, same, sampling=WARM), first)
    other = run(model, same, sampling=dataclasses.replace(WARM, seed=6))
    np.testing.assert_array_equal(other[:2], first[1:])
    greedy = run(model, same)
    np.testing.assert_array_equal(run(model, same, sampling=Sampling(seed=9)), greedy)
    np.testing.assert_array_equal(
        run(model, same, sampling=Sampling(temperature=1.0, top_k=1)), greedy
    )


@pytest.mark.fuzz
def test_draws_are_those_of_an_engine(model, tokens):
    made = models.Engine(
        model, num_pages=12, page_size=16, max_sequences=2, max_length=32, step_tokens=16
    )
    numbers = [
        made.add(
            models.Request(
                row.tolist(), NEW, sampling=dataclasses.replace(WARM, seed=WARM.seed + i)
            )
        )
        for i, row in enumerate(np.asarray(tokens))
    ]
    results = made.run()
    wanted = [list(results[number].tokens) for number in numbers]
    assert run(model, tokens, sampling=WARM, cache="paged").tolist() == wanted


def test_rows_end_at_stop_tokens(model, tokens):
    whole = run(model, tokens, sampling=WARM)
    stops = {int(whole[0, 3]), int(whole[1, 6])}
    ends = [next((i for i, t in enumerate(row) if t in stops), NEW - 1) for row in whole.tolist()]
    assert ends[0] <= 3
    assert ends[1] <= 6
    seen = []
    got = run(
        model, tokens, sampling=WARM, stop_tokens=iter(stops), pad_token=-7, on_token=seen.append
    )
    for row, end in enumerate(ends):
        assert got[row].tolist() == [*whole[row, : end + 1].tolist(), *[-7] * (NEW - 1 - end)]
    # It is over when all are.
    assert len(seen) == max(ends) + 1
    assert seen[0].dtype == np.int32
    np.testing.assert_array_equal(np.stack(seen, axis=1), got[:, : len(seen)])


def test_generation_is_over_when_all_rows_have_ended(model, tokens):
    first, seen = run(model, tokens[:1])[0, 0], []
    got = run(model, tokens[:1], stop_tokens=[int(first)], on_token=seen.append)
    assert got[0].tolist() == [first] + [0] * (NEW - 1)
    assert len(seen) == 1


class Letters(NumberTokenizer):
    """Token t is two digits: a stop text may begin in one and end in the next."""

    def stream(self, prompt=()):
        return lambda token: "" if token is None else f"{token:02}"


@pytest.mark.parametrize("place", [0, 3, 7])
def test_rows_end_at_stop_strings_wherever_they_begin(model, tokens, place):
    whole = run(model, tokens, sampling=WARM)
    texts = ["".join(f"{t:02}" for t in row) for row in whole.tolist()]
    stop = texts[0][place : place + 3]
    got = run(
        model,
        tokens,
        sampling=WARM,
        stop_strings=("never", stop),
        tokenizer=Letters(90),
        pad_token=-1,
    )
    for row, text in enumerate(texts):
        at = text.find(stop)
        kept = NEW if at < 0 else (at + len(stop) + 1) // 2
        assert got[row].tolist() == [*whole[row, :kept].tolist(), *[-1] * (NEW - kept)]
    assert (got[0] == -1).any()


class Remembering(NumberTokenizer):
    """A tokenizer that tells which prompts it was asked to continue."""

    def __init__(self):
        super().__init__(90)
        self.prompts = []

    def stream(self, prompt=()):
        self.prompts.append(list(prompt))
        return super().stream(prompt)


def test_stop_strings_are_read_after_the_prompts_without_padding(model, tokens):
    tokenizer, lengths = Remembering(), (9, 2, 5)
    run(model, tokens, 1, lengths=jnp.array(lengths), stop_strings=["x"], tokenizer=tokenizer)
    rows = np.asarray(tokens).tolist()
    assert tokenizer.prompts == [row[:n] for row, n in zip(rows, lengths, strict=True)]


@pytest.mark.parametrize("sampling", [Sampling(), WARM])
def test_a_session_goes_on_as_if_it_had_not_been_left(model, tokens, sampling):
    whole = run(model, tokens, sampling=sampling)
    session = generation.start(model, tokens, max_length=9 + NEW)
    first = list(generation.stream(session, 5, sampling=sampling))
    np.testing.assert_array_equal(np.stack(first, 1), whole[:, :5])
    # The tokens so far are the prompt of what follows.
    longer = jnp.concatenate([tokens, jnp.asarray(whole[:, :5])], axis=1)
    session = generation.start(model, longer, max_length=9 + NEW)
    rest = list(generation.stream(session, NEW - 5, sampling=sampling, drawn=5))
    np.testing.assert_array_equal(np.stack(rest, 1), whole[:, 5:])


def test_nan_after_the_end_of_a_row_does_no_harm(model, tokens):
    whole = run(model, tokens)
    stop = int(whole[0, 0])
    assert stop not in whole[1:]
    session = generation.start(model, tokens, max_length=9 + NEW)
    steps = generation.stream(session, NEW, stop_tokens=[stop], pad_token=-1)
    got = [next(steps)]
    # The model's own rows cannot be spoiled alone, so the next logits are.
    spoiled = dataclasses.replace(
        generation.start(model, tokens, max_length=9 + NEW),
        logits=session.logits.at[0].set(jnp.nan),
    )
    with pytest.raises(ValueError, match=r"the logits of sequences \[0\] hold NaN"):
        next(generation.stream(spoiled, 2))
    endings = generation.Endings([[], [], []], [stop])
    endings.add(got[0])
    options = [Sampling()] * 3
    known = next(generation._stream(spoiled, 1, options, endings, -1, 0))
    assert known.tolist() == [-1, *whole[1:, 0]]


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"max_new_tokens": 0}, ValueError, "max_new_tokens=0 must be at least 1"),
        ({"stop_tokens": ["a"]}, TypeError, "a member of stop_tokens='a' must be an integer"),
        ({"stop_strings": "ab"}, TypeError, "stop_strings='ab' must be several texts"),
        ({"stop_strings": [3]}, TypeError, "a member of stop_strings=3 must be a text"),
        ({"stop_strings": [""]}, ValueError, "must not hold an empty text"),
        ({"stop_strings": ["a"]}, ValueError, r"stop_strings=\('a',\) need a tokenizer"),
        ({"pad_token": 0.5}, TypeError, "pad_token=0.5 must be an integer"),
        ({"pad_token": 2**31}, ValueError, "pad_token=2147483648 must be within int32"),
    ],
)
def test_generate_refuses(model, tokens, options, error, message):
    with pytest.raises(error, match=message):
        models.generate(model, tokens, **{"max_new_tokens": 1, **options})


def test_stream_refuses_at_once(model, tokens):
    session = generation.start(model, tokens, max_length=20)
    for options, message in (
        ({"drawn": -1}, "drawn=-1 must be at least 0"),
        ({"prompts": [[1]]}, "1 prompts must be 3, one per sequence"),
        ({"pad_token": 2**31}, "pad_token=2147483648 must be within int32"),
    ):
        with pytest.raises(ValueError, match=message):
            generation.stream(session, 1, **options)


def _pieces(pieces: list[str], stops: list[str]) -> tuple[list[str], str, bool]:
    words = iter(pieces)
    stream = TextStream(lambda token: "" if token is None else next(words), stops)
    shown = [stream.add(0) for _ in pieces] + [stream.add(None)]
    return shown, stream.text, stream.stopped


@pytest.mark.parametrize(
    ("pieces", "stops", "shown", "stopped"),
    [
        (["ab", "c"], [], ["ab", "c", ""], False),
        (["ab", "cd"], ["bc"], ["a", "", ""], True),
        (["ab", "xd"], ["bc"], ["a", "bxd", ""], False),
        (["ab"], ["bc"], ["a", "b"], False),
        (["a", "a", "a", "b"], ["aab"], ["", "", "a", "", ""], True),
        (["x\n", "\ny"], ["\n\n"], ["x", "", ""], True),
        (["abcabd"], ["bd", "ca"], ["ab", ""], True),
        (["ab", "c", "d"], ["b", "abcd"], ["a", "", "", ""], True),
    ],
)
def test_text_is_shown_as_soon_as_no_stop_text_can_begin_in_it(pieces, stops, shown, stopped):
    got, text, ended = _pieces(pieces, stops)
    assert (got, ended) == (shown, stopped)
    assert text == "".join(shown)


def test_what_is_shown_is_the_text_up_to_the_first_stop():
    rng = np.random.default_rng(0)
    for _ in range(300):
        pieces = ["".join(rng.choice(list("ab"), rng.integers(0, 4))) for _ in range(8)]
        stops = ["".join(rng.choice(list("ab"), rng.integers(3, 6))) for _ in range(2)]
        shown, text, stopped = _pieces(pieces, stops)
        whole = "".join(pieces)
        assert "".join(shown) == text
        assert whole.startswith(text)
        assert stopped == any(stop in whole for stop in stops)
        assert not any(stop in text for stop in stops)
        if not stopped:
            assert text == whole


def test_nothing_that_a_stop_text_may_begin_with_is_shown():
    random = np.random.default_rng(0)
    for _ in range(300):
        pieces = ["".join(random.choice(list("ab"), random.integers(0, 4))) for _ in range(12)]
        stops = ["".join(random.choice(list("ab"), random.integers(3, 9))) for _ in range(3)]
        shown, _, _ = _pieces(pieces, stops)
        for i in range(len(pieces)):
            seen = "".join(pieces[: i + 1])
            begins = [n for n in range(len(seen)) if any(s.startswith(seen[n:]) for s in stops)]
            if not any(stop in seen for stop in stops):
                assert "".join(shown[: i + 1]) == seen[: min(begins, default=len(seen))]


def test_a_long_stop_text_takes_no_time():
    stream = TextStream(lambda token: "b" * 200_000, ["a" + "c" * 300_000])
    begun = time.process_time()
    assert stream.add(0) == "b" * 200_000
    # Comparing every end of the text with it takes seconds.
    assert time.process_time() - begun < 0.3
