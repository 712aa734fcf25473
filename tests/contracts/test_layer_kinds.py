"""A cache of its own for every layer: what runs, what files say, how layers are chosen."""

import itertools
import json

import jax
import numpy as np
import pytest
from typer.testing import CliRunner

import turbojax as tj
from tests.tools import evaluation_helpers as helpers
from turbojax import evaluation, models
from turbojax.app import startup
from turbojax.app.generate.run import cache_kind, check_options
from turbojax.app.main import app
from turbojax.models.generation.caching import init_caches, kinds_of_layers, with_uncompressed

TURBO = tj.TurboConfig(block_q=16, block_kv=16, buffer_size=32)
MIXED = (TURBO, "paged_int8")


def same(one, other) -> bool:
    leaves = zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True)
    return all(np.array_equal(x, y) for x, y in leaves)


@pytest.mark.fuzz
def test_layers_hold_what_they_hold_of_one_kind_up_to_the_first_other_layer():
    """Ragged prompts, and a session that goes on, whose buffer is compressed on the way."""
    decoder = helpers.decoder(num_layers=2)
    tokens = np.random.default_rng(0).integers(0, 256, (2, 40))
    sessions = []
    for cache in (MIXED, TURBO):
        session = models.start(decoder, tokens, lengths=[40, 29], max_length=64, cache=cache)
        for step in range(9):
            session = session.step(tokens[:, step])
        sessions.append(session)
    mixed, uniform = (session.caches.layers for session in sessions)
    assert same(mixed[0], uniform[0])
    assert type(mixed[1]) is not type(uniform[1])
    for layer in mixed:
        assert layer.lengths.tolist() == [49, 38]
    assert not same(sessions[0].logits, sessions[1].logits)
    made = init_caches(decoder, 2, 64, MIXED)
    assert startup.cache_bytes(decoder.config, decoder.dtype, 2, 64, MIXED) == made.nbytes
    assert made.nbytes == sum(layer.nbytes for layer in mixed)


WRONG = {
    "too few": (lambda: kinds_of_layers(("kv4",), 2), "1 kinds, must have one for each of the mod"),
    "no kind": (lambda: kinds_of_layers(("kv4", "4bit"), 2), "layer 1: cache='4bit' must be"),
    "edges": (
        lambda: kinds_of_layers((models.UncompressedEdges("kv4", 1), "kv4"), 2),
        "layer 0: cache=UncompressedEdges",
    ),
    "edges of them": (lambda: with_uncompressed(("kv4", "kv4"), 1), "must be a cache of one layer"),
    "both": (
        lambda: cache_kind("c.json", helpers.CONFIG, None, 1),
        "uncompressed_layers=1 must be 0: c.json",
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_kinds_are_refused(name):
    call, message = WRONG[name]
    with pytest.raises((ValueError, TypeError), match=message):
        call()


def test_an_engine_names_what_it_cannot_have():
    with pytest.raises(ValueError, match=r"kv_dtype=\('fp8_e4m3', .* must be one of"):
        models.Engine(helpers.decoder(), num_pages=4, kv_dtype=("fp8_e4m3",) * 3)


# Files -------------------------------------------------------------------------------------------


def test_a_file_names_the_layers_kinds(tmp_path):
    path = tmp_path / "cache.json"
    names = ("4bit:block=32", "paged_int8", "exact")
    evaluation.write_layers(path, names, {"loss": 0.1})
    assert json.loads(path.read_text()) == {
        "version": 1,
        "layers": [*names],
        "about": {"loss": 0.1},
    }
    made = evaluation.method(str(path), helpers.CONFIG)
    kinds = tuple(evaluation.method(name, helpers.CONFIG).cache for name in names)
    assert made.cache == kinds
    assert cache_kind(str(path), helpers.CONFIG, None, 0) == kinds
    assert evaluation.method(f"{path}:pooled=0.5", helpers.CONFIG).pooled is not None


FILES = {
    "version": ({"version": 2, "layers": ["kv4"] * 3}, "version=2 must be 1"),
    "none": ({"layers": ["kv4"] * 3}, "version=None must be 1"),
    "key": ({"version": 1, "layer": ["kv4"] * 3}, "'layer' must be one of version, layers, about"),
    "list": ({"version": 1, "layers": "kv4"}, "layers='kv4' must be a list of names"),
    "numbers": ({"version": 1, "layers": [4, 4, 4]}, "must be a list of names"),
    "count": ({"version": 1, "layers": ["kv4"] * 2}, "names 2 caches.* one for each .* 3 layers"),
    "name": ({"version": 1, "layers": ["kv5"] * 3}, "method 'kv5' must begin with one of"),
    "file": ({"version": 1, "layers": ["a.json"] * 3}, "'a.json' must be one of a layer"),
    "latent": ({"version": 1, "layers": ["latent"] * 3}, "the model has no latents"),
    "options": (
        {"version": 1, "layers": ["kv4:uncompressed_layers=1"] * 3},
        "of one layer must have none of the options uncompressed_layers",
    ),
    "json": ([], "must hold a JSON object"),
}


@pytest.mark.parametrize("name", FILES)
def test_a_wrong_file_says_what_is_wrong(tmp_path, name):
    content, message = FILES[name]
    path = tmp_path / "cache.json"
    path.write_text(json.dumps(content))
    with pytest.raises(ValueError, match=message) as error:
        evaluation.kinds_from_file(path, helpers.CONFIG)
    assert str(path) in str(error.value)


def test_generate_looks_at_a_file_before_it_loads_a_model(tmp_path):
    options = {"max_new_tokens": 1, "stop_strings": ()}
    with pytest.raises(FileNotFoundError):
        check_options(cache=str(tmp_path / "missing.json"), **options)
    (tmp_path / "old.json").write_text('{"version": 0}')
    with pytest.raises(ValueError, match="version=0 must be 1"):
        check_options(cache=str(tmp_path / "old.json"), **options)


# Choosing ----------------------------------------------------------------------------------------


def every_choice(costs, sizes):
    """Cost and bytes of all choices."""
    count, layers = costs.shape
    for choice in itertools.product(range(count), repeat=layers):
        at = (np.array(choice), np.arange(layers))
        yield float(costs[at].sum()), int(sizes[at].sum())


@pytest.mark.parametrize("seed", range(8))
def test_the_choice_is_the_best_of_all(seed):
    rng = np.random.default_rng(seed)
    costs = rng.integers(0, 50, (3, 5)) / 64  # sums are exact
    if seed == 0:
        costs[0, 2] = np.nan
    sizes = rng.integers(1, 30, (3, 5)) * 16
    known = [x for x in every_choice(costs, sizes) if np.isfinite(x[0])]
    at = np.arange(5)
    for loss in sorted({cost for cost, _ in known})[:: 1 + len(known) // 8]:
        chosen = evaluation.choose(costs, sizes, loss=loss)
        wanted = min((size, cost) for cost, size in known if cost <= loss)
        assert (sizes[chosen, at].sum(), costs[chosen, at].sum()) == wanted
    for size in sorted({size for _, size in known})[:: 1 + len(known) // 8]:
        chosen = evaluation.choose(costs, sizes, size=size)
        wanted = min(x for x in known if x[1] <= size)
        assert (costs[chosen, at].sum(), sizes[chosen, at].sum()) == wanted


def test_sizes_of_no_common_divisor_stay_within_the_limit():
    rng = np.random.default_rng(0)
    costs, sizes = rng.random((4, 80)), rng.integers(10**6, 10**8, (4, 80))
    size = int(0.7 * sizes.mean(axis=0).sum())
    chosen, at = evaluation.choose(costs, sizes, size=size), np.arange(80)
    assert 0.999 * size < sizes[chosen, at].sum() <= size


def test_what_nothing_reaches_is_refused_with_what_would():
    costs, sizes = np.array([[2.0, 2.0], [1.0, 1.0]]), np.array([[1, 1], [5, 5]])
    for limit, message in (
        ({"loss": 1.5}, "loss=1.5 must be at least 2.000000"),
        ({"size": 1}, "size=1 must be at least 2"),
        ({}, "one of them"),
        ({"loss": 3.0, "size": 3}, "one of them"),
    ):
        with pytest.raises(ValueError, match=message):
            evaluation.choose(costs, sizes, **limit)
    with pytest.raises(ValueError, match="costs must be finite"):
        evaluation.choose(costs * np.array([[1], [np.nan]]) * np.array([1, np.inf]), sizes, size=9)


@pytest.mark.fuzz
def test_costs_of_the_last_layer_are_those_of_scoring_through_the_cache(tiny_folder):
    """There nothing that prompts have attended with comes after it."""
    # Sizes are those of the command's test, which shares most programs.
    decoder = models.load_decoder(tiny_folder, dtype="float32")
    tokens = np.random.default_rng(1).integers(0, 256, (2, 32))
    found = evaluation.layer_costs(decoder, tokens, ("kv4",), prompt=16, batch_size=2)
    method = evaluation.Method("last", ("exact", "kv4"))
    scores = evaluation.score(decoder, tokens, method, prompt=16, batch_size=2)
    # The first target was predicted by the prompt.
    np.testing.assert_allclose(found[0, 1], scores.divergence[:, 1:].mean(), rtol=1e-3)
    assert found[0, 0] > 0


# The command -------------------------------------------------------------------------------------


def run(*arguments):
    try:
        words = [*map(str, arguments), "--no-compilation-cache"]
        return CliRunner().invoke(app, words, env={"COLUMNS": "120"})
    finally:
        # It is for a whole process: other tests keep their programs.
        jax.config.update("jax_enable_compilation_cache", True)


@pytest.mark.fuzz
def test_the_command_writes_what_eval_takes(tmp_path, tiny_folder):
    text, out, results = (tmp_path / x for x in ("text.py", "cache.json", "eval.json"))
    text.write_text("def f(x):\n    return x + 1\n\n\n" * 8)
    given = ("--model", tiny_folder, "--text", text, "--context", 31, "--windows", 2)
    choice = ("--candidates", "kv4,int8", "--decoded", 15, "--out", out, "--batch-size", 2)
    wrong = run("calibrate", *given, *choice, "--ratio", "30")
    assert wrong.exit_code == 2
    assert "--ratio 30 must be at most" in wrong.stderr
    assert not out.exists()
    done = run("calibrate", *given, *choice, "--loss", "50", "--length", "128", "--json")
    assert done.exit_code == 0, done.stderr
    report = json.loads(done.stdout)
    assert report["layers"] == ["kv4", "kv4"]
    assert json.loads(out.read_text())["about"]["rows"] == report["rows"]
    # The layers' own caches are these in all layers.
    assert report["rows"]["chosen"] == pytest.approx(
        report["rows"]["kv4"] | {"predicted": report["rows"]["chosen"]["predicted"]}
    )
    assert report["rows"]["chosen"]["predicted"] == pytest.approx(
        report["rows"]["kv4"]["divergence"]
    )
    measure = ("eval", *given, "--batch-size", 2, "--prompt", 16, "--measures", "text")
    measured = run(*measure, "--methods", f"kv4,{out}", "--out", results)
    assert measured.exit_code == 0, measured.stderr
    rows = json.loads(results.read_text())["methods"]
    assert rows[str(out)]["text"]["bits_per_byte"] == rows["kv4"]["text"]["bits_per_byte"]
    evaluation.write_layers(out, ["kv4", "int8"])
    other = run(*measure, "--methods", f"kv4,{out}", "--out", results)
    assert other.exit_code == 2
    assert "results of another evaluation" in other.stderr
