"""The gradient's kernels of `int4_matmul` on Hopper, without a GPU: transposition, launch, lowering.

What they compute is checked on a GPU, in `test_gpu_int4_gradient.py`.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from int4_helpers import random_weight
from kernel_helpers import lower_for_cuda
from oracles import int4 as oracle
from oracles import warp
from test_mosaic_int4 import specification

from pallas_kernels.mosaic.products import int4 as operand
from pallas_kernels.mosaic.products import int4_transposed
from turbojax import _device
from turbojax.ops.int4_matmul import matmul, mosaic_gpu, mosaic_gradient

EXPAND, PRODUCT = "turbojax_int4_expand_transposed_hopper", "turbojax_fp8_matmul_hopper"
SHARED_BYTES = 227 * 1024


class Memory(warp.Pointer):
    """Shared memory that notes how many lanes of a load or store meet in a bank."""

    worst: dict[str, int] = {}

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
    for module in (operand, int4_transposed):
        monkeypatch.setattr(module, "lane", warp)
        monkeypatch.setattr(module, "Pointer", Memory)
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
    tables, out = mosaic_gpu._tables(), np.zeros(128 * 128, np.uint8)
    for number in range(4):
        monkeypatch.setattr(warp.STATE, "number", number)
        int4_transposed.expand(tiles_of(codes), bits, tables, group, out)
    scale = bits[:, group].reshape(128, 1)
    want = tables[scale, codes[:, 128 * group : 128 * (group + 1)] & 15].T
    place = np.arange(128 * 128)
    np.testing.assert_array_equal(out[place ^ ((place >> 7 & 7) << 4)].reshape(128, 128), want)
    # Codes, and what is stored; of tables some lanes meet, as scales have it.
    assert Memory.worst[f"{2 * 2 * 64 * 64} load"] == 1
    assert Memory.worst[f"{128 * 128} store"] == 1
