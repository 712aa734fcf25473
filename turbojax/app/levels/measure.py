"""Which levels policies choose for a layer of a real model and text, their costs, a picture."""

import dataclasses
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from turbojax import _extras, _writing
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
    is a multiple of 8.
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
    """Chooses levels for one layer of a byte-level model on the file, and attends with them."""
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


_MOST_PANELS = 4
_COLOURS = {1: "#1d1147", 2: "#832681", 4: "#e75263", 8: "#fec287", 0: "#f1efe9"}
_MEANINGS = {1: "1: every key", 0: "skipped"} | {r: f"{r}: means of {r} keys" for r in (2, 4, 8)}


def render(report: MapReport) -> RenderableType:
    """The report as tables for a terminal: one of both would be wider than 80 columns."""
    settings = report.settings
    levels = Table(
        title=f"{settings.file.name}, {settings.tokens} tokens in blocks of {settings.block}, "
        f"layer {settings.layer}, {len(settings.heads or ())} heads"
    )
    costs = Table()
    for table, columns in (
        (levels, ["skipped" if level == 0 else f"level {level}" for level in SHOWN]),
        (costs, ["density", "ideal speed-up", "cosine", "relative L1"]),
    ):
        table.add_column("policy")
        for column in columns:
            table.add_column(column, justify="right")
    for result in report.results:
        levels.add_row(result.name, *(f"{result.shares[level]:.1%}" for level in SHOWN))
        costs.add_row(
            result.name,
            f"{result.density:.3f}",
            f"{1 / result.density:.2f}x",
            f"{result.cosine:.4f}",
            f"{result.relative_l1:.4f}",
        )
    where = f"jax {jax.__version__} on {jax.devices()[0].device_kind}"
    note = "Levels: shares of the blocks on and below the diagonal. Error: against dense attention."
    return Group(
        levels, costs, Text(f"{note}\n{report.seconds:.0f} s in all, {where}", style="dim")
    )


def save_plot(report: MapReport, path: Path) -> None:
    """Draws the level maps: a row per policy, a column per head (the first four).

    The ending of `path` chooses the format.
    """
    _extras.need_matplotlib()
    # Imported here, as in the demo: it takes a second, and a bare `Figure` needs no display.
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch

    settings = report.settings
    heads = (settings.heads or ())[:_MOST_PANELS]
    rows = len(report.results)
    figure = Figure(figsize=(2.35 * len(heads) + 1.9, 2.5 * rows + 1.05), layout="constrained")
    grid = figure.subplots(
        rows,
        len(heads) + 1,
        squeeze=False,
        gridspec_kw={"width_ratios": [1.0] * len(heads) + [0.22]},
    )
    for row, result in enumerate(report.results):
        for panel, head in enumerate(heads):
            _draw_map(grid[row][panel], result, panel, settings)
            title = f"density {result.densities[panel]:.2f}, error {result.errors[panel]:.1%}"
            title = f"head {head}\n{title}" if row == 0 else title
            grid[row][panel].set_title(title, fontsize=9)
            if row == rows - 1:
                grid[row][panel].set_xlabel("keys", fontsize=9)
        grid[row][0].set_ylabel(f"$\\bf{{{result.name}}}$\nqueries", fontsize=10)
        _draw_shares(grid[row][-1], result)
    legend = [Patch(facecolor=_COLOURS[r], edgecolor="#999999", label=_MEANINGS[r]) for r in SHOWN]
    figure.legend(handles=legend, loc="outside lower center", ncols=len(legend), frameon=False)
    figure.suptitle(
        f"{settings.file.name}, layer {settings.layer}: {settings.tokens} bytes "
        f"in blocks of {settings.block}",
        fontsize=12,
    )
    with _writing.replacing(path) as draft:
        figure.savefig(draft, dpi=130)


def _draw_map(axes: Any, result: PolicyResult, panel: int, settings: MapSettings) -> None:
    """One head's levels; what is above the diagonal stays white."""
    from matplotlib.colors import BoundaryNorm, ListedColormap

    levels = result.levels[panel]
    order = np.full(levels.shape, -1.0)
    for number, level in enumerate(SHOWN):
        order[levels == level] = number
    order = np.where(np.tril(np.ones(levels.shape, bool)), order, np.nan)
    # Blocks at the end may be cut short: the picture's edge is that of whole blocks.
    end = levels.shape[0] * settings.block
    axes.imshow(
        order,
        cmap=ListedColormap([_COLOURS[level] for level in SHOWN]),
        norm=BoundaryNorm(np.arange(len(SHOWN) + 1) - 0.5, len(SHOWN)),
        interpolation="nearest",
        extent=(0, end, end, 0),
    )
    ticks = [0, settings.tokens // 2, settings.tokens]
    axes.set_xticks(ticks)
    axes.set_yticks(ticks)
    axes.tick_params(labelsize=7, length=2)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)


def _draw_shares(axes: Any, result: PolicyResult) -> None:
    """A bar: how many of all heads' visible blocks have each level."""
    bottom = 0.0
    for level in reversed(SHOWN):
        share = result.shares[level]
        axes.bar(
            0, share, bottom=bottom, width=1, color=_COLOURS[level], edgecolor="#999999", lw=0.4
        )
        if share >= 0.04:
            colour = "white" if level in (1, 2) else "black"
            middle = bottom + share / 2
            axes.text(0, middle, f"{share:.0%}", ha="center", va="center", fontsize=7, color=colour)
        bottom += share
    axes.set_ylim(0, 1)
    axes.set_axis_off()
    axes.set_title(f"all heads\n{result.density:.2f}", fontsize=8)
