"""Caches whose tokens are split over devices, and the same on one device."""

import dataclasses
import functools
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from turbojax import TurboConfig, parallel
from turbojax.attention.options import AttentionOptions
from turbojax.caches.attend import of_call
from turbojax.caches.kinds import init_layer_cache, kind_of

BATCH, HEADS, CHANNELS, ROPE = 2, 2, 32, 16
AXIS = "sequence"
CONFIG = TurboConfig(
    block_kv=16,
    block_q=16,
    buffer_size=16,
    num_low_bit_key_heads=1,
    num_low_bit_value_heads=1,
    mode="int8",
)
KINDS: dict[str, Any] = {
    "exact": "exact",
    "2/4bit": CONFIG,
    "4bit": TurboConfig(block_kv=16, block_q=16, mode="int8"),
    "kv4": "kv4",
    "k8v4": "k8v4",
    "pages": "turbo4",
    "latent": "latent",
}
# Slots of every kind are whole on four devices.
MAX_LENGTH = 512


def mesh_of(devices: int) -> jax.sharding.Mesh:
    """One axis."""
    return jax.make_mesh(
        (devices,), (AXIS,), axis_types=(AxisType.Auto,), devices=jax.devices()[:devices]
    )


@dataclasses.dataclass
class Case:
    """A cache on one device, and split over several.

    Attributes:
      name: of the kind.
      devices: of the axis.
      whole: on one device.
      part: split.
    """

    name: str
    devices: int
    whole: Any
    part: Any

    @classmethod
    def empty(cls, name: str, devices: int, max_length: int = MAX_LENGTH, **config: Any) -> "Case":
        """Of no tokens; `config` changes the kind's."""
        kind = dataclasses.replace(KINDS[name], **config) if config else KINDS[name]
        given: dict[str, Any] = {"kind": kind, "dtype": jnp.float32}
        sizes = (BATCH, max_length, HEADS, CHANNELS)
        if name == "latent":
            given["rope_dim"] = ROPE
            sizes = (BATCH, max_length, 1, CHANNELS + ROPE)
        axes = parallel.Axes(sequence=AXIS, mesh=mesh_of(devices))
        whole = init_layer_cache(*sizes, **given)
        return cls(name, devices, whole, init_layer_cache(*sizes, **given, axes=axes))

    @property
    def specs(self) -> Any:
        """How the split one is split."""
        return parallel.partition_specs(self.part, self.axes)

    @property
    def axes(self) -> parallel.Axes:
        """Of its mesh."""
        return parallel.Axes(sequence=AXIS, mesh=mesh_of(self.devices))

    def split(self, f: Any, out: Any) -> Any:
        """A jitted function of a split cache and of arrays that all devices have."""

        def call(cache: Any, *arrays: Any) -> Any:
            specs = (self.specs, *[P()] * len(arrays))
            mapped = jax.shard_map(
                f, mesh=self.axes.mesh, in_specs=specs, out_specs=out, check_vma=True
            )
            return mapped(cache, *arrays)

        return jax.jit(call)

    def tokens(self, rng: np.random.Generator, count: int) -> list[jax.Array]:
        """Keys and values; of latents rotary keys and latents."""
        heads, widths = (
            (1, (ROPE, CHANNELS)) if self.name == "latent" else (HEADS, (CHANNELS, CHANNELS))
        )
        return [
            jnp.asarray(rng.normal(size=(BATCH, count, heads, width)), jnp.float32)
            for width in widths
        ]

    def query(self, rng: np.random.Generator, tokens: int) -> jax.Array:
        """Two for each KV head."""
        width = CHANNELS + (ROPE if self.name == "latent" else 0)
        return jnp.asarray(rng.normal(size=(BATCH, tokens, 2 * HEADS, width)), jnp.float32)

    def store(self, rng: np.random.Generator, count: int, lengths: list[int], prompt: bool) -> str:
        """Writes tokens to both; gives the program of the devices."""
        key, value = self.tokens(rng, count)
        real = jnp.asarray(lengths, jnp.int32)
        kind = kind_of(self.whole)
        write, of_axis = (
            (kind.store_prompt, parallel.store_prompt) if prompt else (kind.append, parallel.append)
        )

        def one(cache: Any, key: jax.Array, value: jax.Array, real: jax.Array) -> Any:
            return write(cache, key, value, lengths=real)

        def several(cache: Any, key: jax.Array, value: jax.Array, real: jax.Array) -> Any:
            return of_axis(cache, key, value, axis=AXIS, lengths=real)

        self.whole = jax.jit(one)(self.whole, key, value, real)
        compiled = self.split(several, self.specs).lower(self.part, key, value, real).compile()
        self.part = compiled(self.part, key, value, real)
        return compiled.as_text()

    def decode(self, query: jax.Array, window: int | None, sinks: Any) -> "Found":
        """Attends, on the devices and on one."""
        options = AttentionOptions(scale=0.2, local_window_size=window)
        static: Any = {**options.arguments(), "return_residual": True}

        def several(cache: Any, query: jax.Array) -> Any:
            out = parallel.decode(query, cache, AXIS, sinks=sinks, **static)
            return jax.tree.map(lambda x: x[None], out)  # of every device

        compiled = self.split(several, P(AXIS)).lower(self.part, query).compile()
        out, residual = (np.asarray(x) for x in compiled(self.part, query))
        kind = kind_of(self.whole)
        one = functools.partial(kind.decode, **of_call(query, options, sinks, "xla"))
        wanted = np.asarray(jax.jit(one)(query, self.whole)[0])
        return Found(out, residual, wanted, compiled.as_text())


@dataclasses.dataclass
class Found:
    """Outputs ``[devices, B, T, N, H]``, log-sum-exps, what one device gives, and the program."""

    out: np.ndarray
    residual: np.ndarray
    wanted: np.ndarray
    program: str


_COLLECTIVE = re.compile(
    r"= (\S+) (all-gather|all-reduce|reduce-scatter|all-to-all|collective-permute|"
    r"collective-broadcast)(?:-start)?\("
)


def collectives(program: str) -> list[tuple[str, str]]:
    """Shape and name of every collective of a compiled program."""
    return _COLLECTIVE.findall(program)
