"""What pages cost on real text, decoded byte by byte by the embedded model."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from benchmarks.cache_quality import decode_bits, held_out_windows
from turbojax import models

CONTEXT, DECODED = 2239, 192
FILES = ("argparse.py", "configparser.py", "ipaddress.py", "statistics.py")


@pytest.fixture(scope="module")
def embedded() -> tuple[models.Llama, np.ndarray, np.ndarray]:
    """The model, a window of each of four held-out modules, and their bits without any cache."""
    model = models.load(dtype=jnp.float32)
    cut = held_out_windows(CONTEXT, 1)
    tokens = np.concatenate([cut[file] for file in FILES])
    log_p = jax.nn.log_softmax(model(jnp.asarray(tokens[:, :-1]))[:, -DECODED:], axis=-1)
    targets = jnp.asarray(tokens[:, -DECODED:])
    bits = -np.asarray(jnp.take_along_axis(log_p, targets[..., None], axis=-1))[..., 0]
    return model, tokens, bits / np.log(2)


@pytest.mark.optimized
@pytest.mark.slow
def test_what_pages_cost_on_real_text(embedded):
    """Of turbo4, the coarsest of them. `test_layer_cache` bounds the errors of all kinds."""
    model, tokens, exact_bits = embedded
    bits, _, nbytes = decode_bits(model, tokens, CONTEXT + 1 - DECODED, "turbo4")
    assert bits.mean() - exact_bits.mean() < 0.01
    # And this is not the exact cache in disguise.
    assert np.abs(bits - exact_bits).max() > 1e-3
    config = model.config
    exact_bytes = 4 * config.num_layers * len(FILES) * CONTEXT * config.num_kv_heads * 64
    assert exact_bytes / nbytes > 3.7
