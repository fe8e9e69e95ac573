"""Adapters by model name over HTTP, several in one batch."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from types import ModuleType

import httpx
import pytest
from mlsys_orca.api.server import make_app, make_service
from mlsys_orca.engine.engine import EngineConfig
from mlsys_orca.loading.load import load_model
from mlsys_orca.model.adapters import AdaptedDecoder
from mlsys_serving.http import BackgroundServer, HttpConfig


@pytest.fixture(scope="module")
def made() -> ModuleType:
    """The tests of adapters without a server, for what they write."""
    path = Path(__file__).parents[1] / "test_adapters.py"
    spec = importlib.util.spec_from_file_location("orca_test_adapters", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_a_request_names_its_adapter_as_its_model(
    make_gguf: Callable[..., Path], tmp_path: Path, made: ModuleType
) -> None:
    made.write_adapter(tmp_path / "a", 1, list(made.PRODUCTS))
    made.write_adapter(tmp_path / "b", 2, ["mlp.down_proj"])
    loaded = load_model(make_gguf(), dtype="fp32", backend="torch")
    loaded = replace(loaded, model=AdaptedDecoder(loaded.model, {"a": tmp_path / "a", "b": tmp_path / "b"}))
    config = EngineConfig(max_batch_size=8, max_model_len=96, policy="chunked")
    app = make_app(make_service(loaded, "tiny", config), HttpConfig(validation_status=400))
    with BackgroundServer(app) as server:

        def ask(model: str) -> str:
            body = {"model": model, "prompt": "hello", "max_tokens": 20, "temperature": 0, "ignore_eos": True}
            response = httpx.post(f"{server.url}/v1/completions", json=body | {"logprobs": 0}, timeout=None)
            assert response.json()["model"] == model
            return response.json()["choices"][0]["logprobs"]["tokens"]

        alone = {model: ask(model) for model in ("tiny", "a", "b")}
        assert alone["a"] != alone["tiny"] != alone["b"] != alone["a"]
        with ThreadPoolExecutor(6) as pool:
            names = ["tiny", "a", "b"] * 2
            assert list(pool.map(ask, names)) == [alone[name] for name in names]
        cards = httpx.get(f"{server.url}/v1/models").json()["data"]
        assert [(card["id"], card["parent"]) for card in cards] == [("tiny", None), ("a", "tiny"), ("b", "tiny")]
        body = {"model": "c", "prompt": "x"}
        assert httpx.post(f"{server.url}/v1/completions", json=body).json()["error"]["code"] == "model_not_found"
