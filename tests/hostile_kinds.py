"""What `hostile_worker` opens: good folders, hostile cases of them, and how they are used."""

import json
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import hostile_cases
import numpy as np
from hostile_cases import Case

from turbojax import models

Use = Callable[[Path], object]
Kind = tuple[Path, list[Case], Use]
_TEMPLATE = "{% for m in messages %}{{ m['content'] }}{% endfor %}"


def some(cases: Iterable[Case], count: int, rng: np.random.Generator) -> list[Case]:
    """So many of the cases; all for 0."""
    every = list(cases)
    if not 0 < count < len(every):
        return every
    return [every[i] for i in sorted(rng.choice(len(every), count, replace=False))]


def configs(folder: Path, count: int, seed: int) -> Kind:
    """`config.json` of every family, by turns."""
    import hf_helpers

    rng = np.random.default_rng(seed)
    names = ("llama3.1", "qwen3-window", "phi3-longrope", "gemma2", "mistral", "qwen2.5-yarn")
    cases: list[Case] = []
    for name in names:
        hf_helpers.write(name, folder / name)
        text = (folder / name / "config.json").read_text()
        cases += [
            _within(name, case)
            for case in (
                *hostile_cases.values("config.json", text),
                *hostile_cases.texts("config.json", text),
            )
        ]

    def use(path: Path) -> None:
        if path == folder:
            for name in names:
                models.load_decoder(path / name)
        else:
            models.load_decoder(path / (path / "which").read_text())

    return folder, some(cases, count, rng), use


def _within(name: str, case: Case) -> Case:
    def apply(path: Path) -> None:
        (path / "which").write_text(name)
        case.apply(path / name)

    return Case(f"{name}/{case.name}", case.file, case.words, apply)


def quantized(folder: Path, count: int, seed: int) -> Kind:
    """`config.json` of a quantized checkpoint."""
    config = models.LlamaConfig(64, 32, 48, 2, 2, 1, 16, 64)
    models.save_quantized(models.random_quantized_decoder(config), folder)
    text = (folder / "config.json").read_text()
    block = json.dumps({"quantization_config": json.loads(text)["quantization_config"]})
    others = {k: v for k, v in json.loads(text).items() if k != "quantization_config"}
    cases = []
    for case in hostile_cases.values("config.json", block):
        cases.append(_joined(case, others))
    cases += hostile_cases.values("config.json", text)
    return folder, some(cases, count, np.random.default_rng(seed)), models.load


def _joined(case: Case, others: dict[str, Any]) -> Case:
    def apply(folder: Path) -> None:
        case.apply(folder)
        path = folder / "config.json"
        path.write_text(json.dumps(others)[:-1] + ", " + path.read_text().lstrip("{ "))

    return Case(f"block {case.name}", case.file, case.words, apply)


def tokenizers(folder: Path, count: int, seed: int) -> Kind:
    """Every file that a tokenizer reads."""
    import tokenizer_helpers

    files = {
        "tokenizer_config.json": {
            "bos_token": "<s>",
            "eos_token": {"content": "</s>", "special": True},
            "extra_special_tokens": {"image_token": "<i>"},
            "chat_template": [{"name": "default", "template": _TEMPLATE}],
        },
        "special_tokens_map.json": {"pad_token": "</s>"},
        "generation_config.json": {"eos_token_id": [1, 2]},
        "config.json": {"vocab_size": 320},
    }
    with_added = {"added_tokens_decoder": {"2": {"content": "<|im_start|>", "special": True}}}
    tokenizer_helpers.save(tokenizer_helpers.byte_level(), folder, files)
    texts = {path.name: path.read_text() for path in folder.glob("*.json")}
    texts["tokenizer_config.json"] = json.dumps({**files["tokenizer_config.json"], **with_added})
    cases: list[Case] = []
    for name, text in texts.items():
        cases += hostile_cases.values(name, text)
        cases += hostile_cases.texts(name, text)

    def use(path: Path) -> None:
        tokenizer = models.load_tokenizer(path)
        tokens = tokenizer.encode("The quick brown fox <s> 😀")
        tokenizer.decode(tokens)
        stream = tokenizer.stream(tokens[:2])
        for token in (*tokens[2:8], None):
            stream(token)
        tokenizer.special_token("<s>")
        if tokenizer.chat_template is not None:
            models.render_chat(tokenizer, [{"role": "user", "content": "a"}])

    return folder, some(cases, count, np.random.default_rng(seed)), use


KINDS: dict[str, Callable[[Path, int, int], Kind]] = {
    "configs": configs,
    "quantized": quantized,
    "tokenizers": tokenizers,
}
