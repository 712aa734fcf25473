"""The shape of the project: directions of imports, sizes of files, names and versions."""

import ast
import dataclasses
import functools
import importlib
import importlib.util
import inspect
import re
import tomllib
from collections.abc import Iterator
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

import turbojax

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("turbojax", "pallas_kernels", "training", "benchmarks")
MAX_LINES = 800
# Files that hold one kernel, from its tiles to its launch, to be read top-down; no other is longer.
ONE_KERNEL = ("pallas_kernels/mosaic/hopper/attention.py",)


def python_files(*folders: str) -> list[Path]:
    return sorted(path for folder in folders for path in (ROOT / folder).rglob("*.py"))


def source_files() -> list[Path]:
    """Every Python file that is ours, wherever it lies."""
    folders = [
        path.name
        for path in ROOT.iterdir()
        if path.is_dir() and not path.name.startswith(".") and path.name not in ("build", "dist")
    ]
    return [path for path in python_files(*folders) if "site-packages" not in path.parts] + sorted(
        ROOT.glob("*.py")
    )


def module_name(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


MODULES = {module_name(path): path for path in python_files(*PACKAGES)}


def imported_names(name: str, tree: ast.AST) -> Iterator[str]:
    """Dotted names that a module imports, those inside functions included.

    `from a import b` counts as `a.b`, which `owner` takes for the module `a.b` or for `a`.
    """
    is_package = MODULES[name].name == "__init__.py"
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                anchor = name.split(".")
                up = node.level - is_package
                anchor = anchor[: len(anchor) - up]
                base = ".".join([*anchor, base] if base else anchor)
            yield from (f"{base}.{alias.name}" for alias in node.names)


def owner(imported: str) -> str | None:
    """The module of ours that an imported name lives in."""
    while imported and imported not in MODULES:
        imported = imported.rpartition(".")[0]
    return imported or None


@functools.cache
def import_graph() -> dict[str, set[str]]:
    graph = {}
    for name, path in MODULES.items():
        names = imported_names(name, ast.parse(path.read_text(encoding="utf-8")))
        graph[name] = {module for module in map(owner, names) if module} - {name}
    return graph


def component(module: str) -> str:
    """The part of the layout that a module belongs to.

    `turbojax.caches`, `training`, `benchmarks.tables`, `benchmarks.suites.paged`, ...
    """
    parts = module.split(".")
    depth = {"turbojax": 2, "training": 1, "benchmarks": 3 if "suites" in parts[1:2] else 2}
    return ".".join(parts[: depth.get(parts[0], len(parts))])


# Top-level packages, each of which imports nothing of those after it.
FLOORS = ("pallas_kernels", "turbojax", "training", "benchmarks")
# What suites are read by, and never read.
ABOVE_SUITES = (
    "benchmarks.catalogue",
    "benchmarks.report",
    "benchmarks.side_by_side",
    "benchmarks.__main__",
)


def cycle(graph: dict[str, set[str]]) -> list[str]:
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        return list(reversed(error.args[1]))
    return []


def test_modules_import_without_cycles():
    graph = import_graph()
    assert "turbojax" in graph
    assert graph["turbojax"], "the graph found no import of turbojax/__init__.py: it sees nothing"
    found = cycle(graph)
    assert not found, "import cycle: " + " -> ".join(found)


def test_packages_point_one_way():
    graph: dict[str, set[str]] = {}
    for module, targets in import_graph().items():
        arrows = graph.setdefault(component(module), set())
        arrows |= {component(target) for target in targets} - {component(module)}
    found = cycle(graph)
    assert not found, "packages point at each other: " + " -> ".join(found)
    assert {"training", "benchmarks.suites.paged", "benchmarks.measuring"} <= graph.keys()


def test_floors_rest_on_those_below():
    wrong = []
    for module, targets in import_graph().items():
        floor = FLOORS.index(module.partition(".")[0])
        for target in targets:
            upwards = FLOORS.index(target.partition(".")[0]) > floor
            sideways = module.startswith("benchmarks") and target.startswith("training")
            if upwards or sideways:
                wrong.append(f"{module} -> {target}")
    assert not wrong


def test_suites_know_neither_the_command_nor_the_catalogue():
    graph = import_graph()
    shared = {
        name
        for name in graph
        if name.startswith("benchmarks.") and component(name) not in ABOVE_SUITES
    }
    read = {name for name in shared if graph[name] & set(ABOVE_SUITES)}
    assert not read
    measuring = {
        t for name in graph if name.startswith("benchmarks.measuring") for t in graph[name]
    }
    assert not {target for target in measuring if target.startswith("benchmarks.suites.")}
    # Each suite is in the catalogue.
    suites = {component(name) for name in graph if name.startswith("benchmarks.suites.")}
    assert suites == {
        component(t) for t in graph["benchmarks.catalogue"] if t.startswith("benchmarks.suites.")
    }


def test_cycles_are_found():
    assert cycle({"a": {"b"}, "b": {"c"}, "c": {"a"}})
    assert not cycle({"a": {"b", "c"}, "b": {"c"}, "c": set()})


def test_kernels_import_nothing_from_turbojax():
    graph = import_graph()
    wrong = {
        module: sorted(target for target in graph[module] if target.startswith("turbojax"))
        for module in graph
        if module.startswith("pallas_kernels")
    }
    assert not any(wrong.values()), wrong


def test_private_modules_of_jax_are_used_in_one_place():
    private = "jax." + "_src"
    users = [
        str(path.relative_to(ROOT))
        for path in source_files()
        if private in path.read_text(encoding="utf-8")
    ]
    # Of benchmarks' peers: cuDNN's attention in e4m3, and to pages.
    assert users == ["benchmarks/_compat.py"]


def test_files_are_short():
    lengths = {
        str(path.relative_to(ROOT)): len(path.read_text(encoding="utf-8").splitlines())
        for path in source_files()
    }
    assert str(Path(__file__).relative_to(ROOT)) in lengths
    long = {name: lines for name, lines in lengths.items() if lines >= MAX_LINES}
    for kernel in ONE_KERNEL:
        del long[kernel]
    assert not long, f"{MAX_LINES} lines or more: {long}"


def test_all_lists_what_exists():
    names = turbojax.__all__
    assert len(set(names)) == len(names)
    missing = [name for name in names if not hasattr(turbojax, name)]
    assert not missing


@pytest.mark.parametrize("name", turbojax.__all__)
def test_public_name_is_documented(name):
    value = getattr(turbojax, name)
    if not (inspect.ismodule(value) or inspect.isclass(value) or callable(value)):
        return  # a constant such as __version__
    assert value.__doc__
    if not inspect.isclass(value):
        return
    # What dataclasses write when there is no docstring does not count.
    assert not (dataclasses.is_dataclass(value) and value.__doc__.startswith(f"{name}("))
    members = {
        member: getattr(item, "fget", item)
        for member, item in vars(value).items()
        if not member.startswith("_") and (inspect.isfunction(item) or isinstance(item, property))
    }
    bare = [member for member, item in members.items() if not item.__doc__]
    assert not bare, f"{name} has members without a docstring"


def test_version_is_that_of_the_project():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert turbojax.__version__ == project["version"]
    changelog = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    assert f"## {project['version']}" in changelog


def test_api_page_lists_every_public_name():
    page = (ROOT / "docs" / "api.md").read_text(encoding="utf-8")
    listed = set(re.findall(r"auto(?:class|function|data|module):: (\S+)", page))
    missing = []
    for name in turbojax.__all__:
        if name.startswith("__"):
            continue
        if inspect.ismodule(getattr(turbojax, name)):
            wanted = f"turbojax.{name}"
        else:
            wanted = name
        if not {wanted, f"turbojax.{name}"} & listed:
            missing.append(wanted)
    assert not missing, f"docs/api.md does not list {missing}"
    for name in listed:
        target = name if name.startswith("turbojax") else f"turbojax.{name}"
        parent, _, last = target.rpartition(".")
        found = not parent or hasattr(importlib.import_module(parent), last)
        # A module of extras, which `import turbojax` does not load.
        found = found or importlib.util.find_spec(target) is not None
        assert found, f"docs/api.md lists {name}, which does not exist"


def test_costs_on_the_numerics_page():
    page = (ROOT / "docs" / "numerics.md").read_text(encoding="utf-8")
    channels, block = 128, 64
    for codes, bits in {
        "4 bits": 4,
        "3 bits": 3,
        "half the heads 4 bits, half 2": 3,
        "2 bits": 2,
    }.items():
        cost = bits + 16 / block + 32 / (block * channels)
        assert f"| {codes} | {cost:.2f} | {16 / cost:.2f} times smaller |" in page
