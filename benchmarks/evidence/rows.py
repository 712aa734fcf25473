"""Rows of the tables: what each measures, under the key that all tables share it by."""

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.evidence import whole
from benchmarks.evidence.attends import Whole
from benchmarks.evidence.subject import Subject
from benchmarks.tables import Row
from turbojax import models
from turbojax.evaluation import ExactRun, Method, Scores, method, score
from turbojax.evaluation.layers import layer_errors
from turbojax.evaluation.run import text_row

ERRORS = ("cosine", "relative_l1", "rmse")


@dataclasses.dataclass(frozen=True)
class Spec:
    """A row that can be measured.

    Attributes:
      key: what it is stored under; rows of different tables with one key are one.
      measure: its figures, in plain JSON values.
      quick: whether ``--quick`` has it.
    """

    key: str
    measure: Callable[[Subject], Row] = dataclasses.field(compare=False)
    quick: bool = False


_OURS = ("4bit", "3bit", "2bit", "2/4bit")


def spelled_out(name: str) -> str:
    """The method that the name of a pinned row means, whatever the defaults of `TurboConfig` are.

    Without an option that says otherwise: products of prompts are in e4m3, and a buffer of 64
    tokens, or of a block of the size that is given, is compressed as a whole. These were the
    defaults when the tables were measured first.
    """
    base, _, text = name.partition(":")
    if base not in _OURS:
        return name
    given = dict(option.split("=", 1) for option in text.split(",") if option)
    meant = {"mode": "fp8", "flush": "all", "buffer_size": given.get("block", "64")} | given
    return f"{base}:{','.join(f'{key}={value}' for key, value in meant.items())}"


def meant(subject: Subject, name: str, config: models.TransformerConfig) -> Method:
    """The method that a row of a subject is of: as first measured, or as it is called today."""
    return method(spelled_out(name) if subject.pinned else name, config)


def cached(name: str, *, quick: bool = False) -> Spec:
    """Bits through a cache: a method of `turbojax.evaluation`, by its name."""

    def measure(subject: Subject) -> Row:
        return _cached(subject, name, subject.decoder, subject.exact_run)

    return Spec(f"cache/{name}", measure, quick)


def cached_int4(name: str, *, quick: bool = False) -> Spec:
    """The same with INT4 weights; what it costs is beyond these weights with an exact cache."""

    def measure(subject: Subject) -> Row:
        return _cached(subject, name, subject.quantized, subject.quantized_run)

    return Spec(f"int4/{name}", measure, quick)


def _cached(subject: Subject, name: str, model: Any, exact: ExactRun) -> Row:
    sizes, chosen = subject.sizes, meant(subject, name, model.config)
    found = score(
        model,
        subject.tokens,
        chosen,
        prompt=sizes.prompt,
        batch_size=sizes.batch,
        exact=exact,
    )
    return facts(found, subject.owners, subject.unit)


def layers(name: str, *, quick: bool = False) -> Spec:
    """Errors of each layer's attention output through a cache: of the tokens that are decoded."""

    def measure(subject: Subject) -> Row:
        chosen = meant(subject, name, subject.decoder.config)
        tokens = subject.layer_tokens
        prompt, batch = subject.sizes.prompt, subject.sizes.layer_windows
        found = layer_errors(subject.decoder, tokens, chosen, prompt=prompt, batch_size=batch)
        return {
            **{error: rounded(getattr(found.decode, error)) for error in ERRORS},
            "prefill": {error: rounded(getattr(found.prefill, error)) for error in ERRORS},
            "by_newest": rounded(_by_newest(found.by_token, prompt)),
        }

    return Spec(f"layers/{name}", measure, quick)


NEWEST = {"none": (0, 1), "1 to 7": (1, 8), "8 to 31": (8, 32), "32 to 63": (32, 64)}
"""Tokens past a multiple of 64, which is when the decode buffer of our default is compressed."""


def _by_newest(by_token: np.ndarray, prompt: int) -> np.ndarray:
    """Errors ``[layers, T]`` of what is decoded, by `NEWEST`: their means; NaN where none is."""
    past = np.arange(1, by_token.shape[1] + 1)[prompt:] % 64
    decoded = by_token[:, prompt:].mean(axis=0)
    chosen = [decoded[(past >= low) & (past < high)] for low, high in NEWEST.values()]
    return np.array([part.mean() if part.size else math.nan for part in chosen])


def within(name: str, attend: Whole, *, long: bool = False, quick: bool = False) -> Spec:
    """Bits of attention within whole windows, and its errors; of `long` ones bits alone."""

    def measure(subject: Subject) -> Row:
        tokens = subject.long_tokens if long else subject.tokens
        first = subject.long_first if long else subject.first
        exact = subject.long_exact if long else subject.exact
        batch = 1 if long else subject.sizes.whole_batch
        found = whole.score_whole(
            subject.decoder, tokens, attend, first=first, batch=batch, exact=exact
        )
        owners = subject.long_owners if long else subject.owners
        row = facts(found.scores, owners, subject.unit)
        del row["cache_bytes"], row["exact_cache_bytes"]
        if not np.isnan(found.reports).all():
            reported = np.nan_to_num(found.reports, nan=1.0)  # layers that attend exactly
            row |= {"density": float(reported.mean()), "density_by_layer": rounded(reported)}
        if long:
            return row
        errors = whole.output_errors(subject.tensors, attend=attend, first=subject.first)
        return row | {e: rounded(np.asarray(x)) for e, x in zip(ERRORS, errors, strict=True)}

    return Spec(f"{'long' if long else 'whole'}/{name}", measure, quick)


def channel_errors() -> Spec:
    """Channel-wise against token-wise codes of the model's keys and values."""

    def measure(subject: Subject) -> Row:
        _, key, value = subject.tensors
        return {"relative_l2": errors_by_layer(key, value)}

    return Spec("channels", measure, quick=True)


def facts(found: Scores, owners: Sequence[str], unit: str) -> Row:
    """What a row says of scores, see `text_row`: what tables show, and the cost of each window."""
    row: Row = text_row(found, np.asarray(owners), unit)
    for name in ("by_file", "by_window", "cost_by_file", "cost_by_half"):
        del row[name]
    row["cost_by_window"] = [number(x, 7) for x in row["cost_by_window"]]
    row["nan_windows"] = int((~np.isfinite(found.bits).all(axis=1)).sum())
    return row


def number(x: Any, digits: int) -> float | None:
    """A float for JSON; None if it is not finite."""
    value = float(x)
    return round(value, digits) if math.isfinite(value) else None


def rounded(values: Any) -> list[float | None]:
    """Numbers of layers, for JSON."""
    return [number(x, 6) for x in np.asarray(values)]


# Channel-wise against token-wise codes ------------------------------------------------------------

BITS = (2, 3, 4)
AXES = {"channel": 2, "token": 4}
"""Which axis of ``[L, n, T, K, H]`` shares a minimum and a scale, by what each group belongs to."""


def group_size(size: int) -> int:
    """The largest divisor of `size` up to 64."""
    return max(g for g in range(1, min(size, 64) + 1) if size % g == 0)


@functools.partial(jax.jit, static_argnames=("bits", "axis", "group"))
def group_errors(x: jax.Array, *, bits: int, axis: int, group: int) -> jax.Array:
    """Relative L2 error of each layer of ``[L, n, T, K, H]``, a minimum and a scale for a group.

    ``code = round((x - minimum) / scale)``, ``scale = (maximum - minimum) / (2**bits - 1)``, with
    minimum and scale in float32; groups along axis 2 are tokens of a channel, along 4 channels of a
    token.
    """
    shape = x.shape
    wide = x.astype(jnp.float32)
    grouped = wide.reshape(*shape[:axis], shape[axis] // group, group, *shape[axis + 1 :])
    low = jnp.min(grouped, axis=axis + 1, keepdims=True)
    step = (jnp.max(grouped, axis=axis + 1, keepdims=True) - low) / (2**bits - 1)
    codes = jnp.rint((grouped - low) / jnp.where(step == 0, 1, step))
    off = (low + codes * step).reshape(shape) - wide
    axes = tuple(range(1, len(shape)))
    return jnp.sqrt(jnp.sum(off * off, axes) / jnp.sum(wide * wide, axes))


def errors_by_layer(key: jax.Array, value: jax.Array) -> dict[str, dict[str, list[float]]]:
    """Of ``[L, n, T, K, H]``: ``{"key" | "value": {"channel-2" ..: [error of each layer]}}``.

    Tokens past the last whole group of 64 are left out.
    """
    group = group_size(key.shape[-1])
    tokens = key.shape[2] // group * group
    if not tokens:
        raise ValueError(f"{key.shape=} must have at least {group} tokens, a group")
    found: dict[str, dict[str, list[float]]] = {}
    for name, x in (("key", key), ("value", value)):
        found[name] = {
            f"{kind}-{bits}": np.asarray(
                group_errors(x[:, :, :tokens], bits=bits, axis=axis, group=group)
            ).tolist()
            for bits in BITS
            for kind, axis in AXES.items()
        }
    return found
