"""``/v1/batches``: a file's requests, answered within a day."""

from __future__ import annotations

import asyncio
import time
import uuid
from typing import Annotated, Literal

from fastapi import Query, Request
from mlsys_core.errors import InvalidInputError
from mlsys_orca.api.fields import Label
from mlsys_serving.http import HttpError, Router
from mlsys_serving.http.bodies import Body
from pydantic import BaseModel, Field

from mlsys_orca_gateway.batches.file_routes import checked_keep_s
from mlsys_orca_gateway.batches.files import unknown_file
from mlsys_orca_gateway.batches.lifetime import Batches
from mlsys_orca_gateway.batches.records import WINDOW_S, Batch, KeptBatch
from mlsys_orca_gateway.batches.store import Caller, page, unknown_batch

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


def add_routes(router: Router, batches: Batches) -> None:
    """Add the routes below ``/v1/batches``."""

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
