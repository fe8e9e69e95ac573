"""Routes that change which adapters are served, as vLLM has them. Off unless the operator allows them."""

from __future__ import annotations

import asyncio
import json
import logging
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from fastapi.responses import PlainTextResponse
from mlsys_core.errors import InvalidInputError, MlsysError
from mlsys_core.posix import memory_file, read_at, write_at
from mlsys_serving.http import Router
from mlsys_serving.http.bodies import Body
from mlsys_serving.http.middleware.gate import check_model_control
from mlsys_serving.processes.channel import MAX_FRAME_NBYTES
from pydantic import Field

from mlsys_orca.api.service import ModelService, unknown_model
from mlsys_orca.model.adapters import read_adapter

_log = logging.getLogger(__name__)
MAX_ADAPTER_NBYTES = MAX_FRAME_NBYTES - (1 << 25)  # it crosses to workers in one frame, with its configuration


class LiveAdapters:
    """Adapters as clients have changed them, in memory that the processes of a server share: a new front reads it.

    Make it before the front is forked; one front writes it at a time.

    Example:
        >>> kept = LiveAdapters()
        >>> kept.read() is None
        True
        >>> kept.write({"pirate": "/adapters/pirate"})
        >>> kept.read()
        {'pirate': '/adapters/pirate'}
    """

    def __init__(self) -> None:
        self._fd = memory_file("mlsys-adapters")

    def read(self) -> dict[str, str] | None:
        """Return the directory of each adapter by name; None: nobody has changed them."""
        text = read_at(self._fd, os.fstat(self._fd).st_size, 0).rstrip()
        return json.loads(text) if text else None

    def write(self, directories: Mapping[str, str]) -> None:
        """Keep the directory of each adapter that there is."""
        text = json.dumps(directories).encode()
        write_at(self._fd, text.ljust(os.fstat(self._fd).st_size), 0)


@dataclass(frozen=True, slots=True)
class ModelControl:
    """Changes that clients of one server may make."""

    is_allowed: bool = False  # for clients
    start: Mapping[str, str] = field(default_factory=dict)  # directory of each adapter of the start, by name
    live: LiveAdapters | None = None  # None: the server is one process, which nothing restarts


NO_CONTROL = ModelControl()


class LoadAdapterBody(Body):
    """Body of ``POST /v1/load_lora_adapter``."""

    lora_name: str = Field(min_length=1, max_length=256)
    lora_path: str = Field(min_length=1, max_length=4096)  # a PEFT directory on the server's machine
    load_inplace: bool = False  # in place of one of that name


class UnloadAdapterBody(Body):
    """Body of ``POST /v1/unload_lora_adapter``."""

    lora_name: str = Field(min_length=1, max_length=256)
    lora_int_id: int | None = None  # vLLM's; taken, and not needed


async def restore_adapters(service: ModelService, control: ModelControl) -> None:
    """Have the adapters that were there before this front began, where it follows one that died."""
    if control.live is None or (wanted := control.live.read()) is None:
        return
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
        """Have the next front know the adapters that there are now."""
        if control.live is not None:
            known = {**control.start, **(control.live.read() or {}), **paths}
            control.live.write({name: known[name] for name in sorted(service.engine.adapters)})

    @router.post("/v1/load_lora_adapter", response_class=PlainTextResponse)
    async def load_adapter(body: LoadAdapterBody) -> str:
        """Load a LoRA adapter while the server runs; requests name it as their model from then on.

        The directory is read once. With ``load_inplace`` it takes the place of one of that name, under which running
        requests end.
        """
        check_model_control(control.is_allowed)
        if body.lora_name == service.name:
            raise InvalidInputError(f"{body.lora_name!r} is the name of a model here; give the adapter another")
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
