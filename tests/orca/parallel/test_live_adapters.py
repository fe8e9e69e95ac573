"""A server of a divided model with adapters: at the start and at run time, through deaths and refusals."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from itertools import count
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from mlsys_serving.processes import can_supervise
from safetensors.torch import save_file

from tests.orca.parallel.conftest import HIDDEN, NUM_LAYERS
from tests.orca.survival.clients import answer
from tests.orca.survival.commands import Served, served

pytestmark = [pytest.mark.skipif(can_supervise() is not None, reason=str(can_supervise())), pytest.mark.slow]
NAMES = ("six", "start", "later")
MODULES = ("self_attn.q_proj", "self_attn.o_proj", "mlp.down_proj")


def write_adapter(path: Path, seed: int, *, rows: int = HIDDEN) -> Path:
    """A PEFT directory of rank 4 for the six-layer model; of another model with other ``rows``."""
    path.mkdir()
    generator, tensors = torch.Generator().manual_seed(seed), {}
    for layer in range(NUM_LAYERS):
        for module in MODULES:
            stem = f"base_model.model.model.layers.{layer}.{module}"
            tensors[f"{stem}.lora_A.weight"] = torch.randn((4, HIDDEN), generator=generator) * 0.2
            tensors[f"{stem}.lora_B.weight"] = torch.randn((rows, 4), generator=generator) * 0.2
    save_file(tensors, path / "adapter_model.safetensors")
    raw = {"peft_type": "LORA", "r": 4, "lora_alpha": 8, "target_modules": list(MODULES), "bias": "none"}
    (path / "adapter_config.json").write_text(json.dumps(raw))
    return path


def load(server: Served, path: Path, name: str) -> httpx.Response:
    return server.post("/v1/load_lora_adapter", lora_name=name, lora_path=str(path))


def names(server: Served) -> set[str]:
    return {card["id"] for card in server.get("/v1/models")["data"]}


async def ask(url: str, model: str, on_event: Callable[[], None] = lambda: None) -> list[Any]:
    body = {"model": model, "prompt": "hello hello", "max_tokens": 40, "temperature": 0}
    async with httpx.AsyncClient(timeout=None) as client:
        return await answer(client, url, body | {"ignore_eos": True, "stream": True, "logprobs": 2}, on_event)


def test_adapters_of_a_divided_model(six_layers: Path, tmp_path: Path) -> None:
    start, later = (write_adapter(tmp_path / name, seed) for seed, name in enumerate(("start", "later")))
    wrong = write_adapter(tmp_path / "wrong", 2, rows=HIDDEN * 2)
    options = ["--name", "six", "--dtype", "fp32", "--model-control", "--max-model-len", "128"]
    options += ["--adapter", f"start={start}"]
    with served(str(six_layers), *options, "--tensor-parallel", "2") as server:
        refused = load(server, wrong, "wrong")
        assert refused.status_code == 400
        assert "is of another model" in refused.json()["error"]["message"]
        assert "\n" not in refused.json()["error"]["message"]
        assert names(server) == {"six", "start"}
        assert load(server, later, "later").status_code == 200
        expected = {name: asyncio.run(ask(server.url, name)) for name in NAMES}
        assert len({str([event["text"] for event in found]) for found in expected.values()}) == 3

        async def killed(kind: str, name: str) -> list[Any]:
            events = count()

            def on_event() -> None:
                if next(events) == 0:
                    server.processes(kind)[0].kill()

            return await ask(server.url, name, on_event)

        for kind, name in (("mlsys-worker", "later"), ("mlsys-rank", "later"), ("orca 0.1", "start")):
            assert asyncio.run(killed(kind, name)) == expected[name]
        assert server.post("/v1/unload_lora_adapter", lora_name="start").status_code == 200
        assert names(server) == {"six", "later"}
