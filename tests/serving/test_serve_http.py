"""`turbojax serve --http`: its options, and a process from its first address to its last answer."""

import functools
import io
import json
import re
import signal
import socket
import subprocess
import sys

import httpx
import pytest
from rich.console import Console

from tests.tools import command_line
from tests.tools.command_line import refuses, works
from tests.training.interrupt_helpers import environment
from turbojax import models, server
from turbojax.app import startup, terminal, text_model
from turbojax.app.serve import http
from turbojax.app.serve.settings import Settings
from turbojax.models import Engine

run = functools.partial(command_line.run, "serve")


@pytest.mark.parametrize(
    ("text", "host", "port"),
    [
        (":8000", "127.0.0.1", 8000),
        ("localhost:0", "localhost", 0),
        ("0.0.0.0:65535", "0.0.0.0", 65535),
        ("[::1]:80", "::1", 80),
        ("[fe80::1%eth0]:80", "fe80::1%eth0", 80),
        ("a-b.c:1", "a-b.c", 1),
    ],
)
def test_addresses(text, host, port):
    assert http.Address.parse(text) == http.Address(host, port)


@pytest.mark.parametrize(
    "text", ["", "8000", "localhost", "::1:80", "[::1]", "a:65536", "a:-1", "a b:1", "a:1:2", "a:x"]
)
def test_what_is_no_address(text):
    with pytest.raises(ValueError, match=re.escape(f"--http {text!r} must be HOST:PORT")):
        http.Address.parse(text)


def test_keys_and_names(monkeypatch):
    monkeypatch.delenv(http.API_KEY_VARIABLE, raising=False)
    assert http.api_keys([]) == ()
    assert http.api_keys(["a", "b"]) == ("a", "b")
    monkeypatch.setenv(http.API_KEY_VARIABLE, " one two ")
    assert http.api_keys([]) == ("one", "two")
    assert http.api_keys(["a"]) == ("a",)
    for key in ("", "a b"):
        with pytest.raises(ValueError, match="--api-key must not be empty, nor have spaces"):
            http.api_keys([key])
    assert http.served_name(None, None, None) == "embedded"
    assert http.served_name(None, "/models/llama/", None) == "llama"
    assert http.served_name(None, None, "tiny") == "tiny"
    assert http.served_name("mine", "/models/llama", None) == "mine"
    with pytest.raises(ValueError, match="--served-name ' ' must not be empty"):
        http.served_name(" ", None, None)


REFUSED = [
    (["--http", "x"], "--http 'x' must be HOST:PORT"),
    (["--http", ":0", "--out", "x"], "--out is for a FILE"),
    (["--http", ":0", "--resume"], "--resume is for a FILE"),
    (["--http", ":0", "--overwrite"], "--overwrite is for a FILE"),
    (["--http", ":0", "--skip-bad"], "--skip-bad is for a FILE"),
    (["--http", ":0", "--max-new-tokens", "3"], "--max-new-tokens is for a FILE"),
    (["--http", ":0", "--max-waiting", "0"], "max_waiting=0 must be at least 1"),
    (["--http", ":0", "--api-key", ""], "--api-key must not be empty"),
    (["--http", ":0", "--model", "/nowhere"], "/nowhere"),
    (["--http", ":0", "--random-weights", "tiny", "--num-pages", "1000000000"], "GB are free"),
    (["--http", "203.0.113.1:80"], "annot assign requested address"),
]


@pytest.mark.parametrize(("options", "message"), REFUSED, ids=[" ".join(x) for x, _ in REFUSED])
def test_mistakes_are_found_before_the_model_is_loaded(options, message, monkeypatch):
    monkeypatch.setattr(text_model, "TextModel", None)
    refuses(run(*options), message)


def test_an_address_in_use():
    with socket.create_server(("127.0.0.1", 0)) as taken:
        result = run("--http", f"127.0.0.1:{taken.getsockname()[1]}", "--random-weights", "tiny")
    refuses(result, "ddress already in use")


def test_a_missing_package(monkeypatch):
    monkeypatch.setitem(sys.modules, "turbojax.server", None)
    refuses(run("--http", ":0", "--random-weights", "tiny"), "turbojax.server")


def test_sizes_of_a_server(monkeypatch):
    found = text_model.find_random_model("tiny")
    pool = http.plan_server(found, None, Settings())
    assert (pool.max_length, pool.max_sequences) == (found.config.max_length, 16)
    assert pool.nbytes <= 2**29
    monkeypatch.setattr(startup, "available_memory", lambda: 2 * found.weight_bytes)
    with pytest.raises(ValueError, match="this needs at least"):
        http.plan_server(found, None, Settings(num_pages=10**6))


def test_what_is_handed_to_the_server(tiny_folder, monkeypatch):
    """All but the programs and the server itself, which have tests of their own."""
    seen = {}

    def serve(engine, tokenizer, **options):
        options["ready"]("http://127.0.0.1:1")
        seen.update(options, engine=engine, tokenizer=tokenizer)

    monkeypatch.setattr(server, "serve", serve)
    monkeypatch.setattr(Engine, "compile", lambda engine: None)
    options = ["--model", tiny_folder, "--served-name", "mine", "--api-key", "k1", "--max-waiting"]
    result = works(run("--http", "127.0.0.1:0", *options, "7", "--max-sequences", "3"))
    assert result.stderr.splitlines() == [
        "compiling",
        "turbojax serve: mine on http://127.0.0.1:1, Ctrl-C ends it",
    ]
    assert result.stdout.startswith("0 requests, 0 tokens")
    assert (seen["name"], seen["api_keys"], seen["max_waiting"]) == ("mine", ("k1",), 7)
    assert isinstance(seen["engine"], Engine)
    assert isinstance(seen["tokenizer"], models.ByteTokenizer)
    assert seen["engine"].max_length == 128
    assert seen["listening"].fileno() == -1  # it is closed at the end


def test_a_bar_counts_programs_on_a_terminal(monkeypatch):
    shown = io.StringIO()
    bar = terminal.progress_bar()
    bar.live.console = Console(file=shown, force_terminal=True, width=80)
    monkeypatch.setattr(terminal, "progress_bar", lambda transient: bar)

    class Compiling:
        def compile(self, progress):
            progress(1, 3)
            bar.refresh()
            progress(2, 3)
            bar.refresh()

    http.compile_ahead_of_time(Compiling())
    assert "1/3" in shown.getvalue()
    assert "2/3" in shown.getvalue()


def signalled_midway(url, process, number):
    """The text of a request during which the server's process gets a signal."""
    body = {"model": "tiny", "prompt": "abc", "max_tokens": 90, "stream": True}
    body |= {"temperature": 0, "guided_regex": "[a-c]{90}"}
    headers = {"Authorization": "Bearer secret"}
    with httpx.Client(base_url=url, headers=headers, timeout=60) as client:
        assert client.get("/v1/models").json()["data"][0]["id"] == "tiny"
        with client.stream("POST", "/v1/completions", json=body) as answer:
            lines = answer.iter_lines()
            text = json.loads(next(lines).removeprefix("data: "))["choices"][0]["text"]
            process.send_signal(number)
            chunks = [x.removeprefix("data: ") for x in lines if x]
    assert chunks.pop() == "[DONE]"
    return text + "".join(json.loads(x)["choices"][0]["text"] for x in chunks)


@pytest.mark.quick(slow=1)
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_server_until_it_is_told_to_end(number, tiny_folder, tmp_path):
    command = [sys.executable, "-m", "turbojax", "serve", "--http", "127.0.0.1:0"]
    command += ["--model", tiny_folder, "--max-sequences", "2", "--step-tokens", "16"]
    command += ["--page-size", "16", "--served-name", "tiny", "--api-key", "secret"]
    env = {name: x for name, x in environment(tmp_path).items() if name != "JAX_LOG_COMPILES"}
    piped = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    with subprocess.Popen(command, env=env, **piped) as process:
        try:
            assert process.stderr.readline() == "compiling\n"
            said = process.stderr.readline()
            found = re.fullmatch(r"turbojax serve: tiny on (http://\S+), Ctrl-C ends it\n", said)
            text = signalled_midway(found.group(1), process, number)
            out, err = process.communicate(timeout=60)
        finally:
            process.kill()
    # What was begun came to its end.
    assert re.fullmatch("[a-c]{90}", text)
    assert process.returncode == 0, err
    assert out.startswith("1 requests, 90 tokens")
    assert err == ""
