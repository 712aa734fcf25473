"""Text scored through caches: against one pass, step by step, and numpy."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.tools.evaluation_helpers import BATCH, CONFIG, CONTEXT, PROMPT, decoder, tokens
from turbojax import evaluation, models
from turbojax.caches.exact import api
from turbojax.evaluation import decoding, scoring


@pytest.fixture(autouse=True)
def _short_chunks(monkeypatch):
    monkeypatch.setattr(decoding, "STEPS", 10)  # 24 targets: the last chunk is shorter


@pytest.fixture(scope="module")
def model():
    return decoder()


def scored(model, name, windows=None, **options):
    method = evaluation.method(name, model.config)
    given = {"prompt": PROMPT, "batch_size": BATCH, **options}
    return evaluation.score(model, tokens() if windows is None else windows, method, **given)


def logits_of(model, windows, cache):
    """Of the targets after the prompt, float64 ``[n, D, V]``, one step after the other."""
    session = models.start(model, windows[:, :PROMPT], max_length=CONTEXT, cache=cache)
    return np.asarray(models.score(session, windows[:, PROMPT:]), np.float64)


def log2_p(logits):
    shifted = logits - logits.max(axis=-1, keepdims=True)
    return (shifted - np.log(np.exp(shifted).sum(axis=-1, keepdims=True))) / np.log(2)


@pytest.mark.fuzz
def test_scores_are_those_of_single_steps(model):
    windows = tokens()[:BATCH]
    found = scored(model, "kv4", windows)
    exact, ours = (log2_p(logits_of(model, windows, x)) for x in ("exact", "kv4"))
    at = windows[:, PROMPT:, None]
    for name, wanted in {
        "bits": -np.take_along_axis(ours, at, axis=-1)[..., 0],
        "exact_bits": -np.take_along_axis(exact, at, axis=-1)[..., 0],
        "divergence": np.sum(2**exact * (exact - ours), axis=-1),
    }.items():
        value = getattr(found, name)
        assert (value.shape, value.dtype) == ((BATCH, CONTEXT + 1 - PROMPT), np.float32)
        np.testing.assert_allclose(value, wanted, rtol=2e-5, atol=2e-5, err_msg=name)
    np.testing.assert_array_equal(found.choices, ours.argmax(axis=-1))
    np.testing.assert_array_equal(found.exact_choices, exact.argmax(axis=-1))
    assert found.choices.dtype == np.int32
    assert np.mean(found.divergence) > 1e-4  # and not the exact cache in disguise


@pytest.mark.slow
def test_scores_are_those_of_one_pass():
    """Of one layer, so that a prompt's first token, which attends in e4m3, reaches no other.

    Whatever the batch, of which the last is filled up.
    """
    model = decoder(num_layers=1)
    found = scored(model, "kv4", prompt=1)
    for cache, bits in {"kv4": found.bits, "exact": found.exact_bits}.items():
        once = models.token_bits(model, tokens(), cache=cache)
        np.testing.assert_allclose(bits[:, 1:], once[:, 1:], rtol=1e-4, atol=1e-4)
    assert np.abs(found.bits - found.exact_bits).mean() > 1e-2


@pytest.mark.slow
def test_the_exact_method_costs_nothing_and_all_repeats(model, monkeypatch):
    first = scored(model, "exact")
    np.testing.assert_array_equal(first.bits, first.exact_bits)
    np.testing.assert_array_equal(first.choices, first.exact_choices)
    assert not first.divergence.any()
    shared = evaluation.ExactRun(model, tokens(), prompt=PROMPT, batch_size=BATCH)
    kept = scored(model, "kv4", exact=shared)
    monkeypatch.setattr(scoring, "_MOST_KEPT", 0)
    for again in (scored(model, "kv4", exact=shared), scored(model, "kv4")):
        for field in dataclasses.fields(kept):
            np.testing.assert_array_equal(getattr(kept, field.name), getattr(again, field.name))
    np.testing.assert_array_equal(kept.exact_bits, first.bits)


@pytest.mark.slow
def test_bytes_are_those_allocated(model):
    found = scored(model, "kv4")
    caches = models.init_caches(model, 1, CONTEXT, "kv4")
    assert found.cache_bytes == caches.nbytes
    held = 4 * CONFIG.num_layers * CONFIG.num_kv_heads * CONFIG.head_dim * CONTEXT
    assert held <= found.exact_cache_bytes < held * 1.01
    assert scoring.cache_bytes(model, CONTEXT, "exact") > 1.9 * found.exact_cache_bytes


@pytest.mark.fuzz
def test_nan_stays_in_its_window(model):
    """And where there is no next token, none agrees."""
    windows = np.where(tokens() == 7, 8, tokens())
    plain = scored(model, "kv4", windows)
    windows[1, PROMPT + 5] = 7
    broken = dataclasses.replace(model, embedding=model.embedding.at[7].set(jnp.nan))
    found = scored(broken, "kv4", windows)
    assert np.isnan(found.bits[1, 6:]).all()
    assert np.isnan(found.divergence[1, 6:]).all()
    assert (found.choices[1, 6:] == -1).all()
    assert np.isfinite(found.bits[[0, 2]]).all()
    np.testing.assert_array_equal(found.bits[0], plain.bits[0])
    row = evaluation.text_row(found, np.array(["a", "b", "c"]), "byte")
    assert np.isnan(row["cost"])
    assert row["same_greedy_choice"] < 0.9


@pytest.mark.parametrize(
    ("windows", "options", "message"),
    [
        (np.zeros((2, 3, 4), int), {}, r"tokens.shape=\(2, 3, 4\) must be"),
        (np.zeros((2, 9), int), {"prompt": 9}, "prompt=9 must be at most T, the window's 8"),
        (np.zeros((2, 9), int), {"prompt": 0}, "prompt=0 must be at least 1"),
        (np.full((2, 9), 256), {"prompt": 2}, "within 0..255"),
        (np.zeros((2, 600), int), {"prompt": 2}, "512"),
    ],
)
def test_refusals(model, windows, options, message):
    with pytest.raises(ValueError, match=message):
        scored(model, "exact", windows, **options)


def test_other_windows_are_refused(model):
    exact = evaluation.ExactRun(model, tokens(), prompt=PROMPT)
    with pytest.raises(ValueError, match="exact is of other windows"):
        scored(model, "kv4", tokens()[:2], exact=exact)
    other = evaluation.ExactRun(decoder(), tokens(), prompt=PROMPT)
    with pytest.raises(ValueError, match="exact is of another model"):
        scored(model, "kv4", exact=other)
    with pytest.raises(TypeError, match="model is a str"):
        evaluation.score("model", tokens(), evaluation.method("exact", CONFIG), prompt=PROMPT)


def test_programs_are_compiled_alike(monkeypatch):
    """XLA knows the option that takes timing out of its choices, and is told on a GPU alone."""
    assert decoding.accepted_options(decoding._ALIKE) == decoding._ALIKE
    assert decoding._options() is None
    given = []
    monkeypatch.setattr(decoding, "_options", lambda: given.append(1) or decoding._ALIKE)
    double = decoding.repeatable(static_argnames="factor")(lambda x, *, factor: x * factor)
    assert not given  # a decorator looks for no device
    assert double(jnp.float32(3), factor=2.0) == double(jnp.float32(6), factor=1.0) == 6
    assert given == [1]


@pytest.mark.fuzz
def test_what_decodes_is_what_repeats(model, monkeypatch):
    """Exact caches and those that are dequantized: cuDNN, which would be chosen, does not."""
    asked, choose = [], api._choose_decode

    def recorded(query, cache, options, **more):
        asked.append(options.implementation)
        return choose(query, cache, options, **more)

    monkeypatch.setattr(api, "_choose_decode", recorded)
    windows = tokens()[:1, :35]  # a size of its own, so that programs are traced here
    for name in ("exact", "kivi4"):
        evaluation.score(model, windows, evaluation.method(name, CONFIG), prompt=21)
        evaluation.layer_errors(model, windows, evaluation.method(name, CONFIG), prompt=21)
    assert len(asked) >= 4
    assert set(asked) == {"repeatable"}


@pytest.mark.fuzz
def test_int4_weights_are_those_of_both(model):
    """The exact cache is the same model's: what its weights cost is not counted."""
    sizes = {"hidden_size": 128, "intermediate_size": 128, "head_dim": 32, "num_layers": 1}
    config = dataclasses.replace(CONFIG, **sizes)
    quantized = models.random_quantized_decoder(config, dtype=jnp.float32)
    windows = tokens()[:BATCH]
    assert not scored(quantized, "exact", windows).divergence.any()
    found = scored(quantized, "kv4", windows)
    once = models.token_bits(quantized, windows)[:, PROMPT - 1 :]
    assert np.abs(found.exact_bits - once).mean() < 1e-2  # e4m3 of tokens rounds one way or another
    assert 1e-6 < np.mean(found.divergence) < 0.5


@pytest.mark.fuzz
def test_prompts_attend_as_the_method_says(model):
    """Pooled, and through layers of which the first and last are exact."""
    windows = tokens()[:BATCH]
    pooled = scored(model, "exact:policy=topk,pool_block=8", windows)
    assert np.mean(pooled.divergence) > 1e-5
    everything = scored(model, "exact:pooled=1,pool_block=8", windows)
    np.testing.assert_allclose(everything.bits, everything.exact_bits, atol=1e-3)
    edges, all_layers = (scored(model, f"kv4{x}", windows) for x in (":uncompressed_layers=1", ""))
    assert np.mean(edges.divergence) < np.mean(all_layers.divergence)
    assert edges.cache_bytes > all_layers.cache_bytes


@pytest.mark.mesh
@pytest.mark.fuzz
def test_a_split_model_scores_alike(model):
    mesh = jax.make_mesh((2, 2), ("data", "model"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
    from turbojax.sharding import Axes

    split = models.shard(model, Axes.of(mesh))
    found, one = scored(split, "kv4"), scored(model, "kv4")
    np.testing.assert_allclose(found.bits, one.bits, atol=5e-2)
    np.testing.assert_allclose(found.exact_bits, one.exact_bits, atol=1e-3)
    assert found.cache_bytes == one.cache_bytes
