"""Engines on devices of their own, and several of them that look like one."""

import asyncio
import dataclasses
import threading

import jax
import numpy as np
import pytest
from jax.sharding import Mesh

from tests.serving import engine_helpers
from tests.serving.engine_helpers import NEW, TINY, requests_of
from turbojax import models
from turbojax.models import AsyncEngine, Finished, NewToken, Replicas, Request
from turbojax.parallel import Axes

pytestmark = pytest.mark.mesh

PROMPTS = [[5, 9, 3 + i, *range(10, 10 + 7 * i)] for i in range(6)]


def make(model, **options):
    """One program for all steps: quickly compiled, and the same bits whatever else runs."""
    return engine_helpers.make(model, **{"reproducible": True, **options})


@pytest.fixture(scope="module")
def model():
    return models.random_decoder(TINY, dtype=jax.numpy.float32)


@pytest.fixture(scope="module")
def alone(model):
    """What one engine on the default device makes of all requests."""
    made = make(model)
    numbers = [made.add(request) for request in requests_of(PROMPTS, 0.8)]
    results = made.run()
    return [results[number].tokens for number in numbers]


def mesh_of(count, **others):
    shape = (count, *others.values())
    devices = np.array(jax.devices()[: int(np.prod(shape))]).reshape(shape)
    return Mesh(devices, ("data", *others))


def replicas(model, count=2, **options):
    parts = models.replicate(model, Axes.of(mesh_of(count)))
    return Replicas([make(part, **options) for part in parts])


def devices_of(made):
    arrays = (made._device._decoder, made._device.caches, made._device._state)
    return {device for x in jax.tree.leaves(arrays) for device in x.devices()}


def test_replicate_names_each_device_once_and_copies_nothing_that_is_there(model):
    parts = models.replicate(model, Axes.of(mesh_of(8)))
    where = [{x.sharding for x in jax.tree.leaves(part)} for part in parts]
    assert where == [{jax.sharding.SingleDeviceSharding(device)} for device in jax.devices()]
    assert parts[0].norm.unsafe_buffer_pointer() == model.norm.unsafe_buffer_pointer()
    [whole] = models.replicate(model, Axes(mesh=mesh_of(1)))
    assert whole.norm.devices() == {jax.devices()[0]}


@pytest.mark.slow
def test_an_engine_runs_where_its_model_is(model, alone):
    device = jax.devices()[5]
    made = make(jax.device_put(model, device))
    assert devices_of(made) == {device}
    numbers = [made.add(request) for request in requests_of(PROMPTS, 0.8)]
    results = made.run()
    assert [results[number].tokens for number in numbers] == alone
    assert devices_of(made) == {device}
    elsewhere = models.Draft(jax.device_put(model, jax.devices()[1]))
    with pytest.raises(ValueError, match=r"draft model is on .*1.*must be on .*5"):
        make(jax.device_put(model, device), speculation=elsewhere, reproducible=False)
    torn = dataclasses.replace(
        model,
        embedding=jax.device_put(model.embedding, jax.devices()[3]),
        norm=jax.device_put(model.norm, jax.devices()[2]),
    )
    with pytest.raises(ValueError, match="weights are on"):
        make(torn)


@pytest.mark.quick(1, slow=0)
@pytest.mark.parametrize("count", [2, 3])
def test_texts_are_those_of_one_engine_and_all_devices_work(model, alone, count):
    made = replicas(model, count)
    assert [devices_of(engine) for engine in made.engines] == [
        {device} for device in jax.devices()[:count]
    ]
    numbers = [made.add(request) for request in requests_of(PROMPTS, 0.8)]
    assert numbers == list(range(len(PROMPTS)))
    events = []
    while not made.idle:
        events += made.step()
    ended = {e.request_id: e.result.tokens for e in events if isinstance(e, Finished)}
    assert [ended[number] for number in numbers] == alone
    for number in numbers:
        of_one = [e for e in events if e.request_id == number]
        new = [e for e in of_one if isinstance(e, NewToken)]
        assert isinstance(of_one[-1], Finished)
        assert [(e.index, e.token) for e in new] == list(enumerate(ended[number]))
    each, whole = made.statistics_of_each(), made.statistics()
    assert all(part.finished for part in each)
    assert whole.finished == len(PROMPTS) == sum(part.finished for part in each)
    assert whole.new_tokens == sum(map(len, alone))
    assert whole.seconds == max(part.seconds for part in each)
    assert whole.token_capacity == count * each[0].token_capacity
    assert whole.groups[0].pages == whole.pages
    assert whole.token_bytes == each[0].token_bytes
    # Programs are traced once, and compiled for each device.
    assert each[-1].programs_compiled


def test_run_stream_and_samples(model, alone):
    made = replicas(model)
    wanted = requests_of(PROMPTS, 0.8)
    first = [made.add(request) for request in wanted[:3]]
    seen = []
    for event in made.stream():
        seen.append(event)
        if len(seen) == 3:
            break
    second = [made.add(request) for request in wanted[3:]]
    told = []
    results = made.run(told.append)
    tokens = {e.request_id: e.result.tokens for e in seen if isinstance(e, Finished)}
    tokens |= {number: result.tokens for number, result in results.items()}
    assert [tokens[number] for number in first + second] == alone
    before = sum(isinstance(e, NewToken) for e in seen)
    assert before <= sum(map(len, alone)) - sum(told) <= 3 + 2 * 4
    samples = made.add_samples(wanted[0], 3)
    places = {made._places[number] for number in samples}
    assert len(places) == 1
    found = made.run()
    assert sorted(found) == sorted(samples)
    assert found[samples[0]].tokens == alone[0]


def test_a_server_s_engine_may_be_replicas(model, alone):
    async def all_of(shared):
        handles = [shared.submit(request) for request in requests_of(PROMPTS, 0.8)]
        return [(await handle.results())[0].tokens for handle in handles]

    with AsyncEngine(replicas(model)) as shared:
        assert asyncio.run(all_of(shared)) == alone
        handle = shared.submit(Request([1, 2], NEW))
        handle.cancel()
        [result] = handle.wait_results(60)
        assert result.finish_reason in ("aborted", "length")
        assert shared.statistics(60).finished == len(PROMPTS) + 1


@pytest.mark.slow
def test_all_programs_are_compiled_ahead_on_every_device(model):
    made = replicas(model, max_sequences=2, step_tokens=16, max_length=48)
    shown = []
    made.compile(lambda done, total: shown.append((done, total)), only_greedy=True)
    total = shown[-1][1]
    assert shown == [(i + 1, total) for i in range(total)]
    for i in range(4):
        made.add(Request([i + 1] * 20, 5))
    made.run()
    each = made.statistics_of_each()
    assert [part.first_step_seconds for part in each] == [0.0, 0.0]
    assert made.statistics().programs_compiled == total


def test_beginnings_of_prompts_go_where_they_were(model):
    made = replicas(model)
    head = [list(range(1, 33)), list(range(40, 72))]
    places = [made._places[made.add(Request([*x, 7], 2))] for x in head]
    assert places[0] is not places[1]
    made.run()
    for i in (1, 0, 0, 1, 0):
        number = made.add(Request([*head[i], 8 + i], 2))
        assert made._places[number] is places[i]
        made.run()
    assert made.statistics().reused_tokens == 5 * 32


def test_what_fails_in_one_ends_all(model):
    made = replicas(model)
    for request in requests_of(PROMPTS[:3], 0.0):
        made.add(request)

    def fail(*_):
        raise OSError("the device is gone")

    made.engines[1]._device.run = fail
    with pytest.raises(OSError, match="the device is gone"):
        made.run()
    for call in (made.step, made.statistics, lambda: made.idle, lambda: made.add(Request([1]))):
        with pytest.raises(RuntimeError, match=r"this engine has ended: OSError: the device"):
            call()


def test_what_comes_during_a_step_waits_for_its_end(model):
    made = replicas(model, 1)
    [engine] = made.engines
    begun, go_on = threading.Event(), threading.Event()
    run = engine._device.run

    def slowly(*arguments):
        begun.set()
        assert go_on.wait(60)
        return run(*arguments)

    engine._device.run = slowly
    first = made.add(Request([1, 2, 3], 4))
    made._replicas[0].step = made._threads.submit(engine.step)
    assert begun.wait(60)
    second = made.add(Request([1, 2, 3], 4))
    made.abort(first, reason="stop")
    assert second not in made._replicas[0].own
    go_on.set()
    results = made.run()
    assert results[first].finish_reason == "stop"
    assert results[second].finish_reason == "length"
    with pytest.raises(KeyError, match=f"request {first}"):
        made.abort(first)


def test_refusals(model):
    first = make(model)
    with pytest.raises(ValueError, match="none"):
        Replicas([])
    with pytest.raises(TypeError, match="str"):
        Replicas(["engine"])
    with pytest.raises(ValueError, match="twice"):
        Replicas([first, first])
    with pytest.raises(ValueError, match=r"engine 1 must have the first one's"):
        Replicas([first, make(model, num_pages=41)])
    made = Replicas([first])
    for wanted, kind, words in (
        (Request([97]), ValueError, "token=97"),
        (Request([1] * 100, 100), ValueError, "max_length"),
        ("text", TypeError, "Request"),
    ):
        with pytest.raises(kind, match=words):
            made.add(wanted)
    with pytest.raises(ValueError, match="reason"):
        made.abort(0, reason="tired")
    with pytest.raises(KeyError, match="request 0"):
        made.abort(0)
    assert made.idle
    busy = make(model)
    busy.add(Request([1], 4))
    with pytest.raises(ValueError, match="engine 1 has requests"):
        Replicas([first, busy])
    with pytest.raises(TypeError, match="abstract"):
        models.replicate(model, Axes(mesh=mesh_of(2).abstract_mesh))
