"""What an installation has, and what is said where something is missing."""

import ast
import importlib.metadata
import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from typer.testing import CliRunner

import turbojax
from tests.training.interrupt_helpers import ROOT
from turbojax import _extras
from turbojax.app.main import app

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]


def _python(*arguments: str) -> subprocess.CompletedProcess:
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, *arguments]
    return subprocess.run(command, env=env, capture_output=True, text=True, check=False)


def test_a_plain_installation_has_the_command():
    assert PROJECT["scripts"] == {"turbojax": "turbojax.__main__:main"}
    assert set(_extras.COMMAND) <= set(PROJECT["dependencies"])


def test_messages_name_the_packages_of_the_extras():
    extras = PROJECT["optional-dependencies"]
    for name, packages in _extras.EXTRAS.items():
        assert [x for x in extras[name] if not x.startswith("turbojax[")] == list(packages)
    assert _extras.install("text") == "pip install 'tokenizers>=0.20' 'jinja2>=3.1.6'"


def test_no_text_says_to_install_a_package_that_no_index_has():
    paths = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "Makefile"]
    for folder in ("turbojax", "pallas_kernels", "training", "benchmarks", "docs", "colab"):
        for ending in ("py", "md", "ipynb"):
            paths += (ROOT / folder).rglob(f"*.{ending}")
    assert len(paths) > 200
    wrong = re.compile(r"pip install \S*?[\"'`\\]*turbojax")
    found = [str(path) for path in paths if wrong.search(path.read_text(encoding="utf-8"))]
    assert not found


def test_python_m_turbojax():
    done = _python("-m", "turbojax", "--version")
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == f"turbojax {turbojax.__version__}\n"


@pytest.mark.slow
def test_import_needs_no_package_of_the_command_and_lists_everything():
    code = (
        "import sys; sys.modules['typer'] = sys.modules['platformdirs'] = None\n"
        "import turbojax as tj\n"
        "assert 'turbojax.models' not in sys.modules and 'turbojax.flax' not in sys.modules\n"
        "assert {'models', 'flax', 'decode', '__version__', *tj.__all__} <= set(dir(tj))\n"
        "assert tj.models.load and tj.flax.attention_fn\n"
    )
    done = _python("-c", code)
    assert (done.returncode, done.stderr) == (0, "")


def test_every_package_that_is_imported_is_one_that_is_asked_for():
    """Not one that another package happens to bring: that changes with its versions."""
    asked_for = [PROJECT["dependencies"], *PROJECT["optional-dependencies"].values()]
    names = [re.match(r"[\w.-]+", one).group() for group in asked_for for one in group]
    declared = {name.lower().replace("_", "-") for name in names}
    found = importlib.metadata.packages_distributions()
    imported = re.compile(r"^ *(?:from|import) (\w+)", re.MULTILINE)
    for path in [x for folder in ("turbojax", "benchmarks", "tests") for x in _files(folder)]:
        names = set(imported.findall(path.read_text(encoding="utf-8")))
        for name in names - sys.stdlib_module_names:
            bringing = {x.lower().replace("_", "-") for x in found.get(name, ())}
            assert not bringing or bringing & declared, (path, name)


def _files(folder: str) -> list[Path]:
    return [x for x in (ROOT / folder).rglob("*.py") if "integrations" not in x.parts]


def test_only_the_command_imports_its_packages():
    packages = {"typer", "platformdirs"}
    for path in (ROOT / "turbojax").rglob("*.py"):
        text = path.read_text(encoding="utf-8")
        is_app = path.is_relative_to(ROOT / "turbojax/app")
        if is_app or not any(name in text for name in packages):
            continue
        for node in ast.walk(ast.parse(text)):
            names = [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            names += [x.name for x in node.names] if isinstance(node, ast.Import) else []
            assert not packages & {name.partition(".")[0] for name in names}, path


@pytest.mark.parametrize(
    ("arguments", "missing", "expected"),
    [
        (["demo", "--plot", "x.png"], "matplotlib", "--plot needs the package matplotlib: {demo}"),
        (
            ["levels", "--plot", "x.png"],
            "matplotlib",
            "--plot needs the package matplotlib: {demo}",
        ),
        (["compare", "a", "b", "--plot", "x.png"], "matplotlib", "--plot needs the package"),
        (["train", "--out", "x", "--plot", "x.png"], "matplotlib", "--plot needs the package"),
    ],
)
def test_what_is_missing_is_one_line(arguments, missing, expected, monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, missing, None)
    monkeypatch.chdir(tmp_path)
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 2
    (line,) = result.stderr.splitlines()
    demo = "pip install 'matplotlib>=3.9'"
    assert line.startswith(f"turbojax {arguments[0]}: {expected.format(demo=demo)}")
    assert line.endswith(demo)
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
def test_train_without_orbax():
    code = (
        "import sys; sys.modules['orbax'] = None\n"
        "sys.argv = ['turbojax', 'train', '--out', '/nonexistent/out']\n"
        "from turbojax.app.main import app; app()"
    )
    done = _python("-c", code)
    assert done.returncode == 2
    assert len(done.stderr.splitlines()) == 1
    assert done.stderr.startswith("turbojax train: ")
    assert "pip install 'optax>=0.2.8' 'orbax-checkpoint>=0.11'" in done.stderr


@pytest.mark.quick(slow=1)
@pytest.mark.parametrize("package", ["starlette", "uvicorn", "prometheus_client"])
def test_a_server_without_its_packages_says_what_to_install(package):
    code = f"import sys; sys.modules[{package!r}] = None\nimport turbojax.server\n"
    done = _python("-c", code)
    assert f"turbojax.server needs the package {package}: pip install 'starlette" in done.stderr
