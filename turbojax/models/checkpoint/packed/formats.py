"""The packed formats there are. A new one is a file of its own and a line here."""

from collections.abc import Callable, Mapping
from typing import Any

from turbojax.models.checkpoint.packed import awq, compressed_tensors, gptq
from turbojax.models.checkpoint.packed.codes import PackedFormat

_PARSERS: Mapping[str, Callable[[Mapping[str, Any]], PackedFormat]] = {
    "gptq": gptq.parse,
    "awq": awq.parse,
    "compressed-tensors": compressed_tensors.parse,
}

METHODS = tuple(_PARSERS)
"""What `quant_method` may be."""


def parse(block: Mapping[str, Any]) -> PackedFormat:
    """How linear layers are stored; `block` is a `quantization_config`.

    Raises NotImplementedError, naming the key, for other kinds of weights or activations;
    ValueError if an object is missing.
    """
    return _PARSERS[block["quant_method"]](block)
