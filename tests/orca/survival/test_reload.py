"""A served model is replaced while clients ask: none notices, and every answer is whole, one model's or the other's."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
from mlsys_orca.api.resume.keeper import AnswerKeeper
from mlsys_serving.processes import can_supervise

from tests.orca.conftest import tiny_metadata, tiny_tensors, write_gguf
from tests.orca.survival.clients import answer, bodies
from tests.orca.survival.commands import Served, served
from tests.processes import by_age

pytestmark = [pytest.mark.skipif(can_supervise() is not None, reason=str(can_supervise())), pytest.mark.slow]
LONG = {"model": "tiny", "prompt": "hello", "max_tokens": 1500, "temperature": 0, "ignore_eos": True, "stream": True}


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Two models of the same shape with other weights."""
    folder = tmp_path_factory.mktemp("models")
    metadata = tiny_metadata() | {"llama.context_length": 2048}
    return [str(write_gguf(folder / f"{seed}.gguf", metadata, tiny_tensors(seed))) for seed in range(2)]


@pytest.fixture
def server(models: list[str]) -> Iterator[Served]:
    with served(models[0], "--name", "tiny", "--dtype", "fp32", "--model-control", "--kv-tokens", "32768") as server:
        yield server


async def one_by_one(url: str, asked: list[dict[str, Any]]) -> list[Any]:
    async with httpx.AsyncClient(timeout=None) as client:
        return [await answer(client, url, body) for body in asked]


async def asking(url: str, asked: list[dict[str, Any]], until: threading.Event, found: list[tuple[int, Any]]) -> None:
    """Ask all again and again until told to stop, each on a connection of its own that is kept."""

    async def ask(number: int, body: dict[str, Any]) -> None:
        async with httpx.AsyncClient(timeout=None) as client:
            while not until.is_set():
                found.append((number, await answer(client, url, body)))

    await asyncio.gather(*(ask(number, body) for number, body in enumerate(asked)))


def test_no_answer_is_lost_cut_or_mixed(server: Served, models: list[str]) -> None:
    asked = [*bodies(7), LONG, LONG | {"prompt": "x", "temperature": 0.8, "seed": 3}]
    expected = [asyncio.run(one_by_one(server.url, asked))]
    found: list[tuple[int, Any]] = []
    done = threading.Event()
    clients = threading.Thread(target=lambda: asyncio.run(asking(server.url, asked, done, found)))
    clients.start()
    for number in (1, 0, 1):
        ran = server.reload("--model", models[number])
        assert ran.returncode == 0, ran.stderr
        lines = ran.stdout.splitlines()
        assert lines[0] == "loading ..."
        assert lines[1].startswith("ready: ")
        assert lines[-1].endswith("done")
    done.set()
    clients.join()
    expected.append(asyncio.run(one_by_one(server.url, asked)))
    assert expected[0] != expected[1]
    by_model = [[number for number, answer in found if answer == each[number]] for each in expected]
    assert len(by_model[0]) + len(by_model[1]) == len(found)
    for each in by_model:
        assert set(each) == set(range(len(asked)))


def test_a_generation_that_retires_keeps_its_promises(server: Served, models: list[str]) -> None:
    """Its workers may die as before: its requests go on at its standby."""
    expected = asyncio.run(one_by_one(server.url, [LONG]))

    async def kill_while_it_drains() -> list[Any]:
        async with httpx.AsyncClient(timeout=None) as client:
            running = [asyncio.create_task(answer(client, server.url, LONG)) for _ in range(4)]
            (old,) = server.processes("mlsys-generatio")
            workers = [child for child in old.children() if child.name() == "mlsys-worker"]
            reloaded = (await client.post(f"{server.url}/v1/reload", json={"model": models[1]})).json()
            assert reloaded["generation"] == 2
            last = asyncio.create_task(answer(client, server.url, LONG))
            min(workers, key=by_age).kill()
            return [*await asyncio.gather(*running), await last]

    found = asyncio.run(kill_while_it_drains())
    assert found[:-1] == expected * 4
    assert found[-1] != expected[0]


def test_batches_go_on_in_the_next_generation(server: Served) -> None:
    lines = [
        {
            "custom_id": str(number),
            "method": "POST",
            "url": "/v1/completions",
            "body": {"model": "tiny", "prompt": f"{number}", "max_tokens": 1000, "temperature": 0, "ignore_eos": True},
        }
        for number in range(24)
    ]
    expected = {line["custom_id"]: server.post(line["url"], **line["body"]).json()["choices"] for line in lines}
    content = "\n".join(map(json.dumps, lines)).encode()
    with httpx.Client(base_url=server.url, timeout=None) as client:
        file = client.post("/v1/files", files={"file": ("lines.jsonl", content)}, data={"purpose": "batch"}).json()
        asked = {"input_file_id": file["id"], "endpoint": "/v1/completions", "completion_window": "24h"}
        batch = client.post("/v1/batches", json=asked).json()
        for number in (2, 3):
            assert client.post("/v1/reload", json={}).json()["generation"] == number
            while server.get("/v1/reload")["status"] != "serving":
                pass
        while (batch := client.get(f"/v1/batches/{batch['id']}").json())["status"] != "completed":
            assert batch["status"] in ("validating", "in_progress", "finalizing")
        output = client.get(f"/v1/files/{batch['output_file_id']}/content").text
    found = {line["custom_id"]: line["response"]["body"]["choices"] for line in map(json.loads, output.splitlines())}
    assert found == expected


def test_answers_in_the_background_are_there_after_a_reload(models: list[str], tmp_path: Path) -> None:
    options = ["--name", "tiny", "--dtype", "fp32", "--model-control", "--journal", str(tmp_path / "journal")]
    body = {"model": "tiny", "input": "hello", "temperature": 0, "max_output_tokens": 1500}
    with served(models[0], *options) as server:
        expected = server.post("/v1/responses", **body).json()["output"][0]["content"]
        asked = [server.post("/v1/responses", **body, background=True).json()["id"] for _ in range(8)]
        assert server.post("/v1/reload", model=models[1]).status_code == 200
        for each in asked:
            while (answer := server.get(f"/v1/responses/{each}")).get("status") != "completed":
                assert (
                    "error" not in answer or answer["error"] is None or answer["error"]["code"] == "response_not_found"
                )
            assert answer["output"][0]["content"] == expected
        assert server.post("/v1/responses", **body).json()["output"][0]["content"] != expected


def test_a_front_that_retires_waits_for_answers_without_a_connection() -> None:
    async def wait() -> None:
        keeper, answer = AnswerKeeper(), SimpleNamespace(ended_s=None)
        keeper._answers["x"] = answer  # type: ignore[assignment]
        finishing = asyncio.create_task(keeper.finish())
        await asyncio.sleep(0.2)
        assert not finishing.done()
        answer.ended_s = 1.0
        await finishing

    asyncio.run(wait())


def test_a_reload_that_fails_says_why_and_changes_nothing(server: Served, tmp_path: Path) -> None:
    before = server.get("/v1/models")
    for path, says in (("/nowhere", "'/nowhere' is neither a known model"), (__file__, "no loader takes it")):
        ran = server.reload("--model", path)
        assert ran.returncode == 1
        assert says in " ".join(ran.stderr.split())
    ran = server.reload("--adapter", f"a={tmp_path}")
    assert ran.returncode == 1
    assert "is no PEFT adapter" in " ".join(ran.stderr.split())
    assert server.get("/v1/models") == before
    status = server.get("/v1/reload")
    assert (status["status"], status["generation"]) == ("serving", 1)
    assert len(server.processes("mlsys-generatio")) == 1


def test_who_may_reload_and_what(models: list[str]) -> None:
    with served(models[0]) as server:
        for answer in (server.post("/v1/reload"), httpx.get(f"{server.url}/v1/reload")):
            assert (answer.status_code, answer.json()["error"]["code"]) == (403, "model_control_off")
        ran = server.reload()
        assert ran.returncode == 1
        assert "--model-control" in ran.stderr
    with served(models[0], "--model-control", "--request-timeout-s", "0.2") as server:  # the server loads on
        ran = server.reload("--model", models[1], "--name", "other")
        assert ran.returncode == 0, ran.stderr
        assert [card["id"] for card in server.get("/v1/models")["data"]] == ["other"]
        assert server.reload("--model", "/nowhere").returncode == 1
    with served(models[0], "--model-control", "--single-process") as server:
        answer = server.post("/v1/reload")
        assert answer.status_code == 400
        assert "one process" in answer.json()["error"]["message"]
