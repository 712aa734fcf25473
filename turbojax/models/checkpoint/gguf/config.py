"""The metadata of a GGUF file as a Hugging Face `config.json`.

llama.cpp names sizes and constants by architecture, as in ``llama.block_count``. A key that may
change what is computed is read, has the one value that changes nothing, or is refused.
"""

import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from turbojax._checks import is_finite_number
from turbojax._json import shown, shown_name
from turbojax.models.checkpoint.gguf.header import Header

ARCHITECTURE = "general.architecture"
MODEL_TYPES = {
    "llama": "llama",
    "qwen2": "qwen2",
    "qwen3": "qwen3",
    "gemma2": "gemma2",
    "gemma3": "gemma3_text",
    "phi3": "phi3",
}
"""Architectures of GGUF files, and Hugging Face's names of these. Mistral's files say "llama"."""

ROPE_FACTORS = "rope_freqs.weight"
SHORT_FACTORS, LONG_FACTORS = "rope_factors_short.weight", "rope_factors_long.weight"
HEAD = "output.weight"
_EMBEDDING = "token_embd.weight"

# Keys after the architecture's name that change nothing, whatever their value.
_HARMLESS = {
    *("vocab_size", "tensor_data_layout", "rope.scaling.finetuned", "attention.value_length"),
    *("attention.key_length", "rope.dimension_count"),
}
# Keys that may only have these values.
_IDLE: dict[str, tuple[Any, ...]] = {
    **{"attention.causal": (True,), "use_parallel_residual": (False,), "expert_count": (0,)},
    **{"expert_used_count": (0,), "rope.scaling.yarn_ext_factor": (1.0,)},
}
_GEMMA3_PATTERN, _GEMMA3_LOCAL_BASE = 6, 10_000.0
_YARN_KEYS = {
    "rope.scaling.yarn_beta_fast": "beta_fast",
    "rope.scaling.yarn_beta_slow": "beta_slow",
}
# Llama 3.1 and later; files have the divisors of its frequencies, not these numbers.
_LLAMA3 = {
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
# transformers computes them in float32, llama.cpp's converter in another precision.
_LLAMA3_TOLERANCE = 1e-5


def config(header: Header, factors: Mapping[str, np.ndarray]) -> dict[str, Any]:
    """A `config.json` that describes the same model; NotImplementedError or ValueError if none can.

    `factors` are the file's tensors that divide rotary frequencies, by their names, in float32.
    """
    try:
        return _Config(header, factors).read()
    except (ValueError, NotImplementedError) as error:
        kind = NotImplementedError if isinstance(error, NotImplementedError) else ValueError
        raise kind(f"{header.file}: {error}") from error


class _Config:
    def __init__(self, header: Header, factors: Mapping[str, np.ndarray]) -> None:
        self.header, self.factors = header, factors
        self.architecture = str(header.metadata.get(ARCHITECTURE))
        if self.architecture not in MODEL_TYPES:
            found = header.metadata.get(ARCHITECTURE)
            raise NotImplementedError(
                f"{ARCHITECTURE}={shown(found)} is not supported: must be one of "
                f"{', '.join(MODEL_TYPES)}"
            )
        self.used: set[str] = set()

    def read(self) -> dict[str, Any]:
        tensors = self.header.tensors
        if _EMBEDDING not in tensors:
            raise ValueError(f"it lacks {_EMBEDDING}")
        heads = self.integer("attention.head_count")
        sizes = {
            "hidden_size": self.integer("embedding_length"),
            "intermediate_size": self.integer("feed_forward_length"),
            "num_hidden_layers": self.integer("block_count"),
            "num_attention_heads": heads,
            "num_key_value_heads": self.integer("attention.head_count_kv", heads),
            "max_position_embeddings": self.integer("context_length"),
        }
        head_dim = self.head_dim(sizes["hidden_size"], heads)
        model_type = MODEL_TYPES[self.architecture]
        found: dict[str, Any] = {
            "model_type": model_type,
            **sizes,
            "vocab_size": tensors[_EMBEDDING].shape[0],
            "head_dim": head_dim,
            "rms_norm_eps": self.number("attention.layer_norm_rms_epsilon"),
            "tie_word_embeddings": HEAD not in tensors,
            "torch_dtype": _dtype(self.header),
            **self.tokens(),
            **self.rope(head_dim, sizes["max_position_embeddings"]),
        }
        own = getattr(self, f"_{self.architecture}", None)
        found |= own(sizes, head_dim) if own else {}
        if self.architecture == "phi3":
            # Phi-3 has no such key: its heads share the width evenly.
            del found["head_dim"]
            if head_dim * heads != sizes["hidden_size"]:
                raise NotImplementedError(
                    f"heads of {head_dim} channels are not supported: {heads} of them must be as "
                    f"wide as {self.name('embedding_length')}={sizes['hidden_size']}"
                )
        self.require_known()
        return found

    def name(self, key: str) -> str:
        return f"{self.architecture}.{key}"

    def get(self, key: str, default: Any = None) -> Any:
        """The value of a key; if it has one for every layer and all are alike, that one."""
        self.used.add(key)
        value = self.header.metadata.get(self.name(key), default)
        if isinstance(value, np.ndarray) and len(value) and (value == value[0]).all():
            return value[0].item()
        return value

    def integer(self, key: str, default: int | None = None) -> int:
        value = self.get(key, default)
        if value is None:
            raise ValueError(f"it lacks {self.name(key)}")
        if isinstance(value, np.ndarray):
            raise NotImplementedError(
                f"{self.name(key)}={shown(value.tolist())} is not supported: must be the same in "
                "all layers"
            )
        if type(value) is not int or value < 0:
            raise ValueError(f"{self.name(key)}={shown(value)} must be a whole number")
        return value

    def number(self, key: str, default: float | None = None) -> float:
        value = self.get(key, default)
        if value is None:
            raise ValueError(f"it lacks {self.name(key)}")
        if not is_finite_number(value):
            raise ValueError(f"{self.name(key)}={shown(value)} must be a finite number")
        return _short(value)

    def head_dim(self, width: int, heads: int) -> int:
        if heads < 1:
            raise ValueError(f"{self.name('attention.head_count')}={heads} must be at least 1")
        dim = self.integer("attention.key_length", width // heads)
        values = self.integer("attention.value_length", dim)
        if values != dim:
            raise NotImplementedError(
                f"{self.name('attention.value_length')}={values} is not supported: must be "
                f"{self.name('attention.key_length')}={dim}"
            )
        return dim

    def tokens(self) -> dict[str, Any]:
        """The special tokens, which `generation_config.json` says in a folder."""
        found = {}
        for role in ("bos", "eos"):
            number = self.header.metadata.get(f"tokenizer.ggml.{role}_token_id")
            if type(number) is int:
                found[f"{role}_token_id"] = number
        return found

    def rope(self, head_dim: int, max_length: int) -> dict[str, Any]:
        keys: dict[str, Any] = {"rope_theta": self.number("rope.freq_base", 10000.0)}
        rotated = self.integer("rope.dimension_count", head_dim)
        if rotated != head_dim:
            if self.architecture != "phi3" or not 0 < rotated < head_dim:
                raise NotImplementedError(
                    f"{self.name('rope.dimension_count')}={rotated} is not supported: must be the "
                    f"{head_dim} channels of a head"
                )
            keys["partial_rotary_factor"] = rotated / head_dim
        given = self.get("rope.scaling.type")
        kind = "linear" if given is None else given  # as llama.cpp has it
        original = self.get("rope.scaling.original_context_length")
        amplitude = self.number("rope.scaling.attn_factor", 1.0)
        scaling: dict[str, Any] = {}
        if {SHORT_FACTORS, LONG_FACTORS} & self.factors.keys():
            scaling = self.longrope(given, amplitude)
        elif kind == "linear":
            # Old files call it `rope.scale_linear`.
            factor = self.number("rope.scaling.factor", self.number("rope.scale_linear", 1.0))
            scaling = {"rope_type": "linear", "factor": factor} if factor not in (0, 1) else {}
            original = None
        elif kind == "yarn":
            scaling = self.yarn(amplitude)
        elif kind != "none":
            raise NotImplementedError(
                f"{self.name('rope.scaling.type')}={shown(kind)} is not supported: must be one of "
                "none, linear, yarn, or longrope with tensors of its factors"
            )
        if scaling.get("rope_type") not in ("longrope", "yarn") and amplitude != 1:
            raise NotImplementedError(
                f"{self.name('rope.scaling.attn_factor')}={amplitude} is not supported: must be 1 "
                "without YaRN or LongRoPE"
            )
        if ROPE_FACTORS in self.factors:
            if scaling:
                raise NotImplementedError(
                    f"{ROPE_FACTORS} is not supported beside {self.name('rope.scaling.type')}="
                    f"{shown(kind)}: must be alone"
                )
            scaling, original = self.divided(self.factors[ROPE_FACTORS], keys, max_length), None
        if scaling:
            if original is not None:
                scaling["original_max_position_embeddings"] = original
            keys["rope_scaling"] = scaling
        return keys

    def longrope(self, kind: Any, amplitude: float) -> dict[str, Any]:
        if not {SHORT_FACTORS, LONG_FACTORS} <= self.factors.keys() or kind not in (
            *(None, "none", "longrope"),
        ):
            raise NotImplementedError(
                f"{SHORT_FACTORS} and {LONG_FACTORS} must both be there, with "
                f"{self.name('rope.scaling.type')} 'longrope', not {shown(kind)}"
            )
        self.integer("rope.scaling.original_context_length")
        short, long = (self.factors[x].tolist() for x in (SHORT_FACTORS, LONG_FACTORS))
        return {
            "rope_type": "longrope",
            "short_factor": short,
            "long_factor": long,
            "attention_factor": amplitude,
        }

    def yarn(self, amplitude: float) -> dict[str, Any]:
        factor = self.number("rope.scaling.factor")
        scaling = {"rope_type": "yarn", "factor": factor}
        for key, name in _YARN_KEYS.items():
            if (value := self.get(key)) is not None:
                scaling[name] = value
        amplitude *= self.number("rope.scaling.yarn_attn_factor", 1.0)
        if amplitude != 1:
            # llama.cpp multiplies the factor that YaRN's authors recommend, the default elsewhere.
            scaling["attention_factor"] = amplitude * (1 + 0.1 * math.log(max(factor, 1.0)))
        return scaling

    def divided(self, factors: np.ndarray, keys: dict[str, Any], length: int) -> dict[str, Any]:
        """RoPE scaling for frequencies that a tensor divides: Llama 3's, or any others.

        The latter are LongRoPE with the same factors for short and long sequences.
        """
        factor = _short(float(factors.max(initial=1.0)))
        periods = keys["rope_theta"] ** (np.arange(len(factors)) / len(factors))
        rotations = _LLAMA3["original_max_position_embeddings"] / (2 * np.pi * periods)
        low, high = _LLAMA3["low_freq_factor"], _LLAMA3["high_freq_factor"]
        smooth = np.clip((rotations - low) / (high - low), 0, 1)
        expected = 1 / ((1 - smooth) / factor + smooth)
        if np.allclose(factors, expected, rtol=_LLAMA3_TOLERANCE, atol=0):
            return {"rope_type": "llama3", "factor": factor, **_LLAMA3}
        return {
            "rope_type": "longrope",
            "short_factor": factors.tolist(),
            "long_factor": factors.tolist(),
            "attention_factor": 1.0,
            "original_max_position_embeddings": length,
        }

    def require_known(self) -> None:
        """Raises NotImplementedError for keys of the architecture that were not read."""
        prefix = f"{self.architecture}."
        for name, value in self.header.metadata.items():
            key = name.removeprefix(prefix)
            if key == name or key in self.used | _HARMLESS:
                continue
            value = self.get(key)
            allowed = _IDLE.get(key)
            if allowed is None or value not in allowed:
                wanted = "left out" if allowed is None else shown(allowed[0])
                raise NotImplementedError(
                    f"{shown_name(name)}={shown(value)} is not supported: must be {wanted}"
                )

    def window(self) -> int | None:
        return self.integer("attention.sliding_window", 0) or None

    def _llama(self, sizes: Mapping[str, int], head_dim: int) -> dict[str, Any]:
        window = self.window()
        has_bias = "blk.0.attn_q.bias" in self.header.tensors
        if window is not None:
            return {"model_type": "mistral", "sliding_window": window}
        inner = "blk.0.ffn_up.bias" in self.header.tensors
        return {"attention_bias": has_bias, "mlp_bias": inner}

    def _phi3(self, sizes: Mapping[str, int], head_dim: int) -> dict[str, Any]:
        return {"sliding_window": self.window()}

    def _gemma(self, sizes: Mapping[str, int], head_dim: int, largest: int) -> dict[str, Any]:
        """What Gemma 2 and 3 share.

        Files do not say how scores are scaled: by the width of a head, except in the largest model,
        whose number of layers is `largest`, by the hidden size divided by the number of heads.
        """
        scalar: float = head_dim
        if sizes["num_hidden_layers"] == largest:
            scalar = sizes["hidden_size"] // sizes["num_attention_heads"]
        if (scale := self.get("attention.scale")) is not None:
            scalar = self.number("attention.scale") ** -2 if scale else 0
        cap = self.number("final_logit_softcapping", 0.0)
        return {
            "hidden_activation": "gelu_pytorch_tanh",
            "query_pre_attn_scalar": scalar,
            "final_logit_softcapping": cap or None,
            "sliding_window": self.integer("attention.sliding_window"),
        }

    def _gemma2(self, sizes: Mapping[str, int], head_dim: int) -> dict[str, Any]:
        found = self._gemma(sizes, head_dim, 46)
        cap = self.number("attn_logit_softcapping", 50.0)
        if self.get("final_logit_softcapping") is None:
            found["final_logit_softcapping"] = 30.0
        return {**found, "attn_logit_softcapping": cap or None}

    def _gemma3(self, sizes: Mapping[str, int], head_dim: int) -> dict[str, Any]:
        found = self._gemma(sizes, head_dim, 62)
        pattern = self.get("attention.sliding_window_pattern", _GEMMA3_PATTERN)
        count = sizes["num_hidden_layers"]
        if isinstance(pattern, np.ndarray):
            local = [bool(x) for x in pattern]
        elif isinstance(pattern, bool):
            local = [pattern] * count
        else:
            period = self.integer("attention.sliding_window_pattern", _GEMMA3_PATTERN)
            local = [not period or bool(i % period) for i in range(1, min(count, 10_000) + 1)]
        kinds = ["sliding_attention" if x else "full_attention" for x in local]
        base = self.number("rope.freq_base_swa", _GEMMA3_LOCAL_BASE)
        return {**found, "layer_types": kinds, "rope_local_base_freq": base}


def _dtype(header: Header) -> str:
    """The default dtype: that of most numbers in matrices if it is a floating-point type.

    Otherwise bfloat16: codes do not say it, and nearly all models were made in bfloat16.
    """
    sizes: dict[str, int] = {}
    for place in header.tensors.values():
        if len(place.shape) > 1:
            sizes[place.type] = sizes.get(place.type, 0) + math.prod(place.shape)
    names = {"F32": "float32", "F16": "float16"}
    return names.get(max(sizes, key=sizes.__getitem__), "bfloat16") if sizes else "float32"


def _short(value: float) -> float:
    """The shortest decimal number that is the same float32: 1e-05 for 9.99999974e-06."""
    as_float32 = np.float32(value)
    return float(str(as_float32)) if float(as_float32) == value else float(value)
