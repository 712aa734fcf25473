"""An engine's parts, made from its arguments, which are checked first."""

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax

from turbojax._device import needs_gpu
from turbojax.models.config import TransformerConfig
from turbojax.models.decoder import Decoder, for_length, unstack
from turbojax.models.engine import groups, placement, pools, state
from turbojax.models.engine.device import Device, Programs, Weights, check_programs
from turbojax.models.engine.placement import Place
from turbojax.models.engine.plan import Limits
from turbojax.models.engine.programs import (
    PromptProgram,
    decode_sizes,
    prompt_programs,
    reproducible_program,
)
from turbojax.models.engine.speculation import Draft, NGram, Speculation
from turbojax.models.quantized import QuantizedDecoder
from turbojax.models.tensor_parallel.layout import local_config
from turbojax.models.tensor_parallel.specs import init_split
from turbojax.models.text.tokenizer import Tokenizer
from turbojax.models.transformer import Transformer
from turbojax.numerics.config import TurboConfig

Model = Transformer | Decoder | QuantizedDecoder


@dataclasses.dataclass(frozen=True)
class Settings:
    """The arguments of `Engine`, which describes them."""

    page_size: int
    max_sequences: int
    max_length: int
    step_tokens: int
    num_pages: int
    window_pages: int | None
    kv_dtype: str
    uncompressed_layers: int
    key_scale: float
    value_scale: float
    seed: int
    reproducible: bool
    speculation: Speculation | None
    prefix_caching: bool
    cache_results: bool
    implementation: str | None


@dataclasses.dataclass(frozen=True)
class Made:
    """The parts of an engine."""

    settings: Settings
    config: TransformerConfig
    groups: tuple[groups.Group, ...]
    limits: Limits
    device: Device


class Sizes(NamedTuple):
    """The sizes of an engine where no others are asked for, see `Engine`."""

    max_sequences: int
    step_tokens: int


def usual_sizes(*, reproducible: bool) -> Sizes:
    """Sizes that suit the device: many rows keep a GPU busy, on a CPU each row costs time."""
    if reproducible:
        return Sizes(8, 64)
    return Sizes(256, 8192) if jax.default_backend() == "gpu" else Sizes(16, 512)


def check_model(model: Model) -> None:
    """Raises TypeError unless this is a model."""
    if not isinstance(model, Transformer | Decoder | QuantizedDecoder):
        raise TypeError(
            f"model is a {type(model).__name__}, must be a Transformer, Decoder or QuantizedDecoder"
        )


def make(model: Model, settings: Settings, tokenizer: Tokenizer | None) -> Made:
    """The parts of an engine; raises what `Engine` raises."""
    config, s = model.config, settings
    sizes = groups.Sizes(s.page_size, s.max_sequences, s.max_length, s.step_tokens)
    _check(s, config, tokenizer)
    windows = groups.windows_of(config, s.max_length)
    pages = groups.pages_of_groups(windows, s.num_pages, sizes, s.window_pages)
    decoder = for_length(_unstacked(model), s.max_length)
    where = placement.place_of(decoder)
    caches, local = _pools(decoder, pages, windows, s, where)
    programs = _programs(s, windows, caches, config)
    max_pages = -(-s.max_length // s.page_size)
    layers = groups.layers_of(config, windows)
    draft = None
    if isinstance(s.speculation, Draft):
        draft, of_draft = _draft(s.speculation, config, windows, pages, s, where)
        heads = local_config(draft[0].config, draft[0].axes).num_heads
        check_programs(programs, of_draft[:1], max_pages, heads)
    # One of each way to store pages: the first and last layers may have another.
    kinds = {cache.kv_dtype: cache for cache in local}
    heads = local_config(config, decoder.axes).num_heads
    check_programs(programs, kinds.values(), max_pages, heads)
    with placement.made_on(where):
        slots = state.new_state(len(windows), s.max_sequences, max_pages, s.max_length)
        slots = placement.put(slots, where)
    made = groups.new_groups(config, windows, pages, s.page_size, prefix_caching=s.prefix_caching)
    limits = Limits(
        s.max_sequences,
        programs.prompts[-1],
        next((x for x in programs.prompts[::-1] if x.is_dense), None),
        0 if s.speculation is None else s.speculation.tokens,
        is_shared=not s.reproducible,
    )
    device = Device(decoder, caches, slots, programs, layers, draft)
    return Made(settings, decoder.config, made, limits, device)


def _check(s: Settings, config: TransformerConfig, tokenizer: Tokenizer | None) -> None:
    if s.max_length > config.max_length:
        raise ValueError(
            f"max_length={s.max_length} must be at most the model's {config.max_length}"
        )
    if tokenizer is not None and tokenizer.vocab_size > config.vocab_size:
        raise ValueError(
            f"the tokenizer has {tokenizer.vocab_size} tokens, must be at most the model's "
            f"{config.vocab_size}"
        )
    if s.cache_results and not s.prefix_caching:
        raise ValueError(
            f"cache_results={s.cache_results} has no use with prefix_caching={s.prefix_caching}"
        )
    if s.speculation is None:
        return
    if not isinstance(s.speculation, NGram | Draft):
        raise TypeError(
            f"speculation is a {type(s.speculation).__name__}, must be NGram, Draft or None"
        )
    if s.reproducible:
        raise ValueError(
            f"reproducible={s.reproducible} must be False with speculation: tokens that are "
            "checked together are rounded in another way than one by one"
        )


def _unstacked(model: Model) -> Decoder | QuantizedDecoder:
    return unstack(model) if isinstance(model, Transformer) else model


def _pools(
    decoder: Weights, pages: Sequence[int], windows: groups.Windows, s: Settings, place: Place
) -> tuple[pools.Pools, pools.Pools]:
    """The layers' pools, and what one device has of them."""
    return _made(
        decoder,
        place,
        num_pages=pools.pages_of_layers(decoder.config, windows, pages),
        page_size=s.page_size,
        kv_dtype=s.kv_dtype,
        uncompressed_layers=s.uncompressed_layers,
        key_scale=s.key_scale,
        value_scale=s.value_scale,
        seed=s.seed,
    )


def _made(decoder: Weights, place: Place, **given: Any) -> tuple[pools.Pools, pools.Pools]:
    """Pools where the model is, see `pools.init_pools`, and what one device has of them."""
    axes = decoder.axes
    config = local_config(decoder.config, axes)
    make = functools.partial(pools.init_pools, config, decoder.dtype, **given)
    if axes is not None:
        return init_split(make, axes), jax.eval_shape(make)
    with placement.made_on(place):
        caches = placement.put(make(), place)
    return caches, caches


def _programs(
    s: Settings, windows: groups.Windows, caches: pools.Pools, config: TransformerConfig
) -> Programs:
    if s.reproducible:
        one: tuple[PromptProgram, ...] = (reproducible_program(s.max_sequences, s.step_tokens),)
        return Programs(one, (), windows, s.implementation)
    dense = TurboConfig.for_device() if _attends_densely(s, config) else None
    kinds = {cache.kv_dtype for cache in caches}
    prompts = prompt_programs(
        s.max_sequences, s.step_tokens, s.max_length, kinds=kinds, is_dense=dense is not None
    )
    sizes = decode_sizes(s.max_sequences)
    return Programs(prompts, sizes, windows, s.implementation, dense, s.speculation)


def _attends_densely(s: Settings, config: TransformerConfig) -> bool:
    """Whether prompts attend among themselves: faster on a GPU than attending to pages of codes."""
    is_compressed = s.kv_dtype != "auto" and config.latent is None
    return is_compressed and s.implementation != "xla" and needs_gpu(8.0) is None


def _draft(
    how: Draft,
    config: TransformerConfig,
    windows: groups.Windows,
    pages: Sequence[int],
    s: Settings,
    where: Place,
) -> tuple[tuple[Weights, pools.Pools, tuple[tuple[int, ...], ...]], pools.Pools]:
    """A draft model's weights, pools and layers, and what one device has of the pools.

    Their pages have the same numbers as the model's, so both use the same tables.
    """
    other = how.model.config
    for name, found, wanted in (
        ("vocab_size", other.vocab_size, config.vocab_size),
        ("latents", other.latent is not None, False),
    ):
        if found != wanted:
            raise ValueError(f"the draft model has {name}={found}, must be {wanted}")
    if other.max_length < s.max_length:
        raise ValueError(
            f"the draft model has max_length={other.max_length}, must be at least {s.max_length}"
        )
    seen = {groups.window_of(other, i, s.max_length) for i in range(other.num_layers)}
    if None not in windows and not seen <= set(windows):
        raise ValueError(f"the draft model's windows are {seen}, must be among {set(windows)}")
    layers = groups.layers_of(other, windows)
    of_layers = {layer: n for of_group, n in zip(layers, pages, strict=True) for layer in of_group}
    decoder = for_length(_unstacked(how.model), s.max_length)
    placement.check_beside(decoder, where)
    caches, local = _made(
        decoder,
        where,
        num_pages=[of_layers[layer] for layer in range(other.num_layers)],
        page_size=s.page_size,
        kv_dtype="auto" if config.latent is not None else s.kv_dtype,
        uncompressed_layers=0,
        key_scale=s.key_scale,
        value_scale=s.value_scale,
        seed=s.seed,
    )
    return (decoder, caches, layers), local
