"""A batch is finished, each line once and to the byte, whenever the whole server is killed."""

from __future__ import annotations

import json
import resource
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import openai
import psutil
import pytest
from mlsys_serving.processes import can_supervise

from tests.orca.survival.clients import Server, bodies

pytestmark = pytest.mark.skipif(can_supervise() is not None, reason=str(can_supervise()))


def lines() -> list[dict[str, Any]]:
    """Requests of every kind; of some, the seed is the batch's to choose; one is refused."""
    made = []
    for index, body in enumerate(bodies(16)):
        own = {key: value for key, value in body.items() if key != "stream" and (key != "seed" or index % 3)}
        if index == 5:
            own["temperature"] = 9
        made.append({"custom_id": f"l{index}", "method": "POST", "url": "/v1/completions", "body": own})
    return made


def client_of(server: Server) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key="x", max_retries=0, timeout=None)


def begin(server: Server) -> str:
    client = client_of(server)
    text = "".join(json.dumps(line) + "\n" for line in lines())
    file = client.files.create(file=("input.jsonl", text.encode()), purpose="batch")
    return client.batches.create(input_file_id=file.id, endpoint="/v1/completions", completion_window="24h").id


def finished(server: Server) -> tuple[bytes, bytes]:
    """Return the output and the errors of the server's only batch, when it has ended."""
    client = client_of(server)
    while True:
        (batch,) = client.batches.list().data
        if batch.status not in ("validating", "in_progress", "finalizing"):
            break
        time.sleep(0.02)
    assert batch.status == "completed", batch
    assert batch.request_counts is not None
    assert batch.request_counts.model_dump() == {"total": 16, "completed": 15, "failed": 1}
    assert {file.id for file in client.files.list()} == {
        batch.input_file_id,
        batch.output_file_id,
        batch.error_file_id,
    }
    return client.files.content(batch.output_file_id or "").content, client.files.content(
        batch.error_file_id or ""
    ).content


def die(start: Any, folder: Path, step: str, number: int) -> None:
    """Go on with what is in ``folder`` until the server is killed at that step."""
    try:
        with start(batches=str(folder), batch_step=[step, number]) as server:
            server.process.wait()
    except httpx.TransportError:  # before it has said that it is ready
        return


@pytest.fixture(scope="module")
def begun(start: Callable[..., Any], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a server that was killed when its batch had just begun."""
    folder = tmp_path_factory.mktemp("begun") / "journal"
    with start(batches=str(folder), batch_step=["appended", 3]) as server:
        begin(server)
        server.process.wait()
    return folder


@pytest.fixture
def copy(begun: Path, tmp_path: Path) -> Path:
    """A copy of it, to go on from."""
    return Path(shutil.copytree(begun, tmp_path / "journal"))


@pytest.fixture(scope="module")
def expected(start: Callable[..., Any], begun: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[bytes, bytes]:
    """The output and the errors of a server that nothing happens to."""
    folder = shutil.copytree(begun, tmp_path_factory.mktemp("undisturbed") / "journal")
    with start(batches=str(folder)) as server:
        found = finished(server)
    names = [json.loads(line)["custom_id"] for line in found[0].splitlines()]
    assert names == [f"l{index}" for index in range(16) if index != 5]
    return found


@pytest.mark.some_cases(5)
@pytest.mark.parametrize(
    ("step", "number"),
    [
        *((step, 1) for step in ("written", "placed", "half appended", "appended", "synced")),
        *((step, 2) for step in ("half appended", "appended", "synced")),
        ("half appended", 3),
    ],
)
def test_a_server_that_dies_as_a_batch_begins(start: Any, tmp_path: Path, step: str, number: int):
    """Either the client has not heard of the batch, or it is finished."""
    folder = str(tmp_path / "journal")
    is_known = False
    with start(batches=folder, batch_step=[step, number]) as server:
        try:
            begin(server)
            is_known = True
            finished(server)
        except openai.APIConnectionError:
            assert server.process.wait() != 0
    with start(batches=folder) as server:
        client = client_of(server)
        if not is_known and not client.batches.list().data:
            for file in client.files.list():
                client.files.delete(file.id)
            begin(server)
        finished(server)


@pytest.mark.some_cases(7)
@pytest.mark.parametrize(
    ("step", "number"),
    [
        *(("half appended", number) for number in (1, 6, 16, 17)),
        *(("appended", number) for number in (1, 9, 16, 17)),
        *(("synced", number) for number in (1, 2)),
        *(("written", number) for number in (1, 2)),
        *(("placed", number) for number in (1, 2)),
        ("ended", 1),
    ],
)
def test_a_server_that_is_killed_anywhere_changes_no_byte(
    start: Any, copy: Path, expected: tuple[bytes, bytes], step: str, number: int
):
    die(start, copy, step, number)
    with start(batches=str(copy)) as server:
        assert finished(server) == expected


def test_killed_again_and_again(start: Any, copy: Path, expected: tuple[bytes, bytes]):
    for _ in range(5):
        die(start, copy, "appended", 3)
    with start(batches=str(copy)) as server:
        assert finished(server) == expected


@pytest.mark.parametrize("damage", ["cut", "garbage", "flipped"])
def test_a_damaged_end_of_the_log(start: Any, copy: Path, expected: tuple[bytes, bytes], damage: str):
    die(start, copy, "appended", 9)
    log = copy / "journal.sqlite3-wal"
    content = log.read_bytes()
    changed = {
        "cut": content[:-7],
        "garbage": content + b"\x00garbage" * 99,
        "flipped": content[:-200] + bytes(255 - byte for byte in content[-200:-190]) + content[-190:],
    }
    log.write_bytes(changed[damage])
    with start(batches=str(copy)) as server:
        assert finished(server) == expected


@pytest.mark.parametrize("who", ["mlsys-front", "mlsys-worker"])
@pytest.mark.parametrize("is_kept", [True, False])
def test_parts_of_the_server_may_die_even_without_a_folder(start: Any, tmp_path: Path, who: str, is_kept: bool):
    with start(**({"batches": str(tmp_path)} if is_kept else {})) as server:
        begin(server)
        name = next(child for child in psutil.Process(server.process.pid).children() if child.name() == who)
        name.kill()
        if who == "mlsys-front":
            assert server.process.stdout is not None
            assert int(server.process.stdout.readline()) == server.port
        output, _ = finished(server)
        names = [json.loads(line)["custom_id"] for line in output.splitlines()]
        assert names == [f"l{index}" for index in range(16) if index != 5]


def said(found: tuple[bytes, bytes]) -> tuple[list[Any], bytes]:
    """Output lines without what tells attempts apart: a line that has made way for a client runs again."""
    lines = [json.loads(line) for line in found[0].splitlines()]
    for line in lines:
        del line["response"]["body"]["id"], line["response"]["body"]["usage"]["prompt_tokens_details"]
    return lines, found[1]


def test_a_full_disk_pauses_a_batch_and_loses_nothing(start: Any, copy: Path, expected: tuple[bytes, bytes]):
    die(start, copy, "appended", 4)
    with start(batches=str(copy), full=4096) as server:
        (front,) = [child for child in psutil.Process(server.process.pid).children() if child.name() == "mlsys-front"]
        client = client_of(server)
        with pytest.raises(openai.InternalServerError) as raised:
            client.files.create(file=("a.jsonl", b'{"a": "' + b"a" * 200_000 + b'"}\n'), purpose="batch")
        assert (raised.value.status_code, raised.value.code) == (503, "journal_unavailable")
        (batch,) = client.batches.list().data
        assert batch.status == "in_progress"
        with pytest.raises(openai.InternalServerError):
            client.batches.cancel(batch.id)
        asked = {"model": "tiny", "prompt": "a", "max_tokens": 4}
        assert client.completions.create(**asked).choices  # type: ignore[call-overload]
        front.rlimit(psutil.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
        assert said(finished(server)) == said(expected)  # a line may have made way for what a client asked
