"""A server extension: a route, an option of every server that has it, a panel, and work beside the engine."""

from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Annotated

import typer
from mlsys_core.errors import InvalidInputError
from mlsys_serving.extensions import Extension, ExtensionOptions, Panel, Service
from mlsys_serving.http import Router

from mlsys_acme.notes import note


@dataclass(frozen=True, kw_only=True)
class Options(ExtensionOptions):
    acme_word: Annotated[str, typer.Option(help="The greeting.")] = "hello"

    def check(self, *, has_instances):
        if not self.acme_word:
            raise InvalidInputError("--acme-word is empty: leave it out, or give a word")

    def notes(self, url):
        return [f"a greeting at {url}/acme"]


def extend(service: Service) -> Extension:
    router, count = Router(), [0]

    @router.get("/acme")
    async def greet() -> dict[str, str]:
        count[0] += 1
        return {"greeting": service.options.acme_word, "model": service.engine.name}

    @asynccontextmanager
    async def beside(app):
        note("extension started")
        yield
        note("extension ended")

    async def drained() -> None:
        note("extension drained")

    return Extension(
        routers=[router],
        lifespan=beside,
        on_drain=[drained],
        panels=[Panel("acme", lambda: {"greetings": count[0]})],
    )
