"""What is compared, and what the verdict's tables call it."""

DECODE, PROMPT, TEXT = "verdict-decode", "verdict-prompt", "verdict-text"
"""The operations, as they begin the rows' names."""

BF16, FULL, FP8, KIVI = "exact", "cudnn-full", "fp8_e4m3", "kivi4"
"""Dense bfloat16; the same without lengths, so that all tokens are read; pages in e4m3; KIVI."""

METHODS = {
    BF16: "bf16, dense",
    FULL: "bf16, dense, cuDNN on all tokens",
    "paged": "bf16 pages",
    FP8: "fp8 pages, e4m3",
    "turbo4": "turbo4 pages",
    "paged_k8v4": "k8v4 pages",
    "k8v4": "k8v4",
    "kv4": "kv4",
    "4bit": "4bit",
    KIVI: "KIVI, 4 bits, plain JAX",
    "fp8_e4m3-triton": "fp8 pages, our kernel in Triton",
    "turbo4-triton": "turbo4 pages, our kernel in Triton",
}
"""Rows of a shape by their names, what others are compared with first. All but `FULL` are caches
that models take, some of them read by a kernel that is asked for."""

CACHES = tuple(name for name in METHODS if name != FULL and "-" not in name)
COMPRESSED = ("turbo4", "paged_k8v4", "k8v4", "kv4", "4bit")
"""Ours with fewer bits than fp8."""

TRITON = "-triton"
"""The end of a name whose cache is read by Triton's kernel, whatever else there is."""

# What rows are compared with, by the names of their families: the faster of two rows of one.
_FAMILIES = {
    BF16: "bf16",
    FULL: "bf16",
    "paged": "bf16-pages",
    FP8: "fp8-pages",
    f"{FP8}{TRITON}": "fp8-pages",
}
BASELINES = dict.fromkeys((DECODE, PROMPT), ("bf16", "bf16-pages", "fp8-pages"))
"""Families that rows of an operation are compared with."""


def family(method: str) -> str:
    return _FAMILIES.get(method, method)
