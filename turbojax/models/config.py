"""The shape of a Llama-family decoder, and its Hugging Face `config.json`."""

import dataclasses
import math
from collections.abc import Mapping
from typing import Any, Literal

import jax.numpy as jnp
import numpy as np

from turbojax import _checks
from turbojax.layer_cache import AttentionOptions
from turbojax.rotary import Rope, RopeScaling

Family = Literal["llama", "mistral", "qwen2", "qwen3", "phi3", "gemma2"]
"""Whose tensor names and `config.json` a model has: Hugging Face's `model_type`."""

Activation = Literal["silu", "gelu_tanh"]

ARCHITECTURE = "LlamaForCausalLM"
DTYPES = ("float32", "bfloat16", "float16")

# config.json key -> LlamaConfig field, where the two are the same number.
_HF_FIELDS = {
    "vocab_size": "vocab_size",
    "hidden_size": "hidden_size",
    "intermediate_size": "intermediate_size",
    "num_hidden_layers": "num_layers",
    "num_attention_heads": "num_heads",
    "max_position_embeddings": "max_length",
    "rms_norm_eps": "norm_eps",
}
# Features of Llama checkpoints this decoder does not have, with the value that means "unused".
_HF_UNUSED = {
    "hidden_act": "silu",
    "attention_bias": False,
    "mlp_bias": False,
    "rope_scaling": None,
}


@dataclasses.dataclass(frozen=True)
class LlamaConfig:
    """Sizes and constants of a `Llama`.

    Attributes:
      vocab_size: number of tokens; 256 for a byte-level model.
      hidden_size: width D of the residual stream.
      intermediate_size: width F of the SwiGLU feed-forward layer.
      num_layers: number of blocks.
      num_heads: query heads N, a multiple of `num_kv_heads`.
      num_kv_heads: key/value heads K (grouped queries).
      head_dim: width H of one head, even because RoPE rotates pairs.
      max_length: longest sequence the model is meant for.
      rope_theta: base of the rotary frequencies.
      norm_eps: epsilon of every RMSNorm.
      tie_embeddings: whether the output projection is the embedding's transpose.
      family: whose checkpoints it comes from; the mathematics is in the other fields alone.
      activation: of the feed-forward layer's gate; ``"gelu_tanh"`` is GELU's approximation by tanh.
      qkv_bias: whether queries, keys and values have biases.
      output_bias: whether the attention's output projection has one.
      mlp_bias: whether the feed-forward layer's projections have biases.
      qk_norm: whether the heads of queries and keys are normed before they are rotated.
      rope_scaling: optional change of the rotary frequencies.
      rotary_dim: channels of a head that RoPE turns, the first ones; all if not given.
      attention_scale: factor of the scores; ``1 / sqrt(H)`` if not given.
      attention_soft_cap: optional `c`: scores become ``c * tanh(score / c)``.
      final_soft_cap: the same of the logits.
      local_windows: for each layer, how many tokens a query sees, its own included, or None for
        all; empty if no layer has a window.
      embedding_scale: optional factor of the embeddings, rounded to the computation's dtype.
      norm_offset: added to the scale of every norm; 1 in Gemma's checkpoints.
      post_norms: whether what attention and feed-forward layer add to the residual stream is
        normed, too.

    Raises:
      ValueError: if a value is out of the range stated here.
    """

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_length: int
    rope_theta: float = 10000.0
    norm_eps: float = 1e-5
    tie_embeddings: bool = False
    family: Family = "llama"
    activation: Activation = "silu"
    qkv_bias: bool = False
    output_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    rope_scaling: RopeScaling | None = None
    rotary_dim: int | None = None
    attention_scale: float | None = None
    attention_soft_cap: float | None = None
    final_soft_cap: float | None = None
    local_windows: tuple[int | None, ...] = ()
    embedding_scale: float | None = None
    norm_offset: float = dataclasses.field(default=0.0, metadata={"may_be_zero": True})
    post_norms: bool = False

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if field.metadata.get("may_be_zero"):
                continue
            if field.type is int and (
                not isinstance(value, int) or isinstance(value, bool) or value < 1
            ):
                raise ValueError(f"{field.name}={value!r} must be an integer of at least 1")
            if field.type is float and not (
                isinstance(value, int | float) and 0 < value < math.inf
            ):
                raise ValueError(f"{field.name}={value!r} must be positive and finite")
        if self.num_heads % self.num_kv_heads:
            raise ValueError(
                f"num_heads={self.num_heads} must be a multiple of num_kv_heads={self.num_kv_heads}"
            )
        _ = self.rope, [self.attention_options(layer) for layer in range(self.num_layers)]
        if self.local_windows and len(self.local_windows) != self.num_layers:
            raise ValueError(
                f"local_windows has {len(self.local_windows)} entries, must have "
                f"num_layers={self.num_layers}"
            )
        for name in ("final_soft_cap", "embedding_scale"):
            _checks.check_number(name, getattr(self, name))
            _checks.check_positive(name, getattr(self, name))

    @property
    def rope(self) -> Rope:
        """The rotary embedding."""
        return Rope(self.head_dim, self.rope_theta, self.rotary_dim, self.rope_scaling)

    def attention_options(self, layer: int) -> AttentionOptions:
        """What this layer asks of its attention.

        Args:
          layer: its number; a window as long as the longest sequence is none.
        """
        window = self.local_windows[layer] if layer < len(self.local_windows) else None
        if window is not None and window >= self.max_length:
            window = None
        return AttentionOptions(self.attention_scale, window, self.attention_soft_cap)

    @property
    def num_parameters(self) -> int:
        """How many numbers a model of this shape holds."""
        size, inner, head = self.hidden_size, self.intermediate_size, self.head_dim
        width, kv_width = self.num_heads * head, self.num_kv_heads * head
        layer = 2 * size * (width + kv_width) + 3 * size * inner
        layer += self.qkv_bias * (width + 2 * kv_width) + self.output_bias * size
        layer += self.mlp_bias * (2 * inner + size) + self.qk_norm * 2 * head
        layer += (4 if self.post_norms else 2) * size
        tables = self.vocab_size * size * (1 if self.tie_embeddings else 2)
        return self.num_layers * layer + tables + size

    @classmethod
    def from_hf(cls, hf: Mapping[str, Any]) -> "LlamaConfig":
        """Reads the content of a Hugging Face `config.json`.

        Args:
          hf: the parsed JSON object.

        Raises:
          NotImplementedError: if the architecture is not LlamaForCausalLM, or uses biases, scaled
            RoPE or an activation other than SiLU.
          ValueError: if a required key is missing or a value is out of range.
        """
        _require_supported(hf)
        missing = sorted(set(_HF_FIELDS) - set(hf))
        if missing:
            raise ValueError(f"config.json lacks {', '.join(missing)}")
        fields = {field: hf[key] for key, field in _HF_FIELDS.items()}
        rope = _rope_parameters(hf)
        return cls(
            **fields,
            num_kv_heads=hf.get("num_key_value_heads") or hf["num_attention_heads"],
            head_dim=hf.get("head_dim") or hf["hidden_size"] // hf["num_attention_heads"],
            rope_theta=hf.get("rope_theta") or rope.get("rope_theta") or 10000.0,
            tie_embeddings=bool(hf.get("tie_word_embeddings", False)),
        )

    def to_hf(self) -> dict[str, Any]:
        """The content of a `config.json` that `from_hf` and `transformers` read back.

        Both spellings of the RoPE base are written: `rope_theta` for transformers up to 4,
        `rope_parameters` from 5 on.
        """
        return {
            "architectures": [ARCHITECTURE],
            "model_type": "llama",
            **{key: getattr(self, field) for key, field in _HF_FIELDS.items()},
            "num_key_value_heads": self.num_kv_heads,
            "head_dim": self.head_dim,
            "rope_theta": self.rope_theta,
            "rope_parameters": {"rope_type": "default", "rope_theta": self.rope_theta},
            "tie_word_embeddings": self.tie_embeddings,
            **{key: value for key, value in _HF_UNUSED.items() if value is not None},
        }


def stored_dtype(hf: Mapping[str, Any]) -> np.dtype | None:
    """The dtype that a `config.json` names, as `torch_dtype` or `dtype`; None if it names none.

    Raises:
      ValueError: if it is none of `DTYPES`.
    """
    for key in ("torch_dtype", "dtype"):
        name = hf.get(key)
        if name is not None:
            if name not in DTYPES:
                raise ValueError(f"config.json: {key}={name!r} must be one of {', '.join(DTYPES)}")
            return jnp.dtype(name)
    return None


def _rope_parameters(hf: Mapping[str, Any]) -> Mapping[str, Any]:
    rope = hf.get("rope_parameters") or {}
    if not isinstance(rope, Mapping):
        raise ValueError(f"rope_parameters={rope!r} must be an object")
    return rope


def _require_supported(hf: Mapping[str, Any]) -> None:
    """Raises NotImplementedError for a checkpoint whose mathematics differs from `Llama`'s."""
    architectures = hf.get("architectures") or ["(none named)"]
    if architectures != [ARCHITECTURE]:
        raise NotImplementedError(f"{architectures=} is not supported: must be {[ARCHITECTURE]}")
    for key, unused in _HF_UNUSED.items():
        if hf.get(key, unused) != unused:
            raise NotImplementedError(f"{key}={hf[key]!r} is not supported: must be {unused!r}")
    rope_type = _rope_parameters(hf).get("rope_type", "default")
    if rope_type != "default":
        raise NotImplementedError(f"rope_type={rope_type!r} is not supported: must be 'default'")
