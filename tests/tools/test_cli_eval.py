"""The `turbojax eval` command: what it prints, how it goes on, and what it says when it cannot."""

import dataclasses
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from typer.testing import CliRunner

from tests.models.tokenizer_helpers import byte_level, save
from tests.tools.command_line import refuses
from tests.tools.evaluation_helpers import CONFIG
from turbojax import evaluation, models
from turbojax.app.evaluate.command import split_methods
from turbojax.app.main import app
from turbojax.models.text.tokenizer import load_tokenizer

TASK = """
task: words
dataset_path: json
dataset_kwargs: {data_files: {test: lines.jsonl}}
test_split: test
output_type: generate_until
doc_to_text: "{{prompt}}"
doc_to_target: "{{answer}}"
generation_kwargs: {until: [never], max_gen_toks: 6}
metric_list: [{metric: exact_match}]
"""


@pytest.fixture(scope="module")
def texts(tmp_path_factory) -> tuple[str, str]:
    """Two texts of three windows of 31 bytes each."""
    folder = tmp_path_factory.mktemp("texts")
    for i in range(2):
        (folder / f"{i}.py").write_text(f"def f{i}(x):\n    return x + {i}\n\n\n" * 4)
    return str(folder / "0.py"), str(folder / "1.py")


@pytest.fixture(scope="module")
def tasks(tmp_path_factory) -> str:
    folder = tmp_path_factory.mktemp("tasks")
    (folder / "lines.jsonl").write_text('{"prompt": "abc", "answer": "x"}\n' * 3)
    (folder / "words.yaml").write_text(TASK)
    return str(folder / "words.yaml")


def run(*arguments: str):
    options = ["--no-compilation-cache", *map(str, arguments)]
    try:
        return CliRunner().invoke(app, ["eval", *options], env={"COLUMNS": "200"})
    finally:
        # It is for a whole process: other tests keep their programs.
        jax.config.update("jax_enable_compilation_cache", True)


def sizes(model, texts, *methods):
    return (
        *("--model", model, "--text", texts[0], "--text", texts[1]),
        *("--context", "31", "--windows", "2", "--batch-size", "2", "--methods", ",".join(methods)),
    )


@pytest.mark.slow
def test_tables_plots_and_a_file_that_goes_on(tiny_folder, texts, tmp_path, monkeypatch):
    out, folder = tmp_path / "out.json", tmp_path / "plots"
    given = (*sizes(tiny_folder, texts, "exact", "kv4"), "--out", out)
    begun = run(*sizes(tiny_folder, texts, "exact"), "--out", out)
    assert begun.exit_code == 0, begun.output
    asked = []
    real = evaluation.evaluate

    def counted(*arguments, progress, **options):
        def tell(method, measure, done, total):
            asked.append((method, measure))
            progress(method, measure, done, total)

        return real(*arguments, progress=tell, **options)

    monkeypatch.setattr(evaluation, "evaluate", counted)
    result = run(*given, "--plot", folder)
    assert result.exit_code == 0, result.output
    # What the first run measured is not measured again.
    assert set(asked) == {("kv4", name) for name in ("text", "layers")}
    for words in ("bits/byte", "relative", "100.0%"):
        assert words in result.stdout
    assert "plots written" in result.stdout
    assert sorted(path.name for path in folder.iterdir()) == ["cost.png", "layers.png"]
    found = json.loads(out.read_text())
    assert [*found["methods"]] == ["exact", "kv4"]
    assert found["methods"]["exact"]["text"]["cost"] == 0
    whole = run(*sizes(tiny_folder, texts, "exact", "kv4"), "--json")
    assert json.loads(whole.stdout)["methods"] == found["methods"]
    refuses(run(*given, "--seed", "1"), "settings.seed is 0 there and 1 here")


# Packages of lm-eval warn of each other.
@pytest.mark.fuzz
@pytest.mark.filterwarnings("ignore")
def test_tasks_beside_the_exact_cache(tiny_folder, texts, tasks, tmp_path):
    out = tmp_path / "out.json"
    given = (*sizes(tiny_folder, texts, "exact", "kv4"), "--tasks", tasks, "--measures", "tasks")
    result = run(*given, "--limit", "2", "--num-fewshot", "0", "--out", out)
    assert result.exit_code == 0, result.output
    for words in ("words, 2 items", "exact_match", "to exact", "same", "100.0%"):
        assert words in result.stdout
    assert not out.with_name("out.json.tasks").exists()
    found = json.loads(out.read_text())
    assert found["measures"]["tasks"]["limit"] == 2
    [one, other] = found["methods"]["kv4"]["tasks"]["items"]["words"]
    assert one["answers"] == other["answers"]
    missing = run(*sizes(tiny_folder, texts, "exact"), "--tasks", "no_such_task")
    refuses(missing, "'no_such_task' is not a registered task")


@pytest.mark.slow
@pytest.mark.parametrize("rows", [0, 1])
def test_an_interrupted_run_says_where_it_goes_on(rows, tiny_folder, texts, tmp_path, monkeypatch):
    out = tmp_path / "out.json"

    def layers(*arguments, **options):
        raise KeyboardInterrupt

    monkeypatch.setattr("turbojax.evaluation.run.layer_errors", layers)
    measures = ("text,layers", "layers,text")[1 - rows]
    result = run(*sizes(tiny_folder, texts, "exact"), "--measures", measures, "--out", out)
    assert result.exit_code == 130
    assert result.stderr.splitlines()[-1] == "turbojax eval: interrupted: " + (
        f"what was measured is in {out}; the same command goes on from there"
        if rows
        else "nothing was written"
    )
    assert out.exists() == bool(rows)


@pytest.mark.slow
def test_recall_says_what_it_left_out(tiny_folder, texts, tmp_path):
    result = run(
        *sizes(tiny_folder, texts, "exact"),
        *("--measures", "recall", "--recall-lengths", "64,1024", "--recall-depths", "0.5"),
        *("--plot", tmp_path / "plots"),
    )
    assert result.exit_code == 0, result.output
    assert "not asked" in result.stdout
    assert "1,024 tokens: max_length=128" in result.stdout


@pytest.mark.parametrize(
    ("given", "methods"),
    [
        (None, None),
        (["exact,4bit"], ("exact", "4bit")),
        (["4bit:softmax=sas,block=32,kv4"], ("4bit:softmax=sas,block=32", "kv4")),
        (
            ["exact, 4bit:pooled=0.25,block=32", "k8v4"],
            ("exact", "4bit:pooled=0.25,block=32", "k8v4"),
        ),
        (["4bit:block=32", "block=64"], ("4bit:block=32", "block=64")),
        (
            ["kv4:uncompressed_layers=1,4bit:block=32,low_heads=1"],
            ("kv4:uncompressed_layers=1", "4bit:block=32,low_heads=1"),
        ),
    ],
)
def test_commas_between_methods_and_between_options(given, methods):
    assert split_methods(given) == methods


@pytest.mark.quick(20, slow=0)
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--methods", "5bit"], "method '5bit' must begin with one of exact"),
        (["--methods", "exact,"], "method '' must begin with one of"),
        (["--methods", "4bit:colour=red"], "option 'colour' must be one of"),
        (["--methods", "kv4,kv4"], "must name at least one, and each once"),
        (["--measures", "speed"], "measure 'speed' must be one of text, layers, recall, tasks"),
        (["--measures", "tasks"], "the measure 'tasks' and --tasks must go together"),
        (["--limit", "3"], "--limit must go with --tasks"),
        (["--chat"], "--chat must go with --tasks"),
        (["--recall-kinds", "copy"], "--recall-kinds must go with the measure 'recall'"),
        (["--measures", "recall", "--recall-kinds", "hay"], "recall_kinds: 'hay' must be one of"),
        (["--recall-lengths", "64"], "--recall-lengths must go with the measure 'recall'"),
        (
            ["--measures", "recall", "--recall-lengths", "a"],
            "--recall-lengths 'a' must be integers",
        ),
        (["--measures", "recall", "--recall-depths", "2"], "must be between 0 and 1"),
        (["--context", "0"], "context=0 must be at least 1"),
        (["--context", "129"], "--context 129 must be at most the model's max_length=128"),
        (["--context", "31", "--prompt", "32"], "prompt=32 must be at most context=31"),
        (["--text", "/no/such/file"], "No such file or directory: '/no/such/file'"),
        (
            ["--out", "/no/such/folder/file"],
            "--out /no/such/folder/file must be a file in a folder",
        ),
        (["--plot", "/dev/null"], "--plot /dev/null must be a folder"),
        (["--model", "/no/such/folder"], "'/no/such/folder' must be 'embedded' or a folder"),
        (["--batch-size", "0"], "batch_size=0 must be at least 1"),
        (["--dtype", "int8"], "'int8' must be one of float32"),
    ],
)
def test_errors_are_one_clear_line(arguments, message, tiny_folder, texts):
    result = refuses(run("--model", tiny_folder, "--text", texts[0], *arguments), message)
    assert result.stderr.startswith("turbojax eval: ")
    assert result.stderr.count("\n") == 1


@pytest.mark.fuzz
def test_int4_weights_of_a_folder(texts, tmp_path):
    """Exact is then the same weights with an exact cache."""
    config = dataclasses.replace(CONFIG, num_layers=2, max_length=64, tie_embeddings=True)
    decoder = models.random_quantized_decoder(config, dtype=jnp.float32)
    models.save_quantized(decoder, tmp_path, extra_config={"bos_token_id": 0, "eos_token_id": 0})
    options = ("--measures", "text", "--json", "--dtype", "float32")
    result = run(*sizes(str(tmp_path), texts, "exact", "kv4"), *options)
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout)
    assert found["model"]["kind"] == "QuantizedDecoder"
    assert found["methods"]["exact"]["text"]["cost"] == 0
    assert found["methods"]["kv4"]["text"]["divergence"] > 0


@pytest.mark.fuzz
@pytest.mark.filterwarnings("ignore")
def test_a_checkpoint_with_a_tokenizer_and_a_chat_template(texts, tasks, tmp_path):
    config = dataclasses.replace(CONFIG, vocab_size=320, num_layers=2, max_length=64)
    models.save(models.Transformer(config, rngs=nnx.Rngs(0)), tmp_path)
    template = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
    settings = {"bos_token": "<s>", "eos_token": "<|im_end|>", "chat_template": template}
    save(byte_level(), tmp_path, {"tokenizer_config.json": settings})
    given = (*sizes(str(tmp_path), texts, "exact"), "--tasks", tasks, "--measures", "text,tasks")
    given = (*given, "--chat", "--limit", "1")
    result = run(*given, "--json")
    assert result.exit_code == 0, result.output
    row = json.loads(result.stdout)["methods"]["exact"]
    assert row["text"]["perplexity"] == pytest.approx(2 ** row["text"]["bits_per_token"])
    [item] = row["tasks"]["items"]["words"]
    tokenizer = load_tokenizer(tmp_path)
    prompt = tokenizer.encode("user: abc\n")
    model = models.load(tmp_path, dtype=jnp.float32)
    new = models.generate(model, np.array([prompt], np.int32), max_new_tokens=6)[0].tolist()
    assert item["answers"] == [tokenizer.decode(new)]
