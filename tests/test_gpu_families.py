"""Models of other families on a GPU: windows, caps, odd heads, by the kernels of every cache."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import turbojax as tj
from turbojax import models
from turbojax.flax import TurboAttention

pytestmark = pytest.mark.gpu

BASE = models.LlamaConfig(
    vocab_size=256,
    hidden_size=256,
    intermediate_size=512,
    num_layers=2,
    num_heads=8,
    num_kv_heads=2,
    head_dim=128,
    max_length=512,
)
FAMILIES = {
    "mistral": dataclasses.replace(BASE, local_windows=(48, 48)),
    "qwen": dataclasses.replace(BASE, qkv_bias=True, qk_norm=True),
    "phi": dataclasses.replace(BASE, head_dim=96, num_kv_heads=8, rotary_dim=72),
    "gemma": dataclasses.replace(
        BASE,
        head_dim=256,
        local_windows=(40, None),
        attention_soft_cap=5.0,
        final_soft_cap=10.0,
        attention_scale=0.1,
        embedding_scale=16.0,
        activation="gelu_tanh",
        norm_offset=1.0,
        post_norms=True,
    ),
}
KINDS = {
    "exact": "exact",
    "paged": "paged",
    "fp8_e4m3": "fp8_e4m3",
    "turbo4": "turbo4",
    "4bit": tj.TurboConfig(),
}
LENGTHS = np.array([150, 7, 64])
NEW = 6


def logits(decoder, kind, implementation):
    """Of prompts of different lengths, and of `NEW` given tokens after them, float32."""
    rng = np.random.default_rng(0)
    tokens = rng.integers(256, size=(3, 150))
    continued = jnp.asarray(rng.integers(256, size=(3, NEW)))
    session = models.start(
        decoder,
        jnp.asarray(tokens),
        max_length=200,
        lengths=jnp.asarray(LENGTHS),
        cache=KINDS[kind],
        implementation=implementation,
    )
    return np.asarray(models.score(session, continued))


def in_float32(decoder):
    wide = jax.tree.map(lambda x: x.astype(jnp.float32), decoder)
    return dataclasses.replace(wide, dtype=jnp.dtype(jnp.float32))


# Heads and scores unlike Llama's through every cache, the other families through some.
CASES = [
    *((family, kind) for family in ("gemma", "phi") for kind in KINDS),
    *((family, kind) for family in ("mistral", "qwen") for kind in ("turbo4", "4bit")),
]


@pytest.mark.parametrize(("family", "kind"), CASES)
def test_kernels_are_as_good_as_xla(family, kind):
    """What is chosen errs no more than XLA in bfloat16 does, both against XLA in float32."""
    decoder = models.random_decoder(FAMILIES[family], dtype=jnp.bfloat16, seed=1)
    with jax.default_matmul_precision("highest"):
        truth = logits(in_float32(decoder), kind, "xla")
    plain = np.abs(logits(decoder, kind, "xla") - truth)
    ours = np.abs(logits(decoder, kind, None) - truth)
    spread = truth.std()
    assert spread > 0.3
    assert ours.mean() <= 1.5 * plain.mean() + 0.01 * spread, (ours.mean(), plain.mean(), spread)
    assert ours.max() <= 2 * plain.max() + 0.05 * spread, (ours.max(), plain.max(), spread)


@pytest.mark.parametrize("kind", KINDS)
def test_flax_module_as_good_as_xla(kind):
    """`TurboAttention` under `nnx.jit`, prefill and decode, against the same with XLA."""
    from flax import nnx

    outputs = {}
    rng = np.random.default_rng(0)
    x = jnp.asarray(rng.standard_normal((2, 90, 256)), jnp.float32)
    for name, dtype, implementation in (
        ("truth", jnp.float32, "xla"),
        ("plain", jnp.bfloat16, "xla"),
        ("ours", jnp.bfloat16, None),
    ):
        module = TurboAttention(
            256,
            8,
            2,
            128,
            cache=KINDS[kind],
            options=models.AttentionOptions(local_window_size=40),
            dtype=dtype,
            param_dtype=jnp.float32,
            implementation=implementation,
            rngs=nnx.Rngs(0),
        )
        module.init_cache(2, 128)
        first = nnx.jit(lambda m, x: m.prefill(x))(module, x[:, :80].astype(dtype))
        step = nnx.jit(lambda m, x: m.decode(x))
        rest = [step(module, x[:, t : t + 1].astype(dtype)) for t in range(80, 90)]
        outputs[name] = np.concatenate([np.asarray(y, np.float32) for y in (first, *rest)], 1)
    plain, ours = (np.abs(outputs[name] - outputs["truth"]) for name in ("plain", "ours"))
    spread = outputs["truth"].std()
    assert ours.mean() <= 1.5 * plain.mean() + 0.01 * spread
    assert ours.max() <= 2 * plain.max() + 0.05 * spread
