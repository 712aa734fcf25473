"""What `config.json` of each family of Hugging Face checkpoints means.

A family's defaults are what transformers takes where a key is missing; its own files leave out
those whose value all of its models share.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any, Literal, get_args

from turbojax._checks import is_finite_number
from turbojax._json import shown, shown_name
from turbojax.models.families import rope as hf_rope

Family = Literal["llama", "mistral", "qwen2", "qwen3", "phi3", "gemma2"]
"""Whose tensor names and `config.json` a model has: Hugging Face's `model_type`."""

Activation = Literal["silu", "gelu_tanh"]

FAMILIES: tuple[Family, ...] = get_args(Family)

MOST_LAYERS = 10_000
"""No model has a hundredth of it; there is something to be held for every layer."""
LARGEST_SIZE = 2**31 - 1
"""Of every other size: tokens and positions are int32."""

_SLIDING, _FULL = "sliding_attention", "full_attention"
_ACTIVATIONS: dict[str, Activation] = {
    "silu": "silu",
    "swish": "silu",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_new": "gelu_tanh",
}
_ACTIVATION_NAMES: dict[Activation, str] = {"silu": "silu", "gelu_tanh": "gelu_pytorch_tanh"}

# config.json key -> TransformerConfig field, where the two are the same number.
_SIZES = {
    "vocab_size": "vocab_size",
    "hidden_size": "hidden_size",
    "intermediate_size": "intermediate_size",
    "num_hidden_layers": "num_layers",
    "num_attention_heads": "num_heads",
}
_COMMON = {
    "num_key_value_heads": None,
    "head_dim": None,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False,
    "hidden_act": "silu",
    "layer_types": None,
}


@dataclasses.dataclass(frozen=True)
class _Rules:
    """How a family's `config.json` is read.

    Attributes:
      architecture: its causal language model's name.
      defaults: keys that are read, besides the sizes and those of RoPE, and their values if
        missing.
      idle: keys of other models, or of older versions, with the one value that changes nothing.
    """

    architecture: str
    defaults: Mapping[str, Any]
    idle: Mapping[str, Any] = dataclasses.field(default_factory=dict)


_RULES: dict[str, _Rules] = {
    "llama": _Rules(
        "LlamaForCausalLM",
        {**_COMMON, "max_position_embeddings": 2048, "attention_bias": False, "mlp_bias": False},
    ),
    "mistral": _Rules(
        "MistralForCausalLM",
        {
            **_COMMON,
            "max_position_embeddings": 131072,
            "num_key_value_heads": 8,
            "sliding_window": 4096,
        },
    ),
    "qwen2": _Rules(
        "Qwen2ForCausalLM",
        {
            **_COMMON,
            "max_position_embeddings": 32768,
            "num_key_value_heads": 32,
            "use_sliding_window": False,
            "sliding_window": 4096,
            "max_window_layers": 28,
        },
    ),
    "qwen3": _Rules(
        "Qwen3ForCausalLM",
        {
            **_COMMON,
            "max_position_embeddings": 32768,
            "num_key_value_heads": 32,
            "head_dim": 128,
            "attention_bias": False,
            "use_sliding_window": False,
            "sliding_window": 4096,
            "max_window_layers": 28,
        },
    ),
    "phi3": _Rules(
        "Phi3ForCausalLM",
        {**_COMMON, "max_position_embeddings": 4096, "rms_norm_eps": 1e-5, "sliding_window": None},
        {"full_attn_mod": 1, "interpolate_factor": 1},
    ),
    "gemma2": _Rules(
        "Gemma2ForCausalLM",
        {
            **{key: value for key, value in _COMMON.items() if key != "hidden_act"},
            "max_position_embeddings": 8192,
            "num_key_value_heads": 4,
            "head_dim": 256,
            "tie_word_embeddings": True,
            "hidden_activation": "gelu_pytorch_tanh",
            "attention_bias": False,
            "query_pre_attn_scalar": 256,
            "sliding_window": 4096,
            "final_logit_softcapping": 30.0,
            "attn_logit_softcapping": 50.0,
        },
        {"hidden_act": "gelu_pytorch_tanh"},
    ),
}
# As `_Rules.idle`, for every family; transformers treats null like false.
_IDLE = {"is_causal": True}

# Keys that do not change what a model computes in inference: where it comes from, what its
# tokenizer, training or generation look like, how weights are stored.
_HARMLESS_TEXT = """
architectures attention_dropout attn_implementation auto_map
bad_words_ids begin_suppress_tokens bos_token_id cache_implementation chunk_size_feed_forward
decoder_start_token_id diversity_penalty do_sample dtype
early_stopping embd_pdrop encoder_no_repeat_ngram_size eos_token_id
exponential_decay_length_penalty finetuning_task forced_bos_token_id forced_eos_token_id
gradient_checkpointing id2label initializer_range is_decoder is_llama_config label2id
length_penalty mask_token_id max_length max_sequence_length min_length model_max_length
model_type no_repeat_ngram_size num_beam_groups num_beams num_labels num_return_sequences
output_attentions output_hidden_states output_scores pad_token_id prefix pretraining_tp
problem_type quantization_config remove_invalid_values repetition_penalty
resid_pdrop return_dict return_dict_in_generate sep_token_id suppress_tokens
task_specific_params temperature tf_legacy_loss tokenizer_class top_k top_p
torch_dtype torchscript transformers.js_config transformers_version typical_p unk_token_id
unsloth_fixed unsloth_version use_bfloat16 use_cache use_flash_attention use_flash_attn
"""
_HARMLESS = frozenset(_HARMLESS_TEXT.split())


def read(hf: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of the `TransformerConfig` that a `config.json` describes.

    Args:
      hf: the parsed JSON object.

    Raises:
      NotImplementedError: naming key and value, if the architecture or something that may change
        the mathematics is not supported.
      ValueError: if a required key is missing or keys do not fit each other.
    """
    family = _family(hf)
    rules = _RULES[family]
    _require_known(hf, rules)
    missing = sorted(key for key in _SIZES if hf.get(key) is None)
    if missing:
        raise ValueError(f"config.json lacks {', '.join(missing)}")
    keys = {**rules.defaults, **hf}
    for key in (*_SIZES, "max_position_embeddings"):
        _integer(keys, key)
    for key in ("num_key_value_heads", "head_dim"):
        if keys[key] is not None:
            _integer(keys, key)
    heads, max_length = keys["num_attention_heads"], keys["max_position_embeddings"]
    head_dim = keys["head_dim"] or _even_share(keys["hidden_size"], heads)
    return {
        "family": family,
        **{field: keys[key] for key, field in _SIZES.items()},
        "num_kv_heads": keys["num_key_value_heads"] or heads,
        "head_dim": head_dim,
        "max_length": max_length,
        "norm_eps": _number(keys, "rms_norm_eps"),
        "tie_embeddings": _flag(keys, "tie_word_embeddings"),
        "local_windows": _windows(keys, family),
        **hf_rope.read(hf, family, head_dim, max_length),
        **_mathematics(keys, family),
    }


def write(fields: Mapping[str, Any]) -> dict[str, Any]:
    """A `config.json` for the fields of a `TransformerConfig`.

    It holds what files of its family can express; comparing with `read` shows whether that is all.
    """
    family, layers = fields["family"], fields["num_layers"]
    rules = _RULES[family]
    keys: dict[str, Any] = {
        "architectures": [rules.architecture],
        "model_type": family,
        **{key: fields[field] for key, field in _SIZES.items()},
        "max_position_embeddings": fields["max_length"],
        "rms_norm_eps": fields["norm_eps"],
        "num_key_value_heads": fields["num_kv_heads"],
        "head_dim": fields["head_dim"],
        "tie_word_embeddings": fields["tie_embeddings"],
        # Not known here. Without the keys transformers would take those of one particular model.
        **dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id")),
    }
    if (
        family in ("qwen2", "phi3")
        and fields["head_dim"] * fields["num_heads"] == (fields["hidden_size"])
    ):
        del keys["head_dim"]  # these families have no such key
    keys |= hf_rope.write(
        fields["rope_theta"],
        fields["rope_scaling"],
        fields["rotary_dim"],
        family=family,
        head_dim=fields["head_dim"],
        max_length=fields["max_length"],
    )
    name = "hidden_activation" if family == "gemma2" else "hidden_act"
    keys[name] = _ACTIVATION_NAMES[fields["activation"]]
    if "attention_bias" in rules.defaults:
        keys["attention_bias"] = fields["qkv_bias"]
    if family == "llama":
        keys["mlp_bias"] = fields["mlp_bias"]
    if family == "gemma2":
        scale = fields["attention_scale"]
        scalar = fields["head_dim"] if scale is None else scale**-2
        # An integer, which is what transformers asks for, wherever it is one.
        whole = round(scalar)
        keys["query_pre_attn_scalar"] = whole if whole**-0.5 == scale else scalar
        keys["final_logit_softcapping"] = fields["final_soft_cap"]
        keys["attn_logit_softcapping"] = fields["attention_soft_cap"]
    return keys | _window_keys(fields["local_windows"], layers, family, fields["max_length"])


def _family(hf: Mapping[str, Any]) -> Family:
    """The family that `architectures` and `model_type` name, one of which must be there."""
    architectures, model_type = hf.get("architectures"), hf.get("model_type")
    if architectures is not None:
        _strings("architectures", architectures)
    supported = {_RULES[family].architecture: family for family in FAMILIES}
    if not architectures and model_type is None:
        raise NotImplementedError(
            "config.json names no architecture, which is not supported: must be one of "
            f"{', '.join(supported)}"
        )
    if architectures and (len(architectures) > 1 or architectures[0] not in supported):
        raise NotImplementedError(
            f"architectures={shown(architectures)} is not supported: must be one of "
            f"{', '.join(supported)}"
        )
    family = supported[architectures[0]] if architectures else model_type
    if model_type not in (None, family) or family not in FAMILIES:
        expected = f"{family!r}, as {architectures=}" if architectures else ", ".join(FAMILIES)
        raise NotImplementedError(
            f"model_type={shown(model_type)} is not supported: must be {expected}"
        )
    return family


def _require_known(hf: Mapping[str, Any], rules: _Rules) -> None:
    """Raises NotImplementedError for keys that may change the mathematics in unknown ways."""
    known = {*_SIZES, *rules.defaults, *hf_rope.KEYS} | _HARMLESS
    idle = {**_IDLE, **rules.idle}
    for given in sorted(hf):
        value, key = hf[given], shown_name(given)
        if given in known or given.startswith("_"):
            continue
        if value is None and given not in _IDLE:
            continue
        if given in idle:
            if value != idle[given]:
                raise NotImplementedError(
                    f"config.json: {key}={shown(value)} is not supported: must be {idle[given]!r}"
                )
            continue
        if not value:
            continue  # switched off
        if given == "sliding_window_size" and value == hf.get("sliding_window"):
            continue  # another name that early Gemma 2 files give it, too
        raise NotImplementedError(
            f"config.json: {key}={shown(value)} is not supported: must be left out, which is right "
            f"if it changes nothing about how a {rules.architecture} computes"
        )


def _integer(keys: Mapping[str, Any], key: str, least: int = 1) -> int:
    value = keys[key]
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise ValueError(
            f"config.json: {key}={shown(value)} must be an integer of at least {least}"
        )
    most = MOST_LAYERS if key == "num_hidden_layers" else LARGEST_SIZE
    if value > most:
        raise ValueError(f"config.json: {key}={shown(value)} must be at most {most}")
    return value


def _number(keys: Mapping[str, Any], key: str) -> Any:
    """A positive number."""
    value = keys[key]
    if not is_finite_number(value) or value <= 0:
        raise ValueError(f"config.json: {key}={shown(value)} must be positive and finite")
    return value


def _flag(keys: Mapping[str, Any], key: str) -> bool:
    """A switch; off where it is null, or no key of the family."""
    value = keys.get(key)
    if value is not None and not isinstance(value, bool):
        raise ValueError(f"config.json: {key}={shown(value)} must be true or false")
    return bool(value)


def _strings(key: str, value: Any) -> None:
    if not isinstance(value, list | tuple) or not all(isinstance(x, str) for x in value):
        raise ValueError(f"config.json: {key}={shown(value)} must be a list of strings")


def _even_share(hidden_size: int, heads: int) -> int:
    if hidden_size % heads:
        raise ValueError(
            f"config.json: {hidden_size=} must be a multiple of num_attention_heads={heads} where "
            "head_dim is missing"
        )
    return hidden_size // heads


def _mathematics(keys: Mapping[str, Any], family: str) -> dict[str, Any]:
    """Fields that say how a layer computes, besides its sizes, windows and positions."""
    name = "hidden_activation" if family == "gemma2" else "hidden_act"
    if not isinstance(keys[name], str | None):
        raise ValueError(f"config.json: {name}={shown(keys[name])} must be a string")
    if keys[name] not in _ACTIVATIONS:
        raise NotImplementedError(
            f"{name}={shown(keys[name])} is not supported: must be one of {', '.join(_ACTIVATIONS)}"
        )
    # Qwen 2 has biases of queries, keys and values, and no key for them.
    bias = _flag(keys, "attention_bias")
    fields: dict[str, Any] = {
        "activation": _ACTIVATIONS[keys[name]],
        "qkv_bias": bias or family == "qwen2",
        "output_bias": bias,
        "mlp_bias": _flag(keys, "mlp_bias"),
        "qk_norm": family == "qwen3",
    }
    if family == "gemma2":
        caps = ("attn_logit_softcapping", "final_logit_softcapping")
        attention_cap, final_cap = (
            None if keys[name] is None else _number(keys, name) for name in caps
        )
        fields |= {
            "attention_scale": _number(keys, "query_pre_attn_scalar") ** -0.5,
            "attention_soft_cap": attention_cap,
            "final_soft_cap": final_cap,
            "embedding_scale": keys["hidden_size"] ** 0.5,
            "norm_offset": 1.0,
            "post_norms": True,
        }
    return fields


def _windows(keys: Mapping[str, Any], family: str) -> tuple[int | None, ...]:
    """For each layer how many tokens a query sees; empty if no layer has a window."""
    layers, window = keys["num_hidden_layers"], keys.get("sliding_window")
    if "use_sliding_window" in keys and not _flag(keys, "use_sliding_window"):
        window = None
    if window is not None:
        _integer(keys, "sliding_window")
    if family == "gemma2":
        usual = [_FULL if i % 2 else _SLIDING for i in range(layers)]
    else:
        # Of Qwen's models the first layers have none.
        first = _integer(keys, "max_window_layers", 0) if "max_window_layers" in keys else 0
        usual = [_FULL if window is None or i < first else _SLIDING for i in range(layers)]
    types = keys["layer_types"]
    if types is not None:
        _strings("layer_types", types)
    if types is None:
        types = usual
    elif len(types) != layers or set(types) - {_SLIDING, _FULL}:
        raise NotImplementedError(
            f"layer_types={shown(types)} is not supported: must be {_SLIDING!r} or {_FULL!r} for "
            f"each of {layers} layers"
        )
    elif family in ("llama", "mistral", "phi3") and list(types) != usual:
        raise NotImplementedError(
            f"layer_types={shown(types)} is not supported for {family!r}: must be {shown(usual)}"
        )
    if window is None and _SLIDING in types:
        size, used = (shown(keys.get(key)) for key in ("sliding_window", "use_sliding_window"))
        raise ValueError(
            f"config.json: sliding_window={size} and use_sliding_window={used} must give the "
            "window that layer_types name"
        )
    if _SLIDING not in types:
        return ()
    return tuple(window if kind == _SLIDING else None for kind in types)


def _window_keys(
    windows: tuple[int | None, ...], layers: int, family: str, max_length: int
) -> dict[str, Any]:
    """What says that layers have these windows; of several sizes the first one."""
    window = next((size for size in windows if size is not None), None)
    types = [_SLIDING if i < len(windows) and windows[i] else _FULL for i in range(layers)]
    match family:
        case "llama":
            return {}
        case "mistral" | "phi3":
            return {"sliding_window": window}
        case "gemma2":
            # transformers asks for a window even where no layer has one.
            return {"sliding_window": window or max_length, "layer_types": types}
    return {
        "use_sliding_window": window is not None,
        "sliding_window": window,
        "max_window_layers": types.index(_SLIDING) if window else layers,
        "layer_types": types,
    }
