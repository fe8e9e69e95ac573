"""Helpers of what ``tritonclient`` asks for beside plain inference: sequences, timeouts, control."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import tritonclient.grpc as by_grpc
import tritonclient.http as by_http
from tritonclient.utils import InferenceServerException

from tests.conformance.oip.habits.case import Server

Client = SimpleNamespace  # wire, module and client; and the server


@contextlib.contextmanager
def connected(server: Server, wire: str) -> Iterator[Client]:
    """Connect a client of one kind."""
    module = by_http if wire == "http" else by_grpc
    url = server.http if wire == "http" else server.grpc
    options = {"concurrency": 8} if wire == "http" else {}
    with module.InferenceServerClient(url, **options) as client:
        yield Client(wire=wire, module=module, client=client, server=server)


def tried(server: Server, ask: Callable[[], Any]) -> Any:
    """Return an answer, or an error's status."""
    try:
        return ask()
    except InferenceServerException as error:
        status = str(error.status() or "no status").removeprefix("StatusCode.")
        return [status, "error" if server.note(str(error.message())) else "no words"]


def tensor(to: Client, name: str, array: Any, datatype: str = "FP32") -> Any:
    """Return an input."""
    given = to.module.InferInput(name, list(array.shape), datatype)
    given.set_data_from_numpy(array)
    return given


def floats(*values: float) -> Any:
    """Return one row."""
    return np.array([values], np.float32)


def ask(
    to: Client, model: str, array: Any, output: str, *, name: str = "x", datatype: str = "FP32", **more: Any
) -> Any:
    """Return an output's elements, or an error's status."""
    inputs = [tensor(to, name, array, datatype)]
    return tried(to.server, lambda: to.client.infer(model, inputs, **more).as_numpy(output).tolist())


def as_json(to: Client) -> dict[str, Any]:
    """Return the option by which gRPC's client gives what HTTP's does."""
    return {"as_json": True} if to.wire == "grpc" else {}
