"""docs/quickstart.md: its examples run and print what they should."""

import re

import pytest

from tests.tools.docs_helpers import DOCS, examples, run

EXAMPLES = examples(DOCS / "quickstart.md")


@pytest.mark.slow
def test_cache_example():
    out = run(EXAMPLES[0])
    assert "[1001  641]" in out
    ratio = float(re.search(r"([\d.]+)x smaller", out).group(1))
    assert ratio > 4.5


@pytest.mark.optimized
@pytest.mark.slow
def test_model_example():
    assert len(run(EXAMPLES[1]).strip()) > 20


@pytest.mark.slow
def test_flax_example():
    assert run(EXAMPLES[2]) == "(2, 300, 512)\n[301 121] (2, 1, 512)\n"


@pytest.mark.slow
def test_pooled_example():
    shape, times = re.search(r"(\(.*\)) ([\d.]+) times less work", run(EXAMPLES[3])).groups()
    assert shape == "(1, 1024, 4, 64)"
    assert float(times) > 3


@pytest.mark.slow
def test_int4_example():
    shape, dtype, bits = re.search(r"(\(.*\)) (\w+) ([\d.]+) bits", run(EXAMPLES[4])).groups()
    assert (shape, dtype) == ("(2, 16, 512)", "bfloat16")
    # Codes, a byte of scale for every 128 of them, four bytes for every output.
    assert float(bits) == pytest.approx(4 + 8 / 128 + 32 * 2560 / (3 * 512 * 1024), abs=0.005)


@pytest.mark.slow
def test_paged_example():
    # The prompt's 15 full pages are shared; the last one is copied. 132 bytes per token and head.
    assert run(EXAMPLES[5]) == (
        f"(2, 1, 16, 128) 2002 tokens in 17 pages, {17 * 64 * 4 * 132:,} bytes\n"
    )


def test_there_are_no_other_examples():
    assert len(EXAMPLES) == 6
