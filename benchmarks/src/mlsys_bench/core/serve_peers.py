"""Our front beside LitServe, BentoML, Ray Serve and Triton (through PyTriton): the same model, clients and rounds.

Each peer has an environment of its own below ``.peers/`` (``benchmarks/peers/install.sh litserve bentoml ray-serve
pytriton``); one that is not installed, or does not start, is named with its reason. The model takes 2 ms a batch, of
one request or of up to 16; answers are compared with the right ones. A server that computes in the background while
others are asked would slow them down, so those that wait are stopped (SIGSTOP) with all their processes.

    mlsys bench serve-peers seconds=5 rounds=5
"""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import httpx
import psutil
from mlsys_core.posix import signal_group

from mlsys_bench.core.oip_clients import WIDTH
from mlsys_bench.core.oip_front import Server, measure
from mlsys_bench.harness.text import rows_section

if TYPE_CHECKING:
    from mlsys_core.bench import BenchContext
    from mlsys_core.report import Section

_START_S = 180.0
_NO_PEER = {
    "torchserve": "no longer maintained by its authors, and its front needs Java: not measured",
}


@dataclass(frozen=True, slots=True)
class Peer:
    """A server that can be measured."""

    name: str
    port: int
    has_grpc: bool = False

    def python(self, root: Path) -> Path:
        """Return its environment's interpreter."""
        return root / ".peers" / self.name / "bin" / "python"


PEERS = (
    Peer("litserve", 18100),
    Peer("bentoml", 18300),
    Peer("ray-serve", 18200),
    Peer("pytriton", 18000, has_grpc=True),
)
NAMES = tuple(each.name for each in PEERS)


class NotStartedError(Exception):
    """A peer that cannot be measured; the message says why."""


class PausedServer(Server):
    """A server all of whose processes stand still but for the time it is measured."""

    def pause(self) -> None:
        """Stop all its processes."""
        self._tell(signal.SIGSTOP)

    def go_on(self) -> None:
        """Let them run."""
        self._tell(signal.SIGCONT)

    def _tell(self, number: int) -> None:
        signal_group(self.pid, number)


def _ready(url: str, process: subprocess.Popen[bytes]) -> None:
    """Wait until both models answer.

    Raises:
        NotStartedError: The process has ended, or does not answer in time.
    """
    body = {"inputs": [{"name": "x", "datatype": "FP32", "shape": [1, WIDTH], "data": [0.0] * WIDTH}]}
    deadline = time.monotonic() + _START_S
    for model in ("unbatched", "batched"):
        while True:
            try:
                if httpx.post(f"{url}/v2/models/{model}/infer", json=body, timeout=10).status_code == 200:
                    break
            except httpx.HTTPError:
                pass
            if process.poll() is not None:
                raise NotStartedError(f"it ended with exit code {process.returncode}")
            if time.monotonic() > deadline:
                raise NotStartedError(f"it did not answer within {_START_S:g} s")
            time.sleep(0.2)


@contextmanager
def running(peer: Peer, root: Path) -> Iterator[PausedServer]:
    """Run a peer in a process group of its own.

    Raises:
        NotStartedError: It is not installed, or does not start.
    """
    python = peer.python(root)
    if not python.is_file():
        raise NotStartedError(f"not installed: benchmarks/peers/install.sh {peer.name}")
    ports = [str(peer.port + number) for number in range(2 if peer.has_grpc else 1)]
    command = [str(python), str(root / "benchmarks" / "peers" / peer.name / "server.py"), *ports]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True)
    try:
        _ready(f"http://127.0.0.1:{peer.port}", process)
        grpc = f"127.0.0.1:{peer.port + 1}" if peer.has_grpc else "-"
        yield PausedServer(peer.name, f"127.0.0.1:{peer.port}", grpc, process.pid)
    finally:
        _end(process)


@contextmanager
def _ours() -> Iterator[PausedServer]:
    command = [sys.executable, "-m", "mlsys_bench.core.oip_front"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, start_new_session=True)
    try:
        assert process.stdout is not None
        urls = json.loads(process.stdout.readline())
        yield PausedServer("mlsys", urls["http"], urls["grpc"], process.pid)
    finally:
        _end(process)


def _end(process: subprocess.Popen[bytes]) -> None:
    """End a server and all processes below it."""
    try:
        family = [psutil.Process(process.pid), *psutil.Process(process.pid).children(recursive=True)]
    except psutil.NoSuchProcess:
        family = []
    signal_group(process.pid, signal.SIGCONT)
    process.terminate()
    _, alive = psutil.wait_procs(family, timeout=15)
    for each in alive:
        each.kill()
    process.wait()


def run(
    context: BenchContext,
    *,
    seconds: float = 3.0,
    rounds: int = 3,
    clients: int = 16,
    peers: tuple[str, ...] = NAMES,
    root: str = ".",
) -> Section:
    """Measure our server and all peers that are installed.

    Args:
        context: The suite's context.
        seconds: Of each case in each round.
        rounds: Rounds that are timed; one more warms up.
        clients: Connections at once.
        peers: Names of peers.
        root: Checkout with ``benchmarks/peers`` and ``.peers``.
    """
    if context.is_quick:
        seconds, rounds = 0.2, 1
    missing = dict(_NO_PEER)
    with ExitStack() as stack:
        servers: list[Server] = [stack.enter_context(_ours())]
        for peer in PEERS:
            if peer.name not in peers:
                continue
            try:
                servers.append(stack.enter_context(running(peer, Path(root).resolve())))
            except NotStartedError as error:
                missing[peer.name] = str(error)
        for server in servers:
            assert isinstance(server, PausedServer)
            server.pause()
        rows = measure(servers, seconds=seconds, num_rounds=rounds, num_clients=clients)
    left_out = [f"{name}: {reason}" for name, reason in missing.items()]
    text = f"{clients} clients, [1, {WIDTH}] FP32, {rounds} rounds of {seconds:g} s; server us: of CPU time a request."
    return rows_section("Servers of models, side by side", rows, text, *left_out, missing=missing)
