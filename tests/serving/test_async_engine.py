"""`AsyncEngine`: many threads and event loops, one engine."""

import asyncio
import contextlib
import gc
import os
import subprocess
import sys
import threading
import time

import pytest

from tests.serving.engine_helpers import shallow_model
from tests.serving.fake_engine import FakeEngine, answer
from tests.serving.server_helpers import real_engine
from turbojax.models.engine import Finished, NewToken, Request, Sampling
from turbojax.models.engine.asynchronous import (
    AsyncEngine,
    EngineClosed,
    EngineEnded,
    QueueFull,
)


def prompt(text: str, new: int = 8, **options) -> Request:
    return Request(list(text.encode()), new, **options)


def told(events) -> tuple[list[int], list[str]]:
    """The tokens that events tell of, and why they end."""
    events = list(events)
    tokens = [event.token for event in events if isinstance(event, NewToken)]
    ends = [event.result.finish_reason for event in events if isinstance(event, Finished)]
    return tokens, ends


def expected(request: Request) -> list[int]:
    text = answer(request)
    return (text * request.max_new_tokens)[: request.max_new_tokens]


def until(condition, seconds: float = 10.0) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "nothing happened"
        time.sleep(0.002)


async def collect(engine: AsyncEngine, request: Request):
    return [event async for event in engine.generate(request)]


def test_events_come_in_order_and_end():
    with AsyncEngine(FakeEngine()) as engine:
        request = prompt("one")
        events = asyncio.run(collect(engine, request))
        assert told(events) == (expected(request), ["length"])
        assert [event.index for event in events[:-1]] == list(range(8))
        assert events[-1].result.tokens == tuple(expected(request))


def test_a_thread_reads_without_a_loop():
    with AsyncEngine(FakeEngine()) as engine:
        handle = engine.submit(prompt("one"))
        [number] = handle.wait_accepted()
        assert told(handle) == (expected(prompt("one")), ["length"])
        [result] = handle.wait_results()
        assert handle.done
        assert (number, result.finish_reason) == (0, "length")
        # What was read is gone, the results are not.
        assert list(handle) == []
        # Who stops reading and begins again misses nothing.
        handle = engine.submit(prompt("one"))
        first = next(iter(handle))
        assert told([first, *handle]) == (expected(prompt("one")), ["length"])


def test_samples_are_told_apart():
    request = prompt("one", sampling=Sampling(temperature=1.0, seed=3))
    with AsyncEngine(FakeEngine()) as engine:
        handle = engine.submit(request, samples=3)
        numbers = handle.wait_accepted()
        events = list(handle)
        for i, number in enumerate(numbers):
            tokens, ends = told(event for event in events if event.request_id == number)
            wanted = prompt("one", sampling=Sampling(temperature=1.0, seed=3 + i))
            assert (tokens, ends) == (expected(wanted), ["length"])
        assert [result.tokens for result in handle.wait_results()] == [
            tuple(expected(prompt("one", sampling=Sampling(temperature=1.0, seed=3 + i))))
            for i in range(3)
        ]


def test_many_threads_and_loops_at_a_time():
    fake = FakeEngine(max_sequences=8)
    found, threads = {}, []

    def in_a_loop(names):
        async def all_of_them():
            requests = [prompt(name, 20) for name in names]
            return await asyncio.gather(*(collect(engine, request) for request in requests))

        for name, events in zip(names, asyncio.run(all_of_them()), strict=True):
            found[name] = told(events)

    def in_a_thread(name):
        found[name] = told(engine.submit(prompt(name, 20)))

    with AsyncEngine(fake) as engine:
        for i in range(4):
            names = [f"loop {i} {j}" for j in range(8)]
            threads.append(threading.Thread(target=in_a_loop, args=(names,)))
            threads.append(threading.Thread(target=in_a_thread, args=(f"thread {i}",)))
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(20)
    assert len(found) == 36
    for name, (tokens, ends) in found.items():
        assert tokens == expected(prompt(name, 20))
        assert ends == ["length"]
    assert fake.steps < 36 * 20, "requests ran one by one"


def test_what_the_engine_refuses_comes_from_the_ticket():
    with AsyncEngine(FakeEngine(max_length=20)) as engine:
        handle = engine.submit(prompt("one", 100))
        with pytest.raises(ValueError, match="must be at most 20"):
            handle.wait_accepted()
        with pytest.raises(ValueError, match="must be at most 20"):
            handle.wait_results()
        with pytest.raises(ValueError, match="must be at most 20"):
            list(handle)
        with pytest.raises(ValueError, match="must be at most 20"):
            asyncio.run(collect(engine, prompt("one", 100)))
        # It goes on, and nothing of the refused ones waits.
        assert told(engine.submit(prompt("two")))[1] == ["length"]
        assert engine.waiting == 0


def test_numbers_of_samples_and_of_waiting_requests():
    with pytest.raises(ValueError, match="max_waiting=0 must be at least 1"):
        AsyncEngine(FakeEngine(), max_waiting=0)
    with AsyncEngine(FakeEngine(), max_waiting=2) as engine:
        with pytest.raises(ValueError, match="samples=3 must be at most max_waiting=2"):
            engine.submit(prompt("one"), samples=3)
        with pytest.raises(ValueError, match="samples=0"):
            engine.submit(prompt("one"), samples=0)
        with pytest.raises(TypeError, match=r"samples=1\.5"):
            engine.submit(prompt("one"), samples=1.5)


def test_no_more_than_max_waiting():
    fake = FakeEngine(max_sequences=2)
    fake.gate.clear()
    with AsyncEngine(fake, max_waiting=3) as engine:
        handles = [engine.submit(prompt("one")), engine.submit(prompt("two"), samples=2)]
        assert engine.waiting == 3
        with pytest.raises(QueueFull, match="3 requests wait, 1 more must be at most max_waiting"):
            engine.submit(prompt("three"))
        fake.gate.set()
        until(lambda: engine.waiting < 3)
        handles.append(engine.submit(prompt("three")))
        for handle in handles:
            assert {result.finish_reason for result in handle.wait_results()} == {"length"}
        assert engine.waiting == 0


@pytest.mark.parametrize("how", ["break", "cancel the task", "cancel the handle", "with"])
def test_leaving_aborts(how):
    fake = FakeEngine(delay=0.001)
    request = prompt("one", 4000)

    async def leave():
        if how == "break":
            async for _ in engine.generate(request):
                break
        elif how == "cancel the task":
            task = asyncio.ensure_future(collect(engine, request))
            await asyncio.sleep(0.02)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
        elif how == "cancel the handle":
            handle = engine.submit(request)
            await handle.accepted()
            handle.cancel("stop")
            [result] = await handle.results()
            assert result.finish_reason == "stop"
            handle.cancel()  # it is done: nothing
        else:
            with engine.submit(request) as handle:
                await handle.accepted()
        await asyncio.sleep(0)
        gc.collect()
        while (await engine.astatistics()).finished == 0:
            await asyncio.sleep(0.002)

    with AsyncEngine(fake) as engine:
        asyncio.run(asyncio.wait_for(leave(), 10))
        assert fake.steps < 4000
        assert told(engine.submit(prompt("two")))[1] == ["length"]


def test_a_ticket_that_is_cancelled_before_the_engine_has_it():
    fake = FakeEngine()
    fake.gate.clear()
    with AsyncEngine(fake) as engine:
        first = engine.submit(prompt("one"))
        first.wait_accepted()  # the thread waits at the gate
        second = engine.submit(prompt("two"))
        second.cancel()
        fake.gate.set()
        [result] = second.wait_results()
        assert (result.tokens, result.finish_reason) == ((), "aborted")
        assert first.wait_results()[0].finish_reason == "length"


def test_a_slow_reader_holds_up_nobody_and_gets_all():
    with AsyncEngine(FakeEngine()) as engine:
        slow, quick = engine.submit(prompt("slow", 500)), engine.submit(prompt("quick", 500))
        assert told(quick)[1] == ["length"]
        slow.wait_results()

        async def batches():
            return [events async for events in slow.batches()]

        [together] = asyncio.run(batches())
        assert told(together) == (expected(prompt("slow", 500)), ["length"])


def test_the_death_of_the_engine_reaches_everybody():
    fake = FakeEngine()
    fake.gate.clear()
    cause = ArithmeticError("the device is gone")

    async def wait(handle):
        with pytest.raises(EngineEnded, match="ArithmeticError: the device is gone") as found:
            await handle.results()
        assert found.value.__cause__ is cause

    engine = AsyncEngine(fake)
    handles = [engine.submit(prompt(name)) for name in ("one", "two", "three")]
    handles[0].wait_accepted()
    late = engine.submit(prompt("late"))
    question = []

    def ask():
        with pytest.raises(EngineEnded) as found:
            engine.statistics()
        question.append(found.value)

    asking = threading.Thread(target=ask)
    asking.start()
    fake.fail = cause
    fake.gate.set()
    for handle in (*handles, late):
        asyncio.run(wait(handle))
        with pytest.raises(EngineEnded):
            list(handle)
        handle.cancel()
    asking.join(10)
    assert question
    with pytest.raises(EngineEnded, match="the device is gone"):
        engine.submit(prompt("four"))
    with pytest.raises(EngineEnded, match="the device is gone"):
        engine.statistics()
    assert engine.closing
    assert engine.error is cause
    engine.abort_all()
    engine.close()
    engine.close()
    assert engine.waiting == 0


def test_what_was_asked_together_is_answered_where_the_engine_ends_at_the_first():
    class Broken(FakeEngine):
        def statistics(self):
            raise ArithmeticError("nothing adds up")

    fake = Broken()
    fake.gate.clear()
    engine = AsyncEngine(fake)
    engine.submit(prompt("one")).wait_accepted()
    given_up, *questions = (engine._ask() for _ in range(3))
    given_up.cancel()
    late = engine.submit(prompt("late"))
    fake.gate.set()
    for question in questions:
        with pytest.raises(EngineEnded, match="nothing adds up"):
            question.result(10)
    with pytest.raises(EngineEnded, match="nothing adds up"):
        late.wait_results(10)
    engine.close()


def test_closing_drains_or_aborts():
    before = threading.active_count()
    for drain, reasons in ((True, {"length"}), (False, {"aborted"})):
        engine = AsyncEngine(FakeEngine(max_sequences=1, delay=0.001))
        handles = [engine.submit(prompt(f"text {i}", 30)) for i in range(5)]
        engine.close(drain=drain)
        assert threading.active_count() == before
        assert {handle.wait_results()[0].finish_reason for handle in handles} == reasons
        with pytest.raises(EngineClosed):
            engine.submit(prompt("late"))
        assert engine.statistics().finished == 5
        assert engine.error is None


def test_draining_has_a_limit():
    engine = AsyncEngine(FakeEngine(delay=0.01))
    handle = engine.submit(prompt("long", 4000))
    next(iter(handle))
    engine.close(timeout=0.1)
    [result] = handle.wait_results()
    assert result.finish_reason == "aborted"
    assert 0 < len(result.tokens) < 100


def test_closing_in_a_loop():
    async def drained():
        async with AsyncEngine(FakeEngine(delay=0.001)) as engine:
            handle = engine.submit(prompt("one", 50))
        assert (await handle.results())[0].finish_reason == "length"
        assert (await engine.astatistics()).finished == 1

    async def left_by_an_exception():
        engine = AsyncEngine(FakeEngine(delay=0.001))
        handle = engine.submit(prompt("one", 4000))
        with contextlib.suppress(KeyError):
            async with engine:
                raise KeyError("what the user did")
        assert (await handle.results())[0].finish_reason == "aborted"

    async def limited():
        engine = AsyncEngine(FakeEngine(delay=0.01))
        handle = engine.submit(prompt("one", 4000))
        await engine.aclose(timeout=0.1)
        assert (await handle.results())[0].finish_reason == "aborted"

    async def all_of_them():
        await drained()
        await left_by_an_exception()
        await limited()

    before = threading.active_count()
    asyncio.run(asyncio.wait_for(all_of_them(), 20))
    assert threading.active_count() == before


def test_waiting_has_a_limit():
    fake = FakeEngine()
    fake.gate.clear()
    with AsyncEngine(fake) as engine:
        handle = engine.submit(prompt("one"))
        handle.wait_accepted(10)
        with pytest.raises(TimeoutError, match="not ready after 0.01 seconds"):
            handle.wait_results(0.01)
        with pytest.raises(TimeoutError):
            engine.statistics(0.01)
        fake.gate.set()
        assert engine.statistics(10).steps >= 1


def test_observers_see_every_end():
    seen = []
    with AsyncEngine(FakeEngine()) as engine:
        engine.observe(seen.append)
        engine.submit(prompt("read by nobody"))
        engine.submit(prompt("cancelled", 4000)).cancel()
    assert sorted(result.finish_reason for result in seen) == ["aborted", "length"]


def test_a_loop_that_is_gone_disturbs_nobody():
    fake = FakeEngine()
    fake.gate.clear()
    with AsyncEngine(fake) as engine:
        handle = engine.submit(prompt("one"))
        loop = asyncio.new_event_loop()
        waiting = loop.create_task(handle.results())
        loop.run_until_complete(asyncio.sleep(0.01))
        loop.close()
        fake.gate.set()
        assert told(engine.submit(prompt("two")))[1] == ["length"]
        waiting._log_destroy_pending = False
        handle.wait_results()


@pytest.mark.fuzz
@pytest.mark.parametrize("left", ["requests that run", "an exception"])
def test_a_program_that_does_not_close_it_ends(left):
    code = (
        "from tests.serving.fake_engine import FakeEngine\n"
        "from turbojax.models import AsyncEngine, Request\n"
        "engine = AsyncEngine(FakeEngine(delay=0.01))\n"
        "handle = engine.submit(Request([97], 4000))\n"
        "handle.wait_accepted()\n"
        "print('begun', flush=True)\n"
    )
    code += "" if left.startswith("requests") else "raise KeyError('what the user did')\n"
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=30
    )
    assert done.stdout == "begun\n"
    if left == "an exception":
        assert "what the user did" in done.stderr
    else:
        assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.slow
def test_a_real_engine_in_its_thread():
    model = shallow_model()
    requests = [Request([0, *b"def main("], 6), Request([0, *b"import "], 6)]
    alone = real_engine(model)
    numbers = [alone.add(request) for request in requests]
    results = alone.run()

    async def both():
        async with AsyncEngine(real_engine(model)) as engine:
            found = await asyncio.gather(*(collect(engine, request) for request in requests))
            samples = await engine.submit(requests[0], samples=2).results()
        return found, samples

    found, samples = asyncio.run(both())
    for number, events in zip(numbers, found, strict=True):
        assert told(events) == (list(results[number].tokens), ["length"])
    assert [result.tokens for result in samples] == [results[numbers[0]].tokens] * 2
