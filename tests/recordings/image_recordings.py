"""What transformers made of the tiny Gemma 3 of `image_helpers`, its images and prompts.

Arrays by name: `pixels` ``[3, 24, 24, 3]``, the output of tower and projector, `tower` and `soft`;
of prompt `i` its logits ``[T, V]`` and greedy tokens, ``logits0`` and ``greedy0``; `loss`, and its
gradients, ``d ...`` with a parameter's name.
"""

import functools
from pathlib import Path

import numpy as np

FILE = Path(__file__).parent / "images.npz"
_LAYER = "model.vision_tower.encoder.layers.0."
DIFFERENTIATED = (
    "model.language_model.embed_tokens.weight",
    "model.language_model.layers.0.self_attn.q_proj.weight",
    "model.multi_modal_projector.mm_input_projection_weight",
    "model.multi_modal_projector.mm_soft_emb_norm.weight",
    f"{_LAYER}self_attn.k_proj.weight",
    f"{_LAYER}layer_norm1.bias",
    "model.vision_tower.embeddings.patch_embedding.weight",
)


@functools.cache
def arrays() -> dict[str, np.ndarray]:
    with np.load(FILE) as file:
        return dict(file)
