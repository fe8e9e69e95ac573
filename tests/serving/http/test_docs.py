from __future__ import annotations

import re
import tomllib
from dataclasses import fields
from pathlib import Path
from typing import Any

import httpx
import typer
from mlsys_serving.cli import ServerOptions
from mlsys_serving.http import BackgroundServer, runtime_of
from typer.testing import CliRunner

PAGE = (Path(__file__).parents[3] / "docs" / "http.md").read_text()


def test_the_example_of_the_page_works() -> None:
    code = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)[0]
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


# Options of servers that queue requests, or speak the Open Inference Protocol.
NOT_OF_THE_EXAMPLE = {
    *("--help", "--max-waiting", "--grpc-port", "--model-control", "--cascade"),
    *("--model-configs", "--no-ui"),
}


def test_the_command_of_the_page_has_every_servers_options() -> None:
    code = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)[1]
    namespace: dict[str, Any] = {"__name__": "example"}
    exec(compile(code, "docs/http.md", "exec", dont_inherit=True), namespace)
    app = typer.Typer()
    app.command()(namespace["serve"])
    said = CliRunner().invoke(app, ["--help"], terminal_width=200).output
    for name in re.findall(r"`(--[a-z-]+)`", PAGE.partition("## Options of every server")[2].partition("\n## ")[0]):
        assert name in said or name in NOT_OF_THE_EXAMPLE, name


def test_the_example_of_a_settings_file_is_taken() -> None:
    text = (Path(__file__).parents[3] / "examples" / "server.toml").read_text()
    given = tomllib.loads(re.sub(r"^# (?=\w+ =)", "", text, flags=re.MULTILINE))
    known = {field.name: field for field in fields(ServerOptions)}
    assert set(given) - {"max_waiting"} <= set(known)
    assert len(given) > 10
