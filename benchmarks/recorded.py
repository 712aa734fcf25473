"""Tables of experiments that have answered their question; of these the results alone are kept.

Each table names the commit that still has the script that measured it (``git show COMMIT:FILE``).
Two are of commands instead: `turbojax demo --json` and `turbojax compare --write`.
"""

import functools
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from benchmarks import summary, tables
from benchmarks.real_caches import cost_cells, cost_header
from benchmarks.suite import Shown, Table
from benchmarks.summary import SMOOTHING, changes, end_of
from benchmarks.tables import Result
from turbojax import TurboConfig
from turbojax.finetune import comparison

if TYPE_CHECKING:
    from matplotlib.figure import Figure

SCRIPTS = {
    "attention_quality": "08eaecf1",
    "attribution": "7ed56b3b",
    "cache_quality": "7c5487d3",
    "device/first_calls": "1f498cde",
    "gradient_error": "1f498cde",
    "gradient_training": "99f6fdb2",
    "pooled_training": "270e4011",
    "video": "73da588f",
}
"""Of `benchmarks/`, and the last commits that have them."""


def script(name: str) -> str:
    ending = "/" if name == "attribution" else ".py"
    return f"Measured by `benchmarks/{name}{ending}` of commit {SCRIPTS[name]}."


def _source(name: str, result: Mapping[str, Any], by: str) -> str:
    return f"{tables.source(name, dict(result))} {script(by)}"


# Attention in 8 bits ------------------------------------------------------------------------------

_SOFTMAX_NAMES = {"exact": "exact", "sas": "SAS", "sas2": "SAS, base 2"}
# Speeds are of whole calls: 2 sequences of 8k tokens, full and causal.
_PLACES = tuple(
    f"prefill/llama3-8b/b2-s8192{causal}/turbo-{{}}/mosaic_gpu" for causal in ("", "-causal")
)


def numerics_table(results: Path) -> str:
    """Speed, error and cost of every mode with every softmax and block, from the newest results."""
    figures = summary.Figures(results)
    quality = figures.result("attention_quality")
    default, lines = TurboConfig(), []
    for name, row in quality["attention"].items():
        if name == "bfloat16":
            continue
        mode, softmax, block = name.split("-")
        speeds = [figures.speed("hopper", place.format(name)) for place in _PLACES]
        cost = f"{row['cost']:+.4f} ± {row['cost_standard_error']:.4f}"
        layers = row["by_layer"]["relative_l2"]
        errors = [f"{row['random']['relative_l2']:.3f}", f"{min(layers):.3f} to {max(layers):.3f}"]
        line = [f"`{mode}`", _SOFTMAX_NAMES[softmax], block, *speeds, *errors, cost]
        is_default = (mode, softmax, int(block)) == (
            default.mode,
            default.softmax,
            default.block_kv,
        )
        lines.append([f"**{cell}**" for cell in line] if is_default else line)
    header = [
        *("mode", "softmax", "block", "over cuDNN", "causal", "error, random", "error, layers"),
        "bits per byte",
    ]
    exact = quality["attention"].get("bfloat16")
    plain = (
        f" Exact attention in bfloat16: {exact['cost']:+.4f} ± {exact['cost_standard_error']:.4f}."
        if exact
        else ""
    )
    note = (
        f"{quality['windows']} windows of {quality['context']:,} bytes, at most "
        f"{-(-quality['windows'] // quality['modules'])} of each of {quality['modules']} modules."
    )
    source = f"{figures.devices()} {script('attention_quality')}"
    return f"{tables.table(header, lines)}\n\n{note}{plain} {source}"


def gradient_error_table(name: str, result: Result) -> str:
    """Errors in percent, by mode and by what the backward pass rounds."""
    model = result["model"]
    lines = []
    for label, errors in result["random"].items():
        mode, _, gradient = label.partition("-")
        parts = ", ".join(f"{100 * x:.1f} %" for x in errors)
        whole = f"{100 * model['errors'][label]:.1f} %"
        lines.append([f'`mode="{mode}"`', f'`"{gradient}"`', parts, whole])
    header = ["forward", "`gradient=`", "$dQ$, $dK$, $dV$", "all parameters of a model"]
    note = (
        "Of the norm of the gradient of exact attention. First of 300 causal tokens of normal "
        f"numbers, head dim 64; then of the embedded model's loss on {model['windows']} held-out "
        f"windows of {model['context']:,} bytes. Exact softmax, blocks of 64, plain JAX."
    )
    return f"{tables.table(header, lines)}\n\n{note} {_source(name, result, 'gradient_error')}"


def _held_out(run: Mapping[str, Any]) -> float:
    return float(run["held_out_bits_per_byte"])


def _change(values: Sequence[float]) -> str:
    error = np.std(values, ddof=1) / np.sqrt(len(values)) if len(values) > 1 else np.nan
    return f"{100 * np.mean(values):+.2f} ± {100 * error:.2f} %"


def gradient_training_table(name: str, result: Result) -> str:
    """Losses of training with 8-bit attention, beside those of exact attention."""
    lines = []
    for label, by_seed in result["runs"].items():
        mode, _, gradient = label.partition("-")
        line = [mode, gradient or "-"]
        for of in (end_of, _held_out):
            line.append(f"{np.mean([of(run) for run in by_seed.values()]):.4f}")
            line.append("" if label == "exact" else _change(changes(result, label, of)))
        lines.append(line)
    header = ["forward", "`gradient=`", "loss", "beside exact", "held out", "beside exact"]
    settings = result["settings"]
    note = (
        f"{settings['steps']} steps of {settings['batch_size']} sequences of "
        f"{settings['context']:,} bytes; weights to begin with: {result['weights']}. Means of "
        f"{len(result['runs']['exact'])} seeds, with the standard errors of their differences; "
        f"bits per byte, of the last {SMOOTHING} steps and of modules that were not trained on, "
        "read with exact attention."
    )
    return f"{tables.table(header, lines)}\n\n{note} {_source(name, result, 'gradient_training')}"


# Caches on text -----------------------------------------------------------------------------------


def quality_table(name: str, report: Result) -> str:
    base = report["caches"]["exact"]
    columns: tuple[tables.Column, ...] = (
        ("bits per byte", tables.shown_as("bits_per_byte", "{:.4f}")),
        ("cost", lambda row: f"{row['bits_per_byte'] - base['bits_per_byte']:+.4f}"),
        ("same greedy byte", tables.shown_as("same_greedy_choice", "{:.1%}")),
        ("smaller than exact", lambda row: f"{_bytes(base) / _bytes(row):.2f}x"),
    )
    rows = [{"cache": x, "status": "ok", **row} for x, row in report["caches"].items()]
    text = tables.rows_table(rows, [("cache", lambda row: row["cache"])], columns)
    note = (
        f"{report['decoded_bytes']:,} bytes of {report['windows']} windows, positions "
        f"{report['prefilled']} to {report['context'] + 1}, decoded one by one;"
    )
    return f"{text}\n\n{note} {_source(name, report, 'cache_quality')}"


def _bytes(row: tables.Row) -> float:
    return float(row["cache_bytes_per_sequence"])


_PAGES = ("turbo4", "fp8_e4m3", "fp8_e5m2")


def pages_sentence(name: str, result: Result) -> str:
    """What each kind of page adds to the bits of a bfloat16 cache."""
    costs = ", ".join(
        f'{row["cost"]:+.4f} ± {row["cost_standard_error"]:.4f} with `"{kind}"`'
        for kind in _PAGES
        for row in [result["caches"][kind]]
    )
    return (
        "What a byte of held-out text costs the embedded model in bits, beyond a bfloat16 cache: "
        f"{costs}. Means over {result['windows']} windows of "
        f"{result['modules']} modules of the standard library, the first {result['prefilled']:,} "
        "bytes of each in one piece and the others one by one, with their standard errors; "
        f"{result['device']}, jax {result['jax']}, {result['date']} (`{name}`)."
    )


def demo_table(name: str, report: Result) -> str:
    """What `turbojax demo --json` wrote."""
    settings = report["settings"]
    first = report["results"][0]
    lines = []
    for row in report["results"]:
        difference = row["bits_per_byte"] - first["bits_per_byte"]
        cost = "" if row is first else f" ({difference:+.4f})"
        lines.append(
            [
                row["name"],
                f"{row['bits_per_byte']:.4f}{cost}",
                f"{row['agreement']:.1%}",
                f"{row['nbytes']:,}",
                f"{row['compression_ratio']:.2f}x",
            ]
        )
    header = ["cache", "bits per byte", "same greedy byte", "cache bytes", "smaller than bf16"]
    note = (
        f"`{Path(settings['file']).name}`: {settings['prompt_bytes']} bytes prefilled, "
        f"{settings['new_bytes']} decoded;"
    )
    return f"{tables.table(header, lines)}\n\n{note} {tables.source(name, report)}"


# Rows of simulations, in the order of their files: which part of a 4-bit cache costs how much, and
# what repairs it.
_SIMULATED = {
    "attribution": {
        "parts": slice(0, 8),
        "layers": slice(8, 12),
        "repairs": slice(12, 27),
        "formats": slice(27, 42),
    },
    "attribution_more": {"values": slice(0, 4), "further": slice(4, 9)},
}


def attribution_table(rows: slice, name: str, result: Result) -> str:
    """Some rows: what they cost, with intervals, on each text."""
    chosen = dict(list(result["rows"].items())[rows])
    lines = [cost_cells(label, row) for label, row in chosen.items()]
    header = ["rounded", *cost_header(chosen)]
    return f"{tables.table(header, lines)}\n\n{_source(name, result, 'attribution')}"


# Training with pooled attention -------------------------------------------------------------------

TRAINING_PLOT = ("pooled_training.png", "Loss of dense and of pooled fine-tuning")


def training_section(name: str, result: Mapping[str, Any]) -> str:
    """Runs of `turbojax train`, as `turbojax compare --write` puts them into one file."""
    compared, runs = result["comparison"], result["runs"]
    lines = []
    for i, log in enumerate(runs):
        attention = log["identity"]["attention"]["kind"]
        records, steps = log["records"], compared["steps"]
        last = [record for record in records if record["step"] <= steps][-1]
        rate = last["step"] * _tokens_per_step(log) / last["seconds"]
        held_out = log.get("held_out_bits_per_byte", {})
        lines.append(
            [
                attention,
                "1" if i == 0 else f"{compared['density']:.3f}",
                f"{compared['seconds'][i]:.1f}",
                f"{rate:,.0f}",
                f"{compared['seconds'][0] / compared['seconds'][i]:.2f}x",
                f"{last['bits_per_byte']:.4f}",
                _bits(held_out.get("run")),
                _bits(held_out.get("dense", held_out.get("run") if i == 0 else None)),
            ]
        )
    header = ["attention", "density", "seconds in steps", "bytes per second", "over dense"]
    header += ["loss at the end", "held out", "held out, dense attention"]
    settings = runs[0]["identity"]["settings"]
    note = (
        f"{compared['steps']} steps of {settings['batch_size']} sequences of "
        f"{settings['context']:,} bytes; loss in bits per byte. Over means of "
        f"{compared['smoothing']} steps the pooled loss is "
        f"{compared['final_ratio']:.4f} times the dense one at the end, "
        f"{compared['mean_ratio']:.4f} on average and {compared['largest_ratio']:.4f} at most."
    )
    picture = tables.picture(*TRAINING_PLOT)
    source = tables.source(name, runs[1]["environment"])
    return f"{picture}{tables.table(header, lines)}\n\n{note} {source}"


def _tokens_per_step(log: Mapping[str, Any]) -> int:
    settings = log["identity"]["settings"]
    return settings["context"] * settings["batch_size"]


def _bits(value: float | None) -> str:
    return "-" if value is None else f"{value:.4f}"


def training_plot(result: Mapping[str, Any]) -> "Figure":
    """Smoothed losses over steps and over time in steps."""
    return comparison.draw(result["runs"], width=result["comparison"]["smoothing"])


# What a way to choose levels is held to: so near to the dense loss, and so much faster.
_MOST_LOSS, _LEAST_SPEED = 1.02, 1.8


def policies_section(name: str, result: Mapping[str, Any]) -> str:
    """A row per way to choose levels; says which are as near and as fast as is asked for."""
    dense, *others = result["runs"]
    held_out = dense["held_out_bits_per_byte"]["run"]
    lines, met = [], []
    for log, compared in zip(others, result["comparisons"], strict=True):
        scores = log["held_out_bits_per_byte"]
        lines.append(
            [
                _policy(log["identity"]["attention"]),
                f"{compared['density']:.3f}",
                f"{compared['speedup']:.2f}x",
                f"{compared['final_ratio']:.4f}",
                f"{compared['mean_ratio']:.4f}",
                f"{scores['run'] / held_out:.4f}",
                f"{scores['dense'] / held_out:.4f}",
            ]
        )
        good = compared["final_ratio"] <= _MOST_LOSS and compared["speedup"] >= _LEAST_SPEED
        met += [f"{compared['density']:.3f}"] if good else []
    header = ["levels", "density", "speed over dense", "loss at the end", "on average"]
    header += ["held out", "held out, dense attention"]
    settings = dense["identity"]["settings"]
    note = (
        f"Over the dense run's figures, {result['comparisons'][0]['steps']} steps of "
        f"{settings['batch_size']} sequences of {settings['context']:,} bytes. "
        f"Within 2 % of the dense loss at {_LEAST_SPEED} times the speed or more: "
        f"{'those at density ' + ', '.join(met) if met else 'none'}."
    )
    source = _source(name, dense["environment"], "pooled_training")
    return f"{tables.table(header, lines)}\n\n{note} {source}"


def _policy(attention: Mapping[str, Any]) -> str:
    more = [
        f"{attention[key]} {text}"
        for key, text in {
            "query_samples": "samples a block",
            "dense_layers": "of the first layers dense",
        }.items()
        if attention.get(key)
    ]
    return ", ".join([f"`{attention['policy']}`", *more])


# Orders of a video's tokens -----------------------------------------------------------------------

_ORDERS = {
    "rows": "by frames and rows",
    "bricks": "bricks, by rows inside",
    "grid_order": "`grid_order`",
}


def video_table(name: str, result: Result) -> str:
    first = next(iter(result["errors"].values()))
    budgets = list(dict.fromkeys(row["budget"] for row in first))
    density = {row["budget"]: row["density"] for row in first}
    header = ["order of the tokens"]
    header += [f"{scene}, density {density[b]:.3f}" for scene in result["errors"] for b in budgets]
    losses = result["training"]["losses"]
    lines = []
    for order, words in _ORDERS.items():
        cells = [
            f"{100 * row['error']:.1f} %"
            for rows in result["errors"].values()
            for row in rows
            if row["order"] == order
        ]
        lines.append([words, *cells, f"{losses[order][-1]:.3f}"])
    lines.append(["exact attention", *["0"] * (len(header) - 1), f"{losses['exact'][-1]:.3f}"])
    grid, small = ("x".join(map(str, x)) for x in (result["grid"], result["training"]["grid"]))
    note = (
        f"Errors relative to the norm of exact attention, of {grid} tokens; bricks of "
        f"{'x'.join(map(str, result['brick']))}, `TopK` with its shares halved, as they are and "
        f"doubled. The loss after {len(losses['exact'])} steps is of {small} tokens of the slow "
        "scene, over the variance of what is filled in."
    )
    return f"{tables.table([*header, 'loss'], lines)}\n\n{note} {_source(name, result, 'video')}"


# First calls --------------------------------------------------------------------------------------


def first_calls_section(name: str, result: Result) -> str:
    """Programs and seconds of one call for each prompt length, before and now; a served request."""
    lines = []
    for versions in result["generate"].values():
        before = versions["before"]
        for label, found in versions.items():
            lines.append(
                [
                    {"now": "rounded up", "before": "one by one"}[label],
                    str(found["programs"]),
                    f"{found['seconds']:.1f}",
                    tables.times(before["seconds"] / found["seconds"]),
                    f"{found['seconds_again']:.1f}",
                ]
            )
    header = ["sizes", "programs", "seconds", "speed", "the same calls again"]
    prompts, served = result["prompts"], result["serve"]
    slowest = max(row["seconds"] for row in result["interrupts"])
    calls = (
        f"{len(prompts)} calls of `models.generate`, prompts of {prompts[0]} to {prompts[-1]} "
        f"tokens and {result['new_tokens']} new ones, {result['generate_layers']} layers of "
        f"{result['shape']}, an exact cache, with nothing compiled before. "
    )
    commands = (
        "`turbojax serve` gave the first token of the embedded model after "
        f"{served['cold']:.1f} s without kept programs, and after {served['kept']:.1f} s with "
        "those of an earlier run. Ctrl-C while `turbojax generate` compiled for the whole model "
        f"ended it within {slowest:.1f} s. "
    )
    source = _source(name, result, "device/first_calls")
    return f"{tables.table(header, lines)}\n\n{calls}{commands}{source}"


def _parts(groups: Mapping[str, slice]) -> dict[str, Table]:
    found: dict[str, Callable[[str, Result], str]] = {
        f"attribution {group}": functools.partial(attribution_table, rows)
        for group, rows in groups.items()
    }
    return found


SHOWN = (
    Shown(("gradient_error",), {"gradient error": gradient_error_table}),
    Shown(("gradient_training",), {"gradient training": gradient_training_table}),
    Shown(("gradient_tuning",), {"gradient tuning": gradient_training_table}),
    Shown(("cache_quality",), {"quality": quality_table, "page costs": pages_sentence}),
    # Of pages whose keys and values are stored unlike each other, and those they are made of.
    Shown(("format_quality",), {"format costs": quality_table}),
    Shown(("demo",), {"demo": demo_table}),
    *(Shown((name,), _parts(groups)) for name, groups in _SIMULATED.items()),
    Shown(
        ("pooled_training",),
        {"pooled training": training_section},
        {TRAINING_PLOT[0]: training_plot},
    ),
    Shown(("pooled_training_policies",), {"pooled training policies": policies_section}),
    Shown(("video",), {"video": video_table}),
    Shown(("first_calls",), {"first calls": first_calls_section}),
)
