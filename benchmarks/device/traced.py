"""What calls of every kernel are traced to, as text: what changes of structure must not change.

`python -m benchmarks.device.traced --write FOLDER [PATTERN]` before a change writes the jaxpr of
every case into a folder, and `--compare FOLDER [PATTERN]` after it says which differ and where
first; it ends with 1 if any does. Cases are those of `registers`, kernels and all, as on an H100,
and public operations in plain JAX. Needs no GPU. Places in source files, addresses and private
names of functions, which moving code changes and compiled programs do not depend on, are left out.

Kernels in the language of lanes are functions of Python to a jaxpr, which does not show what they
do: `--code` with both adds the code of all Mosaic GPU kernels, which takes minutes instead of one.
"""

import argparse
import difflib
import functools
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

# The place of a kernel beside its name; of a function; what `repr` gives objects without one.
_PLACES = re.compile(r"( at )\S+:\d+|0x[0-9a-f]+")
_PRIVATE = re.compile(r"\bname=_\w+")
_SHOWN = 12


def normalized(text: str) -> str:
    """The text of a jaxpr without what depends on where code stands."""
    return _PRIVATE.sub("name=_", _PLACES.sub(r"\1", text))


def cases(*, code: bool = False) -> Iterator[tuple[str, Callable[[], str]]]:
    """Names, and what makes the text of each, with the code of Mosaic's kernels if asked for."""
    from benchmarks.device.registers import cases as compiled
    from benchmarks.device.sanitize import as_on_an_h100

    def on_an_h100(build: Callable[[], Any]) -> str:
        with as_on_an_h100():
            return _text(*build(), code=code)

    for name, build in compiled().items():
        yield name, functools.partial(on_an_h100, build)
    for name, (call, arguments) in plain().items():
        yield f"plain {name}", functools.partial(_text, call, arguments)


def plain() -> dict[str, tuple[Callable[..., Any], tuple[Any, ...]]]:
    """Public operations in plain JAX, and shapes for them: grouped queries, odd lengths."""
    import jax
    import jax.numpy as jnp

    import turbojax as tj

    batch, tokens, heads, kv_heads, dim = 2, 150, 4, 2, 64

    def shape(*sizes: int, dtype: Any = jnp.bfloat16) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(sizes, dtype)

    def xla(call: Callable[..., Any], **options: Any) -> Callable[..., Any]:
        return functools.partial(call, implementation="xla", **options)

    def with_gradient(call: Callable[..., Any]) -> Callable[..., Any]:
        def both(*arrays: Any) -> Any:
            out, pull = jax.vjp(call, *arrays)
            return out, pull(out)

        return both

    query = shape(batch, tokens, heads, dim)
    new = shape(batch, 1, kv_heads, dim)
    one = shape(batch, 1, heads, dim)
    keys = shape(batch, tokens, kv_heads, dim)
    levels = jnp.ones((batch, heads, 3, 3), jnp.int8)
    made: dict[str, tuple[Callable[..., Any], tuple[Any, ...]]] = {}
    for mode in ("int8_fp8", "fp8", "int8", "float"):
        attend = xla(tj.turbo_attention, config=tj.TurboConfig(mode=mode), is_causal=True)
        made[f"turbo_attention, {mode}"] = with_gradient(attend), (query, keys, keys)
    pooled = xla(tj.pooled_attention, levels=levels, block_q=64, block_kv=64)
    made["pooled_attention"] = with_gradient(pooled), (query, keys, keys)
    for bits in (4, 2):
        config = tj.TurboConfig(key_bits=bits, value_bits=bits)
        cache = jax.eval_shape(
            functools.partial(tj.init_cache, batch, 300, kv_heads, dim, config=config)
        )
        made[f"append, {bits} bits"] = xla(tj.append), (cache, new, new)
        made[f"decode, {bits} bits"] = xla(tj.decode), (one, cache)
        made[f"prefill, {bits} bits"] = xla(tj.prefill), (query, keys, keys, cache)
    tables, lengths = shape(batch, 4, dtype=jnp.int32), shape(batch, dtype=jnp.int32)
    for kind in ("auto", "fp8_e4m3", "int8", "int8_v4", "k8v4", "turbo4", "turbo_k3v2"):
        pool = jax.eval_shape(
            functools.partial(tj.init_paged_cache, 9, 64, kv_heads, dim, kv_dtype=kind)
        )
        where = tables, lengths
        made[f"paged.append, {kind}"] = xla(tj.paged.append), (pool, new, new, *where)
        made[f"paged_attention, {kind}"] = xla(tj.paged_attention), (one, pool, *where)
    weight = jax.eval_shape(tj.fireq.quantize_weight, shape(256, 128, dtype=jnp.float32))
    made["fireq.matmul"] = xla(tj.fireq.matmul), (shape(batch, tokens, 128), weight)
    return made


def _text(call: Callable[..., Any], arguments: tuple[Any, ...], *, code: bool = False) -> str:
    import jax

    traced = jax.jit(call).trace(*arguments)
    texts = [str(traced.jaxpr)]
    if code:
        from benchmarks._compat import mosaic_code

        with mosaic_code() as found:
            traced.lower(lowering_platforms=("cuda",))
        texts += found
    return normalized("\n".join(texts))


def path_of(folder: Path, name: str) -> Path:
    return folder / (re.sub(r"[^\w.-]+", "_", name) + ".txt")


def write(folder: Path, pattern: str, *, code: bool = False) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, make in cases(code=code):
        if re.search(pattern, name):
            path_of(folder, name).write_text(make(), encoding="utf-8")
            print("written:", name, flush=True)


def compare(folder: Path, pattern: str, *, code: bool = False) -> int:
    """Says which cases differ from a folder's texts, and how many."""
    differing = 0
    for name, make in cases(code=code):
        if not re.search(pattern, name):
            continue
        path = path_of(folder, name)
        before = path.read_text(encoding="utf-8") if path.exists() else ""
        lines = difflib.unified_diff(before.splitlines(), make().splitlines(), lineterm="", n=1)
        if shown := list(lines)[2:]:
            differing += 1
            print(f"differs: {name}", *shown[:_SHOWN], sep="\n  ", flush=True)
        else:
            print("equal:", name, flush=True)
    return differing


def main(given: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--write", type=Path, metavar="FOLDER")
    what.add_argument("--compare", type=Path, metavar="FOLDER")
    parser.add_argument("pattern", nargs="?", default="", help="regular expression on the names")
    parser.add_argument("--code", action="store_true", help="also the code of Mosaic GPU kernels")
    arguments = parser.parse_args(given)
    if arguments.write:
        write(arguments.write, arguments.pattern, code=arguments.code)
    elif differing := compare(arguments.compare, arguments.pattern, code=arguments.code):
        sys.exit(f"{differing} differ")


if __name__ == "__main__":
    main()
