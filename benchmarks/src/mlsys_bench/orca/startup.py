"""Starts of a server, beside llama.cpp's: seconds to ready and to the first token, and the memory that they take.

    python -m mlsys_bench.orca.peers.large --shape 1b --kind q4_0
    mlsys bench orca-startup models=smollm2-135m-instruct,.peers/models/llama-1b-q4_0.gguf rounds=5

Starts ``mlsys orca serve`` and llama.cpp's server (benchmarks/peers/llama-cpp) in turn, each in processes of its own,
asks for one token as soon as it is ready, and stops it. A first start has no packed copy of the model beside it;
kernels are compiled before. Both have K/V slots for the same tokens. On a machine with other work the processor time
shows the cost of starting; the end of the process is part of it. Memory is taken from a further start, since to ask for
it costs time: pages that processes share count once (the sum of their proportional set sizes).
"""

from __future__ import annotations

import resource
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import httpx
import psutil

from mlsys_bench.harness.child import environment, free_port
from mlsys_bench.harness.machine import LOADED_SHARE, LoadMeter
from mlsys_bench.harness.text import rows_section
from mlsys_bench.orca.peers.cases import child_command

if TYPE_CHECKING:
    from mlsys_core.bench import BenchContext
    from mlsys_core.report import Section

OURS, FIRST, PEER = "mlsys orca", "mlsys orca, first start", "llama.cpp"
_POLL_S = 0.02
_SAMPLE_S = 0.05


@dataclass(frozen=True, slots=True)
class Server:
    """A server that can be started: its name, its command without the port, and its environment."""

    name: str
    command: Sequence[str]
    variables: dict[str, str]


@dataclass(frozen=True, slots=True)
class Row:
    """Starts of one server with one model: medians, and MiB."""

    model: str
    server: str
    ready_s: float
    first_token_s: float
    processor_s: float
    slowest_ready_s: float
    file_mib: float  # of the model
    peak_mib: float  # of all its processes together
    held_mib: float  # after the first token


def ours(model: str, cache: Path, *, name: str, threads: int, tokens: int) -> Server:
    """Return our server of ``model`` with its cache in ``cache``, and K/V slots for ``tokens``."""
    options = {"--name": "model", "--kv-tokens": tokens, "--max-model-len": tokens, "--threads": threads}
    flags = [str(each) for pair in options.items() for each in pair]
    command = [sys.executable, "-m", "mlsys_core", "orca", "serve", model, *flags, "--port"]
    return Server(name, command, {"MLSYS_CACHE_DIR": str(cache), "PYTHONDONTWRITEBYTECODE": ""})


def llama_cpp(file: Path, folder: Path, *, threads: int, tokens: int) -> Server | None:
    """Return llama.cpp's server of a GGUF file; None: it is not installed, or cannot read the file."""
    python = folder / "bin" / "python"
    if not python.is_file() or file.suffix != ".gguf":
        return None
    options = {"model": str(file), "n_parallel": 1, "max_model_len": tokens, "n_ubatch": 512, "kv_type": "f16"}
    options |= {"flash_attention": "auto", "kv_unified": False, "num_threads": threads}
    return Server(PEER, [str(python), *child_command("llama_cpp", options, 0)[:-1]], {})


@contextmanager
def cache_without_copies() -> Iterator[Path]:
    """Yield a cache folder with what ours has, kernels above all, but no packed copy of a model."""
    from mlsys_core.config import settings

    with tempfile.TemporaryDirectory(prefix="mlsys-startup-") as made:
        folder = Path(made)
        own = settings().cache_dir
        own.mkdir(parents=True, exist_ok=True)
        for entry in own.iterdir():
            if entry.name != "packed":
                (folder / entry.name).symlink_to(entry)
        yield folder


@contextmanager
def started(server: Server) -> Iterator[tuple[subprocess.Popen[bytes], str]]:
    """Start a server and yield its process and address; end it with the context.

    Raises:
        RuntimeError: it has ended by itself; the message has its last words.
    """
    port = free_port()
    with tempfile.TemporaryFile() as log:
        variables = environment() | server.variables
        process = subprocess.Popen([*server.command, str(port)], env=variables, stdout=log, stderr=log)
        try:
            yield process, f"http://127.0.0.1:{port}"
        except ServerEndedError as error:
            log.seek(0)
            said = log.read().decode(errors="replace")[-1000:]
            raise RuntimeError(f"{server.name} ended with code {process.returncode}: {said}") from error
        finally:
            process.send_signal(signal.SIGTERM)
            try:
                process.wait(60)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


class ServerEndedError(Exception):
    """A server has ended before it was ready."""


@dataclass(frozen=True, slots=True)
class Start:
    """One start of a server: seconds, and MiB if it was watched."""

    ready_s: float
    first_token_s: float
    processor_s: float
    peak_mib: float = 0.0
    held_mib: float = 0.0


def start(server: Server, *, watches: bool) -> Start:
    """Start a server, ask it for a token, and end it; ``watches`` its memory, which costs time.

    Raises:
        RuntimeError: it has ended before it was ready.
    """
    begun, begun_cpu_s = time.perf_counter(), children_cpu_s()
    with started(server) as (process, url), memory_of(process, watches=watches) as sizes:
        ready_s, token_s = first_token_s(process, url)
        held = tree_mib(process.pid) if watches else 0.0
    cpu_s = children_cpu_s() - begun_cpu_s
    return Start(ready_s - begun, token_s - begun, cpu_s, max([*sizes, held]), held)


@contextmanager
def memory_of(process: subprocess.Popen[bytes], *, watches: bool) -> Iterator[list[float]]:
    """Yield a list that gets the MiB of a process and all below it, again and again within the context."""
    sizes: list[float] = []
    ended = threading.Event()

    def watch() -> None:
        while not ended.wait(_SAMPLE_S):
            sizes.append(tree_mib(process.pid))

    watcher = threading.Thread(target=watch)
    if watches:
        watcher.start()
    try:
        yield sizes
    finally:
        ended.set()
        if watches:
            watcher.join()


def first_token_s(process: subprocess.Popen[bytes], url: str) -> tuple[float, float]:
    """Wait for a server and ask it for a token; return the clock's seconds when it was ready and when that came."""
    with httpx.Client(verify=False, trust_env=False, timeout=600) as client:
        while True:
            if process.poll() is not None:
                raise ServerEndedError
            with suppress(httpx.TransportError):
                if client.get(f"{url}/health").status_code == 200:
                    break
            time.sleep(_POLL_S)
        ready_s = time.perf_counter()
        body: dict[str, Any] = {"model": "model", "prompt": "Hello", "max_tokens": 1, "temperature": 0}
        client.post(f"{url}/v1/completions", json=body).raise_for_status()
        return ready_s, time.perf_counter()


def tree_mib(pid: int) -> float:
    """Return the memory of a process and all below it, in MiB; shared pages count once."""
    found = 0
    with suppress(psutil.NoSuchProcess):
        root = psutil.Process(pid)
        for each in (root, *root.children(recursive=True)):
            with suppress(psutil.NoSuchProcess, psutil.AccessDenied, psutil.ZombieProcess):
                found += each.memory_full_info().pss
    return found / 2**20


def children_cpu_s() -> float:
    """Return the processor time of the processes that have ended."""
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


def run(
    context: BenchContext,
    *,
    models: tuple[str, ...] = ("smollm2-135m-instruct",),
    rounds: int = 3,
    tokens: int = 2048,
    peer: str = ".peers/llama-cpp",
) -> Section:
    """Start each server with each model so many times, in turn, and once more before that for their memory.

    Args:
        context: The suite's context; quick starts ours once.
        models: Names or GGUF files.
        rounds: Starts of each.
        tokens: Tokens that keys and values have room for, and one request at most.
        peer: The environment of llama.cpp's server.
    """
    from mlsys_core.config import settings
    from mlsys_core.models import resolve_model

    rows: list[Row] = []
    notes: list[str] = []
    threads, cache = context.num_threads, settings().cache_dir
    with LoadMeter() as meter:
        for name in models:
            file = resolve_model(name, cache)
            later = ours(name, cache, name=OURS, threads=threads, tokens=tokens)
            other = None if context.is_quick else llama_cpp(file, Path(peer).absolute(), threads=threads, tokens=tokens)
            if other is None:
                notes.append(
                    f"{PEER} takes no part with {file.name}: it needs benchmarks/peers/install.sh llama-cpp and a GGUF."
                )
            starts: dict[str, list[Start]] = {}
            if not context.is_quick:
                start(later, watches=False)  # which leaves a packed copy
            for number in range(1 if context.is_quick else 1 + rounds):
                with cache_without_copies() as empty:
                    first = None if context.is_quick else ours(name, empty, name=FIRST, threads=threads, tokens=tokens)
                    for server in (first, later, other):
                        if server is not None:
                            starts.setdefault(server.name, []).append(start(server, watches=number == 0))
            rows += [row_of(file, title, found) for title, found in starts.items()]
    text = f"Medians of {1 if context.is_quick else rounds} starts, {threads} threads, K/V slots for {tokens} tokens."
    is_busy = meter.load.share_of_others > LOADED_SHARE
    return rows_section(
        "Orca: start-up", rows, text, str(meter.load), *notes, method=text, load=str(meter.load), is_busy=is_busy
    )


def row_of(file: Path, server: str, starts: Sequence[Start]) -> Row:
    """Return the row of a server: memory from its first start, times from the others."""
    watched, timed = starts[0], starts[1:] or starts
    return Row(
        model=file.stem,
        server=server,
        ready_s=statistics.median(each.ready_s for each in timed),
        first_token_s=statistics.median(each.first_token_s for each in timed),
        processor_s=statistics.median(each.processor_s for each in timed),
        slowest_ready_s=max(each.ready_s for each in timed),
        file_mib=file.stat().st_size / 2**20 if file.is_file() else 0.0,
        peak_mib=watched.peak_mib,
        held_mib=watched.held_mib,
    )
