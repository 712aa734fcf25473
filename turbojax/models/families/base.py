"""What families of Hugging Face checkpoints have in common, and where one may differ.

A `Family` is data, and methods that a subclass overrides where data does not suffice. A file has
the families of some authors; `table.py` lists them all.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

from turbojax._json import shown, shown_name
from turbojax.models.families import rope
from turbojax.models.families.keys import (
    ACTIVATION_NAMES,
    ACTIVATIONS,
    FULL,
    HARMLESS,
    IDLE,
    SIZES,
    SLIDING,
    even_share,
    flag,
    integer,
    number,
    strings,
)

Path = tuple[str, ...]
"""Where something lies in the state of a `Block`."""

LINEARS: Mapping[str, tuple[Path, ...]] = {
    "self_attn.q_proj": (("attention", "q_proj"),),
    "self_attn.k_proj": (("attention", "k_proj"),),
    "self_attn.v_proj": (("attention", "v_proj"),),
    "mlp.gate_proj": (("mlp", "gate_proj"),),
    "mlp.up_proj": (("mlp", "up_proj"),),
    "self_attn.o_proj": (("attention", "o_proj"),),
    "mlp.down_proj": (("mlp", "down_proj"),),
}
"""Linear layers of a layer of the checkpoint, each one of the model's."""

HEAD_NORMS: Mapping[str, Path] = {
    "self_attn.q_norm": ("attention", "q_norm"),
    "self_attn.k_norm": ("attention", "k_norm"),
}
"""Norms of queries and keys, of models that have them."""

NORMS: Mapping[str, Path] = {
    "input_layernorm": ("attention_norm",),
    "post_attention_layernorm": ("mlp_norm",),
    **HEAD_NORMS,
}
"""Norms of a layer of the checkpoint."""


@dataclasses.dataclass(frozen=True, eq=False)
class Family:
    """How a family's `config.json` and tensors are read and written.

    Attributes:
      name: its `model_type`.
      architecture: its causal language model's name.
      defaults: keys that are read, besides the sizes and those of RoPE, and what transformers takes
        where they are missing; files leave out those whose value all models of a family share.
      idle: keys of other models, or of older versions, with the one value that changes nothing.
      activation_key: the key that names the activation.
      norm_eps_key: the key of the norms' epsilon.
      writes_head_dim: whether the family has a key `head_dim`; if not, it is written only where it
        does not follow from the other sizes.
      chooses_layers: whether `layer_types` may differ from `_usual_layers`.
      linears: stored linear layers by name, and those of the model whose rows they hold, one below
        the other.
      experts: for families with experts, the stored names of the router and, with ``{}`` for an
        expert's number, of the experts' linear layers, and the model's layers, which hold all
        experts. There may also be the router's correction, and linear layers of an expert that all
        tokens go to.
      experts_in_one: whether one tensor holds a linear layer of all experts, ``[E, in, out]`` and
        biases ``[E, out]``; columns of the gate and its partner alternate.
      has_predictors: whether files may hold a further layer, which predicts tokens beyond the next
        one and is not read.
      norms: stored norms by name, and the model's; a model has all or some of them.
      fields: fields of `TransformerConfig` that all models of the family have.
      rope_kinds: values of `rope_type` that are read.
      rope_theta: the base of rotary frequencies where a file has none.
      rope_original: the length of the first training where a file has none; its `max_length` if
        None.
      rotates_parts: whether RoPE may rotate only a part of each head.
      overflows_float16: whether residual streams are known to pass float16's largest number.
    """

    name: str
    architecture: str
    defaults: Mapping[str, Any]
    idle: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    activation_key: str = "hidden_act"
    norm_eps_key: str = "rms_norm_eps"
    writes_head_dim: bool = True
    chooses_layers: bool = False
    linears: Mapping[str, tuple[Path, ...]] = dataclasses.field(default_factory=lambda: LINEARS)
    norms: Mapping[str, Path] = dataclasses.field(default_factory=lambda: NORMS)
    experts: Mapping[str, Path] = dataclasses.field(default_factory=dict)
    experts_in_one: bool = False
    has_predictors: bool = False
    overflows_float16: bool = False
    fields: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    rope_kinds: Sequence[str] = rope.KINDS
    rope_theta: float = 10_000.0
    rope_original: int | None = None
    rotates_parts: bool = False

    def read(self, hf: Mapping[str, Any]) -> dict[str, Any]:
        """The fields of the `TransformerConfig` that a `config.json` of this family describes."""
        self._require_known(hf)
        missing = sorted(key for key in SIZES if hf.get(key) is None)
        if missing:
            raise ValueError(f"config.json lacks {', '.join(missing)}")
        keys = {**self.defaults, **hf}
        for key in (*SIZES, "max_position_embeddings"):
            integer(keys, key)
        for key in ("num_key_value_heads", "head_dim"):
            if keys[key] is not None:
                integer(keys, key)
        heads, max_length = keys["num_attention_heads"], keys["max_position_embeddings"]
        head_dim = keys["head_dim"] or even_share(keys["hidden_size"], heads)
        return {
            "family": self.name,
            **{field: keys[key] for key, field in SIZES.items()},
            "num_kv_heads": keys["num_key_value_heads"] or heads,
            "head_dim": head_dim,
            "max_length": max_length,
            "norm_eps": number(keys, self.norm_eps_key),
            "tie_embeddings": flag(keys, "tie_word_embeddings"),
            "local_windows": self._read_windows(keys),
            **self._read_rope(hf, head_dim, max_length),
            **self._read_mathematics(keys),
            **self.fields,
        }

    def write(self, fields: Mapping[str, Any]) -> dict[str, Any]:
        """A `config.json` for the fields of a `TransformerConfig`; see `families.write`."""
        keys: dict[str, Any] = {
            "architectures": [self.architecture],
            "model_type": self.name,
            **{key: fields[field] for key, field in SIZES.items()},
            "max_position_embeddings": fields["max_length"],
            self.norm_eps_key: fields["norm_eps"],
            "num_key_value_heads": fields["num_kv_heads"],
            "head_dim": fields["head_dim"],
            "tie_word_embeddings": fields["tie_embeddings"],
            # Not known here. Without these keys transformers would take another model's tokens.
            **dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id")),
        }
        follows = fields["head_dim"] * fields["num_heads"] == fields["hidden_size"]
        if follows and not self.writes_head_dim:
            del keys["head_dim"]
        return {
            **keys,
            **self._write_rope(fields),
            **self._write_mathematics(fields),
            **self._write_windows(fields["local_windows"], fields),
        }

    def _rope_keys(self, hf: Mapping[str, Any]) -> dict[str, Any]:
        """What a `config.json` says about RoPE, in the names that `rope.parse` reads."""
        return rope.merged(hf)

    def _read_rope(self, hf: Mapping[str, Any], head_dim: int, max_length: int) -> dict[str, Any]:
        """The fields that say how positions rotate queries and keys; `max_length` is the file's."""
        found = rope.parse(
            self._rope_keys(hf),
            max_length,
            self.rope_kinds,
            theta=self.rope_theta,
            original=self.rope_original,
        )
        if not self.rotates_parts:
            self._require_whole(found)
        rotated = None if found.partial == 1 else int(head_dim * found.partial)
        return {"rope_theta": found.theta, "rope_scaling": found.scaling, "rotary_dim": rotated}

    def _write_rope(self, fields: Mapping[str, Any]) -> dict[str, Any]:
        """The keys that `_read_rope` reads, in the spellings of transformers 4 and 5."""
        keys = rope.write(fields["rope_theta"], fields["rope_scaling"], fields["max_length"])
        if self.rotates_parts:
            rotated = fields["rotary_dim"]
            partial = 1.0 if rotated is None else rotated / fields["head_dim"]
            keys[rope.PARTIAL] = keys["rope_parameters"][rope.PARTIAL] = partial
        return keys

    def _read_mathematics(self, keys: Mapping[str, Any]) -> dict[str, Any]:
        """The fields that say how a layer computes, besides its sizes, windows and positions."""
        name = self.activation_key
        if not isinstance(keys[name], str | None):
            raise ValueError(f"config.json: {name}={shown(keys[name])} must be a string")
        if keys[name] not in ACTIVATIONS:
            raise NotImplementedError(
                f"{name}={shown(keys[name])} is not supported: must be one of "
                f"{', '.join(ACTIVATIONS)}"
            )
        bias = flag(keys, "attention_bias")
        return {
            "activation": ACTIVATIONS[keys[name]],
            "qkv_bias": bias,
            "output_bias": bias,
            "mlp_bias": flag(keys, "mlp_bias"),
        }

    def _write_mathematics(self, fields: Mapping[str, Any]) -> dict[str, Any]:
        """The keys that `_read_mathematics` reads."""
        keys = {self.activation_key: ACTIVATION_NAMES[fields["activation"]]}
        biases = {"attention_bias": "qkv_bias", "mlp_bias": "mlp_bias"}
        return keys | {key: fields[x] for key, x in biases.items() if key in self.defaults}

    def _usual_layers(self, keys: Mapping[str, Any], window: int | None) -> list[str]:
        """The `layer_types` of a file without that key; a `window` of None means no windows."""
        return [FULL if window is None else SLIDING] * keys["num_hidden_layers"]

    def _write_windows(
        self, windows: Sequence[int | None], fields: Mapping[str, Any]
    ) -> dict[str, Any]:
        """The keys that say which layers have windows; `windows` is empty if no layer has one."""
        if "sliding_window" not in self.defaults:
            return {}
        # Files cannot express a second size.
        window = next((size for size in windows if size is not None), None)
        has_switch = "use_sliding_window" in self.defaults
        keys: dict[str, Any] = {"use_sliding_window": window is not None} if has_switch else {}
        keys["sliding_window"] = window
        if self.chooses_layers:
            keys["layer_types"] = layer_types(windows, fields["num_layers"])
        return keys

    def _require_whole(self, found: rope.RopeKeys) -> None:
        """Raises NotImplementedError if RoPE rotates only a part of each head."""
        if found.partial != 1:
            raise NotImplementedError(
                f"{rope.PARTIAL}={found.partial} is not supported for {self.name!r}: must be left "
                "out"
            )

    def _require_known(self, hf: Mapping[str, Any]) -> None:
        """Raises NotImplementedError for keys that may change the mathematics in unknown ways."""
        known = {*SIZES, *self.defaults, *rope.KEYS} | HARMLESS
        idle = {**IDLE, **self.idle}
        for given in sorted(hf):
            value, key = hf[given], shown_name(given)
            if given in known or given.startswith("_"):
                continue
            if value is None and given not in IDLE:
                continue
            if given in idle:
                if value != idle[given]:
                    raise NotImplementedError(
                        f"config.json: {key}={shown(value)} is not supported: must be "
                        f"{idle[given]!r}"
                    )
                continue
            if not value:
                continue  # switched off
            if given == "sliding_window_size" and value == hf.get("sliding_window"):
                continue  # another name that early Gemma 2 files give it, too
            raise NotImplementedError(
                f"config.json: {key}={shown(value)} is not supported: must be left out, which is "
                f"right if it changes nothing about how a {self.architecture} computes"
            )

    def _read_windows(self, keys: Mapping[str, Any]) -> tuple[int | None, ...]:
        """For each layer how many tokens a query sees; empty if no layer has a window."""
        layers, window = keys["num_hidden_layers"], keys.get("sliding_window")
        if "use_sliding_window" in keys and not flag(keys, "use_sliding_window"):
            window = None
        if window is not None:
            integer(keys, "sliding_window")
        types, usual = keys["layer_types"], self._usual_layers(keys, window)
        if types is None:
            types = usual
        strings("layer_types", types)
        if len(types) != layers or set(types) - {SLIDING, FULL}:
            raise NotImplementedError(
                f"layer_types={shown(types)} is not supported: must be {SLIDING!r} or {FULL!r} for "
                f"each of {layers} layers"
            )
        if not self.chooses_layers and list(types) != usual:
            raise NotImplementedError(
                f"layer_types={shown(types)} is not supported for {self.name!r}: must be "
                f"{shown(usual)}"
            )
        if window is None and SLIDING in types:
            size, used = (shown(keys.get(key)) for key in ("sliding_window", "use_sliding_window"))
            raise ValueError(
                f"config.json: sliding_window={size} and use_sliding_window={used} must give the "
                "window that layer_types name"
            )
        if SLIDING not in types:
            return ()
        return tuple(window if kind == SLIDING else None for kind in types)


class Alternating(Family):
    """A family that always has a window: in every other layer, where a file does not say."""

    def _usual_layers(self, keys: Mapping[str, Any], window: int | None) -> list[str]:
        return [FULL if i % 2 else SLIDING for i in range(keys["num_hidden_layers"])]

    def _write_windows(
        self, windows: Sequence[int | None], fields: Mapping[str, Any]
    ) -> dict[str, Any]:
        keys = super()._write_windows(windows, fields)
        # transformers asks for a window even where no layer has one.
        return keys | {"sliding_window": keys["sliding_window"] or fields["max_length"]}


def layer_types(windows: Sequence[int | None], layers: int) -> list[str]:
    """The value of the key `layer_types` for layers with these windows."""
    return [SLIDING if i < len(windows) and windows[i] else FULL for i in range(layers)]


TEXT = "text_config"
"""The key of `config.json` that holds the text model's own."""

_TIED = "tie_word_embeddings"
# Prefixes of tensors' names, as published and as in memory, and the prefixes in a text model.
_PREFIXES = {
    "language_model.model.": "model.",
    "language_model.lm_head.": "lm_head.",
    "model.language_model.": "model.",
    "lm_head.": "lm_head.",
}
VISION_PARTS = ("vision_tower", "multi_modal_projector")
"""First words of the names of tensors that read images."""
_IGNORED = tuple(f"{prefix}{name}." for prefix in ("", "model.") for name in VISION_PARTS)

_Stored = TypeVar("_Stored")


@dataclasses.dataclass(frozen=True, eq=False)
class Whole:
    """A kind of checkpoint with a text model and a part for images.

    Attributes:
      name: its `model_type`.
      architecture: its name among `architectures`.
      family: of the text model.
      others: keys of the whole, or of the part for images, that never change how text is computed.
      defaults: keys that published files leave out of the text model's part, and transformers'
        values for them.
    """

    name: str
    architecture: str
    family: Family
    others: tuple[str, ...]
    defaults: Mapping[str, Any] = dataclasses.field(default_factory=dict)

    def describes(self, hf: Mapping[str, Any]) -> bool:
        """Whether a `config.json` is that of such a checkpoint."""
        architectures = hf.get("architectures")
        if architectures:
            return bool(architectures == [self.architecture])
        return bool(hf.get("model_type") == self.name)

    def text_config(self, hf: Mapping[str, Any]) -> dict[str, Any]:
        """The `config.json` of the text model: the object within `hf`, and the keys beside it."""
        if hf.get("model_type") not in (None, self.name):
            raise NotImplementedError(
                f"model_type={shown(hf['model_type'])} is not supported: must be {self.name!r}, as "
                f"architectures={[self.architecture]}"
            )
        part = hf.get(TEXT)
        if not isinstance(part, Mapping):
            raise ValueError(f"config.json: {TEXT}={shown(part)} must be an object")
        kind = part.get("model_type", self.family.name)
        if kind != self.family.name:
            raise NotImplementedError(
                f"config.json: {TEXT}: model_type={shown(kind)} is not supported: must be "
                f"{self.family.name!r}"
            )
        outside = {key: value for key, value in hf.items() if key not in (*self.others, TEXT)}
        # The outer key counts for both tables, whatever the text model's own says.
        return {
            **self.defaults,
            **outside,
            **part,
            **({_TIED: hf[_TIED]} if hf.get(_TIED) is not None else {}),
            "architectures": [self.family.architecture],
            "model_type": self.family.name,
        }


def tensors_of_text(tensors: Mapping[str, _Stored]) -> dict[str, _Stored]:
    """The tensors of the text model by their names in its family; those for images are left out.

    Tensors of unknown parts keep their names, and a reader refuses them.
    """
    found = {}
    for name, stored in tensors.items():
        if name.startswith(_IGNORED):
            continue
        prefix = next((x for x in _PREFIXES if name.startswith(x)), "")
        found[_PREFIXES.get(prefix, "") + name.removeprefix(prefix)] = stored
    return found
