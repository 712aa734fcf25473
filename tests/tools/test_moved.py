"""Old names still work, and say what to write instead."""

import importlib
import subprocess
import sys

import pytest

from turbojax import models


@pytest.mark.slow
def test_every_old_module_has_its_new_content():
    # In a process of its own: a module warns when it is first imported.
    code = """
import importlib, sys, warnings
import turbojax
from turbojax._moved import MOVED
for old, places in MOVED.items():
    places = (places,) if isinstance(places, str) else places
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        module = importlib.import_module("turbojax." + old)
    texts = [str(x.message) for x in caught if x.category is DeprecationWarning]
    new = " and ".join(f"turbojax.{x}" for x in places)
    wanted = f"turbojax.{old} is now {new}; the old name goes in version 0.3"
    assert wanted in texts, (old, texts)
    targets = [sys.modules["turbojax." + x] for x in places]
    for name in {name for target in targets for name in dir(target)}:
        if not name.startswith("__"):
            # Of names that several have, such as what they import, the first one's counts.
            first = next(target for target in targets if hasattr(target, name))
            assert getattr(module, name) is getattr(first, name), (old, name)
"""
    subprocess.run([sys.executable, "-W", "error", "-c", code], check=True)


@pytest.mark.slow
def test_old_modules_are_attributes_too():
    # In 0.1 `turbojax.layer_cache` was there as soon as `turbojax.models` was.
    code = """
import warnings
import turbojax
from turbojax import kv, models
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    assert turbojax.layer_cache.init_layer_cache is kv.init_layer_cache
    assert turbojax.layer_cache.options.Attend is kv.Attend
    assert turbojax.cache.kv4.Kv4Cache is turbojax.fireq.Kv4Cache
    assert models.llama.Llama is models.Transformer
    assert models.config.LlamaConfig is models.TransformerConfig
    import turbojax.ops.registry
    assert turbojax.ops.registry.Registry is turbojax._registry.Registry
texts = " ".join(str(x.message) for x in caught if x.category is DeprecationWarning)
for old in ("layer_cache", "layer_cache.options", "models.llama", "models.transformer.Llama",
            "models.config.LlamaConfig", "ops.registry"):
    assert f"turbojax.{old} is now" in texts, (old, texts)
assert not hasattr(turbojax, "nothing") and not hasattr(models, "nothing")
"""
    subprocess.run([sys.executable, "-W", "error", "-c", code], check=True)


@pytest.mark.filterwarnings("ignore:turbojax.cache:DeprecationWarning")
def test_old_modules_are_not_copies():
    old = importlib.import_module("turbojax.cache.kv4")
    new = importlib.import_module("turbojax.state.kv4")
    assert old.Kv4Cache is new.Kv4Cache
    with pytest.raises(AttributeError, match=r"'turbojax.cache.kv4' has no attribute 'nothing'"):
        _ = old.nothing
    with pytest.raises(ModuleNotFoundError):
        importlib.import_module("turbojax.cache.nothing")


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("Llama", "Transformer"),
        ("LlamaConfig", "TransformerConfig"),
        ("load_llama", "load_transformer"),
    ],
)
def test_old_names_of_models(old, new):
    with pytest.warns(DeprecationWarning, match=f"turbojax.models.{old} is now"):
        found = getattr(models, old)
    assert found is getattr(models, new)
    with pytest.raises(AttributeError, match=r"'turbojax.models' has no attribute 'nothing'"):
        _ = models.nothing


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("checkpoint.load", "checkpoint.huggingface.load"),
        ("checkpoint.WEIGHTS_NAME", "checkpoint.huggingface.WEIGHTS_NAME"),
        ("generation.generate", "generation.session.generate"),
        ("generation.start", "generation.session.start"),
    ],
)
def test_functions_of_modules_that_are_packages_now(old, new):
    package, _, name = old.partition(".")
    module = importlib.import_module(f"turbojax.models.{package}")
    with pytest.warns(DeprecationWarning, match=f"{old} is now turbojax.models.{new}"):
        found = getattr(module, name)
    assert found is getattr(models, name)
