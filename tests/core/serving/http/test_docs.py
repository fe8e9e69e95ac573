from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import httpx
from mlsys_core.serving.http import BackgroundServer, runtime_of

PAGE = (Path(__file__).parents[4] / "docs" / "http.md").read_text()


def test_the_example_of_the_page_works() -> None:
    [code] = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
    namespace: dict[str, Any] = {"__name__": "example"}
    exec(compile(code, "docs/http.md", "exec", dont_inherit=True), namespace)
    with BackgroundServer(namespace["app"]) as server:
        headers = {"authorization": "Bearer secret"}
        response = httpx.post(f"{server.url}/v1/words", json={"prompt": "one two"}, headers=headers)
        assert response.text == "data: one\n\ndata: two\n\n"
        assert httpx.post(f"{server.url}/v1/words", json={}).json()["error"]["code"] == "missing_api_key"
        metrics = httpx.get(f"{server.url}/metrics").text
    assert runtime_of(namespace["app"]).config.title == "words"
    for name in re.findall(r"^\| `(mlsys_http_\w+)` \|", PAGE, re.MULTILINE):
        assert f"# TYPE {name} " in metrics
