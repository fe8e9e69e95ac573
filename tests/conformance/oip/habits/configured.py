"""Configurations that a load request brings: which are taken, and which are refused."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from tritonclient.utils import InferenceServerException

from tests.conformance.oip.habits.clients import Client

X = {"name": "x", "data_type": "TYPE_FP32", "dims": [1]}
ZEROS = {"data_type": "TYPE_FP32", "dims": [1], "zero_data": True}


def levels(levels: int, default: int) -> dict[str, Any]:
    """Return a configuration of priorities."""
    return {"dynamic_batching": {"priority_levels": levels, "default_priority_level": default}}


def warmed_up(rows: int = 1, **more: Any) -> dict[str, Any]:
    """Return a configuration with a warm-up."""
    return {"model_warmup": [{"name": "w", "batch_size": rows, "inputs": {"x": {**ZEROS, **more}}}]}


GIVEN: dict[str, tuple[str, dict[str, Any]]] = {
    "a default priority without levels": ("warmed", levels(0, 2)),
    "levels without a default": ("warmed", levels(3, 0)),
    "a default beyond the levels": ("warmed", levels(3, 5)),
    "one level": ("warmed", levels(1, 1)),
    "the latest 0 versions": ("warmed", {"version_policy": {"latest": {"num_versions": 0}}}),
    "no version": ("warmed", {"version_policy": {"specific": {}}}),
    "a version that is not there": ("warmed", {"version_policy": {"specific": {"versions": [7]}}}),
    "another name": ("warmed", {"name": "other"}),
    "fewer rows": ("warmed", {"max_batch_size": 3}),
    "rows below 0": ("warmed", {"max_batch_size": -1}),
    "a warm-up": ("warmed", warmed_up()),
    "a warm-up of too many rows": ("warmed", warmed_up(9)),
    "a warm-up of another type": ("warmed", warmed_up(data_type="TYPE_INT32")),
    "a warm-up of another size": ("warmed", warmed_up(dims=[2])),
    "a warm-up of an open size": ("warmed", warmed_up(dims=[-1])),
    "an input twice": ("warmed", {"input": [X, X]}),
    "an input without a name": ("warmed", {"input": [{**X, "name": ""}]}),
    "a size of 0": ("warmed", {"input": [{**X, "dims": [0]}]}),
    "an unknown field": ("warmed", {"nope": 1}),
    "true as a number": ("warmed", {"max_batch_size": True}),
    "a cache of several responses": ("repeat", {"response_cache": {"enable": True}}),
}


def configured(to: Client) -> Any:
    """Return, for each configuration, whether a model is loaded with it."""
    client, found = to.client, {}

    def load(model: str, config: Mapping[str, Any]) -> str:
        try:
            client.load_model(model, config=json.dumps(config))
        except InferenceServerException as error:
            return "refused" if to.server.note(str(error.message())) else "no words"
        return "loaded"

    own = {model: client.get_model_config(model) for model in ("warmed", "repeat")}
    for name, (model, given) in GIVEN.items():
        told = own[model]
        found[name] = load(model, given if told["backend"] == "mlsys" else {**told, **given})
    for model in own:
        client.load_model(model)
    return found
