"""What a kind of cache is: how caches of one class are made, written, read, cut and stored."""

import abc
from collections.abc import Mapping
from typing import Any, ClassVar, Generic, Literal, NamedTuple, Protocol, TypeVar

import jax
import jax.numpy as jnp
import numpy as np

from turbojax import _checks
from turbojax._registry import IMPLEMENTATION_NAMES
from turbojax.attention.options import PLAIN, AttentionOptions, Options
from turbojax.attention.score_modifiers import NO_MODIFIERS, ScoreModifiers
from turbojax.caches import rolling_buffer
from turbojax.numerics.config import TurboConfig

Cache = Any

Attended = tuple[jax.Array, jax.Array | None]
"""Outputs ``[B, T, N, H]`` and their log-sum-exp, float32 ``[B, T, N]``."""

C = TypeVar("C")
"""The class of a kind's caches."""

Description = Mapping[str, Any]
"""Kind, sizes and configuration of a cache, in plain JSON values."""

Counts = Mapping[str, np.ndarray]
"""How many tokens, or blocks of them, each sequence holds: int ``[..., B]`` by name."""


class Attend(Protocol):
    """How a layer attends, and what it does with its cache."""

    def __call__(
        self,
        query: jax.Array,
        key: jax.Array,
        value: jax.Array,
        cache: Cache,
        options: AttentionOptions = PLAIN,
        sinks: jax.Array | None = None,
    ) -> tuple[jax.Array, Cache]:
        """Attends for one layer.

        Args:
          query: ``[B, T, N, H]``, rotated.
          key: ``[B, T, K, H]``, rotated.
          value: ``[B, T, K, H]``.
          cache: this layer's cache, or None.
          options: of this layer.
          sinks: float ``[N]``, this layer's, if it has any, see `turbojax.turbo_attention`. Layers
            without sinks do not pass this argument, so an `Attend` for these need not take it.

        Returns:
          The output ``[B, T, N, H]`` and the layer's new cache, of the same structure.

        Raises:
          NotImplementedError: if it cannot attend with these options.
        """
        ...


class LayerCache(Protocol):
    """What the caches of every kind have: a frozen dataclass, registered as a pytree.

    Attributes:
      lengths: int32 ``[B]``, tokens so far; all are held, but by a rolling buffer
        (`turbojax.caches.rolling_buffer`).
      overflowed: bool ``[B]``, True where a call under `jit` had to leave tokens out.
      max_length: tokens each sequence may grow to.
      num_kv_heads: key/value heads, `K`.
      head_dim: channels of a head, `H`.
      dtype: of the keys and values it takes.
      nbytes: bytes of all arrays held.
      compression_ratio: bytes of a bfloat16 cache of `max_length` tokens over `nbytes`.
    """

    __dataclass_fields__: ClassVar[dict[str, Any]]

    @property
    def lengths(self) -> jax.Array: ...  # noqa: D102

    @property
    def overflowed(self) -> jax.Array: ...  # noqa: D102

    @property
    def max_length(self) -> int: ...  # noqa: D102

    @property
    def num_kv_heads(self) -> int: ...  # noqa: D102

    @property
    def head_dim(self) -> int: ...  # noqa: D102

    @property
    def dtype(self) -> np.dtype: ...  # noqa: D102

    @property
    def nbytes(self) -> int: ...  # noqa: D102

    @property
    def compression_ratio(self) -> float: ...  # noqa: D102


class Grows(NamedTuple):
    """The axis of an array that is stored only as far as it is in use.

    Attributes:
      axis: counted from the end; that of the sequences comes before it.
      counted: the name of its counts, see `Stored.counts`.
    """

    axis: int
    counted: str = "lengths"


class Stored(abc.ABC, Generic[C]):
    """How caches of one class lie in files; `turbojax.caches.files` does the rest.

    Attributes:
      cls: the class.
      stored_as: the kind's name in files, which may never change.
      grows: the axes of which only what is held is stored, by the name of a field, at any depth;
        arrays of other fields are stored whole.
      counting: the fields that say how many tokens a sequence holds.
    """

    cls: type[C]
    stored_as: str
    grows: ClassVar[Mapping[str, Grows]] = {}
    counting: tuple[str, ...] = ("lengths",)

    @abc.abstractmethod
    def describe(self, cache: C) -> dict[str, Any]:
        """Sizes and configuration, in plain JSON values; the cache's arrays may be abstract."""

    @abc.abstractmethod
    def make(self, description: Description) -> C:
        """An empty cache of a description, laid out as by `to_rows`; called under `eval_shape`."""

    def to_rows(self, cache: C) -> C:
        """The cache as files hold it, all arrays ``[B, ...]``; ValueError if that cannot be."""
        return cache

    def from_rows(self, cache: C, description: Description) -> C:
        """The inverse of `to_rows`."""
        del description
        return cache

    def counts(self, lengths: Counts, cache: C) -> Counts:
        """The counts that `grows` names, from the arrays of `counting`; `cache` has no arrays."""
        del cache
        return lengths

    def check_counts(self, counts: Counts, cache: C) -> None:
        """Raises ValueError for impossible counts other than negative or too large ones."""

    def validate(self, cache: C) -> None:
        """Raises ValueError if the values of a cache from a file break an invariant of its class.

        Shapes, dtypes and lengths have been checked. Layers may be stacked, see `validate_layers`.
        """


class Kind(Stored[C]):
    """A kind of KV cache: all that models, files and commands ask of a cache of this class.

    One object stands for each kind, in `turbojax.caches.kinds`. It has no state of its own: its
    methods take caches and return caches, and work under `jit`. What is said here of arguments and
    results holds for every kind; `docs/add_a_kind.md` shows how to write one.

    Attributes:
      names: on command lines.
      takes: what stands for this kind where Python code asks for a cache (`CacheKind`): a name, or
        the class of a configuration.
      implementations: the names that ``implementation=`` may have for its ops.
      has_rolling_buffers: whether `init` takes a `local_window_size`, and the cache then holds no
        more than what such a window needs, see `turbojax.caches.rolling_buffer`.
      has_latents: whether it is for latent attention and `init` takes a `rope_dim`, see
        `turbojax.caches.latent.kind`.
      splits_tokens: whether devices can have different tokens of a sequence, see
        `turbojax.parallel`.
      in_one_pass: an `Attend` with the result of decoding token by token through the cache, for
        all tokens of whole sequences at once; None where a token's stored form depends on its
        neighbours.
    """

    names: tuple[str, ...]
    takes: tuple[str | type, ...]
    implementations: tuple[str, ...] = IMPLEMENTATION_NAMES
    has_rolling_buffers: bool = False
    has_latents: bool = False
    splits_tokens: bool = True
    in_one_pass: Attend | None = None

    def stands_for(self, kind: Any) -> bool:
        """Whether this is the kind that `kind`, a value of `CacheKind`, asks for."""
        names = [x for x in self.takes if isinstance(x, str)]
        classes = tuple(x for x in self.takes if isinstance(x, type))
        return kind in names if isinstance(kind, str) else isinstance(kind, classes)

    def by_name(self, name: str, num_kv_heads: int, devices: int = 1) -> Any:
        """The value of `CacheKind` that one of `names` stands for: itself, if not overridden.

        Args:
          name: one of them.
          num_kv_heads: of the model.
          devices: over how many its heads are to be split.

        Raises:
          ValueError: if a model with so many KV heads cannot have it.
        """
        del num_kv_heads, devices
        return name

    @abc.abstractmethod
    def init(
        self,
        batch_size: int,
        max_length: int,
        num_kv_heads: int,
        head_dim: int,
        *,
        kind: Any,
        dtype: np.dtype,
    ) -> C:
        """An empty cache.

        Where the kind `has_rolling_buffers`, it also takes a `local_window_size`, see
        `init_layer_cache`.

        Args:
          batch_size: sequences, `B`.
          max_length: tokens each can hold.
          num_kv_heads: key/value heads, `K`.
          head_dim: channels, `H`.
          kind: the value of `CacheKind` that asks for it.
          dtype: of queries, keys and values.

        Raises:
          ValueError: if a size does not fit.
        """

    @abc.abstractmethod
    def append(
        self,
        cache: C,
        key: jax.Array,
        value: jax.Array,
        *,
        lengths: jax.Array | None = None,
        implementation: Any = None,
    ) -> C:
        """See `turbojax.append`; a kind with one way to write takes None and ``"xla"``."""

    def writer(self, implementation: Any, tokens: int) -> Any:
        """The `implementation` of `append` for so many tokens beside one of `decode` or `prefill`.

        The same where it writes too; None, to choose, where it only attends.
        """
        del implementation, tokens
        return None

    def dequantize(
        self, cache: C, *, dtype: jax.typing.DTypeLike | None = None
    ) -> tuple[jax.Array, jax.Array]:
        """See `turbojax.dequantize`."""
        del dtype
        raise NotImplementedError(f"a {type(cache).__name__} holds no keys and values of heads")

    def slots(self, kind: Any, max_length: int) -> tuple[int, int]:
        """How a sequence's tokens can be split over devices, which have whole slots of them.

        Args:
          kind: the value of `CacheKind` that asks for the cache.
          max_length: tokens each sequence can hold.

        Returns:
          Tokens of a slot, and slots.
        """
        del kind
        return 1, max_length

    def store_prompt(
        self,
        cache: C,
        key: jax.Array,
        value: jax.Array,
        lengths: jax.Array,
        *,
        implementation: Any = None,
    ) -> C:
        """Stores prompts that something else attended to, in empty sequences; see `append`."""
        return self.append(cache, key, value, lengths=lengths, implementation=implementation)

    @abc.abstractmethod
    def prefill(
        self,
        query: jax.Array,
        key: jax.Array,
        value: jax.Array,
        cache: C,
        lengths: jax.Array | None = None,
        *,
        options: Options,
        modifiers: ScoreModifiers = NO_MODIFIERS,
    ) -> tuple[Attended, C]:
        """`turbojax.prefill` of checked options: attends within prompts and stores them.

        Args:
          query: ``[B, T, N, H]``.
          key: ``[B, T, K, H]``.
          value: ``[B, T, K, H]``.
          cache: the cache.
          lengths: optional int32 ``[B]``, of the prompts; what lies past them is padding, which
            reaches neither other tokens nor the cache.
          options: of the call.
          modifiers: of the call; only sinks.

        Returns:
          The output ``[B, T, N, H]`` in the query's dtype, where rows of padding mean nothing, with
          the log-sum-exp, which may be None unless it is wanted; and the cache.

        Raises:
          ValueError: if a shape does not fit or there is no such implementation.
          NotImplementedError: if it cannot run this here.
        """

    @abc.abstractmethod
    def decode(
        self,
        query: jax.Array,
        cache: C,
        query_lengths: jax.Array | None = None,
        *,
        options: Options,
        modifiers: ScoreModifiers = NO_MODIFIERS,
    ) -> Attended:
        """`turbojax.decode` of checked, causal options: the last `T` tokens attend to all held.

        The cache already holds the queries' own keys and values. Arguments, results and errors are
        those of `prefill`; `query_lengths` are optional int ``[B]``, the real queries.
        """

    def append_and_decode(
        self,
        query: jax.Array,
        key: jax.Array,
        value: jax.Array,
        cache: C,
        lengths: jax.Array | None = None,
        query_lengths: jax.Array | None = None,
        *,
        options: Options,
        modifiers: ScoreModifiers = NO_MODIFIERS,
    ) -> tuple[Attended, C]:
        """`append`, then `decode`; a kind whose kernels can do both at once overrides this.

        `lengths` are those of `append`, `query_lengths` those of `decode`, as are other arguments
        and errors. What writes is chosen beside `options.implementation`.
        """
        writer = self.writer(options.implementation, key.shape[1])
        cache = self.append(cache, key, value, lengths=lengths, implementation=writer)
        return self.decode(query, cache, query_lengths, options=options, modifiers=modifiers), cache

    def most_new_tokens(self, cache: C, options: AttentionOptions) -> int | None:
        """How many new tokens can be stored before they attend; None if there is no limit.

        Raises:
          ValueError: if the cache does not keep all that a layer with these options sees.
        """
        if not self.has_rolling_buffers:
            return None
        held: Any = cache
        return rolling_buffer.most_new_tokens(held, options.local_window_size)

    def take(self, cache: C, first: jax.Array | int, count: int) -> C:
        """Sequences ``first`` to ``first + count - 1``, as a cache of their own."""
        return jax.tree.map(lambda x: jax.lax.dynamic_slice_in_dim(x, first, count), cache)

    def put(self, cache: C, part: C, first: jax.Array | int) -> C:
        """The cache with its sequences from `first` on replaced by those of `part`."""
        return jax.tree.map(
            lambda x, new: jax.lax.dynamic_update_slice_in_dim(x, new, first, 0), cache, part
        )

    def whole_attention(self, kind: Any) -> Literal["exact"] | TurboConfig:
        """What attends within whole sequences where there is no cache: as prompts do, if it can."""
        del kind
        return "exact"

    def why_nan(self, cache: C) -> str | None:
        """What, in words, makes outputs NaN although no key or value was; None if nothing does."""
        del cache
        return None

    def describe(self, cache: C) -> dict[str, Any]:
        """See `Stored.describe`; leading axes of `lengths` are those of stacked layers."""
        sizes: Any = cache
        window = sizes.window if self.has_rolling_buffers else None
        return {
            # Files from before there were rolling buffers say nothing.
            **({} if window is None else {"local_window_size": window}),
            "stacked": list(sizes.lengths.shape[:-1]),
            "batch_size": sizes.lengths.shape[-1],
            "max_length": sizes.max_length,
            "num_kv_heads": sizes.num_kv_heads,
            "head_dim": sizes.head_dim,
            "dtype": sizes.dtype.name,
        }

    def make(self, description: Description) -> C:
        """See `Stored.make`: what `init` makes for the first of `takes`."""
        return self.make_kind(description, self.takes[0])

    def make_kind(self, description: Description, kind: Any) -> C:
        """What `init` makes for `kind`, a value of `CacheKind`, in the sizes of a description."""
        init: Any = self.init  # only some take a window
        window = {x: description[x] for x in ("local_window_size",) if x in description}
        cache: C = init(*sizes_of(description), kind=kind, dtype=dtype_of(description), **window)
        return cache


def is_split(x: Any) -> bool:
    """Whether devices have different parts of an array; False where that is not known."""
    return isinstance(x, jax.Array) and _checks.is_concrete(x) and not x.is_fully_replicated


def sizes_of(description: Description) -> list[int]:
    """The sizes that `Kind.init` takes, in its order."""
    names = ("batch_size", "max_length", "num_kv_heads", "head_dim")
    return [description[name] for name in names]


def dtype_of(description: Description) -> np.dtype:
    """The dtype of a description."""
    return jnp.dtype(description["dtype"])


def sides_of(local_window_size: int | None) -> tuple[int, int] | None:
    """The window of a layer, which counts a query's own token, as ops take it: (left, right)."""
    return AttentionOptions(local_window_size=local_window_size).arguments()["local_window_size"]


ROWS = "rows"
"""The name of what `rows_in_use` counts."""


def rows_in_use(lengths: Counts, rows: int) -> Counts:
    """`Stored.counts` of a cache with a row for each token, or of a rolling buffer."""
    return {**lengths, ROWS: np.minimum(lengths["lengths"], rows)}


def validate_layers(cache: Any) -> None:
    """Calls `validate` of every layer's cache; several may be stacked in one."""
    if cache.lengths.ndim == 1:
        cache.validate()
        return
    for layer in range(len(cache.lengths)):
        validate_layers(jax.tree.map(lambda x: x[layer], cache))  # noqa: B023
