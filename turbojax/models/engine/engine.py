"""`Engine`: many requests through one model and one pool of pages, with continuous batching."""

import dataclasses
import functools
import time
from collections.abc import Callable
from collections.abc import Sequence as Many
from typing import Any, NamedTuple

import jax
import numpy as np

from turbojax import _checks
from turbojax._device import needs_gpu
from turbojax.models.config import TransformerConfig
from turbojax.models.decoder import Decoder, for_length, unstack
from turbojax.models.engine import placement, pools
from turbojax.models.engine.base import BaseEngine, Reason
from turbojax.models.engine.device import Device, Programs, Step, Weights, check_programs
from turbojax.models.engine.placement import Place
from turbojax.models.engine.pools import (
    Group,
    Sizes,
    Windows,
    layers_of,
    new_groups,
    pages_of_groups,
    window_of,
    windows_of,
)
from turbojax.models.engine.programs import (
    PromptProgram,
    compiled_since,
    decode_sizes,
    prompt_programs,
    reproducible_program,
    seen,
)
from turbojax.models.engine.requests import Sequence, Status
from turbojax.models.engine.scheduler import Limits, Plan, Scheduler
from turbojax.models.engine.speculation import Draft, NGram, Speculation
from turbojax.models.engine.statistics import Costs, Counts, EngineStatistics, statistics_of
from turbojax.models.engine.step import new_state
from turbojax.models.engine.together import MOST_ROWS, Together
from turbojax.models.engine.tracker import Admission, RequestTracker
from turbojax.models.quantized import QuantizedDecoder
from turbojax.models.tensor_parallel.layout import local_config
from turbojax.models.tensor_parallel.specs import init_split
from turbojax.models.text.tokenizer import Tokenizer
from turbojax.models.transformer import Transformer
from turbojax.numerics.config import TurboConfig

Model = Transformer | Decoder | QuantizedDecoder

# How many times as fast tokens must come together as one by one, as others may have to wait for it.
_GAIN = 1.1


@dataclasses.dataclass(frozen=True)
class Settings:
    """The arguments of `Engine`, which describes them."""

    page_size: int
    max_sequences: int
    max_length: int
    step_tokens: int
    num_pages: int
    window_pages: int | None
    kv_dtype: str
    uncompressed_layers: int
    key_scale: float
    value_scale: float
    seed: int
    reproducible: bool
    speculation: Speculation | None
    tokens_together: int
    prefix_caching: bool
    cache_results: bool
    implementation: str | None


class Made(NamedTuple):
    """The parts of an engine."""

    config: TransformerConfig
    groups: tuple[Group, ...]
    limits: Limits
    device: Device


class UsualSizes(NamedTuple):
    """The sizes of an engine where no others are asked for, see `Engine`."""

    max_sequences: int
    step_tokens: int
    tokens_together: int


def usual_sizes(*, reproducible: bool) -> UsualSizes:
    """Sizes that suit the device: many rows keep a GPU busy, on a CPU each row costs time."""
    if reproducible:
        return UsualSizes(8, 64, 1)
    return UsualSizes(256, 8192, 4) if jax.default_backend() == "gpu" else UsualSizes(16, 512, 1)


def check_model(model: Model) -> None:
    """Raises TypeError unless this is a model."""
    if not isinstance(model, Transformer | Decoder | QuantizedDecoder):
        raise TypeError(
            f"model is a {type(model).__name__}, must be a Transformer, Decoder or QuantizedDecoder"
        )


def make(model: Model, settings: Settings, tokenizer: Tokenizer | None) -> Made:
    """The parts of an engine; raises what `Engine` raises."""
    config, s = model.config, settings
    sizes = Sizes(s.page_size, s.max_sequences, s.max_length, s.step_tokens)
    _check(s, config, tokenizer)
    windows = windows_of(config, s.max_length)
    pages = pages_of_groups(windows, s.num_pages, sizes, s.window_pages)
    decoder = for_length(_unstacked(model), s.max_length)
    where = placement.place_of(decoder)
    caches, local = _pools(decoder, pages, windows, s, where)
    programs = _programs(s, windows, caches, config)
    max_pages = -(-s.max_length // s.page_size)
    layers = layers_of(config, windows)
    draft = None
    if isinstance(s.speculation, Draft):
        draft, of_draft = _draft(s.speculation, config, windows, pages, s, where)
        heads = local_config(draft[0].config, draft[0].axes).num_heads
        check_programs(programs, of_draft[:1], max_pages, heads)
    # One of each way to store pages: the first and last layers may have another.
    kinds = {cache.kv_dtype: cache for cache in local}
    heads = local_config(config, decoder.axes).num_heads
    check_programs(programs, kinds.values(), max_pages, heads)
    with placement.made_on(where):
        slots = new_state(len(windows), s.max_sequences, max_pages, s.max_length)
        slots = placement.put(slots, where)
    made = new_groups(config, windows, pages, s.page_size, prefix_caching=s.prefix_caching)
    limits = Limits(
        s.max_sequences,
        programs.prompts[-1],
        next((x for x in programs.prompts[::-1] if x.is_dense), None),
        s.tokens_together - 1 if s.speculation is None else s.speculation.tokens,
        is_shared=not s.reproducible,
    )
    device = Device(decoder, caches, slots, programs, layers, draft)
    return Made(decoder.config, made, limits, device)


def _check(s: Settings, config: TransformerConfig, tokenizer: Tokenizer | None) -> None:
    if s.max_length > config.max_length:
        raise ValueError(
            f"max_length={s.max_length} must be at most the model's {config.max_length}"
        )
    if tokenizer is not None and tokenizer.vocab_size > config.vocab_size:
        raise ValueError(
            f"the tokenizer has {tokenizer.vocab_size} tokens, must be at most the model's "
            f"{config.vocab_size}"
        )
    if s.cache_results and not s.prefix_caching:
        raise ValueError(
            f"cache_results={s.cache_results} has no use with prefix_caching={s.prefix_caching}"
        )
    _checks.check_sizes(tokens_together=s.tokens_together)
    if s.tokens_together > 1 and s.reproducible:
        raise ValueError(
            f"tokens_together={s.tokens_together} must be 1 with reproducible={s.reproducible}: "
            "all steps are one program then"
        )
    if s.speculation is None:
        return
    if s.tokens_together > 1:
        raise ValueError(
            f"tokens_together={s.tokens_together} must be 1 with speculation, which says itself "
            "how many tokens come at a time"
        )
    if not isinstance(s.speculation, NGram | Draft):
        raise TypeError(
            f"speculation is a {type(s.speculation).__name__}, must be NGram, Draft or None"
        )
    if s.reproducible:
        raise ValueError(
            f"reproducible={s.reproducible} must be False with speculation: tokens that are "
            "checked together are rounded in another way than one by one"
        )


def _unstacked(model: Model) -> Decoder | QuantizedDecoder:
    return unstack(model) if isinstance(model, Transformer) else model


def _pools(
    decoder: Weights, pages: Many[int], windows: Windows, s: Settings, place: Place
) -> tuple[pools.Pools, pools.Pools]:
    """The layers' pools, and what one device has of them."""
    return _made(
        decoder,
        place,
        num_pages=pools.pages_of_layers(decoder.config, windows, pages),
        page_size=s.page_size,
        kv_dtype=s.kv_dtype,
        uncompressed_layers=s.uncompressed_layers,
        key_scale=s.key_scale,
        value_scale=s.value_scale,
        seed=s.seed,
    )


def _made(decoder: Weights, place: Place, **given: Any) -> tuple[pools.Pools, pools.Pools]:
    """Pools where the model is, see `pools.init_pools`, and what one device has of them."""
    axes = decoder.axes
    config = local_config(decoder.config, axes)
    make = functools.partial(pools.init_pools, config, decoder.dtype, **given)
    if axes is not None:
        return init_split(make, axes), jax.eval_shape(make)
    with placement.made_on(place):
        caches = placement.put(make(), place)
    return caches, caches


def _programs(
    s: Settings, windows: Windows, caches: pools.Pools, config: TransformerConfig
) -> Programs:
    if s.reproducible:
        one: tuple[PromptProgram, ...] = (reproducible_program(s.max_sequences, s.step_tokens),)
        return Programs(one, (), windows, s.implementation)
    dense = TurboConfig.for_device() if _attends_densely(s, config) else None
    kinds = {cache.kv_dtype for cache in caches}
    prompts = prompt_programs(
        s.max_sequences, s.step_tokens, s.max_length, kinds=kinds, is_dense=dense is not None
    )
    sizes = decode_sizes(s.max_sequences)
    together = None if s.tokens_together == 1 else Together.of(s.tokens_together, s.max_sequences)
    return Programs(prompts, sizes, windows, s.implementation, dense, s.speculation, together)


def _attends_densely(s: Settings, config: TransformerConfig) -> bool:
    """Whether prompts attend among themselves: faster on a GPU than attending to pages of codes."""
    is_compressed = s.kv_dtype != "auto" and config.latent is None
    return is_compressed and s.implementation != "xla" and needs_gpu(8.0) is None


def _draft(
    how: Draft,
    config: TransformerConfig,
    windows: Windows,
    pages: Many[int],
    s: Settings,
    where: Place,
) -> tuple[tuple[Weights, pools.Pools, tuple[tuple[int, ...], ...]], pools.Pools]:
    """A draft model's weights, pools and layers, and what one device has of the pools.

    Their pages have the same numbers as the model's, so both use the same tables.
    """
    other = how.model.config
    for name, found, wanted in (
        ("vocab_size", other.vocab_size, config.vocab_size),
        ("latents", other.latent is not None, False),
    ):
        if found != wanted:
            raise ValueError(f"the draft model has {name}={found}, must be {wanted}")
    if other.max_length < s.max_length:
        raise ValueError(
            f"the draft model has max_length={other.max_length}, must be at least {s.max_length}"
        )
    seen = {window_of(other, i, s.max_length) for i in range(other.num_layers)}
    if None not in windows and not seen <= set(windows):
        raise ValueError(f"the draft model's windows are {seen}, must be among {set(windows)}")
    layers = layers_of(other, windows)
    of_layers = {layer: n for of_group, n in zip(layers, pages, strict=True) for layer in of_group}
    decoder = for_length(_unstacked(how.model), s.max_length)
    placement.check_beside(decoder, where)
    caches, local = _made(
        decoder,
        where,
        num_pages=[of_layers[layer] for layer in range(other.num_layers)],
        page_size=s.page_size,
        kv_dtype="auto" if config.latent is not None else s.kv_dtype,
        uncompressed_layers=0,
        key_scale=s.key_scale,
        value_scale=s.value_scale,
        seed=s.seed,
    )
    return (decoder, caches, layers), local


# The engine ---------------------------------------------------------------------------------------


class Engine(BaseEngine):
    """Runs requests that come at any time through one model and one paged cache.

    A step runs one token of each sequence that is generating and, while there are prompts to run,
    pieces of them, up to `step_tokens`. Steps have a few sizes, each a program; `compile` makes all
    of them before the first request. Where pages are compressed and the device has a kernel for it,
    prompts that begin in a step attend among themselves, to keys and values that are not
    compressed. All other tokens attend to the pages, that is to keys and values as the cache stores
    them.

    With ``reproducible=True`` a request's text depends only on its own tokens and options, and on
    the engine's settings (such as `max_sequences`, `step_tokens` and `implementation`, which make
    other programs): not on what else runs, on the order of arrival, on the size of the pool, on
    prefixes found there or on having left it for a while. All steps are one program then, as large
    as it must be, and one prompt runs at a time. Otherwise all that holds within rounding: programs
    of other sizes add up in another order, so that a text may take another turn where two tokens
    are about equally likely.

    Layers whose sliding windows differ have pages of their own: those of a window are freed as it
    moves on, so that a request holds what its windows need.

    A request gets pages as it needs them. Where the pool is full, the youngest running request
    leaves: its pages go to host memory, from which they come back with the same bits, or they are
    dropped and computed again, if that has taken less time so far (with ``reproducible=True`` they
    never are). Full pages of prompts stay in the pool as long as the space is not needed, and are
    found by later requests that begin with the same tokens.

    A step is given to the device before the tokens of the one before are read, so events come with
    the next call of `step`.

    Any exception inside a step, Ctrl-C included, ends the engine, and so does one while a request
    is added or aborted: every later call, also of `idle` and `statistics`, raises
    ``RuntimeError("this engine has ended: ...")`` with the first cause. Arguments that are refused
    end nothing. Between steps the engine may be left at any time, by an exception of `progress`, by
    closing what `stream` returned, or by Ctrl-C there: what was not handed out comes with the next
    call.

    It runs on the device that holds the model's weights, where these were put on one
    (`jax.device_put`, `replicate`), and otherwise on jax's default device. A model that is split
    over a mesh (`load_decoder` with one, `shard`) runs on all of its devices: each has the pages of
    its KV heads, and a step is one program, see `docs/parallel.md`.

    An engine is for one thread at a time. A call while another thread is inside one, or in `run`,
    raises RuntimeError and changes nothing.

    Args:
      model: the model, quantized or not. A `Transformer` is unstacked first, see `start`.
      num_pages: pages of each layer's pool; where some layers see further back than others, of
        those that see furthest.
      window_pages: pages of the pools of all other layers, see `num_pages`; by default what
        `max_sequences` requests need at most, but no more than `num_pages`.
      page_size: tokens of a page: 16, 32, 64 or 128.
      kv_dtype: how pages are stored: ``"auto"`` (the model's dtype), ``"fp8_e4m3"``, ``"int8"``,
        ``"turbo4"``, ``"k8v4"`` .., see `PagedCache`; for a model with latent attention ``"auto"``,
        ``"fp8_e4m3"`` or ``"turbo4"``, see `LatentPages`. By default nothing is compressed, so that
        texts are exactly the model's; `init_paged_cache`, whose purpose is compression, has another
        default.
      uncompressed_layers: how many of the first and of the last layers keep pages in the model's
        dtype; in many models these layers lose most by compression.
      max_sequences: requests that run at a time; if not given 256 on a GPU, 16 on a CPU, and 8 with
        `reproducible`.
      max_length: tokens of prompt and result of a request at most; by default the model's. LongRoPE
        chooses its factors by it, for all requests alike, as they may share pages. A length that is
        larger than needed costs time in each step, because tables are as wide as it asks for.
      step_tokens: tokens of prompts that a step runs at most, besides those that are generated; if
        not given 8,192 on a GPU, 512 on a CPU, and 64 with `reproducible`. With more of them
        prompts are faster, and sequences that are generating wait longer.
      reproducible: see above.
      speculation: `NGram` or `Draft`: how tokens are guessed ahead, to be checked several at a time
        in steps without prompts, where that has taken less time for a token so far. Not with
        `reproducible`. A step in which a request wants penalties, a bias, a constraint or
        log-probabilities guesses nothing.
      tokens_together: new tokens of each sequence that the device makes before the host hears of
        them, where at most 64 sequences generate and none waits, and where that has taken less time
        for a token so far: the host takes some 0.15 ms a layer for a step, which is longer than a
        step of a small model. Whatever comes meanwhile waits for all of them. If not given 4 on a
        GPU, and 1 on a CPU, with `reproducible` and with `speculation`. A step in which a request
        wants penalties, a bias, a constraint or log-probabilities makes one.
      prefix_caching: whether pages are kept for requests that begin with the same tokens.
      cache_results: whether pages of results are kept, too, for instance for the next turn of a
        conversation. A text that continues one may then differ in rounding from one that ran alone,
        where single tokens and prompts run in different kernels.
      key_scale: see `init_paged_cache`.
      value_scale: see `init_paged_cache`.
      seed: of the codes' rotation, see `init_paged_cache`. Sampling has seeds of its own.
      implementation: of attention to pages; None to choose.
      tokenizer: turns tokens into the text in which requests' `stop_strings` are looked for; needed
        for those only.

    Attributes:
      max_length: tokens of prompt and result of a request at most.
      admission: what requests are checked against.

    Raises:
      TypeError: if the model or a number is of the wrong kind.
      ValueError: if a number does not fit, or a name is unknown.
      NotImplementedError: if the implementation asked for cannot run the engine's step here.
    """

    def __init__(
        self,
        model: Transformer | Decoder | QuantizedDecoder,
        *,
        num_pages: int,
        window_pages: int | None = None,
        page_size: int = 64,
        kv_dtype: str = "auto",
        uncompressed_layers: int = 0,
        max_sequences: int | None = None,
        max_length: int | None = None,
        step_tokens: int | None = None,
        reproducible: bool = False,
        speculation: Speculation | None = None,
        tokens_together: int | None = None,
        prefix_caching: bool = True,
        cache_results: bool = False,
        key_scale: float = 1.0,
        value_scale: float = 1.0,
        seed: int = 0,
        implementation: str | None = None,
        tokenizer: Tokenizer | None = None,
    ) -> None:
        check_model(model)
        usual = usual_sizes(reproducible=reproducible)
        if tokens_together is None:
            tokens_together = usual.tokens_together if speculation is None else 1
        settings = Settings(
            page_size=page_size,
            max_sequences=usual.max_sequences if max_sequences is None else max_sequences,
            max_length=model.config.max_length if max_length is None else max_length,
            step_tokens=usual.step_tokens if step_tokens is None else step_tokens,
            num_pages=num_pages,
            window_pages=window_pages,
            kv_dtype=kv_dtype,
            uncompressed_layers=uncompressed_layers,
            key_scale=key_scale,
            value_scale=value_scale,
            seed=seed,
            reproducible=reproducible,
            speculation=speculation,
            tokens_together=tokens_together,
            prefix_caching=prefix_caching,
            cache_results=cache_results,
            implementation=implementation,
        )
        config, self._groups, limits, self._device = make(model, settings, tokenizer)
        self._max_pages = -(-settings.max_length // page_size)
        self._costs = Costs(may_recompute=not reproducible)
        self._speculates = speculation is not None
        self._scheduler = Scheduler(
            self._groups,
            limits,
            cache_results=cache_results,
            recomputes=self._recomputes,
            takes_more=self._takes_more,
        )
        counts = Counts()
        self._tracker = RequestTracker(self._scheduler, counts)
        self._in_flight: Step | None = None
        self._busy_since = 0.0
        super().__init__(
            Admission(config, settings.max_length, settings.step_tokens, self._groups, tokenizer),
            self._tracker.sequences,
            counts,
        )

    def compile(
        self, progress: Callable[[int, int], None] | None = None, *, only_greedy: bool = False
    ) -> None:
        """Compiles all programs now, side by side, so that no step has to.

        Programs of a `logit_bias`, and those that move pages to the host and back, are not among
        them: they are small, and compiled when they are first needed.

        Args:
          progress: called with how many programs are done, and of how many.
          only_greedy: whether to leave out the programs of requests that want more than the most
            likely tokens.
        """
        count = self._guard.change(
            "compile", lambda: self._device.compile(progress, only_greedy=only_greedy)
        )
        self._counts.programs_compiled += count

    def statistics(self) -> EngineStatistics:
        """What was done so far, and what is held now."""
        self._guard.check()
        return statistics_of(
            self._counts,
            self._scheduler,
            self._groups,
            self._device.caches,
            list(self._tracker.swapped.values()),
        )

    # Inside a call --------------------------------------------------------------------------------

    def _queue(self, sequences: list[Sequence], added: float | None) -> tuple[int, ...]:
        return self._tracker.queue(sequences, added)

    def _works(self) -> bool:
        return bool(self._tracker.sequences) or self._in_flight is not None

    def _abort(self, request_id: int, reason: Reason) -> bool:
        sequence = self._tracker.sequences.get(request_id)
        if sequence is not None:
            self._tracker.finish(sequence, reason)
            self._events += self._tracker.take_events()
        return sequence is not None

    def _advance(self) -> None:
        begun, compiled = time.perf_counter(), seen()
        tokens = self._counts.new_tokens
        waited = self._counts.wait_seconds
        self._tracker.end_late(begun)
        plan = self._scheduler.plan()
        self._note_idling(plan)
        # Nothing waits for the device before it has the next step.
        leaving = [(x, self._device.read(pages)) for x, pages in plan.leaving]
        self._enter(plan)
        previous, self._in_flight = self._in_flight, self._dispatch(plan)
        if previous is not None:
            self._tracker.collect(previous)
        for sequence, copies in leaving:
            if sequence.status is Status.SWAPPED:  # and has not ended just now
                self._costs.swapped(*self._tracker.fetch(sequence, copies))
        self._busy_since = time.perf_counter()
        for sequence in [x for x in self._scheduler.running if _is_over(x)]:
            # Nothing is left to feed; the last token is on its way.
            self._scheduler.release(sequence, Status.LEFT)
        seconds = time.perf_counter() - begun
        if (programs := compiled_since(compiled)) > 0:
            self._counts.programs_compiled += programs
            self._counts.first_step_seconds += seconds
            self._counts.first_step_tokens += self._counts.new_tokens - tokens
            # Compiling is not part of what a step costs the host.
            self._counts.wait_seconds = waited
        else:
            self._counts.seconds += seconds
            self._counts.host_seconds += seconds - (self._counts.wait_seconds - waited)
            if previous is not None:  # what the device did meanwhile
                self._costs.stepped(
                    seconds,
                    prompt_tokens=previous.prompt_tokens,
                    several=previous.more > 0,
                    sequences=len(previous.rows),
                    new_tokens=self._counts.new_tokens - tokens,
                )
        self._events += self._tracker.take_events()

    def _note_idling(self, plan: Plan) -> None:
        """Counts a step that comes after the device has done the one before and waits."""
        if plan.empty or self._in_flight is None:
            return
        found: Any = self._in_flight.found
        if not found.is_ready():
            return
        self._counts.late_steps += 1
        self._counts.idle_seconds += time.perf_counter() - self._busy_since

    def _takes_more(self) -> bool:
        """Whether the next step may give each sequence several tokens."""
        scheduler = self._scheduler
        if self._speculates:
            return self._costs.several_pay()
        # Whoever waits would wait for all of these tokens.
        is_busy = scheduler.waiting or scheduler.swapped or len(scheduler.running) > MOST_ROWS
        return not is_busy and self._costs.several_pay(_GAIN)

    def _recomputes(self, sequence: Sequence, pages: tuple[tuple[int, ...], ...]) -> bool:
        """Whether running a sequence's tokens again takes less time than moving its pages twice."""
        return self._costs.recomputes(self._device.nbytes(pages), sequence.held)

    def _enter(self, plan: Plan) -> None:
        """Writes pages that come back from host memory, and fills slots of entering sequences."""
        for sequence, pages in plan.returning:
            self._device.write(pages, self._tracker.swapped.pop(sequence.request_id))
        begins = {piece.sequence: piece.begin for piece in plan.pieces}
        entering = []
        for sequence in plan.entering:
            held = begins.get(sequence, sequence.held)
            tables = [
                group.allocator.block_tables([handle], self._max_pages)[0]
                for group, handle in zip(self._groups, sequence.handles, strict=True)
            ]
            entering.append((sequence, held, np.stack(tables)))
            self._tracker.started(sequence)
        self._device.enter(entering)

    def _dispatch(self, plan: Plan) -> Step | None:
        """Gives the device a step, None if the plan is empty."""
        if plan.empty:
            return None
        step = self._device.run(plan, self._changes(plan))
        self._counts.steps += 1
        self._counts.steps_of_prompts += bool(plan.pieces)
        self._counts.steps_of_speculation += step.is_guessed
        self._counts.steps_of_several += step.more > 0 and not step.is_guessed
        for piece in plan.pieces:
            self._counts.prompt_tokens += piece.count
            if not piece.sequence.prefilling:
                # Whoever finds these pages reads them in a later step.
                self._scheduler.keep_prefix(piece.sequence)
        return step

    def _changes(self, plan: Plan) -> list[tuple[int, int, int, int]]:
        """New entries of tables, of sequences that grew: group, slot, column, page."""
        found = []
        for sequence, before in plan.grown:
            for number, handle in enumerate(sequence.handles):
                pages = self._groups[number].allocator.pages(handle)
                found += [
                    (number, sequence.slot, column, pages[column])
                    for column in range(before, len(pages))
                ]
        return found


def _is_over(sequence: Sequence) -> bool:
    """Whether all tokens of a request are known, or are certain to come from steps under way."""
    return sequence.sampled - sequence.unsure >= sequence.request.max_new_tokens
