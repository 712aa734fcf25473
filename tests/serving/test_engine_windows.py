"""Engines of models with sliding windows: pages behind them are freed, and texts stay the same."""

import dataclasses
from unittest import mock

import jax.numpy as jnp
import numpy as np
import pytest

from tests.serving.engine_device import make as fake
from tests.serving.engine_device import step
from tests.serving.engine_helpers import NEW, PAGE, TINY, make, real_prompts, run_one
from turbojax import models
from turbojax.app.serve import run as serving
from turbojax.app.serve.requests import RequestFile, TextRequest, fitting
from turbojax.app.serve.settings import Models, Settings
from turbojax.models import Engine, Request
from turbojax.models.engine import engine, pools

WINDOW = 24
# As Gemma's: layers with a window, and now and then one without; as Mistral's: all with one.
ALTERNATING, ALL = (WINDOW, None, WINDOW), (WINDOW, WINDOW)


def model(windows):
    config = dataclasses.replace(
        TINY, vocab_size=256, num_layers=len(windows), local_windows=windows
    )
    return models.random_decoder(config, dtype=jnp.float32)


def keep_everything():
    """All layers in one group, from which nothing is freed."""
    return mock.patch.object(engine, "windows_of", return_value=(None,))


def texts(made, prompts):
    numbers = [made.add(Request(prompt, NEW)) for prompt in prompts]
    results = made.run()
    return [results[number].tokens for number in numbers]


@pytest.mark.quick(slow=1)
@pytest.mark.parametrize(
    ("windows", "kv_dtype"),
    [
        (ALTERNATING, "turbo4"),
        pytest.param(ALL, "auto", marks=pytest.mark.slow),
        pytest.param(ALTERNATING, "fp8_e5m2", marks=pytest.mark.slow),
    ],
)
def test_texts_are_those_of_an_engine_that_frees_nothing(windows, kv_dtype):
    """Alone, together, swapped out and in, and with prefixes that were found."""
    decoder, prompts = model(windows), real_prompts()
    options = {"kv_dtype": kv_dtype, "reproducible": True}
    with keep_everything():
        kept = make(decoder, **options)
    want = [run_one(kept, Request(prompt, NEW)) for prompt in prompts]
    assert len(kept._groups) == 1
    assert min(map(len, want)) == NEW
    made = make(decoder, **options)
    assert len(made._groups) == len(set(windows))
    assert texts(made, prompts) == want
    assert texts(made, prompts) == want
    assert made.statistics().prefix_hits > 0
    small = make(decoder, **options, num_pages=7)
    assert texts(small, prompts) == want
    if len(set(windows)) > 1:
        assert small.statistics().preemptions > 0


def test_the_pools_hold_what_windows_need():
    """In bytes: layers with a window have room for what all requests need, and no more."""
    decoder = model(ALTERNATING)
    options = {"max_sequences": 2, "kv_dtype": "turbo4"}
    made = make(decoder, **options)
    with keep_everything():
        kept = make(decoder, **options)
    page = made._device.caches[0].page_bytes
    assert [cache.num_pages for cache in made._device.caches] == [7, 40, 7]
    found = made.statistics()
    assert [(x.window, x.layers, x.pages) for x in found.groups] == [(None, 1, 40), (WINDOW, 2, 7)]
    assert kept.statistics().pool_bytes - found.pool_bytes == 2 * 33 * page
    assert found.pool_bytes == sum(group.pool_bytes for group in found.groups)
    assert (found.pages, found.token_capacity) == (40, 40 * PAGE)
    given = make(decoder, window_pages=11)
    assert [cache.num_pages for cache in given._device.caches] == [11, 40, 11]
    assert make(decoder, num_pages=6).statistics().groups[1].pages == 6


@pytest.mark.slow
def test_a_model_whose_layers_are_alike_has_one_group():
    made = make(model(ALL), num_pages=5)
    assert [(x.window, x.pages) for x in made.statistics().groups] == [(WINDOW, 5)]
    # A request of 7 pages runs in 5: its windows need 4 with a piece of the prompt.
    number = made.add(Request([1] * 60, 50))
    assert made.run()[number].finish_reason == "length"
    with pytest.raises(ValueError, match="need 4 pages, must be at most num_pages=3"):
        make(model(ALL), num_pages=3).add(Request([1] * 60, 50))
    # A window that no request outgrows hides nothing.
    made = make(model(ALTERNATING), max_length=WINDOW)
    assert [x.window for x in made.statistics().groups] == [None]


def test_what_does_not_fit_is_refused():
    with pytest.raises(ValueError, match="window_pages=3 has no use: all layers see equally far"):
        make(model(ALL), window_pages=3)
    with pytest.raises(ValueError, match="window_pages=0 must be at least 1"):
        make(model(ALTERNATING), window_pages=0)
    with pytest.raises(ValueError, match="need 4 pages, must be at most window_pages=3"):
        make(model(ALTERNATING), window_pages=3).add(Request([1] * 60, 50))


@pytest.mark.parametrize("page_size", [16, 64])
@pytest.mark.parametrize("window", [1, 2, 15, 16, 17, 100])
def test_the_most_pages_of_a_request(window, page_size):
    """What a sequence holds in any step, wherever its window is."""
    for total, piece in ((1, 1), (50, 1), (300, 1), (300, 7), (300, 64), (40, 40)):
        most = 0
        for first in range(total):
            # From any place on: prefixes that are found move the pieces.
            stop = min(first + piece, total)
            seen = max(first - window + 1, 0) // page_size
            most = max(most, -(-stop // page_size) - seen)
        assert pools.pages_at_most(total, piece, page_size, window) >= most
        if total > window + piece + 2 * page_size:
            assert pools.pages_at_most(total, piece, page_size, window) == most
        assert pools.pages_at_most(total, piece, page_size, None) == -(-total // page_size)


@pytest.mark.parametrize(
    ("name", "windows"),
    [("mistral-7b", (4096,)), ("gemma-2-9b", (None, 4096)), ("gemma-3-4b", (None, 1024))],
)
def test_what_models_hold(name, windows):
    """Of 8 requests of 32k tokens: pages of 64 tokens of each layer."""
    config = dataclasses.replace(models.SHAPES[name], max_length=32768)
    assert pools.windows_of(config, 32768) == windows
    [window] = filter(None, windows)
    assert pools.windows_of(config, window) == (None,)
    sizes = pools.Sizes(64, 8, 32768, 64)
    # A window that begins within a page, and one piece of a prompt.
    assert sizes.pages_of_all(window) == 8 * (window // 64 + 1) + 1
    assert sizes.pages_of_all(None) == 8 * 512


def test_a_known_beginning_must_be_known_to_all_groups():
    """Of layers with a window only the pages that the window reaches back to have to be there."""
    made, device = fake(20, 2, 16, True, windows=(None, 20))
    prompt = [i % 5 for i in range(70)]
    run = lambda request: [made.add(request), *_finish(made, device)][0]  # noqa: E731
    run(Request(prompt, 2))
    full, windowed = made._groups
    assert len(full.prefixes) == len(windowed.prefixes) == 4
    before = made.statistics().reused_tokens
    run(Request(prompt, 2))
    assert made.statistics().reused_tokens - before == 64
    # All but the third and fourth page of those with a window: they are enough.
    windowed.prefixes.lookup(prompt[:64])
    assert windowed.prefixes.evict(2) == 2
    before = made.statistics().reused_tokens
    run(Request(prompt, 2))
    assert made.statistics().reused_tokens - before == 64
    # Without these, nothing is: what the others remember does not help.
    windowed.prefixes.evict(99)
    before = made.statistics().reused_tokens
    run(Request(prompt, 2))
    assert made.statistics().reused_tokens == before


def _finish(made, device):
    while not made.idle:
        step(made, device)
    return []


def test_a_long_text_in_a_small_pool():
    """Far more tokens than a pool of all layers would hold, through a device of numpy."""
    made, device = fake(4, 1, 16, True, windows=(20,))
    request = Request([i % 5 for i in range(120)], 100)
    made.add(request)
    most = 0
    while not made.idle:
        step(made, device)
        (held,) = made.statistics().groups
        most = max(most, held.pages - held.free_pages - held.cached_pages)
    assert most == 3


def test_there_is_a_table_for_each_group():
    made, device = fake(9, 3, 16, True, windows=(None, 20, 33))
    made.add(Request([1, 2, 3], 2))
    _finish(made, device)
    assert made._device._state.tables.shape == (3, 3, 16)
    assert isinstance(made, Engine)
    assert np.all(device.pages[0][3:] == -99)


# What `turbojax serve` makes of it -----------------------------------------------------------


def plan(windows, lengths, **given):
    config = dataclasses.replace(
        TINY, num_layers=len(windows), local_windows=windows, max_length=4096
    )
    requests = [
        TextRequest(str(i), i, Request([1] * (length // 2), length - length // 2), ())
        for i, length in enumerate(lengths)
    ]
    settings = Settings(page_size=16, kv_dtype="auto", max_sequences=4, step_tokens=64, **given)
    shapes = Models(config, np.dtype(np.float32))
    return config, serving.plan_for(requests, shapes, settings, None)


def test_serving_sizes_pools_by_windows():
    page = 2 * 2 * 16 * 16 * 4  # of one layer
    _, pool = plan(ALL, (600, 900))
    # Of two requests the windows, and a piece of 64 tokens with one of them.
    assert (pool.num_pages, pool.nbytes) == (7 + 3, 10 * 2 * page)
    _, pool = plan(ALTERNATING, (600, 900))
    assert (pool.num_pages, pool.max_length) == (2 * 57, 900)
    assert pool.nbytes == (114 + 2 * (7 + 3 * 3)) * page
    # Bytes go to windows first; what is left to layers without one.
    _, pool = plan(ALTERNATING, (600, 900), pool_bytes=(200 + 2 * 16) * page + 5)
    assert (pool.num_pages, pool.nbytes) == (200, (200 + 2 * 16) * page)
    _, pool = plan(ALTERNATING, (600, 900), pool_bytes=3 * 10 * page)
    assert (pool.num_pages, pool.nbytes) == (10, 30 * page)
    with pytest.raises(ValueError, match=f"must be at least {3 * page}, the bytes of one page"):
        plan(ALTERNATING, (600,), pool_bytes=3 * page - 1)


@pytest.mark.quick(1, slow=0)
@pytest.mark.parametrize("windows", [ALL, ALTERNATING])
def test_lines_that_fit_are_those_that_the_engine_takes(windows):
    config = dataclasses.replace(TINY, num_layers=len(windows), local_windows=windows)
    made = Engine(models.random_decoder(config), num_pages=6, page_size=16, max_sequences=2)
    for prompt, new in ((20, 20), (60, 30), (60, 60), (100, 2), (3, 90)):
        request = Request([1] * prompt, new)
        file = RequestFile((TextRequest("a", 1, request, ()),), ())
        found = fitting(
            file, config, num_pages=6, page_size=16, step_tokens=made.admission.step_tokens
        )
        if found.requests:
            made.add(request)
        else:
            with pytest.raises(ValueError, match="pages, must be at most num_pages=6"):
                made.add(request)
            assert "pages, must be at most num_pages=6" in str(found.bad[0])
