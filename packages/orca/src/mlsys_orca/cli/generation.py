"""The inner half of ``mlsys orca serve``: load what the settings name, and serve it until the end."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mlsys_core.collector import collect_as_usual, kept_out_of_collections
from mlsys_orca.cli.hosts import HostOptions
from mlsys_orca.cli.options import is_divided
from mlsys_orca.loading.named import load, with_draft
from mlsys_orca.parallel.named import find_divided

if TYPE_CHECKING:
    from mlsys_orca.api.service import ModelService
    from mlsys_orca.loading.loaded import LoadedModel
    from mlsys_serving.extensions import Extensions
    from mlsys_serving.http import BoundPort, HttpConfig, ServerAddress


_MOST_TOKENS = 512  # per iteration
_CHUNK_TOKENS = 24  # of prompts, per iteration in which others decode: 8 of them wait for two to three times as long
_OF_A_DIVIDED_MODEL = 8  # requests per iteration: its parts know their memory, and are loaded later


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationSettings:
    """Settings of the model."""

    model: str
    name: str | None = None  # for clients; None: the model's own
    adapters: Mapping[str, str] = field(default_factory=dict)  # name -> directory
    dtype: str | None = None
    weights: str | None = None
    activations: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Fixed:
    """Options of the server."""

    http: HttpConfig
    engine: Mapping[str, Any]  # keywords of EngineConfig
    max_batch_tokens: int | None
    max_chunk_tokens: int | None
    device: str
    draft_model: str | None  # guesses the model's next tokens
    chat_template: Path | None
    takes_adapters: bool  # while it runs
    runs_in_torch: bool  # not in native kernels
    model_control: bool
    sliced: bool  # torch's operators sum as ranks do
    supervises: bool  # in several processes
    hosts: HostOptions | None  # the model is on several machines; None: on this one
    extensions: Extensions
    banner: Callable[[ModelService, ServerAddress], None]


def live(settings: GenerationSettings, fixed: Fixed, bound: BoundPort) -> int:
    """Serve the model of ``settings`` until the server ends; return the exit code.

    Args:
        settings: The model.
        fixed: All else.
        bound: The listening port.

    Raises:
        InvalidInputError: the model cannot be loaded, or does not fit the limits or the memory.
    """
    if fixed.supervises:
        import torch

        torch.set_num_threads(1)  # threads do not survive a fork
    degrees = {name: fixed.engine[name] for name in ("tensor_parallel", "pipeline_parallel")}
    parallel = None
    if fixed.hosts is not None or is_divided(**degrees, sliced=fixed.sliced):
        dtype = settings.dtype if fixed.hosts is None else fixed.hosts.dtype_of(settings.dtype)
        loaded, parallel = find_divided(
            settings.model,
            dtype,
            weights=settings.weights,
            activations=settings.activations,
            slices=fixed.sliced or None,
            adapters=settings.adapters,
            takes_adapters=fixed.takes_adapters,
            chat_template=fixed.chat_template,
            share=1.0 if fixed.hosts is None else fixed.hosts.share,
            **degrees,
        )
        if fixed.hosts is not None:
            assert dtype is not None
            parallel = fixed.hosts.divided(
                parallel,
                settings.model,
                dtype=dtype,
                weights=settings.weights,
                activations=settings.activations,
                slices=fixed.sliced or None,
            )
    else:
        loaded = _load_whole(settings, fixed)
    from mlsys_orca.api.control import ModelControl
    from mlsys_orca.api.server import make_app, make_service, model_name
    from mlsys_orca.engine.engine import EngineConfig
    from mlsys_serving.http import serve as serve_http

    engine = {**fixed.engine, "max_batch_size": _batch_size(fixed, loaded, is_divided=parallel is not None)}
    config = EngineConfig(**engine, policy_options=_policy_options(fixed, loaded))
    name = settings.name or model_name(settings.model)
    control = ModelControl(fixed.model_control, settings.adapters)
    collect_as_usual()  # the start is over
    with ExitStack() as serving:

        def on_ready(service: ModelService, address: ServerAddress) -> None:
            serving.enter_context(kept_out_of_collections())
            fixed.banner(service, address)

        if fixed.supervises:
            from mlsys_orca.api.supervised import serve_supervised

            return serve_supervised(
                loaded,
                name,
                config,
                fixed.http,
                bound=bound,
                extensions=fixed.extensions,
                on_ready=on_ready,
                parallel=parallel,
                control=control,
            )
        service = make_service(loaded, name, config, parallel=parallel)
        app = make_app(service, fixed.http, control=control, extensions=fixed.extensions)
        return serve_http(app, bound=bound, on_ready=lambda address: on_ready(service, address))


def _batch_size(fixed: Fixed, loaded: LoadedModel, *, is_divided: bool) -> int:
    """Return the requests per iteration: as given, or what ``explain`` suggests for a replica."""
    if (given := fixed.engine["max_batch_size"]) is not None or is_divided:
        return given or _OF_A_DIVIDED_MODEL
    from mlsys_orca.api.server import available_memory_nbytes
    from mlsys_orca.engine.fit import suggested_batch_size

    available_nbytes = available_memory_nbytes(fixed.device) // fixed.engine["num_replicas"]
    return suggested_batch_size(loaded, fixed.engine, available_nbytes=available_nbytes)


def _policy_options(fixed: Fixed, loaded: LoadedModel) -> dict[str, Any]:
    given = {"max_batch_tokens": fixed.max_batch_tokens, "max_chunk_tokens": fixed.max_chunk_tokens}
    options: dict[str, Any] = {name: value for name, value in given.items() if value is not None}
    if fixed.engine["policy"] != "chunked":
        return options  # which another policy refuses by name, if it has none such
    # What an encoder reads is one chunk, so its whole context must fit.
    most = _MOST_TOKENS if loaded.config.encoder is None else loaded.config.max_positions
    return {"max_batch_tokens": most, "max_chunk_tokens": _CHUNK_TOKENS} | options


def _load_whole(settings: GenerationSettings, fixed: Fixed) -> LoadedModel:
    loaded = load(
        settings.model,
        settings.dtype,
        device=fixed.device,
        weights=settings.weights,
        activations=settings.activations,
        adapters=settings.adapters,
        takes_adapters=fixed.takes_adapters,
        runs_in_torch=fixed.runs_in_torch,
        chat_template=fixed.chat_template,
    )
    return with_draft(loaded, fixed.draft_model)
