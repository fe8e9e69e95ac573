"""The cases of ``tritonclient``, each over HTTP and gRPC."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tests.conformance.oip.habits import control, scheduling
from tests.conformance.oip.habits.case import Case, Server
from tests.conformance.oip.habits.clients import Client, connected

BOTH: dict[str, Callable[[Client], Any]] = {
    "sequences": scheduling.sequences,
    "timeouts": scheduling.timeouts,
    "configurations": control.configs,
    "statistics": control.counted,
    "repository index": control.index,
    "loading and unloading": control.loading,
}


def cases() -> list[Case]:
    """Return all of them."""

    def both(ask_: Callable[[Client], Any], wire: str) -> Callable[[Server], Any]:
        def run(server: Server) -> Any:
            with connected(server, wire) as to:
                return ask_(to)

        return run

    made = [
        Case(f"client, {wire}: {name}", both(run, wire), has_steps=True)
        for name, run in BOTH.items()
        for wire in ("http", "grpc")
    ]
    return [
        *made,
        Case("client, grpc: sequences in a stream", scheduling.sequences_in_a_stream),
        Case("client, http: loading with a configuration", both(control.configured, "http"), has_steps=True),
    ]
