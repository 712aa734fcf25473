"""The engine of `turbojax serve`: what options make of it, and the size of its pool."""

import dataclasses
import functools
import json
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest

from tests.tools import command_line
from tests.tools.command_line import refuses, works, write
from turbojax import models
from turbojax.app import startup, text_model
from turbojax.app.serve import settings as serve_settings
from turbojax.app.serve.settings import Models, Settings, plan
from turbojax.models.engine import Draft, Engine, NGram

CONFIG = models.TransformerConfig(
    vocab_size=256,
    hidden_size=32,
    intermediate_size=48,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=16,
    max_length=128,
)
SHAPES = Models(CONFIG, jnp.dtype(jnp.float32))
# Keys and values of two heads of 16 channels in float32, two layers.
TOKEN_BYTES = 2 * 2 * 16 * 4 * 2


run = functools.partial(command_line.run, "serve")


def planned(settings, **options):
    return plan(SHAPES, settings, max_length=options.pop("max_length", 100), **options)


def test_defaults():
    pool = planned(Settings())
    assert (pool.max_sequences, pool.step_tokens, pool.max_length) == (16, 512, 100)  # of a CPU
    assert pool.num_pages == 16 * 2  # of 64 tokens
    assert pool.nbytes == pool.num_pages * 64 * TOKEN_BYTES
    pool = planned(Settings(reproducible=True))
    assert (pool.max_sequences, pool.step_tokens, pool.num_pages) == (8, 64, 16)


def test_no_more_than_the_requests_of_a_file():
    assert planned(Settings(), requests=3).max_sequences == 3
    assert planned(Settings(), requests=300).max_sequences == 16
    # One program, whatever the file: texts stay the same when lines are added.
    assert planned(Settings(reproducible=True), requests=3).max_sequences == 8
    assert planned(Settings(reproducible=True), requests=3).num_pages == 3 * 2
    assert planned(Settings(max_sequences=5), requests=3).max_sequences == 5


def test_what_is_asked_for_is_taken():
    asked = Settings(max_sequences=7, step_tokens=100, page_size=16, num_pages=9)
    pool = planned(asked, free_bytes=0)
    found = (pool.max_sequences, pool.step_tokens, pool.num_pages)
    assert (*found, pool.nbytes) == (7, 100, 9, 9 * 16 * TOKEN_BYTES)
    page = 16 * TOKEN_BYTES
    asked = Settings(page_size=16, pool_bytes=5 * page + page // 2)
    assert planned(asked).num_pages == 5
    with pytest.raises(ValueError, match=f"pool_bytes=10 must be at least {page}, the bytes of"):
        planned(Settings(page_size=16, pool_bytes=10))


def test_what_the_memory_leaves():
    page = 64 * TOKEN_BYTES
    assert planned(Settings(), free_bytes=10 * page + 1).num_pages == 10
    assert planned(Settings(), free_bytes=10**12).num_pages == 32
    assert planned(Settings(), free_bytes=None).num_pages == 32
    # At least one, so that memory is what the error is about.
    assert planned(Settings(), free_bytes=-5).num_pages == 1


def test_a_draft_model_has_pages_too():
    small = dataclasses.replace(CONFIG, num_layers=1)
    shapes = dataclasses.replace(SHAPES, draft=small, draft_dtype=jnp.dtype(jnp.bfloat16))
    settings = Settings(num_pages=10)
    more = 10 * 64 * TOKEN_BYTES // 2 // 2
    pool = plan(shapes, settings, max_length=100)
    assert pool.nbytes == 10 * 64 * TOKEN_BYTES + more
    drafts = Settings(num_pages=10, page_size=16, kv_dtype="turbo4", speculate="draft")
    decoder = models.random_decoder(CONFIG, dtype=jnp.float32)
    small = models.random_decoder(small, dtype=jnp.float32)
    shapes = Models(CONFIG, decoder.dtype, small.config, small.dtype)
    pool = plan(shapes, drafts, max_length=64)
    engine = serve_settings.make_engine(decoder, models.ByteTokenizer(), drafts, pool, small)
    assert isinstance(engine, Engine)
    held = engine.statistics().pool_bytes
    assert held < pool.nbytes  # the statistics are of the model's own pages
    assert pool.nbytes < 2 * held


def test_free_memory(monkeypatch):
    needs = {"weights": 100, "logits": 50}
    monkeypatch.setattr(startup, "available_memory", lambda: 10_000)
    assert (
        serve_settings.free_for_pages(needs)
        == serve_settings.free_for_pages(needs, modest=True)
        == 9000 - 150
    )
    monkeypatch.setattr(startup, "available_memory", lambda: 10**12)
    assert serve_settings.free_for_pages(needs) == 9 * 10**11 - 150
    assert serve_settings.free_for_pages(needs, modest=True) == 2**29
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    assert serve_settings.free_for_pages(needs, modest=True) == 9 * 10**11 - 150
    monkeypatch.setattr(startup, "available_memory", lambda: None)
    assert serve_settings.free_for_pages(needs) is None


def test_a_request_that_the_memory_has_no_room_for_is_found_before_weights_are_read(
    tmp_path, monkeypatch
):
    found = text_model.find_random_model("tiny")
    unread = dataclasses.replace(found, load=None)
    monkeypatch.setattr(text_model, "find_random_model", lambda *a, **k: unread)
    sizes = Settings().sizes(400, 2)
    needs = sum(serve_settings.bytes_besides(found, None, Settings(), sizes).values())
    [page] = Models.of(found).page_bytes(Settings(), 400)
    monkeypatch.setattr(startup, "available_memory", lambda: (needs + 3 * page) / 0.9 + 1)
    lines = [{"prompt": "1", "max_new_tokens": count} for count in (100, 399)]
    result = run(write(tmp_path, *lines), "--random-weights", "tiny")
    refuses(
        result,
        "line 2: a prompt of 1 tokens and 399 new ones need 7 pages",
        "num_pages=3: for more the memory has no room: a smaller --max-seq",
    )


def test_what_an_engine_needs_besides():
    found = text_model.find_random_model("tiny")
    sizes = Settings(max_sequences=4).sizes(128)
    needs = serve_settings.bytes_besides(found, None, Settings(), sizes)
    assert needs["weights"] == found.weight_bytes
    assert needs["logits of 4 rows"] == 4 * 4 * found.config.vocab_size
    guessing = Settings(speculate="draft", draft_tokens=7)
    needs = serve_settings.bytes_besides(found, found, guessing, sizes)
    assert needs["weights of the draft model"] == found.weight_bytes
    assert "logits of 32 rows" in needs


def test_speculation():
    assert Settings().speculation(None) is None
    assert Settings(speculate="ngram").speculation(None) == NGram()
    assert Settings(speculate="ngram", draft_tokens=7).speculation(None) == NGram(7)
    decoder = models.random_decoder(CONFIG, dtype=jnp.float32)
    found = Settings(speculate="draft", draft_tokens=2).speculation(decoder)
    assert isinstance(found, Draft)
    assert (found.model is decoder, found.tokens) == (True, 2)


REFUSED = [
    (["--speculate", "guess"], "--speculate 'guess' must be one of ngram, draft"),
    (["--speculate", "draft"], "--speculate draft and --draft-model DIR need each other"),
    (["--draft-model", "x"], "--speculate draft and --draft-model DIR need each other"),
    (["--speculate", "ngram", "--draft-model", "x"], "need each other"),
    (["--draft-tokens", "3"], "--draft-tokens 3 is for --speculate"),
    (["--speculate", "ngram", "--draft-tokens", "16"], "tokens=16 must be at most 15"),
    (["--speculate", "ngram", "--draft-tokens", "0"], "draft_tokens=0 must be at least 1"),
    (["--speculate", "ngram", "--reproducible"], "--reproducible and --speculate do not go"),
    (["--step-tokens", "-1"], "step_tokens=-1 must be at least 1"),
    (["--num-pages", "0"], "num_pages=0 must be at least 1"),
    (["--http", ":0"], "give a FILE of requests or --http HOST:PORT, one of them"),
    (["--served-name", "x"], "--served-name is for --http"),
    (["--api-key", "x"], "--api-key is for --http"),
    (["--max-waiting", "0"], "--max-waiting is for --http"),
]


@pytest.mark.parametrize(("options", "message"), REFUSED, ids=[x for _, x in REFUSED])
def test_options_that_do_not_fit(options, message, tmp_path, monkeypatch):
    monkeypatch.setattr(models, "load_decoder", None)
    refuses(run(write(tmp_path, {"prompt": "a"}), *options), message)


def test_neither_a_file_nor_an_address():
    refuses(run(), "give a FILE of requests or --http HOST:PORT, one of them")


def test_a_key_in_the_environment_is_no_option_of_a_file(tmp_path, monkeypatch):
    monkeypatch.setenv("TURBOJAX_API_KEY", "secret")
    result = run(write(tmp_path, {"prompt": 3}))
    assert "'prompt' must be a string" in result.stderr


@pytest.mark.fuzz
def test_a_draft_that_is_the_model_guesses_right(tiny_folder, tmp_path):
    file, out = write(tmp_path, {"prompt": "abc", "max_new_tokens": 40}), str(tmp_path / "out")
    options = ["--model", tiny_folder, "--page-size", "16", "--json"]
    plain = works(run(file, *options))
    guessing = ["--speculate", "draft", "--draft-model", tiny_folder, "--draft-tokens", "3"]
    result = works(run(file, *options, *guessing, "--out", out))
    numbers = json.loads(result.stdout)["statistics"]
    assert numbers["accepted_tokens"] > 0.9 * numbers["proposed_tokens"] > 20
    [found] = map(json.loads, Path(out).read_text().splitlines())
    assert found["tokens"] == json.loads(plain.stdout.splitlines()[0])["tokens"]
