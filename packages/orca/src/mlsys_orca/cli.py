"""``mlsys orca``: serve a language model, talk to it, or measure it."""

from __future__ import annotations

from typing import Annotated

import typer
from mlsys_core.errors import InvalidInputError

from mlsys_orca.cli_bench import app as bench
from mlsys_orca.cli_embed import embed
from mlsys_orca.cli_options import DEFAULT_MODEL, Device, Dtype, Threads, Weights, load, num_threads_of

app = typer.Typer(no_args_is_help=True)
app.add_typer(bench, name="bench")
app.command()(embed)

Model = Annotated[str, typer.Argument(help="A name from 'mlsys models list', a GGUF file, or a model directory.")]
MaxModelLen = Annotated[
    int | None, typer.Option(min=2, help="Tokens of prompt and answer; by default the model's own.")
]


_PROMISES = {
    True: "native kernels: a request gets the same bits in any batch",
    False: "torch's operators: a request's last digits may depend on its batch",
}


@app.callback()
def orca() -> None:
    """Serve language models with iteration-level scheduling, OpenAI-compatible."""


@app.command()
def serve(
    model: Model = DEFAULT_MODEL,
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port; 0 takes a free one.")] = 8000,
    name: Annotated[str | None, typer.Option(help="The model's name for clients; by default the one given.")] = None,
    dtype: Dtype = None,
    weights: Weights = None,
    device: Device = "cpu",
    threads: Threads = 0,
    max_batch_size: Annotated[int, typer.Option(min=1, help="Requests per iteration at most.")] = 8,
    max_model_len: MaxModelLen = None,
    policy: Annotated[
        str,
        typer.Option(help="Scheduling policy: orca, paged, chunked, request-level, or one that a plugin registered."),
    ] = "orca",
    kv_tokens: Annotated[int | None, typer.Option(min=16, help="K/V slots; by default what fits the memory.")] = None,
    batch_invariant: Annotated[
        bool,
        typer.Option("--batch-invariant", help="Refuse a model whose answers would depend on what it is batched with."),
    ] = False,
    api_key: Annotated[
        list[str] | None,
        typer.Option(envvar="MLSYS_ORCA_API_KEY", help="A key clients must send; repeat for several. None: open."),
    ] = None,
    drain_timeout_s: Annotated[float, typer.Option(min=0, help="Seconds running answers may take after SIGTERM.")] = 30,
    log_format: Annotated[str, typer.Option(help="json or console.")] = "console",
) -> None:
    """Serve a model over HTTP with the OpenAI protocol until Ctrl-C.

    Example: mlsys orca serve smollm2-135m-instruct --port 8000
    """
    if log_format not in ("json", "console"):
        raise InvalidInputError(f"--log-format is json or console, not {log_format!r}")
    from mlsys_core.plugins import installed_plugins
    from mlsys_core.serving.http import HttpConfig, ServerAddress
    from mlsys_core.serving.http import serve as serve_http

    from mlsys_orca.schedulers.policy import find_policy

    find_policy(policy, installed_plugins().registry)  # before the model is loaded
    http = HttpConfig(
        title="mlsys orca",
        api_keys=frozenset(api_key or ()),
        drain_timeout_s=drain_timeout_s,
        log_format="json" if log_format == "json" else "console",
        validation_status=400,  # as the protocol's own server answers
    )
    loaded = load(model, dtype, device=device, weights=weights)
    from mlsys_orca.engine import EngineConfig
    from mlsys_orca.server import make_app, make_service, model_name

    config = EngineConfig(
        max_batch_size=max_batch_size,
        num_kv_tokens=kv_tokens,
        max_model_len=max_model_len,
        num_threads=num_threads_of(threads),
        policy=policy,
        batch_invariant=batch_invariant,
    )
    service = make_service(loaded, name or model_name(model), config)

    def banner(address: ServerAddress) -> None:
        engine = service.engine
        slots = engine.block_tables.num_blocks * engine.block_tables.block_size
        route, body = "completions", '"prompt": "Hello!"'
        if loaded.chat_template is not None:
            route, body = "chat/completions", '"messages": [{"role": "user", "content": "Hello!"}]'
        typer.echo(
            f"\n  {service.name} at {address.url}/v1   ({str(loaded.model.dtype).removeprefix('torch.')}, "
            f"weights {loaded.weights_nbytes / 2**20:.0f} MiB, {config.num_threads} threads)\n"
            f"  context {engine.max_model_len} tokens, {slots} K/V slots ({engine.kv_nbytes / 2**20:.0f} MiB), "
            f"up to {max_batch_size} requests per iteration, policy {policy}\n"
            f"  {_PROMISES[engine.is_batch_invariant]}\n"
            f"  documentation at {address.url}/docs, metrics at {address.url}/metrics; Ctrl-C ends it\n\n"
            f"  curl {address.url}/v1/{route} -H 'Content-Type: application/json' \\\n"
            f'    -d \'{{"model": "{service.name}", {body}}}\'\n',
            err=True,
        )

    raise typer.Exit(serve_http(make_app(service, http), host, port, on_ready=banner))


@app.command()
def chat(
    model: Model = DEFAULT_MODEL,
    prompt: Annotated[str | None, typer.Option(help="Ask just this and stop; otherwise a conversation.")] = None,
    system: Annotated[str | None, typer.Option(help="A system message to begin with.")] = None,
    temperature: Annotated[float, typer.Option(min=0, max=2, help="0 is greedy.")] = 0.0,
    max_tokens: Annotated[int, typer.Option(min=1, help="New tokens per answer at most.")] = 512,
    dtype: Dtype = None,
    weights: Weights = None,
    device: Device = "cpu",
    threads: Threads = 0,
) -> None:
    """Talk to a model in the terminal; an empty line or Ctrl-D ends it.

    Example: mlsys orca chat smollm2-135m-instruct --prompt "Why do plants need sunlight?"
    """
    import asyncio

    loaded = load(model, dtype, device=device, weights=weights)
    from mlsys_orca.engine import EngineConfig
    from mlsys_orca.server import make_service, model_name
    from mlsys_orca.terminal_chat import converse

    config = EngineConfig(max_batch_size=1, num_threads=num_threads_of(threads))
    service = make_service(loaded, model_name(model), config)
    with service.engine:
        asyncio.run(converse(service, prompt, system=system, temperature=temperature, max_tokens=max_tokens))
