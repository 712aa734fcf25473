"""The notebooks in colab/: they run from top to bottom, draw, and are committed as they ran."""

import ast
import functools
import importlib
import os
import re
import subprocess
import sys
from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient

ROOT = Path(__file__).resolve().parents[2]
NOTEBOOKS = sorted((ROOT / "colab").glob("*.ipynb"))
NAMES = (
    "01_quickstart",
    "02_pooled_training",
    "03_int4_fp8",
    "04_paged_turbo4",
    "05_your_checkpoint",
    "06_packed_finetuning",
)
SECONDS = 600  # a cell, while other tests run beside it
# Folders of one machine: an output that names one came from somewhere else than it should say.
MACHINE = re.compile(r"/(?:home|root|work|tmp|Users|usr|opt|var)/\w")


@pytest.fixture(params=NOTEBOOKS, ids=lambda path: path.stem)
def notebook(request) -> nbformat.NotebookNode:
    return nbformat.read(request.param, as_version=4)


def _code(notebook):
    return [cell for cell in notebook.cells if cell.cell_type == "code"]


def _outputs(notebook):
    return [output for cell in _code(notebook) for output in cell.outputs]


def _pictures(notebook):
    return [x for x in _outputs(notebook) if "image/png" in x.get("data", {})]


def _text(notebook):
    streams = [x.text for x in _outputs(notebook) if x.output_type == "stream"]
    results = [str(x.data.get("text/plain")) for x in _outputs(notebook) if "data" in x]
    return "\n".join(streams + results)


def _assert_ran(notebook):
    errors = [x for x in _outputs(notebook) if x.output_type == "error"]
    assert not errors, errors[0].traceback
    counts = [cell.execution_count for cell in _code(notebook)]
    assert counts == list(range(1, len(counts) + 1)), "cells must have run once, in order"
    assert len(_pictures(notebook)) >= 3
    warnings = [x.text for x in _outputs(notebook) if x.get("name") == "stderr"]
    assert not warnings


def test_all_are_here():
    assert tuple(path.stem for path in NOTEBOOKS) == NAMES


def _tier(path):
    # One that takes under a minute belongs to `make test-slow`.
    return pytest.mark.slow if path.stem == "03_int4_fp8" else pytest.mark.fuzz


@pytest.mark.optimized
@pytest.mark.parametrize(
    "notebook",
    [pytest.param(path, marks=_tier(path), id=path.stem) for path in NOTEBOOKS],
    indirect=True,
)
def test_it_runs_from_top_to_bottom(notebook, tmp_path, monkeypatch):
    _run(notebook, tmp_path, monkeypatch)
    _assert_ran(notebook)


@pytest.mark.optimized
@pytest.mark.fuzz
def test_it_runs_as_on_a_t4(notebook, tmp_path, monkeypatch):
    """In float16, as if the CPU were a GPU of that capability: without bfloat16 and kernels."""
    pretence = "from turbojax import _device\n_device.gpu_compute_capability = lambda: 7.5"
    notebook.cells.insert(2, nbformat.v4.new_code_cell(pretence))
    _run(notebook, tmp_path, monkeypatch)
    _assert_ran(notebook)
    said = _text(notebook)
    assert "(compute capability 7.5): no kernels and no bfloat16 units" in said
    assert not re.search(r"\b(nan|inf)\b", said)


def _run(notebook, tmp_path, monkeypatch):
    """Runs all cells in a process of their own, on the CPU, without the outputs they had."""
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")
    # The kernel is a process of its own, and finds turbojax as it is here.
    paths = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(paths))
    # With fonts that nobody else looked for: what lacks some of them warns.
    monkeypatch.setenv("MPLCONFIGDIR", str(tmp_path / "matplotlib"))
    subprocess.run([sys.executable, "-c", "import matplotlib.font_manager"], check=True)
    for cell in _code(notebook):
        cell.outputs, cell.execution_count = [], None
    NotebookClient(
        notebook,
        timeout=SECONDS,
        kernel_name="python3",
        resources={"metadata": {"path": str(tmp_path)}},
    ).execute()


def test_it_says_what_the_gpu_runs_and_asks_it_for_its_dtype(notebook):
    """No cell names bfloat16 as a dtype, which a T4 lacks."""
    code = [cell.source for cell in _code(notebook)]
    assert "print(tj.device.kernels())" in code[1]
    assert not [x for x in code if "jnp.bfloat16" in x or 'dtype="bfloat16"' in x]


def test_what_it_takes_from_turbojax_is_there(notebook):
    """Quick, where running a notebook is left to `make test-slow` and `make test-fuzz`."""
    lines = "\n".join(cell.source for cell in _code(notebook)).splitlines()
    code = ast.parse("\n".join(line for line in lines if not line.lstrip().startswith(("%", "!"))))
    names = set()
    for node in ast.walk(code):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("turbojax"):
            names |= {f"{node.module}.{alias.name}" for alias in node.names}
        elif isinstance(node, ast.Attribute) and ast.unparse(node).startswith("tj."):
            names.add(ast.unparse(node).replace("tj.", "turbojax.", 1))
    names = {name for name in names if re.fullmatch(r"[\w.]+", name)}
    assert names
    assert [name for name in sorted(names) if not _is_there(name)] == []


def _is_there(name):
    module, *rest = name.split(".")
    try:
        functools.reduce(_attribute, rest, importlib.import_module(module))
    except (AttributeError, ImportError):
        return False
    return True


def _attribute(found, name):
    """An attribute, or a module that nobody imported yet."""
    if not hasattr(found, name) and hasattr(found, "__path__"):
        importlib.import_module(f"{found.__name__}.{name}")
    return getattr(found, name)


def test_it_is_valid_and_opens_anywhere(notebook):
    nbformat.validate(notebook)
    ids = [cell.id for cell in notebook.cells]
    assert len(set(ids)) == len(ids)
    assert notebook.metadata.kernelspec.name == "python3"
    assert notebook.cells[0].cell_type == "markdown"
    assert notebook.cells[0].source.startswith("# ")


def test_it_installs_first(notebook, tmp_path):
    first = _code(notebook)[0].source
    assert "pip" in first
    assert "REPO_URL" in first
    # Where turbojax is installed the cell does nothing.
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    options = {"cwd": tmp_path, "env": environment, "capture_output": True, "text": True}
    done = subprocess.run([sys.executable, "-c", first], check=True, **options)
    assert not done.stdout


# The cell in a place without turbojax, with a pip that only writes down what it was asked for.
STUB = """
import importlib.machinery, importlib.util, subprocess, sys
find_spec = importlib.util.find_spec
importlib.util.find_spec = lambda name: {found}
subprocess.run = lambda command, **options: print(*command[1:], options)
"""
MISSING = "None if name == 'turbojax' else find_spec(name)"
# As Python finds a folder of this name that is no package.
FOLDER = "importlib.machinery.ModuleSpec(name, None) if name == 'turbojax' else find_spec(name)"


def _install(notebook, folder, found=MISSING, url=""):
    cell = _code(notebook)[0].source.replace('REPO_URL = ""', f'REPO_URL = "{url}"')
    code = STUB.replace("{found}", found) + cell.replace('which("nvidia-smi")', 'which("no-smi")')
    return subprocess.run(
        [sys.executable, "-c", code], check=False, cwd=folder, capture_output=True, text=True
    )


@pytest.mark.parametrize("place", ["in", "beside", "deep"])
@pytest.mark.parametrize("found", [MISSING, FOLDER], ids=["nothing", "a folder"])
def test_it_installs_from_a_clone(place, found, tmp_path):
    notebook = nbformat.read(NOTEBOOKS[0], as_version=4)
    clone = tmp_path / "a place" / "turbojax"
    (clone / "colab" / "deep").mkdir(parents=True)
    (clone / "pyproject.toml").write_text((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    (clone.parent / "another").mkdir()
    (clone.parent / "another" / "pyproject.toml").write_text('[project]\nname = "another"\n')
    folder = {"in": clone / "colab", "beside": clone.parent, "deep": clone / "colab" / "deep"}
    done = _install(notebook, folder[place], found)
    assert done.returncode == 0, done.stderr
    wanted = f"-m pip install --quiet turbojax[demo] @ {clone.as_uri()} {{'check': True}}\n"
    assert done.stdout == wanted
    # What is asked for counts more than what is there.
    done = _install(notebook, folder[place], found, "https://example.com/turbojax")
    assert "turbojax[demo] @ git+https://example.com/turbojax {" in done.stdout


@pytest.mark.parametrize("found", [MISSING, FOLDER], ids=["nothing", "a folder"])
def test_without_a_clone_it_says_what_to_do(notebook, found, tmp_path):
    (tmp_path / "turbojax").mkdir()
    done = _install(notebook, tmp_path, found)
    assert done.returncode
    assert not done.stdout
    assert "set REPO_URL above" in done.stderr.splitlines()[-1]


def test_the_install_cells_differ_in_their_extras_alone():
    cells = [_code(nbformat.read(path, as_version=4))[0].source for path in NOTEBOOKS]
    extras = [re.search(r'^EXTRAS = "([a-z,]+)"$', cell, re.MULTILINE).group(1) for cell in cells]
    plain = {cell.replace(f'"{x}"', '""') for cell, x in zip(cells, extras, strict=True)}
    assert len(plain) == 1
    project = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    for name in {name for x in extras for name in x.split(",")}:
        assert re.search(rf"^{name} = \[", project, re.MULTILINE)


def test_it_is_committed_as_it_ran_on_a_gpu(notebook):
    _assert_ran(notebook)
    assert "NVIDIA" in _text(notebook)


def test_its_outputs_name_no_folder_of_a_machine(notebook):
    found = MACHINE.findall(_text(notebook))
    assert not found
