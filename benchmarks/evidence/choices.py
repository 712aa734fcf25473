"""Which rows the tables have, by their labels: as first measured, and with today's defaults.

Rows of the embedded model keep the meaning that they had when they were measured first, see
`rows.spelled_out`; so its tables have labels of that time. Of every other model names mean what
they mean in `turbojax.evaluation.method` today, and its result says what the default was.
"""

import dataclasses
from collections.abc import Mapping, Sequence

from benchmarks.tables import Result

Methods = Mapping[str, str]
"""Names of methods by what a table calls them."""

PAPER = "mode=int8,softmax=sas"
"""TurboAttention's own products and softmax, where other rows have those of the default."""

SIZES = ((32, 32), (32, 64), (64, 32), (64, 64), (64, 128), (96, 96), (128, 64), (128, 128))
"""Tokens of a block of queries, and of one of keys."""

Versus = Sequence[tuple[Sequence[str], Sequence[str]]]


@dataclasses.dataclass(frozen=True)
class Choices:
    """The rows of the tables that depend on what the default is.

    Attributes:
      ours: methods of this library.
      baselines: methods for comparison; the paper compares with a residual of 64 tokens.
      pairs: which of ours are held against which baselines: those of about as many bits.
      not_drawn: words of labels that would lie upon others in the plot.
      newest: whose errors are shown by the tokens since a buffer of 64 was compressed.
      causes: where the cost of 4 bits comes from: the same codes, with other products and buffers.
      parts: FlashQ and SAS apart; None stands for SAS alone, which has no cache.
      blocks: methods by block sizes.
      about_blocks: what they have in common.
      int4: caches that meet INT4 weights; the last one is what others are held against.
    """

    ours: Methods
    baselines: Methods
    pairs: tuple[tuple[str, str], ...]
    not_drawn: Sequence[str]
    newest: Sequence[str]
    causes: Methods
    parts: Mapping[str, str | None]
    blocks: Methods
    about_blocks: str
    int4: Methods

    @classmethod
    def of(cls, *, pinned: bool) -> "Choices":
        """Of names that mean what they meant first, or what they mean today."""
        return _FIRST if pinned else _TODAY


def of_result(result: Result) -> Choices:
    """The rows of a result: it says what the default was where names were not pinned."""
    return Choices.of(pinned="default" not in result["settings"])


def _pairs(versus: Versus) -> tuple[tuple[str, str], ...]:
    return tuple((one, base) for ours, bases in versus for one in ours for base in bases)


# As first measured --------------------------------------------------------------------------------

_INT8, _EXACT = "4bit:mode=int8", "4bit:mode=float"


def _first_block(q: int, kv: int) -> str:
    if (q, kv) == (64, 64):
        return f"4bit:{PAPER}"  # the default's sizes
    sizes = f"block={q}" if q == kv else f"block_q={q},block_kv={kv},buffer_size={kv}"
    return f"4bit:{PAPER},{sizes}"


_FIRST = Choices(
    ours={
        "4 bits": "4bit",
        "4 bits, buffer of 128": "4bit:buffer_size=128",
        "4 bits, int8 and SAS": f"4bit:{PAPER}",
        "4 bits, int8": _INT8,
        "turbo4": "turbo4",
        "k8v4": "k8v4",
        "KV4": "kv4",
        "3 bits": "3bit",
        "2/4 bits": "2/4bit",
        "2/4 bits, int8 and SAS": f"2/4bit:{PAPER}",
        "turbo 3 bits": "turbo_k3v3",
        "2 bits": "2bit",
        "turbo 2 bits": "turbo_k2v2",
    },
    baselines={
        "INT8, token-wise": "int8",
        "e4m3": "e4m3",
        "KIVI 4": "kivi4",
        "GEAR-L 4": "gear4",
        "KIVI 4, residual 64": "kivi4:residual_length=64",
        "GEAR-L 4, residual 64": "gear4:residual_length=64",
        "INT4, token-wise": "int4",
        "KIVI 3": "kivi3",
        "GEAR-L 3": "gear3",
        "KIVI 3, residual 64": "kivi3:residual_length=64",
        "GEAR-L 3, residual 64": "gear3:residual_length=64",
        "KIVI 2": "kivi2",
        "GEAR-L 2": "gear2",
    },
    pairs=_pairs(
        (
            (("k8v4",), ("INT8, token-wise", "e4m3")),
            (
                (
                    "4 bits",
                    "4 bits, buffer of 128",
                    "4 bits, int8 and SAS",
                    "4 bits, int8",
                    "turbo4",
                    "KV4",
                ),
                (
                    "KIVI 4",
                    "GEAR-L 4",
                    "KIVI 4, residual 64",
                    "GEAR-L 4, residual 64",
                    "INT4, token-wise",
                ),
            ),
            (
                ("3 bits", "2/4 bits", "2/4 bits, int8 and SAS", "turbo 3 bits"),
                ("KIVI 3", "GEAR-L 3", "KIVI 3, residual 64", "GEAR-L 3, residual 64"),
            ),
            (("2 bits", "turbo 2 bits"), ("KIVI 2", "GEAR-L 2")),
        )
    ),
    not_drawn=("residual", "buffer", "2/4 bits, int8"),
    newest=("4 bits", "4 bits, buffer of 128", "KIVI 4", "KIVI 4, residual 64", "INT8, token-wise"),
    causes={
        "the default: e4m3 products in prompts, buffer of 64": "4bit",
        "buffer of 128": "4bit:buffer_size=128",
        "int8 products": _INT8,
        "int8 products, buffer of 128": f"{_INT8},buffer_size=128",
        "int8 products, buffer of 256": f"{_INT8},buffer_size=256",
        "int8 products, blocks of 32, buffer of 128": f"{_INT8},block_kv=32,buffer_size=128",
        "exact products": _EXACT,
        "exact products, buffer of 128": f"{_EXACT},buffer_size=128",
        "exact products, buffer of 256": f"{_EXACT},buffer_size=256",
    },
    parts={
        "FlashQ alone: 4 bits, int8 products": _INT8,
        "SAS alone: nothing rounded": None,
        "both: TurboAttention": f"4bit:{PAPER}",
        "4 bits, e4m3 products (our default)": "4bit",
        "the default with SAS": "4bit:softmax=sas",
    },
    blocks={f"({q}, {kv})": _first_block(q, kv) for q, kv in SIZES},
    about_blocks="4 bits with int8 products and SAS; the decode buffer is a block of keys.",
    int4={
        "4 bits": "4bit",
        "4 bits, buffer of 128": "4bit:buffer_size=128",
        "4 bits, int8 and SAS": f"4bit:{PAPER}",
        "KV4": "kv4",
        "turbo4": "turbo4",
        "KIVI 4": "kivi4",
    },
)

# With today's defaults ----------------------------------------------------------------------------


def _block(q: int, kv: int) -> str:
    if (q, kv) == (64, 64):
        return "4bit"
    return f"4bit:block={q}" if q == kv else f"4bit:block_q={q},block_kv={kv}"


_PUBLISHED = f"4bit:{PAPER},buffer_size=64,flush=all"
"""`TurboConfig.paper()`."""

_TODAY = Choices(
    ours={
        "4 bits": "4bit",
        "4 bits, buffer of 64": "4bit:buffer_size=64",
        "4 bits, int8 and SAS": f"4bit:{PAPER}",
        "4 bits, int8": _INT8,
        "turbo4": "turbo4",
        "k8v4": "k8v4",
        "KV4": "kv4",
        "pages, int8": "paged_int8",
        "pages, int8 and turbo4": "paged_int8_v4",
        "3 bits": "3bit",
        "4 and 2 bits": "k4v2",
        "2/4 bits": "2/4bit",
        "turbo 3 bits": "turbo_k3v3",
        "2 bits": "2bit",
        "turbo 2 bits": "turbo_k2v2",
    },
    baselines={
        "INT8, token-wise": "int8",
        "e4m3": "e4m3",
        "KIVI 4": "kivi4",
        "KIVI 4, residual 64": "kivi4:residual_length=64",
        "INT4, token-wise": "int4",
        "KIVI 3": "kivi3",
        "KIVI 2": "kivi2",
        "GEAR-L 4": "gear4",
    },
    pairs=_pairs(
        (
            (("pages, int8", "pages, int8 and turbo4", "k8v4"), ("INT8, token-wise", "e4m3")),
            (
                (
                    "4 bits",
                    "4 bits, buffer of 64",
                    "4 bits, int8 and SAS",
                    "4 bits, int8",
                    "turbo4",
                    "KV4",
                ),
                ("KIVI 4", "KIVI 4, residual 64", "GEAR-L 4", "INT4, token-wise"),
            ),
            (("3 bits", "4 and 2 bits", "2/4 bits", "turbo 3 bits"), ("KIVI 3",)),
            (("2 bits", "turbo 2 bits"), ("KIVI 2",)),
        )
    ),
    not_drawn=("residual", "buffer", "4 bits, int8"),
    newest=("4 bits", "4 bits, buffer of 64", "KIVI 4", "KIVI 4, residual 64", "INT8, token-wise"),
    causes={
        "the default: a first token, buffer of 128 that gives up its oldest": "4bit",
        "no first token": "4bit:first_tokens=0",
        "four first tokens": "4bit:first_tokens=4",
        "buffer of 128 that is emptied, no first token": "4bit:flush=all",
        "buffer of 64, no first token": "4bit:buffer_size=64",
        "buffer of 256": "4bit:buffer_size=256",
        "blocks of 32, buffer of 128": "4bit:block_kv=32,buffer_size=128",
        "e4m3 products in prompts": "4bit:mode=fp8",
        "int8 products": _INT8,
        "exact products": _EXACT,
    },
    parts={
        "FlashQ alone: 4 bits, int8 products": _INT8,
        "SAS alone: nothing rounded": None,
        "both": f"4bit:{PAPER}",
        "both, buffer of 64, no first token: TurboAttention": _PUBLISHED,
        "the default: 4 bits, int8 and e4m3 products": "4bit",
        "the default with SAS": "4bit:softmax=sas",
    },
    blocks={f"({q}, {kv})": _block(q, kv) for q, kv in SIZES},
    about_blocks="The default but for its blocks; the decode buffer is two blocks of keys.",
    int4={
        "4 bits": "4bit",
        "4 bits, buffer of 64": "4bit:buffer_size=64",
        "4 bits, int8 and SAS": f"4bit:{PAPER}",
        "KV4": "kv4",
        "turbo4": "turbo4",
        "pages, int8 and turbo4": "paged_int8_v4",
        "KIVI 4": "kivi4",
    },
)
