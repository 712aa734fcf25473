"""Paged attention for Hopper, on a CPU: which entries of a table must be pages of the pool."""

import functools
import types

import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.mosaic import warp as frame
from pallas_kernels.mosaic.hopper.paged import inputs, merge
from tests.oracles import warp
from turbojax.caches.paged import checks


@pytest.mark.quick(5, slow=0)
@pytest.mark.parametrize("window", [None, (40, 0), (700, 3)])
@pytest.mark.parametrize("shared", [1, 4, 16])
def test_the_pages_that_must_exist(monkeypatch, window, shared):
    """Those the definition names: no page before the windows, and none past the length."""
    for module in (frame, inputs, merge):
        monkeypatch.setattr(module, "lane", warp)
    rng = np.random.default_rng(shared)
    tokens, entries, size, num_pages = 3, 100, 16, 50
    pool = types.SimpleNamespace(page_size=size, num_pages=num_pages)
    for _ in range(40):
        length = int(rng.choice([0, 1, 16, 33, 555, 1599, 1600]))
        count = int(rng.integers(0, tokens + 1))
        tables = rng.integers(0, num_pages, (1, entries)).astype(np.int32)
        seen = max(length - count - (window or (length,))[0], 0) // size
        bad = rng.choice([0, seen - 1, seen, seen + 40, length // size, entries - 1])
        tables[0, np.clip(bad, 0, entries - 1)] = rng.choice([-1, num_pages])
        lengths, counts = jnp.asarray([length]), jnp.asarray([count])
        first = checks.first_seen(lengths, counts, tokens, window)
        want = bool(checks.readable(pool, jnp.asarray(tables), lengths, first)[0])
        held = warp.integer(length), warp.integer(count)
        a = types.SimpleNamespace(
            tables=warp.Pointer(tables.view(np.uint8).ravel()), max_pages=entries, page_size=size,
            num_pages=num_pages, held=lambda _, held=held: held,
        )  # fmt: skip
        a.page = functools.partial(inputs.Arrays.page, a)
        s = types.SimpleNamespace(window=window)
        zero = warp.integer(0)
        found = 0
        for number in range(shared):
            row = merge._Row(
                a, [], s, types.SimpleNamespace(shared=shared), zero, zero, zero,
                warp.integer(length), zero, warp.Int(warp.LANES), warp.integer(number), zero,
            )  # fmt: skip
            pages = row.pages(row.first_needed + row.warp * 32)
            found |= int(row.has_bad_page(pages).value[0])
        assert (found == 0) == want
