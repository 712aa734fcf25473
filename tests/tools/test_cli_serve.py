"""`turbojax serve`: results, stop texts, and what it says when it cannot."""

import functools
import json
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from typer.testing import CliRunner

from tests.tools.command_line import refuses, run, works, write
from turbojax import models
from turbojax.app import text_model
from turbojax.app.main import app
from turbojax.app.serve import requests as serve_requests
from turbojax.app.serve import run as serving
from turbojax.app.serve.settings import Settings
from turbojax.models.text.tokenizer import ByteTokenizer


@pytest.fixture(scope="module")
def model(tiny_folder) -> text_model.TextModel:
    return text_model.find_text_model(tiny_folder, jnp.dtype(jnp.float32)).load()


_run = functools.partial(run, "serve")


def _continued(model: text_model.TextModel, prompts: tuple[str, ...], count: int) -> np.ndarray:
    """By `models.generate`, of all at once, so that one program is compiled."""
    encoded = [model.tokenizer.encode(prompt) for prompt in prompts]
    tokens = np.zeros((len(prompts), max(map(len, encoded))), np.int32)
    for row, numbers in zip(tokens, encoded, strict=True):
        row[: len(numbers)] = numbers
    lengths = jnp.asarray([len(numbers) for numbers in encoded])
    options = {"max_new_tokens": count, "cache": "paged", "lengths": lengths}
    return np.asarray(models.generate(model.decoder, jnp.asarray(tokens), **options))


@pytest.mark.slow
def test_results_are_those_of_generate(tiny_folder, model, tmp_path):
    prompts = ("abc", "", "longer é")
    lines = [{"prompt": p, "max_new_tokens": 5 + i} for i, p in enumerate(prompts)]
    lines[1]["id"] = "empty"
    file = write(tmp_path, *lines, "")
    result = works(_run(file, "--model", tiny_folder, "--max-sequences", "2"))
    results = {x["id"]: x for x in map(json.loads, result.stdout.splitlines())}
    assert set(results) == {1, "empty", 3}
    continued = _continued(model, prompts, 7)
    for number, (prompt, line) in enumerate(zip(prompts, lines, strict=True), start=1):
        got = results[line.get("id", number)]
        tokens = continued[number - 1, : line["max_new_tokens"]].tolist()
        words = bytes(tokens).decode("utf-8", "replace")
        assert (got["tokens"], got["text"]) == (tokens, words)
        assert got["finish_reason"] == "length"
        assert got["prompt_tokens"] == 1 + len(prompt.encode())
        assert 0 < got["first_token_seconds"] <= got["seconds"]
    assert "3 requests, 18 tokens" in result.stderr
    assert "auto pages" in result.stderr
    assert "(2.00x larger than bfloat16)" in result.stderr


@pytest.mark.fuzz
def test_a_file_for_the_results_and_numbers_as_json(tiny_folder, tmp_path):
    file = write(tmp_path, {"prompt": "abc"}, {"prompt": "abd", "temperature": 0.7, "top_k": 4})
    out = tmp_path / "results.jsonl"
    options = ["--model", tiny_folder, "--max-new-tokens", "4", "--page-size", "16"]
    result = _run(
        *(file, "--out", str(out), "--json", "--kv-dtype", "turbo4"),
        *("--pool-bytes", "4000", *options),
    )
    works(result)
    report = json.loads(result.stdout)
    statistics = report["statistics"]
    assert (report["requests"], report["kv_dtype"], report["page_size"]) == (2, "turbo4", 16)
    # Two layers, two heads, keys and values: 8 bytes of codes and 2 of norm a token.
    assert statistics["token_bytes"] == 2 * 2 * 2 * 10
    assert statistics["pages"] == 4000 // (16 * 80)
    assert statistics["new_tokens"] == 8
    assert report["device"]
    assert [len(json.loads(x)["tokens"]) for x in out.read_text().splitlines()] == [4, 4]


def test_serving_nothing(model):
    with pytest.raises(ValueError, match="there must be at least one request"):
        serving.serve(model, [], emit=print)


@pytest.mark.slow
def test_ids_that_are_no_unicode_and_a_terminal_that_takes_ascii(tiny_folder, tmp_path):
    file = write(tmp_path, {"id": "\ud800", "prompt": "a"}, {"id": "é", "prompt": "b"})
    options = [file, "--model", tiny_folder, "--max-new-tokens", "2"]
    result = works(CliRunner(charset="ascii").invoke(app, ["serve", *options]))
    assert [json.loads(x)["id"] for x in result.stdout.splitlines()] == ["\ud800", "é"]
    out = tmp_path / "out"
    assert _run(*options, "--out", str(out)).exit_code == 0
    assert [json.loads(x)["id"] for x in out.read_text().splitlines()] == ["\ud800", "é"]


@pytest.mark.parametrize(
    ("line", "options", "message"),
    [
        ({"prompt": 1}, [], "'prompt' must be a string"),
        ({"prompt": "a" * 200}, [], "line 2: a prompt of 201 tokens"),
        ({"prompt": "a"}, ["--page-size", "5"], "page_size=5"),
        ({"prompt": "a"}, ["--implementation", "fast"], "implementation='fast'"),
    ],
)
def test_earlier_results_stay_if_nothing_runs(tiny_folder, tmp_path, line, options, message):
    file, out = write(tmp_path, {"prompt": "a"}, line), tmp_path / "out"
    out.write_text("kept")
    options = ["--model", tiny_folder, "--max-new-tokens", "2", *options]
    result = _run(file, "--out", str(out), "--overwrite", *options)
    assert (result.exit_code, out.read_text()) == (2, "kept")
    assert message in result.stderr


def test_out_of_memory_says_what_can_be_smaller(tiny_folder, tmp_path):
    file = write(tmp_path, {"prompt": "a"})
    error = jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: out of memory")
    with mock.patch.object(serving, "serve", side_effect=error):
        result = _run(file, "--model", tiny_folder, "--max-new-tokens", "2")
    refuses(result, "try a smaller --num-pages, --pool-bytes or --max-sequences")


def test_results_do_not_overwrite_the_requests(tiny_folder, tmp_path):
    file = write(tmp_path, {"prompt": "a"})
    link = tmp_path / "link"
    link.symlink_to(file)
    result = _run(file, "--out", str(link), "--model", tiny_folder)
    refuses(result, "must not be the file of the requests")
    assert json.loads(link.read_text()) == {"prompt": "a"}


@pytest.mark.fuzz
@pytest.mark.parametrize("results", [False, True])
def test_the_next_turn_finds_a_result_if_asked_for(tmp_path, results):
    """Prompts and results are numbers, so that a result can be a prompt."""
    options = ["--random-weights", "tiny", "--max-sequences", "1", "--page-size", "16"]
    options += ["--max-new-tokens", "20", *["--cache-results"][:results]]
    first = json.loads(_run(write(tmp_path, {"prompt": "1"}), *options).stdout)
    assert first["prompt_tokens"] == 1
    assert first["text"] == "".join(f"{token} " for token in first["tokens"])
    turn = "1 " + first["text"]
    result = works(_run(write(tmp_path, {"prompt": "1"}, {"prompt": turn}), *options))
    reused = [json.loads(x)["reused_tokens"] for x in result.stdout.splitlines()]
    assert reused == [0, 16 if results else 0]


class Letters(ByteTokenizer):
    """A token is a pair of letters: a stop text may begin in one and end in the next."""

    def stream(self, prompt=()):
        return lambda token: "" if token is None else f"{token % 10}{token // 10 % 10}"


@pytest.mark.slow
def test_a_stop_text_in_the_last_token(model):
    letters = text_model.TextModel(model.decoder, Letters())
    whole = _serve(letters, [{"prompt": "abd", "max_new_tokens": 3}])[1]
    stop = whole["text"][3:]
    assert stop not in whole["text"][:-1]
    got = _serve(letters, [{"prompt": "abd", "max_new_tokens": 3, "stop": [stop]}])[1]
    assert (got["text"], got["finish_reason"]) == (whole["text"][:3], "stop")


@pytest.mark.slow
def test_a_stop_token_is_no_part_of_the_text(model):
    whole = _serve(model, [{"prompt": "abc", "max_new_tokens": 9}])[1]
    stop = whole["tokens"][4]
    count = whole["tokens"].index(stop)
    got = _serve(model, [{"prompt": "abc", "max_new_tokens": 9, "stop": [stop]}])[1]
    assert got["tokens"] == whole["tokens"][: count + 1]
    assert got["text"] == bytes(whole["tokens"][:count]).decode("utf-8", "replace")
    assert got["finish_reason"] == "stop"


def test_what_a_tokenizer_ends_texts_with_ends_them(model):
    whole = _serve(model, [{"prompt": "abc", "max_new_tokens": 9}])[1]
    stop = whole["tokens"][3]
    ending = text_model.TextModel(model.decoder, ByteTokenizer([stop]))
    got = _serve(ending, [{"prompt": "abc", "max_new_tokens": 9}])[1]
    count = whole["tokens"].index(stop)
    assert (got["tokens"], got["finish_reason"]) == (whole["tokens"][: count + 1], "stop")
    assert got["text"] == bytes(whole["tokens"][:count]).decode("utf-8", "replace")


@pytest.mark.slow
def test_min_p_of_one_is_greedy(model):
    greedy = {"prompt": "abc", "max_new_tokens": 9}
    got = _serve(model, [greedy, {**greedy, "temperature": 2.0, "min_p": 1.0}])
    assert got[1]["tokens"] == got[2]["tokens"]


def _serve(model: text_model.TextModel, lines: list[dict]) -> dict:
    content = "\n".join(map(json.dumps, lines)).encode()
    results: list[dict] = []
    requests = serve_requests.read_requests(content, model.tokenizer, 8).requests
    serving.serve(model, requests, Settings(page_size=16), emit=results.append)
    return {result["id"]: result for result in results}


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", "not JSON"),
        ("[1]", "must be a JSON object"),
        ("{}", "'prompt' must be a string"),
        ({"prompt": 3}, "'prompt' must be a string"),
        ({"prompt": "a", "max_tokens": 3}, "'max_tokens' must be one of id, prompt"),
        ({"prompt": "a", "id": 1.5}, "id=1.5 must be a string or an integer"),
        ({"prompt": "a", "id": 1}, "id 1 must not be that of line 1 (a line without an id has its"),
        ('{"prompt": "a", "prompt": "b"}', "'prompt' must not be given twice"),
        ("[" * 100_000, "must not be nested so deep"),
        ({"prompt": "a", "stop": "b"}, "stop='b' must be a list"),
        ({"prompt": "a", "stop": [""]}, "must be a list of texts, none empty"),
        ({"prompt": "a", "stop": [True]}, "must be a list of texts, none empty"),
        ({"prompt": "a", "stop": [256]}, "token=256 of a request must be within 0..255"),
        ({"prompt": "a", "max_new_tokens": 0}, "max_new_tokens=0 must be at least 1"),
        ({"prompt": "a", "max_new_tokens": "4"}, "max_new_tokens='4' must be an integer"),
        ({"prompt": "a", "temperature": "warm"}, "temperature='warm' must be a number"),
        ({"prompt": "a", "stop": [-1]}, "token=-1 of a request must be within"),
        ({"prompt": "a", "top_k": 4}, "top_k=4 needs a temperature above 0"),
        ({"prompt": "a", "temperature": 1, "min_p": 2}, "min_p=2 must be within 0..1"),
        ({"prompt": "a" * 130}, "131 tokens and 130 new ones must be at most max_length=128"),
        ('{"prompt": "\\ud800"}', "surrogates not allowed"),
    ],
)
def test_a_bad_line_is_named(tiny_folder, tmp_path, line, message):
    file = write(tmp_path, {"prompt": "a", "max_new_tokens": 2}, "", line)
    result = _run(file, "--model", tiny_folder, "--max-new-tokens", "130")
    refuses(result, "line 3: ", message)
    assert result.stdout == ""
    assert "Traceback" not in result.stderr


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["/no/such/file"], "No such file or directory: '/no/such/file'"),
        (["FILE", "--weights", "int4"], "--weights is for --random-weights"),
        (["FILE", "--kv-dtype", "int3"], "kv_dtype='int3' must be one of auto"),
        (["FILE", "--page-size", "5"], "page_size=5 must be one of"),
        (["FILE", "--page-size", "0"], "page_size=0 must be at least 1"),
        (["FILE", "--max-sequences", "0"], "max_sequences=0 must be at least 1"),
        (["FILE", "--step-tokens", "0"], "step_tokens=0 must be at least 1"),
        (["FILE", "--pool-bytes", "10"], "pool_bytes=10 must be at least"),
        (["FILE", "--num-pages", "1"], "line 1: a prompt of 1 tokens and 128 new"),
        (
            ["FILE", "--num-pages", "4", "--pool-bytes", "9"],
            "give the number of pages or the bytes",
        ),
        (["FILE", "--implementation", "fast"], "implementation='fast' must be"),
        (["EMPTY"], "there must be at least one request"),
        (
            ["FILE", "--model", "x", "--random-weights", "tiny"],
            "--random-weights takes no --model",
        ),
    ],
)
def test_errors_are_one_clear_line(tmp_path, arguments, message):
    file, empty = write(tmp_path, {"prompt": "1"}), tmp_path / "empty"
    empty.write_text("\n\n")
    names = {"FILE": file, "EMPTY": str(empty)}
    arguments = [names.get(x, x) for x in arguments]
    if not {"--weights", "--model"} & set(arguments):
        arguments += ["--random-weights", "tiny"]
    refuses(_run(*arguments), message)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--out", "/no/such/folder/out"], "--out /no/such/folder/out must be a file"),
        (["--out", "/"], "--out / must be a file in a folder that exists"),
        (["--max-new-tokens", "0"], "max_new_tokens=0 must be at least 1"),
        (["--max-sequences", "0"], "max_sequences=0 must be at least 1"),
    ],
)
def test_cheap_mistakes_are_found_before_the_model_is_loaded(tmp_path, options, message):
    result = _run(write(tmp_path, {"prompt": "a"}), "--model", "/nowhere", *options)
    refuses(result, message)
    result = _run("/no/such/file", "--model", "/nowhere")
    assert "No such file or directory: '/no/such/file'" in result.stderr
