"""Low-rank adapters in files, as PEFT stores them.

A folder with `adapter_config.json` and `adapter_model.safetensors`, whose tensors are named
``base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight``.
"""

import json
import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from turbojax import _json, _writing
from turbojax._json import shown
from turbojax.models.checkpoint import folder as _folder
from turbojax.models.checkpoint import safetensors as _safetensors
from turbojax.models.checkpoint.weights import FLOATS, check_dtype
from turbojax.models.lora import Adapter, Adapters

CONFIG_NAME = "adapter_config.json"
WEIGHTS_NAME = "adapter_model.safetensors"
_MODULES = {
    "q": "self_attn.q_proj",
    "k": "self_attn.k_proj",
    "v": "self_attn.v_proj",
    "o": "self_attn.o_proj",
    "q_a": "self_attn.q_a_proj",
    "q_b": "self_attn.q_b_proj",
    "kv_a": "self_attn.kv_a_proj_with_mqa",
    "kv_b": "self_attn.kv_b_proj",
    "gate": "mlp.gate_proj",
    "up": "mlp.up_proj",
    "down": "mlp.down_proj",
}
_NAMES = {module: name for name, module in _MODULES.items()}
_TENSOR = re.compile(r"base_model\.model\.model\.layers\.(\d+)\.(.+)\.lora_([AB])\.weight")
# Keys that change the adapters' outputs, and the values that they must have.
_PLAIN: dict[str, tuple[Any, ...]] = {
    "bias": ("none",),
    "fan_in_fan_out": (False,),
    "use_dora": (False,),
    "rank_pattern": ({},),
    "alpha_pattern": ({},),
    "modules_to_save": (None, []),
}


def save_adapters(
    adapters: Adapters,
    path: str | os.PathLike[str],
    *,
    dtype: DTypeLike = jnp.float32,
    base_model: str | None = None,
) -> None:
    """Writes adapters into a folder, in the names and layout of PEFT.

    PEFT adds them to a model whose linear layers must have the same inputs and outputs as in
    training. Those of a model that `quantize_model` smoothed differ from the original's; with
    ``Smoothing(cas=False, pts=False, rpn=False, crs=False)`` they are the same.

    Args:
      adapters: all of one rank.
      path: the folder, created if it does not exist; adapters in it are replaced.
      dtype: of the stored tensors.
      base_model: what the adapters are for, ``base_model_name_or_path``.

    Raises:
      BlockingIOError: if another program is writing into the folder.
      TypeError: if they are no `Adapters`.
      ValueError: if they have several ranks, or a number is too large for the dtype.
    """
    if not isinstance(adapters, Adapters):
        raise TypeError(f"adapters is a {type(adapters).__name__}, must be Adapters")
    stored = check_dtype(dtype)
    ranks = {len(adapter.a) for layer in adapters.layers for adapter in layer.values()}
    if len(ranks) != 1:
        raise ValueError(f"adapters must have one rank, have {sorted(ranks)}")
    [rank] = ranks
    modules, numbers = _targets(adapters)
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base_model,
        "r": rank,
        "lora_alpha": adapters.scale * rank,
        "lora_dropout": 0.0,
        "target_modules": modules,
        "layers_to_transform": numbers,
        "bias": "none",
        "fan_in_fan_out": False,
        "use_rslora": False,
        "use_dora": False,
        "inference_mode": True,
    }
    tensors = [
        _tensor(f"base_model.model.model.layers.{i}.{_MODULES[name]}.lora_{part}.weight", x, stored)
        for i, layer in enumerate(adapters.layers)
        for name, adapter in layer.items()
        for part, x in (("A", adapter.a), ("B", adapter.b))
    ]
    files = (WEIGHTS_NAME, CONFIG_NAME)
    with _writing.replacing_files(path, files=files, owned=files, last=CONFIG_NAME) as draft:
        _safetensors.write_tensors(draft / WEIGHTS_NAME, tensors)
        text = json.dumps(config, indent=2, allow_nan=False) + "\n"
        (draft / CONFIG_NAME).write_text(text, encoding="utf-8")


def load_adapters(path: str | os.PathLike[str], num_layers: int) -> Adapters:
    """Reads adapters that `save_adapters` or PEFT wrote.

    Args:
      path: their folder.
      num_layers: of the model that they are for.

    Returns:
      The adapters, float32; `with_adapters` checks that they fit a model.

    Raises:
      FileNotFoundError: if there are none.
      NotImplementedError: if they are not plain LoRA of linear layers of attention and of gated
        feed-forward layers.
      ValueError: if a file cannot be parsed, an adapter that the configuration names or half of one
        is missing, or one is not floating point or has another rank than the configuration says.
    """
    folder = Path(path)
    _folder.require_folder(folder)
    _writing.finish(folder, last=CONFIG_NAME)
    place = _writing.current(folder, CONFIG_NAME)
    config = _json.read_object(place / CONFIG_NAME)
    rank, scale = _scale(config, folder)
    layers: list[dict[str, dict[str, jax.Array]]] = [{} for _ in range(num_layers)]
    for name, stored in _safetensors.read_header(place / WEIGHTS_NAME):
        found = _TENSOR.fullmatch(name)
        if found is None or found[2] not in _NAMES:
            raise NotImplementedError(
                f"{folder}: {_json.shown_name(name)} must be of {', '.join(_MODULES.values())}"
            )
        layer, part = int(found[1]), found[3].lower()
        if layer >= num_layers:
            raise ValueError(f"{folder}: {name} is of layer {layer}, the model has {num_layers}")
        if stored.dtype not in FLOATS:
            raise ValueError(
                f"{folder}: {name} has dtype {_json.shown_name(stored.dtype)}, must be "
                f"{', '.join(sorted(FLOATS))}"
            )
        array = _folder.cast(stored.read(), np.dtype(np.float32), name)
        if array.ndim != 2:
            raise ValueError(f"{folder}: {name} has shape {array.shape}, must be a matrix")
        layers[layer].setdefault(_NAMES[found[2]], {})[part] = jnp.asarray(array)
    for i, own in enumerate(layers):
        for name, parts in own.items():
            if len(parts) < 2:
                missing = "A" if "b" in parts else "B"
                raise ValueError(f"{folder}: layer {i} lacks lora_{missing} of {_MODULES[name]}")
            a, b = parts["a"].shape, parts["b"].shape
            if (a[0], b[1]) != (rank, rank):
                raise ValueError(
                    f"{folder}: layer {i} has lora_A of shape {a} and lora_B of shape {b} of "
                    f"{_MODULES[name]}, must be of the rank of {CONFIG_NAME}, r={rank}"
                )
    _check_complete(layers, config, folder)
    return Adapters(
        tuple({name: Adapter(**own[name]) for name in _MODULES if name in own} for own in layers),
        scale,
    )


def _targets(adapters: Adapters) -> tuple[list[str], list[int] | None]:
    """PEFT's `target_modules` and `layers_to_transform`; the latter is None for all layers."""
    found = [i for i, layer in enumerate(adapters.layers) if layer]
    if any(set(adapters.layers[i]) != set(adapters.targets) for i in found):
        whole = [_module(i, name) for i in found for name in _MODULES if name in adapters.layers[i]]
        return whole, None
    modules = [_MODULES[name].partition(".")[2] for name in adapters.targets]
    return modules, None if len(found) == len(adapters.layers) else found


def _module(layer: int, name: str) -> str:
    return f"model.layers.{layer}.{_MODULES[name]}"


def _check_complete(
    layers: Sequence[Mapping[str, Any]], config: Mapping[str, Any], folder: Path
) -> None:
    """Raises ValueError if an adapter that the configuration names is missing, or there is none."""
    where = f"{folder / CONFIG_NAME}"
    if not any(layers):
        raise ValueError(f"{folder / WEIGHTS_NAME}: must hold adapters, has none")
    numbers, targets = config.get("layers_to_transform"), config.get("target_modules")
    if type(numbers) is int:
        numbers = [numbers]
    if numbers is not None and not _is_list(numbers, int):
        raise ValueError(
            f"{where}: layers_to_transform={shown(numbers)} must be integers, or null for all"
        )
    if numbers and not 0 <= min(numbers) <= max(numbers) < len(layers):
        raise ValueError(
            f"{where}: layers_to_transform={shown(numbers)} must be from 0 to {len(layers) - 1}"
        )
    if targets is None or isinstance(targets, str):  # A pattern, which does not name modules.
        return
    if not _is_list(targets, str):
        raise ValueError(f"{where}: target_modules={shown(targets)} must be names")
    for i, own in enumerate(layers):
        for name in _MODULES:
            module = _module(i, name)
            # A complete name counts whatever `layers_to_transform` says.
            is_named = module in targets or (
                (not numbers or i in numbers)
                and any(module.endswith(f".{target}") for target in targets)
            )
            if is_named and name not in own:
                raise ValueError(
                    f"{folder}: layer {i} lacks the adapter of {_MODULES[name]}, which "
                    f"{CONFIG_NAME} names"
                )


def _is_list(value: Any, kind: type) -> bool:
    return isinstance(value, list) and all(type(x) is kind for x in value)


def _tensor(name: str, x: jax.Array, dtype: np.dtype) -> _folder.Tensor:
    def make() -> np.ndarray:
        return _folder.cast(np.asarray(x), dtype, name)

    return _folder.Tensor(name, dtype, x.shape, make)


def _scale(config: Mapping[str, Any], folder: Path) -> tuple[int, float]:
    """The adapters' rank, and the factor of their outputs."""
    where = f"{folder / CONFIG_NAME}"
    if config.get("peft_type") != "LORA":
        raise NotImplementedError(f"{where}: peft_type={shown(config.get('peft_type'))}, not LORA")
    for name, allowed in _PLAIN.items():
        if name in config and config[name] not in (*allowed, None):
            raise NotImplementedError(f"{where}: {name}={shown(config[name])} is not supported")
    rank, alpha = config.get("r"), config.get("lora_alpha")
    if type(rank) is not int or rank < 1:
        raise ValueError(f"{where}: r={shown(rank)} must be a positive integer")
    if isinstance(alpha, bool) or not isinstance(alpha, int | float):
        raise ValueError(f"{where}: lora_alpha={shown(alpha)} must be a number")
    return rank, float(alpha) / (rank**0.5 if config.get("use_rslora") else rank)
