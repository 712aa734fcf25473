"""Rotary embeddings that the tests of angles share."""

from tests.models.published import PUBLISHED

# As far into a text as the longest contexts go.
FAR = 100_000
# Rotary embeddings of published models, and some whose heads are no power of two.
ROTARIES = {
    **{name: keys for name, (keys, _, _) in PUBLISHED.items()},
    "heads of 80": {**PUBLISHED["Llama-2-7b"][0], "head_dim": 80},
    "linear": {
        **PUBLISHED["Llama-2-7b"][0],
        "rope_scaling": {"rope_type": "linear", "factor": 3.0},
    },
}
