"""Routes that change what is served: the model, and adapters as vLLM has them. Off unless the operator allows them."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from fastapi.responses import PlainTextResponse
from mlsys_core.errors import InvalidInputError, MlsysError
from mlsys_serving.http import Router
from mlsys_serving.oip.access import check_model_control
from mlsys_serving.processes import GenerationLink
from mlsys_serving.processes.frames import MAX_FRAME_NBYTES
from pydantic import BaseModel, ConfigDict, Field

from mlsys_orca.api.errors import unknown_model
from mlsys_orca.api.service import ModelService
from mlsys_orca.model.adapters import read_adapter

_log = logging.getLogger(__name__)
MAX_ADAPTER_NBYTES = MAX_FRAME_NBYTES - (1 << 25)  # it crosses to workers in one frame, with its configuration


@dataclass(frozen=True, slots=True)
class ModelControl:
    """Changes that clients of one server may make, and who makes them."""

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
    activations: str | None = None

    def changes(self) -> dict[str, Any]:
        """Return the settings that change."""
        changes = self.model_dump(exclude_none=True)
        return ({"adapters": {}} if self.model is not None else {}) | changes


class LoadAdapterBody(BaseModel):
    """Body of ``POST /v1/load_lora_adapter``."""

    model_config = ConfigDict(extra="forbid")

    lora_name: str = Field(min_length=1, max_length=256)
    lora_path: str = Field(min_length=1, max_length=4096)  # a PEFT directory on the server's machine
    load_inplace: bool = False  # in place of one of that name


class UnloadAdapterBody(BaseModel):
    """Body of ``POST /v1/unload_lora_adapter``."""

    model_config = ConfigDict(extra="forbid")

    lora_name: str = Field(min_length=1, max_length=256)
    lora_int_id: int | None = None  # vLLM's; taken, and not needed


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


async def restore_adapters(service: ModelService, control: ModelControl) -> None:
    """Have the adapters that were there before this front began, where it follows one that died."""
    if control.generation is None or not service.engine.shape.takes_adapters:
        return
    wanted: dict[str, str] = (await control.generation.connect()).settings.get("adapters", {})
    for name in service.engine.adapters - wanted.keys():
        await service.engine.unload_adapter(name)
    for name, path in wanted.items():
        try:
            files = await asyncio.to_thread(read_adapter, path, max_nbytes=MAX_ADAPTER_NBYTES)
            if files.key_of(name) != service.engine.adapter_key(name):
                await service.engine.load_adapter(name, files, replaces=True)
        except MlsysError as error:
            _log.error("the adapter %r is not loaded again: %s", name, error)


def add_routes(router: Router, service: ModelService, control: ModelControl) -> None:
    """Add the routes to ``router``."""
    changing = asyncio.Lock()
    paths: dict[str, str] = {}  # by name, of adapters loaded since the start

    def keep() -> None:
        """Have who follows this process know the adapters that there are now."""
        if control.generation is not None:
            known = {**control.generation.status.settings.get("adapters", {}), **paths}
            control.generation.keep({"adapters": {name: known[name] for name in sorted(service.engine.adapters)}})

    @router.post("/v1/load_lora_adapter", response_class=PlainTextResponse)
    async def load_adapter(body: LoadAdapterBody) -> str:
        """Load a LoRA adapter while the server runs; requests name it as their model from then on.

        The directory is read once. With ``load_inplace`` it takes the place of one of that name, under which running
        requests end.
        """
        check_model_control(control.is_allowed)
        if body.lora_name == service.name:
            raise InvalidInputError(f"{body.lora_name!r} is the name of the model here; give the adapter another")
        path = Path(body.lora_path).expanduser().absolute()
        files = await asyncio.to_thread(read_adapter, path, max_nbytes=MAX_ADAPTER_NBYTES)
        async with changing:
            await service.engine.load_adapter(body.lora_name, files, replaces=body.load_inplace)
            paths[body.lora_name] = str(path)
            keep()
        return f"Success: LoRA adapter '{body.lora_name}' added successfully."

    @router.post("/v1/unload_lora_adapter", response_class=PlainTextResponse)
    async def unload_adapter(body: UnloadAdapterBody) -> str:
        """Take a LoRA adapter away: new requests for it get 404, running ones end under it."""
        check_model_control(control.is_allowed)
        async with changing:
            if service.engine.adapter_key(body.lora_name) is None:
                raise unknown_model(body.lora_name, sorted(service.engine.adapters))
            await service.engine.unload_adapter(body.lora_name)
            keep()
        return f"Success: LoRA adapter '{body.lora_name}' removed successfully."

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
