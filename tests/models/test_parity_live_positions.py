"""Positions far into a text: angles and logits are still those that transformers computes.

An angle is a product of float32 numbers, position and frequency. At 100,000 tokens it has a
rounding unit of 0.008 radians, and a frequency that is one unit off moves it by as much again: two
programs agree there if they round the same way, and not otherwise.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from tests.models import hf_helpers as hf
from tests.models.rotary_helpers import FAR, ROTARIES
from turbojax import models
from turbojax.models import TransformerConfig

pytestmark = pytest.mark.slow

TOLERANCE = 1e-4
FAMILIES = ("llama3.1", "qwen2.5-yarn", "phi3-longrope", "gemma2", "gemma3")


def theirs():
    """What transformers computes: imported here, because it may not be installed."""
    from tests.models import torch_helpers

    return torch_helpers


class OfGlobalLayers:
    """Gemma 3's embedding of layers without a window, as if it were the only one."""

    def __init__(self, both):
        self.both = both
        self.rope_type, self.inv_freq = (
            both.rope_type["full_attention"],
            both.full_attention_inv_freq,
        )

    def __call__(self, x, positions):
        return self.both(x, positions, "full_attention")


def rotary_of(keys: dict):
    from transformers.models.gemma3.modeling_gemma3 import Gemma3RotaryEmbedding
    from transformers.models.glm.modeling_glm import GlmRotaryEmbedding
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding
    from transformers.models.phi3.modeling_phi3 import Phi3RotaryEmbedding

    config = theirs().config(keys)
    if keys["model_type"] == "mistral3":
        config = config.text_config
    if keys["model_type"] in ("glm", "glm4"):
        return GlmRotaryEmbedding(config)
    if keys["model_type"] == "gemma3_text":
        return OfGlobalLayers(Gemma3RotaryEmbedding(config))
    make = Phi3RotaryEmbedding if keys["model_type"] == "phi3" else LlamaRotaryEmbedding
    return make(config)


@pytest.mark.quick(slow=1)
@pytest.mark.parametrize("name", ROTARIES)
def test_frequencies_are_rounded_as_transformers_rounds_them(name):
    """All but a few to the bit: torch's power is one unit off for one number in a hundred."""
    import torch

    rope = TransformerConfig.from_hf(ROTARIES[name]).rope
    rotary = rotary_of(ROTARIES[name])
    pairs = [(rope.frequencies(np.float32), rotary.inv_freq.numpy())]
    if rotary.rope_type == "longrope":
        rotary(torch.zeros(1), torch.tensor([[FAR]]))
        assert not np.array_equal(rotary.inv_freq, rotary.original_inv_freq)
        pairs = [
            (rope.frequencies(np.float32, FAR), rotary.inv_freq.numpy()),
            (rope.frequencies(np.float32, 100), rotary.original_inv_freq.numpy()),
        ]
    for ours, expected in pairs:
        assert ours.dtype == np.float32
        apart = np.abs(ours.view(np.int32) - expected.view(np.int32))
        assert apart.max() <= 1
        assert np.sum(apart != 0) <= max(2, 0.05 * apart.size)


@pytest.mark.quick(slow=1)
@pytest.mark.parametrize("name", ROTARIES)
@pytest.mark.parametrize("first", [700, FAR])
def test_angles_far_into_a_text(name, first):
    import torch

    rope = TransformerConfig.from_hf(ROTARIES[name]).rope
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
    sign, same = np.repeat([-1.0, 1.0], half), np.concatenate([exact, exact])
    if rope.interleaved:  # neighbours are rotated together
        cos, sin = (np.repeat(y[..., :half], 2, axis=-1) for y in (cos, sin))
        both = x[..., : 2 * half].reshape(*x.shape[:3], half, 2)[..., ::-1].reshape(both.shape)
        sign, same = np.tile([-1.0, 1.0], half), np.repeat(exact, 2)
    sign = sign.astype(np.float32)
    rotated = x[..., : 2 * half] * cos[:, :, None] + both * sign * sin[:, :, None]
    out = np.asarray(rope.rotate(jnp.asarray(x), ours))[..., : 2 * half]
    # Sine and cosine are a few units apart, of vectors of up to 4 * 1.2 in size.
    np.testing.assert_allclose(out[..., same], rotated[..., same], rtol=0, atol=3e-6)


def logits(folder, ids: np.ndarray, positions: np.ndarray) -> np.ndarray:
    graph, state = nnx.split(models.load(folder, max_length=2**17))

    def run(state, ids, positions):
        return nnx.merge(graph, state)(ids, positions=positions)

    return np.asarray(jax.jit(run)(state, jnp.asarray(ids), jnp.asarray(positions)))


@pytest.mark.quick(slow=1)
@pytest.mark.parametrize(
    ("name", "first", "length"),
    [
        ("phi3-longrope", 0, 700),
        *((name, FAR, 50) for name in FAMILIES),
    ],
)
def test_logits_far_into_a_text(folder, name, first, length):
    """A text of 700 tokens, and one that stands as far in as the longest contexts go."""
    import torch

    ids = hf.tokens(1, length)
    positions = np.arange(first, first + length)[None]
    with torch.no_grad():
        expected = (
            theirs()
            .reference(name)(
                torch.tensor(ids), position_ids=torch.tensor(positions), use_cache=False
            )
            .logits.numpy()
        )
    ours = logits(folder(name), ids, positions)
    np.testing.assert_allclose(ours, expected, rtol=0, atol=TOLERANCE)
