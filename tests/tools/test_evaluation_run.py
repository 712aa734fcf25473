"""Whole evaluations: files that are gone on with, and what their rows say."""

import dataclasses
import json
import math

import jax.numpy as jnp
import numpy as np
import pytest

from tests.tools.evaluation_helpers import BATCH, CONTEXT, PROMPT, decoder, texts
from turbojax import evaluation
from turbojax.evaluation.recall import RecallMeasure
from turbojax.evaluation.records import Records

METHODS = ("exact", "kv4")


@pytest.fixture(scope="module")
def model():
    return decoder()


class Words:
    """A measure of its own; counts what it is asked for."""

    def __init__(self):
        self.identity = {"words": 2}
        self.asked = []

    def __call__(self, decoder, method, progress):
        progress(1, 1)
        self.asked.append(method.name)
        if method.name == "bfloat16":
            raise NotImplementedError("not in words")
        return {"score": float("nan"), "name": method.name}


def settings(**options):
    sizes = {"context": CONTEXT, "prompt": PROMPT, "windows_per_file": 1, "batch_size": BATCH}
    given = {"methods": METHODS, "measures": ("text", "words"), **sizes, **options}
    return evaluation.Settings(**given)


def plain(document):
    """Without what two runs need not share."""
    return {key: value for key, value in document.items() if key not in ("seconds", "date")}


class Stop(Exception):
    pass


@pytest.mark.slow
def test_a_run_that_was_ended_goes_on(model, tmp_path):
    whole = evaluation.evaluate(model, texts(), settings(), further={"words": Words()})
    file, words = tmp_path / "new" / "eval.json", Words()

    def stop(method, measure, done, total):
        assert 0 < done <= total
        if (method, measure) == ("kv4", "text"):
            raise Stop

    options = {"out": file, "further": {"words": words}}
    with pytest.raises(Stop):
        evaluation.evaluate(model, texts(), settings(), progress=stop, **options)
    half = json.loads(file.read_text(encoding="utf-8"))
    assert list(half["methods"]) == ["exact"]
    assert set(half["methods"]["exact"]) == {"text", "words"}
    found = evaluation.evaluate(model, texts(), settings(), **options)
    assert words.asked == ["exact", "kv4"]
    assert plain(found) == plain(whole)
    assert json.loads(file.read_text(encoding="utf-8")) == found
    # Done: nothing is measured, and further methods are added to it.
    assert evaluation.evaluate(model, texts(), settings(), **options) == found
    more = settings(methods=("bfloat16",), measures=("words",))
    added = evaluation.evaluate(model, texts(), more, **options)
    assert added["methods"] == {
        **found["methods"],
        "bfloat16": {"words": {"refused": "not in words"}},
    }


@pytest.mark.slow
def test_rows_of_text(model):
    only = settings(measures=("text",))
    document = evaluation.evaluate(model, {**texts(), "short.py": b"x = 1"}, only)
    exact, row = (document["methods"][name]["text"] for name in METHODS)
    assert exact["cost"] == exact["divergence"] == 0
    assert exact["same_greedy_choice"] == 1
    assert exact["cost_interval"] == [0, 0]
    assert row["bits_per_byte"] == pytest.approx(np.mean(row["by_window"]))
    assert row["cost"] == pytest.approx(row["bits_per_byte"] - exact["bits_per_byte"])
    assert row["exact_bits_per_byte"] == exact["bits_per_byte"]
    assert row["perplexity"] == pytest.approx(2 ** row["bits_per_byte"])
    assert row["cost_interval"][0] <= row["cost"] <= row["cost_interval"][1]
    assert row["interval_of"] == "windows"
    assert list(row["by_file"].values()) == row["by_window"]
    assert row["decoded"] == 3 * (CONTEXT + 1 - PROMPT)
    assert np.mean(row["cost_by_half"]) == pytest.approx(row["cost"], abs=1e-2)
    assert document["settings"]["prompt"] == PROMPT
    assert document["model"]["layers"] == 3
    assert [text["windows"] for text in document["texts"].values()] == [1, 1, 1, 0]
    # As tokens they are the same texts.
    numbers = {name: [0, *text] for name, text in texts().items()}
    again = evaluation.evaluate(model, numbers, only)["methods"]["kv4"]["text"]
    assert again["bits_per_token"] == row["bits_per_byte"]


def test_intervals_are_of_files_where_there_are_many():
    windows = np.random.default_rng(0).normal(2, 1, (10, 4)).astype(np.float32)
    zeros = np.zeros((10, 4), np.int32)
    found = evaluation.Scores(windows, windows - 1, zeros, zeros, np.abs(windows), 3, 9)
    owners = np.repeat(list("abcde"), 2)
    row = evaluation.text_row(found, owners, "token", seed=5, samples=100)
    assert row["interval_of"] == "files"
    means = windows.mean(axis=1, dtype=np.float64)
    assert row["interval"] == evaluation.bootstrap(means, owners, seed=5, samples=100).ends
    assert row["cost"] == pytest.approx(1)
    assert (row["cache_bytes"], row["exact_cache_bytes"]) == (3, 9)
    huge = dataclasses.replace(found, bits=windows + 1024)
    assert evaluation.text_row(huge, owners, "token", samples=2)["perplexity"] == math.inf


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"seed": 1}, "settings.seed is 0 there and 1 here"),
        ({"context": 30}, "settings.context is 40 there and 30 here"),
        ({"texts": texts(4)}, "texts.file3.py is None there"),
        ({"texts": {**texts(), "file1.py": texts()["file2.py"]}}, "texts.file1.py.checksum is"),
        ({"weights": True}, "model.checksum is"),
    ],
)
def test_another_evaluation_is_an_error(model, tmp_path, change, message):
    file, further = tmp_path / "eval.json", {"words": Words()}
    only = {"measures": ("words",)}
    evaluation.evaluate(model, texts(), settings(**only), out=file, further=further)
    before = file.read_bytes()
    change = dict(change)
    found = change.pop("texts", texts())
    if change.pop("weights", False):
        model = decoder()
        model.layers[1]["mlp"]["down_proj"]["kernel"] = (
            model.layers[1]["mlp"]["down_proj"]["kernel"].at[3, 4].add(1e-3)
        )
    with pytest.raises(ValueError, match=message):
        evaluation.evaluate(model, found, settings(**only, **change), out=file, further=further)
    assert file.read_bytes() == before


def test_further_measures_are_added(model, tmp_path):
    """A file goes on with other measures, but not with another of the same name."""
    file, words, more = tmp_path / "eval.json", Words(), Words()

    def run(*names, **further):
        chosen = settings(methods=("exact",), measures=names)
        return evaluation.evaluate(model, texts(), chosen, out=file, further=further)

    run("words", words=words)
    result = run("words", "more", words=words, more=more)
    assert set(result["methods"]["exact"]) == set(result["measures"]) == {"words", "more"}
    assert words.asked == more.asked == ["exact"]
    assert set(run("more", more=more)["measures"]) == {"words", "more"}
    before, more.identity = file.read_bytes(), {"words": 3}
    with pytest.raises(ValueError, match="measures.more.words is 2 there and 3 here"):
        run("more", more=more)
    assert file.read_bytes() == before


def test_recall_depends_on_whole_texts():
    """Items come from beyond the windows: another end of a text is another evaluation."""

    def told(end):
        text = b"".join(b"value_%d = %d\n" % (i, i * i) for i in range(300))
        return RecallMeasure(
            {"a.py": text, "b.py": text[:2000] + end * 1000},
            None,
            lengths=(1024,),
            depths=(0.5,),
            count=2,
            seed=0,
            max_length=4096,
            batch_size=2,
        ).identity

    assert told(b"x") == told(b"x")
    assert told(b"x")["items"] == 4
    assert told(b"x")["checksum"] != told(b"y")["checksum"]


def test_layers_need_tokens_to_decode():
    with pytest.raises(ValueError, match="must be below context=40 for the measure 'layers'"):
        settings(measures=("text", "layers"), prompt=CONTEXT)
    assert settings(measures=("text",), prompt=CONTEXT).prompt_length == CONTEXT


def test_records(tmp_path):
    file, calls = tmp_path / "a" / "rows.json", []

    def make(value):
        calls.append(value)
        return {"value": value, "list": (1, float("inf"))}

    records = Records(file, {"seed": 1}, {"date": "today"})
    assert not file.exists()
    row = records.row(("methods", "2/4bit", "text"), lambda: make(1))
    assert row == {"value": 1, "list": [1, None]}
    assert records.row(("methods", "2/4bit", "text"), lambda: make(2)) == row
    again = Records(file, {"seed": 1}, {"date": "tomorrow"})
    assert again.found == 1
    assert again.has(("methods", "2/4bit", "text"))
    assert again.row(("methods", "2/4bit", "text"), lambda: make(3)) == row
    again.row(("methods", "kv4", "text"), lambda: make(float("nan")))
    assert len(calls) == 2
    whole = json.loads(file.read_text(encoding="utf-8"))
    assert whole == again.document
    assert whole["methods"]["kv4"]["text"]["value"] is None
    assert whole["date"] == "tomorrow"
    for text in ("{}", "[1]", "not", '{"seconds": 3}'):
        file.write_text(text, encoding="utf-8")
        with pytest.raises(ValueError, match="holds something else than results"):
            Records(file, {"seed": 1})
    file.write_bytes(b"")  # of a file that was made beforehand
    assert Records(file, {"seed": 1}).found == 0


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"methods": ()}, "methods=.* must name at least one"),
        ({"methods": ("kv4", "kv4")}, "each once"),
        ({"methods": ("kv5",)}, "method 'kv5' must begin with"),
        ({"measures": ("taste",)}, "measure 'taste' must be one of text, layers, recall"),
        ({"prompt": 41}, "prompt=41 must be at most context=40"),
        ({"prompt": 0}, "prompt=0"),
        ({"seed": -1}, "seed=-1 must be at least 0"),
        ({"recall_depths": (0, 1.5)}, "must be between 0 and 1"),
        ({"recall_lengths": (0,)}, r"recall_lengths\[0\]=0"),
        ({"context": 4000, "prompt": 2}, "context=4000 must be at most the"),
    ],
)
def test_bad_settings(model, options, message):
    with pytest.raises(ValueError, match=message):
        evaluation.evaluate(model, texts(), settings(**{"measures": ("text",), **options}))


def test_a_cache_that_cannot_hold_the_heads_is_refused_before(tmp_path):
    """And nothing is measured, of other methods neither."""
    odd, words = decoder(head_dim=12, num_layers=1), Words()
    with pytest.raises(ValueError, match="multiple of 8"):
        evaluation.evaluate(odd, texts(), settings(measures=("words",)), further={"words": words})
    assert not words.asked


def test_windows():
    cut = evaluation.windows({"a": bytes(range(1, 60)), "b": b"xy", "c": np.arange(21)}, 10, 3)
    assert {name: rows.shape for name, rows in cut.items()} == {"a": (3, 11), "c": (2, 11)}
    np.testing.assert_array_equal(cut["a"][1], np.arange(10, 21))
    np.testing.assert_array_equal(cut["a"][0], np.arange(11))
    assert cut["c"].dtype == np.int32
    with pytest.raises(TypeError, match="text 'd' is float32"):
        evaluation.windows({"d": jnp.zeros(30)}, 10, 1)


@pytest.mark.slow
def test_all_measures(model, tmp_path):
    """One small evaluation of each, twice: bit for bit."""
    everything = settings(
        measures=evaluation.MEASURES,
        layer_windows=2,
        recall_lengths=(400, 1024),
        recall_depths=(0.0, 1.0),
        recall_items=1,
    )
    first = evaluation.evaluate(model, texts(), everything, out=tmp_path / "eval.json")
    again = evaluation.evaluate(model, texts(), everything)
    assert plain(first) == plain(again)
    for row in first["methods"].values():
        assert set(row) == set(evaluation.MEASURES)
        assert len(row["layers"]["cosine"]) == len(row["layers"]["decode"]["rmse"]) == 3
        assert row["layers"]["windows"] == 2
        assert row["recall"]["copy"]["items"] == row["recall"]["key_value"]["items"] == 2
        assert row["recall"]["left_out"] == [{"length": 1024, "why": "max_length=512"}]
    exact, kv4 = (first["methods"][name]["layers"] for name in METHODS)
    assert max(exact["relative_l1"]) < 1e-5 < min(kv4["relative_l1"])
