"""``/v1/files`` and ``/v1/batches``, as the ``openai`` client sees them."""

from __future__ import annotations

import concurrent.futures
import json
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from mlsys_orca.api.server import make_app, make_service
from mlsys_orca.engine.engine import EngineConfig
from mlsys_orca.loading.load import load_model
from mlsys_orca_gateway.batches.lines import request_id_of, seed_of
from mlsys_orca_gateway.extension import open_log
from mlsys_orca_gateway.options import GatewayOptions
from mlsys_serving.http import BackgroundServer, HttpConfig

from .conftest import extensions_with

Start = Callable[..., AbstractContextManager[openai.OpenAI]]


@pytest.fixture
def start(make_gguf: Callable[..., Path], tmp_path: Path) -> Start:
    """``with start(journal options, key=..., http=..., engine=...) as client``."""
    tiny = load_model(make_gguf(), dtype="fp32")

    @contextmanager
    def started(
        key: str = "x", http: dict[str, Any] | None = None, engine: dict[str, Any] | None = None, **journal: Any
    ) -> Iterator[openai.OpenAI]:
        config = EngineConfig(**{"max_batch_size": 4, "max_model_len": 96, "policy": "chunked", **(engine or {})})
        service = make_service(tiny, "tiny", config)
        extensions = extensions_with(GatewayOptions(journal=tmp_path / "journal", **journal))
        app = make_app(service, HttpConfig(validation_status=400, **(http or {})), extensions=extensions)
        with BackgroundServer(app, drain_timeout_s=5) as server:
            yield openai.OpenAI(base_url=f"{server.url}/v1", api_key=key, max_retries=0)

    return started


def line(name: str, *, url: str = "/v1/completions", **body: Any) -> dict[str, Any]:
    body = {"model": "tiny", "prompt": f"say {name}", "max_tokens": 8, "temperature": 0, **body}
    return {"custom_id": name, "method": "POST", "url": url, "body": body}


def upload(client: openai.OpenAI, lines: list[Any], **options: Any) -> str:
    text = "".join(json.dumps(each) + "\n" for each in lines)
    return client.files.create(file=("input.jsonl", text.encode()), purpose="batch", **options).id


def begin(client: openai.OpenAI, lines: list[Any], endpoint: Any = "/v1/completions", **options: Any) -> str:
    batch = client.batches.create(
        input_file_id=upload(client, lines), endpoint=endpoint, completion_window="24h", **options
    )
    assert batch.status == "validating"
    return batch.id


def wait(client: openai.OpenAI, batch_id: str) -> openai.types.Batch:
    while (batch := client.batches.retrieve(batch_id)).status not in ("completed", "failed", "cancelled", "expired"):
        time.sleep(0.02)
    return batch


def read(client: openai.OpenAI, file_id: str | None) -> list[dict[str, Any]]:
    assert file_id is not None
    return [json.loads(each) for each in client.files.content(file_id).text.splitlines()]


def direct(client: openai.OpenAI, path: str, body: dict[str, Any]) -> Any:
    return client.post(path.removeprefix("/v1"), body=body, cast_to=httpx.Response).json()


def bare(answer: dict[str, Any]) -> dict[str, Any]:
    """An answer without what differs from call to call."""
    return {
        name: value for name, value in answer.items() if name not in ("id", "created", "created_at", "usage", "output")
    }


def test_a_batch_from_file_to_file(start: Start):
    lines = [line(f"l{index}", max_tokens=4 + index) for index in range(9)]
    lines[3] = line("sampled", temperature=1.0, n=2)
    lines[5] = line("wrong", temperature=9)
    lines[6] = line("streamed", stream=True)
    lines[7] = line("elsewhere", model="other")
    with start() as client:
        batch = wait(client, begin(client, lines, metadata={"night": "1"}))
        assert (batch.status, batch.model, batch.metadata) == ("completed", "tiny", {"night": "1"})
        assert batch.request_counts is not None
        assert batch.request_counts.model_dump() == {"total": 9, "completed": 6, "failed": 3}
        output, errors = read(client, batch.output_file_id), read(client, batch.error_file_id)
        names = [each["custom_id"] for each in lines]
        bad = ["wrong", "streamed", "elsewhere"]
        assert [each["custom_id"] for each in output] == [name for name in names if name not in bad]
        assert [each["custom_id"] for each in errors] == bad
        assert [each["response"]["status_code"] for each in errors] == [400, 400, 404]
        assert [each["response"]["body"]["error"]["param"] for each in errors] == ["temperature", "stream", "model"]
        for each in output:
            index = names.index(each["custom_id"])
            assert each["error"] is None
            assert each["id"] == each["response"]["request_id"] == request_id_of(batch.id, index)
            asked = lines[index]["body"]
            if each["custom_id"] == "sampled":
                asked = {**asked, "seed": seed_of(batch.id, index)}
            assert bare(each["response"]["body"]) == bare(direct(client, "/v1/completions", asked))
        wrong = client.with_options(max_retries=0)
        with pytest.raises(openai.BadRequestError) as raised:
            direct(wrong, "/v1/completions", lines[5]["body"])
        ours, theirs = errors[0]["response"]["body"]["error"], raised.value.response.json()["error"]
        assert {**ours, "request_id": ""} == {**theirs, "request_id": ""}


@pytest.mark.parametrize(
    ("endpoint", "body"),
    [
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "hello"}], "prompt": None}),
        ("/v1/responses", {"input": "hello", "max_output_tokens": 6, "prompt": None, "max_tokens": None}),
    ],
)
def test_other_endpoints(start: Start, endpoint: str, body: dict[str, Any]):
    made = line("a", url=endpoint, **body)
    made["body"] = {name: value for name, value in made["body"].items() if value is not None}
    with start() as client:
        batch = wait(client, begin(client, [made], endpoint))
        (found,) = read(client, batch.output_file_id)
        expected = direct(client, endpoint, made["body"])
        assert bare(found["response"]["body"]) == bare(expected)


def test_a_line_is_answered_whole(start: Start):
    made = line("a", url="/v1/responses")
    made["body"] = {"model": "tiny", "input": "hello", "background": True}
    with start() as client:
        batch = wait(client, begin(client, [made], "/v1/responses"))
        (found,) = read(client, batch.error_file_id)
        assert found["response"]["body"]["error"]["param"] == "background"


def test_a_batch_of_bad_lines_fails_as_a_whole(start: Start):
    lines = [
        line("a"),
        line("a"),
        {**line("b"), "method": "GET"},
        line("c", url="/v1/chat/completions"),
        {key: value for key, value in line("d").items() if key != "body"},
        {key: value for key, value in line("e").items() if key != "custom_id"},
    ]
    with start() as client:
        batch = wait(client, begin(client, lines))
        assert batch.status == "failed"
        assert batch.errors is not None
        assert batch.errors.data is not None
        assert [(error.line, error.code, error.param) for error in batch.errors.data] == [
            (2, "duplicate_custom_id", "custom_id"),
            (3, "invalid_method", "method"),
            (4, "url_mismatch", "url"),
            (5, "missing_required_parameter", "body"),
            (6, "missing_required_parameter", "custom_id"),
        ]
        assert batch.output_file_id is None
        with pytest.raises(openai.ConflictError, match="failed"):
            client.batches.cancel(batch.id)


@pytest.mark.parametrize(
    ("content", "says"),
    [(b'{"a": 1}\nnot JSON\n', "line 2"), (b"", "no request"), (b'{"a": 1}\n\n[1]\n', "line 3"), (b"\xff\n", "line 1")],
)
def test_files_that_are_no_lines_of_json_are_refused(start: Start, content: bytes, says: str):
    with start() as client:
        with pytest.raises(openai.BadRequestError, match=says):
            client.files.create(file=("a.jsonl", content), purpose="batch")
        assert client.files.list().data == []


def test_files(start: Start):
    with start() as client:
        ids = [upload(client, [line("a")]) for _ in range(5)]
        later = upload(client, [line("a")], expires_after={"anchor": "created_at", "seconds": 3600})
        about = client.files.retrieve(later)
        assert about.expires_at == about.created_at + 3600
        assert about.model_dump(include={"filename", "purpose", "status"}) == {
            "filename": "input.jsonl",
            "purpose": "batch",
            "status": "processed",
        }
        assert len(client.files.content(later).content) == about.bytes
        found = [file.id for file in client.files.list(limit=2, order="asc")]  # over all pages
        assert sorted(found) == sorted([*ids, later])
        assert client.files.list(purpose="batch_output").data == []
        assert client.files.delete(ids[0]).deleted
        for refused in (client.files.retrieve, client.files.content, client.files.delete, client.batches.retrieve):
            with pytest.raises(openai.NotFoundError):
                refused(ids[0])
        with pytest.raises(openai.NotFoundError):
            client.batches.create(input_file_id=ids[0], endpoint="/v1/completions", completion_window="24h")
        for options in (
            {"purpose": "fine-tune"},
            {"purpose": "batch", "expires_after": {"anchor": "created_at", "seconds": 1}},
        ):
            with pytest.raises(openai.BadRequestError):
                client.files.create(file=("a.jsonl", b"{}"), **options)  # type: ignore[arg-type]
        with pytest.raises(openai.BadRequestError, match="encoder"):
            client.batches.create(input_file_id=ids[1], endpoint="/v1/embeddings", completion_window="24h")


def test_uploads_may_be_larger_than_bodies_and_lines_may_not(start: Start):
    with start(http={"max_body_nbytes": 2000}) as client:
        batch = wait(client, begin(client, [line("large", prompt="a" * 3000), line("small")]))
        (error,) = read(client, batch.error_file_id)
        assert (error["custom_id"], error["response"]["status_code"]) == ("large", 413)
        with pytest.raises(openai.APIStatusError) as raised:
            direct(client, "/v1/completions", line("large", prompt="a" * 3000)["body"])
        assert raised.value.status_code == 413


def test_a_batch_is_cancelled_and_what_was_answered_stays(start: Start):
    lines = [line(f"l{index}", max_tokens=60, ignore_eos=True) for index in range(3000)]  # some ten seconds
    with start() as client:
        name = begin(client, lines)
        while not (counts := client.batches.retrieve(name).request_counts) or not counts.completed:
            time.sleep(0.01)
        source = client.batches.retrieve(name).input_file_id
        with pytest.raises(openai.ConflictError, match="reads the file"):
            client.files.delete(source)
        assert client.batches.cancel(name).status in ("cancelling", "cancelled")
        batch = wait(client, name)
        assert batch.status == "cancelled"
        output, errors = read(client, batch.output_file_id), read(client, batch.error_file_id)
        assert {each["error"]["code"] for each in errors} == {"batch_cancelled"}
        assert sorted(each["custom_id"] for each in [*output, *errors]) == sorted(each["custom_id"] for each in lines)
        assert batch.request_counts is not None
        assert batch.request_counts.completed == len(output) > 0


def test_a_server_goes_on_where_the_last_one_stopped(start: Start):
    lines = [line(f"l{index}", temperature=1.0, max_tokens=40, ignore_eos=True) for index in range(40)]
    with start() as client:
        name = begin(client, lines)
        while not (counts := client.batches.retrieve(name).request_counts) or counts.completed < 5:
            time.sleep(0.01)
    with start() as client:
        batch = wait(client, name)
        assert batch.status == "completed"
        output = read(client, batch.output_file_id)
        assert [each["custom_id"] for each in output] == [each["custom_id"] for each in lines]
        for index in (0, 17, 39):
            asked = {**lines[index]["body"], "seed": seed_of(name, index)}
            assert bare(output[index]["response"]["body"]) == bare(direct(client, "/v1/completions", asked))
    with start() as client:  # and what has ended stays
        assert client.batches.retrieve(name) == batch
        assert read(client, batch.output_file_id) == output
        assert [each.id for each in client.batches.list()] == [name]


def test_a_batch_that_is_a_day_old_expires(start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("mlsys_orca_gateway.batches.routes.WINDOW_S", 0)
    with start() as client:
        batch = wait(client, begin(client, [line("a"), line("b")]))
        assert batch.status == "expired"
        assert [each["error"]["code"] for each in read(client, batch.error_file_id)] == ["batch_expired"] * 2


def test_keys_own_what_they_make(start: Start, tmp_path: Path):
    with start(key="first", http={"api_keys": frozenset({"first", "second"})}) as client:
        name = begin(client, [line("a")])
        batch = wait(client, name)
        other = client.with_options(api_key="second")
        assert other.files.list().data == []
        assert other.batches.list().data == []
        assert len(client.files.list().data) == 2
        for refused in (
            lambda: other.batches.retrieve(name),
            lambda: other.batches.cancel(name),
            lambda: other.files.content(batch.output_file_id or ""),
            lambda: other.files.delete(batch.input_file_id),
            lambda: other.batches.create(
                input_file_id=batch.input_file_id, endpoint="/v1/completions", completion_window="24h"
            ),
        ):
            with pytest.raises(openai.NotFoundError):
                refused()
    kept = [path for path in (tmp_path / "journal").rglob("*") if path.is_file()]
    assert kept
    assert not [path for path in kept if b"first" in path.read_bytes()]
    assert {path.stat().st_mode & 0o777 for path in kept} == {0o600}
    assert {path.stat().st_mode & 0o777 for path in (tmp_path / "journal").rglob("*") if path.is_dir()} == {0o700}
    with start() as client:  # without keys all belongs to all
        assert client.batches.retrieve(name).status == "completed"


def test_answers_that_a_batch_stores_belong_to_its_key(start: Start):
    def asked(client: openai.OpenAI, **body: Any) -> dict[str, Any]:
        ask = line("a", url="/v1/responses", input="say a", max_output_tokens=4, **body)
        for field in ("prompt", "max_tokens"):
            del ask["body"][field]
        batch = wait(client, begin(client, [ask], "/v1/responses"))
        (answer,) = read(client, batch.output_file_id or batch.error_file_id)
        return dict(answer["response"])

    with start(key="first", http={"api_keys": frozenset({"first", "second"})}) as client:
        first = asked(client, store=True)
        assert first["status_code"] == 200, first
        stored = first["body"]["id"]
        assert asked(client, previous_response_id=stored)["status_code"] == 200
        assert asked(client.with_options(api_key="second"), previous_response_id=stored)["status_code"] == 404


def test_clients_do_not_wait_for_batches(start: Start):
    """Neither in the queue, where no request may wait, nor behind lines that take long."""
    lines = [line(f"l{index}", max_tokens=80, ignore_eos=True) for index in range(3000)]
    with start(engine={"max_waiting": 0}) as client, concurrent.futures.ThreadPoolExecutor(4) as pool:
        name = begin(client, lines)
        while not (counts := client.batches.retrieve(name).request_counts) or not counts.completed:
            time.sleep(0.01)
        asked = line("x", max_tokens=3)["body"]
        expected = bare(direct(client, "/v1/completions", asked))
        for _ in range(5):
            for answer in pool.map(lambda _: direct(client, "/v1/completions", asked), range(4)):
                assert bare(answer) == expected
        assert client.batches.cancel(name).status in ("cancelling", "cancelled")  # it has been overtaken
        batch = wait(client, name)
        output, errors = read(client, batch.output_file_id), read(client, batch.error_file_id)
        names = [each["custom_id"] for each in lines]
        assert sorted(names.index(each["custom_id"]) for each in [*output, *errors]) == list(range(3000))
        direct_one = bare(direct(client, "/v1/completions", lines[0]["body"]))
        by_name = {each["custom_id"]: each["response"]["body"]["choices"] for each in output}
        assert by_name["l0"] == direct_one["choices"]


def test_what_is_old_is_forgotten(start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("mlsys_orca_gateway.batches.runner._SWEEP_S", 0.0)
    monkeypatch.setattr("mlsys_orca_gateway.batches.runner._REST_S", 0.05)
    with start(journal_keep=5) as client:
        begin(client, [line("a")])
        while client.batches.list().data or client.files.list().data:
            time.sleep(0.05)
    folder = tmp_path / "journal"
    found = [path.relative_to(folder) for path in folder.rglob("*") if path.is_file()]
    assert [path.name for path in found] == ["journal.sqlite3"]
    with open_log(GatewayOptions(journal=folder)) as log:
        assert log.rows("SELECT (SELECT count(*) FROM batches), (SELECT count(*) FROM files)") == [(0, 0)]


def test_files_that_find_no_room_are_refused(start: Start):
    with start(journal_size=3000) as client:
        with pytest.raises(openai.InternalServerError) as raised:
            upload(client, [line("a", prompt="a" * 4000)])
        assert raised.value.status_code == 503
        assert raised.value.code == "journal_unavailable"
        assert client.files.list().data == []


def test_two_servers_do_not_share_a_folder(start: Start):
    with start() as client:
        assert client.files.list().data == []
        with pytest.raises(Exception, match="another server"), start():
            pass
