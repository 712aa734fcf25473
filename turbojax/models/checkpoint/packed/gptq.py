"""GPTQ (Frantar et al., 2023), as AutoGPTQ and GPTQModel write it.

A linear layer of `N` outputs and `K` inputs in groups of `g`, with ``G = ceil(K / g)``, is

- ``qweight``: int32 ``[K / 8, N]``. Word ``(i, n)`` holds the codes of inputs ``8 i`` to
  ``8 i + 7`` of output `n`, the first in the lowest bits, each 0 to 15;
- ``qzeros``: int32 ``[G, N / 8]``. Word ``(j, i)`` holds the zero points of outputs ``8 i`` to
  ``8 i + 7`` in group `j`. The format ``"gptq"`` stores them less one, ``"gptq_v2"`` as they are;
- ``scales``: float16 ``[G, N]``;
- ``g_idx``: int32 ``[K]``, the group of each input; where it is missing, input `k` is of group
  ``k // g``.

The weight of output `n` for input `k` is ``(code - zero) * scale``, rounded once to the scales'
dtype. One is added to the zero points of a ``"gptq"`` file a word at a time, as GPTQModel does: a
stored 15 becomes 0 and carries into the next output's. Other programs read it as 16, but no zero
point is 16, and adding to whole words exactly undoes a subtraction from whole words. All zero
points of a symmetric weight are 8; if all stored ones are 8 in a symmetric ``"gptq"`` file, they
are taken as they are, because some programs forget to subtract.

With act-order (``desc_act``) inputs of a group are not neighbours, unless groups are static. Codes
of such a layer are sorted by group, and its tokens are brought into that order before the product.
"""

import dataclasses
from collections.abc import Mapping

import jax
import numpy as np

from turbojax.models.checkpoint.packed import keys
from turbojax.models.checkpoint.packed.codes import (
    MIDDLE,
    PER_WORD,
    Codes,
    Part,
    Places,
    by_groups,
    grouped,
    nibbles,
    require_words,
    signed,
)
from turbojax.models.checkpoint.packed.keys import Block

_READ = """
quant_method bits group_size sym desc_act static_groups checkpoint_format format lm_head pack_dtype
"""
_HARMLESS = """
act_group_aware backend batch_size block_name_to_quantize cache_block_outputs damp_auto_increment
damp_percent dataset disable_exllama exllama_config max_input_length meta method
model_file_base_name model_name_or_path model_seqlen module_name_preceding_first_block
modules_in_block_to_quantize mse pad_token_id tokenizer true_sequential
use_cuda_fp16 use_exllama
"""
_ONES = np.uint32(0x11111111)


@dataclasses.dataclass(frozen=True)
class Gptq:
    """What a `quantization_config` of GPTQ says; see `PackedFormat`.

    Attributes:
      symmetric: whether all zero points are 8.
      less_one: whether they are stored less one.
      act_order: whether groups are not runs of inputs, so that layers must have a ``g_idx``.
    """

    group_size: int | None
    symmetric: bool
    less_one: bool
    act_order: bool = False
    name: str = "GPTQ"
    codes: str = "qweight"

    @property
    def places(self) -> Mapping[str, Places]:
        """See `PackedFormat`."""
        return {
            "qweight": (("inputs", PER_WORD), ("outputs", 1)),
            "scales": (("groups", 1), ("outputs", 1)),
        }

    def parts(self, outputs: int, inputs: int) -> Mapping[str, Part]:
        """See `PackedFormat`."""
        require_words(inputs, "inputs")
        require_words(outputs, "outputs")
        _, count = keys.groups(inputs, self.group_size)
        scales = (count, outputs)
        return {
            "qweight": Part({"I32": (inputs // PER_WORD, outputs)}),
            "qzeros": Part({"I32": (count, outputs // PER_WORD)}),
            "scales": Part({"F16": scales, "BF16": scales}),
            "g_idx": Part({"I32": (inputs,)}, required=False),
        }

    def unpack(self, parts: Mapping[str, np.ndarray], outputs: int, inputs: int) -> Codes:
        """See `PackedFormat`."""
        if self.act_order and "g_idx" not in parts:
            raise ValueError("desc_act=True without static_groups must have g_idx, has none")
        codes, scales = _codes(parts["qweight"]), parts["scales"].T
        zeros = by_groups(self._zeros(parts["qzeros"]).T, self.symmetric)
        return grouped(codes, scales, zeros, self.group_size, parts.get("g_idx"))

    def _zeros(self, words: np.ndarray) -> np.ndarray:
        """Zero points, int8 ``[G, N]``, -8 to 7."""
        stored = nibbles(words)
        forgot = self.symmetric and bool((stored == MIDDLE).all())
        if self.less_one and not forgot:
            stored = nibbles((words.view(np.uint32) + _ONES).view(np.int32))
        return signed(stored).reshape(words.shape[0], -1)


def parse(block: Block) -> Gptq:
    """Reads a `quantization_config` of ``"gptq"``; NotImplementedError if it is not supported."""
    keys.require_off(block, (*_READ.split(), *_HARMLESS.split()))
    keys.require(block, "bits", (4,))
    keys.require(block, "lm_head", (False, None))
    keys.require(block, "pack_dtype", ("int32", None))
    key = "format" if block.get("checkpoint_format") is None else "checkpoint_format"
    stored = keys.require(block, key, ("gptq", "gptq_v2"), "gptq")
    size = keys.group_size(block.get("group_size", 128))
    is_ordered = keys.require(block, "desc_act", (True, False, None))
    is_static = keys.require(block, "static_groups", (True, False, None))
    return Gptq(
        group_size=size,
        symmetric=keys.require(block, "sym", (True, False), True),
        less_one=stored == "gptq",
        act_order=bool(is_ordered and not is_static and size is not None),
    )


@jax.jit
def _codes(words: jax.Array) -> jax.Array:
    """int8 ``[N, K]`` of words ``[K / 8, N]``."""
    return signed(nibbles(words)).transpose(1, 0, 2).reshape(words.shape[1], -1)
