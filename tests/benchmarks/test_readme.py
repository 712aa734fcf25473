"""README.md: its example runs, its figures are those of the results, its links lead somewhere."""

import json
import re

import pytest

from benchmarks import readme, summary
from tests.tools.docs_helpers import DOCS, ROOT, examples, run

README = (ROOT / "README.md").read_text(encoding="utf-8")


@pytest.mark.slow
def test_the_example():
    [example] = examples(ROOT / "README.md")
    out = run(example)
    assert "[1001  641]" in out
    ratio = float(re.search(r"([\d.]+)x smaller", out).group(1))
    assert 3.5 < ratio < 4


def test_it_is_one_page():
    assert len(README.splitlines()) <= 150


def test_every_example_of_the_docs_is_run():
    """A page with examples has a test that runs them; of other packages, with those packages."""
    pages = {path.relative_to(DOCS).as_posix() for path in DOCS.rglob("*.md") if examples(path)}
    tested = {"attention_options.md", "flax.md", "latent.md", "lora.md", "models.md"}
    tested |= {"evaluation.md", "paged.md", "parallel.md", "quickstart.md", "serving.md"}
    tested |= {"images.md", "transforms.md", "video.md", "your_trainer.md"}
    others = {page for page in pages if page.startswith("integrations/")}
    assert {page for page in pages - others if not page.startswith("_build")} == tested
    for page in others:
        name = page.removeprefix("integrations/").removesuffix(".md")
        assert (ROOT / "tests/integrations" / f"test_{name}.py").exists()
    tests = "".join(
        x.read_text(encoding="utf-8") for x in (ROOT / "tests").glob("*/test_docs_*.py")
    )
    for page in tested:
        assert page in tests


@pytest.mark.parametrize(
    "path",
    [
        path
        for path in (*ROOT.glob("*.md"), ROOT / "benchmarks/README.md", *DOCS.rglob("*.md"))
        if "_build" not in path.parts
    ],
    ids=lambda path: path.relative_to(ROOT).as_posix(),
)
def test_links_lead_to_files(path):
    text = path.read_text(encoding="utf-8")
    links = re.findall(r"\]\(([^)#\s]+)[^)]*\)", re.sub(r"```.*?```", "", text, flags=re.DOTALL))
    local = [link for link in links if not re.match(r"[a-z]+:", link)]
    assert [link for link in local if not (path.parent / link).exists()] == []
    pages = re.findall(r"\{doc\}`([^`<]+)`", text)
    assert [page for page in pages if not (path.parent / f"{page}.md").exists()] == []


def test_tables_are_those_of_the_results():
    assert readme.fill(README) == README, "run python -m benchmarks report"
    assert set(readme.active()) == set(readme.TABLES)


def test_a_missing_marker_is_named():
    with pytest.raises(ValueError, match="<!-- figures table -->"):
        readme.fill("no markers")


def test_figures_need_their_results(tmp_path, monkeypatch):
    monkeypatch.setattr(readme, "RESULTS", tmp_path)
    assert set(readme.active()) == {"gpu tests"}


def test_the_last_run_of_the_gpu_tests(tmp_path, monkeypatch):
    monkeypatch.setattr(readme, "RESULTS", tmp_path)
    assert readme.gpu_tests_line() == "No run of the GPU tests is recorded yet."
    record = {
        "date": "2000-01-02",
        "device": "a device",
        "driver": "1.2",
        "jax": "0.1",
        "commit": "0123456789abcdef",
        "passed": 1234,
        "failed": 1,
        "skipped": 2,
        "seconds": 420.0,
        "workers": 16,
    }
    (tmp_path / "gpu_tests_2000-01-01.json").write_text("{}")
    (tmp_path / "gpu_tests_2000-01-02.json").write_text(json.dumps(record))
    assert readme.gpu_tests_line() == (
        "`make test-gpu`: 1,234 passed, 1 failed, 2 skipped, in 7.0 minutes with 16 processes "
        "(a device, driver 1.2, jax 0.1, 2000-01-02, commit 0123456789: "
        "[gpu_tests_2000-01-02.json](benchmarks/results/gpu_tests_2000-01-02.json))."
    )
    for commit, shown in (("0123456789ab, changed", "0123456789 with changes"), (None, "unknown")):
        (tmp_path / "gpu_tests_2000-01-03.json").write_text(
            json.dumps({**record, "commit": commit})
        )
        assert f"commit {shown}: [gpu" in readme.gpu_tests_line()
    of_parts = {**record, "of": 1300, "calls": ["some", "the others"]}
    (tmp_path / "gpu_tests_all_2000-01-01.json").write_text(json.dumps(of_parts))
    (tmp_path / "gpu_tests_several_2000-01-01.json").write_text(json.dumps(record))
    tiers = readme.gpu_tests_line().split("; ")
    assert [tier.partition(":")[0] for tier in tiers] == [
        "`make test-gpu`",
        "`make test-gpus`",
        "`make test-gpu-all`",
    ]
    assert ": 1,234 of 1,300 passed, 1 failed" in tiers[2]
    assert "commit 0123456789 and before, in 2 calls: [gpu_tests_all_2000" in tiers[2]


def test_a_figure_that_was_not_measured_is_named(tmp_path):
    figures = summary.Figures(tmp_path)
    with pytest.raises(FileNotFoundError, match="no result called hopper"):
        figures.row("hopper", "decode/x")
    rows = [{"name": "decode/x", "status": "failed", "reason": "no memory"}]
    (tmp_path / "hopper_2000-01-01.json").write_text(json.dumps({"rows": rows}))
    for name in ("decode/x", "decode/y"):
        with pytest.raises(ValueError, match=f"called hopper has no figures of {name}"):
            figures.row("hopper", name)
