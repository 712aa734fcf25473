"""Keys of a Hugging Face `config.json`: what is known of them in all families, and their checks."""

from collections.abc import Mapping
from typing import Any, Literal

from turbojax._checks import is_finite_number
from turbojax._json import shown

Activation = Literal["silu", "gelu_tanh"]

MOST_LAYERS = 10_000
"""No known model has a hundredth of it; a limit because every layer takes some memory."""
LARGEST_SIZE = 2**31 - 1
"""Limit of every other size: tokens and positions are int32."""

SLIDING, FULL = "sliding_attention", "full_attention"
"""The entries of `layer_types`: of layers with a window and without."""

ACTIVATIONS: dict[str, Activation] = {
    "silu": "silu",
    "swish": "silu",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_new": "gelu_tanh",
}
ACTIVATION_NAMES: dict[Activation, str] = {"silu": "silu", "gelu_tanh": "gelu_pytorch_tanh"}

SIZES = {
    "vocab_size": "vocab_size",
    "hidden_size": "hidden_size",
    "intermediate_size": "intermediate_size",
    "num_hidden_layers": "num_layers",
    "num_attention_heads": "num_heads",
}
"""Keys that must be there, and the field of `TransformerConfig` that is the same number."""

COMMON = {
    "num_key_value_heads": None,
    "head_dim": None,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False,
    "hidden_act": "silu",
    "layer_types": None,
}
"""Keys of nearly all families, and what most take where one is missing."""

IDLE = {"is_causal": True}
"""Like `Family.idle`, for every family; here null is not ignored, as transformers treats it
like false."""

_HARMLESS_TEXT = """
architectures attention_dropout attn_implementation auto_map
bad_words_ids begin_suppress_tokens bos_token_id cache_implementation chunk_size_feed_forward
decoder_start_token_id diversity_penalty do_sample dtype
early_stopping embd_pdrop encoder_no_repeat_ngram_size eos_token_id
exponential_decay_length_penalty finetuning_task forced_bos_token_id forced_eos_token_id
gradient_checkpointing id2label initializer_range is_decoder is_llama_config label2id
length_penalty mask_token_id max_length max_sequence_length min_length model_max_length
model_type no_repeat_ngram_size num_beam_groups num_beams num_labels num_return_sequences
output_attentions output_hidden_states output_router_logits output_scores pad_token_id prefix
pretraining_tp problem_type quantization_config remove_invalid_values repetition_penalty
resid_pdrop return_dict return_dict_in_generate
router_aux_loss_coef router_jitter_noise sep_token_id suppress_tokens
task_specific_params temperature tf_legacy_loss tokenizer_class top_k top_p
torch_dtype torchscript transformers.js_config transformers_version typical_p unk_token_id
unsloth_fixed unsloth_version use_bfloat16 use_cache use_flash_attention use_flash_attn
"""
HARMLESS = frozenset(_HARMLESS_TEXT.split())
"""Keys that do not change what a model computes in inference.

They say where it comes from, what its tokenizer, training or generation look like, how weights are
stored.
"""


def integer(keys: Mapping[str, Any], key: str, least: int = 1) -> int:
    """A key's value; ValueError unless it is an integer from `least` to the largest size."""
    value = keys[key]
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise ValueError(
            f"config.json: {key}={shown(value)} must be an integer of at least {least}"
        )
    most = MOST_LAYERS if key == "num_hidden_layers" else LARGEST_SIZE
    if value > most:
        raise ValueError(f"config.json: {key}={shown(value)} must be at most {most}")
    return value


def number(keys: Mapping[str, Any], key: str) -> Any:
    """A key's value; ValueError unless it is a positive number."""
    value = keys[key]
    if not is_finite_number(value) or value <= 0:
        raise ValueError(f"config.json: {key}={shown(value)} must be positive and finite")
    return value


def flag(keys: Mapping[str, Any], key: str) -> bool:
    """A switch, off if it is null or missing; ValueError if it is neither true nor false."""
    value = keys.get(key)
    if value is not None and not isinstance(value, bool):
        raise ValueError(f"config.json: {key}={shown(value)} must be true or false")
    return bool(value)


def strings(key: str, value: Any) -> None:
    """Raises ValueError unless a key's value is a list of strings."""
    if not isinstance(value, list | tuple) or not all(isinstance(x, str) for x in value):
        raise ValueError(f"config.json: {key}={shown(value)} must be a list of strings")


def even_share(hidden_size: int, heads: int) -> int:
    """The width of a head if no key gives it; ValueError if the heads do not share evenly."""
    if hidden_size % heads:
        raise ValueError(
            f"config.json: {hidden_size=} must be a multiple of num_attention_heads={heads} where "
            "head_dim is missing"
        )
    return hidden_size // heads
