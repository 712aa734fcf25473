"""The gradient's kernels of `int4_matmul` without a GPU: transposition, launch, lowering.

What they compute is checked on a GPU, in `test_gpu_int4_gradient.py`.
"""

import functools
from typing import ClassVar

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.mosaic import block
from pallas_kernels.mosaic.products import int4 as operand
from tests.kernels.kernel_helpers import lower_for_cuda
from tests.matmul.int4_helpers import specification
from tests.oracles import int4 as oracle
from tests.oracles import warp
from turbojax.matmul.int4 import matmul, mosaic_gradient, mosaic_operands

EXPAND, PRODUCT = "turbojax_int4_expand_transposed_hopper", "turbojax_fp8_matmul_hopper"
SHARED_BYTES = 227 * 1024


class Memory(warp.Pointer):
    """Shared memory that notes how many lanes of a load or store meet in a bank."""

    worst: ClassVar[dict[str, int]] = {}

    @classmethod
    def to(cls, array):
        return cls(array.reshape(-1).view(np.uint8))

    def at(self, *offsets):
        return Memory(*vars(super().at(*offsets)).values())

    def words(self, count):
        # Of 16 bytes eight lanes load at a time.
        self.note(f"{self.memory.size} load", 4 * count, 32 // count)
        return super().words(count)

    def store(self, x):
        self.note(f"{self.memory.size} store", 4, 32)
        super().store(x)

    def note(self, what, size, together):
        for lanes in self.offset.reshape(-1, together):
            banks = lanes[:, None] // 4 + np.arange(size // 4)
            words = np.unique(banks)
            most = np.bincount(words % 32).max()
            self.worst[what] = max(self.worst.get(what, 0), int(most))


@pytest.fixture
def on_lanes(monkeypatch):
    monkeypatch.setattr(Memory, "worst", {})
    for module in (operand, block):
        monkeypatch.setattr(module, "lane", warp)
    monkeypatch.setattr(operand, "Pointer", Memory)
    monkeypatch.setattr(warp, "scalar", warp.integer, raising=False)
    monkeypatch.setattr(warp, "special", lambda _: warp.thread(), raising=False)


def tiles_of(codes):
    """Packed codes ``[128, 256]`` as tiles ``[2, 2, 64, 64]``."""
    return oracle.pack(codes).reshape(2, 64, 2, 64).transpose(0, 2, 1, 3).copy()


@pytest.mark.usefixtures("on_lanes")
@pytest.mark.parametrize("group", [0, 1])
def test_transposition(monkeypatch, group):
    """Every code at every place and every scale, as the bytes that a matrix unit reads."""
    rng = np.random.default_rng(0)
    codes = rng.integers(-8, 8, (128, 256))
    bits = rng.integers(0, 128, (2, 2, 64)).astype(np.uint8)
    tables, out = mosaic_operands.tables(), np.zeros(128 * 128, np.uint8)
    for number in range(4):
        monkeypatch.setattr(warp.STATE, "number", number)
        operand.expand_transposed(tiles_of(codes), bits, tables, group, out)
    scale = bits[:, group].reshape(128, 1)
    want = tables[scale, codes[:, 128 * group : 128 * (group + 1)] & 15].T
    place = np.arange(128 * 128)
    np.testing.assert_array_equal(out[place ^ ((place >> 7 & 7) << 4)].reshape(128, 128), want)
    # Codes, and what is stored; of tables some lanes meet, as scales have it.
    assert Memory.worst[f"{2 * 2 * 64 * 64} load"] == 1
    assert Memory.worst[f"{128 * 128} store"] == 1


# Launches, and that it lowers ---------------------------------------------------------------------


@pytest.mark.parametrize("shape", [(1, 1), (70, 520), (4096, 4096), (28672, 14336)])
def test_launches(shape):
    """Of every number of tokens: memory suffices, nobody is idle, parts have enough to do."""
    for rows in (1, 7, 8, 9, 33, 64, 65, 128, 256, 257, 4097):
        _, weight = specification(rows, *shape)
        launch = mosaic_gradient.default_launch(rows, weight)
        assert launch.tokens == min(256, max(8, 1 << (rows - 1).bit_length()))
        groups = -(-weight.padded_shape[0] // 128)
        assert launch.parts == 1 or (rows <= 256 and groups >= 8 * launch.parts)
        places, written = (1, launch.tokens) if launch.tokens <= 64 else (2, 64)
        buffers = [
            launch.stages * (launch.tokens + 128) * 128,
            2 * -(-launch.tokens // 64) * 64,
            places * written * 128 * (4 if launch.parts > 1 else 2),
        ]
        size = sum(-(-size // 1024) * 1024 for size in buffers) + 8 * (2 * launch.stages + 9)
        assert size <= SHARED_BYTES
        assert launch.stages >= 3


def d_x(x, weight, d_out, **options):
    return jax.vjp(lambda x: matmul(x, weight, **options), x)[1](d_out)[0]


@pytest.mark.fuzz
@pytest.mark.usefixtures("hopper")
@pytest.mark.parametrize(
    ("rows", "outputs", "inputs", "activation", "dtype"),
    [
        (4096, 14336, 4096, None, jnp.bfloat16),
        (33, 76, 300, "swiglu", jnp.float16),
        (1, 64, 128, None, jnp.bfloat16),
        (17, 200, 520, "gelu", jnp.bfloat16),
        (256, 14336, 384, None, jnp.float16),
        (1000, 1030, 1000, "silu", jnp.bfloat16),
        (2049, 704, 640, "swiglu", jnp.bfloat16),
    ],
)
def test_lowers_for_cuda(rows, outputs, inputs, activation, dtype):
    _, weight = specification(rows, outputs, inputs, gated=activation == "swiglu")
    x = jax.ShapeDtypeStruct((rows, inputs), dtype)
    d_out = jax.ShapeDtypeStruct((rows, weight.result_size), dtype)
    options = {"activation": activation, "implementation": "mosaic_gpu"}
    text = lower_for_cuda(functools.partial(d_x, gradient="e4m3", **options), x, weight, d_out)
    assert EXPAND in text
    assert PRODUCT in text


@pytest.mark.usefixtures("hopper")
@pytest.mark.parametrize(
    "options", [{"gradient": "exact"}, {"gradient": "e4m3", "precision": "highest"}]
)
def test_where_sums_must_be_float32_xla_multiplies(options):
    _, weight = specification(300, 256, 384)
    x, d_out = (jax.ShapeDtypeStruct((300, n), jnp.bfloat16) for n in (384, 256))
    text = lower_for_cuda(functools.partial(d_x, **options), x, weight, d_out)
    assert EXPAND not in text


@pytest.mark.usefixtures("hopper")
def test_lowers_under_vmap():
    _, weight = specification(9, 200, 300)
    x, d_out = (jax.ShapeDtypeStruct((3, 9, n), jnp.bfloat16) for n in (300, 200))
    call = jax.vmap(functools.partial(d_x, gradient="e4m3"), (0, None, 0))
    assert EXPAND in lower_for_cuda(call, x, weight, d_out)
