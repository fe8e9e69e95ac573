"""A server of several processes for tests: ``server.py MODEL '{"step": ..., "poison": ...}'`` prints its port.

``step`` and ``number``: the first worker is killed when it comes to that step for that time. ``policy``, ``kv_tokens``,
``replicas``, ``kv_dtype`` and ``speculate``: as of the command. ``poison``: a token id; a worker that computes three
of them in a row in a prompt crashes. ``memory``: a worker that computes token 67 in a prompt may take no more than so
many bytes beyond what it has, and tries to. ``max_deaths``, ``num_immediate`` and ``backoff_s``: of the restart budget.
``defect``: the scheduler raises at its call of that number, once. ``no_pool``: as with a policy that keeps no
RequestPool.
``batches``: a folder for files and batches; when one of their steps is reached for the n-th time, ``[step, n]`` in
``batch_step``, the whole server is killed. ``full``: no file may become larger than so many bytes, from when a log was
opened.
``template``: the model's chat template. ``clock_jumps``: the wall clock goes a day forward or back at each look.
``otlp``: address of a collector of traces. ``num_files``: that a process may open. ``journal``: its folder;
``journal_step``: the front is killed when it comes to that step for the ``number``-th time.
"""

from __future__ import annotations

import json
import mmap
import os
import random
import resource
import signal
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from mlsys_core.exits import end_process
from mlsys_core.plugins import installed_plugins
from mlsys_orca.api.service import ModelService
from mlsys_orca.api.supervised import serve_supervised
from mlsys_orca.backends.native.decoder import NativeDecoder
from mlsys_orca.engine import core
from mlsys_orca.engine.crash_points import CrashPoints
from mlsys_orca.engine.settings import EngineConfig
from mlsys_orca.loading.load import load_model
from mlsys_orca.scheduling.request_pool import RequestPool
from mlsys_orca.text.chat_template import ChatTemplate
from mlsys_orca_gateway.options import GatewayOptions
from mlsys_serving.extensions import Extensions
from mlsys_serving.http import HttpConfig, ServerAddress
from mlsys_serving.http.port import BoundPort
from mlsys_serving.processes import RestartBudget
from mlsys_serving.tracing import TraceConfig


class Poisoned(NativeDecoder):
    """A decoder that does not survive some tokens."""

    poison: int | None = None
    memory: int | None = None

    def __call__(self, inputs: Any, kv_cache: Any) -> Any:
        batch = inputs.batch
        first = [part for part in batch.requests if not part.num_computed_tokens]  # answers may have any token
        tokens = {token for part in first for token in batch.token_ids[part.start : part.stop]}
        runs = [batch.token_ids[part.start : part.stop] for part in first]
        if any((self.poison,) * 3 == run[at : at + 3] for run in runs for at in range(len(run))):
            os.abort()
        if self.memory is not None and 67 in tokens:
            taken = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
            resource.setrlimit(resource.RLIMIT_AS, (taken + self.memory, taken + self.memory))
            _ = bytearray(2 * self.memory)
        return super().__call__(inputs, kv_cache)


def plant_defect(number: int) -> None:
    """Have the pool of whichever worker makes the call of that number raise."""
    calls, update = mmap.mmap(-1, 8), RequestPool.update_from_output

    def counted(pool: RequestPool, *args: Any) -> Any:
        made = int.from_bytes(calls[:], "little") + 1
        calls[:] = made.to_bytes(8, "little")
        if made == number:
            raise RuntimeError("a defect")
        return update(pool, *args)

    RequestPool.update_from_output = counted  # type: ignore[method-assign]


def killer(step: str, number: int) -> Callable[[str], None]:
    """Return a function that kills the whole server when the front reaches ``step`` for the n-th time."""
    left = number

    def reach(reached: str) -> None:
        nonlocal left
        left -= reached == step
        if left == 0:
            os.kill(os.getppid(), signal.SIGKILL)
            os.kill(os.getpid(), signal.SIGKILL)

    return reach


def filler(nbytes: int) -> Callable[[str], None]:
    """Return a function that lets no file become larger when the front has opened a log."""

    def reach(reached: str) -> None:
        if reached == "opened":
            resource.setrlimit(resource.RLIMIT_FSIZE, (nbytes, resource.RLIM_INFINITY))

    return reach


def kill_once(step: str, number: int) -> Callable[[str], None]:
    """Have the process that comes to ``step`` of the journal for that time killed; the one after it lives on."""
    calls = mmap.mmap(-1, 8)

    def reach(reached: str) -> None:
        if reached == step:
            made = int.from_bytes(calls[:], "little") + 1
            calls[:] = made.to_bytes(8, "little")
            if made == number:
                os.kill(os.getpid(), signal.SIGKILL)

    return reach


def watched(reach: Callable[[str], None]) -> type[GatewayOptions]:
    """Return options whose steps of writing call ``reach``."""
    return type("Watched", (GatewayOptions,), {"reach": lambda _, step: reach(step)})


def main() -> int:
    torch.set_num_threads(1)
    options = json.loads(sys.argv[2])
    gateway = GatewayOptions()
    if "batches" in options:
        reach = killer(*options.get("batch_step", ("", 1)))
        if "full" in options:
            os.dup2(os.open(os.devnull, os.O_WRONLY), 2)  # which may be a file, too
            reach = filler(options["full"])
        gateway = watched(reach)(journal=Path(options["batches"]))
    loaded = load_model(Path(sys.argv[1]), dtype="fp32")
    assert isinstance(loaded.model, NativeDecoder)
    loaded.model.__class__ = Poisoned
    Poisoned.poison, Poisoned.memory = options.get("poison"), options.get("memory")
    if "defect" in options:
        plant_defect(options["defect"])
    if options.get("no_pool"):
        core.pool_of = lambda _: None  # type: ignore[assignment]
    if "template" in options:
        loaded = replace(loaded, chat_template=ChatTemplate(options["template"]))
    if options.get("clock_jumps"):
        wall, jumps = time.time, random.Random(0)
        time.time = lambda: wall() + jumps.choice((-86400, 86400))  # type: ignore[assignment]
    if "num_files" in options:
        resource.setrlimit(resource.RLIMIT_NOFILE, (options["num_files"], options["num_files"]))
    config = EngineConfig(
        max_batch_size=4,
        max_model_len=96,
        policy=options.get("policy", "chunked"),
        num_kv_tokens=options.get("kv_tokens"),
        num_draft_tokens=options.get("speculate", 0),
        num_replicas=options.get("replicas", 1),
        kv_dtype=options.get("kv_dtype"),
    )
    traces = TraceConfig(options["otlp"]) if "otlp" in options else None
    http = HttpConfig(
        validation_status=400, api_keys=options.get("api_keys", ()), open_paths=("/health",), traces=traces
    )
    if "journal" in options:
        reach = (
            kill_once(options["journal_step"], options.get("number", 1))
            if "journal_step" in options
            else lambda _: None
        )
        gateway = watched(reach)(
            journal=Path(options["journal"]),
            journal_fsync=options.get("sync", "interval"),
            journal_size=options.get("journal_nbytes", 1 << 30),
        )

    def on_ready(service: ModelService, address: ServerAddress) -> None:
        print(address.port, flush=True)

    extensions = Extensions.of("orca", installed_plugins().registry, orca_gateway=gateway)
    with extensions.held("127.0.0.1"), BoundPort("127.0.0.1", 0, config=http) as bound:
        return serve_supervised(
            replace(loaded),
            "tiny",
            config,
            http,
            bound=bound,
            on_ready=on_ready,
            budget=RestartBudget(
                max_deaths=options.get("max_deaths", 30),
                num_immediate=options.get("num_immediate", 8),
                backoff_s=options.get("backoff_s", 0.1),
            ),
            extensions=extensions,
            crash_points=CrashPoints(options.get("step"), options.get("number", 1)),
        )


if __name__ == "__main__":
    end_process(main())
