r"""The loss curve as a picture, and the model card: both are made from the logs of the run.

A model can come from several runs, each started from the weights of the one before. This writes
the report anew, from all of their logs:

    python -m training.report runs/embedded/model --corpus runs/embedded/corpus.json \
        --logs runs/embedded/log.json runs/annealed/log.json
"""

import argparse
import json
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from training.shapes import EMBEDDED
from turbojax import _writing

CURVE_NAME = "loss_curve.png"
DATA_NAME = "training_data.json"

Log = Mapping[str, Any]

_SNIPPET = """\
import textwrap  # a module the model has never seen
from pathlib import Path

import jax.numpy as jnp
import turbojax as tj

model = tj.models.load("embedded")
text = bytes([tj.models.BEGINNING_OF_FILE]) + Path(textwrap.__file__).read_bytes()[:2047]
tokens = jnp.array(list(text), jnp.int32)[None]
logits = model(tokens)  # [1, 2048, 256], float32; [0, t] predicts byte t + 1 of the text
print(chr(int(logits[0, -1].argmax())))
"""


def write(folder: Path, logs: Sequence[Log], manifest: Mapping[str, Any]) -> None:
    """Writes picture, data listing and model card beside the weights.

    Args:
      folder: the model's folder.
      logs: the log of each run, in order; figures of the result are those of the last.
      manifest: content of `corpus.json`.
    """
    plot(logs, folder / CURVE_NAME)
    _writing.write_text(folder / DATA_NAME, json.dumps(manifest, indent=1) + "\n")
    _writing.write_text(folder / "README.md", model_card(logs, manifest))


def plot(logs: Sequence[Log], path: Path) -> None:
    """Draws training and held-out bits per byte over bytes seen."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7.5, 4.2), dpi=90, layout="constrained")
    axes = figure.subplots()
    before, lowest, labelled = 0.0, float("inf"), set()
    colours = [("#9ecae1", "#3182bd"), ("#fdae6b", "#d94801"), ("#a1d99b", "#238b45")]
    for log in logs:
        per_step = log["settings"]["tokens_per_step"] / 1e9
        for context in sorted({row["context"] for row in log["records"]}):
            light, dark = colours[_phase_of(log["settings"], context)]
            label = "" if context not in labelled else "_"
            labelled.add(context)
            x, y = _curve(log["records"], context, "bits_per_byte", before, per_step)
            axes.plot(x, y, color=light, lw=1, label=f"{label}training, windows of {context}")
            lowest = min(lowest, *y)
            x, y = _curve(log["evaluations"], context, "held_out_bits_per_byte", before, per_step)
            label = f"{label}held out, windows of {context}"
            axes.plot(x, y, "o-", color=dark, ms=3, lw=1.5, label=label)
        before += log["records"][-1]["step"] * per_step
        if log is not logs[-1]:
            axes.axvline(before, color="0.6", lw=1, ls=":")
    axes.set_ylim(lowest - 0.1, lowest + 1.0)
    axes.set_xlabel("bytes seen (billions)")
    axes.set_ylabel("bits per byte")
    axes.grid(alpha=0.3)
    axes.legend(frameon=False)
    with _writing.replacing(path) as draft:
        figure.savefig(draft)


def _phase_of(settings: Mapping[str, Any], context: int) -> int:
    """Which of a run's phases has this context: 0, 1 or 2. Logs of before know two."""
    names = ("short_context", "long_context")
    return sum(context > settings[name] for name in names if name in settings)


def _curve(
    rows: Sequence[Mapping[str, Any]], context: int, name: str, before: float, per_step: float
) -> tuple[list[float], list[float]]:
    """Billions of bytes seen, and the named figure, of the rows with this context."""
    rows = [row for row in rows if row["context"] == context]
    return [before + row["step"] * per_step for row in rows], [row[name] for row in rows]


def model_card(logs: Sequence[Log], manifest: Mapping[str, Any]) -> str:
    """The model card, every figure taken from logs and manifest."""
    parts = (
        _description(logs[-1]),
        _results(logs[-1]),
        _data(manifest),
        _training(logs, manifest),
    )
    return "\n".join(line for part in parts for line in part)


def _description(log: Mapping[str, Any]) -> list[str]:
    model, shape = log["model"], log.get("shape", EMBEDDED)
    title = "turbojax embedded model"
    purpose = "seen and tested on real text without a download"
    if shape != EMBEDDED:
        title = f"turbojax model {shape}, to measure with"
        purpose = "measured on real text with errors that stand out of the noise"
    return [
        "---",
        "license: apache-2.0",
        "library_name: transformers",
        "tags: [byte-level, code, python, llama]",
        "---",
        "",
        f"# {title}",
        "",
        "A small byte-level language model of Python source code, in the ordinary Hugging Face "
        f"Llama layout. It exists so that cache compression can be {purpose}; "
        "it is no coding assistant.",
        "",
        f"- {model['parameters']:,} parameters, bfloat16",
        f"- {model['num_layers']} layers, width {model['hidden_size']}, feed-forward width "
        f"{model['intermediate_size']}, {model['num_heads']} query heads and "
        f"{model['num_kv_heads']} key/value heads of {model['head_dim']}, tied embeddings",
        f"- context {model['max_length']} bytes",
        "- a token is a byte; there is no tokenizer",
        "- **byte 0 stands before the first byte of every file**, in training and in use, and "
        "after the last one",
        "",
        "```python",
        *_SNIPPET.splitlines(),
        "```",
        "",
    ]


def _results(log: Mapping[str, Any]) -> list[str]:
    scores = log["held_out_bits_per_byte"]
    contexts = sorted(scores, key=int)
    names = [name for name in scores[contexts[0]] if name != "all"]
    lines = [
        "## Held-out bits per byte",
        "",
        "Windows that do not overlap, each read from an empty cache, so that the mean includes "
        "the first bytes of a window, which have little context. A dash: the file is shorter.",
        "",
        "| file | " + " | ".join(f"{context} bytes" for context in contexts) + " |",
        "|---" * (1 + len(contexts)) + "|",
    ]
    for name in [*names, "all"]:
        cells = (f"{scores[c][name]:.3f}" if name in scores[c] else "-" for c in contexts)
        lines.append(f"| {name} | " + " | ".join(cells) + " |")
    lines.append("")
    if (beside := log.get("embedded_bits_per_byte")) is not None:
        text = ", ".join(f"{beside[c]['all']:.3f} at {c}" for c in sorted(beside, key=int))
        lines += [f"The embedded model, on the same files and machine: {text}.", ""]
    if (row := log.get("transformers_comparison")) is not None:
        lines += [
            f"`LlamaForCausalLM` of transformers {row['transformers']} reads the folder as it is: "
            f"on {row['bytes']} bytes of {row['file']} ({row['dtype']}, CPU) its logits, up to "
            f"{row['max_abs_logit']:.1f} in size, differ by at most "
            f"{row['max_abs_difference']:.1g}.",
            "",
        ]
    return lines


def _data(manifest: Mapping[str, Any]) -> list[str]:
    packages = manifest["packages"]
    often = "".join(
        f"{name} occurs {count} times in that. "
        for name, count in manifest["repeats"].items()
        if count > 1
    )
    lines = [
        "## Data",
        "",
        f"{manifest['total_bytes']:,} bytes: the `*.py` files of the Python standard library and "
        f"of {len(packages) - 1} installed packages whose metadata declares a permissive licence. "
        "Left out: copyleft, proprietary and unknown licences, vendored code, files with a "
        "copyleft notice, copies, generated tables, the modules of the table above, and every "
        "file named like one of them or sharing more than 20 % of its long lines. "
        f"{often}"
        f"The ten largest sources; all of them, and what was dropped, are in `{DATA_NAME}`.",
        "",
        "| source | licence | files | bytes |",
        "|---|---|---|---|",
    ]
    lines += [
        f"| {row['package']} | {row['licence']} | {row['files']:,} | {row['bytes']:,} |"
        for row in packages[:10]
    ]
    return [*lines, ""]


def _training(logs: Sequence[Log], manifest: Mapping[str, Any]) -> list[str]:
    tokens = sum(log["tokens_seen"] for log in logs)
    minutes = sum(log["seconds"] for log in logs) / 60
    last = logs[-1]
    phases = "" if len(logs) == 1 else f" in {len(logs)} phases"
    optimizer = "Muon for the layers' matrices, Adam for the rest"
    if last["settings"].get("optimizer", "adamw") == "adamw":
        optimizer = "AdamW"
    return [
        "## Training",
        "",
        f"{tokens:,} bytes seen ({tokens / manifest['total_bytes']:.1f} passes over the data) in "
        f"{minutes:.1f} minutes{phases} on {_machines(logs)}"
        f", {last['date']}. {optimizer}, {last['settings']['tokens_per_step']:,} bytes "
        "per step, "
        "bfloat16 compute, float32 master weights.",
        "",
        *(line for number, log in enumerate(logs, 1) for line in _phase(number, log)),
        f"![loss curve]({CURVE_NAME})",
        "",
        "Versions: "
        + ", ".join(f"{name} {version}" for name, version in last["versions"].items())
        + f", Python {last['python']}. This page and the curve are written by "
        "`python -m training.report` from the logs of the phases.",
        "",
    ]


def _machines(logs: Sequence[Log]) -> str:
    devices = sorted({log["device"] for log in logs})
    counts = {log.get("devices", 1) for log in logs}
    if counts == {1}:
        return f"one {' and one '.join(devices)}"
    return f"{' and '.join(str(count) for count in sorted(counts))} x {' and '.join(devices)}"


def _phase(number: int, log: Log) -> list[str]:
    """One run: where it started, its settings, its end and its command."""
    settings, last = log["settings"], log["records"][-1]
    steps, planned = last["step"], settings["steps"]
    scores = ", ".join(
        f"{scores['all']:.3f} at {context}"
        for context, scores in log["held_out_bits_per_byte"].items()
    )
    return [
        f"### Phase {number}: {log['tokens_seen']:,} bytes, {log['seconds'] / 60:.1f} minutes",
        "",
        f"{_start(log)} {steps:,} steps. {_contexts(log)} The rate rises to "
        f"{settings['learning_rate']:g} over {settings['warmup_steps']:,} steps and falls to zero "
        f"({_DECAYS[settings['decay_shape']]}) over {_share(settings['decay_fraction'])}"
        f"{planned:,} steps.{_cut(log) if steps < planned else ''} Held-out bits per byte at the "
        f"end: {scores}.",
        "",
        "```",
        log["command"],
        "```",
        "",
    ]


# How the rate falls over the share x of the decay that is done.
_DECAYS = {"sqrt": "as 1 - sqrt(x)", "linear": "linearly"}


def _share(fraction: float) -> str:
    return "all " if fraction == 1 else f"the last {fraction:.0%} of "


def _start(log: Log) -> str:
    if not log.get("init_sha256"):
        return "From random weights."
    return (
        "From the bfloat16 weights that the phase before exported (SHA-256 "
        f"{log['init_sha256'][:16]}...), with a fresh optimizer and the data in a new order."
    )


def _cut(log: Log) -> str:
    last = log["records"][-1]
    return (
        f" It was cut off after step {last['step']:,}, at a rate of {last['learning_rate']:.2g}."
        f" {log.get('note', '')}".rstrip()
    )


def _contexts(log: Log) -> str:
    """The windows, with the speed at each."""
    rows = log["records"]
    contexts = sorted({row["context"] for row in rows})
    parts = []
    for context in contexts:
        here = [row for row in rows if row["context"] == context]
        speed = statistics.median(row["tokens_per_second"] for row in here) / 1e6
        parts.append(
            f"windows of {context} bytes up to step {here[-1]['step']:,} "
            f"({speed:.2f} million bytes per second)"
        )
    text = ", then ".join(parts)
    return text[0].upper() + text[1:] + "."


def read_logs(path: Path) -> list[Log]:
    """The logs in a file: the one of a run, or those of several under the key `runs`."""
    content = json.loads(path.read_text(encoding="utf-8"))
    logs: list[Log] = content.get("runs", [content])
    return logs


def main() -> None:
    """Writes the report of a model anew."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path, help="the model's folder")
    parser.add_argument("--corpus", type=Path, required=True, help="corpus.json of the runs")
    parser.add_argument("--logs", type=Path, nargs="+", required=True, help="log.json of each run")
    args = parser.parse_args()
    logs = [log for path in args.logs for log in read_logs(path)]
    write(args.folder, logs, json.loads(args.corpus.read_text(encoding="utf-8")))


if __name__ == "__main__":
    main()
