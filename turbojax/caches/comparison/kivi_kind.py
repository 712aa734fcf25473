"""KIVI's and GEAR's caches, for comparison: ``"kivi4"``, ``"gear4"`` .., any `Kivi`."""

import dataclasses
from collections.abc import Mapping
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np

from turbojax.caches.base import Counts, Description, Grows
from turbojax.caches.comparison import kivi
from turbojax.caches.dequantized import Dequantized

_KEYS, _GROUPS, _VALUES, _PAIRS, _RESIDUAL = "keys", "groups", "values", "pairs", "residual"
_BLOCKS = "prompt_blocks"
_GEAR_RANK = 4


class KiviKind(Dequantized[kivi.KiviCache]):
    """`KiviCache`; a `Kivi` asks for it, and names stand for configs."""

    cls = kivi.KiviCache
    names = ("kivi4", "kivi3", "kivi2", "gear4", "gear3", "gear2")
    takes = (kivi.Kivi,)
    stored_as = "kivi"
    counting = ("lengths", _BLOCKS)
    grows: ClassVar[Mapping[str, Grows]] = {
        "key_codes": Grows(-3, _KEYS),
        "key_minimum": Grows(-3, _GROUPS),
        "key_scale": Grows(-3, _GROUPS),
        "value_codes": Grows(-3, _VALUES),
        "value_minimum": Grows(-3, _VALUES),
        "value_scale": Grows(-3, _VALUES),
        "key_residual": Grows(-3, _RESIDUAL),
        "value_residual": Grows(-3, _RESIDUAL),
        "key_left": Grows(-3, _KEYS),
        "key_right": Grows(-4, _PAIRS),
        "value_left": Grows(-3, _VALUES),
        "value_right": Grows(-4, _PAIRS),
    }

    def by_name(self, name: str, num_kv_heads: int, devices: int = 1) -> kivi.Kivi:
        """See `Kind.by_name`: the digit is the bits, and ``"gear4"`` has an error of rank 4."""
        del num_kv_heads, devices
        return kivi.Kivi(bits=int(name[-1]), rank=_GEAR_RANK if name.startswith("gear") else 0)

    def init(
        self,
        batch_size: int,
        max_length: int,
        num_kv_heads: int,
        head_dim: int,
        *,
        kind: kivi.Kivi,
        dtype: np.dtype,
    ) -> kivi.KiviCache:
        """See `Kind.init`."""
        sizes = (batch_size, max_length, num_kv_heads, head_dim)
        return kivi.init_cache(*sizes, config=kind, dtype=dtype)

    def append(
        self,
        cache: kivi.KiviCache,
        key: jax.Array,
        value: jax.Array,
        *,
        lengths: jax.Array | None = None,
        implementation: Any = None,
    ) -> kivi.KiviCache:
        """See `Kind.append`."""
        del implementation
        return kivi.append(cache, key, value, lengths=lengths)

    def store_prompt(
        self,
        cache: kivi.KiviCache,
        key: jax.Array,
        value: jax.Array,
        lengths: jax.Array,
        *,
        implementation: Any = None,
    ) -> kivi.KiviCache:
        """See `Kind.store_prompt`: of GEAR, all of a prompt has one pair of factors."""
        del implementation
        return kivi.store_prompt(cache, key, value, lengths=lengths)

    def dequantize(self, cache: kivi.KiviCache) -> tuple[jax.Array, jax.Array]:
        """See `Dequantized.dequantize`."""
        return kivi.dequantize(cache)

    def why_nan(self, cache: kivi.KiviCache) -> str | None:
        """See `Kind.why_nan`."""
        if cache.dtype != jnp.float32:
            return None
        return "float32 keys or values beyond 65504 become NaN: what groups share is in float16"

    def describe(self, cache: kivi.KiviCache) -> dict[str, Any]:
        """See `Stored.describe`."""
        return {**super().describe(cache), "config": dataclasses.asdict(cache.config)}

    def make(self, description: Description) -> kivi.KiviCache:
        """See `Stored.make`."""
        return self.make_kind(description, kivi.Kivi(**description["config"]))

    def counts(self, lengths: Counts, cache: kivi.KiviCache) -> Counts:
        """See `Stored.counts`."""
        config, held = cache.config, lengths["lengths"]
        keys, values = config.compressed(held)
        blocks = keys // config.residual_length
        return {
            **lengths,
            _KEYS: keys,
            _GROUPS: keys // config.group_size,
            _VALUES: values,
            _PAIRS: np.maximum(blocks + 1 - np.maximum(lengths[_BLOCKS], 1), 0),
            _RESIDUAL: np.minimum(held, config.residual_length),
        }

    def check_counts(self, counts: Counts, cache: kivi.KiviCache) -> None:
        """See `Stored.check_counts`."""
        most = counts[_KEYS] // cache.config.residual_length if cache.config.rank else 0
        if np.any(counts[_BLOCKS] > most):
            raise ValueError(
                f"{_BLOCKS}={counts[_BLOCKS].tolist()} must be at most {np.asarray(most).tolist()}"
            )


KIVI = KiviKind()
