"""Tables of the commands: whole in a terminal of 80 columns, and whole in a pipe."""

import io
import re
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from rich.console import Console, RenderableType

from turbojax.app import terminal
from turbojax.app.demo import display
from turbojax.app.demo.measure import CacheResult, DemoReport, DemoSettings
from turbojax.app.levels import measure as levels
from turbojax.app.levels.display import render as render_levels
from turbojax.app.quantize import command as quantize_command
from turbojax.models import CACHE_NAMES

LONG = Path("a_module_with_quite_a_long_name_as_files_have_it.py")


def demo_table() -> tuple[RenderableType, list[str]]:
    """Every cache, with numbers as large as they get, and what must be found."""
    results = tuple(
        CacheResult(name, 10.1234, 1.0, 12_345_678_901, 16.25, 12345.6, b"some text", (1.0,))
        for name in CACHE_NAMES
    )
    report = DemoReport(DemoSettings(LONG, caches=CACHE_NAMES), results, 123.4)
    numbers = ["10.1234", "+0.0000", "100.0%", "12,345,678,901", "16.25x", "12345.6"]
    return display.render(report), [*CACHE_NAMES, *numbers, "bits/", "bytes/s", "first"]


def levels_table() -> tuple[RenderableType, list[str]]:
    shares = dict.fromkeys((1, 2, 4, 8, 0), 1.0)
    results = tuple(
        levels.PolicyResult(name, np.zeros((1, 1, 1)), shares, 0.0312, (), 0.9999, 0.1234, ())
        for name in levels.POLICY_NAMES
    )
    settings = levels.MapSettings(LONG, heads=(0, 1), policies=levels.POLICY_NAMES)
    words = ["level 1", "skipped", "ideal speed-up", "relative L1", "100.0%", "32.05x", "0.9999"]
    found = levels.MapReport(settings, results, 1.0)
    return render_levels(found), [*levels.POLICY_NAMES, *words]


def quantize_table() -> tuple[RenderableType, list[str]]:
    bits = {"exact": 12.3456, "kv4": 12.3457}
    report = SimpleNamespace(
        bits={"before": bits, "after": bits},
        unit="token",
        bytes_before=1_234_567_890_123,
        bytes_after=1_234_567_890_123,
        bits_per_weight=4.25,
    )
    words = ["before", "after", "1,234,567.89", "4.25", "12.3456", "bits/token, exact"]
    return quantize_command._table(report), [*words, "bits/token, kv4", "megabytes"]


TABLES = {"demo": demo_table, "levels": levels_table, "quantize": quantize_table}


@pytest.mark.parametrize("name", TABLES)
def test_a_terminal_of_80_columns_shows_all(name):
    table, words = TABLES[name]()
    screen = io.StringIO()
    Console(file=screen, force_terminal=True, width=80, color_system=None).print(table)
    shown = re.sub(r"\x1b\[[0-9;]*m", "", screen.getvalue())
    assert "…" not in shown
    assert max(map(len, shown.splitlines())) <= 80
    missing = [word for word in words if word not in shown]
    assert not missing, shown


@pytest.mark.parametrize("name", TABLES)
@pytest.mark.parametrize("columns", ["20", "80", None])
def test_a_pipe_gets_all(name, columns, capsys, monkeypatch):
    """However narrow the terminal is that the command was called from."""
    monkeypatch.delenv("COLUMNS", raising=False)
    if columns is not None:
        monkeypatch.setenv("COLUMNS", columns)
    table, words = TABLES[name]()
    terminal.show(table)
    shown = capsys.readouterr().out
    assert "…" not in shown
    missing = [word for word in words if word not in shown]
    assert not missing, shown


def test_a_title_may_take_lines_but_loses_nothing(capsys):
    terminal.show(levels_table()[0])
    shown = " ".join(capsys.readouterr().out.split())
    assert f"{LONG}, 4096 tokens in blocks of 32, layer 4, 2 heads" in shown
