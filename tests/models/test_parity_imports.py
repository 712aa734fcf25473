"""Who needs torch and transformers: tests that say so by name, and nothing of the package."""

import ast
from collections.abc import Iterator
from pathlib import Path

from tests.recordings import parity_recordings as recordings

ROOT = Path(__file__).resolve().parents[2]
REFERENCE = {"torch", "transformers"}
# They import the reference when they are imported.
MAKERS = {
    *("torch_helpers", "make_recordings"),
    *("make_packed_recordings", "make_image_recordings"),
}


def imports(tree: ast.AST) -> Iterator[str]:
    """All names in the paths of what a file imports, inside functions or not."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (name for alias in node.names for name in alias.name.split("."))
        elif isinstance(node, ast.ImportFrom) and not node.level:
            yield from (node.module or "").split(".")
            yield from (alias.name for alias in node.names)


def parsed(folder: str) -> dict[Path, ast.Module]:
    """The files that name what is looked for anywhere: to parse all of them takes seconds."""
    texts = {path: path.read_text("utf-8") for path in sorted((ROOT / folder).rglob("*.py"))}
    assert texts
    named = {path: x for path, x in texts.items() if any(n in x for n in REFERENCE | MAKERS)}
    return {path: ast.parse(text) for path, text in named.items()}


def test_the_package_does_without_the_reference():
    """But for the process in which peers written for PyTorch are timed."""
    for folder in ("turbojax", "pallas_kernels", "training", "benchmarks"):
        for path, tree in parsed(folder).items():
            if path.name != "torch_rows.py":
                assert not REFERENCE & set(imports(tree)), path


def test_only_live_tests_import_the_reference():
    """And only when they run: they are slow, and `make test` collects them without it."""
    live = []
    for path, tree in parsed("tests").items():
        if path.stem in MAKERS or not (REFERENCE | MAKERS) & set(imports(tree)):
            continue
        live.append(path)
        assert path.name.startswith("test_parity_live_"), path
        assert "pytestmark = pytest.mark.slow" in map(ast.unparse, tree.body), path
        outside = ast.Module([x for x in tree.body if isinstance(x, ast.Import | ast.ImportFrom)])
        assert not (REFERENCE | MAKERS) & set(imports(outside)), path
    assert len(live) > 3


def test_recorded_versions_are_those_of_the_constraints():
    """Whoever changes one there records anew."""
    lines = (Path(__file__).parents[2] / "constraints.txt").read_text(encoding="utf-8").lower()
    pinned = {line.partition(";")[0].strip() for line in lines.splitlines()}
    for file in ("models", "text"):
        versions = recordings.read(file)["versions"]
        assert versions.keys() == {"transformers", "torch", "tokenizers", "jinja2"}
        for package, version in versions.items():
            assert f"{package}=={version}" in pinned
