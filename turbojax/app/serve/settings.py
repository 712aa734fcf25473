"""How the engine of `turbojax serve` is made: its options, and the size of its pool."""

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np

from turbojax import _checks
from turbojax.app import startup
from turbojax.app.text_model import FoundModel
from turbojax.models import Decoder, QuantizedDecoder, TransformerConfig
from turbojax.models.engine import Draft, Engine, NGram, Replicas, pools, replicate
from turbojax.models.engine.engine import usual_sizes
from turbojax.models.engine.pools import page_bytes
from turbojax.models.engine.speculation import Speculation
from turbojax.models.tensor_parallel.layout import local_config
from turbojax.models.text.tokenizer import Tokenizer

AnyModel = FoundModel | Decoder | QuantizedDecoder
SPECULATIONS = ("ngram", "draft")
# Share of a device's free memory that is used; the rest is for XLA's own needs and fragmentation.
_SHARE = 0.9
_CPU_BYTES = 2**29

SMALLER = "smaller --num-pages, --pool-bytes, --max-sequences or --max-length"


@dataclasses.dataclass(frozen=True)
class Settings:
    """The options of the command that make an engine; most are arguments of `Engine`.

    `num_pages` is None for a size that follows from the requests or from the memory,
    `max_sequences` for the default of `Engine`, but no more than there are requests. Raises
    TypeError if a number is not an integer; ValueError if one is out of range, both sizes of the
    pool are given, or options do not go together.
    """

    kv_dtype: str = "auto"
    uncompressed_layers: int = 0
    page_size: int = 64
    num_pages: int | None = None
    pool_bytes: int | None = None
    max_sequences: int | None = None
    step_tokens: int | None = None
    reproducible: bool = False
    speculate: str | None = None
    draft_tokens: int | None = None
    cache_results: bool = False
    implementation: str | None = None

    def __post_init__(self) -> None:
        _checks.check_sizes(page_size=self.page_size)
        names = ("num_pages", "pool_bytes", "max_sequences", "step_tokens", "draft_tokens")
        given = {name: value for name in names if (value := getattr(self, name)) is not None}
        _checks.check_sizes(**given)
        if self.num_pages is not None and self.pool_bytes is not None:
            raise ValueError("give the number of pages or the bytes of the pool, one of them")
        if self.speculate is not None and self.speculate not in SPECULATIONS:
            raise ValueError(
                f"--speculate {self.speculate!r} must be one of {', '.join(SPECULATIONS)}"
            )
        if self.draft_tokens is not None:
            if self.speculate is None:
                raise ValueError(f"--draft-tokens {self.draft_tokens} is for --speculate")
            NGram(self.draft_tokens)
        if self.reproducible and self.speculate is not None:
            raise ValueError("--reproducible and --speculate do not go together")

    def sizes(self, max_length: int, requests: int | None = None) -> pools.Sizes:
        """What pages follow from; `requests` is None where their number is not known."""
        usual = usual_sizes(reproducible=self.reproducible)
        sequences = usual.max_sequences
        if requests is not None and not self.reproducible:
            sequences = min(sequences, requests)
        return pools.Sizes(
            self.page_size,
            sequences if self.max_sequences is None else self.max_sequences,
            max_length,
            usual.step_tokens if self.step_tokens is None else self.step_tokens,
        )

    @property
    def stored(self) -> dict[str, Any]:
        """How pages are stored."""
        return {"kv_dtype": self.kv_dtype, "uncompressed_layers": self.uncompressed_layers}

    def speculation(self, draft: Decoder | QuantizedDecoder | None) -> Speculation | None:
        """What the engine guesses with."""
        more = {} if self.draft_tokens is None else {"tokens": self.draft_tokens}
        if self.speculate == "ngram":
            return NGram(**more)
        return None if draft is None else Draft(draft, **more)


@dataclasses.dataclass(frozen=True)
class Pool:
    """Sizes of an engine; `nbytes` are of all pages on a device, a draft model's included."""

    num_pages: int
    max_length: int
    max_sequences: int
    step_tokens: int
    nbytes: int


@dataclasses.dataclass(frozen=True)
class Models:
    """The shapes of an engine's models, or of the part of them that one of its devices holds."""

    config: TransformerConfig
    dtype: np.dtype
    draft: TransformerConfig | None = None
    draft_dtype: np.dtype | None = None

    @staticmethod
    def of(model: AnyModel, draft: AnyModel | None = None) -> "Models":
        """The shapes of models, which may be loaded or not."""
        config = local_config(model.config, model.axes)
        if draft is None:
            return Models(config, model.dtype)
        return Models(config, model.dtype, local_config(draft.config, draft.axes), draft.dtype)

    def page_bytes(self, settings: Settings, max_length: int) -> list[int]:
        """For each group of layers, the bytes of one page in all of its layers."""
        windows = pools.windows_of(self.config, max_length)

        def of_groups(config: TransformerConfig, dtype: np.dtype, stored: Any) -> list[int]:
            return [
                page_bytes(config, dtype, settings.page_size, layers=layers, **stored)
                for layers in pools.layers_of(config, windows)
            ]

        found = of_groups(self.config, self.dtype, settings.stored)
        if self.draft is None or self.draft_dtype is None:
            return found
        kind = "auto" if self.config.latent is not None else settings.kv_dtype
        stored = {"kv_dtype": kind, "uncompressed_layers": 0}
        more = of_groups(self.draft, self.draft_dtype, stored)
        return [x + y for x, y in zip(found, more, strict=True)]


def pages_asked_for(models: Models, settings: Settings, sizes: pools.Sizes) -> int | None:
    """How many pages the pool is asked to have; None where the options do not say.

    With `pool_bytes`, layers with a window get what they need at most, see `Engine`, and the others
    the rest. `sizes` are upper bounds where requests are not known yet.
    """
    needed = models.page_bytes(settings, sizes.max_length)  # which looks at the page's size
    if settings.pool_bytes is None:
        return settings.num_pages
    if settings.pool_bytes < sum(needed):
        raise ValueError(
            f"pool_bytes={settings.pool_bytes} must be at least {sum(needed)}, the bytes of one "
            "page"
        )
    windows = pools.windows_of(models.config, sizes.max_length)
    return pools.most_first_pages(settings.pool_bytes, needed, windows, sizes)


def plan(
    models: Models,
    settings: Settings,
    *,
    max_length: int,
    requests: int | None = None,
    free_bytes: int | None = None,
) -> Pool:
    """The sizes of an engine, without making one; ValueError if a number does not fit.

    Where the settings do not say, there are pages for `max_sequences` of the longest requests, or
    as many as fit into `free_bytes` (None for any number). `requests` is None where nobody knows
    how many come, as with a server.
    """
    sizes = settings.sizes(max_length, requests)
    needed = models.page_bytes(settings, max_length)
    windows = pools.windows_of(models.config, max_length)
    count = pages_asked_for(models, settings, sizes)
    if count is None:
        together = sizes
        if requests is not None:
            fewer = min(sizes.max_sequences, requests)
            together = dataclasses.replace(sizes, max_sequences=fewer)
        count = together.pages_of_all(windows[0])
        if free_bytes is not None:
            fitting = pools.most_first_pages(max(free_bytes, 0), needed, windows, sizes)
            count = max(min(count, fitting), 1)
    pages = pools.pages_of_groups(windows, count, sizes)
    nbytes = sum(n * size for n, size in zip(pages, needed, strict=True))
    return Pool(count, max_length, sizes.max_sequences, sizes.step_tokens, nbytes)


def bytes_besides(
    found: FoundModel, draft: FoundModel | None, settings: Settings, sizes: pools.Sizes
) -> Mapping[str, int]:
    """What an engine needs besides its pages, at least: bytes by what they are for."""
    rows = sizes.max_sequences
    # Float32 logits of every guess; sampling may take as many again, which is not counted.
    logits = rows * (1 if settings.speculate is None else (settings.draft_tokens or 4) + 1)
    pages = -(-sizes.max_length // settings.page_size)
    needs = {
        "weights": found.weight_bytes,
        f"logits of {logits:,} rows": 4 * logits * found.config.vocab_size,
        "tokens in a step": startup.prompt_bytes(
            local_config(found.config, found.axes), found.dtype, 1, rows + sizes.step_tokens
        ),
        "tables of pages, and tokens": 4 * rows * (pages + sizes.max_length),
    }
    if draft is not None:
        needs["weights of the draft model"] = draft.weight_bytes
    return needs


def free_for_pages(needs: Mapping[str, int], *, modest: bool = False) -> int | None:
    """Bytes that pages may take beside the `needs` of `bytes_besides`; None where nobody knows.

    If `modest`, no more than half a GiB on a CPU, whose memory others use too.
    """
    free = startup.available_memory()
    left = None if free is None else int(_SHARE * free) - sum(needs.values())
    if modest and jax.default_backend() == "cpu":
        return _CPU_BYTES if left is None else min(left, _CPU_BYTES)
    return left


def check_memory(pool: Pool, settings: Settings, needs: Mapping[str, int]) -> None:
    """Raises ValueError if models, pool and the rest are more than there is memory for."""
    pages = f"{pool.num_pages:,} pages of {settings.page_size} tokens"
    startup.check_memory({**needs, pages: pool.nbytes}, f"{SMALLER}, or another --kv-dtype")


def make_engine(
    model: Decoder | QuantizedDecoder,
    tokenizer: Tokenizer,
    settings: Settings,
    pool: Pool,
    draft: Decoder | QuantizedDecoder | None = None,
) -> Engine | Replicas:
    """The engine, or several as one where a mesh has an axis of data; raises what `Engine` does."""
    parts = [model] if model.axes is None else replicate(model)
    drafts: list[Decoder | QuantizedDecoder | None] = [None] * len(parts)
    if draft is not None:
        drafts = [draft] if draft.axes is None else [*replicate(draft)]
    engines = [
        Engine(
            part,
            num_pages=pool.num_pages,
            page_size=settings.page_size,
            max_sequences=pool.max_sequences,
            max_length=pool.max_length,
            step_tokens=pool.step_tokens,
            reproducible=settings.reproducible,
            speculation=settings.speculation(small),
            cache_results=settings.cache_results,
            implementation=settings.implementation,
            tokenizer=tokenizer,
            **settings.stored,
        )
        for part, small in zip(parts, drafts, strict=True)
    ]
    return engines[0] if len(engines) == 1 else Replicas(engines)
