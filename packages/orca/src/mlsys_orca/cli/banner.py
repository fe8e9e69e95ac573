"""Lines that ``mlsys orca serve`` prints when it is ready."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from mlsys_orca.api.service import ModelService
    from mlsys_serving.http import ServerAddress

_PROMISES = {
    True: "native kernels: a request gets the same bits in any batch",
    False: "torch's operators: a request's last digits may depend on its batch",
}


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
