"""Our own engine without its HTTP front, driven like the peers."""

from __future__ import annotations

import asyncio
import queue
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from mlsys_orca.api.server import available_memory_nbytes
from mlsys_orca.engine.engine import Engine, EngineConfig
from mlsys_orca.loading.load import load_model
from mlsys_orca.scheduling.batch import GenerationRequest, SampledToken


class PeerEngine:
    """The engine on the directory ``model``; settings: ``policy``, ``max_batch_size``."""

    def __init__(self, options: dict[str, Any]) -> None:
        config = EngineConfig(
            max_batch_size=options["max_batch_size"],
            max_model_len=options["max_model_len"],
            num_threads=options["num_threads"],
            policy=options["policy"],
        )
        loaded = load_model(Path(options["model"]), dtype=options["dtype"])
        self._engine = Engine(loaded, config, available_nbytes=available_memory_nbytes())
        self._engine.start()
        self._events: queue.SimpleQueue[tuple[int, list[int]] | BaseException] = queue.SimpleQueue()
        self._loop = asyncio.new_event_loop()
        threading.Thread(target=self._loop.run_forever, daemon=True).start()

    def add(self, key: int, prompt: list[int], num_tokens: int) -> None:
        """See :meth:`http_front.Engine.add`."""
        request = GenerationRequest(request_id=str(key), prompt_token_ids=tuple(prompt), max_new_tokens=num_tokens)
        asyncio.run_coroutine_threadsafe(self._read(key, request), self._loop)

    async def _read(self, key: int, request: GenerationRequest) -> None:
        try:
            async for item in self._engine.generate(request):
                if isinstance(item, SampledToken):
                    self._events.put((key, [item.token_id]))
        except Exception as error:  # noqa: BLE001 - raised again by the thread that waits
            self._events.put(error)

    def step(self, timeout_s: float) -> Sequence[tuple[int, Sequence[int]]]:
        """See :meth:`http_front.Engine.step`."""
        events: list[tuple[int, Sequence[int]]] = []
        while not self._events.empty() or not events:
            try:
                event = self._events.get(timeout=timeout_s)
            except queue.Empty:
                break
            if isinstance(event, BaseException):
                raise event
            events.append(event)
        return events
