"""What runs on one device and on several, and what was asked of it."""

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any

import jax

from benchmarks.suites.parallel import collectives, models, ops
from benchmarks.tables import Row

OPERATION = "parallel"


@dataclasses.dataclass(frozen=True)
class Group:
    """One piece of work, on one device and on more.

    Attributes:
      label: in the rows' names.
      way: how it is split, in words.
      work: measures it on so many devices.
      asked: times the speed of one device on two.
      facts: sizes, for the row.
      devices: numbers of devices, 1 first; all that there are, if not given.
    """

    label: str
    way: str
    work: Callable[[int], Row]
    asked: float | None = None
    facts: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    devices: tuple[int, ...] | None = None

    @property
    def cases(self) -> tuple[int, ...]:
        """Numbers of devices."""
        if self.devices is not None:
            return self.devices
        there = len(jax.devices())
        return tuple(n for n in (1, 2, 4, 8) if n <= max(there, 2))

    def name(self, devices: int) -> str:
        """``parallel/decode-batch/2``."""
        return f"{OPERATION}/{self.label}/{devices}"

    def measure(self, devices: int) -> Row:
        """A row's figures."""
        return self.work(devices)


def groups() -> list[Group]:
    """What was asked first."""
    return [
        _prefill(131072),
        _pooled(65536),
        *_sequence(loops=200),
        *_decode(batch=32, tokens=2**15, loops=100),
        *_collectives(),
        *_step("llama-3-8b", batch=16, tokens=8192),
        *_replicas("llama-3-8b"),
    ]


def quick_groups() -> list[Group]:
    """Tiny ones, for a CPU that pretends to be several devices."""
    return [
        *_decode(batch=8, tokens=128, loops=2),
        *_sequence(loops=2, lengths=(256,)),
        _prefill(1024),
        _pooled(1024),
        *_step("tiny", batch=8, tokens=64),
        *_replicas("tiny"),
        *_collectives((2**10,), loops=2),
    ]


def _decode(batch: int, tokens: int, loops: int) -> list[Group]:
    facts = {"batch": batch, "tokens": tokens}
    return [
        Group(
            f"decode-{split}/{name}",
            f"{split}, plain `jit`",
            functools.partial(ops.decode, name, split, batch, tokens, loops),
            asked=1.9 if name == "4bit" else None,
            facts={**facts, "cache": name},
        )
        # Under plain `jit` a pool of pages is one: its sequences cannot be split.
        for name, splits in (("4bit", ("batch", "heads")), ("turbo4", ("heads",)))
        for split in splits
    ]


def _sequence(loops: int, lengths: tuple[int, ...] = (2**19, 2**20, 2**17)) -> list[Group]:
    asked = {2**19: 1.55, 2**20: 1.75}
    return [
        Group(
            f"decode-sequence/{name}/{tokens // 1024}k",
            "tokens of one sequence",
            functools.partial(ops.decode_sequence, name, tokens, loops),
            asked=asked.get(tokens) if name == "4bit" else None,
            facts={"batch": 1, "tokens": tokens, "cache": name},
        )
        for name in ("4bit", "turbo4")
        for tokens in lengths
    ]


def _prefill(tokens: int) -> Group:
    return Group(
        f"prefill/{tokens // 1024}k",
        "tokens, zig-zag ring",
        functools.partial(ops.prefill, tokens),
        asked=1.85,
        facts={"batch": 1, "tokens": tokens},
    )


def _pooled(tokens: int) -> Group:
    return Group(
        f"pooled-training/{tokens // 1024}k",
        "tokens, zig-zag ring, forward and backward",
        functools.partial(ops.pooled_training, tokens),
        asked=1.7,
        facts={"batch": 1, "tokens": tokens},
    )


def _step(model: str, batch: int, tokens: int) -> list[Group]:
    asked = {"bf16": {"paged": 1.6, "turbo4": 1.45}, "int4": {}}
    return [
        Group(
            f"step/{weights}/{cache}",
            "heads and hidden sizes (tensor parallel)",
            functools.partial(models.step, model, weights, cache, batch, tokens),
            asked=asked[weights].get(cache),
            facts={
                "model": model,
                "batch": batch,
                "tokens": tokens,
                "weights": weights,
                "cache": cache,
            },
        )
        for weights, caches in (("bf16", ("paged", "turbo4")), ("int4", ("turbo4",)))
        for cache in caches
    ]


def _replicas(model: str) -> list[Group]:
    return [
        Group(
            f"engine/{how}",
            words,
            functools.partial(models.engine, model, how),
            asked=1.9 if how == "replicas" else None,
            facts={"model": model},
        )
        for how, words in (("replicas", "replicas"), ("tensor", "heads and hidden sizes"))
    ]


def _collectives(sizes: tuple[int, ...] = (2**14, 2**22, 2**29), loops: int = 100) -> list[Group]:
    return [
        Group(
            f"collective/{kind}/{size}",
            "nothing but the exchange",
            functools.partial(collectives.measure, kind, size, loops if size < 2**25 else 10),
            facts={"bytes": size, "kind": kind},
            devices=(2,),
        )
        for kind in collectives.KINDS
        for size in sizes
    ]
