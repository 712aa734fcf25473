"""The house: rooms stand one above the other, and CONTRIBUTING's map shows what is there."""

import importlib.util
import re
from graphlib import CycleError
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).resolve().parents[2]

UPWARDS = [
    "leaves",
    "numerics",
    "attention",
    "caches",
    "flax",
    "models",
    "evaluation",
    "finetune",
    "app",
    "benchmarks",
]
"""Rooms from the ground up: none imports one that comes after it."""


@pytest.fixture(scope="module")
def house() -> ModuleType:
    spec = importlib.util.spec_from_file_location("house", ROOT / "docs" / "house.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def reached(arrows: dict[str, set[str]], room: str) -> set[str]:
    below = arrows.get(room, set())
    return below.union(*(reached(arrows, other) for other in below))


def test_rooms_stand_one_above_the_other(house):
    arrows = house.rooms()
    assert {*UPWARDS, "training", "levels", "matmul", "polar", "smoothing"} <= set(arrows)
    floors = house.floors(arrows)  # raises where there is a circle
    height = {name: i for i, names in enumerate(floors) for name in names}
    assert sorted(UPWARDS, key=height.__getitem__) == UPWARDS
    for i, room in enumerate(UPWARDS):
        assert not reached(arrows, room) & set(UPWARDS[i + 1 :])
    for kernels in (name for name in arrows if name.startswith("pallas_kernels")):
        assert all(x.startswith("pallas_kernels") for x in arrows[kernels])


def test_nothing_stands_on_what_runs_it(house):
    arrows = house.rooms()
    for top in ("benchmarks", "training"):
        assert not [name for name, below in arrows.items() if top in below and name != "benchmarks"]


def test_circles_are_found(house):
    with pytest.raises(CycleError):
        house.floors({"a": {"b"}, "b": {"c"}, "c": {"a"}})


def test_only_direct_arrows_are_drawn(house):
    arrows = {"a": {"b", "c"}, "b": {"c"}, "c": set()}
    assert house.direct(arrows) == {"a": {"b"}, "b": {"c"}, "c": set()}
    assert house.floors(arrows) == [["c"], ["b"], ["a"]]


def test_every_room_says_what_it_holds(house):
    rows = house.table().splitlines()[2:]
    assert len(rows) == len({name for floor in house.floors(house.rooms()) for name in floor})
    for row in rows:
        assert re.fullmatch(r"\| `[\w.]+` \| \S.{10,} \|", row), row


def test_the_drawing_names_all_rooms(house, tmp_path):
    house.draw(tmp_path / "house.svg")
    drawn = (tmp_path / "house.svg").read_text(encoding="utf-8")
    for name in house.rooms():
        assert f">{name}</text>" in drawn
    house.draw(tmp_path / "again.svg")
    assert (tmp_path / "again.svg").read_text(encoding="utf-8") == drawn


def test_the_map_is_true():
    text = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    [plan] = re.findall(r"## Layout\n\n```text\n(.*?)```", text, re.DOTALL)
    parents: list[tuple[int, Path]] = [(-1, ROOT)]
    shown = set()
    for line in plan.splitlines():
        indent = len(line) - len(line.lstrip())
        if indent > 8:
            continue  # goes on with what the line before says
        parents = [(i, path) for i, path in parents if i < indent]
        # Names, then two spaces or more, then what they hold.
        for name in re.split(r"[,\s]+", re.split(r"\s{2,}", line.strip(), maxsplit=1)[0]):
            path = parents[-1][1] / name
            assert path.exists(), f"the map shows {path.relative_to(ROOT)}, which is not there"
            shown.add(path)
        parents.append((indent, path))
    for package in ("turbojax", "pallas_kernels"):
        for entry in (ROOT / package).iterdir():
            is_ours = entry.suffix == ".py" or (entry.is_dir() and list(entry.glob("*.py")))
            if is_ours and not entry.name.startswith("__"):
                assert entry in shown, f"the map lacks {entry.relative_to(ROOT)}"
