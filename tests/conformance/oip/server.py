"""Serves the reference models of ``plugins/open-inference/tests`` on free ports; prints where, and runs until SIGTERM.

python tests/conformance/oip/server.py
"""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path
from typing import Any

from mlsys_open_inference import GrpcConfig, create_oip_app, grpc_address_of
from mlsys_serving.http import HttpConfig, ServerAddress, serve
from mlsys_serving.models import ModelRepository

REFERENCE = Path(__file__).parents[3] / "plugins" / "open-inference" / "tests" / "reference.py"


def reference_models() -> list[Any]:
    spec = importlib.util.spec_from_file_location("oip_reference", REFERENCE)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    models: list[Any] = module.all_models()
    return models


class Source:
    """The reference models by name, as a directory would give them."""

    def names(self) -> list[str]:
        return sorted(model.spec.name for model in reference_models())

    async def load(self, name: str) -> list[Any]:
        return [model for model in reference_models() if model.spec.name == name]


def main() -> int:
    app = create_oip_app(
        ModelRepository(source=Source()),
        grpc=GrpcConfig(),
        config=HttpConfig(max_body_nbytes=64 * 2**20),
        model_control=True,
    )

    def announce(address: ServerAddress) -> None:
        grpc = grpc_address_of(app)
        print(json.dumps({"http": f"{address.host}:{address.port}", "grpc": f"{grpc.host}:{grpc.port}"}), flush=True)

    return serve(app, port=0, on_ready=announce)


if __name__ == "__main__":
    sys.exit(main())
