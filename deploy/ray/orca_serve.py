"""Orca as a Ray Serve deployment: each replica is an engine with its OpenAI routes, and Serve adds and ends replicas.

On a cluster: serve run orca_serve:app model=smollm2-135m-instruct threads=2
On Kubernetes: rayservice.yaml, beside this file.
"""

from __future__ import annotations

from typing import Any

from mlsys_serving.http import HttpConfig
from ray import serve
from ray.serve import Application

MAX_BATCH_SIZE = 8


def app(args: dict[str, Any]) -> Application:
    """Return the application of a model.

    Args:
        args: ``model``: a name, a GGUF file or a Hugging Face directory, the same on all nodes; ``threads`` of each
            replica, and the cores that Ray keeps for it; ``max_replicas``; ``kv_tokens``: K/V slots of each replica.
    """
    model, threads = str(args.get("model", "smollm2-135m-instruct")), int(args.get("threads", 2))
    kv_tokens = None if args.get("kv_tokens") is None else int(args["kv_tokens"])

    def make_asgi() -> Any:
        """Load the model in the replica's process, and return its app; Serve runs the app's lifespan."""
        from mlsys_orca.api.server import make_app, make_service, model_name
        from mlsys_orca.engine.engine import EngineConfig
        from mlsys_orca.loading.named import load

        config = EngineConfig(
            max_batch_size=MAX_BATCH_SIZE,
            num_threads=threads,
            num_kv_tokens=kv_tokens,
            policy="chunked",
            policy_options={"max_batch_tokens": 128},
        )
        service = make_service(load(model, None), model_name(model), config)
        return make_app(service, HttpConfig(title="mlsys orca", allowed_hosts=("*",), validation_status=400))

    deployment = serve.deployment(
        name="Orca",
        max_ongoing_requests=4 * MAX_BATCH_SIZE,
        autoscaling_config={
            "min_replicas": 1,
            "max_replicas": int(args.get("max_replicas", 4)),
            "target_ongoing_requests": MAX_BATCH_SIZE,
            "upscale_delay_s": 10,
            "downscale_delay_s": 300,
        },
        ray_actor_options={"num_cpus": threads},
        health_check_period_s=5,
        graceful_shutdown_timeout_s=60,
    )
    return deployment(serve.ingress(make_asgi)(type("Orca", (), {}))).bind()
