"""What compressed caches cost on real text: bits per byte on the held-out modules.

`python -m benchmarks.cache_quality --out benchmarks/results/cache_quality.json`

Every window is prefilled to half of its length and then decoded byte by byte, fed the true
bytes, through each cache. The cost of a cache is what it adds to the bits of the first one, which
is in bfloat16 where it is ``exact``. Uncompressed pages, ``paged``, are in the model's dtype.

`--quick` is a small sample of the same: does everything run?
"""

import functools
import math
import sysconfig
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
from rich.progress import Progress

from benchmarks import stored, tables
from benchmarks.suite import Shown
from benchmarks.tables import Result
from turbojax import evaluation, models
from turbojax._environment import environment

DEFAULT_CACHES = (
    *("exact", "4bit", "3bit", "2/4bit", "2bit", "kv4", "k8v4"),
    *("turbo4", "fp8_e4m3", "fp8_e5m2"),
)
QUICK = {"context": 159, "per_file": 1}
BATCH = 16
"""Windows that run at once."""


def held_out_windows(context: int, per_file: int) -> dict[str, np.ndarray]:
    """Up to `per_file` windows ``[n, context + 1]`` of each held-out module here."""
    library = Path(sysconfig.get_path("stdlib"))
    files = {name: library / name for name in models.held_out_modules()}
    texts = {name: path.read_bytes() for name, path in files.items() if path.is_file()}
    return evaluation.windows(texts, context, per_file)


def mean_and_error(values: np.ndarray) -> tuple[float, float]:
    """The mean of the windows, and its standard error as if they were independent."""
    return float(values.mean()), float(values.std(ddof=1) / math.sqrt(len(values)))


def measure(
    context: int, per_file: int, caches: tuple[str, ...], dtype: Any, progress: Progress
) -> dict[str, Any]:
    """Bits per byte of every cache, in all, by position and by file."""
    model = models.unstack(models.load_transformer(dtype=dtype))
    cut = held_out_windows(context, per_file)
    tokens = np.concatenate(list(cut.values()))
    owners = np.repeat(list(cut), [len(w) for w in cut.values()])
    prompt = (context + 1) // 2
    middle = (tokens.shape[1] - prompt) // 2
    rows: dict[str, Any] = {}
    reference: np.ndarray | None = None
    first: np.ndarray | None = None
    sizes = {"prompt": prompt, "batch_size": BATCH}
    exact = evaluation.ExactRun(model, tokens, **sizes)
    for name in caches:
        task = progress.add_task(name, total=tokens[:, prompt:].size)
        # Of bfloat16 also where the model computes in float32: what caches are compared to.
        method = evaluation.method("bfloat16" if name == "exact" else name, model.config)
        advance = functools.partial(progress.advance, task)
        found = evaluation.score(model, tokens, method, **sizes, exact=exact, progress=advance)
        bits, choices = found.bits, found.choices
        reference = choices if reference is None else reference
        by_window = bits.mean(axis=1, dtype=np.float64)
        first = by_window if first is None else first
        mean, error = mean_and_error(by_window - first)
        rows[name] = {
            "bits_per_byte": float(by_window.mean()),
            "cost": mean,
            "cost_standard_error": error,
            "bits_per_byte_by_window": [round(float(x), 6) for x in by_window],
            "bits_per_byte_by_context": {
                f"{prompt}-{prompt + middle}": float(bits[:, :middle].mean()),
                f"{prompt + middle}-{tokens.shape[1]}": float(bits[:, middle:].mean()),
            },
            "bits_per_byte_by_file": {file: float(bits[owners == file].mean()) for file in cut},
            "same_greedy_choice": float(np.mean(choices == reference)),
            # To the exact cache in the model's dtype, in bits.
            "divergence": float(found.divergence.mean(dtype=np.float64)),
            "cache_bytes_per_sequence": found.cache_bytes,
        }
    return {
        "modules": len(cut),
        "windows": len(tokens),
        "decoded_bytes": int(tokens.shape[0] * (tokens.shape[1] - prompt)),
        "context": context,
        "prefilled": prompt,
        "dtype": jnp.dtype(dtype).name,
        "caches": rows,
    }


def main(arguments: Sequence[str] | None = None) -> None:
    parser = stored.parser(__doc__.splitlines()[0], required=False, quick=True)
    parser.add_argument("--context", type=int, default=4095, help="bytes predicted per window")
    parser.add_argument("--windows-per-file", type=int, default=4)
    parser.add_argument("--caches", default=",".join(DEFAULT_CACHES))
    parser.add_argument("--dtype", default="float32", choices=("float32", "bfloat16"))
    given = parser.parse_args(arguments)
    sizes = {"context": given.context, "per_file": given.windows_per_file}
    with Progress() as progress:
        result = measure(
            **(QUICK if given.quick else sizes),
            caches=tuple(given.caches.split(",")),
            dtype=given.dtype,
            progress=progress,
        )
    stored.save(given.out, {**environment(), **result})


def quality_table(name: str, report: Result) -> str:
    caches = report["caches"]
    base = caches["exact"]
    lines = []
    for label, row in caches.items():
        cost = row["bits_per_byte"] - base["bits_per_byte"]
        ratio = base["cache_bytes_per_sequence"] / row["cache_bytes_per_sequence"]
        lines.append(
            [
                label,
                f"{row['bits_per_byte']:.4f}",
                f"{cost:+.4f}",
                f"{row['same_greedy_choice']:.1%}",
                f"{ratio:.2f}x",
            ]
        )
    header = ["cache", "bits per byte", "cost", "same greedy byte", "smaller than exact"]
    note = (
        f"{report['decoded_bytes']:,} bytes of {report['windows']} windows, positions "
        f"{report['prefilled']} to {report['context'] + 1}, decoded one by one;"
    )
    return f"{tables.table(header, lines)}\n\n{note} {tables.source(name, report)}"


_PAGES = ("turbo4", "fp8_e4m3", "fp8_e5m2")


def pages_sentence(name: str, result: Result) -> str:
    """What each kind of page adds to the bits of a bfloat16 cache."""
    measured = any("cost" in result["caches"].get(kind, {}) for kind in _PAGES)
    start = "What a byte of held-out text costs the embedded model in bits, beyond a bfloat16 cache"
    if not measured:
        return f"{start}: not measured."
    costs = []
    for kind in _PAGES:
        row = result["caches"].get(kind, {})
        if "cost" in row:
            costs.append(f'{row["cost"]:+.4f} ± {row["cost_standard_error"]:.4f} with `"{kind}"`')
        else:
            costs.append(f'not measured with `"{kind}"`')
    return (
        f"{start}: {', '.join(costs)}. Means over {result['windows']} windows of "
        f"{result['modules']} modules of the standard library, the first {result['prefilled']:,} "
        "bytes of each in one piece and the others one by one, with their standard errors; "
        f"{result['device']}, jax {result['jax']}, {result['date']} (`{name}`)."
    )


SHOWN = Shown(("cache_quality",), {"quality": quality_table, "page costs": pages_sentence})
FORMATS = Shown(("format_quality",), {"format costs": quality_table})
"""Of pages whose keys and values are stored unlike each other, and those that they are made of."""


def demo_table(name: str, report: Result) -> str:
    settings = report["settings"]
    first = report["results"][0]
    lines = []
    for row in report["results"]:
        difference = row["bits_per_byte"] - first["bits_per_byte"]
        cost = "" if row is first else f" ({difference:+.4f})"
        lines.append(
            [
                row["name"],
                f"{row['bits_per_byte']:.4f}{cost}",
                f"{row['agreement']:.1%}",
                f"{row['nbytes']:,}",
                f"{row['compression_ratio']:.2f}x",
            ]
        )
    header = ["cache", "bits per byte", "same greedy byte", "cache bytes", "smaller than bf16"]
    note = (
        f"`{Path(settings['file']).name}`: {settings['prompt_bytes']} bytes prefilled, "
        f"{settings['new_bytes']} decoded;"
    )
    return f"{tables.table(header, lines)}\n\n{note} {tables.source(name, report)}"


DEMO = Shown(("demo",), {"demo": demo_table})


if __name__ == "__main__":
    main()
