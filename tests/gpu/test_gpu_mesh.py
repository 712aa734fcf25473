"""What runs on several GPUs, compiled for them: no gather, and what one of them computes."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

import turbojax as tj
from tests.meshes.per_device_helpers import AUTO, EXPLICIT, calls, check, mesh_of
from turbojax import models, parallel
from turbojax.caches.kinds import init_layer_cache, kind_for
from turbojax.sharding import Axes

pytestmark = [pytest.mark.gpu, pytest.mark.gpus]

NAMES = (
    "turbo", "turbo gradient", "prefill", "append", "decode", "kv4 append", "kv4 decode", "pages",
    "pages append", "exact", "latents", "pooled", "pooled gradient", "int4", "tokens",
)  # fmt: skip
TOKENS, CHANNELS = 2048, 128
SPEC = PartitionSpec(None, "sequence")


@pytest.fixture(autouse=True)
def two_gpus():
    if jax.device_count() < 2:
        pytest.skip(f"needs two GPUs; jax sees {jax.devices()}")


def over_tokens(run, mesh, *arrays, check_vma=False):
    """`run` of each device's tokens, compiled."""
    split = jax.shard_map(
        run, mesh=mesh, in_specs=(SPEC,) * len(arrays), out_specs=SPEC, check_vma=check_vma
    )
    placed = [jax.device_put(x, NamedSharding(mesh, SPEC)) for x in arrays]
    return jax.jit(split)(*placed)


@functools.cache
def line():
    return Axes.of(jax.make_mesh((2,), ("sequence",), axis_types=(AUTO,))).mesh


def normal(seed, *shape):
    return jax.random.normal(jax.random.key(seed), shape).astype(jnp.bfloat16)


def off(got, want):
    got, want = (np.asarray(x, np.float64) for x in (got, want))
    return np.linalg.norm(got - want) / np.linalg.norm(want)


@pytest.mark.parametrize("kind", [AUTO, EXPLICIT])
@pytest.mark.parametrize("name", NAMES)
def test_ops_have_the_bits_of_one_gpu(name, kind):
    """Without a collective, sequences over two GPUs or heads over two."""
    call = calls("bfloat16", 64)[name]
    for data, model in ((2, 1), (1, 2)):
        check(call, mesh_of(data, model, kind))


@pytest.mark.parametrize("check_vma", [False, True])
@pytest.mark.parametrize("attention", ["exact", "turbo", "pooled"])
def test_rings_are_as_near_to_exact_attention_as_one_gpu(attention, check_vma):
    """Outputs and gradients, against exact attention in float32."""
    arrays = (
        normal(0, 1, TOKENS, 8, CHANNELS),
        *(normal(i, 1, TOKENS, 2, CHANNELS) for i in (1, 2)),
    )
    d_out = normal(3, 1, TOKENS, 8, CHANNELS)
    levels = jnp.ones((1, 1, TOKENS // 128, TOKENS // 128), jnp.int8)
    of_exact = tj.TurboConfig(mode="float", softmax="exact")

    def plain(q, k, v):
        if attention == "pooled":
            return tj.pooled_attention(q, k, v, levels, is_causal=True)
        config = of_exact if attention == "exact" else tj.TurboConfig()
        return tj.turbo_attention(q, k, v, config=config, is_causal=True)

    def ring(q, k, v):
        if attention == "pooled":
            rows = levels[:, :, : levels.shape[2] // 2]
            return parallel.ring_pooled_attention(
                q, k, v, rows, axis_name="sequence", is_causal=True
            )
        numerics = "exact" if attention == "exact" else tj.TurboConfig()
        return parallel.ring_attention(
            q, k, v, axis_name="sequence", attention=numerics, is_causal=True
        )

    def both(attend):
        def run(q, k, v, d_out):
            out, pull = jax.vjp(attend, q, k, v)
            return out, *pull(d_out.astype(out.dtype))

        return run

    wide = [x.astype(jnp.float32) for x in (*arrays, d_out)]
    exact = functools.partial(
        tj.turbo_attention, config=of_exact, is_causal=True, implementation="xla"
    )
    want = jax.jit(both(exact))(*wide)
    one = jax.jit(both(plain))(*arrays, d_out)
    found = over_tokens(both(ring), line(), *arrays, d_out, check_vma=check_vma)
    for x, y, z in zip(found, one, want, strict=True):
        # Scales per chunk, and outputs that are rounded once more where they are merged.
        assert off(x, z) < 1.25 * off(y, z) + 2**-8


@pytest.mark.parametrize("tokens", [1, 4])
@pytest.mark.parametrize("kind", [tj.TurboConfig(), "turbo4", "kv4", "exact"], ids=str)
def test_split_caches_are_attended_to_as_whole_ones(kind, tokens):
    held, batch = 1000, 2
    made = kind_for(kind)
    sizes = batch, TOKENS, 2, CHANNELS
    whole = init_layer_cache(*sizes, kind=kind)
    lengths = jnp.array([held + 400, 100], jnp.int32)
    key, value = (normal(i, batch, held + 400, 2, CHANNELS) for i in (0, 1))
    query = normal(2, batch, tokens, 8, CHANNELS)
    axes = Axes(sequence="sequence", mesh=line())
    empty = init_layer_cache(*sizes, kind=kind, axes=axes)

    def run(query, key, value, cache):
        cache = parallel.store_prompt(cache, key, value, lengths, "sequence")
        return parallel.decode(query, cache, "sequence")

    same = PartitionSpec()
    specs = (same, same, same, parallel.partition_specs(empty, axes))
    split = jax.shard_map(run, mesh=line(), in_specs=specs, out_specs=same, check_vma=False)
    out = jax.jit(split)(query, key, value, empty)
    whole = made.store_prompt(whole, key, value, lengths)
    want = tj.decode(query, whole)
    assert off(out, want) < 2**-7
    first, second = (np.asarray(shard.data) for shard in out.addressable_shards)
    np.testing.assert_array_equal(first, second)


@pytest.mark.parametrize("cache", ["exact", "turbo4"])
def test_a_split_model_says_what_a_whole_one_does(cache):
    """The embedded model over two GPUs, as loaded: each reads its part."""
    mesh = jax.make_mesh((1, 2), ("data", "model"), axis_types=(AUTO, AUTO))
    text = list(b"import numpy as np\n\n\ndef mean(values):\n    return ")
    found = []
    for where in ({}, {"mesh": mesh}):
        model = models.load_decoder(models.embedded_path(), dtype=jnp.float32, **where)
        session = models.start(model, np.array([text, text[::-1]]), max_length=128, cache=cache)
        logits = [session.logits]
        for token in b"sum(":
            session = session.step(np.full(2, token))
            logits.append(session.logits)
        found.append(np.stack([np.asarray(x) for x in logits]))
    # Products of float32 are TF32's on a GPU, with 10 bits.
    assert off(found[1], found[0]) < (2**-10 if cache == "exact" else 0.03)
