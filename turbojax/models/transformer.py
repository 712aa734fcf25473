"""A decoder in Flax nnx: RMSNorm, RoPE, grouped queries, gated feed-forward layers.

The layers are one `Block` whose parameters carry a leading layer axis, applied with
`jax.lax.scan`: compile time does not grow with depth. Where some layers have experts and some have
none, those are two `Block`s. For generation `turbojax.models.decoder`
takes the layers apart.
"""

import functools
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike

from turbojax import _checks
from turbojax.caches import (
    Attend,
    AttentionOptions,
    causal_attention,
    image_attention,
    padded_attention,
)
from turbojax.caches.base import Cache
from turbojax.caches.layered import attend_of
from turbojax.flax.norms import RMSNorm
from turbojax.flax.projections import AttentionProjections
from turbojax.models.config import TransformerConfig
from turbojax.models.feed_forward import Experts, FeedForward, output_gain
from turbojax.models.latent_attention import LatentAttention
from turbojax.models.tensor_parallel.layout import hidden_axes
from turbojax.models.vision.soft_tokens import Images, among, embedded
from turbojax.remat import Remat, save_all_but_gathered, save_attention
from turbojax.rotary import Rope
from turbojax.sharding import Axes


def embed(
    table: jax.Array,
    tokens: jax.Array,
    config: TransformerConfig,
    dtype: DTypeLike,
    over: tuple[str, ...] = (),
) -> jax.Array:
    """Embeddings ``[..., D]`` of integer tokens ``[...]``, scaled if the model asks for it.

    A token that is not in the vocabulary gets NaN, instead of another token's embedding. `table` is
    ``[V, D]``, or within `shard_map` the device's rows, which are split over the axes `over`.
    """
    if over:

        def look(tokens: jax.Array) -> jax.Array:
            return table.at[tokens].get(mode="fill", fill_value=0, wrap_negative_indices=False)

        return embed_split(look, table.shape[0], tokens, config, dtype, over)
    found = table.at[tokens].get(mode="fill", fill_value=jnp.nan, wrap_negative_indices=False)
    return scale_embeddings(found.astype(dtype), config)


def embed_split(
    look: Callable[[jax.Array], jax.Array],
    rows: int,
    tokens: jax.Array,
    config: TransformerConfig,
    dtype: DTypeLike,
    over: tuple[str, ...],
) -> jax.Array:
    """`embed` of a table with `rows` rows on each device; `look` gives zeros for other numbers."""
    found = jax.lax.psum(look(tokens - jax.lax.axis_index(over) * rows).astype(dtype), over)
    known = (tokens >= 0) & (tokens < config.vocab_size)
    found = jnp.where(known[..., None], found, jnp.asarray(jnp.nan, found.dtype))
    return scale_embeddings(found, config)


def scale_embeddings(hidden: jax.Array, config: TransformerConfig) -> jax.Array:
    """Embeddings times the model's factor, rounded to their dtype."""
    if config.embedding_scale is None:
        return hidden
    return hidden * jnp.asarray(config.embedding_scale, hidden.dtype)


def project(
    hidden: jax.Array, table: jax.Array, dtype: DTypeLike, config: TransformerConfig
) -> jax.Array:
    """Float32 logits ``[..., V]``: ``[..., D]`` times `table` ``[V, D]``, multiplied in `dtype`."""
    logits = jnp.einsum(
        "...d,vd->...v", hidden, table.astype(dtype), preferred_element_type=jnp.float32
    )
    return finish_logits(logits, config)


def finish_logits(logits: jax.Array, config: TransformerConfig) -> jax.Array:
    """Logits times the model's factor, then ``c * tanh(logits / c)``, if it has these."""
    if config.logit_scale is not None:
        logits = logits * jnp.float32(config.logit_scale)
    soft_cap = config.final_soft_cap
    return logits if soft_cap is None else soft_cap * jnp.tanh(logits / soft_cap)


def scale_added(out: jax.Array, config: TransformerConfig) -> jax.Array:
    """What a layer adds to the residual stream, times the model's factor."""
    if config.residual_scale is None:
        return out
    return (out.astype(jnp.float32) * jnp.float32(config.residual_scale)).astype(out.dtype)


def _attention(
    config: TransformerConfig, dtypes: dict[str, Any]
) -> AttentionProjections | LatentAttention:
    """The linear layers around a layer's attention."""
    gain = output_gain(config)
    if config.latent is not None:
        return LatentAttention(config, output_gain=gain, **dtypes)
    return AttentionProjections(
        config.hidden_size,
        config.num_heads,
        config.num_kv_heads,
        config.rope,
        qkv_bias=config.qkv_bias,
        output_bias=config.output_bias,
        qk_norm_eps=config.norm_eps if config.qk_norm else None,
        norm_offset=config.norm_offset,
        joint_qk_norm=config.joint_qk_norm,
        output_gain=gain,
        use_sinks=config.attention_sinks,
        **dtypes,
    )


class Block(nnx.Module):
    """One decoder layer: attention, then a feed-forward layer, or both on the same normed input."""

    def __init__(
        self,
        config: TransformerConfig,
        *,
        has_experts: bool = False,
        dtype: DTypeLike,
        param_dtype: DTypeLike,
        rngs: nnx.Rngs,
    ) -> None:
        dtypes: dict[str, Any] = {"dtype": dtype, "param_dtype": param_dtype, "rngs": rngs}
        norm = functools.partial(
            RMSNorm,
            config.hidden_size,
            config.norm_eps,
            offset=config.norm_offset,
            centered=config.layer_norm,
            param_dtype=param_dtype,
        )
        self.attention_norm = norm() if config.pre_norms else None
        self.attention = _attention(config, dtypes)
        self.attention_post_norm = norm() if config.post_norms else None
        self.mlp_norm = norm() if config.pre_norms and not config.parallel else None
        self.config = config
        self.mlp = (Experts if has_experts else FeedForward)(config, **dtypes)
        self.mlp_post_norm = norm() if config.post_norms else None

    def __call__(
        self,
        hidden: jax.Array,
        angles: jax.Array | None,
        attend: Attend,
        cache: Cache,
        options: AttentionOptions,
        rope: Rope | None,
        axes: Axes | None = None,
    ) -> tuple[jax.Array, Cache]:
        """Maps the residual stream ``[B, T, D]`` to the next layer's and updates the cache.

        `angles` are those of `rope`, None without it. Within `shard_map` heads and inner sizes are
        split over `axes`: sums over devices come before norms and the stream.
        """
        over = hidden_axes(axes)
        normed, attention = _normed(self.attention_norm, hidden), self.attention
        if isinstance(attention, LatentAttention):
            assert rope is not None
            assert angles is not None
            out, cache = attention(normed, angles, attend, cache, options, rope, over)
        else:
            of_heads = (over, () if axes is None else axes.of_dimension("heads"))
            heads = attention.heads(normed, angles, rope, rotates=rope is not None, over=of_heads)
            out, cache = attend(*heads, cache, options, *attention.given_sinks())
            out = attention.output(out, over)
        hidden = hidden + scale_added(_normed(self.attention_post_norm, out), self.config)
        if not self.config.parallel:
            normed = _normed(self.mlp_norm, hidden)
        out = _normed(self.mlp_post_norm, self.mlp(normed, over))
        return hidden + scale_added(out, self.config), cache


def _normed(norm: RMSNorm | None, x: jax.Array) -> jax.Array:
    return x if norm is None else norm(x)


class Transformer(nnx.Module):
    """A decoder of one of `families.FAMILIES`.

    The longest text of each call decides LongRoPE's factors, with caches the config's `max_length`.

    Invariants:
      - Every parameter under `blocks` has a leading axis of `config.num_layers`. Where some layers
        have experts and some have none, `blocks` are the layers with, and `dense_blocks`, otherwise
        None, those without; see `TransformerConfig.stack_of`.
      - `lm_head` is None if and only if `config.tie_embeddings`.
      - Norms, RoPE and logits are computed in float32, everything else in `dtype`.

    Attributes:
      config: the shape.
      dtype: compute dtype; the parameters are cast to it where they are used.
      remat: whether training recomputes each layer in the backward pass to save memory;
        ``"attention"`` for all of it but rounded, pooled or ring attention, whose results are kept
        (`turbojax.remat`). Exact attention is recomputed all the same.
      unroll: layers per iteration of the scan. More compile time, less copying in training.
      gather: makes a layer's parameters, ``{stack: parameters}``, whole when the layer runs, if a
        device holds only slices of them; None where they are whole. What it gathers
        (`jax.lax.all_gather`) is not kept for the backward pass, but gathered again.
      axes: whose `heads` split heads and inner sizes of the layers, within `shard_map`; None where
        a device has all of them.
    """

    def __init__(
        self,
        config: TransformerConfig,
        *,
        dtype: DTypeLike | None = None,
        param_dtype: DTypeLike = jnp.float32,
        remat: Remat = False,
        unroll: int = 1,
        rngs: nnx.Rngs,
    ) -> None:
        """Initializes random parameters.

        Args:
          config: the shape.
          dtype: compute dtype, by default `param_dtype`.
          param_dtype: dtype of the parameters.
          remat: see the class.
          unroll: see the class.
          rngs: source of the initial parameters (stream `params`).

        Raises:
          ValueError: if `remat` is none of these.
        """
        if remat not in (False, True, "attention"):
            raise ValueError(f"{remat=} must be True, False or 'attention'")
        self.config = config
        self.dtype = jnp.dtype(param_dtype if dtype is None else dtype)
        self.remat = remat
        self.unroll = unroll
        self.gather: Callable[[Any], Any] | None = None
        self.axes: Axes | None = None
        init = nnx.initializers.normal(config.hidden_size**-0.5)
        table = (config.vocab_size, config.hidden_size)
        self.embedding = nnx.Param(init(rngs.params(), table, param_dtype))

        def create(layers: int, has_experts: bool) -> Block:
            @nnx.split_rngs(splits=layers)
            @nnx.vmap(in_axes=(0,), out_axes=0)
            def create_blocks(rngs: nnx.Rngs) -> Block:
                return Block(
                    config,
                    has_experts=has_experts,
                    dtype=self.dtype,
                    param_dtype=param_dtype,
                    rngs=rngs,
                )

            blocks: Block = create_blocks(rngs)
            return blocks

        dense = 0 if config.experts is None else len(config.experts.dense_layers)
        self.blocks = create(config.num_layers - dense, config.experts is not None)
        self.dense_blocks = create(dense, False) if dense else None
        self.norm = RMSNorm(
            config.hidden_size,
            config.norm_eps,
            offset=config.norm_offset,
            centered=config.layer_norm,
            param_dtype=param_dtype,
        )
        self.lm_head = (
            None if config.tie_embeddings else nnx.Param(init(rngs.params(), table, param_dtype))
        )

    def __call__(
        self,
        tokens: jax.Array,
        *,
        positions: jax.Array | None = None,
        attention_mask: jax.Array | None = None,
        attend: Attend = causal_attention,
        caches: Cache = None,
        images: Images | None = None,
    ) -> Any:
        """Predicts the next token at every position.

        Args:
          tokens: `[B, T]` integers in `[0, vocab_size)`. This is not checked: with another token,
            the logits of its sequence are NaN.
          positions: `[B, T]` integers, where each token stands in its sequence; by default
            `arange(T)`, or counted from the first token that the mask does not hide.
          attention_mask: optional bool or integer `[B, T]`, False or 0 for padding, on either side:
            no token attends to it, and its own logits mean nothing. Only with exact attention.
          attend: called once per layer, after RoPE, see `Attend`.
          caches: any pytree whose leaves have a leading layer axis; each layer gets its slice.
          images: optional, what stands in the places of the tokens ``images.token_id``, see
            `turbojax.models.vision.soft_tokens`: of a Gemma 3. A token of an image sees all of it.
            Only with exact attention and without caches; gradients reach the images, too. Under
            `jit` their number is not checked: a place beyond the last image has NaN.

        Returns:
          Logits `[B, T, vocab_size]` float32; with `caches` the pair of logits and new caches.

        Raises:
          TypeError: if tokens or positions are not integers, or `images` of another type.
          ValueError: if tokens are not `[B, T]` with T at most `max_length`, or positions or the
            mask have another shape, or a cache leaf has no leading axis of `num_layers`, or a mask
            or images are given with another `attend`, or images with caches, or the tokens have
            not the places of these images.
        """
        hidden, new_caches = self.hidden(
            tokens,
            positions=positions,
            attention_mask=attention_mask,
            attend=attend,
            caches=caches,
            images=images,
        )
        logits = self.logits(hidden)
        return logits if caches is None else (logits, new_caches)

    def hidden(
        self,
        tokens: jax.Array,
        *,
        positions: jax.Array | None = None,
        attention_mask: jax.Array | None = None,
        attend: Attend = causal_attention,
        caches: Cache = None,
        images: Images | None = None,
    ) -> tuple[jax.Array, Cache]:
        """What the logits of every position are made of; arguments and errors as of a call.

        Returns:
          ``[B, T, D]`` after the last norm, for `logits`, and the new caches.
        """
        if not isinstance(tokens, jax.Array):
            tokens = _checks.as_int32("tokens", tokens)
        self._check(tokens, positions, caches)
        soft, mask = None, None
        if attention_mask is not None:
            mask = _check_mask(attention_mask, tokens, attend)
            # Padding may hold any number; its value, times a weight of 0, must not be NaN.
            tokens = jnp.where(mask, tokens, jnp.zeros_like(tokens))
            attend = padded_attention(mask)
            if positions is None:
                positions = jnp.maximum(jnp.cumsum(mask, axis=1, dtype=jnp.int32) - 1, 0)
        if positions is None:
            positions = jnp.broadcast_to(jnp.arange(tokens.shape[1])[None, :], tokens.shape)
            longest: Any = tokens.shape[1]
        else:
            longest = jnp.max(positions) + 1
        # Cached keys were rotated before, with the factors for the longest sequence.
        within = longest if caches is None else None
        angles = {rope: rope.angles(positions, within) for rope in self.config.ropes}
        if images is not None:
            _check_alone(attend, mask, caches)
            tokens, soft = among(images, tokens, self.config.hidden_size)
            attend = image_attention(soft.types, mask)
        hidden = embedded(embed(self.embedding[...], tokens, self.config, self.dtype), soft)
        hidden, new_caches = self._apply_blocks(hidden, angles, attend, caches)
        return self.norm(hidden), new_caches

    def logits(self, hidden: jax.Array) -> jax.Array:
        """Logits ``[..., vocab_size]`` float32 of what `hidden` returns, or of some of its rows."""
        weight = self.embedding if self.lm_head is None else self.lm_head
        return project(hidden, weight[...], self.dtype, self.config)

    def _apply_blocks(
        self, hidden: jax.Array, angles: Mapping[Rope, jax.Array], attend: Attend, caches: Cache
    ) -> tuple[jax.Array, Cache]:
        """Scans the stacked layers over the residual stream `[B, T, D]`.

        An iteration applies one period of layers: as many as it takes until what they attend by,
        their options, their rotary embeddings and their stacks repeat.
        """
        config, count = self.config, self.config.num_layers
        places = [config.stack_of(i) for i in range(count)]
        kinds = [
            (attend_of(attend, i), config.attention_options(i), config.rope_of(i), places[i][0])
            for i in range(count)
        ]
        period = next(
            p for p in range(1, count + 1) if count % p == 0 and kinds == kinds[:p] * (count // p)
        )
        repeats = count // period
        names = dict.fromkeys(name for name, _ in places)
        stacks = {name: nnx.split(getattr(self, name)) for name in names}

        def apply_block(
            hidden: jax.Array,
            params: Any,
            cache: Cache,
            kind: int,
        ) -> tuple[jax.Array, Cache]:
            attend, options, rope, name = kinds[kind]
            if self.gather is not None:
                params = self.gather({name: params})[name]
            block = nnx.merge(stacks[name][0], params)
            rotated = None if rope is None else angles[rope]
            return block(hidden, rotated, attend, cache, options, rope, self.axes)

        if self.remat:
            policy = save_attention if self.remat == "attention" else None
            apply_block = jax.checkpoint(apply_block, static_argnums=3, policy=policy)
        elif self.gather is not None:
            apply_block = jax.checkpoint(
                apply_block, static_argnums=3, policy=save_all_but_gathered
            )

        def apply_period(hidden: jax.Array, layers: tuple[Any, Cache]) -> tuple[jax.Array, Cache]:
            params, caches = layers
            new_caches = []
            for i, (name, number) in enumerate(places[:period]):
                own = jax.tree.map(lambda x, number=number: x[number], params[name])
                cache = jax.tree.map(lambda x, i=i: x[i], caches)
                hidden, new_cache = apply_block(hidden, own, cache, i)
                new_caches.append(new_cache)
            return hidden, jax.tree.map(lambda *x: jnp.stack(x), *new_caches)

        def group(x: jax.Array) -> jax.Array:
            return x.reshape(repeats, x.shape[0] // repeats, *x.shape[1:])

        params = {name: state for name, (_, state) in stacks.items()}
        layers = jax.tree.map(group, (params, caches))
        unroll = max(self.unroll // period, 1)
        hidden, new_caches = jax.lax.scan(apply_period, hidden, layers, unroll=unroll)
        return hidden, jax.tree.map(lambda x: x.reshape(count, *x.shape[2:]), new_caches)

    def _check(self, tokens: jax.Array, positions: jax.Array | None, caches: Cache) -> None:
        if not jnp.issubdtype(tokens.dtype, jnp.integer):
            raise TypeError(f"tokens.dtype={tokens.dtype} must be an integer type")
        if tokens.ndim != 2:
            raise ValueError(f"tokens.shape={tokens.shape} must be [B, T]")
        if tokens.shape[1] > self.config.max_length:
            raise ValueError(
                f"tokens.shape={tokens.shape} must have at most max_length="
                f"{self.config.max_length} tokens per sequence"
            )
        if positions is not None and not jnp.issubdtype(positions.dtype, jnp.integer):
            raise TypeError(f"positions.dtype={positions.dtype} must be an integer type")
        if positions is not None and positions.shape != tokens.shape:
            raise ValueError(
                f"positions.shape={positions.shape} must equal tokens.shape={tokens.shape}"
            )
        for leaf in jax.tree.leaves(caches):
            if jnp.ndim(leaf) == 0 or leaf.shape[0] != self.config.num_layers:
                raise ValueError(
                    f"a cache leaf of shape {jnp.shape(leaf)} must have a leading axis of "
                    f"num_layers={self.config.num_layers}"
                )


def _check_mask(mask: jax.Array, tokens: jax.Array, attend: Attend) -> jax.Array:
    if mask.shape != tokens.shape:
        raise ValueError(
            f"attention_mask.shape={mask.shape} must equal tokens.shape={tokens.shape}"
        )
    if not (mask.dtype == jnp.bool_ or jnp.issubdtype(mask.dtype, jnp.integer)):
        raise TypeError(f"attention_mask.dtype={mask.dtype} must be bool or an integer type")
    if attend is not causal_attention:
        raise ValueError(
            "attention_mask has no use with another attend: it must get lengths itself"
        )
    return mask.astype(jnp.bool_)


def _check_alone(attend: Attend, mask: jax.Array | None, caches: Cache) -> None:
    """Raises ValueError if images come with an `attend` of the caller's, or with caches."""
    if mask is None and attend is not causal_attention:
        raise ValueError("images have no use with another attend: it must show them itself")
    if caches is not None:
        raise ValueError("caches must be None with images: see turbojax.models.start")
