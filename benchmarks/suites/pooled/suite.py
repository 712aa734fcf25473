"""Pooled attention against cuDNN's dense attention, and what choosing its levels takes.

Levels are data: per shape and implementation there are two compiled functions, the forward pass
and the forward with the backward pass, and they serve every map. Compiling takes longer than
measuring, so the functions of several shapes are compiled side by side before anything is timed.
"""

import concurrent.futures
import dataclasses
import functools
import sys
import time
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

import turbojax as tj
from benchmarks import tables, timing
from benchmarks.measuring import work
from benchmarks.measuring.samples import errors, require_gpu
from benchmarks.measuring.steps import compile_side_by_side
from benchmarks.shapes import Shape
from benchmarks.suite import (
    Asked,
    Latest,
    Measure,
    Rows,
    Suite,
    Table,
    each,
    joined,
    over_cudnn,
    parted,
    temporary_bytes,
    timing_facts,
)
from benchmarks.tables import Column, Result, Row

if TYPE_CHECKING:
    from matplotlib.figure import Figure

# The operations of the suite, as they begin the rows' names.
FORWARD, GRADIENT, SELECT = "pooled", "pooled-gradient", "pooled-select"
# Two products forward; backward the scores again, and a product for each gradient and for dP.
_PRODUCTS = {FORWARD: 1.0, GRADIENT: 3.5}
# Dense bfloat16 TFLOP/s by the maker's data sheet.
_PEAKS = {"H100": 989.4, "H200": 989.4}

# What is attended to -----------------------------------------------------------------------------

BLOCK = 128
"""Queries, and keys, that share a level."""
LEVELS = (1, 2, 4, 8)
# Fractions of the visible blocks at each level, as the default of `TopK` chooses them.
MIXTURE = (0.05, 0.10, 0.10, 0.25)
MIXTURE_DENSITY = sum(share / level for share, level in zip(MIXTURE, LEVELS, strict=True))
# Tokens of a segment share a topic; how many topics a head knows; how much of a token is topic.
_SEGMENT, _TOPICS, _STRENGTH = 256, 32, (0.6, 0.98)


@functools.partial(jax.jit, static_argnames="shape")
def sample(shape: Shape) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
    """Query, key, value and the output's cotangent, in bfloat16.

    Each segment of 256 tokens has, in every KV head, one of 32 random directions and a strength s
    between 0.6 and 0.98. A key is s times the direction plus sqrt(1 - s**2) times noise, and so
    are the queries of its heads: neighbours are alike (cosine s**2), more in some segments
    than in others, and queries look for segments of their topic. Values are independent normal
    numbers.
    """
    heads, batch = shape.heads, shape.batch
    segments = -(-shape.tokens // _SEGMENT)
    places = (batch, segments, heads.kv)
    keys = jax.random.split(jax.random.key(0), 7)
    directions = jax.random.normal(keys[0], (_TOPICS, heads.kv, heads.dim), jnp.float32)
    topics = jax.random.randint(keys[1], places, 0, _TOPICS)
    strength = jax.random.uniform(keys[2], (*places, 1), jnp.float32, *_STRENGTH)
    common = strength * directions[topics, jnp.arange(heads.kv)[None, None]]

    def tokens(key: jax.Array, group: int) -> jax.Array:
        signal, weight = (
            jnp.repeat(jnp.repeat(x, _SEGMENT, 1)[:, : shape.tokens], group, 2)
            for x in (common, jnp.sqrt(1 - strength**2))
        )
        noise = jax.random.normal(key, signal.shape, jnp.float32)
        return (signal + weight * noise).astype(jnp.bfloat16)

    def normal(key: jax.Array, count: int) -> jax.Array:
        size = (batch, shape.tokens, count, heads.dim)
        return jax.random.normal(key, size, jnp.float32).astype(jnp.bfloat16)

    query = tokens(keys[3], heads.query // heads.kv)
    return query, tokens(keys[4], 1), normal(keys[5], heads.kv), normal(keys[6], heads.query)


def random_levels(shape: Shape, density: float, *, sink: bool = False) -> jax.Array:
    """A mixture of levels, int8 ``[1, N, T_r, T_c]``, at random places of every row and head.

    The mixture's fractions are scaled to the density, and what a row's whole blocks cannot express
    is carried over to the next rows. Causal: fractions of the visible blocks, the diagonal is one
    of those at level 1; and so is the first block, if it is a `sink`.
    """
    rows = columns = -(-shape.tokens // BLOCK)
    row, column = np.arange(rows)[:, None], np.arange(columns)[None]
    visible = column <= row if shape.is_causal else np.ones((rows, columns), bool)
    forced = (column == row) & shape.is_causal
    if sink:
        forced |= column == 0
    shares = np.array(MIXTURE) * (density / MIXTURE_DENSITY)
    bounds = np.cumsum(_counts(visible.sum(1), forced.sum(1), shares), axis=1)
    place = np.random.default_rng(0).random((shape.heads.query, rows, columns))
    order = np.argsort(place - forced + 2.0 * ~visible, axis=-1)
    rank = np.argsort(order, axis=-1)
    levels = np.zeros(rank.shape, np.int8)
    for i, level in reversed(list(enumerate(LEVELS))):
        levels[rank < bounds[:, i, None]] = level
    return jnp.asarray(levels[None])


def _counts(visible: np.ndarray, forced: np.ndarray, shares: np.ndarray) -> np.ndarray:
    """Blocks of each level in each row: int ``[T_r, 4]``."""
    counts = np.zeros((len(visible), len(LEVELS)), int)
    carried = np.zeros(len(LEVELS))
    for i, blocks in enumerate(visible):
        wanted, left = shares * blocks + carried, int(blocks)
        for j, share in enumerate(wanted):
            least = int(forced[i]) if j == 0 else 0
            counts[i, j] = np.clip(round(share), least, left)
            left -= counts[i, j]
        carried = wanted - counts[i]
    return counts


# Rows ---------------------------------------------------------------------------------------------

POLICIES: dict[str, tj.levels.Policy] = {
    "top-k": tj.levels.TopK(),
    "threshold": tj.levels.Threshold(),
    "similarity": tj.levels.SimilarityCap(tj.levels.TopK()),
}


class Job(NamedTuple):
    """What is compiled once per shape: an operation, and by what."""

    operation: str
    by: str


_REFERENCE = Job("reference", "xla")


@dataclasses.dataclass(frozen=True)
class Case:
    """One row."""

    operation: str
    method: str
    implementation: str | None = None

    @property
    def job(self) -> Job:
        return Job(self.operation, self.implementation or self.method)

    @property
    def needs(self) -> tuple[Job, ...]:
        if self.operation == SELECT:
            return (self.job,)
        chosen = (Job(SELECT, self.method),) if self.method in POLICIES else ()
        return (self.job, _REFERENCE, *chosen)


@dataclasses.dataclass(frozen=True)
class Group:
    """The rows of one shape.

    Attributes:
      shape: of the attention.
      implementations: of ours, the first with all maps.
      stage: groups of one stage are compiled together.
    """

    shape: Shape
    implementations: tuple[str, ...] = ("mosaic_gpu",)
    stage: int = 1

    @property
    def cases(self) -> list[Case]:
        cases = [Case(operation, "cudnn") for operation in (FORWARD, GRADIENT)]
        cases += [Case(SELECT, policy) for policy in POLICIES]
        for i, implementation in enumerate(self.implementations):
            methods = [*self.maps(), *POLICIES] if i == 0 else [*self.maps()][:3]
            for operation in (FORWARD, GRADIENT):
                cases += [Case(operation, method, implementation) for method in methods]
        return cases

    def name(self, case: Case) -> str:
        """``pooled/mha-16/b1-s16384/top-k/mosaic_gpu``."""
        return joined(case.operation, self.shape.label, case.method, case.implementation)

    def describe(self, case: Case) -> Row:
        return {
            "operation": case.operation,
            "method": case.method,
            "implementation": case.implementation,
            **self.shape.facts,
        }

    def maps(self) -> dict[str, Callable[[], jax.Array]]:
        """Maps that do not depend on what is attended to."""
        blocks, heads = -(-self.shape.tokens // BLOCK), self.shape.heads.query
        make = functools.partial(random_levels, self.shape)
        maps: dict[str, Callable[[], jax.Array]] = {
            "mixture-0.156": functools.partial(make, MIXTURE_DENSITY),
            "mixture-0.05": functools.partial(make, 0.05),
            "all-1": lambda: jnp.ones((1, heads, blocks, blocks), jnp.int8),
        }
        if self.shape.is_causal:
            maps["mixture-0.156-sink"] = functools.partial(make, MIXTURE_DENSITY, sink=True)
        return maps


def begin(rows: Rows, asked: Asked) -> Measure:
    inputs = Latest(functools.partial(Inputs, compiled=compile_jobs(rows)))
    return lambda group, case: _measure(inputs.of(group), case, asked)


def compile_jobs(
    rows: Iterable[tuple[Group, Case]],
) -> dict[tuple[Group, Job], concurrent.futures.Future[Any]]:
    jobs = list(dict.fromkeys((group, job) for group, case in rows for job in case.needs))
    start = time.monotonic()
    done = compile_side_by_side(functools.partial(_lower, *job) for job in jobs)
    failed = sum(future.exception() is not None for future in done)
    seconds = time.monotonic() - start
    print(
        f"compiled {len(jobs) - failed} of {len(jobs)} functions in {seconds:.0f} s",
        file=sys.stderr,
        flush=True,
    )
    return dict(zip(jobs, done, strict=True))


def _lower(group: Group, job: Job) -> jax.stages.Lowered:
    query, key, value, d_out = jax.eval_shape(lambda: sample(group.shape))
    if job.operation == SELECT:
        return jax.jit(_select(group.shape, job.by)).lower(query, key)
    levels = jax.eval_shape(group.maps()["all-1"])
    arguments = (query, key, value, d_out, levels)
    if job == _REFERENCE:
        arguments = jax.eval_shape(_first_head, *arguments)
    function = _attend(group.shape, job)
    if job.by != "cudnn":
        return jax.jit(function).lower(*arguments)
    # jax's own function promotes bfloat16 with float32 inside.
    with jax.numpy_dtype_promotion("standard"):
        return jax.jit(function).lower(*arguments[:-1])


def _select(shape: Shape, policy: str) -> Callable[..., jax.Array]:
    return functools.partial(
        tj.select_levels, policy=POLICIES[policy], is_causal=shape.is_causal, **_BLOCKS
    )


_BLOCKS = {"block_q": BLOCK, "block_kv": BLOCK}


def _attend(shape: Shape, job: Job) -> Callable[..., Any]:
    """Of query, key, value, the output's cotangent and, if ours, levels."""

    def attend(query: jax.Array, key: jax.Array, value: jax.Array, *levels: jax.Array) -> jax.Array:
        options = {"is_causal": shape.is_causal, "implementation": job.by}
        if job.by != "cudnn":
            return tj.pooled_attention(query, key, value, *levels, **_BLOCKS, **options)
        require_gpu("cuDNN")
        return jax.nn.dot_product_attention(query, key, value, **options)

    def forward(
        query: jax.Array, key: jax.Array, value: jax.Array, d_out: jax.Array, *levels: jax.Array
    ) -> tuple[jax.Array, tuple[jax.Array, ...]]:
        del d_out
        return attend(query, key, value, *levels), ()

    def both(
        query: jax.Array, key: jax.Array, value: jax.Array, d_out: jax.Array, *levels: jax.Array
    ) -> tuple[jax.Array, tuple[jax.Array, ...]]:
        out, pull = jax.vjp(lambda *x: attend(*x, *levels), query, key, value)
        return out, pull(d_out)

    return forward if job.operation == FORWARD else both


_density = jax.jit(tj.level_density, static_argnames=("is_causal", *_BLOCKS))


@jax.jit
def _first_head(
    query: jax.Array, key: jax.Array, value: jax.Array, d_out: jax.Array, levels: jax.Array
) -> tuple[jax.Array, ...]:
    """The first KV head with its query heads, in float32: no other head has a part in it."""
    group = query.shape[2] // key.shape[2]
    x = (query[:, :, :group], key[:, :, :1], value[:, :, :1], d_out[:, :, :group])
    return *(a.astype(jnp.float32) for a in x), levels[:, :group]


class Inputs:
    """The arrays of a shape, its maps, and what should come out."""

    def __init__(
        self, group: Group, compiled: dict[tuple[Group, Job], concurrent.futures.Future[Any]]
    ) -> None:
        self.group = group
        self._compiled = compiled
        self.arrays = sample(group.shape)
        self._maps: dict[str, jax.Array] = {}
        self._expected: dict[str, Any] = {}

    def function(self, job: Job) -> Callable[..., Any]:
        """A compiled function; raises what its compiler raised."""
        return self._compiled[self.group, job].result()

    def levels(self, method: str) -> jax.Array:
        """int8 ``[1, N, T_r, T_c]``; all 1 for dense attention."""
        if method not in self._maps:
            if method in POLICIES:
                found = self.function(Job(SELECT, method))(*self.arrays[:2])
            else:
                found = self.group.maps()["all-1" if method == "cudnn" else method]()
            self._maps[method] = jax.block_until_ready(found)
        return self._maps[method]

    def density(self, method: str) -> float:
        """The work of these levels over that of dense attention."""
        is_causal = self.group.shape.is_causal
        density = float(_density(self.levels(method), is_causal=is_causal, **_BLOCKS))
        if not density > 0:
            raise ArithmeticError(f"{method} has a density of {density}")
        return density

    def expected(self, method: str) -> tuple[jax.Array, tuple[jax.Array, ...]]:
        """Output and gradients of the first KV head, by the definition in float32."""
        method = "all-1" if method == "cudnn" else method
        if method not in self._expected:
            arguments = _first_head(*self.arrays, self.levels(method))
            self._expected[method] = self.function(_REFERENCE)(*arguments)
        return self._expected[method]

    def error(self, method: str, got: tuple[jax.Array, tuple[jax.Array, ...]]) -> Row:
        """Of output and gradients, and of these levels against dense attention."""
        out, gradients = self.expected(method)
        found, d_found, is_finite = _like(got, (out, gradients[: len(got[1])]))
        if not is_finite:
            raise ArithmeticError("the output or a gradient is not finite")
        facts: Row = errors(found, out)
        facts["gradient_errors"] = {
            name: errors(have, want)
            for name, have, want in zip(("query", "key", "value"), d_found, gradients, strict=False)
        }
        if method not in ("cudnn", "all-1"):
            facts["out_against_dense"] = errors(out, self.expected("all-1")[0])
        return facts


@jax.jit
def _like(got: Any, want: Any) -> tuple[jax.Array, tuple[jax.Array, ...], jax.Array]:
    """The heads of output and gradients that are compared, and whether all heads are finite."""
    is_finite = [jnp.all(jnp.isfinite(x)) for x in jax.tree.leaves(got)]
    out, gradients = jax.tree.map(lambda x, like: x[:, :, : like.shape[2]], got, want)
    return out, gradients, jnp.all(jnp.stack(is_finite))


def _measure(inputs: Inputs, case: Case, asked: Asked) -> Row:
    compiled = inputs.function(case.job)
    density = inputs.density(case.method)
    facts: Row = {"density": density}
    if case.operation == SELECT:
        arguments = inputs.arrays[:2]
    else:
        arguments = inputs.arrays
        if case.implementation is not None:
            arguments = (*arguments, inputs.levels(case.method))
        facts |= inputs.error(case.method, compiled(*arguments))
    taken = timing.measure(compiled, arguments, repetitions=asked.repetitions)
    if case.operation != SELECT:
        amount = work.attention_operations(inputs.group.shape) * density
        needed = work.Work(amount * _PRODUCTS[case.operation], {"bf16": 1.0})
        rate = needed.rate(taken.microseconds)
        peak = next((v for k, v in _PEAKS.items() if k in jax.devices()[0].device_kind), None)
        facts |= {
            "work": needed.amount,
            "tflops_per_second": rate,
            "percent_of_ceiling": needed.percent_of_ceiling(taken.microseconds, asked.ceilings),
            "percent_of_peak": None if peak is None else 100 * rate / peak,
        }
    return {
        "status": "ok",
        **timing_facts(taken),
        **facts,
        **temporary_bytes(compiled),
    }


# What the docs show -------------------------------------------------------------------------------

SUMMARY_METHODS = ("mixture-0.156", "mixture-0.05")
SUMMARY_MODEL = "mha-16"
_SHAPE = ("model", "batch", "tokens", "is_causal")


def _shape_of(row: Row) -> tuple[Any, ...]:
    return tuple(row[name] for name in _SHAPE)


def label(row: Row) -> str:
    """``16 heads of 128, 1 x 16k causal``."""
    model, size = tables.shape_label(row).split(" ", 1)
    heads = f"{row['heads']} heads of {row['head_dim']}" if model.startswith("mha") else model
    return f"{heads}, {size}"


def ordered(rows: Iterable[Row]) -> list[Row]:
    """Rows shape by shape, in the order of the tables."""
    return [row for group in tables.shapes(rows).values() for row in group]


def share_of_ideal(row: Row) -> float | None:
    """The speed over cuDNN, of the inverse of the density."""
    ratio = row.get("speedup_over_cudnn")
    return None if ratio is None else ratio * row["density"]


def _share(value: float | None) -> str:
    return "-" if value is None else f"{value:.0f} %"


def _milliseconds(row: Row) -> str:
    return tables.number(row["us"] / 1e3)


def _of_ideal(row: Row) -> str:
    ideal = share_of_ideal(row)
    return _share(None if ideal is None or row["implementation"] is None else 100 * ideal)


def _gradient_error(name: str, form: str) -> tables.Cell:
    return lambda row: ", ".join(f"{e[name]:{form}}" for e in row["gradient_errors"].values())


_NAMES = (
    ("shape", label),
    ("levels", lambda row: row["method"]),
    ("kernel", lambda row: row["implementation"] or "cuDNN"),
)
_COLUMNS = (
    ("density", tables.shown_as("density", "{:.4f}")),
    ("ms", _milliseconds),
    ("over cuDNN", tables.shown_as("speedup_over_cudnn", "{:.2f}x")),
    ("ideal", lambda row: tables.times(1 / row["density"]) if row["implementation"] else "-"),
    ("of ideal", _of_ideal),
    ("TFLOP/s", tables.significant("tflops_per_second")),
    ("of 989", tables.shown_as("percent_of_peak", "{:.0f} %")),
)
_ERRORS: dict[str, tuple[Column, ...]] = {
    FORWARD: (
        ("cosine", tables.shown_as("cosine", "{:.5f}")),
        ("relative L1, RMSE", lambda row: f"{row['relative_l1']:.4f}, {row['rmse']:.2g}"),
    ),
    GRADIENT: (
        ("cosine of dQ, dK, dV", _gradient_error("cosine", ".5f")),
        ("relative L1", _gradient_error("relative_l1", ".4f")),
        ("RMSE", _gradient_error("rmse", ".2g")),
    ),
}


def attention_table(result: Result, operation: str) -> str:
    rows = ordered(tables.shown(result, operation))
    text = tables.rows_table(rows, _NAMES, (*_COLUMNS, *_ERRORS[operation]))
    return tables.with_cut(text, result, operation)


def selection_table(result: Result) -> str:
    """What choosing levels takes, compared with the forward pass that uses them."""
    forward = _by_method(result, FORWARD)
    both = _by_method(result, GRADIENT)
    lines = []
    for row in ordered(tables.finished(result, SELECT)):
        line = [label(row), row["method"], f"{row['density']:.3f}", tables.number(row["us"])]
        key = (_shape_of(row), row["method"])
        steered, trained = forward.get(key), both.get(key)
        if steered is None:
            lines.append([*line, *["-"] * 5])
            continue
        dense = forward.get((_shape_of(row), "cudnn"))
        total = row["us"] + steered["us"]
        far = steered["out_against_dense"]
        lines.append(
            [
                *line,
                _milliseconds(steered),
                f"{100 * row['us'] / steered['us']:.1f} %",
                "-" if trained is None else f"{100 * row['us'] / trained['us']:.1f} %",
                tables.times(None if dense is None else dense["us"] / total),
                f"{far['cosine']:.4f}, {far['relative_l1']:.3f}",
            ]
        )
    header = ["shape", "policy", "density", "choosing, us", "forward, ms", "choosing / forward"]
    header += ["choosing / forward and backward", "both over cuDNN forward"]
    return tables.table([*header, "output against dense: cosine, relative L1"], lines)


def _by_method(result: Result, operation: str) -> dict[tuple[Any, str], Row]:
    """Rows by shape and levels, of the fastest implementation."""
    best: dict[tuple[Any, str], Row] = {}
    for row in tables.finished(result, operation):
        key = (_shape_of(row), row["method"])
        if key not in best or row["us"] < best[key]["us"]:
            best[key] = row
    return best


def video_section(name: str, result: Result) -> str:
    """Both passes without a mask, as docs/video.md shows them, and where the figures come from."""
    passes = [attention_table(result, operation) for operation in (FORWARD, GRADIENT)]
    return "\n\nWith the backward pass:\n\n".join(passes) + f"\n\n{tables.source(name, result)}"


def _matmul(result: Result) -> str:
    rate = result["ceilings"].get("bf16")
    return "" if rate is None else f"A bfloat16 matrix product through XLA: {rate:.0f} TFLOP/s. "


def _section(operation: str, plot: tuple[str, str] | None = None) -> Table:
    table = functools.partial(attention_table, operation=operation)
    return tables.section(table, plot=plot, note=_matmul)


PLOT = ("pooled_speed.png", "Pooled attention: speed over cuDNN against the density")


def summary_table(result: Result) -> str:
    """A few rows: the fastest of ours, forward and with the backward pass, against cuDNN."""
    forward, both = (_by_method(result, operation) for operation in (FORWARD, GRADIENT))
    lines = []
    for row in ordered(row for row in forward.values() if row["method"] in SUMMARY_METHODS):
        if row["model"] != SUMMARY_MODEL:
            continue
        trained = both.get((_shape_of(row), row["method"]))
        cells = [_time_and_ratio(row), "-" if trained is None else _time_and_ratio(trained)]
        lines.append([label(row), f"{row['density']:.3f}", *cells])
    header = ["batch x tokens", "density", "forward, ms", "forward and backward, ms"]
    return tables.table(header, lines)


_SUMMARY = (
    "Time of the kernels on the device; in brackets the speed over that of cuDNN's dense "
    "attention in bfloat16. The ideal is the inverse of the density. "
)


def _time_and_ratio(row: Row) -> str:
    return f"{_milliseconds(row)} ({tables.times(row.get('speedup_over_cudnn'))})"


_DENSITY_TICKS = (0.05, 0.1, 0.2, 0.5, 1)


def speed_plot(result: Result) -> "Figure":
    """Speed over cuDNN against the density, with the ideal line: the fastest of ours."""
    from matplotlib.figure import Figure
    from matplotlib.ticker import NullLocator

    figure = Figure(figsize=(11, 5), layout="constrained")
    panels = figure.subplots(1, 2, sharex=True, sharey=True)
    densities = []
    for axes, operation, title in zip(
        panels, (FORWARD, GRADIENT), ("forward", "forward and backward"), strict=True
    ):
        by_shape: dict[str, list[Row]] = {}
        for row in ordered(_by_method(result, operation).values()):
            is_shown = row["implementation"] is not None and row["model"] == SUMMARY_MODEL
            if is_shown and "speedup_over_cudnn" in row:
                densities.append(row["density"])
                by_shape.setdefault(label(row), []).append(row)
        for i, (name, rows) in enumerate(by_shape.items()):
            rows = sorted(rows, key=lambda row: row["density"])
            x, y = [r["density"] for r in rows], [r["speedup_over_cudnn"] for r in rows]
            style = "--" if rows[0]["is_causal"] else "-"
            axes.plot(x, y, "o" + style, color=f"C{i // 2}", ms=4, lw=1, label=name)
        axes.set_title(title)
    least = min([*densities, 0.5])
    for axes in panels:
        axes.plot([least, 1], [1 / least, 1], color="black", lw=1, label="ideal, 1 / density")
        axes.axhline(1, color="black", lw=0.5, ls=":")
        axes.set_xscale("log")
        axes.set_yscale("log", base=2)
        axes.set_xticks(_DENSITY_TICKS)
        axes.xaxis.set_major_formatter("{x:g}")
        axes.xaxis.set_minor_locator(NullLocator())
        axes.yaxis.set_major_formatter("{x:g}")
        axes.set_xlabel("density: share of dense attention's work")
        axes.grid(alpha=0.3, which="both")
        axes.legend(fontsize=8, frameon=False)
    panels[0].set_ylabel("times as fast as cuDNN bf16, dense")
    figure.suptitle(f"Pooled attention on {result['device']}")
    return figure


_BOTH, _THREE = ("mosaic_gpu", "triton"), ("xla", "mosaic_gpu", "triton")
SUITE = Suite(
    name="pooled",
    groups=lambda: [
        Group(Shape("mha-16", 1, 16384), _BOTH, 0),
        Group(Shape("mha-16", 1, 16384, is_causal=True), _BOTH, 0),
        Group(Shape("mha-16", 1, 32768)),
        Group(Shape("mha-16", 1, 32768, is_causal=True)),
        Group(Shape("llama3-8b", 1, 16384, is_causal=True), _BOTH),
        Group(Shape("mha-16-narrow", 1, 16384), _BOTH),
    ],
    quick_groups=lambda: [
        Group(Shape("tiny", 1, 384, is_causal=is_causal), _THREE, 0) for is_causal in (False, True)
    ],
    run=each(begin, parted(lambda group: group.stage)),
    with_ratios=over_cudnn,
    formats=("bf16",),
    tables={
        "pooled summary": tables.section(summary_table, note=_SUMMARY),
        "pooled forward": _section(FORWARD, PLOT),
        "pooled gradient": _section(GRADIENT),
        "pooled selection": tables.section(selection_table, note=_matmul),
    },
    plots={PLOT[0]: speed_plot},
)
