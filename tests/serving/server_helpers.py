"""Servers on real sockets, in threads of the tests' process."""

import contextlib
import threading
import time
from collections.abc import Iterator

from tests.serving.engine_helpers import shallow_model
from turbojax import server
from turbojax.models import ByteTokenizer, Engine

NAME = "tiny"
TEMPLATE = (
    "{% for message in messages %}<{{ message.role }}>{{ message.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% if thinking %}...{% endif %}{% endif %}"
)


def tokenizer_with_chats() -> ByteTokenizer:
    """Bytes, with a chat template; no text of bytes ends by itself, but by byte 3."""
    tokenizer = ByteTokenizer([3])
    tokenizer.chat_template = TEMPLATE
    return tokenizer


def real_engine(model=None, **options) -> Engine:
    """Of the embedded model's first layers; texts do not depend on what else runs."""
    settings = {
        "num_pages": 64,
        "page_size": 16,
        "kv_dtype": "turbo4",
        "max_sequences": 4,
        "max_length": 256,
        "step_tokens": 16,
        "reproducible": True,
        "tokenizer": tokenizer_with_chats(),
    }
    return Engine(shallow_model() if model is None else model, **{**settings, **options})


class Running:
    """A server that runs.

    Attributes:
      server: the server.
      url: its address.
      thread: where it runs.
      errors: what `Server.run` raised.
    """

    def __init__(self, engine, tokenizer, **options) -> None:
        listening = server.listen("127.0.0.1", 0)
        self.url = server.address_of(listening)
        try:
            self.server = server.Server(engine, tokenizer, NAME, listening, **options)
        except BaseException:
            listening.close()
            raise
        self.errors: list[BaseException] = []
        ready = threading.Event()
        self.thread = threading.Thread(target=self._run, args=(ready,), name="server")
        self.thread.start()
        assert ready.wait(30)

    def _run(self, ready: threading.Event) -> None:
        try:
            self.server.run(lambda url: ready.set())
        except BaseException as error:
            self.errors.append(error)

    def stop(self) -> None:
        self.server.stop()
        self.thread.join(60)
        assert not self.thread.is_alive()

    # Imported where they are used: machines with GPUs run other tests of this folder without them.
    def client(self, **options):
        import openai

        settings = {"base_url": f"{self.url}/v1", "api_key": "none", "max_retries": 0}
        return openai.OpenAI(**{**settings, **options})

    def async_client(self, **options):
        import openai

        settings = {"base_url": f"{self.url}/v1", "api_key": "none", "max_retries": 0}
        return openai.AsyncOpenAI(**{**settings, **options})

    def http(self, **options):
        import httpx

        return httpx.Client(base_url=self.url, timeout=60, **options)


@contextlib.contextmanager
def running(engine, tokenizer=None, **options) -> Iterator[Running]:
    found = Running(engine, tokenizer or tokenizer_with_chats(), **options)
    try:
        yield found
    finally:
        found.stop()


def until(condition, seconds: float = 20.0) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "nothing happened"
        time.sleep(0.005)


def complete(client, prompt="hello", **options):
    return client.completions.create(
        **{"model": NAME, "prompt": prompt, "temperature": 0, **options}
    )


def chat(client, said="hello", **options):
    messages = [{"role": "user", "content": said}]
    return client.chat.completions.create(
        **{"model": NAME, "messages": messages, "temperature": 0, **options}
    )
