"""The Hopper kernel of INT4 products for many tokens without a GPU: settings and lowering.

What its operands are is tested in `test_mosaic_int4.py`, what it computes in `test_gpu_int4.py`.
"""

import jax
import jax.numpy as jnp
import pytest

from pallas_kernels.mosaic.hopper.matmul import int4_many
from pallas_kernels.mosaic.ring import WARPGROUPS
from tests.kernels.kernel_helpers import lower_for_cuda

NAME = "turbojax_int4_matmul_many_hopper"
SHARED_BYTES = 227 * 1024
# Tokens, weight rows, inputs; tokens of a tile; activation.
LOWERED = [
    (304, 1088, 640, 256, "swiglu"),
    (72, 64, 128, 128, "gelu"),
    (1000, 640, 1024, 192, None),
]


def settings_of(tile, activation, stages, is_full=True):
    swizzle = 64 if activation in ("swiglu", "geglu") else 128
    epilogue = int4_many.Epilogue(activation, is_full, is_full, "bfloat16", swizzle)
    return int4_many.Settings(epilogue, tile, stages)


def lowered(tokens, rows, inputs, tile, activation, stages=3):
    """The text that a call with everything lowers to."""
    settings = settings_of(tile, activation, stages)
    columns = max(rows // (2 if activation == "swiglu" else 1), settings.columns)
    shape = jax.ShapeDtypeStruct
    arrays = [
        shape((rows // 64, inputs // 128, 64, 64), jnp.uint8),
        shape((rows // 64, inputs // 128, 64), jnp.float8_e4m3fn),
        shape((128, 16), jnp.uint8),
        shape((tokens, inputs), jnp.float8_e4m3fn),
        shape((tokens,), jnp.bfloat16),
        shape((rows,), jnp.float32),
        shape((rows,), jnp.float32),
        shape((tokens, columns), jnp.bfloat16),
    ]

    def call(*arrays):
        return int4_many.int4_matmul(*arrays, columns=columns, settings=settings)

    return lower_for_cuda(call, *arrays)


@pytest.mark.quick(first=1)
@pytest.mark.parametrize("case", LOWERED)
def test_lowers_for_cuda(case):
    assert NAME in lowered(*case)


def test_counts_its_shared_memory():
    """As many stages as `shared_bytes` allows lower; the lowering counts them too."""
    fits = [n for n in range(1, 20) if settings_of(128, "gelu", n).shared_bytes <= SHARED_BYTES]
    assert NAME in lowered(*LOWERED[1], stages=fits[-1])
    with pytest.raises(ValueError, match="shared memory"):
        lowered(*LOWERED[1], stages=fits[-1] + 1)


def test_registers_are_those_that_there_are():
    """A kernel that asks for more than its threads have at the start waits forever."""
    own, copies = int4_many.REGISTERS
    given = 65536 // (128 * (WARPGROUPS + 1)) // 8 * 8
    assert WARPGROUPS * own + copies <= (WARPGROUPS + 1) * given
    assert own % 8 == copies % 8 == 0


def test_refuses_fewer_outputs_than_a_tile():
    settings = settings_of(128, None, 3, is_full=False)
    codes, scales = jnp.zeros((1, 1, 64, 64), jnp.uint8), jnp.zeros((1, 1, 64), jnp.float8_e4m3fn)
    tables = jnp.zeros((128, 16), jnp.uint8)
    x, token_scales = jnp.zeros((72, 128), jnp.float8_e4m3fn), jnp.zeros(72, jnp.bfloat16)
    arrays = (codes, scales, tables, x, token_scales, jnp.zeros(64, jnp.float32), None, None)
    with pytest.raises(ValueError, match="columns=64 must be at least 128"):
        int4_many.int4_matmul(*arrays, columns=64, settings=settings)
