"""A tiny random Gemma 3 that reads images: its files, images and prompts.

The windows are shorter than an image, which is shorter than the prompts, and the token in whose
places images stand is not in the vocabulary.
"""

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file

from tests.models import hf_helpers as hf

NAME = "gemma3"
"""The variant whose rule makes the weights."""
TOKENS = 9
IMAGE, BEGIN, END = 64, 61, 62
CONFIG: dict[str, Any] = {
    "architectures": ["Gemma3ForConditionalGeneration"],
    "model_type": "gemma3",
    "mm_tokens_per_image": TOKENS,
    "image_token_index": IMAGE,
    "boi_token_index": BEGIN,
    "eoi_token_index": END,
    "torch_dtype": "float32",
    "text_config": {
        "model_type": "gemma3_text",
        "vocab_size": 64,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "query_pre_attn_scalar": 16,
        "sliding_window": 6,
        "max_position_embeddings": 128,
        "layer_types": ["sliding_attention", "sliding_attention", "full_attention"],
    },
    "vision_config": {
        "model_type": "siglip_vision_model",
        "hidden_size": 36,
        "intermediate_size": 40,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "image_size": 24,
        "patch_size": 4,
        "vision_use_head": False,
    },
}

KINDS = {
    "published": ("language_model.model.", "vision_tower.vision_model.", ""),
    "in memory": ("model.language_model.", "model.vision_tower.vision_model.", "model."),
    "since 5": ("language_model.model.", "vision_tower.", ""),
    "in memory since 5": ("model.language_model.", "model.vision_tower.", "model."),
}
"""How versions of transformers begin the names of text model, tower and projector."""


def config(**keys: Any) -> dict[str, Any]:
    """`CONFIG`, the caller's own, with some keys changed; `tower` and `text` are of the parts."""
    found = json.loads(json.dumps(CONFIG))
    found["vision_config"] |= keys.pop("tower", {})
    found["text_config"] |= keys.pop("text", {})
    return found | keys


def shapes() -> dict[str, tuple[int, ...]]:
    """Every tensor of transformers 5, as it is in memory."""
    text, tower = CONFIG["text_config"], CONFIG["vision_config"]
    size, inner, head = text["hidden_size"], text["intermediate_size"], text["head_dim"]
    found: dict[str, tuple[int, ...]] = {
        "model.language_model.embed_tokens.weight": (text["vocab_size"], size),
        "model.language_model.norm.weight": (size,),
    }
    norms = ("input_layernorm", "post_attention_layernorm")
    norms += ("pre_feedforward_layernorm", "post_feedforward_layernorm")
    heads = {"q": text["num_attention_heads"], "k": 2, "v": 2}
    for i in range(text["num_hidden_layers"]):
        layer = f"model.language_model.layers.{i}."
        found |= {f"{layer}{norm}.weight": (size,) for norm in norms}
        found |= {f"{layer}self_attn.{x}_norm.weight": (head,) for x in "qk"}
        found |= {f"{layer}self_attn.{x}_proj.weight": (n * head, size) for x, n in heads.items()}
        found[f"{layer}self_attn.o_proj.weight"] = (size, heads["q"] * head)
        found |= {f"{layer}mlp.{x}_proj.weight": (inner, size) for x in ("gate", "up")}
        found[f"{layer}mlp.down_proj.weight"] = (size, inner)
    width, wide, patch = (tower[x] for x in ("hidden_size", "intermediate_size", "patch_size"))
    vision = "model.vision_tower."
    found[f"{vision}embeddings.patch_embedding.weight"] = (width, 3, patch, patch)
    found[f"{vision}embeddings.patch_embedding.bias"] = (width,)
    found[f"{vision}embeddings.position_embedding.weight"] = (36, width)
    matrices = {f"self_attn.{x}": (width, width) for x in ("q_proj", "k_proj", "v_proj")}
    matrices |= {"self_attn.out_proj": (width, width)}
    matrices |= {"mlp.fc1": (wide, width), "mlp.fc2": (width, wide)}
    for i in range(tower["num_hidden_layers"]):
        layer = f"{vision}encoder.layers.{i}."
        for name, shape in matrices.items():
            found |= {f"{layer}{name}.weight": shape, f"{layer}{name}.bias": shape[:1]}
        for name in ("layer_norm1", "layer_norm2"):
            found |= {f"{layer}{name}.{x}": (width,) for x in ("weight", "bias")}
    found |= {f"{vision}post_layernorm.{x}": (width,) for x in ("weight", "bias")}
    found["model.multi_modal_projector.mm_input_projection_weight"] = (width, size)
    found["model.multi_modal_projector.mm_soft_emb_norm.weight"] = (width,)
    return found


def weight(name: str, shape: tuple[int, ...]) -> np.ndarray:
    """A tensor by its name in memory of transformers 5; see `hf.weight`."""
    found = hf.weight(NAME, name, shape)
    # The scales of LayerNorms lie around 1; the others are stored less one.
    return found + np.float32(1) if re.search(r"vision.*norm\d?\.weight", name) else found


def tensors(kind: str = "published") -> dict[str, np.ndarray]:
    """What the files hold."""
    begin = ("model.language_model.", "model.vision_tower.", "model.")
    found = {}
    for name, shape in shapes().items():
        old, new = next((x, y) for x, y in zip(begin, KINDS[kind], strict=True) if x in name)
        found[new + name.removeprefix(old)] = weight(name, shape)
    return found


def write(folder: Path, kind: str = "published", *, more: Any = None, **keys: Any) -> Path:
    """Writes the checkpoint; `more` are tensors to be added, or with None to be left out."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config(**keys)), encoding="utf-8")
    content = {k: v for k, v in {**tensors(kind), **(more or {})}.items() if v is not None}
    save_file(content, folder / "model.safetensors", {"format": "pt"})
    return folder


def images() -> list[np.ndarray]:
    """Three images, uint8 ``[H, W, 3]``, of different sizes: smooth, with some noise."""
    found = []
    for i, (height, width) in enumerate([(24, 24), (40, 31), (18, 60)]):
        noise = np.random.PCG64([i, 7]).random_raw(height * width * 3).reshape(height, width, 3)
        y, x = np.mgrid[:height, :width]
        wave = [np.sin(y / (3 + c) + i) + np.cos(x / (4 - c) + i) for c in range(3)]
        smooth = 110 + 50 * np.stack(wave, -1)
        found.append((smooth + (noise % 32).astype(np.float64)).clip(0, 255).astype(np.uint8))
    return found


_ONE = [BEGIN, *[IMAGE] * TOKENS, END]
PROMPTS = (
    [2, 5, 6, *_ONE, 7, 8, 9, *_ONE, 12, 13, 14, 3],
    [2, *_ONE, 40, 41],
    [2, 20, 21, 22, 23, 24, 25, 26, 27, 28],
)
"""With the first two images, with the third one, and with none."""
OF_PROMPTS = (slice(0, 2), slice(2, 3), slice(0, 0))
"""Each prompt's images."""
NEW = 8


def batch() -> tuple[np.ndarray, np.ndarray]:
    """All prompts, padded on the right, and their lengths."""
    lengths = np.array([len(x) for x in PROMPTS], np.int32)
    tokens = np.zeros((len(PROMPTS), lengths.max()), np.int32)
    for row, prompt in zip(tokens, PROMPTS, strict=True):
        row[: len(prompt)] = prompt
    return tokens, lengths


TEMPLATE = (
    "{{ bos_token }}{% for x in messages[0]['content'] %}"
    "{{ '<start_of_image>' if x['type'] == 'image' else x['text'] }}{% endfor %}"
)


def write_tokenizer(folder: Path) -> None:
    """Words, and the special tokens of images under the numbers of the config."""
    import tokenizers

    special = {"<bos>": 2, "<start_of_image>": 61, "<end_of_image>": 62, "<image_soft_token>": 64}
    words = {f"w{i}": i for i in range(61) if i not in (2, 3, 4, 5)} | {
        "what": 3,
        "is": 4,
        "this": 5,
    }
    model = tokenizers.models.WordLevel({**words, **special}, unk_token="w0")
    tokenizer = tokenizers.Tokenizer(model)
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    tokenizer.add_special_tokens([tokenizers.AddedToken(x, special=True) for x in special])
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {"bos_token": "<bos>", "chat_template": TEMPLATE}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings), encoding="utf-8")
