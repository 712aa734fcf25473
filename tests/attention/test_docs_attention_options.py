"""Pages of the docs about attention: examples print what they say, figures are the record's."""

import contextlib
import io
import json
import re
from pathlib import Path

import pytest

from benchmarks import readme
from tests.tools.docs_helpers import DOCS, docs_text, examples, run
from turbojax.finetune.optimizer import default_promotion

PAGE = "attention_options.md"
ROWS = json.loads((readme.RESULTS / "models_tuning_2026-11-25.json").read_text(encoding="utf-8"))[
    "rows"
]


@pytest.mark.slow
def test_examples():
    names = {"__name__": "docs"}
    printed = [run(example, names).split("\n")[:-1] for example in examples(DOCS / PAGE)]
    parts = re.split(r"```python\n.*?```", (DOCS / PAGE).read_text(encoding="utf-8"), flags=re.S)
    said = [re.match(r"\s*It prints (.*?)\.\s", part, flags=re.S) for part in parts[1:]]
    assert [" and ".join(f"`{line}`" for line in lines) for lines in printed] == [
        " ".join(found.group(1).split()) for found in said
    ]


def of(subject, **fields):
    """The only row of a subject with these fields."""
    found = [
        r
        for r in ROWS
        if r["subject"] == subject and all(r.get(name) == x for name, x in fields.items())
    ]
    [row] = found
    return row["us"]


def test_prose_agrees_with_the_packed_rows():
    text = docs_text(PAGE)

    def line(name, what, packed, separate, whole, *, has_whole=True):
        times = [
            of("options of turbo_attention, time", case=case, what=what) if case else None
            for case in (
                packed,
                separate,
                whole if has_whole else None,
                separate and f"cudnn {separate}",
                f"cudnn {whole}",
            )
        ]
        shown = " | ".join("-" if us is None else f"{us:,.0f}" for us in times)
        assert f"| {name} | {shown} |" in text
        return times

    even = "8x1k packed", "16x1k separate", "8k causal"
    line("2 x 8 of 1,024, forward", "fwd", *even)
    packed, separate, *_ = line("forward and backward", "fwd+bwd", *even, has_whole=False)
    assert f"are {packed / separate:.2f} times as fast" in text
    uneven = "16k of 16 packed", None, "16k causal"
    line("16 of 118 to 3,209, forward", "fwd", *uneven)
    packed, _, whole, _, cudnn = line("forward and backward", "fwd+bwd", *uneven)
    assert f"{whole / packed:.2f} times less time than without" in text
    assert f"{cudnn / packed:.2f} times less than cuDNN" in text
    times = f"{packed / 1e3:.2f} ms, where the same tokens as one causal sequence take "
    times += f"{whole / 1e3:.2f} and cuDNN in bfloat16 {cudnn / 1e3:.2f}"
    assert times in docs_text("benchmarks/attention.md")


def test_prose_agrees_with_the_rows_of_sinks():
    text = docs_text(PAGE)
    subject = "sinks in decode, time"
    cudnn = of(subject, implementation="cudnn")
    assert f"cuDNN over dense bfloat16 takes {cudnn:.1f}" in text
    for cache, name in (("4bit", "4-bit cache"), ("pages turbo4", "turbo4 pages")):
        for implementation in ("mosaic_gpu", "triton"):
            shown = " | ".join(
                f"{of(subject, cache=cache, implementation=implementation, what=what):.1f}"
                for what in ("plain", "float32", "sinks")
            )
            assert f"| {name}, `{implementation}` | {shown} |" in text
    plain, sinks = (
        of(subject, cache="pages turbo4, 512 queries of one", what=what)
        for what in ("plain", "sinks")
    )
    assert f"512 queries of one, `mosaic_gpu` | {plain:.1f} | - | {sinks:.1f} |" in text


VIDEO_PAGE = DOCS / "video.md"


@pytest.mark.optimized
@pytest.mark.fuzz
def test_video_examples():
    names = {"__name__": "docs"}
    with default_promotion():  # optax relies on it
        printed = [run(example, names).strip() for example in examples(VIDEO_PAGE)]
    said = re.findall(r"It prints `(.*?)`[.:]", VIDEO_PAGE.read_text(encoding="utf-8"))
    assert len(printed) == len(said) == 3
    assert printed == said


LATENT_PAGE = (Path(__file__).parents[2] / "docs" / "latent.md").read_text(encoding="utf-8")


@pytest.mark.slow
def test_the_example_runs():
    (example,) = re.findall(r"```python\n(.*?)```", LATENT_PAGE, flags=re.DOTALL)
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        exec(compile(example, "docs/latent.md", "exec"), {"__name__": "docs"})
    assert out.getvalue().splitlines() == ["(2, 1, 16, 128) 388", "(2, 1, 16, 512) 644"]
    for name, size in (("turbo4", 388), ("fp8_e4m3", 644)):
        assert re.search(rf'"{name}".*\| {size} \|', LATENT_PAGE)
