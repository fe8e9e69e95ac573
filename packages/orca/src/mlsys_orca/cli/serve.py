"""``mlsys orca serve``: one model over HTTP, until Ctrl-C."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import typer
from mlsys_core.collector import collect_as_usual, kept_out_of_collections
from mlsys_orca.cli.options import Model
from mlsys_orca.cli.serve_options import ModelOptions, PlacementOptions, SchedulingOptions
from mlsys_orca.loading.named import DEFAULT_MODEL, load
from mlsys_orca.parallel.named import find_divided
from mlsys_serving.cli import ServerOptions, serve_command
from mlsys_serving.extensions import Extensions

if TYPE_CHECKING:
    from mlsys_orca.api.service import ModelService
    from mlsys_orca.loading.loaded import LoadedModel
    from mlsys_orca.parallel.ranks import ParallelModel, RankPlacer
    from mlsys_serving.http import ServerAddress

_MOST_TOKENS = 512  # per iteration
_CHUNK_TOKENS = 24  # of prompts, per iteration in which others decode: 8 of them wait for two to three times as long
_OF_A_DIVIDED_MODEL = 8  # requests per iteration: its parts know their memory, and are loaded later
_PROMISES = {
    True: "native kernels: a request gets the same bits in any batch",
    False: "torch's operators: a request's last digits may depend on its batch",
}

app = typer.Typer()  # of "mlsys serve orca"


@app.command()
@serve_command("orca")
def serve(
    model: Model = DEFAULT_MODEL,
    *,
    served: ModelOptions,
    placement: PlacementOptions,
    scheduling: SchedulingOptions,
    server: ServerOptions,
    extensions: Extensions,
) -> None:
    """Serve a model over HTTP with the OpenAI protocol until Ctrl-C.

    Each option may also come from the environment (MLSYS_ORCA_PORT; MLSYS_SERVE_PORT for every server) or from the
    file of --config; flags go first.

    Example: mlsys orca serve smollm2-135m-instruct --port 8000
    """
    from mlsys_core.plugins import installed_plugins
    from mlsys_orca.scheduling.policy import find_policy

    placement.check(served)
    find_policy(scheduling.policy, installed_plugins().registry)  # before the model is loaded
    http = server.http_config(
        title="mlsys orca",
        open_paths=("/health", "/health/*", "/metrics"),
        validation_status=400,  # as the protocol's own server answers
    )
    placer = placement.placer(model, served)
    supervises = placement.supervises(served.device)
    engine = scheduling.engine(served, placement)
    extensions.check()
    answers = supervises or not placement.is_divided  # else this process forks
    with ExitStack() as stack:
        stack.enter_context(extensions.held(server.host))
        bound = stack.enter_context(server.bind(http, answers=answers))
        if supervises:
            import torch

            torch.set_num_threads(1)  # threads do not survive a fork
        loaded, parallel = _load(model, served, placement, placer)
        from mlsys_orca.api.server import make_app, make_service, model_name
        from mlsys_orca.engine.engine import EngineConfig
        from mlsys_serving.http import serve as serve_http

        engine["max_batch_size"] = _batch_size(engine, served, loaded, is_divided=parallel is not None)
        config = EngineConfig(**engine, policy_options=_policy_options(scheduling, loaded))
        name = served.name or model_name(model)
        collect_as_usual()  # the start is over

        def on_ready(service: ModelService, address: ServerAddress) -> None:
            stack.enter_context(kept_out_of_collections())
            typer.echo(banner(service, address, notes=extensions.notes(address.url)), err=True)

        more: Any = {"extensions": extensions}
        if supervises:
            from mlsys_orca.api.supervised import serve_supervised

            more |= {"bound": bound, "on_ready": on_ready, "parallel": parallel}
            raise typer.Exit(serve_supervised(loaded, name, config, http, **more))
        service = make_service(loaded, name, config, parallel=parallel)
        made = make_app(service, http, **more)
        raise typer.Exit(serve_http(made, bound=bound, on_ready=lambda address: on_ready(service, address)))


def _load(
    model: str, served: ModelOptions, placement: PlacementOptions, placer: RankPlacer | None
) -> tuple[LoadedModel, ParallelModel | None]:
    """Return the model, whole, or without weights and with the parts that other processes load.

    Raises:
        InvalidInputError: it cannot be loaded.
    """
    template, form = served.chat_template, served.form
    degrees: Any = placement.degrees
    if not placement.is_divided:
        loaded = load(
            model,
            served.dtype,
            device=served.device,
            adapters=served.adapters,
            runs_in_torch=served.compiler is not None,
            chat_template=template,
            **form,
        )
        return loaded, None
    if placer is None:
        return find_divided(model, served.dtype, chat_template=template, **form, **degrees)
    dtype = served.dtype_everywhere
    loaded, parallel = find_divided(model, dtype, share=0.0, chat_template=template, **form, **degrees)
    return loaded, replace(parallel, placer=placer)


def _batch_size(engine: dict[str, Any], served: ModelOptions, loaded: LoadedModel, *, is_divided: bool) -> int:
    """Return the requests per iteration: as given, or what ``explain`` suggests for a replica."""
    given: int | None = engine["max_batch_size"]
    if given is not None or is_divided:
        return given or _OF_A_DIVIDED_MODEL
    from mlsys_orca.api.server import available_memory_nbytes
    from mlsys_orca.engine.fit import suggested_batch_size

    available_nbytes = available_memory_nbytes(served.device) // engine["num_replicas"]
    return suggested_batch_size(loaded, engine, available_nbytes=available_nbytes)


def _policy_options(scheduling: SchedulingOptions, loaded: LoadedModel) -> dict[str, Any]:
    given = {"max_batch_tokens": scheduling.max_batch_tokens, "max_chunk_tokens": scheduling.max_chunk_tokens}
    options: dict[str, Any] = {name: value for name, value in given.items() if value is not None}
    if scheduling.policy != "chunked":
        return options  # which another policy refuses by name, if it has none such
    # What an encoder reads is one chunk, so its whole context must fit.
    most = _MOST_TOKENS if loaded.config.encoder is None else loaded.config.max_positions
    return {"max_batch_tokens": most, "max_chunk_tokens": _CHUNK_TOKENS} | options


def banner(service: ModelService, address: ServerAddress, *, notes: Sequence[str] = ()) -> str:
    """Return what serves, where, and its limits; ``notes`` come from the server's extensions."""
    engine, loaded = service.engine, service.loaded
    config, shape, slots = engine.config, engine.shape, engine.shape.num_kv_tokens
    route, body = "completions", '"prompt": "Hello!"'
    if loaded.chat_template is not None:
        route, body = "chat/completions", '"messages": [{"role": "user", "content": "Hello!"}]'
    extras = [f"adapters {', '.join(sorted(engine.adapters))}"] if engine.adapters else []
    extras += [f"{config.num_replicas} replicas, each with these limits"] if config.num_replicas > 1 else []
    if config.tensor_parallel * config.pipeline_parallel > 1:
        extras.append(
            f"tensor-parallel {config.tensor_parallel}, pipeline-parallel {config.pipeline_parallel}: each process has "
            f"{config.num_threads} threads and its part of the weights"
        )
    extras += [f"up to {config.num_draft_tokens} guesses a token"] if config.num_draft_tokens else []
    lines = [
        f"  {service.name} at {address.url}/v1   ({str(loaded.model.dtype).removeprefix('torch.')}, "
        f"weights {loaded.weights_nbytes / 2**20:.0f} MiB, {config.num_threads} threads)",
        f"  context {engine.max_model_len} tokens, {slots} K/V slots ({shape.kv_nbytes / 2**20:.0f} MiB): "
        f"{slots // engine.max_model_len} requests of full length at a time",
        f"  up to {config.max_batch_size} requests per iteration, policy {config.policy}",
        f"  {_PROMISES[shape.is_batch_invariant]}",
        *(f"  {extra}" for extra in extras),
        *(f"  {note}" for note in notes),
        f"  documentation at {address.url}/docs, metrics at {address.url}/metrics; Ctrl-C ends it",
        "",
        f"  curl {address.url}/v1/{route} -H 'Content-Type: application/json' \\",
        f'    -d \'{{"model": "{service.name}", {body}}}\'',
    ]
    return "\n".join(["", *lines, ""])
