"""One table per op: a letter for every axis of every array."""

from turbojax.sharding.letters import OWN, table

_QKV = {"query": "BTNH", "key": "BSKH", "value": "BSKH"}
_PART = ("BTNH", "BTN")
_D_PART = {"d_out": "BTNH", "d_residual": "BTN"}
_RESULTS = {"out": "BTNH", "residual": "BTN", **_D_PART}

TURBO = table(
    "turbo_attention",
    _PART,
    **_QKV,
    query_seq_lengths="B",
    key_value_seq_lengths="B",
    extras=OWN,
)
TURBO_GRADIENT = table(
    "the gradient of turbo_attention",
    ("BTNH", "BSKH", "BSKH", "+" + OWN),
    **_QKV,
    query_seq_lengths="B",
    key_value_seq_lengths="B",
    extras=OWN,
    **_RESULTS,
)
PREFILL = table("prefill", (_PART, OWN), **_QKV, cache=OWN, lengths="B", extras=OWN)
DECODE = table("decode", _PART, query="BTNH", cache=OWN, query_seq_lengths="B", extras=OWN)
APPEND = table("append", OWN, cache=OWN, key="BSKH", value="BSKH", lengths="B")
STORE_PROMPT = table("prefill", OWN, cache=OWN, key="BSKH", value="BSKH", lengths="B")
