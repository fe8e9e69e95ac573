"""A model of cells with Python before and behind it: answers directly and served, batched, errors by their fault."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from mlsys_batchmaker import Service
from mlsys_batchmaker.engine import Engine
from mlsys_batchmaker.models.sequence import lstm_model
from mlsys_batchmaker.models.store import save_model
from mlsys_core.errors import InvalidInputError

WORDS = {"a": 1, "cat": 2, "sat": 3}
TEXTS = ["a cat sat", "sat", "a a a a a", "cat a"]


def read(body: Any) -> dict[str, Any]:
    return {"words": [WORDS[word] for word in body["text"].split()]}


def test_requests_are_read_batched_and_answered():
    model = lstm_model(num_words=5, hidden_size=8)
    with Engine(model) as engine:
        futures = [engine.submit({"words": np.array(read({"text": text})["words"])}) for text in TEXTS]
        expected = [future.result().outputs["hidden"] for future in futures]
    with Service(model, preprocess=read, postprocess=lambda outputs: {"state": outputs["hidden"]}) as service:
        np.testing.assert_allclose(service({"text": TEXTS[0]})["state"], expected[0], atol=1e-6)
        with service.background() as server, ThreadPoolExecutor(4) as pool:

            def post(body: Any) -> httpx.Response:
                return httpx.post(f"{server.url}/predict", json=body, timeout=60)

            answers = list(pool.map(lambda text: post({"text": text}).json()["state"], TEXTS))
            for body, says in (
                ({"text": "a dog"}, "the request was refused: KeyError: 'dog'"),
                ({"text": ""}, "words"),
                ({}, "KeyError: 'text'"),
            ):
                refused = post(body)
                assert refused.status_code == 400
                assert says in refused.json()["error"]
            assert "mlsys_batchmaker_cells_total" in httpx.get(f"{server.url}/metrics").text
        np.testing.assert_allclose(answers, expected, atol=1e-6)


def test_directories_are_served(tmp_path: Path):
    model = lstm_model(num_words=5, hidden_size=8)
    save_model(model, tmp_path / "small")
    with Service(tmp_path / "small") as service, Service(model) as own:
        words = {"words": [1, 2, 3]}
        np.testing.assert_allclose(service(words)["hidden"], own(words)["hidden"], atol=1e-6)
        for body, says in (
            ([1, 2], "got list; the model takes tensors by name: words"),
            ({"word": 1}, "there is no input 'word'; the model takes words"),
            ({}, "the input 'words' is missing"),
            ({"words": [1.5]}, "words takes int64, got float64"),
            ({"words": 3}, r"words has shape \[-1\]"),
        ):
            with pytest.raises(InvalidInputError, match=says):
                service(body)
    with pytest.raises(InvalidInputError, match="is no model: give a model's directory"):
        Service(tmp_path)
