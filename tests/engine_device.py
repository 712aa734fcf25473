"""A device made of numpy, so that the engine's host side runs alone, thousands of steps a second.

The device stores tokens in pages and predicts from all the tokens that it reads back through the
tables it is given. A wrong page, a page overwritten too soon, a token fed twice or a wrong prefix
changes what a request gets.
"""

import contextlib
import dataclasses
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
    """What `run_step`, `choose` and `swap` do, for tokens instead of keys and values.

    Each group of layers has pages of its own. A slot of a page holds the number of a text: the
    token that was written, after all those that came before it as its group saw them then, which is
    what a real layer's keys and values depend on.
    """

    def __init__(self, made: Engine) -> None:
        self.made = made
        self.layers = [group.layers for group in made._groups]
        sizes = [group.allocator.num_pages for group in made._groups]
        self.pages = [np.full((count, PAGE), -99) for count in sizes]
        self.texts: list[tuple[int, ...]] = []
        self.numbers: dict[tuple[int, ...], int] = {}
        self.programs: set[tuple] = set()
        self.kinds: set[str] = set()

    def number(self, text: tuple[int, ...]) -> int:
        """Of a text."""
        if text not in self.numbers:
            self.numbers[text] = len(self.texts)
            self.texts.append(text)
        return self.numbers[text]

    def run_step(self, decoder, caches, last_tokens, work, *, implementation, windows):
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
                assert np.all(work.tables[:, row] == -1)
                continue
            for group, table in enumerate(work.tables[:, row]):
                text = self.before(group, table, work.lengths[row])
                for position, token in enumerate(new, start=work.lengths[row]):
                    page, at = table[position // PAGE], position % PAGE
                    assert page >= 0
                    written.append((group, page, at))
                    text = (*text, int(token))
                    self.pages[group][page, at] = self.number(text)
        assert len(set(written)) == len(written)
        for row in range(slots + 1):
            if work.counts[row]:
                length = work.lengths[row] + work.counts[row]
                held = {
                    self.read_back(group, window, work.tables[group, row], work, row)
                    for group, window in enumerate(windows)
                }
                assert len(held) == 1, "groups of layers hold other tokens"
                (text,) = held
                assert len(text) == length
                # The token after the last may be none, until the host knows.
                assert min(text[:-1], default=0) >= 0, "a token that nobody wrote"
                assert text[-1] >= NOTHING
                chosen[row] = next_token(list(text))
        return caches, chosen, np.int32(0)

    def before(self, group, table, length):
        """The text up to a position, which is that of the token before it."""
        if not length:
            return ()
        page = table[(length - 1) // PAGE]
        assert page >= 0
        return self.texts[self.pages[group][page, (length - 1) % PAGE]]

    def read_back(self, group, window, table, work, row):
        """The row's text, from what its tokens see in the pages of a group."""
        length = work.lengths[row] + work.counts[row]
        first = 0 if window is None else max(work.lengths[row] - window + 1, 0)
        assert np.all(table[: first // PAGE] == -1), "a page that no token sees is held"
        text = self.before(group, table, length)
        for position in range(first, length):
            assert self.before(group, table, position + 1) == text[: position + 1]
        return text

    def choose(self, chosen, last_tokens, counts, piece_slot, rows, *, kind):
        self.kinds.add(kind)
        last = np.where(counts[:-1] > 0, chosen[:-1], np.asarray(last_tokens))
        if piece_slot < len(last):
            last[piece_slot] = chosen[-1]
        return chosen, last

    def group_of(self, caches):
        """Whose pools these are."""
        [group] = [
            group
            for group, layers in enumerate(self.layers)
            if all(self.made._caches[i] is x for i, x in zip(layers, caches, strict=False))
        ]
        assert len(caches) == len(self.layers[group])
        return group

    def read(self, caches, pages):
        return self.pages[self.group_of(caches)][list(pages)].copy()

    def write(self, caches, pages, content):
        assert len(pages) == len(content)
        self.pages[self.group_of(caches)][list(pages)] = content
        return caches


@functools.cache
def _model(windows: tuple[int | None, ...]) -> models.Decoder:
    config = dataclasses.replace(CONFIG, num_layers=len(windows), local_windows=windows)
    return models.random_decoder(config, dtype=jnp.float32)


def make(
    pages: int,
    slots: int,
    chunk: int,
    prefixes: bool,
    results: bool = False,
    windows: tuple[int | None, ...] = (None,),
    window_pages: int | None = None,
) -> tuple[Engine, FakeDevice]:
    made = Engine(
        _model(windows),
        num_pages=pages,
        window_pages=window_pages,
        page_size=PAGE,
        max_sequences=slots,
        prefill_chunk=chunk,
        prefix_caching=prefixes,
        cache_results=results,
    )
    return made, FakeDevice(made)


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
