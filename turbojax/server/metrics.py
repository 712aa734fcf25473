"""What a server counts, as Prometheus reads it."""

import asyncio
import contextlib
from collections.abc import Iterator

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from turbojax.models.engine.asynchronous import AsyncEngine, EngineEnded
from turbojax.models.engine.requests import Result
from turbojax.models.engine.statistics import EngineStatistics

_PATIENCE = 2.0
"""Seconds for which the engine's figures are waited for; it may be compiling."""

_SECONDS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0)
_TOKEN_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.25, 0.5, 1.0)

_COUNTERS = {
    "engine_steps": ("steps", "Steps that ran."),
    "engine_prompt_steps": ("steps_of_prompts", "Steps that ran prompts."),
    "engine_decoding_steps": ("steps_of_decoding", "Steps that ran single tokens only."),
    "engine_speculation_steps": ("steps_of_speculation", "Steps that checked proposals."),
    "engine_host_seconds": ("host_seconds", "Time in steps outside waiting for the device."),
    "engine_wait_seconds": ("wait_seconds", "Time in which the device was waited for."),
    "engine_late_steps": ("late_steps", "Steps for which the device had to wait."),
    "engine_idle_seconds": ("idle_seconds", "Time that it waited for them at most."),
    "prompt_tokens": ("prompt_tokens", "Tokens of prompts that ran."),
    "reused_prompt_tokens": ("reused_tokens", "Tokens of prompts found in the prefix cache."),
    "generated_tokens": ("new_tokens", "Tokens that requests got."),
    "proposed_tokens": ("proposed_tokens", "Tokens that speculation proposed."),
    "accepted_tokens": ("accepted_tokens", "Proposed tokens that the model took."),
    "preemptions": ("preemptions", "How often a request had to leave the pool."),
    "swaps": ("swaps", "How often one went to host memory."),
    "recomputations": ("recomputations", "How often one's tokens ran again."),
    "programs_compiled": ("programs_compiled", "Programs that were compiled."),
}
_GAUGES = {
    "requests_waiting": ("waiting", "Requests not begun."),
    "requests_running": ("running", "Requests in the pool."),
    "requests_swapped": ("swapped", "Requests in host memory."),
    "swapped_bytes": ("swapped_bytes", "Host memory that holds their pages."),
    "pages": ("pages", "Pages of the pool."),
    "free_pages": ("free_pages", "Pages not in use."),
    "cached_pages": ("cached_pages", "Pages that are kept for later prompts only."),
    "pool_bytes": ("pool_bytes", "Memory of all layers' pages."),
    "held_tokens": ("tokens_held", "Tokens of running requests in the pool."),
    "page_occupancy": ("occupancy", "Share of the pages that running requests hold."),
    "prefix_hit_ratio": ("prefix_hit_rate", "Share of prompts' tokens found in the prefix cache."),
}


class Metrics:
    """Counts requests, and shows them with the engine's figures; `registry` has nothing else."""

    def __init__(self, engine: AsyncEngine) -> None:
        self.registry = CollectorRegistry(auto_describe=False)
        self._engine = engine
        self._requests = Counter(
            "turbojax_requests", "Requests that ended.", ["outcome"], registry=self.registry
        )
        self._responses = Counter(
            "turbojax_http_responses",
            "Responses; 499 where the client had gone.",
            ["path", "status"],
            registry=self.registry,
        )
        self._queued = self._histogram("queue_seconds", "From a request to its first step.")
        self._first = self._histogram("time_to_first_token_seconds", "From a request to a token.")
        self._per_token = self._histogram(
            "time_per_token_seconds", "Of a request, between its tokens.", _TOKEN_SECONDS
        )
        self._whole = self._histogram("request_seconds", "From a request to its end.")
        self._figures = EngineFigures()
        self.registry.register(self._figures)
        engine.observe(self._observe)

    def responded(self, path: str, status: int) -> None:
        """Counts a response."""
        self._responses.labels(path, status).inc()

    async def page(self) -> bytes:
        """All metrics in Prometheus' text format.

        If the engine has ended or does not answer within two seconds, its last figures are shown.
        """
        with contextlib.suppress(TimeoutError, EngineEnded):
            self._figures.statistics = await asyncio.wait_for(self._engine.astatistics(), _PATIENCE)
        return generate_latest(self.registry)

    def _histogram(self, name: str, words: str, buckets: tuple[float, ...] = _SECONDS) -> Histogram:
        return Histogram(f"turbojax_{name}", words, buckets=buckets, registry=self.registry)

    def _observe(self, result: Result) -> None:
        self._requests.labels(result.finish_reason).inc()
        self._queued.observe(result.waited_seconds)
        self._whole.observe(result.seconds)
        if result.first_token_seconds is not None:
            self._first.observe(result.first_token_seconds)
            if len(result.tokens) > 1:
                seconds = result.seconds - result.first_token_seconds
                self._per_token.observe(seconds / (len(result.tokens) - 1))


class EngineFigures(Collector):
    """An engine's statistics, as last taken, as metrics."""

    def __init__(self) -> None:
        self.statistics: EngineStatistics | None = None

    def collect(self) -> Iterator[Metric]:
        """See `Collector`."""
        if self.statistics is None:
            return
        for name, (attribute, words) in _COUNTERS.items():
            value = getattr(self.statistics, attribute)
            yield CounterMetricFamily(f"turbojax_{name}", words, value=value)
        for name, (attribute, words) in _GAUGES.items():
            value = getattr(self.statistics, attribute)
            yield GaugeMetricFamily(f"turbojax_{name}", words, value=value)
