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
    """How linear layers are stored, of a `quantization_config` whose method is one of `METHODS`.

    Raises:
      NotImplementedError: naming the key, if weights or activations are of another kind.
      ValueError: if something is no object where one must be.
    """
    return _PARSERS[block["quant_method"]](block)
