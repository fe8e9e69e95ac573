"""Routes that change what is served: ``/v1/reload``. Off unless the operator allows them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from mlsys_core.errors import InvalidInputError
from mlsys_core.serving.http import Router
from mlsys_core.serving.oip.rest.control import check_model_control
from mlsys_core.serving.processes import GenerationLink
from pydantic import BaseModel, ConfigDict


@dataclass(frozen=True, slots=True)
class ModelControl:
    """What clients of one server may change, and by whom it is done."""

    is_allowed: bool = False  # for clients
    generation: GenerationLink | None = None  # to the master; None: the server is one process

    def link(self) -> GenerationLink:
        """Return the link to the master.

        Raises:
            InvalidInputError: there is none.
        """
        if self.generation is None:
            raise InvalidInputError(
                "this server runs in one process, which cannot be reloaded: start it without --single-process, on a CPU"
            )
        return self.generation


NO_CONTROL = ModelControl()


class ReloadBody(BaseModel):
    """Body of ``POST /v1/reload``: what is to change; fields left out stay as they are."""

    model_config = ConfigDict(extra="forbid")

    model: str | None = None  # a name or a path on the server's machine
    name: str | None = None  # for clients
    adapters: dict[str, str] | None = None  # name -> directory; of another model, none by default
    dtype: str | None = None
    weights: str | None = None

    def changes(self) -> dict[str, Any]:
        """Return the settings that change."""
        changes = self.model_dump(exclude_none=True)
        return ({"adapters": {}} if self.model is not None else {}) | changes


class ReloadAnswer(BaseModel):
    """Answer of ``POST /v1/reload``, once the next generation takes requests."""

    generation: int
    seconds: float  # that it took to load


class GenerationsAnswer(BaseModel):
    """Answer of ``GET /v1/reload``."""

    status: Literal["serving", "loading", "draining"]
    generation: int | None  # that takes requests
    loading: int | None  # the next, while it loads
    draining: dict[str, int]  # a generation that takes no more requests -> those that it still has
    settings: Mapping[str, Any]


def add_routes(router: Router, control: ModelControl) -> None:
    """Add the routes to ``router``."""

    @router.post("/v1/reload")
    async def reload(body: ReloadBody) -> ReloadAnswer:
        """Load a model or adapters anew while the server goes on; answer when they have taken over.

        Requests that run are finished by those before. Errors: 400 or 500 with the loader's message, and nothing has
        changed; 409: another reload is under way.
        """
        check_model_control(control.is_allowed)
        outcome = await control.link().reload(body.changes())
        return ReloadAnswer(generation=outcome.number, seconds=outcome.seconds)

    @router.get("/v1/reload")
    async def generations() -> GenerationsAnswer:
        """Tell which generation serves, and whether one loads or still finishes its requests."""
        check_model_control(control.is_allowed)
        status = control.link().status
        return GenerationsAnswer(
            status="loading" if status.loading is not None else "draining" if status.retiring else "serving",
            generation=status.serving,
            loading=status.loading,
            draining=dict(status.retiring),
            settings=status.settings,
        )
