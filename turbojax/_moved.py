"""Old names of modules and of what stands in them: with a warning, for one release."""

import importlib
import sys
import warnings
from collections.abc import Callable, Mapping, Sequence
from importlib.machinery import ModuleSpec
from importlib.util import spec_from_loader
from types import ModuleType

MOVED: dict[str, str | tuple[str, ...]] = {
    "baselines.exact": ("state.exact", "ops.exact_attention"),
    "cache": "state.progressive",
    "cache.allocator": "state.pages.allocator",
    "cache.blocks": "state.progressive.blocks",
    "cache.checks": "state.checks",
    "cache.kv4": "state.kv4",
    "cache.page_checks": "state.pages.checks",
    "cache.page_writing": ("state.pages.writing", "state.pages.formats"),
    "cache.paged": "state.pages.pool",
    "cache.paged_triton": "state.pages.triton",
    "cache.pages": "state.pages.transfer",
    "cache.prefix": "state.pages.prefix",
    "cache.progressive": "state.progressive.cache",
    "cache.read": "state.progressive.read",
    "cache.reference": "state.progressive.reference",
    "cache.storage": "state.stored_file",
    "cache.triton": "state.progressive.triton",
    "cache.update": "state.progressive.update",
    "cli": "app.main",
    "cli_generate": "app.generate.command",
    "cli_options": ("app.options", "app.terminal"),
    "cli_programs": "app.programs",
    "cli_quantize": "app.quantize.command",
    "cli_serve": "app.serve.command",
    "cli_train": ("app.train", "app.compare"),
    "demo": "app.demo.measure",
    "demo.display": "app.demo.display",
    "demo.measure": "app.demo.measure",
    "doctor": "app.doctor.examination",
    "layer_cache": "kv",
    "layer_cache.attend": ("kv.attend", "kv.whole"),
    "layer_cache.kinds": "kv.kinds",
    "layer_cache.options": ("ops.options", "kv.base"),
    "layer_cache.paged": "kv.pages",
    "layer_cache.pooled": "kv.pooled",
    "layer_cache.storage": "kv.files",
    "levels_map": ("app.levels.measure", "app.levels.display"),
    "models._folder": "models.checkpoint.folder",
    "models._safetensors": "models.checkpoint.safetensors",
    "models._special_text": "models.text.special_text",
    "models._templates": "models.text.templates",
    "models._tokenizer_file": "models.text.tokenizer_file",
    "models.buckets": "models.generation.buckets",
    "models.caching": "models.generation.caching",
    "models.chat": "models.text.chat",
    "models.hf_rope": "models.families.rope",
    "models.llama": "models.transformer",
    "models.loading": "models.checkpoint.weights",
    "models.padding": "models.generation.padding",
    "models.quantized_checkpoint": "models.checkpoint.quantized",
    "models.sampling": "models.generation.sampling",
    "models.steps": "models.generation.steps",
    "models.stopping": "models.generation.stopping",
    "models.storage": "models.generation.saving",
    "models.tensors": "models.families.tensors",
    "models.tokenizer": "models.text.tokenizer",
    "ops.registry": "_registry",
    "ops.turbo_attention.masking": "ops.options",
    "ops.turbo_attention.numerics": "ops.numerics",
    "quantizing": "app.quantize.run",
    "serve_requests": "app.serve.requests",
    "serve_results": "app.serve.results",
    "serving": "app.serve.run",
    "startup": "app.startup",
    "text": ("app.generate.run", "app.text_model"),
}
"""Old names, within `turbojax`, and where what stood there stands now: one module, or several."""


class _Finder:
    """Finds modules by their old names."""

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        del path, target
        package, _, old = name.partition(".")
        if package != "turbojax" or old not in MOVED:
            return None
        # A package, because old names have old names within.
        return spec_from_loader(name, self, is_package=True)  # type: ignore[arg-type]

    def create_module(self, spec: ModuleSpec) -> None:
        """The usual module."""
        del spec

    def exec_module(self, module: ModuleType) -> None:
        """Makes the module look up what it is asked for where it stands now."""
        name = module.__name__
        places = MOVED[name.partition(".")[2]]
        new = [f"turbojax.{x}" for x in ((places,) if isinstance(places, str) else places)]
        _warn(name, " and ".join(new))
        targets = [importlib.import_module(x) for x in new]
        module.__doc__ = targets[0].__doc__

        def look_up(attribute: str) -> object:
            for target in targets:
                if hasattr(target, attribute):
                    return getattr(target, attribute)
            if f"{name}.{attribute}".partition(".")[2] in MOVED:
                return importlib.import_module(f"{name}.{attribute}")
            raise AttributeError(f"module {name!r} has no attribute {attribute!r}")

        module.__dict__["__getattr__"] = look_up


def install() -> None:
    """Lets old names be imported."""
    if not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        sys.meta_path.append(_Finder())


def renamed(module: str, names: Mapping[str, str]) -> Callable[[str], object]:
    """A module's `__getattr__` that finds what has another name now, or stands elsewhere.

    And the modules of `MOVED` that were in it: `models.llama` was there once `models` was imported.

    Args:
      module: its name.
      names: the new dotted name, module and all, by the old one.
    """

    def look_up(name: str) -> object:
        if f"{module}.{name}".partition(".")[2] in MOVED:
            return importlib.import_module(f"{module}.{name}")
        if name not in names:
            raise AttributeError(f"module {module!r} has no attribute {name!r}")
        _warn(f"{module}.{name}", names[name])
        parent, _, last = names[name].rpartition(".")
        return getattr(importlib.import_module(parent), last)

    return look_up


def _warn(old: str, new: str) -> None:
    text = f"{old} is now {new}; the old name goes in version 0.3"
    warnings.warn(text, DeprecationWarning, stacklevel=3)
