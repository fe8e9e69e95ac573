"""A model with Python before and behind it: answers directly and served, batched, errors by their fault."""

from __future__ import annotations

import io
import re
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import torch
from mlsys_core.errors import InvalidInputError
from mlsys_dvabatch import Service
from PIL import Image
from torch import Tensor, nn


@pytest.fixture(autouse=True)
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLSYS_CACHE_DIR", str(tmp_path / "cache"))
    torch.manual_seed(0)


def net() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, 3)).eval()


def label(scores: Any) -> dict[str, Any]:
    return {"label": int(scores.argmax()), "scores": scores}


def test_requests_are_read_batched_and_answered():
    model = net()
    service = Service(
        model, example=torch.zeros(1, 4), preprocess=lambda body: torch.tensor(body["features"]), postprocess=label,
        num_threads=1, max_batch_size=8,
    )  # fmt: skip
    rows = torch.randn(12, 4)
    with torch.inference_mode():
        expected = model(rows)
    assert service({"features": rows[0].tolist()})["label"] == int(expected[0].argmax())
    for _ in range(2):  # a service may be served again
        with service.background() as server, ThreadPoolExecutor(12) as pool:

            def ask(row: Tensor, url: str = server.url) -> Any:
                return httpx.post(f"{url}/predict", json={"features": row.tolist()}, timeout=60).json()

            answers = list(pool.map(ask, rows))
            tensor = {"name": "input", "datatype": "FP32", "shape": [1, 4], "data": rows[0].tolist()}
            name = httpx.get(f"{server.url}/v2/models/model").json()["inputs"][0]["name"]
            oip = httpx.post(f"{server.url}/v2/models/model/infer", json={"inputs": [tensor | {"name": name}]}).json()
        assert [each["label"] for each in answers] == expected.argmax(-1).tolist()
        np.testing.assert_allclose([each["scores"] for each in answers], expected, atol=1e-5)
        np.testing.assert_allclose(oip["outputs"][0]["data"], expected[0], atol=1e-5)


def test_faults_are_the_clients_or_the_servers():
    def read(body: Any) -> Any:
        if isinstance(body, bytes):
            return np.load(io.BytesIO(body))
        if body.get("is_broken"):
            raise OSError("a secret path")
        return body["features"]

    service = Service(net(), example=torch.zeros(1, 4), preprocess=read, num_threads=1)
    with service.background() as server:

        def post(**given: Any) -> httpx.Response:
            return httpx.post(f"{server.url}/predict", timeout=60, **given)

        raw = io.BytesIO()
        np.save(raw, np.ones(4, np.float32))
        image = post(content=raw.getvalue(), headers={"content-type": "application/octet-stream"})
        assert image.json() == post(json={"features": [1, 1, 1, 1]}).json()
        assert len(image.json()) == 3
        for body, says in (
            ({}, "the request was refused: KeyError: 'features'"),
            ({"features": [1, 2]}, "takes float32 [4], got float32 [2]"),
            ({"features": ["a"] * 4}, "takes float32 [4], got"),
        ):
            refused = post(json=body)
            assert refused.status_code == 400
            assert says in refused.json()["error"]
        assert post(content=b"{", headers={"content-type": "application/json"}).status_code == 400
        broken = post(json={"is_broken": True})
        assert broken.status_code == 500
        assert "secret" not in broken.text
    with pytest.raises(InvalidInputError, match="got float64 numbers for an input of int64"):
        Service(Words().eval(), example=torch.zeros(1, 3, dtype=torch.int64))([1.5, 2, 3])


class Reciprocal(nn.Module):
    """Gives infinity for 0."""

    def forward(self, x: Tensor) -> Tensor:
        return 1 / x


def test_numbers_that_json_has_not_are_refused_and_named():
    shaped: dict[str, Any] = {
        "sum": lambda y: {"sum": y.sum()},
        "log": lambda y: {"said": "NaN", "log": torch.tensor(y - 1).log()},
    }
    for name, postprocess in shaped.items():
        service = Service(Reciprocal().eval(), example=torch.ones(1, 2), postprocess=postprocess, num_threads=1)
        with service.background() as server:
            got = {x: httpx.post(f"{server.url}/predict", json=[0.5, x], timeout=60) for x in (0, 1, 0.25)}
        assert got[0.25].status_code == 200
        assert (got[0].status_code, got[0].json()) == (
            400,
            {"error": "the model's answer to this request is not finite (NaN or infinity); check its input"},
        )
        assert got[1].status_code == (200 if name == "sum" else 400)
        if name == "log":
            assert "a number of the answer is not finite" in got[1].json()["error"]
            assert got[0.25].json()["said"] == "NaN"


class Words(nn.Module):
    """Two heads, the first behind half of the work."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.first, self.deeper = nn.Embedding(9, 8), nn.Linear(8, 2), nn.Linear(8, 8)
        self.last = nn.Linear(8, 2)

    def forward(self, words: Tensor) -> tuple[Tensor, Tensor]:
        hidden = self.words(words).mean(1)
        return self.first(hidden) * 20, self.last(torch.relu(self.deeper(hidden)))


def test_requests_leave_at_the_first_head_that_is_sure():
    model = Words().eval()
    rows = torch.randint(0, 9, (8, 3))
    service = Service(
        model, example=torch.zeros(1, 3, dtype=torch.int64), policy="early-exit", exit_confidence=0.95, num_threads=1,
        postprocess=lambda result: {"scores": result[0], "head": int(result[1])},
    )  # fmt: skip
    with torch.inference_mode():
        first, last = model(rows)
    sure = first.softmax(-1).amax(-1) >= 0.95
    assert 0 < int(sure.sum()) < 8
    with service.background() as server:
        served = [httpx.post(f"{server.url}/predict", json=row.tolist(), timeout=60).json() for row in rows]
    for answer, own, row in zip(served, map(service, rows.tolist()), range(8), strict=True):
        assert answer["head"] == own["head"] == int(not sure[row])
        np.testing.assert_allclose(answer["scores"], (first if sure[row] else last)[row], atol=1e-5)


@pytest.mark.parametrize("number", [1, 2], ids=["texts", "images"])
def test_the_examples_of_the_docs_are_short_and_serve(number: int):
    page = Path(__file__).parents[3] / "docs" / "services.md"
    block = re.findall(r"```python\n(.*?)```", page.read_text(), re.DOTALL)[number]
    assert len([line for line in block.splitlines() if line.strip()]) <= 15
    names: dict[str, Any] = {}
    exec(block, names)
    service = names["service"]
    with service.background() as server:
        if number == 1:
            sent: list[dict[str, Any]] = [{"json": {"text": text}} for text in ("The train is late", "thank you")]
            bad: dict[str, Any] = {"json": {"words": "late"}}
            own = [service(each["json"]) for each in sent]
        else:
            pictures = []
            for colour in ("red", "blue"):
                file = io.BytesIO()
                Image.new("RGB", (80, 50), colour).save(file, "PNG")
                pictures.append(file.getvalue())
            sent = [{"content": each, "headers": {"content-type": "image/png"}} for each in pictures]
            bad = {"content": b"no image", "headers": {"content-type": "image/png"}}
            own = [np.asarray(service(each)).tolist() for each in pictures]
        got = [httpx.post(f"{server.url}/predict", timeout=60, **each).json() for each in sent]
        refused = httpx.post(f"{server.url}/predict", timeout=60, **bad)
    if number == 1:
        assert got == own
    else:
        np.testing.assert_allclose(got, own, atol=1e-5)
        assert not np.allclose(got[0], got[1])
    assert refused.status_code == 400
    assert ("the body is no image" if number == 2 else "KeyError: 'text'") in refused.json()["error"]


def test_what_cannot_be_served_is_refused():
    with pytest.raises(InvalidInputError, match="a module needs example="):
        Service(net())
    with pytest.raises(InvalidInputError, match=r"call \.eval"):
        Service(net().train(), example=torch.zeros(1, 4))
    with pytest.raises(InvalidInputError, match="has no exits"):
        Service(net(), example=torch.zeros(1, 4), policy="early-exit")
    with pytest.raises(InvalidInputError, match="example= is for modules"):
        Service("unet", example=torch.zeros(1, 4))
