"""`turbojax generate`, `serve` and `eval` with `--mesh`: what one device says."""

import json

import jax
import pytest
from typer.testing import CliRunner

from turbojax.app.main import app

pytestmark = pytest.mark.mesh

LINES = [{"prompt": "abc" * i, "max_new_tokens": 6, "seed": i} for i in range(1, 6)]


def generate(*options):
    arguments = ["generate", "--no-compilation-cache", "--max-new-tokens", "6", *options]
    return CliRunner().invoke(app, arguments)


@pytest.mark.slow
def test_generate_says_the_same(tiny_folder):
    options = ("some text", "--model", tiny_folder, "--cache", "exact", "--batch-size", "2")
    texts = []
    for mesh in ((), ("--mesh", "data=2,model=2")):
        found = generate(*options, *mesh, "--json")
        assert found.exit_code == 0, found.output
        texts.append(json.loads(found.output)["text"])
    assert texts[0] == texts[1]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("model=16",), "mesh 'model=16' needs 16 devices, there are 8 (cpu)"),
        (("tensor=2",), "must be such as data=2,model=4"),
        (("model=8",), "num_heads=4 must be a multiple of 8"),
        (("data=2", "--batch-size", "3"), "must be multiples of data=2 of --mesh"),
    ],
)
def test_generate_refuses_bad_meshes(options, message, tiny_folder):
    found = generate("some text", "--model", tiny_folder, "--mesh", *options)
    assert found.exit_code == 2
    assert message in " ".join(found.output.split())


def serve(folder, tmp_path, *options):
    file, out = tmp_path / "requests.jsonl", tmp_path / "results.jsonl"
    file.write_text("\n".join(map(json.dumps, LINES)))
    arguments = [str(file), "--out", str(out), "--model", folder, "--max-length", "64"]
    arguments += ["--reproducible", "--step-tokens", "16", "--json", *options]
    found = CliRunner().invoke(app, ["serve", "--no-compilation-cache", *arguments])
    assert found.exit_code == 0, found.output
    lines = map(json.loads, out.read_text().splitlines())
    # Without the progress that comes before it.
    report = json.loads(found.stdout[found.stdout.index("{") :])
    return {line["id"]: line["tokens"] for line in lines}, report["statistics"]


@pytest.mark.slow
def test_serve_says_the_same(tiny_folder, tmp_path):
    sizes = ("--num-pages", "20")
    alone, of_one = serve(tiny_folder, tmp_path, *sizes)
    split, of_two = serve(tiny_folder, tmp_path, *sizes, "--mesh", "data=2,model=2", "--overwrite")
    assert split == alone
    assert of_two["pages"] == 2 * of_one["pages"] == 40
    assert of_two["finished"] == of_one["finished"] == len(LINES)
    # What is kept may be gone on with, but not by devices that round otherwise.
    again, of_none = serve(tiny_folder, tmp_path, *sizes, "--mesh", "data=4,model=2", "--resume")
    assert (again, of_none) == (alone, None)
    file, out = str(tmp_path / "requests.jsonl"), str(tmp_path / "results.jsonl")
    options = ["--model", tiny_folder, "--max-length", "64", "--reproducible", "--resume"]
    found = CliRunner().invoke(app, ["serve", file, "--out", out, *options])
    assert found.exit_code == 2
    assert "another" in found.output


def test_serve_refuses_bad_meshes(tiny_folder, tmp_path):
    file = tmp_path / "requests.jsonl"
    file.write_text(json.dumps(LINES[0]))
    for mesh, message in (
        ("data=3,model=4", "needs 12 devices, there are 8 (cpu)"),
        ("model=8", "num_heads=4 must be a multiple of 8"),
    ):
        found = CliRunner().invoke(
            app, ["serve", str(file), "--model", tiny_folder, "--mesh", mesh]
        )
        assert found.exit_code == 2
        assert message in " ".join(found.output.split())


def evaluate(model, text, *options):
    sizes = ["--context", "31", "--batch-size", "2", "--methods", "exact,kv4", "--json"]
    arguments = ["eval", "--no-compilation-cache", "--model", model, "--text", text, *sizes]
    try:
        return CliRunner().invoke(app, [*map(str, arguments), *options])
    finally:
        jax.config.update("jax_enable_compilation_cache", True)


@pytest.mark.fuzz
def test_eval_split_over_heads(tiny_folder, tmp_path):
    text = tmp_path / "text.py"
    text.write_text("def f(x):\n    return x + 1\n\n\n" * 4)
    one, two = (
        json.loads(evaluate(tiny_folder, text, *mesh).stdout)["methods"]
        for mesh in (("--measures", "text"), ("--mesh", "model=2"))
    )
    for name, row in two.items():
        wanted = one[name]["text"]
        assert row["text"]["bits_per_byte"] == pytest.approx(wanted["bits_per_byte"], rel=1e-5)
        assert row["text"]["cost"] == pytest.approx(wanted["cost"], abs=1e-5)
        assert row["text"]["cache_bytes"] == wanted["cache_bytes"]
        assert "a split model is not looked into" in row["layers"]["refused"]
    refused = evaluate(tiny_folder, text, "--mesh", "data=2")
    assert "--mesh data=2 must split heads alone" in refused.stderr
