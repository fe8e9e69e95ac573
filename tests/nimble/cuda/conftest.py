from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor


class RecordingDriver:
    """Driver for a machine without a GPU: it records its calls, and computes on tensors of the CPU.

    A graph is the calls that were captured; a replay makes them again and writes the results to where the capture had
    them. That is what a CUDA graph does, so what an executor computes can be tested too; whether streams really run
    side by side cannot.
    """

    def __init__(self) -> None:
        self.device = torch.device("cpu")
        self.log: list[tuple[Any, ...]] = []
        self.stream = "caller"
        self.num_replays = 0
        self.times: list[float] = []  # what measurements are to find, in their order; then always 1
        self._counts = {"stream": 0, "event": 0, "pool": 0}
        self._graph: list[tuple[Callable[..., Any], list[Tensor], list[Tensor]]] | None = None

    def _new(self, kind: str) -> str:
        self._counts[kind] += 1
        return f"{kind}{self._counts[kind] - 1}"

    def current_stream(self) -> str:
        return self.stream

    def new_stream(self) -> str:
        return self._new("stream")

    def new_event(self) -> str:
        return self._new("event")

    def new_pool(self) -> str:
        return self._new("pool")

    def record(self, event: str, stream: str) -> None:
        self.log.append(("record", event, stream))

    def wait(self, event: str, stream: str) -> None:
        self.log.append(("wait", event, stream))

    def run(self, stream: str, function: Callable[..., Any], arguments: Sequence[Tensor]) -> Any:
        self.log.append(("run", stream))
        made = function(*arguments)
        if self._graph is not None:
            self._graph.append((function, list(arguments), [made] if isinstance(made, Tensor) else list(made)))
        return made

    @contextmanager
    def capturing(self, pool: str, stream: str) -> Iterator[Any]:
        assert self._graph is None
        self.log.append(("begin", pool, stream))
        self._graph = graph = []
        try:
            yield graph
        finally:
            self._graph = None
        self.log.append(("end",))

    def forget_workspaces(self) -> None:
        assert self._graph is None
        self.log.append(("forget_workspaces",))

    def replay(self, graph: list[tuple[Callable[..., Any], list[Tensor], list[Tensor]]]) -> None:
        assert self._graph is None
        self.log.append(("replay", self.stream))
        self.num_replays += 1
        for function, arguments, results in graph:
            made = function(*arguments)
            read = {tensor.untyped_storage()._cdata for tensor in arguments}
            for result, new in zip(results, [made] if isinstance(made, Tensor) else made, strict=True):
                if result.untyped_storage()._cdata not in read:  # else a view, or a copy made in place
                    result.copy_(new)

    def copy(self, to: Tensor, source: Tensor) -> None:
        assert self._graph is None
        self.log.append(("copy", self.stream, to.numel()))
        to.copy_(source)

    def synchronize(self) -> None:
        assert self._graph is None
        self.log.append(("synchronize",))

    @contextmanager
    def random_kept(self) -> Iterator[None]:
        with torch.random.fork_rng([]):
            yield

    @contextmanager
    def tuned(self) -> Iterator[None]:
        yield

    def seconds(self, work: Callable[[], Any]) -> float:
        work()
        return self.times.pop(0) if self.times else 1.0

    def reserved_nbytes(self) -> int:
        return 0


@pytest.fixture
def driver() -> RecordingDriver:
    return RecordingDriver()


@pytest.fixture
def device() -> torch.device:
    """A CUDA device; no GPU where the run insists on one is a failure."""
    if not torch.cuda.is_available():
        if os.environ.get("MLSYS_REQUIRE_GPU") == "1":
            pytest.fail("MLSYS_REQUIRE_GPU=1, but torch sees no CUDA device")
        pytest.skip("torch sees no CUDA device")
    return torch.device("cuda")
