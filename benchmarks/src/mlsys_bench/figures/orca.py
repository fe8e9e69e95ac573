"""Orca's tables: serving against peers, one iteration, what is outside the model, the paper's comparison."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from statistics import median
from typing import Any

from mlsys_bench.figures.results import best, load, number, processor, table

_OURS = "mlsys orca"
MODELS = {"llama": "Llama 135M", "gpt2": "GPT-2 124M"}


def offline(*names: str) -> str:
    """Return a row for each case of each file: all requests at once, medians over turns."""
    columns = ["run", "case", "tokens/s", "over best peer (by turn)", "ms/token, p50", "TTFT ms, p50", "other load"]
    rows = [row for name in names for row in _offline_rows(name)]
    return table([*columns, "settings kept"], rows)


def _offline_rows(name: str) -> Iterator[list[str]]:
    results = load(name)
    runs = by_case(results["runs"])
    speeds = {case: [run["throughput_tokens_per_s"] for run in group] for case, group in runs.items()}
    medians = {case: median(values) for case, values in speeds.items()}
    cells = best([f"{value:.1f}" for value in medians.values()], list(medians.values()), lowest=False)
    for case, cell in sorted(zip(runs, cells, strict=True), key=lambda pair: (pair[0] != _OURS, -medians[pair[0]])):
        yield [
            _title(name) if case == _OURS else "",
            case,
            cell,
            _over_best(speeds) if case == _OURS else "",
            number(_median(runs[case], "normalized_latency", "p50")),
            number(_median(runs[case], "ttft", "p50")),
            f"{max(run['share_of_others'] for run in runs[case]):.0%}",
            _settings(results["settings"].get(case.partition(", ")[0], {})),
        ]


def _over_best(speeds: Mapping[str, list[float]]) -> str:
    peers = {case: values for case, values in speeds.items() if not case.startswith(_OURS)}
    if not peers:
        return ""
    champion = max(peers, key=lambda case: median(peers[case]))
    turns = [ours / max(theirs) for ours, *theirs in zip(speeds[_OURS], *peers.values(), strict=True)]
    text = f"**{median(speeds[_OURS]) / median(peers[champion]):.2f}x**"
    return text + (f" ({min(turns):.2f} to {max(turns):.2f})" if len(turns) > 1 else "")


def fronts(name: str) -> str:
    """Return our throughput with and without HTTP, in turn."""
    runs = by_case(load(name)["runs"])
    speeds = {case: [run["throughput_tokens_per_s"] for run in group] for case, group in runs.items()}
    without, with_http = sorted(speeds, key=lambda case: -median(speeds[case]))
    turns = [slow / fast for slow, fast in zip(speeds[with_http], speeds[without], strict=True)]
    ratios = (median(speeds[with_http]) / median(speeds[without]), median(turns), min(turns), max(turns))
    columns = ["without HTTP, tokens/s", "over HTTP", "ratio of medians", "median of the turns' ratios", "turns"]
    cells = [f"{median(speeds[case]):.1f}" for case in (without, with_http)]
    return table(columns, [[*cells, f"{ratios[0]:.3f}", f"{ratios[1]:.3f}", f"{ratios[2]:.2f} to {ratios[3]:.2f}"]])


def online(name: str) -> str:
    """Return latencies by rate and case, in milliseconds, medians over turns."""
    results = load(name)
    rows = []
    for traffic in dict.fromkeys(run["traffic"] for run in results["runs"]):
        runs = by_case([run for run in results["runs"] if run["traffic"] == traffic])
        keys = [("ttft", "p50"), ("ttft", "p99"), ("normalized_latency", "p50"), ("normalized_latency", "p99")]
        values = {key: [_median(group, *key) for group in runs.values()] for key in keys}
        cells = {key: best([number(value) for value in column], column) for key, column in values.items()}
        for index, (case, group) in enumerate(runs.items()):
            turns = ", ".join(number(run["ttft"]["p99"] * 1e3) for run in group) if len(group) > 1 else ""
            first, tail, token, token_tail = (cells[key][index] for key in keys)
            rate = traffic.removesuffix(" req/s")
            rows.append([rate if index == 0 else "", case, first, tail, turns, token, token_tail])
    return table(["requests/s", "case", "TTFT p50", "p99", "p99 by turn", "ms/token p50", "p99"], rows)


def gguf(*names: str) -> str:
    """Return the tokens a second of servers of one GGUF, and ours over the best peer's; a table for each few files."""
    columns = ["file", "server", "one stream", "8 streams", "32 streams", "prompt of 512"]
    keys = ("stream", "streams", "many_streams", "prompt")
    rows = []
    for name in names:
        results = load(name)
        ours, *peers = results["rows"]
        for row in (ours, *peers):
            cells = [number(row[key]) for key in keys]
            if row is ours:
                over = [row[key] / max(peer[key] for peer in peers) for key in keys]
                cells = [f"{cell} (**{ratio:.2f}x**)" for cell, ratio in zip(cells, over, strict=True)]
            file = f"{results['model']}, {processor(name)}" if row is ours else ""
            read = f"{row['read_share']:.2f} of {results['read_rate'] / 1e9:.1f} GB/s"
            rows.append([file, row["server"], *cells, read])
    return table([*columns, "share of a plain read"], rows)


def contexts(*names: str) -> str:
    """Return the tokens a second of a lone request by context, and ours over the best peer's in any of the files."""
    keys = ("prompt", "answer")
    found = [(name, row) for name in names for row in load(name)["rows"]]
    peers = [row for _, row in found if not row["server"].startswith(_OURS)]
    rows = []
    for name, row in sorted(found, key=lambda each: each[1]["context"]):
        cells = [number(row[key]) for key in keys]
        if row not in peers:
            beside = [peer for peer in peers if peer["context"] == row["context"]]
            over = [row[key] / max(peer[key] for peer in beside) for key in keys]
            cells = [f"{cell} (**{ratio:.2f}x**)" for cell, ratio in zip(cells, over, strict=True)]
        rows.append([f"{load(name)['model']}, {processor(name)}", f"{row['context']:,}", row["server"], *cells])
    return table(["file", "context", "server", "prompt", "answer"], rows)


def stalls(name: str) -> str:
    """Return the gaps of running streams without and beside long prompts, in milliseconds."""
    keys = ["quiet_p50_ms", "quiet_p99_ms", "p50_ms", "p99_ms", "longest_ms", "long_prompt_s"]
    rows = [[row["policy"], *(number(row[key]) for key in keys)] for row in load(name)["rows"]]
    return table(["policy", "quiet p50, ms", "quiet p99", "p50", "p99", "longest", "long prompt, s"], rows)


def by_case(runs: list[dict[str, Any]]) -> dict[str, list[dict[str, Any]]]:
    """Return the runs of each case."""
    return {case: [run for run in runs if run["case"] == case] for case in (run["case"] for run in runs)}


def _median(runs: list[dict[str, Any]], key: str, quantile: str) -> float:
    """Return the median over runs, in milliseconds."""
    return float(median(run[key][quantile] for run in runs)) * 1e3


def _title(name: str) -> str:
    options = load(name)["options"]
    turns = "1 turn" if options["rounds"] == 1 else f"{options['rounds']} turns"
    parts = [
        processor(name),
        MODELS[options["model"]],
        options["dtype"],
        "in process" if options["in_process"] else "HTTP",
        *(["**a busy process on each core**"] if options["loaded"] else []),
        f"{options['requests']} requests",
        turns,
    ]
    return ", ".join(parts)


def _settings(chosen: Mapping[str, Any]) -> str:
    """Return a case's settings in words."""
    size = chosen.get("max_batch_size") or chosen.get("max_num_seqs") or chosen.get("n_parallel")
    words = [f"`{chosen['policy']}`"] if "policy" in chosen else []
    words += [f"{size} slots" if "n_parallel" in chosen else f"{size} at once"]
    words += [f"{chosen['max_num_batched_tokens']:,} tokens"] if "max_num_batched_tokens" in chosen else []
    words += ["compiled"] if chosen.get("eager") is False else []
    return ", ".join(words)


def native(*names: str) -> str:
    """Return the milliseconds of one iteration by weights and rows, torch's in brackets, and memory's bound."""
    rows: dict[tuple[str, str], list[str]] = {}
    for name in names:
        for row in load(name)["rows"]:
            cells = rows.setdefault((processor(name), row["weights"]), [])
            cells.append(f"{number(row['native_ms'])} ({number(row['torch_ms'])})")
            if row["bound_ms"]:
                cells.append(f"{number(row['bound_ms'])}, {row['native_ms'] / row['bound_ms']:.1f}x")
    columns = ["machine", "weights", "one token", "bound", "8 tokens", "64 tokens", "a prompt of 256"]
    return table(columns, ([*key, *cells] for key, cells in rows.items()))


def overhead(*names: str) -> str:
    """Return what an iteration costs outside the model, by machine, policy and number of requests."""
    rows = [
        [
            processor(name),
            load(name)["dtype"],
            row["policy"],
            str(row["batch_size"]),
            number(row["forward_s"] * 1e3),
            number(row["outside_cpu_s"] * 1e3, 2),
            f"{row['share']:.1%}",
            number(row["scheduler_s"] * 1e6),
        ]
        for name in names
        for row in load(name)["overheads"]
    ]
    columns = ["machine", "dtype", "policy", "requests", "forward, ms", "outside, ms", "share", "scheduler, us"]
    return table(columns, rows)


def paper(*names: str) -> str:
    """Return throughputs at equal latency under iteration-level and request-level scheduling."""
    rows = []
    for name in names:
        for case, crossing in load(name)["crossings"].items():
            policies = ((label, rate) for label, rate in (crossing["orca"], crossing["request_level"]))
            cells = [f"{number(rate)} req/s, `{label}`" for label, rate in policies]
            where = "16 A100, simulated" if "simulated" in name else f"{processor(name)}, SmolLM2-135M"
            rows.append([where, case, f"{crossing['latency_s'] * 1e3:.3g} ms", *cells, f"**{crossing['ratio']:.1f}x**"])
    return table(["machine", "latency of a token", "", "iteration-level", "request-level", "ratio"], rows)


def gpu(name: str) -> str:
    """Return a row for each kernel and iteration on a GPU: milliseconds beside torch's operators, losses first."""
    columns = ["what", "shape", "ms", "torch's operators, ms", "torch's over ours", "keys gathered beforehand, ms"]
    rows = sorted(load(name)["rows"], key=lambda row: row["torch_ms"] / row["ours_ms"])
    return table(
        columns,
        [
            [
                row["what"],
                row["shape"],
                number(row["ours_ms"]),
                number(row["torch_ms"]),
                f"{row['torch_ms'] / row['ours_ms']:.2f}x",
                "" if row["padded_ms"] is None else number(row["padded_ms"]),
            ]
            for row in rows
        ],
    )
