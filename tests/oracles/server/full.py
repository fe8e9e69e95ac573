"""Clients of others, and hostile ones, against ``mlsys orca|batchmaker|dvabatch serve``: ``make oracles``."""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

from tests.oracles.server.clients import (
    documented_requests,
    openai_client,
    stalled_connections,
    triton_clients,
    web_pages,
)
from tests.oracles.server.servers import KEY, KINDS, running
from tests.oracles.tally import Tally


def run(kind: str, folder: Path, tally: Tally, *, examples: int, connections: int) -> None:
    """Try one server with all clients."""
    with running(kind, folder, "--header-timeout-s", "3", "--body-timeout-s", "3") as server:
        documented_requests(server, tally, examples=examples)
        web_pages(server, tally)
        if server.grpc is None:
            openai_client(server, tally)
        else:
            triton_clients(server, tally)
        stalled_connections(server, tally, number=connections)
    said = "".join(server.log)
    tally.check(KEY not in said, f"{kind}: the key is in the log")
    _, traceback, rest = said.partition("Traceback")
    tally.check(not traceback, f"{kind}: a traceback in the log: {rest[:2000]}")


def main() -> int:
    """Run all; 50 documented requests of each operation, 600 stalled connections for each server."""
    tally = Tally()
    for kind in KINDS:
        with tempfile.TemporaryDirectory() as folder:
            run(kind, Path(folder), tally, examples=50, connections=600)
        print(tally.line(f"up to {kind}"), flush=True)
    return tally.report("server-clients")


if __name__ == "__main__":
    sys.exit(main())
