"""The merge of a decode call's splits on Hopper, emulated on a CPU, against float64."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.mosaic.hopper.decode import merge as kernel
from tests.oracles import lanes

BATCH, KV_HEADS = 2, 3


def merged(o, m, l, tokens):
    """In float64 ``[B, T, N, H]`` and ``[B, T, N]``."""
    o, m, l = (np.asarray(x, np.float64) for x in (o, m, l))
    with np.errstate(all="ignore"):
        top = m.max(1, keepdims=True)
        weights = np.exp2(m - np.where(np.isfinite(top), top, 0))
        total = (weights * l).sum(1)
        out = (weights[..., None] * o).sum(1) / np.where(total == 0, 1, total)[..., None]
        residual = top[:, 0] * np.log(2) + np.log(total)

    def in_order(x):
        x = x.reshape(BATCH, KV_HEADS, -1, tokens, *x.shape[2:])
        return np.moveaxis(x, 3, 1).reshape(BATCH, tokens, -1, *x.shape[4:])

    return in_order(out), in_order(residual)


@pytest.mark.quick(first=3)
@pytest.mark.parametrize(
    ("parts", "head_dim", "dtype"),
    [(5, 128, "bfloat16"), (37, 64, "float16"), (8, 256, "float32"), (2, 64, "bfloat16")],
)
def test_merge(monkeypatch, parts, head_dim, dtype):
    lanes.patch(monkeypatch, kernel)
    tokens, group = 2, 3
    rng = np.random.default_rng(parts)
    shape = BATCH * KV_HEADS, parts, group * tokens
    m = rng.normal(size=shape).astype(np.float32) * 10
    l = rng.uniform(0.5, 9, size=shape).astype(np.float32)
    o = rng.normal(size=(*shape, head_dim)).astype(np.float32)
    # A split without tokens, a query that sees none, one whose value is no number.
    for empty in ((slice(None), 1), (1, slice(None), 4)):
        m[empty], l[empty], o[empty] = -np.inf, 0, 0
    o[2, 0, 3, 7] = np.nan
    query = jax.ShapeDtypeStruct((BATCH, tokens, KV_HEADS * group, head_dim), dtype)
    out, residual = kernel.merge(*map(jnp.asarray, (o, m, l)), query, KV_HEADS)
    want, want_residual = merged(o, m, l, tokens)
    assert out.dtype == dtype
    assert np.isnan(want).sum() == 1
    tolerance = float(jnp.finfo(dtype).eps) + 2.0**-20
    np.testing.assert_allclose(np.asarray(out, np.float64), want, rtol=tolerance, atol=tolerance)
    np.testing.assert_allclose(residual, want_residual, rtol=2.0**-20, atol=2.0**-20)
    assert (want == 0).all(-1).sum() == 1
    assert np.isneginf(want_residual).sum() == 1
