"""Shapes of the models that are trained here: the shipped one, and larger ones to measure with.

The larger ones make errors of caches stand out of the noise: they predict better than the shipped
model, from up to 16,384 bytes, by heads of 128 channels as in Llama 3 and Qwen 3, two queries to a
key. They are not shipped. Rotary frequencies follow `turbojax.finetune.settings.for_context`: the
slowest pair of channels turns over 16k no further than the shipped model's over 4k.
"""

import dataclasses

from turbojax.models import TransformerConfig

EMBEDDED = "embedded"

_SHIPPED = TransformerConfig(
    vocab_size=256,
    hidden_size=256,
    intermediate_size=768,
    num_layers=8,
    num_heads=8,
    num_kv_heads=4,
    head_dim=64,
    max_length=4096,
    tie_embeddings=True,
)
_LONG = dataclasses.replace(_SHIPPED, head_dim=128, max_length=16384, rope_theta=50000.0)

SHAPES = {
    EMBEDDED: _SHIPPED,
    "32m": dataclasses.replace(_LONG, hidden_size=512, intermediate_size=1536),
    "59m": dataclasses.replace(_LONG, hidden_size=640, intermediate_size=2048, num_layers=10),
}
"""Name -> shape; numbers in names are parameters, in millions."""
