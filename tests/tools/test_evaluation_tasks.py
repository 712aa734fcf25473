"""Texts scored and continued through a cache, and tasks of lm-eval on top of that."""

import dataclasses
import json
import math
import sys

import jax.numpy as jnp
import numpy as np
import pytest

from tests.tools.evaluation_helpers import decoder
from turbojax import evaluation, models
from turbojax.evaluation.harness import _generation, compare_tasks, need_lm_eval
from turbojax.evaluation.responses import batches, continuation_of, scores_of
from turbojax.models.text.tokenizer import ByteTokenizer, NumberTokenizer

PAIRS = [
    ("one ", "two"),
    ("one ", "a longer choice"),
    ("The capital", " x"),
    ("The capital", " y"),
    ("The capital", "z"),
    ("q", "q"),
    ("a context of another length ", "x"),
]


def encoded(pairs):
    tokenizer = ByteTokenizer()
    return [
        (tokenizer.encode(one), tokenizer.encode(two, add_special_tokens=False))
        for one, two in pairs
    ]


@pytest.fixture(scope="module")
def model():
    return decoder(num_layers=2, max_length=64)


def answering(model, name="exact", **options):
    method = evaluation.method(name, model.config)
    return evaluation.Answering(model, ByteTokenizer(), method, **{"batch_size": 3, **options})


def one_pass(model, pairs):
    """Log-likelihoods by one pass over whole texts, without a cache."""
    wanted = []
    for context, continuation in pairs:
        whole = np.array([[*context, *continuation]], np.int32)
        bits = models.token_bits(model, whole)[0].astype(np.float64)
        wanted.append(-math.log(2) * bits[len(context) - 1 :].sum())
    return wanted


@pytest.mark.slow
def test_likelihoods_are_those_of_one_pass_without_a_cache(model):
    """In batches of ragged texts, of which some differ in the last token alone."""
    pairs, told = encoded(PAIRS), []
    found = answering(model, progress=lambda *x: told.append(x)).score(pairs)
    np.testing.assert_allclose([x for x, _ in found], one_pass(model, pairs), rtol=2e-5)
    rows, places, cut = scores_of(pairs, 64)
    assert (len(rows), cut) == (6, 0)  # two choices of one context share a row
    assert [len(row.lasts) for row in rows] == [1, 1, 2, 1, 1, 1]
    assert places[2:4] == [(2, 0), (2, 1)]
    assert told[-1] == (6, 6)


@pytest.mark.slow
def test_a_greedy_continuation_is_found_to_be_one(model):
    context = ByteTokenizer().encode("abc")
    new = models.generate(model, np.array([context] * 2), max_new_tokens=4)[0].tolist()
    other = [*new[:3], (new[3] + 1) % 256]
    found = answering(model).score([(context, new), (context, other), (context, new[:1])])
    assert [greedy for _, greedy in found] == [True, False, True]


@pytest.mark.slow
def test_answers_go_through_the_cache():
    """What a session says that prefills all but a context's last token, and steps on from there."""
    model = decoder(num_layers=1)
    pairs = encoded([("value = call(17)\n" * 4, "value")])
    method = evaluation.method("kv4", model.config)
    [(log_p, _)] = answering(model, "kv4", batch_size=1).score(pairs)
    context, continuation = (np.array([x], np.int32) for x in pairs[0])
    session = models.start(model, context[:, :-1], max_length=128, cache=method.cache)
    session = session.step(context[:, -1])
    logits = np.asarray(models.score(session, continuation), np.float64)[0]
    found = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
    wanted = found[np.arange(len(continuation[0])), continuation[0]].sum()
    assert log_p == pytest.approx(wanted, rel=1e-4)
    assert log_p != pytest.approx(one_pass(model, pairs)[0], rel=1e-4)


def test_continuations_are_those_of_generate_up_to_a_stop(model):
    tokenizer, texts = ByteTokenizer(), ("abc", "a longer one", "q")
    contexts = [tokenizer.encode(text) for text in texts]
    whole = answering(model).go_on([(context, ["never"], 6) for context in contexts])
    for context, text in zip(contexts, whole, strict=True):
        new = models.generate(model, np.array([context] * 2), max_new_tokens=6)[0].tolist()
        assert text == tokenizer.decode(new)
    stop = whole[0][3]
    assert answering(model).go_on([(contexts[0], [stop], 6)]) == [whole[0].partition(stop)[0]]
    first = tokenizer.encode(whole[0], add_special_tokens=False)[0]
    ends = evaluation.Answering(
        model, ByteTokenizer([first]), evaluation.method("exact", model.config), batch_size=3
    )
    assert ends.go_on([(contexts[0], [], 6)]) == [""]


def test_nan_is_no_answer(model):
    failing = answering(dataclasses.replace(model, norm=model.norm * jnp.nan))
    assert failing.score(encoded(PAIRS[:2])) == [(-math.inf, False)] * 2
    assert failing.go_on([([1, 2, 3], [], 2)]) == [""]
    assert failing.nan == 3


def test_long_texts_lose_their_beginning():
    rows, places, cut = scores_of([([*range(10)], [10, 11]), ([1], [*range(2, 30)])], 8)
    assert (places, cut) == ([(0, 0), (1, 0)], 2)
    assert rows[0].prompt + rows[0].tokens == tuple(range(3, 12))
    assert (rows[0].tokens, rows[0].skipped) == ((9, 10, 11), 1)
    assert rows[1].prompt + rows[1].tokens == tuple(range(21, 30))
    assert (len(rows[1].prompt), rows[1].skipped) == (1, 0)
    row, was_cut = continuation_of(range(10), ["x"], 3, 8)
    assert (row.prompt, row.last, was_cut) == ((5, 6, 7, 8), (9,), True)
    assert continuation_of([7], [], 3, 8)[0].last == ()
    with pytest.raises(ValueError, match="8 new tokens must be fewer than the model"):
        continuation_of([7], [], 8, 8)


def test_batches_fit_the_model_together():
    pairs = [([1] * size, [2] * more) for size, more in ((50, 2), (3, 40), (4, 1), (50, 1), (9, 9))]
    rows = scores_of(pairs, 64)[0]
    found = list(batches(rows, 2, 64))
    assert sorted(map(id, rows)) == sorted(id(row) for batch in found for row in batch)
    for batch in found:
        assert len(batch) <= 2
        assert max(len(x.prompt) for x in batch) + max(x.size for x in batch) <= 64
    asked = [continuation_of([1, 2], [stop], 4, 64)[0] for stop in "aab"]
    assert [len(batch) for batch in batches(asked, 8, 64)] == [2, 1]


def test_what_cannot_be_asked(model):
    with pytest.raises(ValueError, match="must have a token each"):
        answering(model).score([([], [1])])
    with pytest.raises(ValueError, match="must have at least one token"):
        answering(model).go_on([([], [], 3)])
    with pytest.raises(ValueError, match=r"there is no tokenizer\.json"):
        evaluation.Answering(model, NumberTokenizer(9), evaluation.method("exact", model.config))


def test_what_ends_a_continuation():
    assert _generation({"until": ["a", "", "a"], "max_gen_toks": 3}, 9) == (("a",), 3)
    assert _generation({"until": "b", "do_sample": False, "temperature": 1.0}, 9) == (("b",), 9)
    assert _generation({"max_new_tokens": 5}, 9) == ((), 5)
    for given, message in (
        ({"do_sample": True}, "continuations are greedy here"),
        ({"temperature": 0.7}, "continuations are greedy here"),
        ({"num_beams": 4}, "num_beams=4 of a task is not supported"),
    ):
        with pytest.raises(NotImplementedError, match=message):
            _generation(given, 9)


def test_methods_are_compared_document_by_document():
    def row(*values):
        items = [{"answers": [a], "metrics": {"m": m, "pair": [1, 2]}} for a, m in values]
        tasks = {"t": {"metrics": {"m": {"value": 0}, "pair": {"value": len(values[0][0])}}}}
        return {"tasks": tasks, "items": {"t": items}}

    found = compare_tasks(row(("abc", True), ("b", False)), row(("c", False), ("b", False)))["t"]
    assert found["same_answers"] == 0.5
    assert found["metrics"] == {
        "m": {"difference": 0.5, "interval": [0.0, 1.0]},
        "pair": {"difference": 2.0, "interval": None},  # of the whole
    }
    choices = [[[-3.0, False]], [[-1.0, True]]]
    one, other = ({"answers": [x[0] for x in y], "metrics": {}} for y in (choices, choices[::-1]))
    tasks = {"t": {"metrics": {}}}
    left, right = ({"tasks": tasks, "items": {"t": [x]}} for x in (one, other))
    assert compare_tasks(left, right)["t"]["same_answers"] == 0
    assert compare_tasks(left, left)["t"]["same_answers"] == 1
    whole = {"tasks": tasks, "items": {"t": [{"answers": [-3.0], "metrics": {}}]}}
    assert compare_tasks(whole, whole)["t"]["same_answers"] is None


def test_a_missing_package_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "lm_eval", None)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    message = r"need the package lm-eval, the extra 'tasks': pip install 'lm-eval>=0\.4\.13,<0\.5'"
    with pytest.raises(ImportError, match=message):
        need_lm_eval()
    with pytest.raises(ImportError, match=message):
        evaluation.TaskMeasure(("arc_easy",), ByteTokenizer())


TASK = """
task: {name}
dataset_path: json
dataset_kwargs:
  data_files:
    test: lines.jsonl
test_split: test
output_type: {kind}
doc_to_text: "{text}"
doc_to_target: "{target}"
target_delimiter: ""
{more}
metadata:
  version: 1.0
"""
LINES = [
    {"prompt": "abc", "choices": [" x", " longer one"], "answer": 1},
    {"prompt": "def main", "choices": [" y", " z"], "answer": 0},
    {"prompt": "import", "choices": [" os", " a"], "answer": 1},
]


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tasks")
    (folder / "lines.jsonl").write_text("".join(f"{json.dumps(x)}\n" for x in LINES))
    choose = 'doc_to_choice: "{{choices}}"\nmetric_list: [{metric: acc}, {metric: acc_norm}]'
    say = (
        "generation_kwargs: {until: [never], max_gen_toks: 5}\nmetric_list: [{metric: exact_match}]"
    )
    roll = "metric_list: [{metric: bits_per_byte}, {metric: word_perplexity}]"
    for name, kind, text, target, more in (
        ("choose", "multiple_choice", "{{prompt}}", "{{answer}}", choose),
        ("say", "generate_until", "{{prompt}}", "{{choices[answer]}}", say),
        ("roll", "loglikelihood_rolling", "", "{{prompt}}{{choices[0]}}", roll),
    ):
        text = TASK.format(name=name, kind=kind, text=text, target=target, more=more)
        (folder / f"{name}.yaml").write_text(text)
    return folder


# Packages of its own warn of each other.
of_lm_eval = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]


class TestTasks:
    pytestmark = of_lm_eval

    def measure(self, files, *names, **options):
        paths = [str(files / f"{name}.yaml") for name in names]
        return evaluation.TaskMeasure(paths, ByteTokenizer([0]), batch_size=2, **options)

    @pytest.mark.fuzz
    def test_values_are_those_of_the_exact_model(self, files, model, monkeypatch, tmp_path):
        """Of a file and its data, read by lm-eval and answered through exact caches."""
        monkeypatch.setenv("HF_DATASETS_OFFLINE", "1")
        measure = self.measure(files, "choose", "say", "roll", partial=tmp_path / "partial")
        told = []
        exact = evaluation.method("exact", model.config)
        row = measure(model, exact, lambda *x: told.append(x))
        assert told[-1][0] == told[-1][1]
        assert (row["truncated"], row["nan"]) == (0, 0)
        right = []
        for line, item in zip(LINES, row["items"]["choose"], strict=True):
            wanted = one_pass(model, encoded([(line["prompt"], x) for x in line["choices"]]))
            np.testing.assert_allclose([x for x, _ in item["answers"]], wanted, rtol=2e-5)
            right.append(int(np.argmax(wanted)) == line["answer"])
            assert item["metrics"]["acc"] == right[-1]
        assert row["tasks"]["choose"]["metrics"]["acc"]["value"] == pytest.approx(np.mean(right))
        assert row["tasks"]["choose"]["items"] == 3
        for line, item in zip(LINES, row["items"]["say"], strict=True):
            context = np.array([ByteTokenizer().encode(line["prompt"])] * 2)
            new = models.generate(model, context, max_new_tokens=5, stop_tokens=[0])[0].tolist()
            new = new[: new.index(0)] if 0 in new else new
            assert item["answers"] == [ByteTokenizer().decode(new)]
        # The byte that begins a text stands before it once more: lm-eval's prefix.
        texts = [line["prompt"] + line["choices"][0] for line in LINES]
        totals = one_pass(model, [([0], [0, *text.encode()]) for text in texts])
        bits = -sum(totals) / math.log(2) / sum(len(text.encode()) for text in texts)
        value = row["tasks"]["roll"]["metrics"]["bits_per_byte"]["value"]
        assert value == pytest.approx(bits, rel=2e-5)
        # All answers are kept: nothing runs again.
        again = self.measure(files, "choose", "say", "roll", partial=tmp_path / "partial")
        monkeypatch.setattr("turbojax.evaluation.responses.score_batch", None)
        assert again(model, exact, lambda done, total: None) == row

    def test_a_compressed_cache_answers_otherwise(self, files, model):
        measure = self.measure(files, "choose")
        exact, other = (
            measure(model, evaluation.method(name, model.config), lambda done, total: None)
            for name in ("exact", "kv4")
        )
        assert measure.identity["tasks"] == [str(files / "choose.yaml")]
        assert exact["items"] != other["items"]
        found = compare_tasks(other, exact)["choose"]["metrics"]
        assert {*found} == {"acc", "acc_norm"}
        short = self.measure(files, "choose", limit=2)
        assert short.identity["checksum"] != measure.identity["checksum"]

    @pytest.mark.fuzz
    def test_the_registry_knows_it(self, files, model, monkeypatch):
        import lm_eval
        from lm_eval.api.registry import get_model

        evaluation.register()
        monkeypatch.setattr("turbojax.evaluation.harness.load_decoder", lambda *x, **y: model)
        made = get_model("turbojax").create_from_arg_string("cache=kv4,batch_size=2")
        assert made.answering.method.name == "kv4"
        assert made.tokenizer_name.startswith("turbojax-")
        monkeypatch.chdir(files)
        found = lm_eval.simple_evaluate(
            model="turbojax", model_args="cache=exact,batch_size=2", tasks=["choose.yaml"]
        )
        wanted = self.measure(files, "choose")(
            model, evaluation.method("exact", model.config), lambda done, total: None
        )
        value = wanted["tasks"]["choose"]["metrics"]["acc"]["value"]
        assert found["results"]["choose"]["acc,none"] == pytest.approx(value)

    def test_chats(self, model):
        tokenizer = ByteTokenizer()
        tokenizer.chat_template = (
            "{% for m in messages %}[{{ m.role }}] {{ m.content }}\n{% endfor %}"
        )
        method = evaluation.method("exact", model.config)
        made = evaluation.language_model(evaluation.Answering(model, tokenizer, method))
        said = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Well, "}]
        assert made.apply_chat_template(said[:1]) == "[user] Hi\n"
        continued = made.apply_chat_template(said, add_generation_prompt=False)
        assert continued == "[user] Hi\n[assistant] Well,"
        assert made.chat_template(True) == tokenizer.chat_template

    @pytest.mark.fuzz
    def test_what_is_refused(self, files):
        with pytest.raises(ValueError, match="lm-eval: .*no_such_task.* is not a registered task"):
            evaluation.TaskMeasure(("no_such_task",), ByteTokenizer())
        with pytest.raises(FileNotFoundError, match=r"No such file or directory: 'no\.yaml'"):
            evaluation.TaskMeasure(("no.yaml",), ByteTokenizer())
        with pytest.raises(ValueError, match="each once"):
            self.measure(files, "choose", "choose")
        with pytest.raises(ValueError, match="limit=0 must be above 0"):
            self.measure(files, "choose", limit=0)
        with pytest.raises(ValueError, match="no chat template"):
            self.measure(files, "choose", chat=True)
