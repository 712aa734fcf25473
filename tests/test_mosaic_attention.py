"""`implementation="mosaic_gpu"` of `turbo_attention` without a GPU: refusals, order, lowering.

No interpreter runs its matrix instructions: what it computes is checked on a GPU, in
`test_gpu_mosaic_attention.py`.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from attention_helpers import EXACT, SAS_2, SAS_E
from grids import pairwise
from kernel_helpers import lower_for_cuda

import turbojax as tj
from turbojax import _device
from turbojax.ops.options import Options
from turbojax.ops.turbo_attention import mosaic_gpu
from turbojax.ops.turbo_attention.operands import permute_tokens

MODES = ("int8", "int8_fp8", "fp8")
SEES_ALL = Options(False, scale=0.1)


def refusal(config=tj.TurboConfig(), shape=(1, 8, 2, 64)):
    x = jax.ShapeDtypeStruct(shape, jnp.bfloat16)
    options = {"options": SEES_ALL}
    return mosaic_gpu.attention_unsupported(query=x, key=x, value=x, config=config, **options)


@pytest.fixture
def hopper(monkeypatch):
    monkeypatch.setattr(_device, "gpu_compute_capability", lambda: 9.0)


@pytest.mark.usefixtures("hopper")
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("head_dim", [8, 64, 80, 128, 200, 256])
def test_hopper_runs_it(mode, head_dim):
    assert refusal(tj.TurboConfig(mode=mode), (1, 8, 2, head_dim)) is None


@pytest.mark.usefixtures("hopper")
@pytest.mark.parametrize(
    ("config", "shape", "words"),
    [
        ({"mode": "float"}, (1, 8, 2, 64), "config.mode='float' must be an 8-bit mode"),
        ({"block_kv": 32}, (1, 8, 2, 64), r"config.block_kv=32 must be one of \(64, 128\)"),
        (
            {"block_kv": 256, "buffer_size": 256},
            (1, 8, 2, 64),
            r"config.block_kv=256 must be one of \(64, 128\)",
        ),
        ({"block_q": 32}, (1, 8, 2, 64), "config.block_q=32 must be a multiple of 64"),
        ({}, (1, 8, 2, 264), "head_dim=264 must be at most 256"),
    ],
)
def test_refusals_in_words(config, shape, words):
    with pytest.raises(AssertionError, match=words):
        assert refusal(tj.TurboConfig(**config), shape) is None


def test_it_needs_hopper(monkeypatch):
    for capability in (None, 8.9, 10.0):
        monkeypatch.setattr(_device, "gpu_compute_capability", lambda c=capability: c)
        assert "needs an NVIDIA GPU of compute capability 9.0" in refusal()
    with _device.interpret_kernels():
        assert refusal() == "its kernel cannot be interpreted"


def test_order_of_keys():
    """Place ``8 h + 2 t + r`` of a group of 16 holds token ``4 t + 2 h + r``."""
    x = jnp.arange(48).reshape(1, 1, 48, 1)
    got = np.asarray(permute_tokens(x)).ravel()
    t, h, r = np.meshgrid(np.arange(4), np.arange(2), np.arange(2), indexing="ij")
    for group in range(3):
        place, token = (16 * group + x for x in (8 * h + 2 * t + r, 4 * t + 2 * h + r))
        np.testing.assert_array_equal(got[place], token)


FEATURES = {
    "plain": SEES_ALL,
    "causal": Options(True, scale=0.1),
    "window": Options(False, (100, 30), scale=0.1),
    "causal window": Options(True, (64, 64), scale=0.1),
    "soft cap": Options(True, scale=0.1, logits_soft_cap=5.0),
    "negative scale": Options(False, scale=-0.2),
}


def lower(config, head_dim=64, dtype=jnp.bfloat16, tokens=100, options=SEES_ALL, launch=None):
    run = functools.partial(mosaic_gpu.attention, config=config, options=options, launch=launch)
    query, key = (
        jax.ShapeDtypeStruct((2, n, h, head_dim), dtype) for n, h in ((tokens, 4), (150, 2))
    )
    lengths = jax.ShapeDtypeStruct((2,), jnp.int32)
    return lower_for_cuda(lambda *x: run(*x), query, key, key, lengths, lengths)


LOWERED = pairwise(
    feature=list(FEATURES),
    softmax=[SAS_E, EXACT, SAS_2, tj.SAS(-3.0), tj.SAS(-87.0, "2")],
    head_dim=[128, 64, 8, 80, 256],
    tokens=[100, 1, 7, 128, 300],
    mode=list(MODES),
    dtype=[jnp.bfloat16, jnp.float16, jnp.float32],
    block_kv=[64, 128],
)


@pytest.mark.quick(1)
@pytest.mark.parametrize(
    ("feature", "softmax", "head_dim", "tokens", "mode", "dtype", "block_kv"),
    LOWERED[::3],
)
def test_it_lowers(feature, softmax, head_dim, tokens, mode, dtype, block_kv):
    """Each option, softmax, mode, dtype, head dim, block and number of queries, many in pairs."""
    config = tj.TurboConfig(
        mode=mode, softmax=softmax, block_q=128, block_kv=block_kv, buffer_size=block_kv
    )
    assert "mosaic_gpu" in lower(config, head_dim, dtype, tokens, FEATURES[feature])


LAUNCHES = [(4, True), (2, False), (3, False), (2, True), (3, True)]


@pytest.mark.quick(1)
@pytest.mark.parametrize(("launch", "mode"), list(zip(LAUNCHES, (MODES * 2)[1:], strict=False)))
def test_launches_lower(launch, mode):
    softmax = (EXACT, SAS_E)[launch[1]]
    config = tj.TurboConfig(mode=mode, softmax=softmax)
    options = {"options": Options(True, (70, 0), scale=0.1), "launch": mosaic_gpu.Launch(*launch)}
    assert "mosaic_gpu" in lower(config, **options)
