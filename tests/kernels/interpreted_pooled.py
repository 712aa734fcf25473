"""Pooled attention's Hopper kernels on a CPU, by Pallas' own interpreter: a program of its own.

    python -m tests.kernels.interpreted_pooled forward causal

It exits with an error if a result is wrong or the interpreter finds a race. It is not a test
itself because a warpgroup is a thread that waits inside a callback, and so takes a thread of XLA's
pool, whose size is set by NPROC when jax starts: with fewer threads than warpgroups it hangs. Also
an error leaves the interpreter unusable for the rest of the process.

The interpreter runs a kernel's warpgroups with their copies, barriers, shared memory and control
flow. It has no product with an operand in registers, and no accumulator that begins with something
(docs/kernels.md), so products are replaced by `Accumulator` and `add_product` here.
"""

import functools
import os
import sys

os.environ["NPROC"] = "16"  # Threads of XLA's pool; before jax starts.

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.mosaic.hopper.pooled import forward as pooled_forward
from pallas_kernels.mosaic.hopper.pooled import key_gradient as pooled_key_gradient
from pallas_kernels.mosaic.hopper.pooled import pool as pooled_pool
from pallas_kernels.mosaic.hopper.pooled import query_gradient as pooled_query_gradient
from pallas_kernels.mosaic.hopper.pooled import tiles
from tests.attention.pooled_helpers import (
    Case,
    assert_as_good_as_plain,
    operands,
    options,
    oracle,
    oracle_gradient,
    plain,
    plain_gradient,
)
from turbojax.attention.pooled import mosaic_gpu as pooled
from turbojax.attention.pooled import pooling
from turbojax.attention.pooled.operands import Backward
from turbojax.attention.pooled.static import LEVELS, PooledOptions


def plain_pool(key, value, lengths, *, multiple):
    """Means as plain JAX has them, in place of a kernel of `inline_mgpu` alone."""

    def side(x):
        x = jnp.pad(x, ((0, 0), (0, -x.shape[1] % multiple), (0, 0), (0, 0)))
        return tuple(jnp.swapaxes(pooling.pool(x, lengths, r), 1, 2) for r in LEVELS[1:])

    return side(key), side(value)


KERNELS = (
    (pooled_forward, "attention"),
    (pooled_query_gradient, "query_gradient"),
    (pooled_key_gradient, "key_gradient"),
)


def interpreted(f):
    """`f`, whose kernels are interpreted; a race or a read out of bounds is an error."""

    @functools.wraps(f)
    def run(*args, **kwargs):
        with plgpu.force_gpu_interpret_mode(plgpu.InterpretGPUParams(detect_races=True)):
            return f(*args, **kwargs)

    return run


class Accumulator:
    """In place of the matrix unit's registers: an array, to which a product is added at once.

    The interpreter takes no product with an operand in registers and no accumulator that begins
    with something, see the tests at the end. It does not model that products are asynchronous.
    """

    def __init__(self, shape, dtype):
        self.value = jnp.zeros(shape, dtype)

    @classmethod
    def init(cls, value):
        made = cls(value.shape, value.dtype)
        made.value = value
        return made

    def __getitem__(self, index):
        assert index is Ellipsis
        return self.value


def add_product(out, a, b):
    """`plgpu.wgmma`: reads all of its operands, exact products summed in float32."""
    a, b = (x if isinstance(x, jax.Array) else x[...] for x in (a, b))
    # The matrix unit reads as copies write: no fence is needed between the two.
    plgpu.commit_smem()
    out.value += jnp.dot(a, b, preferred_element_type=out.value.dtype)


def install():
    """Has the kernels interpreted, two programs with some tiles each."""
    run_scoped, run_state = pl.run_scoped, pl.run_state

    def scoped(f, *types, **kwargs):
        if types and all(isinstance(x, Accumulator) for x in types):
            return f(*(Accumulator(x.value.shape, x.value.dtype) for x in types))
        return run_scoped(f, *types, **kwargs)

    def stateful(f):
        def run(state):
            if not isinstance(state, Accumulator):
                return run_state(f)(state)
            f(state)
            return state.value

        return run

    tiles.accumulator = Accumulator
    plgpu.wgmma, pl.run_scoped, pl.run_state = add_product, scoped, stateful
    pooled.multiprocessors = lambda: 2
    pooled_pool.pool = plain_pool
    for module, name in KERNELS:
        setattr(module, name, interpreted(getattr(module, name)))


def run_forward(case, arrays):
    """Output and residual by the kernel."""
    static, *lengths = _static(case, arrays)
    return pooled.attention(*arrays[:4], *lengths, options=static)


def _static(case, arrays):
    known = options(case, arrays[0].shape[-1])
    static = PooledOptions(
        case.is_causal, scale=known["scale"], block_q=case.block_q, block_kv=case.block_kv
    )
    lengths = (known["query_lengths"], known["key_lengths"])
    return static, *(None if x is None else jnp.asarray(x, jnp.int32) for x in lengths)


CASES = {
    # Two tiles of queries; levels mixed, at the causal edge too; a last group of one token.
    "causal": Case(137, 137, heads=1, batch=1, block_q=128, block_kv=64, is_causal=True),
    # Three tiles by two programs, more keys than stages hold, one key head for two.
    "grouped, lengths": Case(
        100,
        333,
        heads=2,
        batch=2,
        block_q=128,
        block_kv=128,
        query_lengths=(100, 37),
        key_lengths=(333, 67),
    ),
}


def forward(case):
    arrays = operands(case, jnp.bfloat16, 64)
    found = run_forward(case, arrays)
    known = options(case, 64)
    assert_as_good_as_plain(found, oracle(*arrays[:4], **known), plain(*arrays[:4], **known))


def gradients(case):
    arrays = operands(case, jnp.bfloat16, 64)
    known = options(case, 64)
    static, *lengths = _static(case, arrays)
    residuals = [
        jnp.asarray(np.asarray(x), dtype)
        for x, dtype in zip(oracle(*arrays[:4], **known), (jnp.bfloat16, jnp.float32), strict=True)
    ]
    given = Backward(*arrays[:4], *lengths, *residuals, *arrays[4:])
    found = pooled.gradient(given, options=static)
    want = oracle_gradient(*arrays, **known)
    assert_as_good_as_plain(found, want, plain_gradient(*arrays, **known))


if __name__ == "__main__":
    install()
    {"forward": forward, "gradients": gradients}[sys.argv[1]](CASES[sys.argv[2]])
