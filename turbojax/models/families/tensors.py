"""Which tensors a Hugging Face checkpoint holds, and where each goes in a `Transformer`.

Hugging Face stores matrices as ``[out, in]``, nnx as ``[in, out]``. Some families keep matrices
that read the same input as one: their rows one below the other.
"""

import dataclasses
from collections.abc import Iterator, Mapping, Sequence

from turbojax.models.config import TransformerConfig

EMBEDDING = "model.embed_tokens.weight"
HEAD = "lm_head.weight"
LAYERS = "model.layers."
# Rotary frequencies that old checkpoints store. They follow from the configuration.
_IGNORED = "rotary_emb.inv_freq"


@dataclasses.dataclass(frozen=True)
class Placement:
    """Where a tensor, or some of its rows, goes.

    Attributes:
      path: in the state of a `Transformer`.
      layer: index into the leading axis of what lies there; None outside the blocks.
      rows: first row and the one after the last; None for all.
      transpose: whether it lies there as ``[in, out]``.
    """

    path: tuple[str, ...]
    layer: int | None = None
    rows: tuple[int, int] | None = None
    transpose: bool = False


@dataclasses.dataclass(frozen=True)
class TensorSpec:
    """A tensor of a checkpoint.

    Attributes:
      name: Hugging Face's.
      shape: as stored.
      placements: where its rows go, each row to one place, in their order.
    """

    name: str
    shape: tuple[int, ...]
    placements: tuple[Placement, ...]


def checkpoint_tensors(config: TransformerConfig) -> tuple[TensorSpec, ...]:
    """All tensors of a checkpoint, from the embedding to the logits.

    With tied embeddings `HEAD` is none of them, though a checkpoint may repeat the embedding there.

    Args:
      config: the model's.
    """
    table = (config.vocab_size, config.hidden_size)
    specs = [TensorSpec(EMBEDDING, table, (Placement(("embedding",)),))]
    for layer in range(config.num_layers):
        specs += _norms(config, layer)
        for linear in _linears(config):
            specs += linear.specs(layer)
    norm = Placement(("norm", "scale"))
    specs.append(TensorSpec("model.norm.weight", (config.hidden_size,), (norm,)))
    if not config.tie_embeddings:
        specs.append(TensorSpec(HEAD, table, (Placement(("lm_head",)),)))
    return tuple(specs)


def is_ignored(name: str) -> bool:
    """Whether a tensor of this name holds nothing that a model needs."""
    return name.endswith(_IGNORED)


@dataclasses.dataclass(frozen=True)
class _Linear:
    """A stored linear layer: one of the model's, or several on the same input.

    Attributes:
      name: within a layer of the checkpoint.
      outputs: path in a block and number of outputs of each of the model's layers.
      inputs: number of them.
      bias: whether there is one.
    """

    name: str
    outputs: Sequence[tuple[tuple[str, str], int]]
    inputs: int
    bias: bool

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
                placements.append(Placement(("blocks", *path, leaf), layer, rows, transpose))
                start += size
            yield TensorSpec(f"{_prefix(layer)}{self.name}.{suffix}", shape, tuple(placements))


def _linears(config: TransformerConfig) -> list[_Linear]:
    size, inner = config.hidden_size, config.intermediate_size
    width, kv_width = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    heads = {"q_proj": width, "k_proj": kv_width, "v_proj": kv_width}
    qkv = [(("attention", name), outputs) for name, outputs in heads.items()]
    gates = [(("mlp", name), inner) for name in ("gate_proj", "up_proj")]
    if config.family == "phi3":
        linears = [
            _Linear("self_attn.qkv_proj", qkv, size, config.qkv_bias),
            _Linear("mlp.gate_up_proj", gates, size, config.mlp_bias),
        ]
    else:
        linears = [
            _Linear(f"self_attn.{part[0][1]}", [part], size, config.qkv_bias) for part in qkv
        ]
        linears += [_Linear(f"mlp.{part[0][1]}", [part], size, config.mlp_bias) for part in gates]
    output, down = ("attention", "o_proj"), ("mlp", "down_proj")
    linears.append(_Linear("self_attn.o_proj", [(output, size)], width, config.output_bias))
    linears.append(_Linear("mlp.down_proj", [(down, size)], inner, config.mlp_bias))
    return linears


def _norms(config: TransformerConfig, layer: int) -> Iterator[TensorSpec]:
    # Where there are four norms, the name of the second of two means another one.
    names: Mapping[str, tuple[str, ...]] = {
        "input_layernorm": ("attention_norm",),
        "post_attention_layernorm": ("mlp_norm",),
    }
    if config.post_norms:
        names = {
            "input_layernorm": ("attention_norm",),
            "post_attention_layernorm": ("attention_post_norm",),
            "pre_feedforward_layernorm": ("mlp_norm",),
            "post_feedforward_layernorm": ("mlp_post_norm",),
        }
    sizes = dict.fromkeys(names, config.hidden_size)
    if config.qk_norm:
        heads = {f"self_attn.{name}": ("attention", name) for name in ("q_norm", "k_norm")}
        names = {**names, **heads}
        sizes |= dict.fromkeys(heads, config.head_dim)
    for name, path in names.items():
        placement = Placement(("blocks", *path, "scale"), layer)
        yield TensorSpec(f"{_prefix(layer)}{name}.weight", (sizes[name],), (placement,))


def _prefix(layer: int) -> str:
    return f"{LAYERS}{layer}."
