"""A decoder layer's weights as smoothing sees them, whatever model they come from."""

import dataclasses

import jax
import jax.numpy as jnp

from turbojax._pytrees import pytree
from turbojax.smoothing._values import check_finite, widened


@pytree
@dataclasses.dataclass(frozen=True)
class Projection:
    """A linear layer ``y = (x @ weight.T) * output_scale + bias``.

    Attributes:
      weight: ``[out, in]``.
      bias: ``[out]``, or None.
      output_scale: scalar, the reciprocal of what PTS multiplied the weight with, or None for 1.
    """

    weight: jax.Array
    bias: jax.Array | None = None
    output_scale: jax.Array | None = None

    def __call__(self, x: jax.Array) -> jax.Array:
        """Maps ``[..., in]`` to ``[..., out]`` in the weight's dtype, without quantization."""
        y = jnp.einsum("...i,oi->...o", x, self.weight)
        if self.output_scale is not None:
            y = y * self.output_scale.astype(y.dtype)
        if self.bias is not None:
            y = y + self.bias.reshape((1,) * (y.ndim - 1) + self.bias.shape)
        return y

    def scale_rows(self, factor: jax.Array) -> "Projection":
        """Outputs times `factor` ``[out]``: rows of the weight, and the bias."""
        weight = self.weight * factor.astype(self.weight.dtype)[:, None]
        bias = None if self.bias is None else self.bias * factor.astype(self.bias.dtype)
        return dataclasses.replace(self, weight=weight, bias=bias)

    def scale_columns(self, factor: jax.Array) -> "Projection":
        """Inputs times `factor` ``[in]``: columns of the weight."""
        return dataclasses.replace(
            self, weight=self.weight * factor.astype(self.weight.dtype)[None, :]
        )


PROJECTIONS = ("q", "k", "v", "o", "gate", "up", "down")
"""Names of the projections of a `LayerWeights`."""


@pytree
@dataclasses.dataclass(frozen=True)
class LayerWeights:
    """One decoder layer with RoPE, grouped queries and a gated feed-forward layer.

    What it computes, with ``rms(x) = x / sqrt(mean(x^2) + eps)``:
    ``h += o(attention(rope(q(a)), rope(k(a)), v(a)))`` of ``a = rms(h) * attention_norm``, then
    ``h += down(act(gate(m)) * up(m))`` of ``m = rms(h) * mlp_norm``. Where there are further norms,
    the heads of ``q(a)`` and ``k(a)`` become ``rms(.) * q_norm`` and ``rms(.) * k_norm``, and what
    is added to ``h`` becomes ``rms(.) * attention_post_norm`` and ``rms(.) * mlp_post_norm``. Where
    a norm before is missing, ``a`` and ``m`` are ``h``; in a parallel layer ``m`` is ``a``, and
    both are added at once. Nothing here depends on whether ``rms`` takes ``x`` less its mean, on
    which channels of ``q(a)`` and ``k(a)`` it is taken over, or on a factor of what is added.

    Invariants, checked by `validate`:
      - D is the residual width, N and K the query and key/value heads, H the head dim, F the inner
        width; N is a multiple of K, and query head n attends to head ``n // (N / K)``.
      - Rows of q, k and v and columns of o are heads one after the other; RoPE rotates channels i
        and ``i + R/2`` of a head together, of its first R, or 2i and 2i + 1 where it is
        interleaved.
      - There is a `q_norm` if and only if there is a `k_norm`.

    A layer of experts has all of theirs side by side: F is the sum of their widths, and
    every token sees some of these channels alone.

    Attributes:
      attention_norm: ``[D]``, factor of the norm before attention, or None.
      q: weight ``[N H, D]``.
      k: weight ``[K H, D]``.
      v: weight ``[K H, D]``.
      o: weight ``[D, N H]``.
      mlp_norm: ``[D]``, factor of the norm before the feed-forward layer, or None.
      gate: weight ``[F, D]``.
      up: weight ``[F, D]``.
      down: weight ``[D, F]``.
      num_kv_heads: K.
      head_dim: H, even.
      rotary_dim: R, even; H if None.
      q_norm: ``[N, H]``, factors of the norm of each head's queries, or None.
      k_norm: ``[K, H]``, the same of keys.
      attention_post_norm: ``[D]``, factor of the norm after attention, or None.
      mlp_post_norm: ``[D]``, factor of the norm after the feed-forward layer, or None.
      key_channel_scale: ``[K, H]``, by which rotated keys are divided and rotated queries
        multiplied (CRS, see `scale_rotated`), or None.
      router: weight ``[E, D]``, of the input of gate and up, by which experts are chosen, or None.
      interleaved: whether RoPE rotates channels 2i and 2i + 1 together.
      parallel: whether gate and up read what q, k and v do; there is no `mlp_norm` then.
      is_up_linear: whether ``act(gate(m))`` is multiplied with ``up(m)`` itself, and not with what
        a limit and a summand make of it, which must not be scaled. Biases of experts are those of
        the caller alone.
    """

    attention_norm: jax.Array | None
    q: Projection
    k: Projection
    v: Projection
    o: Projection
    mlp_norm: jax.Array | None
    gate: Projection
    up: Projection
    down: Projection
    num_kv_heads: int = dataclasses.field(metadata={"static": True})
    head_dim: int = dataclasses.field(metadata={"static": True})
    rotary_dim: int | None = dataclasses.field(default=None, metadata={"static": True})
    q_norm: jax.Array | None = None
    k_norm: jax.Array | None = None
    attention_post_norm: jax.Array | None = None
    mlp_post_norm: jax.Array | None = None
    key_channel_scale: jax.Array | None = None
    router: Projection | None = None
    interleaved: bool = dataclasses.field(default=False, metadata={"static": True})
    parallel: bool = dataclasses.field(default=False, metadata={"static": True})
    is_up_linear: bool = dataclasses.field(default=True, metadata={"static": True})

    @property
    def num_heads(self) -> int:
        """N, the query heads."""
        return self.q.weight.shape[0] // self.head_dim

    def validate(self) -> None:
        """Raises unless the shapes fit together and (outside `jit`) all values are finite.

        Raises:
          TypeError: if an array is not floating point.
          ValueError: otherwise.
        """
        if self.head_dim < 2 or self.head_dim % 2:
            raise ValueError(f"head_dim={self.head_dim} must be even and positive")
        rotary_dim = self.head_dim if self.rotary_dim is None else self.rotary_dim
        if rotary_dim % 2 or not 0 < rotary_dim <= self.head_dim:
            raise ValueError(
                f"rotary_dim={rotary_dim} must be even and 2 to head_dim={self.head_dim}"
            )
        if (self.q_norm is None) != (self.k_norm is None):
            raise ValueError("q_norm and k_norm must be given together")
        if self.parallel and self.mlp_norm is not None:
            raise ValueError("mlp_norm must be None in a parallel layer, which has one norm")
        if self.num_kv_heads < 1 or self.num_heads % self.num_kv_heads or not self.num_heads:
            raise ValueError(
                f"{self.num_heads} query heads must be a multiple of "
                f"num_kv_heads={self.num_kv_heads}"
            )
        for name, shape in self._shapes().items():
            projection: Projection = getattr(self, name)
            _check(f"{name}.weight", projection.weight, shape)
            if projection.bias is not None:
                _check(f"{name}.bias", projection.bias, shape[:1])
            if projection.output_scale is not None:
                _check(f"{name}.output_scale", projection.output_scale, ())
        if self.router is not None:
            wanted = self.router.weight.shape[0], self.o.weight.shape[0]
            _check("router.weight", self.router.weight, wanted)
        width, keys = self.o.weight.shape[:1], (self.num_kv_heads, self.head_dim)
        vectors: dict[str, tuple[int, ...]] = {
            **dict.fromkeys(("attention_norm", "mlp_norm"), width),
            **dict.fromkeys(("attention_post_norm", "mlp_post_norm"), width),
            **dict.fromkeys(("k_norm", "key_channel_scale"), keys),
            "q_norm": (self.num_heads, self.head_dim),
        }
        for name, shape_of in vectors.items():
            if getattr(self, name) is not None:
                _check(name, getattr(self, name), shape_of)

    def _shapes(self) -> dict[str, tuple[int, int]]:
        """What each projection's weight must be."""
        width, inner = self.o.weight.shape[0], self.gate.weight.shape[0]
        queries, keys = self.num_heads * self.head_dim, self.num_kv_heads * self.head_dim
        return {
            "q": (queries, width),
            "k": (keys, width),
            "v": (keys, width),
            "o": (width, queries),
            "gate": (inner, width),
            "up": (inner, width),
            "down": (width, inner),
        }


def widened_layer(layer: LayerWeights) -> LayerWeights:
    """The layer in float32 at least: folding into a narrower format would round, or overflow."""
    return jax.tree.map(lambda x: widened("weight", x), layer)


def _check(name: str, x: jax.Array, shape: tuple[int, ...]) -> None:
    if not jnp.issubdtype(x.dtype, jnp.floating):
        raise TypeError(f"{name}.dtype={x.dtype} must be floating point")
    if x.shape != shape or 0 in x.shape:
        raise ValueError(f"{name}.shape={x.shape} must be {shape}, no axis empty")
    check_finite(name, x)
