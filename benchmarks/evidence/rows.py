"""Rows of the tables: what each measures, under the key that all tables share it by."""

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from benchmarks.evidence import channels, whole
from benchmarks.evidence.attends import Whole
from benchmarks.evidence.subject import Subject
from benchmarks.tables import Row
from turbojax.evaluation.intervals import bootstrap
from turbojax.evaluation.layers import layer_errors
from turbojax.evaluation.methods import method
from turbojax.evaluation.scoring import score

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


def cached(name: str, *, quick: bool = False) -> Spec:
    """Bits through a cache: a method of `turbojax.evaluation`, by its name."""
    return Spec(f"cache/{name}", lambda subject: _cached(subject, name, subject.decoder), quick)


def cached_int4(name: str, *, quick: bool = False) -> Spec:
    """The same with INT4 weights; what it costs is beyond these weights with an exact cache."""
    return Spec(f"int4/{name}", lambda subject: _cached(subject, name, subject.quantized), quick)


def _cached(subject: Subject, name: str, model: Any) -> Row:
    sizes = subject.sizes
    chosen = method(name, model.config)
    found = score(
        model, subject.tokens, chosen, prompt=sizes.prompt, batch_size=min(sizes.batch, len(subject.tokens))
    )
    same = found.choices == found.exact_choices
    return {
        **facts(found.bits, found.exact_bits, same, found.divergence, subject.owners),
        "cache_bytes": int(found.cache_bytes),
        "exact_cache_bytes": int(found.exact_cache_bytes),
    }


def layers(name: str, *, quick: bool = False) -> Spec:
    """Errors of each layer's attention output through a cache."""

    def measure(subject: Subject) -> Row:
        chosen = method(name, subject.decoder.config)
        prompt = subject.sizes.prompt
        found = layer_errors(subject.decoder, subject.layer_tokens, chosen, prompt=prompt)
        return {error: rounded(getattr(found, error)) for error in ERRORS}

    return Spec(f"layers/{name}", measure, quick)


def within(name: str, attend: Whole, *, long: bool = False, quick: bool = False) -> Spec:
    """Bits and errors of attention within whole windows.

    Args:
      name: of the row.
      attend: what attends.
      long: in the long windows.
      quick: see `Spec`.
    """

    def measure(subject: Subject) -> Row:
        tokens = subject.long_tokens if long else subject.tokens
        first = subject.long_first if long else subject.first
        exact = subject.long_exact if long else subject.exact
        batch = 1 if long else subject.sizes.whole_batch
        found = whole.score_whole(
            subject.decoder, tokens, attend, first=first, batch=batch, exact=exact
        )
        owners = subject.long_owners if long else subject.owners
        row = facts(found.bits, found.exact_bits, found.same_choice, found.divergence, owners)
        reported = [1.0 if math.isnan(x) else float(x) for x in found.reports]
        if not np.isnan(found.reports).all():
            row |= {"density": float(np.mean(reported)), "density_by_layer": rounded(reported)}
        errors = whole.output_errors(subject.tensors, attend=attend, first=subject.first)
        return row | {e: rounded(np.asarray(x)) for e, x in zip(ERRORS, errors, strict=True)}

    return Spec(f"{'long' if long else 'whole'}/{name}", measure, quick)


def channel_errors() -> Spec:
    """Channel-wise against token-wise codes of the model's keys and values."""

    def measure(subject: Subject) -> Row:
        _, key, value = subject.tensors
        return {"relative_l2": channels.errors_by_layer(key, value)}

    return Spec("channels", measure, quick=True)


def facts(
    bits: np.ndarray,
    exact_bits: np.ndarray,
    same: np.ndarray,
    divergence: np.ndarray,
    owners: Sequence[str],
) -> Row:
    """What a row says of scores ``[n, D]``: means over windows, with intervals over files.

    Figures that are not finite are None, and `nan_windows` counts the windows that have one.
    """
    finite = np.isfinite(bits).all(axis=1)
    by_window = np.asarray(bits, np.float64).mean(axis=1)
    cost = by_window - np.asarray(exact_bits, np.float64).mean(axis=1)
    apart = np.asarray(divergence, np.float64).mean(axis=1)
    row: Row = {
        "decoded_tokens": int(bits.size),
        "nan_windows": int((~finite).sum()),
        "exact_bits": number(np.mean(exact_bits, dtype=np.float64)),
        "bits": number(by_window.mean()),
        "same_greedy_choice": float(np.mean(same)),
        "cost_by_window": [number(x, 7) for x in cost],
    }
    for name, values in (("cost", cost), ("divergence", apart)):
        if not np.isfinite(values).all():
            row |= {name: None, f"{name}_interval": None}
            continue
        found = bootstrap(values, owners)
        row |= {
            name: number(found.mean),
            f"{name}_interval": [number(found.low), number(found.high)],
        }
    return row


def number(x: Any, digits: int | None = None) -> float | None:
    """A float for JSON; None if it is not finite."""
    value = float(x)
    if not math.isfinite(value):
        return None
    return value if digits is None else round(value, digits)


def rounded(values: Any) -> list[float | None]:
    """Numbers of layers, for JSON."""
    return [number(x, 6) for x in np.asarray(values)]
