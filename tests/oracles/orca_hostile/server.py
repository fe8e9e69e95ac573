"""A server as ``mlsys orca serve`` makes it, which also tells how long its event loop stood still.

    python server.py MODEL MAX_MODEL_LEN

It prints its address. ``GET /oracle`` answers with the longest time between two turns of the loop since it was last
asked, in seconds: of the clock, of this process's processor time (what its threads did together meanwhile, the engine's
among them), and of the loop's own thread (what handlers did). On a busy machine the clock also counts what others did.
Beside them stands the memory that is resident, in bytes.
"""

from __future__ import annotations

import asyncio
import sys
import time
from contextlib import ExitStack
from pathlib import Path

import psutil
from mlsys_core.collector import kept_out_of_collections
from mlsys_core.plugins import installed_plugins
from mlsys_orca.api.server import make_app, make_service
from mlsys_orca.engine.engine import EngineConfig
from mlsys_orca.loading.load import load_model
from mlsys_serving.extensions import Extensions
from mlsys_serving.http import HttpConfig, ServerAddress, serve

TURN_S = 0.002


class Watchdog:
    """A task that wakes every two milliseconds and keeps the longest times that it slept."""

    def __init__(self) -> None:
        self.longest_s = self.longest_cpu_s = self.longest_own_s = 0.0
        self._task: asyncio.Task[None] | None = None

    async def ask(self) -> dict[str, float]:
        """Return what was seen, and begin anew."""
        if self._task is None:
            self._task = asyncio.create_task(self._watch())
        gaps = {"gap_s": self.longest_s, "gap_cpu_s": self.longest_cpu_s, "own_s": self.longest_own_s}
        self.longest_s = self.longest_cpu_s = self.longest_own_s = 0.0
        return gaps | {"rss_nbytes": psutil.Process().memory_info().rss}

    async def _watch(self) -> None:
        last, last_cpu, last_own = time.perf_counter(), time.process_time(), time.thread_time()
        while True:
            await asyncio.sleep(TURN_S)
            now, now_cpu, now_own = time.perf_counter(), time.process_time(), time.thread_time()
            self.longest_s = max(self.longest_s, now - last - TURN_S)
            self.longest_cpu_s = max(self.longest_cpu_s, now_cpu - last_cpu)
            self.longest_own_s = max(self.longest_own_s, now_own - last_own)
            last, last_cpu, last_own = now, now_cpu, now_own


def main(model: str, max_model_len: str) -> int:
    """Serve until SIGTERM."""
    config = EngineConfig(max_model_len=int(max_model_len), max_waiting=256, num_threads=1)
    service = make_service(load_model(Path(model)), "tiny", config)
    with ExitStack() as serving:
        extensions = Extensions.of("orca", installed_plugins().registry)
        serving.enter_context(extensions.held("127.0.0.1"))
        app = make_app(service, HttpConfig(validation_status=400, drain_timeout_s=1), extensions=extensions)
        app.add_api_route("/oracle", Watchdog().ask)

        def ready(address: ServerAddress) -> None:
            serving.enter_context(kept_out_of_collections())  # as the command does
            print(address.url, flush=True)

        return serve(app, port=0, on_ready=ready)


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
