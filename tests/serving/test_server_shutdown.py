"""How a server ends: it drains, it aborts, its engine dies, somebody sends a signal."""

import os
import signal
import socket
import sys
import threading
import time

import httpx
import openai
import pytest

from tests.serving.fake_engine import FakeEngine
from tests.serving.server_helpers import NAME, running, until
from turbojax import server
from turbojax.models import Request
from turbojax.models.engine.asynchronous import AsyncEngine, EngineEnded

BODY = {"model": NAME, "prompt": "a", "max_tokens": 4000}


def test_what_runs_comes_to_its_end_and_nothing_else_is_taken(tokenizer):
    before = set(threading.enumerate())
    fake = FakeEngine(tokenizer=tokenizer)
    found = running(fake, tokenizer)
    served = found.__enter__()
    fake.gate.clear()
    got = []

    def ask():
        with served.http() as http:
            got.append(http.post("/v1/completions", json={**BODY, "max_tokens": 9}))

    asking = threading.Thread(target=ask)
    asking.start()
    until(lambda: fake.live)
    with httpx.Client(base_url=served.url, timeout=10) as kept, served.http() as other:
        assert kept.get("/health").status_code == 200
        # A connection in the middle of a request, which is sent to its end only later.
        late = socket.create_connection(("127.0.0.1", int(served.url.rpartition(":")[2])))
        late.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 40\r\n\r\n")
        late.sendall(b'{"model": "tiny", ')
        time.sleep(0.05)
        served.server.stop()
        until(lambda: served.server.engine.closing)
        with pytest.raises(httpx.TransportError):
            other.get("/health")
        late.sendall(b'"prompt": "abcdefghi"}')
        answer = b"".join(iter(lambda: late.recv(4096), b"")).decode()
        late.close()
        assert answer.startswith("HTTP/1.1 503")
        assert '"code":"shutting_down"' in answer
        assert served.thread.is_alive()
        fake.gate.set()
    asking.join(20)
    found.__exit__(None, None, None)
    assert got[0].status_code == 200
    assert got[0].json()["choices"][0]["finish_reason"] == "length"
    assert served.errors == []
    assert set(threading.enumerate()) == before


@pytest.mark.parametrize("drain_seconds", [0, 0.2])
def test_what_takes_too_long_is_aborted_and_told_so(tokenizer, drain_seconds):
    fake = FakeEngine(tokenizer=tokenizer, delay=0.01)
    with running(fake, tokenizer, drain_seconds=drain_seconds) as served:
        got = {}

        def whole():
            with served.client() as client, pytest.raises(openai.InternalServerError) as found:
                client.completions.create(**BODY)
            got["whole"] = found.value

        def stream():
            with served.client() as client:
                chunks = client.completions.create(**BODY, stream=True)
                got["begun"] = next(iter(chunks))
                with pytest.raises(openai.APIError) as found:
                    list(chunks)
            got["stream"] = found.value

        threads = [threading.Thread(target=ask) for ask in (whole, stream)]
        for thread in threads:
            thread.start()
        until(lambda: len(fake.live) == 2 and "begun" in got)
        begun = time.monotonic()
        served.stop()
        assert drain_seconds <= time.monotonic() - begun < drain_seconds + 5
        for thread in threads:
            thread.join(10)
    assert got["whole"].status_code == 503
    assert got["whole"].code == got["stream"].code == "shutting_down"
    assert "the server is shutting down" in str(got["stream"])
    assert not fake.live
    assert served.errors == []


def test_the_end_of_the_engine_ends_the_server(tokenizer):
    fake = FakeEngine(tokenizer=tokenizer)
    fake.gate.clear()
    with running(fake, tokenizer) as served:
        answers = {}

        def ask(stream):
            with served.http() as http:
                answers[stream] = http.post("/v1/completions", json={**BODY, "stream": stream})

        threads = [threading.Thread(target=ask, args=(stream,)) for stream in (False, True)]
        for thread in threads:
            thread.start()
        until(lambda: served.server.engine.waiting == 2)
        fake.fail = ArithmeticError("the device is gone")
        fake.gate.set()
        for thread in threads:
            thread.join(10)
        served.thread.join(10)
    assert answers[False].status_code == 500
    error = answers[False].json()["error"]
    assert error["message"] == "the engine has ended: ArithmeticError: the device is gone"
    assert (error["type"], error["code"]) == ("server_error", "engine_ended")
    assert "engine_ended" in answers[True].text
    [raised] = served.errors
    assert isinstance(raised, EngineEnded)
    assert isinstance(raised.__cause__, ArithmeticError)


def test_the_health_of_a_server_whose_engine_has_ended(tokenizer):
    from starlette.testclient import TestClient

    fake = FakeEngine(tokenizer=tokenizer)
    engine = AsyncEngine(fake)
    app = server.create_app(engine, tokenizer, NAME)
    with TestClient(app) as http:
        assert http.get("/health").json() == {"status": "ok"}
        fake.fail = ArithmeticError("the device is gone")
        engine.submit(Request([97], 4))
        until(lambda: engine.error is not None)
        assert http.get("/health").status_code == 503
        assert http.get("/health").json()["error"]["code"] == "engine_ended"
        # What was counted before is still there.
        assert http.get("/metrics").status_code == 200
        assert http.post("/v1/completions", json=BODY).json()["error"]["code"] == "engine_ended"
    engine.close()


@pytest.mark.parametrize("signals", [[signal.SIGTERM], [signal.SIGINT], [signal.SIGTERM] * 2])
def test_signals(tokenizer, signals):
    fake = FakeEngine(tokenizer=tokenizer, delay=0.002)
    handlers = {number: signal.getsignal(number) for number in signals}
    interval = sys.getswitchinterval()
    answers, addresses = [], []

    def ask():
        until(lambda: addresses)
        tokens = 4000 if len(signals) > 1 else 100
        with httpx.Client(base_url=addresses[0], timeout=30) as http:
            answers.append(http.post("/v1/completions", json={**BODY, "max_tokens": tokens}))

    def send():
        until(lambda: fake.live)
        for number in signals:
            os.kill(os.getpid(), number)
            time.sleep(0.1)

    threads = [threading.Thread(target=ask), threading.Thread(target=send)]
    for thread in threads:
        thread.start()
    begun = time.monotonic()
    server.serve(fake, tokenizer, name=NAME, port=0, ready=addresses.append)
    assert time.monotonic() - begun < 5
    for thread in threads:
        thread.join(10)
    # One signal lets requests end, a second one does not.
    assert answers[0].status_code == (503 if len(signals) > 1 else 200)
    assert {number: signal.getsignal(number) for number in signals} == handlers
    assert sys.getswitchinterval() == interval
    assert addresses[0].startswith("http://127.0.0.1:")


def test_arguments_of_servers(tokenizer):
    before = set(threading.enumerate())
    for options, error, words in (
        ({"drain_seconds": -1}, ValueError, "drain_seconds=-1 must be 0 or more"),
        ({"drain_seconds": "1"}, TypeError, "drain_seconds is a str"),
        ({"max_waiting": 0}, ValueError, "max_waiting=0 must be at least 1"),
        ({"api_keys": [""]}, ValueError, "an API key must not be empty"),
        ({"api_keys": "secret"}, TypeError, "api_keys must be several keys, not one text"),
        ({"port": -1}, ValueError, r"port=-1 must be within 0\.\.65535"),
    ):
        with pytest.raises(error, match=words):
            server.serve(FakeEngine(), tokenizer, name=NAME, **{"port": 0, **options})
    with (
        server.listen("127.0.0.1", 0) as taken,
        pytest.raises(OSError, match="[Aa]ddress already in use"),
    ):
        server.serve(FakeEngine(), tokenizer, name=NAME, port=taken.getsockname()[1])
    assert set(threading.enumerate()) == before
