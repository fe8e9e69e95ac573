"""A server of holders, ranks and workers for tests: ``server.py MODEL '{"stages": 2, ...}'`` prints its port.

``stages`` and ``ranks``: of the model; without them one worker runs all of it. ``step`` and ``number``: the first
worker is killed when it comes to that step for that time. ``poison``: a token id; a rank that computes three of them in
a row in a prompt crashes. ``policy``, ``kv_tokens``, ``speculate`` and ``replicas``: as of the command. ``missing``:
holders find no model. ``dtype``: fp32 if not given. ``gate``: a path; the port is printed at once, and holders load
when there is such a file.
"""

from __future__ import annotations

import json
import os
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from mlsys_core.errors import MlsysError
from mlsys_orca.api.service import ModelService
from mlsys_orca.api.supervised import serve_supervised
from mlsys_orca.engine.crash_points import CrashPoints
from mlsys_orca.engine.settings import EngineConfig
from mlsys_orca.loading.load import load_model
from mlsys_orca.parallel.native_shard import NativeShard
from mlsys_orca.parallel.parts import divide
from mlsys_orca.parallel.placement import Placement
from mlsys_serving.http import HttpConfig, ServerAddress
from mlsys_serving.http.port import BoundPort
from mlsys_serving.processes import RestartBudget


class Poisoned(NativeShard):
    """A part that does not survive some tokens."""

    poison: int | None = None

    def run(self, inputs: Any, states: Any, out: Any, kv_cache: Any) -> None:
        batch = inputs.batch
        first = [part for part in batch.requests if not part.num_computed_tokens]
        runs = [batch.token_ids[part.start : part.stop] for part in first]
        if any((self.poison,) * 3 == run[at : at + 3] for run in runs for at in range(len(run))):
            os.abort()
        super().run(inputs, states, out, kv_cache)


def serve() -> int:
    torch.set_num_threads(1)
    path, options = Path(sys.argv[1]), json.loads(sys.argv[2])
    ranks, stages = options.get("ranks", 1), options.get("stages", 1)
    Poisoned.poison = options.get("poison")
    parallel = None
    dtype = options.get("dtype", "fp32")
    if ranks * stages == 1:
        loaded = load_model(path, dtype=dtype)
    else:
        loaded, parallel = divide(path, tensor_parallel=ranks, pipeline_parallel=stages, dtype=dtype)
        load = parallel.load

        def load_poisoned(place: Placement) -> Any:
            if options.get("missing"):
                path.unlink()
            while "gate" in options and not Path(options["gate"]).exists():
                time.sleep(0.01)
            shard: Any = load(place)
            if "poison" in options:
                shard.__class__ = Poisoned
            return shard

        parallel = replace(parallel, load=load_poisoned)
    config = EngineConfig(
        max_batch_size=4,
        max_model_len=96,
        policy=options.get("policy", "chunked"),
        num_kv_tokens=options.get("kv_tokens"),
        num_draft_tokens=options.get("speculate", 0),
        num_replicas=options.get("replicas", 1),
    )
    http = HttpConfig(validation_status=400, open_paths=("/health",))

    def on_ready(service: ModelService, address: ServerAddress) -> None:
        if "gate" not in options:
            print(address.port, flush=True)

    with BoundPort("127.0.0.1", 0, config=http) as bound:
        if "gate" in options:
            print(bound.address.port, flush=True)
        return serve_supervised(
            loaded,
            "tiny",
            config,
            http,
            bound=bound,
            on_ready=on_ready,
            budget=RestartBudget(max_deaths=options.get("max_deaths", 30), num_immediate=8, backoff_s=0.1),
            crash_points=CrashPoints(options.get("step"), options.get("number", 1)),
            parallel=parallel,
        )


def main() -> int:
    try:
        return serve()
    except MlsysError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
