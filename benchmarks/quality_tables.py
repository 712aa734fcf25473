"""What pages cost on held-out text, as docs/paged.md says it: from the newest cache_quality result.

`python -m benchmarks.quality_tables` rewrites the sentence between its markers; `--check` only says
whether that would change anything. `python -m benchmarks report` does the same.
"""

import argparse
import sys
from typing import Any

from benchmarks import readme

PAGE = readme.ROOT / "docs" / "paged.md"
_KINDS = ("turbo4", "fp8_e4m3", "fp8_e5m2")


def pages_sentence(name: str, result: dict[str, Any]) -> str:
    """What each kind of page adds to the bits of a bfloat16 cache."""
    measured = any("cost" in result["caches"].get(kind, {}) for kind in _KINDS)
    start = "What a byte of held-out text costs the embedded model in bits, beyond a bfloat16 cache"
    if not measured:
        return f"{start}: not measured."
    costs = []
    for kind in _KINDS:
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


def filled(text: str) -> str:
    """The page with the sentence of the newest result."""
    newest = readme.latest("cache_quality")
    return readme.fill(text, {"page costs": lambda: pages_sentence(*newest)}, "docs/paged.md")


def main() -> None:
    """Rewrites docs/paged.md, or checks it."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--check", action="store_true", help="fail if the page is out of date")
    if not parser.parse_args().check:
        write()
    elif is_stale():
        sys.exit("docs/paged.md is out of date: run python -m benchmarks.quality_tables")


def is_stale() -> bool:
    """Whether `write` would change docs/paged.md."""
    text = PAGE.read_text(encoding="utf-8")
    return filled(text) != text


def write() -> None:
    """Rewrites the sentence of docs/paged.md."""
    PAGE.write_text(filled(PAGE.read_text(encoding="utf-8")), encoding="utf-8")


if __name__ == "__main__":
    main()
