"""Servers whose model lies on several hosts: processes on 127.0.0.1 that share no more than a secret."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.orca.survival.clients import Server
from tests.processes import FAULT_S, await_ends, end, reserved_port
from tests.warm import Started, Warm


@dataclass
class Nodes:
    """Nodes under test, each a process with children."""

    model: Path
    address: str
    secret: Path
    warm: Warm
    processes: list[Started] = field(default_factory=list)

    def add(self, model: Path | None = None, *, seconds: float = 120.0) -> Started:
        """Start one more."""
        process = self.warm.start(str(model or self.model), self.address, str(self.secret), str(seconds))
        self.processes.append(process)
        return process

    def close(self) -> None:
        """End all; nobody is left."""
        everyone: list[psutil.Process] = []
        for process in self.processes:
            if process.poll() is None:
                everyone += psutil.Process(process.pid).children(recursive=True)
                process.terminate()
        for process in self.processes:
            end(process)
            process.stdout.close()
        assert not await_ends(everyone, timeout_s=FAULT_S)


@dataclass
class HostServer(Server):
    """A server with nodes."""

    nodes: Nodes


@pytest.fixture(scope="session")
def warm_node() -> Iterator[Warm]:
    """What becomes a node."""
    warm = Warm("tests.orca.parallel.hosts.worker")
    yield warm
    warm.close()


@pytest.fixture
def nodes(six_layers: Path, tmp_path: Path, warm_node: Warm) -> Iterator[Nodes]:
    """Nodes that are to join a free port with a secret; all have ended afterwards."""
    secret = tmp_path / "secret"
    secret.write_text("a secret of this test's run\n")
    secret.chmod(0o600)
    with reserved_port() as port:
        found = Nodes(six_layers, f"127.0.0.1:{port}", secret, warm_node)
        try:
            yield found
        finally:
            found.close()


@pytest.fixture
def start_hosts(start: Any, nodes: Nodes) -> Callable[..., Any]:
    """``with start_hosts(2, **options) as server``: a server of two nodes, of which this machine's is one.

    With ``control_only`` it is none. ``spares`` more nodes join. All end with the server, without an error; with
    ``may_lose`` one that the server had given up may find no server to join again.
    """

    @contextmanager
    def started(
        number: int, *, spares: int = 0, may_lose: bool = False, model: Path | None = None, **options: Any
    ) -> Iterator[HostServer]:
        nodes.model = model or nodes.model
        for _ in range(number + spares - (not options.get("control_only"))):
            nodes.add()
        with ExitStack() as stack:
            server = stack.enter_context(
                start(nodes.model, nodes=number, listen=nodes.address, secret=str(nodes.secret), **options)
            )
            yield HostServer(server.process, server.port, nodes)
        for process in nodes.processes:
            if process.poll() != -9:  # killed by the test
                assert process.wait(FAULT_S) in ((0, 1) if may_lose else (0,))

    return started
