"""Kernels of torch and of packages that need it, timed in a process of their own.

`benchmarks/suites/peers/suite.py` starts it with rows as JSON on its standard input, and reads a
line of JSON for each from its standard output. A time is the sum of the kernels' times on the
device, as for ours (`benchmarks/timing.py`), with inputs in rotation where they would sit in the L2
cache; what is compiled or planned before is not timed. Every output is compared with float32
arithmetic on the same operands in some rows.
"""

import copy
import functools
import importlib.metadata
import json
import os
import statistics
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks import timing
from benchmarks.suite import failure
from benchmarks.tables import OUT_OF_TIME, Row

PAGE = 64
# Sequences in pages end in the middle of one, as those of the other suites.
SHORT_OF_FULL = 27
_WORKSPACE_BYTES = 2**27
# Of INT4 weights: inputs that share a scale.
_GROUP = 128
# Of the time that a process is given, what it may prepare rows in.
_PREPARING = 0.45
# Rows of an output that are compared; relative L1, of which 8-bit attention has 0.05.
_COMPARED, _WRONG = 16, 0.2


class Call(NamedTuple):
    """Something to time.

    Attributes:
      function: of the arguments.
      arguments: tensors, or what holds some.
      compared: of an output, some of its rows and what they should be.
    """

    function: Callable[..., Any]
    arguments: tuple[Any, ...]
    compared: Callable[[Any], tuple[Any, Any]]


def normal(seed: int, *shape: int) -> Any:
    """Normal numbers in bfloat16, on the device."""
    import torch

    generator = torch.Generator("cuda").manual_seed(seed)
    return torch.randn(shape, generator=generator, device="cuda", dtype=torch.bfloat16)


def attended(query: Any, key: Any, value: Any, visible: Any) -> Any:
    """Exact attention of one sequence: ``[N, R, H]`` of which row `r` sees ``visible[r]`` keys."""
    import torch

    group = query.shape[0] // key.shape[0]
    key, value = (x.float().repeat_interleave(group, 0) for x in (key, value))
    scores = query.float() @ key.mT * query.shape[-1] ** -0.5
    hidden = torch.arange(key.shape[1], device="cuda") >= visible[:, None]
    return scores.masked_fill(hidden, float("-inf")).softmax(-1) @ value


# Attention ----------------------------------------------------------------------------------------


def heads_first(row: Row, queries: int) -> tuple[Any, Any, Any]:
    """Query ``[B, N, T, H]``, key and value ``[B, K, S, H]``."""
    b, s, n, k, h = (row[x] for x in ("batch", "tokens", "heads", "kv_heads", "head_dim"))
    return normal(0, b, n, queries, h), normal(1, b, k, s, h), normal(2, b, k, s, h)


def compared_attention(query: Any, key: Any, value: Any, row: Row) -> Callable[[Any], Any]:
    """Of an output ``[B, N, T, H]``, some rows of its first sequence, and exact ones."""
    import torch

    last = query.shape[2]
    rows = torch.linspace(0, last - 1, min(_COMPARED, last), device="cuda").long()
    visible = rows + 1 if row["is_causal"] else torch.full_like(rows, key.shape[2])

    def compared(out: Any) -> tuple[Any, Any]:
        return out[0][:, rows], attended(query[0][:, rows], key[0], value[0], visible)

    return compared


def attention(row: Row, attend: Callable[..., Any]) -> Call:
    """Of query, key and value; with the gradients of all three if the row is of training."""
    import torch

    queries = row["tokens"] if row["is_causal"] else 1
    tensors = heads_first(row, queries)
    compared = compared_attention(*tensors, row)
    if row["operation"] != "training":
        return Call(attend, tensors, compared)

    def both(q: Any, k: Any, v: Any, d_out: Any) -> Any:
        out = attend(q, k, v)
        return out, *torch.autograd.grad(out, (q, k, v), d_out)

    learned = tuple(x.clone().requires_grad_() for x in tensors)
    d_out = normal(3, *tensors[0].shape)
    return Call(both, (*learned, d_out), lambda outs: compared(outs[0].detach()))


def sdpa(row: Row, backend: str) -> Call:
    from torch.nn import functional
    from torch.nn.attention import SDPBackend, sdpa_kernel

    chosen = getattr(SDPBackend, backend)

    def attend(q: Any, k: Any, v: Any) -> Any:
        with sdpa_kernel(chosen):
            return functional.scaled_dot_product_attention(
                q, k, v, is_causal=row["is_causal"], enable_gqa=True
            )

    return attention(row, attend)


def flex(row: Row) -> Call:
    import torch
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    mask = None
    if row["is_causal"]:

        def before(b: Any, h: Any, q: Any, k: Any) -> Any:
            return q >= k

        mask = create_block_mask(before, None, None, row["tokens"], row["tokens"], device="cuda")
    compiled = torch.compile(flex_attention, dynamic=False)
    return attention(row, lambda q, k, v: compiled(q, k, v, block_mask=mask, enable_gqa=True))


def sage(row: Row) -> Call:
    from sageattention import sageattn

    # It takes the keys' mean off in place: once or often is the same.
    return attention(row, lambda q, k, v: sageattn(q, k, v, is_causal=row["is_causal"]))


def workspace() -> Any:
    import torch

    return torch.zeros(_WORKSPACE_BYTES, dtype=torch.uint8, device="cuda")


def paged(batch: int, length: int) -> tuple[Any, Any, Any]:
    """Where sequences' pages begin in the list of them, that list in random order; tokens of the
    last ones."""
    import torch

    pages = -(-length // PAGE)
    begin = torch.arange(batch + 1, dtype=torch.int32, device="cuda") * pages
    order = torch.randperm(batch * pages, device="cuda").int()
    last = torch.full((batch,), length - (pages - 1) * PAGE, dtype=torch.int32, device="cuda")
    return begin, order, last


def flashinfer_decode(row: Row, kv_dtype: str, tensor_cores: bool) -> Call:
    import flashinfer
    import torch

    b, n, k, h = (row[x] for x in ("batch", "heads", "kv_heads", "head_dim"))
    length, kv = row["tokens"] - SHORT_OF_FULL, getattr(torch, kv_dtype)
    begin, order, last = paged(b, length)
    cache = normal(1, len(order), 2, PAGE, k, h).to(kv)
    wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(
        workspace(), "NHD", use_tensor_cores=tensor_cores
    )
    dtypes = {"q_data_type": torch.bfloat16, "kv_data_type": kv, "o_data_type": torch.bfloat16}
    wrapper.plan(begin, order, last, n, k, h, PAGE, **dtypes)
    query = normal(0, b, n, h)

    def compared(out: Any) -> tuple[Any, Any]:
        held = cache[order[: begin[1]].long()].float()  # [pages, 2, PAGE, K, H]
        key, value = held.transpose(0, 1).flatten(1, 2).transpose(1, 2)[:, :, :length]
        seen = torch.tensor([length], device="cuda")
        return out[0][:, None], attended(query[0][:, None], key, value, seen)

    return Call(wrapper.run, (query, cache), compared)


def flashinfer_prefill(row: Row, dtype: str) -> Call:
    import flashinfer
    import torch

    b, s, n, k, h = (row[x] for x in ("batch", "tokens", "heads", "kv_heads", "head_dim"))
    begin = torch.arange(b + 1, dtype=torch.int32, device="cuda") * s
    tensors = heads_first(row, s)
    flat = [x.transpose(1, 2).flatten(0, 1).contiguous() for x in tensors]
    scales: list[Any] = []
    if dtype != "bfloat16":
        scales = [x.float().abs().amax((0, 2)) / 448 for x in flat]
        flat = [
            (x / r[:, None]).to(getattr(torch, dtype)) for x, r in zip(flat, scales, strict=True)
        ]
    wrapper = flashinfer.BatchPrefillWithRaggedKVCacheWrapper(workspace(), "NHD", backend="fa3")
    dtypes = {"q_data_type": flat[0].dtype, "kv_data_type": flat[1].dtype}
    wrapper.plan(begin, begin, n, k, h, causal=True, o_data_type=torch.bfloat16, **dtypes)
    compared = compared_attention(*tensors, row)

    def apart(out: Any) -> tuple[Any, Any]:
        return compared(out.unflatten(0, (b, s)).transpose(1, 2))

    return Call(wrapper.run, (*flat, *scales), apart)


def flashinfer_latent(row: Row) -> Call:
    import flashinfer
    import torch

    b, n, length = (row[x] for x in ("batch", "heads", "length"))
    c, r, scale = row["latent"], row["rope"], 192**-0.5
    begin, order, _ = paged(b, length)
    latent, rope = normal(1, len(order), PAGE, c), normal(2, len(order), PAGE, r)
    query, rotary = normal(0, b, n, c), normal(3, b, n, r)
    wrapper = flashinfer.mla.BatchMLAPagedAttentionWrapper(workspace(), backend="fa3")
    wrapper.plan(
        torch.arange(b + 1, dtype=torch.int32, device="cuda"),
        *(begin, order, torch.full((b,), length, dtype=torch.int32, device="cuda")),
        *(n, c, r, PAGE, False, scale, torch.bfloat16, torch.bfloat16),
    )

    def compared(out: Any) -> tuple[Any, Any]:
        held, turned = (x[order[: begin[1]].long()].flatten(0, 1) for x in (latent, rope))
        held, turned = held[:length].float(), turned[:length].float()
        scores = scale * (query[0].float() @ held.T + rotary[0].float() @ turned.T)
        return out[0], scores.softmax(-1) @ held

    return Call(wrapper.run, (query, rotary, latent, rope), compared)


# Products -----------------------------------------------------------------------------------------


def product(
    row: Row, function: Callable[..., Any], x: Any, weight: tuple[Any, ...], w: Any
) -> Call:
    """``x w^T`` from whatever stands for the weight, against `w` itself."""
    import torch

    rows = torch.linspace(0, row["tokens"] - 1, min(_COMPARED, row["tokens"])).long()
    return Call(function, (x, *weight), lambda out: (out[rows], x[rows].float() @ w.float().T))


def scaled_mm(row: Row) -> Call:
    """e4m3 on both sides, with a scale per token and per output, through cuBLAS or CUTLASS."""
    import torch

    m, k, n = (row[x] for x in ("tokens", "inputs", "outputs"))
    x, w = (normal(i, *s).to(torch.float8_e4m3fn) for i, s in enumerate(((m, k), (n, k))))
    scales = torch.ones(m, 1, device="cuda"), torch.ones(1, n, device="cuda")

    def multiply(x: Any, w: Any, of_token: Any, of_output: Any) -> Any:
        options = {"out_dtype": torch.bfloat16, "use_fast_accum": True}
        return torch._scaled_mm(x, w.t(), scale_a=of_token, scale_b=of_output, **options)

    return product(row, multiply, x, (w, *scales), w)


def int4(row: Row) -> tuple[Any, Any, Any, Any]:
    """Tokens in bfloat16, codes 0 to 15, a scale per group, and the weight that these stand for."""
    import torch

    m, k, n = (row[x] for x in ("tokens", "inputs", "outputs"))
    codes = torch.randint(16, (n, k), device="cuda", dtype=torch.uint8)
    scales = (0.5 + torch.rand(n, k // _GROUP, device="cuda")).to(torch.bfloat16) / 64
    w = (codes.float() - 8) * scales.float().repeat_interleave(_GROUP, 1)
    return normal(0, m, k), codes, scales, w


def tinygemm(row: Row) -> Call:
    import torch

    x, codes, scales, w = int4(row)
    packed = torch._convert_weight_to_int4pack(codes[:, ::2] << 4 | codes[:, 1::2], 8)
    both = torch.stack([scales, torch.zeros_like(scales)], -1).transpose(0, 1).contiguous()

    def multiply(x: Any, packed: Any, both: Any) -> Any:
        return torch._weight_int4pack_mm(x, packed, _GROUP, both)

    return product(row, multiply, x, (packed, both), w)


def gemlite(row: Row, kind: str) -> Call:
    import gemlite as package
    import torch

    # The settings that come with the package for an H100; it has none of an H200.
    package.load_config(str(Path(package.__file__).parent / "configs/h100.json"))
    x, codes, scales, w = int4(row)
    zeros = torch.full_like(scales, 8)
    layer = getattr(package.helper, kind)().from_weights(codes, scales, zeros)
    return product(row, lambda x, layer: layer(x), x, (layer,), w)


def bitsandbytes(row: Row) -> Call:
    import bitsandbytes as package

    w = normal(1, row["outputs"], row["inputs"])
    codes, state = package.functional.quantize_4bit(w, quant_type="nf4")
    x, stored = normal(0, row["tokens"], row["inputs"]), package.functional.dequantize_4bit
    held = stored(codes, state)
    return product(row, lambda x, *w: package.matmul_4bit(x, *w), x, (codes, state), held)


def grouped_mm(row: Row) -> Call:
    """Experts' gate and up in bfloat16, as many tokens for each."""
    import torch

    e, k = row["experts"], row["inputs"]
    each = row["tokens"] * row["top_k"] // e
    x, w = normal(0, e * each, k), normal(1, e, k, 2 * row["outputs"])
    ends = torch.arange(1, e + 1, dtype=torch.int32, device="cuda") * each

    def compared(out: Any) -> tuple[Any, Any]:
        return out[:_COMPARED], x[:_COMPARED].float() @ w[0].float()

    return Call(lambda x, w: torch._grouped_mm(x, w, offs=ends), (x, w), compared)


PEERS: dict[str, tuple[str, Callable[[Row], Call]]] = {
    "torch-flash": ("torch", lambda row: sdpa(row, "FLASH_ATTENTION")),
    "torch-cudnn": ("torch", lambda row: sdpa(row, "CUDNN_ATTENTION")),
    "torch-flex": ("torch", flex),
    "sageattention": ("sageattention", sage),
    "flashinfer-bf16": (
        "flashinfer-python",
        lambda row: flashinfer_decode(row, "bfloat16", True),
    ),
    "flashinfer-fp8": (
        "flashinfer-python",
        lambda row: flashinfer_decode(row, "float8_e4m3fn", True),
    ),
    "flashinfer-bf16-plain": (
        "flashinfer-python",
        lambda row: flashinfer_decode(row, "bfloat16", False),
    ),
    "flashinfer-fp8-plain": (
        "flashinfer-python",
        lambda row: flashinfer_decode(row, "float8_e4m3fn", False),
    ),
    "flashinfer-fa3": ("flashinfer-python", lambda row: flashinfer_prefill(row, "bfloat16")),
    "flashinfer-fa3-fp8": (
        "flashinfer-python",
        lambda row: flashinfer_prefill(row, "float8_e4m3fn"),
    ),
    "flashinfer-mla": ("flashinfer-python", flashinfer_latent),
    "torch-scaled-mm": ("torch", scaled_mm),
    "torch-int4": ("torch", tinygemm),
    "gemlite-a16w4": ("gemlite", lambda row: gemlite(row, "A16W4_HQQ_INT")),
    "gemlite-a8w4": ("gemlite", lambda row: gemlite(row, "A8W4_HQQ_INT_dynamic")),
    "bitsandbytes-nf4": ("bitsandbytes", bitsandbytes),
    "torch-grouped-mm": ("torch", grouped_mm),
}
"""By method: the package, and what makes a row's call."""


# Measuring ----------------------------------------------------------------------------------------


def _call(row: Row) -> tuple[str, Call]:
    """The package of a row and its call; raises NotImplementedError if it cannot be made here."""
    package, build = PEERS[row["method"]]
    try:
        import torch

        if not torch.cuda.is_available():
            raise NotImplementedError("torch's kernels need a GPU")
        return package, build(row)
    except ImportError as error:
        raise NotImplementedError(f"{package}: {error}") from error


def prepared(row: Row) -> tuple[Call, Row]:
    """A row's call, compiled, whose output is right; and what is known of it then."""
    package, call = _call(row)
    out = call.function(*call.arguments)
    got, want = (x.float() for x in call.compared(out))
    relative_l1 = float((got - want).abs().sum() / want.abs().sum())
    if not relative_l1 <= _WRONG:
        raise ArithmeticError(f"the output is wrong: its relative L1 error is {relative_l1}")
    version = f"{package} {importlib.metadata.version(package)}"
    return call, {"relative_l1": relative_l1, "version": version}


def rotated(arguments: tuple[Any, ...]) -> Iterator[tuple[Any, ...]]:
    """The arguments and as many copies as it takes to outgrow the L2 cache, in turn for ever."""
    import torch

    before = torch.cuda.memory_allocated()
    every = [arguments, copy.deepcopy(arguments)]
    size = max(1, torch.cuda.memory_allocated() - before)
    if size >= timing.ROTATION_BYTES:
        del every[1]
    else:
        while len(every) * size < timing.ROTATION_BYTES and len(every) < 64:
            every.append(copy.deepcopy(arguments))
    while True:
        yield from every


def timed(call: Call, repetitions: int | None) -> Row:
    """As `timing.measure` does: kernels' times, and the wall time of calls in a row."""
    import torch
    from torch.profiler import ProfilerActivity, profile

    sets = rotated(call.arguments)

    def wall(count: int) -> float:
        torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(count):
            call.function(*next(sets))
        torch.cuda.synchronize()
        return (time.perf_counter() - start) / count

    wall(2)
    time.sleep(0.2)
    count = repetitions or min(30, max(5, round(0.1 / wall(1))))
    wall_us = 1e6 * wall(count)
    with profile(activities=[ProfilerActivity.CUDA], acc_events=True) as profiler:
        wall(count)
    found = kernels(profiler.events())
    if len(found) < count:
        raise RuntimeError(f"torch's profiler saw {len(found)} kernels in {count} calls")
    us, spread = per_call([x for _, x in found], count)
    facts = {"us": us, "spread": spread, "wall_us": wall_us, "clock": "cupti"}
    names = list(dict.fromkeys(name[:80] for name, _ in found))[:8]
    return {**facts, "repetitions": count, "kernels": names}


def kernels(events: Any) -> list[tuple[str, float]]:
    """Names and microseconds of the kernels among a profiler's events, in order of their start."""
    found = [e for e in events if e.device_type.name == "CUDA" and not e.name.startswith("Mem")]
    found.sort(key=lambda e: e.time_range.start)
    return [(e.name, e.time_range.elapsed_us()) for e in found]


def per_call(times: list[float], count: int) -> tuple[float, float]:
    """Median over calls of the sum of a call's kernels, and the range of the middle half over it.

    Calls that launch unlike numbers of kernels share the whole time evenly.
    """
    each, rest = divmod(len(times), count)
    if rest:
        return sum(times) / count, 0.0
    sums = [sum(times[i * each : (i + 1) * each]) for i in range(count)]
    median = statistics.median(sums)
    quartiles = statistics.quantiles(sums, n=4) if count > 1 else [median] * 3
    return median, (quartiles[2] - quartiles[0]) / median


def _attempt(do: Callable[[], Any]) -> Any:
    """What came of it, or what a row says of the error that ended it; others go on."""
    try:
        return do()
    except Exception as error:
        if not isinstance(error, NotImplementedError):
            traceback.print_exc()
        return failure(error)


def _start_profiler() -> Row:
    """Once, before anything is timed: it takes a second."""
    import torch
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CUDA]):
        torch.zeros(1, device="cuda")
    return {}


def answer(asked: Row) -> Iterator[Row]:
    """Prepares all rows, beside other processes, and then measures them alone."""
    start, made = time.monotonic(), {}
    end = start + asked["seconds"]
    with timing.beside():
        _attempt(_start_profiler)
        for row in asked["rows"]:
            if time.monotonic() <= start + _PREPARING * asked["seconds"]:
                made[row["name"]] = _attempt(functools.partial(prepared, row))
    for row in asked["rows"]:
        found = made.pop(row["name"], None)
        if found is None or time.monotonic() > end:
            found = {"status": "not run", "reason": OUT_OF_TIME}
        elif isinstance(found, tuple):
            call, facts = found
            with timing.alone():
                taken = _attempt(functools.partial(timed, call, asked["repetitions"]))
            found = {"status": "ok", **facts, **taken}
        yield {"name": row["name"], **found}


def main() -> None:
    # What packages print goes elsewhere.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    for row in answer(json.load(sys.stdin)):
        print(json.dumps(row), file=answers, flush=True)


if __name__ == "__main__":
    main()
