"""turbojax in Levanter: the training step, and pages in its inference engine."""

import dataclasses

import equinox as eqx
import haliax as hax
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from levanter.inference.engine import InferenceEngine, InferenceEngineConfig, Request
from levanter.inference.jit_scheduler import SeqDecodingParams
from levanter.layers.attention import AttentionBackend, AttentionMask
from levanter.models.llama import LlamaConfig, LlamaLMHeadModel

from tests.integrations.helpers import (
    CLOSE_TO_CODES,
    CLOSE_TO_EXACT,
    FLOAT,
    assert_trains_alike,
    random_like,
    relative_error,
)
from turbojax.integrations.levanter import with_turbojax

pytestmark = pytest.mark.integrations

B, T = 2, 24
CONFIG = LlamaConfig(
    seq_len=T,
    hidden_dim=32,
    intermediate_dim=48,
    num_layers=2,
    num_heads=4,
    head_dim=32,
    num_kv_heads=2,
    gradient_checkpointing=False,
    attn_backend=AttentionBackend.VANILLA,
)
VOCAB = hax.Axis("vocab", 32)
BATCH = hax.Axis("batch", B)


def make_model(**changes):
    config = dataclasses.replace(CONFIG, **changes)
    model = LlamaLMHeadModel.init(VOCAB, config, key=jax.random.key(0))
    arrays, rest = eqx.partition(model, eqx.is_inexact_array)
    return eqx.combine(random_like(arrays, seed=1), rest)


def masks():
    """By what Levanter's trainers make of a batch, and what else its masks may be."""
    ids = jnp.asarray(np.stack([np.repeat([0, 1], [9, 15]), np.repeat([2, 4, 5], [4, 4, 16])]))
    causal = AttentionMask.causal()
    lower = hax.named(jnp.tril(jnp.ones((T, T), bool)), (CONFIG.Pos, CONFIG.KeyPos))
    return {
        "causal": causal,
        "segments": causal.with_segment_ids(hax.named(ids, (BATCH, CONFIG.Pos))),
        "window": AttentionMask.causal(sliding_window=5),
        "explicit": AttentionMask.explicit(lower),
        "none": None,
    }


def step(model, mask):
    """The loss of the next tokens, as Levanter's trainer takes it, and its gradient."""
    tokens = jax.random.randint(jax.random.key(0), (B, T), 0, VOCAB.size)

    @eqx.filter_value_and_grad
    def loss(model):
        logits = model(hax.named(tokens, (BATCH, CONFIG.Pos)), attn_mask=mask)
        logits = logits.rearrange((BATCH, CONFIG.Pos, VOCAB)).array
        log_probs = jax.nn.log_softmax(logits[:, :-1].astype(jnp.float32))
        return -jnp.take_along_axis(log_probs, tokens[:, 1:, None], axis=2).mean()

    value, grads = eqx.filter_jit(loss)(model)
    return value, [x for x in jax.tree.leaves(grads) if eqx.is_inexact_array(x)]


@pytest.mark.parametrize("name", ["causal", "segments", "window", "explicit", "none"])
def test_training_step(name):
    mask = masks()[name]
    model = make_model()
    eight = step(with_turbojax(model), mask) if name == "segments" else None
    assert_trains_alike(step(model, mask), step(with_turbojax(model, config=FLOAT), mask), eight)


def generate(model, page_size=16, count=16):
    """Greedy tokens of requests of unlike lengths, one of them continued twice."""
    engine = InferenceEngine.from_model_with_config(
        model,
        None,
        InferenceEngineConfig(
            max_seq_len=64,
            page_size=page_size,
            max_pages=32,
            max_seqs=4,
            max_seqs_in_prefill=4,
            max_prefill_size=32,
            max_queued_tokens=32,
            max_rounds=4,
            compute_dtype=jnp.float32,
        ),
    )
    params = SeqDecodingParams.default()
    requests = [
        Request(
            prompt_tokens=prompt,
            request_id=i,
            decode_params=dataclasses.replace(
                params, max_num_tokens=jnp.array(len(prompt) + count, jnp.int32)
            ),
            n_generations=2 if i == 1 else 1,
        )
        for i, prompt in enumerate([[3, 1, 4, 1, 5], [9, 2], list(range(7, 24))])
    ]
    return engine.generate(requests).tokens


def test_greedy_text_of_pages():
    """Pages of tokens as they are give Levanter's own text."""
    model = make_model(seq_len=64)
    theirs = generate(model)
    ours = generate(with_turbojax(model))
    assert ours == theirs
    assert len({x for tokens in theirs for x in tokens}) > 8, theirs


def prompt_logits(model, cache_of):
    """Logits of a prompt's second half, which attends to the pages of its first."""
    from levanter.inference.page_table import PageBatchInfo, PageTableSpec

    cache = cache_of.initial_cache(PageTableSpec(num_pages=4, page_size=16), dtype=jnp.float32)
    tokens = jax.random.randint(jax.random.key(3), (24,), 0, VOCAB.size)

    def info(first, count):
        return PageBatchInfo(
            slot_ids=hax.named(jnp.array([0, 1]), "seq"),
            page_indices=hax.named(jnp.array([[2, 0], [1, 3]]), ("seq", "page")),
            seq_lens=hax.named(jnp.array([first + count, 0]), "seq"),
            cu_q_lens=hax.named(jnp.array([0, count, count]), "seq"),
            num_seqs=jnp.array(1),
            new_token_dests=hax.named(
                jnp.array([32, 0])[jnp.arange(first, first + count) // 16]
                + jnp.arange(first, first + count) % 16,
                "position",
            ),
            page_size=16,
        )

    for first in (0, 12):
        logits, cache = model.decode(
            hax.named(tokens[first : first + 12], "position"),
            cache,
            info(first, 12),
            hax.arange(hax.Axis("position", 12), start=first),
        )
    return logits.array


@pytest.mark.parametrize("kv_dtype", ["auto", "fp8_e4m3", "turbo4", "k8v4"])
def test_logits_of_pages(kv_dtype):
    model = make_model(seq_len=64)
    theirs = prompt_logits(model, model)
    changed = with_turbojax(model, kv_dtype=kv_dtype)
    ours = prompt_logits(changed, changed)
    bound = CLOSE_TO_EXACT if kv_dtype == "auto" else CLOSE_TO_CODES
    assert relative_error(ours, theirs) < bound


def test_refusals():
    model = make_model()
    with pytest.raises(TypeError, match="must have layers of"):
        with_turbojax(model.lm_head)
    with pytest.raises(ValueError, match="kv_dtype='turbo5' must be one of"):
        with_turbojax(model, kv_dtype="turbo5")
    changed = with_turbojax(model)
    mask = AttentionMask.causal(sliding_window=4, offset=1)
    with pytest.raises(NotImplementedError, match="does not move with it"):
        step(changed, mask)
