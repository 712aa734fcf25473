"""Which tensors a Hugging Face checkpoint holds, and where each goes in a `Transformer`.

Hugging Face stores matrices as ``[out, in]``, nnx as ``[in, out]``. `Family` has the names of
tensors, and says which matrices are stored as one, their rows one below the other.
"""

import dataclasses
import functools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, TypeVar

import numpy as np

from turbojax.models.config import TransformerConfig
from turbojax.models.families.base import Path, tensors_of_text
from turbojax.models.families.layers import LatentConfig
from turbojax.models.families.table import FAMILIES, whole_of

EMBEDDING = "model.embed_tokens.weight"
HEAD = "lm_head.weight"
LAYERS = "model.layers."
# Rotary frequencies that old checkpoints store. They follow from the configuration.
_IGNORED = "rotary_emb.inv_freq"
_Stored = TypeVar("_Stored")


@dataclasses.dataclass(frozen=True)
class Placement:
    """Where a tensor, or some of its rows or columns, goes.

    Attributes:
      path: in the state of a `Transformer` whose layers are alike; see `stacked` for others.
      layer: the layer's number; None outside the blocks.
      expert: index into the next axis; None where there are no experts.
      rows: the first row and the one after the last; None for all.
      columns: the first column and the step to the next one; None for all.
      transpose: whether the array there is ``[in, out]``.
      is_wide: whether the array there is float32, whatever the dtype of the others.
    """

    path: Path
    layer: int | None = None
    expert: int | None = None
    rows: tuple[int, int] | None = None
    columns: tuple[int, int] | None = None
    transpose: bool = False
    is_wide: bool = False

    def of(self, tensor: np.ndarray) -> np.ndarray:
        """The part of the whole tensor that goes there."""
        if self.rows is not None:
            tensor = tensor[slice(*self.rows)]
        if self.columns is not None:
            first, step = self.columns
            tensor = tensor[..., first::step]
        return tensor


@dataclasses.dataclass(frozen=True)
class TensorSpec:
    """A tensor of a checkpoint, with the places that its rows or columns go to, in their order."""

    name: str
    shape: tuple[int, ...]
    placements: tuple[Placement, ...]

    def dtype(self, dtype: np.dtype) -> np.dtype:
        """The dtype of the tensor's numbers in a model of this dtype."""
        return np.dtype(np.float32) if self.placements[0].is_wide else dtype

    def joined(self, parts: Sequence[np.ndarray]) -> np.ndarray:
        """The tensor made of its parts: the inverse of `Placement.of`."""
        if len(parts) == 1:
            return parts[0]
        if self.placements[0].columns is not None:
            return np.stack(parts, axis=-1).reshape(self.shape)
        return np.concatenate(parts)


def stacked(place: Placement, config: TransformerConfig) -> Placement:
    """The place in a `Transformer`'s state: the path of its stack, and the layer's number there."""
    if place.layer is None:
        return place
    name, number = config.stack_of(place.layer)
    return dataclasses.replace(place, path=(name, *place.path[1:]), layer=number)


@functools.lru_cache(maxsize=2)
def checkpoint_tensors(config: TransformerConfig) -> tuple[TensorSpec, ...]:
    """All tensors of a checkpoint, from the embedding to the logits.

    With tied embeddings `HEAD` is left out, though a checkpoint may repeat the embedding there.
    Results are cached: a model with experts has tens of thousands, and callers ask layer by layer.
    """
    table = (config.vocab_size, config.hidden_size)
    specs = [TensorSpec(EMBEDDING, table, (Placement(("embedding",)),))]
    for layer in range(config.num_layers):
        specs += _norms(config, layer)
        for linear in _linears(config, layer):
            specs += linear.specs(layer)
        specs += _others(config, layer)
    norm = Placement(("norm", "scale"))
    specs.append(TensorSpec("model.norm.weight", (config.hidden_size,), (norm,)))
    if not config.tie_embeddings:
        specs.append(TensorSpec(HEAD, table, (Placement(("lm_head",)),)))
    return tuple(specs)


def experts_tensors(config: TransformerConfig) -> int:
    """How many tensors of experts a checkpoint has, computed without making their names."""
    experts = config.experts
    if experts is None or FAMILIES[config.family].experts_in_one:
        return 0
    return 3 * experts.count * (config.num_layers - len(experts.dense_layers))


def text_tensors(hf: Mapping[str, Any], tensors: Mapping[str, _Stored]) -> dict[str, _Stored]:
    """The text model's tensors by their names in `checkpoint_tensors`; usually those they have."""
    return dict(tensors) if whole_of(hf) is None else tensors_of_text(tensors)


def is_ignored(name: str, config: TransformerConfig) -> bool:
    """Whether a tensor of this name holds nothing that a model needs."""
    if FAMILIES[config.family].has_predictors and name.startswith(_prefix(config.num_layers)):
        return True
    return name.endswith(_IGNORED)


@dataclasses.dataclass(frozen=True)
class _Linear:
    """A stored linear layer, which is one of the model's, or several on the same input.

    `outputs` has each one's path in a block and its number of outputs.
    """

    name: str
    outputs: Sequence[tuple[Path, int]]
    inputs: int
    bias: bool
    expert: int | None = None

    def specs(self, layer: int) -> Iterator[TensorSpec]:
        total = sum(size for _, size in self.outputs)
        kinds: dict[str, tuple[str, tuple[int, ...], bool]] = {
            "weight": ("kernel", (total, self.inputs), True)
        }
        if self.bias:
            kinds["bias"] = ("bias", (total,), False)
        for suffix, (leaf, shape, transpose) in kinds.items():
            placements, start = [], 0
            for path, size in self.outputs:
                rows = None if len(self.outputs) == 1 else (start, start + size)
                place = ("blocks", *path, leaf)
                placements.append(Placement(place, layer, self.expert, rows, None, transpose))
                start += size
            yield TensorSpec(f"{_prefix(layer)}{self.name}.{suffix}", shape, tuple(placements))


def _linears(config: TransformerConfig, layer: int) -> Iterator[_Linear]:
    size, inner = config.hidden_size, config.intermediate_size
    width, kv_width = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    # For each of the model's linear layers: outputs, inputs, and whether there is a bias.
    attention: dict[Path, tuple[int, int, bool]] = {
        ("attention", "q_proj"): (width, size, config.qkv_bias),
        ("attention", "k_proj"): (kv_width, size, config.qkv_bias),
        ("attention", "v_proj"): (kv_width, size, config.qkv_bias),
        ("attention", "o_proj"): (size, width, config.output_bias),
    }
    if config.latent is not None:
        attention = _of_latents(config, config.latent)
    layers = {
        **attention,
        ("mlp", "gate_proj"): (inner, size, config.mlp_bias),
        ("mlp", "up_proj"): (inner, size, config.mlp_bias),
        ("mlp", "down_proj"): (size, inner, config.mlp_bias),
    }
    has_experts = config.has_experts(layer)
    for name, paths in FAMILIES[config.family].linears.items():
        if (has_experts and paths[0][0] == "mlp") or paths[0] not in layers:
            continue
        _, inputs, bias = layers[paths[0]]
        yield _Linear(name, [(path, layers[path][0]) for path in paths], inputs, bias)
    if has_experts:
        yield from _experts(config)


def _of_latents(
    config: TransformerConfig, latent: LatentConfig
) -> dict[Path, tuple[int, int, bool]]:
    """The linear layers of `LatentAttention`, as in `_linears`."""
    size, heads, rank = config.hidden_size, config.num_heads, latent.query_rank
    queries, kept = heads * latent.key_dim, latent.rank + latent.rope_dim
    layers = {
        "kv_a_proj": (kept, size, config.qkv_bias),
        "kv_b_proj": (heads * (latent.nope_dim + latent.value_dim), latent.rank, False),
        "o_proj": (size, heads * latent.value_dim, config.output_bias),
    }
    if rank is None:
        layers["q_proj"] = (queries, size, False)
    else:
        layers |= {"q_a_proj": (rank, size, config.qkv_bias), "q_b_proj": (queries, rank, False)}
    return {("attention", name): sizes for name, sizes in layers.items()}


def _experts(config: TransformerConfig) -> Iterator[_Linear]:
    """The router, the layers that all tokens go to, then each expert's own."""
    experts, size = config.experts, config.hidden_size
    assert experts is not None
    inner = experts.intermediate_size
    sizes = {"gate_proj": (inner, size), "up_proj": (inner, size), "down_proj": (size, inner)}
    family = FAMILIES[config.family]
    names = family.experts
    for name, path in names.items():
        if path[-1] == "router":
            yield _Linear(name, [(path, experts.count)], size, experts.has_biases)
        if path[1] == "shared" and experts.shared_size is not None:
            own = {**dict.fromkeys(sizes, (experts.shared_size, size))}
            own["down_proj"] = size, experts.shared_size
            outputs, inputs = own[path[-1]]
            yield _Linear(name, [(path, outputs)], inputs, False)
    if family.experts_in_one:
        return
    for expert in range(experts.count):
        for name, path in names.items():
            if path[1] in sizes:
                outputs, inputs = sizes[path[-1]]
                yield _Linear(name.format(expert), [(path, outputs)], inputs, False, expert)


def _others(config: TransformerConfig, layer: int) -> Iterator[TensorSpec]:
    """Sinks, corrections, and tensors of all experts at once."""
    prefix, family, experts = _prefix(layer), FAMILIES[config.family], config.experts
    if config.attention_sinks:
        place = Placement(("blocks", "attention", "sinks"), layer)
        yield TensorSpec(f"{prefix}self_attn.sinks", (config.num_heads,), (place,))
    if experts is None or not config.has_experts(layer):
        return
    for name, path in family.experts.items():
        if path[-1] == "correction":
            place = Placement(("blocks", *path), layer, is_wide=True)
            yield TensorSpec(f"{prefix}{name}", (experts.count,), (place,))
    if not family.experts_in_one:
        return
    size, inner = config.hidden_size, experts.intermediate_size
    parts = {
        "gate_up_proj": (("gate_proj", "up_proj"), size, 2 * inner),
        "down_proj": (("down_proj",), inner, size),
    }
    for name in family.experts:
        *_, last = name.split(".")
        if last not in parts:
            continue
        paths, inputs, outputs = parts[last]
        leaves: dict[str, tuple[str, tuple[int, ...]]] = {
            "": ("kernel", (experts.count, inputs, outputs))
        }
        if experts.has_biases:
            leaves["_bias"] = ("bias", (experts.count, outputs))
        for suffix, (leaf, shape) in leaves.items():
            places = []
            for i, part in enumerate(paths):
                columns = None if len(paths) == 1 else (i, len(paths))
                places.append(Placement(("blocks", "mlp", part, leaf), layer, columns=columns))
            yield TensorSpec(f"{prefix}{name}{suffix}", shape, tuple(places))


def _norms(config: TransformerConfig, layer: int) -> Iterator[TensorSpec]:
    has = {
        **dict.fromkeys(("q_norm", "k_norm"), config.qk_norm),
        **dict.fromkeys(("attention_post_norm", "mlp_post_norm"), config.post_norms),
    }
    sizes = {}
    if config.latent is not None:
        has["q_a_norm"] = config.latent.query_rank is not None
        sizes = {"q_a_norm": config.latent.query_rank, "kv_a_norm": config.latent.rank}
    for name, path in FAMILIES[config.family].norms.items():
        if has.get(path[-1], True):
            size = config.head_dim if path[0] == "attention" else config.hidden_size
            size = sizes.get(path[-1]) or size
            if path[0] == "attention" and config.joint_qk_norm:
                size *= config.num_heads if path[-1] == "q_norm" else config.num_kv_heads
            placement = Placement(("blocks", *path, "scale"), layer)
            yield TensorSpec(f"{_prefix(layer)}{name}.weight", (size,), (placement,))


def _prefix(layer: int) -> str:
    return f"{LAYERS}{layer}."
