"""Configurations, statistics and the repository, by ``tritonclient``."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from typing import Any

import numpy as np
from tritonclient.utils import InferenceServerException

from tests.conformance.oip.habits.clients import Client, as_json, ask, floats, tried


def config(to: Client, name: str, version: str = "") -> Any:
    """Return a model's configuration."""
    told = to.client.get_model_config(name, version, **as_json(to))
    return told["config"] if to.wire == "grpc" else told


def configs(to: Client) -> Any:
    """Return the fields that clients read."""
    found = {}
    for name in ("add", "echo", "repeat", "versioned", "slow"):
        told = config(to, name)
        found[name] = {
            "name": told["name"],
            "max_batch_size": told.get("max_batch_size", 0),
            "input": [_tensor(each) for each in told["input"]],
            "output": [_tensor(each) for each in told["output"]],
            "decoupled": told.get("model_transaction_policy", {}).get("decoupled", False),
            "version_policy": told.get("version_policy"),
        }
    return found


def _tensor(node: Any) -> list[Any]:
    return [node["name"], node["data_type"], [int(size) for size in node["dims"]], node.get("optional", False)]


def stats(to: Client, name: str) -> Any:
    """Return the statistics of a model's greatest version."""
    return to.client.get_inference_statistics(name, **as_json(to))["model_stats"][-1]


COUNTS = ("success", "fail", "queue", "compute_input", "compute_infer", "compute_output")


def counted(to: Client) -> Any:
    """Return how three requests change the statistics: two rows, one row, and one that is wrong."""

    def numbers() -> list[int]:
        told = stats(to, "add")
        inference = told.get("inference_stats", {})
        return [
            int(told.get("inference_count", 0)),
            int(told.get("execution_count", 0)),
            *(int(inference.get(name, {}).get("count", 0)) for name in COUNTS),
        ]

    before = numbers()
    for array in (np.ones((2, 3), np.float32), floats(1), np.ones((9, 1), np.float32)):
        ask(to, "add", array, "sum", name="a")
    after, end = numbers(), time.monotonic() + 20
    while after[2] - before[2] < 2 and time.monotonic() < end:  # Triton counts an answer after it has been sent
        time.sleep(0.05)
        after = numbers()
    told = stats(to, "add")
    sizes = [int(each["batch_size"]) for each in told["batch_stats"]]
    changes = [late - early for early, late in zip(before, after, strict=True)]
    return dict(zip(("inferences", "executions", *COUNTS), changes, strict=True)) | {
        "batch sizes": [size in sizes for size in (1, 2)],
        "time of the last": int(told["last_inference"]) > 1_600_000_000_000,
        "fields": sorted(each for each in told if each not in ("memory_usage", "response_stats")),
    }


def index(to: Client) -> Any:
    """Return name, version and state of each model."""
    told = to.client.get_model_repository_index(**as_json(to))
    models = told if to.wire == "http" else told["models"]
    return sorted(
        [each["name"], each.get("version", ""), each.get("state", ""), each.get("reason", "")] for each in models
    )


def loading(to: Client) -> Any:
    """Return what comes of loading and unloading, step by step."""
    client, found = to.client, {}

    def note(name: str, act: Callable[[], Any]) -> None:
        found[name] = tried(to.server, act)

    def entry() -> Any:
        lines = [each for each in index(to) if each[0] == "upper"]
        return [[*line[:3], bool(line[3])] for line in lines]

    def infer() -> Any:
        text = np.array([[b"a"]], np.object_)
        return ask(to, "upper", text, "text_output", name="text_input", datatype="BYTES") if to.wire else None

    def decoded() -> Any:
        told = infer()
        return told if isinstance(told[0], str) else [text.decode() for text in told[0]]

    note("unload", lambda: client.unload_model("upper"))
    end = time.monotonic() + 20
    while client.is_model_ready("upper") and time.monotonic() < end:
        time.sleep(0.05)
    while any(line[2] == "UNLOADING" for line in index(to)) and time.monotonic() < end:
        time.sleep(0.05)  # the model's process ends
    note("index then", entry)
    note("ready then", lambda: client.is_model_ready("upper"))
    note("infer then", decoded)
    note("metadata then", lambda: bool(client.get_model_metadata("upper")))
    note("configuration then", lambda: bool(config(to, "upper")))
    note("statistics then", lambda: bool(stats(to, "upper")))
    note("unload again", lambda: client.unload_model("upper"))
    note("unload an unknown model", lambda: client.unload_model("nope"))
    note("load", lambda: client.load_model("upper"))
    note("index after it", entry)
    note("infer after it", decoded)
    note("load again", lambda: client.load_model("upper"))
    note("load an unknown model", lambda: client.load_model("nope"))
    note("load with no configuration", lambda: client.load_model("upper", config="nonsense"))
    note("infer after that", decoded)
    client.load_model("upper")
    note("unload with dependents", lambda: client.unload_model("upper", unload_dependents=True))
    note("load at last", lambda: client.load_model("upper"))
    return found


# Configurations that a load request brings for the model "add".
GIVEN: dict[str, dict[str, Any]] = {
    "fewer rows": {"max_batch_size": 3},
    "rows below 0": {"max_batch_size": -1},
    "an unknown field": {"nope": 1},
    "true as a number": {"max_batch_size": True},
}


def configured(to: Client) -> Any:
    """Return, for each configuration, whether a model is loaded with it."""
    client, found = to.client, {}
    own = client.get_model_config("add")
    for name, given in GIVEN.items():
        try:
            client.load_model("add", config=json.dumps(given if own["backend"] == "mlsys" else {**own, **given}))
        except InferenceServerException as error:
            found[name] = "refused" if to.server.note(str(error.message())) else "no words"
        else:
            found[name] = "loaded"
    client.load_model("add")
    return found
