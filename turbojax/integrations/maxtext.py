"""MaxText: turbojax attention in the training step of its models.

MaxText makes its models from a configuration, also inside its trainer, where nobody can change
them. So `turbojax_attention` changes what they are made of: within it, MaxText's attention layers
make an `AttentionOp` that attends with turbojax.
"""

import contextlib
import functools
import importlib
import inspect
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp

from turbojax._registry import ImplementationName
from turbojax.attention.options import check_implementation
from turbojax.attention.turbo import turbo_attention
from turbojax.numerics.config import TurboConfig

_MODULES = ("maxtext.layers.attention_op", "maxtext.layers.attentions", "maxtext.models.gpt3")
"""Where MaxText's models find the name ``AttentionOp``."""
_KINDS = ("global", "local_sliding", "full")
# Arguments of `AttentionOp.apply_attention` that change what is visible, or ask for more.
_REFUSED = (
    "previous_chunk",
    "bidirectional_mask",
    "indexer_mask",
    "compressed_mask",
    "decoder_segment_ids_kv",
    "record_max_logits",
)


@contextlib.contextmanager
def turbojax_attention(
    config: TurboConfig = TurboConfig(), *, implementation: ImplementationName | None = None
) -> Iterator[None]:
    """Models of MaxText that are made within attend with turbojax when they are trained.

    They keep doing so afterwards; models that were made before do not change. Parameters, and so
    checkpoints, are those of MaxText. Within, ``AttentionOp`` is another class in the whole
    process: make no models in other threads meanwhile.

    >>> from maxtext.trainers.pre_train import train  # doctest: +SKIP
    >>> with turbojax_attention():  # doctest: +SKIP
    ...     train.main(["train", "base.yml", "packing=true"])

    Segments (``decoder_segment_ids``), windows, soft caps, grouped queries and sinks are MaxText's.
    Its choice of a kernel (``attention``) and of dtypes within attention (``float32_logits``,
    ``float32_qk_product``) count in prompts and decoding alone, which stay MaxText's own.

    Args:
      config: numerics of attention, see `turbojax.turbo_attention`.
      implementation: as in `turbojax.turbo_attention`; None to choose.

    Raises:
      TypeError: if `config` is not a `TurboConfig`.
      ValueError: if there is no such implementation, or no attention layer was made within.
      NotImplementedError: in a training step that needs anything else: a type of attention other
        than ``global``, ``local_sliding`` and ``full`` (``mla``, ``chunk`` and so on), MoBA, masks
        of images or of an indexer, tokens split over devices (context parallelism), dropout within
        attention, logits recorded for QK-Clip.
    """
    if not isinstance(config, TurboConfig):
        raise TypeError(f"{config=} must be a TurboConfig")
    check_implementation(implementation)
    modules = [importlib.import_module(name) for name in _MODULES]
    known = modules[0].AttentionOp
    cls = _op_class(known, config, implementation)
    before = cls.made
    for module in modules:
        module.AttentionOp = cls  # type: ignore[attr-defined]
    try:
        yield
    finally:
        for module in modules:
            module.AttentionOp = known  # type: ignore[attr-defined]
    if cls.made == before:
        raise ValueError(
            "no AttentionOp was made within turbojax_attention: make the model within (models of "
            "use_m3_model have other layers)"
        )


@functools.cache
def _op_class(base: Any, config: TurboConfig, implementation: ImplementationName | None) -> Any:
    """A class of attention ops that attend with turbojax in training."""
    signature = inspect.signature(base.apply_attention)

    class TurboAttentionOp(base):
        made = 0  # how many there have been

        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            TurboAttentionOp.made += 1

        def apply_attention(self, *args: Any, **kwargs: Any) -> tuple[Any, Any, Any]:
            """See ``AttentionOp.apply_attention``: the output, which needs no normalization."""
            given = signature.bind(self, *args, **kwargs).arguments
            if given["model_mode"] != "train":
                out: tuple[Any, Any, Any] = super().apply_attention(*args, **kwargs)
                return out
            _check(self, given)
            return _attend(self, config, implementation, given), None, None

    return TurboAttentionOp


def _check(op: Any, given: dict[str, Any]) -> None:
    """Raises NotImplementedError for what turbojax would not do as MaxText does."""
    kind = op.attention_type.value
    if kind not in _KINDS:
        raise NotImplementedError(f"attention_type={kind!r} must be one of {', '.join(_KINDS)}")
    for name in _REFUSED:
        if given.get(name) is not None and given[name] is not False:
            raise NotImplementedError(f"{name} must not be given: turbojax has no such attention")
    if op.config.moba:
        raise NotImplementedError("moba=True must be False: turbojax has no such attention")
    if op.dropout_rate > 0:
        raise NotImplementedError(f"dropout_rate={op.dropout_rate} must be 0: there is no dropout")
    parts = op._context_parallel_size()
    if parts > 1:
        raise NotImplementedError(
            f"tokens are split over {parts} devices, must be whole: set context parallelism to 1"
        )


def _attend(
    op: Any, config: TurboConfig, implementation: ImplementationName | None, given: dict[str, Any]
) -> jax.Array:
    """Attends ``[B, T, N, H]``, which MaxText has scaled, to ``[B, T, K, H]``."""
    kind, ids = op.attention_type.value, given["decoder_segment_ids"]
    options: dict[str, Any] = {}
    if ids is not None:
        # MaxText hides keys of negative ids from all queries.
        options["query_segment_ids"] = jnp.where(ids < 0, -2, ids)
        options["key_value_segment_ids"] = jnp.where(ids < 0, -1, ids)
    if kind == "local_sliding":
        options["local_window_size"] = (op.sliding_window_size - 1, 0)
    if given.get("sinks") is not None:
        options["sinks"] = jnp.asarray(given["sinks"])
    out = turbo_attention(
        given["query"],
        given["key"],
        given["value"],
        config=config,
        scale=1.0,
        is_causal=kind != "full",
        logits_soft_cap=op.attn_logits_soft_cap or None,  # MaxText's 0 is none
        implementation=implementation,
        **options,
    )
    assert isinstance(out, jax.Array)
    return out
