"""An event loop in a thread of its own, asked from plain code and from other event loops."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncGenerator, AsyncIterator, Coroutine, Iterator
from contextlib import suppress
from typing import Any, TypeVar

from mlsys_core.errors import ServingError

T = TypeVar("T")


class LoopThread:
    """Event loop that runs until it is closed. Any thread may ask.

    Example:
        >>> async def double(x: int) -> int:
        ...     return 2 * x
        >>> thread = LoopThread("double")
        >>> thread.run(double(21))
        42
        >>> thread.close()
    """

    def __init__(self, name: str) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name=name, daemon=True)
        self._thread.start()

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """Run ``work`` in the loop and return its result; Ctrl-C cancels it.

        Raises:
            ServingError: the thread is closed.
        """
        future = asyncio.run_coroutine_threadsafe(work, self._open(work))
        try:
            return future.result()
        except BaseException:
            future.cancel()
            raise

    async def arun(self, work: Coroutine[Any, Any, T]) -> T:
        """Run ``work`` in the loop and return its result to another loop; cancelling cancels it.

        Raises:
            ServingError: the thread is closed.
        """
        return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(work, self._open(work)))

    def iterate(self, items: AsyncGenerator[T, None]) -> Iterator[T]:
        """Yield ``items``, which run in the loop; leaving early closes them."""
        try:
            while True:
                try:
                    item = self.run(_next(items))
                except StopAsyncIteration:
                    return
                yield item
        finally:
            with suppress(ServingError):
                self.run(items.aclose())

    async def aiterate(self, items: AsyncGenerator[T, None]) -> AsyncIterator[T]:
        """Yield ``items`` in another loop; leaving early closes them."""
        try:
            while True:
                try:
                    item = await self.arun(_next(items))
                except StopAsyncIteration:
                    return
                yield item
        finally:
            with suppress(ServingError):
                await self.arun(items.aclose())

    def close(self) -> None:
        """Cancel what runs, and end the thread. Idempotent."""
        if self._loop.is_closed():
            return
        asyncio.run_coroutine_threadsafe(_cancel_others(), self._loop).result()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def _open(self, work: Coroutine[Any, Any, Any]) -> asyncio.AbstractEventLoop:
        if self._loop.is_closed():
            work.close()
            raise ServingError("this has been closed: make a new one")
        return self._loop


async def _next(items: AsyncGenerator[T, None]) -> T:
    return await anext(items)


async def _cancel_others() -> None:
    others = asyncio.all_tasks() - {asyncio.current_task()}
    for task in others:
        task.cancel()
    await asyncio.gather(*others, return_exceptions=True)
