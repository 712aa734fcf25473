"""What `turbojax quantize` does: a model and text in, a quantized folder and its costs out."""

import dataclasses
import math
import sysconfig
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from turbojax import _checks, _writing, models
from turbojax._environment import environment
from turbojax.app import startup, text_model
from turbojax.matmul.int4.weight import ScaleDtype
from turbojax.models.checkpoint.quantized import QUANT_METHOD, is_quantized
from turbojax.models.config import stored_dtype
from turbojax.models.evaluation import caches_of
from turbojax.models.quantize import EVERYTHING
from turbojax.models.text.tokenizer import TOKENIZER_NAME, ByteTokenizer, NumberTokenizer, Tokenizer
from turbojax.models.vision import checkpoint as vision
from turbojax.smoothing import Smoothing

Progress = Callable[[str, int, int], None]
"""Called with a phase, how much is done since the last call, and how much there is in all."""


@dataclasses.dataclass(frozen=True)
class QuantizeSettings:
    """What to quantize, and how: the options of the command; ValueError if they do not fit."""

    model: str
    out: Path
    smoothing: Smoothing = EVERYTHING
    scale_dtype: ScaleDtype = "e4m3"
    quantize_embedding: bool = False
    quantize_head: bool = False
    calibration_files: tuple[Path, ...] = ()
    calibration_tokens: int = 16384
    evaluation_files: tuple[Path, ...] = ()
    evaluation_tokens: int = 16384
    window: int = 1024
    max_length: int | None = None

    def __post_init__(self) -> None:
        _checks.check_sizes(calibration_tokens=self.calibration_tokens, window=self.window)
        if self.evaluation_tokens < 0:
            raise ValueError(f"evaluation_tokens={self.evaluation_tokens} must not be negative")
        if self.scale_dtype not in ("e4m3", "bf16"):
            raise ValueError(f"scale dtype {self.scale_dtype!r} must be e4m3 or bf16")
        if self.calibration_files and not (self.smoothing.rpn or self.smoothing.crs):
            raise ValueError("calibration files are for RPN and CRS, and both are left out")
        if self.evaluation_files and self.evaluation_tokens == 0:
            raise ValueError("evaluation files are given, so evaluation_tokens must not be 0")


@dataclasses.dataclass(frozen=True)
class QuantizeReport:
    """What one run did.

    Attributes:
      bytes_before: of the checkpoint's weights on disk; `bytes_after` of the quantized one.
      bits_per_weight: of the quantized matrices: codes, scales and padding.
      calibration_tokens: tokens seen in calibration; `evaluated_tokens` were predicted.
      unit: what bits are counted per: ``"byte"``, or ``"token"`` where tokens are numbers.
      bits: mean bits on the held-out text, ``{"before" | "after": {cache: bits}}``; empty if there
        was none. ``"exact"`` attends exactly; ``"kv4"`` as decoding does through a `Kv4Cache`, for
        every token, and is left out where the cache cannot hold the model's heads.
    """

    settings: QuantizeSettings
    bytes_before: int
    bytes_after: int
    bits_per_weight: float
    calibration_tokens: int
    evaluated_tokens: int
    unit: str
    bits: dict[str, dict[str, float]]
    seconds: float

    def to_json(self) -> dict[str, Any]:
        """The report as plain JSON values; bits that are not finite are None."""
        settings = dataclasses.asdict(self.settings) | {"out": str(self.settings.out)}
        for name in ("calibration_files", "evaluation_files"):
            settings[name] = [str(path) for path in getattr(self.settings, name)]
        bits = {
            name: {cache: x if math.isfinite(x) else None for cache, x in row.items()}
            for name, row in self.bits.items()
        }
        own = dataclasses.asdict(self) | {"settings": settings, "bits": bits}
        return {**environment(), **own}


def run(settings: QuantizeSettings, progress: Progress | None = None) -> QuantizeReport:
    """Quantizes a model, writes it, and measures what that costs.

    `progress` is called as calibration, layers and evaluation are done.
    """
    begun = time.perf_counter()
    _check_out(settings)
    startup.check_input_files(*settings.calibration_files, *settings.evaluation_files)
    hf = models.read_config(settings.model)
    stored_dtype(hf)
    if is_quantized(hf):
        raise ValueError(f"{settings.model!r} is quantized already")
    found = text_model.find_text_model(settings.model, max_length=settings.max_length)
    config = found.config
    tables = (1 if config.tie_embeddings else 2) * config.vocab_size * config.hidden_size
    layers = config.num_parameters - tables
    startup.check_memory(
        # At least four bits of each number, and one layer in float32, which folding copies.
        {
            "quantized weights": layers // 2 + tables // 2,
            "three times a layer": 3 * 4 * layers // config.num_layers,
        },
        "the quantized model must fit, and a layer that is not, three times: use a larger machine",
    )
    assert found.open is not None
    model = found.open()
    window = min(settings.window, config.max_length)
    # Both are made before the long part, so that missing text is reported at once.
    calibration = None
    if settings.smoothing.rpn or settings.smoothing.crs:
        calibration = _calibration_windows(settings, found.tokenizer, window)
    held_out = _evaluation_windows(settings, found.tokenizer, window)
    tell: Progress = progress or (lambda phase, done, total: None)
    sizes = {
        "calibration": 0 if calibration is None else calibration.size * config.num_layers,
        "layers": config.num_layers,
    }
    quantized = models.quantize_model(
        model,
        calibration,
        smoothing=settings.smoothing,
        scale_dtype=settings.scale_dtype,
        quantize_embedding=settings.quantize_embedding,
        quantize_head=settings.quantize_head,
        progress=lambda phase, done: tell(phase, done, sizes[phase]),
    )
    before, after = _write(settings, quantized)
    bits, scored, unit = {}, 0, "byte"
    if held_out is not None:
        bits = _costs({"before": model, "after": quantized}, held_out, tell)
        scored, unit = held_out.scored, held_out.unit
    return QuantizeReport(
        settings=settings,
        bytes_before=before,
        bytes_after=after,
        bits_per_weight=quantized.bits_per_weight,
        calibration_tokens=sizes["calibration"] // config.num_layers,
        evaluated_tokens=scored,
        unit=unit,
        bits=bits,
        seconds=time.perf_counter() - begun,
    )


def calibration_text(num_bytes: int) -> list[bytes]:
    """Modules of this interpreter's standard library that are not held out, in a fixed order.

    Whole files, together at least `num_bytes` bytes unless there are no more.
    """
    held_out = set(models.held_out_modules())
    library = Path(sysconfig.get_path("stdlib"))
    paths = [path for path in sorted(library.glob("*.py")) if path.name not in held_out]
    contents, size = list[bytes](), 0
    for i in np.random.default_rng(0).permutation(len(paths)):
        if size >= num_bytes:
            break
        contents.append(paths[i].read_bytes())
        size += len(contents[-1])
    return contents


def evaluation_text() -> list[bytes]:
    """The held-out modules of this interpreter's standard library."""
    library = Path(sysconfig.get_path("stdlib"))
    paths = [library / name for name in models.held_out_modules()]
    return [path.read_bytes() for path in paths if path.is_file()]


def windows(tokens: Sequence[int], length: int, count: int) -> np.ndarray:
    """At most `count` windows that do not overlap, spread evenly: int32 ``[n, length]``, n >= 1."""
    whole = len(tokens) // length
    if whole < 1:
        raise ValueError(f"the text has {len(tokens)} tokens, must have at least {length}")
    chosen = np.linspace(0, whole - 1, min(count, whole)).astype(int)
    stream = np.asarray(tokens[: whole * length], np.int32).reshape(whole, length)
    return stream[chosen]


@dataclasses.dataclass(frozen=True)
class _HeldOut:
    """Windows to measure with, and how many bytes one of their tokens stands for on average."""

    tokens: np.ndarray
    bytes_per_token: float
    unit: str

    @property
    def scored(self) -> int:
        return int(self.tokens[:, 1:].size)


def _check_out(settings: QuantizeSettings) -> None:
    """Raises ValueError if writing the quantized model would destroy something, or fail."""
    out = settings.out
    if out.resolve() == models.checkpoint_folder(settings.model).resolve():
        raise ValueError(f"{str(out)!r} is the model's own folder, must be another one")
    existing = next(path for path in (out, *out.absolute().parents) if path.exists())
    if not existing.is_dir():
        raise ValueError(f"out={str(out)!r} must be a folder, {str(existing)!r} is a file")
    startup.check_output_folder("out", out)
    _writing.require_free(out)
    beside = out / vision.FOLDER
    if beside.exists() and not vision.has_vision(models.checkpoint_folder(settings.model)):
        raise ValueError(
            f"out={str(out)!r} holds {vision.FOLDER!r} of another model, and this one reads no "
            "images: remove it, or choose a new folder"
        )
    if not ((out / "config.json").exists() or any(out.glob("*.safetensors*"))):
        return
    hf = models.read_config(out) if (out / "config.json").is_file() else {}
    block = hf.get("quantization_config")
    if not isinstance(block, dict) or block.get("quant_method") != QUANT_METHOD:
        raise ValueError(
            f"out={str(out)!r} holds another model: must be a new folder, or one that "
            "turbojax quantize wrote"
        )


def _stream(kind: str, tokenizer: Tokenizer, named: Sequence[tuple[str, bytes]]) -> list[int]:
    """All tokens of the calibration or evaluation text; an error says which text it is about."""
    stream = list[int]()
    for name, content in named:
        try:
            stream += tokenizer.encode(text_model.read_text(content))
        except ValueError as error:
            raise ValueError(f"{kind} text {name!r}: {error}") from error
    return stream


def cut(
    kind: str,
    tokenizer: Tokenizer,
    files: Sequence[Path],
    default: Callable[[], Sequence[bytes]],
    length: int,
    count: int,
) -> tuple[np.ndarray, float]:
    """Windows of the files or the default text, and bytes per token; ValueError if none fits."""
    place = "the standard library"
    if files:
        named = [(str(path), path.read_bytes()) for path in files]
        place = ", ".join(name for name, _ in named)
    else:
        named = [(place, content) for content in default()]
    if not named:
        raise ValueError(f"no {kind} text found in {place}: give a file for {kind}")
    stream = _stream(kind, tokenizer, named)
    if len(stream) < length:
        raise ValueError(
            f"the {kind} text ({place}) has {len(stream)} tokens, must have at least {length}: "
            "give more text or a smaller window"
        )
    size = sum(len(content) for _, content in named)
    return windows(stream, length, count), size / len(stream)


def _calibration_windows(
    settings: QuantizeSettings, tokenizer: Tokenizer, window: int
) -> np.ndarray:
    files, wanted = settings.calibration_files, settings.calibration_tokens
    if isinstance(tokenizer, NumberTokenizer) and not files:
        raise ValueError(f"there is no {TOKENIZER_NAME}: give token numbers in a calibration file")
    length = min(window, wanted)

    def default() -> list[bytes]:
        # On average a token is at most eight bytes.
        return calibration_text(8 * wanted)

    return cut("calibration", tokenizer, files, default, length, wanted // length)[0]


def _evaluation_windows(
    settings: QuantizeSettings, tokenizer: Tokenizer, window: int
) -> _HeldOut | None:
    files, wanted = settings.evaluation_files, settings.evaluation_tokens
    are_numbers = isinstance(tokenizer, NumberTokenizer)
    if wanted == 0 or (are_numbers and not files):
        return None
    length = min(window, wanted)
    tokens, bytes_per_token = cut(
        "evaluation", tokenizer, files, evaluation_text, length + 1, max(wanted // length, 1)
    )
    if are_numbers:
        return _HeldOut(tokens, 1.0, "token")
    return _HeldOut(
        tokens, 1.0 if isinstance(tokenizer, ByteTokenizer) else bytes_per_token, "byte"
    )


def _costs(
    candidates: dict[str, models.StoredDecoder | models.QuantizedDecoder],
    held_out: _HeldOut,
    tell: Progress,
) -> dict[str, dict[str, float]]:
    caches = caches_of(next(iter(candidates.values())))
    total = len(candidates) * len(caches) * held_out.scored
    tell("evaluation", 0, total)

    def mean(model: models.StoredDecoder | models.QuantizedDecoder, cache: str) -> float:
        bits = models.token_bits(
            model,
            held_out.tokens,
            cache=cache,
            batch_size=1,
            progress=lambda n: tell("evaluation", n, total),
        )
        return float(bits.mean(dtype=np.float64)) / held_out.bytes_per_token

    return {
        name: {cache: mean(model, cache) for cache in caches} for name, model in candidates.items()
    }


def _write(settings: QuantizeSettings, model: models.QuantizedDecoder) -> tuple[int, int]:
    """Writes the folder; bytes of the weights before and after."""
    source, out = models.checkpoint_folder(settings.model), settings.out
    extra_config, companions = text_model.files_beside(settings.model)
    models.save_quantized(
        model,
        out,
        dtype=stored_dtype(models.read_config(settings.model)),
        extra_config=extra_config,
        companions=companions,
    )
    if vision.has_vision(source):
        models.save_vision(models.load_vision(source), out / vision.FOLDER)
    sizes = [
        sum(file.stat().st_size for file in models.weight_files(folder)) for folder in (source, out)
    ]
    return sizes[0], sizes[1]
