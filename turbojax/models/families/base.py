"""What families of Hugging Face checkpoints have in common, and where one may differ.

A `Family` is data, and methods that a subclass overrides where data does not suffice. Each family
has a file with what is special about it; `table.py` lists them.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

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
      chooses_layers: whether `layer_types` may differ from `usual_layers`.
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
            **self.read_rope(hf, head_dim, max_length),
            **self.read_mathematics(keys),
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
            **self.write_rope(fields),
            **self.write_mathematics(fields),
            **self.write_windows(fields["local_windows"], fields),
        }

    def read_rope(self, hf: Mapping[str, Any], head_dim: int, max_length: int) -> dict[str, Any]:
        """The fields that say how positions rotate queries and keys; `max_length` is the file's."""
        del head_dim
        found = rope.parse(rope.merged(hf), max_length)
        self._require_whole(found)
        return {"rope_theta": found.theta, "rope_scaling": found.scaling, "rotary_dim": None}

    def write_rope(self, fields: Mapping[str, Any]) -> dict[str, Any]:
        """The keys that `read_rope` reads, in the spellings of transformers 4 and 5."""
        return rope.write(fields["rope_theta"], fields["rope_scaling"], fields["max_length"])

    def read_mathematics(self, keys: Mapping[str, Any]) -> dict[str, Any]:
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

    def write_mathematics(self, fields: Mapping[str, Any]) -> dict[str, Any]:
        """The keys that `read_mathematics` reads."""
        keys = {self.activation_key: ACTIVATION_NAMES[fields["activation"]]}
        biases = {"attention_bias": "qkv_bias", "mlp_bias": "mlp_bias"}
        return keys | {key: fields[x] for key, x in biases.items() if key in self.defaults}

    def usual_layers(self, keys: Mapping[str, Any], window: int | None) -> list[str]:
        """The `layer_types` of a file without that key; a `window` of None means no windows."""
        return [FULL if window is None else SLIDING] * keys["num_hidden_layers"]

    def write_windows(
        self, windows: Sequence[int | None], fields: Mapping[str, Any]
    ) -> dict[str, Any]:
        """The keys that say which layers have windows; `windows` is empty if no layer has one."""
        del fields
        return {"sliding_window": first_window(windows)} if self._has_windows else {}

    @property
    def _has_windows(self) -> bool:
        return "sliding_window" in self.defaults

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
        types, usual = keys["layer_types"], self.usual_layers(keys, window)
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

    def usual_layers(self, keys: Mapping[str, Any], window: int | None) -> list[str]:
        """See `Family`."""
        del window
        return [FULL if i % 2 else SLIDING for i in range(keys["num_hidden_layers"])]

    def write_windows(
        self, windows: Sequence[int | None], fields: Mapping[str, Any]
    ) -> dict[str, Any]:
        """See `Family`."""
        # transformers asks for a window even where no layer has one.
        return {
            "sliding_window": first_window(windows) or fields["max_length"],
            "layer_types": layer_types(windows, fields["num_layers"]),
        }


def first_window(windows: Sequence[int | None]) -> int | None:
    """The first layer's window, or None; files cannot express a second size."""
    return next((size for size in windows if size is not None), None)


def layer_types(windows: Sequence[int | None], layers: int) -> list[str]:
    """The value of the key `layer_types` for layers with these windows."""
    return [SLIDING if i < len(windows) and windows[i] else FULL for i in range(layers)]
