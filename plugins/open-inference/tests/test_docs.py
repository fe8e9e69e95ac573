from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import httpx
import mlsys_open_inference as oip
from mlsys_open_inference.descriptions import EXTENSIONS
from mlsys_serving.http import BackgroundServer

PAGE = (Path(__file__).parents[3] / "docs" / "open-inference.md").read_text()


def test_the_example_of_the_page_works() -> None:
    [code] = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
    namespace: dict[str, Any] = {"__name__": "example"}
    exec(compile(code, "docs/open-inference.md", "exec", dont_inherit=True), namespace)
    tensor = {"name": "x", "datatype": "FP32", "shape": [1, 2], "data": [1, 2]}
    with BackgroundServer(namespace["app"]) as server:
        answer = httpx.post(f"{server.url}/v2/models/double/infer", json={"inputs": [tensor]}).json()
        metrics = httpx.get(f"{server.url}/metrics").text
    assert answer["outputs"][0]["data"] == [2, 4]
    for name in re.findall(r"`((?:nv|mlsys)_inference_\w+)`", PAGE):
        assert f"# TYPE {name} " in metrics, name


def test_every_public_name_can_be_imported() -> None:
    assert set(oip.__all__) <= set(dir(oip))
    for name in oip.__all__:
        assert getattr(oip, name) is not None


def test_the_page_names_every_extension() -> None:
    for extension in EXTENSIONS:
        assert f"`{extension}`" in PAGE
