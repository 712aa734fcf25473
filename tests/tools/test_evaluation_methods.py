"""Methods by name, and intervals of means."""

import dataclasses
import math

import numpy as np
import pytest

from tests.tools.evaluation_helpers import CONFIG
from turbojax import SAS, TurboConfig, models
from turbojax.caches import PooledAttention
from turbojax.evaluation import bootstrap, method, methods
from turbojax.levels import LocalWindow, TopK


@pytest.mark.quick(1, slow=0)
@pytest.mark.parametrize(
    ("name", "cache"),
    [
        ("exact", "exact"),
        ("bfloat16", "bfloat16"),
        ("kv4", "kv4"),
        ("4bit", TurboConfig()),
        ("2/4bit", TurboConfig(num_low_bit_key_heads=1, num_low_bit_value_heads=1)),
        ("4bit:block=32", TurboConfig(block_q=32, block_kv=32)),
        ("4bit:block=32,block_kv=16", TurboConfig(block_q=32, block_kv=16)),
        ("4bit:block_kv=128", TurboConfig(block_kv=128)),
        ("4bit:block_kv=32,first_tokens=4", TurboConfig(block_kv=32, first_tokens=4)),
        ("4bit:flush=all,buffer_size=128", TurboConfig(flush="all")),
        ("4bit:key_bits=2", TurboConfig(key_bits=2)),
        ("4bit:softmax=sas", TurboConfig(softmax=SAS())),
        ("4bit:softmax=sas2,threshold=-8.5", TurboConfig(softmax=SAS(-8.5, base="2"))),
        ("4bit:softmax=exact,mode=float", TurboConfig(mode="float")),
        (
            "4bit:low_heads=1,low_bits=3,head_priority=entropy",
            TurboConfig(
                num_low_bit_key_heads=1,
                num_low_bit_value_heads=1,
                low_bits=3,
                head_priority="entropy",
            ),
        ),
        ("4bit:heads_per_group=2", TurboConfig(heads_per_group=2)),
        ("4bit:heads_per_group=none", TurboConfig()),
        ("2/4bit:heads_per_group=1", TurboConfig(heads_per_group=1, num_low_bit_value_heads=1)),
        (
            "2/4bit:heads_per_group=2,low_bits=3",
            TurboConfig(
                heads_per_group=2, num_low_bit_key_heads=1, num_low_bit_value_heads=1, low_bits=3
            ),
        ),
        ("k8v4:uncompressed_layers=1", models.UncompressedEdges("k8v4", 1)),
    ],
)
def test_caches(name, cache):
    assert method(name, CONFIG) == methods.Method(name, cache)


def test_half_of_any_number_of_heads():
    """Of each group, where there are groups."""

    def low(name, heads):
        config = dataclasses.replace(CONFIG, num_heads=heads, num_kv_heads=heads)
        cache = method(name, config).cache
        return cache.num_low_bit_key_heads, cache.num_low_bit_value_heads, cache.heads_per_group

    assert [low("2/4bit", n) for n in (1, 3, 7)] == [(0, 1, None), (1, 2, None), (3, 4, None)]
    assert low("2/4bit:heads_per_group=3", 6) == (1, 2, 3)
    assert low("2/4bit:heads_per_group=3,low_heads=1", 6) == (1, 1, 3)


def test_pooled_prompts():
    name = "kv4:policy=window,window=64,pool_block=16"
    window = PooledAttention(LocalWindow(64), 16, 16)
    assert method(name, CONFIG) == methods.Method(name, "kv4", window)
    found = method("exact:pooled=0.25", CONFIG).pooled
    assert found == PooledAttention(methods.top_k_of_density(0.25))


@pytest.mark.parametrize("density", [0.01, 0.2, 0.3125, 0.5, 0.99, 1])
def test_density(density):
    """A block at level r is r times cheaper, and levels hold the shares between the fractions."""
    policy = methods.top_k_of_density(density)
    ends = (0, policy.level1, policy.level2, policy.level4, policy.level8)
    work = sum((b - a) / r for a, b, r in zip(ends, ends[1:], (1, 2, 4, 8), strict=False))
    assert work == pytest.approx(density)
    assert methods.top_k_of_density(0.15625) == TopK()  # the default


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("5bit", "method '5bit' must begin with one of exact, 4bit"),
        ("", "must begin with one of"),
        ("4bit:", "'' must be OPTION=VALUE"),
        ("4bit:block", "'block' must be OPTION=VALUE"),
        ("4bit:blok=3", "option 'blok' must be one of key_bits, .*block, low_heads, threshold"),
        ("kv4:block=64", "option 'block' must be one of uncompressed_layers, pooled"),
        ("4bit:block=32,block=32", "option 'block' must be given once"),
        ("4bit:key_bits=5", r"4bit:key_bits=5': key_bits=5 must be one of \(2, 3, 4\)"),
        ("4bit:key_bits=four", "key_bits=four must be an integer"),
        ("2/4bit:heads_per_group=3", "num_kv_heads=2 must be a multiple of heads_per_group=3"),
        ("2/4bit:heads_per_group=x", "heads_per_group=x must be an integer"),
        ("4bit:softmax=sos", "softmax=sos must be one of exact, sas, sas2"),
        ("4bit:threshold=-6", "threshold must go with softmax=sas"),
        ("4bit:softmax=sas,threshold=low", "threshold=low must be a number"),
        ("4bit:mode=int9", "mode=int9 must be one of int8"),
        ("4bit:low_heads=1,num_low_bit_key_heads=1", "must not both be given"),
        ("exact:uncompressed_layers=1", "must be one that is compressed"),
        ("kv4:uncompressed_layers=2", "must leave some of the model's 3 layers"),
        ("kv4:uncompressed_layers=-1", "uncompressed_layers=-1 must be at least 0"),
        ("kv4:pooled=0", "pooled=0.0 must be above 0 and at most 1"),
        ("kv4:pooled=0.2,policy=topk", "pooled must not go with policy"),
        ("kv4:policy=best", "policy=best must be one of threshold, topk, window"),
        ("kv4:policy=topk,window=9", "window=9 is for policy 'window'"),
        ("kv4:pool_block=64", "pool_block must go with pooled or policy"),
        ("kv4:policy=topk,pool_block=12", "must be a multiple of 8"),
        ("latent", "the model has no latents"),
    ],
)
def test_bad_names(name, message):
    with pytest.raises(ValueError, match=message):
        method(name, CONFIG)


def test_every_cache_has_a_method():
    taken = set()
    for name in (*models.CACHE_NAMES, "bfloat16"):
        made = method(name, CONFIG)
        assert made.pooled is None
        taken.add(made.cache)
    assert len(taken) == len(models.CACHE_NAMES) + 1


def test_fields_of_any_configuration():
    """What a later cache's configuration is made of: texts become its fields' values."""

    @dataclasses.dataclass(frozen=True)
    class Config:
        rank: int = 0
        share: float = 0.5
        name: str = "a"
        on: bool = False

    found = methods._values(Config, {"rank": "4", "share": "1e-1", "name": "b", "on": "true"})
    assert found == {"rank": 4, "share": 0.1, "name": "b", "on": True}
    with pytest.raises(ValueError, match="on=yes must be one of true, false"):
        methods._values(Config, {"on": "yes"})


def test_resamples_of_two_groups():
    """With chances of 1/4, 1/2 and 1/4 there are three means; that of both weighs their sizes."""
    values, groups = [1.0, 1.0, 1.0, 4.0], ["a", "a", "a", "b"]
    found = bootstrap(values, groups, level=0.95)
    assert (found.mean, found.low, found.high) == (1.75, 1.0, 4.0)
    # The middle third of the resamples are the mean itself.
    narrow = bootstrap(values, groups, level=0.3)
    assert (narrow.low, narrow.high) == (1.75, 1.75)


def test_resamples_of_many_windows():
    """As wide as a normal distribution's, within what 2,000 resamples vary by."""
    values = np.random.default_rng(3).normal(2, 3, 500)
    found = bootstrap(values, seed=1)
    half = 1.96 * values.std() / math.sqrt(500)
    assert found.mean == pytest.approx(values.mean())
    assert found.low == pytest.approx(found.mean - half, abs=half / 8)
    assert found.high == pytest.approx(found.mean + half, abs=half / 8)
    assert found == bootstrap(values, seed=1)
    assert found != bootstrap(values, seed=2)
    # Windows of a file that are all alike say no more than one of them.
    alike = bootstrap(np.repeat(values[:50], 10), np.repeat(np.arange(50), 10).tolist())
    fewer = 1.96 * values[:50].std() / math.sqrt(50)
    assert alike.high - alike.low == pytest.approx(2 * fewer, rel=0.15)


def test_without_an_interval():
    assert bootstrap([1.0]).ends is None
    assert bootstrap([1.0, 2.0], ["a", "a"]).ends is None
    assert math.isnan(bootstrap([1.0, math.nan, 2.0]).mean)
    assert bootstrap([1.0, math.nan, 2.0]).ends is None
    assert bootstrap([0.0, 0.0]).ends == [0, 0]
    for bad in ({"samples": 0}, {"level": 1.0}, {"groups": ["a"]}):
        with pytest.raises(ValueError, match="must be"):
            bootstrap([1.0, 2.0], **bad)
    with pytest.raises(ValueError, match=r"values.shape=\(0,\) must be"):
        bootstrap([])
