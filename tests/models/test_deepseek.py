"""DeepSeek-V2 and V3: latent attention in both forms, caches of latents, files, refusals."""

import dataclasses
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from tests.models import hf_helpers as hf
from tests.models import moe_helpers as moe
from tests.models.test_parity_cache import continues, error, through
from tests.recordings import parity_texts as texts
from turbojax import models
from turbojax.models import TransformerConfig
from turbojax.models.decoder import apply_block
from turbojax.models.families import LatentConfig

NAMES = ("deepseek-v2-lite", "deepseek-v2", "deepseek-v3")
LATENT = LatentConfig(24, 16, 8, 12)


@pytest.mark.fuzz
@pytest.mark.parametrize("name", NAMES[::-1])
def test_absorbed_form_is_the_expanded_one(decoder, name):
    """Through caches of latents, token by token: what transformers computes, as recorded."""
    model = decoder(name)
    assert error("latent", model, name) < texts.TOLERANCE
    continues("latent", model, name, "left")


@pytest.mark.slow
def test_compressed_latents(decoder):
    """Logits of peaked attention on 24 channels, and experts that are close choices, lose much."""
    model = decoder(NAMES[0])
    exact = through("latent", model)
    found = {kind: moe.relative(through(kind, model), exact) for kind in ("latent_fp8_e4m3",)}
    assert 1e-3 < found["latent_fp8_e4m3"] < 0.5


def test_sizes_of_caches(decoder):
    """A token takes the latent and the rotary key, and not every head's keys and values."""
    model = decoder(NAMES[0])
    caches = {kind: models.init_caches(model, 2, 64, kind) for kind in ("exact", "latent")}
    [exact, latent] = (x.layers[0] for x in caches.values())
    assert (exact.num_kv_heads, exact.head_dim) == (4, 24)
    assert (latent.num_kv_heads, latent.head_dim, latent.rope_dim) == (1, 24 + 8, 8)
    assert latent.nbytes < exact.nbytes / 5


@pytest.mark.slow
def test_latents_of_models_without():
    config = dataclasses.replace(TransformerConfig.from_hf(hf.config("llama2")), num_layers=1)
    decoder = models.random_decoder(config, dtype=jnp.float32)
    with pytest.raises(ValueError, match="cache='latent' must be .* the model has no latents"):
        models.init_caches(decoder, 1, 16, "latent")


def oracle(params, x, positions, config):
    """Attention of one sequence ``[T, D]``, head by head, in float64."""
    latent, heads = config.latent, config.num_heads
    w = jax.tree.map(lambda a: np.asarray(a, np.float64), params)

    def norm(y, scale, eps=1e-6):
        return y / np.sqrt((y * y).mean(-1, keepdims=True) + eps) * scale

    def rotate_one(y):
        angle = positions[:, None] * 10000.0 ** (-np.arange(0, 8, 2) / 8)
        out = np.empty_like(y)
        even, odd = y[:, ::2], y[:, 1::2]
        out[:, ::2] = even * np.cos(angle) - odd * np.sin(angle)
        out[:, 1::2] = odd * np.cos(angle) + even * np.sin(angle)
        return out

    a = w["attention"]
    q = norm(x @ a["q_a_proj"]["kernel"], a["q_a_norm"]["scale"]) @ a["q_b_proj"]["kernel"]
    kept = x @ a["kv_a_proj"]["kernel"]
    c, rotary = (
        norm(kept[:, : latent.rank], a["kv_a_norm"]["scale"]),
        rotate_one(kept[:, latent.rank :]),
    )
    kv = (c @ a["kv_b_proj"]["kernel"]).reshape(len(x), heads, -1)
    q = q.reshape(len(x), heads, -1)
    out = []
    for n in range(heads):
        query = np.concatenate([q[:, n, :16], rotate_one(q[:, n, 16:])], 1)
        key = np.concatenate([kv[:, n, :16], rotary], 1)
        scores = query @ key.T / np.sqrt(24)
        scores[np.triu_indices(len(x), 1)] = -np.inf
        weights = np.exp(scores - scores.max(1, keepdims=True))
        out.append(weights / weights.sum(1, keepdims=True) @ kv[:, n, 16:])
    return np.concatenate(out, 1) @ a["o_proj"]["kernel"]


@pytest.mark.slow
def test_a_layer_against_an_oracle(decoder):
    model = decoder("deepseek-v2")
    config, params = model.config, model.layers[0]
    # What a layer adds if its feed-forward layer adds nothing.
    zeros = jax.tree.map(jnp.zeros_like, params["mlp"])
    params = {**params, "mlp": zeros}
    x = np.random.default_rng(0).normal(size=(1, 11, 64)).astype(np.float32)
    positions = jnp.arange(11)[None]
    out, _ = apply_block(
        params,
        jnp.asarray(x),
        config.rope.angles(positions),
        models.causal_attention,
        None,
        config.attention_options(0),
        config.rope,
        config=config,
        dtype=model.dtype,
    )
    scale = np.asarray(params["attention_norm"]["scale"], np.float64)
    wide = x[0].astype(np.float64)
    normed = wide / np.sqrt((wide * wide).mean(-1, keepdims=True) + config.norm_eps) * scale
    want = wide + oracle(params, normed, np.arange(11.0), config)
    np.testing.assert_allclose(np.asarray(out)[0], want, rtol=1e-4, atol=1e-4)


@pytest.mark.fuzz
def test_gradients_reach_all_weights(folder):
    """Training computes in expanded form; the correction is chosen by, and has none."""
    model = models.load(folder("deepseek-v3"))
    from flax import nnx

    text = jnp.asarray(moe.tokens(1, 7))
    graph, state = nnx.split(model)

    def mean(state):
        return jnp.mean(jax.nn.logsumexp(nnx.merge(graph, state)(text), axis=-1))

    gradient = nnx.to_pure_dict(jax.grad(mean)(state))
    for path, x in jax.tree.leaves_with_path(gradient):
        is_correction = "correction" in jax.tree_util.keystr(path)
        assert (np.abs(np.asarray(x)).max() > 0) != is_correction, path


@pytest.mark.slow
def test_sessions_are_stored(decoder, tmp_path):
    model, prompts = decoder(NAMES[0]), moe.tokens(2, 9)
    session = models.start(model, jnp.asarray(prompts), max_length=24, cache="latent")
    models.save_session(tmp_path / "session", session)
    again, _ = models.load_session(tmp_path / "session", model)
    new = jnp.asarray(moe.tokens(2, 3, seed=5))
    np.testing.assert_array_equal(models.score(session, new), models.score(again, new))
    other = decoder(NAMES[1])
    with pytest.raises(ValueError, match="session"):
        models.load_session(tmp_path / "session", other)


@pytest.mark.slow
def test_first_layers_without_experts_and_layers_that_predict(folder, tmp_path):
    """Files of DeepSeek-V3 hold a layer behind the last one; nothing reads it."""
    tensors = load_file(folder("deepseek-v3") / "model.safetensors")
    last = "model.layers.2."
    further = {
        name.replace(last, "model.layers.3."): x for name, x in tensors.items() if last in name
    }
    file = {**hf.config("deepseek-v3"), "first_k_dense_replace": 1}
    dense = TransformerConfig.from_hf(file)
    assert [dense.has_experts(i) for i in range(3)] == [False, True, True]
    assert TransformerConfig.from_hf(json.loads(json.dumps(dense.to_hf()))) == dense
    kept = {x: y for x, y in tensors.items() if not x.startswith("model.layers.0.mlp.")}
    for name in ("gate_proj", "up_proj", "down_proj"):
        shape = (64, 96) if name == "down_proj" else (96, 64)
        kept[f"model.layers.0.mlp.{name}.weight"] = hf.weight("deepseek-v3", name, shape)
    (tmp_path / "config.json").write_text(json.dumps(file))
    save_file(kept | further, tmp_path / "model.safetensors", {"format": "pt"})
    decoder = models.load_decoder(tmp_path)
    assert sum(x.size for x in jax.tree.leaves(decoder)) == dense.num_parameters
    assert np.isfinite(moe.logits(decoder, moe.tokens(1, 5))).all()
    whole = models.unstack(models.load(tmp_path))
    jax.tree.map(np.testing.assert_array_equal, whole.layers, decoder.layers)
    stored = models.open_decoder(tmp_path)
    jax.tree.map(np.testing.assert_array_equal, tuple(stored.layers), decoder.layers)


@pytest.mark.parametrize("name", NAMES)
def test_a_model_without_experts_says_so(name):
    """transformers gives experts to layers from `first_k_dense_replace` on, and be they none."""
    file = {**hf.config(name), "first_k_dense_replace": 3}
    dense = TransformerConfig.from_hf(file)
    assert dense.experts is None
    assert dense.to_hf()["first_k_dense_replace"] == dense.num_layers
    assert TransformerConfig.from_hf(dense.to_hf()) == dense


@pytest.mark.slow
def test_the_correction_stays_float32(folder):
    """Half of its bits would move choices that training balanced."""
    decoder = models.load_decoder(folder("deepseek-v3"), dtype=jnp.bfloat16)
    router = decoder.layers[0]["mlp"]["router"]
    assert (router["kernel"].dtype, router["correction"].dtype) == (jnp.bfloat16, jnp.float32)
    assert decoder.dtype == jnp.bfloat16
    tensors = models.checkpoint.huggingface.to_hf_tensors(
        models.load(folder("deepseek-v3"), dtype=jnp.bfloat16)
    )
    name = "model.layers.0.mlp.gate.e_score_correction_bias"
    np.testing.assert_array_equal(tensors[name], hf.tensors("deepseek-v3")[name])


def test_what_is_not_supported_is_refused(decoder):
    for name in NAMES:
        model = decoder(name)
        with pytest.raises(NotImplementedError, match="latent attention is not supported in a qu"):
            models.quantize_model(model, smoothing=models.quantize.Smoothing(rpn=False, crs=False))
        with pytest.raises(NotImplementedError, match="latent attention is not supported in a qu"):
            models.random_quantized_decoder(model.config)


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        (NAMES[0], {"topk_method": "noaux_tc"}, "topk_method='noaux_tc' is not supported"),
        (NAMES[0], {"norm_topk_prob": True}, "norm_topk_prob=True is not supported"),
        (NAMES[0], {"mlp_bias": True}, "mlp_bias=True is not supported for 'deepseek_v2' with exp"),
        (NAMES[2], {"scoring_func": "softmax"}, "scoring_func='softmax' is not supported"),
        (NAMES[2], {"topk_method": "greedy"}, "topk_method='greedy' is not supported"),
        (NAMES[2], {"moe_layer_freq": 2}, "moe_layer_freq=2 is not supported"),
    ],
)
def test_files_that_are_not_supported(name, change, message):
    with pytest.raises(NotImplementedError, match=message):
        TransformerConfig.from_hf({**hf.config(name), **change})


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        (NAMES[0], {"kv_lora_rank": 0}, "kv_lora_rank=0 must be an integer of at least 1"),
        (NAMES[0], {"q_lora_rank": "no"}, "q_lora_rank='no' must be an integer"),
        (NAMES[0], {"head_dim": 64}, "head_dim=64 must be 8, or left out"),
        (NAMES[0], {"qk_head_dim": 64}, "qk_head_dim=64 must be 24, or left out"),
        (NAMES[0], {"qk_rope_head_dim": 7, "head_dim": None}, "rope_dim=7 must be even"),
        (NAMES[0], {"v_head_dim": 25}, "value_dim=25 must be at most"),
        (NAMES[0], {"num_experts_per_tok": None}, "num_experts_per_tok=None must be an integer"),
        (NAMES[0], {"routed_scaling_factor": 0}, "routed_scaling_factor=0 must be positive"),
        (NAMES[1], {"n_group": 4}, "n_group=4 must share 6 experts evenly"),
        (NAMES[1], {"topk_group": 1}, "topk_group=1 of them must hold num_experts_per_tok=3"),
        (NAMES[2], {"n_group": None}, "n_group=None must be an integer"),
        (NAMES[2], {"rope_interleave": 1}, "rope_interleave=1 must be true or false"),
    ],
)
def test_wrong_files(name, change, message):
    with pytest.raises(ValueError, match=message):
        TransformerConfig.from_hf({**hf.config(name), **change})


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"num_kv_heads": 2}, "num_kv_heads=2 must be 4"),
        ({"head_dim": 16}, "head_dim=16 must be 24"),
        ({"rotary_dim": 8}, "rotary_dim=8 must be None"),
        ({"attention_scale": 1.0}, "attention_scale=1.0 must be None"),
        ({"qk_norm": True}, "qk_norm=True must be False"),
        ({"family": "llama", "experts": None}, "config.json of family 'llama' cannot say .*latent"),
    ],
)
def test_wrong_configurations(change, message):
    config = TransformerConfig.from_hf(hf.config(NAMES[0]))
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(config, **change).to_hf()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"rank": 0}, "latent.rank=0 must be an integer of 1"),
        ({"query_rank": 0}, "latent.query_rank=0 must be an integer of 1"),
        ({"rope_dim": 9}, "latent.rope_dim=9 must be even"),
        ({"interleaved": 1}, "latent.interleaved=1 must be true or false"),
        ({"yarn_mscale": -1.0}, "latent.yarn_mscale=-1.0 must be finite and at least 0"),
    ],
)
def test_wrong_latents(change, message):
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(LATENT, **change)


def test_a_latent_of_another_kind():
    config = TransformerConfig.from_hf(hf.config(NAMES[0]))
    with pytest.raises(TypeError, match="must be a LatentConfig or None"):
        dataclasses.replace(config, latent={"rank": 24})
