"""Clients of an HTTP server: one process, no jax, nothing beyond Python's own library.

`python -m benchmarks.suites.serving.client PORT` reads one JSON object from standard input (`Load`)
and writes one to standard output: the seconds of all, and each answer's tokens and times.
"""

import asyncio
import dataclasses
import json
import random
import sys
import time
from typing import Any

_HOST = "127.0.0.1"


@dataclasses.dataclass(frozen=True)
class Load:
    """What the clients do."""

    model: str
    clients: int
    requests: int
    prompt: int
    new: int
    vocab_size: int
    seed: int


async def answer(load: Load, port: int, prompt: list[int]) -> dict[str, Any]:
    asked = json.dumps(
        {
            "model": load.model,
            "prompt": prompt,
            "max_tokens": load.new,
            "temperature": 0,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
    ).encode()
    head = (
        f"POST /v1/completions HTTP/1.1\r\nHost: {_HOST}:{port}\r\n"
        f"Content-Type: application/json\r\nContent-Length: {len(asked)}\r\n"
        "Connection: close\r\n\r\n"
    )
    begun = time.perf_counter()
    reader, writer = await asyncio.open_connection(_HOST, port, limit=2**20)
    try:
        writer.write(head.encode() + asked)
        await writer.drain()
        status = await reader.readline()
        if b" 200 " not in status:
            await reader.readuntil(b"\r\n\r\n")
            body = (await reader.read(400)).decode(errors="replace")
            raise RuntimeError(f"{status.decode().strip()}: {' '.join(body.split())}")
        return {"tokens": 0, **await _read(reader, begun)}
    finally:
        writer.close()


async def _read(reader: asyncio.StreamReader, begun: float) -> dict[str, Any]:
    """The events of an answer: lines that are not events are those between chunks."""
    found: dict[str, Any] = {"first": None, "events": 0}
    while line := await reader.readline():
        if not line.startswith(b"data: "):
            continue
        if line.strip() == b"data: [DONE]":
            break
        # Most events are not looked into: reading them must not be what takes the time.
        found["events"] += 1
        if found["first"] is None:
            found["first"] = time.perf_counter() - begun
        if b'"completion_tokens"' in line:
            found["tokens"] = json.loads(line[6:])["usage"]["completion_tokens"]
    found["seconds"] = time.perf_counter() - begun
    return found


async def run(load: Load, port: int) -> dict[str, Any]:
    rng = random.Random(load.seed)
    prompts = [
        [rng.randrange(load.vocab_size) for _ in range(load.prompt)] for _ in range(load.requests)
    ]
    answers: list[dict[str, Any]] = []

    async def client() -> None:
        while prompts:
            answers.append(await answer(load, port, prompts.pop()))

    begun = time.perf_counter()
    await asyncio.gather(*(client() for _ in range(load.clients)))
    return {"seconds": time.perf_counter() - begun, "answers": answers}


def main() -> None:
    load = Load(**json.loads(sys.stdin.read()))
    print(json.dumps(asyncio.run(run(load, int(sys.argv[1])))))


if __name__ == "__main__":
    main()
