"""Models whose layers have different rotary embeddings: each rotates by its own, everywhere."""

import dataclasses
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from safetensors import safe_open

from tests.models import hf_helpers as hf
from tests.models import tiny
from turbojax import finetune, models
from turbojax.models.decoder import for_length
from turbojax.rotary import LongRopeScaling, Rope

WINDOW, THETA, LOCAL_THETA, AMPLITUDE = 6, 900.0, 7.0, 1.5
SHORT, LONG = (1.0, 1.5, 2.0, 2.5), (2.0, 3.0, 4.0, 5.0)
CONFIG = tiny.config(
    vocab_size=50,
    num_layers=4,
    head_dim=8,
    rope_theta=THETA,
    rope_scaling=LongRopeScaling(SHORT, LONG, 16, AMPLITUDE),
    local_rope_theta=LOCAL_THETA,
    local_windows=(WINDOW, None) * 2,
    qk_norm=True,
    norm_offset=1.0,
)
TOKENS = jnp.asarray(np.random.default_rng(0).integers(50, size=(2, 20)))
POSITIONS = jnp.asarray(np.stack([np.arange(20), np.arange(20) + 30]))


@pytest.fixture(scope="module")
def model() -> models.Transformer:
    return models.Transformer(CONFIG, rngs=nnx.Rngs(0))


def keep(query, key, value, cache, options):
    """Attends to nothing, and has queries and keys take the cache's place."""
    del value, cache, options
    return jnp.zeros_like(query), {"query": query, "key": key}


def heads_of(model, positions) -> dict[str, np.ndarray]:
    """Queries and keys of all layers, ``[layers, B, T, heads, H]``."""
    if isinstance(model, models.Transformer):
        nothing = jnp.zeros(model.config.num_layers)
        call = jax.jit(lambda p: model(TOKENS, positions=p, attend=keep, caches=nothing)[1])
        return jax.tree.map(np.asarray, call(positions))
    nothing = (None,) * model.config.num_layers
    found = jax.jit(lambda p: model.hidden(TOKENS, p, keep, nothing)[1])(positions)
    return {name: np.stack([x[name] for x in found]) for name in ("query", "key")}


def rotated(x, positions, frequencies, amplitude):
    """Pairs i and i + H/2, in float64."""
    angles = positions[:, :, None, None] * frequencies
    first, second = np.split(x.astype(np.float64), 2, -1)
    cos, sin = np.cos(angles) * amplitude, np.sin(angles) * amplitude
    return np.concatenate([first * cos - second * sin, second * cos + first * sin], -1)


@pytest.mark.quick(1, slow=0)
@pytest.mark.parametrize("form", ["transformer", "remat", "decoder", "decoder of short texts"])
def test_each_layer_turns_by_its_own(model, form):
    """Bases, factors and amplitude are those of the layer, whatever runs the layers."""
    factors = LONG
    if form == "remat":
        again = models.Transformer(CONFIG, remat=True, rngs=nnx.Rngs(0))
        nnx.update(again, nnx.state(model))
        model = again
    if form.startswith("decoder"):
        model = models.unstack(model)
    if form.endswith("short texts"):
        model, factors = for_length(model, 16), SHORT
    found, still = heads_of(model, POSITIONS), heads_of(model, jnp.zeros_like(POSITIONS))
    powers = np.arange(0, 8, 2) / 8
    for layer, window in enumerate(CONFIG.local_windows):
        frequencies = LOCAL_THETA**-powers if window else THETA**-powers / np.array(factors)
        amplitude = 1.0 if window else AMPLITUDE
        for name in ("query", "key"):
            unrotated = still[name][layer] / amplitude
            expected = rotated(unrotated, np.asarray(POSITIONS), frequencies, amplitude)
            np.testing.assert_allclose(found[name][layer], expected, rtol=0, atol=2e-5)
            assert np.abs(unrotated).max() > 1


@pytest.mark.fuzz
def test_stacked_layers_and_layers_one_by_one_agree(model):
    """With gradients of both, and of layers that are computed anew."""
    nothing = (None,) * CONFIG.num_layers
    again = models.Transformer(CONFIG, remat=True, rngs=nnx.Rngs(0))

    def loss(logits):
        return jnp.mean(jax.nn.logsumexp(logits, -1))

    def stacked(graph):
        def run(state):
            return loss(nnx.merge(graph, state)(TOKENS, positions=POSITIONS))

        return jax.jit(jax.value_and_grad(run))

    def one_by_one(decoder):
        hidden, _ = decoder.hidden(TOKENS, POSITIONS, models.causal_attention, nothing)
        return loss(decoder.logits(hidden))

    state = nnx.state(model)
    value, gradient = stacked(nnx.graphdef(model))(state)
    remat_value, remat_gradient = stacked(nnx.graphdef(again))(state)
    other_value, other = jax.jit(jax.value_and_grad(one_by_one))(models.unstack(model))
    np.testing.assert_allclose([remat_value, other_value], value, rtol=1e-6)
    jax.tree.map(
        lambda x, y: np.testing.assert_allclose(x, y, rtol=0, atol=1e-6), gradient, remat_gradient
    )
    kernel = gradient["blocks"]["attention"]["k_proj"]["kernel"].get_value()
    for layer, params in enumerate(other.layers):
        wanted = params["attention"]["k_proj"]["kernel"]
        np.testing.assert_allclose(kernel[layer], wanted, rtol=0, atol=1e-6)
    assert np.abs(kernel).max() > 1e-4


def test_the_rope_of_a_layer_follows_its_window():
    config = dataclasses.replace(CONFIG, rope_scaling=None)
    local, usual = Rope(8, LOCAL_THETA), Rope(8, THETA)
    assert [config.rope_of(i) for i in range(4)] == [local, usual, local, usual]
    assert config.ropes == (local, usual)
    # Also where the window is too long to hide anything.
    assert dataclasses.replace(config, max_length=4).rope_of(0) == local
    assert dataclasses.replace(config, local_windows=()).ropes == (usual,)
    assert dataclasses.replace(config, local_windows=(6,) * 4).ropes == (local,)
    assert dataclasses.replace(config, local_rope_theta=None).ropes == (usual,)
    part = dataclasses.replace(config, rotary_dim=4)
    assert part.rope_of(0) == Rope(8, LOCAL_THETA, 4)
    assert {name: len(shape.ropes) for name, shape in models.SHAPES.items()} == {
        name: 1 + (name == "gemma-3-4b") for name in models.SHAPES
    }


@pytest.mark.parametrize(
    ("theta", "message"),
    [
        (0.0, "local_rope_theta=0.0 must be positive"),
        (float("nan"), "local_rope_theta=nan must be"),
        ("10000", "local_rope_theta is a str"),
    ],
)
def test_bad_bases(theta, message):
    with pytest.raises((TypeError, ValueError), match=message):
        dataclasses.replace(CONFIG, local_rope_theta=theta)


def test_longer_contexts_leave_windows_as_they_are():
    longer = finetune.for_context(CONFIG, 256)
    assert (longer.max_length, longer.local_rope_theta) == (256, LOCAL_THETA)
    assert longer.rope_theta > THETA


@pytest.mark.slow
def test_sessions_of_one_rope_say_nothing_of_a_second(tmp_path, model):
    """So those from before there was the field can be read; others are told apart."""
    one = dataclasses.replace(CONFIG, rope_scaling=None, local_rope_theta=None)
    decoder = dataclasses.replace(models.unstack(model), config=one)
    session = models.start(decoder, np.asarray(TOKENS), max_length=24)
    models.save_session(tmp_path / "one", session)
    with safe_open(tmp_path / "one", "np") as file:
        held = json.loads(file.metadata()["content"])
    assert "rope_theta" in json.dumps(held)
    assert "local_rope_theta" not in json.dumps(held)
    models.load_session(tmp_path / "one", decoder)
    two = dataclasses.replace(one, local_rope_theta=LOCAL_THETA)
    with pytest.raises(ValueError, match=r"of another model: local_rope_theta=None, not 7\.0"):
        models.load_session(tmp_path / "one", dataclasses.replace(decoder, config=two))


def test_local_frequencies_that_are_not_finite(tmp_path):
    hf.write("gemma3", tmp_path)
    file = hf.config("gemma3")
    file["rope_parameters"]["sliding_attention"]["rope_theta"] = 1e-300
    (tmp_path / "config.json").write_text(json.dumps(file))
    with pytest.raises(ValueError, match=r"config.json: .*local_rope_theta=1e-300 .* finite rot"):
        models.load_decoder(tmp_path)
