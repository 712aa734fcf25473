"""`TurboConfig`: its defaults, the paper's configuration, that of a device, and old files of it."""

import json

import jax
import jax.numpy as jnp
import pytest

import turbojax as tj
from turbojax import _device
from turbojax.app import doctor
from turbojax.caches import cache_by_name
from turbojax.caches.progressive.kind import PROGRESSIVE
from turbojax.flax import TurboAttentionFn

# What caches of version 0.1 say of themselves: all fields, the defaults of that time included.
OLD = {
    "key_bits": 4,
    "value_bits": 4,
    "num_low_bit_key_heads": 0,
    "num_low_bit_value_heads": 0,
    "low_bits": 2,
    "block_q": 64,
    "block_kv": 64,
    "buffer_size": 64,
    "softmax": {"threshold": -6.0, "base": "e"},
    "mode": "int8",
    "head_priority": "gap_std",
}


@pytest.fixture
def gpu(monkeypatch):
    """Pretends that there is a GPU of some compute capability."""

    def pretend(capability):
        monkeypatch.setattr(_device, "gpu_compute_capability", lambda: capability)

    return pretend


def test_the_default():
    config = tj.TurboConfig()
    assert (config.mode, config.softmax) == ("int8_fp8", "exact")
    assert (config.block_q, config.block_kv, config.buffer_size) == (64, 64, 128)
    assert (config.key_bits, config.value_bits) == (4, 4)
    assert (config.flush, config.num_first_tokens, config.flush_size) == ("oldest", 1, 64)


def test_buffers():
    """Of two blocks if nothing is said; one that keeps nothing when it is full is the paper's."""
    assert tj.TurboConfig(block_kv=32).buffer_size == 64
    for config in (tj.TurboConfig.paper(), tj.TurboConfig(buffer_size=64)):
        assert (config.buffer_size, config.num_first_tokens, config.flush_size) == (64, 0, 64)
    config = tj.TurboConfig(buffer_size=192, flush="all")
    assert (config.num_first_tokens, config.flush_size) == (0, 192)
    assert tj.TurboConfig(first_tokens=64).num_first_tokens == 64
    assert tj.TurboConfig(first_tokens=0).num_first_tokens == 0
    # A first token that no query sees any more need not be kept.
    assert tj.init_cache(1, 96, 1, 8, local_window_size=9).config == tj.TurboConfig(first_tokens=0)


def test_everything_takes_the_same_default():
    assert tj.init_cache(1, 8, 1, 8).config == tj.TurboConfig()
    assert TurboAttentionFn().config == tj.TurboConfig()
    assert tj.flax.attention_fn.config == tj.TurboConfig()
    assert cache_by_name("4bit", 2) == tj.TurboConfig()
    assert cache_by_name("2bit", 2) == tj.TurboConfig(key_bits=2, value_bits=2)
    x = jnp.ones((1, 8, 1, 8))
    text = {
        str(jax.make_jaxpr(lambda x, chosen=chosen: tj.turbo_attention(x, x, x, **chosen))(x))
        for chosen in ({}, {"config": tj.TurboConfig()})
    }
    assert len(text) == 1


def test_the_paper():
    config = tj.TurboConfig.paper()
    assert (config.mode, config.softmax) == ("int8", tj.SAS(threshold=-6.0, base="e"))
    assert (config.block_q, config.block_kv, config.buffer_size) == (64, 64, 64)
    assert (config.key_bits, config.value_bits) == (4, 4)
    larger = tj.TurboConfig.paper(buffer_size=256)
    assert (larger.flush, larger.num_first_tokens, larger.flush_size) == ("all", 0, 256)


def test_the_paper_with_other_fields():
    config = tj.TurboConfig.paper(key_bits=2, block_kv=128, buffer_size=128)
    assert (config.key_bits, config.value_bits, config.block_kv) == (2, 4, 128)
    assert (config.mode, config.softmax, config.block_q) == ("int8", tj.SAS(), 64)
    with pytest.raises(ValueError, match="key_bits=5"):
        tj.TurboConfig.paper(key_bits=5)
    with pytest.raises(TypeError, match="bits"):
        tj.TurboConfig.paper(bits=4)


@pytest.mark.parametrize("capability", [None, 8.9, 9.0, 10.0])
def test_where_e4m3_is_multiplied_or_there_is_no_gpu_the_device_gets_the_default(gpu, capability):
    gpu(capability)
    assert tj.TurboConfig.for_device() == tj.TurboConfig()


@pytest.mark.parametrize("capability", [7.5, 8.0, 8.6])
def test_ampere_gets_int8(gpu, capability):
    gpu(capability)
    assert tj.TurboConfig.for_device() == tj.TurboConfig(mode="int8")
    assert tj.TurboConfig.for_device(mode="float", key_bits=2) == tj.TurboConfig(
        mode="float", key_bits=2
    )


def test_the_default_is_the_same_on_every_device(gpu):
    want = tj.TurboConfig()
    gpu(8.0)
    assert tj.TurboConfig() == want


def test_the_doctor_names_it_on_ampere(gpu, monkeypatch):
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    for capability, said in ((8.0, True), (9.0, False)):
        gpu(capability)
        assert any("TurboConfig.for_device()" in x for x in doctor._advice()) == said


def test_caches_in_old_files_are_read_with_the_config_they_had():
    description = PROGRESSIVE.describe(tj.init_cache(1, 128, 2, 64))
    old = json.loads(json.dumps({**description, "config": OLD}))
    assert PROGRESSIVE.make(old).config == tj.TurboConfig.paper()


def test_files_hold_every_field():
    """So that a later default changes nothing about them."""
    description = PROGRESSIVE.describe(tj.init_cache(1, 128, 2, 64))
    assert set(description["config"]) == set(OLD) | {
        "gradient",
        "heads_per_group",
        "flush",
        "first_tokens",
    }
    assert PROGRESSIVE.make(json.loads(json.dumps(description))).config == tj.TurboConfig()
