"""A device made of numpy, so that the engine's host side runs alone, thousands of steps a second.

The device stores tokens in pages and predicts from all the tokens that it reads back through the
tables it is given. A wrong page, a page overwritten too soon, a token fed twice or a wrong prefix
changes what a request gets.
"""

import contextlib
import functools
from collections.abc import Iterator
from unittest import mock

import jax.numpy as jnp
import numpy as np

from turbojax import models
from turbojax.models.engine import Engine, Request, engine
from turbojax.models.generation.sampling import NOTHING

VOCABULARY = 5
PAGE = 16
CONFIG = models.TransformerConfig(
    vocab_size=VOCABULARY,
    hidden_size=16,
    intermediate_size=16,
    num_layers=1,
    num_heads=1,
    num_kv_heads=1,
    head_dim=16,
    max_length=256,
)


def next_token(tokens: list[int]) -> int:
    """Depends on every token and its place; after a 4 at the beginning, sometimes there is none."""
    total = sum((3 * i + 1) * (token + 1) for i, token in enumerate(tokens))
    if tokens[-1] == NOTHING or (tokens[0] == 4 and total % 31 == 0):
        return NOTHING
    return total % 7 % VOCABULARY


def expected(request: Request) -> tuple[tuple[int, ...], str]:
    tokens = list(request.tokens)
    for _ in range(request.max_new_tokens):
        token = next_token(tokens)
        if token == NOTHING:
            return tuple(tokens[len(request.tokens) :]), "failed"
        tokens.append(token)
        if tokens[-1] in request.stop_tokens:
            return tuple(tokens[len(request.tokens) :]), "stop"
    return tuple(tokens[len(request.tokens) :]), "length"


class FakeDevice:
    """What `run_step`, `choose` and `swap` do, for tokens instead of keys and values."""

    def __init__(self, num_pages: int) -> None:
        self.pages = np.full((num_pages, PAGE), -99)
        self.programs: set[tuple] = set()
        self.kinds: set[str] = set()

    def run_step(self, decoder, caches, last_tokens, work, *, implementation):
        slots = len(work.tokens)
        self.programs.add(tuple(np.shape(x) for x in (work.tables, work.tokens, work.piece)))
        chosen = np.full(slots + 1, -7)
        fed = np.where(work.tokens >= 0, work.tokens, np.asarray(last_tokens))
        written = []
        for row in range(slots + 1):
            new = [fed[row]] if row < slots else list(work.piece)
            new = new[: work.counts[row]]
            if not new:
                assert work.lengths[row] == 0
                assert np.all(work.tables[row] == -1)
                continue
            for position, token in enumerate(new, start=work.lengths[row]):
                page, at = work.tables[row, position // PAGE], position % PAGE
                assert page >= 0
                written.append((page, at))
                self.pages[page, at] = token
        assert len(set(written)) == len(written)
        for row in range(slots + 1):
            if work.counts[row]:
                length = work.lengths[row] + work.counts[row]
                held = self.pages[work.tables[row, : -(-length // PAGE)]].reshape(-1)[:length]
                # The token after the last may be none, until the host knows.
                assert np.all(held[:-1] >= 0), "a token that nobody wrote"
                assert held[-1] >= NOTHING
                chosen[row] = next_token(held.tolist())
        return caches, chosen, np.int32(0)

    def choose(self, chosen, last_tokens, counts, piece_slot, rows, *, kind):
        self.kinds.add(kind)
        last = np.where(counts[:-1] > 0, chosen[:-1], np.asarray(last_tokens))
        if piece_slot < len(last):
            last[piece_slot] = chosen[-1]
        return chosen, last

    def read(self, caches, pages):
        return self.pages[list(pages)].copy()

    def write(self, caches, pages, content):
        assert len(pages) == len(content)
        self.pages[list(pages)] = content
        return caches


@functools.cache
def _model() -> models.Decoder:
    return models.random_decoder(CONFIG, dtype=jnp.float32)


def make(
    pages: int, slots: int, chunk: int, prefixes: bool, results: bool = False
) -> tuple[Engine, FakeDevice]:
    made = Engine(
        _model(),
        num_pages=pages,
        page_size=PAGE,
        max_sequences=slots,
        prefill_chunk=chunk,
        prefix_caching=prefixes,
        cache_results=results,
    )
    return made, FakeDevice(pages)


@contextlib.contextmanager
def on(device: FakeDevice) -> Iterator[None]:
    """Engines run on this device inside."""
    with (
        mock.patch.object(engine, "run_step", device.run_step),
        mock.patch.object(engine, "choose", device.choose),
        mock.patch.object(engine.swap, "read", device.read),
        mock.patch.object(engine.swap, "write", device.write),
    ):
        yield


def step(made: Engine, device: FakeDevice) -> list:
    with on(device):
        return made.step()
