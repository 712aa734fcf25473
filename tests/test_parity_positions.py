"""Positions far into a text: angles and logits are still those that transformers computes.

An angle is a product of float32 numbers, position and frequency. At 100,000 tokens it has a
rounding unit of 0.008 radians, and a frequency that is one unit off moves it by as much again: two
programs agree there if they round the same way, and not otherwise.
"""

import functools

import hf_helpers as hf
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
import transformers
from family_helpers import PUBLISHED
from flax import nnx
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding
from transformers.models.phi3.modeling_phi3 import Phi3RotaryEmbedding

from turbojax import models
from turbojax.models import LlamaConfig

TOLERANCE = 1e-4
FAMILIES = ("llama3.1", "mistral", "qwen2.5-yarn", "qwen3", "phi3-longrope", "gemma2")
FAR = 100_000
# Rotary embeddings of published models, and some whose heads are no power of two.
ROTARIES = {
    **{name: keys for name, (keys, _, _) in PUBLISHED.items()},
    "heads of 80": {**PUBLISHED["Llama-2-7b"][0], "head_dim": 80},
    "linear": {
        **PUBLISHED["Llama-2-7b"][0],
        "rope_scaling": {"rope_type": "linear", "factor": 3.0},
    },
}


def rotary_of(keys: dict):
    config = transformers.AutoConfig.for_model(**keys)
    make = Phi3RotaryEmbedding if keys["model_type"] == "phi3" else LlamaRotaryEmbedding
    return make(config)


@pytest.mark.parametrize("name", ROTARIES)
def test_frequencies_are_rounded_as_transformers_rounds_them(name):
    """All but a few to the bit: torch's power is one unit off for one number in a hundred."""
    rope = LlamaConfig.from_hf(ROTARIES[name]).rope
    theirs = rotary_of(ROTARIES[name])
    pairs = [(rope.frequencies(np.float32), theirs.inv_freq.numpy())]
    if theirs.rope_type == "longrope":
        theirs(torch.zeros(1), torch.tensor([[FAR]]))
        assert not np.array_equal(theirs.inv_freq, theirs.original_inv_freq)
        pairs = [
            (rope.frequencies(np.float32, FAR), theirs.inv_freq.numpy()),
            (rope.frequencies(np.float32, 100), theirs.original_inv_freq.numpy()),
        ]
    for ours, expected in pairs:
        assert ours.dtype == np.float32
        apart = np.abs(ours.view(np.int32) - expected.view(np.int32))
        assert apart.max() <= 1
        assert np.mean(apart == 0) >= 0.95


@pytest.mark.parametrize("name", ROTARIES)
@pytest.mark.parametrize("first", [700, FAR])
def test_angles_far_into_a_text(name, first):
    rope = LlamaConfig.from_hf(ROTARIES[name]).rope
    rotary = rotary_of(ROTARIES[name])
    positions = np.arange(first, first + 100)[None]
    ours = rope.angles(jnp.asarray(positions), int(positions.max()) + 1)
    cos, sin = (x.numpy() for x in rotary(torch.zeros(1), torch.tensor(positions)))
    expected = (rotary.inv_freq.numpy() * positions[0, :, None].astype(np.float32))[None, :, None]
    # The rare frequencies that differ do so by a unit: the angle by position times that, and by
    # half a unit of its own from rounding the product.
    exact = rope.frequencies(np.float32, int(positions.max()) + 1) == rotary.inv_freq.numpy()
    np.testing.assert_array_equal(np.asarray(ours)[..., exact], expected[..., exact])
    bound = 2 * np.spacing(np.abs(expected)) + positions[0, None, :, None, None][0] * np.spacing(
        rotary.inv_freq.numpy()
    )
    assert np.all(np.abs(np.asarray(ours) - expected) <= bound)
    x = np.random.default_rng(0).standard_normal((1, 100, 1, rope.head_dim)).astype(np.float32)
    half = rope.channels // 2
    both = np.concatenate([x[..., half : 2 * half], x[..., :half]], -1)
    sign = np.repeat([-1.0, 1.0], half).astype(np.float32)
    turned = x[..., : 2 * half] * cos[:, :, None] + both * sign * sin[:, :, None]
    out = np.asarray(rope.rotate(jnp.asarray(x), ours))[..., : 2 * half]
    same = np.concatenate([exact, exact])
    # Sine and cosine are a few units apart, of vectors of up to 4 * 1.2 in size.
    np.testing.assert_allclose(out[..., same], turned[..., same], rtol=0, atol=3e-6)


@pytest.mark.parametrize("scaling", ["Llama-2-7b", "Llama-3.2-1B", "heads of 80"])
@pytest.mark.parametrize("transform", ["eager", "jit", "vmap", "scan"])
def test_angles_next_to_float64(scaling, transform):
    """Within what float32 numbers allow, and the same bits in every transform."""
    rope = LlamaConfig.from_hf(ROTARIES[scaling]).rope
    positions = np.array([[0, 1, 700, 9_999], [FAR, FAR + 1, 2**17 - 1, 131_072]], np.int32)
    ours = np.asarray(TRANSFORMS[transform](rope.angles)(jnp.asarray(positions)))
    np.testing.assert_array_equal(ours, np.asarray(rope.angles(jnp.asarray(positions))))
    exact = positions[:, :, None, None] * rope.frequencies()
    # The exponent -2i/R is rounded to float32, which the power of theta multiplies with ln(theta);
    # then the power, its reciprocal, up to five steps of a scaling, and the product.
    unit = 2.0**-24
    relative = unit * (np.log(rope.theta) + 1 + 1 + 5 + 1)
    assert np.all(np.abs(ours - exact) <= relative * exact)


TRANSFORMS = {
    "eager": lambda f: f,
    "jit": jax.jit,
    "vmap": lambda f: lambda p: jax.vmap(lambda row: f(row[None])[0])(p),
    "scan": lambda f: (
        lambda p: jax.lax.scan(lambda carry, row: (carry, f(row[None])[0]), None, p)[1]
    ),
}


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    return functools.cache(lambda name: hf.write(name, tmp_path_factory.mktemp(name)))


def logits(folder, ids: np.ndarray, positions: np.ndarray) -> np.ndarray:
    graph, state = nnx.split(models.load(folder, max_length=2**17))

    def run(state, ids, positions):
        return nnx.merge(graph, state)(ids, positions=positions)

    return np.asarray(jax.jit(run)(state, jnp.asarray(ids), jnp.asarray(positions)))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "first", "length"),
    [
        *((name, 0, 700) for name in ("mistral", "phi3-longrope")),
        *((name, FAR, 50) for name in FAMILIES),
    ],
)
def test_logits_far_into_a_text(folders, name, first, length):
    """A text of 700 tokens, and one that stands as far in as the longest contexts go."""
    ids = hf.tokens(1, length)
    positions = np.arange(first, first + length)[None]
    with torch.no_grad():
        expected = hf.reference(name)(
            torch.tensor(ids), position_ids=torch.tensor(positions), use_cache=False
        ).logits.numpy()
    ours = logits(folders(name), ids, positions)
    np.testing.assert_allclose(ours, expected, rtol=0, atol=TOLERANCE)
