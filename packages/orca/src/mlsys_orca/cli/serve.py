"""``mlsys orca serve``: one model over HTTP, until Ctrl-C."""

from __future__ import annotations

from typing import Annotated

import typer
from mlsys_core.cli.registered import BlockPoolName, CompilerName, Device
from mlsys_core.errors import InvalidInputError
from mlsys_orca.cli.banner import banner
from mlsys_orca.cli.generation import Fixed, GenerationSettings, live
from mlsys_orca.cli.hosts import (
    ControlOnly,
    Executor,
    HeartbeatTimeout,
    HostOptions,
    JoinTimeout,
    Listen,
    Nodes,
    RayAddress,
    SecretFile,
    host_options,
    placed_options,
    refuse_hosts,
)
from mlsys_orca.cli.options import (
    ActivationsForm,
    Adapters,
    ChatTemplateFile,
    DraftModel,
    Dtype,
    KvDtype,
    MaxBatchSize,
    MaxModelLen,
    Model,
    ModelControlled,
    PipelineParallel,
    Replicas,
    ReplicaThreads,
    Sliced,
    Speculate,
    TensorParallel,
    Weights,
    adapter_directories,
    is_divided,
    num_guesses,
    num_threads_of,
    refuse_divided,
)
from mlsys_orca.loading.named import DEFAULT_MODEL
from mlsys_serving.cli import ServerOptions, serve_command
from mlsys_serving.extensions import Extensions

app = typer.Typer()  # of "mlsys serve orca"


@app.command()
@serve_command("orca")
def serve(
    model: Model = DEFAULT_MODEL,
    name: Annotated[str | None, typer.Option(help="The model's name for clients; by default the one given.")] = None,
    adapter: Adapters = None,
    chat_template: ChatTemplateFile = None,
    dtype: Dtype = None,
    weights: Weights = None,
    activations: ActivationsForm = None,
    device: Device = "cpu",
    threads: ReplicaThreads = 0,
    replicas: Replicas = 1,
    tensor_parallel: TensorParallel = 1,
    pipeline_parallel: PipelineParallel = 1,
    sliced: Sliced = False,
    executor: Executor = "local",
    ray_address: RayAddress = "auto",
    nodes: Nodes = None,
    listen: Listen = None,
    secret_file: SecretFile = None,
    control_only: ControlOnly = False,
    heartbeat_timeout: HeartbeatTimeout = 5.0,
    join_timeout: JoinTimeout = 300.0,
    max_batch_size: MaxBatchSize = None,
    max_model_len: MaxModelLen = None,
    policy: Annotated[
        str,
        typer.Option(help="Scheduling policy: chunked, paged, orca, request-level, or one that a plugin registered."),
    ] = "chunked",
    max_batch_tokens: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="Tokens per iteration under 'chunked' (512; of an encoder-decoder, all).",
        ),
    ] = None,
    max_chunk_tokens: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="Tokens of prompts in an iteration in which others decode, under 'chunked' (24): fewer keep streams "
            "smoother, more begin answers sooner.",
        ),
    ] = None,
    kv_tokens: Annotated[
        int | None, typer.Option(min=16, help="K/V slots of each replica; by default what fits the memory.")
    ] = None,
    kv_dtype: KvDtype = None,
    memory_pool: BlockPoolName = None,
    compiler: CompilerName = None,
    speculate: Speculate = 0,
    draft_model: DraftModel = None,
    batch_invariant: Annotated[
        bool,
        typer.Option("--batch-invariant", help="Refuse a model whose answers would depend on what it is batched with."),
    ] = False,
    max_waiting: Annotated[int, typer.Option(min=0, help="Requests that may wait; more get 429.")] = 256,
    model_control: ModelControlled = False,
    enable_lora: Annotated[
        bool,
        typer.Option(
            "--enable-lora", help="Run in torch's operators, so that adapters may come later (--model-control)."
        ),
    ] = False,
    single_process: Annotated[
        bool, typer.Option("--single-process", help="Run all in one process, which nothing restarts.")
    ] = False,
    *,
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

    degrees = {"tensor_parallel": tensor_parallel, "pipeline_parallel": pipeline_parallel}
    refuse_divided(
        {f"--device {device}": device != "cpu", "--compiler": compiler, "--draft-model": draft_model},
        **degrees,
        sliced=sliced,
    )
    refuse_hosts(
        nodes if executor == "local" else 1,
        {f"--device {device}": device != "cpu", "--adapter": adapter, "--enable-lora": enable_lora}
        | {"--compiler": compiler, "--single-process": single_process, "--model-control": model_control}
        | {"--draft-model": draft_model},
    )
    find_policy(policy, installed_plugins().registry)  # before the model is loaded
    http = server.http_config(
        title="mlsys orca",
        open_paths=("/health", "/health/*", "/metrics"),
        validation_status=400,  # as the protocol's own server answers
    )
    if executor != "local":
        hosts: HostOptions | None = placed_options(
            executor,
            model,
            address=ray_address,
            listen=listen,
            replicas=replicas,
            threads=threads,
            heartbeat_timeout=heartbeat_timeout,
            join_timeout=join_timeout,
            refused={"--nodes": nodes, "--secret-file": secret_file, "--control-only": control_only},
            **degrees,
        )
    else:
        hosts = host_options(
            nodes,
            listen,
            secret_file,
            control_only=control_only,
            threads=threads,
            heartbeat_timeout=heartbeat_timeout,
            join_timeout=join_timeout,
            tls=http.tls,
        )
    why_single = "--single-process was given" if single_process else _why_single(device)
    if why_single is not None and replicas > 1:
        raise InvalidInputError(
            f"--replicas {replicas} needs a process for each, and all would run in one: {why_single}; ask for 1"
        )
    if why_single is not None and not single_process:
        typer.echo(f"mlsys: all runs in one process: {why_single}", err=True)
    supervises = why_single is None
    settings = GenerationSettings(
        model=model,
        name=name,
        adapters=adapter_directories(adapter or []),
        dtype=dtype,
        weights=weights,
        activations=activations,
    )
    fixed = Fixed(
        http=http,
        engine={
            "max_batch_size": max_batch_size,
            "num_kv_tokens": kv_tokens,
            "kv_dtype": kv_dtype,
            "max_model_len": max_model_len,
            "num_threads": num_threads_of(threads, replicas=replicas * tensor_parallel * pipeline_parallel),
            "policy": policy,
            "memory_pool": memory_pool,
            "compiler": compiler,
            "batch_invariant": batch_invariant,
            "max_waiting": max_waiting,
            "num_draft_tokens": num_guesses(speculate, draft_model),
            "num_replicas": replicas,
            **degrees,
        },
        max_batch_tokens=max_batch_tokens,
        max_chunk_tokens=max_chunk_tokens,
        device=device,
        draft_model=draft_model,
        chat_template=chat_template,
        takes_adapters=enable_lora,
        runs_in_torch=compiler is not None,
        model_control=model_control,
        sliced=sliced,
        supervises=supervises,
        hosts=hosts,
        extensions=extensions,
        banner=lambda service, address: typer.echo(
            banner(service, address, notes=extensions.notes(address.url)), err=True
        ),
    )
    answers = supervises or (hosts is None and not is_divided(**degrees, sliced=sliced))  # else this process must fork
    extensions.check()
    with extensions.held(server.host), server.bind(http, answers=answers) as bound:
        raise typer.Exit(live(settings, fixed, bound))


def _why_single(device: str) -> str | None:
    """Return why a server cannot run in several processes; None: it can."""
    from mlsys_serving.processes import can_supervise

    return can_supervise() if device == "cpu" else f"a model on {device!r} cannot be shared by forked processes"
