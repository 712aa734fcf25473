"""What the tests of `TurboAttention` share: a float64 oracle and the module's parameters."""

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

import turbojax as tj

# Attention without quantization, so that a mask's effect is seen to float32's last digits.
FLOAT = tj.TurboConfig(mode="float", softmax="exact", block_q=16, block_kv=16, buffer_size=16)
# Of it: sums of up to 50 products of order 1, weights that add up to 1, in either computation.
MASK_ROUNDING = 64 * 2.0**-24

WIDTH, HEADS, KV_HEADS, CHANNELS = 24, 4, 2, 8

# Blocks that a few tokens fill; both softmaxes and both kinds of codes are elsewhere compared.
SMALL = tj.TurboConfig(block_q=16, block_kv=16, buffer_size=16)
KINDS = {
    "exact": "exact",
    "bfloat16": "bfloat16",
    "4bit": SMALL,
    "kv4": "kv4",
    "k8v4": "k8v4",
    "paged": "paged",
    "fp8_e4m3": "fp8_e4m3",
    "turbo4": "turbo4",
}

# Angles of up to 40 radians are off by up to 40 * 2**-24; then come sums of up to 40 products of
# order 1 through three layers.
ROUNDING = 256 * 2.0**-24


def module(seed=0, **options):
    """A module whose biases and norms, if any, are not those they start with."""
    layer = tj.flax.TurboAttention(WIDTH, HEADS, KV_HEADS, CHANNELS, rngs=nnx.Rngs(seed), **options)
    rng = np.random.default_rng(seed)
    for path, x in nnx.to_flat_state(nnx.state(layer, nnx.Param)):
        if path[-1] != "kernel":
            noise = rng.standard_normal(x.shape) * 0.3
            x.set_value(x.get_value() + np.asarray(noise, np.dtype(x.dtype)))
    return layer


def leaves(state):
    return [np.asarray(x) for x in jax.tree.leaves(state)]


def equal(a, b):
    """Of the same arrays, to the bit."""
    for x, y in zip(leaves(a), leaves(b), strict=True):
        assert x.dtype == y.dtype
        np.testing.assert_array_equal(x, y)


def tokens(length, batch=2, seed=0, dtype=np.float32):
    rng = np.random.default_rng(seed)
    return np.asarray(rng.standard_normal((batch, length, WIDTH)), np.float32).astype(dtype)


def operands(batch=(2,), tokens=21, keys=None, heads=4, kv_heads=None, channels=8, seed=0):
    """Query, key and value of an attention function."""
    rng = np.random.default_rng(seed)
    keys, kv_heads = keys or tokens, kv_heads or heads
    shapes = [(tokens, heads), (keys, kv_heads), (keys, kv_heads)]
    return [
        jnp.asarray(rng.standard_normal((*batch, *shape, channels)), jnp.float32)
        for shape in shapes
    ]


def params(layer):
    """Float64 parameters by path, such as ``("q_proj", "kernel")``."""
    state = nnx.to_flat_state(nnx.state(layer, nnx.Param))
    return {path: np.asarray(x.get_value(), np.float64) for path, x in state}


def oracle(
    params,
    x,
    *,
    lengths=None,
    positions=None,
    theta=10000.0,
    rotary=CHANNELS,
    scale=CHANNELS**-0.5,
    window=None,
    cap=None,
    eps=None,
):
    """The module by loops in float64; rows of padding are 0. `rotary` 0 is no rotary embedding."""
    x = np.asarray(x, np.float64)
    batch, length = x.shape[:2]
    lengths = [length] * batch if lengths is None else lengths
    positions = np.tile(np.arange(length), (batch, 1)) if positions is None else positions

    def project(name, x):
        return x @ params[name, "kernel"] + params.get((name, "bias"), 0)

    def norm(name, x):
        if eps is None:
            return x
        root = np.sqrt(np.mean(x**2, axis=-1, keepdims=True) + eps)
        return x / root * params[name, "scale"]

    def rotate_one(head, position):
        head, half = head.copy(), rotary // 2
        for i in range(half):
            angle = position * theta ** (-2 * i / rotary)
            cos, sin = np.cos(angle), np.sin(angle)
            a, b = head[i], head[i + half]
            head[i], head[i + half] = a * cos - b * sin, b * cos + a * sin
        return head

    out = np.zeros_like(x)
    for b in range(batch):
        heads = {
            name: project(f"{name}_proj", x[b]).reshape(length, -1, CHANNELS) for name in "qkv"
        }
        heads["q"], heads["k"] = norm("q_norm", heads["q"]), norm("k_norm", heads["k"])
        for name in "qk":
            for t, n in np.ndindex(heads[name].shape[:2]):
                heads[name][t, n] = rotate_one(heads[name][t, n], positions[b, t])
        for t in range(lengths[b]):
            seen = slice(0 if window is None else max(t - window + 1, 0), t + 1)
            attended = []
            for n in range(HEADS):
                kv = n // (HEADS // KV_HEADS)
                scores = heads["k"][seen, kv] @ heads["q"][t, n] * scale
                if cap is not None:
                    scores = cap * np.tanh(scores / cap)
                weights = np.exp(scores - scores.max())
                attended.append(weights @ heads["v"][seen, kv] / weights.sum())
            out[b, t] = project("o_proj", np.concatenate(attended))
    return out
