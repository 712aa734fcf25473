"""AWQ (Lin et al., 2024), as AutoAWQ and GPTQModel write it.

A linear layer of `N` outputs and `K` inputs in groups of `g`, with ``G = K / g``, is in the version
``"gemm"``

- ``qweight``: int32 ``[K, N / 8]``. Word ``(k, i)`` holds the codes, 0 to 15, of input `k` and
  outputs ``8 i`` to ``8 i + 7``; from the lowest bits up those of outputs 0, 2, 4, 6, 1, 3, 5, 7 of
  the eight;
- ``qzeros``: int32 ``[G, N / 8]``, the zero points of those outputs in the same order;
- ``scales``: float16 ``[G, N]``,

and in the version ``"gemv"``

- ``qweight``: int32 ``[N, K / 8]``, eight inputs of an output a word, in their order;
- ``qzeros``: int32 ``[N, Z]``, eight groups of an output a word, in their order, where `Z` is
  ``ceil(floor(K / g) / 8)``, rounded up to a multiple of 2 with groups of 64 and of 4 with groups
  of 32;
- ``scales``: float16 ``[N, 8 Z]``. What is beyond the last group is padding.

The weight of output `n` for input `k` is ``(code - zero) * scale``, rounded once to the scales'
dtype.
"""

import dataclasses
from collections.abc import Mapping

import jax
import numpy as np

from turbojax.models.checkpoint.packed import keys
from turbojax.models.checkpoint.packed.codes import (
    PER_WORD,
    Codes,
    Part,
    Places,
    along_inputs,
    nibbles,
    require_words,
    signed,
)
from turbojax.models.checkpoint.packed.keys import Block

_READ = "quant_method bits group_size zero_point version format modules_to_not_convert lm_head"
_HARMLESS = """
act_group_aware backend batch_size cache_block_outputs damp_percent dataset desc_act do_fuse
exllama_config fuse_max_seq_len max_input_length meta method model_seqlen modules_to_fuse
pad_token_id pack_dtype sym tokenizer true_sequential block_name_to_quantize
module_name_preceding_first_block modules_in_block_to_quantize
"""
# For each of a word's outputs 0 to 7, the place of its code, counted from the lowest bits.
_PLACES = np.argsort([0, 2, 4, 6, 1, 3, 5, 7])


@dataclasses.dataclass(frozen=True)
class Awq:
    """What AWQ's config says; `by_outputs`: an output's codes lie together (``"gemv"``)."""

    group_size: int | None
    by_outputs: bool
    name: str = "AWQ"
    codes: str = "qweight"

    @property
    def places(self) -> Mapping[str, Places]:
        """See `PackedFormat`."""
        if self.by_outputs:
            return {
                "qweight": (("outputs", 1), ("inputs", PER_WORD)),
                "scales": (("outputs", 1), ("groups", 1)),
            }
        return {
            "qweight": (("inputs", 1), ("outputs", PER_WORD)),
            "scales": (("groups", 1), ("outputs", 1)),
        }

    def parts(self, outputs: int, inputs: int) -> Mapping[str, Part]:
        """See `PackedFormat`."""
        size, count = keys.groups(inputs, self.group_size)
        if inputs % size:
            raise ValueError(f"{inputs} inputs must be a multiple of group_size={size}")
        if self.by_outputs:
            require_words(inputs, "inputs")
            words = _words(size, count)
            codes, zeros = (outputs, inputs // PER_WORD), (outputs, words)
            scales = (outputs, words * PER_WORD)
        else:
            require_words(outputs, "outputs")
            codes, zeros = (inputs, outputs // PER_WORD), (count, outputs // PER_WORD)
            scales = (count, outputs)
        return {
            "qweight": Part({"I32": codes}),
            "qzeros": Part({"I32": zeros}),
            "scales": Part({"F16": scales, "BF16": scales}),
        }

    def unpack(self, parts: Mapping[str, np.ndarray], outputs: int, inputs: int) -> Codes:
        """See `PackedFormat`."""
        _, count = keys.groups(inputs, self.group_size)
        zeros, scales = nibbles(parts["qzeros"]), parts["scales"]
        if self.by_outputs:
            codes = along_inputs(parts["qweight"])
            zeros, scales = zeros.reshape(outputs, -1)[:, :count], scales[:, :count]
        else:
            codes = _along_outputs(parts["qweight"])
            zeros, scales = zeros[..., _PLACES].reshape(count, outputs).T, scales.T
        return Codes(codes, scales, signed(zeros), self.group_size)


def parse(block: Block) -> Awq:
    """Reads a `quantization_config` of ``"awq"``; NotImplementedError if it is not supported."""
    keys.require_off(block, (*_READ.split(), *_HARMLESS.split()))
    keys.require(block, "bits", (4,), 4)
    keys.require(block, "lm_head", (False, None))
    keys.require(block, "zero_point", (True,), True)
    key = "format" if block.get("version") is None else "version"
    version = block.get(key, "gemm")
    lower = version.lower() if isinstance(version, str) else version
    keys.require({key: lower}, key, ("gemm", "gemv"))
    return Awq(keys.group_size(block.get("group_size", 128)), by_outputs=lower == "gemv")


@jax.jit
def _along_outputs(words: jax.Array) -> jax.Array:
    """int8 ``[N, K]`` of words ``[K, N / 8]``."""
    return signed(nibbles(words)[..., _PLACES]).reshape(words.shape[0], -1).T


def _words(size: int, count: int) -> int:
    """Words of zero points for an output of ``"gemv"`` with `count` groups of `size` inputs."""
    multiple = {64: 2, 32: 4}.get(size, 1)
    words = -(-count // PER_WORD)
    return -(-words // multiple) * multiple
