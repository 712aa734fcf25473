"""Models of every family beside transformers itself: logits, caches, folders both ways."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from tests.models import hf_helpers as hf
from tests.models import moe_helpers as moe
from tests.recordings import parity_texts as texts
from turbojax import models

pytestmark = pytest.mark.slow

TOLERANCE = texts.TOLERANCE
FAMILIES = texts.FAMILIES
# The shortest text, and one for which LongRoPE has other factors.
SHORTER = [("gemma2", 1), ("phi3-longrope", 20)]
BATCH = 3


@pytest.fixture(scope="module")
def theirs():
    """What transformers computes: imported here, because it may not be installed."""
    from tests.models import torch_helpers

    return torch_helpers


@pytest.fixture(scope="module")
def load(folder):
    return functools.cache(lambda name, **options: models.load(folder(name), **options))


def program(graph):
    """The forward pass as a function of the parameters, quick to compile."""

    def run(state, ids, mask):
        return nnx.merge(graph, state)(ids, attention_mask=mask)

    return jax.jit(run, compiler_options={"xla_backend_optimization_level": 0})


def forward(model: models.Transformer, ids) -> np.ndarray:
    graph, state = nnx.split(model)
    return np.asarray(program(graph)(state, jnp.asarray(ids), None))


@pytest.mark.quick(slow=1)
@pytest.mark.parametrize(("name", "length"), [*((name, 60) for name in hf.VARIANTS), *SHORTER])
def test_logits(load, theirs, name, length):
    model = load(name)
    ids = hf.tokens(BATCH, length)
    expected = theirs.logits(theirs.reference(name), ids)
    assert 0.8 < expected.std() < 3
    np.testing.assert_allclose(forward(model, ids), expected, rtol=0, atol=TOLERANCE)


@pytest.mark.quick(slow=1)
@pytest.mark.parametrize("name", FAMILIES)
def test_padding_on_either_side(load, theirs, name):
    length = 40
    model = load(name)
    ids = hf.tokens(BATCH, length)
    masks = [hf.padding_mask((40, 23, 1), length, side) for side in ("left", "right")]
    graph, state = nnx.split(model)
    run = program(graph)
    for mask in masks:
        real = mask.astype(bool)
        expected = theirs.logits(theirs.reference(name), ids, mask)[real]
        for padding in (0, 99):
            padded = jnp.asarray(np.where(real, ids, padding))
            logits = np.asarray(run(state, padded, jnp.asarray(mask)))
            np.testing.assert_allclose(logits[real], expected, rtol=0, atol=TOLERANCE)


@pytest.mark.quick(slow=1)
@pytest.mark.parametrize("name", hf.VARIANTS)
def test_transformers_reads_what_is_saved(load, theirs, tmp_path, name):
    model = load(name)
    models.save(model, tmp_path)
    assert models.load(tmp_path).config == model.config
    again, ids = theirs.load(tmp_path), hf.tokens(2, 50)
    np.testing.assert_array_equal(
        theirs.logits(again, ids), theirs.logits(theirs.reference(name), ids)
    )


@pytest.mark.quick(slow=1)
@pytest.mark.parametrize("name", FAMILIES[::2])
def test_bfloat16_is_as_close_as_that_of_transformers(folder, load, theirs, name):
    import torch

    ids = hf.tokens(4, 40)
    exact = theirs.logits(theirs.reference(name), ids)
    rounded = theirs.load(folder(name), torch.bfloat16)
    error = theirs.logits(rounded, ids, dtype=torch.bfloat16) - exact
    model = load(name, dtype=jnp.bfloat16)
    ours = forward(model, ids) - exact
    # Both round after every step; the steps are not the same, so neither are the errors.
    assert ours.std() < 1.25 * error.std()
    assert 1e-3 < error.std() < 0.5


def same_bits(one, other) -> bool:
    return (one.dtype, one.shape) == (other.dtype, other.shape) and (
        np.asarray(one).tobytes() == np.asarray(other).tobytes()
    )


def holds(folder, tensors) -> bool:
    """Whether a model's arrays are these, whatever the files they came from."""
    leaves = [jax.tree.leaves(nnx.state(models.load(x))) for x in (folder, tensors)]
    return all(map(same_bits, *leaves)) and len(leaves[0]) == len(leaves[1])


@pytest.mark.quick(slow=1)
@pytest.mark.parametrize("name", list(hf.VARIANTS)[::3])
def test_what_transformers_writes_is_what_the_tests_write(theirs, tmp_path, name):
    """In one file and in several."""
    hf.write(name, tmp_path / "tests")
    for folder, options in (("one", {}), ("many", {"max_shard_size": "60KB"})):
        theirs.reference(name).save_pretrained(tmp_path / folder, **options)
        assert models.load(tmp_path / folder).config == models.load(tmp_path / "tests").config
        assert holds(tmp_path / folder, tmp_path / "tests")
    assert len(list((tmp_path / "many").glob("*.safetensors"))) > 3


@pytest.mark.quick(slow=1)
@pytest.mark.parametrize("name", hf.VARIANTS)
def test_transformers_reads_what_the_tests_write(theirs, tmp_path, name):
    expected = theirs.reference(name).state_dict()
    for limit in (None, 60_000):
        folder = hf.write(name, tmp_path / str(limit), shard_bytes=limit)
        found = theirs.whole_state(folder)
        assert found.keys() == expected.keys()
        assert all(same_bits(found[key].numpy(), x.numpy()) for key, x in expected.items())


@pytest.mark.quick(slow=1)
@pytest.mark.parametrize("name", hf.VARIANTS)
def test_transformers_reads_every_bit_that_is_saved(theirs, tmp_path, name):
    model = models.load(hf.write(name, tmp_path / "in"))
    expected = theirs.reference(name).state_dict()
    for limit in (1 << 30, 60_000):
        out = tmp_path / str(limit)
        models.save(model, out, max_shard_bytes=limit)
        found = theirs.whole_state(out)
        assert found.keys() == expected.keys()
        assert all(same_bits(found[key].numpy(), x.numpy()) for key, x in expected.items())


@pytest.mark.quick(slow=1)
@pytest.mark.parametrize("name", moe.CONFIGS)
def test_logits_and_greedy_texts_of_experts(theirs, name, tmp_path):
    decoder = moe.load(name, tmp_path)
    reference = theirs.load(tmp_path)
    for text in (moe.tokens(3, 40), moe.tokens(1, 1, seed=4)):
        want = theirs.logits(reference, text)
        assert 0.8 < want.std() < 3
        assert np.abs(moe.logits(decoder, text) - want).max() < TOLERANCE
    prompts = moe.tokens(2, 12, seed=2)
    want = theirs.greedy(reference, prompts, np.ones_like(prompts), 8)
    got = models.generate(decoder, prompts, max_new_tokens=8, cache="exact")
    np.testing.assert_array_equal(got, want)


@pytest.mark.quick(slow=1)
@pytest.mark.parametrize("name", moe.CONFIGS)
def test_folders_of_experts(theirs, name, tmp_path):
    """What `transformers` writes is read, and all of what is written here."""
    decoder = moe.load(name, tmp_path / "ours")
    reference = theirs.load(tmp_path / "ours")
    reference.save_pretrained(tmp_path / "theirs")
    again = models.load_decoder(tmp_path / "theirs")
    assert again.config == decoder.config
    text = moe.tokens(1, 9)
    np.testing.assert_array_equal(moe.logits(again, text), moe.logits(decoder, text))
    model = models.load(tmp_path / "ours")
    models.save(model, tmp_path / "saved")
    # All tensors, and no others.
    found = theirs.whole_state(tmp_path / "saved")
    for key, x in reference.state_dict().items():
        np.testing.assert_array_equal(found[key].numpy(), x.numpy())
    assert (
        np.abs(np.asarray(model(jnp.asarray(text))) - moe.logits(decoder, text)).max() < TOLERANCE
    )


PROMPTS = texts.PROMPTS


@pytest.fixture(scope="module")
def ours(decoder):
    """Logits after each prompt and after each of the tokens that follow but the last."""

    @functools.cache
    def compute(name: str) -> np.ndarray:
        ids, longest = texts.cached(), int(PROMPTS.max())
        model = decoder(name)
        with texts.border(model.config):
            session = models.start(
                model,
                jnp.asarray(ids[:, :longest]),
                max_length=longest + texts.NEW,
                lengths=jnp.asarray(PROMPTS),
                cache="exact",
            )
        return np.asarray(models.score(session, jnp.asarray(texts.continued(ids))))

    return compute


# `test_parity_cache.py` has the others, against what is recorded.
@pytest.mark.fuzz
@pytest.mark.parametrize("name", ["llama3.1", "qwen2-window", "gemma2", "gemma3"])
def test_as_one_pass_over_the_whole_text(ours, theirs, name):
    expected = texts.after_prompts(theirs.logits(theirs.reference(name), texts.cached()))
    np.testing.assert_allclose(ours(name), expected, rtol=0, atol=texts.TOLERANCE)


@pytest.mark.quick(slow=1)
@pytest.mark.parametrize("name", ["mistral", "gemma2", "gemma3", "gemma3-odd"])
def test_as_transformers_does_with_its_own_cache(ours, theirs, name):
    """Its prompt and its steps, left-padded as it wants them; the same prompts without padding."""
    ids, longest = texts.cached(), int(PROMPTS.max())
    mask = hf.padding_mask(PROMPTS, longest, "left")
    prompts = np.zeros_like(mask)
    for row, n in enumerate(PROMPTS):
        prompts[row, longest - n :] = ids[row, :n]
    steps = theirs.steps(theirs.reference(name), prompts, mask, texts.continued(ids))
    np.testing.assert_allclose(ours(name), steps, rtol=0, atol=texts.TOLERANCE)
