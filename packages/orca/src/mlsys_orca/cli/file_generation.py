"""Many prompts through one engine, to a file that can be taken up again: the inner half of ``mlsys orca generate``."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, TextIO

from mlsys_core.errors import InvalidInputError
from mlsys_orca.api import chat, completions
from mlsys_orca.api.answers import collect
from mlsys_orca.api.service import GenerationParameters, ModelService
from pydantic import ValidationError


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


def num_done(path: Path) -> int:
    """Count the answers that ``path`` holds from an earlier run; a last line that was cut short is removed.

    Raises:
        InvalidInputError: its lines are not numbered from 0: it was written by something else.
    """
    if not path.exists():
        return 0
    whole = path.read_bytes()
    kept = whole[: whole.rfind(b"\n") + 1]
    if len(kept) < len(whole):
        path.write_bytes(kept)
    try:
        numbers = [json.loads(line)["index"] for line in kept.splitlines()]
    except (ValueError, KeyError, TypeError) as error:
        raise InvalidInputError(f"{path} exists and holds something else: give another --output") from error
    if numbers != list(range(len(numbers))):
        raise InvalidInputError(f"{path} exists, and its answers are not in order: give another --output")
    return len(numbers)


def parameters_of(
    item: dict[str, Any], defaults: dict[str, Any], service: ModelService, *, as_chat: bool
) -> GenerationParameters:
    """Return what one item asks to generate; its own fields go before ``defaults``.

    Raises:
        InvalidInputError: a field is refused.
    """
    item = dict(item)
    if as_chat and isinstance(item.get("prompt"), str):
        item["messages"] = [{"role": "user", "content": item.pop("prompt")}]
    fields = {"model": service.name, **defaults, **item}
    try:
        if "messages" in item:
            return chat.parameters_of(chat.ChatCompletionRequest(**fields), service)[0]
        return completions.parameters_of(completions.CompletionRequest(**fields), service)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"]))
        raise InvalidInputError(f"{where}: {first['msg']}".lstrip(": ")) from error


async def generate_all(
    service: ModelService,
    items: Iterable[dict[str, Any]],
    output: TextIO,
    *,
    defaults: dict[str, Any],
    as_chat: bool,
    first_index: int = 0,
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
        on_done: Called with the tokens of each answer as it is written.
    """
    room = asyncio.Semaphore(2 * service.engine.config.max_batch_size)
    finished: dict[int, dict[str, Any]] = {}
    next_index = first_index

    async def answer(index: int, item: dict[str, Any]) -> None:
        nonlocal next_index
        try:
            whole = (await collect(await service.start(parameters_of(item, defaults, service, as_chat=as_chat))))[0]
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

    async with asyncio.TaskGroup() as tasks:
        for index, item in enumerate(items, first_index):
            await room.acquire()
            tasks.create_task(answer(index, item))
