"""The shape of a Llama-family decoder, and its Hugging Face `config.json`."""

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

import jax.numpy as jnp
import numpy as np

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

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
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
        if self.head_dim % 2:
            raise ValueError(f"head_dim={self.head_dim} must be even: RoPE rotates pairs")

    @property
    def num_parameters(self) -> int:
        """How many numbers a model of this shape holds."""
        attention = 2 * self.hidden_size * self.head_dim * (self.num_heads + self.num_kv_heads)
        feed_forward = 3 * self.hidden_size * self.intermediate_size
        embeddings = self.vocab_size * self.hidden_size * (1 if self.tie_embeddings else 2)
        norms = (2 * self.num_layers + 1) * self.hidden_size
        return self.num_layers * (attention + feed_forward) + embeddings + norms

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
