"""Models that commands continue texts with: found by name, checked, and loaded last."""

import dataclasses
import functools
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from turbojax import device, models
from turbojax.models import families
from turbojax.models.checkpoint import quantized as quantized_checkpoint
from turbojax.models.checkpoint.folder import find_companions, is_gguf
from turbojax.models.checkpoint.huggingface import checkpoint_folder, float_bytes, require_gguf
from turbojax.models.config import DTYPES, model_config, stored_dtype
from turbojax.models.lora import check_adapters
from turbojax.models.tensor_parallel.layout import axes_of_model, parts
from turbojax.models.text import gguf_tokenizer
from turbojax.models.text.chat import chat_tokens
from turbojax.models.text.tokenizer import NumberTokenizer, Tokenizer, load_tokenizer
from turbojax.sharding.axes import Axes

WEIGHTS = ("float", "int4")


@dataclasses.dataclass(frozen=True)
class TextModel:
    """A model to generate with, and what turns text into its tokens and back."""

    decoder: models.Decoder | models.QuantizedDecoder
    tokenizer: Tokenizer


@dataclasses.dataclass(frozen=True)
class FoundModel:
    """A model that is found but not loaded, so that what it is to do can be checked before.

    `weight_bytes` is about that of its weights in `dtype`, on a mesh of those that one device
    holds; `open` opens its checkpoint, see `models.open_decoder`, None if there is none; `axes` are
    those of the mesh that it will be split over; `is_quantized` says whether its weights are INT4.
    """

    config: models.TransformerConfig
    dtype: np.dtype
    tokenizer: Tokenizer
    weight_bytes: int
    load: Callable[[], TextModel]
    open: Callable[[], models.StoredDecoder] | None = None
    axes: Axes | None = None
    is_quantized: bool = False


def find_text_model(
    path: str,
    dtype: np.dtype | None = None,
    max_length: int | None = None,
    adapters: str | None = None,
    axes: Axes | None = None,
    weights: str = "float",
) -> FoundModel:
    """Reads all of a checkpoint but its weights.

    `path` is ``"embedded"``, ``"smollm2"``, a GGUF file, or a checkpoint's folder, quantized or
    not. `dtype` is by default float32 on a CPU, where it is the fast one, and otherwise that of the
    checkpoint, or float16 for bfloat16 on a GPU that lacks it (float32 of Gemma 2 and 3, which
    overflow it). For `max_length` see `models.load`. `adapters` is a folder of low-rank adapters
    for the model, and `axes` those of a mesh to split the model over. `weights` is ``"float"``,
    which stands for what a checkpoint has, or for a GGUF file also ``"int4"``, which takes its
    codes, see `models.load`.
    """
    int4 = _is_int4(weights)
    if int4:
        require_gguf(path)
    tokenizer = load_tokenizer(path)
    hf = models.read_config(path)
    config = model_config(checkpoint_folder(path), hf, max_length)
    axes = None if axes is None else axes_of_model(config, axes)
    if dtype is None:
        dtype = usual_dtype(stored_dtype(hf), config)
    used = dtype or stored_dtype(hf) or jnp.dtype(jnp.bfloat16)
    if "quantization_config" in hf:
        size = sum(file.stat().st_size for file in models.weight_files(path))
    else:
        size = float_bytes(path, used, int4=int4)
    loaded = None
    if adapters is not None:
        loaded = models.load_adapters(adapters, config.num_layers)
        check_adapters(loaded, config)

    options: dict[str, Any] = {"dtype": dtype, "max_length": max_length, "mesh": axes}

    def load() -> TextModel:
        decoder = models.load_decoder(path, adapters=loaded, int4=int4, **options)
        return TextModel(decoder, tokenizer)

    open_it = functools.partial(models.open_decoder, path, **options)
    return FoundModel(
        config,
        used,
        tokenizer,
        size // parts(axes),
        load,
        open_it,
        axes,
        is_quantized=int4 or quantized_checkpoint.is_quantized(hf),
    )


def usual_dtype(stored: np.dtype | None, config: models.TransformerConfig) -> np.dtype | None:
    """What a model is computed in on this device where nobody says; None for `stored`, its own.

    Float32 on a CPU. On GPUs without bfloat16, a model in it, or in no dtype that its checkpoint
    names, is computed in float16, or in float32 where float16 is known to overflow.
    """
    usual = device.compute_dtype()
    if usual == jnp.float16 and stored in (None, jnp.bfloat16):
        overflows = families.FAMILIES[config.family].overflows_float16
        return jnp.dtype(jnp.float32) if overflows else usual
    return usual if usual == jnp.float32 else None


def files_beside(path: str) -> tuple[dict[str, Any], dict[str, Path | bytes]]:
    """What a copy of a model needs beside its weights.

    Returns:
      The keys of its `config.json` that name special tokens, and the files of its tokenizer.
    """
    source, hf = checkpoint_folder(path), models.read_config(path)
    read = gguf_tokenizer.companions if is_gguf(source) else find_companions
    names = ("bos_token_id", "eos_token_id", "pad_token_id")
    return {name: hf[name] for name in names if name in hf}, dict(read(source))


def find_random_model(
    shape: str,
    dtype: np.dtype | None = None,
    weights: str = "float",
    axes: Axes | None = None,
) -> FoundModel:
    """A model with random weights, whose tokens are numbers; by default in 16 bits.

    That is bfloat16, or float16 on a GPU that lacks it.

    `shape` is a name in `models.SHAPES`; `weights` ``"float"``, or ``"int4"`` for INT4 weights in
    the blocks' linear layers.
    """
    int4 = _is_int4(weights)
    if shape not in models.SHAPES:
        raise ValueError(f"random weights {shape!r} must be one of {', '.join(models.SHAPES)}")
    config, used = models.SHAPES[shape], jnp.dtype(dtype or device.half_dtype())
    axes = None if axes is None else axes_of_model(config, axes)
    make = models.random_quantized_decoder if int4 else models.random_decoder
    tokenizer = NumberTokenizer(config.vocab_size)
    shapes = jax.tree.leaves(jax.eval_shape(lambda: make(config, dtype=used)))
    size = sum(math.prod(x.shape) * x.dtype.itemsize for x in shapes)

    def load() -> TextModel:
        return TextModel(make(config, dtype=used, axes=axes), tokenizer)

    return FoundModel(config, used, tokenizer, size // parts(axes), load, axes=axes)


def _is_int4(weights: str) -> bool:
    """Whether weights are ``"int4"``; raises ValueError unless they are one of `WEIGHTS`."""
    if weights not in WEIGHTS:
        raise ValueError(f"weights {weights!r} must be one of {', '.join(WEIGHTS)}")
    return weights == "int4"


def parse_dtype(name: str | None) -> np.dtype | None:
    """The floating-point dtype of this name, None for None; ValueError if it is not in `DTYPES`."""
    if name is None:
        return None
    if name not in DTYPES:
        raise ValueError(f"dtype {name!r} must be one of {', '.join(DTYPES)}")
    return jnp.dtype(name)


def read_text(content: bytes) -> str:
    """UTF-8 as text; other bytes as `Tokenizer.encode` takes them."""
    return content.decode("utf-8", "surrogateescape")


def prompt_tokens(
    model: FoundModel, content: str, *, chat: bool = False, system: str | None = None
) -> list[int]:
    """The tokens of a prompt: of a text to continue, or with `chat` of what the user says.

    With `chat` the checkpoint's template writes a conversation, after the message `system` if there
    is one.
    """
    if system is not None and not chat:
        raise ValueError("a system message is for a conversation: it needs chat")
    if chat:
        said = [("system", system), ("user", content)]
        messages = [{"role": role, "content": x} for role, x in said if x is not None]
        tokens = chat_tokens(model.tokenizer, messages)
    else:
        tokens = model.tokenizer.encode(content)
    if not tokens:
        raise ValueError("the text must hold at least one token")
    smallest, largest, size = min(tokens), max(tokens), model.config.vocab_size
    if smallest < 0 or largest >= size:
        raise ValueError(f"tokens in {smallest}..{largest} must be within 0..{size - 1}")
    return tokens


def than_bfloat16(ratio: float) -> str:
    """How a cache compares with a bfloat16 one that is `ratio` times as large, in words."""
    times = f"{max(ratio, 1 / ratio):.2f}"
    if times == "1.00":
        return "as large as bfloat16"
    return f"{times}x {'smaller' if ratio > 1 else 'larger'} than bfloat16"
