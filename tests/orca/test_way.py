"""The page ``docs/ways/prompt.md`` lists the files that a chat passes, from the socket to the kernel and back."""

from __future__ import annotations

from pathlib import Path

import httpx
from mlsys_orca.api.server import make_app, make_service
from mlsys_orca.engine.engine import EngineConfig
from mlsys_orca.loading.load import load_model
from mlsys_serving.http import BackgroundServer, HttpConfig

from tests.ways import ROOT, files_of_page, files_passed, num_lines

PAGE = "docs/ways/prompt.md"


def test_a_prompts_way(tiny_gguf: Path) -> None:
    config = EngineConfig(max_batch_size=4, max_model_len=96, policy="chunked", num_threads=1)
    service = make_service(load_model(tiny_gguf, dtype="fp32"), "tiny", config)
    server = BackgroundServer(make_app(service, HttpConfig(validation_status=400)))
    body = {"model": "tiny", "messages": [{"role": "user", "content": "hello"}], "max_tokens": 4, "temperature": 0}

    url: list[str] = []  # the client's, no part of the way

    def call() -> None:
        assert httpx.post(f"{url[0]}/v1/chat/completions", json=body).status_code == 200
        assert httpx.get(f"{url[0]}/health/live").status_code == 200  # by then the first request is in the log

    def start() -> None:
        server.start()
        url.append(server.url)
        call()  # what is made at first use is no part of the way

    try:
        passed = files_passed(call, start=start)
    finally:
        server.stop()
    assert sorted(files_of_page(PAGE)) == sorted(passed)
    assert f"{len(passed)} Python files" in (ROOT / PAGE).read_text()
    assert num_lines(passed) < 9_600
