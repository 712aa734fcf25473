"""Fine-tuning on packed sequences: documents that do not see each other."""

import itertools

import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from tests.training.finetune_helpers import SETTINGS, TINY, corpus, tiny_model
from turbojax import finetune, models
from turbojax.finetune import base
from turbojax.models import pooled_by_name

# Every block at level 1, so that only what documents do not see of each other can differ.
EXACT = pooled_by_name("window", window=256, block_size=32)


def first_step(**options) -> dict:
    trainer = finetune.Trainer(tiny_model(), SETTINGS, corpus().stream, **options)
    return {name: float(x) for name, x in trainer.run_step().items()}


@pytest.mark.slow
def test_loss_is_that_of_documents_by_themselves():
    """Each alone, in float64; a run that sees across is another one."""
    stream = corpus().stream
    starts = base.window_starts(
        np.arange(SETTINGS.batch_size),
        num_bytes=stream.size,
        context=SETTINGS.context,
        seed=SETTINGS.seed,
    )
    model = models.Transformer(finetune.for_context(TINY, 256), rngs=nnx.Rngs(1))
    losses, cuts = [], 0
    for start in starts:
        tokens = stream[start : start + SETTINGS.context + 1].astype(np.int32)
        begins = [0, *np.flatnonzero(tokens[1:-1] == 0) + 1, SETTINGS.context]
        cuts += len(begins) - 2
        for begin, end in itertools.pairwise(begins):
            logits = model(jnp.asarray(tokens[None, begin:end]))
            logits = np.asarray(logits[0], np.float64)
            logits -= np.log(np.exp(logits).sum(axis=-1, keepdims=True))
            losses += list(-logits[np.arange(end - begin), tokens[begin + 1 : end + 1]])
    assert cuts > 0
    assert len(losses) == SETTINGS.batch_size * SETTINGS.context
    found = first_step(pooled=EXACT, packed=True)
    assert found["bits_per_byte"] == pytest.approx(np.mean(losses) / np.log(2), abs=1e-5)
    across = first_step(pooled=EXACT)
    assert abs(across["bits_per_byte"] - found["bits_per_byte"]) > 1e-4
    assert found["density"] <= across["density"]


def test_needs_pooled_attention():
    with pytest.raises(ValueError, match="packed=True needs pooled attention"):
        first_step(packed=True)
