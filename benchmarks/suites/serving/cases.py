"""What is served: workloads, what runs them, and what was asked of each.

Requests are random tokens of one length, greedy, all there at the start unless a group says
otherwise. Rows that share an engine stand next to each other: it is made and compiled once.
"""

import dataclasses
import zlib
from typing import Literal

import jax
import numpy as np

from benchmarks.suite import joined
from benchmarks.tables import Row
from turbojax import models, paged
from turbojax.models.engine import Request

OPERATION = "serving"
STOPPED = "stopped"
"""Status of a row that the clock ended."""
LOOP = 32
"""Tokens after which text of the weights ``"looping"`` repeats that begins in the lower half of the
vocabulary; what begins in the upper one goes through all of it first."""

Runs = Literal["engine", "bare", "steps", "http"]
"""The engine; its kernels by hand; `decode_step` by hand; the engine behind its HTTP server."""
Weights = Literal["bf16", "int4", "looping"]
"""Random ones. Those that loop are bfloat16, too, with logits that say what follows each token."""


@dataclasses.dataclass(frozen=True)
class Setting:
    """An engine's sizes."""

    slots: int
    max_length: int
    num_pages: int | None = None
    pool_bytes: int | None = None
    page_size: int = 64
    step_tokens: int = 8192

    def pages(self, config: models.TransformerConfig, kv_dtype: str) -> int:
        if self.pool_bytes is None:
            assert self.num_pages is not None
            return self.num_pages
        sizes = self.page_size, config.num_kv_heads, config.head_dim
        page = jax.eval_shape(lambda: paged.init_cache(1, *sizes, kv_dtype=kv_dtype))
        return self.pool_bytes // (config.num_layers * page.page_bytes)


@dataclasses.dataclass(frozen=True)
class Case:
    """A row of a group.

    Attributes:
      name: in the row's name.
      expected: seconds that the row takes on an H200, making weights and compiling included.
      runs: what runs the requests.
      weights: of the model.
      kv_dtype: of the pages.
      speculates: whether n-grams of the text so far are proposed.
      setting: of the engine, where it is not the group's.
      asked: figures of the row and what was asked of them, see `tables.LESS` for the direction.
      over: figures that compare it with another row: its group and case.
    """

    name: str
    expected: float
    runs: Runs = "engine"
    weights: Weights = "bf16"
    kv_dtype: str = "turbo4"
    speculates: bool = False
    setting: Setting | None = None
    asked: tuple[tuple[str, float], ...] = ()
    over: tuple[tuple[str, str], ...] = ()


@dataclasses.dataclass(frozen=True)
class Group:
    """Requests, the same for every row.

    Attributes:
      label: in the rows' names.
      model: a name of `models.SHAPES`.
      setting: of the engine.
      requests: how many.
      prompt: tokens of each prompt.
      new: tokens of each result.
      cases: the rows, what others are compared with first.
      clients: requests at a time: the next comes when one is done. None: all at once.
      tokens: of the vocabulary, those that prompts are made of: from and to, as shares of it.
      prompts_at_a_time: of the kernels by hand.
    """

    label: str
    model: str
    setting: Setting
    requests: int
    prompt: int
    new: int
    cases: tuple[Case, ...]
    clients: int | None = None
    tokens: tuple[float, float] = (0.0, 1.0)
    prompts_at_a_time: int = 8

    @property
    def config(self) -> models.TransformerConfig:
        return models.SHAPES[self.model]

    def name(self, case: Case) -> str:
        """``serving/llama-3-8b/batch/engine``."""
        return joined(OPERATION, self.model, self.label, case.name)

    def describe(self, case: Case) -> Row:
        setting = self.setting_of(case)
        return {
            "operation": OPERATION,
            "label": self.label,
            "method": case.name,
            "model": self.model,
            "runs": case.runs,
            "weights": case.weights,
            "kv_dtype": case.kv_dtype,
            "speculates": case.speculates,
            "requests": self.requests,
            "prompt": self.prompt,
            "new": self.new,
            "clients": self.clients,
            "setting": dataclasses.asdict(setting),
            "num_pages": setting.pages(self.config, case.kv_dtype),
            "expected_seconds": case.expected,
            "asked": dict(case.asked),
            "over": dict(case.over),
        }

    def setting_of(self, case: Case) -> Setting:
        return case.setting or self.setting

    def prompts(self, use: str = "measured") -> np.ndarray:
        """int32 ``[requests, prompt]``, others for each use: in the pool none is found again."""
        size = self.requests, self.prompt
        rng = np.random.default_rng(zlib.crc32(f"{self.label} {use}".encode()))
        low, high = (round(share * self.config.vocab_size) for share in self.tokens)
        return rng.integers(low, high, size=size, dtype=np.int32)

    def make(self) -> list[Request]:
        return [Request(tokens, max_new_tokens=self.new) for tokens in self.prompts().tolist()]

    def warm_up(self) -> list[Request]:
        """As many with other and shorter prompts, and one of full length, with short results."""
        first, *others = self.prompts("warm-up").tolist()
        few = max(1, min(8, self.prompt // 2))
        return [Request(first, 4), *(Request(tokens[:few], 4) for tokens in others)]


_IDLE = ("idle_ms", 0.3)


def engine_key(group: Group, case: Case) -> tuple[object, ...] | None:
    """What a row's engine is made of, beside the weights; None where there is no engine."""
    if case.runs in ("bare", "steps"):
        return None
    return group.model, case.kv_dtype, case.speculates, group.setting_of(case)


def in_order(rows: list[tuple[Group, Case]]) -> list[tuple[Group, Case]]:
    """The rows, those of the same weights together, and among them those of one engine."""
    if not rows:
        return []
    weights, keys = ([*dict.fromkeys(found)] for found in zip(*map(_makings, rows), strict=True))

    def place(row: tuple[Group, Case]) -> tuple[int, int]:
        kind, key = _makings(row)
        return weights.index(kind), keys.index(key)

    return sorted(rows, key=place)


def _makings(row: tuple[Group, Case]) -> tuple[object, object]:
    return row[1].weights, (row[1].weights, engine_key(*row))


def groups() -> list[Group]:
    """The table of what the engine was rebuilt for; what shares weights and engines together."""
    # 256 sequences of 1,280 tokens, or 512 of 640: as many pages.
    wide = Setting(slots=256, max_length=1280, num_pages=512 * 10 + 64)
    wider = dataclasses.replace(wide, slots=512)
    llama = "llama-3-8b"
    batch, asked = "batch/engine", (("generated_per_second", 9000.0), ("share_of_bare", 0.7))
    many = (("generated_per_second", 16000.0), _IDLE)
    return [
        Group(
            "batch",
            llama,
            wide,
            256,
            1024,
            256,
            (
                Case("bare", 25, "bare"),
                Case("engine", 50, asked=(*asked, _IDLE), over=(("share_of_bare", "batch/bare"),)),
            ),
        ),
        Group("many", llama, wider, 512, 128, 512, (Case("engine", 20, asked=many),)),
        Group("one", llama, wide, 1, 1024, 256, _one()),
        Group("http", llama, wide, 128, 1024, 256, _http(), clients=64),
        _pages("llama-3.1-8b"),
        Group(
            "int4",
            llama,
            wide,
            256,
            1024,
            256,
            (
                Case("bare", 25, "bare", "int4"),
                Case(
                    "engine",
                    45,
                    weights="int4",
                    asked=(("times_bf16_weights", 1.3),),
                    over=(("share_of_bare", "int4/bare"), ("times_bf16_weights", batch)),
                ),
            ),
        ),
        *_speculation(llama, Setting(slots=32, max_length=1024, num_pages=32 * 16 + 16), 32, 512),
        _grid(128, 2048, 26221.0),
        _grid(1000, 1000, 17744.0),
    ]


def _grid(prompt: int, new: int, published: float) -> Group:
    """Lengths of the grid that TensorRT-LLM publishes, with its figure for fp8 weights on an H200.

    INT4 weights and 4-bit pages leave room for 1,024 sequences at a time.
    """
    tokens, at_a_time = prompt + new, 1024
    setting = Setting(at_a_time, tokens, num_pages=at_a_time * -(-tokens // 64) + 64)
    asked = (("generated_per_second", published),)
    cases = (Case("engine", 160, weights="int4", asked=asked),)
    return Group(f"grid-{prompt}-{new}", "llama-3.1-8b", setting, 2048, prompt, new, cases)


def _one() -> tuple[Case, ...]:
    asked, over = (("over_by_hand", 1.1),), (("over_by_hand", "one/by-hand"),)
    return Case("by-hand", 12, "steps"), Case("engine", 4, asked=asked, over=over)


def _http() -> tuple[Case, ...]:
    over = (("times_engine", "http/engine"),)
    return Case("engine", 10), Case("http", 14, "http", over=over)


def _pages(model: str) -> Group:
    """As many requests as three pools of bfloat16 hold, all of which turbo4 holds at once.

    The shape of Llama 3.1 8B is that of Llama 3 8B, with a longer context: prompts alone are 8k.
    """
    pool, length = 40 * 2**30, 8192 + 1024
    narrow, wide = (Setting(slots, length, pool_bytes=pool) for slots in (40, 104))
    cases = (
        Case("auto", 95, kv_dtype="auto", setting=narrow),
        Case("turbo4", 67, asked=(("times_bf16", 1.8),), over=(("times_bf16", "pages/auto"),)),
    )
    return Group("pages", model, wide, 104, 8192, 1024, cases)


def _speculation(model: str, setting: Setting, requests: int, new: int) -> list[Group]:
    """N-grams where they are nearly always right, and where nothing repeats."""

    def group(label: str, count: int, tokens: tuple[float, float], seconds: float) -> Group:
        over = (("times_without", f"{label}/none"),)
        none = Case("none", seconds, weights="looping")
        ngram = Case("ngram", seconds, weights="looping", speculates=True, over=over)
        return Group(label, model, setting, count, 256, new, (none, ngram), tokens=tokens)

    lower, upper = (0.0, 0.5), (0.5, 1.0)
    return [
        group("loops-one", 1, lower, 30),
        group("loops", requests, lower, 6),
        group("no-loops", requests, upper, 6),
    ]


def quick_groups() -> list[Group]:
    """A tiny model, whether everything runs: the same rows."""
    few = Setting(slots=4, max_length=96, num_pages=24, page_size=16, step_tokens=64)
    found = []
    for group in groups():
        setting, cases = few, group.cases
        if group.label == "pages":
            setting = dataclasses.replace(few, num_pages=None, pool_bytes=2**15)
            cases = tuple(dataclasses.replace(case, setting=None) for case in cases)
        tiny = dataclasses.replace(
            group,
            model="tiny",
            setting=setting,
            requests=min(4, group.requests),
            prompt=20,
            # Longer than the loop, where there is one.
            new=2 * LOOP if "loops" in group.label else 12,
            cases=cases,
            clients=None if group.clients is None else 2,
            prompts_at_a_time=2,
        )
        found.append(tiny)
    return found
