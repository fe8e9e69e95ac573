"""One engine in its own environment's process: in-process runs requested on stdin, or a small HTTP server around it.

Runs with the interpreter of a peer's environment, which has the sources of mlsys on its path but not what they need,
so it imports the standard library and the engine alone. ``ENGINE`` names a module beside this file with
a class ``PeerEngine(options)``; one that brings a server of its own has ``serve(options, port)`` too.

    python -m mlsys_bench.orca.peers.engines.child ENGINE OPTIONS              a run for each line of stdin
    python -m mlsys_bench.orca.peers.engines.child ENGINE OPTIONS --port 8000  POST /v1/completions with token ids

OPTIONS is one JSON object: ``model`` and ``tokenizer`` (paths), ``num_threads``, ``max_model_len``, and the settings.
"""

from __future__ import annotations

import argparse
import gc
import importlib
import json
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mlsys_bench.orca.peers.engines.http_front import Engine


def run(engine: Engine, requests: Sequence[dict[str, Any]], first_key: int) -> list[dict[str, Any]]:
    """Send requests at their ``arrival_s``; return each token and its time, in seconds from the start."""
    keys = {first_key + index: index for index in range(len(requests))}
    records: list[dict[str, Any]] = [{"sent_s": 0.0, "token_s": [], "tokens": []} for _ in requests]
    missing = [request["num_tokens"] for request in requests]
    num_sent, num_open = 0, 0
    origin = time.perf_counter()
    while num_sent < len(requests) or num_open:
        now = time.perf_counter() - origin
        while num_sent < len(requests) and requests[num_sent]["arrival_s"] <= now:
            request = requests[num_sent]
            records[num_sent]["sent_s"] = now
            engine.add(first_key + num_sent, request["prompt"], request["num_tokens"])
            num_sent, num_open = num_sent + 1, num_open + 1
        wait_s = requests[num_sent]["arrival_s"] - now if num_sent < len(requests) else 1.0
        if not num_open:
            time.sleep(max(0.0, wait_s))
            continue
        events = engine.step(max(0.0, wait_s))
        now = time.perf_counter() - origin
        for key, tokens in events:
            index = keys[key]
            records[index]["tokens"] += tokens
            records[index]["token_s"] += [now] * len(tokens)
            missing[index] -= len(tokens)
            num_open -= bool(tokens) and missing[index] == 0
    return records


def main() -> None:
    """Load the engine, print a line ``ready``, and serve requests."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("engine")
    parser.add_argument("options", type=json.loads)
    parser.add_argument("--port", type=int, help="serve HTTP on it instead of reading stdin")
    arguments = parser.parse_args()
    answers = os.fdopen(os.dup(1), "w", buffering=1)  # output of libraries goes to stderr
    os.dup2(2, 1)
    module = importlib.import_module(f"{__package__}.{arguments.engine}")
    if arguments.port is not None and hasattr(module, "serve"):
        module.serve(arguments.options, arguments.port)
        return
    engine: Engine = module.PeerEngine(arguments.options)
    gc.collect()
    gc.freeze()  # as servers do: to look through all that is loaded would halt an engine for a while
    if arguments.port is not None:
        from mlsys_bench.orca.peers.engines.http_front import read_words, serve

        serve(engine, read_words(Path(arguments.options["tokenizer"])), arguments.port)
        return
    print(json.dumps("ready"), file=answers)
    first_key = 0
    for line in sys.stdin:
        requests = json.loads(line)
        print(json.dumps(run(engine, requests, first_key)), file=answers)
        first_key += len(requests)
    os._exit(0)  # engines with threads of their own do not all end them


if __name__ == "__main__":
    main()
