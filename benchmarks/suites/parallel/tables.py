"""What the docs show of several devices: speeds over one, and what was asked."""

from typing import TYPE_CHECKING

from benchmarks import plots, tables
from benchmarks.tables import Result, Row

if TYPE_CHECKING:
    from matplotlib.figure import Figure

PLOT = ("parallel.png", "The same work on one GPU and on several: times the speed of one")


def with_ratios(rows: list[Row]) -> list[Row]:
    """The rows with what they are over one device, and whether that is what was asked."""
    one = {row["label"]: row for row in rows if row["devices"] == 1 and row["status"] == "ok"}
    return [_with_ratio(row, one.get(row["label"])) for row in rows]


def _with_ratio(row: Row, one: Row | None) -> Row:
    if row["status"] != "ok" or one is None or row is one:
        return row
    row = {**row, "speedup": one["us"] / row["us"]}
    if row["asked"] is None or row["devices"] != 2:
        return row
    return {**row, "reached": row["speedup"] >= row["asked"]}


def one_line(row: Row) -> str:
    """A row for a terminal."""
    if row["status"] != "ok":
        return tables.not_measured(row)
    speed = f", {row['speedup']:.2f}x one" if "speedup" in row else ""
    asked = f" (asked: {row['asked']}x)" if "reached" in row else ""
    exchanges = ", ".join(f"{n} {kind}" for kind, n in row.get("exchanges", {}).items())
    off = f", off by {row['difference']:.1e}" if "difference" in row else ""
    return f"{row['name']}: {row['us']:,.1f} us{speed}{asked}{off} [{exchanges}]"


def parallel_table(result: Result) -> str:
    """Every row on several devices: the time, that of one device, and what was asked."""
    rows = result["rows"]
    one = {row["label"]: row for row in rows if row["devices"] == 1}
    lines = [
        _line(row, one.get(row["label"]))
        for row in rows
        if row["devices"] > 1 and "kind" not in row
    ]
    header = ["work", "split over", "GPUs", "time", "on one", "speed", "asked", "exchanges"]
    return tables.table(header, lines)


def _line(row: Row, one: Row | None) -> list[str]:
    way = f"{row['way']} ({row['note']})" if "note" in row else row["way"]
    name = [row["label"], way, str(row["devices"])]
    if row["status"] != "ok":
        return [*name, tables.failure_cell(row), "", "", "", ""]
    asked = "-" if row["asked"] is None else f"{row['asked']}x"
    if row.get("reached") is False:
        asked += " (missed)"
    counts = ", ".join(f"{count} {kind}" for kind, count in row.get("exchanges", {}).items())
    alone = "-" if one is None or one["status"] != "ok" else _time(one["us"])
    return [
        *name,
        _time(row["us"]),
        alone,
        tables.times(row.get("speedup")),
        asked,
        counts or "none",
    ]


def _time(microseconds: float) -> str:
    if microseconds < 1e3:
        return f"{microseconds:.1f} us"
    return f"{microseconds / 1e3:.2f} ms" if microseconds < 1e6 else f"{microseconds / 1e6:.2f} s"


def collectives_table(result: Result) -> str:
    """How long devices take to exchange so many bytes."""
    rows = [row for row in result["rows"] if "kind" in row]
    lines = [
        [
            row["kind"],
            f"{row['bytes']:,}",
            *(
                [_time(row["us"]), f"{row['gigabytes_per_second']:.1f}"]
                if row["status"] == "ok"
                else [tables.failure_cell(row), ""]
            ),
        ]
        for row in rows
    ]
    return tables.table(["collective", "bytes of each GPU", "time", "GB/s"], lines)


def page_section(name: str, result: Result) -> str:
    """The tables of docs/benchmarks and where their figures come from."""
    parts = [tables.picture(*PLOT) + parallel_table(result), collectives_table(result)]
    return "\n\n".join([*parts, tables.source(name, result)])


def bars(result: Result) -> dict[str, dict[str, plots.Bar]]:
    """Times the speed of one device, by work and number of devices."""
    found: dict[str, dict[str, plots.Bar]] = {}
    for row in result["rows"]:
        if row["status"] == "ok" and "speedup" in row:
            bar = plots.Bar(row["speedup"], f"{row['speedup']:.2f}")
            found.setdefault(row["label"], {})[f"{row['devices']} GPUs"] = bar
    return found


def plot(result: Result) -> "Figure":
    """Times the speed of one device."""
    figure = plots.wide_figure(12)
    axes = plots.draw_bars(figure, bars(result), 0.3)
    axes.margins(y=0.2)
    axes.set_title(f"The same work on several GPUs: {result['device']}")
    axes.set_ylabel("times one GPU")
    return figure
