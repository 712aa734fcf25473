"""Mistral Small 3.1 and later, whose checkpoints also read images: the text model is a Mistral."""

from turbojax.models.families.mistral import MISTRAL
from turbojax.models.families.whole import Whole

MISTRAL3 = Whole(
    "mistral3",
    "Mistral3ForConditionalGeneration",
    MISTRAL,
    others=(
        *("vision_config", "image_token_index", "image_token_id", "projector_hidden_act"),
        *("vision_feature_layer", "multimodal_projector_bias", "spatial_merge_size"),
    ),
)
