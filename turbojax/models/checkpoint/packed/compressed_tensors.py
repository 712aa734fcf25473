"""compressed-tensors, format ``"pack-quantized"`` (W4A16), as LLM Compressor writes it.

A linear layer of `N` outputs and `K` inputs, with `G` groups a row, is

- ``weight_packed``: int32 ``[N, ceil(K / 8)]``. Word ``(n, i)`` holds the codes of inputs ``8 i``
  to ``8 i + 7`` of output `n`, the first in the lowest bits, each -8 to 7 and stored 8 larger;
- ``weight_scale``: bfloat16 or float16 ``[N, G]``;
- ``weight_zero_point``, if weights are not symmetric: int32 ``[ceil(N / 8), G]``, the zero points
  of eight outputs a word, stored like codes; or, as early versions wrote them, int8 ``[N, G]``;
- ``weight_shape``: int64 or int32 ``[2]``, `N` and `K`;
- ``weight_g_idx``, only with act-order by groups: int32 ``[K]``, the group of each input; if any is
  -1, groups are not known, and inputs are in order.

The strategy ``"group"`` has groups of `group_size` inputs, ``"channel"`` one of all inputs. The
weight of output `n` for input `k` is ``(code - zero) * scale``, or ``code * scale``, rounded once
to the scale's dtype.

`quantization_config` has its schemes in `config_groups`, and names in `ignore` what is not
quantized. Here a layer's tensors decide whether it is quantized.
"""

import dataclasses
from collections.abc import Mapping

import numpy as np

from turbojax._json import shown_name
from turbojax.models.checkpoint.packed import keys
from turbojax.models.checkpoint.packed.codes import (
    PER_WORD,
    Codes,
    Part,
    Places,
    along_inputs,
    grouped,
    nibbles,
    signed,
)
from turbojax.models.checkpoint.packed.keys import Block

FORMAT = "pack-quantized"
_READ = "quant_method config_groups format quantization_status sparsity_config"
_HARMLESS = "global_compression_ratio ignore version provider"
_SCHEME = "targets weights format"
_WEIGHTS = "num_bits type symmetric strategy group_size dynamic"
_HARMLESS_WEIGHTS = "actorder observer observer_kwargs scale_dtype zp_dtype"


@dataclasses.dataclass(frozen=True)
class CompressedTensors:
    """What the `quantization_config` says; `symmetric` means that there are no zero points."""

    group_size: int | None
    symmetric: bool
    name: str = "compressed-tensors"
    codes: str = "weight_packed"

    @property
    def places(self) -> Mapping[str, Places]:
        """See `PackedFormat`."""
        return {
            "weight_packed": (("outputs", 1), ("inputs", PER_WORD)),
            "weight_scale": (("outputs", 1), ("groups", 1)),
        }

    def parts(self, outputs: int, inputs: int) -> Mapping[str, Part]:
        """See `PackedFormat`."""
        size, count = keys.groups(inputs, self.group_size)
        if inputs % size:
            raise ValueError(f"{inputs} inputs must be a multiple of group_size={size}")
        parts = {
            "weight_packed": Part({"I32": (outputs, _words(inputs))}),
            "weight_scale": Part(dict.fromkeys(("F16", "BF16"), (outputs, count))),
            "weight_shape": Part(dict.fromkeys(("I64", "I32"), (2,))),
            "weight_g_idx": Part({"I32": (inputs,)}, required=False),
        }
        if not self.symmetric:
            zeros = {"I32": (_words(outputs), count), "I8": (outputs, count)}
            parts["weight_zero_point"] = Part(zeros)
        return parts

    def unpack(self, parts: Mapping[str, np.ndarray], outputs: int, inputs: int) -> Codes:
        """See `PackedFormat`."""
        if parts["weight_shape"].tolist() != [outputs, inputs]:
            raise ValueError(
                f"weight_shape is {parts['weight_shape'].tolist()}, must be {[outputs, inputs]}"
            )
        codes = along_inputs(parts["weight_packed"])[:, :inputs]
        scales, zeros = parts["weight_scale"], None
        if not self.symmetric:
            zeros = _zeros(parts["weight_zero_point"], outputs)
        groups = parts.get("weight_g_idx")
        if groups is not None and (groups == -1).any():
            groups = None
        return grouped(codes, scales, zeros, self.group_size, groups)


def parse(block: Block) -> CompressedTensors:
    """Reads a `quantization_config` of ``"compressed-tensors"``."""
    keys.require_off(block, (*_READ.split(), *_HARMLESS.split()))
    keys.require(block, "format", (FORMAT,))
    keys.require(block, "quantization_status", ("compressed", "frozen", None))
    sparsity = block.get("sparsity_config")
    if sparsity:
        keys.require(keys.an_object(block, "sparsity_config"), "format", ("dense",))
    groups = keys.an_object(block, "config_groups")
    if not groups:
        raise ValueError("config.json: quantization_config: config_groups must hold a group")
    schemes = {name: _scheme(groups, name) for name in groups}
    first = next(iter(schemes.values()))
    for name, scheme in schemes.items():
        if scheme != first:
            raise NotImplementedError(
                f"config.json: quantization_config: config_groups: {shown_name(name)} differs from "
                "the first group, which is not supported: all layers must be quantized alike"
            )
    return first


def _scheme(groups: Block, name: str) -> CompressedTensors:
    scheme = keys.an_object(groups, name)
    # Refuses `input_activations` among others: only weights may be quantized.
    keys.require_off(scheme, _SCHEME.split())
    keys.require(scheme, "format", (FORMAT, None))
    weights = keys.an_object(scheme, "weights")
    keys.require_off(weights, (*_WEIGHTS.split(), *_HARMLESS_WEIGHTS.split()))
    keys.require(weights, "num_bits", (4,))
    keys.require(weights, "type", ("int",), "int")
    keys.require(weights, "dynamic", (False, None))
    size = weights.get("group_size")
    by_row = size in (None, -1)
    strategy = keys.require(weights, "strategy", ("group", "channel", None))
    if strategy is None:
        strategy = "channel" if by_row else "group"
    return CompressedTensors(
        group_size=None if strategy == "channel" else keys.group_size(size),
        symmetric=keys.require(weights, "symmetric", (True, False), True),
    )


def _zeros(stored: np.ndarray, outputs: int) -> np.ndarray:
    """Zero points, int8 ``[N, G]``."""
    if stored.dtype == np.int8:
        if stored.min() < -8 or stored.max() > 7:
            raise ValueError("weight_zero_point must hold numbers from -8 to 7")
        return stored
    return signed(nibbles(stored.T)).reshape(stored.shape[1], -1)[:, :outputs].T


def _words(codes: int) -> int:
    return -(-codes // PER_WORD)
