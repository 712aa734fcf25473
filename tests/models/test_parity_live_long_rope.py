"""LongRoPE's two sets of factors: which one applies where, next to transformers.

The tiny Phi-3 of these tests was made for 32 tokens, and goes up to 256.
"""

import dataclasses
import json
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from typer.testing import CliRunner

from tests.models import hf_helpers as hf
from turbojax import models
from turbojax.app import main as cli
from turbojax.app.serve import requests as serve_requests
from turbojax.app.serve import run as serving
from turbojax.app.serve.settings import Settings
from turbojax.app.text_model import TextModel
from turbojax.models import Engine, Request
from turbojax.models.text.tokenizer import NumberTokenizer

pytestmark = pytest.mark.slow

ORIGINAL = 32
TOLERANCE = 1e-4


def theirs():
    """What transformers computes: imported here, because it may not be installed."""
    from tests.models import torch_helpers

    return torch_helpers


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return hf.write("phi3-longrope", tmp_path_factory.mktemp("phi3"))


@pytest.fixture(scope="module")
def decoder(folder):
    return models.load_decoder(folder)


def greedy(ids: np.ndarray, count: int) -> np.ndarray:
    """What transformers goes on with."""
    model = theirs().reference("phi3-longrope")
    return theirs().greedy(model, ids, np.ones_like(ids), count)


@pytest.mark.parametrize("length", [ORIGINAL, ORIGINAL + 1])
def test_a_plain_load_takes_the_factors_of_the_text(folder, length):
    ids = hf.tokens(2, length)
    logits = np.asarray(models.load(folder)(jnp.asarray(ids)))
    expected = theirs().logits(theirs().reference("phi3-longrope"), ids)
    np.testing.assert_allclose(logits, expected, rtol=0, atol=TOLERANCE)


@pytest.mark.fuzz
@pytest.mark.parametrize("longest", [20, 40])
def test_padding_does_not_make_a_text_long(folder, longest):
    """By the longest text of the batch, as transformers has it, and not by the batch's width."""
    graph, state = nnx.split(models.load(folder))
    run = jax.jit(lambda state, ids, mask: nnx.merge(graph, state)(ids, attention_mask=mask))
    ids, mask = hf.tokens(2, 50), hf.padding_mask((longest, 9), 50, "left")
    logits = np.asarray(run(state, jnp.asarray(ids), jnp.asarray(mask)))
    expected = theirs().logits(theirs().reference("phi3-longrope"), ids, mask)
    real = mask.astype(bool)
    np.testing.assert_allclose(logits[real], expected[real], rtol=0, atol=TOLERANCE)


def test_factors_are_seen():
    """So that the tests above would see the wrong ones."""
    ids = hf.tokens(2, 20)
    model = theirs().reference("phi3-longrope")
    far = np.concatenate([ids, hf.tokens(2, 40)], 1)
    apart = theirs().logits(model, ids) - theirs().logits(model, far)[:, :20]
    assert np.abs(apart).max() > 100 * TOLERANCE


@pytest.mark.fuzz
def test_greedy_texts(decoder):
    """Prompt and new tokens together on one side of the border: exactly those of transformers."""
    ids = hf.tokens(2, 22)
    ours = models.generate(decoder, jnp.asarray(ids), max_new_tokens=10, cache="paged")
    np.testing.assert_array_equal(ours, greedy(ids, 10))


def test_scores_through_a_cache(decoder):
    """On the short side of the border; the next test is on the other."""
    ids = hf.tokens(2, 23)
    session = models.start(decoder, jnp.asarray(ids[:, :17]), max_length=23)
    ours = np.asarray(models.score(session, jnp.asarray(ids[:, 17:])))
    expected = theirs().logits(theirs().reference("phi3-longrope"), ids)[:, 16:-1]
    np.testing.assert_allclose(ours, expected, rtol=0, atol=TOLERANCE)


def test_a_session_across_the_border_has_the_long_factors_and_says_so(decoder):
    ids = hf.tokens(2, 40)
    with pytest.warns(UserWarning, match=r"(?s)up to 32 tokens.*max_length=32") as caught:
        session = models.start(decoder, jnp.asarray(ids[:, :20]), max_length=40)
    assert len(caught) == 1
    ours = np.asarray(models.score(session, jnp.asarray(ids[:, 20:])))
    expected = theirs().logits(theirs().reference("phi3-longrope"), ids)[:, 19:-1]
    np.testing.assert_allclose(ours, expected, rtol=0, atol=TOLERANCE)
    # A model for short texts never gets there.
    short = dataclasses.replace(
        decoder, config=dataclasses.replace(decoder.config, max_length=ORIGINAL)
    )
    models.start(short, jnp.asarray(ids[:, :20]), max_length=ORIGINAL)


@pytest.mark.fuzz
def test_an_engine_chooses_by_its_longest_request(decoder):
    def engine(max_length):
        return Engine(decoder, num_pages=8, page_size=16, max_sequences=2, max_length=max_length)

    ids = hf.tokens(1, 20)
    short = engine(ORIGINAL)
    number = short.add(Request(ids[0].tolist(), 10))
    assert list(short.run()[number].tokens) == greedy(ids, 10)[0].tolist()
    long = engine(ORIGINAL + 32)
    with pytest.warns(UserWarning, match=r"(?s)up to 32 tokens.*max_length=32"):
        long.add(Request(ids[0].tolist(), 10))
    ids = hf.tokens(1, 40)
    number = long.add(Request(ids[0].tolist(), 8))
    assert list(long.run()[number].tokens) == greedy(ids, 8)[0].tolist()


def test_serving_takes_the_factors_of_its_longest_request(decoder):
    ids, results = hf.tokens(1, 20), []
    model = TextModel(decoder, NumberTokenizer(hf.VOCAB))
    line = json.dumps({"prompt": " ".join(map(str, ids[0])), "max_new_tokens": 10})
    requests = serve_requests.read_requests(line.encode(), model.tokenizer, 5).requests
    serving.serve(model, requests, Settings(page_size=16), emit=results.append)
    assert results[0]["tokens"] == greedy(ids, 10)[0].tolist()


def test_bits_of_windows_are_those_of_their_length(decoder):
    ids = hf.tokens(2, 21)
    ours = models.token_bits(decoder, ids)
    logits = theirs().logits(theirs().reference("phi3-longrope"), ids[:, :-1]).astype(np.float64)
    chosen = np.take_along_axis(logits, ids[:, 1:, None], -1)[..., 0]
    bits = (np.log(np.exp(logits).sum(-1)) - chosen) / np.log(2)
    np.testing.assert_allclose(ours, bits, rtol=0, atol=3 * TOLERANCE)


@pytest.mark.fuzz
def test_the_commands_take_the_length(folder, tmp_path):
    """`--max-length` takes the short factors, and bounds what may be asked for."""
    ids = " ".join(map(str, hf.tokens(1, 20)[0]))
    run = CliRunner().invoke
    arguments = ["generate", ids, "--model", str(folder), "--cache", "exact", "--json"]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        done = run(cli.app, [*arguments, "--max-new-tokens", "10", "--max-length", "32"])
    assert done.exit_code == 0, done.output
    new = greedy(hf.tokens(1, 20), 10)[0]
    assert json.loads(done.stdout)["text"].split() == [str(x) for x in new]
    done = run(cli.app, [*arguments, "--max-new-tokens", "13", "--max-length", "32"])
    assert done.exit_code == 2
    assert "must be at most the model's 32" in done.output
    file = tmp_path / "requests.jsonl"
    file.write_text(json.dumps({"prompt": ids}))
    serve = ["serve", str(file), "--model", str(folder), "--max-length", "32"]
    assert run(cli.app, [*serve, "--max-new-tokens", "10"]).exit_code == 0
    assert run(cli.app, [*serve, "--max-new-tokens", "13"]).exit_code == 2
    for command in ("generate", "serve"):
        extra = ["1 2"] if command == "generate" else [str(file)]
        done = run(cli.app, [command, *extra, "--model", str(folder), "--max-length", "0"])
        assert done.exit_code == 2
        assert "max_length=0 must be" in done.output
