"""`config.json` of every family: the least there must be, and windows."""

from tests.models.published import ARCHITECTURES

SIZES = {
    "vocab_size": 100,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
# Keys for which transformers has a default that it cannot compute with.
_NEEDED = {"deepseek_v2": {"num_experts_per_tok": 6}}


def least(family: str, **keys) -> dict:
    """A config.json with nothing that has a default."""
    found = {"architectures": [ARCHITECTURES[family]], "model_type": family, **SIZES}
    return {**found, **_NEEDED.get(family, {}), **keys}


def least_files(family: str) -> tuple[dict, dict]:
    """Two of them: in the second, the number of heads that share keys is left out, too."""
    other = least(family, num_attention_heads=32, hidden_size=256)
    del other["num_key_value_heads"]
    return least(family), other


# Keys of a file, and the window of each of two layers.
WINDOWS = [
    ("mistral", {"sliding_window": None}, ()),
    ("mistral", {"sliding_window": 9}, (9, 9)),
    ("mistral", {}, (4096, 4096)),
    ("qwen2", {"sliding_window": 9}, ()),
    ("qwen2", {"sliding_window": 9, "use_sliding_window": True}, ()),
    (
        "qwen2",
        {"sliding_window": 9, "use_sliding_window": True, "max_window_layers": 1},
        (None, 9),
    ),
    (
        "qwen3",
        {
            "sliding_window": 9,
            "use_sliding_window": True,
            "layer_types": ["sliding_attention", "full_attention"],
        },
        (9, None),
    ),
    ("mixtral", {}, ()),
    ("mixtral", {"sliding_window": 9}, (9, 9)),
    ("qwen3_moe", {"sliding_window": 9}, ()),
    ("qwen3_moe", {"sliding_window": 9, "use_sliding_window": True}, (9, 9)),
    ("phi3", {}, ()),
    ("phi3", {"sliding_window": 9}, (9, 9)),
    ("gemma2", {"sliding_window": 9}, (9, None)),
    ("gemma2", {"layer_types": ["full_attention", "full_attention"]}, ()),
    ("gpt_oss", {}, (128, None)),
    ("gpt_oss", {"sliding_window": 9}, (9, None)),
    ("gpt_oss", {"layer_types": ["full_attention", "full_attention"]}, ()),
    ("deepseek_v2", {}, ()),
    ("deepseek_v3", {"first_k_dense_replace": 1}, ()),
    ("gemma3_text", {"sliding_window": 9}, (9, 9)),
    ("gemma3_text", {"sliding_window": 9, "sliding_window_pattern": 2}, (9, None)),
    ("gemma3_text", {"sliding_window": 9, "sliding_window_pattern": 1}, ()),
    (
        "gemma3_text",
        {"sliding_window": 9, "layer_types": ["full_attention", "sliding_attention"]},
        (None, 9),
    ),
    ("smollm3", {"sliding_window": 9}, ()),
    ("smollm3", {"sliding_window": 9, "use_sliding_window": True}, ()),
    (
        "smollm3",
        {"sliding_window": 9, "use_sliding_window": True, "no_rope_layers": [0, 1]},
        (9, None),
    ),
    ("cohere2", {"sliding_window": 9}, (9, 9)),
    ("cohere2", {"sliding_window": 9, "sliding_window_pattern": 2}, (9, None)),
    ("cohere2", {"layer_types": ["full_attention"] * 2}, ()),
]


def cases(table: dict) -> list[tuple]:
    """``(family, change, message)`` of each entry of ``{family: [(change, message)]}``."""
    return [(name, *case) for name, found in table.items() for case in found]
