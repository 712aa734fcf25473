"""What masks and biases cost: `python -m benchmarks.masks --out masks.json`, on a GPU.

`turbo_attention` with its default configuration and each of its masks, by the implementation that a
call without a name takes, by Triton's kernel and by plain JAX, against cuDNN, which has the same
mask as a bias in bfloat16 (``jax.nn.dot_product_attention(bias=...)``), forward and with the
backward pass. `docs/attention_options.md` shows the table.
"""

import functools
import time
from collections.abc import Callable, Collection, Iterator
from typing import Any

import jax
import jax.numpy as jnp

import turbojax as tj
from benchmarks import stored, tables
from benchmarks.machine import describe
from benchmarks.suite import Shown
from benchmarks.tables import Result, Row
from benchmarks.timing import measure

BATCH, TOKENS, HEADS, KV_HEADS, HEAD_DIM = 2, 8192, 16, 4, 128
METHODS = {"default": None, "triton": "triton", "xla": "xla", "cudnn": "cudnn"}
Attend = Callable[..., jax.Array]


def masks(tokens: int, heads: int) -> Iterator[tuple[str, bool, dict[str, Any]]]:
    """Names, whether the call is causal, and what it is given."""
    position = jnp.arange(tokens, dtype=jnp.int32)
    packed = jnp.tile(position // (tokens // 8), (BATCH, 1))
    # An image of 256 tokens begins each 1,024.
    images = jnp.tile(jnp.where(position % 1024 < 256, 1 + position // 1024, 0), (BATCH, 1))
    yield "causal", True, {}
    ids = {"query_segment_ids": packed, "key_value_segment_ids": packed}
    yield "causal, 8 packed sequences: segment ids", True, ids
    yield "causal, 8 packed sequences: bounds", True, {"key_bounds": tj.bounds.segments(packed)}
    prompts = jnp.full((BATCH,), tokens // 8, jnp.int32)
    yield (
        "prefix-LM, an eighth is prompt",
        False,
        {"key_bounds": tj.bounds.prefix_lm(prompts, tokens)},
    )
    yield "text with images", False, {"key_bounds": tj.bounds.image_blocks(images)}
    yield "none", False, {}
    for name, shape in (
        ("[1, N, T, S]", (1, heads, tokens, tokens)),
        ("[1, 1, T, S]", (1, 1, tokens, tokens)),
        ("[1, N, 1, S]", (1, heads, 1, tokens)),
    ):
        bias = jax.random.normal(jax.random.key(9), shape, jnp.bfloat16)
        yield f"causal, a bias {name}", True, {"bias": bias}


def as_bias(given: dict[str, Any], tokens: int) -> jax.Array | None:
    """The same mask for cuDNN: bfloat16 ``[B, 1, T, S]``, or the bias itself."""
    key = jnp.arange(tokens)[None, None]
    if "key_bounds" in given:
        start, end = (x[:, :, None] for x in given["key_bounds"])
        seen = (start <= key) & (key < end)
    elif "query_segment_ids" in given:
        ids = given["query_segment_ids"]
        seen = ids[:, :, None] == ids[:, None]
    else:
        return given.get("bias")
    return jnp.where(seen, 0.0, -1e30).astype(jnp.bfloat16)[:, None]


def tensors(tokens: int) -> tuple[jax.Array, ...]:
    """Query, key, value and the output's cotangent, bfloat16."""
    heads = HEADS, KV_HEADS, KV_HEADS, HEADS
    keys = jax.random.split(jax.random.key(0), 4)
    shapes = ((BATCH, tokens, n, HEAD_DIM) for n in heads)
    return tuple(
        jax.random.normal(key, shape, jnp.bfloat16) for key, shape in zip(keys, shapes, strict=True)
    )


def call_of(method: str, is_causal: bool, given: dict[str, Any], tokens: int) -> tuple[Attend, Any]:
    """What attends, of query, key, value and the mask's arrays; and these arrays."""
    if method == "cudnn":
        bias = as_bias(given, tokens)

        def exact(q: jax.Array, k: jax.Array, v: jax.Array, bias: jax.Array | None) -> jax.Array:
            return jax.nn.dot_product_attention(
                q, k, v, bias=bias, is_causal=is_causal, implementation="cudnn"
            )

        return exact, bias

    def attend(q: jax.Array, k: jax.Array, v: jax.Array, given: dict[str, Any]) -> jax.Array:
        return tj.turbo_attention(
            q, k, v, is_causal=is_causal, implementation=METHODS[method], **given
        )

    return attend, given


def with_gradient(
    attend: Attend,
    learns: bool,
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    d_out: jax.Array,
    given: Any,
) -> Any:
    """The output and the gradients of queries, keys, values and, where it `learns`, the bias."""
    if learns:
        out, pull = jax.vjp(attend, query, key, value, given)
    else:
        out, pull = jax.vjp(functools.partial(_beside, attend, given), query, key, value)
    return out, pull(d_out)


def _beside(attend: Attend, given: Any, *arrays: jax.Array) -> jax.Array:
    return attend(*arrays, given)


def microseconds(function: Callable[..., Any], *arrays: Any) -> float | str:
    try:
        return round(measure(jax.jit(function).lower(*arrays).compile(), arrays).microseconds, 1)
    except Exception as error:  # a row of the table: others go on
        return f"{type(error).__name__}: {str(error)[:300]}"


def rows(tokens: int, seconds: float, known: Collection[tuple[str, str]] = ()) -> Iterator[Row]:
    """One for each mask and method that is not known, while there is time."""
    started = time.monotonic()
    query, key, value, d_out = tensors(tokens)
    for name, is_causal, given in masks(tokens, HEADS):
        for method in METHODS:
            if (name, method) in known:
                continue
            if time.monotonic() - started > seconds:
                return
            attend, mask = call_of(method, is_causal, given, tokens)
            row: Row = {"mask": name, "method": method}
            row["forward_us"] = microseconds(attend, query, key, value, mask)
            if method != "triton":  # it has no gradient
                arrays = query, key, value, d_out, mask
                row["both_us"] = microseconds(
                    functools.partial(with_gradient, attend, False), *arrays
                )
                if "bias" in given:
                    row["bias_gradient_us"] = microseconds(
                        functools.partial(with_gradient, attend, True), *arrays
                    )
            yield row


HEADER = [
    *("mask", "forward, ms", "of cuDNN's speed", "by Triton, ms", "by plain JAX, ms"),
    *("and backward, ms", "of cuDNN's speed"),
]


def masks_table(name: str, result: Result) -> str:
    found: dict[str, dict[str, Row]] = {}
    for row in result["rows"]:
        found.setdefault(row["mask"], {})[row["method"]] = row
    lines = []
    for mask, methods in found.items():
        others = [_ms(methods.get(method, {}).get("forward_us")) for method in ("triton", "xla")]
        lines.append([mask, *_ours(methods, "forward_us"), *others, *_ours(methods, "both_us")])
        if "bias_gradient_us" in methods["default"]:
            lines.append(
                ["with the bias's gradient", *[""] * 4, *_ours(methods, "bias_gradient_us")]
            )
    shape = (
        f"{BATCH} x {TOKENS:,} tokens, {HEADS} heads on {KV_HEADS}, {HEAD_DIM} channels, bfloat16, "
        "`TurboConfig()`; cuDNN in bfloat16, with the mask as a bias."
    )
    return f"{tables.table(HEADER, lines)}\n\n{shape} {tables.source(name, result)}"


def _ours(methods: dict[str, Row], key: str) -> tuple[str, str]:
    ours, theirs = (methods.get(name, {}).get(key) for name in ("default", "cudnn"))
    known = isinstance(ours, float) and isinstance(theirs, float)
    return _ms(ours), tables.times(theirs / ours if known else None)


def _ms(us: float | str | None) -> str:
    return f"{us / 1e3:.2f}" if isinstance(us, float) else "-"


SHOWN = Shown(("masks",), {"masks": masks_table})


def main() -> None:
    parser = stored.parser("what masks and biases cost, on a GPU")
    parser.add_argument("--tokens", type=int, default=TOKENS, help="of a sequence")
    parser.add_argument("--seconds", type=float, default=500.0, help="begin no row after this time")
    parser.add_argument("--resume", action="store_true", help="keep the rows that --out holds")
    options = parser.parse_args()
    result: Result = {**describe(), "rows": []}
    if options.resume and (old := stored.previous(options.out, result)):
        result["rows"] = old["rows"]
    known = [(row["mask"], row["method"]) for row in result["rows"]]
    for row in rows(options.tokens, options.seconds, known):
        print(row, flush=True)
        result["rows"].append(row)
        stored.write(options.out, result)


if __name__ == "__main__":
    main()
