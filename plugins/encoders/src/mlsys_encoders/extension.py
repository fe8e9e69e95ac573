"""Server extensions: routes for texts beside DVABatch's models, and an encoder beside Orca's language model."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated

import typer
from mlsys_core.cli import completion
from mlsys_serving.extensions import Extension, ExtensionOptions, Service

if TYPE_CHECKING:
    from fastapi import FastAPI


@dataclass(frozen=True, slots=True)
class EncoderOptions(ExtensionOptions):
    """Options of the encoder beside a language model."""

    encoder: Annotated[
        str | None,
        typer.Option(
            help="An encoder beside the model, for embeddings, ranks and scores of texts.",
            autocompletion=completion.models,
        ),
    ] = None

    def check(self, *, has_instances: bool) -> None:
        """Refuse an encoder that is not there, before the model is loaded."""
        from mlsys_core.config import settings
        from mlsys_core.models import resolve_model

        if self.encoder is not None:
            resolve_model(self.encoder, settings().cache_dir)


def beside_models(service: Service) -> Extension:
    """Return the routes for texts of a server of models, in the words of three protocols."""
    from mlsys_serving.http import ErrorFormat, Router

    from mlsys_encoders.serve.tei_routes import TEI_ERRORS, TEI_PATHS, add_tei_routes
    from mlsys_encoders.serve.text_routes import add_model_list, add_text_routes
    from mlsys_encoders.serve.text_service import TextService

    texts, router = TextService(service.models, service.threads), Router()
    add_model_list(router, texts)
    add_text_routes(router, texts, service.threads)
    add_tei_routes(router, texts, service.threads)
    openai = dict.fromkeys(("/v1/", "/v2/rerank", "/score"), ErrorFormat())
    return Extension(routers=[router], error_formats={**openai, **dict.fromkeys(TEI_PATHS, TEI_ERRORS)})


def beside_language_model(service: Service) -> Extension | None:
    """Load the encoder of ``--encoder``, and return OpenAI's and Cohere's routes for it; None: none is asked for."""
    if service.options is None or service.options.encoder is None:
        return None
    from mlsys_core.config import settings
    from mlsys_dvabatch.serve.instances import served_model
    from mlsys_dvabatch.serve.preparing import Batching, prepare
    from mlsys_serving.http import Router
    from mlsys_serving.models import ModelRepository

    from mlsys_encoders.serve.text_routes import add_text_routes
    from mlsys_encoders.serve.text_service import TextService, require_texts

    batching = Batching()
    prepared = prepare(service.options.encoder, settings().cache_dir, batching)
    require_texts(prepared.loaded.name, prepared.loaded.wire)
    repository = ModelRepository([served_model(prepared, batching, None)])

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        await repository.load_all()
        try:
            yield
        finally:
            await repository.close()

    router = Router()
    rerank = add_text_routes(router, TextService(repository, service.threads), service.threads)
    router.post("/rerank", include_in_schema=False)(rerank)  # vLLM's; of a server of models, this is TEI's
    return Extension(routers=[router], lifespan=lifespan)
