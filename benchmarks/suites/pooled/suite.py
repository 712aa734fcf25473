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
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

import turbojax as tj
from benchmarks import timing
from benchmarks.measuring import work
from benchmarks.measuring.compiling import compile_side_by_side, require_gpu
from benchmarks.measuring.samples import errors
from benchmarks.shapes import Shape
from benchmarks.suite import Ceilings, Latest, Suite, attempt, over_cudnn, timing_facts
from benchmarks.suites.pooled import inputs as pooled_inputs
from benchmarks.suites.pooled import tables as pooled_tables
from benchmarks.suites.pooled.inputs import MIXTURE_DENSITY
from benchmarks.tables import Row

FORWARD, GRADIENT, SELECT = pooled_tables.FORWARD, pooled_tables.GRADIENT, pooled_tables.SELECT
# Two products forward; backward the scores again, and a product for each gradient and for dP.
_PRODUCTS = {FORWARD: 1.0, GRADIENT: 3.5}
# Dense bfloat16 TFLOP/s by the maker's data sheet.
_PEAKS = {"H100": 989.4, "H200": 989.4}

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
    """One row.

    Attributes:
      operation: forward, forward and backward, or the choice of levels.
      method: ``"cudnn"``, or which levels.
      implementation: of ours, or None.
    """

    operation: str
    method: str
    implementation: str | None = None

    @property
    def job(self) -> Job:
        """The compiled function that is timed."""
        return Job(self.operation, self.implementation or self.method)

    @property
    def needs(self) -> tuple[Job, ...]:
        """Everything that must be compiled for it."""
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
        """Its rows, what others are compared with first."""
        cases = [Case(operation, "cudnn") for operation in (FORWARD, GRADIENT)]
        cases += [Case(SELECT, policy) for policy in POLICIES]
        for i, implementation in enumerate(self.implementations):
            methods = [*self.maps(), *POLICIES] if i == 0 else [*self.maps()][:3]
            for operation in (FORWARD, GRADIENT):
                cases += [Case(operation, method, implementation) for method in methods]
        return cases

    def name(self, case: Case) -> str:
        """``pooled/mha-16/b1-s16384/top-k/mosaic_gpu``."""
        parts = (case.operation, self.shape.label, case.method, case.implementation)
        return "/".join(part for part in parts if part)

    def maps(self) -> dict[str, Callable[[], jax.Array]]:
        """Maps that do not depend on what is attended to."""
        blocks, heads = -(-self.shape.tokens // pooled_inputs.BLOCK), self.shape.heads.query
        make = functools.partial(pooled_inputs.random_levels, self.shape)
        maps: dict[str, Callable[[], jax.Array]] = {
            "mixture-0.156": functools.partial(make, MIXTURE_DENSITY),
            "mixture-0.05": functools.partial(make, 0.05),
            "all-1": lambda: jnp.ones((1, heads, blocks, blocks), jnp.int8),
        }
        if self.shape.is_causal:
            maps["mixture-0.156-sink"] = functools.partial(make, MIXTURE_DENSITY, sink=True)
        return maps


def _groups() -> list[Group]:
    """What matters most first: a run may be stopped by the clock."""
    both = ("mosaic_gpu", "triton")
    return [
        Group(Shape("mha-16", 1, 16384), both, 0),
        Group(Shape("mha-16", 1, 16384, is_causal=True), both, 0),
        Group(Shape("mha-16", 1, 32768)),
        Group(Shape("mha-16", 1, 32768, is_causal=True)),
        Group(Shape("llama3-8b", 1, 16384, is_causal=True), both),
        Group(Shape("mha-16-narrow", 1, 16384), both),
    ]


def _quick_groups() -> list[Group]:
    """Tiny shapes: whether everything runs, and nothing about speed."""
    shapes = (Shape("tiny", 1, 384, is_causal=is_causal) for is_causal in (False, True))
    return [Group(shape, ("xla", "mosaic_gpu", "triton"), 0) for shape in shapes]


def run(
    rows: list[tuple[Group, Case]],
    ceilings: Ceilings,
    on_row: Callable[[Row], None],
    *,
    repetitions: int | None = None,
    deadline: float = float("inf"),
) -> None:
    """See `benchmarks.suite.Run`."""
    for stage in dict.fromkeys(group.stage for group, _ in rows):
        here = [(group, case) for group, case in rows if group.stage == stage]
        compiled = compile_jobs(here) if time.monotonic() <= deadline else {}
        inputs = Latest(functools.partial(Inputs, compiled=compiled))
        for group, case in here:
            measure = functools.partial(_measure, group, case, inputs, ceilings, repetitions)
            attempt(describe(group, case), measure, on_row, deadline)


def compile_jobs(
    rows: Iterable[tuple[Group, Case]],
) -> dict[tuple[Group, Job], concurrent.futures.Future[Any]]:
    """Compiles what rows need, side by side."""
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
    """A job for arrays of the group's shape."""
    query, key, value, d_out = jax.eval_shape(lambda: pooled_inputs.sample(group.shape))
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


_BLOCKS = {"block_q": pooled_inputs.BLOCK, "block_kv": pooled_inputs.BLOCK}


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
    """The arrays of a shape, its maps, and what should come out.

    Args:
      group: the shape and its rows.
      compiled: see `compile_jobs`.
    """

    def __init__(
        self, group: Group, compiled: dict[tuple[Group, Job], concurrent.futures.Future[Any]]
    ) -> None:
        self.group = group
        self._compiled = compiled
        self.arrays = pooled_inputs.sample(group.shape)
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


def _measure(
    group: Group, case: Case, latest: Latest, ceilings: Ceilings, repetitions: int | None
) -> Row:
    inputs: Inputs = latest.of(group)
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
    taken = timing.measure(compiled, arguments, repetitions=repetitions)
    if case.operation != SELECT:
        amount = work.attention_operations(inputs.group.shape) * density
        needed = work.Work(amount * _PRODUCTS[case.operation], {"bf16": 1.0})
        rate = needed.rate(taken.microseconds)
        peak = next((v for k, v in _PEAKS.items() if k in jax.devices()[0].device_kind), None)
        facts |= {
            "work": needed.amount,
            "tflops_per_second": rate,
            "percent_of_ceiling": needed.percent_of_ceiling(taken.microseconds, ceilings),
            "percent_of_peak": None if peak is None else 100 * rate / peak,
        }
    return {
        "status": "ok",
        **timing_facts(taken),
        **facts,
        "temporary_bytes": getattr(compiled.memory_analysis(), "temp_size_in_bytes", None),
    }


def describe(group: Group, case: Case) -> Row:
    """What is known of a row before it runs."""
    return {
        "name": group.name(case),
        "operation": case.operation,
        "method": case.method,
        "implementation": case.implementation,
        **group.shape.facts,
    }


SUITE = Suite(
    name="pooled",
    groups=_groups,
    quick_groups=_quick_groups,
    run=run,
    with_ratios=over_cudnn,
    one_line=pooled_tables.one_line,
    formats=("bf16",),
    tables=pooled_tables.TABLES,
    plots=pooled_tables.PLOTS,
)
