"""One table per op: a letter for every axis of every array."""

from turbojax.sharding.notation import OWN, table

_QKV = {"query": "BTNH", "key": "BSKH", "value": "BSKH"}
_PART = ("BTNH", "BTN")
_D_PART = {"d_out": "BTNH", "d_residual": "BTN"}
_RESULTS = {"out": "BTNH", "residual": "BTN", **_D_PART}
_NEWEST = {"query": "BTNH", "cache": OWN, "query_seq_lengths": "B", "modifiers": OWN}

TURBO = table(
    "turbo_attention",
    _PART,
    **_QKV,
    query_seq_lengths="B",
    key_value_seq_lengths="B",
    modifiers=OWN,
)
TURBO_GRADIENT = table(
    "the gradient of turbo_attention",
    ("BTNH", "BSKH", "BSKH", OWN + "+BN"),
    **_QKV,
    query_seq_lengths="B",
    key_value_seq_lengths="B",
    modifiers=OWN,
    **_RESULTS,
)
PREFILL = table("prefill", (_PART, OWN), **_QKV, cache=OWN, lengths="B", modifiers=OWN)
DECODE = table("decode", _PART, **_NEWEST)
APPEND = table("append", OWN, cache=OWN, key="BSKH", value="BSKH", lengths="B")
DEQUANTIZE = table("dequantize", ("BSKH", "BSKH"), cache=OWN)
STORE_PROMPT = table("prefill", OWN, cache=OWN, key="BSKH", value="BSKH", lengths="B")

FIREQ_PREFILL = table("fireq.prefill", (_PART, OWN), **_QKV, cache=OWN, lengths="B", modifiers=OWN)
FIREQ_DECODE = table("fireq.decode", _PART, **_NEWEST)
FIREQ_APPEND = table("fireq.append", OWN, cache=OWN, key="BSKH", value="BSKH", lengths="B")

EXACT = table("exact attention", "BTNH", **_QKV, modifiers=OWN)
EXACT_DECODE = table("exact decode", _PART, query="BTNH", cache=OWN, modifiers=OWN)
EXACT_KERNEL = table("exact decode", "BTNH", query="BTNH", cache=OWN)
EXACT_KERNEL_PART = table("exact decode", _PART, query="BTNH", cache=OWN)
EXACT_APPEND = table("exact append", OWN, cache=OWN, key="BSKH", value="BSKH", lengths="B")

PAGED = table(
    "paged_attention",
    _PART,
    query="BTNH",
    cache=OWN,
    block_tables="BL",
    lengths="B",
    query_seq_lengths="B",
    modifiers=OWN,
)
_ONE_POOL = "whose tokens all go to the one pool that every device would have to change alike"
PAGED_APPEND = table(
    "paged.append",
    (OWN, "BTKC"),
    cache=OWN,
    key="BTKH",
    value="BTKH",
    block_tables="BL",
    lengths="B",
    new_lengths="B",
).needs_whole("B", _ONE_POOL)
PAGED_APPEND_AND_ATTEND = table(
    "paged.append_and_attend",
    (_PART, OWN),
    query="BTNH",
    key="BTKH",
    value="BTKH",
    cache=OWN,
    block_tables="BL",
    lengths="B",
    new_lengths="B",
    query_seq_lengths="B",
).needs_whole("B", _ONE_POOL)

_LEVELS = {
    "levels": "BNTS",
    "query_seq_lengths": "B",
    "key_value_seq_lengths": "B",
    "modifiers": OWN,
}
POOLED_LEVELS = table("pooled_attention", "BNTS", **_LEVELS)
POOLED = table("pooled_attention", ("BTNH", "BTN", "BTN"), **_QKV, **_LEVELS)
POOLED_GRADIENT = table(
    "the gradient of pooled_attention",
    ("BTNH", "BSKH", "BSKH", OWN + "+BN"),
    **_QKV,
    **_LEVELS,
    **_RESULTS,
)

_LATENT_QUERIES = {"query_latent": "BTNC", "query_rope": "BTNR"}
LATENT = table(
    "latent_attention",
    ("BTNC", "BTN"),
    **_LATENT_QUERIES,
    cache=OWN,
    query_seq_lengths="B",
    modifiers=OWN,
)
PAGED_LATENT = table(
    "latent_attention",
    ("BTNC", "BTN"),
    **_LATENT_QUERIES,
    cache=OWN,
    block_tables="BL",
    lengths="B",
    query_seq_lengths="B",
    modifiers=OWN,
)
LATENT_APPEND = table(
    "append_latents", (OWN, "BT"), cache=OWN, latent="BTC", rope="BTR", lengths="B"
)
PAGED_LATENT_APPEND = table(
    "append_latents",
    (OWN, "BT"),
    cache=OWN,
    latent="BTC",
    rope="BTR",
    block_tables="BL",
    lengths="B",
    new_lengths="B",
).needs_whole("B", _ONE_POOL)

_PRODUCT = {"x": "...I", "weight": OWN, "bias": "F"}
MATMUL = table("int4_matmul", "...F", **_PRODUCT, residual="...F")
MATMUL_GRADIENT = table(
    "the gradient of int4_matmul", ("...I+F", "F+..."), x="...I", weight=OWN, bias="F", d_out="...F"
)
_GROUPED = "which belong to experts wherever these are"
GROUPED_MATMUL = table(
    "grouped_matmul",
    "MF",
    x="MI",
    weight="E" + OWN,
    group_sizes="E",
    bias="EF",
).needs_whole("M", _GROUPED)
GROUPED_MATMUL_GRADIENT = table(
    "the gradient of grouped_matmul",
    ("MI+F", "EF"),
    x="MI",
    weight="E" + OWN,
    group_sizes="E",
    bias="EF",
    d_out="MF",
).needs_whole("M", _GROUPED)
QUANTIZE = table("fp8_tokens", OWN, x="...I", scale="I").needs_whole(
    "I", "of which a token's scale takes all"
)
