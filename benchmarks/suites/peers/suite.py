"""What one would run instead, beside turbojax's defaults: one run, one device, one clock.

Ours and jax's rows are those of other suites, with nothing asked for by name where ours are
concerned. Torch's own kernels, FlashInfer, SageAttention, GemLite and bitsandbytes run in a process
of their own for each group of rows (`torch_rows.py`), as far as their packages are installed.
"""

import dataclasses
import functools
import json
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp

from benchmarks import tables
from benchmarks.measuring import calls
from benchmarks.measuring.calls import Arrays, Call, Case, Group
from benchmarks.measuring.samples import require_gpu
from benchmarks.measuring.work import Needs
from benchmarks.shapes import Shape
from benchmarks.suite import Ceilings, Rows, Suite, attempt, describe, over_baselines, parted
from benchmarks.suites import experts, latent
from benchmarks.suites.attention import decode, prefill
from benchmarks.suites.attention.cases import Call as AttentionCall
from benchmarks.suites.attention.cases import Operation
from benchmarks.suites.fireq import cases as fireq
from benchmarks.suites.paged import cases as paged
from benchmarks.suites.paged.inputs import Problem
from benchmarks.tables import Result, Row

MODULE = "benchmarks.suites.peers.torch_rows"
# What a process may need after the last row that it began in time.
_PATIENCE_SECONDS = 20.0
_OURS, _PEER = "turbojax", "peer"
# What rows are compared with: bfloat16 in jax. The name of products of XLA is that by which
# `calls` knows what must be compiled alone.
_EXACT, _PRODUCT = "exact", "bf16"

METHODS = {
    # decode
    "cudnn-full": ("cuDNN through jax", "bfloat16"),
    "pallas": ("jax's Pallas kernel", "bfloat16"),
    "jax-128": ("jax's paged kernel", "bfloat16 pages"),
    "cudnn-paged": ("cuDNN through jax", "bfloat16 pages"),
    "torch-flash": ("torch, flash", "bfloat16"),
    "torch-cudnn": ("torch, cuDNN", "bfloat16"),
    "torch-flex": ("torch, flex_attention", "bfloat16"),
    "flashinfer-bf16": ("FlashInfer, tensor cores", "bfloat16 pages"),
    "flashinfer-bf16-plain": ("FlashInfer", "bfloat16 pages"),
    "flashinfer-fp8": ("FlashInfer, tensor cores", "e4m3 pages"),
    "flashinfer-fp8-plain": ("FlashInfer", "e4m3 pages"),
    "auto": ("turbojax", "bfloat16 pages"),
    "fp8_e4m3": ("turbojax", "e4m3 pages"),
    "turbo4": ("turbojax", "turbo4 pages"),
    "turbo-4bit": ("turbojax", "4-bit cache"),
    # prefill and training
    "cudnn": ("cuDNN through jax", "bfloat16"),
    "e4m3-cudnn": ("cuDNN through jax", "e4m3, quantized before"),
    "attention-mgpu": ("jax's Mosaic GPU kernel", "float16"),
    "flashinfer-fa3": ("FlashInfer, FA3", "bfloat16"),
    "flashinfer-fa3-fp8": ("FlashInfer, FA3", "e4m3, quantized before"),
    "sageattention": ("SageAttention 1", "int8 and float16"),
    "turbo-default": ("turbojax", "8 bits, from bfloat16"),
    # products
    "bf16": ("XLA", "bfloat16"),
    "fp8": ("XLA", "e4m3"),
    "jax-int8": ("jax's Mosaic GPU kernel", "int8 x bfloat16"),
    "torch-scaled-mm": ("torch, _scaled_mm", "e4m3, quantized before"),
    "torch-int4": ("torch, tinygemm", "INT4 x bfloat16"),
    "gemlite-a16w4": ("GemLite", "INT4 x bfloat16"),
    "gemlite-a8w4": ("GemLite", "INT4 x e4m3, from bfloat16"),
    "bitsandbytes-nf4": ("bitsandbytes", "NF4 x bfloat16"),
    "w4a16": ("turbojax", "INT4 x bfloat16"),
    "int4-activations": ("turbojax", "INT4 x e4m3, from bfloat16"),
    # latents and experts
    "bfloat16": ("turbojax", "bfloat16 latents"),
    "latent-fp8": ("turbojax", "e4m3 latents"),
    "latent-turbo4": ("turbojax", "turbo4 latents"),
    "flashinfer-mla": ("FlashInfer, FA3", "bfloat16 latents"),
    "torch-grouped-mm": ("torch, _grouped_mm", "bfloat16"),
    "int4": ("turbojax", "INT4 x e4m3"),
}
"""Of each method: whose it is, and what it reads."""


@dataclasses.dataclass(frozen=True)
class TorchCase:
    """A row of `torch_rows.PEERS`."""

    method: str
    implementation: None = None
    family: str = _PEER


# What is measured ---------------------------------------------------------------------------------


def _taken(group: Group, **families: str) -> list[Case]:
    """Cases of another suite's group by method, in the families that they have here."""
    found = {case.method: case for case in group.cases}
    return [dataclasses.replace(found[name], family=x) for name, x in families.items()]


def _with_peers(group: Group, cases: list[Case], peers: tuple[str, ...]) -> Group:
    return dataclasses.replace(group, cases=(*cases, *map(TorchCase, peers)))


def _call(call: AttentionCall) -> Call:
    """A call of the attention suites as one of the others."""
    amounts = (call.work.amount, 0.0) if call.work.is_bytes else (0.0, call.work.amount)
    return Call(call.function, call.arguments, Needs(*amounts, "bf16"), errors=call.error)


def _attention(operation: Operation, shape: Shape, method: str, choice: Any, family: str) -> Case:
    """A case of an attention suite, among a choice of its rows."""

    def build(arrays: Arrays) -> Call:
        [case] = [c for c in operation.cases(shape, choice) if c.method == method]
        return _call(case.build(arrays.get(operation.inputs, shape)))

    return Case(method, None, family, build)


def decoding(shape: Shape, *, with_all: bool = True) -> Group:
    """A token of each sequence; all but cuDNN and torch hold `Problem`'s tokens, 27 fewer."""
    dense = functools.partial(_attention, decode.DECODE, shape)
    pages = paged.decode(Problem(shape), [(kind, None) for kind in ("turbo4", "fp8_e4m3", "auto")])
    cases = [dense("cudnn-full", "short", _EXACT), dense("turbo-4bit", "default", _OURS)]
    cases += _taken(pages, turbo4=_OURS, fp8_e4m3=_OURS, auto=_OURS)
    peers = ("flashinfer-bf16", "flashinfer-fp8", "torch-flash", "torch-flex")
    if with_all:
        cases.append(dense("pallas", "short", _PEER))
        cases += _taken(pages, **{"cudnn-paged": _PEER, "jax-128": _PEER})
        peers += ("torch-cudnn", "flashinfer-bf16-plain", "flashinfer-fp8-plain")
    return _with_peers(Group("decode", shape.label, shape.facts, ()), cases, peers)


def prompts(shape: Shape) -> Group:
    within = functools.partial(_attention, prefill.PREFILL, shape)
    cases = [
        within("cudnn", "hopper", _EXACT),
        within("turbo-default", "default", _OURS),
        within("e4m3-cudnn", "hopper", _PEER),
        Case("attention-mgpu", None, _PEER, functools.partial(_attention_mgpu, shape)),
        within("pallas", "short", _PEER),
    ]
    peers = ("torch-flash", "torch-cudnn", "flashinfer-fa3", "flashinfer-fa3-fp8")
    peers += ("torch-flex", "sageattention")
    return _with_peers(Group("prefill", shape.label, shape.facts, ()), cases, peers)


def _attention_mgpu(shape: Shape, arrays: Arrays) -> Call:
    """FlashAttention-3 as jax ships it, with the largest of its example's tiles that fits.

    It takes no scale, so the queries are scaled before, and as of jax 0.11 float16 alone.
    """
    require_gpu("jax's Mosaic GPU kernel")
    from jax.experimental.pallas.ops.gpu import attention_mgpu as kernel

    exact = prefill.cases(shape, "default")[0].build(arrays.get(prefill.Inputs, shape))
    query, key, value = (x.astype(jnp.float16) for x in exact.arguments)
    tiles = {"block_q": 64, "block_kv": 128, "max_concurrent_steps": 2}
    config = kernel.TuningConfig(**tiles, causal=shape.is_causal)

    def attend(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
        return kernel.attention(q, k, v, config)

    given = query * jnp.float16(shape.heads.dim**-0.5), key, value
    return _call(dataclasses.replace(exact, function=attend, arguments=given))


def training(shape: Shape) -> Group:
    both = functools.partial(_attention, prefill.TRAINING, shape)
    cases = [both("cudnn", "default", _EXACT), both("turbo-default", "default", _OURS)]
    peers = ("torch-flash", "torch-cudnn", "torch-flex")
    return _with_peers(Group("training", shape.label, shape.facts, ()), cases, peers)


def products(size: int, outputs: int, tokens: int) -> Group:
    group = fireq.matmul(size, outputs, tokens, implementations=(None,))
    families = {"bf16": _PRODUCT, "fp8": "fp8", "jax-int8": _PEER}
    cases = _taken(group, **families, **{"int4-activations": _OURS, "w4a16": _OURS})
    peers = ("torch-int4", "gemlite-a16w4", "bitsandbytes-nf4", "torch-scaled-mm", "gemlite-a8w4")
    return _with_peers(group, cases, peers)


def latents(shape: latent.Shape) -> Group:
    group = latent.decoding(shape, implementations=(None,))
    names = {"fp8_e4m3": "latent-fp8", "turbo4": "latent-turbo4"}
    cases = _taken(group, bf16=_EXACT, **dict.fromkeys(("bfloat16", *names), _OURS))
    cases = [dataclasses.replace(c, method=names.get(c.method, c.method)) for c in cases]
    return _with_peers(group, cases, ("flashinfer-mla",))


def experts_products(p: experts.Product, tokens: int) -> Group:
    group = experts.product(p, tokens, implementations=(None,))
    cases = _taken(group, bf16=_PRODUCT, fp8="fp8", int4=_OURS)
    return _with_peers(group, cases, ("torch-grouped-mm",))


def _groups() -> Iterator[Group]:
    llama = "llama3-8b"
    yield decoding(Shape(llama, 16, 32768))
    yield prompts(Shape(llama, 2, 8192, is_causal=True))
    yield training(Shape(llama, 2, 8192, is_causal=True))
    for tokens in (1, 16, 64, 1024):
        yield products(4096, 14336, tokens)
    for model, heads in (("deepseek-v3", 128), ("deepseek-v2-lite", 16)):
        yield latents(latent.Shape(model, heads, 64, 8192))
    yield decoding(Shape(llama, 64, 4096), with_all=False)
    [mixtral] = [p for p in experts.PRODUCTS if p.name == "mixtral-8x7b-gate-up"]
    yield experts_products(mixtral, 256)


def _quick_groups() -> Iterator[Group]:
    yield decoding(Shape("tiny", 2, 192))
    yield prompts(Shape("tiny", 1, 128, is_causal=True))
    yield products(256, 384, 5)
    yield latents(latent.TINY)


# Running ------------------------------------------------------------------------------------------


def run(
    rows: Rows,
    ceilings: Ceilings,
    on_row: Callable[[Row], None],
    *,
    repetitions: int | None = None,
    deadline: float = float("inf"),
) -> None:
    """Starts torch's processes, which compile meanwhile, measures ours, and reads their answers."""
    theirs = [(group, case) for group, case in rows if isinstance(case, TorchCase)]
    ours = [(group, case) for group, case in rows if not isinstance(case, TorchCase)]
    parts = parted(id)(theirs) if time.monotonic() <= deadline else []
    workers = [(part, _start(part, repetitions, deadline)) for part in parts]
    try:
        calls.run(ours, ceilings, on_row, repetitions=repetitions, deadline=deadline)
        for part, worker in workers:
            for row in _answers(part, worker, deadline):
                on_row(row)
    finally:
        for _, worker in workers:
            worker.kill()
            worker.wait()
    if not parts:
        for group, case in theirs:
            attempt(describe(group, case), dict, on_row, deadline)


def _start(part: Rows, repetitions: int | None, deadline: float) -> "subprocess.Popen[str]":
    """A process that measures rows."""
    pipes: Any = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    worker = subprocess.Popen([sys.executable, "-m", MODULE], **pipes)
    asked = {"rows": [describe(group, case) for group, case in part], "repetitions": repetitions}
    assert worker.stdin is not None
    json.dump({**asked, "seconds": deadline - time.monotonic()}, worker.stdin)
    worker.stdin.close()
    worker.stdin = None  # `communicate` would close it again
    return worker


def _answers(part: Rows, worker: "subprocess.Popen[str]", deadline: float) -> Iterator[Row]:
    """Each row with what became of it; those that the process did not come to say so."""
    patience = deadline - time.monotonic() + _PATIENCE_SECONDS
    try:
        said, _ = worker.communicate(timeout=None if patience == float("inf") else patience)
    except subprocess.TimeoutExpired:
        worker.kill()
        said, _ = worker.communicate()
    missing = {"status": "failed", "reason": f"its process ended with {worker.returncode}"}
    found = answers(said)
    for group, case in part:
        row = describe(group, case)
        yield {**row, **found.get(row["name"], missing)}


def answers(said: str) -> dict[str, Row]:
    """By name, the rows in the lines of a process; the last line may be cut short."""
    found: dict[str, Row] = {}
    for line in said.splitlines(keepends=True):
        if line.endswith("\n"):
            row = json.loads(line)
            found[row.pop("name")] = row
    return found


# What the docs show -------------------------------------------------------------------------------

_TITLES = {
    "decode": "Decode, a token of each sequence",
    "prefill": "Prefill",
    "training": "Forward and backward",
    "matmul": "Products",
    "latent": "Decode over latents",
    "experts": "Products of experts",
}


def _place(row: Row) -> str:
    if row["operation"] in ("decode", "prefill", "training"):
        return tables.shape_label(row)
    if row["operation"] == "latent":
        return f"{row['heads']} heads, {row['batch']} x {tables.short(row['length'])}"
    model = row.get("model") or f"{row['inputs']:,} to {row['outputs']:,}"
    return f"{model}, {row['tokens']:,} token{'s' if row['tokens'] > 1 else ''}"


_NAMES = (
    ("where", _place),
    ("what", lambda row: METHODS[row["method"]][0]),
    ("numbers", lambda row: METHODS[row["method"]][1]),
)
_COLUMNS = (
    tables.US,
    ("wall, us", tables.significant("wall_us")),
    (
        "over bfloat16 in jax",
        lambda row: tables.times(next(iter(row["speedup_over"].values()), None)),
    ),
)


def table(result: Result) -> str:
    """A table for each operation, the fastest first in each place."""
    parts = []
    for operation, title in _TITLES.items():
        rows = tables.shown(result, operation)
        places = list(dict.fromkeys(map(_place, rows)))
        rows.sort(key=lambda row: (places.index(_place(row)), row.get("us", float("inf"))))
        if rows:
            text = tables.rows_table(rows, _NAMES, _COLUMNS)
            parts.append(f"### {title}\n\n{tables.with_cut(text, result, operation)}")
    return "\n\n".join(parts)


def _versions(result: Result) -> str:
    found = sorted({row["version"] for row in result["rows"] if "version" in row})
    return f"Beside jax: {', '.join(found)}. " if found else ""


SUITE = Suite(
    name="peers",
    groups=_groups,
    quick_groups=_quick_groups,
    run=run,
    with_ratios=over_baselines(dict.fromkeys(_TITLES, (_EXACT, _PRODUCT))),
    formats=None,
    environment={"XLA_PYTHON_CLIENT_PREALLOCATE": "false"},
    tables={"peers": tables.section(table, note=_versions)},
)
