"""Calls that hand a state on, such as the caches of a decode step: compiled early, then timed."""

import concurrent.futures
import functools
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from benchmarks import timing
from benchmarks.suite import Rows, parted
from turbojax.caches import LayerCache, kind_of

Lower = Callable[[], jax.stages.Lowered]


def compile_side_by_side(lowerings: Iterable[Lower]) -> list[concurrent.futures.Future[Any]]:
    """Compiles side by side, and waits: nothing compiles while something is timed."""
    with concurrent.futures.ThreadPoolExecutor() as pool:
        return [pool.submit(lowered(lower)) for lower in lowerings]


def lowered(lower: Lower) -> Callable[[], Any]:
    """What compiles it; or what raises, when it is called, what the lowering raised."""
    try:
        return lower().compile
    except Exception as error:
        return functools.partial(_raise, error)


def _raise(error: Exception) -> None:
    raise error


Future = concurrent.futures.Future[Any]


def compile_groups(groups: Sequence[Sequence[Lower]]) -> list[list[Future]]:
    """Compiles what groups need: the first of each group alone, the others side by side.

    XLA times its products to choose among them, on a device that should do nothing else, and
    remembers the choice. So a group, whose members share their products, begins with one of them.
    """
    begun = time.monotonic()
    with (
        concurrent.futures.ThreadPoolExecutor() as others,
        concurrent.futures.ThreadPoolExecutor(max_workers=1) as firsts,
    ):
        found = []
        for group in groups:
            futures: list[Future] = []
            for lower in group:
                compile_it = lowered(lower)
                if not futures:
                    futures.append(firsts.submit(compile_it))
                else:
                    futures.append(others.submit(_after, futures[0], compile_it))
            found.append(futures)
    count = sum(map(len, found))
    seconds = time.monotonic() - begun
    print(f"compiled {count} functions in {seconds:.0f} s", file=sys.stderr, flush=True)
    return found


def compile_rows(
    rows: Rows, lowerings: Callable[[Any, Any], Sequence[Lower]]
) -> dict[tuple[Any, Any], list[Future]]:
    """What each row needs, compiled group by group; by group and case."""
    parts = list(parted(lambda group: group)(rows))
    wanted = [[(row, lower) for row in part for lower in lowerings(*row)] for part in parts]
    compiled: dict[tuple[Any, Any], list[Future]] = {}
    groups = compile_groups([[lower for _, lower in group] for group in wanted])
    for group, futures in zip(wanted, groups, strict=True):
        for (row, _), future in zip(group, futures, strict=True):
            compiled.setdefault(row, []).append(future)
    return compiled


def _after(first: Future, compile_it: Callable[[], Any]) -> Any:
    concurrent.futures.wait([first])
    return compile_it()


class Steps(timing.Rotation):
    """Calls ``compiled(fixed, state, inputs) -> (output, state)`` over and over."""

    def __init__(self, compiled: Callable[..., Any], fixed: Any, state: Any, inputs: Any) -> None:
        super().__init__(compiled, [(inputs,)])
        self._fixed = fixed
        self.state = state

    def __call__(self) -> Any:
        output, self.state = self._compiled(self._fixed, self.state, *next(self._sets))
        return output


@functools.partial(
    jax.jit,
    static_argnames=("count", "tokens", "kv_heads", "head_dim", "dtype"),
    donate_argnums=0,
)
def fill(
    cache: LayerCache,
    seed: jax.Array,
    first: jax.Array,
    *,
    count: int,
    tokens: int,
    kv_heads: int,
    head_dim: int,
    dtype: jnp.dtype,
) -> LayerCache:
    """`random_tokens` in `count` sequences of an empty cache."""
    sizes = {"tokens": tokens, "kv_heads": kv_heads, "head_dim": head_dim}
    k, v = random_tokens(seed, first, count=count, dtype=dtype, **sizes)
    kind = kind_of(cache)
    part = kind.take(cache, first, count)
    lengths = jnp.full(count, tokens, jnp.int32)
    return kind.put(cache, kind.store_prompt(part, k, v, lengths), first)


def random_tokens(
    seed: jax.Array,
    first: jax.Array,
    *,
    count: int,
    tokens: int,
    kv_heads: int,
    head_dim: int,
    dtype: jnp.dtype,
) -> tuple[jax.Array, jax.Array]:
    """Keys and values ``[count, tokens, K, H]``, the same ones for every kind of cache.

    Values have a mean of their own in every channel: so attention to many of them does not vanish,
    and a wrong output is seen in what a model makes of it.
    """
    offsets, key, value = jax.random.split(jax.random.key(seed), 3)
    shape = (count, tokens, kv_heads, head_dim)
    make = functools.partial(jax.random.normal, dtype=jnp.float32)
    means = make(offsets, (kv_heads, head_dim))[None, None]
    k = make(jax.random.fold_in(key, first), shape).astype(dtype)
    v = (make(jax.random.fold_in(value, first), shape) + means).astype(dtype)
    return k, v


def difference(got: jax.Array, want: jax.Array) -> float:
    got, want = got.astype(jnp.float32), want.astype(jnp.float32)
    if not jnp.all(jnp.isfinite(got)):
        raise ArithmeticError("the output is not finite")
    return float(jnp.linalg.norm(got - want) / jnp.linalg.norm(want))
