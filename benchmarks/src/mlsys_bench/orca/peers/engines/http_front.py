"""Minimal HTTP front of a completion server, for engines without one: asyncio in front, the engine in a thread.

One route answers: ``POST /v1/completions`` with ``prompt`` (token ids) and ``max_tokens``, as a stream of events with
the usage at its end. Anything else is answered with ``ok``.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import queue
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol, TypeAlias

_IDLE_STEP_S = 0.05
Events: TypeAlias = Sequence[tuple[int, Sequence[int]]]  # (request's key, its new tokens)


class Engine(Protocol):
    """An adapter around a peer: greedy answers of exactly the requested length."""

    def add(self, key: int, prompt: list[int], num_tokens: int) -> None:
        """Accept a request; ``key`` was not used before."""
        ...

    def step(self, timeout_s: float) -> Events:
        """Return new tokens: those of one iteration, or of ``timeout_s`` (engines with threads of their own)."""
        ...


def serve(engine: Engine, words: Mapping[int, str], port: int) -> None:
    """Serve ``engine`` on 127.0.0.1 until the process is ended; a failure of the engine ends it."""
    asyncio.run(_Front(engine, words).serve(port))


def read_words(tokenizer: Path) -> dict[int, str]:
    """Return the text of each token, for vocabularies without escaped bytes but the leading space.

    ``mlsys_bench.orca.peers.models`` makes such vocabularies.
    """
    vocabulary = json.loads(tokenizer.read_text(encoding="utf-8"))["model"]["vocab"]
    return {index: token.replace("Ġ", " ") for token, index in vocabulary.items()}


class _Front:
    def __init__(self, engine: Engine, words: Mapping[int, str]) -> None:
        self._engine = engine
        self._words = words
        self._keys = itertools.count()
        self._accepted: queue.SimpleQueue[tuple[int, list[int], int]] = queue.SimpleQueue()
        self._streams: dict[int, asyncio.Queue[list[int]]] = {}

    async def serve(self, port: int) -> None:
        self._loop = asyncio.get_running_loop()
        server = await asyncio.start_server(self._connection, "127.0.0.1", port, backlog=512)
        threading.Thread(target=self._run_engine, daemon=True).start()
        async with server:
            await server.serve_forever()

    def _run_engine(self) -> None:
        missing: dict[int, int] = {}  # tokens that each running request still gets
        try:
            while True:
                while not missing or not self._accepted.empty():
                    key, prompt, num_tokens = self._accepted.get()
                    missing[key] = num_tokens
                    self._engine.add(key, prompt, num_tokens)
                events = self._engine.step(_IDLE_STEP_S)
                for key, tokens in events:
                    missing[key] -= len(tokens)
                    if not missing[key]:
                        del missing[key]
                self._loop.call_soon_threadsafe(self._deliver, events)
        except BaseException:  # noqa: BLE001 - the thread's end is the server's
            import traceback

            traceback.print_exc()
            os._exit(1)

    def _deliver(self, events: Any) -> None:
        for key, tokens in events:
            self._streams[key].put_nowait(list(tokens))

    async def _connection(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while head := await reader.readuntil(b"\r\n\r\n"):
                lines = head.decode("latin-1").split("\r\n")
                headers = dict(line.lower().split(": ", 1) for line in lines[1:] if line)
                body = await reader.readexactly(int(headers.get("content-length", 0)))
                if lines[0].startswith("POST"):
                    await self._answer(json.loads(body), writer)
                else:
                    writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok")
                await writer.drain()
        except (asyncio.IncompleteReadError, ConnectionError):
            pass  # the client has left
        finally:
            writer.close()

    async def _answer(self, body: dict[str, Any], writer: asyncio.StreamWriter) -> None:
        key, prompt, num_tokens = next(self._keys), body["prompt"], body["max_tokens"]
        tokens_of = self._streams[key] = asyncio.Queue()
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n")
        self._accepted.put((key, prompt, num_tokens))
        num_sent = 0
        while num_sent < num_tokens:
            tokens = await tokens_of.get()
            num_sent += len(tokens)
            text = "".join(self._words[token] for token in tokens)
            end = "length" if num_sent == num_tokens else None
            writer.write(_event({"choices": [{"index": 0, "text": text, "finish_reason": end}]}))
            await writer.drain()
        del self._streams[key]
        usage = {"prompt_tokens": len(prompt), "completion_tokens": num_sent, "total_tokens": len(prompt) + num_sent}
        writer.write(_event({"choices": [], "usage": usage}) + _chunk(b"data: [DONE]\n\n") + b"0\r\n\r\n")


def _event(document: dict[str, Any]) -> bytes:
    return _chunk(b"data: " + json.dumps(document).encode() + b"\n\n")


def _chunk(data: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(data), data)
