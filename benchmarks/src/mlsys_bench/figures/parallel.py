"""Tables of Orca's divided models: parity, throughput by degrees, gaps between iterations, bubbles of a pipeline."""

from __future__ import annotations

from mlsys_bench.figures.results import load, number, table

_MODELS = {"8-heads": "Llama of 8 heads, bf16", "8-heads-fp32": "Llama of 8 heads, fp32"}


def parity(*names: str) -> str:
    """Return a row for each model and degree of each file: what was compared, and what differed."""
    columns = ["model", "kernels", "TP", "PP", "policies equal", "iterations", "preempted", "shared tokens"]
    columns += ["right guesses", "under adapters", "cancelled", "blocks left"]
    rows, model = [], ""
    for row in (row for name in names for row in load(name)["rows"]):
        cells = [row["model"] if row["model"] != model else "", row["kernels"], str(row["ranks"]), str(row["stages"])]
        counts = [
            row["iterations"],
            row["preempted"],
            row["shared_tokens"],
            row["right_guesses"],
            row["under_adapters"],
        ]
        cells += [row["equal"], *(f"{count:,}" for count in counts), row["requests_cancelled"], str(row["blocks_left"])]
        model = row["model"]
        rows.append(cells)
    return table(columns, rows)


def scale(*names: str) -> str:
    """Return a row for each engine of each file: throughput over one process, control, bytes."""
    columns = ["model", "engine", "processes", "tokens/s", "over one process", "control, ms a stage"]
    columns += ["bytes a token: control", "states"]
    rows = []
    for name in names:
        middle = name.removeprefix("orca-scale-").rpartition("-")[0]
        for index, row in enumerate(load(name)["rows"]):
            control = f"{row['control_ms']:.2f}" if row["control_ms"] else ""  # 0: too small for the estimate
            rows.append(
                [
                    _MODELS.get(middle, "SmolLM2-135M, bf16") if index == 0 else "",
                    row["engine"],
                    str(row["processes"]),
                    number(row["tokens_per_s"]),
                    f"{row['ratio']:.2f}x",
                    control,
                    f"{row['control_bytes_per_token']:.1f}",
                    f"{row['states_bytes_per_token']:,.0f}",
                ]
            )
    return table(columns, rows)


def control(name: str) -> str:
    """Return the processor time of one iteration's control, by requests, context and ranks."""
    columns = ["requests", "context", "ranks", "message (bytes)", "send (us)", "pass on, decode", "begin, end"]
    columns += ["results", "sum (us)"]
    parts = ("send_us", "forward_us", "begin_and_end_us", "results_us", "sum_us")
    rows = [
        [f"{row[key]:,}" for key in ("requests", "context", "ranks", "message_bytes")]
        + [f"{row[key]:.0f}" for key in parts]
        for row in load(name)["rows"]
    ]
    return table(columns, rows)


def gap(name: str) -> str:
    """Return the time of the last stage between two iterations, by engine."""
    columns = ["engine", "iterations", "gap, median (ms)", "p90 (ms)", "stage computes (ms)", "message was there"]
    rows = [
        [
            row["engine"],
            f"{row['iterations']:,}",
            f"{row['gap_ms']:.2f}",
            f"{row['gap_p90_ms']:.2f}",
            f"{row['run_ms']:.1f}",
            f"{row['message_was_waiting']:.0%}",
        ]
        for row in load(name)["rows"]
    ]
    return table(columns, rows)


def bubbles(name: str) -> str:
    """Return the bubble of the last stage, on processes and in the simulation, by stages and policy."""
    found = {(row["stages"], row["policy"], row["where"]): row for row in load(name)["rows"]}
    columns = ["stages", "policy", "bubble of the last stage", "in the simulation", "iterations", "tokens/s"]
    rows = []
    for (stages, policy, where), row in found.items():
        if where == "processes":
            simulated = found[stages, policy, "simulation"]
            iterations = str(row["iterations"])
            cells = [f"{row['bubble']:.0%}", f"{simulated['bubble']:.0%}", iterations, number(row["tokens_per_s"])]
            rows.append([str(stages), policy, *cells])
    return table(columns, rows)
