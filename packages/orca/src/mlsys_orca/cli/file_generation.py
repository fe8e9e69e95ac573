"""Many prompts through one engine, to a file that can be taken up again: the inner half of ``mlsys orca generate``."""

from __future__ import annotations

import asyncio
import json
import os
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, TextIO

from mlsys_core.errors import InvalidInputError
from mlsys_orca.api.answers import Identity, collect
from mlsys_orca.api.items import parameters_of
from mlsys_orca.api.service import ModelService

_SYNC_S = 1.0  # between two times that the disk has all that was written


def read_items(lines: Iterable[str]) -> Iterator[dict[str, Any]]:
    """Yield one item per line: a JSON object with "prompt" or "messages" and that endpoint's fields, or a text.

    Empty lines are left out.

    Raises:
        InvalidInputError: a line that begins with { is no JSON object.

    Example:
        >>> list(read_items(["Hello", "", '{"prompt": "Hi", "seed": 1}']))
        [{'prompt': 'Hello'}, {'prompt': 'Hi', 'seed': 1}]
    """
    for number, line in enumerate(lines, 1):
        text = line.rstrip("\r\n")
        if not text.strip():
            continue
        if not text.lstrip().startswith("{"):
            yield {"prompt": text}
            continue
        try:
            yield json.loads(text)
        except ValueError as error:
            raise InvalidInputError(f"line {number} begins with a brace and is no JSON object: {error}") from error


def num_items(source: Path) -> int:
    """Return how many items a file has for :func:`read_items`."""
    with source.open(encoding="utf-8") as lines:
        return sum(1 for line in lines if line.strip())


def fields_of(item: dict[str, Any], defaults: dict[str, Any], *, as_chat: bool) -> dict[str, Any]:
    """Return the fields of one item's request; its own go before ``defaults``."""
    item = dict(item)
    if as_chat and isinstance(item.get("prompt"), str):
        item["messages"] = [{"role": "user", "content": item.pop("prompt")}]
    return {**defaults, **item}


async def generate_all(
    service: ModelService,
    items: Iterable[dict[str, Any]],
    output: TextIO,
    *,
    defaults: dict[str, Any],
    as_chat: bool,
    first_index: int = 0,
    seed_of: Callable[[int], int],
    on_done: Callable[[int], None] = lambda _: None,
) -> None:
    """Answer ``items``, twice an iteration's worth of them at a time, and write a line for each in their order.

    Args:
        service: Its engine runs.
        items: Items of :func:`read_items`, those from ``first_index`` on.
        output: Gets ``{"index", "text", "finish_reason", "num_tokens"}``, or ``{"index", "error"}``, and the item.
        defaults: Fields of requests that items leave out.
        as_chat: True if a text is a question, False if it is to be continued.
        first_index: Index of the first item.
        seed_of: Returns the seed of an item that brings none, by its index.
        on_done: Called with the tokens of each answer as it is written.
    """
    room = asyncio.Semaphore(2 * service.engine.config.max_batch_size)
    finished: dict[int, dict[str, Any]] = {}
    next_index, synced_s = first_index, time.monotonic()

    async def answer(index: int, item: dict[str, Any]) -> None:
        nonlocal next_index, synced_s
        try:
            identity = replace(Identity.draw(), seed=seed_of(index))
            parameters, _ = parameters_of(fields_of(item, defaults, as_chat=as_chat), service)
            whole = (await collect(await service.start(parameters, identity=identity)))[0]
            result: dict[str, Any] = {
                "text": whole.text,
                "finish_reason": whole.finish_reason,
                "num_tokens": len(whole.tokens),
            }
        except InvalidInputError as error:
            result = {"error": str(error)}
        except Exception as error:
            if not hasattr(error, "http_status"):
                raise
            result = {"error": str(error)}
        finally:
            room.release()
        finished[index] = {"index": index, **item, **result}
        while next_index in finished:
            line = finished.pop(next_index)
            output.write(json.dumps(line, ensure_ascii=False) + "\n")
            output.flush()
            on_done(line.get("num_tokens", 0))
            next_index += 1
        if time.monotonic() - synced_s > _SYNC_S:
            synced_s = time.monotonic()
            await asyncio.to_thread(_sync, output)

    async with asyncio.TaskGroup() as tasks:
        for index, item in enumerate(items, first_index):
            await room.acquire()
            tasks.create_task(answer(index, item))
    _sync(output)


def _sync(output: TextIO) -> None:
    """Have the disk know what was written, if it goes to one."""
    with suppress(OSError, ValueError):  # a pipe, a terminal, a text in memory
        os.fsync(output.fileno())
