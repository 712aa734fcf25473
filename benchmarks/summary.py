"""What a reader decides by: figures of several results, side by side.

Three tables: the three figures of README.md, one line for each area at the head of the benchmarks,
and the page that says which cache and which mode suits which task.
"""

import functools
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks import tables
from benchmarks.stored import newest
from benchmarks.tables import Result, Row

NEEDED = (
    "attention",
    "buffers",
    "decode_launches",
    "engine",
    "evidence",
    "evidence_smollm2",
    "families",
    "fireq",
    "fireq_ablation",
    "fireq_model",
    "generate",
    "gradient_training",
    "gradient_tuning",
    "hopper",
    "kv4",
    "paged",
    "paged_int8",
    "pooled",
    "pooled_training",
    "real_caches",
)


class Figures:
    """Figures of the newest results, and a note of which results were read."""

    def __init__(self, results: Path) -> None:
        self._results = results
        self.sources: dict[str, Result] = {}

    def result(self, prefix: str) -> Result:
        found = newest(self._results, (prefix,))
        if found is None:
            raise FileNotFoundError(f"{self._results} holds no result called {prefix}")
        self.sources[found[0]] = found[1]
        return found[1]

    def row(self, prefix: str, name: str) -> Row:
        rows = [row for row in self.result(prefix)["rows"] if row.get("name") == name]
        if len(rows) != 1 or rows[0]["status"] != "ok":
            raise ValueError(f"the newest result called {prefix} has no figures of {name}")
        return rows[0]

    def speed(self, prefix: str, name: str) -> str:
        """The speed over cuDNN, or a dash where the row was not measured."""
        rows = [row for row in self.result(prefix)["rows"] if row.get("name") == name]
        return tables.times(rows[0].get("speedup_over_cudnn") if rows else None)

    def over_cudnn(self, prefix: str, name: str) -> str:
        row = self.row(prefix, name)
        if "speedup_over_cudnn" in row:
            return tables.times(row["speedup_over_cudnn"])
        return tables.times(row["speedup_over"]["cudnn"])

    def over(self, prefix: str, name: str, base: str) -> str:
        return tables.times(self.row(prefix, name)["speedup_over"][base])

    def real(self, cache: str) -> Row:
        row: Row = self.result("real_caches")["caches"][cache]
        return row

    def loss(self, cache: str) -> str:
        return f"{self.real(cache)['cost']:+.4f} bits per token"

    def buffers(self, cache: str) -> str:
        """The speed over cuDNN of decoding from a cache of this name."""
        found = {
            row["cache"]: row["us"]
            for row in self.result("buffers")["rows"]
            if (row["shape"], row["call"]) == ("llama3-8b/b16-s32768", "decode")
        }
        return tables.times(found["bfloat16"] / found[cache])

    def launched(self, batch: int, tokens: int) -> str:
        """The best speed over cuDNN of the 4-bit cache, of the launch settings that were tried."""
        return tables.times(
            max(
                row["speedup_over_cudnn"]
                for row in self.result("decode_launches")["rows"]
                if (row["batch"], row["tokens"], row["kv_heads"]) == (batch, tokens, 8)
                and row["cache"] == "4bit"
                and row["speedup_over_cudnn"] is not None
            )
        )

    def devices(self, link: str = "") -> str:
        """Where the figures come from: the files of each device."""
        files: dict[str, list[str]] = {}
        for name, result in sorted(self.sources.items()):
            files.setdefault(_device(result), []).append(
                f"[{name}]({link}{name})" if link else f"`{name}`"
            )
        return ". ".join(f"{device}: {', '.join(names)}" for device, names in files.items()) + "."


def _device(result: Result) -> str:
    runs: list[dict[str, Any]] = result.get("runs") or []
    return result["device"] if "device" in result else runs[0]["environment"]["device"]


def best_batches(result: Result) -> dict[str, Row]:
    """Of each cache of a result of the suite ``generate`` the row of most tokens per second."""
    best: dict[str, Row] = {}
    for row in result["rows"]:
        cache = row.get("cache") or row["method"]
        if row["status"] == "ok" and row["tokens_per_second"] > best.get(cache, {}).get(
            "tokens_per_second", 0.0
        ):
            best[cache] = row
    return best


# Of training with 8-bit attention: steps at the end over which losses are averaged.
SMOOTHING = 50


def end_of(run: Mapping[str, Any]) -> float:
    return float(np.mean(run["losses"][-SMOOTHING:]))


def changes(
    result: Result, name: str, of: Callable[[Mapping[str, Any]], float] = end_of
) -> list[float]:
    """A figure of each of a run's seeds over that of exact attention with the same seed, less 1."""
    exact = result["runs"]["exact"]
    return [of(run) / of(exact[seed]) - 1 for seed, run in result["runs"][name].items()]


def loss_ratio(result: Result, name: str) -> float:
    """A run's loss at the end over that of exact attention, the mean of its seeds."""
    return 1 + float(np.mean(changes(result, name)))


_LONG = "decode/llama3-8b/b16-s32768/"
_PROMPT = "prefill/llama3-8b/b2-s8192/"
_CAUSAL = "prefill/llama3-8b/b2-s8192-causal/"
_TRAINING = "training/llama3-8b/b2-s8192/"
_TRAINING_CAUSAL = "training/llama3-8b/b2-s8192-causal/"
_PAGES = "paged-decode/llama3-8b/b16-s32768/"
_SCALED = "kv4-decode/llama3-8b/b16-s32768/"
_MIXTURE = "mha-16/b1-s16384/mixture-0.156/mosaic_gpu"
# How many times the tokens of bfloat16 pages the same memory holds, of 128 channels: from the bytes
# of a key and of a value.
_TOKENS = {
    name: 2 * 256 / (key + value)
    for name, (key, value) in {
        "int8": (130, 130), "int8_v4": (130, 66), "turbo4": (66, 66), "fp8_e4m3": (128, 128),
    }.items()
}  # fmt: skip
_PRODUCT = "matmul/k4096-n14336/"


def figures_table(results: Path, link: str) -> str:
    """The three figures of README.md, each with its device."""
    figures = Figures(results)
    decode = figures.row("hopper", f"{_LONG}turbo-4bit/mosaic_gpu")
    whole = figures.result("generate")
    ends = best_batches(whole)
    model = whole.get("settings", ends["4bit"])["model"]
    exact, ours = (ends[x]["tokens_per_second"] for x in ("exact", "4bit"))
    real = figures.real("4bit")
    lines = [
        [
            f"**{tables.times(decode['speedup_over_cudnn'])}** as fast",
            "decoding attention over 16 sequences of 32k tokens, 4-bit cache against cuDNN in "
            f"bfloat16, at {decode['percent_of_ceiling']:.0f} % of the memory bandwidth",
        ],
        [
            f"**{tables.times(real['compression'])}** smaller, {figures.loss('4bit')}",
            "a 4-bit cache of a real language model (SmolLM2-135M), at 4,096 tokens of prose or "
            f"code; the same greedy choice for {100 * real['same_choice']:.1f} % of the tokens",
        ],
        [
            f"**{tables.times(ours / exact)}** the tokens per second",
            f"decoding with a model of the shape of {model} on one GPU, its batch as large as "
            f"memory or the run allowed: {ours:,.0f} tokens per "
            f"second with {ends['4bit']['batch']} sequences in 4 bits, "
            f"{exact:,.0f} with {ends['exact']['batch']} in bfloat16",
        ],
    ]
    names = {"hopper": 0, "real_caches": 1, "generate": 2}
    for prefix, at in names.items():
        found = newest(results, (prefix,))
        assert found is not None  # `figures` has read it
        name, result = found
        lines[at].append(f"{result['device']}, {result['date']} ([file]({link}{name}))")
    return tables.table(["", "what was measured", "on"], lines)


def headline_table(results: Path) -> str:
    figures = Figures(results)
    engine = [
        figures.row("engine", f"engine/llama-3-8b/short/{pages}")["token_capacity"]
        for pages in ("turbo4", "auto")
    ]
    training = figures.result("pooled_training")["comparison"]
    default = "turbo-int8_fp8-exact-64/mosaic_gpu"
    over = functools.partial(figures.over_cudnn, "hopper")
    ends = best_batches(figures.result("generate"))
    ours, exact = (ends[x]["tokens_per_second"] for x in ("4bit", "exact"))
    lines = [
        [
            "decoding from a 4-bit cache, 16 x 32k",
            f"{over(f'{_LONG}turbo-4bit/mosaic_gpu')} cuDNN in bfloat16",
            "{doc}`attention`",
        ],
        [
            "attention within a prompt, 2 x 8k, causal",
            f"{over(f'{_CAUSAL}{default}')} cuDNN in bfloat16",
            "{doc}`attention`",
        ],
        [
            "pooled attention at 16k tokens, density 0.156, forward and backward",
            f"{figures.over_cudnn('pooled', f'pooled-gradient/{_MIXTURE}')} cuDNN, dense",
            "{doc}`pooled`",
        ],
        [
            "fine-tuning at 16k bytes with pooled attention",
            f"{tables.times(training['speedup'])} dense attention, loss "
            f"{training['final_ratio']:.3f} times the dense one",
            "{doc}`pooled`",
        ],
        [
            "INT4 x e4m3 product, 16 tokens",
            f"{figures.over('fireq', f'{_PRODUCT}m16/int4/mosaic_gpu', 'bf16')} XLA in bfloat16",
            "{doc}`int4`",
        ],
        [
            "decoding from turbo4 pages, 16 x 32k",
            f"{figures.over_cudnn('paged', f'{_PAGES}turbo4/mosaic_gpu')} cuDNN on dense bfloat16",
            "{doc}`paged`",
        ],
        [
            "tokens in a pool of turbo4 pages",
            f"{tables.times(engine[0] / engine[1])} those of bfloat16 pages in the same memory",
            "{doc}`paged`",
        ],
        [
            "generation with a batch as large as memory allows, 4-bit cache",
            f"{tables.times(ours / exact)} the exact cache",
            "{doc}`models`",
        ],
        [
            "4-bit cache of SmolLM2-135M, at 4,096 tokens",
            f"{figures.loss('4bit')}, {tables.times(figures.real('4bit')['compression'])} smaller",
            "{doc}`real_model`",
        ],
    ]
    table = tables.table(["what", "speed, size or cost", "page"], lines)
    return f"{table}\n\n{figures.devices()}"


def toy_table(results: Path) -> str:
    """What caches cost the byte-level model and a real one, also over what KIVI's 4 bits cost."""
    figures = Figures(results)
    toys = figures.result("evidence")["rows"]
    lines = []
    for cache, toy in _ON_BOTH.items():
        costs = [toys[f"cache/{toy}"]["cost"], figures.real(cache)["cost"]]
        bases = [toys["cache/kivi4"]["cost"], figures.real("kivi4")["cost"]]
        over = [f"{cost / base:.1f}" for cost, base in zip(costs, bases, strict=True)]
        lines.append([f"`{cache}`", *(f"{cost:+.4f}" for cost in costs), *over])
    header = ["cache", "bits per byte", "bits per token", "over `kivi4`, bytes", "real"]
    return f"{tables.table(header, lines)}\n\n{figures.devices()}"


# As they were measured on bytes; e4m3 rounds alike with and without pages.
_ON_BOTH = {"int8": "int8", "kivi4": "kivi4", "fp8_e4m3": "e4m3"} | {
    name: name for name in ("k8v4", "turbo4", "kv4")
}


def choosing_table(results: Path) -> str:
    """What to write for which task, with its measured gain and cost."""
    figures = Figures(results)
    lines = [*_caches(figures), *_prompts(figures), *_weights(figures)]
    header = ["what you have", "what to write", "runs as", "gain", "cost"]
    return f"{tables.table(header, lines)}\n\n{figures.devices()}"


def _caches(figures: Figures) -> list[list[str]]:
    hopper = functools.partial(figures.over_cudnn, "hopper")
    triton = functools.partial(figures.over_cudnn, "attention")
    paged = functools.partial(figures.over_cudnn, "paged")
    family = functools.partial(figures.over, "families")
    step = "model-decode/{}/paged"

    def pages(kv_dtype: str, cache: str, suite: str = "paged") -> list[str]:
        """What the cells of pages say: of tokens of 128 channels, in keys and in values."""
        speed = figures.over_cudnn(suite, f"{_PAGES}{kv_dtype}/mosaic_gpu")
        return [f"{speed} cuDNN, {_TOKENS[kv_dtype]:.2f}x the tokens", figures.loss(cache)]

    return [
        [
            "**Decoding** one batch, where reading the cache takes the time; H100 or H200",
            "`cache=tj.TurboConfig()`",
            "`mosaic_gpu`; head dims in multiples of 32 up to 256",
            f"{hopper(f'{_LONG}turbo-4bit/mosaic_gpu')} cuDNN, "
            f"{tables.times(figures.real('4bit')['compression'])} smaller",
            figures.loss("4bit"),
        ],
        [
            "the same on another NVIDIA GPU, or with another head dim",
            "`cache=tj.TurboConfig()`",
            "`triton`, Ampere and newer",
            f"{triton(f'{_LONG}turbo-4bit/triton')} cuDNN (on an H100)",
            "the same",
        ],
        [
            "memory is tighter still",
            "`cache=tj.TurboConfig(value_bits=2)`",
            "`mosaic_gpu` on H100 and H200, else `triton`",
            f"{figures.buffers('k4v2')} cuDNN, "
            f"{tables.times(figures.real('k4v2')['compression'])} smaller",
            figures.loss("k4v2"),
        ],
        [
            "**many requests** of different lengths, that come and go or share beginnings",
            '`tj.models.Engine(model, num_pages=4096, kv_dtype="int8")`, or '
            "`turbojax serve --kv-dtype int8`",
            "`mosaic_gpu` on H100 and H200, else `triton`",
            *pages("int8", "paged_int8", "paged_int8"),
        ],
        [
            "the same, with three quarters of that memory",
            '`kv_dtype="int8_v4"`',
            "`mosaic_gpu` on H100 and H200, else `triton`",
            *pages("int8_v4", "paged_int8_v4", "paged_int8"),
        ],
        [
            "the same, as small and as fast as it gets; **measure your model first**",
            '`kv_dtype="turbo4"`',
            "`mosaic_gpu` on H100 and H200, else `triton`",
            *pages("turbo4", "turbo4"),
        ],
        [
            "the same, with 8-bit products of prompts that go to pages; **measure first**",
            '`kv_dtype="fp8_e4m3"`',
            "`mosaic_gpu`, else `triton` (Ada and newer)",
            *pages("fp8_e4m3", "fp8_e4m3"),
        ],
        [
            "**exact numbers**; a model with windows, soft caps or heads wider than 128",
            '`cache="paged"`; on H100 and H200 `cache="exact"`, too',
            "`mosaic_gpu` on H100 and H200, else `triton`",
            f"{family(step.format('mistral-7b/b16-s8192'), 'exact')} an exact cache by XLA "
            f"(Mistral 7B), {family(step.format('gemma-2-9b/b16-s8192'), 'exact')} (Gemma 2 9B)",
            "none; as large as bfloat16",
        ],
        [
            "a single short sequence, or exact numbers without windows and caps",
            '`cache="exact"`',
            "cuDNN",
            f"compression gains little at 1 x 1k: 4-bit {figures.launched(1, 1024)} cuDNN, "
            f"turbo4 pages {paged('paged-decode/llama3-8b/b1-s1024/turbo4/mosaic_gpu')}",
            "none",
        ],
    ]


def _smaller(figures: Figures, prefix: str, place: str, names: tuple[str, str]) -> str:
    """How many times the bytes that the second of two rows reads the first one does."""
    large, small = (figures.row(prefix, f"{place}{name}")["bytes"] for name in names)
    return tables.times(large / small)


def _prompts(figures: Figures) -> list[list[str]]:
    hopper = functools.partial(figures.over_cudnn, "hopper")
    triton = functools.partial(figures.over_cudnn, "attention")
    error = [
        f"relative L1 {figures.row(suite, f'{_CAUSAL}turbo-{name}')['relative_l1']:.3f}"
        for suite, name in (
            ("hopper", "int8_fp8-exact-64/mosaic_gpu"),
            ("attention", "int8_fp8-exact-128/jax_triton"),
            ("attention", "int8-exact-128/triton"),
        )
    ]
    pooled = functools.partial(figures.over_cudnn, "pooled")
    training = figures.result("pooled_training")["comparison"]
    short = "turbo-int8_fp8-exact-gradient-8bit/mosaic_gpu"
    learning = figures.result("gradient_training")
    learned = loss_ratio(learning, "int8_fp8-8bit")
    tuning = figures.result("gradient_tuning")
    tuned = loss_ratio(tuning, "int8_fp8-8bit")
    steps, more = (x["settings"]["steps"] for x in (learning, tuning))
    return [
        [
            "**prompts**, attention without a cache, or that go into a 4-bit cache; H100 or H200",
            "`tj.turbo_attention(...)`, `cache=tj.TurboConfig()`",
            "`mosaic_gpu`; head dims up to 256",
            f"{hopper(f'{_PROMPT}turbo-int8_fp8-exact-64/mosaic_gpu')} cuDNN, causal "
            f"{hopper(f'{_CAUSAL}turbo-int8_fp8-exact-64/mosaic_gpu')}",
            error[0],
        ],
        [
            "prompts on another NVIDIA GPU, Ada or newer",
            "`pip install '.[triton]'`, and the same",
            "`jax_triton`",
            f"{triton(f'{_PROMPT}turbo-int8_fp8-exact-128/jax_triton')} cuDNN (on an H100)",
            error[1],
        ],
        [
            "prompts on Ampere, or without jax-triton",
            '`jax.nn.dot_product_attention(..., implementation="cudnn")`; with a 4-bit cache '
            "`cache=tj.TurboConfig.for_device()`",
            "cuDNN; `triton`",
            f"our `triton` kernel in `int8` reaches "
            f"{triton(f'{_PROMPT}turbo-int8-exact-128/triton')} cuDNN (on an H100)",
            f"none; {error[2]}",
        ],
        [
            "**training** or prompts at 16k tokens and more",
            "`tj.pooled_attention` with the levels of `tj.select_levels`",
            "`mosaic_gpu` on H100 and H200, else `triton`",
            f"{pooled(f'pooled/{_MIXTURE}')} cuDNN forward, "
            f"{pooled(f'pooled-gradient/{_MIXTURE}')} with the backward pass, at 16 % of the "
            f"work; training {tables.times(training['speedup'])} at "
            f"{100 * training['density']:.0f} %",
            f"{training['final_ratio']:.3f} times the loss of dense training",
        ],
        [
            "training at shorter contexts; H100 or H200",
            '`tj.turbo_attention(..., config=tj.TurboConfig(mode="int8_fp8", gradient="8bit"))`',
            "`mosaic_gpu`; elsewhere the gradient is plain XLA, and cuDNN's is faster",
            f"forward and backward {hopper(f'{_TRAINING}{short}')} cuDNN, causal "
            f"{hopper(f'{_TRAINING_CAUSAL}{short}')}",
            f"loss {learned:.3f} times that of exact attention after {steps:,} steps from "
            f"random weights, {tuned:.3f} times after {more:,} from the embedded model's",
        ],
    ]


def _weights(figures: Figures) -> list[list[str]]:
    product = functools.partial(figures.over, "fireq")
    prompts = [
        row
        for row in figures.result("fireq_model")["rows"]
        if (row["tokens"], row["method"]) == (4096, "int4-kv4")
    ]
    ablation = figures.result("fireq_ablation")
    cost = ablation["bits_per_byte"]["as_is"]["all"] - ablation["exact_bits_per_byte"]
    real = figures.result("evidence_smollm2")["rows"]
    rounded, exact = (real[x]["exact_bits_per_token"] for x in ("int4/bfloat16", "cache/4bit"))
    sixteen, many = (f"{_PRODUCT}{count}/int4/mosaic_gpu" for count in ("m16", "m1024"))
    return [
        [
            "**weights**: few tokens at a time, so that reading them takes the time",
            "`turbojax quantize --model FOLDER --out runs/int4`, or `tj.fireq.quantize_weight(w)`",
            "`mosaic_gpu` on H100 and H200, else `triton`",
            f"{product(sixteen, 'bf16')} a bfloat16 product of 16 tokens, "
            f"{product(many, 'bf16')} one of 1,024; prompts of a whole model "
            f"{tables.times(prompts[0]['speedup_over']['bf16'])}",
            f"{cost:+.3f} bits per byte, with e4m3 activations and a `kv4` cache (embedded model); "
            f"**{rounded - exact:+.2f} bits per token** with an exact cache (SmolLM2)",
        ],
        [
            "a cache for such a model",
            '`cache="kv4"`: a scale for every token and head, no buffer',
            "`mosaic_gpu` on H100 and H200, else `triton`, Ada and newer",
            f"{figures.over_cudnn('kv4', f'{_SCALED}kv4/mosaic_gpu')} cuDNN",
            f"{figures.loss('kv4')}: no cache for a model like SmolLM2",
        ],
        [
            "the same, where `kv4` loses too much",
            '`cache="k8v4"`',
            "`mosaic_gpu` on H100 and H200, else `triton`, Ada and newer",
            f"{figures.over_cudnn('kv4', f'{_SCALED}k8v4/mosaic_gpu')} cuDNN, "
            f"{_smaller(figures, 'kv4', _SCALED, ('cudnn', 'k8v4/triton'))} smaller",
            figures.loss("k8v4"),
        ],
    ]
