"""Tables of the Open Inference Protocol's front at several numbers of clients, beside Triton and beside its past."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from mlsys_bench.figures.results import load, number, table

_BATCHES = {"batched": "up to 16", "unbatched": "one at a time"}
_WIRES = {"binary": "REST, binary", "json": "REST, JSON", "grpc": "gRPC", "stream": "gRPC stream"}


def _cases(name: str) -> Iterator[tuple[list[str], dict[str, Any]]]:
    """Yield the first cells of each case, and its rows by server."""
    found: dict[tuple[str, str, int], dict[str, Any]] = {}
    for row in load(name)["rows"]:
        found.setdefault((row["model"], row["wire"], row["clients"]), {})[row["server"]] = row
    for (model, wire, count), servers in found.items():
        yield [_BATCHES[model], _WIRES[wire], str(count)], servers


def clients(name: str) -> str:
    """Return the rates of each server and ours over each Triton's, by model, wire and number of clients."""
    rows = []
    for cells, servers in _cases(name):
        rates = {server: row["requests_per_s"] for server, row in servers.items()}
        ratios = [f"{rates[ours] / rates[peer]:.2f}x" for ours in _OURS for peer in ("triton", "pytriton")]
        waits = [f"{servers[server]['p50_ms']:.0f} / {servers[server]['p99_ms']:.0f}" for server in _SHOWN]
        rows.append([*cells, *(number(rates[server]) for server in (*_OURS, "triton", "pytriton")), *ratios, *waits])
    columns = ["batches", "wire", "clients", "mlsys req/s", "dvabatch", "Triton", "PyTriton", "mlsys / Triton"]
    columns += ["mlsys / PyTriton", "dvabatch / Triton", "dvabatch / PyTriton"]
    return table([*columns, "mlsys p50 / p99 ms", "dvabatch", "Triton"], rows)


_OURS = ("mlsys", "dvabatch")
_SHOWN = (*_OURS, "triton")


def before(name: str) -> str:
    """Return DVABatch's rates, latencies and processor time before a change and after it, in batches."""
    rows = []
    for cells, servers in _cases(name):
        if cells[0] == _BATCHES["batched"]:
            then, now = servers["dvabatch-before"], servers["dvabatch"]
            pairs = [f"{number(each['server_cpu_us'])}" for each in (then, now)]
            share = f"{now['server_cpu_us'] / then['server_cpu_us']:.2f}x"
            rates = [number(each["requests_per_s"]) for each in (then, now)]
            gain = f"{now['requests_per_s'] / then['requests_per_s']:.2f}x"
            waits = [f"{each['p50_ms']:.0f} / {each['p99_ms']:.0f}" for each in (then, now)]
            rows.append([*cells[1:], *rates, gain, *pairs, share, *waits])
    columns = ["wire", "clients", "req/s before", "now", "to before", "CPU us/req before", "now", "to before"]
    return table([*columns, "p50 / p99 ms before", "now"], rows)
