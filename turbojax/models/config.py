"""The shape of a decoder, and its Hugging Face `config.json`."""

import dataclasses
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, get_args

import jax.numpy as jnp
import numpy as np

from turbojax import _checks
from turbojax._json import shown
from turbojax._pytrees import static
from turbojax.caches import AttentionOptions
from turbojax.models import families
from turbojax.models.families import Activation as Activation
from turbojax.models.families import ExpertsConfig as ExpertsConfig
from turbojax.models.families import LatentConfig as LatentConfig
from turbojax.models.families.layers import told_fields
from turbojax.rotary import LongRopeScaling, Rope, RopeScaling

# Keys that `to_hf` leaves open.
_TOKENS = ("bos_token_id", "eos_token_id", "pad_token_id")

STACKS = ("blocks", "dense_blocks")
"""Names of a `Transformer`'s stacks of layers."""

DTYPES = ("float32", "bfloat16", "float16")


@static
@dataclasses.dataclass(frozen=True)
class TransformerConfig:
    """Sizes and constants of a `Transformer`.

    Attributes:
      vocab_size: number of tokens; 256 for a byte-level model.
      hidden_size: width D of the residual stream.
      intermediate_size: width F of the SwiGLU feed-forward layer.
      num_layers: number of blocks.
      num_heads: query heads N, a multiple of `num_kv_heads`.
      num_kv_heads: key/value heads K (grouped queries).
      head_dim: width H of one head, even because RoPE rotates pairs.
      max_length: longest sequence the model is meant for. At the length of LongRoPE's first
        training or below, its short factors apply; above it the sequences decide.
      rope_theta: base of the rotary frequencies.
      norm_eps: epsilon of every RMSNorm.
      tie_embeddings: whether the output projection is the embedding's transpose.
      family: whose tensor names and `config.json` it has, by Hugging Face's `model_type`; what is
        computed depends only on the other fields.
      activation: of the feed-forward layer's gate; ``"gelu_tanh"`` is GELU's approximation by tanh.
      qkv_bias: whether queries, keys and values have biases.
      output_bias: whether the attention's output projection has one.
      mlp_bias: whether the feed-forward layer's projections have biases.
      qk_norm: whether the heads of queries and keys are normed before they are rotated.
      joint_qk_norm: whether all heads of a token are normed together, not each by itself.
      rope_scaling: optional change of the rotary frequencies.
      rotary_dim: how many channels of a head RoPE rotates, the first ones; all if not given.
      rope_interleaved: whether RoPE rotates channels 2i and 2i + 1 together, not i and i + R/2.
      nope_layers: numbers of the layers without RoPE, ascending.
      local_rope_theta: base of the rotary frequencies, then unscaled, of layers with a window; if
        not given, they have the same frequencies as the other layers.
      attention_scale: factor of the scores; ``1 / sqrt(H)`` if not given.
      attention_soft_cap: optional `c`: scores become ``c * tanh(score / c)``.
      final_soft_cap: the same for the logits.
      logit_scale: optional factor of the logits, before they are capped.
      local_windows: for each layer, how many tokens a query sees, its own included, or None for
        all; empty if no layer has a window.
      embedding_scale: optional factor of the embeddings, rounded to the computation's dtype.
      norm_offset: added to the scale of every norm; 1 in Gemma's checkpoints.
      pre_norms: whether the input of attention and feed-forward layer is normed.
      post_norms: whether what attention and feed-forward layer add to the residual stream is
        normed, too.
      layer_norm: whether the norms of the residual stream subtract its mean: LayerNorm without a
        bias, in place of RMSNorm.
      parallel: whether attention and feed-forward layer read the same normed input, and their
        outputs are added at once.
      residual_scale: optional factor of what is added to the residual stream.
      experts: of the feed-forward layers, or None.
      latent: for attention whose keys and values are made from a latent, or None. With it there are
        as many KV heads as heads, of ``nope_dim + rope_dim`` channels; values are padded to as
        many; `qkv_bias` is that of the projections that make latents; and it gives the scale of
        scores.
      attention_sinks: whether every layer has a learned logit per query head in the denominator of
        its softmax, see `turbojax.turbo_attention`.

    Raises:
      TypeError: if `experts` or `latent` is of another type.
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
    family: str = "llama"
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
    local_rope_theta: float | None = None
    experts: ExpertsConfig | None = None
    latent: LatentConfig | None = None
    attention_sinks: bool = False
    joint_qk_norm: bool = False
    rope_interleaved: bool = False
    nope_layers: tuple[int, ...] = ()
    logit_scale: float | None = None
    pre_norms: bool = True
    layer_norm: bool = False
    parallel: bool = False
    residual_scale: float | None = None

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if field.metadata.get("may_be_zero"):
                continue
            if field.type is int:
                _check_size(field.name, value)
            if field.type is float and not (_checks.is_finite_number(value) and value > 0):
                raise ValueError(f"{field.name}={shown(value)} must be positive and finite")
        if self.num_heads % self.num_kv_heads:
            raise ValueError(
                f"num_heads={self.num_heads} must be a multiple of num_kv_heads={self.num_kv_heads}"
            )
        if self.family not in tuple(families.FAMILIES):
            raise ValueError(
                f"family={shown(self.family)} must be one of {', '.join(families.FAMILIES)}"
            )
        if self.activation not in get_args(Activation):
            raise ValueError(
                f"activation={self.activation!r} must be one of {get_args(Activation)}"
            )
        if self.local_windows and len(self.local_windows) != self.num_layers:
            raise ValueError(
                f"local_windows has {len(self.local_windows)} entries, must have "
                f"num_layers={self.num_layers}"
            )
        for name in (
            *("final_soft_cap", "embedding_scale", "local_rope_theta"),
            *("logit_scale", "residual_scale"),
        ):
            _checks.check_number(name, getattr(self, name))
            _checks.check_positive(name, getattr(self, name))
        self._check_experts()
        self._check_layers()
        self._check_latent()
        _ = self.rope, self.ropes
        _ = [self.attention_options(layer) for layer in range(self.num_layers)]

    def _check_experts(self) -> None:
        experts = self.experts
        if experts is None:
            return
        if not isinstance(experts, ExpertsConfig):
            raise TypeError(f"experts={shown(experts)} must be an ExpertsConfig or None")
        if self.mlp_bias or not families.FAMILIES[self.family].experts:
            raise ValueError(
                f"{experts=} must be None with mlp_bias={self.mlp_bias} and family={self.family!r}"
            )
        if len(experts.dense_layers) >= self.num_layers or (
            experts.dense_layers and experts.dense_layers[-1] >= self.num_layers
        ):
            raise ValueError(
                f"experts.dense_layers={experts.dense_layers} must be some of {self.num_layers} "
                "layers, not all"
            )

    def _check_layers(self) -> None:
        """Raises ValueError for combinations of fields that no kind of layer has."""
        layers: Any = self.nope_layers
        if (
            not isinstance(layers, tuple)
            or any(type(x) is not int or not 0 <= x < self.num_layers for x in layers)
            or list(layers) != sorted(set(layers))
        ):
            raise ValueError(
                f"nope_layers={shown(layers)} must be a tuple of numbers of {self.num_layers} "
                "layers, each once and ascending"
            )
        if self.joint_qk_norm and not self.qk_norm:
            raise ValueError("joint_qk_norm=True must be False with qk_norm=False: there is none")
        if self.layer_norm and self.qk_norm:
            raise ValueError("layer_norm=True must be False with qk_norm=True")
        if self.experts is not None and (
            self.parallel or self.layer_norm or not self.pre_norms or self.residual_scale
        ):
            raise ValueError(
                f"experts must be None with parallel={self.parallel}, "
                f"layer_norm={self.layer_norm}, pre_norms={self.pre_norms} and "
                f"residual_scale={self.residual_scale}"
            )

    def _check_latent(self) -> None:
        latent = self.latent
        if latent is None:
            return
        if not isinstance(latent, LatentConfig):
            raise TypeError(f"latent={shown(latent)} must be a LatentConfig or None")
        wanted = {
            "num_kv_heads": self.num_heads,
            "head_dim": latent.key_dim,
            "rotary_dim": None,
            "attention_scale": None,
            "local_rope_theta": None,
            "qk_norm": False,
            "attention_sinks": False,
            "rope_interleaved": False,
            "nope_layers": (),
        }
        for name, value in wanted.items():
            if getattr(self, name) != value:
                raise ValueError(f"{name}={getattr(self, name)!r} must be {value} with {latent}")

    def has_experts(self, layer: int) -> bool:
        """Whether this layer's feed-forward layer is one of experts."""
        return self.experts is not None and layer not in self.experts.dense_layers

    def stack_of(self, layer: int) -> tuple[str, int]:
        """Which of a `Transformer`'s `STACKS` has this layer, and its number there.

        Layers with experts and layers without have other arrays; where all are alike there is one.
        """
        dense = () if self.experts is None else self.experts.dense_layers
        before = sum(x < layer for x in dense)
        return (STACKS[1], before) if layer in dense else (STACKS[0], layer - before)

    @property
    def rope(self) -> Rope:
        """The rotary embedding of all layers that have none of their own."""
        longest = self.max_length if isinstance(self.rope_scaling, LongRopeScaling) else None
        width = self.head_dim if self.latent is None else self.latent.rope_dim
        return Rope(
            width,
            self.rope_theta,
            self.rotary_dim,
            self.rope_scaling,
            longest,
            self.rope_interleaved,
        )

    def rope_of(self, layer: int) -> Rope | None:
        """The rotary embedding of this layer, or None."""
        if layer in self.nope_layers:
            return None
        has_window = layer < len(self.local_windows) and self.local_windows[layer] is not None
        if self.local_rope_theta is None or not has_window:
            return self.rope
        return Rope(
            self.head_dim,
            self.local_rope_theta,
            self.rotary_dim,
            interleaved=self.rope_interleaved,
        )

    @property
    def ropes(self) -> tuple[Rope, ...]:
        """The different rotary embeddings of the layers, one in most models."""
        if self.local_rope_theta is None and not self.nope_layers:
            return (self.rope,)
        found = dict.fromkeys(self.rope_of(layer) for layer in range(self.num_layers))
        return tuple(rope for rope in found if rope is not None)

    def attention_options(self, layer: int) -> AttentionOptions:
        """The options of this layer's attention; a window of `max_length` or more is none."""
        window = self.local_windows[layer] if layer < len(self.local_windows) else None
        if window is not None and window >= self.max_length:
            window = None
        scale = self.attention_scale
        if self.latent is not None:
            scale = self.latent.scale(self.rope_scaling)
        return AttentionOptions(scale, window, self.attention_soft_cap)

    @property
    def num_parameters(self) -> int:
        """How many numbers a model of this shape holds."""
        size, inner, head = self.hidden_size, self.intermediate_size, self.head_dim
        width, kv_width = self.num_heads * head, self.num_kv_heads * head
        layer = 2 * size * (width + kv_width)
        layer += self.qkv_bias * (width + 2 * kv_width) + self.output_bias * size
        if self.latent is not None:
            layer = self._latent_parameters(self.latent)
        heads = self.num_heads + self.num_kv_heads if self.joint_qk_norm else 2
        layer += self.mlp_bias * (2 * inner + size) + self.qk_norm * heads * head
        layer += self.attention_sinks * self.num_heads
        before = self.pre_norms * (1 if self.parallel else 2)
        layer += (before + 2 * self.post_norms) * size
        tables = self.vocab_size * size * (1 if self.tie_embeddings else 2)
        dense, mlps = self.num_layers, 0
        if self.experts is not None:
            dense, experts = len(self.experts.dense_layers), self.experts
            each = experts.count * size * (3 * experts.intermediate_size + 1)
            each += 3 * size * (experts.shared_size or 0)
            each += experts.count * (experts.scores == "sigmoid")
            if experts.has_biases:
                each += experts.count * (2 * experts.intermediate_size + size + 1)
            mlps = (self.num_layers - dense) * each
        return self.num_layers * layer + dense * 3 * size * inner + mlps + tables + size

    def _latent_parameters(self, latent: LatentConfig) -> int:
        """How many numbers a layer's latent attention has."""
        size, heads, rank = self.hidden_size, self.num_heads, latent.rank
        queries = heads * latent.key_dim
        count = size * (rank + latent.rope_dim) + rank  # the latent, and its norm
        count += rank * heads * (latent.nope_dim + latent.value_dim)
        count += heads * latent.value_dim * size + self.output_bias * size
        count += self.qkv_bias * (rank + latent.rope_dim)
        if latent.query_rank is None:
            return count + size * queries
        return count + latent.query_rank * (size + 1 + queries + self.qkv_bias)

    @classmethod
    def from_hf(cls, hf: Mapping[str, Any]) -> "TransformerConfig":
        """Reads the content of a Hugging Face `config.json` of any of `families.FAMILIES`.

        Missing keys have transformers' defaults; only sizes must be there. An unknown key with a
        value is refused, because it may change what the model computes.

        Args:
          hf: the parsed JSON object.

        Raises:
          NotImplementedError: naming it, if the architecture or a key's value is not supported.
          ValueError: if a required key is missing, a value is out of range, or two disagree.
        """
        return cls(**families.read(hf))

    def to_hf(self) -> dict[str, Any]:
        """The content of a `config.json` that `from_hf` and `transformers` read back.

        RoPE is written twice: in the spelling of transformers up to 4, and in that from 5 on.

        Raises:
          ValueError: naming the fields, if files of this family cannot express their values.
        """
        fields = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        hf = families.write(fields)
        mine, read = self._canonical(), self.from_hf(hf)._canonical()
        wrong = [name for name in fields if getattr(mine, name) != getattr(read, name)]
        if wrong:
            values = ", ".join(f"{name}={fields[name]!r}" for name in wrong)
            raise ValueError(f"a config.json of family {self.family!r} cannot say {values}")
        return hf

    def told(self) -> dict[str, Any]:
        """The fields by name, without those of `_ADDED` that have their default."""
        return told_fields(self, _ADDED)

    def described(self) -> dict[str, Any]:
        """`told`, with fields that are objects as dictionaries too."""
        return {name: _described(value) for name, value in self.told().items()}

    def _canonical(self) -> "TransformerConfig":
        """An equal model's configuration with the defaults filled in, for comparisons."""
        scale, windows = self.attention_scale, self.local_windows
        windows = windows if any(windows) else ()
        factors = ("embedding_scale", "residual_scale", "logit_scale")
        idle: dict[str, Any] = {x: None for x in factors if getattr(self, x) == 1}
        if self.latent is not None:
            return dataclasses.replace(self, **idle, local_windows=windows)
        return dataclasses.replace(
            self,
            **idle,
            attention_scale=self.head_dim**-0.5 if scale is None else scale,
            local_windows=windows,
            rotary_dim=self.rope.channels,
            local_rope_theta=(None if set(self.ropes) <= {self.rope} else self.local_rope_theta),
        )


# Fields that were added to `TransformerConfig` after sessions, results and logs were written that
# hold its fields or digests of them. Those lack these, and must still match the same model.
_ADDED = (
    *("local_rope_theta", "experts", "latent", "attention_sinks"),
    *("joint_qk_norm", "rope_interleaved", "nope_layers", "logit_scale"),
    *("pre_norms", "layer_norm", "parallel", "residual_scale"),
)


def _described(value: Any) -> Any:
    if isinstance(value, ExpertsConfig):
        return value.told()
    is_object = dataclasses.is_dataclass(value) and not isinstance(value, type)
    return dataclasses.asdict(value) if is_object else value


def model_config(
    folder: Path, hf: Mapping[str, Any], max_length: int | None = None
) -> TransformerConfig:
    """The model that `hf`, a folder's `config.json`, describes; errors name the file."""
    try:
        config = TransformerConfig.from_hf(hf)
    except (NotImplementedError, ValueError) as error:
        kind = NotImplementedError if isinstance(error, NotImplementedError) else ValueError
        text = str(error).removeprefix("config.json").removeprefix(":").strip()
        # A GGUF file's metadata stand for it.
        file = folder if folder.is_file() else folder / "config.json"
        raise kind(f"{file}: {text}") from error
    return config if max_length is None else dataclasses.replace(config, max_length=max_length)


def config_json(
    config: TransformerConfig, dtype: np.dtype, extra: Mapping[str, Any] | None
) -> dict[str, Any]:
    """The content of a checkpoint's `config.json`, with the keys `extra` added."""
    hf, extra = config.to_hf(), extra or {}
    for key, value in extra.items():
        if key == "quantization_config" or (key in hf and key not in _TOKENS):
            raise ValueError(
                f"extra_config: {key}={value!r} must be left out: it is derived from the model"
            )
        try:
            json.dumps({key: value})
        except TypeError as error:
            raise TypeError(
                f"extra_config: {key}={value!r} must be serializable as JSON: {error}"
            ) from error
    merged = {**hf, "torch_dtype": dtype.name, **extra}
    if TransformerConfig.from_hf(merged) != TransformerConfig.from_hf(hf):
        raise ValueError(f"extra_config={dict(extra)!r} must not make another model of this one")
    return merged


def stored_dtype(hf: Mapping[str, Any]) -> np.dtype | None:
    """The dtype that a `config.json` names, or None; ValueError unless it is in `DTYPES`."""
    for key in ("torch_dtype", "dtype"):
        name = hf.get(key)
        if name is not None:
            if name not in DTYPES:
                raise ValueError(
                    f"config.json: {key}={shown(name)} must be one of {', '.join(DTYPES)}"
                )
            return jnp.dtype(name)
    return None


def _check_size(name: str, value: object) -> None:
    """Raises ValueError unless a size is possible."""
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ValueError(f"{name}={shown(value)} must be an integer of at least 1")
    most = families.MOST_LAYERS if name == "num_layers" else families.LARGEST_SIZE
    if value > most:
        raise ValueError(f"{name}={shown(value)} must be at most {most}")
