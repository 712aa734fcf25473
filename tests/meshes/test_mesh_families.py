"""Every family over a mesh, and INT4 weights: heads and inner channels that devices have."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from tests.meshes.test_mesh_models import axes_of, relative
from tests.models import family_helpers, moe_helpers
from turbojax import models
from turbojax.caches import causal_attention
from turbojax.matmul.int4.parts import NOTHING, split_group_size, take_inputs, take_outputs
from turbojax.matmul.int4.weight import dequantize, gate_and_up, quantize_weight
from turbojax.models.families import ExpertsConfig
from turbojax.models.quantized_layer import QuantizedLinear
from turbojax.models.tensor_parallel.placing import local_layer
from turbojax.models.tensor_parallel.programs import on_mesh
from turbojax.parallel import Axes
from turbojax.smoothing import Smoothing

pytestmark = pytest.mark.mesh

TOKENS = jnp.asarray(np.random.default_rng(0).integers(0, 100, (2, 12)))
MESHES = ((1, 2), (2, 2), (1, 4))
# Of experts some, others than published models have, and inner sizes that devices do not divide.
FAMILIES = sorted(family_helpers.ARCHITECTURES, key=lambda name: name != "gpt_oss")


def logits(model, tokens):
    positions = jnp.broadcast_to(jnp.arange(tokens.shape[1])[None], tokens.shape)
    nothing = (None,) * model.config.num_layers
    hidden, _ = model.hidden(tokens, positions, causal_attention, nothing)
    return model.logits(hidden)


@jax.jit
def run(model, tokens):
    rows = P() if model.axes is None else model.axes.spec("B")
    return on_mesh(logits, model, (rows,), rows)(tokens)


def bound(config) -> float:
    """A sum of so many numbers in another order, once for each of so many places."""
    return (2 * config.num_layers + 1) * config.intermediate_size * 2.0**-24


def tiny(family: str) -> models.TransformerConfig:
    config = models.TransformerConfig.from_hf(family_helpers.least(family))
    experts, layers = config.experts, 2
    if experts is not None:
        few = {"count": 4, "per_token": 2, "intermediate_size": 47, "groups": 1, "top_groups": 1}
        experts = dataclasses.replace(experts, **few, shared_size=experts.shared_size and 33)
    return dataclasses.replace(config, experts=experts, num_layers=layers, max_length=512)


def blurred(tree):
    """With noise everywhere: biases, sinks and norms that are not those of new models."""
    leaves, structure = jax.tree.flatten(tree)
    rng = np.random.default_rng(1)
    noise = [jnp.asarray(0.1 * rng.standard_normal(x.shape), x.dtype) for x in leaves]
    return jax.tree.unflatten(structure, [x + y for x, y in zip(leaves, noise, strict=True)])


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.quick(slow=1)
def test_families(family):
    config = tiny(family)
    one = blurred(models.random_decoder(config, dtype="float32"))
    split = models.shard(one, axes_of(*MESHES[FAMILIES.index(family) % 3]))
    want = run(one, TOKENS)
    assert not np.isnan(want).any()
    assert relative(run(split, TOKENS), want) < bound(config)


def test_keys_and_values_of_latents_are_not_split_over_slots():
    config = tiny("deepseek_v3")
    mesh = jax.make_mesh((1, 2, 2), ("data", "model", "sequence"))
    model = jax.eval_shape(lambda: models.random_decoder(config))
    model = dataclasses.replace(model, axes=Axes.of(mesh))
    with pytest.raises(NotImplementedError, match=r"cache='exact' .*\('sequence',\): must be one"):
        models.init_caches(model, 2, 128, "exact")
    assert models.init_caches(model, 2, 128, "latent").max_length == 128


@pytest.mark.slow
def test_latents_split_over_slots():
    config = tiny("deepseek_v3")
    one = models.random_decoder(config, dtype="float32")
    mesh = jax.make_mesh((1, 2, 2), ("data", "model", "sequence"))
    split, prompts = models.shard(one, Axes.of(mesh)), np.tile(TOKENS, (1, 6))
    given = {"max_length": 128, "lengths": np.array([72, 5]), "cache": "latent"}
    sessions = [models.start(model, prompts, **given) for model in (one, split)]
    assert relative(sessions[1].logits, sessions[0].logits) < bound(config)
    want, got = (np.stack(list(models.stream(session, 3))) for session in sessions)
    assert np.array_equal(got, want)


@pytest.mark.slow
def test_heads_that_are_normed_together():
    config = tiny("olmo2")
    one = blurred(models.random_decoder(config, dtype="float32"))
    for shape in MESHES[1:]:
        split = models.shard(one, axes_of(*shape))
        assert relative(run(split, TOKENS), run(one, TOKENS)) < bound(config)


QUANTIZED = {
    "dense": models.SHAPES["tiny"],
    "head": models.SHAPES["tiny"],
    "adapters": models.SHAPES["tiny"],
    "joint": dataclasses.replace(models.SHAPES["tiny"], qk_norm=True, joint_qk_norm=True),
}


@pytest.mark.parametrize("name", QUANTIZED)
@pytest.mark.quick(slow=1)
def test_int4_decoders(name):
    """Tokens of 16 bits or more, which devices round alike."""
    config = dataclasses.replace(QUANTIZED[name], num_layers=1)
    one = models.random_quantized_decoder(config, dtype="float32", quantize_head=name == "head")
    one = frozen = one.with_activations("bf16")
    if name == "adapters":
        adapters = blurred(models.init_adapters(one))
        one = models.with_adapters(frozen, adapters, gradient="exact")
    want = run(one, TOKENS)
    shapes = MESHES[1:2] if name == "dense" else MESHES[::2]
    for shape in shapes:
        split = models.shard(one, axes_of(*shape))
        limit = 2.0**-4 if name == "head" else bound(config)  # the head's tokens are e4m3
        assert relative(run(split, TOKENS), want) < limit
    if name == "adapters":  # of a decoder that is split already
        later = models.with_adapters(models.shard(frozen, split.axes), adapters, gradient="exact")
        assert jax.tree.structure(later) == jax.tree.structure(split)
        for x, y in zip(jax.tree.leaves(later), jax.tree.leaves(split), strict=True):
            assert np.array_equal(x, y)


@pytest.mark.quick(1)
@pytest.mark.parametrize("shape", MESHES)
def test_adapters_beside_floats(shape):
    """Each device has its part of them, whether they come before the splitting or after it."""
    tiny = models.SHAPES["tiny"]
    # Parts of the inner size have zeros at their end.
    inner = tiny.intermediate_size + 2
    config = dataclasses.replace(tiny, num_layers=1, intermediate_size=inner, mlp_bias=True)
    whole = models.random_decoder(config, dtype="float32")
    adapters = blurred(models.init_adapters(whole, rank=2))
    beside, axes = models.with_adapters(whole, adapters), axes_of(*shape)
    split = models.shard(beside, axes)
    later = models.with_adapters(models.shard(whole, axes), adapters)
    assert jax.tree.structure(later) == jax.tree.structure(split)
    for x, y in zip(jax.tree.leaves(later), jax.tree.leaves(split), strict=True):
        assert x.sharding == y.sharding
        assert np.array_equal(x, y)
    want = run(beside, TOKENS)
    assert relative(run(split, TOKENS), want) < bound(config)
    assert relative(run(whole, TOKENS), want) > 0.1


@pytest.mark.quick(slow=1)
@pytest.mark.parametrize("name", ["qwen3-moe", "gpt-oss"])
def test_int4_experts(name):
    """In e4m3, where a device's tokens have scales of their own: as near to the exact weights."""
    config = dataclasses.replace(moe_helpers.CONFIGS["qwen3-moe"], num_layers=1)
    if name == "gpt-oss":
        few = ExpertsConfig(4, 2, 48, softmax="after", has_biases=True, swiglu_limit=7.0)
        config = dataclasses.replace(
            models.SHAPES["tiny"], family="gpt_oss", num_layers=1, experts=few, attention_sinks=True
        )
    plain = models.random_decoder(config, dtype="float32")
    quantized = models.quantize_model(plain, smoothing=Smoothing(False, False, False, False))
    want = run(plain, TOKENS)
    error = relative(run(quantized, TOKENS), want)
    split = models.shard(quantized, axes_of(1, 2))
    assert relative(run(split, TOKENS), want) < 1.5 * error


def test_devices_have_the_codes_of_the_whole():
    """Of joined, gated and padded weights, whose groups are cut; no code or scale changes."""
    config = dataclasses.replace(models.SHAPES["tiny"], num_layers=1)
    layer = models.random_quantized_decoder(config, dtype="float32").layers[0]
    axes = axes_of(1, 2)
    parts = [local_layer(layer, config, axes, i) for i in range(2)]
    q, k, v = np.split(np.asarray(dequantize(layer.qkv.weight)), [64, 96])
    for i, part in enumerate(parts):
        want = [np.split(x, 2)[i] for x in (q, k, v)]
        assert np.array_equal(dequantize(part.qkv.weight), np.concatenate(want))
    o = [np.asarray(dequantize(part.o.weight)) for part in parts]
    assert np.array_equal(np.concatenate(o, axis=1), dequantize(layer.o.weight))
    # 96 inner channels: 64 on the first device; on the second 32, then zeros.
    down = np.concatenate([np.asarray(dequantize(part.mlp.down.weight)) for part in parts], 1)
    assert np.array_equal(down[:, :96], dequantize(layer.mlp.down.weight))
    gates = [np.split(np.asarray(dequantize(part.mlp.gate_up.weight)), 2) for part in parts]
    gate, up = (np.concatenate([each[i] for each in gates]) for i in range(2))
    assert np.array_equal(
        np.concatenate([gate[:96], up[:96]]), dequantize(layer.mlp.gate_up.weight)
    )
    assert not gate[96:].any()
    assert not up[96:].any()


@functools.cache
def weight(rows: int, inputs: int, group_size: int = 128):
    values = jax.random.normal(jax.random.key(rows + inputs), (rows, inputs), jnp.float32)
    return quantize_weight(values, group_size=group_size, scale_dtype="bf16")


@pytest.mark.quick(1, slow=0)
@pytest.mark.parametrize(
    ("inputs", "size", "group", "wanted"),
    [(256, 128, 128, 128), (288, 96, 64, 32), (96, 48, 128, 128)],
)
def test_inputs_of_weights(inputs, size, group, wanted):
    whole = weight(72, inputs, group)
    assert split_group_size(group, size, inputs) == wanted
    for start in range(0, inputs, size):
        part = take_inputs(whole, start, size, wanted)
        part.validate()
        assert np.array_equal(dequantize(part), dequantize(whole)[:, start : start + size])


def test_outputs_of_weights():
    whole, order = weight(72, 256), np.array([70, 3, NOTHING, 3])
    part = take_outputs(whole, order)
    part.validate()
    values = np.asarray(dequantize(whole))
    assert np.array_equal(dequantize(part), values[order] * (order >= 0)[:, None])
    gated = take_outputs(gate_and_up(whole, weight(72, 256)), order)
    gated.validate()
    assert np.array_equal(dequantize(gated), np.tile(values[order] * (order >= 0)[:, None], (2, 1)))


def test_groups_that_cannot_be_split_are_named():
    with pytest.raises(NotImplementedError, match="80 inputs a device .* group_size=128"):
        split_group_size(128, 80, 160)
    with pytest.raises(ValueError, match="from 64 on in groups of 128 must each lie in one"):
        take_inputs(weight(72, 256), 64, 128, 128)


def test_sorted_inputs():
    """Act-order: the feed-forward layer's channels go where their columns are; heads cannot."""
    config = dataclasses.replace(models.SHAPES["tiny"], num_layers=1)
    layer = models.random_quantized_decoder(config, dtype="float32").layers[0]
    order = jnp.asarray(np.random.default_rng(2).permutation(96).astype(np.int32))
    down = dataclasses.replace(layer.mlp.down, inputs=order)
    mixed = dataclasses.replace(layer, mlp=dataclasses.replace(layer.mlp, down=down))
    axes = axes_of(1, 2)
    x = jax.random.normal(jax.random.key(0), (1, 3, 64), jnp.float32)

    def mlp(layer):
        plain = [
            dataclasses.replace(y, activations="bf16") for y in (layer.mlp.gate_up, layer.mlp.down)
        ]
        return dataclasses.replace(layer.mlp, gate_up=plain[0], down=plain[1])(x, None, config)

    parts = [mlp(local_layer(mixed, config, axes, i)) for i in range(2)]
    assert relative(parts[0] + parts[1], mlp(mixed)) < bound(config)
    heads = dataclasses.replace(layer, o=dataclasses.replace(layer.o, inputs=jnp.arange(64)))
    assert isinstance(heads.o, QuantizedLinear)
    with pytest.raises(NotImplementedError, match="act-order"):
        local_layer(heads, config, axes, 0)
