"""Shapes of published models, by name, for measuring speed with `random_decoder`."""

import dataclasses
from typing import Any

from turbojax.models.config import ExpertsConfig, LatentConfig, TransformerConfig
from turbojax.rotary import LinearScaling, Llama3Scaling, YarnScaling

# Vocabulary, width, inner width, layers, heads, KV heads, width of a head, longest text.
_LLAMA_3_8B = TransformerConfig(128256, 4096, 14336, 32, 32, 8, 128, 8192, rope_theta=500000.0)
_QWEN: dict[str, Any] = {"rope_theta": 1000000.0, "norm_eps": 1e-6}
_GEMMA: dict[str, Any] = {
    "norm_eps": 1e-6,
    "tie_embeddings": True,
    "activation": "gelu_tanh",
    "attention_scale": 256**-0.5,
    "norm_offset": 1.0,
    "post_norms": True,
}

SHAPES = {
    "llama-2-7b": TransformerConfig(32000, 4096, 11008, 32, 32, 32, 128, 4096),
    "llama-3-8b": _LLAMA_3_8B,
    "llama-3.1-8b": dataclasses.replace(
        _LLAMA_3_8B,
        max_length=131072,
        rope_scaling=Llama3Scaling(
            factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_length=8192
        ),
    ),
    "mistral-7b": TransformerConfig(
        *(32000, 4096, 14336, 32, 32, 8, 128, 32768),
        family="mistral",
        local_windows=(4096,) * 32,
    ),
    "qwen-2.5-7b": TransformerConfig(
        *(152064, 3584, 18944, 28, 28, 4, 128, 131072), family="qwen2", qkv_bias=True, **_QWEN
    ),
    "qwen-3-8b": TransformerConfig(
        *(151936, 4096, 12288, 36, 32, 8, 128, 40960), family="qwen3", qk_norm=True, **_QWEN
    ),
    "qwen-3-30b-a3b": TransformerConfig(
        *(151936, 2048, 6144, 48, 32, 4, 128, 40960),
        family="qwen3_moe",
        qk_norm=True,
        experts=ExpertsConfig(count=128, per_token=8, intermediate_size=768, normalize=True),
        **_QWEN,
    ),
    "mixtral-8x7b": TransformerConfig(
        *(32000, 4096, 14336, 32, 32, 8, 128, 32768),
        family="mixtral",
        rope_theta=1000000.0,
        experts=ExpertsConfig(count=8, per_token=2, intermediate_size=14336, softmax="after"),
    ),
    "phi-3-mini": TransformerConfig(
        *(32064, 3072, 8192, 32, 32, 32, 96, 4096), family="phi3", local_windows=(2047,) * 32
    ),
    "gemma-2-9b": TransformerConfig(
        *(256000, 3584, 14336, 42, 16, 8, 256, 8192),
        family="gemma2",
        attention_soft_cap=50.0,
        final_soft_cap=30.0,
        local_windows=(4096, None) * 21,
        embedding_scale=3584**0.5,
        **_GEMMA,
    ),
    "gemma-3-4b": TransformerConfig(
        *(262208, 2560, 10240, 34, 8, 4, 256, 131072),
        family="gemma3_text",
        rope_theta=1000000.0,
        rope_scaling=LinearScaling(8.0),
        local_rope_theta=10000.0,
        qk_norm=True,
        local_windows=((1024,) * 5 + (None,)) * 5 + (1024,) * 4,
        embedding_scale=2560**0.5,
        **_GEMMA,
    ),
    "gpt-oss-20b": TransformerConfig(
        *(201088, 2880, 2880, 24, 64, 8, 64, 131072),
        family="gpt_oss",
        rope_theta=150000.0,
        rope_scaling=YarnScaling(32.0, 4096, truncate=False),
        qkv_bias=True,
        output_bias=True,
        local_windows=(128, None) * 12,
        attention_sinks=True,
        experts=ExpertsConfig(
            count=32,
            per_token=4,
            intermediate_size=2880,
            softmax="after",
            has_biases=True,
            swiglu_limit=7.0,
        ),
    ),
    "deepseek-v2-lite": TransformerConfig(
        *(102400, 2048, 10944, 27, 16, 16, 192, 163840),
        family="deepseek_v2",
        norm_eps=1e-6,
        rope_scaling=YarnScaling(40.0, 4096, attention_factor=1.0),
        latent=LatentConfig(rank=512, nope_dim=128, rope_dim=64, value_dim=128, yarn_mscale=0.707),
        experts=ExpertsConfig(
            count=64, per_token=6, intermediate_size=1408, dense_layers=(0,), shared_size=2816
        ),
    ),
    "tiny": TransformerConfig(512, 64, 96, 2, 4, 2, 16, 512),
}
"""Shapes of base models: Mistral 7B v0.1, Phi-3 mini with 4k tokens of context, Gemma 3 without the
part for pictures; and one for tests."""
