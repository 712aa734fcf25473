"""Exact attention within prompts with images: the tokens of an image see all of it."""

import dataclasses

import jax
import jax.numpy as jnp

from turbojax import _checks, bounds
from turbojax.attention import score_modifiers as given
from turbojax.attention import turbo as turbo_attention
from turbojax.attention.options import PLAIN, AttentionOptions, Options, check_implementation
from turbojax.caches.base import Attend
from turbojax.numerics.config import TurboConfig

_EXACT = TurboConfig(mode="float", softmax="exact")


@dataclasses.dataclass(frozen=True, eq=False)
class ImageBlocks:
    """What attends within whole sequences that hold images (Gemma 3).

    Text is causal. A token of an image also sees the tokens of its image after itself. A layer's
    window hides what is before it, also of an image.

    Attributes:
      types: integers ``[B, T]``: 0 for text, others for images, see `turbojax.bounds.image_blocks`.
    """

    types: jax.Array

    def attend(
        self,
        query: jax.Array,
        key: jax.Array,
        value: jax.Array,
        *,
        lengths: jax.Array | None = None,
        mask: jax.Array | None = None,
        options: AttentionOptions = PLAIN,
        sinks: jax.Array | None = None,
        implementation: str | None = None,
    ) -> jax.Array:
        """Attends within ``[B, T, N or K, H]`` by `turbo_attention` without rounding.

        What lies past `lengths` (optional int32 ``[B]``), and what a `mask` (optional bool ``[B,
        T]``) hides, is padding, which reaches no other token; its own rows mean nothing.
        """
        _checks.check_query_key_value(query, key, value, one_head_dim=False)
        batch, tokens = query.shape[:2]
        seen, window = bounds.image_blocks(self.types), options.local_window_size
        if window is not None:
            left = bounds.window(batch, tokens, (window - 1, tokens))
            seen = bounds.intersect(seen, left)
        # Queries are of segment 1, and so are the keys that they may see.
        segments = (None, None) if mask is None else (jnp.ones_like(self.types), mask.astype("i4"))
        modifiers = given.complete(
            query,
            key,
            sinks=sinks,
            key_bounds=seen,
            query_segment_ids=segments[0],
            key_value_segment_ids=segments[1],
        )
        arguments = {**options.arguments(), "local_window_size": None, "is_causal": False}
        arguments["implementation"] = implementation
        out, _ = turbo_attention.attend(
            query,
            key,
            value,
            lengths,
            lengths,
            config=_EXACT,
            options=Options.complete(query.shape[3], **arguments),
            modifiers=modifiers,
        )
        return out


def own_implementation(implementation: str | None, names: tuple[str, ...]) -> str | None:
    """The implementation for `ImageBlocks`, given that of a cache's ops, whose names are `names`.

    ``"xla"`` and ``"triton"`` can attend so. The others name what writes caches and decodes; which
    implementation attends is chosen then. Raises ValueError unless the name is None or one of
    these, NotImplementedError for cuDNN, which is asked for to attend.
    """
    check_implementation(implementation, names)
    if implementation == "cudnn":
        raise NotImplementedError(
            "exact attention cannot run here: cudnn: it has no key_bounds, which prompts with "
            "images need"
        )
    return implementation if implementation in ("xla", "triton") else None


def image_attention(types: jax.Array, mask: jax.Array | None = None) -> Attend:
    """`ImageBlocks` without a cache, which passes through untouched; has a gradient.

    Args:
      types: see `ImageBlocks`.
      mask: bool ``[B, T]``, False for padding, or None.
    """
    blocks = ImageBlocks(types)

    def attend(query, key, value, cache=None, options=PLAIN, sinks=None):  # type: ignore[no-untyped-def]
        out = blocks.attend(query, key, value, mask=mask, options=options, sinks=sinks)
        return out, cache

    return attend
