"""Tasks of a file: what is refused and how, and that answers are those of the model."""

import dataclasses
import json

import jax.numpy as jnp
import numpy as np
import pytest
from tokenizer_helpers import byte_level

from turbojax import evaluation, models
from turbojax.evaluation.answering import answer
from turbojax.evaluation.tasks import parse_task
from turbojax.models.text.tokenizer import ByteTokenizer, JsonTokenizer

WORDS = [
    {"prompt": "abc", "answer": "x", "stop": "never", "max_new_tokens": 6},
    {"prompt": "a longer one", "answer": "y", "stop": "never", "max_new_tokens": 6},
    {"prompt": "q", "answer": "z", "stop": "never", "max_new_tokens": 6},
]
CHOICES = [
    {"prompt": "one ", "choices": ["two", "a longer choice", "x"], "answer": 1, "group": "g"},
    {"prompt": "o", "choices": ["pq", "rs"], "answer": 0},
]


def read(lines, tmp_path):
    file = tmp_path / "tasks.jsonl"
    file.write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    return evaluation.read_tasks(file)


def prepared(lines, config, tokenizer=None):
    tasks = [parse_task(json.dumps(line), i + 1) for i, line in enumerate(lines)]
    return evaluation.prepare_tasks(tasks, tokenizer or ByteTokenizer(), config)


@pytest.fixture(scope="module")
def model(tiny_folder):
    return models.load_decoder(tiny_folder, dtype=jnp.float32)


def run(model, tasks, name="exact", batch_size=2, **options):
    measure = evaluation.TaskMeasure(tasks, batch_size, **options)
    return measure(model, evaluation.method(name, model.config), lambda done, total: None)


def test_a_line_in_words():
    line = {
        "prompt": "p",
        "answer": "so 7, #### 1,042.",
        "pattern": r"#### (-?[\d,.]*\d)",
        "ignore": "[,$]",
        "stop": ["\n"],
        "max_new_tokens": 9,
        "id": "a",
    }
    task = parse_task(json.dumps(line), 3)
    assert (task.line, task.name, task.stop, task.max_new_tokens) == (3, "a", ("\n",), 9)
    assert task.is_right("#### 1042")
    assert task.is_right("first #### 1,042 and then #### 5")
    assert not task.is_right("first #### 5 and then #### 1,042")
    assert not task.is_right("1042")
    assert task.answer_in("none") is None


def test_answers_are_compared_without_the_space_around_them():
    task = parse_task('{"prompt": "p", "answer": ["Paris", "the city"]}', 1)
    assert task.is_right(" Paris\n")
    assert task.is_right("the city")
    assert not task.is_right("paris")
    whole = parse_task('{"prompt": "p", "answer": "yes", "pattern": "(?i:yes|no)"}', 1)
    assert whole.is_right("well, yes and no")
    assert not whole.is_right("Yes")


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", "is no JSON"),
        ("[1]", "must be an object"),
        ({"answer": "a"}, "lacks 'prompt'"),
        ({"prompt": "a"}, "lacks 'answer'"),
        ({"prompt": 1, "answer": "a"}, "'prompt' is 1, must be a text"),
        ({"prompt": "p", "answer": "a", "chioces": []}, "unknown key 'chioces', must be one of"),
        ({"prompt": "p", "answer": ""}, "'answer' is '', must be a text or a list of texts"),
        ({"prompt": "p", "answer": 2}, "'answer' is 2, must be a text"),
        ({"prompt": "p", "answer": "a", "pattern": "("}, "'pattern' '(' is no regular expression"),
        ({"prompt": "p", "answer": "a", "pattern": "b"}, "'answer' 'a' must hold what 'pattern'"),
        ({"prompt": "p", "answer": "a", "ignore": 1}, "'ignore' is 1, must be a text"),
        ({"prompt": "p", "answer": "a", "stop": ["", "x"]}, "'stop' is ['', 'x'], must hold no"),
        ({"prompt": "p", "answer": "a", "stop": 3}, "'stop' is 3, must be a text or a list"),
        ({"prompt": "p", "answer": "a", "max_new_tokens": 0}, "'max_new_tokens' is 0, must be"),
        ({"prompt": "p", "answer": "a", "max_new_tokens": True}, "is True, must be an integer"),
        ({"prompt": "p", "answer": "a", "chat": 1}, "'chat' is 1, must be true or false"),
        ({"prompt": "p", "answer": "a", "system": "s"}, "'system' is for a line with 'chat'"),
        ({"prompt": "p", "answer": "a", "id": 1.5}, "'id' is 1.5, must be a text or an integer"),
        ({"prompt": "p", "answer": 2, "choices": ["a", "b"]}, "'answer' is 2, must be the number"),
        ({"prompt": "p", "answer": True, "choices": ["a", "b"]}, "'answer' is True, must be"),
        ({"prompt": "p", "answer": 0, "choices": ["a"]}, "'choices' is ['a'], must be two or more"),
        ({"prompt": "p", "answer": 0, "choices": "ab"}, "'choices' is 'ab', must be two or more"),
        ({"prompt": "p", "answer": 0, "choices": ["a", ""]}, "'choices' is ['a', ''], must be"),
        ({"prompt": "p", "answer": 0, "choices": ["a", "b"], "stop": "x"}, "'stop' is for answers"),
    ],
)
def test_what_is_no_task_is_named_by_line_and_key(line, message, tmp_path):
    file = tmp_path / "tasks.jsonl"
    text = line if isinstance(line, str) else json.dumps(line)
    file.write_text(f'{{"prompt": "a", "answer": "b"}}\n\n{text}\n')
    with pytest.raises(ValueError, match="line 3: ") as caught:
        evaluation.read_tasks(file)
    assert f"{file}, line 3: " in str(caught.value)
    assert message in str(caught.value)


def test_files_without_a_task_and_with_one_id_twice(tmp_path):
    with pytest.raises(ValueError, match="must hold at least one task"):
        read([], tmp_path)
    with pytest.raises(ValueError, match="line 2: 'id' 'a' is that of line 1"):
        read([{"prompt": "p", "answer": "a", "id": "a"}] * 2, tmp_path)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ({"prompt": "p", "answer": "a"}, "line 1: nothing ends this answer"),
        ({"prompt": "p" * 126, "answer": "a", "stop": "x", "max_new_tokens": 2}, "max_length=128"),
        ({"prompt": "p" * 126, "answer": 0, "choices": ["a", "bc"]}, "and 2 after it must be at"),
        ({"prompt": "p", "answer": "a", "chat": True}, "line 1: the tokenizer has no chat temp"),
    ],
)
def test_what_a_model_cannot_take_is_named_by_its_line(line, message, model):
    with pytest.raises(ValueError, match="line 1: ") as caught:
        prepared([line], model.config)
    assert message in str(caught.value)


def test_a_choice_is_read_with_its_prompt(tmp_path, model):
    byte_level().save(str(tmp_path / "tokenizer.json"))
    tokenizer = JsonTokenizer(tmp_path / "tokenizer.json")
    config = dataclasses.replace(model.config, vocab_size=tokenizer.vocab_size)
    for prompt, choice in (("The quick", " brown fox"), ("The qui", "ck dog"), ("d", "ef main")):
        tasks = prepared(
            [{"prompt": prompt, "choices": [choice, " zz"], "answer": 0}], config, tokenizer
        )
        row = tasks.rows[0]
        whole = tokenizer.encode(prompt + choice)
        assert [*row.prompt, *row.tokens] == whole
        alone = tokenizer.encode(prompt)
        assert list(row.prompt) == alone[: len(row.prompt)]
        assert len(row.prompt) == len(alone) or row.tokens[0] != alone[len(row.prompt)]


def test_batches_fit_the_model_together(model):
    lines = [
        {"prompt": "p" * 120, "choices": ["a", "b"], "answer": 0},
        {"prompt": "p", "choices": ["a", "b" * 100], "answer": 0},
        *WORDS,
        {"prompt": "p", "answer": "a", "stop": "other", "max_new_tokens": 6},
    ]
    tasks = prepared(lines, model.config)
    batches = tasks.batches(4)
    assert sorted(row for batch in batches for row in map(id, batch)) == sorted(map(id, tasks.rows))
    for batch in batches:
        assert len(batch) <= 4
        assert max(len(x.prompt) for x in batch) + max(x.new_tokens for x in batch) <= 128
        assert len({(x.choice is None, x.task.stop) for x in batch}) == 1
    assert tasks.batches(4) == prepared(lines, model.config).batches(4)


def test_choices_have_the_bits_of_one_pass(model):
    """Decoded through the cache token by token: as the whole text in one pass, to rounding."""
    tasks = prepared(CHOICES, model.config)
    found = run(model, tasks)["items"]
    bits = [x for item in found for x in item["bits"]]
    tokens = np.zeros((len(tasks.rows), 25), np.int32)
    for i, row in enumerate(tasks.rows):
        tokens[i, : len(row.prompt) + len(row.tokens)] = [*row.prompt, *row.tokens]
    whole = models.token_bits(model, tokens, batch_size=len(tokens)).astype(np.float64)
    for row, got, of_all in zip(tasks.rows, bits, whole, strict=True):
        first = len(row.prompt) - 1
        wanted = of_all[first : first + len(row.tokens)].sum()
        assert got == pytest.approx(wanted, rel=1e-5)
    for item, line in zip(found, CHOICES, strict=True):
        per_byte = [x / len(text) for x, text in zip(item["bits"], line["choices"], strict=True)]
        assert item["answer"] == int(np.argmin(item["bits"]))
        assert item["right"] == (item["answer"] == line["answer"])
        assert item["right_per_byte"] == (int(np.argmin(per_byte)) == line["answer"])


def test_continuations_are_those_of_generate(model):
    tasks = prepared(WORDS, model.config)
    found = run(model, tasks)
    tokenizer = ByteTokenizer()
    for item, line in zip(found["items"], WORDS, strict=True):
        prompt = np.array([tokenizer.encode(line["prompt"])] * 2, np.int32)
        [new, _] = models.generate(model, prompt, max_new_tokens=6).tolist()
        assert item["text"] == tokenizer.decode(new)
        assert (item["tokens"], item["ended"]) == (6, "length")
    # The right answers are those that it gives.
    texts = [item["text"].strip() for item in found["items"]]
    right = [{**line, "answer": text} for line, text in zip(WORDS, texts, strict=True)]
    assert run(model, prepared(right, model.config))["words"]["right"] == 1
    assert found["words"] == {
        "items": 3,
        "right": 0.0,
        "interval": [0.0, 0.0],
        "ended": {"stop": 0, "length": 3, "nan": 0},
        "without_answer": 0,
    }


def test_a_stop_ends_a_continuation_and_is_no_part_of_it(model):
    whole = run(model, prepared(WORDS[:1], model.config))["items"][0]["text"]
    stop = whole[3]
    [item] = run(model, prepared([{**WORDS[0], "stop": stop}], model.config))["items"]
    assert item["text"] == whole[: whole.index(stop)]
    assert item["ended"] == "stop"


def test_a_token_that_ends_texts_ends_a_continuation(model):
    prompt = np.array([ByteTokenizer().encode("abc")] * 2, np.int32)
    new = models.generate(model, prompt, max_new_tokens=6)[0].tolist()
    [item] = run(model, prepared(WORDS[:1], model.config, ByteTokenizer([new[2]])))["items"]
    before = new[: new.index(new[2])]
    assert item["text"] == ByteTokenizer().decode(before)
    assert (item["tokens"], item["ended"]) == (len(before) + 1, "stop")


def test_nan_is_no_answer(model):
    """Neither a choice nor a word is right where the model has lost itself."""
    lost = dataclasses.replace(model, norm=model.norm * jnp.nan)
    words = [{**line, "answer": "\0"} for line in WORDS]
    found = run(lost, prepared([*words, *CHOICES], model.config))
    assert found["words"]["right"] == found["choices"]["right"] == 0
    assert found["words"]["ended"] == {"stop": 0, "length": 0, "nan": 3}
    assert found["choices"]["nan"] == 2
    assert found["items"][-1]["bits"] == [None, None]
    assert found["items"][-1]["answer"] is None
    json.dumps(found, allow_nan=False)


def test_an_interrupted_method_goes_on_batch_by_batch(model, tmp_path, monkeypatch):
    tasks = prepared([*WORDS, *CHOICES], model.config)
    whole = run(model, tasks)
    file, ran = tmp_path / "partial", []

    def counted(decoder, prepared, batch, method, batch_size):
        if len(ran) == 2:
            raise KeyboardInterrupt
        ran.append(batch)
        return answer(decoder, prepared, batch, method, batch_size)

    monkeypatch.setattr("turbojax.evaluation.answering.answer", counted)
    with pytest.raises(KeyboardInterrupt):
        run(model, tasks, partial=file)
    ran[:] = [None] * 3
    assert run(model, tasks, partial=file) == whole
    assert len(ran) == 3 + len(tasks.batches(2)) - 2
    other = prepared(WORDS, model.config)
    with pytest.raises(ValueError, match=r"another evaluation: tasks.tasks is 5 there and 3 here"):
        run(model, other, partial=file)


def test_answers_are_compared_task_by_task():
    def scores(*rows):
        return {"items": [{"kind": kind, "right": r, "answer": a} for kind, r, a in rows]}

    one = scores(("words", True, "a"), ("words", False, "b"), ("choices", True, 1))
    other = scores(("words", False, "c"), ("words", False, "b"), ("choices", True, 1))
    found = evaluation.compare_answers(one, other)
    assert found["words"]["difference"] == 0.5
    assert found["words"]["same_answer"] == 0.5
    low, high = found["words"]["interval"]
    assert (low, high) == (0.0, 1.0)
    assert found["choices"] == {"difference": 0.0, "interval": None, "same_answer": 1.0}
