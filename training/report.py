"""The loss curve as a picture, and the model card: both are made from the run's log."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

CURVE_NAME = "loss_curve.png"
LICENCES_NAME = "training_data.json"


def write(folder: Path, log: Mapping[str, Any], manifest: Mapping[str, Any]) -> None:
    """Writes picture, data listing, held-out list and model card beside the weights.

    Args:
      folder: the model's folder.
      log: content of the run's log.
      manifest: content of `corpus.json`.
    """
    plot(log, folder / CURVE_NAME)
    (folder / LICENCES_NAME).write_text(json.dumps(manifest, indent=1) + "\n", encoding="utf-8")
    (folder / "README.md").write_text(model_card(log, manifest), encoding="utf-8")


def plot(log: Mapping[str, Any], path: Path) -> None:
    """Draws training and held-out bits per byte over bytes seen."""
    from matplotlib.figure import Figure

    records, evaluations = log["records"], log["evaluations"]
    per_step = log["settings"]["tokens_per_step"]
    figure = Figure(figsize=(7.5, 4.2), dpi=90, layout="constrained")
    axes = figure.subplots()
    colours = (("#9ecae1", "#3182bd"), ("#fdae6b", "#d94801"))
    contexts = sorted({row["context"] for row in records})
    for context, (light, dark) in zip(contexts, colours, strict=False):
        rows = [row for row in records if row["context"] == context]
        x = [row["tokens"] / 1e9 for row in rows]
        y = [row["bits_per_byte"] for row in rows]
        axes.plot(x, y, color=light, lw=1, label=f"training, windows of {context}")
        rows = [row for row in evaluations if row["context"] == context]
        x = [row["step"] * per_step / 1e9 for row in rows]
        y = [row["held_out_bits_per_byte"] for row in rows]
        axes.plot(x, y, "o-", color=dark, ms=3, lw=1.5, label=f"held out, windows of {context}")
    low = min(row["bits_per_byte"] for row in records)
    axes.set_ylim(low - 0.1, low + 1.0)
    axes.set_xlabel("bytes seen (billions)")
    axes.set_ylabel("bits per byte")
    axes.grid(alpha=0.3)
    axes.legend(frameon=False)
    figure.savefig(path)


def model_card(log: Mapping[str, Any], manifest: Mapping[str, Any]) -> str:
    """The model card, every figure taken from log and manifest."""
    return "\n".join(
        [
            *_front_matter(),
            *_description(log),
            *_results(log),
            *_data(manifest),
            *_training(log),
        ]
    )


def _front_matter() -> list[str]:
    return [
        "---",
        "license: apache-2.0",
        "library_name: transformers",
        "tags: [byte-level, code, python, llama]",
        "---",
        "",
    ]


def _description(log: Mapping[str, Any]) -> list[str]:
    model = log["model"]
    return [
        "# turbojax embedded model",
        "",
        "A small byte-level language model of Python source code, in the ordinary Hugging Face "
        "Llama layout. It exists so that cache compression can be seen and tested on real text "
        "without a download; it is no coding assistant.",
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
        "import turbojax.models as models",
        "",
        'model = models.load("embedded")',
        "text = bytes([models.BEGINNING_OF_FILE]) + open(path, 'rb').read()[:2048]",
        "logits = model(jnp.frombuffer(text, jnp.uint8)[None].astype(jnp.int32))",
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
    return [*lines, ""]


def _data(manifest: Mapping[str, Any]) -> list[str]:
    packages = manifest["packages"]
    lines = [
        "## Data",
        "",
        f"{manifest['total_bytes']:,} bytes: the `*.py` files of the Python standard library and "
        f"of {len(packages) - 1} installed packages whose metadata declares a permissive licence. "
        "Left out: copyleft, proprietary and unknown licences, vendored code, files with a "
        "copyleft notice, copies, generated tables, the modules of the table above, and every "
        "file named like one of them or sharing more than 20 % of its long lines. "
        f"{_repeats(manifest)}"
        f"The ten largest sources; all of them, and what was dropped, are in `{LICENCES_NAME}`.",
        "",
        "| source | licence | files | bytes |",
        "|---|---|---|---|",
    ]
    lines += [
        f"| {row['package']} | {row['licence']} | {row['files']:,} | {row['bytes']:,} |"
        for row in packages[:10]
    ]
    return [*lines, ""]


def _repeats(manifest: Mapping[str, Any]) -> str:
    often = {name: count for name, count in manifest["repeats"].items() if count > 1}
    return "".join(f"{name} occurs {count} times in that. " for name, count in often.items())


def _training(log: Mapping[str, Any]) -> list[str]:
    settings, versions = log["settings"], log["versions"]
    speeds = sorted(row["tokens_per_second"] for row in log["records"])
    return [
        "## Training",
        "",
        f"{log['tokens_seen']:,} bytes seen in {log['seconds'] / 60:.1f} minutes on one "
        f"{log['device']} (median {speeds[len(speeds) // 2] / 1e6:.2f} million bytes per second), "
        f"{log['date']}. AdamW, peak rate {settings['learning_rate']}, "
        f"{settings['tokens_per_step']:,} bytes per step; windows of "
        f"{settings['short_context']}, in the last {settings['long_fraction']:.0%} of the steps "
        f"of {settings['long_context']}; the rate falls to zero over the last "
        f"{settings['decay_fraction']:.0%}. bfloat16 compute, float32 master weights.",
        "",
        f"![loss curve]({CURVE_NAME})",
        "",
        "```",
        log["command"],
        "```",
        "",
        "Versions: "
        + ", ".join(f"{name} {version}" for name, version in versions.items())
        + f", Python {log['python']}.",
        "",
    ]
