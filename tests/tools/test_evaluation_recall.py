"""Facts in words: how they are written, where they stand, and that a session's cache is asked."""

import jax.numpy as jnp
import numpy as np
import pytest

from tests.models.tokenizer_helpers import byte_level, save
from tests.tools.evaluation_helpers import CONFIG, decoder, texts
from turbojax import evaluation, models
from turbojax.evaluation import recall_items
from turbojax.evaluation.recall import RecallMeasure
from turbojax.evaluation.recall_items import CUE, KINDS, ROOM, TURNS, NoItem
from turbojax.models.text.tokenizer import JsonTokenizer

TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
LENGTH = 2000


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tokenizer")
    settings = {"bos_token": "<s>", "eos_token": "<|im_end|>", "chat_template": TEMPLATE}
    save(byte_level(), folder, {"tokenizer_config.json": settings})
    return JsonTokenizer(folder)


def source_of(tokenizer):
    plain = {
        name: np.array(tokenizer.encode(x.decode(), add_special_tokens=False), np.int32)
        for name, x in texts(3, 120).items()
    }
    return evaluation.Source(plain, tokenizer)


def make(kind, tokenizer, length=LENGTH, depth=0.5, seed=(0, 1)):
    return evaluation.make_item(
        source_of(tokenizer), kind, length=length, depth=depth, seed=list(seed)
    )


def written(tokenizer, *parts):
    """Their text, special tokens too."""
    tokens = np.concatenate(parts).tolist()
    if isinstance(tokenizer, JsonTokenizer):
        return tokenizer._tokenizer.decode(tokens, skip_special_tokens=False)
    return tokenizer.decode(tokens)


@pytest.mark.parametrize("depth", [0.0, 0.4, 1.0])
@pytest.mark.parametrize("has_template", [True, False])
def test_a_needle_is_asked_for_as_its_model_is_asked(depth, has_template, tokenizer):
    used = tokenizer if has_template else models.ByteTokenizer()
    item = make("needle", used, depth=depth)
    assert len(item.prompt) == LENGTH - ROOM
    assert len(item.asked) + len(item.answer) <= ROOM
    text = written(used, item.prompt)
    asked, answer = (written(used, x) for x in (item.asked, item.answer))
    statement = f"\n{asked}{answer}.\n"
    assert text.count(statement) == text.count(answer) == 1
    place = asked.removeprefix("The password of the ").removesuffix(" is")
    question = f"What is the password of the {place}?"
    if has_template:
        assert text.startswith("<|im_start|>user\nA password is hidden in")
        assert text.endswith(f"\n\n{question}<|im_end|>\n<|im_start|>assistant\n")
    else:
        assert text.startswith("\0User:\nA password is hidden in")
        assert text.endswith(f"\n\n{question}\n\nAssistant:\n")
    assert text.index(statement) / len(text) == pytest.approx(depth, abs=0.12)


@pytest.mark.parametrize("depth", [0.0, 0.4, 1.0])
@pytest.mark.parametrize("has_template", [True, False])
def test_a_fact_is_told_in_a_turn_and_asked_for_in_the_last(depth, has_template, tokenizer):
    """The first turn alone is the prompt: what is said later goes on with its cache."""
    used = tokenizer if has_template else models.ByteTokenizer()
    item = make("chat", used, depth=depth)
    whole = np.concatenate([item.prompt, item.asked, item.answer])
    assert LENGTH - ROOM < len(whole) <= LENGTH
    assert len(item.prompt) < LENGTH / TURNS
    text, prompt = written(used, whole), written(used, item.prompt)
    user, end = ("<|im_start|>user\n", "<|im_end|>") if has_template else ("User:\n", "\n\n")
    turns = text.split(user)[1:]
    assert len(turns) == TURNS + 1
    [told] = [i for i, turn in enumerate(turns[:-1]) if "Remember this: The password" in turn]
    assert told == round(depth * (TURNS - 1))
    assert ("Remember this" in prompt) == (told == 0)
    assert prompt.count(user) == 1
    assert all(turn.count("Thank you, I have read it.") == 1 for turn in turns[:-1])
    answer = written(used, item.answer)
    assert f"{answer}." in turns[told]
    assert turns[-1].startswith("What is the password of the ")
    assert turns[-1].count(end) == 1
    assert turns[-1].endswith(f" is{answer}")
    # Those of one length share a program.
    assert len(make("chat", used, depth=0.9, seed=(5,)).prompt) == len(item.prompt)


def test_items_of_words_follow_from_the_seed(tokenizer):
    for kind in ("needle", "chat"):
        one, same, other = (make(kind, tokenizer, seed=(x,)) for x in (1, 1, 2))
        np.testing.assert_array_equal(one.prompt, same.prompt)
        np.testing.assert_array_equal(one.answer, same.answer)
        assert not np.array_equal(one.prompt, other.prompt)


def test_words_that_have_no_room(tokenizer):
    with pytest.raises(NoItem, match="must have room for a fact and its question"):
        make("needle", tokenizer, length=150)
    with pytest.raises(NoItem, match="must have room for 8 turns"):
        make("chat", tokenizer, length=300)
    with pytest.raises(NoItem, match="the texts hold .* tokens"):
        make("needle", tokenizer, length=50000)


@pytest.mark.parametrize(
    ("template", "message"),
    [
        ("{{ raise_exception('no') }}", "refuses these messages: no"),
        ("{% for m in messages %}{{ m.content | upper }}{% endfor %}{{ messages | length }}", None),
        ("{{ messages[-1].role }}", "does not write messages as they are"),
    ],
)
def test_templates_that_cannot_be_filled(template, message, tokenizer, monkeypatch):
    monkeypatch.setattr(tokenizer, "chat_template", template)
    if message is None:  # nothing but the marks is looked for
        assert len(make("needle", tokenizer).prompt) == LENGTH - ROOM
        return
    with pytest.raises(NoItem, match=message):
        make("needle", tokenizer)


@pytest.mark.fuzz
def test_a_chat_goes_through_the_session_that_its_first_turn_began(monkeypatch):
    """Bits and choices are those of a session that is fed turn after turn by hand."""
    monkeypatch.setattr(recall_items, "TURNS", 2)
    model = decoder(max_length=512)
    method = evaluation.method("kv4", model.config)
    items = [make("chat", models.ByteTokenizer(), 512, depth) for depth in (0.0, 0.7)]
    found = evaluation.recall(model, items, method)
    prompts = np.stack([item.prompt for item in items])
    session = models.start(model, prompts, max_length=512, cache=method.cache)
    later = np.stack([np.concatenate([item.asked, item.answer]) for item in items])
    logits = np.asarray(models.score(session, later))
    log_p = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
    count = len(items[0].answer)
    bits = -np.take_along_axis(log_p, later[..., None], -1)[..., 0] / np.log(2)
    np.testing.assert_allclose(found.bits, bits[:, -count:], rtol=1e-4, atol=1e-4)
    np.testing.assert_array_equal(found.right, (logits.argmax(-1) == later)[:, -count:])
    np.testing.assert_allclose(
        found.likelihood, np.exp2(-bits[:, -count:].sum(1, dtype=np.float64)), rtol=1e-3
    )


def test_likelihood_counts_the_tokens_of_the_answer():
    there = np.array([[True, True], [True, False]])
    bits = np.array([[1.0, 2.0], [3.0, np.nan]], np.float32)
    assert evaluation.Answers(there, bits, there).likelihood.tolist() == [0.125, 0.125]


def test_kinds_are_those_that_a_model_can_read(tokenizer):
    options = {"depths": (0.5,), "count": 1, "seed": 0, "max_length": 2048, "batch_size": 1}
    plain = {name: x.tolist() for name, x in source_of(tokenizer).texts.items()}

    def kinds_of(*arguments, **more):
        measure = RecallMeasure(*arguments, lengths=(1500,), **options, **more)
        assert not measure.left_out
        return [kind for kind, _ in measure._cells]

    assert kinds_of(texts(3, 120), None) == ["copy", "key_value"]
    assert kinds_of(plain, tokenizer) == [*KINDS]
    assert kinds_of(texts(3, 120), None, kinds=("needle",)) == ["needle"]
    with pytest.raises(ValueError, match="recall_kinds: 'hay' must be one of copy"):
        evaluation.Settings(("exact",), recall_kinds=("hay",))


@pytest.mark.fuzz
def test_the_measure_of_words():
    model = models.random_decoder(CONFIG, dtype=jnp.float32)
    measure = RecallMeasure(
        texts(),
        None,
        kinds=("needle", "chat"),
        lengths=(300, 512),
        depths=(0.0, 1.0),
        count=2,
        seed=0,
        max_length=512,
        batch_size=4,
    )
    assert {(x["kind"], x["length"]) for x in measure.left_out} >= {("chat", 300)}
    row = measure(model, evaluation.method("kv4", CONFIG), lambda done, total: None)
    cells = row["needle"]["cells"]
    assert len(cells) == 2 * (2 - ("needle" in {x.get("kind") for x in measure.left_out}))
    assert all(0 <= cell["likelihood"] <= 1 for cell in cells)
    assert CUE < ROOM
