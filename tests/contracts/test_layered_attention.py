"""Models whose first layers attend by one function and the others by another."""

import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from tests.training.finetune_helpers import SETTINGS, TINY, corpus, tiny_model
from turbojax import finetune, models
from turbojax.finetune.trainer import dense_attention
from turbojax.models import FirstLayers, pooled_by_name

CONFIG = models.TransformerConfig(**{**TINY.described(), "num_layers": 3, "max_length": 256})
TOKENS = np.random.default_rng(0).integers(256, size=(1, 96))


class Watch:
    """Exact attention that says that it was asked."""

    def __init__(self, name: str, seen: list[str]) -> None:
        self.name, self.seen = name, seen

    def __call__(self, query, key, value, cache=None, *rest):
        self.seen.append(self.name)
        return dense_attention(query, key, value, cache, *rest)


@pytest.mark.quick(slow=1)
@pytest.mark.parametrize("remat", [False, True])
def test_each_layer_is_asked_for_its_own(remat):
    seen: list[str] = []
    attend = FirstLayers(Watch("first", seen), Watch("others", seen), 1)
    model = models.Transformer(CONFIG, remat=remat, rngs=nnx.Rngs(0))
    found = model(jnp.asarray(TOKENS), attend=attend)
    assert seen == ["first", "others", "others"]
    np.testing.assert_allclose(found, model(jnp.asarray(TOKENS)), atol=1e-5)
    if remat:
        return
    seen.clear()
    decoder, positions = models.unstack(model), jnp.arange(96)[None]
    hidden, _ = decoder.hidden(jnp.asarray(TOKENS), positions, attend, (None,) * 3)
    assert seen == ["first", "others"]  # the last two layers share a trace
    np.testing.assert_allclose(decoder.logits(hidden), found, atol=1e-5)


def test_it_is_no_attention_by_itself():
    attend = FirstLayers(dense_attention, dense_attention, 2)
    x = jnp.zeros((1, 8, 2, 16))
    with pytest.raises(NotImplementedError, match="must be asked for its layers"):
        attend(x, x, x)
    with pytest.raises(ValueError, match="count=0 must be at least 1"):
        FirstLayers(dense_attention, dense_attention, 0)
    with pytest.raises(TypeError, match="count=1.5 must be an integer"):
        FirstLayers(dense_attention, dense_attention, 1.5)


@pytest.mark.fuzz
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning")
def test_training_counts_dense_layers_in_the_density(tmp_path):
    pooled = pooled_by_name("topk", block_size=32, near=32, bounds=(0.1, 0.2, 0.3, 0.5), samples=2)
    model = models.Transformer(CONFIG, rngs=nnx.Rngs(1))
    densities = [
        float(
            finetune.Trainer(
                model, SETTINGS, corpus().stream, pooled=pooled, dense_layers=n
            ).run_step()["density"]
        )
        for n in (0, 2)
    ]
    # The levels of a layer follow from its queries and keys: the last one's change a little.
    assert densities[1] == pytest.approx((2 + densities[0]) / 3, abs=0.1)
    log = finetune.fine_tune(
        tmp_path,
        model,
        SETTINGS,
        corpus(),
        pooled=pooled,
        dense_layers=1,
        rhythm=finetune.Rhythm(evaluate_every=0),
    )
    assert log["identity"]["attention"]["dense_layers"] == 1
    assert "near=32" in log["identity"]["attention"]["policy"]
    assert log["held_out_bits_per_byte"]["run"] > 0


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"dense_layers": 1}, "dense_layers=1 must be 0 without pooled attention"),
        ({"dense_layers": 1, "pooled": True}, "dense_layers=1 must be at least 0 and below"),
        ({"dense_layers": -1, "pooled": True}, "dense_layers=-1 must be at least 0"),
    ],
)
def test_bad_numbers_of_dense_layers(options, message):
    if options.get("pooled"):
        options = {**options, "pooled": pooled_by_name("topk")}
    with pytest.raises(ValueError, match=message):
        finetune.Trainer(tiny_model(), SETTINGS, corpus().stream, **options)


@pytest.mark.slow
def test_packed_runs_have_no_dense_layers():
    model = models.Transformer(CONFIG, rngs=nnx.Rngs(1))
    with pytest.raises(ValueError, match="must be 0 with packed=True"):
        finetune.Trainer(
            model,
            SETTINGS,
            corpus().stream,
            pooled=pooled_by_name("topk"),
            dense_layers=1,
            packed=True,
        )
