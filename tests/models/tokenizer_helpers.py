"""Small real tokenizers, of the two kinds that checkpoints come with, and their folders."""

import json
from pathlib import Path

from tokenizers import (
    AddedToken,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    trainers,
)
from tokenizers import processors as post_processors

CORPUS = [
    "The quick brown fox jumps over the lazy dog. A dog, a fox, and the other dog!",
    "def main(args):\n    for name in args:\n        print(name)\n",
    "Cafés, naïve façades; 你好，世界 and 😀 in one line.",
] * 4
TEXTS = (
    "The dog",
    "  two spaces, then a\ttab\n\nand lines",
    "Çafé 你好 😀😀 — “quoted”",
    "def f(x):\n    return x  # done",
)
SPECIAL = ["<s>", "</s>", "<|im_start|>", "<|im_end|>"]


def byte_level(vocab_size: int = 320) -> Tokenizer:
    """As Llama 3 and Qwen have it: BPE of bytes; <s> begins a text."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=SPECIAL,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    begin = tokenizer.token_to_id("<s>")
    tokenizer.post_processor = post_processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", begin)]
    )
    return tokenizer


def byte_fallback() -> Tokenizer:
    """As Llama 2 and Gemma have it: BPE of letters, bytes for others, a space before a text."""
    letters = sorted({c for text in CORPUS[:2] for c in text if c.isascii() and c not in " \n"})
    words = ["\u2581the", "\u2581dog", "\u2581fox", "\u2581a"]
    steps = [("\u2581", "t"), ("\u2581t", "h"), ("\u2581th", "e"), ("\u2581", "d"), ("o", "g")]
    steps += [("\u2581d", "og"), ("\u2581", "f"), ("o", "x"), ("\u2581f", "ox"), ("\u2581", "a")]
    names = ["<unk>", *SPECIAL, *(f"<0x{byte:02X}>" for byte in range(256)), "\u2581", *letters]
    for pair in steps:
        names += ["".join(pair)] if "".join(pair) not in names else []
    assert set(words) <= set(names)
    vocab = {name: i for i, name in enumerate(names)}
    tokenizer = Tokenizer(models.BPE(vocab, steps, unk_token="<unk>", byte_fallback=True))
    tokenizer.add_special_tokens([AddedToken(text, special=True) for text in ["<unk>", *SPECIAL]])
    tokenizer.normalizer = normalizers.Sequence(
        [normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")]
    )
    tokenizer.decoder = decoders.Sequence(
        [
            decoders.Replace("\u2581", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    tokenizer.post_processor = post_processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", vocab["<s>"])]
    )
    return tokenizer


KINDS = {"byte_level": byte_level, "byte_fallback": byte_fallback}


def save(tokenizer: Tokenizer, folder: Path, files: dict[str, dict | str] | None = None) -> Path:
    """Writes `tokenizer.json` and other files beside it."""
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    for name, content in (files or {}).items():
        text = content if isinstance(content, str) else json.dumps(content)
        (folder / name).write_text(text, encoding="utf-8")
    return folder


def folder(kind: str, path: Path) -> Path:
    """Writes one of `KINDS` as transformers reads it, too."""
    config = {"bos_token": "<s>", "eos_token": "</s>", "tokenizer_class": "PreTrainedTokenizerFast"}
    return save(KINDS[kind](), path, {"tokenizer_config.json": config})
