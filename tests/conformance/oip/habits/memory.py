"""Tensors in shared memory, by ``tritonclient``."""

from __future__ import annotations

import contextlib
import os
import uuid
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
from google.protobuf.json_format import MessageToDict
from tritonclient.utils import serialize_byte_tensor, shared_memory

from tests.conformance.oip.habits.clients import Client, as_json, floats, tried


@contextlib.contextmanager
def region(nbytes: int) -> Iterator[tuple[str, Any]]:
    """Make a region; its key is another on each call."""
    key = f"/habits-{os.getpid()}-{uuid.uuid4().hex[:8]}"
    made = shared_memory.create_shared_memory_region("habit", key, nbytes)
    try:
        yield key, made
    finally:
        with contextlib.suppress(Exception):
            shared_memory.destroy_shared_memory_region(made)


def placed(to: Client, nbytes: int, offset: int = 0, shape: Any = (1, 2), where: str = "habit") -> Any:
    """Return the input a in shared memory."""
    given = to.module.InferInput("a", list(shape), "FP32")
    given.set_shared_memory(where, nbytes, offset=offset)
    return given


def wanted(to: Client, nbytes: int, offset: int = 0, where: str = "habit") -> Any:
    """Return the output sum in shared memory."""
    output = to.module.InferRequestedOutput("sum")
    output.set_shared_memory(where, nbytes, offset=offset)
    return output


def placed_output(to: Client, result: Any, name: str = "sum") -> Any:
    """Return what an answer says of an output that lies in shared memory."""
    told = result.get_output(name)
    if to.wire == "grpc":
        told = MessageToDict(told, preserving_proto_field_name=True)
        told["shape"] = [int(size) for size in told["shape"]]
        told["parameters"] = {key: next(iter(value.values())) for key, value in told.get("parameters", {}).items()}
    told["parameters"] = {key: str(value) for key, value in told.get("parameters", {}).items()}
    return told


def shared_memory_of(to: Client) -> Any:
    """Return what comes of each use and misuse of a region."""
    client, found = to.client, {}

    def note(name: str, act: Callable[[], Any]) -> None:
        found[name] = tried(to.server, act)

    def infer(inputs: Any, outputs: Any = None) -> Any:
        result = client.infer("add", inputs, outputs=outputs)
        return result.as_numpy("sum").tolist() if outputs is None else placed_output(to, result)

    with region(64) as (key, made):
        shared_memory.set_shared_memory_region(made, [floats(1, 2)])
        note("nothing is registered", lambda: status(to))
        note("register", lambda: client.register_system_shared_memory("habit", key, 64))
        note("register again", lambda: client.register_system_shared_memory("habit", key, 64))
        note(
            "register the key by another name", lambda: client.register_system_shared_memory("other", key, 8, offset=8)
        )
        note("register a key that is not there", lambda: client.register_system_shared_memory("no", "/no-such", 8))
        note("register more than there is", lambda: client.register_system_shared_memory("more", key, 65))
        note("register beyond its end", lambda: client.register_system_shared_memory("end", key, 8, offset=60))
        note("register no bytes", lambda: client.register_system_shared_memory("none", key, 0))
        note("status", lambda: status(to))
        note("status of one", lambda: status(to, "other"))
        note("status of an unknown one", lambda: status(to, "nope"))
        note("input", lambda: infer([placed(to, 8)]))
        note("input and output", lambda: infer([placed(to, 8)], [wanted(to, 8, 16)]))
        found["output"] = shared_memory.get_contents_as_numpy(made, np.float32, [1, 2], 16).tolist()
        note("output of more room", lambda: infer([placed(to, 8)], [wanted(to, 16, 32)]))
        note("output without room", lambda: infer([placed(to, 8)], [wanted(to, 4)]))
        note("output beyond the end", lambda: infer([placed(to, 8)], [wanted(to, 8, 60)]))
        note("input of too few bytes", lambda: infer([placed(to, 4)]))
        note("input of too many bytes", lambda: infer([placed(to, 16)]))
        note("input beyond the end", lambda: infer([placed(to, 8, 60)]))
        note("input in an unknown region", lambda: infer([placed(to, 8, where="nope")]))
        note("output in an unknown region", lambda: infer([placed(to, 8)], [wanted(to, 8, where="nope")]))
        note("unregister", lambda: client.unregister_system_shared_memory("other"))
        note("unregister again", lambda: client.unregister_system_shared_memory("other"))
        note("status then", lambda: status(to))
        note("unregister all", lambda: client.unregister_system_shared_memory())
        note("input then", lambda: infer([placed(to, 8)]))
        for values in found.values():
            for region_ in values if isinstance(values, list) and values and isinstance(values[0], dict) else ():
                region_["key"] = region_["key"] == key
    return found


def texts_in_shared_memory(to: Client) -> Any:
    """Return texts that went both ways through a region."""
    raw = serialize_byte_tensor(np.array([[b"ab"], [b"c"]], np.object_))
    size = len(raw.item())
    with region(128) as (key, made):
        shared_memory.set_shared_memory_region(made, [raw])
        to.client.register_system_shared_memory("habit", key, 128)
        try:
            given = to.module.InferInput("text_input", [2, 1], "BYTES")
            given.set_shared_memory("habit", size)
            output = to.module.InferRequestedOutput("text_output")
            output.set_shared_memory("habit", 64, offset=64)
            result = tried(to.server, lambda: to.client.infer("upper", [given], outputs=[output]))
            if isinstance(result, list):
                return result
            found = shared_memory.get_contents_as_numpy(made, np.object_, [2, 1], 64)
            return [[text.decode() for text in found.ravel()], placed_output(to, result, "text_output")]
        finally:
            to.client.unregister_system_shared_memory()


def status(to: Client, name: str = "") -> Any:
    """Return the regions, by name."""
    told = to.client.get_system_shared_memory_status(name, **as_json(to))
    if to.wire == "http":
        return sorted(told, key=lambda each: each["name"])
    regions = told.get("regions", {}).values()
    whole = ("offset", "byte_size")
    return sorted(
        ({**each, **{name: int(each.get(name, 0)) for name in whole}} for each in regions),
        key=lambda each: each["name"],
    )
