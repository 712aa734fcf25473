"""Checks and tunes the upstream Triton kernel of prefill attention on a GPU.

`python -m benchmarks.device.jax_triton_tune --out jt.json`: small ragged calls against the XLA
reference, the error of e4m3 sums over long contexts, and the device time of tilings, modes and
softmaxes against cuDNN in bfloat16 in the same run. What is left when `--seconds` are over is
named, not run.
"""

import dataclasses
import functools
import time
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp

import turbojax as tj
from benchmarks import stored
from benchmarks.timing import measure
from pallas_kernels.upstream_triton.attention import SparseExponential, Tiling, attention
from turbojax._environment import environment
from turbojax.attention.options import Options
from turbojax.attention.turbo import jax_triton, reference
from turbojax.attention.turbo.operands import quantize_operands

MODES = ("fp8", "int8_fp8", "int8")
SOFTMAXES = {"exact": "exact", "sas": tj.SAS(), "sas2": tj.SAS(base="2")}
TILINGS = {
    "128/8/3": Tiling(128, 8, 3),
    "128/8/2": Tiling(128, 8, 2),
    "64/4/3": Tiling(64, 4, 3),
    "64/4/2": Tiling(64, 4, 2),
}
BATCH, TOKENS, HEADS, KV_HEADS, HEAD_DIM = 2, 8192, 32, 8, 128
CASES = {
    "causal, lengths": Options(True, scale=HEAD_DIM**-0.5),
    "window": Options(False, (90, 17), scale=HEAD_DIM**-0.5),
    "soft cap": Options(True, (150, 0), scale=HEAD_DIM**-0.5, logits_soft_cap=5.0),
}

Row = dict[str, Any]


def normal(seed: int, *shape: int) -> jax.Array:
    """Sampled in float32 and cast: bfloat16 samples have a mean and few distinct values."""
    return jax.random.normal(jax.random.key(seed), shape, jnp.float32).astype(jnp.bfloat16)


def config_of(mode: str, softmax: str, block_kv: int) -> tj.TurboConfig:
    return tj.TurboConfig(
        mode=mode, softmax=SOFTMAXES[softmax], block_kv=block_kv, buffer_size=block_kv
    )


def full(batch: int, length: int) -> jax.Array:
    return jnp.full(batch, length, jnp.int32)


def distance(x: jax.Array, y: jax.Array) -> Row:
    """Relative L2 and largest absolute difference, over what is finite in `y`."""
    x, y = (a.astype(jnp.float32) for a in (x, y))
    finite = jnp.isfinite(y)
    same = bool(jnp.array_equal(jnp.isfinite(x), finite))
    x, y = (jnp.where(finite, a, 0) for a in (x, y))
    relative = jnp.linalg.norm((x - y).ravel()) / jnp.linalg.norm(y.ravel())
    return {"relative": float(relative), "max": float(jnp.max(jnp.abs(x - y))), "finite": same}


def correctness() -> Iterator[Row]:
    """Every mode and softmax on ragged calls: the kernel against XLA, and both against exact."""
    q = normal(0, 2, 200, 4, HEAD_DIM).astype(jnp.float32)
    k, v = (normal(i, 2, 330, 2, HEAD_DIM).astype(jnp.float32) for i in (1, 2))
    operands = (q, k, v, jnp.array([200, 130], jnp.int32), jnp.array([330, 77], jnp.int32))
    for (name, options), softmax in zip(CASES.items(), SOFTMAXES, strict=True):
        exact = tj.TurboConfig(mode="float", softmax="exact")
        truth, _ = reference.attention(*operands, config=exact, options=options)
        for mode in MODES:
            for kind in SOFTMAXES if mode == "fp8" else (softmax,):
                config = config_of(mode, kind, 64)
                want = reference.attention(*operands, config=config, options=options)
                got = jax_triton.attention(*operands, config=config, options=options)
                yield {
                    "case": name,
                    "mode": mode,
                    "softmax": kind,
                    "out": distance(got[0], want[0]),
                    "residual": distance(got[1], want[1]),
                    "error": distance(got[0], truth)["relative"],
                    "error of xla": distance(want[0], truth)["relative"],
                }


def kernel_of(
    config: tj.TurboConfig, tiling: Tiling | None, *, is_causal: bool
) -> Callable[..., tuple[jax.Array, jax.Array]]:
    """The kernel alone, of quantized operands and lengths."""
    softmax = config.softmax
    exponential = None
    if isinstance(softmax, tj.SAS):
        exponential = SparseExponential(softmax.coefficients, softmax.threshold, softmax.base)

    def run(query_tokens: int, *operands: jax.Array) -> tuple[jax.Array, jax.Array]:
        return attention(
            *operands,
            tokens=query_tokens,
            out_dtype=jnp.bfloat16,
            scale=HEAD_DIM**-0.5,
            left=None,
            right=0 if is_causal else None,
            soft_cap=None,
            exponential=exponential,
            tiling=tiling,
        )

    return run


def accumulation() -> Iterator[Row]:
    """The error of e4m3 sums over 8192 keys, with values of both signs and of one."""
    q = normal(0, 1, 512, 8, HEAD_DIM)
    k, v = (normal(i, 1, TOKENS, 2, HEAD_DIM) for i in (1, 2))
    lengths = full(1, 512), full(1, TOKENS)
    options = Options(False, scale=HEAD_DIM**-0.5)
    exact = tj.TurboConfig(mode="float", softmax="exact")
    for signs, values in (("both", v), ("one", jnp.abs(v) + 1)):
        as_float32 = [x.astype(jnp.float32) for x in (q, k, values)]
        truth, _ = reference.attention(*as_float32, *lengths, config=exact, options=options)
        for mode in MODES:
            config = config_of(mode, "exact", 64)
            want, _ = reference.attention(*as_float32, *lengths, config=config, options=options)
            row = {"signs": signs, "mode": mode, "xla": distance(want, truth)["relative"]}
            operands = quantize_operands(q, k, values, *lengths, config)
            run = kernel_of(config, None, is_causal=False)
            out, _ = jax.jit(functools.partial(run, 512))(*operands, *lengths)
            yield row | {"kernel": distance(out, truth)["relative"]}


def teraflops(microseconds: float, *, is_causal: bool) -> float:
    operations = 4 * BATCH * HEADS * TOKENS**2 * HEAD_DIM / (2 if is_causal else 1)
    return operations / microseconds / 1e6


def timed(run: Callable[..., Any], arguments: tuple[Any, ...], *, is_causal: bool) -> Row:
    try:
        timing = measure(jax.jit(run).lower(*arguments).compile(), arguments)
    except Exception as error:  # a variant that does not compile is a result
        return {"failed": f"{type(error).__name__}: {error}".splitlines()[0][:200]}
    rate = teraflops(timing.microseconds, is_causal=is_causal)
    return {"us": round(timing.microseconds, 1), "tflops": round(rate, 1)}


@dataclasses.dataclass(frozen=True)
class Variant:
    """One kernel to time; `tiling` None is the whole op, quantization included, as shipped."""

    mode: str
    softmax: str
    block_kv: int
    is_causal: bool
    tiling: str | None


def variants() -> Iterator[Variant]:
    """The most telling first: time may run out."""
    for mode in MODES:
        yield Variant(mode, "exact", 128, False, None)
    for block_kv in (128, 64):
        for tiling in TILINGS:
            for mode in MODES:
                yield Variant(mode, "exact", block_kv, False, tiling)
    for is_causal in (False, True):
        for softmax in SOFTMAXES:
            for block_kv in (128, 64):
                for mode in MODES:
                    if is_causal or softmax != "exact":
                        yield Variant(mode, softmax, block_kv, is_causal, "128/8/3")


def time_variants(deadline: float) -> Iterator[Row]:
    q = normal(0, BATCH, TOKENS, HEADS, HEAD_DIM)
    k, v = (normal(i, BATCH, TOKENS, KV_HEADS, HEAD_DIM) for i in (1, 2))
    lengths = full(BATCH, TOKENS), full(BATCH, TOKENS)
    for is_causal in (False, True):
        cudnn = functools.partial(
            jax.nn.dot_product_attention, is_causal=is_causal, implementation="cudnn"
        )
        yield {"kernel": "cudnn bf16", "is_causal": is_causal} | timed(
            cudnn, (q, k, v), is_causal=is_causal
        )
    operands: dict[tuple[str, int], Any] = {}
    for variant in variants():
        row: Row = {"kernel": "jax_triton", **dataclasses.asdict(variant)}
        if time.monotonic() > deadline:
            yield row | {"failed": "no time left"}
            continue
        config = config_of(variant.mode, variant.softmax, variant.block_kv)
        if variant.tiling is None:
            options = Options(False, scale=HEAD_DIM**-0.5)
            run = functools.partial(jax_triton.attention, config=config, options=options)
            yield row | timed(run, (q, k, v, *lengths), is_causal=False)
            continue
        key = variant.mode, variant.block_kv
        if key not in operands:
            quantize = jax.jit(quantize_operands, static_argnames="config")
            operands[key] = quantize(q, k, v, *lengths, config=config)
        run = kernel_of(config, TILINGS[variant.tiling], is_causal=variant.is_causal)
        arguments = (*operands[key], *lengths)
        yield row | timed(functools.partial(run, TOKENS), arguments, is_causal=variant.is_causal)


def table(report: Row) -> str:
    """The figures that matter, the fastest variants last."""
    lines = ["", "correctness (relative L2 / max against XLA; error against exact: ours, XLA's)"]
    for row in report["correctness"]:
        out = row["out"]
        lines.append(
            f"  {row['mode']:8} {row['softmax']:5} {row['case']:15} {out['relative']:.1e} "
            f"/ {out['max']:.1e}  lse {row['residual']['max']:.1e}  "
            f"{row['error']:.4f} {row['error of xla']:.4f}"
            + ("" if out["finite"] and row["residual"]["finite"] else "  INFINITIES DIFFER")
        )
    lines.append("relative error against exact at 8192 keys: XLA, the kernel")
    for row in report["accumulation"]:
        errors = f"{row['xla']:.5f} {row['kernel']:.5f}"
        lines.append(f"  {row['mode']:8} values of {row['signs']:4} sign  {errors}")
    base = {
        r["is_causal"]: r.get("tflops", 0) for r in report["times"] if r["kernel"] != "jax_triton"
    }
    lines.append(f"TFLOP/s; cuDNN bf16: {base[False]}, causal {base[True]}")
    done = [r for r in report["times"] if r["kernel"] == "jax_triton"]
    for row in sorted(done, key=lambda r: (r["is_causal"], r.get("tflops", 0))):
        causal = "causal" if row["is_causal"] else ""
        name = f"{row['mode']:8} {row['softmax']:5} kv {row['block_kv']:3} {causal:6}"
        if "failed" in row:
            rate = row["failed"]
        else:
            ratio = row["tflops"] / (base[row["is_causal"]] or 1)
            rate = f"{row['tflops']:7} {row['us']:8} us  {ratio:.2f}x"
        lines.append(f"  {name} {row['tiling'] or 'whole op':18} {rate}")
    return "\n".join(lines)


def main() -> None:
    parser = stored.parser(__doc__)
    parser.add_argument("--seconds", type=float, default=220.0)
    arguments = parser.parse_args()
    deadline = time.monotonic() + arguments.seconds
    report: Row = environment()
    stages = {
        "correctness": correctness,
        "accumulation": accumulation,
        "times": functools.partial(time_variants, deadline),
    }
    for name, stage in stages.items():
        report[name] = []
        for row in stage():
            report[name].append(row)
            stored.save(arguments.out, report)
        print(f"{name}: {len(report[name])} rows", flush=True)
    print(table(report))


if __name__ == "__main__":
    main()
