"""``mlsys orca``: serve a language model, have it work through a file, talk to it, or measure it."""

from __future__ import annotations

from typing import Annotated

import typer
from mlsys_core.cli.options import BlockPoolName, Device
from mlsys_orca.cli.options import ActivationsForm, Dtype, Model, Threads, Weights, num_threads_of
from mlsys_orca.cli.serve import serve
from mlsys_orca.loading.named import DEFAULT_MODEL, load

app = typer.Typer(no_args_is_help=True)
app.command()(serve)


@app.callback()
def orca() -> None:
    """Serve language models with iteration-level scheduling, OpenAI-compatible."""


@app.command()
def chat(
    model: Model = DEFAULT_MODEL,
    prompt: Annotated[str | None, typer.Option(help="Ask just this and stop; otherwise a conversation.")] = None,
    system: Annotated[str | None, typer.Option(help="A system message to begin with.")] = None,
    temperature: Annotated[float, typer.Option(min=0, max=2, help="0 is greedy.")] = 0.0,
    max_tokens: Annotated[int, typer.Option(min=1, help="New tokens per answer at most.")] = 512,
    dtype: Dtype = None,
    weights: Weights = None,
    activations: ActivationsForm = None,
    device: Device = "cpu",
    threads: Threads = 0,
    memory_pool: BlockPoolName = None,
) -> None:
    """Talk to a model in the terminal; /help lists what else can be said, an empty line or Ctrl-D ends it.

    Example: mlsys orca chat smollm2-135m-instruct --prompt "Why do plants need sunlight?"
    """
    import asyncio

    loaded = load(model, dtype, device=device, weights=weights, activations=activations)
    from mlsys_orca.api.chat import Message
    from mlsys_orca.api.server import make_service, model_name
    from mlsys_orca.cli.terminal_chat import Conversation, converse
    from mlsys_orca.engine.engine import EngineConfig

    config = EngineConfig(max_batch_size=1, num_threads=num_threads_of(threads), memory_pool=memory_pool)
    service = make_service(loaded, model_name(model), config)
    conversation = Conversation(service, settings={"temperature": temperature, "max_tokens": max_tokens})
    if system is not None:
        conversation.messages.append(Message(role="system", content=system))
    with service.engine:
        asyncio.run(converse(conversation, prompt))
