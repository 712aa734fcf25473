"""Shapes of published models, by name, for measuring speed with `random_decoder`."""

from turbojax.models.config import ExpertsConfig, LatentConfig, TransformerConfig
from turbojax.rotary import LinearScaling, Llama3Scaling, YarnScaling

_LLAMA_2_7B = TransformerConfig(
    vocab_size=32000,
    hidden_size=4096,
    intermediate_size=11008,
    num_layers=32,
    num_heads=32,
    num_kv_heads=32,
    head_dim=128,
    max_length=4096,
)

_LLAMA_3_8B = TransformerConfig(
    vocab_size=128256,
    hidden_size=4096,
    intermediate_size=14336,
    num_layers=32,
    num_heads=32,
    num_kv_heads=8,
    head_dim=128,
    max_length=8192,
    rope_theta=500000.0,
)

_LLAMA_3_1_8B = TransformerConfig(
    vocab_size=128256,
    hidden_size=4096,
    intermediate_size=14336,
    num_layers=32,
    num_heads=32,
    num_kv_heads=8,
    head_dim=128,
    max_length=131072,
    rope_theta=500000.0,
    rope_scaling=Llama3Scaling(
        factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_length=8192
    ),
)

_MISTRAL_7B = TransformerConfig(
    family="mistral",
    vocab_size=32000,
    hidden_size=4096,
    intermediate_size=14336,
    num_layers=32,
    num_heads=32,
    num_kv_heads=8,
    head_dim=128,
    max_length=32768,
    local_windows=(4096,) * 32,
)

_QWEN_2_5_7B = TransformerConfig(
    family="qwen2",
    vocab_size=152064,
    hidden_size=3584,
    intermediate_size=18944,
    num_layers=28,
    num_heads=28,
    num_kv_heads=4,
    head_dim=128,
    max_length=131072,
    rope_theta=1000000.0,
    norm_eps=1e-6,
    qkv_bias=True,
)

_QWEN_3_8B = TransformerConfig(
    family="qwen3",
    vocab_size=151936,
    hidden_size=4096,
    intermediate_size=12288,
    num_layers=36,
    num_heads=32,
    num_kv_heads=8,
    head_dim=128,
    max_length=40960,
    rope_theta=1000000.0,
    norm_eps=1e-6,
    qk_norm=True,
)

_QWEN_3_30B_A3B = TransformerConfig(
    family="qwen3_moe",
    vocab_size=151936,
    hidden_size=2048,
    intermediate_size=6144,
    num_layers=48,
    num_heads=32,
    num_kv_heads=4,
    head_dim=128,
    max_length=40960,
    rope_theta=1000000.0,
    norm_eps=1e-6,
    qk_norm=True,
    experts=ExpertsConfig(count=128, per_token=8, intermediate_size=768, normalize=True),
)

_MIXTRAL_8X7B = TransformerConfig(
    family="mixtral",
    vocab_size=32000,
    hidden_size=4096,
    intermediate_size=14336,
    num_layers=32,
    num_heads=32,
    num_kv_heads=8,
    head_dim=128,
    max_length=32768,
    rope_theta=1000000.0,
    experts=ExpertsConfig(count=8, per_token=2, intermediate_size=14336, softmax="after"),
)

_PHI_3_MINI = TransformerConfig(
    family="phi3",
    vocab_size=32064,
    hidden_size=3072,
    intermediate_size=8192,
    num_layers=32,
    num_heads=32,
    num_kv_heads=32,
    head_dim=96,
    max_length=4096,
    local_windows=(2047,) * 32,
)

_GEMMA_2_9B = TransformerConfig(
    family="gemma2",
    vocab_size=256000,
    hidden_size=3584,
    intermediate_size=14336,
    num_layers=42,
    num_heads=16,
    num_kv_heads=8,
    head_dim=256,
    max_length=8192,
    norm_eps=1e-6,
    tie_embeddings=True,
    activation="gelu_tanh",
    attention_scale=256**-0.5,
    attention_soft_cap=50.0,
    final_soft_cap=30.0,
    local_windows=(4096, None) * 21,
    embedding_scale=3584**0.5,
    norm_offset=1.0,
    post_norms=True,
)

_GEMMA_3_4B = TransformerConfig(
    family="gemma3_text",
    vocab_size=262208,
    hidden_size=2560,
    intermediate_size=10240,
    num_layers=34,
    num_heads=8,
    num_kv_heads=4,
    head_dim=256,
    max_length=131072,
    rope_theta=1000000.0,
    rope_scaling=LinearScaling(8.0),
    local_rope_theta=10000.0,
    norm_eps=1e-6,
    tie_embeddings=True,
    activation="gelu_tanh",
    qk_norm=True,
    attention_scale=256**-0.5,
    local_windows=((1024,) * 5 + (None,)) * 5 + (1024,) * 4,
    embedding_scale=2560**0.5,
    norm_offset=1.0,
    post_norms=True,
)

_GPT_OSS_20B = TransformerConfig(
    family="gpt_oss",
    vocab_size=201088,
    hidden_size=2880,
    intermediate_size=2880,
    num_layers=24,
    num_heads=64,
    num_kv_heads=8,
    head_dim=64,
    max_length=131072,
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
)

_DEEPSEEK_V2_LITE = TransformerConfig(
    family="deepseek_v2",
    vocab_size=102400,
    hidden_size=2048,
    intermediate_size=10944,
    num_layers=27,
    num_heads=16,
    num_kv_heads=16,
    head_dim=192,
    max_length=163840,
    norm_eps=1e-6,
    rope_scaling=YarnScaling(40.0, 4096, attention_factor=1.0),
    latent=LatentConfig(rank=512, nope_dim=128, rope_dim=64, value_dim=128, yarn_mscale=0.707),
    experts=ExpertsConfig(
        count=64, per_token=6, intermediate_size=1408, dense_layers=(0,), shared_size=2816
    ),
)

_TINY = TransformerConfig(
    vocab_size=512,
    hidden_size=64,
    intermediate_size=96,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=16,
    max_length=512,
)

SHAPES = {
    "llama-2-7b": _LLAMA_2_7B,
    "llama-3-8b": _LLAMA_3_8B,
    "llama-3.1-8b": _LLAMA_3_1_8B,
    "mistral-7b": _MISTRAL_7B,
    "qwen-2.5-7b": _QWEN_2_5_7B,
    "qwen-3-8b": _QWEN_3_8B,
    "qwen-3-30b-a3b": _QWEN_3_30B_A3B,
    "mixtral-8x7b": _MIXTRAL_8X7B,
    "phi-3-mini": _PHI_3_MINI,
    "gemma-2-9b": _GEMMA_2_9B,
    "gemma-3-4b": _GEMMA_3_4B,
    "gpt-oss-20b": _GPT_OSS_20B,
    "deepseek-v2-lite": _DEEPSEEK_V2_LITE,
    "tiny": _TINY,
}
"""Shapes of base models: Mistral 7B v0.1, Phi-3 mini with 4k tokens of context, Gemma 3 without the
part for pictures; and one for tests."""
