"""Adapters by model name over HTTP, several in one batch."""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from types import ModuleType
from typing import Any

import httpx
import pytest
from mlsys_orca.api.control import ModelControl
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


@pytest.fixture
def control(make_gguf: Callable[..., Path], tmp_path: Path, made: ModuleType) -> Iterator[Controlled]:
    """A server without adapters, which takes some, and three directories of adapters."""
    for seed, name in enumerate(("first", "second")):
        made.write_adapter(tmp_path / name, seed, list(made.PRODUCTS))
    loaded = load_model(make_gguf(), dtype="fp32", backend="torch")
    loaded = replace(loaded, model=AdaptedDecoder(loaded.model, {}))
    config = EngineConfig(max_batch_size=8, max_model_len=128, policy="chunked")
    app = make_app(
        make_service(loaded, "tiny", config), HttpConfig(validation_status=400), control=ModelControl(is_allowed=True)
    )
    with BackgroundServer(app) as server:
        yield Controlled(server.url, tmp_path)


@dataclass
class Controlled:
    url: str
    folder: Path

    def load(self, name: str, directory: str, **fields: Any) -> httpx.Response:
        body = {"lora_name": name, "lora_path": str(self.folder / directory), **fields}
        return httpx.post(f"{self.url}/v1/load_lora_adapter", json=body, timeout=None)

    def unload(self, name: str) -> httpx.Response:
        return httpx.post(f"{self.url}/v1/unload_lora_adapter", json={"lora_name": name}, timeout=None)

    def ask(self, model: str, **fields: Any) -> httpx.Response:
        body = {"model": model, "prompt": "a long prompt, of several blocks of tokens", "max_tokens": 20} | fields
        body |= {"temperature": 0, "ignore_eos": True, "logprobs": 0}
        return httpx.post(f"{self.url}/v1/completions", json=body, timeout=None)

    def answer(self, model: str) -> tuple[list[str], int]:
        """Return an answer's tokens, and how many of the prompt's were found kept."""
        whole = self.ask(model).json()
        return whole["choices"][0]["logprobs"]["tokens"], whole["usage"]["prompt_tokens_details"]["cached_tokens"]


def test_adapters_come_and_go(control: Controlled) -> None:
    assert control.ask("x").status_code == 404
    answer = control.load("x", "first")
    assert (answer.status_code, answer.text) == (200, "Success: LoRA adapter 'x' added successfully.")
    assert [card["id"] for card in httpx.get(f"{control.url}/v1/models").json()["data"]] == ["tiny", "x"]
    assert control.load("y", "second").status_code == 200
    answers = [control.answer(name)[0] for name in ("tiny", "x", "y")]
    assert answers[0] != answers[1] != answers[2] != answers[0]
    answer = control.unload("x")
    assert (answer.status_code, answer.text) == (200, "Success: LoRA adapter 'x' removed successfully.")
    assert control.ask("x").json()["error"]["code"] == "model_not_found"
    assert control.unload("x").status_code == 404
    assert [control.answer(name)[0] for name in ("tiny", "y")] == [answers[0], answers[2]]


def test_kept_prefixes_of_an_adapter_are_never_another_ones_of_its_name(control: Controlled) -> None:
    control.load("other", "second")
    second, _ = control.answer("other")
    control.load("x", "first")
    first, num_cached = control.answer("x")
    assert num_cached == 0
    assert control.answer("x") == (first, 32)
    control.unload("x")
    control.load("x", "second")
    assert control.answer("x") == (second, 0)
    assert control.load("x", "first", load_inplace=True).status_code == 200
    assert control.answer("x")[0] == first


def test_a_request_that_runs_ends_under_its_adapter(control: Controlled) -> None:
    control.load("x", "first")
    expected = control.ask("x", max_tokens=80).json()["choices"][0]["logprobs"]["tokens"]
    found = []
    body = {"model": "x", "prompt": "a long prompt, of several blocks of tokens", "max_tokens": 80, "stream": True}
    body |= {"temperature": 0, "ignore_eos": True, "logprobs": 0}
    with httpx.stream("POST", f"{control.url}/v1/completions", json=body, timeout=None) as response:
        for line in response.iter_lines():
            if line.startswith("data: {"):
                found += json.loads(line[6:])["choices"][0]["logprobs"]["tokens"]
            if len(found) == 1:
                assert control.load("x", "second", load_inplace=True).status_code == 200
                assert control.unload("x").status_code == 200
                assert control.ask("x").status_code == 404
    assert found == expected


def test_what_cannot_be_loaded_is_refused_and_changes_nothing(
    control: Controlled, made: ModuleType, make_gguf: Callable[..., Path]
) -> None:
    control.load("x", "first")
    made.write_adapter(control.folder / "dora", 3, ["self_attn.q_proj"], use_dora=True)
    made.write_adapter(control.folder / "pickled", 3, ["self_attn.q_proj"])
    (control.folder / "pickled" / "adapter_model.safetensors").rename(control.folder / "pickled" / "adapter_model.bin")
    made.write_adapter(control.folder / "damaged", 3, ["self_attn.q_proj"])
    (control.folder / "damaged" / "adapter_model.safetensors").write_bytes(b"x" * 100)
    refused = [
        ("x", "second", "already"),
        ("tiny", "first", "the name of a model here"),
        ("y", "nowhere", "no PEFT adapter"),
        ("y", "dora", "use_dora"),
        ("y", "pickled", "no adapter_model.safetensors"),
        ("y", "damaged", "no readable adapter_model.safetensors"),
    ]
    for name, directory, says in refused:
        answer = control.load(name, directory)
        assert answer.status_code == 400
        assert says in answer.json()["error"]["message"]
    assert [card["id"] for card in httpx.get(f"{control.url}/v1/models").json()["data"]] == ["tiny", "x"]
    native = make_service(load_model(make_gguf(), dtype="fp32"), "tiny", EngineConfig(max_model_len=96))
    for is_allowed, status, says in ((True, 400, "--enable-lora"), (False, 403, "--model-control")):
        app = make_app(native, HttpConfig(), control=ModelControl(is_allowed=is_allowed))
        with BackgroundServer(app) as server:
            answer = Controlled(server.url, control.folder).load("x", "first")
            assert answer.status_code == status
            assert says in answer.json()["error"]["message"]
        native = make_service(load_model(make_gguf(), dtype="fp32"), "tiny", EngineConfig(max_model_len=96))
