"""The decoder against an independent float64 oracle, its checkpoints, and the embedded model."""

import dataclasses
import json
import math
import sysconfig
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from tests.models import tiny
from turbojax.flax.norms import RMSNorm
from turbojax.models import (
    BEGINNING_OF_FILE,
    Transformer,
    TransformerConfig,
    embedded_path,
    held_out_modules,
    load,
    save,
)
from turbojax.models.checkpoint.huggingface import to_hf_tensors
from turbojax.rotary import Rope, rotate

TINY = tiny.config(
    vocab_size=23,
    hidden_size=24,
    intermediate_size=40,
    num_layers=3,
    head_dim=8,
    max_length=32,
    rope_theta=500.0,
    norm_eps=0.0001,
)
TIED = dataclasses.replace(TINY, tie_embeddings=True)


def make(config: TransformerConfig = TINY, **kwargs) -> Transformer:
    """A model whose norms have scales other than 1, so that they show."""
    model = Transformer(config, rngs=nnx.Rngs(0), **kwargs)
    rng = np.random.default_rng(1)
    norms = (model.norm, model.blocks.attention_norm, model.blocks.mlp_norm)
    for norm in norms:
        value = norm.scale.get_value()
        norm.scale.set_value(jnp.asarray(rng.uniform(0.5, 1.5, value.shape), value.dtype))
    return model


# Compiled once per shape: eager, every layer's scan would be compiled for every call.
run = nnx.jit(lambda model, tokens, positions=None: model(tokens, positions=positions))


def some_tokens(config: TransformerConfig = TINY, shape: tuple[int, int] = (2, 11)) -> jax.Array:
    return jnp.asarray(np.random.default_rng(2).integers(config.vocab_size, size=shape))


# An independent oracle: float64, loops over heads and pairs, weights under their HF names.


def oracle_norm(x: np.ndarray, scale: np.ndarray, eps: float) -> np.ndarray:
    return x / np.sqrt((x**2).mean(-1, keepdims=True) + eps) * scale


def oracle_rope(x: np.ndarray, position: int, theta: float) -> np.ndarray:
    """One head's vector at one position: pair (i, i + d/2) as a complex number, rotated."""
    half = len(x) // 2
    pairs = x[:half] + 1j * x[half:]
    rotated = pairs * np.exp(1j * position * theta ** (-np.arange(half) * 2.0 / len(x)))
    return np.concatenate([rotated.real, rotated.imag])


def oracle_attention(x: np.ndarray, weights: dict, config: TransformerConfig) -> np.ndarray:
    size, theta, length = config.head_dim, config.rope_theta, len(x)
    query, key, value = (
        (x @ weights[f"self_attn.{name}_proj.weight"].T).reshape(length, -1, size) for name in "qkv"
    )
    out = np.zeros((length, config.num_heads, size))
    for head in range(config.num_heads):
        shared = head // (config.num_heads // config.num_kv_heads)
        q = np.stack([oracle_rope(query[t, head], t, theta) for t in range(length)])
        k = np.stack([oracle_rope(key[t, shared], t, theta) for t in range(length)])
        for t in range(length):
            scores = np.exp(k[: t + 1] @ q[t] / math.sqrt(size))
            out[t, head] = scores / scores.sum() @ value[: t + 1, shared]
    return out.reshape(length, -1) @ weights["self_attn.o_proj.weight"].T


def oracle_mlp(x: np.ndarray, weights: dict) -> np.ndarray:
    gate = x @ weights["mlp.gate_proj.weight"].T
    up = x @ weights["mlp.up_proj.weight"].T
    return (gate / (1 + np.exp(-gate)) * up) @ weights["mlp.down_proj.weight"].T


def oracle_logits(tensors: dict, config: TransformerConfig, tokens: np.ndarray) -> np.ndarray:
    """Logits `[T, V]` of one sequence."""
    tensors = {name: tensor.astype(np.float64) for name, tensor in tensors.items()}
    x = tensors["model.embed_tokens.weight"][tokens]
    for i in range(config.num_layers):
        prefix = f"model.layers.{i}."
        layer = {n.removeprefix(prefix): t for n, t in tensors.items() if n.startswith(prefix)}
        normed = oracle_norm(x, layer["input_layernorm.weight"], config.norm_eps)
        x = x + oracle_attention(normed, layer, config)
        normed = oracle_norm(x, layer["post_attention_layernorm.weight"], config.norm_eps)
        x = x + oracle_mlp(normed, layer)
    x = oracle_norm(x, tensors["model.norm.weight"], config.norm_eps)
    head = "model.embed_tokens.weight" if config.tie_embeddings else "lm_head.weight"
    return x @ tensors[head].T


class TestConfig:
    @pytest.mark.parametrize(
        ("field", "value", "requirement"),
        [
            ("vocab_size", 0, "vocab_size=0 must be an integer of at least 1"),
            ("num_layers", 2.0, "num_layers=2.0 must be an integer"),
            ("num_layers", True, "num_layers=True must be an integer"),
            ("num_kv_heads", 3, "num_heads=4 must be a multiple of num_kv_heads=3"),
            ("head_dim", 7, "head_dim=7 must be even"),
            ("rope_theta", 0.0, "rope_theta=0.0 must be positive"),
            ("norm_eps", -1e-5, "norm_eps=-1e-05 must be positive"),
            ("norm_eps", "x", "norm_eps='x' must be positive and finite"),
            ("rope_theta", float("inf"), "rope_theta=inf must be positive and finite"),
        ],
    )
    def test_bad_values(self, field, value, requirement):
        with pytest.raises(ValueError, match=requirement):
            dataclasses.replace(TINY, **{field: value})

    def test_reads_either_spelling_of_theta_and_default_heads(self):
        hf = TINY.to_hf()
        for key in ("rope_parameters", "rope_theta"):
            assert TransformerConfig.from_hf({k: hf[k] for k in hf if k != key}).rope_theta == 500.0
        del hf["num_key_value_heads"], hf["head_dim"]
        config = TransformerConfig.from_hf(hf)
        assert (config.num_kv_heads, config.head_dim) == (4, 6)


class TestForward:
    @pytest.mark.quick(1)
    @pytest.mark.parametrize("config", [TINY, TIED])
    def test_equals_the_oracle(self, config):
        model, tokens = make(config), some_tokens(config)
        logits = np.asarray(run(model, tokens))
        assert logits.shape == (2, 11, config.vocab_size)
        assert logits.dtype == np.float32
        for row, expected in zip(logits, tokens, strict=True):
            oracle = oracle_logits(to_hf_tensors(model), config, np.asarray(expected))
            np.testing.assert_allclose(row, oracle, atol=2e-5)

    def test_norm_and_rope_equal_the_oracle(self):
        x = np.random.default_rng(3).normal(size=(1, 5, 2, 8)).astype(np.float32)
        norm = RMSNorm(8, 1e-4, param_dtype=jnp.float32)
        norm.scale.set_value(jnp.arange(8, dtype=jnp.float32))
        expected = oracle_norm(x.astype(np.float64), np.arange(8.0), 1e-4)
        np.testing.assert_allclose(norm(jnp.asarray(x)), expected, atol=1e-5)

        positions = np.array([[0, 1, 7, 100, 4095]])
        rotated = rotate(jnp.asarray(x), Rope(8).angles(jnp.asarray(positions)))
        for t, position in enumerate(positions[0]):
            for head in range(2):
                expected = oracle_rope(x[0, t, head].astype(np.float64), int(position), 10000.0)
                # A float32 angle of 4095 rad is good to 2e-4.
                np.testing.assert_allclose(rotated[0, t, head], expected, atol=1e-3)

    def test_positions_shift_nothing_but_rope(self):
        model, tokens = make(), some_tokens()
        default = jnp.broadcast_to(jnp.arange(11)[None], (2, 11))
        np.testing.assert_array_equal(run(model, tokens), run(model, tokens, default))
        # RoPE is relative: all positions moved together change nothing but rounding.
        shifted, spread = run(model, tokens, default + 5), run(model, tokens, 2 * default)
        np.testing.assert_allclose(run(model, tokens), shifted, atol=2e-5)
        assert not np.allclose(run(model, tokens), spread, atol=1e-3)

    @pytest.mark.quick(slow=2)
    @pytest.mark.parametrize("variant", [{"unroll": 3}, {"remat": True}])
    def test_variants_compute_the_same(self, variant):
        tokens = some_tokens()

        @nnx.jit
        @nnx.grad
        def gradient(model):
            return jnp.mean(jnp.square(model(tokens)))

        plain, other = gradient(make()), gradient(make(**variant))
        for a, b in zip(jax.tree.leaves(plain), jax.tree.leaves(other), strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6)

    def test_jit_equals_eager(self):
        model, tokens = make(), some_tokens()
        np.testing.assert_allclose(run(model, tokens), model(tokens), atol=1e-5)

    def test_bfloat16_compute_with_float32_parameters(self):
        tokens = some_tokens()
        logits = run(make(dtype=jnp.bfloat16), tokens)
        assert logits.dtype == jnp.float32
        exact = run(make(), tokens)
        assert 0 < jnp.max(jnp.abs(logits - exact)) < 0.1 * jnp.max(jnp.abs(exact))

    def test_bad_calls(self):
        model, tokens = make(), some_tokens()
        with pytest.raises(TypeError, match="tokens.dtype=float32 must be an integer"):
            model(tokens.astype(jnp.float32))
        with pytest.raises(ValueError, match=r"tokens.shape=\(11,\) must be"):
            model(tokens[0])
        with pytest.raises(ValueError, match="at most max_length=32"):
            model(some_tokens(shape=(1, 33)))
        with pytest.raises(ValueError, match="positions.shape"):
            model(tokens, positions=jnp.zeros((2, 10), jnp.int32))
        with pytest.raises(TypeError, match="positions.dtype=float32"):
            model(tokens, positions=jnp.zeros((2, 11)))
        with pytest.raises(ValueError, match="num_layers=3"):
            model(tokens, caches=jnp.zeros((2, 5)))


def exact_cache_attend(query, key, value, cache, options=None):
    """Attention through an exact cache: keys, values, and how many tokens they hold."""
    keys, values, length = cache
    start = (0, length, 0, 0)
    keys = jax.lax.dynamic_update_slice(keys, key, start)
    values = jax.lax.dynamic_update_slice(values, value, start)
    seen = length + 1 + jnp.arange(query.shape[1])
    mask = jnp.arange(keys.shape[1])[None, :] < seen[:, None]
    out = jax.nn.dot_product_attention(query, keys, values, mask=mask[None, None])
    return out, (keys, values, length + query.shape[1])


def test_decoding_through_a_cache_equals_the_whole_forward():
    model, tokens = make(), some_tokens()
    shape = (TINY.num_layers, 2, TINY.max_length, TINY.num_kv_heads, TINY.head_dim)
    caches = (jnp.zeros(shape), jnp.zeros(shape), jnp.zeros(TINY.num_layers, jnp.int32))
    pieces, start = [], 0

    @nnx.jit
    def step(model, tokens, positions, caches):
        return model(tokens, positions=positions, attend=exact_cache_attend, caches=caches)

    for length in (5, 1, 1, 1, 1, 1, 1):
        positions = jnp.broadcast_to(start + jnp.arange(length)[None], (2, length))
        logits, caches = step(model, tokens[:, start : start + length], positions, caches)
        pieces.append(logits)
        start += length
    np.testing.assert_allclose(jnp.concatenate(pieces, axis=1), run(model, tokens), atol=2e-5)
    np.testing.assert_array_equal(caches[2], 11)


class TestCheckpoint:
    def test_casts(self, tmp_path):
        model = make()
        save(model, tmp_path, dtype=jnp.bfloat16, extra_config={"bos_token_id": 0})
        assert json.loads((tmp_path / "config.json").read_text())["bos_token_id"] == 0
        assert load(tmp_path).dtype == jnp.bfloat16
        rounded = load(tmp_path, dtype=jnp.float32)
        expected = model.embedding.get_value().astype(jnp.bfloat16).astype(jnp.float32)
        np.testing.assert_array_equal(rounded.embedding.get_value(), expected)


class TestEmbedded:
    @pytest.mark.slow
    def test_fits(self):
        assert sum(file.stat().st_size for file in embedded_path().iterdir()) <= 16_000_000
        model = load("embedded")
        assert model.dtype == jnp.bfloat16
        assert model.config.max_length >= 4096
        assert model.config.head_dim in (64, 128)
        assert model.config.vocab_size == 256

    def test_card_names_data_and_command(self):
        card = (embedded_path() / "README.md").read_text(encoding="utf-8")
        for word in ("PSF-2.0", "training.train_embedded_model", "bytes seen", "loss_curve.png"):
            assert word in card
        data = json.loads((embedded_path() / "training_data.json").read_text(encoding="utf-8"))
        assert set(data["held_out"]) == set(held_out_modules())
        assert all(row["licence"] for row in data["packages"])

    @pytest.mark.optimized
    @pytest.mark.slow
    def test_snippet_of_the_card_runs(self, capsys):
        card = (embedded_path() / "README.md").read_text(encoding="utf-8")
        snippet = card.split("```python\n")[1].split("```")[0]
        names: dict = {}
        exec(snippet, names)
        assert names["logits"].shape == (1, 2048, 256)
        assert len(capsys.readouterr().out) >= 2

    @pytest.mark.optimized
    @pytest.mark.slow
    def test_predicts_held_out_files(self):
        cut = []
        for name, share in (("argparse.py", 0.0), ("tarfile.py", 0.5)):
            assert name in held_out_modules()
            data = (Path(sysconfig.get_path("stdlib")) / name).read_bytes()
            stream = np.frombuffer(bytes([BEGINNING_OF_FILE]) + data, np.uint8).astype(np.int32)
            cut.append(stream[int(share * len(data)) :][:2049])
        windows = jnp.asarray(np.stack(cut))
        log_p = jax.nn.log_softmax(run(load("embedded", dtype=jnp.float32), windows[:, :-1]))
        chosen = jnp.take_along_axis(log_p, windows[:, 1:, None], axis=-1)
        assert -jnp.mean(chosen) / math.log(2) < 1.1
