"""What rows of the attention suites are, for tables and plots."""

from collections.abc import Iterable

from benchmarks.tables import Row

# What decodes, in the order of the tables, and what the columns are called.
DECODE_METHODS = {
    "turbo-4bit": "4-bit",
    "turbo-2/4bit": "2/4-bit",
    "turbo-3bit": "3-bit",
    "turbo-2bit": "2-bit",
    "kivi-4bit": "KIVI 4-bit",
    "pallas": "jax Pallas",
    "xla": "XLA",
}
PREFILL_MODES = ("int8", "int8_fp8", "fp8", "float")
# What our kernels' names begin with; what XLA does around them has other names.
_OUR_KERNELS = ("turbojax_", "attention_kernel")
# Those that quantize what a prefill attends to or a gradient multiplies, and write a cache.
QUANTIZING = (
    "turbojax_quantize",
    "turbojax_maxima",
    "turbojax_compress",
    "turbojax_gradient_rows",
)


def is_cudnn(row: Row) -> bool:
    """Whether a row is the baseline: cuDNN in bfloat16."""
    return row["method"].startswith("cudnn")


def mode_of(row: Row) -> str | None:
    """The mode of one of our prefills, or None: ``turbo-int8_fp8-sas2-128``."""
    parts = row["method"].split("-")
    return parts[1] if parts[0] == "turbo" and parts[1] in PREFILL_MODES else None


def softmax_of(row: Row) -> str:
    """The softmax of one of our prefills: ``exact``, ``sas`` or ``sas2``."""
    return row["method"].split("-")[2]


def alone(row: Row) -> float | None:
    """Microseconds of our kernels alone, or all of cuDNN's; None if neither ran.

    Not in it: quantizing the operands of prompts and writing their cache, and what XLA does before
    and after kernels, such as filling a new cache with zeros.
    """
    if is_cudnn(row):
        return row["us"]
    ours = [k for k in row["kernels"] if k["name"].startswith(_OUR_KERNELS)]
    if row["operation"] in ("prefill", "training"):
        ours = [k for k in ours if not k["name"].startswith(QUANTIZING)]
    found = [k["us"] for k in ours]
    return sum(found) if found else None


def prefill_variants(rows: Iterable[Row], *, short: bool = False) -> list[Row]:
    """Our fastest row of each mode, implementation and kind of softmax, or of each 8-bit mode."""
    best: dict[tuple[str, ...], Row] = {}
    for row in sorted(rows, key=lambda row: row["us"]):
        mode = mode_of(row)
        if mode is None or (short and mode == "float"):
            continue
        kind = () if short else (row["implementation"], softmax_of(row)[:3])
        best.setdefault((mode, *kind), row)
    return sorted(best.values(), key=lambda row: PREFILL_MODES.index(mode_of(row) or ""))


def variant_label(row: Row) -> str:
    """``fp8, jax_triton, exact, 128``."""
    return ", ".join((mode_of(row) or "", row["implementation"], *row["method"].split("-")[2:]))
