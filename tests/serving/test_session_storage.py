"""Sessions and the caches of a model on disk: generation goes on as if nothing had been stored."""

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from tests.contracts.storage_helpers import KINDS, assert_same_contents, rewrite
from turbojax import models
from turbojax.caches import stored_file as files
from turbojax.models.generation.caching import ModelCaches, init_caches
from turbojax.models.generation.saving import load_cache, load_session, save_cache, save_session
from turbojax.rotary import LongRopeScaling

CONFIG = models.TransformerConfig(
    vocab_size=64,
    hidden_size=32,
    intermediate_size=48,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=16,
    max_length=256,
)
PROMPTS = np.random.default_rng(3).integers(0, 64, (2, 40))


def _model(config=CONFIG, seed=0, dtype=jnp.float32):
    # Compute in float32: tokens drawn from a random model differ, so that a wrong cache shows.
    return models.random_decoder(config, dtype=dtype, seed=seed)


@pytest.fixture(scope="module")
def model():
    return _model()


def _started(model, kind, max_length=80):
    return models.start(
        model,
        jnp.asarray(PROMPTS),
        max_length=max_length,
        cache=kind,
        lengths=jnp.array([40, 23]),
    )


def _next(session, count=24, **options):
    return np.stack(list(models.stream(session, count, **options)))


@pytest.mark.quick(slow=2)
@pytest.mark.parametrize("kind", ["exact", "turbo4"])
def test_generation_goes_on_from_a_file(tmp_path, model, kind):
    path = tmp_path / "session"
    session = _started(model, kind)
    for token in (5, 9):  # a little way into the answer
        session = session.step(jnp.array([token, token + 1]))
    save_session(path, session, metadata={"prompt": "numbers"})
    loaded, metadata = load_session(path, model)
    assert metadata == {"prompt": "numbers"}
    assert (loaded.longest, loaded.caches.max_length) == (42, 80)
    np.testing.assert_array_equal(loaded.logits, session.logits)
    sampling = models.Sampling(temperature=1.0, top_k=20, seed=7)
    sampled = _next(loaded, sampling=sampling)
    np.testing.assert_array_equal(sampled, _next(session, sampling=sampling))
    assert len(np.unique(sampled)) > 8
    greedy = _next(load_session(path, model)[0])
    session = _started(model, kind)
    for token in (5, 9):
        session = session.step(jnp.array([token, token + 1]))
    np.testing.assert_array_equal(greedy, _next(session))


@pytest.mark.slow
def test_a_session_may_get_more_room(tmp_path, model):
    save_session(tmp_path / "session", _started(model, "exact", 41))
    session, _ = load_session(tmp_path / "session", model, max_length=80)
    np.testing.assert_array_equal(_next(session), _next(_started(model, "exact", 80)))
    with pytest.raises(ValueError, match="max_length=257 must be at most the model's 256"):
        load_session(tmp_path / "session", model, max_length=257)
    with pytest.raises(ValueError, match="max_length=39"):
        load_session(tmp_path / "session", model, max_length=39)


@pytest.mark.slow
def test_a_session_takes_the_model_it_was_made_with(tmp_path, model):
    path = tmp_path / "session"
    save_session(path, _started(model, "turbo4"))
    with pytest.raises(ValueError, match=r"session is of a model of this shape with other weights"):
        load_session(path, _model(seed=1))
    with pytest.raises(ValueError, match="dtype=float32, not bfloat16"):
        load_session(path, _model(dtype=jnp.bfloat16))
    for change in ({"num_layers": 3}, {"rope_theta": 5000.0}, {"num_kv_heads": 4}):
        name = next(iter(change))
        with pytest.raises(ValueError, match=f"is of another model: {name}="):
            load_session(path, _model(dataclasses.replace(CONFIG, **change)))
    with pytest.raises(ValueError, match=r"holds a session: tj.models.load_session reads it"):
        load_cache(path)


@pytest.mark.fuzz
def test_a_stacked_and_a_quantized_model_have_sessions(tmp_path):
    path = tmp_path / "session"
    shallow = dataclasses.replace(CONFIG, num_layers=1)
    llama = models.Transformer(shallow, rngs=nnx.Rngs(0))
    save_session(path, _started(llama, "kv4"))
    loaded, _ = load_session(path, llama)
    np.testing.assert_array_equal(_next(loaded, 5), _next(_started(llama, "kv4"), 5))
    config = dataclasses.replace(shallow, hidden_size=128, intermediate_size=128, head_dim=32)
    quantized = models.random_quantized_decoder(config)
    save_session(path, _started(quantized, "kv4"))
    loaded, _ = load_session(path, quantized)
    np.testing.assert_array_equal(_next(loaded, 5), _next(_started(quantized, "kv4"), 5))
    with pytest.raises(ValueError, match="class=QuantizedDecoder, not Decoder"):
        load_session(path, _model(config))


@pytest.mark.quick(1, slow=0)
@pytest.mark.parametrize("kind", ["exact", "mixed", "turbo4"])
def test_caches_of_a_model_come_back(tmp_path, model, kind):
    path = tmp_path / "caches"
    caches = _started(model, KINDS[kind]).caches
    save_cache(path, caches)
    loaded, _ = load_cache(path, like=init_caches(model, 2, 120, KINDS[kind]))
    assert isinstance(loaded, ModelCaches)
    assert loaded.max_length == 120
    for one, other in zip(loaded.layers, caches.layers, strict=True):
        assert_same_contents(one, other)
    deeper = dataclasses.replace(CONFIG, num_layers=3)
    with pytest.raises(ValueError, match=r"with 2 layers, `like` is one of kind 'model' with 3"):
        load_cache(path, like=init_caches(_model(deeper), 2, 80, KINDS[kind]))
    with pytest.raises(ValueError, match="kind 'model'"):
        load_cache(path, like=caches.layers[0])
    with pytest.raises(ValueError, match="holds no session but a cache"):
        load_session(path, model)


def test_sessions_are_checked(tmp_path, model):
    with pytest.raises(TypeError, match="session is a ModelCaches"):
        save_session(tmp_path / "session", _started(model, "exact").caches)
    save_session(tmp_path / "session", _started(model, "exact"))

    def refused(match, arrays):
        rewrite(tmp_path / "session", tmp_path / "other", arrays=arrays)
        with pytest.raises(ValueError, match=match):
            load_session(tmp_path / "other", model)

    refused("logits is float32", lambda x: x.update(logits=x["logits"][:, 1:].copy()))
    refused(
        r"lengths=\[41, 23\] must be \[40, 23\]",
        lambda x: x.update(lengths=np.array([41, 23], np.int32)),
    )


@pytest.mark.parametrize("place", [(0, 0), (1, 17), (31, 31)])
def test_a_change_of_one_weight_is_noticed(tmp_path, model, place):
    path = tmp_path / "session"
    save_session(path, _started(model, "exact"))
    layer = {**model.layers[0], "mlp": {**model.layers[0]["mlp"]}}
    kernel = layer["mlp"]["up_proj"]["kernel"]
    layer["mlp"]["up_proj"] = {"kernel": kernel.at[place].multiply(1.0001)}
    other = dataclasses.replace(model, layers=(layer, *model.layers[1:]))
    with pytest.raises(ValueError, match="with other weights"):
        load_session(path, other)
    swapped = dataclasses.replace(model, norm=model.norm, embedding=model.embedding[::-1])
    with pytest.raises(ValueError, match="with other weights"):
        load_session(path, swapped)


@pytest.mark.slow
def test_the_models_longest_sequence_may_be_another(tmp_path, model):
    path = tmp_path / "session"
    save_session(path, _started(model, "exact"))
    longer = dataclasses.replace(model, config=dataclasses.replace(CONFIG, max_length=512))
    session, _ = load_session(path, longer, max_length=300)
    np.testing.assert_array_equal(_next(session), _next(_started(model, "exact")))
    shorter = dataclasses.replace(model, config=dataclasses.replace(CONFIG, max_length=70))
    with pytest.raises(ValueError, match="caches for 80 tokens, more than the model's 70"):
        load_session(path, shorter)
    load_session(path, shorter, max_length=70)
    scaling = LongRopeScaling((1.0,) * 8, (2.0,) * 8, 64)
    config = dataclasses.replace(CONFIG, rope_scaling=scaling)
    with pytest.warns(UserWarning, match="take the long factors"):
        save_session(path, _started(dataclasses.replace(model, config=config), "exact"))
    config = dataclasses.replace(config, max_length=512)
    load_session(path, dataclasses.replace(model, config=config))
    with pytest.raises(ValueError, match="longrope=long, not short"):
        load_session(path, dataclasses.replace(model, config=config), max_length=64)


# What models were described by when the first sessions were stored.
FIRST_FIELDS = (
    *("vocab_size", "hidden_size", "intermediate_size", "num_layers", "num_heads", "num_kv_heads"),
    *("head_dim", "rope_theta", "norm_eps", "tie_embeddings", "family", "activation", "qkv_bias"),
    *("output_bias", "mlp_bias", "qk_norm", "rope_scaling", "rotary_dim", "attention_scale"),
    *("attention_soft_cap", "final_soft_cap", "local_windows", "embedding_scale", "norm_offset"),
    "post_norms",
)


def test_a_description_says_no_more_than_before(tmp_path, model):
    """Of a model without what came later, so that earlier versions' sessions go on."""
    save_session(tmp_path / "session", _started(model, "exact"))
    found = []
    rewrite(
        tmp_path / "session",
        tmp_path / "copy",
        change=lambda content: found.extend(content["description"]["model"]["config"]),
    )
    assert set(found) == set(FIRST_FIELDS)


@pytest.mark.parametrize("kind", ["session", "model"])
def test_a_description_that_lacks_something_names_the_file(tmp_path, model, kind):
    path = tmp_path / "stored"
    files.write(path, {"kind": kind}, {"x": np.zeros(3)})
    with pytest.raises(ValueError, match=r"stored is damaged: its description lacks '\w+'"):
        load_session(path, model) if kind == "session" else load_cache(path)
