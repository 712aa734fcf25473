"""Models of other families on a GPU: windows, caps, odd heads, by the kernels of every cache."""

import dataclasses
import os
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import turbojax as tj
from turbojax import models
from turbojax.flax import TurboAttention
from turbojax.rotary import LinearScaling

pytestmark = pytest.mark.gpu

BASE = models.TransformerConfig(
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
    "gemma3": dataclasses.replace(
        BASE,
        head_dim=256,
        local_windows=(40, None),
        rope_theta=1e6,
        rope_scaling=LinearScaling(8.0),
        local_rope_theta=1e4,
        qk_norm=True,
        attention_scale=1 / 16,
        embedding_scale=16.0,
        activation="gelu_tanh",
        norm_offset=1.0,
        post_norms=True,
    ),
    "olmo": dataclasses.replace(
        BASE, qk_norm=True, joint_qk_norm=True, pre_norms=False, post_norms=True
    ),
    "smollm": dataclasses.replace(BASE, nope_layers=(1,)),
    "granite": dataclasses.replace(
        BASE, attention_scale=0.05, embedding_scale=12.0, residual_scale=0.22, logit_scale=1 / 16
    ),
    "cohere": dataclasses.replace(
        BASE,
        local_windows=(40, None),
        nope_layers=(1,),
        rope_interleaved=True,
        layer_norm=True,
        parallel=True,
        logit_scale=0.25,
    ),
    "glm": dataclasses.replace(
        BASE, rotary_dim=64, rope_interleaved=True, qkv_bias=True, post_norms=True
    ),
}
KINDS = {
    "exact": "exact",
    "paged": "paged",
    "fp8_e4m3": "fp8_e4m3",
    "turbo4": "turbo4",
    "4bit": tj.TurboConfig(),
}
LENGTHS = np.array([70, 7, 64])
NEW = 3
# Heads and scores unlike Llama's through every cache, the other families through some.
CASES = [
    *((family, kind) for family in ("gemma", "phi") for kind in KINDS),
    *((family, kind) for family in ("mistral", "qwen", "gemma3") for kind in ("turbo4", "4bit")),
    ("gemma3", "paged"),
    *((family, "turbo4") for family in ("olmo", "granite", "cohere", "glm")),
    ("smollm", "paged"),
]


def model_logits(family, kind, dtype, implementation):
    """Of prompts of different lengths, and of `NEW` given tokens after them."""
    decoder = models.random_decoder(FAMILIES[family], dtype=jnp.bfloat16, seed=1)
    decoder = jax.tree.map(lambda x: x.astype(dtype), decoder)
    decoder = dataclasses.replace(decoder, dtype=jnp.dtype(dtype))
    rng = np.random.default_rng(0)
    tokens = rng.integers(256, size=(3, LENGTHS.max()))
    continued = jnp.asarray(rng.integers(256, size=(3, NEW)))
    session = models.start(
        decoder,
        jnp.asarray(tokens),
        max_length=128,
        lengths=jnp.asarray(LENGTHS),
        cache=KINDS[kind],
        implementation=implementation,
    )
    return np.asarray(models.score(session, continued))


def module_outputs(kind, dtype, implementation):
    """Of a `TurboAttention` under `nnx.jit`: a prompt, then tokens one by one."""
    x = jnp.asarray(np.random.default_rng(0).standard_normal((2, 84, 256)), dtype)
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
    outputs = [nnx.jit(lambda m, x: m.prefill(x))(module, x[:, :80])]
    step = nnx.jit(lambda m, x: m.decode(x))
    outputs += [step(module, x[:, t : t + 1]) for t in range(80, 84)]
    return np.concatenate([np.asarray(y, np.float32) for y in outputs], 1)


def on_a_cpu(call, path):
    """A call by XLA on this machine's CPU, in float32 and in bfloat16: in a process of its own."""
    code = (
        "import sys, numpy as np; from tests.gpu import test_gpu_families as t;"
        "np.savez(sys.argv[1], **t.by_xla(sys.argv[2:]))"
    )
    root = Path(__file__).parents[2]
    environment = {**os.environ, "JAX_PLATFORMS": "cpu", "PYTHONPATH": str(root)}
    done = subprocess.run(
        [sys.executable, "-c", code, str(path), *call],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    found = np.load(path)
    return found["truth"], found["plain"]


def by_xla(call):
    """What `on_a_cpu` asks for: of a family and a kind of cache, or of the module and a kind."""
    run = module_outputs if len(call) == 1 else model_logits
    return {
        "truth": run(*call, jnp.float32, "xla"),
        "plain": run(*call, jnp.bfloat16, "xla"),
    }


def assert_as_good(ours, truth, plain):
    """Errs no more than XLA in bfloat16 does; where that is exact, than bfloat16's own step."""
    ours, plain, spread = np.abs(ours - truth), np.abs(plain - truth), truth.std()
    assert ours.mean() <= 1.5 * plain.mean() + 0.01 * spread, (ours.mean(), plain.mean(), spread)
    assert ours.max() <= 2 * plain.max() + 0.05 * spread, (ours.max(), plain.max(), spread)


@pytest.mark.quick(3)
@pytest.mark.parametrize(("family", "kind"), CASES)
def test_kernels_are_as_good_as_xla(family, kind, tmp_path):
    truth, plain = on_a_cpu((family, kind), tmp_path / "xla.npz")
    assert truth.std() > 0.03
    assert_as_good(model_logits(family, kind, jnp.bfloat16, None), truth, plain)


@pytest.mark.quick(2)
@pytest.mark.parametrize("kind", KINDS)
def test_the_flax_module_is_as_good_as_xla(kind, tmp_path):
    truth, plain = on_a_cpu((kind,), tmp_path / "xla.npz")
    assert_as_good(module_outputs(kind, jnp.bfloat16, None), truth, plain)
