"""What the tables are measured on: a model, windows of held-out text, and what rows share."""

import dataclasses
import functools
import sysconfig
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.evidence import whole
from turbojax import TurboConfig, models
from turbojax.app import text_model
from turbojax.app.quantize import run as quantizing
from turbojax.evaluation import ExactRun, windows
from turbojax.evaluation.records import describe_model, describe_texts
from turbojax.models.text.tokenizer import ByteTokenizer, Tokenizer

T = TypeVar("T")

EMBEDDED = "embedded"


@dataclasses.dataclass(frozen=True)
class Sizes:
    """How much is measured. Static: part of what a result file is continued by.

    Attributes:
      context: tokens that a window feeds; its last target is the token after them.
      prompt: how many of them are prefilled; what comes after is decoded one by one.
      windows_per_file: at most.
      files: at most; None for all.
      batch: windows that are decoded at once.
      whole_batch: windows that run at once where nothing is cached.
      long_context: as `context`, for attention that is about long texts; its second half counts.
      long_windows_per_file: at most.
      layer_windows: windows whose queries, keys and values give the errors of layers.
      calibration: windows of `calibration_length` tokens that INT4 weights are calibrated with.
      calibration_length: their tokens.
      block: tokens of a block of pooled attention.
      layers: the model is cut to its first layers; None for all. Bits then mean nothing.
    """

    context: int = 4095
    prompt: int = 3584
    windows_per_file: int = 8
    files: int | None = None
    batch: int = 96
    whole_batch: int = 8
    long_context: int = 16384
    long_windows_per_file: int = 1
    layer_windows: int = 2
    calibration: int = 16
    calibration_length: int = 1024
    block: int = 128
    layers: int | None = None


TOKENS = Sizes(prompt=3647, windows_per_file=2, batch=24, long_context=8192)
"""For models whose tokens are not bytes: the exact logits of these windows, of 448 decoded tokens
each and a vocabulary of 49,152, are within what `ExactRun` keeps."""

QUICK = Sizes(
    context=159,
    prompt=128,
    windows_per_file=1,
    files=2,
    long_context=256,
    layer_windows=1,
    calibration=2,
    calibration_length=64,
    block=32,
    layers=2,
)


class Subject:
    """A model and its windows; what several rows need is made once, by whichever comes first.

    Attributes:
      name: ``"embedded"``, or the name of the checkpoint's folder, or of its GGUF file.
      pinned: whether names of methods mean what they meant when the embedded model was measured
        first, see `rows.spelled_out`; of other models they mean today's defaults.
      decoder: the model.
      unit: what bits are counted per: ``"byte"`` or ``"token"``.
      sizes: what was asked for, cut to what the model and the files allow.
      tokens: int32 ``[n, context + 1]``.
      owners: the file of each window.
      long_tokens: int32 ``[m, long_context + 1]``.
      long_owners: the file of each.
    """

    def __init__(
        self,
        name: str,
        decoder: models.Decoder,
        tokenizer: Tokenizer,
        texts: Mapping[str, bytes],
        sizes: Sizes,
    ) -> None:
        layers = sizes.layers
        if layers is not None and layers < decoder.config.num_layers:
            config = dataclasses.replace(decoder.config, num_layers=layers)
            decoder = dataclasses.replace(decoder, layers=decoder.layers[:layers], config=config)
        read = self._reader(tokenizer)
        chosen = {file: read(content) for file, content in list(texts.items())[: sizes.files]}
        longest = min(decoder.config.max_length, max(map(len, chosen.values())) - 1)
        context = min(sizes.context, longest)
        self.sizes = dataclasses.replace(
            sizes,
            context=context,
            # As large a part of the window, if it is a shorter one.
            prompt=sizes.prompt * context // sizes.context,
            long_context=min(sizes.long_context, longest),
        )
        self.name, self.decoder, self.pinned = name, decoder, name == EMBEDDED
        self.unit = "byte" if isinstance(tokenizer, ByteTokenizer) else "token"
        self.tokens, self.owners = _joined(windows(chosen, context, sizes.windows_per_file))
        self.long_tokens, self.long_owners = _joined(
            windows(chosen, self.sizes.long_context, sizes.long_windows_per_file)
        )
        self._read = read
        self._lock = threading.RLock()
        self._made: dict[str, Any] = {}

    @staticmethod
    def _reader(tokenizer: Tokenizer) -> Callable[[bytes], np.ndarray]:
        def read(content: bytes) -> np.ndarray:
            return np.asarray(tokenizer.encode(text_model.read_text(content)), np.int32)

        return read

    def _once(self, name: str, make: Callable[[], T]) -> T:
        """What was made under this name, by whichever thread asked first."""
        with self._lock:
            if name not in self._made:
                self._made[name] = make()
            found: T = self._made[name]
            return found

    @property
    def first(self) -> int:
        """Position of the first input whose target counts, without a cache."""
        return self.sizes.prompt - 1

    @property
    def long_first(self) -> int:
        return self.sizes.long_context // 2

    @property
    def exact_run(self) -> ExactRun:
        """The exact cache's logits of the windows."""
        return self._once("exact run", lambda: self._run(self.decoder))

    @property
    def quantized_run(self) -> ExactRun:
        return self._once("quantized run", lambda: self._run(self.quantized))

    def _run(self, model: Any) -> ExactRun:
        return ExactRun(model, self.tokens, prompt=self.sizes.prompt, batch_size=self.sizes.batch)

    @property
    def exact(self) -> jax.Array:
        """See `whole.exact_hidden`, of the windows."""
        return self._exact("exact", self.tokens, self.first, self.sizes.whole_batch)

    @property
    def long_exact(self) -> jax.Array:
        """See `whole.exact_hidden`, of the long windows."""
        return self._exact("long", self.long_tokens, self.long_first, 1)

    def _exact(self, name: str, tokens: np.ndarray, first: int, batch: int) -> jax.Array:
        make = functools.partial(whole.exact_hidden, self.decoder, tokens)
        return self._once(name, lambda: make(first=first, batch=batch))

    @property
    def layer_tokens(self) -> np.ndarray:
        """int32 ``[layer_windows, context]``: the first windows of different files."""
        chosen = [list(self.owners).index(file) for file in dict.fromkeys(self.owners)]
        return self.tokens[chosen[: self.sizes.layer_windows], :-1]

    @property
    def tensors(self) -> whole.HeadTensors:
        """See `whole.layer_tensors`, of these."""
        tokens = jnp.asarray(self.layer_tokens)
        return self._once("tensors", lambda: whole.layer_tensors(self.decoder, tokens))

    @property
    def quantized(self) -> models.QuantizedDecoder:
        """The model with INT4 weights, smoothed with text that is not held out."""
        return self._once(
            "quantized", lambda: models.quantize_model(self.decoder, self.calibration)
        )

    @property
    def calibration(self) -> np.ndarray:
        """int32 windows of modules that are not held out."""
        count, length = self.sizes.calibration, self.sizes.calibration_length

        def make() -> np.ndarray:
            # More than enough bytes, whatever tokens stand for.
            contents = quantizing.calibration_text(8 * count * length)
            stream = np.concatenate([self._read(content) for content in contents])
            return quantizing.windows(stream.tolist(), length, count)

        return self._once("calibration", make)

    def _default(self) -> dict[str, str]:
        """What names of methods leave out, of a result whose rows mean today's defaults."""
        return {} if self.pinned else {"default": repr(TurboConfig())}

    def identity(self) -> dict[str, Any]:
        """What must be the same where a result is continued, but for the machine."""
        model = {**describe_model(self.decoder), "name": self.name}
        texts = {"owners": list(self.owners), "long_owners": list(self.long_owners)}
        every = {"windows": self.tokens, "long_windows": self.long_tokens}
        return {
            "model": {**model, "parameters": self.decoder.config.num_parameters},
            "settings": dataclasses.asdict(self.sizes) | self._default(),
            "texts": {**texts, **describe_texts(every), "unit": self.unit},
        }


def _joined(cut: Mapping[str, np.ndarray]) -> tuple[np.ndarray, tuple[str, ...]]:
    owners = [file for file, rows in cut.items() for _ in rows]
    return np.concatenate(list(cut.values())), tuple(owners)


def held_out() -> dict[str, bytes]:
    """The held-out modules of this interpreter's standard library, by name."""
    library = Path(sysconfig.get_path("stdlib"))
    paths = [library / name for name in models.held_out_modules()]
    return {path.name: path.read_bytes() for path in paths if path.is_file()}


def name_of(model: str) -> str:
    """What results call a model: the name of its folder or file, without a GGUF file's ending."""
    path = models.checkpoint_folder(model).resolve()
    return EMBEDDED if model == EMBEDDED else path.name.removesuffix(".gguf")


def load(model: str, dtype: str | None, sizes: Sizes | None = None) -> Subject:
    """A model by name or path, with the held-out modules."""
    if dtype is None:
        dtype = "float32" if jax.default_backend() == "cpu" else "bfloat16"
    loaded = text_model.find_text_model(model, text_model.parse_dtype(dtype)).load()
    if not isinstance(loaded.decoder, models.Decoder):
        raise ValueError(f"model={model!r} must have float weights: the tables also quantize them")
    if sizes is None:
        sizes = Sizes() if isinstance(loaded.tokenizer, ByteTokenizer) else TOKENS
    if dtype == "float32" and jax.default_backend() != "cpu":
        # Scores of whole prompts are in memory: cuDNN does not take float32.
        sizes = dataclasses.replace(sizes, batch=min(sizes.batch, 8), whole_batch=1)
    return Subject(name_of(model), loaded.decoder, loaded.tokenizer, held_out(), sizes)
