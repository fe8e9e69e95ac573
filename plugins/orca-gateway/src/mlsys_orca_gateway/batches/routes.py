"""``/v1/files``: the input and output of batches; ``/v1/batches``: a file's requests, answered within a day."""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import Callable
from pathlib import PurePath
from typing import Annotated, Any, Literal

from fastapi import Query, Request
from fastapi.responses import FileResponse
from mlsys_core.errors import InvalidInputError
from mlsys_orca.api.fields import Label
from mlsys_serving.http import HttpError, Router
from mlsys_serving.http.bodies import Body, body_too_large
from pydantic import BaseModel, Field
from starlette.datastructures import FormData, UploadFile

from mlsys_orca_gateway.batches.files import FileObject, KeptFile, pieces, unknown_file
from mlsys_orca_gateway.batches.lifetime import Batches
from mlsys_orca_gateway.batches.lines import check_shape
from mlsys_orca_gateway.batches.records import WINDOW_S, Batch, KeptBatch
from mlsys_orca_gateway.batches.store import Caller, page, unknown_batch
from mlsys_orca_gateway.log import LogUnavailableError

MAX_FILE_NBYTES = 200 * 10**6  # as OpenAI's
MAX_UPLOAD_NBYTES = MAX_FILE_NBYTES + 10**5  # with the form around it
_MIN_KEEP_S, _MAX_KEEP_S = 3600, 30 * 24 * 3600  # that clients may ask for
_MAX_NAME_CHARS = 255
_FORM = {
    "requestBody": {
        "required": True,
        "content": {
            "multipart/form-data": {
                "schema": {
                    "type": "object",
                    "required": ["file", "purpose"],
                    "properties": {
                        "file": {"type": "string", "format": "binary", "description": "JSON lines, a request each."},
                        "purpose": {"type": "string", "enum": ["batch"]},
                        "expires_after[anchor]": {"type": "string", "enum": ["created_at"]},
                        "expires_after[seconds]": {"type": "integer"},
                    },
                }
            }
        },
    }
}


class FileList(BaseModel):
    """Answer of ``GET /v1/files``."""

    object: Literal["list"] = "list"
    data: list[FileObject]
    first_id: str | None
    last_id: str | None
    has_more: bool


class FileDeleted(BaseModel):
    """Answer of ``DELETE /v1/files/ID``."""

    id: str
    object: Literal["file"] = "file"
    deleted: Literal[True] = True


def add_routes(router: Router, batches: Batches) -> None:
    """Add the routes below ``/v1/files`` and ``/v1/batches``."""
    _add_files(router, batches)
    _add_batches(router, batches)


def _add_files(router: Router, batches: Batches) -> None:

    def find(file_id: str, request: Request) -> KeptFile:
        kept = batches.files.get(file_id)
        if kept is None or not Caller(request, batches.salt).may_see(kept.owner):
            raise unknown_file(file_id)
        return kept

    @router.post("/v1/files", openapi_extra=_FORM)
    async def upload_file(request: Request) -> FileObject:
        """Take a file with a request of a batch on each line."""
        owner = Caller(request, batches.salt).owner
        await asyncio.to_thread(batches.files.check_room, 0)  # before it is read
        try:
            async with request.form(max_files=1, max_fields=8) as form:
                upload, keep_s = _fields(form)
                if (upload.size or 0) > MAX_FILE_NBYTES:
                    raise body_too_large(MAX_FILE_NBYTES)
                kept = await asyncio.to_thread(_keep(batches, upload, owner, keep_s))
        except OSError as error:
            raise LogUnavailableError(f"the file cannot be kept ({error.strerror}): try again later") from error
        await batches.files.add(kept)
        return kept.file

    @router.get("/v1/files")
    async def list_files(
        request: Request,
        after: Annotated[str | None, Query(max_length=128)] = None,
        limit: Annotated[int, Query(ge=1, le=10_000)] = 10_000,
        order: Literal["asc", "desc"] = "desc",
        purpose: Annotated[str | None, Query(max_length=64)] = None,
    ) -> FileList:
        """List the files of the caller's key."""
        caller = Caller(request, batches.salt)
        all_of_them = batches.files.all() if order == "asc" else batches.files.all()[::-1]
        own = [each.file for each in all_of_them if caller.may_see(each.owner)]
        own = [file for file in own if purpose in (None, file.purpose)]
        data, has_more = page(own, id_of=lambda file: file.id, after=after, limit=limit)
        ends = (data[0].id, data[-1].id) if data else (None, None)
        return FileList(data=data, first_id=ends[0], last_id=ends[1], has_more=has_more)

    @router.get("/v1/files/{file_id}")
    async def get_file(file_id: str, request: Request) -> FileObject:
        """Describe a file."""
        return find(file_id, request).file

    @router.get("/v1/files/{file_id}/content", response_class=FileResponse)
    async def get_file_content(file_id: str, request: Request) -> FileResponse:
        """Return a file as it is."""
        kept = find(file_id, request)
        path = batches.files.path(file_id)
        return FileResponse(path, media_type="application/jsonl", filename=kept.file.filename)

    @router.delete("/v1/files/{file_id}")
    async def delete_file(file_id: str, request: Request) -> FileDeleted:
        """Delete a file that no running batch reads."""
        find(file_id, request)
        readers = [each.kept.batch.id for each in batches.store.running.values()]
        readers = [name for name in readers if batches.store.running[name].kept.batch.input_file_id == file_id]
        if readers:
            raise HttpError(
                f"the batch {readers[0]} reads the file {file_id}: cancel it first, or wait for its end",
                http_status=409,
                error_code="file_in_use",
            )
        batches.files.delete(file_id)
        return FileDeleted(id=file_id)


def _keep(batches: Batches, upload: UploadFile, owner: str | None, keep_s: int | None) -> Callable[[], KeptFile]:
    """Return the function that checks and writes an upload, in a thread."""

    def keep() -> KeptFile:
        check_shape(upload.file)
        upload.file.seek(0)
        name = PurePath((upload.filename or "").replace("\\", "/")).name[:_MAX_NAME_CHARS]
        return batches.files.write(
            pieces(upload.file), filename=name or "input.jsonl", purpose="batch", owner=owner, keep_s=keep_s
        )

    return keep


def _fields(form: FormData) -> tuple[UploadFile, int | None]:
    """Return the file of an upload and the seconds for which it is to be kept.

    Raises:
        HttpError: 400, a field is missing, unknown, or has a value that is not allowed.
    """
    values: dict[str, Any] = dict(form)
    upload, purpose = values.pop("file", None), values.pop("purpose", None)
    anchor, seconds = (values.pop(f"expires_after[{name}]", None) for name in ("anchor", "seconds"))
    if not isinstance(upload, UploadFile):
        raise _wrong("file", "the form needs a field 'file' with the file (multipart/form-data)")
    if purpose != "batch":
        raise _wrong("purpose", f"the purpose is 'batch', the only one of this server, and not {str(purpose)[:64]!r}")
    if values:
        raise _wrong(next(iter(values))[:64], f"there is no such field: {next(iter(values))[:64]!r}")
    if anchor is None and seconds is None:
        return upload, None
    if anchor != "created_at":
        raise _wrong("expires_after", "the anchor of expires_after is 'created_at', the only one")
    if not (isinstance(seconds, str) and seconds.isascii() and seconds.isdecimal() and len(seconds) < 9):
        raise _wrong("expires_after", "the seconds of expires_after are a whole number")
    return upload, checked_keep_s(int(seconds), "expires_after")


def checked_keep_s(seconds: int, param: str) -> int:
    """Return the seconds that a client wants a file to be kept.

    Raises:
        HttpError: 400, they are too few or too many.
    """
    if not _MIN_KEEP_S <= seconds <= _MAX_KEEP_S:
        raise _wrong(param, f"the seconds of {param} are from {_MIN_KEEP_S} to {_MAX_KEEP_S}, not {seconds}")
    return seconds


def _wrong(param: str, message: str) -> HttpError:
    return HttpError(message, http_status=400, error_code="invalid_value", param=param)


Endpoint = Literal["/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/embeddings"]


class ExpiresAfter(Body):
    """Time for which the output is kept."""

    anchor: Literal["created_at"]
    seconds: int


class CreateBatch(Body):
    """``POST /v1/batches``."""

    input_file_id: str = Field(min_length=1, max_length=128)
    endpoint: Endpoint
    completion_window: Literal["24h"]
    metadata: Annotated[dict[Annotated[str, Field(max_length=64)], Label], Field(max_length=16)] | None = None
    output_expires_after: ExpiresAfter | None = None


class BatchList(BaseModel):
    """Answer of ``GET /v1/batches``."""

    object: Literal["list"] = "list"
    data: list[Batch]
    first_id: str | None
    last_id: str | None
    has_more: bool


def _add_batches(router: Router, batches: Batches) -> None:

    def find(batch_id: str, request: Request) -> KeptBatch:
        kept = batches.store.get(batch_id)
        if kept is None or not Caller(request, batches.salt).may_see(kept.owner):
            raise unknown_batch(batch_id)
        return kept

    @router.post("/v1/batches")
    async def create_batch(body: CreateBatch, request: Request) -> Batch:
        """Begin to answer the requests of a file that was uploaded."""
        caller = Caller(request, batches.salt)
        kept_file = batches.files.get(body.input_file_id)
        if kept_file is None or not caller.may_see(kept_file.owner):
            raise unknown_file(body.input_file_id)
        if kept_file.file.purpose != "batch":
            raise InvalidInputError(f"input_file_id: {body.input_file_id} is the output of a batch")
        if body.endpoint not in (await asyncio.to_thread(request.app.openapi))["paths"]:
            raise InvalidInputError(
                f"endpoint: this server has no {body.endpoint}: install mlsys-encoders, and serve --encoder NAME"
            )
        keep = body.output_expires_after
        created = int(time.time())
        batch = Batch(
            id=f"batch_{uuid.uuid4().hex}",
            endpoint=body.endpoint,
            input_file_id=body.input_file_id,
            created_at=created,
            expires_at=created + WINDOW_S,
            metadata=body.metadata,
        )
        output_keep_s = None if keep is None else checked_keep_s(keep.seconds, "output_expires_after")
        await batches.store.create(KeptBatch(batch=batch, owner=caller.owner, output_keep_s=output_keep_s))
        batches.runner.wake()
        return batch

    @router.get("/v1/batches")
    async def list_batches(
        request: Request,
        after: Annotated[str | None, Query(max_length=128)] = None,
        limit: Annotated[int, Query(ge=1, le=100)] = 20,
    ) -> BatchList:
        """List the batches of the caller's key, the newest first."""
        caller = Caller(request, batches.salt)
        own = [kept.batch for kept in batches.store.all() if caller.may_see(kept.owner)]
        data, has_more = page(own, id_of=lambda batch: batch.id, after=after, limit=limit)
        ends = (data[0].id, data[-1].id) if data else (None, None)
        return BatchList(data=data, first_id=ends[0], last_id=ends[1], has_more=has_more)

    @router.get("/v1/batches/{batch_id}")
    async def get_batch(batch_id: str, request: Request) -> Batch:
        """Return a batch as it is now."""
        return find(batch_id, request).batch

    @router.post("/v1/batches/{batch_id}/cancel")
    async def cancel_batch(batch_id: str, request: Request) -> Batch:
        """Run no more requests of a batch; what has been answered stays."""
        status = find(batch_id, request).batch.status
        if status != "cancelling":
            running = batches.store.running.get(batch_id)
            if running is None or status not in ("validating", "in_progress"):
                raise HttpError(
                    f"the batch {batch_id} is {status}: there is nothing to cancel",
                    http_status=409,
                    error_code="batch_not_running",
                )
            await running.move(running.kept.moved("cancelling", time.time()))
            batches.runner.wake()
        return find(batch_id, request).batch
