r"""Tables and a plot of fine-tuning with pooled attention, from logs of `turbojax train`.

`turbojax compare --write` makes the result of two runs. That of several ways to choose levels,
each against the same dense run:

    python -m benchmarks.pooled_training --out pooled_training_policies_DATE.json \
        runs/dense runs/topk runs/near
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks import stored, tables
from benchmarks.suite import Shown
from turbojax import finetune
from turbojax.finetune import comparison

if TYPE_CHECKING:
    from matplotlib.figure import Figure


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
    picture = tables.picture(*PLOT)
    source = tables.source(name, runs[1]["environment"])
    return f"{picture}{tables.table(header, lines)}\n\n{note} {source}"


PLOT = ("pooled_training.png", "Loss of dense and of pooled fine-tuning")


def _tokens_per_step(log: Mapping[str, Any]) -> int:
    settings = log["identity"]["settings"]
    return settings["context"] * settings["batch_size"]


def _bits(value: float | None) -> str:
    return "-" if value is None else f"{value:.4f}"


def training_plot(result: Mapping[str, Any]) -> "Figure":
    """Smoothed losses over steps and over time in steps."""
    return comparison.draw(result["runs"], width=result["comparison"]["smoothing"])


SHOWN = Shown(("pooled_training",), {"pooled training": training_section}, {PLOT[0]: training_plot})


# What a way to choose levels is held to: so near to the dense loss, and so much faster.
_MOST_LOSS, _LEAST_SPEED = 1.02, 1.8


def policies(logs: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Several pooled runs against one dense run: a JSON object."""
    if len(logs) < 2:
        raise ValueError(f"{len(logs)} runs must be at least 2: a dense one, and others")
    kinds = [log["identity"]["attention"]["kind"] for log in logs]
    if kinds != ["dense", *["pooled"] * (len(logs) - 1)]:
        raise ValueError(f"the runs must be a dense one, then pooled ones: {', '.join(kinds)}")
    if len(devices := {log["environment"]["device"] for log in logs}) > 1:
        raise ValueError(f"the runs must be of one device: {', '.join(sorted(devices))}")
    for log in logs:
        if "held_out_bits_per_byte" not in log:
            raise ValueError(f"a run must have ended, not stopped after {len(log['losses'])} steps")
    return {
        "benchmark": "fine-tuning by policies of pooled attention",
        **logs[0]["environment"],
        "comparisons": [finetune.compare(logs[0], log)["comparison"] for log in logs[1:]],
        "runs": [dict(log) for log in logs],
    }


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
        met.append(f"{compared['density']:.3f}" if good else "")
    header = ["levels", "density", "speed over dense", "loss at the end", "on average"]
    header += ["held out", "held out, dense attention"]
    settings = dense["identity"]["settings"]
    found = [density for density in met if density]
    note = (
        f"Over the dense run's figures, {result['comparisons'][0]['steps']} steps of "
        f"{settings['batch_size']} sequences of {settings['context']:,} bytes. "
        f"Within 2 % of the dense loss at {_LEAST_SPEED} times the speed or more: "
        f"{'those at density ' + ', '.join(found) if found else 'none'}."
    )
    source = tables.source(name, dense["environment"])
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


POLICIES = Shown(("pooled_training_policies",), {"pooled training policies": policies_section})


def main(arguments: list[str] | None = None) -> None:
    parser = stored.parser(policies.__doc__ or "")
    parser.add_argument("runs", type=Path, nargs="+", help="folders or logs, the dense one first")
    args = parser.parse_args(arguments)
    result = policies([finetune.read_log(path) for path in args.runs])
    stored.save(args.out, result)
    print(policies_section(args.out.stem, result))


if __name__ == "__main__":
    main()
