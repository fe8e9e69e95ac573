"""The extension of Orca's server: its routes, and its life around the database."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from fastapi import FastAPI, Request, Response
from mlsys_core import __version__
from mlsys_orca.api.answers import STREAMED, owner_of
from mlsys_orca.api.intake import intake_route
from mlsys_orca.api.service import ModelService
from mlsys_serving.extensions import Extension, Service
from mlsys_serving.http import Router

from mlsys_orca_gateway.batches import routes as batch_routes
from mlsys_orca_gateway.batches.lifetime import Batches
from mlsys_orca_gateway.batches.store import SCHEMA as BATCHES
from mlsys_orca_gateway.log import Log, make_folder
from mlsys_orca_gateway.messages import routes as messages
from mlsys_orca_gateway.options import GatewayOptions
from mlsys_orca_gateway.responses import routes as responses
from mlsys_orca_gateway.responses.store import ResponseStore
from mlsys_orca_gateway.streams.journal import SCHEMA as STREAMS
from mlsys_orca_gateway.streams.journal import AnswerJournal
from mlsys_orca_gateway.streams.keeper import AnswerKeeper


def extend(service: Service) -> Extension | None:
    """Add Responses, Messages, files and batches to a server, and keep its streams; None: it has no language model."""
    if service.engine is None:
        return None
    model: ModelService = service.engine
    options: GatewayOptions = service.options
    keeper = AnswerKeeper() if options.journal_keep is None else AnswerKeeper(keep_s=options.journal_keep)
    stored, batches = ResponseStore(), Batches(model, options)
    model.streams = keeper

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        with await asyncio.to_thread(open_log, options) as log:
            try:
                if options.journal is not None:
                    keeper.journal = AnswerJournal(log)
                    stored.keep_in(keeper.journal)
                await keeper.start(app)
                async with batches.open(app, log):
                    yield
            finally:
                await keeper.close()

    router = Router(tags=["Orca"], route_class=intake_route(model))
    responses.add_routes(router, model, keeper, stored)
    messages.add_routes(router, model, keeper)
    batch_routes.add_routes(router, batches)

    @router.get("/v1/streams/{key}", responses=STREAMED)
    async def stream(key: str, request: Request) -> Response:
        """Return the events of a stream that was asked for, behind the one that Last-Event-ID names or all of them."""
        if (rest := await keeper.go_on(request)) is not None:
            return rest
        return keeper.respond(request, keeper.get(key, owner_of(request)))

    @router.get("/version")
    async def version() -> dict[str, str]:
        """Return the version of this server, where vLLM has it."""
        return {"version": __version__}

    return Extension(
        routers=[router],
        lifespan=lifespan,
        on_drain=[batches.drain],
        uploads={"/v1/files": batch_routes.MAX_UPLOAD_NBYTES},
        error_formats={messages.MESSAGES_PATH: messages.MESSAGES_FORMAT},
    )


def open_log(options: GatewayOptions) -> Log:
    """Open the database of a server's folder.

    Raises:
        InvalidInputError: it cannot be written, is another server's, or no database of this version.
    """
    make_folder(options.folder)
    return Log(
        options.folder / "journal.sqlite3",
        STREAMS + BATCHES,
        sync=options.sync,  # type: ignore[arg-type]  # checked with the options
        max_nbytes=options.journal_size,
        reach=options.reach,
    )
