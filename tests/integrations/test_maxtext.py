"""turbojax in MaxText: the training step against its own attention, and its trainer."""

import json
import os

import jax
import jax.numpy as jnp
import maxtext
import numpy as np
import pytest
from flax import nnx
from maxtext.configs import pyconfig
from maxtext.layers import attention_op
from maxtext.utils import maxtext_utils, model_creation_utils

import turbojax as tj
from tests.integrations.helpers import (
    FLOAT,
    ROUNDING,
    assert_trains_alike,
    random_like,
)
from turbojax.integrations.maxtext import turbojax_attention

pytestmark = pytest.mark.integrations

BASE = os.path.join(os.path.dirname(maxtext.__file__), "configs", "base.yml")
B, T, VOCAB = 2, 32, 32
SMALL = {
    "run_name": "test",
    "enable_checkpointing": False,
    "skip_jax_distributed_system": True,
    "hardware": "cpu",
    "dataset_type": "synthetic",
    "base_emb_dim": 32,
    "base_mlp_dim": 48,
    "base_num_query_heads": 4,
    "base_num_kv_heads": 2,
    "head_dim": 16,
    "base_num_decoder_layers": 2,
    "vocab_size": VOCAB,
    "max_target_length": T,
    "per_device_batch_size": B,
    "dtype": "float32",
    "attention": "dot_product",
    "decoder_block": "llama2",
}
CASES = {
    "sinks": {"attention_sink": True},
    "window and cap": {
        "decoder_block": "gemma2",
        "sliding_window_size": 5,
        "attn_logits_soft_cap": 20.0,
    },
}


def arguments(**changes):
    return [f"{name}={value}" for name, value in {**SMALL, **changes}.items()]


def make_model(**changes):
    """A random model of two layers, which are scanned and rematerialized, MaxText's default."""
    config = pyconfig.initialize(["", BASE, *arguments(**changes)])
    mesh = maxtext_utils.get_mesh_from_config(config, jax.devices()[:1])
    model = model_creation_utils.from_config(config, mesh=mesh, rngs=nnx.Rngs(0))
    nnx.update(model, random_like(nnx.state(model, nnx.Param), seed=1))
    return model


def step(model):
    """The loss of the next tokens of packed sequences, and its gradient."""
    tokens = jax.random.randint(jax.random.key(0), (B, T), 0, VOCAB)
    # The last sequence of the first row is padding, whose id MaxText sets to 0.
    ids = np.stack([np.repeat([1, 2, 0], [9, 15, 8]), np.repeat([1, 2, 3], [4, 4, 24])])
    ids = jnp.asarray(ids, jnp.int32)
    place = jnp.broadcast_to(jnp.arange(T), (B, T))

    @nnx.jit
    @nnx.value_and_grad
    def loss(model):
        logits = model(
            decoder_input_tokens=tokens,
            decoder_positions=place,
            decoder_segment_ids=ids,
            enable_dropout=False,
        )
        nnx.pop(model, nnx.Intermediate)
        log_probs = jax.nn.log_softmax(logits[:, :-1].astype(jnp.float32))
        picked = jnp.take_along_axis(log_probs, tokens[:, 1:, None], axis=2)[..., 0]
        weight = (ids[:, 1:] == ids[:, :-1]) & (ids[:, 1:] > 0)
        return -(picked * weight).sum() / weight.sum()

    with jax.set_mesh(model.mesh):
        return loss(model)


@pytest.mark.parametrize("name", CASES)
def test_training_step(name):
    case = CASES[name]

    def ours(*config):
        with turbojax_attention(*config):
            model = make_model(**case)
        return step(model)

    eight = ours() if name == "sinks" else None
    assert_trains_alike(step(make_model(**case)), ours(FLOAT), eight)


def losses(folder, **changes):
    """Losses of two steps of MaxText's own trainer, over all devices."""
    from maxtext.trainers.pre_train import train

    folder.mkdir()
    metrics = folder / "metrics.jsonl"
    more = {"base_output_directory": folder, "metrics_file": metrics, "steps": 2, **changes}
    train.main(["", BASE, *arguments(**more)])
    lines = metrics.read_text(encoding="utf-8").splitlines()
    return [json.loads(line)["learning/loss"] for line in lines]


def test_its_trainer(tmp_path):
    """The same losses; the second one is that of weights after a step."""
    theirs = losses(tmp_path / "theirs")
    with turbojax_attention(FLOAT):
        ours = losses(tmp_path / "ours")
    assert len(theirs) == 2
    np.testing.assert_allclose(ours, theirs, rtol=100 * ROUNDING)
    with turbojax_attention():
        eight = losses(tmp_path / "eight")
    assert (np.abs(np.subtract(eight, theirs)) > 100 * ROUNDING * np.abs(theirs)).all()
    np.testing.assert_allclose(eight, theirs, rtol=1 / 16)


def test_refusals():
    with pytest.raises(TypeError, match="config='fp8' must be a TurboConfig"):
        turbojax_attention("fp8").__enter__()
    with pytest.raises(ValueError, match="implementation='cuda' must be"):
        turbojax_attention(implementation="cuda").__enter__()
    known = attention_op.AttentionOp
    with pytest.raises(ValueError, match="no AttentionOp was made within"), turbojax_attention():
        assert attention_op.AttentionOp is not known
    assert attention_op.AttentionOp is known
    with turbojax_attention():
        model = make_model(dropout_rate=0.1, enable_dropout=True)
    with pytest.raises(NotImplementedError, match=r"dropout_rate=0.1 must be 0"):
        step(model)
    config, mesh = model.config, model.mesh
    heads = jnp.ones((B, T, 4, 16))
    for kind, given, match in (
        ("chunk", {}, "attention_type='chunk' must be one of global"),
        ("global", {"bidirectional_mask": jnp.ones((B, T))}, "bidirectional_mask must not be"),
        ("global", {"record_max_logits": True}, "record_max_logits must not be"),
    ):
        with turbojax_attention(tj.TurboConfig()):
            op = attention_op.AttentionOp(
                config,
                mesh,
                "dot_product",
                T,
                4,
                4,
                attention_type=kind,
            )
        with pytest.raises(NotImplementedError, match=match):
            op(heads, heads, heads, None, None, "train", **given)
