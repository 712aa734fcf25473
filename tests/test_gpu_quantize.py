"""Stage 1 as kernels, compiled, against plain JAX: equal bits."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from gpu_helpers import normal

import turbojax as tj
from turbojax.ops.turbo_attention import operands

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("mode", ["int8", "int8_fp8", "fp8"])
@pytest.mark.parametrize(
    ("head_dim", "dtype"),
    [(128, jnp.bfloat16), (64, jnp.float16), (80, jnp.bfloat16), (96, jnp.float32)],
)
def test_kernels_and_plain_jax_give_the_same_bits(monkeypatch, mode, head_dim, dtype):
    query = normal(1, (2, 1000, 8, head_dim), dtype)
    key, value = (normal(i, (2, 1030, 2, head_dim), dtype) for i in (2, 3))
    key, value = key.at[0, 77, 1, 3].set(jnp.nan), value.at[1, 99, 0, 3].set(jnp.inf)
    lengths = jnp.array([1000, 310], jnp.int32), jnp.array([1030, 555], jnp.int32)
    config = tj.TurboConfig.paper(mode=mode)

    def run(permuted):
        def call(*arrays):
            return operands.quantize_operands(*arrays, config, permuted=permuted)

        return jax.jit(call)(query, key, value, *lengths)

    for permuted in (False, True):
        got = run(permuted)
        with monkeypatch.context() as patch:
            patch.setattr(operands, "_kernels_unsupported", lambda *_: "asked not to")
            want = run(permuted)
        for name, a, b in zip(got._fields, got, want, strict=True):
            a, b = (np.asarray(x.astype(jnp.float32)) for x in (a, b))
            np.testing.assert_array_equal(a, b, err_msg=name)
