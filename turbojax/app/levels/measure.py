"""Which levels policies choose for a layer of a real model on a real text, and what they cost."""

import dataclasses
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from turbojax._environment import environment
from turbojax.attention.options import PLAIN, AttentionOptions, require_plain
from turbojax.attention.pooled import pooled_attention
from turbojax.levels import (
    LocalWindow,
    Policy,
    SimilarityCap,
    Strided,
    Threshold,
    TopK,
    level_density,
    select_levels,
)
from turbojax.models import BEGINNING_OF_FILE, Transformer, causal_attention, unstack
from turbojax.models.decoder import for_length

# Patterns in blocks, so that they fit short texts as well as long ones.
_POLICIES: dict[str, Callable[[int], Policy]] = {
    "topk": lambda block: TopK(),
    "threshold": lambda block: Threshold(),
    "threshold95": lambda block: Threshold((0.8, 0.85, 0.9, 0.95)),
    "topk+similarity": lambda block: SimilarityCap(TopK()),
    "threshold+similarity": lambda block: SimilarityCap(Threshold()),
    "window": lambda block: LocalWindow(8 * block, (16 * block, 32 * block, None)),
    "strided": lambda block: Strided(8 * block, 8),
}
POLICY_NAMES = tuple(_POLICIES)
"""What ``--policy`` takes."""

SHOWN = (1, 2, 4, 8, 0)
"""Levels in the order of tables and pictures; 0 stands for skipped."""


@dataclasses.dataclass(frozen=True)
class MapSettings:
    """What to look at: the options of the command; `heads` are all if None.

    The first ``tokens - 1`` bytes of the file are used, after the beginning-of-file token; `block`
    is a multiple of 8. Raises ValueError if a policy is unknown or named twice, there is none, or a
    number is out of range.
    """

    file: Path
    layer: int = 4
    heads: tuple[int, ...] | None = None
    policies: tuple[str, ...] = ("topk", "topk+similarity", "threshold95", "window")
    tokens: int = 4096
    block: int = 32

    def __post_init__(self) -> None:
        for name in self.policies:
            if name not in _POLICIES:
                raise ValueError(f"policy {name!r} must be one of {', '.join(POLICY_NAMES)}")
        if not self.policies or len(set(self.policies)) != len(self.policies):
            raise ValueError(f"policies={self.policies} must name each policy once")
        if self.tokens < 2:
            raise ValueError(f"tokens={self.tokens} must be at least 2")
        if self.block < 8 or self.block % 8:
            raise ValueError(f"block={self.block} must be a positive multiple of 8")


@dataclasses.dataclass(frozen=True)
class PolicyResult:
    """What one policy chose, and what it costs; `densities` and `errors` are by head.

    Attributes:
      levels: int8 ``[heads, T_r, T_c]``.
      shares: of the visible blocks, by level: 1, 2, 4, 8 and 0.
      density: work relative to dense causal attention, see `level_density`.
      cosine: mean over queries and heads of the cosine between the pooled and the dense output.
      relative_l1: sum of the absolute differences over the sum of the dense outputs' absolutes.
    """

    name: str
    levels: np.ndarray
    shares: dict[int, float]
    density: float
    densities: tuple[float, ...]
    cosine: float
    relative_l1: float
    errors: tuple[float, ...]

    def to_json(self) -> dict[str, Any]:
        """The result as plain JSON values, without the map."""
        row = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        del row["levels"]
        return row | {"shares": {str(level): share for level, share in self.shares.items()}}


@dataclasses.dataclass(frozen=True)
class MapReport:
    """Everything the command shows; `settings` have `heads` filled in, `results` are by policy."""

    settings: MapSettings
    results: tuple[PolicyResult, ...]
    seconds: float

    def to_json(self) -> dict[str, Any]:
        """The report as plain JSON values."""
        return {
            "settings": dataclasses.asdict(self.settings) | {"file": str(self.settings.file)},
            **environment(),
            "seconds": self.seconds,
            "results": [result.to_json() for result in self.results],
        }


def run(model: Transformer, settings: MapSettings) -> MapReport:
    """Chooses levels for one layer of a byte-level model on the file, and attends with them.

    Raises OSError if the file cannot be read, ValueError if it is too short, or the model has
    another vocabulary, a shorter context or no such layer or head.
    """
    begun = time.perf_counter()
    settings = _fit(model, settings)
    query, key, value = _layer_operands(model, settings)
    dense, _ = causal_attention(query, key, value)
    results = tuple(
        _measure(name, query, key, value, dense, settings) for name in settings.policies
    )
    return MapReport(settings, results, time.perf_counter() - begun)


def _fit(model: Transformer, settings: MapSettings) -> MapSettings:
    """Checks the settings against the model and fills in the heads."""
    config = model.config
    if config.vocab_size != 256:
        raise ValueError(f"vocab_size={config.vocab_size} must be 256: the text is read as bytes")
    if settings.tokens > config.max_length:
        raise ValueError(
            f"tokens={settings.tokens} must be at most the model's {config.max_length}"
        )
    if not 0 <= settings.layer < config.num_layers:
        raise ValueError(f"layer={settings.layer} must be between 0 and {config.num_layers - 1}")
    heads = tuple(range(config.num_heads)) if settings.heads is None else settings.heads
    if not heads or not all(0 <= head < config.num_heads for head in heads):
        raise ValueError(f"heads={heads} must be between 0 and {config.num_heads - 1}")
    return dataclasses.replace(settings, heads=heads)


def _layer_operands(
    model: Transformer, settings: MapSettings
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Query, key and value of the layer on the file, as its attention sees them."""
    content = settings.file.read_bytes()[: settings.tokens - 1]
    if len(content) < settings.tokens - 1:
        raise ValueError(
            f"{settings.file} has {len(content)} bytes, must have at least {settings.tokens - 1}"
        )
    tokens = jnp.asarray(np.array([[BEGINNING_OF_FILE, *content]], np.int32))

    def attend(
        query: jax.Array,
        key: jax.Array,
        value: jax.Array,
        cache: Any,
        options: AttentionOptions = PLAIN,
        sinks: jax.Array | None = None,
    ) -> tuple[jax.Array, Any]:
        require_plain(options, "the map of levels")
        out, _ = causal_attention(query, key, value, sinks=sinks)
        return out, (query, key, value)

    decoder = for_length(unstack(model), settings.tokens)
    decoder = dataclasses.replace(decoder, layers=decoder.layers[: settings.layer + 1])
    positions = jnp.arange(settings.tokens)[None]
    operands = decoder.hidden(tokens, positions, attend, (None,) * len(decoder.layers))[1]
    query, key, value = operands[-1]
    return query, key, value


def _measure(
    name: str,
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    dense: jax.Array,
    settings: MapSettings,
) -> PolicyResult:
    """One policy's row; `dense` is what exact attention gives."""
    blocks: dict[str, Any] = {"block_q": settings.block, "block_kv": settings.block}
    levels = select_levels(query, key, _POLICIES[name](settings.block), is_causal=True, **blocks)
    pooled = pooled_attention(query, key, value, levels, is_causal=True, **blocks)
    heads = np.array(settings.heads)
    chosen = np.asarray(levels)[0, heads]
    ours, exact = (np.asarray(x, np.float64)[0, :, heads] for x in (pooled, dense))
    lengths = np.linalg.norm(ours, axis=-1) * np.linalg.norm(exact, axis=-1)
    cosines = (ours * exact).sum(-1) / np.maximum(lengths, np.finfo(np.float64).tiny)
    differences, totals = np.abs(ours - exact).sum((1, 2)), np.abs(exact).sum((1, 2))
    visible = np.tril(np.ones(chosen.shape[1:], bool))
    counts = {level: float((chosen == level)[:, visible].mean()) for level in SHOWN}
    densities = [float(level_density(jnp.asarray(x), is_causal=True, **blocks)) for x in chosen]
    return PolicyResult(
        name=name,
        levels=chosen,
        shares=counts,
        density=float(np.mean(densities)),
        densities=tuple(densities),
        cosine=float(cosines.mean()),
        relative_l1=float(differences.sum() / totals.sum()),
        errors=tuple(float(x) for x in differences / totals),
    )
