"""Draws the house: which room imports which, from the imports that the code holds.

`docs/conf.py` calls it, so that the drawing in the docs is that of the code they are built from. By
hand: ``python docs/house.py house.svg``.
"""

import ast
import functools
import sys
from collections.abc import Iterator, Mapping
from graphlib import TopologicalSorter
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
Arrows = Mapping[str, set[str]]
"""The rooms that each room imports from."""

LEAVES = "leaves"
_FRONTS = ("turbojax.fireq", "turbojax.k8v4", "turbojax.paged", "turbojax.quantizers")
"""Public names of what stands in several rooms."""
_BESIDE = ("turbojax", "turbojax.__init__", "turbojax.__main__")
_GROUPS = {
    "app": "#f6d6ad",
    "training": "#f6d6ad",
    "benchmarks": "#f6d6ad",
    "pallas_kernels": "#cfe3f7",
}
_OUTSIDE = ("benchmarks", "training", "pallas_kernels")
_PLAIN = "#e9ecef"
_EDGE = 0.19
"""From the middle of a room to its lower or upper edge, in floors."""


def room(module: str) -> str:
    """The room that a module stands in: `kv`, `leaves`, `pallas_kernels.triton`, ..."""
    parts = module.split(".")
    if parts[0] == "pallas_kernels":
        folder = (ROOT / "pallas_kernels" / parts[1]).is_dir() if len(parts) > 1 else False
        return ".".join(parts[:2]) if folder else "pallas_kernels"
    if parts[0] != "turbojax":
        return parts[0]
    if len(parts) > 1 and (ROOT / "turbojax" / parts[1]).is_dir():
        return parts[1]
    return LEAVES


@functools.cache
def rooms() -> Arrows:
    """Who imports from whom; inside a room does not count, nor does `turbojax` itself."""
    arrows: dict[str, set[str]] = {}
    for name, path in _modules().items():
        if name in (*_BESIDE, *_FRONTS):
            continue
        targets = arrows.setdefault(room(name), set())
        for imported in _imports(path):
            found = _owner(imported)
            if found and found not in ("turbojax", *_FRONTS):
                targets.add(room(found))
    arrows = {name: targets - {name} for name, targets in sorted(arrows.items())}
    used = set().union(*arrows.values())
    return {name: targets for name, targets in arrows.items() if targets or name in used}


def floors(arrows: Arrows) -> list[list[str]]:
    """Rooms from the ground up: each stands above all that it imports from.

    Raises:
      graphlib.CycleError: if rooms import from each other.
    """
    height: dict[str, int] = {}
    for name in TopologicalSorter(arrows).static_order():
        height[name] = 1 + max((height[below] for below in arrows.get(name, ())), default=-1)
    return [
        sorted(name for name in height if height[name] == floor)
        for floor in range(max(height.values()) + 1)
    ]


def direct(arrows: Arrows) -> dict[str, set[str]]:
    """The arrows that do not follow from others."""

    def reached(name: str) -> set[str]:
        return set().union(arrows.get(name, set()), *(reached(x) for x in arrows.get(name, ())))

    return {
        name: {x for x in below if not any(x in reached(other) for other in below - {x})}
        for name, below in arrows.items()
    }


def table() -> str:
    """What stands in each room, in Markdown: the first lines of their docstrings."""
    lines = ["| room | holds |", "| --- | --- |"]
    for name in (name for floor in reversed(floors(rooms())) for name in floor):
        folder = name if name.startswith(_OUTSIDE) else f"turbojax.{name}"
        path = ROOT.joinpath(*folder.split("."), "__init__.py")
        text = "single modules that import little: " + ", ".join(_leaves())
        if name != LEAVES:
            text = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or ""
        lines.append(f"| `{name}` | {text.splitlines()[0]} |")
    return "\n".join(lines) + "\n"


def _leaves() -> list[str]:
    names = (path.stem for path in sorted((ROOT / "turbojax").glob("*.py")))
    return [f"`{name}`" for name in names if f"turbojax.{name}" not in (*_FRONTS, *_BESIDE)]


def draw(path: Path) -> None:
    """Writes the drawing, SVG or PNG as the suffix says."""
    import matplotlib as mpl
    from matplotlib.figure import Figure

    arrows = rooms()
    levels = floors(arrows)
    figure = Figure(figsize=(11, 0.95 * len(levels) + 0.3))
    axes = figure.add_axes((0, 0, 1, 1))
    axes.set_axis_off()
    places: dict[str, tuple[float, float]] = {}
    for y, names in enumerate(levels):
        for i, name in enumerate(_ordered(names, arrows, places)):
            places[name] = ((i + 0.5) / len(names), float(y))
    for name, below in sorted(direct(arrows).items()):
        for other in sorted(below):
            _arrow(axes, places[name], places[other])
    for name, place in places.items():
        _box(axes, name, place)
    axes.set_xlim(0, 1)
    axes.set_ylim(-0.5, len(levels) - 0.5)
    with mpl.rc_context({"svg.hashsalt": "house", "svg.fonttype": "none"}):
        metadata = {"Date": None} if path.suffix == ".svg" else None
        figure.savefig(path, metadata=metadata)


def _ordered(names: list[str], arrows: Arrows, places: Mapping[str, Any]) -> list[str]:
    """Rooms of a floor, each near those that it stands on."""

    def middle(name: str) -> float:
        below = [places[x][0] for x in arrows.get(name, ())]
        return sum(below) / len(below) if below else 0.5

    return sorted(names, key=lambda name: (middle(name), name))


def _box(axes: Any, name: str, place: tuple[float, float]) -> None:
    color = _GROUPS.get(name.partition(".")[0], _PLAIN)
    style = {"boxstyle": "round,pad=0.5", "facecolor": color, "edgecolor": "#495057"}
    axes.text(*place, name, ha="center", va="center", fontsize=11, bbox=style, zorder=3)


def _arrow(axes: Any, start: tuple[float, float], end: tuple[float, float]) -> None:
    style = {"arrowstyle": "-|>", "color": "#868e96", "shrinkA": 0, "shrinkB": 0, "lw": 1}
    # Long arrows bend, and leave sideways, so that they pass beside the rooms between.
    far = start[1] - end[1] > 1
    bend = (-0.15 if end[0] > start[0] else 0.15) if far else 0
    style["connectionstyle"] = f"arc3,rad={bend}"
    ends = {"xy": (end[0], end[1] + _EDGE), "xytext": (start[0], start[1] - _EDGE)}
    axes.annotate("", **ends, arrowprops=style, zorder=1)


@functools.cache
def _modules() -> dict[str, Path]:
    found = {}
    for folder in ("turbojax", "pallas_kernels", "training", "benchmarks"):
        for path in sorted((ROOT / folder).rglob("*.py")):
            parts = path.relative_to(ROOT).with_suffix("").parts
            found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


def _imports(path: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and not node.level:
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def _owner(name: str) -> str | None:
    modules = _modules()
    while name and name not in modules:
        name = name.rpartition(".")[0]
    return name or None


if __name__ == "__main__":
    draw(Path(sys.argv[1]))
