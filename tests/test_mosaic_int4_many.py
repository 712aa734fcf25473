"""The Hopper kernel of INT4 products for many tokens without a GPU: settings and lowering."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from kernel_helpers import lower_for_cuda

from pallas_kernels.mosaic.hopper.matmul import int4_many

NAME = "turbojax_int4_matmul_many_hopper"
# Tokens, weight rows, inputs; tokens and warpgroups of a tile; parts; scales; activation.
LOWERED = [
    (304, 1088, 640, 256, 2, 1, "e4m3", "swiglu"),
    (304, 1088, 640, 128, 3, 1, "e4m3", "gelu"),
    (72, 64, 128, 128, 2, 1, "bfloat16", None),
    (200, 1088, 1024, 128, 2, 3, "float16", None),
    (1000, 640, 1024, 192, 3, 1, "e4m3", None),
]


def lowered(tokens, rows, inputs, tile, warpgroups, parts, scales, activation, stages=3):
    """The text that a call with everything lowers to."""
    is_e4m3, is_alone = scales == "e4m3", parts == 1
    epilogue = int4_many.Epilogue(
        activation, is_alone, is_alone, "bfloat16", 64 if activation == "swiglu" else 128
    )
    settings = int4_many.Settings(
        epilogue, tile, warpgroups, stages, is_two_level=not is_e4m3, parts=parts
    )
    columns = max(rows // (2 if activation == "swiglu" else 1), settings.columns)
    kind = jnp.float8_e4m3fn if is_e4m3 else jnp.dtype(scales)
    shape = jax.ShapeDtypeStruct
    arrays = [
        shape((rows // 64, inputs // 128, 64, 64), jnp.uint8),
        shape((rows // 64, inputs // 128, 64), kind),
        shape((128, 16), jnp.uint8),
        shape((tokens, inputs), jnp.float8_e4m3fn),
        shape((tokens,), jnp.bfloat16),
        shape((rows,), jnp.float32),
        shape((rows,), jnp.float32),
        shape((tokens, columns), jnp.bfloat16),
    ]

    def call(codes, scales, tables, x, token_scales, output_scales, bias, residual):
        return int4_many.int4_matmul(
            codes,
            scales,
            tables if is_e4m3 else None,
            x,
            token_scales,
            output_scales,
            bias if is_alone else None,
            residual if is_alone else None,
            columns=columns,
            settings=settings,
        )

    return lower_for_cuda(call, *arrays)


@pytest.mark.quick(first=2)
@pytest.mark.parametrize("case", LOWERED)
def test_lowers_for_cuda(case):
    assert NAME in lowered(*case)


def test_counts_its_shared_memory():
    """As many stages as `shared_bytes` allows lower; the lowering counts them too."""
    epilogue = int4_many.Epilogue("gelu", True, True, "bfloat16", 128)
    fits = [
        n
        for n in range(1, 20)
        if int4_many.Settings(epilogue, 128, 3, n).shared_bytes(1) <= 227 * 1024
    ]
    assert NAME in lowered(*LOWERED[1], stages=fits[-1])
    with pytest.raises(ValueError, match="shared memory"):
        lowered(*LOWERED[1], stages=fits[-1] + 1)


def test_registers_are_those_that_there_are():
    """A kernel that asks for more than its threads have at the start waits forever."""
    epilogue = int4_many.Epilogue(None, False, False, "bfloat16", 128)
    for warpgroups in (2, 3):
        own, copies = int4_many.Settings(epilogue, 128, warpgroups, 3).registers
        given = 65536 // (128 * (warpgroups + 1)) // 8 * 8
        assert warpgroups * own + copies <= (warpgroups + 1) * given
        assert np.all(np.array([own, copies]) % 8 == 0)


def test_refuses_fewer_outputs_than_a_tile():
    epilogue = int4_many.Epilogue(None, False, False, "bfloat16", 128)
    settings = int4_many.Settings(epilogue, 128, 2, 3, is_two_level=True)
    codes, scales = jnp.zeros((1, 1, 64, 64), jnp.uint8), jnp.zeros((1, 1, 64), jnp.bfloat16)
    x, token_scales = jnp.zeros((72, 128), jnp.float8_e4m3fn), jnp.zeros(72, jnp.bfloat16)
    arrays = (codes, scales, None, x, token_scales, jnp.zeros(64, jnp.float32), None, None)
    with pytest.raises(ValueError, match="columns=64 must be at least 128"):
        int4_many.int4_matmul(*arrays, columns=64, settings=settings)
