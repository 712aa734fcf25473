"""`turbojax doctor`: what can run on this machine, and in words why the rest cannot."""

import dataclasses
import functools
import importlib.metadata
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, get_args

import jax
import jax.numpy as jnp

import turbojax
from turbojax import _device, _extras, device
from turbojax._registry import Registry
from turbojax.attention import cudnn
from turbojax.attention.options import Options
from turbojax.attention.pooled import pooled_attention
from turbojax.attention.turbo import turbo_attention
from turbojax.attention.turbo.gradient import GRADIENT
from turbojax.caches.exact import cache as exact
from turbojax.caches.exact import mosaic_gpu as exact_decode
from turbojax.caches.latent import paged_latent_attention
from turbojax.caches.latent.formats import LATENT_DTYPES
from turbojax.caches.latent.pages import LatentPages, init_latent_pages
from turbojax.caches.paged import paged_attention
from turbojax.caches.paged.pool import KV_DTYPES, PagedCache, init_paged_cache
from turbojax.caches.paged.pool import append as append_to_pages
from turbojax.caches.progressive import ProgressiveCache, append, init_cache
from turbojax.caches.progressive.update import store_prompt
from turbojax.caches.token_scaled import cache as kv4
from turbojax.caches.verbs import decode
from turbojax.matmul import fp8_tokens
from turbojax.matmul import int4 as int4_matmul
from turbojax.matmul.grouped import grouped_matmul
from turbojax.matmul.int4.experts import quantize_experts
from turbojax.matmul.int4.weight import quantize_weight
from turbojax.numerics.config import Mode, TurboConfig

_Call = Callable[[str], Any]

PACKAGES = (
    "jax",
    "jaxlib",
    "jax-cuda13-plugin",
    "jax-cuda12-plugin",
    "flax",
    "jax-triton",
    "triton",
    "tokenizers",
)
# Llama 3 8B: what an op is asked about. Batch size and length never lead to a refusal.
_BATCH, _LENGTH, _HEADS, _KV_HEADS, _HEAD_DIM = 1, 1024, 32, 8, 128
_PAGE_SIZE = 64
_EXPERTS = 8
# The option whose values are the variants of an op, where that is not the mode.
_VARIANTS = {"paged_attention": "kv_dtype", "latent_attention": "kv_dtype"}
_NVIDIA_DRIVER = Path("/proc/driver/nvidia/version")


@dataclasses.dataclass(frozen=True)
class OpReport:
    """Which implementations of an op run here.

    `op` also names, where they matter, the modes (`TurboConfig.mode`) or dtypes of the cache that
    this is about. `refusals` says by implementation, the preferred one first, why it does not run,
    or None.
    """

    op: str
    refusals: Mapping[str, str | None]

    @property
    def chosen(self) -> str | None:
        """What ``implementation=None`` picks; None if nothing runs."""
        return next((name for name, refusal in self.refusals.items() if refusal is None), None)


@dataclasses.dataclass(frozen=True)
class Report:
    """What the doctor found.

    Versions are None where a package is not installed; `devices` are what jax sees, or the reason
    why it sees nothing, one line each.
    """

    versions: Mapping[str, str | None]
    devices: tuple[str, ...]
    ops: tuple[OpReport, ...]
    advice: tuple[str, ...]

    def to_json(self) -> dict[str, Any]:
        """The report as plain JSON values."""
        return {
            "versions": dict(self.versions),
            "devices": list(self.devices),
            "ops": {
                op.op: {"chosen": op.chosen, "implementations": _as_words(op)} for op in self.ops
            },
            "advice": list(self.advice),
        }

    def to_text(self) -> str:
        """The report for a terminal."""
        lines = ["packages"]
        for name, version in self.versions.items():
            lines.append(f"  {name:18} {version or 'not installed'}")
        lines += ["devices", *(f"  {device}" for device in self.devices)]
        shape = f"bfloat16, {_HEADS} query and {_KV_HEADS} KV heads of {_HEAD_DIM} channels"
        lines.append(f"ops ({shape}; * is what implementation=None picks)")
        for op in self.ops:
            lines.append(f"  {op.op}")
            for name, words in _as_words(op).items():
                mark = "*" if name == op.chosen else " "
                lines.append(f"  {mark} {name:12} {words}")
        return "\n".join([*lines, *self.advice])


def examine() -> Report:
    """Looks at packages, devices and every op's implementations. Never raises."""
    versions = {"turbojax": turbojax.__version__, **{name: _version(name) for name in PACKAGES}}
    return Report(
        versions=versions,
        devices=_devices(),
        ops=(*(op for registry in registries() for op in _examine(registry)), _examine_exact()),
        advice=(*_kernels(), *_advice()),
    )


def registries() -> list[Registry]:
    """The registries of all ops, found in the modules that `import turbojax` loads."""
    found: dict[str, Registry] = {}
    for name, module in sorted(sys.modules.items()):
        if name.startswith("turbojax."):
            for value in vars(module).values():
                if isinstance(value, Registry):
                    # Some ops have a second registry, for parts of caches: the first is kept.
                    found.setdefault(value.op, value)
    return list(found.values())


def _examine(registry: Registry) -> list[OpReport]:
    """One report per op, or several if its modes or dtypes are refused for different reasons.

    Two refusals are the same if they differ only in the mode or dtype that they name.
    """
    calls = _representative_calls().get(registry.op, {"": None})
    groups: dict[tuple[tuple[str, str | None], ...], list[str]] = {}
    for variant, call in calls.items():
        refusals = {i.name: _refusal(call, i.name) for i in registry.preferred}
        unnamed = {
            name: refusal and refusal.replace(f"={variant!r}", "")
            for name, refusal in refusals.items()
        }
        groups.setdefault(tuple(unnamed.items()), []).append(variant)
    if len(groups) == 1:
        return [OpReport(registry.op, dict(refusals)) for refusals in groups]
    kind = _VARIANTS.get(registry.op, "mode")
    return [
        OpReport(f"{registry.op}, {kind} {', '.join(variants)}", dict(refusals))
        for refusals, variants in groups.items()
    ]


def _refusal(call: _Call | None, name: str) -> str | None:
    """Why this implementation cannot run the call here: it is traced, but not run."""
    if call is None:
        return "not examined: the doctor knows no call of this op"
    try:
        call(name)
    except NotImplementedError as error:
        # A refusal of an op's gradient names the op.
        return str(error).split(" cannot run here: ", 1)[-1].removeprefix(f"{name}: ")
    except Exception as error:  # whatever is broken here: to say so is what the doctor is for
        return f"fails: {type(error).__name__}: {_first_line(error)}"
    return None


@functools.cache
def _representative_calls() -> dict[str, dict[str, _Call]]:
    """By op and variant: a call of the named implementation, traced for the shape of Llama 3 8B."""

    def tokens(length: int, heads: int) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct((_BATCH, length, heads, _HEAD_DIM), jnp.bfloat16)

    def cache(config: TurboConfig) -> ProgressiveCache:
        sizes = (_BATCH, _LENGTH, _KV_HEADS, _HEAD_DIM)
        return jax.eval_shape(lambda: init_cache(*sizes, config=config))

    def trace(function: Callable[..., Any], *arguments: Any) -> _Call:
        def call(name: str) -> Any:
            return jax.eval_shape(functools.partial(function, implementation=name), *arguments)

        return call

    def select(config: TurboConfig) -> _Call:
        # Not through the forward pass, which has more names and refuses some calls that run here.
        query, key, value = prompt
        options = Options(is_causal=True, scale=1.0)
        arguments: dict[str, Any] = {"query": query, "key": key, "value": value}
        return functools.partial(GRADIENT.select, **arguments, config=config, options=options)

    prompt = tokens(_LENGTH, _HEADS), tokens(_LENGTH, _KV_HEADS), tokens(_LENGTH, _KV_HEADS)
    query, key, value = tokens(1, _HEADS), tokens(1, _KV_HEADS), tokens(1, _KV_HEADS)
    lengths = jax.ShapeDtypeStruct((_BATCH,), jnp.int32)
    configs = [TurboConfig(mode=mode) for mode in get_args(Mode)]
    default = cache(TurboConfig())
    blocks = -(-_LENGTH // 128)
    levels = jax.ShapeDtypeStruct((1, 1, blocks, blocks), jnp.int8)
    pooled = {"": trace(functools.partial(pooled_attention, is_causal=True), *prompt, levels)}
    width = _HEADS * _HEAD_DIM
    hidden = jax.ShapeDtypeStruct((_BATCH, _LENGTH, width), jnp.bfloat16)
    weight = jax.eval_shape(quantize_weight, jax.ShapeDtypeStruct((width, width), jnp.bfloat16))
    experts = jax.eval_shape(
        quantize_experts, jax.ShapeDtypeStruct((_EXPERTS, width, width), jnp.bfloat16)
    )
    sizes = jax.ShapeDtypeStruct((_EXPERTS,), jnp.int32)
    kv4_cache = jax.eval_shape(lambda: kv4.init_cache(_BATCH, _LENGTH, _KV_HEADS, _HEAD_DIM))
    pages = _LENGTH // _PAGE_SIZE
    tables = jax.ShapeDtypeStruct((_BATCH, pages), jnp.int32)

    def paged(kv_dtype: str) -> PagedCache:
        sizes = (pages, _PAGE_SIZE, _KV_HEADS, _HEAD_DIM)
        return jax.eval_shape(lambda: init_paged_cache(*sizes, kv_dtype=kv_dtype))

    def latents(kv_dtype: str) -> LatentPages:
        return jax.eval_shape(lambda: init_latent_pages(pages, _PAGE_SIZE, kv_dtype=kv_dtype))

    # DeepSeek-V2's sizes: 512 and 64 channels, and as many heads.
    to_latents = (
        query.update(shape=(_BATCH, 1, _HEADS, 512)),
        query.update(shape=(_BATCH, 1, _HEADS, 64)),
    )
    attend_latents = functools.partial(paged_latent_attention, scale=1.0)
    return {
        "turbo_attention": {
            config.mode: trace(
                functools.partial(turbo_attention, is_causal=True, config=config), *prompt
            )
            for config in configs
        },
        "the gradient of turbo_attention": {config.mode: select(config) for config in configs},
        "decode": {config.mode: trace(decode, query, cache(config)) for config in configs},
        "append": {"": trace(append, default, key, value)},
        # An implementation named for the forward pass runs the backward pass too, or neither.
        "pooled_attention": pooled,
        "the gradient of pooled_attention": pooled,
        "store_prompt": {"": trace(store_prompt, default, *prompt[1:], lengths)},
        "fp8_tokens": {"": trace(fp8_tokens.quantize_activation, hidden)},
        "int4_matmul": {"": trace(int4_matmul.matmul, hidden, weight)},
        "grouped_matmul": {
            "": trace(grouped_matmul, hidden.update(shape=(_LENGTH, width)), experts, sizes)
        },
        "fireq.decode": {"": trace(decode, query, kv4_cache)},
        "fireq.append": {"": trace(kv4.append, kv4_cache, key, value)},
        # The others need no kernel.
        "paged.append": {"": trace(append_to_pages, paged("turbo4"), key, value, tables, lengths)},
        "paged_attention": {
            kv_dtype: trace(paged_attention, query, paged(kv_dtype), tables, lengths)
            for kv_dtype in KV_DTYPES
        },
        "latent_attention": {
            kv_dtype: trace(attend_latents, *to_latents, latents(kv_dtype), tables, lengths)
            for kv_dtype in LATENT_DTYPES
        },
    }


def _examine_exact() -> OpReport:
    """The uncompressed baseline: cuDNN where it can, with windows and the like Hopper's kernel."""
    query = jax.ShapeDtypeStruct((_BATCH, 1, _HEADS, _HEAD_DIM), jnp.bfloat16)
    sizes = (_BATCH, _LENGTH, _KV_HEADS, _HEAD_DIM)
    cache = jax.eval_shape(lambda: exact.init_cache(*sizes, dtype=jnp.bfloat16))
    try:
        refusals = {
            "cudnn": cudnn.unsupported(query, cache.key, decoding=True),
            "mosaic_gpu": exact_decode.unsupported(query, cache),
        }
    except Exception as error:  # as above
        refusals = {"cudnn": f"fails: {type(error).__name__}: {_first_line(error)}"}
    return OpReport("exact cache (baseline)", {**refusals, "xla": None})


def _devices() -> tuple[str, ...]:
    try:
        return tuple(_describe(device) for device in jax.devices())
    except Exception as error:  # a plugin that does not start: as above
        return (f"none: {type(error).__name__}: {_first_line(error)}",)


def _describe(device: jax.Device) -> str:
    parts = [f"{device.platform}:{device.id} {device.device_kind}"]
    capability = getattr(device, "compute_capability", None)
    if capability is not None:
        parts.append(f"compute capability {capability}")
    memory = (device.memory_stats() or {}).get("bytes_limit")
    if memory:
        parts.append(f"{memory / 2**30:.1f} GiB for jax")
    return ", ".join(parts)


def _kernels() -> tuple[str, ...]:
    """One line about the device, or nothing where `devices` says what is wrong."""
    try:
        return (device.kernels(),)
    except Exception:  # a plugin that does not start
        return ()


def _advice() -> tuple[str, ...]:
    try:
        on_gpu = jax.default_backend() == "gpu"
    except Exception:  # `devices` says what is wrong
        on_gpu = False
    if not on_gpu and _NVIDIA_DRIVER.exists():
        return (
            f"There is an NVIDIA driver, but jax uses no GPU: {_extras.install('gpu')}, and look "
            "at JAX_PLATFORMS and CUDA_VISIBLE_DEVICES.",
        )
    if on_gpu and _device.lacks_e4m3():
        return (
            "This GPU does not multiply e4m3, as the default TurboConfig() does in prompts, which "
            "are then slow: TurboConfig.for_device() is in int8.",
        )
    if on_gpu and _device.needs_hopper() is None and cudnn.missing() is None:
        return (
            "On this GPU turbo_attention, prefill and flax.TurboAttention without implementation= "
            "are exact attention by cuDNN where rounding does not pay: with head dim 128 below "
            "some 1,000 to 2,000 causal tokens, with more below 8,000, with fewer below 4,000.",
        )
    return ()


def _as_words(op: OpReport) -> dict[str, str]:
    words = {name: refusal or "available" for name, refusal in op.refusals.items()}
    if op.refusals.get("mosaic_gpu", "") is None and not _device.is_measured():
        capability = _device.gpu_compute_capability()
        words["mosaic_gpu"] += f", not measured on compute capability {capability}"
    return words


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _first_line(error: Exception) -> str:
    return (str(error).splitlines() or [""])[0]
